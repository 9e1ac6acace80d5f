"""A connection that stamps what arrives, and the idle ones that are kept for the next request.

The client sends one request at a time on each. The stamp is taken first thing when the event loop
hands the bytes over, before anything is parsed; an HTTP library would hand them on to a task that
runs later, after the reads of all other connections. Nothing is ever sent twice.
"""

import asyncio
import errno
import os
import ssl
from typing import Protocol

from baton.bench.client.http_wire import ResponseParser, WireError
from baton.bench.client.target import Place, Target
from baton.protocol.errors import ConfigError
from baton.runtime.clock import Clock

# Servers close idle connections after 5 s and more; a request must not cross that on the way.
IDLE_LIMIT_S = 2.0
NO_SOCKET = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)


class Receiver(Protocol):
    """Whoever sent the request that a connection is busy with."""

    def received(self, response: ResponseParser, pieces: list[bytes], at_s: float) -> None:
        """Bytes of the answer came; `pieces` are those of its body."""

    def ended(self, response: ResponseParser, at_s: float) -> None:
        """The answer is complete."""

    def lost(self, why: str, is_http: bool, at_s: float) -> None:
        """No more will come: the connection is gone, or (`is_http` false) speaks nonsense."""


class Connection(asyncio.Protocol):
    """One connection. `send` when it is idle."""

    def __init__(self, clock: Clock) -> None:
        self.is_open = False
        self.idle_since_s = 0.0
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._response = ResponseParser()

    @property
    def is_idle(self) -> bool:
        return self.is_open and self._receiver is None

    def send(self, request: bytes, receiver: Receiver) -> None:
        assert self.is_idle
        assert self._transport is not None
        self._receiver, self._response = receiver, ResponseParser()
        self._transport.write(request)

    def close(self) -> None:
        """At once: what is on its way is not wanted any more."""
        self.is_open, self._receiver = False, None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.is_open = transport, True
        self.idle_since_s = self._clock()

    def data_received(self, data: bytes) -> None:
        at_s = self._clock()
        receiver, response = self._receiver, self._response
        if receiver is None:
            self.close()  # nobody asked
            return
        try:
            pieces = response.feed(data)
        except WireError as error:
            self.close()
            receiver.lost(error.message, False, at_s)
            return
        receiver.received(response, pieces, at_s)
        if response.is_complete and self._receiver is receiver:
            self._complete(receiver, at_s)

    def connection_lost(self, error: Exception | None) -> None:
        at_s = self._clock()
        self.is_open = False
        if (receiver := self._receiver) is None:
            return
        if self._response.end_of_input():
            self._complete(receiver, at_s)
            return
        self._receiver = None
        why = "the connection was reset" if error is not None else "the connection was closed"
        receiver.lost(why, True, at_s)

    def _complete(self, receiver: Receiver, at_s: float) -> None:
        self._receiver, self.idle_since_s = None, at_s
        receiver.ended(self._response, at_s)
        if not self._response.keep_alive:
            self.close()


class Pool:
    """Connections to one place. Not a limit: whoever finds none opens one."""

    def __init__(self, target: Target, place: Place, clock: Clock) -> None:
        """Raises `ConfigError` for an unusable `ca_file`."""
        self._place, self._clock = place, clock
        self._tls = _tls(target) if place.is_tls else None
        self._connections: set[Connection] = set()
        self._idle: list[Connection] = []

    def take(self) -> Connection | None:
        """An idle connection that is young enough, for the caller alone."""
        while self._idle:
            connection = self._idle.pop()
            young = self._clock() - connection.idle_since_s < IDLE_LIMIT_S
            if young and connection.is_idle:
                return connection
            self.discard(connection)
        return None

    async def open(self) -> Connection:
        """A new one, for the caller alone; raises `OSError` (TLS errors are such), or
        `ValueError` for an impossible name."""
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(self._clock),
            self._place.host,
            self._place.port,
            ssl=self._tls,
        )
        self._connections.add(connection)
        return connection

    def give_back(self, connection: Connection) -> None:
        """It is done with; kept if it can be used again."""
        if connection.is_idle:
            self._idle.append(connection)
        else:
            self.discard(connection)

    def discard(self, connection: Connection) -> None:
        connection.close()
        self._connections.discard(connection)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        self._idle.clear()


def is_clients(error: BaseException) -> bool:
    """Whether it is this machine that had nothing left for a connection."""
    return isinstance(error, OSError) and error.errno in NO_SOCKET


def reason_of(error: BaseException) -> str:
    """Why there is no connection, and what to do if it is the certificate."""
    if isinstance(error, ssl.SSLCertVerificationError):
        why = error.verify_message or "certificate not trusted"
        return (
            f"TLS: the server's certificate is refused ({why}): name its authority with "
            "--ca-file FILE, or do not check it (--insecure)"
        )
    if isinstance(error, ssl.SSLError):
        why = (error.reason or str(error)).replace("_", " ").lower()
        hint = ": http:// instead of https://?" if "wrong version" in why else ""
        hint = hint or (": http:// instead of https://?" if "record layer" in why else "")
        return f"TLS: {why}{hint}"
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno).lower()
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _tls(target: Target) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=target.ca_file or None)
    except (OSError, ssl.SSLError) as error:
        text = f"cannot read certificates from {target.ca_file!r}: {error.strerror or error}"
        raise ConfigError(text) from None
    context.set_alpn_protocols(["http/1.1"])
    if target.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
