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
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable

from aiohttp import web

from baton.protocol.config import RouterConfig
from baton.router.http.stream_connection import StreamConnection
from baton.router.http.unread import UnreadOutput
from baton.runtime.host import RareWarning
from baton.runtime.log import logger

# Descriptors that are reserved for nodes, files and connections that are being closed.
_OTHER_DESCRIPTORS = 512
# Connections above the limit, on which only /live, /health and /metrics are answered.
SPARE = 16
_MIN_CONNECTIONS = 8
# How long a client may take to agree on TLS.
HANDSHAKE_S = 10
_HEAD_END = b"\r\n\r\n"

log = logger("router")


def affordable(max_connections: int) -> int:
    """Return `max_connections`, or less if the process may open too few descriptors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return max_connections
    others = min(_OTHER_DESCRIPTORS, limit // 2)
    return min(max_connections, max(limit - others - SPARE, _MIN_CONNECTIONS))


class Connection(web.RequestHandler):
    """One connection of a client. `is_spare` means that it came above the limit."""

    __slots__ = (
        "_connections", "_num_head_bytes", "_num_received_bytes", "handshake", "is_spare",
        "open_transport", "unread",
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
        self.unread: UnreadOutput | None = None
        # What has come since the last answer ended, and the head at its front if it came whole.
        self._num_received_bytes = self._num_head_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.open_transport = transport
        self.unread = UnreadOutput(transport)
        if self.handshake is not None:
            self._connections.closed(self.handshake)
            self.handshake = None
        self.is_spare = self._connections.opened(self)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if not self._num_received_bytes:
            self._num_head_bytes = data.find(_HEAD_END) + len(_HEAD_END)
        self._num_received_bytes += len(data)
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.open_transport = None
        self._connections.closed(self)
        super().connection_lost(exc)

    def began(self) -> None:
        """Note that a whole request has arrived, so this connection need not make room."""
        self._connections.began(self)

    def ended(self) -> None:
        """Note that the request was answered."""
        self._num_received_bytes = 0
        self._connections.ended(self)

    def can_go_on_after(self, request: web.Request) -> bool:
        """Return whether nothing is lost if a new `Connection` takes over after this request.

        That is so if it is known that no part of another request has come behind it.
        """
        num_bytes = self._num_head_bytes + request.content.total_bytes
        return request.keep_alive and self._num_received_bytes == num_bytes

    def hand_over(self, on_gone: Callable[[], None]) -> StreamConnection:
        """Give the client to a stream; this object ends when the handler has returned."""
        assert self.open_transport is not None
        transport, self.open_transport, self.transport = self.open_transport, None, None
        successor = StreamConnection(
            self._connections, transport, on_gone, is_full=self.writing_paused
        )
        self._connections.handed_over(self, successor)
        asyncio.get_running_loop().call_soon(super().connection_lost, None)
        return successor

    def abort(self) -> None:
        if self.open_transport is not None:
            self.open_transport.abort()


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
        self._open: set[_Client] = set()
        # Connections without a whole request; the one that has waited longest is first.
        self._waiting: dict[_Client, None] = {}
        self._takes_no_more = False
        self._warn = RareWarning(self._loop.time)
        self._timer = self._loop.call_later(self.unread_s / 4, self._sweep)

    def __call__(self) -> Connection | Handshake:
        connection = self._connection()
        if self._tls is None:
            return connection
        return Handshake(self, connection, self._tls, self._loop)

    def _connection(self) -> Connection:
        return Connection(self, self._manager, self._loop, self._http_log, self._idle_s)

    def opened(self, connection: Connection | Handshake) -> bool:
        """Add a connection. Return True if it is above the limit and none could make room."""
        if connection in self._open:
            return False  # it took the place of a stream
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

    def handed_over(self, connection: Connection, successor: StreamConnection) -> None:
        self.closed(connection)
        self._open.add(successor)

    def take_back(self, connection: StreamConnection, early: bytes) -> None:
        """Let the client of a stream that has ended send its next request, or close."""
        transport = connection.open_transport
        if self._takes_no_more:
            transport.close()
            return
        self.closed(connection)
        successor = self._connection()
        self._open.add(successor)
        self._waiting[successor] = None
        transport.set_protocol(successor)
        successor.connection_made(transport)
        if early:
            successor.data_received(early)
        if not transport.is_reading():
            transport.resume_reading()

    def closed(self, connection: "_Client") -> None:
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def began(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)

    def ended(self, connection: Connection) -> None:
        if connection in self._open:
            self._waiting[connection] = None

    def drain(self) -> None:
        """Take no further requests from clients whose streams end."""
        self._takes_no_more = True

    def close(self) -> None:
        """Look at connections no more, and cut those off whose streams have not ended."""
        self._takes_no_more = True
        self._timer.cancel()
        for connection in self._open:
            if isinstance(connection, StreamConnection):
                connection.abort()

    def _sweep(self) -> None:
        self._timer = self._loop.call_later(self.unread_s / 4, self._sweep)
        now_s = self._loop.time()
        for connection in self._open:
            if isinstance(connection, Handshake) or connection.unread is None:
                continue
            if connection.unread.has_stalled(now_s, self.unread_s):
                log.info("a client was cut off because it did not read its answer")
                connection.abort()


_Client = Connection | Handshake | StreamConnection
