"""The endpoints that generate text: completions and chats.

`app` routes to these. A handler parses the body, submits one request per prompt, and answers with
one body or a stream of events. However it ends, every request that it submitted is closed. Handlers
know nothing of nodes. They raise `BatonError` as long as an error can still be an HTTP status.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web

from baton.protocol.config import ClusterConfig
from baton.protocol.errors import BatonError, NodeError, Overloaded, RequestError
from baton.protocol.sampling import SamplingParams
from baton.router.http.answers import Answer, clamped_to
from baton.router.http.connections import connection_of
from baton.router.http.metrics import HttpMetrics
from baton.router.http.relay import Relay
from baton.router.http.schema import Ask, Chat, parse_chat, parse_completion
from baton.router.http.sse import SILENCE_S, EventStream
from baton.router.outputs import CompletionOutput, Merged
from baton.router.registry import Health, ServedModel
from baton.router.stream import RequestStream, Sink
from baton.router.text.chat_template import ChatTemplate
from baton.router.text.text import Text
from baton.runtime.log import clip, logger

BODY_TIMEOUT_S = 60.0
MAX_REQUEST_ID_CHARS = 128

log = logger("router")


class Engine(Protocol):
    """The part of `TextRouter` that handlers need."""

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
    """One HTTP request and the answer that it is getting."""

    ask: Ask
    answer: Answer
    prompts: list[str | list[int]]
    echoes: list[str]  # per prompt, the text before each of its choices; empty without `echo`
    request_id: str  # the client's own, or the answer's
    outcome: str = BatonError.code  # as long as nothing better is known


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
        return await self._serve(request, parse_completion(await self._body(request)))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        return await self._serve(request, parse_chat(await self._body(request)))

    async def _serve(self, request: web.Request, ask: Ask) -> web.StreamResponse:
        """Submit a request per prompt and answer. All of them are closed and counted in the end."""
        work = await self._prepare(request, ask)
        streams: list[RequestStream] = []
        try:
            for index, prompt in enumerate(work.prompts):
                if index:  # a long list of prompts must not hold up other requests
                    await asyncio.sleep(0)
                if self._logs_prompts:
                    log.info("prompt", request=work.answer.id, text=clip(str(prompt)))
                name = f"{work.answer.id}-{index}"
                streams.append(await self._engine.submit(prompt, ask.params, name))
            if ask.is_streamed:
                return await self._stream(request, work, streams)
            return await self._whole(work, streams)
        except asyncio.CancelledError:
            work.outcome = "client_gone"
            raise
        except BatonError as error:
            work.outcome = error.code
            raise
        finally:
            for stream in streams:
                stream.close()
                self._metrics.ended(stream.metrics, work.outcome, ask.params.n)

    # --- before submitting ----------------------------------------------------------------------

    async def _body(self, request: web.Request) -> bytes:
        data = await self._read(request)
        connection_of(request).began()
        return data

    async def _read(self, request: web.Request) -> bytes:
        if self.is_draining:
            raise Overloaded("the router is shutting down", code="shutting_down")
        try:
            if request.content.is_eof():
                return await request.read()  # the whole body has come, so no wait needs a deadline
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await request.read()
        except TimeoutError:
            text = f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
            raise RequestError(text, code="timeout", http_status=408) from None
        except web.RequestPayloadError as error:
            text = "the body is not encoded in the way that its headers say"
            raise RequestError(text, code="invalid_body") from error

    def _model(self, name: str | None) -> ServedModel:
        """Return the served model; raises if the client names another one."""
        try:
            model = self._engine.get_model_config()
        except NodeError as error:
            raise Overloaded("no node is ready yet", code="not_ready") from error
        if name and name not in (model.name, model.path):
            text = f"the model {clip(name)!r} does not exist; this server has {model.name!r}"
            raise RequestError(text, code="model_not_found", param="model", http_status=404)
        return model

    async def _prepare(self, request: web.Request, ask: Ask) -> Work:
        model = self._model(ask.model)
        prompts = [
            await self._render(prompt, model.max_model_len - 1)
            if isinstance(prompt, Chat)
            else prompt
            for prompt in ask.prompts
        ]
        answer = Answer(
            id=f"{'chatcmpl' if ask.is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            model=model.name,
            created=int(time.time()),
            is_chat=ask.is_chat,
            include_usage=ask.include_usage,
            token_ids=ask.token_ids,
            timeline=ask.timeline,
        )
        echoes = [self._text_of(prompt) for prompt in prompts] if ask.echo else []
        return Work(ask, answer, prompts, echoes, _request_id(request, answer))

    def _text_of(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self._engine.get_tokenizer().decode(prompt)

    async def _render(self, chat: Chat, max_tokens: int) -> list[int]:
        template = self._chat_template
        if template is None:
            text = "this model has no chat template; use /v1/completions"
            raise RequestError(text, code="no_chat_template", http_status=404)
        text = await asyncio.to_thread(
            template.render,
            chat.messages,
            add_generation_prompt=chat.add_generation_prompt,
            options=chat.options,
        )
        return await self._engine.get_tokenizer().encode(
            text, add_special_tokens=False, max_tokens=max_tokens
        )

    # --- answering ------------------------------------------------------------------------------

    async def _whole(self, work: Work, streams: list[RequestStream]) -> web.Response:
        num_choices = work.ask.params.n
        wholes = [Merged(num_choices) for _ in streams]
        for stream, whole in zip(streams, wholes, strict=True):
            stream.send_to(self._counted(whole.add))
        await _all_ended(streams)
        outputs = []
        for index, whole in enumerate(wholes):
            for output in whole.outputs():
                output.index += index * num_choices
                if work.echoes:
                    output.text = work.echoes[index] + output.text
                outputs.append(output)
        body = work.answer.whole(outputs, [stream.metrics for stream in streams])
        headers = _headers(work, streams)
        work.outcome = "finished"
        return web.Response(body=body, content_type="application/json", headers=headers)

    def _counted(self, sink: Sink) -> Sink:
        def take(delta: CompletionOutput) -> None:
            self._metrics.num_output_tokens += len(delta.token_ids)
            sink(delta)

        return take

    async def _stream(
        self, request: web.Request, work: Work, streams: list[RequestStream]
    ) -> web.StreamResponse:
        # As long as nothing was sent, an error can be an HTTP status, so this waits for the first
        # delta; but not so long that the client is left in silence, unless the request still waits
        # for a node: then it may get 503.
        has_nodes = False
        while not has_nodes:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._silence_s):
                    await streams[0].changed()
                break
            has_nodes = streams[0].metrics.num_attempts > 0
        headers = _headers(work, streams)
        events = EventStream(request, work.answer.id, headers, self._silence_s)
        relay = Relay(events, work.answer, work.ask.params.n, work.echoes, self._metrics)
        await events.open()
        try:
            for index, stream in enumerate(streams):
                stream.send_to(relay.sink(index))
            await _all_ended(streams)
            relay.finish([stream.metrics for stream in streams])
            work.outcome = "finished"
        except BatonError as error:
            work.outcome = error.code
            relay.fail(error)
        except Exception:
            log.exception("a streamed answer broke", request=work.answer.id)
            relay.fail(BatonError("the router failed to make this answer"))
        finally:
            relay.stop()
            events.stop()
            for stream in streams:
                stream.close()
        return await events.close()


async def _all_ended(streams: Sequence[RequestStream]) -> None:
    """Wait for the end of all streams; the first error of any stream is raised at once."""
    if len(streams) == 1:
        await streams[0].ended()
        return
    try:
        async with asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(stream.ended())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def _request_id(request: web.Request, answer: Answer) -> str:
    """Return the client's own id of its request if it is fit for a header and a log."""
    given = request.headers.get("X-Request-Id", "")
    is_fit = given.isascii() and given.isprintable() and len(given) <= MAX_REQUEST_ID_CHARS
    return given if given and is_fit else answer.id


def _headers(work: Work, streams: list[RequestStream]) -> dict[str, str]:
    headers = {"X-Request-Id": work.request_id}
    clamped = clamped_to([stream.metrics for stream in streams])
    if clamped is not None:
        headers["Baton-Max-Tokens"] = str(clamped)
    return headers
