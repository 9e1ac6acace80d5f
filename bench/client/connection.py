"""A connection that stamps what arrives.

The client sends one request at a time on each. The stamp is taken first thing when the event loop
hands the bytes over, before anything is parsed; an HTTP library would hand them on to a task that
runs later, after the reads of all other connections. Nothing is ever sent twice.
"""

import asyncio
import errno
import os
import ssl

import httptools

from baton.bench.client.answer_reader import Problem, one_line
from baton.bench.client.exchange import Exchange
from baton.bench.client.target import Target
from baton.bench.records import Outcome
from baton.protocol.errors import ConfigError
from baton.runtime.clock import monotonic

# This machine had nothing left for a connection.
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
        """Close the connection at once: what is on its way is not wanted any more."""
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


def reason_of(error: BaseException) -> Problem:
    """Return why there is no connection, and what to do if it is the certificate."""
    if isinstance(error, ssl.SSLCertVerificationError):
        why = error.verify_message or "certificate not trusted"
        text = (
            f"TLS: the server's certificate is refused ({why}): name its authority with "
            "--ca-file FILE, or do not check it (--insecure)"
        )
    elif isinstance(error, ssl.SSLError):
        why = (error.reason or str(error)).replace("_", " ").lower()
        is_plain = "wrong version" in why or "record layer" in why
        text = f"TLS: {why}" + (": http:// instead of https://?" if is_plain else "")
    elif isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        text = os.strerror(error.errno).lower()
        if error.errno in NO_SOCKET:
            return Problem(Outcome.NO_SOCKET, text)
    else:
        text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return Problem(Outcome.UNREACHABLE, one_line(text))


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
