"""Turn the deltas of one streamed answer into events.

`handlers` makes one `Relay` per streamed answer, with a sink for each of its requests. When the
client reads too slowly, deltas are merged per choice instead of piling up as events.
"""

import asyncio
from collections.abc import Sequence
from functools import partial

from baton.protocol.errors import BatonError
from baton.router.http.answers import Answer, ChunkTemplate, error_of
from baton.router.http.metrics import HttpMetrics
from baton.router.http.places import Numbers, Places, Positions, ReaderPlace
from baton.router.http.sse import EventStream
from baton.router.outputs import CompletionOutput, Merged, RequestMetrics
from baton.router.reattach import ReceivedPart
from baton.router.stream import Sink

# Tells a client that the answer is complete.
_DONE = b"[DONE]"
# How often a client that read too slowly is checked.
RELEASE_S = 0.05


class Relay:
    __slots__ = (
        "_answer", "_echoes", "_has_usage", "_held", "_metrics", "_num_choices", "_places",
        "_templates", "_timer", "events",
    )  # fmt: skip

    def __init__(
        self,
        events: EventStream,
        answer: Answer,
        num_choices: int,
        echoes: Sequence[str],
        metrics: HttpMetrics,
    ) -> None:
        """Relay a new answer. Its client cannot resume it unless `goes_on` is called."""
        self.events = events
        self._answer = answer
        self._places: Places = Numbers()
        self._has_usage = False  # the client has it
        self._num_choices = num_choices  # per prompt
        self._echoes = echoes
        self._metrics = metrics
        self._templates: dict[int, ChunkTemplate] = {}
        self._held: Merged | None = None  # deltas for a client that reads too slowly
        self._timer: asyncio.TimerHandle | None = None

    def goes_on(self, place: ReaderPlace) -> None:
        """Begin where the client left off, and put its place into the ids of events."""
        received = place.received or (ReceivedPart(),) * self._num_choices
        self._places = Positions(received)
        self._has_usage = place.tail != ""
        for index, one in enumerate(received):
            if one.has_begun:
                self._templates[index] = self._answer.chunks(index)

    def sink(self, prompt_index: int) -> Sink:
        """Return the sink for the deltas of one prompt."""
        return partial(self._take, prompt_index * self._num_choices)

    def finish(self, metrics: Sequence[RequestMetrics]) -> None:
        """Send the last events of a complete answer."""
        self._release_all()
        closing = self._answer.closing(metrics)
        if closing is not None and not self._has_usage:
            self.events.send(closing, self._places.now("/u"))
        self.events.send(_DONE, self._places.now("/d"))

    def fail(self, error: BatonError) -> None:
        """Send the held deltas, then the error that ends the answer."""
        self._release_all()
        self._metrics.failed(error)
        self.events.send(error_of(error), self._places.now())

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _take(self, offset: int, delta: CompletionOutput) -> None:
        self._metrics.num_output_tokens += len(delta.token_ids)
        delta.index += offset
        if self._held is None and not self.events.is_full:
            self._send(delta)
        else:
            self._hold(delta)

    def _send(self, delta: CompletionOutput) -> None:
        template = self._templates.get(delta.index)
        if template is None:
            template = self._open(delta.index)
        has_ended = delta.finish_reason is not None
        self._places.advance(delta.index, len(delta.token_ids), has_ended=has_ended)
        self.events.send(template.fill(delta), self._places.now())

    def _open(self, index: int) -> ChunkTemplate:
        template = self._templates[index] = self._answer.chunks(index)
        if self._answer.is_chat:
            self._places.begin(index)
            self.events.send(self._answer.opening(index), self._places.now())
        elif self._echoes:
            echo = self._echoes[index // self._num_choices]
            chunk = template.fill(CompletionOutput(index, echo, []))
            self.events.send(chunk, self._places.now())
        return template

    def _hold(self, delta: CompletionOutput) -> None:
        if self._held is None:
            self._held = Merged()
            self._release_later()
        self._held.add(delta)

    def _release_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(RELEASE_S, self._release)

    def _release(self) -> None:
        if self.events.is_full:
            self._release_later()
        else:
            self._release_all()

    def _release_all(self) -> None:
        held, self._held = self._held, None
        for delta in held.take() if held is not None else ():
            self._send(delta)
