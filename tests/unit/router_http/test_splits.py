"""However bytes arrive, requests and responses are paired as by plain aiohttp.

One connection gets the same bytes in the same pieces from the router's server and from an
application of a few lines. Both must answer the same requests, in the same order, and leave the
connection in the same state.
"""

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Callable
from itertools import pairwise

from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from baton.router.http.submission import request_id_of
from tests.support.http_bench import HttpBench, ScriptedEngine, well

RESPONSE = re.compile(rb"HTTP/1\.[01] (\d{3})[^\n]*\n((?:[^\r\n]+\r\n)*)\r\n")
NAME = re.compile(rb"(?i)x-request-id: ([^\r]*)")
# The router's answer to what is no request has a name, and plain aiohttp's has none.
NO_REQUEST = b'{"error":{"message":"the request is not valid HTTP'
SETTLED_S = 15.0

COMPLETION = b'{"prompt": [5, 6], "max_tokens": 3}'
STREAM = b'{"prompt": [5, 6], "max_tokens": 3, "stream": true}'
HIDDEN = b"GET /live HTTP/1.1\r\nHost: x\r\nX-Request-Id: hidden\r\n\r\n"
JSON = b"Content-Type: application/json\r\n"


def plain(line: bytes, headers: bytes = b"", body: bytes = b"") -> bytes:
    length = b"Content-Length: %d\r\n" % len(body) if body else b""
    return (
        line
        + b" HTTP/1.1\r\nHost: x\r\nX-Request-Id: NAME\r\n"
        + headers
        + length
        + b"\r\n"
        + body
    )


def chunked(line: bytes, body: bytes, headers: bytes = b"") -> bytes:
    half = len(body) // 2
    chunks = b"".join(
        b"%x\r\n%s\r\n" % (len(one), one) for one in (body[:half], body[half:])
    )
    return (
        plain(line, headers + b"Transfer-Encoding: chunked\r\n") + chunks + b"0\r\n\r\n"
    )


ASKED = (
    plain(b"GET /live"),
    plain(b"HEAD /live"),
    plain(b"GET /nowhere", body=HIDDEN),
    plain(b"GET /metrics"),
    plain(b"GET /metrics", body=HIDDEN),
    chunked(b"GET /metrics", HIDDEN),
    plain(b"POST /v1/completions", JSON, COMPLETION),
    plain(b"POST /v1/completions", JSON, STREAM),
    plain(b"POST /v1/completions", b"Content-Type: \xff\r\n", COMPLETION),
    chunked(b"POST /v1/completions", STREAM, JSON),
    plain(b"POST /v1/completions", JSON, b"{" + HIDDEN),
    plain(b"POST /v1/completions", JSON + b"Connection: close\r\n", COMPLETION),
    plain(b"POST /v1/completions", JSON + b"Expect: 100-continue\r\n", COMPLETION),
    plain(b"POST /v1/completions", JSON + b"Expect: secret\r\n", COMPLETION),
    plain(b"GET /live").replace(b"HTTP/1.1", b"HTTP/1.0"),
    plain(b"GET /live", b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n")
    + b"0\r\n\r\n",
    plain(b"GET /live", b"Content-Length: -1\r\n"),
    plain(b"GET /live", b"Content-Length: 1\r\nContent-Length: 2\r\n") + b"ab",
    plain(b"GET /live", b" folded: x\r\n"),
    b"garbage\r\n\r\n",
    b"\r\n",
)
CUTS = st.lists(st.integers(0, 2000), max_size=6)  # where the bytes are cut
DAMAGE = st.one_of(
    st.none(), st.tuples(st.integers(0, 2000), st.binary(min_size=1, max_size=3))
)

NewConnection = Callable[[], asyncio.Protocol]
Answered = tuple[list[bytes], bool]


class Wire(asyncio.Transport):
    """The client's end of a connection: what the server sends, and whether it has closed."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.sent = bytearray()
        self.is_open = True
        self._protocol = protocol
        self._socket = socket.socket()
        protocol.connection_made(self)

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._socket if name == "socket" else default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.is_open:
            self.sent += data

    def is_closing(self) -> bool:
        return not self.is_open

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._socket.close()
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    abort = close

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        raise AssertionError("nobody takes a connection over")

    def receive(self, data: bytes) -> None:
        if not isinstance(self._protocol, asyncio.BufferedProtocol):
            if self.is_open:
                self._protocol.data_received(data)
            return
        while data and self.is_open:
            buffer = self._protocol.get_buffer(-1)
            part = data[: len(buffer)]
            data = data[len(buffer) :]
            buffer[: len(part)] = part
            self._protocol.buffer_updated(len(part))

    @property
    def answered(self) -> Answered:
        """Return the name of each request with an answer, or its status if it has no name."""
        names = []
        for response in RESPONSE.finditer(self.sent):
            status = response[1]
            headers = response[2]
            is_no_request = self.sent.startswith(NO_REQUEST, response.end())
            name = None if is_no_request else NAME.search(headers)
            if status != b"100":
                names.append(status if name is None else name[1])
        return [
            b"" if name.startswith(b"req-") else name for name in names
        ], self.is_open


async def answer(request: web.Request) -> web.Response:
    """Read the body of what the router reads, and say which request this was."""
    if request.method == "POST":
        await request.read()
    return web.Response(headers={"X-Request-Id": request_id_of(request)})


async def close_if_refused(_: web.Request, response: web.StreamResponse) -> None:
    """Close the connection after 417, as the router does.

    RFC 9110 (10.1.1) leaves this to the server. The client may still wait with its body, and then
    its next request would be taken for that body. Plain aiohttp reads on.
    """
    if isinstance(response, web.HTTPExpectationFailed):
        response.force_close()
        response.headers["X-Request-Id"] = "req-refused"


async def answers(pieces: list[bytes], servers: list[NewConnection]) -> list[Answered]:
    """Return what each server answers to these pieces, in order, and whether it then closes."""
    loop = asyncio.get_running_loop()
    wires = [Wire(new()) for new in servers]
    for piece in pieces:
        for wire in wires:
            wire.receive(piece)
        await asyncio.sleep(0)
    give_up_s = loop.time() + SETTLED_S
    num_calm_turns = 0  # in which an answer too many would come
    while num_calm_turns < 20 and loop.time() < give_up_s:
        await asyncio.sleep(0)
        is_calm = wires[0].answered == wires[1].answered
        num_calm_turns = num_calm_turns + 1 if is_calm else 0
    found = [wire.answered for wire in wires]
    for wire in wires:
        wire.close()
    return found


@contextlib.asynccontextmanager
async def two_servers() -> AsyncIterator[list[NewConnection]]:
    """Yield what opens a connection of the router's server, and of plain aiohttp."""
    engine = ScriptedEngine(well)
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    application.on_response_prepare.append(close_if_refused)
    runner = web.AppRunner(application, handler_cancellation=True, access_log=None)
    await runner.setup()
    assert runner.server is not None
    try:
        async with HttpBench(engine) as bench:
            yield [bench.server._new_connection, runner.server]
    finally:
        await runner.cleanup()
        engine.close()


def test_any_bytes_in_any_pieces_are_paired_as_by_plain_aiohttp():
    with asyncio.Runner() as runner:
        context = two_servers()
        servers = runner.run(context.__aenter__())

        @given(st.lists(st.sampled_from(ASKED), min_size=1, max_size=4), CUTS, DAMAGE)
        def check(
            asked: list[bytes], cuts: list[int], damage: tuple[int, bytes] | None
        ) -> None:
            whole = b"".join(
                one.replace(b"NAME", b"%d" % i) for i, one in enumerate(asked)
            )
            if damage is not None:
                at = damage[0] % len(whole)
                whole = whole[:at] + damage[1] + whole[at + len(damage[1]) :]
            bounds = [0, *sorted(cut % len(whole) for cut in cuts), len(whole)]
            pieces = [
                whole[start:end] for start, end in pairwise(bounds) if start < end
            ]
            ours, theirs = runner.run(answers(pieces, servers))
            assert ours == theirs

        try:
            check()
        finally:
            runner.run(context.__aexit__(None, None, None))
