"""What a client makes of every way in which a server can answer, over real connections."""

import asyncio
import contextlib
import os
import resource
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web

from baton.bench.client.ask import Session, Stopped, ask_from
from baton.bench.client.target import Target
from baton.bench.records import Outcome, Planned, Record
from baton.runtime.clock import monotonic
from tests.support.scripted_openai import (
    DONE,
    Call,
    Play,
    ScriptedOpenAI,
    answer,
    error,
    event,
    token,
    usage,
)

TIMEOUT_S = 20.0


def planned(index: int = 0, at_s: float | None = None, num_tokens: int = 3) -> Planned:
    return Planned(index=index, at_s=at_s, output_tokens=num_tokens, prompt_ids=(1, 2))


def put(url: str, *requests: Planned, **more: object) -> list[Record]:
    """One after the other, over one session."""

    async def run() -> list[Record]:
        target = Target(url, "tiny", **{"timeout_s": TIMEOUT_S, **more})  # type: ignore[arg-type]
        start_s = monotonic()
        async with Session(target) as session:
            return [await ask_from(session, target, request, start_s) for request in requests]

    return asyncio.run(run())


def play(script: Play, **more: object) -> Record:
    with ScriptedOpenAI(script) as server:
        (record,) = put(server.url, planned(), **more)
    return record


def sends(*pieces: bytes) -> Play:
    async def script(call: Call) -> web.StreamResponse:
        return await call.send(*pieces)

    return script


def cuts(*pieces: bytes) -> Play:
    async def script(call: Call) -> web.StreamResponse:
        return await call.cut(*pieces)

    return script


def says(data: bytes) -> Play:
    async def script(call: Call) -> web.StreamResponse:
        return await call.raw(data)

    return script


def returns(make: Callable[[], web.Response]) -> Play:
    async def script(_: Call) -> web.StreamResponse:
        return make()

    return script


def test_an_answer_is_read_and_stamped() -> None:
    with ScriptedOpenAI() as server:
        record, other = put(server.url, planned(), planned(1), token_ids=True)
    assert (record.outcome, record.detail, record.status) == (Outcome.ANSWERED, "", 200)
    assert record.token_ids == [0, 1, 2]
    assert (record.num_tokens, record.prompt_tokens, record.output_tokens) == (3, 3, 3)
    stamps = [record.intended_s, record.sent_s, record.first_byte_s or 0.0]
    stamps += [arrival.at_s for arrival in record.arrivals] + [record.end_s]
    assert stamps == sorted(stamps)
    assert record.intended_s == record.sent_s
    assert record.end_s <= other.sent_s


def test_a_connection_is_used_again() -> None:
    with ScriptedOpenAI() as server:
        records = put(server.url, *map(planned, range(5)))
        assert server.num_connections == 1
    assert {record.outcome for record in records} == {Outcome.ANSWERED}


def test_a_connection_that_the_server_will_close_is_not_used_again() -> None:
    async def script(call: Call) -> web.StreamResponse:
        call.keep_alive = False
        return await call.send(token(), usage(1), DONE)

    with ScriptedOpenAI(script) as server:
        records = put(server.url, *(planned(index, num_tokens=1) for index in range(3)))
        assert server.num_connections == 3
    assert {record.outcome for record in records} == {Outcome.ANSWERED}


def test_a_connection_that_the_server_closed_meanwhile_is_not_used_again() -> None:
    with ScriptedOpenAI(keep_alive_s=0.05) as server:
        records = put(server.url, planned(0), planned(1, at_s=1.0))
        assert server.num_connections == 2
    assert {record.outcome for record in records} == {Outcome.ANSWERED}


def test_a_request_waits_for_its_moment_and_counts_from_it() -> None:
    with ScriptedOpenAI() as server:
        late, due = put(server.url, planned(0, at_s=-1.0), planned(1, at_s=0.4))
    assert late.intended_s == pytest.approx(-1.0)
    assert late.sent_s > 0.0
    assert due.intended_s == pytest.approx(0.4)
    assert due.sent_s >= due.intended_s


@pytest.mark.parametrize(
    ("script", "outcome", "words"),
    [
        (sends(token(), token(), usage(2), DONE), "wrong_length", "2 tokens instead of 3"),
        (sends(token(), token(), token(), usage(4), DONE), "wrong_usage", "usage says 4"),
        (sends(token(), event({"error": {"message": "node lost"}})), "error_in_stream", "node"),
        (sends(token(), token(), token()), "truncated", "the body ended without [DONE]"),
        (sends(token(), b"data: {"), "truncated", "within an event"),
        (sends(), "truncated", "the body ended without any event"),
        (sends(b'{"choices": []}'), "not_streamed", "one JSON body instead of a stream"),
        (sends(token(), b"data: {]\n\n"), "malformed", "no JSON"),
        (cuts(token(), token()), "truncated", "the connection was closed without [DONE], after 2"),
        (cuts(), "truncated", "the connection was closed without any event"),
        (says(b""), "truncated", "the connection was closed before an answer came"),
        (says(b"SSH-2.0-x\r\n"), "malformed", "the answer is not HTTP/1.1"),
        (returns(lambda: error("full", 429, retry_after_ms="20")), "refused", "full"),
        (returns(lambda: error("busy", 503, Retry_After="2")), "refused", "busy"),
        (returns(lambda: error("no such model", 404)), "client_error", "no such model"),
        (returns(lambda: error("a bug", 500)), "server_error", "a bug"),
        (returns(lambda: web.Response(text="oops", status=502)), "server_error", "oops"),
        (returns(lambda: web.json_response({"choices": []})), "not_streamed", "instead of"),
        (returns(lambda: error("odd", 200)), "not_streamed", "odd"),
        (returns(lambda: web.Response(text="hello")), "malformed", "text/plain"),
        (
            returns(lambda: web.Response(status=307, headers={"Location": "/x"})),
            "malformed",
            "status 307 to /x",
        ),
    ],
)
def test_what_is_wrong_with_an_answer_is_told(script: Play, outcome: str, words: str) -> None:
    record = play(script)
    assert record.outcome == outcome
    assert words in record.detail
    assert "\n" not in record.detail
    assert record.end_s >= record.sent_s


def test_a_refusal_says_when_to_come_back() -> None:
    assert play(returns(lambda: error("", 429, retry_after_ms="20"))).retry_after_s == 0.02
    assert play(returns(lambda: error("", 503, Retry_After="2"))).retry_after_s == 2.0
    assert play(returns(lambda: error("", 503, Retry_After="soon"))).retry_after_s is None


def test_tokens_that_came_before_a_failure_are_kept() -> None:
    record = play(cuts(token(), token()))
    assert record.num_tokens == 2
    assert record.first_byte_s is not None


def test_an_answer_that_does_not_end_in_time_is_given_up() -> None:
    async def script(call: Call) -> web.StreamResponse:
        await call.write(token())
        await asyncio.sleep(60.0)
        return await call.end()

    record = play(script, timeout_s=0.3)
    assert record.outcome is Outcome.TIMED_OUT
    assert (record.num_tokens, record.detail) == (1, "no end of the answer within 0.3 s")


def test_an_answer_is_over_with_its_last_event_whenever_its_body_ends() -> None:
    asked: list[asyncio.Event] = []

    async def script(call: Call) -> web.StreamResponse:
        asked.append(asyncio.Event())
        await call.write(token(), usage(1), DONE)
        if len(asked) == 1:
            await asked[0].wait()
        asked[0].set()
        return await call.end()

    with ScriptedOpenAI(script) as server:
        records = put(server.url, planned(0, num_tokens=1), planned(1, num_tokens=1))
        assert server.num_connections == 2
    assert {record.outcome for record in records} == {Outcome.ANSWERED}


def test_a_server_that_is_not_there_is_unreachable() -> None:
    with ScriptedOpenAI() as server:
        url = server.url
    sent, scheduled = put(url, planned(), planned(1, at_s=0.1))
    for record in (sent, scheduled):
        assert (record.outcome, record.detail) == (Outcome.UNREACHABLE, "connection refused")
        assert record.end_s >= record.sent_s >= record.intended_s


def test_a_client_without_files_left_does_not_blame_the_server() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def run(url: str) -> Record:
        target = Target(url, "tiny")
        async with Session(target) as session:
            files = [os.open(os.devnull, os.O_RDONLY)]
            resource.setrlimit(resource.RLIMIT_NOFILE, (files[0] + 1, limits[1]))
            try:
                with contextlib.suppress(OSError):
                    while True:  # until all numbers below the limit are taken
                        files.append(os.dup(files[0]))
                return await ask_from(session, target, planned(), 0.0)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                for file in files:
                    os.close(file)

    with ScriptedOpenAI() as server:
        record = asyncio.run(run(server.url))
    assert (record.outcome, record.detail) == (Outcome.NO_SOCKET, "too many open files")


def test_a_name_that_is_not_known_is_unreachable() -> None:
    (record,) = put("http://nowhere.invalid:80", planned())
    assert record.outcome is Outcome.UNREACHABLE
    assert record.detail


def test_a_stop_gives_up_what_is_under_way_and_what_waits() -> None:
    async def script(call: Call) -> web.StreamResponse:
        await call.write(token())
        await asyncio.sleep(60.0)
        return await call.end()

    async def run(url: str) -> list[Record | BaseException]:
        target = Target(url, "tiny")
        async with Session(target) as session:
            asked = [
                asyncio.ensure_future(ask_from(session, target, planned(at_s=at_s), 0.0))
                for at_s in (None, monotonic() + 60.0)
            ]
            await server.asked()
            session.stop()
            return await asyncio.gather(*asked, return_exceptions=True)

    with ScriptedOpenAI(script) as server:
        under_way, waiting = asyncio.run(run(server.url))
    assert isinstance(under_way, Record)
    assert under_way.outcome is Outcome.STOPPED
    assert under_way.detail == "the load was stopped before the answer ended"
    assert isinstance(waiting, Stopped)


def test_a_stop_while_a_connection_is_opened_is_no_failure_of_the_server() -> None:
    async def run() -> Record:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            silent.setblocking(False)
            url = f"https://127.0.0.1:{silent.getsockname()[1]}"
            target = Target(url, "tiny", timeout_s=TIMEOUT_S)
            async with Session(target) as session:
                asked = asyncio.ensure_future(ask_from(session, target, planned(), 0.0))
                # Never a word to it, so that the TLS handshake goes on.
                accepted, _ = await asyncio.get_running_loop().sock_accept(silent)
                with accepted:
                    session.stop()
                    return await asked

    assert asyncio.run(run()).outcome is Outcome.STOPPED


def test_a_key_is_sent_and_a_long_prompt_arrives_whole() -> None:
    request = Planned(index=0, at_s=None, output_tokens=1, prompt_ids=tuple(range(100_000)))
    with ScriptedOpenAI() as server:
        (record,) = put(server.url, request, api_key="secret")
        assert server.headers[0]["Authorization"] == "Bearer secret"
        assert server.bodies[0]["prompt"] == list(range(100_000))
    assert record.outcome is Outcome.ANSWERED


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed one for 127.0.0.1, with its key, in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    words = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=127.0.0.1"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(path), "-out", "-"]
    made = subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=60)
    with path.open("ab") as file:
        file.write(made.stdout)
    return path


def tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    return context


def test_a_certificate_that_nobody_vouches_for_is_refused_with_what_to_do(
    certificate: Path,
) -> None:
    with ScriptedOpenAI(tls=tls(certificate)) as server:
        (refused,) = put(server.url, planned())
        (trusted,) = put(server.url, planned(), ca_file=str(certificate))
        (unchecked,) = put(server.url, planned(), insecure=True)
        (plain,) = put(server.url.replace("https", "http"), planned())
    assert refused.outcome is Outcome.UNREACHABLE
    assert "self-signed" in refused.detail
    assert "--ca-file" in refused.detail
    assert "--insecure" in refused.detail
    assert trusted.outcome is unchecked.outcome is Outcome.ANSWERED
    assert plain.outcome is not Outcome.ANSWERED


def test_tls_with_a_server_that_has_none_is_told() -> None:
    with ScriptedOpenAI(answer) as server:
        (record,) = put(server.url.replace("http", "https"), planned())
    assert record.outcome is Outcome.UNREACHABLE
    assert "http:// instead of https://" in record.detail


def test_waiting_for_a_connection_counts_in_a_closed_loop_too(certificate: Path) -> None:
    waited_s = 0.3

    async def run(port: int) -> Record:
        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(waited_s)
            from_server, to_server = await asyncio.open_connection("127.0.0.1", port)
            pumps = (_pump(reader, to_server), _pump(from_server, writer))
            await asyncio.gather(*pumps)
            over.set()

        over = asyncio.Event()
        async with await asyncio.start_server(relay, "127.0.0.1", 0) as slow:
            url = f"https://127.0.0.1:{slow.sockets[0].getsockname()[1]}"
            target = Target(url, "tiny", insecure=True, timeout_s=TIMEOUT_S)
            async with Session(target) as session:
                record = await ask_from(session, target, planned(), monotonic())
            await over.wait()
            return record

    with ScriptedOpenAI(tls=tls(certificate)) as server:
        record = asyncio.run(run(int(server.url.rpartition(":")[2])))
    assert record.outcome is Outcome.ANSWERED
    assert record.intended_s == record.sent_s
    assert record.arrivals[0].at_s - record.intended_s >= waited_s


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until either end is gone."""
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
