"""The clients' connections: how many there may be, and when an idle one is closed.

`Server` makes one `Connections` and gives it to the event loop as the factory of protocols. The
number of connections is bounded by the descriptors of the process. When they run out, a new
connection replaces the one that has waited longest without a whole request, so probes of /live are
answered even among many half-sent requests. A client that does not read is cut off. A client that
has yet to agree on TLS counts like a client that has sent no request.
"""

import asyncio
import logging
import resource
import socket
import ssl
from asyncio.sslproto import SSLProtocol

from aiohttp import web

from baton.protocol.config import RouterConfig
from baton.runtime.descriptors import RareWarning
from baton.runtime.log import logger

# Descriptors that are reserved for nodes, files and connections that are being closed.
_OTHER_DESCRIPTORS = 512
# Connections above the limit, on which only /live, /health and /metrics are answered.
SPARE = 16
_MIN_CONNECTIONS = 8
# How long a client may take to agree on TLS.
HANDSHAKE_S = 10
# A client that has unread output must read this much of it per second on average.
MIN_BYTES_PER_S = 256
# The offset of `tcpi_bytes_acked` in Linux's struct tcp_info (include/uapi/linux/tcp.h).
_BYTES_ACKED = slice(120, 128)

log = logger("router")


def affordable(max_connections: int) -> int:
    """Return `max_connections`, or less if the process may open too few descriptors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return max_connections
    others = min(_OTHER_DESCRIPTORS, limit // 2)
    return min(max_connections, max(limit - others - SPARE, _MIN_CONNECTIONS))


class ReadingPace:
    """Judges how quickly a client takes the output that waits for it."""

    __slots__ = ("_checked_s", "_num_acked", "_unread_s")

    def __init__(self, unread_s: float, now_s: float, num_acked: int) -> None:
        """Begin at `now_s`, when the client's host has taken `num_acked` bytes."""
        self._unread_s = unread_s
        self._checked_s, self._num_acked = now_s, num_acked

    def is_too_slow(self, now_s: float, num_acked: int) -> bool:
        """Return whether the client has taken too little, which is judged once in `unread_s`."""
        passed_s = now_s - self._checked_s
        if passed_s < self._unread_s:
            return False
        num_new, self._checked_s, self._num_acked = num_acked - self._num_acked, now_s, num_acked
        return num_new < passed_s * MIN_BYTES_PER_S


class Connection(web.RequestHandler):
    """One connection of a client. `is_spare` means that it came above the limit."""

    __slots__ = (
        "_connections", "_pace", "_socket", "handshake", "is_spare", "open_transport",
    )  # fmt: skip

    def __init__(
        self,
        connections: "Connections",
        manager: web.Server,
        loop: asyncio.AbstractEventLoop,
        log: logging.Logger,
        idle_s: float,
    ) -> None:
        super().__init__(
            manager,
            loop=loop,
            keepalive_timeout=idle_s,
            logger=log,
            access_log=None,  # type: ignore[arg-type]  # aiohttp takes None, but does not say so
        )
        self._connections = connections
        self.handshake: Handshake | None = None
        self.is_spare = False
        self.open_transport: asyncio.Transport | None = None
        self._socket: socket.socket | None = None
        self._pace: ReadingPace | None = None  # while there is output to read

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.open_transport = transport
        self._socket = transport.get_extra_info("socket")
        if self.handshake is not None:
            self._connections.closed(self.handshake)
            self.handshake = None
        self.is_spare = self._connections.opened(self)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.open_transport = None
        self._connections.closed(self)
        super().connection_lost(exc)

    def began(self) -> None:
        """Note that a whole request has arrived, so this connection need not make room."""
        self._connections.began(self)

    def ended(self) -> None:
        """Note that the request was answered."""
        self._connections.ended(self)

    def abort(self) -> None:
        if self.open_transport is not None:
            self.open_transport.abort()

    def cut_if_unread(self, now_s: float) -> None:
        """Close the connection if its client has output to read and does not read it."""
        assert self.open_transport is not None
        if not self.open_transport.get_write_buffer_size():
            self._pace = None
        elif self._pace is None:
            self._pace = ReadingPace(self._connections.unread_s, now_s, self._num_acked())
        elif self._pace.is_too_slow(now_s, self._num_acked()):
            log.info("a client was cut off because it did not read its answer")
            self.abort()

    def _num_acked(self) -> int:
        """Return how many bytes the client's host has taken so far."""
        assert self._socket is not None
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return int.from_bytes(info[_BYTES_ACKED], "little")


class Handshake(SSLProtocol):
    """A client that has yet to agree on TLS. After that, a `Connection` replaces it.

    asyncio's public ways do less. `create_server(ssl=...)` makes the `Connection` before the
    handshake, never tells it of one that fails, and gives no way to end one that makes room.
    `start_tls` hands a client's first bytes to a protocol that has no transport yet.
    """

    def __init__(
        self,
        connections: "Connections",
        connection: Connection,
        context: ssl.SSLContext,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(
            loop,
            connection,
            context,
            None,  # type: ignore[arg-type]  # asyncio takes None, but its stubs do not say so
            server_side=True,
            ssl_handshake_timeout=HANDSHAKE_S,
        )
        connection.handshake = self
        self._connections = connections
        self._open_transport: asyncio.BaseTransport | None = None
        self.is_spare = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._open_transport = transport
        self.is_spare = self._connections.opened(self)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._open_transport = None
        self._connections.closed(self)
        super().connection_lost(exc)

    def abort(self) -> None:
        if isinstance(self._open_transport, asyncio.Transport):
            self._open_transport.abort()


def connection_of(request: web.Request) -> Connection:
    """Return the connection of a request."""
    assert isinstance(request.protocol, Connection), "a Server makes every connection"
    return request.protocol


class Connections:
    """All connections of one server; the event loop calls it to make a new one."""

    def __init__(
        self,
        manager: web.Server,
        http_log: logging.Logger,
        config: RouterConfig,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._manager = manager
        self._http_log = http_log
        self._tls = tls
        self._max_open = affordable(config.max_connections)
        self._idle_s = config.idle_s
        self.unread_s = config.unread_s
        self._loop = asyncio.get_running_loop()
        self._open: set[Connection | Handshake] = set()
        # Connections without a whole request; the one that has waited longest is first.
        self._waiting: dict[Connection | Handshake, None] = {}
        self._warn = RareWarning(self._loop.time)
        self._timer = self._loop.call_later(self.unread_s / 4, self._sweep)

    def __call__(self) -> Connection | Handshake:
        connection = Connection(self, self._manager, self._loop, self._http_log, self._idle_s)
        if self._tls is None:
            return connection
        return Handshake(self, connection, self._tls, self._loop)

    def opened(self, connection: Connection | Handshake) -> bool:
        """Add a connection. Return True if it is above the limit and none could make room."""
        if len(self._open) >= self._max_open:
            # Spare connections make room only when all are used, so that they get their answers.
            all_taken = len(self._open) >= self._max_open + SPARE
            oldest = next((one for one in self._waiting if all_taken or not one.is_spare), None)
            if oldest is not None:
                self._warn(
                    "there are too many connections, so those that are idle longest are closed"
                )
                self.closed(oldest)
                oldest.abort()
        is_spare = len(self._open) >= self._max_open
        self._open.add(connection)
        self._waiting[connection] = None
        if len(self._open) > self._max_open + SPARE:
            self._warn("there are too many connections, so new ones are closed")
            self._loop.call_soon(connection.abort)
        return is_spare

    def closed(self, connection: Connection | Handshake) -> None:
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def began(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)

    def ended(self, connection: Connection) -> None:
        if connection in self._open:
            self._waiting[connection] = None

    def close(self) -> None:
        self._timer.cancel()

    def _sweep(self) -> None:
        self._timer = self._loop.call_later(self.unread_s / 4, self._sweep)
        now_s = self._loop.time()
        for connection in tuple(self._open):
            if isinstance(connection, Connection):
                connection.cut_if_unread(now_s)
