"""The web application: paths, health, models, and what happens around every request.

Every error is turned into the form of its endpoint here, except in a stream that has begun: that
sends the error itself.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import cache

import msgspec
from aiohttp import web

from baton.protocol import VERSION
from baton.protocol.config import ClusterConfig
from baton.protocol.errors import BatonError, Overloaded, RequestError
from baton.router.core.health import Health, ServedModel
from baton.router.http.adapter_handlers import AdapterHandlers
from baton.router.http.api.anthropic import CountBody, MessageBody, message_error
from baton.router.http.api.pooling_bodies import EmbeddingBody, RerankBody, ScoreBody
from baton.router.http.api.responses_body import ResponseBody
from baton.router.http.api.schema import ChatBody, CompletionBody
from baton.router.http.api.sse import EXTRA_HEADERS, SILENCE_S
from baton.router.http.api.tokens import DetokenizeBody, TokenizeBody
from baton.router.http.auth import TENANT, Access, Cors, refuse_pages
from baton.router.http.connections import Bodies, Connection, connection_of
from baton.router.http.errors import error_of, retry_headers
from baton.router.http.handlers import Handlers
from baton.router.http.metrics import HttpMetrics
from baton.router.http.request_log import RUNNING, RequestLog, Tracer
from baton.router.http.status import StatusPage, named_nodes
from baton.router.http.submission import request_id_of
from baton.router.text.chat_template import ChatTemplate
from baton.router.text_router import TextRouter
from baton.runtime.log import clip, logger
from baton.runtime.metrics import CONTENT_TYPE

# The paths that are answered on connections above the limit.
PROBES = ("/live", "/health", "/ping", "/metrics")
CLIENT_GONE = 499
MESSAGES = "/v1/messages"
# Those of vLLM, Jina and Cohere.
SCORE_PATHS = ("/v1/score", "/score")
RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")
# The route of requests to paths that do not exist.
UNKNOWN = "unknown"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logger("router")


class App:
    """The web application around one engine."""

    def __init__(
        self,
        engine: TextRouter,
        config: ClusterConfig,
        chat_template: ChatTemplate | None = None,
        silence_s: float = SILENCE_S,
        tracer: Tracer | None = None,
    ) -> None:
        self._tracer = tracer
        self._baton_version = VERSION
        self._name = config.router.name
        self._has_dev_endpoints = config.router.dev_endpoints
        self._updates_loras = config.model.allow_runtime_lora_updating
        self.metrics = HttpMetrics(
            config.model.shown_name,
            self._baton_version,
            self._name if config.router.shares_port else "",
        )
        self._bodies = Bodies(config.router.max_body_mib)
        self._handlers = Handlers(
            engine, config, self._bodies, self.metrics, chat_template, silence_s
        )
        self._request_log = RequestLog(config.log)
        self.access = Access(config.router)
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
        self.application = web.Application(middlewares=[self._around])
        self._add_routes()

    def _add_routes(self) -> None:
        router = self.application.router
        handlers = self._handlers
        router.add_post("/v1/completions", handlers.completions)
        router.add_post("/v1/chat/completions", handlers.chat)
        router.add_post("/v1/responses", handlers.responses)
        router.add_post("/v1/responses/input_tokens", handlers.input_tokens)
        router.add_post(MESSAGES, handlers.messages)
        router.add_post(f"{MESSAGES}/count_tokens", handlers.count_tokens)
        for path, handler in (
            ("/v1/embeddings", handlers.embeddings),
            *((path, handlers.score) for path in SCORE_PATHS),
            *((path, handlers.rerank) for path in RERANK_PATHS),
        ):
            router.add_post(path, handler)
        router.add_get("/v1/models", self._models)
        router.add_get("/v1/models/{name:.+}", self._model)
        router.add_get("/health", self._health)
        router.add_get("/ping", self._health)
        router.add_post("/ping", self._health)
        router.add_get("/load", self._load)
        router.add_get("/live", self._live)
        router.add_post("/tokenize", handlers.tokenize)
        router.add_post("/detokenize", handlers.detokenize)
        router.add_get("/tokenizer_info", handlers.tokenizer_info)
        router.add_get("/metrics", self._metrics)
        router.add_get("/version", self._version)
        router.add_get("/openapi.json", self._openapi)
        if self._has_dev_endpoints:
            router.add_post("/reset_prefix_cache", self._reset_prefix_cache)
            router.add_post("/start_profile", self._start_profile)
            router.add_post("/stop_profile", self._stop_profile)
        if self._updates_loras:
            adapters = AdapterHandlers(self._engine, self._bodies)
            router.add_post("/v1/load_lora_adapter", adapters.load)
            router.add_post("/v1/unload_lora_adapter", adapters.unload)
        if self._status is not None:
            router.add_get("/", self._status.page)
            router.add_get("/status.json", self._status_document)

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

    async def _openapi(self, request: web.Request) -> web.Response:
        return _json(document())

    async def _models(self, request: web.Request) -> web.Response:
        return _json(msgspec.json.encode({"object": "list", "data": self._cards()}))

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        for card in self._cards():
            if card["id"] == name:
                return _json(msgspec.json.encode(card))
        text = f"the model {clip(name)!r} does not exist"
        raise RequestError(text, code="model_not_found", param="model", http_status=404)

    def _cards(self) -> list[dict[str, object]]:
        """Return a card for each name of the model, and those of its adapters."""
        model = self._engine.get_model_config()
        card = {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "baton",
            "max_model_len": model.max_model_len,
        }
        others = [card | {"id": name} for name in model.other_names]
        names = (*model.lora_modules, *model.run_time_loras)
        adapters = [card | {"id": name, "parent": model.name} for name in names]
        return [card, *others, *adapters]

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
            text = "the router is shutting down: it finishes its requests and takes no new ones"
            health = msgspec.structs.replace(health, status="draining", message=text)
        return health

    async def _load(self, request: web.Request) -> web.Response:
        health = self._engine.health()
        load = {"server_load": health.num_running + health.num_queued}
        return _json(msgspec.json.encode(load))

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        refuse_pages(request)
        self._engine.core.notifier.reset_prefix_caches()
        return web.Response()

    async def _start_profile(self, request: web.Request) -> web.Response:
        refuse_pages(request)
        return _json(msgspec.json.encode(self._engine.core.notifier.start_profile()))

    async def _stop_profile(self, request: web.Request) -> web.Response:
        refuse_pages(request)
        return _json(msgspec.json.encode(self._engine.core.notifier.stop_profile()))

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
        with contextlib.suppress(Overloaded):
            return self._engine.get_model_config()
        return None

    async def _version(self, request: web.Request) -> web.Response:
        return _json(msgspec.json.encode({"version": self._baton_version}))

    # --- around every request -------------------------------------------------------------------

    @web.middleware
    async def _around(
        self, request: web.Request, handler: Handler
    ) -> web.StreamResponse:
        """Respond to one request to any path."""
        self._num_open += 1
        self._idle.clear()
        status = CLIENT_GONE
        began_s = time.monotonic()
        name = request_id_of(request)
        connection = connection_of(request)
        connection.handles(request)
        if request.content.is_eof():
            connection.began()
        if self._cors is not None:
            request[EXTRA_HEADERS] = self._cors.headers_for(request)
        try:
            response = await self._response_to(request, handler, connection)
            status = response.status
            if not response.prepared:
                if connection.is_spare or self._handlers.is_draining:
                    response.force_close()
                if "X-Request-Id" not in response.headers:
                    response.headers["X-Request-Id"] = (
                        name or f"req-{secrets.token_hex(12)}"
                    )
                response.headers.extend(request.get(EXTRA_HEADERS, ()))
            name = response.headers["X-Request-Id"]
            return response
        finally:
            connection.ended()
            self._ended(request, status, name, time.monotonic() - began_s)

    async def _response_to(
        self, request: web.Request, handler: Handler, connection: Connection
    ) -> web.StreamResponse:
        """Return the response to a request, which may be an error."""
        try:
            if connection.is_spare and request.path not in PROBES:
                text = "the router has too many open connections"
                raise Overloaded(text, code="too_many_connections")
            if (
                self._cors is not None
                and (reply := self._cors.preflight(request)) is not None
            ):
                return reply
            self.access.check(request)
            request[TENANT] = self.access.tenant_of(request)
            return await handler(request)
        except web.HTTPMethodNotAllowed as error:
            text = f"{clip(request.path)} does not take {clip(request.method)}"
            refusal = RequestError(text, code="method_not_allowed", http_status=405)
            return self._error(
                request, refusal, {"Allow": ",".join(sorted(error.allowed_methods))}
            )
        except web.HTTPNotFound:
            text = f"there is no {request.method} {clip(request.path)}{self._hint(request.path)}"
            return self._error(
                request, RequestError(text, code="unknown_url", http_status=404)
            )
        except BatonError as error:
            return self._error(request, error)
        except ConnectionError:  # the client has left
            return web.Response(status=CLIENT_GONE)
        except Exception:
            log.exception("unhandled error", route=_route_of(request))
            return self._error(
                request, BatonError("the router failed to handle this request")
            )

    def _hint(self, path: str) -> str:
        """Return which path a client with a wrong base URL may mean, for a message."""
        meant = path.rstrip("/").replace("/v1/v1/", "/v1/")
        paths = {resource.canonical for resource in self.application.router.resources()}
        return f"; did you mean {meant}?" if meant != path and meant in paths else ""

    def _ended(
        self, request: web.Request, status: int, name: str, took_s: float
    ) -> None:
        """Count a request that is over, and report it to the logs, traces and records."""
        self._num_open -= 1
        if not self._num_open:
            self._idle.set()
        route = _route_of(request)
        self.metrics.answered(route, status)
        running = request.get(RUNNING)
        self._request_log.answered(request, running, status, name, took_s)
        if running is None:
            return
        if self._status is not None:
            self._status.recent.answered(running, status, name, took_s)
        if self._tracer is not None:
            running.request_id = running.request_id or name
            self._tracer.record(request.headers, route, status, took_s, running)

    def refused(self, request: web.BaseRequest, error: BatonError) -> web.Response:
        """Count, log and answer what is no request."""
        self.metrics.answered(UNKNOWN, error.http_status)
        self._request_log.refused(request, error)
        response = self._error(request, error)
        response.headers["X-Request-Id"] = f"req-{secrets.token_hex(12)}"
        return response

    def _error(
        self,
        request: web.BaseRequest,
        error: BatonError,
        headers: dict[str, str] | None = None,
    ) -> web.Response:
        self.metrics.failed(error)
        headers = {**retry_headers(error), **(headers or {})}
        if error.http_status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        is_message = request.path.startswith(MESSAGES)
        body = message_error(error) if is_message else error_of(error)
        return _json(body, error.http_status, headers)


def _route_of(request: web.Request) -> str:
    """Return the pattern of the path for metrics and logs, never what a client sent."""
    resource = request.match_info.route.resource
    return UNKNOWN if resource is None else resource.canonical


def _json(
    body: bytes, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    return web.Response(
        body=body, status=status, headers=headers, content_type="application/json"
    )


# --- the description of the paths, for /openapi.json --------------------------------------------


_POSTS: dict[str, tuple[type, str]] = {
    "/v1/completions": (CompletionBody, "Continue one or several prompts."),
    "/v1/chat/completions": (ChatBody, "Answer the last turn of a chat."),
    "/v1/responses": (ResponseBody, "Answer a list of items, in OpenAI's newer form."),
    "/v1/responses/input_tokens": (
        ResponseBody,
        "Return the number of a prompt's tokens.",
    ),
    "/v1/messages": (
        MessageBody,
        "Answer the last turn of a chat, in Anthropic's form.",
    ),
    "/v1/messages/count_tokens": (CountBody, "Return the number of a prompt's tokens."),
    "/v1/embeddings": (EmbeddingBody, "Return the embeddings of texts."),
    **dict.fromkeys(SCORE_PATHS, (ScoreBody, "Return how well pairs of texts match.")),
    **dict.fromkeys(
        RERANK_PATHS, (RerankBody, "Rank documents by how well they match a query.")
    ),
    "/tokenize": (TokenizeBody, "Return the token ids of a prompt or a chat."),
    "/detokenize": (DetokenizeBody, "Return the text of token ids."),
}
_GETS: dict[str, str] = {
    "/v1/models": "List the served model.",
    "/v1/models/{name}": "Describe the served model.",
    "/tokenizer_info": "Return the tokenizer's settings.",
    "/health": "Return the state of the router and of its nodes; 503 if it can serve nothing.",
    "/live": "Return 200 while the process runs.",
    "/ping": "The same as /health.",
    "/load": "Return the number of requests under way.",
    "/metrics": "Return metrics in Prometheus' text format.",
    "/version": "Return baton's version.",
}


class ErrorBody(msgspec.Struct):
    """Why a request failed."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    error: ErrorBody


@cache
def document() -> bytes:
    """Return the description, in OpenAPI 3.1 as JSON."""
    bodies = [body for body, _ in _POSTS.values()]
    schemas, components = msgspec.json.schema_components(
        [*bodies, ErrorAnswer],
        ref_template="#/components/schemas/{name}",
        schema_hook=lambda _: {"description": "any value"},
    )
    *body_schemas, error = schemas
    failed = {"description": "an error", "content": _of_schema(error)}
    responses = {"200": {"description": "the response"}, "4XX": failed, "5XX": failed}
    paths: dict[str, dict[str, object]] = {}
    for (path, (_, summary)), schema in zip(_POSTS.items(), body_schemas, strict=True):
        body = {"required": True, "content": _of_schema(schema)}
        paths[path] = {
            "post": {"summary": summary, "requestBody": body, "responses": responses}
        }
    for path, summary in _GETS.items():
        get: dict[str, object] = {"summary": summary, "responses": responses}
        if "{" in path:
            name = path.partition("{")[2].removesuffix("}")
            place = {
                "name": name,
                "in": "path",
                "required": True,
                "schema": {"type": "string"},
            }
            get["parameters"] = [place]
        paths[path] = {"get": get}
    info = {"title": "baton", "version": VERSION}
    described = {"openapi": "3.1.0", "info": info, "paths": paths}
    return msgspec.json.encode({**described, "components": {"schemas": components}})


def _of_schema(schema: dict[str, object]) -> dict[str, object]:
    return {"application/json": {"schema": schema}}
