"""The scripted server says what its script says, byte by byte, and owns up to when it wrote it."""

import contextlib
import http.client
import itertools
import json
import socket
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

import openai
import pytest

from baton.bench.selftest.scripted_server import ScriptedServer
from baton.bench.selftest.scripts import (
    MODEL,
    Answer,
    Chunk,
    Damage,
    Ending,
    Script,
    answer_ids,
    paced,
    steady,
)
from baton.protocol.errors import BatonError
from baton.runtime.clock import monotonic

DEADLINE_S = 30.0
THREE = steady(1.0, 1.0, 3)


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as running:
        yield running


def body_for(number: int, **fields: object) -> bytes:
    body: dict[str, object] = {"model": MODEL, "prompt": [number, 7], "max_tokens": 3}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(body | fields).encode()


class Reply(NamedTuple):
    status: int
    headers: Mapping[str, str]
    text: str


def ask(server: ScriptedServer, number: int, **fields: object) -> Reply:
    """The whole reply, on a connection of its own."""
    link = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=DEADLINE_S)
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    with contextlib.closing(link):
        link.request("POST", path, body_for(number, **fields))
        reply = link.getresponse()
        return Reply(reply.status, dict(reply.headers), reply.read().decode())


def events(server: ScriptedServer, number: int, **fields: object) -> list[str]:
    """What lies between the blank lines of a whole stream."""
    text = ask(server, number, **fields).text
    assert text.endswith("\n\n")
    return text[:-2].split("\n\n")


def data_of(event: str) -> dict[str, object]:
    decoded = json.loads(event.removeprefix("data: "))
    assert isinstance(decoded, dict)
    return decoded


def choice_of(event: str) -> dict[str, object]:
    choices = data_of(event)["choices"]
    assert isinstance(choices, list)
    [choice] = choices
    assert isinstance(choice, dict)
    return choice


def send(server: ScriptedServer, number: int) -> socket.socket:
    parts = urlsplit(server.url)
    body = body_for(number)
    link = socket.create_connection((parts.hostname, parts.port), DEADLINE_S)
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body)
    link.sendall(head + body)
    return link


def raw(server: ScriptedServer, number: int) -> tuple[bytes, str]:
    """All bytes until the server closes, and how it closed."""
    received = b""
    with send(server, number) as link:
        try:
            while data := link.recv(65536):
                received += data
        except ConnectionResetError:
            return received, "reset"
    return received, "closed"


def settled(server: ScriptedServer, count: int) -> list[Answer]:
    """The answers, once that many are over: a client may see the end before the server notes it."""
    deadline_s = monotonic() + DEADLINE_S
    while monotonic() < deadline_s:
        answers = server.answers()
        if sum(one.ended_s is not None or one.client_left for one in answers) == count:
            return answers
        time.sleep(0.02)
    raise AssertionError(answers)


def test_a_stream_carries_the_scripted_tokens_and_their_usage(server: ScriptedServer) -> None:
    server.play({1: [Script(chunks=paced(1.0, [1.0, 1.0], [1, 3, 1]), cached_tokens=4)]})
    *chunks, usage, done = events(server, 1, return_token_ids=True)
    ids = [choice_of(chunk)["token_ids"] for chunk in chunks]
    expected = answer_ids(1, 5)
    assert ids == [expected[:1], expected[1:4], expected[4:]]
    assert [choice_of(chunk)["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert choice_of(chunks[0])["text"] == f" t{expected[0]}"
    assert data_of(usage)["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 5,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert done == "data: [DONE]"


def test_nothing_comes_that_was_not_asked_for(server: ScriptedServer) -> None:
    server.play({1: [Script(chunks=THREE)]})
    *chunks, done = events(server, 1, stream_options={})
    assert len(chunks) == 3
    assert done == "data: [DONE]"
    assert "token_ids" not in choice_of(chunks[0])


def test_a_chat_opens_with_a_role_and_no_token(server: ScriptedServer) -> None:
    server.play({5: [Script(chunks=(Chunk(1.0, 0), *THREE), own_finish=True)]})
    opening, *chunks, finish, _, _ = events(
        server, 0, messages=[{"role": "user", "content": "play script 5 please"}]
    )
    assert choice_of(opening)["delta"] == {"role": "assistant", "content": ""}
    deltas = [choice_of(chunk)["delta"] for chunk in chunks]
    assert deltas == [{"content": f" t{token}"} for token in answer_ids(5, 3)]
    assert choice_of(finish)["finish_reason"] == "length"


def test_usage_can_lie_be_missing_or_come_with_every_chunk(server: ScriptedServer) -> None:
    lie = Script(chunks=THREE, usage_error=-1)
    none = Script(chunks=THREE, usage="none")
    running = Script(chunks=THREE, usage="continuous")
    server.play({1: [lie, none, running]})
    assert '"completion_tokens":2' in events(server, 1)[-2]
    assert not any('"usage"' in event for event in events(server, 1))
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(server, 1, stream_options=options)[:3]
    assert [data_of(chunk)["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3]  # type: ignore[index]


def test_events_of_one_moment_leave_in_one_write(server: ScriptedServer) -> None:
    server.play({1: [Script(chunks=(Chunk(1.0), Chunk(2.0), Chunk(2.0, 4)), end_ms=5.0)]})
    events(server, 1)
    [answer] = settled(server, 1)
    assert [write.num_tokens for write in answer.writes] == [(1,), (1, 4), ()]


@pytest.mark.parametrize("crlf", [False, True])
def test_tokens_of_a_split_event_count_at_its_last_piece(
    server: ScriptedServer, crlf: bool
) -> None:
    server.play({1: [Script(chunks=(Chunk(9.0, 2, 4), Chunk(10.0)), crlf=crlf)]})
    text = ask(server, 1).text
    assert text.count("data: ") == 4
    assert text.endswith("data: [DONE]" + 2 * ("\r\n" if crlf else "\n"))
    [answer] = settled(server, 1)
    assert [write.num_tokens for write in answer.writes] == [(), (), (), (2,), (1,)]


def test_a_dripping_answer_says_the_same(server: ScriptedServer) -> None:
    server.play({1: [Script(chunks=THREE), Script(chunks=THREE, drip_bytes=37)]})
    assert events(server, 1) == events(server, 1)
    straight, dripping = settled(server, 2)
    assert [write.num_tokens for write in dripping.writes] == [
        write.num_tokens for write in straight.writes
    ]


def test_comments_and_headers_alone_carry_no_tokens(server: ScriptedServer) -> None:
    chunks = (Chunk(2.0, 0, comment=True), *steady(3.0, 1.0, 3))
    server.play({1: [Script(chunks=chunks, headers_ms=0.0)]})
    assert events(server, 1)[0] == ": still here"
    [answer] = settled(server, 1)
    assert [write.body for write in answer.writes] == [False, True, True, True, True]
    assert [write.num_tokens for write in answer.writes[:3]] == [(), (), (1,)]


@pytest.mark.parametrize(
    ("ending", "last_bytes", "close"),
    [
        (Ending.CUT, b"}\n\n\r\n", "closed"),
        (Ending.RESET, b"}\n\n\r\n", "reset"),
        (Ending.HALF_EVENT, b"\r\n", "closed"),
    ],
)
def test_a_cut_stream_lacks_the_end_of_its_body(
    server: ScriptedServer, ending: Ending, last_bytes: bytes, close: str
) -> None:
    server.play({1: [Script(chunks=THREE, ending=ending)]})
    received, how = raw(server, 1)
    assert how == close
    assert received.endswith(last_bytes)
    assert not received.endswith(b"0\r\n\r\n")
    assert b"[DONE]" not in received
    assert received.count(b'" t') == 3


@pytest.mark.parametrize(
    ("ending", "last_events"),
    [
        (Ending.NO_DONE, ['"usage"']),
        (Ending.ERROR, ['{"error":{"message":"scripted failure"']),
        (Ending.ERROR_THEN_DONE, ['{"error":', "[DONE]"]),
        (Ending.MALFORMED, ['data: {"choices":[{"index":0,', "[DONE]"]),
        (Ending.FOREIGN, ['{"status":"busy"}', "[DONE]"]),
    ],
)
def test_a_wrong_stream_ends_properly_as_http(
    server: ScriptedServer, ending: Ending, last_events: list[str]
) -> None:
    server.play({1: [Script(chunks=THREE, ending=ending)]})
    found = events(server, 1)
    assert len(found) == 3 + len(last_events)
    for event, part in zip(found[3:], last_events, strict=True):
        assert part in event


def test_a_silent_answer_waits_until_its_client_leaves(server: ScriptedServer) -> None:
    server.play({1: [Script(chunks=THREE, ending=Ending.SILENCE)]})
    with send(server, 1) as link:
        assert link.recv(65536).startswith(b"HTTP/1.1 200 OK")
    [answer] = settled(server, 1)
    assert answer.client_left


def test_a_body_without_length_ends_with_the_connection(server: ScriptedServer) -> None:
    server.play({1: [Script(chunks=THREE, chunked=False)]})
    received, how = raw(server, 1)
    assert how == "closed"
    assert received.endswith(b"data: [DONE]\n\n")
    assert b"chunked" not in received


def test_failures_before_a_stream_are_statuses(server: ScriptedServer) -> None:
    busy = Script(status=429, retry_after_s=2.0)
    server.play({1: [busy, Script(status=500)]})
    replies = [ask(server, 1), ask(server, 1)]
    assert [reply.status for reply in replies] == [429, 500]
    assert replies[0].headers["Retry-After"] == "2"
    assert json.loads(replies[1].text)["error"]["type"] == "server_error"


def test_an_answer_can_refuse_to_be_a_stream(server: ScriptedServer) -> None:
    server.play({1: [Script(chunks=THREE, body="json"), Script(chunks=THREE, body="html")]})
    reply = ask(server, 1)
    assert reply.headers["Content-Type"] == "application/json"
    assert json.loads(reply.text)["usage"]["completion_tokens"] == 3
    reply = ask(server, 1)
    assert (reply.status, reply.headers["Content-Type"]) == (200, "text/html")


def test_the_last_script_of_a_number_repeats(server: ScriptedServer) -> None:
    server.play({1: [Script(status=500), Script(chunks=THREE)]})
    assert [ask(server, 1).status for _ in range(3)] == [500, 200, 200]
    assert [(one.number, one.call) for one in settled(server, 3)] == [(1, 0), (1, 1), (1, 2)]


def test_a_prompt_without_a_script_gets_the_length_it_asks_for(server: ScriptedServer) -> None:
    server.play({})
    assert '"completion_tokens":3' in events(server, 9)[-2]
    [answer] = settled(server, 1)
    assert answer.number is None


def test_the_model_has_a_name_and_no_other(server: ScriptedServer) -> None:
    reply = ask(server, 1, model="another")
    assert reply.status == 404
    assert "'another'" in reply.text


def test_a_script_that_is_none_is_refused(server: ScriptedServer) -> None:
    with pytest.raises(BatonError, match="refused /scripts"):
        server.play({1: ["nonsense"]})  # type: ignore[list-item]


def test_stamps_are_never_earlier_than_scripted_nor_later_than_seen(
    server: ScriptedServer,
) -> None:
    """The order of events on the clock that both processes share, whatever the machine does."""
    script = Script(chunks=paced(5.0, [1.0, 8.0], [1, 1, 1]))
    server.play({1: [script]})
    asked_s = monotonic()
    ask(server, 1)
    seen_s = monotonic()
    [answer] = settled(server, 1)
    assert asked_s <= answer.received_s
    assert answer.held_writes == 0
    for write, chunk in zip(answer.writes, script.chunks, strict=True):
        assert write.at_s >= answer.received_s + chunk.at_ms / 1e3
        assert write.at_s <= seen_s
    for before, after in itertools.pairwise(answer.writes):
        assert before.at_s + before.took_s <= after.at_s


@pytest.mark.parametrize("damage", ["swapped", "lost", "doubled", "wrong"])
def test_damage_keeps_the_number_of_tokens(damage: Damage) -> None:
    whole, damaged = answer_ids(3, 8), answer_ids(3, 8, damage)
    assert len(damaged) == 8
    assert damaged != whole
    assert len(set(whole)) == 8
    missing = [token for token in whole if token not in damaged]
    repeated = len(damaged) - len(set(damaged))
    assert (len(missing), repeated) == {
        "swapped": (0, 0), "lost": (1, 0), "doubled": (1, 1), "wrong": (1, 0)
    }[damage]  # fmt: skip


def test_the_client_of_openai_reads_a_scripted_stream(server: ScriptedServer) -> None:
    server.play({1: [Script(chunks=(Chunk(1.0, 0), *THREE), crlf=True)]})
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
