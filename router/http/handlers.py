"""The endpoints that generate: from a body to requests of the router, from their tokens to a reply.

`app` routes to these. A handler parses, submits one request per prompt, and answers whole or as
events; however it ends, also by a client that leaves, every request that it submitted is closed.
Handlers know no nodes, and raise `BatonError` for whatever can still be an HTTP status.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web

from baton.protocol.config import ClusterConfig
from baton.protocol.errors import BatonError, NodeError, Overloaded, RequestError
from baton.protocol.sampling import SamplingParams
from baton.router.http.answers import Answer, clamped_to
from baton.router.http.metrics import HttpMetrics
from baton.router.http.relay import Relay
from baton.router.http.schema import (
    ChatBody,
    CompletionBody,
    messages_of,
    parse_chat,
    parse_completion,
    prompts_of,
    sampling_of,
)
from baton.router.http.sse import SILENCE_S, EventStream
from baton.router.outputs import CompletionOutput
from baton.router.registry import Health, ServedModel
from baton.router.stream import Cumulated, RequestStream
from baton.router.text.chat_template import ChatTemplate
from baton.router.text.text import Text
from baton.runtime.log import clip, logger

BODY_TIMEOUT_S = 60.0
MAX_REQUEST_ID_CHARS = 128

log = logger("router")


class Engine(Protocol):
    """What handlers need of `AsyncLLM`."""

    async def submit(
        self, prompt: str | list[int], params: SamplingParams, request_id: str | None = None
    ) -> RequestStream: ...

    def health(self) -> Health: ...

    def get_model_config(self) -> ServedModel: ...

    def get_tokenizer(self) -> Text: ...

    @property
    def errored(self) -> bool: ...


@dataclass(slots=True)
class Work:
    """One HTTP request, understood."""

    answer: Answer
    prompts: list[str | list[int]]
    params: SamplingParams
    echoes: list[str]  # per prompt, what stands before each of its choices; empty: nothing
    is_streamed: bool
    request_id: str  # the client's, or the answer's
    outcome: str = "finished"


class Handlers:
    def __init__(
        self,
        engine: Engine,
        config: ClusterConfig,
        metrics: HttpMetrics,
        chat_template: ChatTemplate | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.is_draining = False
        self._engine = engine
        self._metrics = metrics
        self._chat_template = chat_template
        self._silence_s = silence_s
        self._logs_prompts = config.log.prompts

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        body = parse_completion(await self._read(request))
        model = self._model(body.model)
        prompts, params = prompts_of(body), sampling_of(body)
        echoes = [self._echo(prompt) for prompt in prompts] if body.echo else []
        answer = _answer("cmpl", body, model.name)
        request_id = _request_id(request, answer)
        work = Work(answer, prompts, params, echoes, bool(body.stream), request_id)
        return await self._serve(request, work)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        body = parse_chat(await self._read(request))
        model = self._model(body.model)
        params = sampling_of(body)
        token_ids = await self._render(body)
        answer = _answer("chatcmpl", body, model.name)
        request_id = _request_id(request, answer)
        work = Work(answer, [token_ids], params, [], bool(body.stream), request_id)
        return await self._serve(request, work)

    # --- before submitting ----------------------------------------------------------------------

    async def _read(self, request: web.Request) -> bytes:
        if self.is_draining:
            raise Overloaded("the router is shutting down", code="shutting_down")
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await request.read()
        except TimeoutError:
            text = f"the body was not here within {BODY_TIMEOUT_S:g} s"
            raise RequestError(text, code="timeout", http_status=408) from None
        except web.RequestPayloadError as error:
            text = "the body is not encoded as its headers say"
            raise RequestError(text, code="invalid_body") from error

    def _model(self, name: str | None) -> ServedModel:
        """The model that is meant; raises unless it is the one that the nodes serve."""
        try:
            model = self._engine.get_model_config()
        except NodeError as error:
            raise Overloaded("no node is ready yet", code="not_ready") from error
        if name and name not in (model.name, model.path):
            text = f"the model {clip(name)!r} does not exist; {model.name!r} does"
            raise RequestError(text, code="model_not_found", param="model", http_status=404)
        return model

    def _echo(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self._engine.get_tokenizer().decode(prompt)

    async def _render(self, body: ChatBody) -> list[int]:
        template = self._chat_template
        if template is None:
            text = "this model has no chat template; use /v1/completions"
            raise RequestError(text, code="no_chat_template", http_status=404)
        generates = body.add_generation_prompt is not False
        messages, options = messages_of(body), body.chat_template_kwargs
        text = await asyncio.to_thread(
            template.render, messages, add_generation_prompt=generates, options=options
        )
        return await self._engine.get_tokenizer().encode(text, add_special_tokens=False)

    # --- submitting and answering ---------------------------------------------------------------

    async def _serve(self, request: web.Request, work: Work) -> web.StreamResponse:
        async with self._submitted(work) as streams:
            if work.is_streamed:
                return await self._stream(request, work, streams)
            return await self._whole(work, streams)

    @contextlib.asynccontextmanager
    async def _submitted(self, work: Work) -> AsyncGenerator[list[RequestStream], None]:
        """A request per prompt. On the way out all of them are ended and counted."""
        streams: list[RequestStream] = []
        try:
            for index, prompt in enumerate(work.prompts):
                if self._logs_prompts:
                    log.info("prompt", request=work.answer.id, text=clip(str(prompt)))
                name = f"{work.answer.id}-{index}"
                streams.append(await self._engine.submit(prompt, work.params, name))
            yield streams
        except asyncio.CancelledError:
            work.outcome = "client_gone"
            raise
        except BatonError as error:
            work.outcome = error.code
            raise
        except BaseException:
            work.outcome = BatonError.code
            raise
        finally:
            for stream in streams:
                stream.close()
                self._metrics.ended(stream.metrics, work.outcome, work.params.n)

    async def _whole(self, work: Work, streams: list[RequestStream]) -> web.Response:
        wholes = [Cumulated(work.params.n) for _ in streams]

        async def collect(stream: RequestStream, whole: Cumulated) -> None:
            def take(delta: CompletionOutput) -> None:
                self._metrics.num_output_tokens += len(delta.token_ids)
                whole.add(delta)

            await stream.forward(take)

        pairs = zip(streams, wholes, strict=True)
        await _all(*[collect(stream, whole) for stream, whole in pairs])
        outputs = []
        for index, whole in enumerate(wholes):
            for output in whole.outputs():
                output.index += index * work.params.n
                if work.echoes:
                    output.text = work.echoes[index] + output.text
                outputs.append(output)
        metrics = [stream.metrics for stream in streams]
        return web.Response(
            body=work.answer.whole(outputs, metrics),
            content_type="application/json",
            headers=_headers(work, streams),
        )

    async def _stream(
        self, request: web.Request, work: Work, streams: list[RequestStream]
    ) -> web.StreamResponse:
        # Until something is sent, an error can be an HTTP status, so the first token is awaited;
        # but a client is not left in silence.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._silence_s):
                await streams[0].started()
        headers = _headers(work, streams)
        events = EventStream(request, work.answer.id, headers, self._silence_s)
        relay = Relay(events, work.answer, work.params.n, work.echoes, self._metrics)
        await events.open()
        try:
            await _all(*[s.forward(relay.sink(index)) for index, s in enumerate(streams)])
            relay.finish([stream.metrics for stream in streams])
        except BatonError as error:
            work.outcome = error.code
            relay.fail(error)
        except Exception:
            log.exception("a streamed answer broke", request=work.answer.id)
            work.outcome = BatonError.code
            relay.fail(BatonError("the router failed to make this answer"))
        finally:
            relay.stop()
            events.stop()
        return await events.close()


async def _all(*waits: Coroutine[None, None, None]) -> None:
    """Wait for all of them; the first that raises ends the others."""
    if len(waits) == 1:
        await waits[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for wait in waits:
                group.create_task(wait)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def _answer(prefix: str, body: CompletionBody | ChatBody, model: str) -> Answer:
    return Answer(
        id=f"{prefix}-{secrets.token_hex(12)}",
        model=model,
        created=int(time.time()),
        is_chat=isinstance(body, ChatBody),
        include_usage=body.include_usage,
        token_ids=bool(body.return_token_ids),
        timeline=bool(body.timeline),
    )


def _request_id(request: web.Request, answer: Answer) -> str:
    """The client's own name for it, if that is fit for a header and a log."""
    given = request.headers.get("X-Request-Id", "")
    is_fit = given.isascii() and given.isprintable() and len(given) <= MAX_REQUEST_ID_CHARS
    return given if given and is_fit else answer.id


def _headers(work: Work, streams: list[RequestStream]) -> dict[str, str]:
    headers = {"X-Request-Id": work.request_id}
    clamped = clamped_to([stream.metrics for stream in streams])
    if clamped is not None:
        headers["Baton-Max-Tokens"] = str(clamped)
    return headers
