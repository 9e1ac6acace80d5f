"""A connection that stamps what arrives, and the idle ones that are kept for the next request.

The client sends one request at a time on each. The stamp is taken first thing when the event loop
hands the bytes over, before anything is parsed; an HTTP library would hand them on to a task that
runs later, after the reads of all other connections. Nothing is ever sent twice.
"""

import asyncio
import errno
import os
import ssl

import httptools

from baton.bench.client.exchange import Exchange
from baton.bench.client.target import Place, Target
from baton.protocol.errors import ConfigError
from baton.runtime.clock import monotonic

# Servers close idle connections after 5 s and more; a request must not cross that on the way.
IDLE_LIMIT_S = 2.0
NO_SOCKET = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)


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

    def send(self, request: bytes, exchange: Exchange) -> None:
        assert self.is_idle
        assert self._transport is not None
        self._exchange, self._parser = exchange, httptools.HttpResponseParser(exchange)
        self._transport.write(request)

    def close(self) -> None:
        """Close it at once: what is on its way is not wanted any more."""
        self.is_open, self._exchange, self._parser = False, None, None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.is_open = transport, True
        self.idle_since_s = monotonic()

    def data_received(self, data: bytes) -> None:
        at_s = monotonic()
        exchange, parser = self._exchange, self._parser
        if exchange is None or parser is None:
            self.close()  # the server sends what no request asked for
            return
        exchange.feed(parser, data, at_s)
        if exchange.is_complete and self._exchange is exchange:
            self._exchange, self._parser, self.idle_since_s = None, None, at_s
            if not exchange.keep_alive:
                self.close()
            if exchange.drained is not None:
                exchange.drained.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        at_s = monotonic()
        exchange, self.is_open, self._exchange, self._parser = self._exchange, False, None, None
        if exchange is not None:
            exchange.lost("the connection was " + ("reset" if error else "closed"), at_s)


class Pool:
    """Connections to one place. Their number has no limit: a caller that finds none opens one."""

    def __init__(self, target: Target, place: Place) -> None:
        """Raises `ConfigError` for an unusable `ca_file`."""
        self._place = place
        self._tls = tls_of(target) if place.is_tls else None
        self._connections: set[Connection] = set()
        self._idle: list[Connection] = []

    def take(self) -> Connection | None:
        """Return an idle connection that is young enough, for the caller alone."""
        while self._idle:
            connection = self._idle.pop()
            young = monotonic() - connection.idle_since_s < IDLE_LIMIT_S
            if young and connection.is_idle:
                return connection
            self.give_back(connection, keep=False)
        return None

    async def open(self) -> Connection:
        """Return a new connection, for the caller alone.

        Raises `OSError` (TLS errors are such), or `ValueError` for an impossible name.
        """
        _, connection = await asyncio.get_running_loop().create_connection(
            Connection, self._place.host, self._place.port, ssl=self._tls
        )
        self._connections.add(connection)
        return connection

    def give_back(self, connection: Connection, *, keep: bool = True) -> None:
        """Keep the connection for the next request if it can be used again, else close it."""
        if keep and connection.is_idle:
            self._idle.append(connection)
        else:
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
    """Return why there is no connection, and what to do if it is the certificate."""
    if isinstance(error, ssl.SSLCertVerificationError):
        why = error.verify_message or "certificate not trusted"
        return (
            f"TLS: the server's certificate is refused ({why}): name its authority with "
            "--ca-file FILE, or do not check it (--insecure)"
        )
    if isinstance(error, ssl.SSLError):
        why = (error.reason or str(error)).replace("_", " ").lower()
        is_plain = "wrong version" in why or "record layer" in why
        return f"TLS: {why}" + (": http:// instead of https://?" if is_plain else "")
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno).lower()
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def tls_of(target: Target) -> ssl.SSLContext:
    """Raises `ConfigError` for an unusable `ca_file`."""
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
