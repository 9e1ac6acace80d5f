"""The scripted server says what its script says, byte by byte, and when it wrote it."""

import contextlib
import http.client
import itertools
import json
from typing import Any
from urllib.parse import urlsplit

import openai

from baton.bench.selftest.answers import DONE, Chunk, Script, answer_ids, paced, steady, usage
from baton.bench.selftest.scripted_server import MODEL, Answer, ScriptedServer, Stage
from baton.runtime.clock import monotonic

DEADLINE_S = 30.0
THREE = steady(1.0, 1.0, 3)
USAGE = {"stream_options": {"include_usage": True}}


def ask(script: Script, **fields: object) -> tuple[list[dict[str, Any]], Answer]:
    """Ask for a script; return the data of the whole stream that ends in [DONE], and the stamps."""
    stage = Stage({1: script})
    body = {"prompt": [1, 7], "max_tokens": 3, "stream": True, **USAGE, **fields}
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    # The server's thread has ended with the block, so all its writes are noted.
    with ScriptedServer(stage.play) as server:
        link = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=DEADLINE_S)
        with contextlib.closing(link):
            link.request("POST", path, json.dumps(body))
            reply = link.getresponse()
            assert reply.status == 200
            *found, done, rest = reply.read().decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    (answer,) = stage.answers
    return [json.loads(event.removeprefix("data: ")) for event in found], answer


def test_a_stream_carries_the_scripted_tokens_and_their_usage() -> None:
    script = Script(paced(1.0, [1.0, 1.0], [1, 3, 1]), cached_tokens=4)
    (*chunks, told), answer = ask(script, return_token_ids=True)
    ids = answer_ids(1, 5)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["token_ids"] for choice in choices] == [ids[:1], ids[1:4], ids[4:]]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "length"]
    assert choices[0]["text"] == f" t{ids[0]}"
    assert told["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert answer.number == 1


def test_only_what_was_asked_for_comes() -> None:
    bare, _ = ask(Script(THREE), stream_options={})
    assert [list(chunk["choices"][0]) for chunk in bare] == [["index", "text", "finish_reason"]] * 3
    wrong, _ = ask(Script(THREE, usage(5) + DONE))
    assert wrong[-1]["usage"]["completion_tokens"] == 5
    events, answer = ask(Script(THREE), prompt=[9])
    assert len(events) == 4  # of no script: as many as it asks for, and usage
    assert answer.number is None


def test_a_chat_opens_with_a_role_and_no_token() -> None:
    said = [{"role": "user", "content": "play script 1 please"}]
    (opening, *chunks, told), _ = ask(Script((Chunk(1.0, 0), *THREE)), messages=said)
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    texts = [chunk["choices"][0]["delta"]["content"] for chunk in chunks]
    assert texts == [f" t{token}" for token in answer_ids(1, 3)]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert told["usage"]["prompt_tokens"] == 4


def test_events_of_one_moment_leave_in_one_write() -> None:
    _, answer = ask(Script((Chunk(1.0), Chunk(2.0), Chunk(2.0, 4)), end_ms=5.0))
    assert [write.num_tokens for write in answer.writes] == [1, 5, 0]


def test_stamps_are_never_earlier_than_scripted_nor_later_than_seen() -> None:
    """The order of events on the clock that both sides share, however busy the machine is."""
    script = Script(paced(5.0, [1.0, 8.0], [1, 1, 1]))
    asked_s = monotonic()
    _, answer = ask(script)
    seen_s = monotonic()
    assert asked_s <= answer.received_s
    for write, chunk in zip(answer.writes, script.chunks, strict=True):
        assert answer.received_s + chunk.at_ms / 1e3 <= write.at_s <= seen_s
    for before, after in itertools.pairwise(answer.writes):
        assert before.at_s < after.at_s


def test_the_client_of_openai_reads_a_scripted_stream() -> None:
    stage = Stage({1: Script((Chunk(1.0, 0), *THREE))})
    with (
        ScriptedServer(stage.play) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "script 1"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        parts = list(stream)
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == "".join(f" t{token}" for token in answer_ids(1, 3))
    assert parts[-1].usage.completion_tokens == 3
