"""HTTP in memory: one port that all routers share, and the connections of its clients."""

import asyncio
import errno
import json
import random
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from tests.sim.clock import Process, SimLoop
from tests.sim.network import world_call_at

LATENCY_S = 0.0003
ACCEPT_AGAIN_S = 1.0
P_NO_BUFFER = 0.1  # that a write fails while memory is short
HIGH_WATER = 1024  # bytes that a client may leave unread before its router waits
SOCKET = type("Socket", (), {"family": socket.AF_UNIX, "setsockopt": lambda *_: None})()


class Port:
    """The kernel's side of a port: it gives each connection to one process that listens."""

    def __init__(self, loop: SimLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.listening: dict[Process, Listening] = {}
        # Whose connections the client has not closed.
        self.exchanges: dict[Exchange, None] = {}
        loop.listen = lambda process, make: Listening(self, process, make)

    def connect(self, exchange: "Exchange") -> bool:
        """Open a connection if any process listens, if only a frozen one."""
        if self.listening:
            self.exchanges[exchange] = None
            self.rng.choice(list(self.listening.values())).connect(exchange)
        return bool(self.listening)

    def died(self, process: Process) -> None:
        self.listening.pop(process, None)
        for exchange in self.exchanges:
            if exchange.process is process:
                exchange.send(None)


class Listening:
    """What a process has of the port. It is also the one socket of it."""

    def __init__(
        self, port: Port, process: Process, make: Callable[[], asyncio.Protocol]
    ) -> None:
        self._port = port
        self._process = process
        self._make = make
        self._unaccepted: dict[Exchange, None] = {}
        port.listening[process] = self

    @property
    def sockets(self) -> tuple["Listening"]:
        return (self,)

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 80

    @contextmanager
    def dup(self) -> "Iterator[Listening]":
        yield self

    def listen(self, backlog: int) -> None: ...

    def close(self) -> None:
        if self._port.listening.pop(self._process, None) is not None:
            for exchange in self._unaccepted:
                exchange.send(None)
            self._unaccepted.clear()

    def connect(self, exchange: "Exchange") -> None:
        self._unaccepted[exchange] = None
        exchange.process = self._process
        self._process.call(lambda: self._accept(exchange))

    def _accept(self, exchange: "Exchange") -> None:
        if self._process.is_out_of_descriptors:  # asyncio tries again after this time
            self._process.loop.call_later(ACCEPT_AGAIN_S, self._accept, exchange)
        elif exchange in self._unaccepted:
            del self._unaccepted[exchange]
            exchange.wire = Wire(self._process.loop, self._make(), exchange)


class Wire(asyncio.Transport):
    """A router's end of a connection."""

    def __init__(
        self, loop: SimLoop, protocol: asyncio.Protocol, exchange: "Exchange"
    ) -> None:
        super().__init__({"socket": SOCKET})
        self._loop = loop
        self._protocol = protocol
        self._exchange = exchange
        self._is_closing = self._is_full = False
        protocol.connection_made(self)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closing or self._loop.is_closed():
            return
        process = self._exchange.process
        if (
            process is not None
            and process.is_out_of_memory
            and self._exchange.fails_to_send()
        ):
            self.lose(OSError(errno.ENOBUFS, "no buffer space is left"))
            return
        self._exchange.send(bytes(data))
        self.flow()

    def is_closing(self) -> bool:
        return self._is_closing

    def get_write_buffer_size(self) -> int:
        return self._exchange.num_unread

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def close(self) -> None:
        self.lose(None)

    abort = close

    def lose(self, error: Exception | None) -> None:
        """End the connection, from either side."""
        if not self._is_closing and not self._loop.is_closed():
            self._is_closing = True
            self._exchange.send(None)
            self._loop.call_soon(self._protocol.connection_lost, error)

    def take(self, data: bytes) -> None:
        if not self._is_closing:
            self._protocol.data_received(data)

    def flow(self) -> None:
        """Tell the router whether the client reads."""
        is_full = self.get_write_buffer_size() > HIGH_WATER
        if is_full != self._is_full and not self._is_closing:
            self._is_full = is_full
            (
                self._protocol.pause_writing
                if is_full
                else self._protocol.resume_writing
            )()


class Exchange:
    """One request on a connection of its own, and its response as the client reads it.

    `on_event` gets the id and the data of each server-sent event. `ended` is done once the response
    is whole, or the connection is lost.
    """

    def __init__(
        self,
        port: Port,
        start: str,
        on_event: Callable[[str, bytes], None],
        body: object,
        headers: Mapping[str, str],
    ) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        fields = {"Host": "baton", "Content-Length": len(data), **headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._port = port
        self._on_event = on_event
        self._request = f"{start} HTTP/1.1\r\n{lines}\r\n".encode() + data
        self.process: Process | None = None  # that has the connection
        self.wire: Wire | None = None  # once it has accepted it
        self.ended: asyncio.Future[None] = port.loop.create_future()
        self.status = 0
        self.body = b""  # what has come of it, and is not of an event
        self.is_whole = False
        self._is_stream = self._is_chunked = False
        self._num_bytes = 0  # of a body that is not chunked
        self._unread = b""
        self._under_way: deque[bytes | None] = deque()
        self._is_dozing = self._is_left = False
        self.num_unread = 0  # bytes that wait for a client that dozes

    def doze(self, seconds: float) -> None:
        """Read nothing for a while."""
        self._is_dozing = True
        world_call_at(self._port.loop, self._port.loop.time() + seconds, self._wake)

    def _wake(self) -> None:
        self._is_dozing = False
        self.num_unread = 0
        while self._under_way:
            self._receive()
        self._to_router(LATENCY_S, Wire.flow)

    def begin(self) -> bool:
        """Connect and ask. Return whether any process listens."""
        is_open = self._port.connect(self)
        self._to_router(LATENCY_S, lambda wire: wire.take(self._request))
        return is_open

    def fails_to_send(self) -> bool:
        """Draw whether a router that has no memory left fails to send."""
        return self._port.rng.random() < P_NO_BUFFER

    def leave(self, after_s: float = 0.0) -> None:
        """Close the connection. A client that vanishes is noticed `after_s` later."""
        self._port.exchanges.pop(self, None)
        self._is_left = True
        error = TimeoutError() if after_s else None
        self._to_router(LATENCY_S + after_s, lambda wire: wire.lose(error))

    def _to_router(self, after_s: float, act: Callable[[Wire], None]) -> None:
        loop = self._port.loop
        process = self.process

        def arrive() -> None:
            if self.wire is not None:
                act(self.wire)

        if process is not None:
            world_call_at(loop, loop.time() + after_s, lambda: process.call(arrive))

    def send(self, data: bytes | None) -> None:
        """Bring bytes, or the end of the connection, to the client."""
        self._under_way.append(data)
        if self._is_dozing:
            self.num_unread += len(data or b"")
            return
        loop = self._port.loop
        world_call_at(loop, loop.time() + LATENCY_S, self._arrive)

    def _arrive(self) -> None:
        if self._under_way and not self._is_dozing:
            self._receive()

    def _receive(self) -> None:
        if (data := self._under_way.popleft()) is not None and not self.ended.done():
            self._unread += data
            self._read()
        if (data is None or self.is_whole) and not self.ended.done():
            self.ended.set_result(None)

    def _read(self) -> None:
        if not self.status:
            head, end, rest = self._unread.partition(b"\r\n\r\n")
            if not end:
                return
            self._unread, head = rest, head.lower()
            self.status = int(head.split(b" ", 2)[1])
            self._is_chunked = b"transfer-encoding: chunked" in head
            self._is_stream = b"text/event-stream" in head
            if not self._is_chunked:
                length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
                self._num_bytes = int(length or 0)
        if self._is_chunked:
            self._read_chunks()
        else:
            self.body = self._unread
            self.is_whole = len(self.body) >= self._num_bytes
        while self._is_stream and b"\n\n" in self.body:
            event, _, self.body = self.body.partition(b"\n\n")
            fields = dict(
                line.split(b": ", 1) for line in event.split(b"\n") if line[:1] != b":"
            )
            if b"data" in fields and not self._is_left:
                self._on_event(fields.get(b"id", b"").decode(), fields[b"data"])

    def _read_chunks(self) -> None:
        while b"\r\n" in self._unread and not self.is_whole:
            size, _, rest = self._unread.partition(b"\r\n")
            length = int(size, 16)
            if len(rest) < length + 2:
                return
            self.body += rest[:length]
            self._unread, self.is_whole = rest[length + 2 :], length == 0
