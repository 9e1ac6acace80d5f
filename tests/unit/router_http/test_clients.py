"""What clients that were written for other servers send and read works here as well."""

import json

from tests.support.http_bench import HttpBench, ScriptedEngine, hello, served

USAGE = {"include_usage": True, "continuous_usage_stats": True}


async def plain_stream(bench: HttpBench, body: dict[str, object]) -> list[dict[str, object]]:
    """Read a stream as benchmarks do: every line that is not empty is taken for data."""
    accept = {"Accept": "*/*"}
    chunks = []
    async with bench.session.post("/v1/completions", json=body, headers=accept) as reply:
        async for line in reply.content:
            data = line.decode().strip().removeprefix("data: ")
            if data and data != "[DONE]":
                chunks.append(json.loads(data))
    return chunks


@served(script=hello)
async def test_a_reader_that_takes_each_line_for_data_gets_no_ids(bench: HttpBench) -> None:
    chunks = await plain_stream(bench, {"prompt": [5], "stream": True})
    assert chunks
    assert all(chunk["choices"] for chunk in chunks)
    assert all(name for name, _ in (await bench.post({"prompt": [5], "stream": True})).events)


@served(silence_s=0.05)
async def test_a_comment_stands_apart_where_events_have_no_ids(
    bench: HttpBench, engine: ScriptedEngine
) -> None:
    engine.script = lambda stream: setattr(stream.metrics, "num_attempts", 1)  # it has nodes
    body, accept = {"prompt": [5], "stream": True}, {"Accept": "*/*"}
    async with bench.session.post("/v1/completions", json=body, headers=accept) as reply:
        lines = [await reply.content.readline() for _ in range(2)]
    assert lines == [b": waiting\n", b"\n"]


@served(script=hello)
async def test_every_chunk_has_the_usage_so_far(bench: HttpBench) -> None:
    body = {"prompt": [5, 6], "stream": True, "stream_options": USAGE}
    *chunks, last = await plain_stream(bench, body)
    assert [chunk["usage"] for chunk in chunks] == [
        {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    ]
    assert last["choices"] == []
