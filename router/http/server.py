"""Listen for HTTP clients, and close all connections at the end.

`main` makes a `Server` around an `App`. aiohttp's low-level server calls `App.answer` for every
request: its application would do more for a request than `App` needs. This file answers nothing.
"""

import asyncio
import errno
import logging
import ssl

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from baton.protocol.config import RouterConfig
from baton.protocol.errors import NodeError
from baton.router.http.app import App
from baton.router.http.connections import Connections
from baton.runtime.log import ROOT

BACKLOG = 4096
# How many connections the event loop accepts before it does anything else.
ACCEPTS = 16
# How long the server waits at its end for answers that were told to end.
CLOSE_S = 0.3


class Server:
    """An `App` on a listening socket."""

    def __init__(self, app: App, config: RouterConfig, tls: ssl.SSLContext | None = None) -> None:
        """With `tls`, the server speaks https only."""
        self._app = app
        self._config = config
        self._tls = tls
        self._http_log = logging.getLogger(f"{ROOT}.http")
        self._http_log.addFilter(_is_ours)
        self._runner: web.ServerRunner | None = None
        self._connections: Connections | None = None
        self._listener: asyncio.Server | None = None
        self._own_listener: asyncio.Server | None = None

    async def start(self) -> str:
        """Start to listen, and return the URL. Raises a `NodeError` that says what to do."""
        manager, config = _server_of(self._app), self._config
        self._runner = web.ServerRunner(manager, shutdown_timeout=CLOSE_S)
        await self._runner.setup()
        self._connections = Connections(manager, self._http_log, config, self._tls)
        self._listener = await self._listen(config.port, is_shared=config.shares_port)
        if config.own_port:
            self._own_listener = await self._listen(config.own_port, is_shared=False)
        port = self._listener.sockets[0].getsockname()[1]
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://{f'[{config.host}]' if ':' in config.host else config.host}:{port}"

    async def _listen(self, port: int, *, is_shared: bool) -> asyncio.Server:
        assert self._connections is not None
        host = self._config.host
        try:
            listener = await asyncio.get_running_loop().create_server(
                self._connections,
                None if host in ("", "*") else host,
                port,
                backlog=ACCEPTS,
                reuse_port=is_shared,
            )
        except OSError as error:
            await self.stop()
            raise NodeError(_why_not(host, port, error), code="no_port") from error
        for listening in listener.sockets:
            # asyncio uses one number for both: connections to accept at once and connections that
            # may wait.
            with listening.dup() as same:
                same.listen(BACKLOG)
        return listener

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, and wait up to `grace_s` for answers under way.

        Meanwhile, probes and refusals are still answered. If other processes listen on the same
        port, they get new connections.
        """
        if self._listener is not None and self._config.shares_port:
            self._listener.close()
        if self._connections is not None:
            self._connections.drain()
        await self._app.drain(grace_s)

    async def stop(self) -> None:
        """Close all connections. It may be called again."""
        for listener in (self._listener, self._own_listener):
            if listener is not None:
                listener.close()
        self._app.close()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._connections is not None:
            self._connections.close()
            await asyncio.sleep(0)  # in which the ends of connections are told


def _server_of(app: App) -> web.Server:
    """Return aiohttp's low-level server: its application does more for a request than `App`."""
    loop = asyncio.get_running_loop()

    def request_of(*parts: object) -> web.Request:
        return web.Request(*parts, loop)  # type: ignore[arg-type, call-arg]  # aiohttp calls it

    # If a client leaves, its handler ends and with it the request.
    return web.Server(app.answer, request_factory=request_of, handler_cancellation=True)  # type: ignore[arg-type]


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
