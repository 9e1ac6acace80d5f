"""A router takes over streams of another one, over real sockets, from nodes that the test plays."""

import asyncio

import msgspec
import pytest

from baton.protocol.config import NodeConfig
from baton.protocol.errors import BatonError, Overloaded, RequestError
from baton.protocol.ids import Key, RequestId
from baton.protocol.messages import (
    Attach,
    Attached,
    Cancel,
    CancelDone,
    Decode,
    HeldChoice,
    Keep,
    NotAttached,
    Prefill,
    ResumeState,
    TokenEntry,
    Tokens,
)
from baton.protocol.sampling import Sampling, SamplingParams
from baton.router.core.reattach import REJOIN_S, Claim, ReceivedPart
from baton.router.core.stream import RequestStream, digest_of
from baton.router.outputs import CompletionOutput
from tests.support.router_bench import GREEDY, PROMPT, RouterBench, routed
from tests.support.scripted_nodes import ScriptedNode, node_info, toy_answer

ID = RequestId("cmpl-7-0")
OWNER = b"owner"
SAMPLING = Sampling(seed=0, max_tokens=8, temperature=0.0)
ANSWER = toy_answer(PROMPT, 8)


def part(token_ids: list[int], *, has_ended: bool = False) -> ReceivedPart:
    return ReceivedPart(len(token_ids), True, has_ended, digest_of(token_ids))


def claim(*received: ReceivedPart) -> Claim:
    return Claim(ID, OWNER, received or None)


def attached(*choices: HeldChoice, num_choices: int = 1, first_attempt: int = 1) -> Attached:
    return Attached(ID, b"form", num_choices, PROMPT, SAMPLING, choices, first_attempt)


def taking(
    bench: RouterBench, claim: Claim, params: SamplingParams = GREEDY
) -> "asyncio.Task[tuple[RequestStream, list[CompletionOutput]]]":
    """Take the stream over, and return it with the deltas as they come."""

    async def take() -> tuple[RequestStream, list[CompletionOutput]]:
        def read_form(form: bytes) -> tuple[SamplingParams, None]:
            assert form == b"form"
            return params, None

        stream = await bench.router.reattach(claim, read_form)
        deltas: list[CompletionOutput] = []
        stream.send_to(deltas.append)
        return stream, deltas

    return asyncio.create_task(take())


async def asked(node: ScriptedNode) -> None:
    assert await node.hear(Attach) == Attach(ID, OWNER)


def token_ids(deltas: list[CompletionOutput], choice: int = 0) -> list[int]:
    return [token for delta in deltas if delta.index == choice for token in delta.token_ids]


@routed()
async def test_the_owner_who_comes_back_wins_over_the_connection_that_is_left(bench):
    """Without a word to the nodes, and nobody else can do it."""
    prefill, decode = await bench.pair()
    old = await bench.router.submit(PROMPT, GREEDY, ID, ResumeState(b"form", OWNER, 1))
    key = (await prefill.hear(Prefill)).key
    start = len(PROMPT)
    decode.say(Tokens([TokenEntry(key, start, ANSWER[:5])]))
    await old.changed()
    with pytest.raises(RequestError) as error:
        await taking(bench, Claim(ID, b"stranger"))
    assert error.value.code == "stream_gone"
    stream, deltas = await taking(bench, claim(part(ANSWER[:3])))
    with pytest.raises(RequestError) as error:
        await old.ended()
    assert error.value.code == "stream_taken_over"
    assert token_ids(deltas) == ANSWER[3:5]
    decode.say(Tokens([TokenEntry(key, start + 5, ANSWER[5:], "length")]))
    await stream.ended()
    assert token_ids(deltas) == ANSWER[3:]
    assert not [message for message in decode.heard if isinstance(message, Attach | Cancel)]
    await bench.settled()


@routed()
async def test_of_two_searches_for_a_stream_the_later_one_gets_it(bench):
    _, decode = await bench.pair()
    bench.clock.advance(REJOIN_S)
    first = taking(bench, claim())
    await asked(decode)
    second = taking(bench, claim())
    await asked(decode)
    with pytest.raises(RequestError) as error:
        await first
    assert error.value.code == "stream_taken_over"
    for _ in range(2):
        decode.say(attached(HeldChoice(Key(ID), ANSWER, "length")))
    stream, deltas = await second
    await stream.ended()
    assert token_ids(deltas) == ANSWER


@routed()
async def test_what_stopped_is_resumed_from_its_tokens_and_kept_again(bench):
    await bench.toy(node_info("p0", "prefill"))
    holder = await bench.scripted(node_info("d0", "decode"))
    task = taking(bench, claim(part(ANSWER[:3])))
    await asked(holder)
    holder.say(attached(HeldChoice(Key(ID, 0, 2), ANSWER[:5]), first_attempt=9))
    bench.clock.advance(REJOIN_S)
    stream, deltas = await task
    order = await holder.hear(Decode)
    assert order.key == Key(ID, 0, 9), "a router that had it before must lose against this one"
    assert order.token_ids == PROMPT + ANSWER[:5]
    assert order.kept == ResumeState(b"form", OWNER, 1), "this router may die as well"
    holder.say(Tokens([TokenEntry(order.key, len(PROMPT) + 5, ANSWER[5:], "length")]))
    await stream.ended()
    assert token_ids(deltas) == ANSWER[3:]


@routed()
async def test_a_finished_stream_needs_no_node(bench):
    _, decode = await bench.pair()
    received = (part(ANSWER, has_ended=True), part(ANSWER))
    task = taking(bench, claim(*received), SamplingParams(n=2, max_tokens=8))
    await asked(decode)
    decode.say(attached(HeldChoice(Key(ID, 1), ANSWER, "length"), num_choices=2))
    stream, deltas = await task
    await stream.ended()
    assert [(d.index, d.token_ids, d.finish_reason) for d in deltas] == [(1, [], "length")]
    assert stream.metrics.num_output_tokens == 16
    await bench.settled()


@routed()
async def test_a_client_cannot_claim_more_tokens_than_there_are(bench):
    _, decode = await bench.pair()
    received = (ReceivedPart(10**9, True, True), ReceivedPart(10**9, True, True), ReceivedPart())
    task = taking(bench, claim(*received), SamplingParams(n=3, max_tokens=8))
    await asked(decode)
    held = [HeldChoice(Key(ID, 1), ANSWER[:2], "stop"), HeldChoice(Key(ID, 2), ANSWER, "length")]
    decode.say(attached(*held, num_choices=3))
    stream, _ = await task
    await stream.ended()
    assert stream.metrics.num_output_tokens == 8 + 2 + 8


@routed()
async def test_a_router_that_ends_leaves_an_adopted_stream_to_its_node(bench):
    _, decode = await bench.pair()
    bench.clock.advance(REJOIN_S)
    task = taking(bench, claim(part(ANSWER[:5])))
    await asked(decode)
    decode.say(attached(HeldChoice(Key(ID), ANSWER[:5], is_running=True)))
    stream, deltas = await task
    bench.core.close()
    with pytest.raises(Overloaded) as error:
        await stream.ended()
    assert (error.value.code, token_ids(deltas)) == ("shutting_down", [])
    assert "Last-Event-ID" in error.value.message


@routed()
async def test_a_router_that_ends_gives_a_stream_that_waits_for_a_node_to_one(bench):
    decode = await bench.scripted(node_info("d0", "decode"))  # and no prefill node
    bench.clock.advance(REJOIN_S)
    task = taking(bench, claim(part(ANSWER[:2])))
    await asked(decode)
    held = HeldChoice(Key(ID), ANSWER[:5])
    decode.say(attached(held))
    stream, _ = await task
    await bench.until(lambda: bench.core.health().num_queued == 1)
    bench.core.close()
    kept = await decode.hear(Keep)
    assert [one.token_ids for one in kept.choices] == [ANSWER[:5]]
    assert (kept.prompt_token_ids, kept.kept.owner) == (PROMPT, OWNER)
    assert stream.finished


@routed()
async def test_a_stop_string_that_the_cut_went_through_is_found(bench):
    _, decode = await bench.pair()
    text = bench.router.get_tokenizer()
    ids = [text.encode_now(letter)[0] for letter in "stworst"]
    params = SamplingParams(max_tokens=50, stop="wor")
    task = taking(bench, claim(part(ids[:4])), params)  # it has "st", and "wo" is held back
    await asked(decode)
    decode.say(attached(HeldChoice(Key(ID), ids[:4], is_running=True)))
    decode.say(Tokens([TokenEntry(Key(ID), len(PROMPT) + 4, ids[4:])]))
    stream, deltas = await task
    assert (await decode.hear(Cancel)).keys == (Key(ID),)
    decode.say(CancelDone((Key(ID),)))
    await stream.ended()
    assert [(d.text, d.finish_reason, d.stop_reason) for d in deltas] == [("", "stop", "wor")]
    await bench.settled()


@routed()
async def test_a_client_that_leaves_again_gives_the_sequence_up(bench):
    _, decode = await bench.pair()
    task = taking(bench, claim())
    await asked(decode)
    task.cancel()
    await asyncio.wait([task])
    decode.say(attached(HeldChoice(Key(ID), ANSWER[:2], is_running=True)))
    assert (await decode.hear(Cancel)).keys == (Key(ID),)
    assert bench.core.num_active == 0


@routed()
async def test_a_search_holds_back_no_more_than_the_tokens_and_kills_nothing(bench):
    _, decode = await bench.pair()
    silent = await bench.scripted(node_info("d1", "decode"))
    task = taking(bench, claim(part([7])))
    await asked(decode)
    decode.say(attached(HeldChoice(Key(ID), [7], is_running=True)))
    num_many = 12_000
    start = len(PROMPT) + 1
    entries = [TokenEntry(Key(ID), start + index, [7]) for index in range(num_many)]
    for index in range(0, num_many, 1_000):
        decode.say(Tokens(entries[index : index + 1_000]))
    # A sequence that no router asked for is given back; its cancel shows that the router read the
    # rest.
    other = HeldChoice(Key(RequestId("other")), [], is_running=True)
    decode.say(msgspec.structs.replace(attached(other), request_id=RequestId("other")))
    assert (await decode.hear(Cancel)).keys == (other.key,)
    silent.say(NotAttached(ID))
    stream, deltas = await task
    decode.say(Tokens([TokenEntry(Key(ID), start + num_many, [], "length")]))
    await stream.ended()
    assert token_ids(deltas) == [7] * num_many
    await bench.settled()


@routed()
async def test_a_stream_whose_prompt_lands_goes_on_after_the_token_of_its_client(bench):
    _, decode = await bench.pair()
    bench.clock.advance(REJOIN_S)
    task = taking(bench, claim(part(ANSWER[:1])))
    await asked(decode)
    answer = attached(HeldChoice(Key(ID), [], is_running=True))
    decode.say(msgspec.structs.replace(answer, landing=(0,)))
    stream, deltas = await task
    (node,) = [node for node in bench.core.health().nodes if node.role == "decode"]
    assert (node.num_attempts, node.num_tokens) == (1, len(PROMPT))
    assert bench.core.registry.node(node.node_id).num_blocks > 0
    decode.say(Tokens([TokenEntry(Key(ID), len(PROMPT), ANSWER[:2])]))
    decode.say(Tokens([TokenEntry(Key(ID), len(PROMPT) + 2, ANSWER[2:], "length")]))
    await stream.ended()
    assert token_ids(deltas) == ANSWER[1:]
    await bench.settled()


@pytest.mark.parametrize(
    ("waited_s", "codes"),
    [
        # A node that has not been met yet may have the client's token.
        (REJOIN_S, ["stream_unknown", "stream_unknown"]),
        (NodeConfig().detached_s, ["stream_unknown", "stream_gone"]),
    ],
)
@routed()
async def test_a_prompt_that_lands_with_another_token_than_the_clients_is_not_gone_on_with(
    bench, waited_s, codes
):
    _, decode = await bench.pair()
    bench.clock.advance(waited_s)
    for code in codes:
        task = taking(bench, claim(part([ANSWER[0] ^ 1])))
        await asked(decode)
        answer = attached(HeldChoice(Key(ID), [], is_running=True))
        decode.say(msgspec.structs.replace(answer, landing=(0,)))
        stream, deltas = await task
        decode.say(Tokens([TokenEntry(Key(ID), len(PROMPT), ANSWER[:2])]))
        with pytest.raises(BatonError) as error:
            await stream.ended()
        assert (error.value.code, token_ids(deltas)) == (code, [])
        assert (await decode.hear(Cancel)).keys == (Key(ID),)
        decode.say(CancelDone((Key(ID),)))
        await bench.settled()


@routed()
async def test_a_client_that_went_on_elsewhere_does_not_get_this_routers_tokens(bench):
    """Both routers took the other for lost, and began attempts that differ in a token."""
    prefill, decode = await bench.pair()
    bench.clock.advance(REJOIN_S)
    old = await bench.router.submit(PROMPT, GREEDY, ID, ResumeState(b"form", OWNER, 1))
    key = (await prefill.hear(Prefill)).key
    decode.say(Tokens([TokenEntry(key, len(PROMPT), ANSWER[:5])]))
    await old.changed()
    other = [*ANSWER[:3], ANSWER[3] ^ 1]
    task = taking(bench, claim(part(other)))
    await asked(decode)
    with pytest.raises(RequestError):
        await old.ended()
    assert any(isinstance(one, Cancel) and one.keys == (key,) for one in decode.heard)
    decode.say(attached(HeldChoice(Key(ID, 0, 7), [*other, 9], "length")))
    stream, deltas = await task
    await stream.ended()
    assert token_ids(deltas) == [9]


@routed()
async def test_a_choice_that_ended_at_its_first_token_counts_before_its_prompt_has_landed(bench):
    """The client has the first token of both choices from prefill; it ended one of them."""
    _, decode = await bench.pair()
    bench.clock.advance(REJOIN_S)
    received = (part(ANSWER[:1], has_ended=True), part(ANSWER[:1]))
    task = taking(bench, claim(*received), SamplingParams(n=2, max_tokens=8))
    await asked(decode)
    held = [HeldChoice(Key(ID, choice), [], is_running=True) for choice in range(2)]
    decode.say(msgspec.structs.replace(attached(*held, num_choices=2), landing=(0, 1)))
    assert (await decode.hear(Cancel)).keys == (Key(ID, 0),)
    decode.say(Tokens([TokenEntry(Key(ID, 1), len(PROMPT), ANSWER, "length")]))
    stream, deltas = await task
    await stream.ended()
    assert token_ids(deltas, 1) == ANSWER[1:]
    assert stream.metrics.num_output_tokens == 1 + len(ANSWER)
