"""The HTTP side of a node, for probes and Prometheus: `/live`, `/ready` and `/metrics`.

The node's shell starts it if `node.http` is set. It runs on an event loop in its own thread and
only reads `Vitals`, so it and the engine loop never wait for each other. The number of its
connections is bounded, because they take descriptors of the node.
"""

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future

import msgspec
from aiohttp import web

from baton.node.heartbeat import Vitals
from baton.node.sockets import RouterStanding
from baton.protocol.errors import ConfigError
from baton.protocol.ids import NodeId
from baton.protocol.messages import NodeInfo, Role
from baton.runtime.clock import Clock
from baton.runtime.host import AcceptErrors
from baton.runtime.metrics import CONTENT_TYPE, NodeHealth, Page, add_nodes

# A loop that hangs for this long will not recover. Routers consider the node stuck before that.
DEAD_S = 60.0
DEAD_FACTOR = 16.0  # times the predicted time of a step
STOP_S = 2.0
# Probes and scrapes need a few connections. A new connection replaces the oldest.
MAX_CONNECTIONS = 64
ACCEPTS = 16  # connections accepted at once, before the replaced ones are closed
BACKLOG = 1024  # that may wait


class NodeHttp:
    """Serves from `start` to `stop`.

    `info` returns what the node has published, or None before that; `routers` returns the node's
    standing at each router.
    """

    def __init__(
        self,
        vitals: Vitals,
        clock: Clock,
        node: tuple[NodeId, Role],
        model_name: str,
        info: Callable[[], NodeInfo | None],
        routers: Callable[[], tuple[RouterStanding, ...]],
    ) -> None:
        self.url = ""
        self._vitals = vitals
        self._clock = clock
        self._node = node
        self._model_name = model_name
        self._info = info
        self._routers = routers
        self._started: Future[None] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Event | None = None
        self._thread: threading.Thread | None = None

    def start(self, address: str) -> None:
        """Serve on `host:port`. Raises `ConfigError` if that address cannot be bound."""
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(
                f"node.http is {address!r}: write host:port, such as 127.0.0.1:9100"
            )
        is_any = host == "*" and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if ":" in host or is_any else socket.AF_INET
        bound = "" if host == "*" else host
        try:
            listener = socket.create_server(
                (bound, int(port)), family=family, dualstack_ipv6=is_any
            )
        except OSError as error:
            raise ConfigError(
                f"cannot serve node.http on {address}: {error.strerror}"
            ) from error
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{listener.getsockname()[1]}"
        self._thread = threading.Thread(
            target=asyncio.run, args=(self._serve(listener),), name="http", daemon=True
        )
        self._thread.start()
        self._started.result()

    def stop(self) -> None:
        """Close the port. It may be called twice, and without `start`."""
        if (
            self._loop is not None
            and self._ending is not None
            and not self._loop.is_closed()
        ):
            self._loop.call_soon_threadsafe(self._ending.set)
        if self._thread is not None:
            self._thread.join(STOP_S)

    async def _serve(self, listener: socket.socket) -> None:
        self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.add_routes(
            [
                web.get("/live", self._live),
                web.get("/ready", self._ready),
                web.get("/metrics", self._metrics),
            ]
        )
        self._loop.set_exception_handler(AcceptErrors(self._loop))
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=STOP_S / 2)
        try:
            try:
                await runner.setup()
                assert runner.server is not None
                accepting = await self._loop.create_server(
                    _bounded(runner.server), sock=listener, backlog=ACCEPTS
                )
                # asyncio uses one number for both: connections to accept at once and connections
                # that may wait.
                listener.listen(BACKLOG)
            except Exception as error:
                self._started.set_exception(error)  # `start` raises the error
                raise
            self._started.set_result(None)
            await self._ending.wait()
            accepting.close()
        finally:
            await runner.cleanup()
            listener.close()

    async def _live(self, request: web.Request) -> web.Response:
        """Answer 503 if only a restart can help."""
        now_s = self._clock()
        signs = self._vitals.signs
        if signs.loop_age_s(now_s) > DEAD_S:
            return _json("the node's engine loop hangs", 503)
        if signs.step_age_s(now_s) > max(DEAD_S, DEAD_FACTOR * signs.predicted_s):
            return _json("a step of the model hangs", 503)
        return _json("live", 200)

    async def _ready(self, request: web.Request) -> web.Response:
        """Answer 200 once the node is loaded, and say which routers give it requests."""
        signs = self._vitals.signs
        routers = self._routers()
        if signs.is_draining:
            return _json("draining", 503, routers)
        if not signs.is_ready:
            return _json(f"starting: {signs.phase}", 503, routers)
        return _json("ready", 200, routers)

    async def _metrics(self, request: web.Request) -> web.Response:
        page = Page({"model_name": self._model_name})
        routers = {
            (*self._node, one.router): one.state == "in service"
            for one in self._routers()
        }
        add_nodes(page, [self._health()], in_service=routers)
        return web.Response(body=page.text(), headers={"Content-Type": CONTENT_TYPE})

    def _health(self) -> NodeHealth:
        signs, (node_id, role) = self._vitals.signs, self._node
        return NodeHealth(
            node_id,
            role,
            "draining"
            if signs.is_draining
            else "ready"
            if signs.is_ready
            else "starting",
            load=signs.load,
            totals=self._vitals.totals(),
            step_age_s=signs.step_age_s(self._clock()),
        ).with_info(self._info())


def _bounded(server: web.Server) -> Callable[[], web.RequestHandler]:
    """Return a factory that makes each connection's protocol, and room for it."""

    def make() -> web.RequestHandler:
        connections = server.connections
        for oldest in connections[: max(0, len(connections) + 1 - MAX_CONNECTIONS)]:
            if oldest.transport is not None:
                oldest.transport.abort()
        return server()

    return make


def _json(
    status: str, code: int, routers: tuple[RouterStanding, ...] | None = None
) -> web.Response:
    document = (
        {"status": status}
        if routers is None
        else {"status": status, "routers": routers}
    )
    body = msgspec.json.encode(document)
    return web.Response(body=body, status=code, content_type="application/json")
