"""Completions over HTTP: whole, streamed, failing and abandoned, before a scripted engine."""

import asyncio
import gc
import json
import socket
import struct

import pytest

from baton import __version__
from baton.protocol.errors import Overloaded, RequestError
from baton.protocol.sampling import Scope
from baton.router.core.stream import RequestStream, digest_of
from baton.router.http import submission
from baton.router.http.api.sse import EventStream
from baton.router.http.request_log import Running
from baton.router.outputs import CompletionOutput
from baton.router.text.chat_template import ChatTemplate
from tests.support.http_bench import (
    TEXT,
    HttpBench,
    ScriptedEngine,
    events_of,
    lost,
    posted,
    served,
    well,
)

TYPE = "Content-Type: application/json\r\n"


def hello(stream: RequestStream) -> None:
    """ " hello" and " world", in every choice."""
    for choice in range(stream.params.n):
        for text, end in ((" hello", None), (" world", "length")):
            stream.push(choice, TEXT.encode_now(text), end)
    stream.finish()


def chunks(text: str) -> list[dict[str, object]]:
    return [json.loads(data) for _, data in events_of(text) if data != "[DONE]"]


@served(script=hello)
async def test_a_whole_answer_has_text_usage_and_a_request_id(bench, engine):
    reply = await bench.post({"model": "tiny", "prompt": "the end"})
    assert reply.status == 200
    answer = reply.json
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert answer["choices"] == [
        {
            "index": 0,
            "text": " hello world",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    num_prompt = len(TEXT.encode_now("the end"))
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 2,
        "total_tokens": num_prompt + 2,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert reply.headers["X-Request-Id"].startswith("req-")
    assert engine.closed == []


@served(script=hello)
async def test_a_stream_says_the_same_as_a_whole_answer_and_every_event_has_an_id(
    bench,
):
    body = {
        "prompt": "the end",
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    reply = await bench.post({**body})
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    name = json.loads(reply.events[0][1])["id"]
    assert reply.headers["X-Request-Id"] not in name
    hello, world = map(TEXT.encode_now, (" hello", " world"))
    whole = f"2e@{digest_of(hello + world):08x}"
    places = [f"1@{digest_of(hello):08x}", whole, f"{whole}/u", f"{whole}/d"]
    ids = [event_id.split(":") for event_id, _ in reply.events]
    assert [(one, place) for one, _, place in ids] == [
        (name, place) for place in places
    ]
    assert len({made for _, made, _ in ids}) == 1
    assert reply.events[-1][1] == "[DONE]"
    first, second, closing = chunks(reply.text)
    assert first["choices"] == [
        {"index": 0, "text": " hello", "logprobs": None, "finish_reason": None}
    ]
    assert second["choices"][0]["finish_reason"] == "length"
    assert first["usage"] is None
    assert closing["choices"] == []
    assert closing["usage"]["completion_tokens"] == 2


@served(script=hello)
async def test_prompts_and_choices_are_numbered_in_order(bench, engine):
    for prompt in (["the", "end"], [[1, 2], [3]]):
        whole = await bench.post({"prompt": prompt, "n": 2, "echo": True})
        choices = whole.json["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        texts = [choice["text"] for choice in choices]
        streamed = await bench.post(
            {"prompt": prompt, "n": 2, "echo": True, "stream": True}
        )
        joined = ["", "", "", ""]
        for chunk in chunks(streamed.text):
            for choice in chunk["choices"]:
                joined[choice["index"]] += choice["text"]
        assert joined == texts
        assert texts[2] == texts[3]
        assert texts[0] != texts[2]
    assert [stream.prompt_token_ids for stream in engine.streams[-2:]] == [[1, 2], [3]]


@served(script=hello)
async def test_token_ids_come_on_request(bench):
    body = {"prompt": [5], "return_token_ids": True}
    expected = [TEXT.encode_now(" hello")[0], TEXT.encode_now(" world")[0]]
    whole = await bench.post({**body})
    assert whole.json["choices"][0]["token_ids"] == expected
    streamed = chunks((await bench.post({**body, "stream": True})).text)
    ids = [
        i
        for chunk in streamed
        for choice in chunk["choices"]
        for i in choice["token_ids"]
    ]
    assert ids == expected


@served(script=hello, chat_template=ChatTemplate("{{ messages[0].content }}", {}))
async def test_the_packed_prompts_prompts_come_on_request(bench):
    body = {"prompt": [[5], [6, 7]], "n": 2, "return_token_ids": True}
    prompts = [[5], [5], [6, 7], [6, 7]]
    for more in ({}, {"echo": True}):
        whole = await bench.post({**body, **more})
        assert [one["prompt_token_ids"] for one in whole.json["choices"]] == prompts
        streamed = chunks((await bench.post({**body, **more, "stream": True})).text)
        choices = [choice for chunk in streamed for choice in chunk["choices"]]
        shown = [
            (one["index"], one["prompt_token_ids"])
            for one in choices
            if PROMPT_IDS in one
        ]
        assert sorted(shown) == list(enumerate(prompts))
        assert all(PROMPT_IDS in choices[place] for place in first_of_each(choices))
    # In chats, vLLM has them beside the choices, which share the prompt.
    chat = {
        "messages": [{"role": "user", "content": "hello"}],
        "n": 2,
        "return_token_ids": True,
    }
    ids = TEXT.encode_now("hello")
    whole = await bench.post(chat, "/v1/chat/completions")
    assert whole.json["prompt_token_ids"] == ids
    streamed = chunks(
        (await bench.post({**chat, "stream": True}, "/v1/chat/completions")).text
    )
    openings = [chunk for chunk in streamed if PROMPT_IDS in chunk]
    details = whole.json["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": 0}
    assert [chunk[PROMPT_IDS] for chunk in openings] == [ids, ids]
    assert all("role" in chunk["choices"][0]["delta"] for chunk in openings)
    many = {"prompt": [[5] * 90] * 100, "n": 10, "return_token_ids": True}
    assert (await bench.post(many)).status == 200
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(submission, "MAX_SHOWN_IDS", 90_000 - 1)
        refused = await bench.post(many)
    assert (refused.status, refused.error["param"]) == (400, "return_token_ids")


PROMPT_IDS = "prompt_token_ids"


def first_of_each(choices: list[dict[str, object]]) -> list[int]:
    """Return where the first chunk of each choice is."""
    indices = [choice["index"] for choice in choices]
    return [indices.index(index) for index in set(indices)]


def hello_cut(stream: RequestStream) -> None:
    stream.metrics.max_tokens_clamped = 7
    hello(stream)


@served(script=hello_cut)
async def test_a_limit_that_was_cut_is_said_in_usage_and_header(bench):
    reply = await bench.post({"prompt": [5], "max_tokens": 99})
    assert reply.headers["Baton-Max-Tokens"] == "7"
    assert reply.json["usage"]["max_tokens_clamped"] == 7


@served(script=hello)
async def test_sampling_fields_reach_the_engine_and_null_is_the_default(bench, engine):
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": -3,
        "n": 2,
        "max_tokens": 9,
        "min_tokens": 2,
        "priority": -2,
        "stop": ["x"],
        "stop_token_ids": [4],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    assert (
        await bench.post({"prompt": [5], "cache_salt": "mine", **given})
    ).status == 200
    assert engine.caller.scope == Scope(cache_salt="mine")
    params = engine.streams[0].params
    assert {name: getattr(params, name) for name in given} == given
    assert (await bench.post({"prompt": [5], **dict.fromkeys(given)})).status == 200
    params = engine.streams[1].params
    assert (params.max_tokens, params.temperature, params.n) == (16, 1.0, 1)


def refuse(stream: RequestStream) -> None:
    stream.finish(
        Overloaded("full", code="queue_full", http_status=429, retry_after_s=1.5)
    )


@pytest.mark.parametrize("stream", [False, True])
@served(script=refuse)
async def test_an_error_before_the_first_token_is_a_status_also_in_streams(
    bench, stream
):
    reply = await bench.post({"prompt": [5], "stream": stream})
    assert reply.status == 429
    assert (reply.error["code"], reply.error["type"]) == (
        "queue_full",
        "rate_limit_error",
    )
    assert reply.headers["Retry-After"] == "2"
    assert reply.headers["retry-after-ms"] == "1500"


@served(script=lost)
async def test_an_error_after_the_first_token_is_an_event_and_the_end(bench):
    reply = await bench.post({"prompt": [5], "stream": True})
    assert reply.status == 200
    first, last = chunks(reply.text)
    assert first["choices"][0]["text"] == " hello"
    assert last["error"]["code"] == "node_lost"
    assert "[DONE]" not in reply.text
    # The connection can be used again.
    assert (await bench.get("/live")).status == 200
    whole = await bench.post({"prompt": [5]})
    assert (whole.status, whole.error["code"]) == (502, "node_lost")


@served()
async def test_a_bug_while_streaming_ends_that_answer_alone(bench, engine):
    bad = asyncio.create_task(bench.post({"prompt": [5], "stream": True}))
    broken = await engine.stream()
    good = asyncio.create_task(bench.post({"prompt": [6], "stream": True}))
    other = await engine.stream(1)
    engine.say(other, " hello")
    broken.push(0, TEXT.encode_now(" hello"), None)
    broken.finish(RuntimeError("a bug"))
    engine.say(other, " world", "stop")
    other.finish()
    last = chunks((await bad).text)[-1]
    assert last["error"]["code"] == "internal_error"
    assert "a bug" not in str(last)
    assert (await good).text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("has_begun", [False, True])
@served()
async def test_a_client_that_leaves_cancels_its_request(
    bench, engine, streamed, has_begun
):
    reader, writer = await bench.dial()
    writer.write(posted({"prompt": [[5], [6]], "stream": streamed}))
    await engine.stream(1)
    if has_begun:
        engine.say(engine.streams[0], " hello")
    if has_begun and streamed:
        await reader.readuntil(b" hello")
    writer.close()
    await engine.is_closed(2)
    await writer.wait_closed()
    counted = (await bench.get("/metrics")).text
    assert 'outcome="client_gone",path="none"} 2.0' in counted


@served(silence_s=0.05)
async def test_a_stream_that_only_waited_for_a_node_gets_503_and_no_event(
    bench, engine
):
    async def turn_away() -> None:
        stream = await engine.stream()
        await asyncio.sleep(0.3)  # longer than a stream may be silent
        stream.finish(
            Overloaded("no node was free", code="queue_timeout", retry_after_s=7.0)
        )

    body = {"prompt": [5], "stream": True}
    async with asyncio.TaskGroup() as group:
        group.create_task(turn_away())
        async with bench.session.post("/v1/completions", json=body) as reply:
            assert reply.status == 503
            assert reply.headers["Retry-After"] == "7"
            assert (await reply.json())["error"]["code"] == "queue_timeout"


@served(silence_s=0.05)
async def test_silence_is_broken_by_comments_before_and_after_the_first_token(
    bench, engine
):
    # It has nodes.
    engine.script = lambda stream: setattr(stream.metrics, "num_attempts", 1)
    async with bench.session.post(
        "/v1/completions", json={"prompt": [5], "stream": True}
    ) as reply:
        for _ in range(2):
            assert await reply.content.readline() == b": waiting\n"
        engine.say(await engine.stream(), " hello")
        event = await reply.content.readuntil(b"\n\n")
        # Some were written before.
        assert b" hello" in event.rpartition(b": waiting\n")[2]
        assert await reply.content.readline() == b": waiting\n"
        engine.streams[0].finish()
        assert b"[DONE]" in await reply.content.read()


def unchunked(body: bytes) -> bytes:
    """Return the data of a body in chunks, of which none may be missing or broken."""
    data = b""
    while True:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        assert rest[length : length + 2] == b"\r\n"
        if length == 0:
            assert rest == b"\r\n"
            return data
        data += rest[:length]
        body = rest[length + 2 :]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@served()
async def test_a_client_that_does_not_read_gets_merged_events_and_nothing_is_lost(
    version, bench, engine
):
    num_tokens = 30_000
    token_id = TEXT.encode_now(" hello")[0]
    reader, writer = await bench.dial(limit=1024)
    writer.write(posted({"prompt": [5], "stream": True}, version))
    stream = await engine.stream()
    stream.push(0, [token_id], None)
    await reader.readuntil(b"\r\n\r\n")
    for _ in range(num_tokens - 1):
        stream.push(0, [token_id], None)
    stream.push(0, [token_id], "length")
    stream.finish()
    if version == "1.0":  # which ends the connection
        received = (await reader.read(-1)).decode()
    else:
        body = b""
        while not body.endswith(b"\r\n0\r\n\r\n"):
            body += await reader.read(1024)
        received = unchunked(body).decode()
    writer.close()
    await writer.wait_closed()
    parts = [chunk["choices"][0]["text"] for chunk in chunks(received)]
    assert "".join(parts) == " hello" * (num_tokens + 1)
    assert len(parts) < num_tokens
    assert received.endswith("data: [DONE]\n\n")


@served()
async def test_nothing_follows_the_end_of_a_response(bench, monkeypatch):
    close = EventStream.close

    async def close_before_a_token(events: EventStream) -> None:
        await close(events)
        events.take(CompletionOutput(0, "late", [5]))

    monkeypatch.setattr(EventStream, "close", close_before_a_token)
    body = {"prompt": "the end", "max_tokens": 0, "echo": True, "stream": True}
    reader, writer = await bench.dial()
    for _ in range(2):
        writer.write(posted(body))
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        await reader.readuntil(b"\r\n0\r\n\r\n")
    writer.close()


@served()
async def test_an_interval_makes_fewer_events_of_the_same_tokens(bench, engine):
    body = {"prompt": [5], "stream": True, "stream_interval": 4}
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply = asyncio.create_task(bench.post({**body, "stream_options": options}))
    stream = await engine.stream()
    engine.say(stream, " hello world the end" * 2, "length")
    stream.finish()
    *parts, last = chunks((await reply).text)
    texts = [part["choices"][0]["text"] for part in parts]
    assert texts == [" hello", " world the end hello", " world the end"]
    assert [part["usage"]["completion_tokens"] for part in parts] == [1, 5, 8]
    assert last["usage"]["completion_tokens"] == 8


@served()
async def test_a_connection_that_closes_between_two_tokens_of_a_step_hurts_no_other(
    bench, engine, caplog
):
    reader, writer = await bench.dial()
    writer.write(posted({"prompt": [5], "n": 32, "stream": True}))
    leaving = await engine.stream()
    other = asyncio.create_task(bench.post({"prompt": [6], "stream": True}))
    staying = await engine.stream(1)
    engine.say(leaving, " hello")
    await reader.readuntil(b" hello")
    # The client resets its connection, which the router sees at its next write.
    reset = struct.pack("ii", 1, 0)
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    writer.transport.abort()
    await asyncio.sleep(0)
    for choice in range(32):
        engine.say(leaving, " world", choice=choice)
    engine.say(staying, " world", "stop")
    staying.finish()
    assert (await other).text.endswith("data: [DONE]\n\n")
    await engine.is_closed()
    assert not caplog.records


@served(script=hello)
async def test_an_adapter_is_chosen_as_the_model(bench, engine):
    for model, lora in (("sql", "sql"), ("tiny", "")):
        reply = await bench.post({"model": model, "prompt": [5], "cache_salt": "mine"})
        assert reply.json["model"] == model
        assert engine.caller.scope == Scope(lora, "mine")
    listed = (await bench.get("/v1/models")).json["data"]
    named = [(card["id"], card.get("parent")) for card in listed]
    assert named == [
        ("tiny", None),
        ("small", None),
        ("sql", "tiny"),
        ("poems", "tiny"),
    ]
    assert (await bench.get("/v1/models/poems")).json == listed[3]
    body = {"model": "sql", "prompt": "the end"}
    assert (await bench.post(body, path="/tokenize")).json["count"] > 0


@served(script=hello)
async def test_a_model_may_have_several_names_of_which_responses_show_the_first(bench):
    for name in ("small", "tiny", "/models/tiny"):
        assert (await bench.post({"model": name, "prompt": [5]})).json[
            "model"
        ] == "tiny"
    assert (await bench.get("/v1/models/small")).json["id"] == "small"


@served()
async def test_unknown_paths_methods_and_models_are_json_errors(bench, engine):
    missing = await bench.get("/v1/nothing")
    assert (missing.status, missing.error["code"]) == (404, "unknown_url")
    wrong = await bench.get("/v1/completions")
    assert (wrong.status, wrong.error["code"]) == (405, "method_not_allowed")
    assert wrong.headers["Allow"] == "POST"
    for name in ("gpt-4", "tiny:my-lora"):
        model = await bench.post({"model": name, "prompt": [5]})
        assert (model.status, model.error["param"]) == (404, "model")
        assert model.error["code"] == "model_not_found"
    assert engine.streams == []


@served()
async def test_models_health_and_live_tell_readiness_apart(bench, engine):
    models = (await bench.get("/v1/models")).json
    assert models["data"][0]["id"] == "tiny"
    assert (await bench.get("/v1/models/tiny")).json["max_model_len"] == 256
    assert (await bench.get("/v1/models/other/one")).status == 404
    assert (await bench.get("/version")).json == {"version": __version__}
    assert (await bench.get("/health")).json["status"] == "ready"
    engine.is_ready = False
    health = await bench.get("/health")
    assert (health.status, health.json["message"]) == (503, "nodes are starting")
    assert (await bench.get("/live")).status == 200
    early = await bench.post({"prompt": [5]})
    assert (early.status, early.error["code"]) == (503, "not_ready")
    assert "Retry-After" in early.headers
    engine.errored = True
    assert (await bench.get("/live")).status == 503


@served()
async def test_draining_finishes_what_is_under_way_and_takes_nothing_new(bench, engine):
    under_way = asyncio.create_task(bench.post({"prompt": [5], "stream": True}))
    stream = await engine.stream()
    draining = asyncio.create_task(bench.server.drain(20.0))
    while (health := await bench.get("/health")).status == 200:
        pass
    assert health.json["status"] == "draining"
    refused = await bench.post({"prompt": [6]})
    assert (refused.status, refused.error["code"]) == (503, "shutting_down")
    assert (refused.headers["Retry-After"], refused.headers["Connection"]) == (
        "1",
        "close",
    )
    engine.say(stream, " hello", "stop")
    stream.finish()
    assert (await under_way).text.endswith("data: [DONE]\n\n")
    await draining


@served(script=hello)
async def test_metrics_count_answers_requests_and_tokens(bench):
    await bench.post({"prompt": [5, 6, 7]})
    await bench.post({"prompt": [5], "stream": True})
    await bench.post({"prompt": ""})
    text = (await bench.get("/metrics")).text
    assert 'route="/v1/completions",status="200"} 2.0' in text
    assert 'route="/v1/completions",status="400"} 1.0' in text
    assert (
        'baton_requests_total{model_name="tiny",outcome="finished",path="none"} 2.0'
        in text
    )
    assert 'baton_prompt_tokens_total{model_name="tiny"} 4.0' in text
    assert 'baton_generation_tokens_total{model_name="tiny"} 4.0' in text
    assert 'baton_time_to_first_token_seconds_count{model_name="tiny"} 2.0' in text


@served()
async def test_a_refusal_of_one_prompt_ends_the_others_of_its_request(bench, engine):
    def refuse(_: RequestStream) -> None:
        engine.refusal = RequestError("the prompt is too long", param="prompt")

    engine.script = refuse
    reply = await bench.post({"prompt": ["the", "end"]})
    assert (reply.status, reply.error["param"]) == (400, "prompt")
    await engine.is_closed(1)


@served()
async def test_broken_http_is_400_and_no_traceback(bench, caplog):
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        + TYPE.encode()
    )
    broken = [
        head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        head + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
        head + b"Content-Length: abc\r\n\r\n",
        b"nonsense\r\n\r\n",
    ]
    for data in broken:
        reader, writer = await bench.dial()
        writer.write(data)
        assert (await reader.readline()).split()[1] == b"400"
        writer.close()
        await writer.wait_closed()
    assert (await bench.get("/live")).status == 200
    assert "Traceback" not in caplog.text


def count(kind: type) -> int:
    return sum(type(one) is kind for one in gc.get_objects())


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("script", [well, lost, None])
def test_an_answer_is_gone_without_the_collector(script, is_streamed):
    async def ask() -> int:
        engine = ScriptedEngine(script)
        engine.refusal = (
            None if script is not None else Overloaded("full", code="queue_full")
        )
        async with HttpBench(engine) as bench:
            reply = await bench.post({"prompt": [5, 6], "stream": is_streamed})
        assert bool(engine.streams) == (script is not None)
        engine.refusal = None
        engine.streams.clear()
        engine.close()
        return reply.status

    gc.disable()
    gc.freeze()  # so that only what this test makes is counted, whatever ran before it
    try:
        assert asyncio.run(ask()) in (200, 502, 503)
        assert (count(Running), count(RequestStream)) == (0, 0)
    finally:
        gc.enable()
