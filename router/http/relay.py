"""Turns the deltas of one streamed answer into events.

`handlers` makes one `Relay` per streamed answer, with a sink for each of its requests. When the
client reads too slowly, deltas are merged per choice instead of piling up as events.
"""

import asyncio
from collections.abc import Sequence

from baton.protocol.errors import BatonError
from baton.router.http.answers import Answer, ChunkTemplate, error_of
from baton.router.http.metrics import HttpMetrics
from baton.router.http.sse import EventStream
from baton.router.outputs import CompletionOutput, Merged, RequestMetrics
from baton.router.stream import Sink

# How often a client that read too slowly is checked.
RELEASE_S = 0.05


class Relay:
    def __init__(
        self,
        events: EventStream,
        answer: Answer,
        num_choices: int,
        echoes: Sequence[str],
        metrics: HttpMetrics,
    ) -> None:
        self._events = events
        self._answer = answer
        self._num_choices = num_choices  # per prompt
        self._echoes = echoes
        self._metrics = metrics
        self._templates: dict[int, ChunkTemplate] = {}
        self._held = Merged()
        self._timer: asyncio.TimerHandle | None = None  # set as long as deltas are held

    def sink(self, prompt_index: int) -> Sink:
        """Return the sink for the deltas of one prompt."""
        offset = prompt_index * self._num_choices
        events, metrics = self._events, self._metrics

        def take(delta: CompletionOutput) -> None:
            metrics.num_output_tokens += len(delta.token_ids)
            delta.index += offset
            if self._timer is None and not events.is_full:
                self._send(delta)
            else:
                self._held.add(delta)
                self._release_later()

        return take

    def finish(self, metrics: Sequence[RequestMetrics]) -> None:
        """Send the last events of a complete answer."""
        self._release_all()
        closing = self._answer.closing(metrics)
        if closing is not None:
            self._events.send(closing)
        self._events.done()

    def fail(self, error: BatonError) -> None:
        """Send what is held, then the error that ends the answer."""
        self._release_all()
        self._metrics.failed(error)
        self._events.send(error_of(error))

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _send(self, delta: CompletionOutput) -> None:
        template = self._templates.get(delta.index)
        if template is None:
            template = self._open(delta.index)
        self._events.send(template.fill(delta))

    def _open(self, index: int) -> ChunkTemplate:
        template = self._templates[index] = self._answer.chunks(index)
        if self._answer.is_chat:
            self._events.send(self._answer.opening(index))
        elif self._echoes:
            echo = self._echoes[index // self._num_choices]
            self._events.send(template.fill(CompletionOutput(index, echo, [])))
        return template

    def _release_later(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(RELEASE_S, self._release)

    def _release(self) -> None:
        self._timer = None
        if self._events.is_full:
            self._release_later()
        else:
            self._release_all()

    def _release_all(self) -> None:
        for delta in self._held.take():
            self._send(delta)
