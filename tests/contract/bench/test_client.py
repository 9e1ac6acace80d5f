"""The client judges every kind of answer of a server, over real connections."""

import asyncio
import errno
import socket
import ssl
import struct
from pathlib import Path

import pytest

from baton.bench.client.http import Session, reason_of, send
from baton.bench.records import Outcome, Planned, Record
from baton.bench.settings import Target
from baton.runtime.clock import monotonic
from tests.support.certificates import make_certificate
from tests.support.scripted_server import (
    DONE,
    MODEL,
    Call,
    Play,
    ScriptedServer,
    answer_ids,
    error,
    event,
    token,
    usage,
)

TIMEOUT_S = 20.0
ONE = (token(), usage(1), DONE)


def planned(index: int = 0, at_s: float | None = None, num_tokens: int = 3) -> Planned:
    return Planned(index=index, at_s=at_s, output_tokens=num_tokens, prompt_ids=(1, 2))


def put(url: str, *requests: Planned, **more: object) -> list[Record]:
    """One after the other, over one session; `at_s` counts from now."""

    async def run() -> list[Record]:
        target = Target(url, MODEL, **{"timeout_s": TIMEOUT_S, **more})
        start_s = monotonic()
        due_s = [None if one.at_s is None else start_s + one.at_s for one in requests]
        async with Session(target) as session:
            pairs = zip(requests, due_s, strict=True)
            return [await send(session, target, request, due) for request, due in pairs]

    return asyncio.run(run())


def play(script: Play, **more: object) -> Record:
    with ScriptedServer(script) as server:
        (record,) = put(server.url, planned(), **more)
    return record


def sends(*pieces: bytes) -> Play:
    return lambda call: call.send(*pieces)


def cuts(*pieces: bytes) -> Play:
    return lambda call: call.cut(*pieces)


def says(data: bytes) -> Play:
    return lambda call: call.raw(data)


def replies(
    status: int, body: bytes, kind: str = "application/json", **fields: str
) -> Play:
    return lambda call: call.reply(status, body, kind, **fields)


async def resets(call: Call) -> None:
    await call.write(token())
    link = call.transport.get_extra_info("socket")
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    call.transport.abort()


def test_an_answer_is_read_and_stamped():
    with ScriptedServer() as server:
        record, other = put(server.url, planned(), planned(1))
    assert (record.outcome, record.detail, record.status) == (Outcome.ANSWERED, "", 200)
    assert record.token_ids == answer_ids(1, 3)
    assert (record.num_tokens, record.prompt_tokens, record.output_tokens) == (3, 2, 3)
    stamps = [record.intended_s, record.sent_s, record.first_byte_s or 0.0]
    stamps += [arrival.at_s for arrival in record.arrivals] + [record.end_s]
    assert stamps == sorted(stamps)
    assert record.intended_s == record.sent_s
    assert record.end_s <= other.sent_s


async def closing(call: Call) -> None:
    call.keep_alive = False
    await call.send(*ONE)


@pytest.mark.parametrize(
    ("script", "keep_alive_s", "moments", "num_connections"),
    [
        (sends(*ONE), 30.0, [None] * 5, 1),
        (closing, 30.0, [None] * 3, 3),  # the server says that it will close
        (sends(*ONE), 0.05, [None, 3.0], 2),  # it closed meanwhile
    ],
)
def test_a_connection_is_used_again_unless_it_is_closed(
    script, keep_alive_s, moments, num_connections
):
    with ScriptedServer(script, keep_alive_s=keep_alive_s) as server:
        requests = [planned(index, at_s, 1) for index, at_s in enumerate(moments)]
        records = put(server.url, *requests)
        assert server.num_connections == num_connections
    assert {record.outcome for record in records} == {Outcome.ANSWERED}


def test_a_request_waits_for_its_moment_and_counts_from_it():
    with ScriptedServer() as server:
        late, due = put(server.url, planned(0, at_s=-1.0), planned(1, at_s=0.4))
    assert due.intended_s - late.intended_s == pytest.approx(1.4)
    assert late.sent_s > late.intended_s + 1.0
    assert due.sent_s >= due.intended_s


@pytest.mark.parametrize(
    ("script", "outcome", "words"),
    [
        (
            sends(token(), event({"error": {"message": "node lost"}})),
            "error_in_stream",
            "node",
        ),
        (
            sends(token(), token(), token()),
            "truncated",
            "the body ended without [DONE]",
        ),
        (cuts(), "truncated", "the connection was closed without any event"),
        (resets, "truncated", "the connection was reset without"),
        (says(b"SSH-2.0-x\r\n"), "malformed", "the response is not HTTP/1.1"),
        (replies(503, error("busy")), "refused", "busy"),
        (replies(404, error("no such model")), "client_error", "no such model"),
        (replies(500, error("a bug")), "server_error", "a bug"),
        (replies(200, b'{"choices": []}'), "not_streamed", "instead of"),
        (replies(200, b"hello", "text/plain"), "malformed", "text/plain"),
        (replies(307, b"", Location="/x"), "malformed", "status 307 /x"),
    ],
)
def test_what_is_wrong_with_an_answer_is_told(script, outcome, words):
    record = play(script)
    assert record.outcome == outcome
    assert words in record.detail
    assert "\n" not in record.detail
    assert record.end_s >= record.sent_s


def test_a_server_that_is_not_there_is_unreachable():
    with ScriptedServer() as server:
        url = server.url
    sent, scheduled = put(url, planned(), planned(1, at_s=0.1))
    for record in (sent, scheduled):
        assert (record.outcome, record.detail) == (
            Outcome.UNREACHABLE,
            "connection refused",
        )
        assert record.end_s >= record.sent_s >= record.intended_s
    (record,) = put("http://nowhere.invalid:80", planned())
    assert record.outcome is Outcome.UNREACHABLE
    assert record.detail


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A self-signed one for 127.0.0.1, with its key, in one file."""
    made = make_certificate(tmp_path_factory.mktemp("tls"))
    with made.cert.open("ab") as file:
        file.write(made.key.read_bytes())
    return made.cert


def tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    return context


def test_a_certificate_without_an_authority_is_refused_with_what_to_do(certificate):
    with ScriptedServer(tls=tls(certificate)) as server:
        (refused,) = put(server.url, planned())
        (trusted,) = put(server.url, planned(), ca_file=str(certificate))
        (unchecked,) = put(server.url, planned(), insecure=True)
        (plain,) = put(server.url.replace("https", "http"), planned())
    assert refused.outcome is Outcome.UNREACHABLE
    for words in ("self-signed", "--ca-file", "--insecure"):
        assert words in refused.detail
    assert trusted.outcome is unchecked.outcome is Outcome.ANSWERED
    assert plain.outcome is not Outcome.ANSWERED


def test_a_machine_without_files_left_does_not_blame_the_server():
    assert reason_of(OSError(errno.EMFILE, "")) == (
        Outcome.NO_SOCKET,
        "too many open files",
    )
