"""Requests to one server over HTTP/1.1: connections that stamp arriving bytes, and their pool.

The stamp is taken as soon as the event loop hands the bytes over, before anything is parsed; an
HTTP library would pass the bytes to a task that runs later. httptools parses HTTP, and the body
goes to the response's reader under the stamp of the read that brought it. Nothing is sent twice,
decompressed or redirected: an unreadable response is a `Problem` in one line. Everything that takes
time happens before the moment of sending: the body is encoded and a connection is open by then, as
in a client with a pool. `send` never raises for the behaviour of a server: that is an `Outcome`.
"""

import asyncio
import errno
import os
import re
import ssl
from collections.abc import Sequence
from typing import Self

import httptools
import msgspec

from baton.bench.client.response import Problem, ResponseReader, message_of, one_line
from baton.bench.records import Outcome, Planned, Record
from baton.bench.settings import API_KEY_VARIABLE, Target, server_address
from baton.protocol.errors import ConfigError
from baton.runtime.clock import monotonic
from baton.runtime.tls import client_context, trusting

# Servers close idle connections after 5 s or more, and no request may be sent on such a connection.
IDLE_LIMIT_S = 2.0
# The longest wait from [DONE] to the end of the body before closing.
SHUTDOWN_TIMEOUT_S = 0.004
MAX_BODY_BYTES = 1 << 20  # the limit for a response that is not a stream
# These errors mean that this machine had no resources left for a connection.
NO_SOCKET = (
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOBUFS,
    errno.ENOMEM,
    errno.EADDRNOTAVAIL,
)
# The client sets these fields itself and reads the response accordingly.
OWN_FIELDS = (
    "model",
    "prompt",
    "messages",
    "stream",
    "n",
    "max_tokens",
    "max_completion_tokens",
)
_STREAM = re.compile(rb"\s*(?:data|event|id|retry)?:")


class Connection(asyncio.Protocol):
    """One connection. Call `send` when it is idle."""

    def __init__(self) -> None:
        self.is_open = False
        self.idle_since_s = 0.0
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._parser: httptools.HttpResponseParser | None = None

    @property
    def is_idle(self) -> bool:
        return self.is_open and self._exchange is None

    def send(self, request: bytes, exchange: "Exchange") -> None:
        assert self.is_idle
        assert self._transport is not None
        self._exchange, self._parser = exchange, httptools.HttpResponseParser(exchange)
        self._transport.write(request)

    def close(self) -> None:
        """Close the connection at once and drop the bytes that are on their way."""
        self.is_open = False
        self._exchange = None
        self._parser = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True
        self.idle_since_s = monotonic()

    def data_received(self, data: bytes) -> None:
        at_s = monotonic()
        exchange = self._exchange
        parser = self._parser
        if exchange is None or parser is None:
            self.close()  # the server sent bytes that no request asked for
            return
        exchange.feed(parser, data, at_s)
        if exchange.is_complete and self._exchange is exchange:
            self._exchange = None
            self._parser = None
            self.idle_since_s = at_s
            if not exchange.keep_alive:
                self.close()
            if exchange.drained is not None:
                exchange.drained.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        at_s = monotonic()
        exchange = self._exchange
        self.is_open = False
        self._exchange = None
        self._parser = None
        if exchange is not None:
            exchange.lost(
                "the connection was " + ("reset" if error else "closed"), at_s
            )


class Exchange:
    """Stamps are monotonic. `status` is None until the head of the response is complete."""

    def __init__(self, is_chat: bool) -> None:
        self.reader = ResponseReader(is_chat)
        self.problem: Problem | None = None
        self.status: int | None = None
        self.headers: dict[str, str] = {}  # names in lower case
        self.body = bytearray()  # the body of a response that is not a stream
        self.first_byte_s: float | None = None
        self.end_s = 0.0
        # The whole body has arrived; a stream may have ended earlier.
        self.is_complete = False
        self.keep_alive = False
        # Done: the connection can be used again.
        self.drained: asyncio.Future[None] | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # This is set only within `feed`, because the parser refers to this object and the client
        # collects no cycles.
        self._parser: httptools.HttpResponseParser | None = None
        self._read_s = 0.0  # the stamp of the read that is being parsed
        self._is_stream = False

    def end(self, at_s: float, problem: Problem | None = None) -> None:
        """End the request; later bytes do not count."""
        if not self.ended.done():
            self.end_s = at_s
            self.problem = problem
            self.ended.set_result(None)

    def feed(
        self, parser: httptools.HttpResponseParser, data: bytes, at_s: float
    ) -> None:
        """Take in the bytes of one read; `parser` is the one that was made for this exchange."""
        self._read_s = at_s
        self._parser = parser
        try:
            parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise  # a bug in this file
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            # Bytes after the end spoil the connection and nothing else.
            self.keep_alive = False
            if not self.is_complete:
                self._refuse(f"the response is not HTTP/1.1: {error}")
        finally:
            self._parser = None

    def lost(self, why: str, at_s: float) -> None:
        """Note that the connection is gone, which ends a body without a length."""
        self._read_s = at_s
        if self.status is None:
            self.end(at_s, Problem(Outcome.TRUNCATED, f"{why} before a response came"))
        elif self.headers.keys().isdisjoint(("content-length", "transfer-encoding")):
            self._complete()
        else:
            self._finish(why)

    def on_message_begin(self) -> None:
        # A second response to one request began.
        self.keep_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.status is None:  # else it is a trailer
            key = name.decode("latin-1").lower()
            text = value.decode("latin-1")
            self.headers[key] = (
                f"{self.headers[key]}, {text}" if key in self.headers else text
            )

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        headers = self.headers
        if self.is_complete:
            return
        if 100 <= status < 200:
            headers.clear()
            if status == 101:
                self._refuse("the server wants to speak another protocol (status 101)")
            return
        self.status = status
        coding = headers.get("content-encoding", "identity").lower()
        if coding != "identity":
            self._refuse(
                f"the response is compressed ({coding}), which the request did not allow"
            )

    def on_body(self, piece: bytes) -> None:
        if self.ended.done():
            return
        if self.first_byte_s is None:
            self.first_byte_s = self._read_s
            kind = self.headers.get("content-type", "").lower()
            says_so = kind.startswith("text/event-stream") and not piece.startswith(
                b"{"
            )
            self._is_stream = self.status == 200 and (
                says_so or _STREAM.match(piece) is not None
            )
        if not self._is_stream:
            self.body += piece[: MAX_BODY_BYTES - len(self.body)]
        elif self.reader.feed(piece, self._read_s):
            self.end(self._read_s, self.reader.problem)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        # Else it was an interim response.
        if self.status is not None and not self.is_complete:
            self.keep_alive = self._parser.should_keep_alive()
            self._complete()

    def _complete(self) -> None:
        self.is_complete = True
        self._finish("the body ended")

    def _refuse(self, text: str) -> None:
        self.end(self._read_s, Problem(Outcome.MALFORMED, one_line(text)))

    def _finish(self, why: str) -> None:
        if self.ended.done():
            return
        if self._is_stream:
            self.reader.cut(why)
            self.end(self._read_s, self.reader.problem)
        else:
            self.end(self._read_s, self._judge(why))

    def _judge(self, why: str) -> Problem:
        """Return the problem of a response that is not a stream of events."""
        status = self.status or 0
        text = message_of(bytes(self.body))
        if status in (429, 503):
            return Problem(Outcome.REFUSED, text)
        if 400 <= status < 600:
            return Problem(
                Outcome.CLIENT_ERROR if status < 500 else Outcome.SERVER_ERROR, text
            )
        if status != 200:
            location = self.headers.get("location", "")
            return Problem(Outcome.MALFORMED, one_line(f"status {status} {location}"))
        if not self.body:
            return Problem(Outcome.TRUNCATED, f"{why} without any event")
        try:
            found: object = msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            found = None
        if isinstance(found, dict):
            what = f": {text}" if "error" in found else " instead of a stream of events"
            return Problem(
                Outcome.NOT_STREAMED, one_line(f"the response is one JSON body{what}")
            )
        kind = self.headers.get("content-type", "of no type")
        return Problem(Outcome.MALFORMED, one_line(f"the response is {kind}: {text}"))


class Session:
    """The connections to one server. An async context manager, for one event loop."""

    def __init__(self, target: Target) -> None:
        """Open no connection yet. Raises `ConfigError` for an unusable target."""
        address = server_address(target.url)
        self.base_path = address.base_path
        self._place = address
        self._key = target.api_key
        self._tls = tls_of(target) if address.is_tls else None
        self._connections: set[Connection] = set()
        self._idle: list[Connection] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        for connection in self._connections:
            connection.close()
        # Transports that were aborted close in the next turn of the loop.
        await asyncio.sleep(0)

    async def open_ahead(self, num_connections: int, timeout_s: float) -> None:
        """Open idle connections; a failed one is tried again, and judged, when it is needed."""
        opened = await asyncio.gather(
            *(self.open(timeout_s) for _ in range(num_connections))
        )
        for connection in opened:
            if isinstance(connection, Connection):
                self.give_back(connection)

    def take(self) -> Connection | None:
        """Return an idle connection that is young enough, for the caller alone."""
        while self._idle:
            connection = self._idle.pop()
            if (
                connection.is_idle
                and monotonic() - connection.idle_since_s < IDLE_LIMIT_S
            ):
                return connection
            self._close(connection)
        return None

    def give_back(self, connection: Connection) -> None:
        """Keep the connection for the next request if it can be used again, else close it."""
        if connection.is_idle:
            self._idle.append(connection)
        else:
            self._close(connection)

    def _close(self, connection: Connection) -> None:
        connection.close()
        self._connections.discard(connection)

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Return the bytes of a request."""
        head = [
            f"{method} {path} HTTP/1.1",
            f"Host: {self._place.authority}",
            "Accept: text/event-stream, application/json",
            "Accept-Encoding: identity",
            "User-Agent: baton-bench",
        ]
        if body:
            head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        if self._key:
            head.append(f"Authorization: Bearer {self._key}")
        return "\r\n".join([*head, "", ""]).encode() + body

    async def open(self, timeout_s: float) -> Connection | Problem:
        """Return a new connection, for the caller alone, or the reason why there is none."""
        address = self._place
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                _, connection = await loop.create_connection(
                    Connection, address.host, address.port, ssl=self._tls
                )
        except (OSError, UnicodeError) as error:
            # Not the system's limit.
            if isinstance(error, TimeoutError) and error.errno is None:
                return Problem(
                    Outcome.UNREACHABLE, f"no connection within {timeout_s:g} s"
                )
            return reason_of(error)
        self._connections.add(connection)
        return connection

    async def exchange(
        self,
        connection: Connection,
        request: bytes,
        exchange: Exchange,
        timeout_s: float,
    ) -> None:
        """Send, and return when `exchange` has ended. The session then owns the connection."""
        try:
            connection.send(request, exchange)
            await asyncio.wait({exchange.ended}, timeout=timeout_s)
            late = f"the response did not end within {timeout_s:g} s"
            exchange.end(monotonic(), Problem(Outcome.TIMED_OUT, late))
            if exchange.reader.done and connection.is_open and not connection.is_idle:
                # The end of the body most likely comes at once.
                exchange.drained = asyncio.get_running_loop().create_future()
                await asyncio.wait({exchange.drained}, timeout=SHUTDOWN_TIMEOUT_S)
        finally:
            self.give_back(connection)


def settled(target: Target, requests: Sequence[Planned]) -> Target:
    """Return `target` with its API chosen for `requests`, and by default the environment's key."""
    api = target.api
    if api == "auto":
        api = "chat" if any(planned.messages for planned in requests) else "completions"
    target.extra  # noqa: B018  it raises if the text is not a JSON object
    api_key = target.api_key or os.environ.get(API_KEY_VARIABLE, "")
    return msgspec.structs.replace(target, api=api, api_key=api_key)


def check(target: Target, requests: Sequence[Planned]) -> None:
    """Raise `ConfigError` if these requests cannot be sent to this target."""
    server_address(target.url)
    if taken := [name for name in OWN_FIELDS if name in target.extra]:
        raise ConfigError(
            f"the extra body must not set {', '.join(taken)}: the load does"
        )
    if not target.api_key.isprintable() or not target.api_key.isascii():
        raise ConfigError("the API key must be printable ASCII")
    for planned in requests:
        if planned.messages and not target.is_chat:
            raise ConfigError(
                "the load has chat messages; the completions API takes none"
            )
        if planned.prompt_ids and target.is_chat:
            raise ConfigError(
                "the load has prompts of token ids; the chat API takes none"
            )


_encode = msgspec.json.Encoder().encode


def body_of(target: Target, planned: Planned) -> bytes:
    """Return the JSON of one request."""
    body: dict[str, object] = {"model": target.model}
    if target.is_chat:
        body["messages"] = planned.messages or [
            {"role": "user", "content": planned.prompt}
        ]
    else:
        body["prompt"] = planned.prompt_ids or planned.prompt
    body["max_tokens"] = planned.output_tokens
    body["temperature"] = 0
    body["stream"] = True
    if target.usage:
        body["stream_options"] = {"include_usage": True}
    # With `ignore_eos`, `min_tokens` is not needed, and it costs some servers time in every step.
    if target.ignore_eos:
        body["ignore_eos"] = True
    if target.token_ids:
        body["return_token_ids"] = True
    return _encode(body | target.extra)


async def send(
    session: Session, target: Target, planned: Planned, due_s: float | None = None
) -> Record | None:
    """Send `planned` at `due_s` on the monotonic clock (None: at once) and read the response.

    All stamps of the record are on that clock; `planned.at_s` is not read. A cancelled request is
    `STOPPED`; it has no record (None) if its moment had not come.
    """
    request = session.request(
        "POST", session.base_path + target.path, body_of(target, planned)
    )
    intended_s = monotonic() if due_s is None else due_s
    record = Record(
        index=planned.index,
        intended_s=intended_s,
        sent_s=intended_s,
        end_s=intended_s,
        outcome=Outcome.STOPPED,
        detail="the load was stopped before there was a connection",
        forced_tokens=planned.output_tokens if target.ignore_eos else 0,
        warm_up=planned.warm_up,
    )
    try:
        record.sent_s, found = await _connected(
            session, target.timeout_s, intended_s, due_s is None
        )
    except asyncio.CancelledError:
        record.end_s = monotonic()
        return record if record.end_s >= intended_s else None
    if isinstance(found, Problem):
        record.end_s, (record.outcome, record.detail) = monotonic(), found
        return record
    exchange = Exchange(target.is_chat)
    try:
        await session.exchange(found, request, exchange, target.timeout_s)
    except asyncio.CancelledError:
        why = "the load was stopped before the response ended"
        exchange.end(monotonic(), Problem(Outcome.STOPPED, why))
    reader = exchange.reader
    reader.fill(record, num_requested=planned.output_tokens)
    if exchange.problem is not None:
        record.outcome, record.detail = exchange.problem
    record.end_s = exchange.end_s
    record.first_byte_s = exchange.first_byte_s
    record.status = exchange.status
    return record


async def _connected(
    session: Session, timeout_s: float, due_s: float, at_once: bool
) -> tuple[float, Connection | Problem]:
    """Wait until `due_s`; return the moment of sending, and a connection or a `Problem`.

    Opening starts earlier. If it takes until after the moment, the delay counts as the server's and
    not as a lag of the client; if it failed before the moment, a second attempt at the moment
    decides.
    """
    found: Connection | Problem | None = session.take()
    opening = None if found else asyncio.create_task(session.open(timeout_s))
    sent_s = due_s
    is_early = False
    if not at_once:
        try:
            await asyncio.sleep(due_s - monotonic())
        except asyncio.CancelledError:
            if opening is not None:
                opening.cancel()
            raise
        sent_s = monotonic()
        is_early = opening is None or opening.done()
    if opening is not None:
        found = await opening
    assert found is not None
    if is_early and (isinstance(found, Problem) or not found.is_idle):
        found = await session.open(timeout_s)
    if isinstance(found, Connection) and not found.is_idle:
        session.give_back(found)
        found = Problem(Outcome.UNREACHABLE, "the server closed the connection at once")
    return sent_s, found


def tls_of(target: Target) -> ssl.SSLContext:
    """Return the TLS settings. Raises `ConfigError` for an unusable `ca_file`."""
    context = client_context(target.ca_file)
    return trusting(context) if target.insecure else context


def reason_of(error: BaseException) -> Problem:
    """Return the reason for a failed connection, with advice if the certificate is the reason."""
    if isinstance(error, ssl.SSLCertVerificationError):
        why = error.verify_message or "certificate not trusted"
        text = (
            f"TLS: the server's certificate is refused ({why}): name its authority with "
            "--ca-file FILE, or skip the check with --insecure"
        )
    elif isinstance(error, ssl.SSLError):
        why = (error.reason or str(error)).replace("_", " ").lower()
        text = f"TLS: {why}"
    elif isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        text = os.strerror(error.errno).lower()
        if error.errno in NO_SOCKET:
            return Problem(Outcome.NO_SOCKET, text)
    else:
        text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return Problem(Outcome.UNREACHABLE, one_line(text))
