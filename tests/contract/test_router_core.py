"""Requests through the router, over real sockets, to nodes that the test plays."""

import msgspec
import pytest

from baton.protocol.config import RouterConfig
from baton.protocol.errors import (
    BatonError,
    Cancelled,
    Failure,
    Overloaded,
    RequestError,
)
from baton.protocol.ids import NodeId
from baton.protocol.messages import (
    Accepted,
    Cancel,
    CancelDone,
    Decode,
    Failed,
    FirstToken,
    FirstTokens,
    InProgress,
    NodeFacts,
    NodeInfo,
    Pooled,
    Prefill,
    Refused,
    StageTimes,
    TokenEntry,
    Tokens,
)
from baton.protocol.pooling import ModelTasks
from baton.protocol.sampling import SamplingParams, StructuredOutputsParams
from baton.router.core.lifecycle import Request
from baton.router.core.request import Caller, Tenant
from baton.router.outputs import CompletionOutput, RequestOutput
from tests.support.refusals import raises
from tests.support.router_bench import GREEDY, PROMPT, collected, routed, whole
from tests.support.scripted_nodes import VOCAB_SIZE, ScriptedNode, node_info, toy_answer


@routed()
async def test_both_nodes_are_told_at_once_and_the_response_comes_back(bench):
    prefill, decode = await bench.toy_pair()
    output = await whole(bench.router)
    assert output.outputs[0].token_ids == toy_answer(PROMPT, 8)
    assert output.outputs[0].finish_reason == "length"
    assert output.prompt_token_ids == PROMPT
    assert output.metrics.path == "disaggregated"
    assert output.metrics.first_step_s == 0.25
    assert output.metrics.num_attempts == 1
    await bench.until(lambda: bool(prefill.orders))
    assert [type(order) for order in (*prefill.orders, *decode.orders)] == [
        Prefill,
        Decode,
    ]
    assert prefill.orders[0].key == decode.orders[0].key
    await bench.settled()


@routed(tokenizer="word_piece")
async def test_a_form_is_refused_at_once_where_no_node_could_hold_it(bench):
    prefill, decode = await bench.toy_pair()
    form = StructuredOutputsParams(choice=["yes", "no"])
    with raises(RequestError, "unsupported", "structured_outputs"):
        await bench.router.submit(PROMPT, SamplingParams(structured_outputs=form))
    assert not prefill.orders + decode.orders
    await whole(bench.router)


@routed()
async def test_the_oldest_wait_shows_until_a_node_has_the_request_in_progress(bench):
    prefill, _ = await bench.pair()
    stream = await bench.router.submit(PROMPT, GREEDY)
    order = await prefill.hear(Prefill)
    bench.clock.advance(2.0)
    assert bench.core.health().oldest_wait_s == 2.0
    prefill.say(InProgress((order.key,)))
    await bench.until(lambda: bench.core.health().oldest_wait_s == 0.0)
    stream.close()


@routed()
async def test_no_token_reaches_the_client_before_decode_has_accepted(bench):
    prefill, decode = await bench.pair()
    stream = await bench.router.submit(PROMPT, GREEDY)
    order = await prefill.hear(Prefill)
    await decode.hear(Decode)
    prefill.say(FirstTokens(order.key, 6, (FirstToken(42),)))
    decode.say(Failed(order.key, Failure("transfer_failed", "no", retryable=True)))
    again = await prefill.hear(Prefill)
    assert again.key.attempt == 1
    assert again.token_ids == PROMPT
    decode.say(Accepted(again.key))
    prefill.say(FirstTokens(again.key, 6, (FirstToken(43),), StageTimes(prefill_s=0.5)))
    got: list[CompletionOutput] = []
    stream.send_to(got.append)
    assert await stream.changed()
    assert [delta.token_ids for delta in got] == [[43]]
    assert (stream.metrics.prefill_s, stream.metrics.num_attempts) == (0.5, 2)
    stream.close()


@routed(RouterConfig(max_inflight=1, max_queued=2))
async def test_a_full_queue_takes_a_client_for_whom_the_last_of_another_gives_way(
    bench,
):
    await bench.pair()
    flood = Caller(tenant=Tenant("flood"))
    polite = Caller(tenant=Tenant("polite"))
    streams = [
        await bench.router.submit(PROMPT, GREEDY, caller=flood) for _ in range(3)
    ]
    with raises(Overloaded, "queue_full"):
        await bench.router.submit(PROMPT, GREEDY, caller=flood)
    streams.append(await bench.router.submit(PROMPT, GREEDY, caller=polite))
    with raises(Overloaded, "queue_full") as refused:
        await streams[2].ended()
    assert refused.value.http_status == 429
    assert bench.core.health().num_queued == 2
    for stream in streams:
        stream.close()


@routed()
async def test_output_kinds_agree(bench):
    await bench.toy_pair()
    outputs: dict[str, list[RequestOutput]] = {}
    for kind in ("delta", "cumulative", "final"):
        params = msgspec.structs.replace(GREEDY, output_kind=kind)
        stream = await bench.router.submit("xyz", params)
        outputs[kind] = [output async for output in stream.outputs("xyz")]
    final = outputs["final"][0].outputs[0]
    assert len(outputs["final"]) == 1
    assert outputs["cumulative"][-1].outputs[0] == final
    deltas = [output.outputs[0] for output in outputs["delta"]]
    assert [i for delta in deltas for i in delta.token_ids] == final.token_ids
    assert "".join(delta.text for delta in deltas) == final.text
    assert all(o[0].prompt == "xyz" for o in outputs.values())
    assert [o.finished for o in outputs["delta"]] == [False] * (len(deltas) - 1) + [
        True
    ]


@routed()
async def test_one_token_needs_no_decode_node(bench):
    prefill, decode = await bench.toy_pair()
    output = await whole(bench.router, SamplingParams(temperature=0, max_tokens=1))
    assert output.outputs[0].token_ids == toy_answer(PROMPT, 1)
    assert output.metrics.path == "prefill_only"
    assert isinstance(prefill.orders[0], Prefill)
    assert prefill.orders[0].decode_node is None
    assert decode.orders == []
    await bench.settled()


@routed(RouterConfig())
async def test_without_a_prefill_node_decode_computes_and_the_output_says_so(bench):
    await bench.toy(node_info("d0", "decode"))
    output = await whole(bench.router, prompt=list(range(1, 50)))
    assert output.metrics.path == "local_prefill"
    assert output.metrics.local_fallback
    assert bench.core.health().status == "degraded"


@routed()
async def test_a_close_reaches_both_nodes_and_ends_the_reader(bench):
    prefill, decode = await bench.pair()
    stream = await bench.router.submit(PROMPT, GREEDY)
    order = await prefill.hear(Prefill)
    stream.close()
    with pytest.raises(Cancelled):
        await stream.changed()
    assert bench.core.num_active == 1
    for node in (prefill, decode):
        assert (await node.hear(Cancel)).keys == (order.key,)
        node.say(CancelDone((order.key,)))
    await bench.settled()
    stream.close()


@routed()
async def test_a_stop_string_ends_the_choice_on_the_node_too(bench):
    prefill, decode = await bench.pair()
    text = bench.router.get_tokenizer()
    params = SamplingParams(n=2, max_tokens=50, stop="wor", seed=1)
    stream = await bench.router.submit(PROMPT, params)
    key = (await prefill.hear(Prefill)).key
    decode.say(Accepted(key))
    token_ids = [text.encode_now(letter)[0] for letter in "stworst"]
    assert max(token_ids) < VOCAB_SIZE
    decode.say(Tokens([TokenEntry(key.of_choice(1), 6, token_ids)]))
    assert (await decode.hear(Cancel)).keys == (key.of_choice(1),)
    decode.say(CancelDone((key.of_choice(1),)))
    decode.say(Tokens([TokenEntry(key, 6, [7], "length")]))
    output = await collected(stream)
    assert output.outputs[1].text == "st"
    assert output.outputs[1].finish_reason == "stop"
    assert output.outputs[1].stop_reason == "wor"
    assert output.outputs[0].finish_reason == "length"
    await bench.settled()


@routed()
async def test_an_error_of_one_request_touches_no_other(bench):
    await bench.toy_pair()
    broken = await bench.router.submit(PROMPT, GREEDY)
    other = await bench.router.submit(PROMPT, GREEDY)

    def sink(delta: object) -> None:
        raise ValueError(f"a bug with {delta}")

    broken.send_to(sink)
    with pytest.raises(BatonError, match="failed to handle"):
        await broken.ended()
    assert (await collected(other)).outputs[0].token_ids == toy_answer(PROMPT, 8)
    await bench.settled()


@routed()
async def test_the_nodes_of_a_request_that_met_a_bug_stop_at_once(bench, monkeypatch):
    nodes = await bench.pair()
    stream = await bench.router.submit(PROMPT, GREEDY)
    order = await nodes[0].hear(Prefill)
    step = Request.step

    def broken(request: Request, now_s: float, event: object, node: NodeId) -> object:
        if isinstance(event, InProgress):
            raise ValueError("a bug")
        return step(request, now_s, event, node)

    monkeypatch.setattr(Request, "step", broken)
    nodes[0].say(InProgress((order.key,)))
    with pytest.raises(BatonError, match="failed to handle"):
        await stream.ended()
    for node in nodes:
        assert (await node.hear(Cancel)).keys == (order.key,)
        node.say(CancelDone((order.key,)))
    await bench.settled()


def embedding_node(name: str, **tasks: bool) -> NodeInfo:
    info = node_info(name, "prefill")
    facts = NodeFacts(tasks=ModelTasks(embedding="last", **tasks))
    return msgspec.structs.replace(info, facts=facts)


@routed()
async def test_prefill_nodes_alone_pool_prompts_and_a_lost_one_is_replaced(bench):
    first = await bench.scripted(embedding_node("p0"))
    second = await bench.scripted(embedding_node("p1"))
    stream = await bench.router.pool(PROMPT, "last", "mine")
    order = await first.hear(Prefill)
    assert (order.sampling.pooling, order.decode_node) == ("last", None)
    first.die()
    again = await second.hear(Prefill)
    assert again.token_ids == PROMPT
    second.say(Pooled(again.key, b"1234", StageTimes(num_cached_tokens=4)))
    await stream.ended()
    assert (stream.pooled, stream.request_id) == (b"1234", "mine")
    assert (stream.metrics.path, stream.metrics.num_retries) == ("prefill_only", 1)
    assert stream.metrics.num_cached_tokens == 4
    await bench.settled()


@routed()
async def test_a_cluster_without_decode_nodes_says_what_it_cannot_do(bench):
    node = await bench.scripted(embedding_node("p0"))
    health = bench.core.health()
    assert (health.status, health.can_serve) == ("degraded", True)
    assert "no decode node" in health.message
    with raises(Overloaded, "no_nodes") as error:
        await bench.router.submit(PROMPT, GREEDY)
    assert error.value.http_status == 503
    with raises(RequestError, "unsupported", "model"):
        await bench.router.pool(PROMPT, "classify")
    for ids, code in (
        ([], "invalid_request"),
        ([VOCAB_SIZE], "invalid_request"),
        ([1] * 201, "context_length_exceeded"),
    ):
        with raises(RequestError, code, "prompt"):
            await bench.router.pool(ids, "last")
    longest = await bench.router.pool([1] * 200, "last")
    order = await node.hear(Prefill)
    longest.close()
    assert (await node.hear(Cancel)).keys == (order.key,)
    node.say(CancelDone((order.key,)))
    await bench.settled()


@routed()
async def test_a_model_that_makes_no_tokens_is_ready_without_decode_nodes(bench):
    await bench.scripted(embedding_node("p0", generates=False))
    assert bench.core.health().status == "ready"
    with raises(RequestError, "unsupported", "model"):
        await bench.router.submit(PROMPT, GREEDY)
    other = ScriptedNode(bench.endpoint, embedding_node("p1"))  # with other settings
    bench.nodes.append(other)
    other.join()
    assert (await other.hear(Refused)).failure.code == "limits_mismatch"
