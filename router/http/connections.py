"""The limits on what clients may take: connections, time to read, and the size of their bodies.

The number of connections is bounded by the descriptors of the process, and that of connections
without a whole request by its memory. At the limit, a new connection replaces the one that has
waited longest without a whole request, so probes of /live are answered even among many half-sent
requests. A client that reads its response too slowly is cut off. The head of a request may have
`MAX_HEAD_BYTES`.

A body that is not small reserves memory of a limited budget as it arrives, and gives it back when
its prompts have become token ids, so that clients cannot fill the memory of the router.
"""

import asyncio
import logging
import resource
import socket
import zlib
from collections.abc import Callable, Iterator

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from baton.protocol.config import RouterConfig
from baton.protocol.errors import BatonError, Overloaded, RequestError
from baton.router.core.health import ServedModel
from baton.runtime.clock import monotonic
from baton.runtime.host import RareWarning, available_bytes
from baton.runtime.log import clip, logger

# Descriptors that are reserved for nodes, files and connections that are being closed.
_OTHER_DESCRIPTORS = 512
# A client whose output has piled up must take this much of it.
MIN_BYTES_PER_S = 256
# Connections above the limit, on which only /live, /health and /metrics are answered.
SPARE = 16
_MIN_CONNECTIONS = 8
MIB = 1024 * 1024
# What a client that has not sent a whole request can make its connection hold, with and without
# TLS, as measured: most of it are the objects of many small headers.
_WAITING_BYTES = 64 * 1024
_TLS_WAITING_BYTES = 128 * 1024
# The memory of all such connections together, and their share of what the host has left.
_ALL_WAITING_BYTES = 512 * MIB
_MEMORY_SHARE = 4
MIN_WAITING = 256
# A request's line and headers. Cookies and tokens of identity providers may take ten thousand.
MAX_HEAD_BYTES = 16 * 1024
MAX_HEADERS = 128
# The most that is read, and so parsed, in one turn of the loop; less of a body in chunks, because
# each of them costs as much as a kilobyte.
_READ_BYTES = 32 * 1024
_FEW_BYTES = 4 * 1024
# How long to wait for requests to begin before what came ahead of them counts as one head.
_HOLD_S = 0.1
# No request can go on like this.
_NO_HEAD = b"\0\r\n\r\n"

Refuse = Callable[[web.BaseRequest, BatonError], web.Response]

log = logger("router")


class Connection(web.RequestHandler, asyncio.BufferedProtocol):
    """One connection of a client. `is_spare` means that it came above the limit.

    It reads into a buffer that all connections share, and counts what it reads: `num_body_bytes`
    are those of the body of the latest request, its chunks' heads included. What comes ahead of
    that request's end is a head or a pipelined request, of which only so much is read at a time.
    """

    __slots__ = (
        "_connections",
        "_content",
        "_had_late_body",
        "_has_begun",
        "_hold_timer",
        "_is_busy",
        "_is_chunked",
        "_is_head_too_large",
        "_num_ahead_bytes",
        "_num_left",
        "_room",
        "_timer",
        "is_spare",
        "is_writable",
        "num_body_bytes",
    )

    def __init__(
        self,
        connections: "Connections",
        server: web.Server,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=connections.idle_s,
            logger=connections.http_log,
            access_log=None,  # type: ignore[arg-type]  # aiohttp takes None, but does not say so
            max_line_size=MAX_HEAD_BYTES,
            max_field_size=MAX_HEAD_BYTES,
            max_headers=MAX_HEADERS,
            read_bufsize=_READ_BYTES,
            auto_decompress=False,  # `Bodies` does it, within limits
        )
        self._connections = connections
        self.is_spare = False
        self._num_left = 0  # bytes that the client had not taken at the last check
        self._timer: asyncio.TimerHandle | None = None
        self.is_writable = True  # the client reads as fast as its output is made
        self._room: asyncio.Future[None] | None = None  # exists while it does not
        self._content: StreamReader | None = None  # the body of the latest request
        self._is_busy = False  # with a request
        self._is_chunked = False  # the body
        self._had_late_body = False
        self.num_body_bytes = 0
        self._num_ahead_bytes = 0
        # Exists while reading is paused.
        self._hold_timer: asyncio.TimerHandle | None = None
        self._has_begun = False  # whether a request has begun since reading was paused
        self._is_head_too_large = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # That of TLS has a buffer of its own.
        if hasattr(transport, "set_read_buffer_limits"):
            transport.set_read_buffer_limits(_READ_BYTES)
        self.is_spare = self._connections.opened(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.closed(self)
        if isinstance(exc, TimeoutError):
            _log_cut()
        self._end_wait()
        self._end_hold()
        self._content = None
        super().connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer to read into, which all connections share."""
        if self._content is not None and not self._content.is_eof():
            return self._connections.buffer[
                : _FEW_BYTES if self._is_chunked else _READ_BYTES
            ]
        num_bytes = max(MAX_HEAD_BYTES + 1 - self._num_ahead_bytes, _FEW_BYTES)
        return self._connections.buffer[:num_bytes]

    def buffer_updated(self, nbytes: int) -> None:
        """Parse what was read."""
        if self._is_head_too_large:
            return
        is_ahead = self._content is None or self._content.is_eof()
        self.data_received(bytes(self._connections.buffer[:nbytes]))
        if not is_ahead:
            self.num_body_bytes += nbytes
            self._had_late_body = True
            return
        self._num_ahead_bytes += nbytes
        if self._num_ahead_bytes > MAX_HEAD_BYTES and self.transport is not None:
            self.transport.pause_reading()
            # Else aiohttp went on, which has begun what it had.
            if self._hold_timer is None:
                self._has_begun = False
                self._check_ahead_later()

    def handles(self, request: web.Request) -> None:
        """Note that the next request is being handled, though its body may not have come."""
        self._content = request.content
        self._is_busy = self._has_begun = True
        self.num_body_bytes = 0
        if not self._content.is_eof():
            self._is_chunked = request.content_length is None
        if self._hold_timer is None:
            self._num_ahead_bytes = 0
            return
        self._num_ahead_bytes -= self._content.total_bytes
        if not self._content.is_eof() or self._num_ahead_bytes <= MAX_HEAD_BYTES // 2:
            self._read_on()

    def _check_ahead_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._hold_timer = loop.call_later(_HOLD_S, self._check_ahead)

    def _check_ahead(self) -> None:
        """Go on reading if requests have begun; otherwise what came is one head, and too large."""
        if self.transport is None:
            return
        if self._is_busy or self.transport.get_write_buffer_size():
            self._check_ahead_later()
        elif self._has_begun:
            self._read_on()
        else:
            # A client that still sends when its connection is closed would lose the response.
            self._is_head_too_large = True
            self.transport.resume_reading()
            loop = asyncio.get_running_loop()
            self._hold_timer = loop.call_later(_HOLD_S, self.data_received, _NO_HEAD)

    def _read_on(self) -> None:
        self._end_hold()
        self._num_ahead_bytes = 0
        if self.transport is not None:
            self.transport.resume_reading()

    def _end_hold(self) -> None:
        if self._hold_timer is not None:
            self._hold_timer.cancel()
            self._hold_timer = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the response to what is no request, in the form of all errors."""
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        if request.writer.output_size > 0:
            raise ConnectionError("an error came after the response had begun")
        response = self._connections.refuse(
            request, _refusal_of(exc, self._is_head_too_large)
        )
        response.force_close()
        return response

    async def finish_response(
        self,
        request: web.BaseRequest,
        resp: web.StreamResponse,
        start_time: float | None,
    ) -> tuple[web.StreamResponse, bool]:
        """Send a response. The only one that aiohttp makes by itself gets the form of all errors.

        It refuses a value of the header Expect before the application sees the request.
        """
        if isinstance(resp, web.HTTPExpectationFailed):
            text = "the header Expect may only be 100-continue"
            error = RequestError(text, code="expectation_failed", http_status=417)
            resp = self._connections.refuse(request, error)
            resp.force_close()  # the client may wait with its body
        return await super().finish_response(request, resp, start_time)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.is_writable = False
        self._room = asyncio.get_running_loop().create_future()
        self._check_later()

    def resume_writing(self) -> None:
        self._end_wait()
        super().resume_writing()

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
        self.is_writable = True

    def began(self) -> None:
        """Note that a whole request has arrived, so this connection need not make room."""
        self._connections.began(self)

    def ended(self) -> None:
        """Note that the request was answered."""
        self._is_busy = False
        if self._had_late_body and self.transport is not None:
            # aiohttp 3.14 counts a request twice that began before its body had come, and then may
            # leave requests behind it unparsed until more bytes come.
            self.data_received(b"")
        self._connections.ended(self)


def connection_of(request: web.Request) -> Connection:
    """Return the connection of a request."""
    assert isinstance(request.protocol, Connection), "a Server makes every connection"
    return request.protocol


class Connections:
    """The open connections of one server."""

    def __init__(
        self, config: RouterConfig, http_log: logging.Logger, refuse: Refuse
    ) -> None:
        """`refuse` makes the response to what is no request, and counts it."""
        self.idle_s = config.idle_s
        self.http_log = http_log
        self.refuse = refuse
        self.buffer = memoryview(bytearray(_READ_BYTES))
        self._max_open = _affordable(config.max_connections)
        each_bytes = _TLS_WAITING_BYTES if config.speaks_tls else _WAITING_BYTES
        all_bytes = min(_ALL_WAITING_BYTES, available_bytes() // _MEMORY_SHARE)
        self._max_waiting = max(all_bytes // each_bytes, MIN_WAITING)
        self.unread_s = config.unread_s
        self._open: set[Connection] = set()
        # Connections without a whole request; the one that has waited longest is first.
        self._waiting: dict[Connection, None] = {}
        self._warn = RareWarning(monotonic)

    def opened(self, connection: Connection) -> bool:
        """Add a connection. Return True if it is above the limit and none could make room."""
        transport = connection.transport
        assert transport is not None
        sock = transport.get_extra_info("socket")
        if sock.family != socket.AF_UNIX:
            # The kernel ends a connection on which nothing was acknowledged or taken for that long.
            timeout_ms = round(self.unread_s * 1000)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
        if len(self._open) >= self._max_open:
            # Spare connections make room only when all are used, so that they get their answers.
            all_taken = len(self._open) >= self._max_open + SPARE
            oldest = next(
                (one for one in self._waiting if all_taken or not one.is_spare), None
            )
            if oldest is not None:
                self._close_idle(oldest)
        is_spare = len(self._open) >= self._max_open
        self._open.add(connection)
        self._waits(connection)
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
            self._waits(connection)

    def _waits(self, connection: Connection) -> None:
        self._waiting[connection] = None
        if len(self._waiting) > self._max_waiting:
            self._close_idle(next(iter(self._waiting)))

    def _close_idle(self, connection: Connection) -> None:
        self._warn(
            "there are too many connections, so those that are idle longest are closed"
        )
        self.closed(connection)
        _abort(connection)


def _affordable(max_connections: int) -> int:
    """Return `max_connections`, or less if the process may open too few descriptors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return max_connections
    others = min(_OTHER_DESCRIPTORS, limit // 2)
    return min(max_connections, max(limit - others - SPARE, _MIN_CONNECTIONS))


def _refusal_of(error: HttpProcessingError, is_head_too_large: bool) -> RequestError:
    """Return what is wrong with a request that cannot be parsed, without what may be secret."""
    if is_head_too_large or isinstance(error, LineTooLong):
        text = f"the line and headers of the request are larger than {MAX_HEAD_BYTES // 1024} KiB"
        return RequestError(text, code="headers_too_large", http_status=431)
    what = clip(error.message.partition("\n")[0].partition(":")[0])
    return RequestError(
        f"the request is not valid HTTP/1.1: {what}", code="invalid_http"
    )


def _abort(connection: Connection) -> None:
    if connection.transport is not None:
        connection.transport.abort()


def _log_cut() -> None:
    log.info("a client was cut off because it did not read its response")


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
# Chunks need as many bytes around them as in them, and no more; so much is free.
_FREE_CHUNK_BYTES = 64 * 1024
# The most that is made of compressed data before other connections have their turn.
_PIECE_BYTES = 256 * 1024
_WINDOWS = {
    "gzip": 16 + zlib.MAX_WBITS,
    "x-gzip": 16 + zlib.MAX_WBITS,
    "deflate": zlib.MAX_WBITS,
}


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

    async def _read_in_time(
        self, request: web.Request, room: Room, max_bytes: int
    ) -> bytes:
        _check_type(request)
        encoding = _encoding_of(request)
        length = request.content_length
        content = request.content
        if length is not None and length > max_bytes:
            raise _too_large(max_bytes)
        try:
            is_small = length is not None and length <= _FREE_BYTES
            if is_small and content.is_eof() and not encoding:
                return content.read_nowait()  # the body is complete
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await self._read(request, room, max_bytes, encoding)
        except TimeoutError:
            text = (
                f"the body did not arrive within {BODY_TIMEOUT_S:g} s, or nothing of it for "
                f"{STALLED_S:g} s"
            )
            raise RequestError(text, code="timeout", http_status=408) from None
        except (web.RequestPayloadError, zlib.error) as error:
            text = "the body is not encoded as its headers say"
            raise RequestError(text, code="invalid_body") from error

    async def _read(
        self, request: web.Request, room: Room, max_bytes: int, encoding: str
    ) -> bytes:
        connection = connection_of(request)
        content = request.content
        inflating = _Inflating(_WINDOWS[encoding]) if encoding else None
        # If the body is compressed, the rest may be of any size.
        most_bytes = max_bytes if encoding else request.content_length or max_bytes
        chunks: list[bytes] = []
        num_bytes = 0
        while True:
            async with asyncio.timeout(STALLED_S):
                chunk = await content.readany()
            if not chunk:
                if inflating is not None:
                    chunks.append(inflating.end())
                return b"".join(chunks)
            if connection.num_body_bytes > 2 * content.total_bytes + _FREE_CHUNK_BYTES:
                text = "the chunks of the body are too small: send larger ones"
                raise RequestError(text, code="invalid_body")
            for piece in (chunk,) if inflating is None else inflating.pieces(chunk):
                chunks.append(piece)
                num_bytes += len(piece)
                if num_bytes > max_bytes:
                    raise _too_large(max_bytes)
                room.hold(num_bytes, most_bytes)
                if inflating is not None:
                    await asyncio.sleep(0)


class _Inflating:
    """Inflates a body piece by piece. Raises `zlib.error` for data that is not so compressed."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._inflater = zlib.decompressobj(window)

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Return what more data brings, in pieces of a bounded size."""
        while data:
            if self._inflater.eof:  # gzip files may follow one another
                self._inflater = zlib.decompressobj(self._window)
            yield self._inflater.decompress(data, _PIECE_BYTES)
            data = self._inflater.unconsumed_tail or self._inflater.unused_data

    def end(self) -> bytes:
        """Return the last bytes, of which there are few."""
        rest = self._inflater.flush()
        if not self._inflater.eof:
            raise zlib.error("the data ends too early")
        return rest


def _too_large(max_bytes: int) -> RequestError:
    text = (
        f"the body is larger than {max_bytes / MIB:.3g} MiB, which is as much as the longest "
        f"prompt of this model or router.max_body_mib allows"
    )
    return RequestError(text, code="body_too_large", http_status=413)


def _encoding_of(request: web.Request) -> str:
    """Return how a body is compressed, or "". Raises `RequestError` if baton cannot inflate it."""
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding in ("", "identity"):
        return ""
    if encoding not in _WINDOWS:
        text = f"the Content-Encoding {clip(encoding)!r} is not supported; gzip and deflate are"
        raise RequestError(text, code="unsupported_media_type", http_status=415)
    return encoding


def _check_type(request: web.Request) -> None:
    kind = request.content_type
    if kind != "application/json" and not kind.endswith("+json"):
        given = clip(request.headers.get("Content-Type", "")) or "none"
        text = f"the header Content-Type must be application/json, but it is {given}"
        raise RequestError(text, code="unsupported_media_type", http_status=415)
