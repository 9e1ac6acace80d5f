"""The scripted server says what its script says, byte by byte, and when it wrote it."""

import contextlib
import http.client
import itertools
import json
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from baton.bench.selftest.answers import error
from baton.bench.selftest.scripted_server import MODEL, Answer, ScriptedServer, Stage
from baton.bench.selftest.scripts import Chunk, Script, answer_ids, paced, steady
from baton.runtime.clock import monotonic

DEADLINE_S = 30.0
THREE = steady(1.0, 1.0, 3)
USAGE = {"stream_options": {"include_usage": True}}
Running = tuple[ScriptedServer, Stage]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    stage = Stage()
    with ScriptedServer(stage.play) as server:
        yield server, stage


def ask(running: Running, *scripts: Script, **fields: object) -> tuple[int, str, str]:
    """Ask for the last of the scripts; return the status, the kind and the body that came."""
    server, stage = running
    if scripts:
        stage.prepare({1: list(scripts)})
    link = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=DEADLINE_S)
    body = {"prompt": [1, 7], "max_tokens": 3, "stream": True, **USAGE, **fields}
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    with contextlib.closing(link):
        link.request("POST", path, json.dumps(body))
        reply = link.getresponse()
        return reply.status, reply.headers["Content-Type"], reply.read().decode()


def events(running: Running, *scripts: Script, **fields: object) -> list[dict[str, Any]]:
    """Return the data of a whole stream that ends in [DONE]."""
    *found, done, rest = ask(running, *scripts, **fields)[2].split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in found]


def settled(running: Running, count: int) -> list[Answer]:
    """A client may see the end before the server notes it."""
    deadline_s = monotonic() + DEADLINE_S
    while sum(one.is_over for one in running[1].answers) < count:
        assert monotonic() < deadline_s
        time.sleep(0.02)
    return running[1].answers


def test_a_stream_carries_the_scripted_tokens_and_their_usage(running: Running) -> None:
    script = Script(paced(1.0, [1.0, 1.0], [1, 3, 1]), cached_tokens=4)
    *chunks, told = events(running, script, return_token_ids=True)
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


def test_only_what_was_asked_for_comes(running: Running) -> None:
    bare = events(running, Script(THREE), stream_options={})
    assert [list(chunk["choices"][0]) for chunk in bare] == [["index", "text", "finish_reason"]] * 3
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(running, Script(THREE, usage_error=-1), stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 2]
    assert not any("usage" in chunk for chunk in events(running, Script(THREE, usage=False)))
    assert len(events(running, prompt=[9])) == 4  # of no script: as many as it asks for, and usage


def test_a_chat_opens_with_a_role_and_no_token(running: Running) -> None:
    said = [{"role": "user", "content": "play script 1 please"}]
    opening, *chunks, told = events(running, Script((Chunk(1.0, 0), *THREE)), messages=said)
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    texts = [chunk["choices"][0]["delta"]["content"] for chunk in chunks]
    assert texts == [f" t{token}" for token in answer_ids(1, 3)]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert told["usage"]["prompt_tokens"] == 4


def test_events_of_one_moment_leave_in_one_write(running: Running) -> None:
    ask(running, Script((Chunk(1.0), Chunk(2.0), Chunk(2.0, 4)), end_ms=5.0))
    [answer] = settled(running, 1)
    assert [write.num_tokens for write in answer.writes] == [(1,), (1, 4), ()]


def test_the_last_script_of_a_number_repeats(running: Running) -> None:
    busy = Script(status=429, body=error("full"))
    assert ask(running, busy, Script(THREE))[:2] == (429, "application/json")
    assert [ask(running)[0] for _ in range(2)] == [200, 200]
    assert [one.number for one in settled(running, 3)] == [1, 1, 1]


def test_stamps_are_never_earlier_than_scripted_nor_later_than_seen(running: Running) -> None:
    """The order of events on the clock that both sides share, however busy the machine is."""
    script = Script(paced(5.0, [1.0, 8.0], [1, 1, 1]))
    asked_s = monotonic()
    ask(running, script)
    seen_s = monotonic()
    [answer] = settled(running, 1)
    assert asked_s <= answer.received_s
    assert answer.held_writes == 0
    for write, chunk in zip(answer.writes, script.chunks, strict=True):
        assert answer.received_s + chunk.at_ms / 1e3 <= write.at_s <= seen_s
    for before, after in itertools.pairwise(answer.writes):
        assert before.at_s + before.took_s <= after.at_s


def test_the_client_of_openai_reads_a_scripted_stream(running: Running) -> None:
    server, stage = running
    stage.prepare({1: [Script((Chunk(1.0, 0), *THREE))]})
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "script 1"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        parts = list(stream)
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == "".join(f" t{token}" for token in answer_ids(1, 3))
    assert parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens == 3
