"""The endpoints that read bodies: completions, chats, the tokenizer's, and those that pool.

A handler has a body submitted as one request per prompt, and delivers what these bring. Every
request that was submitted is closed, however the handler ends. Handlers know nothing of nodes.
"""

import asyncio
import secrets
from functools import partial
from pathlib import Path

import msgspec
from aiohttp import web

from baton.protocol.config import ClusterConfig
from baton.protocol.errors import Overloaded, RequestError
from baton.router.http.api.large_bodies import BodyWork
from baton.router.http.api.pooling_bodies import PoolingEndpoint
from baton.router.http.api.schema import Endpoint
from baton.router.http.api.sse import SILENCE_S
from baton.router.http.api.tokens import TokenEndpoint
from baton.router.http.auth import TENANT
from baton.router.http.connections import Bodies
from baton.router.http.delivery import Delivery
from baton.router.http.metrics import HttpMetrics
from baton.router.http.pooling_handlers import PoolingHandlers
from baton.router.http.request_log import counted_request
from baton.router.http.submission import Submission, request_id_of
from baton.router.text.chat_template import ChatTemplate
from baton.router.text_router import TextRouter
from baton.runtime.log import logger

# The largest body of the tokenizer's endpoints.
MAX_TOKENS_BYTES = 4 * 1024 * 1024

log = logger("router")


class Handlers:
    """Call `close` in the end."""

    def __init__(
        self,
        engine: TextRouter,
        config: ClusterConfig,
        bodies: Bodies,
        metrics: HttpMetrics,
        chat_template: ChatTemplate | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.is_draining = False
        self._engine = engine
        self._metrics = metrics
        self._bodies = bodies
        self._work = BodyWork(config, engine.get_tokenizer(), chat_template)
        self._submission = Submission(
            engine, bodies, metrics, self._work, logs_prompts=config.log.prompts
        )
        self._delivery = Delivery(engine, metrics, silence_s)
        self._pooling = PoolingHandlers(engine, bodies, metrics, self._work)
        self._tokenizer_config = Path(config.model.path) / "tokenizer_config.json"
        # Answer a POST to /v1/completions, /v1/chat/completions, /v1/responses or /v1/messages.
        self.completions = partial(self._serve, endpoint="completions")
        self.chat = partial(self._serve, endpoint="chat")
        self.responses = partial(self._serve, endpoint="responses")
        self.messages = partial(self._serve, endpoint="messages")
        # Answer a POST to /tokenize or /detokenize, to /v1/messages/count_tokens or
        # /v1/responses/input_tokens.
        self.tokenize = partial(self._tokens, endpoint="tokenize")
        self.detokenize = partial(self._tokens, endpoint="detokenize")
        self.count_tokens = partial(self._tokens, endpoint="count_tokens")
        self.input_tokens = partial(self._tokens, endpoint="input_tokens")
        # Answer a POST to /v1/embeddings, /v1/score or /v1/rerank.
        self.embeddings = partial(self._pool, endpoint="embeddings")
        self.score = partial(self._pool, endpoint="score")
        self.rerank = partial(self._pool, endpoint="rerank")

    def close(self) -> None:
        self._work.close()

    async def _tokens(
        self, request: web.Request, *, endpoint: TokenEndpoint
    ) -> web.Response:
        model = self._engine.get_model_config()
        token_bytes = self._engine.get_tokenizer().max_token_bytes
        max_bytes = min(self._bodies.limit(model, token_bytes), MAX_TOKENS_BYTES)
        client = request[TENANT].name
        with self._bodies.room() as room:
            body = await self._bodies.read(request, room, max_bytes)
            response = await self._work.token_response(endpoint, model, body, client)
        self._metrics.ignored(response.ignored)
        return web.Response(body=response.body, content_type="application/json")

    async def _pool(
        self, request: web.Request, *, endpoint: PoolingEndpoint
    ) -> web.Response:
        self._refuse_if_draining()
        name = request_id_of(request) or f"req-{secrets.token_hex(12)}"
        return await self._pooling.answer(request, endpoint, name)

    async def tokenizer_info(self, request: web.Request) -> web.Response:
        try:
            data = await asyncio.to_thread(self._tokenizer_config.read_bytes)
            settings = msgspec.json.decode(data, type=dict[str, object])
        except (OSError, msgspec.DecodeError):
            text = "the model has no tokenizer_config.json"
            raise RequestError(text, code="unknown_url", http_status=404) from None
        body = msgspec.json.encode(settings)
        return web.Response(body=body, content_type="application/json")

    async def _serve(
        self, request: web.Request, *, endpoint: Endpoint
    ) -> web.StreamResponse:
        """Answer a POST, which resumes a broken stream if it has `Last-Event-ID`."""
        with counted_request(request, self._metrics) as running:
            self._refuse_if_draining()
            parsed, encoder = await self._submission.submit(request, running, endpoint)
            return await self._delivery.respond(request, parsed, running, encoder)

    def _refuse_if_draining(self) -> None:
        if self.is_draining:
            text = (
                "the router is shutting down: send the request again, to another router if there "
                "is one"
            )
            raise Overloaded(text, code="shutting_down", retry_after_s=1.0)
