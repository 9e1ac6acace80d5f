"""What a caller takes out of a request's stream, and the stages that add up to its time."""

import asyncio
import gc
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest

from baton.protocol.errors import NodeError
from baton.protocol.ids import Key, NodeId, RequestId
from baton.protocol.messages import TokenLogprobs
from baton.protocol.sampling import SamplingParams
from baton.router.core.request import Attempt
from baton.router.core.stream import RequestStream
from baton.router.outputs import CompletionOutput, Merged, RequestMetrics, waterfall
from tests.support.async_tests import on_a_loop
from tests.support.router_bench import collected
from tests.support.small_tokenizers import small_text


def stream_of(params: SamplingParams) -> RequestStream:
    text = small_text()
    prompt = text.encode_now("hello")
    detokenizers = [text.detokenizer(prompt, params, i) for i in range(params.n)]
    return RequestStream("r", prompt, params, detokenizers)


def tokens(text: str) -> list[int]:
    return small_text().encode_now(text)


@on_a_loop
async def test_an_error_follows_what_came_before_it():
    stream = stream_of(SamplingParams())
    stream.push(0, tokens(" the"), None)
    stream.finish(NodeError("gone"))
    stream.finish()
    assert await stream.changed()
    for wait in (stream.changed, stream.ended):
        with pytest.raises(NodeError):
            await wait()
    assert not stream.output([]).finished


@on_a_loop
async def test_a_stop_string_is_told_to_the_router_once_and_nothing_follows_it():
    stream = stream_of(SamplingParams(stop=" world"))
    assert stream.push(0, tokens("hello world the"), None)
    # What the engine sent before it heard of the end must not replace how the choice ended.
    assert not stream.push(0, tokens(" end"), "length")
    stream.finish()
    assert not stream.push(0, tokens(" end"), None)
    output = await collected(stream)
    (choice,) = output.outputs
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (
        "hello",
        "stop",
        " world",
    )
    assert output.finished


@on_a_loop
async def test_a_sink_gets_what_was_there_and_what_comes():
    stream = stream_of(SamplingParams())
    got: list[CompletionOutput] = []
    stream.push(0, tokens(" the"), None)
    stream.send_to(got.append)
    reader = asyncio.create_task(stream.ended())
    await asyncio.sleep(0)
    stream.push(0, tokens(" end"), "stop")
    stream.finish()
    await reader
    assert "".join(delta.text for delta in got) == " the"


@on_a_loop
async def test_an_interval_gathers_tokens_per_choice_except_the_first_and_the_last():
    stream = stream_of(SamplingParams(n=2, stream_interval=3))
    got: list[CompletionOutput] = []
    stream.send_to(got.append)
    ids = tokens("hello world the end")
    hello, world, the, end = ids
    likely = (TokenLogprobs(-0.5, 1, ()),)
    stream.push(0, [hello], None, likely)
    stream.push(1, [hello], None, likely)
    assert [(one.index, one.text) for one in got] == [(0, "hello"), (1, "hello")]
    for token_id in (world, the):
        stream.push(0, [token_id], None, likely)
        stream.push(1, [token_id], None, likely)
    assert len(got) == 2
    assert stream.metrics.num_output_tokens == 6
    stream.push(0, [end], None, likely)
    assert (got[2].index, got[2].text, got[2].token_ids) == (
        0,
        " world the end",
        ids[1:],
    )
    assert got[2].logprobs is not None
    assert len(got[2].logprobs) == 3
    stream.push(1, [], "stop")
    assert (got[3].index, got[3].text, got[3].finish_reason) == (
        1,
        " world the",
        "stop",
    )
    stream.push(0, [world], "length", likely)
    assert (got[4].text, got[4].finish_reason) == (" world", "length")
    stream.finish()
    await stream.ended()


@on_a_loop
async def test_a_stop_string_ends_a_choice_within_an_interval():
    stream = stream_of(SamplingParams(stop=" world", stream_interval=100))
    got: list[CompletionOutput] = []
    stream.send_to(got.append)
    hello, world, the = tokens("hello world the")
    assert not stream.push(0, [the], None)
    assert not stream.push(0, [hello], None)
    assert stream.push(0, [world], None)
    assert [one.text for one in got] == [" the", "hello"]
    assert got[1].stop_reason == " world"


@on_a_loop
async def test_an_error_ends_an_interval_and_what_waits_is_not_handed_out():
    stream = stream_of(SamplingParams(stream_interval=100, output_kind="delta"))
    stream.push(0, tokens(" the"), None)
    stream.push(0, tokens(" end"), None)
    stream.finish(NodeError("gone"))
    outputs = stream.outputs()
    assert (await anext(outputs)).outputs[0].text == " the"
    with pytest.raises(NodeError):
        await anext(outputs)


def test_snapshots_do_not_change_afterwards():
    whole = Merged(2)
    whole.add(CompletionOutput(1, "a", [1]))
    before = whole.outputs()
    whole.add(CompletionOutput(1, "b", [2], None, "stop", "b"))
    assert [(o.text, o.token_ids, o.finish_reason) for o in before] == [
        ("", [], None),
        ("a", [1], None),
    ]
    assert whole.outputs()[1] == CompletionOutput(1, "ab", [1, 2], None, "stop", "b")


def test_a_delta_that_came_alone_is_taken_as_it_is():
    merged = Merged()
    alone = CompletionOutput(0, "a", [1])
    merged.add(alone)
    assert merged.take() == [alone]
    assert merged.take() == []
    merged.add(alone)
    before = merged.outputs()
    merged.add(CompletionOutput(0, "b", [2], None, "length"))
    assert before == [CompletionOutput(0, "a", [1])]
    assert merged.take() == [CompletionOutput(0, "ab", [1, 2], None, "length")]


P0 = NodeId("p0")
D0 = NodeId("d0")
D1 = NodeId("d1")


def attempt(
    choices: tuple[int, ...], number: int, asked_at_s: float, **times: Any
) -> Attempt:
    key = Key(RequestId("r"), choices[0], number)
    return Attempt(key, choices, 3, asked_at_s=asked_at_s, **times)


WHOLE = attempt(
    (0,),
    0,
    0.0,
    placed_at_s=0.5,
    prefill_node=P0,
    decode_node=D0,
    prefilled_at_s=2.0,
    decoding_at_s=3.0,
    queue_s=0.25,
    prefill_s=1.0,
    transfer_s=0.75,
    exposed_s=0.25,
    decode_queue_s=0.125,
    first_step_s=0.25,
)
LOST = attempt(
    (0, 1),
    0,
    0.0,
    placed_at_s=0.5,
    prefill_node=P0,
    decode_node=D0,
    prefilled_at_s=1.0,
    prefill_s=0.5,
    decoding_at_s=1.5,
    first_step_s=0.25,
    lost_at_s=2.0,
    failure="node_lost",
)
RESUMED = attempt(
    (1,), 1, 2.5, placed_at_s=2.75, decode_node=D1, decoding_at_s=3.5, prefill_s=0.5
)
OTHER = attempt((0,), 1, 2.25, placed_at_s=2.25, decode_node=D1, decoding_at_s=3.0)
# The router read the message of the decode node before that of the prefill node.
SWAPPED = attempt(
    (0,),
    0,
    0.0,
    placed_at_s=0.5,
    prefill_node=P0,
    decode_node=D0,
    prefilled_at_s=2.0,
    decoding_at_s=2.0,
    prefill_s=1.0,
    first_step_s=0.25,
)
# A clock of a node that runs fast: its stages do not fit between the router's times.
TOO_LONG = attempt(
    (0,),
    0,
    0.0,
    placed_at_s=0.5,
    prefill_node=P0,
    decode_node=D0,
    prefilled_at_s=1.0,
    decoding_at_s=1.25,
    queue_s=9.0,
    prefill_s=9.0,
    exposed_s=9.0,
    first_step_s=9.0,
)


@pytest.mark.parametrize(
    ("attempts", "expected"),
    [
        (
            [WHOLE],
            "router_queue 0.5 dispatch 0.25 queue 0.25 prefill 1.0 handoff 0.375 transfer 0.25 "
            "decode_queue 0.125 first_step 0.25 decode 1.0",
        ),
        (
            [replace(WHOLE, prefix_read_s=0.125)],
            "router_queue 0.5 dispatch 0.125 queue 0.25 prefix_read 0.125 prefill 1.0 "
            "handoff 0.375 transfer 0.25 decode_queue 0.125 first_step 0.25 decode 1.0",
        ),
        (
            [LOST, OTHER, RESUMED],
            "router_queue 0.5 prefill 0.5 handoff 0.25 first_step 0.25 decode 0.5 lost 0.5 "
            "router_queue 0.25 dispatch 0.25 prefill 0.5 decode 0.5",
        ),
        (
            [SWAPPED],
            "router_queue 0.5 dispatch 0.25 prefill 1.0 first_step 0.25 decode 2.0",
        ),
        ([attempt((0,), 0, 0.0)], "router_queue 4.0"),
        (
            [TOO_LONG],
            "router_queue 0.5 queue 0.0 prefill 0.5 first_step 0.25 decode 2.75",
        ),
    ],
    ids=["pair", "with a prefix", "resumed", "swapped", "never placed", "clocks"],
)
def test_the_stages_add_up(attempts, expected):
    stages = waterfall(RequestMetrics(e2e_s=4.0, attempts=attempts))
    words = expected.split()
    wanted = [
        (n, float(s)) for n, s in zip(words[::2], words[1::2], strict=True) if float(s)
    ]
    assert [(one.stage, one.duration_s) for one in stages] == wanted
    assert sum(one.duration_s for one in stages) == 4.0
    ends = [one.start_s + one.duration_s for one in stages]
    assert [one.start_s for one in stages] == [0.0, *ends[:-1]]


def test_a_stage_names_its_node_and_a_lost_attempt_its_failure():
    stages = waterfall(RequestMetrics(e2e_s=4.0, attempts=[LOST, OTHER, RESUMED]))
    assert [one.node for one in stages if one.stage == "prefill"] == ["p0", "d1"]
    assert [one.failure for one in stages if one.stage == "lost"] == ["node_lost"]


def test_a_long_prompt_takes_four_bytes_a_token_and_nothing_that_is_freed_one_by_one():
    params = SamplingParams()
    prompt = [1000 + index % 1000 for index in range(100_000)]
    gc.collect()
    tracemalloc.start()
    try:
        detokenizer = small_text().detokenizer([], params, 0)
        before_bytes, _ = tracemalloc.get_traced_memory()
        stream = RequestStream("r", list(prompt), params, [detokenizer])
        after_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after_bytes - before_bytes < 5 * len(prompt)
    assert stream.prompt_token_ids == prompt
