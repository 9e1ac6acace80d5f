"""What a caller takes out of a request's stream."""

import asyncio

import pytest

from baton.protocol.errors import NodeError
from baton.protocol.sampling import SamplingParams
from baton.router.outputs import CompletionOutput, Merged
from baton.router.stream import RequestStream
from tests.support.async_tests import on_a_loop
from tests.support.router_bench import collected
from tests.support.small_tokenizers import small_text


def stream_of(params: SamplingParams) -> RequestStream:
    text = small_text()
    prompt = text.encode_now("hello")
    detokenizers = [text.detokenizer(prompt, params, i) for i in range(params.n)]
    return RequestStream("r", "hello", prompt, params, detokenizers)


def tokens(text: str) -> list[int]:
    return small_text().encode_now(text)


@on_a_loop
async def test_an_error_follows_what_came_before_it() -> None:
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
async def test_a_stop_string_is_told_to_the_router_once_and_nothing_follows_it() -> None:
    stream = stream_of(SamplingParams(stop=" world"))
    assert stream.push(0, tokens("hello world the"), None)
    # What the engine sent before it heard of the end must not replace how the choice ended.
    assert not stream.push(0, tokens(" end"), "length")
    stream.finish()
    assert not stream.push(0, tokens(" end"), None)
    output = await collected(stream)
    (choice,) = output.outputs
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (
        "hello", "stop", " world",
    )  # fmt: skip
    assert output.finished


@on_a_loop
async def test_a_sink_gets_what_was_there_and_what_comes() -> None:
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


def test_snapshots_do_not_change_afterwards() -> None:
    whole = Merged(2)
    whole.add(CompletionOutput(1, "a", [1]))
    before = whole.outputs()
    whole.add(CompletionOutput(1, "b", [2], None, "stop", "b"))
    assert [(o.text, o.token_ids, o.finish_reason) for o in before] == [
        ("", [], None), ("a", [1], None),
    ]  # fmt: skip
    assert whole.outputs()[1] == CompletionOutput(1, "ab", [1, 2], None, "stop", "b")
