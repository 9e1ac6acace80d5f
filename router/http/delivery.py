"""From the streams of a request to its response: one body, or events as the tokens arrive."""

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence
from functools import partial

from aiohttp import web

from baton.protocol.errors import BatonError
from baton.router.core.stream import RequestStream
from baton.router.http.api.event_ids import wants_ids
from baton.router.http.api.openai_chunks import (
    ChunkEvents,
    ShownPrompt,
    clamped_to,
)
from baton.router.http.api.schema import ParsedRequest
from baton.router.http.api.sse import DeltaCounter, Encoder, EventStream
from baton.router.http.errors import blaming
from baton.router.http.metrics import HttpMetrics
from baton.router.http.request_log import Running
from baton.router.http.submission import metrics_of
from baton.router.outputs import CompletionOutput, RequestMetrics
from baton.router.text_router import TextRouter
from baton.runtime.log import logger

log = logger("router")


class Delivery:
    """Responds to completions, chats, responses and messages."""

    def __init__(
        self, engine: TextRouter, metrics: HttpMetrics, silence_s: float
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._silence_s = silence_s
        # Held while a body with the log probabilities of prompts is made, which takes much memory.
        self._scoring = asyncio.Lock()

    async def respond(
        self,
        request: web.Request,
        parsed: ParsedRequest,
        running: Running,
        encoder: Encoder,
    ) -> web.StreamResponse:
        """Respond with what the streams of `running` bring. Raises `BatonError` before that."""
        if not parsed.generates:
            return await self._echo(request, parsed, running, encoder)
        with blaming(parsed.sent):
            if not parsed.is_streamed:
                return await self._whole(parsed, running, encoder)
            await self._begun(parsed, running.streams, encoder)
        return await self._relayed(request, parsed, running, encoder)

    async def _whole(
        self, parsed: ParsedRequest, running: Running, encoder: Encoder
    ) -> web.Response:
        streams = running.streams
        for index, stream in enumerate(streams):
            counter = DeltaCounter(self._metrics, index, parsed.params.n, encoder.take)
            stream.send_to(counter.note)
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
        if parsed.params.prompt_logprobs is None or not isinstance(
            encoder, ChunkEvents
        ):
            return
        tokenizer = self._engine.get_tokenizer()
        spell = partial(tokenizer.spell, parsed.params.skip_special_tokens)

        def shown() -> list[ShownPrompt]:  # in a thread, because there may be very many
            texts: Sequence[str | None] = parsed.echoes or [None] * len(streams)
            pairs = zip(texts, streams, strict=True)
            return [
                encoder.shown_prompt(
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
    ) -> web.StreamResponse:
        """Answer with the prompts alone, for `max_tokens` 0.

        Nodes take part only for log probabilities.
        """
        await _all_ended(running.streams)
        running.outcome = "finished"
        metrics = metrics_of(parsed, running)
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
            events.take(output)
        events.finish(metrics)
        events.stop()
        await events.close()
        return response

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
        self,
        request: web.Request,
        parsed: ParsedRequest,
        running: Running,
        encoder: Encoder,
    ) -> web.StreamResponse:
        """Send the headers, then what the streams bring."""
        events = self._event_stream(request, parsed, encoder)
        headers = _headers(
            running.request_id, [stream.metrics for stream in running.streams]
        )
        response = await events.open(request, headers)
        try:
            with blaming(parsed.sent):
                await events.relay(running.streams)
            running.outcome = "finished"
        except BatonError as error:
            running.failed(error)
            events.fail(error)
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


def _headers(request_id: str, metrics: Sequence[RequestMetrics]) -> dict[str, str]:
    headers = {"X-Request-Id": request_id}
    clamped = clamped_to(metrics)
    if clamped is not None:
        headers["Baton-Max-Tokens"] = str(clamped)
    return headers
