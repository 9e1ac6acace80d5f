"""What clients that were written for other servers send and read works here as well."""

import json

from baton.router.text.chat_template import ChatTemplate
from tests.support.http_bench import TEXT, HttpBench, hello, served

USAGE = {"include_usage": True, "continuous_usage_stats": True}


async def plain_stream(
    bench: HttpBench, body: dict[str, object]
) -> list[dict[str, object]]:
    """Read a stream as benchmarks do: every line that is not empty is taken for data."""
    accept = {"Accept": "*/*"}
    chunks = []
    async with bench.session.post(
        "/v1/completions", json=body, headers=accept
    ) as reply:
        async for line in reply.content:
            data = line.decode().strip().removeprefix("data: ")
            if data and data != "[DONE]":
                chunks.append(json.loads(data))
    return chunks


@served(script=hello)
async def test_a_reader_that_takes_each_line_for_data_gets_no_ids(bench):
    chunks = await plain_stream(bench, {"prompt": [5], "stream": True})
    assert chunks
    assert all(chunk["choices"] for chunk in chunks)
    assert all(
        name for name, _ in (await bench.post({"prompt": [5], "stream": True})).events
    )


@served(silence_s=0.05)
async def test_a_comment_stands_apart_where_events_have_no_ids(bench, engine):
    # It has nodes.
    engine.script = lambda stream: setattr(stream.metrics, "num_attempts", 1)
    body = {"prompt": [5], "stream": True}
    accept = {"Accept": "*/*"}
    async with bench.session.post(
        "/v1/completions", json=body, headers=accept
    ) as reply:
        lines = [await reply.content.readline() for _ in range(2)]
    assert lines == [b": waiting\n", b"\n"]


@served(script=hello)
async def test_every_chunk_has_the_usage_so_far(bench):
    body = {"prompt": [5, 6], "stream": True, "stream_options": USAGE}
    *chunks, last = await plain_stream(bench, body)
    assert [chunk["usage"] for chunk in chunks] == [
        {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    ]
    assert last["choices"] == []


@served(script=hello, chat_template=ChatTemplate("{{ messages[0].content }}", {}))
async def test_harmless_fields_of_newer_clients_change_nothing(bench):
    parts = [{"type": "input_text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    turn = {
        "role": "user",
        "content": parts,
        "id": "1",
        "cache_control": {"type": "ephemeral"},
    }
    fields = {
        "reasoning_effort": "low",
        "modalities": ["text"],
        "verbosity": "low",
        "session_id": "s",
        "prediction": {"type": "content", "content": "x"},
        "prompt_cache_retention": "24h",
        "request_id": "r",
        "include_reasoning": True,
    }
    body = {"messages": [{**turn, "prefix": True}], **fields}
    reply = await bench.post(body, "/v1/chat/completions")
    assert reply.status == 200
    assert str(reply.json["system_fingerprint"]).startswith("fp_")
    refused = await bench.post(
        {**body, "modalities": ["audio"]}, "/v1/chat/completions"
    )
    assert (refused.status, refused.error["param"]) == (400, "modalities")


@served(chat_template=ChatTemplate("{{ messages[0].content }}", {}))
async def test_the_tokenizer_answers_in_vllms_form(bench):
    ids = TEXT.encode_now("hello the end")
    whole = await bench.post(
        {"prompt": "hello the end", "return_token_strs": True}, "/tokenize"
    )
    assert (whole.json["tokens"], whole.json["count"]) == (ids, len(ids))
    assert len(whole.json["token_strs"]) == len(ids)
    parts = [{"type": "text", "text": "hello the end"}]
    chat = {"messages": [{"role": "user", "content": parts}]}
    assert (await bench.post(chat, "/tokenize")).json["tokens"] == ids
    assert (await bench.post({"tokens": ids}, "/detokenize")).json == {
        "prompt": "hello the end"
    }
    assert (await bench.post({"tokens": [10**6]}, "/detokenize")).status == 400
    for bad in (
        {},
        {"messages": []},
        {"messages": [{"role": "user", "tool_calls": [1]}]},
    ):
        assert (await bench.post(bad, "/tokenize")).status == 400
    assert (await bench.post({"tokens": [-1]}, "/detokenize")).status == 400
    assert (await bench.post({"prompt": "x" * 5_000_000}, "/tokenize")).status == 413


@served()
async def test_probes_of_other_servers_are_answered(bench):
    assert (await bench.get("/ping")).status == 200
    assert (await bench.get("/load")).json == {"server_load": 0}
