"""The HTTP side of the router: routes, errors as JSON, health, metrics, status, and the socket.

`main` makes an `App` and serves it with a `Server`; tests do the same on a free port. Every error
is turned into OpenAI's form here, except in a stream that has begun: its handler sends the error.
"""

import asyncio
import contextlib
import errno
import logging
import secrets
import time
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from baton.protocol.config import ClusterConfig, RouterConfig
from baton.protocol.errors import BatonError, NodeError, Overloaded, RequestError
from baton.protocol.version import VERSION
from baton.router.health import Health, ServedModel
from baton.router.http.access import Access
from baton.router.http.answers import error_of, retry_headers
from baton.router.http.connections import Connection, Connections, connection_of
from baton.router.http.cors import Cors
from baton.router.http.engine import Engine
from baton.router.http.handlers import Handlers, request_id_of
from baton.router.http.metrics import HttpMetrics
from baton.router.http.request_log import RUNNING, RequestLog
from baton.router.http.sse import SILENCE_S
from baton.router.http.status import StatusPage, named_nodes
from baton.router.http.tracing import Tracer
from baton.router.text.chat_template import ChatTemplate
from baton.runtime.exposition import CONTENT_TYPE
from baton.runtime.log import ROOT, clip, logger
from baton.runtime.tls import LOOK_S, ServerCertificate

BACKLOG = 4096
# How many connections the event loop accepts before it does anything else.
ACCEPTS = 16
# The paths that are answered on connections above the limit.
PROBES = ("/live", "/health", "/metrics")
# How long the server waits at its end for answers that were told to end.
CLOSE_S = 0.3
CLIENT_GONE = 499

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logger("router")


class App:
    """The web application around one engine."""

    def __init__(
        self,
        engine: Engine,
        config: ClusterConfig,
        chat_template: ChatTemplate | None = None,
        silence_s: float = SILENCE_S,
        tracer: Tracer | None = None,
    ) -> None:
        self._tracer = tracer
        self._baton_version = VERSION
        self._name = config.router.name
        self.metrics = HttpMetrics(
            config.model.shown_name,
            self._baton_version,
            self._name if config.router.shares_port else "",
        )
        self._handlers = Handlers(engine, config, self.metrics, chat_template, silence_s)
        self._request_log = RequestLog(config.log)
        self._access = Access(config.router)
        self._engine = engine
        began_at = time.time()
        self._created = int(began_at)
        self._status: StatusPage | None = None
        if config.router.page:
            self._status = StatusPage(self._baton_version, self._name, began_at)
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.web = web.Application(middlewares=[self._answer_errors])
        origins = config.router.allowed_origins
        self._cors = Cors(origins) if origins else None
        if self._cors is not None:
            self.web.on_response_prepare.append(self._cors.on_prepare)
        self.web.add_routes(
            [
                web.post("/v1/completions", self._handlers.completions),
                web.post("/v1/chat/completions", self._handlers.chat),
                web.get("/v1/streams/{id}", self._handlers.stream_again, allow_head=False),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name:.+}", self._model),
                web.get("/health", self._health),
                web.get("/live", self._live),
                web.get("/metrics", self._metrics),
                web.get("/version", self._version),
            ]
        )
        if self._status is not None:
            page = web.get("/", self._status.page)
            self.web.add_routes([page, web.get("/status.json", self._status_document)])

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, and wait up to `grace_s` for those under way."""
        self._handlers.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._idle.wait()

    def close(self) -> None:
        """End the helper processes. It may be called again."""
        self._handlers.close()

    # --- endpoints ------------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.Response:
        return _json(msgspec.json.encode({"object": "list", "data": [self._card()]}))

    async def _model(self, request: web.Request) -> web.Response:
        card, name = self._card(), request.match_info["name"]
        if name != card["id"]:
            text = f"the model {clip(name)!r} does not exist"
            raise RequestError(text, code="model_not_found", param="model", http_status=404)
        return _json(msgspec.json.encode(card))

    def _card(self) -> dict[str, object]:
        try:
            model = self._engine.get_model_config()
        except NodeError as error:
            raise Overloaded("no node is ready yet", code="not_ready") from error
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "baton",
            "max_model_len": model.max_model_len,
        }

    async def _health(self, request: web.Request) -> web.Response:
        health = self._health_now()
        body = {
            "router": self._name,
            **msgspec.structs.asdict(health),
            "nodes": named_nodes(health),
        }
        return _json(msgspec.json.encode(body), 200 if health.can_serve else 503)

    def _health_now(self) -> Health:
        health = self._engine.health()
        if self._handlers.is_draining:
            text = "the router is ending: it finishes its requests and takes no new ones"
            health = msgspec.structs.replace(health, status="draining", message=text)
        return health

    async def _live(self, request: web.Request) -> web.Response:
        # This is not readiness: status 503 means that only a restart can help.
        if self._engine.errored:
            return _json(msgspec.json.encode({"status": "failed"}), 503)
        return _json(msgspec.json.encode({"status": "live"}))

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            body=self.metrics.render(self._engine.health(), self._model_now()),
            headers={"Content-Type": CONTENT_TYPE},
        )

    async def _status_document(self, request: web.Request) -> web.Response:
        assert self._status is not None
        body = self._status.document(
            time.time(), self._health_now(), self._model_now(), self.metrics
        )
        return _json(body, headers={"Cache-Control": "no-store"})

    def _model_now(self) -> ServedModel | None:
        """Return the model; None while no node has been ready."""
        with contextlib.suppress(NodeError):
            return self._engine.get_model_config()
        return None

    async def _version(self, request: web.Request) -> web.Response:
        return _json(msgspec.json.encode({"version": self._baton_version}))

    # --- around every request -------------------------------------------------------------------

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._num_open += 1
        self._idle.clear()
        status, began_s, name = CLIENT_GONE, time.monotonic(), request_id_of(request)
        connection = connection_of(request)
        if request.content.is_eof():
            connection.began()
        try:
            try:
                at_once = self._answer_at_once(request, connection)
                response = await handler(request) if at_once is None else at_once
            except BatonError as error:
                response = self._error(error)
            except web.HTTPException as error:
                response = self._error(_named(request, error), error.headers.get("Allow"))
            except ConnectionError:  # the client left in the moment in which its answer began
                response = web.Response(status=CLIENT_GONE)
            except Exception:
                log.exception("a request broke", route=_route(request))
                response = self._error(BatonError("the router failed to handle this request"))
            status = response.status
            if connection.is_spare or self._handlers.is_draining:
                response.force_close()
            if not response.prepared and "X-Request-Id" not in response.headers:
                response.headers["X-Request-Id"] = name or f"req-{secrets.token_hex(12)}"
            name = response.headers["X-Request-Id"]
            return response
        finally:
            connection.ended()
            self._num_open -= 1
            if not self._num_open:
                self._idle.set()
            self._ended(request, status, name, time.monotonic() - began_s)

    def _answer_at_once(self, request: web.Request, connection: Connection) -> web.Response | None:
        """Return the answer that needs no handler, if there is one. Raises `BatonError`."""
        if connection.is_spare and request.path not in PROBES:
            text = "the router has too many open connections"
            raise Overloaded(text, code="too_many_connections")
        if self._cors is not None and (reply := self._cors.preflight(request)) is not None:
            return reply
        self._access.check(request)
        return None

    def _ended(self, request: web.Request, status: int, name: str, took_s: float) -> None:
        """Count an answered request, and report it to the logs, traces and records."""
        route = _route(request)
        self.metrics.answered(route, status)
        self._request_log.answered(request, status, name, took_s)
        if self._status is not None:
            self._status.recent.answered(request, status, name, took_s)
        if self._tracer is not None and (running := request.get(RUNNING)) is not None:
            running.request_id = running.request_id or name
            self._tracer.record(request.headers, route, status, took_s, running)

    def _error(self, error: BatonError, allow: str | None = None) -> web.Response:
        self.metrics.failed(error)
        headers = retry_headers(error)
        if allow is not None:
            headers["Allow"] = allow
        if error.http_status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return _json(error_of(error), error.http_status, headers)


class Server:
    """An `App` on a listening socket."""

    def __init__(
        self, app: App, config: RouterConfig, certificate: ServerCertificate | None = None
    ) -> None:
        """With a certificate, the server speaks https only."""
        self._app = app
        self._config = config
        self._certificate = certificate
        self._looking: asyncio.TimerHandle | None = None
        self._http_log = logging.getLogger(f"{ROOT}.http")
        self._http_log.addFilter(_is_ours)
        self._runner = web.AppRunner(
            app.web,
            # If a client leaves, its handler ends and with it the request.
            handler_cancellation=True,
            shutdown_timeout=CLOSE_S,
        )
        self._connections: Connections | None = None
        self._listener: asyncio.Server | None = None
        self._own_listener: asyncio.Server | None = None

    async def start(self) -> str:
        """Start to listen, and return the URL. Raises a `NodeError` that says what to do."""
        await self._runner.setup()
        manager, config = self._runner.server, self._config
        assert manager is not None
        tls = self._certificate.context if self._certificate is not None else None
        self._connections = Connections(manager, self._http_log, config, tls)
        self._listener = await self._listen(config.port, is_shared=config.shares_port)
        if config.own_port:
            self._own_listener = await self._listen(config.own_port, is_shared=False)
        self._look_at_certificate()
        port = self._listener.sockets[0].getsockname()[1]
        scheme = "http" if self._certificate is None else "https"
        return f"{scheme}://{f'[{config.host}]' if ':' in config.host else config.host}:{port}"

    def _look_at_certificate(self) -> None:
        if self._certificate is not None:
            self._certificate.look()
            loop = asyncio.get_running_loop()
            self._looking = loop.call_later(LOOK_S, self._look_at_certificate)

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
        await self._app.drain(grace_s)

    async def stop(self) -> None:
        """Close all connections. It may be called again."""
        if self._looking is not None:
            self._looking.cancel()
        for listener in (self._listener, self._own_listener):
            if listener is not None:
                listener.close()
        if self._connections is not None:
            self._connections.close()
        self._app.close()
        await self._runner.cleanup()


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


def _named(request: web.Request, error: web.HTTPException) -> BatonError:
    """Return a refusal by aiohttp as a `BatonError`."""
    match error.status:
        case 404:
            text, code = f"there is no {request.method} {clip(request.path)}", "unknown_url"
        case 405:
            text = f"{clip(request.path)} does not take {clip(request.method)}"
            code = "method_not_allowed"
        case _:
            text, code = error.text or error.reason, "invalid_request"
    return RequestError(text, code=code, http_status=error.status)


def _route(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unknown"


def _json(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")
