"""The HTTP side of the router: endpoints, errors as JSON, health, metrics and status.

`main` makes an `App` and serves it with a `Server`; tests do the same on a free port. Every error
is turned into OpenAI's form here, except in a stream that has begun: that sends the error itself.
"""

import asyncio
import contextlib
import secrets
import time
from functools import partial

import msgspec
from aiohttp import hdrs, web
from aiohttp.http import HttpVersion11

from baton.protocol import VERSION
from baton.protocol.config import ClusterConfig
from baton.protocol.errors import BatonError, NodeError, Overloaded, RequestError
from baton.router.chat_template import ChatTemplate
from baton.router.health import Health, ServedModel
from baton.router.http.access import Access
from baton.router.http.answers import error_of, retry_headers
from baton.router.http.connections import Connection, connection_of
from baton.router.http.cors import Cors
from baton.router.http.engine import Engine
from baton.router.http.handlers import Handlers, request_id_of
from baton.router.http.metrics import HttpMetrics
from baton.router.http.open_stream import HandedOver
from baton.router.http.request_log import (
    GONE,
    RUNNING,
    Asked,
    Facts,
    RequestLog,
    Running,
    facts_of,
)
from baton.router.http.routes import PATH_END, UNKNOWN, Route, Routes, handler_of
from baton.router.http.sse import EXTRA_HEADERS, SILENCE_S
from baton.router.http.status import StatusPage, named_nodes
from baton.router.http.tracing import Tracer
from baton.runtime.log import clip, logger
from baton.runtime.metrics import CONTENT_TYPE

# The paths that are answered on connections above the limit.
PROBES = ("/live", "/health", "/metrics")
CLIENT_GONE = 499

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
        origins = config.router.allowed_origins
        self._cors = Cors(origins) if origins else None
        self._routes = Routes()
        self._add_routes()

    def _add_routes(self) -> None:
        add, handlers = self._routes.add, self._handlers
        add("/v1/completions", POST=handlers.completions)
        add("/v1/chat/completions", POST=handlers.chat)
        add("/v1/streams/{id}", GET=handlers.stream_again)
        add("/v1/models", GET=self._models, HEAD=self._models)
        add("/v1/models/{name}", GET=self._model, HEAD=self._model)
        add("/health", GET=self._health, HEAD=self._health)
        add("/live", GET=self._live, HEAD=self._live)
        add("/metrics", GET=self._metrics, HEAD=self._metrics)
        add("/version", GET=self._version, HEAD=self._version)
        if self._status is not None:
            add("/", GET=self._status.page, HEAD=self._status.page)
            add("/status.json", GET=self._status_document, HEAD=self._status_document)

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
        card, name = self._card(), request[PATH_END]
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

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer one request to any path."""
        self._num_open += 1
        self._idle.clear()
        status, began_s, name = CLIENT_GONE, time.monotonic(), request_id_of(request)
        connection, endpoint = connection_of(request), self._routes.find(request)
        is_open = False
        if request.content.is_eof():
            connection.began()
        if self._cors is not None:
            request[EXTRA_HEADERS] = self._cors.headers_for(request)
        try:
            response = await self._response_to(request, endpoint, connection)
            status = response.status
            if connection.is_spare or self._handlers.is_draining:
                response.force_close()
            if not response.prepared:
                if "X-Request-Id" not in response.headers:
                    response.headers["X-Request-Id"] = name or f"req-{secrets.token_hex(12)}"
                response.headers.extend(request.get(EXTRA_HEADERS, ()))
            name = response.headers["X-Request-Id"]
            if isinstance(response, HandedOver):
                # Nothing that aiohttp made may be kept as long as the stream is open.
                is_open, facts, route = True, facts_of(request), _route(endpoint)
                over = partial(self._stream_over, facts, route, name, began_s)
                request[RUNNING].at_end = over
            return response
        finally:
            if not is_open:
                connection.ended()
                running = request.get(RUNNING)
                self._over(request, running, _route(endpoint), status, name, began_s)

    async def _response_to(
        self, request: web.Request, endpoint: Route | None, connection: Connection
    ) -> web.StreamResponse:
        """Return the answer to a request, which may be an error."""
        try:
            if hdrs.EXPECT in request.headers:
                await _let_continue(request)
            at_once = self._answer_at_once(request, connection)
            if at_once is not None:
                return at_once
            return await handler_of(endpoint, request)(request)
        except BatonError as error:
            return self._error(error, endpoint)
        except ConnectionError:  # the client left in the moment in which its answer began
            return web.Response(status=CLIENT_GONE)
        except Exception:
            log.exception("a request broke", route=_route(endpoint))
            return self._error(BatonError("the router failed to handle this request"), endpoint)

    def _stream_over(
        self, facts: Facts, route: str, name: str, began_s: float, running: Running
    ) -> None:
        status = CLIENT_GONE if running.outcome == GONE else 200
        self._over(facts, running, route, status, name, began_s)

    def _over(
        self,
        asked: Asked,
        running: Running | None,
        route: str,
        status: int,
        name: str,
        began_s: float,
    ) -> None:
        """Count a request that is over, and report it to the logs, traces and records."""
        took_s = time.monotonic() - began_s
        self._num_open -= 1
        if not self._num_open:
            self._idle.set()
        self.metrics.answered(route, status)
        self._request_log.answered(asked, running, status, name, took_s)
        if running is None:
            return
        if self._status is not None:
            self._status.recent.answered(running, status, name, took_s)
        if self._tracer is not None:
            running.request_id = running.request_id or name
            self._tracer.record(asked.headers, route, status, took_s, running)

    def _answer_at_once(self, request: web.Request, connection: Connection) -> web.Response | None:
        """Return the answer that needs no handler, if there is one. Raises `BatonError`."""
        if connection.is_spare and request.path not in PROBES:
            text = "the router has too many open connections"
            raise Overloaded(text, code="too_many_connections")
        if self._cors is not None and (reply := self._cors.preflight(request)) is not None:
            return reply
        self._access.check(request)
        return None

    def _error(self, error: BatonError, endpoint: Route | None) -> web.Response:
        self.metrics.failed(error)
        headers = retry_headers(error)
        if error.http_status == 405 and endpoint is not None:
            headers["Allow"] = ",".join(sorted(endpoint.handlers))
        if error.http_status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return _json(error_of(error), error.http_status, headers)


async def _let_continue(request: web.Request) -> None:
    """Tell a client that waits for it to send its body. Raises `RequestError`."""
    if request.version < HttpVersion11:
        return
    if request.headers[hdrs.EXPECT].lower() != "100-continue":
        text = "the header Expect can only be 100-continue"
        raise RequestError(text, code="invalid_request", http_status=417)
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # the answer has not begun


def _route(endpoint: Route | None) -> str:
    return UNKNOWN if endpoint is None else endpoint.name


def _json(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")
