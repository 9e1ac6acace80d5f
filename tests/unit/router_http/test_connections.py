"""Connections that do nothing: none of them keeps others from being served."""

import asyncio
import contextlib
import gc
import gzip
import json
import os
import resource
import signal
import socket
import urllib.request
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import psutil
import pytest

from baton.protocol.config import ClusterConfig, RouterConfig
from baton.router.http import connections
from baton.router.http.connections import MAX_HEAD_BYTES, MIB, Connection
from baton.runtime.clock import monotonic
from tests.support.http_bench import posted, served, well
from tests.support.router_process import WAIT_S, ask, wait_until_ready, with_toy_nodes
from tests.support.scripted_nodes import toy_answer

HALF = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n"


def few(num: int) -> ClusterConfig:
    return ClusterConfig(router=RouterConfig(max_connections=num))


def with_small_windows(client: socket.socket) -> None:
    """Use short segments, or the kernel takes megabytes of output for a reader on loopback."""
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)


def is_live(url: str) -> bool:
    with urllib.request.urlopen(f"{url}/live", timeout=WAIT_S) as reply:
        return bool(reply.status == 200)


def test_a_flood_of_half_sent_requests_leaves_the_probes_answered(config, start):
    router = start(config, files=(64, 128))
    url = router.wait_for_url()
    limits = Path(f"/proc/{router.process.pid}/limits").read_text()
    assert ["128", "128"] in [line.split()[3:5] for line in limits.splitlines()]
    host, port = url.removeprefix("http://").split(":")
    flood = []
    try:
        for _ in range(400):
            connection = socket.create_connection((host, int(port)), WAIT_S)
            connection.sendall(HALF)
            flood.append(connection)
            if len(flood) % 100 == 0:
                assert is_live(url)
        assert is_live(url)
    finally:
        for connection in flood:
            connection.close()
    router.end_well()
    assert len(router.lines) < 10, router.lines


def test_too_few_descriptors_for_probes_are_refused_at_the_start(config, start):
    router = start(config, files=(64, 64))
    router.wait_for("needs 128: raise `ulimit -n`")
    assert router.process.wait(WAIT_S) == 1


def test_running_out_of_descriptors_is_one_line_and_not_the_end(config, start):
    router = start(config)
    url = router.wait_for_url()
    pid = router.process.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    host, port = url.removeprefix("http://").split(":")
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
    with socket.create_connection((host, int(port)), WAIT_S):
        assert "ulimit -n" in router.wait_for("cannot be accepted")
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        assert is_live(url)
    router.end_well()
    assert sum("cannot be accepted" in line for line in router.lines) == 1


@served(config=ClusterConfig(router=RouterConfig(idle_s=0.2)))
async def test_idle_and_half_sent_connections_end_but_not_those_with_a_request(
    bench, engine
):
    reader, writer = await bench.dial()
    writer.write(posted({"prompt": [5], "stream": True}))
    stream = await engine.stream()
    for sent in (b"", HALF, b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"):
        other, to_other = await bench.dial()
        to_other.write(sent)
        received = await other.read()
        assert received.startswith(b"HTTP/1.1 200") == sent.startswith(b"GET /live")
        to_other.close()
    engine.say(stream, " hello", "stop")
    stream.finish()
    assert b"[DONE]" in await reader.readuntil(b"[DONE]")
    writer.close()


def test_a_reader_of_a_byte_per_second_costs_the_others_nothing_and_is_cut_off(
    config, start
):
    """The others get whole answers from the same nodes as long as it is there."""
    limited = msgspec.structs.replace(config.router, unread_s=2.0)
    router = start(msgspec.structs.replace(config, router=limited))
    url = router.wait_for_url()
    host, port = url.removeprefix("http://").split(":")
    prompt = [5, 6, 7]
    body = {"prompt": prompt, "max_tokens": 50, "return_token_ids": True}

    def ask_beside_it() -> int:
        wait_until_ready(url)
        with socket.socket() as slow:
            with_small_windows(slow)
            slow.settimeout(WAIT_S)
            slow.connect((host, int(port)))
            slow.sendall(
                posted({"prompt": prompt, "n": 32, "max_tokens": 190, "stream": True})
            )
            assert slow.recv(12) == b"HTTP/1.1 200"  # its answer has begun
            began_s = next_s = monotonic()
            num_whole = 0
            while not is_cut.done():
                assert monotonic() < began_s + WAIT_S
                answer = json.loads(ask(url, body))
                assert answer["choices"][0]["token_ids"] == toy_answer(prompt, 50)
                num_whole += 1
                if monotonic() >= next_s:
                    next_s += 1.0
                    slow.recv(1)
        return num_whole

    with ThreadPoolExecutor(1) as thread:
        # Its socket does not show the cut until it has read all that the kernel holds for it.
        is_cut = thread.submit(router.wait_for, "it did not read its response")
        try:
            assert asyncio.run(with_toy_nodes(config, ask_beside_it)) > 0
        finally:
            os.kill(router.process.pid, signal.SIGTERM)
    router.end()
    assert router.process.returncode == 0, router.lines


@served()
async def test_a_client_that_leaves_when_its_answer_begins_is_no_fault_of_ours(
    bench, engine, caplog
):
    _, writer = await bench.dial()
    writer.write(posted({"prompt": [5], "stream": True}))
    stream = await engine.stream()
    made = [one for one in gc.get_objects() if type(one) is Connection]
    (transport,) = [one.transport for one in made if one.transport is not None]
    engine.say(stream, " hello")
    transport.abort()  # before the handler has its turn
    await engine.is_closed()
    writer.close()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    assert (
        'outcome="client_gone",path="none"} 1.0' in (await bench.get("/metrics")).text
    )
    assert "Traceback" not in caplog.text


LIVE = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
IS_LIVE = b'{"status":"live"}'


@pytest.mark.parametrize("is_early", [True, False])
@served()
async def test_requests_behind_a_stream_are_answered_after_it_in_order(
    is_early, bench, engine
):
    reader, writer = await bench.dial()
    behind = LIVE + LIVE.replace(b"/live", b"/none") + LIVE[:9]
    writer.write(posted({"prompt": [5], "stream": True}) + behind * is_early)
    stream = await engine.stream()
    engine.say(stream, " hello")
    await reader.readuntil(b" hello")
    writer.write(behind * (not is_early))
    engine.say(stream, " world", "stop")
    stream.finish()
    await reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")
    await reader.readuntil(IS_LIVE)
    assert b" 404 " in await reader.readuntil(b"unknown_url")
    writer.write(LIVE[9:])
    await reader.readuntil(IS_LIVE)
    writer.close()


@served(config=few(2))
async def test_the_longest_idle_connection_makes_room_for_a_new_one(bench):
    (first, to_first), (second, to_second) = await bench.dial(), await bench.dial()
    to_second.write(HALF)
    assert (await bench.get("/live")).status == 200
    assert await first.read() == b""
    to_second.write(b"\r\n")
    assert (await second.readline()).split()[1] == b"200"
    for writer in (to_first, to_second):
        writer.close()


@served(config=few(2))
async def test_connections_above_the_limit_get_probes_only(bench, engine):
    busy = [await bench.dial() for _ in range(2)]
    for number, (_, writer) in enumerate(busy):
        writer.write(posted({"prompt": [5], "stream": True}))
        await engine.stream(number)
    # Makes no room for others, as it is above the limit itself.
    busy.append(await bench.dial())
    for path in ("/live", "/health", "/metrics"):
        assert (await bench.get(path)).status == 200
    refused = await bench.post({"prompt": [5]})
    assert (refused.status, refused.error["code"]) == (503, "too_many_connections")
    assert "Retry-After" in refused.headers
    for stream in engine.streams:
        engine.say(stream, " hello", "stop")
        stream.finish()
    for reader, writer in busy:
        if (reader, writer) != busy[-1]:
            await reader.readuntil(b"[DONE]")
        writer.close()
    engine.script = lambda stream: stream.finish()
    while (await bench.post({"prompt": [5]})).status == 503:
        pass


@pytest.mark.parametrize("reads", [False, True])
@served(config=ClusterConfig(router=RouterConfig(unread_s=0.4)))
async def test_a_client_that_reads_its_answer_too_slowly_is_cut_off(
    reads, bench, engine
):
    host, port = bench.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        with_small_windows(client)
        client.connect((host, int(port)))
        client.sendall(posted({"prompt": [5], "stream": True}))
        client.setblocking(False)
        stream = await engine.stream()
        while not engine.closed:
            stream.push(0, [5] * 5_000, None)
            if reads:
                with contextlib.suppress(BlockingIOError):
                    client.recv(1)
            await asyncio.sleep(0.01)
    assert (await bench.get("/live")).status == 200


def large_head(num_bytes: int) -> bytes:
    """A head without its end, of fields that are short enough each."""
    fields = b"".join(
        b"X-%d: %b\r\n" % (i, b"y" * 1000) for i in range(num_bytes // 1000 + 1)
    )
    return HALF + fields[: num_bytes - len(HALF)]


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "available_bytes", lambda: 0)
    monkeypatch.setattr(connections, "MIN_WAITING", 8)


@pytest.mark.usefixtures("no_memory")
@served()
async def test_little_memory_bounds_connections_without_a_request_alone(bench, engine):
    streaming = []
    for number in range(9):
        streaming.append(await bench.dial())
        streaming[-1][1].write(posted({"prompt": [5], "stream": True}))
        engine.say(await engine.stream(number), " hello")
    waiting = [await bench.dial() for _ in range(9)]
    assert await waiting[0][0].read() == b""
    for stream in engine.streams:
        engine.say(stream, " world", "stop")
        stream.finish()
    for reader, _ in streaming:
        await reader.readuntil(b"[DONE]")
    for _, writer in streaming + waiting:
        writer.close()


@served()
async def test_a_head_may_be_large_but_one_without_an_end_is_refused(bench, caplog):
    caplog.set_level("INFO")
    reader, writer = await bench.dial()
    writer.write(large_head(MAX_HEAD_BYTES - 10) + b"\r\n\r\n")
    assert (await reader.readline()).split()[1] == b"200"
    writer.close()
    reader, writer = await bench.dial()
    writer.write(large_head(10 * MAX_HEAD_BYTES))
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.split()[1] == b"431"
    assert b"X-Request-Id: req-" in head
    assert json.loads(body)["error"]["code"] == "headers_too_large"
    writer.close()
    assert 'status="431"' in (await bench.get("/metrics")).text
    assert "a malformed request was refused" in caplog.text


@served()
async def test_what_http_does_not_allow_is_refused_without_repeating_secrets(bench):
    wrong = [
        (b"Authorization: Bearer " + b"secret" * 3000, b"431", "headers_too_large"),
        (b"".join(b"X-%d: secret\r\n" % i for i in range(140)), b"400", "invalid_http"),
        (b"Content-Type: a\r\ncontent-type: a", b"400", "invalid_http"),
        (b"Authorization: Bearer secret\0", b"400", "invalid_http"),
        (b"Expect: secret", b"417", "expectation_failed"),
    ]
    for fields, status, code in wrong:
        reader, writer = await bench.dial()
        writer.write(HALF + fields + b"\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert (head.split()[1], json.loads(body)["error"]["code"]) == (status, code)
        assert b"secret" not in body
        writer.close()


@served(script=well)
async def test_many_requests_at_once_are_answered_in_order_however_large_they_are(
    bench,
):
    """More bytes than a head may have can be many requests, or one with a body."""
    large = posted({"prompt": [5], "user": "x" * 3 * MAX_HEAD_BYTES})
    reader, writer = await bench.dial()
    writer.write(large + LIVE * 2000 + large + LIVE)
    for number, response in (
        (1, b'"usage"'),
        (2000, IS_LIVE),
        (1, b'"usage"'),
        (1, IS_LIVE),
    ):
        for _ in range(number):
            await reader.readuntil(response)
    writer.close()


def compressed(data: bytes, window: int = zlib.MAX_WBITS) -> bytes:
    return zlib.compress(data, wbits=window)


@served(script=well)
async def test_bodies_may_be_compressed_but_only_so_far(bench):
    body = json.dumps({"prompt": [5], "user": "x" * 100_000}).encode()
    halves = gzip.compress(body[:50_000]) + gzip.compress(body[50_000:])
    for data, encoding in (
        (gzip.compress(body), "gzip"),
        (halves, "gzip"),
        (compressed(body), "deflate"),
    ):
        reply = await bench.post(data, **{"Content-Encoding": encoding})
        assert reply.status == 200, reply.text
    wrong = [
        (gzip.compress(body)[:-9], "gzip", 400, "invalid_body"),
        (body, "gzip", 400, "invalid_body"),
        (body, "br", 415, "unsupported_media_type"),
        (gzip.compress(b" " * 64 * MIB), "gzip", 413, "body_too_large"),
    ]
    for data, encoding, status, code in wrong:
        reply = await bench.post(data, **{"Content-Encoding": encoding})
        assert (reply.status, reply.error["code"]) == (status, code)


@served()
async def test_a_body_of_tiny_chunks_is_refused_before_it_is_whole(bench):
    reader, writer = await bench.dial()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 50_000)
    assert (await reader.readline()).split()[1] == b"400"
    assert b"chunks" in await reader.readuntil(b"}}")
    writer.close()


def test_unfinished_heads_hold_little_memory(config, start):
    router = start(config)
    url = router.wait_for_url()
    host, port = url.removeprefix("http://").split(":")
    process = psutil.Process(router.process.pid)
    before = process.memory_info().rss
    flood = [socket.create_connection((host, int(port)), WAIT_S) for _ in range(300)]
    try:
        for connection in flood:
            connection.sendall(large_head(MAX_HEAD_BYTES - 1000))
        assert is_live(url)
        assert process.memory_info().rss - before < len(flood) * 64 * 1024
        for connection in flood[:100]:
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                connection.send(large_head(MIB))
        assert is_live(url)
        assert process.memory_info().rss - before < len(flood) * 64 * 1024
    finally:
        for connection in flood:
            connection.close()
    router.end_well()
