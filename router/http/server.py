"""Listen for HTTP clients, drain, and close all connections at the end."""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
from asyncio import sslproto
from functools import partial

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from baton.protocol.config import RouterConfig
from baton.protocol.errors import ConfigError, NodeError
from baton.router.http.app import App
from baton.router.http.connections import Connection, Connections
from baton.runtime.log import ROOT
from baton.runtime.unix_socket import bind_socket, url_of_socket

BACKLOG = 4096
# Those of IPv4 and IPv6. `::` alone would be IPv6's, which is what nobody means by it.
EVERY_ADDRESS = ("", "*", "::")
# How many connections the event loop accepts before it does anything else.
ACCEPTS = 16
# How long the server waits at shutdown for responses that were told to end.
CLOSE_S = 0.3
# How long a client may take to agree on TLS.
HANDSHAKE_S = 10
# asyncio's buffer of each connection with TLS; its own size is 256 KiB. A record has 16 KiB.
TLS_BUFFER_BYTES = 16 * 1024


class Server:
    """An `App` on a port or a Unix socket."""

    def __init__(
        self, app: App, config: RouterConfig, tls: ssl.SSLContext | None = None
    ) -> None:
        """With `tls`, the server speaks https only."""
        self._app = app
        self._config = config
        self._tls = tls
        http_log = logging.getLogger(f"{ROOT}.http")
        http_log.addFilter(_is_ours)
        # If a client leaves, its handler is cancelled and with it the request.
        self._runner = web.AppRunner(
            app.application,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=CLOSE_S,
        )
        if tls is not None:
            sslproto.SSLProtocol.max_size = TLS_BUFFER_BYTES
        self._connections = Connections(config, http_log, app.refused)
        self._listeners: list[asyncio.Server] = []
        # The path of the Unix socket, and the device and inode that the file there has.
        self._socket_file: tuple[str, int, int] | None = None

    async def start(self) -> str:
        """Start to listen, and return the URL. Raises a `NodeError` that says what to do."""
        config = self._config
        await self._runner.setup()
        if config.uds:
            await self._listen_on_socket(config.uds)
        else:
            await self._listen(
                config.port, is_shared=config.shares_port or config.port_is_held
            )
        if config.own_port:
            await self._listen(config.own_port, is_shared=False)
        if config.uds:
            return url_of_socket(config.uds)
        port = self._listeners[0].sockets[0].getsockname()[1]
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://{f'[{config.host}]' if ':' in config.host else config.host}:{port}"

    async def _listen_on_socket(self, path: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            bound = bind_socket(path)
        except ConfigError as error:
            await self.stop()
            raise NodeError(error.message, code="no_port") from error
        status = os.stat(path)
        self._socket_file = (path, status.st_dev, status.st_ino)
        listener = await loop.create_unix_server(
            self._new_connection, sock=bound, backlog=ACCEPTS
        )
        self._add(listener)

    async def _listen(self, port: int, *, is_shared: bool) -> None:
        host = self._config.host
        handshake_s = HANDSHAKE_S if self._tls is not None else None
        serve = partial(
            asyncio.get_running_loop().create_server,
            self._new_connection,
            backlog=ACCEPTS,
            ssl=self._tls,
            ssl_handshake_timeout=handshake_s,
        )
        try:
            if host in EVERY_ADDRESS:
                listener = await serve(
                    sock=_on_every_address(port, is_shared=is_shared)
                )
            else:
                listener = await serve(host=host, port=port, reuse_port=is_shared)
        except OSError as error:
            await self.stop()
            raise NodeError(_why_not(host, port, error), code="no_port") from error
        self._add(listener)

    def _add(self, listener: asyncio.Server) -> None:
        for listening in listener.sockets:
            # asyncio uses one number for both: connections to accept at once and connections that
            # may wait.
            with listening.dup() as same:
                same.listen(BACKLOG)
        self._listeners.append(listener)

    def _new_connection(self) -> Connection:
        server = self._runner.server
        assert server is not None, "it is made by `setup`"
        return Connection(self._connections, server, asyncio.get_running_loop())

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, and wait up to `grace_s` for responses under way.

        Meanwhile, probes and refusals are still answered. If other processes listen on the same
        port, they get new connections.
        """
        if self._config.shares_port and self._listeners:
            # Accept the connections that the kernel holds for this process.
            for _ in range(2):
                await asyncio.sleep(0)
            self._listeners[0].close()
        await self._app.drain(grace_s)

    async def stop(self) -> None:
        """Close all connections. It may be called again."""
        for listener in self._listeners:
            listener.close()
        self._remove_socket_file()
        self._app.close()
        await self._runner.cleanup()
        await asyncio.sleep(0)  # in which the event loop tells the ends of connections

    def _remove_socket_file(self) -> None:
        """Remove the file of the Unix socket, unless another router has put its own there."""
        if self._socket_file is None:
            return
        path, *own = self._socket_file
        with contextlib.suppress(OSError):
            status = os.stat(path)
            if [status.st_dev, status.st_ino] == own:
                os.unlink(path)
        self._socket_file = None


def _on_every_address(port: int, *, is_shared: bool) -> socket.socket:
    """Return a socket for IPv4, and for IPv6 too where this host has it. Raises `OSError`."""
    is_dual = socket.has_dualstack_ipv6()
    return socket.create_server(
        ("", port),
        family=socket.AF_INET6 if is_dual else socket.AF_INET,
        backlog=ACCEPTS,
        reuse_port=is_shared,
        dualstack_ipv6=is_dual,
    )


def _is_ours(record: logging.LogRecord) -> bool:
    """Return whether a log record is about the router. Malformed HTTP only gets status 400."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError)


def _why_not(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use: choose another with --port N"
    if error.errno == errno.EACCES:
        return f"port {port} needs privileges: choose a port above 1023 with --port N"
    return f"cannot listen on {host}:{port}: {error.strerror or error}"
