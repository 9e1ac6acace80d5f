"""The endpoints that read bodies: completions, chats, the tokenizer's, and those that pool.

A handler parses the body, submits one request per prompt, and responds with one body or a stream of
events. Every request that it submitted is closed, however the handler ends. Handlers know nothing
of nodes. They raise `BatonError` while an error can still be an HTTP status.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Sequence
from functools import partial
from pathlib import Path

import msgspec
from aiohttp import web

from baton.protocol.adapters import shown_lora
from baton.protocol.config import ClusterConfig
from baton.protocol.errors import BatonError, Overloaded, RequestError
from baton.router.core.admission import check_num_logprobs
from baton.router.core.health import ServedModel
from baton.router.core.request import Caller
from baton.router.core.stream import RequestStream, Sink
from baton.router.http.api.anthropic import MessageEvents
from baton.router.http.api.event_ids import (
    EventIds,
    new_id,
    resume_point,
    wants_ids,
)
from baton.router.http.api.large_bodies import BodyWork
from baton.router.http.api.openai_chunks import (
    ChunkEvents,
    ResponseWriter,
    ShownPrompt,
    clamped_to,
    system_fingerprint,
)
from baton.router.http.api.pooling_bodies import PoolingEndpoint
from baton.router.http.api.prepare import num_packed, unpacked
from baton.router.http.api.responses_events import ResponseEvents
from baton.router.http.api.schema import Endpoint, ParsedRequest
from baton.router.http.api.sse import SILENCE_S, Encoder, EventStream
from baton.router.http.api.tokens import TokenEndpoint
from baton.router.http.auth import TENANT
from baton.router.http.connections import Bodies
from baton.router.http.errors import blaming
from baton.router.http.metrics import HttpMetrics
from baton.router.http.pooling_handlers import PoolingHandlers
from baton.router.http.request_log import Running, counted_request
from baton.router.outputs import CompletionOutput, RequestMetrics
from baton.router.text.chat_template import ChatTemplate
from baton.router.text_router import TextRouter
from baton.runtime.log import MAX_PROMPT_CHARS, clip, logger

MAX_REQUEST_ID_CHARS = 128

# A prompt is echoed once per choice, which no engine limits.
MAX_ECHO_CHARS = 4 * 1024 * 1024
# Each choice has the token ids of its prompt.
MAX_SHOWN_IDS = 1 << 20
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
        self._silence_s = silence_s
        self._logs_prompts = config.log.prompts
        self._bodies = bodies
        # Held while a body with the log probabilities of prompts is made, which takes much memory.
        self._scoring = asyncio.Lock()
        self._work = BodyWork(config, engine.get_tokenizer(), chat_template)
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

    async def _tokens(self, request: web.Request, *, endpoint: TokenEndpoint) -> web.Response:
        model = self._engine.get_model_config()
        token_bytes = self._engine.get_tokenizer().max_token_bytes
        max_bytes = min(self._bodies.limit(model, token_bytes), MAX_TOKENS_BYTES)
        client = request[TENANT].name
        with self._bodies.room() as room:
            body = await self._bodies.read(request, room, max_bytes)
            response = await self._work.token_response(endpoint, model, body, client)
        self._metrics.ignored(response.ignored)
        return web.Response(body=response.body, content_type="application/json")

    async def _pool(self, request: web.Request, *, endpoint: PoolingEndpoint) -> web.Response:
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

    async def _serve(self, request: web.Request, *, endpoint: Endpoint) -> web.StreamResponse:
        """Answer a POST, which resumes a broken stream if it has `Last-Event-ID`."""
        with counted_request(request, self._metrics) as running:
            parsed, writer = await self._submit(request, running, endpoint)
            metrics = [stream.metrics for stream in running.streams]
            if not parsed.generates:
                metrics = [_metrics_of(prompt) for prompt in parsed.packed_prompts]
            encoder = _encoder(request, parsed, writer, metrics)
            if not parsed.generates:
                return await self._echo(request, parsed, running, encoder, metrics)
            with blaming(parsed.sent):
                if not parsed.is_streamed:
                    return await self._whole(parsed, running, encoder)
                await self._begun(parsed, running.streams, encoder)
            return await self._relayed(request, parsed, running, encoder)

    def _refuse_if_draining(self) -> None:
        if self.is_draining:
            text = (
                "the router is shutting down: send the request again, to another router if there "
                "is one"
            )
            raise Overloaded(text, code="shutting_down", retry_after_s=1.0)

    # --- before submitting ----------------------------------------------------------------------

    async def _submit(
        self, request: web.Request, running: Running, endpoint: Endpoint
    ) -> tuple[ParsedRequest, ResponseWriter]:
        """Read the body and submit its prompts, which frees the memory of the body."""
        self._refuse_if_draining()
        model = self._engine.get_model_config()
        token_bytes = self._engine.get_tokenizer().max_token_bytes
        max_bytes = self._bodies.limit(model, token_bytes)
        with self._bodies.room() as room:
            body = await self._bodies.read(request, room, max_bytes)
            parsed, writer = await self._prepare(request, body, endpoint, model)
            del body
            running.request_id = request_id_of(request) or f"req-{secrets.token_hex(12)}"
            received = () if writer.point is None else writer.point.received
            caller = Caller.of(parsed.scope, request[TENANT])
            num_logprobs = 0
            for index, prompt in enumerate(parsed.packed_prompts if parsed.needs_nodes else ()):
                if index:  # a long list of prompts must not delay other requests
                    await asyncio.sleep(0)
                name = f"{writer.id}-{index}"
                ids = unpacked(prompt)
                if self._logs_prompts:
                    shown = self._engine.get_tokenizer().decode(
                        ids[:MAX_PROMPT_CHARS], skip_special_tokens=False
                    )
                    log.info("prompt", request=running.request_id, text=clip(shown))
                with blaming(parsed.sent):
                    stream = await self._engine.submit(
                        ids, parsed.params, name, parsed.parsing, caller, received
                    )
                    running.streams.append(stream)
                    times = 1 if parsed.is_chat else parsed.params.n
                    num_logprobs += stream.num_prompt_logprobs * times
                    check_num_logprobs(num_logprobs)
        return parsed, writer

    async def _prepare(
        self, request: web.Request, body: bytes, endpoint: Endpoint, model: ServedModel
    ) -> tuple[ParsedRequest, ResponseWriter]:
        parsed = await self._work.prepare(endpoint, model, body, request[TENANT].name)
        self._metrics.ignored(parsed.ignored)
        if sum(map(len, parsed.echoes)) * parsed.params.n > MAX_ECHO_CHARS:
            text = f"prompt times n is longer than {MAX_ECHO_CHARS} characters: leave out echo"
            raise RequestError(text, param="echo")
        num_ids = sum(map(num_packed, parsed.packed_prompts)) * parsed.params.n
        if parsed.token_ids and num_ids > MAX_SHOWN_IDS:
            text = (
                f"prompt times n has more than {MAX_SHOWN_IDS} tokens: leave out return_token_ids"
            )
            raise RequestError(text, param="return_token_ids")
        point = resume_point(request, parsed)
        if point is not None:
            sampling = {**parsed.sampling, "seed": point.seed}
            parsed = msgspec.structs.replace(parsed, sampling=sampling)
        writer = ResponseWriter(
            id=new_id(parsed.endpoint) if point is None else point.response_id,
            model=shown_lora(parsed.scope.lora) or model.name,
            created=int(time.time()) if point is None else point.created,
            is_chat=parsed.is_chat,
            include_usage=parsed.include_usage,
            token_ids=parsed.token_ids,
            num_logprobs=parsed.params.logprobs,
            num_prompt_logprobs=parsed.num_prompt_logprobs,
            names_ids=parsed.names_ids,
            continuous_usage=parsed.continuous_usage,
            system_fingerprint=system_fingerprint(model.fingerprint),
            point=point,
        )
        return parsed, writer

    # --- answering ------------------------------------------------------------------------------

    async def _whole(
        self, parsed: ParsedRequest, running: Running, encoder: Encoder
    ) -> web.Response:
        streams = running.streams
        for index, stream in enumerate(streams):
            stream.send_to(self._sink(encoder, index * parsed.params.n))
        await _all_ended(streams)
        metrics = [stream.metrics for stream in streams]
        return await self._body(parsed, running, encoder, metrics)

    async def _body(
        self,
        parsed: ParsedRequest,
        running: Running,
        encoder: Encoder,
        metrics: Sequence[RequestMetrics],
    ) -> web.Response:
        if parsed.params.prompt_logprobs is None:
            body = encoder.whole(metrics)
        else:
            async with self._scoring:
                await self._show_prompts(parsed, running.streams, encoder)
                body = await asyncio.to_thread(encoder.whole, metrics)
        running.outcome = "finished"
        headers = _headers(running.request_id, metrics)
        return web.Response(body=body, content_type="application/json", headers=headers)

    async def _show_prompts(
        self, parsed: ParsedRequest, streams: Sequence[RequestStream], encoder: Encoder
    ) -> None:
        """Show the prompts with their log probabilities, if they are wanted."""
        if parsed.params.prompt_logprobs is None or not isinstance(encoder, ChunkEvents):
            return
        tokenizer = self._engine.get_tokenizer()
        spell = partial(tokenizer.spell, parsed.params.skip_special_tokens)

        def shown() -> list[ShownPrompt]:  # in a thread, because there may be very many
            texts: Sequence[str | None] = parsed.echoes or [None] * len(streams)
            pairs = zip(texts, streams, strict=True)
            return [
                encoder.writer.prompt(
                    text, one.prompt_token_ids, one.prompt_logprobs() or [], spell
                )
                for text, one in pairs
            ]

        encoder.show(await asyncio.to_thread(shown))

    async def _echo(
        self,
        request: web.Request,
        parsed: ParsedRequest,
        running: Running,
        encoder: Encoder,
        metrics: Sequence[RequestMetrics],
    ) -> web.StreamResponse:
        """Answer with the prompts alone, for `max_tokens` 0.

        Nodes take part only for log probabilities.
        """
        await _all_ended(running.streams)
        running.outcome = "finished"
        outputs = [
            CompletionOutput(index, "", [], None, "length")
            for index in range(len(parsed.echoes) * parsed.params.n)
        ]
        if not parsed.is_streamed:
            for output in outputs:
                encoder.take(output)
            return await self._body(parsed, running, encoder, metrics)
        await self._show_prompts(parsed, running.streams, encoder)
        events = self._event_stream(request, parsed, encoder)
        response = await events.open(request, _headers(running.request_id, metrics))
        for output in outputs:
            events.sink(0)(output)
        events.finish(metrics)
        events.stop()
        await events.close()
        return response

    def _sink(self, encoder: Encoder, offset: int) -> Sink:
        """Return the sink of a stream whose choices come behind `offset` others."""
        came_s: dict[int, float] = {}

        def take(delta: CompletionOutput) -> None:
            self._metrics.delivered(delta, came_s)
            delta.index += offset
            encoder.take(delta)

        return take

    async def _begun(
        self, parsed: ParsedRequest, streams: Sequence[RequestStream], encoder: Encoder
    ) -> None:
        """Return once the first token of a response, or its first node, is known."""
        # An error can be an HTTP status until something is sent, so this waits for the first delta.
        # It does not leave the client in silence for long, except while the request waits for a
        # node, because then it may still get status 503.
        has_nodes = False
        if parsed.params.prompt_logprobs is not None:
            for stream in streams:  # the first chunk has what nodes compute
                await stream.changed()
            has_nodes = True
        while not has_nodes:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._silence_s):
                    await streams[0].changed()
                break
            has_nodes = streams[0].metrics.num_attempts > 0
        await self._show_prompts(parsed, streams, encoder)

    def _event_stream(
        self, request: web.Request, parsed: ParsedRequest, encoder: Encoder
    ) -> EventStream:
        has_ids = isinstance(encoder, ChunkEvents) and wants_ids(request)
        return EventStream(
            encoder, parsed.params.n, self._metrics, self._silence_s, has_ids=has_ids
        )

    async def _relayed(
        self, request: web.Request, parsed: ParsedRequest, running: Running, encoder: Encoder
    ) -> web.StreamResponse:
        """Send the headers, then what the streams bring."""
        events = self._event_stream(request, parsed, encoder)
        headers = _headers(running.request_id, [stream.metrics for stream in running.streams])
        response = await events.open(request, headers)
        try:
            with blaming(parsed.sent):
                await events.relay(running.streams)
            running.outcome = "finished"
        except BatonError as error:
            running.failed(error)
            events.fail(error)
        except ConnectionError:
            raise
        except Exception:
            log.exception("unhandled error in a stream", request=running.request_id)
            broken = BatonError("the router failed to make this response")
            running.failed(broken)
            events.fail(broken)
        finally:
            events.stop()
        await events.close()
        return response


def _all_ended(streams: Sequence[RequestStream]) -> Awaitable[None]:
    """Wait for the end of all streams. Raises the first error of any stream at once."""
    return streams[0].ended() if len(streams) == 1 else _each_ended(streams)


async def _each_ended(streams: Sequence[RequestStream]) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(stream.ended())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def request_id_of(request: web.Request) -> str:
    """Return the client's id of its request if it is safe in a header and a log, else ""."""
    given = request.headers.get("X-Request-Id", "")
    is_fit = given.isascii() and given.isprintable() and len(given) <= MAX_REQUEST_ID_CHARS
    return given if is_fit else ""


def _encoder(
    request: web.Request,
    parsed: ParsedRequest,
    writer: ResponseWriter,
    metrics: Sequence[RequestMetrics],
) -> Encoder:
    """Return what makes a response. `metrics` are those of each prompt, as they grow."""
    is_streamed = parsed.is_streamed
    match parsed.endpoint:
        case "responses":
            return ResponseEvents(writer, parsed.settings, is_streamed=is_streamed)
        case "messages":
            return MessageEvents(writer, metrics[0], is_streamed=is_streamed)
    return ChunkEvents(
        writer,
        parsed.params.n,
        _plain_prompts(parsed),
        [one.num_prompt_tokens for one in metrics],
        EventIds(writer.id, writer.point) if wants_ids(request) else None,
        is_streamed=is_streamed,
    )


def _metrics_of(prompt: bytes) -> RequestMetrics:
    """Return the metrics of a packed prompt that no node computes, or without tokens."""
    return RequestMetrics(num_prompt_tokens=num_packed(prompt))


def _plain_prompts(parsed: ParsedRequest) -> list[ShownPrompt]:
    """Return the prompts as the response shows them, without log probabilities."""
    if not parsed.token_ids:
        return [ShownPrompt(text) for text in parsed.echoes]
    texts: Sequence[str | None] = parsed.echoes or [None] * len(parsed.packed_prompts)
    pairs = zip(texts, parsed.packed_prompts, strict=True)
    return [ShownPrompt(text, token_ids=unpacked(ids)) for text, ids in pairs]


def _headers(request_id: str, metrics: Sequence[RequestMetrics]) -> dict[str, str]:
    headers = {"X-Request-Id": request_id}
    clamped = clamped_to(metrics)
    if clamped is not None:
        headers["Baton-Max-Tokens"] = str(clamped)
    return headers
