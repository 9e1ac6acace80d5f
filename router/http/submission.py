"""From a request to its streams: the body is read and prepared, and each prompt submitted once."""

import asyncio
import secrets
from collections.abc import Sequence

import msgspec
from aiohttp import web

from baton.protocol.adapters import shown_lora
from baton.protocol.errors import RequestError
from baton.router.core.admission import check_num_logprobs
from baton.router.core.health import ServedModel
from baton.router.core.request import Caller
from baton.router.http.api.anthropic import MessageEvents
from baton.router.http.api.event_ids import (
    ResponseHead,
    head_of,
    wants_ids,
)
from baton.router.http.api.large_bodies import BodyWork
from baton.router.http.api.openai_chunks import (
    ChunkEvents,
    ShownPrompt,
    system_fingerprint,
)
from baton.router.http.api.prepare import num_packed, unpacked
from baton.router.http.api.responses_events import ResponseEvents
from baton.router.http.api.schema import Endpoint, ParsedRequest
from baton.router.http.api.sse import Encoder
from baton.router.http.auth import TENANT
from baton.router.http.connections import Bodies
from baton.router.http.errors import blaming
from baton.router.http.metrics import HttpMetrics
from baton.router.http.request_log import Running
from baton.router.outputs import RequestMetrics
from baton.router.text_router import TextRouter
from baton.runtime.log import MAX_PROMPT_CHARS, clip, logger

MAX_REQUEST_ID_CHARS = 128

# A prompt is echoed once per choice, which no engine limits.
MAX_ECHO_CHARS = 4 * 1024 * 1024
# Each choice has the token ids of its prompt.
MAX_SHOWN_IDS = 1 << 20

log = logger("router")


class Submission:
    """Submits the requests of completions, chats, responses and messages."""

    def __init__(
        self,
        engine: TextRouter,
        bodies: Bodies,
        metrics: HttpMetrics,
        work: BodyWork,
        *,
        logs_prompts: bool,
    ) -> None:
        self._engine = engine
        self._bodies = bodies
        self._metrics = metrics
        self._work = work
        self._logs_prompts = logs_prompts

    async def submit(
        self, request: web.Request, running: Running, endpoint: Endpoint
    ) -> tuple[ParsedRequest, Encoder]:
        """Return what a body asks for, whose streams `running` gets, and what makes its response.

        The memory of the body is freed. Raises `BatonError`.
        """
        model = self._engine.get_model_config()
        token_bytes = self._engine.get_tokenizer().max_token_bytes
        max_bytes = self._bodies.limit(model, token_bytes)
        with self._bodies.room() as room:
            body = await self._bodies.read(request, room, max_bytes)
            parsed, head = await self._prepare(request, body, endpoint, model)
            del body
            running.request_id = (
                request_id_of(request) or f"req-{secrets.token_hex(12)}"
            )
            caller = Caller.of(parsed.scope, request[TENANT])
            num_logprobs = 0
            for index, prompt in enumerate(
                parsed.packed_prompts if parsed.needs_nodes else ()
            ):
                if index:  # a long list of prompts must not delay other requests
                    await asyncio.sleep(0)
                name = f"{head.id}-{index}"
                ids = unpacked(prompt)
                if self._logs_prompts:
                    shown = self._engine.get_tokenizer().decode(
                        ids[:MAX_PROMPT_CHARS], skip_special_tokens=False
                    )
                    log.info("prompt", request=running.request_id, text=clip(shown))
                with blaming(parsed.sent):
                    stream = await self._engine.submit(
                        ids, parsed.params, name, parsed.parsing, caller, head.received
                    )
                    running.streams.append(stream)
                    times = 1 if parsed.is_chat else parsed.params.n
                    num_logprobs += stream.num_prompt_logprobs * times
                    check_num_logprobs(num_logprobs)
        return parsed, _encoder(request, parsed, head, metrics_of(parsed, running))

    async def _prepare(
        self, request: web.Request, body: bytes, endpoint: Endpoint, model: ServedModel
    ) -> tuple[ParsedRequest, ResponseHead]:
        parsed = await self._work.prepare(endpoint, model, body, request[TENANT].name)
        self._metrics.ignored(parsed.ignored)
        if sum(map(len, parsed.echoes)) * parsed.params.n > MAX_ECHO_CHARS:
            text = f"prompt times n is longer than {MAX_ECHO_CHARS} characters: leave out echo"
            raise RequestError(text, param="echo")
        num_ids = sum(map(num_packed, parsed.packed_prompts)) * parsed.params.n
        if parsed.token_ids and num_ids > MAX_SHOWN_IDS:
            text = (
                f"prompt times n has more than {MAX_SHOWN_IDS} tokens: "
                "leave out return_token_ids"
            )
            raise RequestError(text, param="return_token_ids")
        head = head_of(request, parsed)
        if head.received:
            sampling = {**parsed.sampling, "seed": head.seed}
            parsed = msgspec.structs.replace(parsed, sampling=sampling)
        head = msgspec.structs.replace(
            head,
            model=shown_lora(parsed.scope.lora) or model.name,
            system_fingerprint=system_fingerprint(model.fingerprint),
        )
        return parsed, head


def request_id_of(request: web.Request) -> str:
    """Return the client's id of its request if it is safe in a header and a log, else ""."""
    given = request.headers.get("X-Request-Id", "")
    is_fit = (
        given.isascii() and given.isprintable() and len(given) <= MAX_REQUEST_ID_CHARS
    )
    return given if is_fit else ""


def _encoder(
    request: web.Request,
    parsed: ParsedRequest,
    head: ResponseHead,
    metrics: Sequence[RequestMetrics],
) -> Encoder:
    """Return what makes a response. `metrics` are those of each prompt, as they grow."""
    match parsed.endpoint:
        case "responses":
            return ResponseEvents(parsed, head)
        case "messages":
            return MessageEvents(head, metrics[0], is_streamed=parsed.is_streamed)
    return ChunkEvents(
        parsed,
        head,
        _plain_prompts(parsed),
        [one.num_prompt_tokens for one in metrics],
        has_ids=wants_ids(request),
    )


def metrics_of(parsed: ParsedRequest, running: Running) -> list[RequestMetrics]:
    """Return those of each prompt, which have no tokens if the response is the prompts alone."""
    if parsed.generates:
        return [stream.metrics for stream in running.streams]
    sizes = map(num_packed, parsed.packed_prompts)
    return [RequestMetrics(num_prompt_tokens=size) for size in sizes]


def _plain_prompts(parsed: ParsedRequest) -> list[ShownPrompt]:
    """Return the prompts as the response shows them, without log probabilities."""
    if not parsed.token_ids:
        return [ShownPrompt(text) for text in parsed.echoes]
    texts: Sequence[str | None] = parsed.echoes or [None] * len(parsed.packed_prompts)
    pairs = zip(texts, parsed.packed_prompts, strict=True)
    return [ShownPrompt(text, token_ids=unpacked(ids)) for text, ids in pairs]
