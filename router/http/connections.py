"""The limits on what clients may take: connections, time to read, and the size of their bodies.

The number of connections is bounded by the descriptors of the process. At the limit, a new
connection replaces the one that has waited longest without a whole request, so probes of /live are
answered even among many half-sent requests. A client that reads its response too slowly is cut off.

A body that is not small reserves memory of a limited budget as it arrives, and gives it back when
its prompts have become token ids, so that clients cannot fill the memory of the router.
"""

import asyncio
import logging
import resource
import socket

from aiohttp import web

from baton.protocol.config import RouterConfig
from baton.protocol.errors import Overloaded, RequestError
from baton.router.core.health import ServedModel
from baton.runtime.clock import monotonic
from baton.runtime.host import RareWarning
from baton.runtime.log import clip, logger

# Descriptors that are reserved for nodes, files and connections that are being closed.
_OTHER_DESCRIPTORS = 512
# A client whose output has piled up must take this much of it.
MIN_BYTES_PER_S = 256
# Connections above the limit, on which only /live, /health and /metrics are answered.
SPARE = 16
_MIN_CONNECTIONS = 8

log = logger("router")


class Connection(web.RequestHandler):
    """One connection of a client. `is_spare` means that it came above the limit."""

    __slots__ = ("_connections", "_num_left", "_room", "_timer", "is_spare")

    def __init__(
        self, connections: "Connections", server: web.Server, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=connections.idle_s,
            logger=connections.http_log,
            access_log=None,  # type: ignore[arg-type]  # aiohttp takes None, but does not say so
        )
        self._connections = connections
        self.is_spare = False
        self._num_left = 0  # bytes that the client had not taken at the last check
        self._timer: asyncio.TimerHandle | None = None
        self._room: asyncio.Future[None] | None = None  # exists while output piles up

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.is_spare = self._connections.opened(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.closed(self)
        if isinstance(exc, TimeoutError):
            _log_cut()
        self._end_wait()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._room = asyncio.get_running_loop().create_future()
        self._check_later()

    def resume_writing(self) -> None:
        self._end_wait()
        super().resume_writing()

    @property
    def is_writable(self) -> bool:
        """Whether the client reads as fast as its output is made."""
        return self._room is None

    async def has_room(self) -> None:
        """Wait until the client has taken most of its output. One that takes too long is cut off.

        A wait for a connection that ends is over too.
        """
        if self._room is not None:
            await self._room  # within this deadline, by `_check_pace`

    def _check_later(self) -> None:
        assert self.transport is not None
        self._num_left = self.transport.get_write_buffer_size()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._connections.unread_s, self._check_pace)

    def _check_pace(self) -> None:
        if self.transport is None:
            return
        num_taken = self._num_left - self.transport.get_write_buffer_size()
        if num_taken < MIN_BYTES_PER_S * self._connections.unread_s:
            _log_cut()
            self.transport.abort()
        else:
            self._check_later()

    def _end_wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        self._timer = self._room = None

    def began(self) -> None:
        """Note that a whole request has arrived, so this connection need not make room."""
        self._connections.began(self)

    def ended(self) -> None:
        """Note that the request was answered."""
        self._connections.ended(self)


def connection_of(request: web.Request) -> Connection:
    """Return the connection of a request."""
    assert isinstance(request.protocol, Connection), "a Server makes every connection"
    return request.protocol


class Connections:
    """The open connections of one server."""

    def __init__(self, config: RouterConfig, http_log: logging.Logger) -> None:
        self.idle_s = config.idle_s
        self.http_log = http_log
        self._max_open = _affordable(config.max_connections)
        self.unread_s = config.unread_s
        self._open: set[Connection] = set()
        # Connections without a whole request; the one that has waited longest is first.
        self._waiting: dict[Connection, None] = {}
        self._warn = RareWarning(monotonic)

    def opened(self, connection: Connection) -> bool:
        """Add a connection. Return True if it is above the limit and none could make room."""
        transport = connection.transport
        assert transport is not None
        # The kernel ends a connection on which nothing was acknowledged or taken for that long.
        transport.get_extra_info("socket").setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(self.unread_s * 1000)
        )
        if len(self._open) >= self._max_open:
            # Spare connections make room only when all are used, so that they get their answers.
            all_taken = len(self._open) >= self._max_open + SPARE
            oldest = next((one for one in self._waiting if all_taken or not one.is_spare), None)
            if oldest is not None:
                self._warn(
                    "there are too many connections, so those that are idle longest are closed"
                )
                self.closed(oldest)
                _abort(oldest)
        is_spare = len(self._open) >= self._max_open
        self._open.add(connection)
        self._waiting[connection] = None
        if len(self._open) > self._max_open + SPARE:
            self._warn("there are too many connections, so new ones are closed")
            _abort(connection)
        return is_spare

    def closed(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def began(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)

    def ended(self, connection: Connection) -> None:
        if connection in self._open:
            self._waiting[connection] = None


def _affordable(max_connections: int) -> int:
    """Return `max_connections`, or less if the process may open too few descriptors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return max_connections
    others = min(_OTHER_DESCRIPTORS, limit // 2)
    return min(max_connections, max(limit - others - SPARE, _MIN_CONNECTIONS))


def _abort(connection: Connection) -> None:
    if connection.transport is not None:
        connection.transport.abort()


def _log_cut() -> None:
    log.info("a client was cut off because it did not read its response")


MIB = 1024 * 1024
# A body up to this size is parsed on the event loop, which takes a few milliseconds at most.
SMALL_BYTES = 128 * 1024
BODY_TIMEOUT_S = 60.0
# A body that brings nothing for so long has stalled: it must not keep its memory for a minute.
STALLED_S = 10.0
# A body may be this large with any model, so that many short prompts fit one request.
_ALWAYS_ALLOWED_BYTES = 4 * MIB
# JSON may take six bytes for one byte of a prompt, as in \u001f.
_ESCAPED_BYTES = 6
# Bodies up to this size reserve nothing: there can be as many as connections without danger.
_FREE_BYTES = 4 * 1024
# The number of bodies of the largest size that may be in memory at once.
_LARGE_BODIES = 16


class Room:
    """The memory that one body holds while its context lasts."""

    def __init__(self, bodies: "Bodies") -> None:
        self._bodies = bodies
        self._num_bytes = 0

    def __enter__(self) -> "Room":
        return self

    def __exit__(self, *_: object) -> None:
        self._bodies.held_bytes -= self._num_bytes
        self._num_bytes = 0

    def hold(self, num_bytes: int, most_bytes: int) -> None:
        """Hold twice what has arrived. Raises `Overloaded` if there is no memory for it.

        An announced length alone holds nothing, because clients may not send what they announce.
        """
        if num_bytes <= max(_FREE_BYTES, self._num_bytes):
            return
        # Without a length, or if the body is compressed, the rest may be of any size.
        more = max(num_bytes, min(2 * num_bytes, most_bytes)) - self._num_bytes
        if self._bodies.held_bytes + more > self._bodies.max_bytes:
            held_mib = self._bodies.held_bytes // MIB
            text = f"the router holds {held_mib} MiB of large bodies and takes no more right now"
            raise Overloaded(text, code="too_many_large_bodies")
        self._bodies.held_bytes += more
        self._num_bytes += more


class Bodies:
    """The bodies that the router reads, and the memory that they hold together."""

    def __init__(self, max_body_mib: int) -> None:
        self.max_body_bytes = max_body_mib * MIB
        self.max_bytes = self.max_body_bytes * _LARGE_BODIES
        self.held_bytes = 0

    def limit(self, model: ServedModel, max_token_bytes: int) -> int:
        """Return the size in bytes of the largest body that the model can use."""
        longest_prompt = model.max_model_len * max_token_bytes * _ESCAPED_BYTES
        return min(self.max_body_bytes, max(longest_prompt, _ALWAYS_ALLOWED_BYTES))

    def room(self) -> Room:
        return Room(self)

    async def read(self, request: web.Request, room: Room, max_bytes: int) -> bytes:
        """Return the whole body of a request. Raises `RequestError` or `Overloaded`."""
        body = await self._read_in_time(request, room, max_bytes)
        connection_of(request).began()
        return body

    async def _read_in_time(self, request: web.Request, room: Room, max_bytes: int) -> bytes:
        _check_type(request)
        length, content = request.content_length, request.content
        if length is not None and length > max_bytes:
            raise _too_large(max_bytes)
        try:
            is_small = length is not None and length <= _FREE_BYTES
            if is_small and content.is_eof() and "Content-Encoding" not in request.headers:
                return content.read_nowait()  # the body is complete
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await self._read(request, room, max_bytes)
        except TimeoutError:
            text = (
                f"the body did not arrive within {BODY_TIMEOUT_S:g} s, or nothing of it for "
                f"{STALLED_S:g} s"
            )
            raise RequestError(text, code="timeout", http_status=408) from None
        except web.RequestPayloadError as error:
            text = "the body is not encoded as its headers say"
            raise RequestError(text, code="invalid_body") from error

    async def _read(self, request: web.Request, room: Room, max_bytes: int) -> bytes:
        chunks: list[bytes] = []
        num_bytes = 0
        while True:
            async with asyncio.timeout(STALLED_S):
                chunk = await request.content.readany()
            if not chunk:
                return b"".join(chunks)
            chunks.append(chunk)
            num_bytes += len(chunk)
            if num_bytes > max_bytes:
                raise _too_large(max_bytes)
            room.hold(num_bytes, request.content_length or max_bytes)


def _too_large(max_bytes: int) -> RequestError:
    text = (
        f"the body is larger than {max_bytes / MIB:.3g} MiB, which is as much as the longest "
        f"prompt of this model or router.max_body_mib allows"
    )
    return RequestError(text, code="body_too_large", http_status=413)


def _check_type(request: web.Request) -> None:
    kind = request.content_type
    if kind != "application/json" and not kind.endswith("+json"):
        given = clip(request.headers.get("Content-Type", "")) or "none"
        text = f"the header Content-Type must be application/json, but it is {given}"
        raise RequestError(text, code="unsupported_media_type", http_status=415)
