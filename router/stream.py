"""What one request hands to its caller: new tokens and text per choice, then exactly one end.

`core` pushes tokens in, `AsyncLLM` and the HTTP handlers take deltas out, on the same event loop.
A delta costs no task switch when it goes to a sink (`forward`), and one per batch otherwise.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from baton.protocol.errors import BatonError
from baton.protocol.messages import FinishReason
from baton.protocol.sampling import SamplingParams
from baton.router.outputs import CompletionOutput, RequestMetrics, RequestOutput, StopReason

Sink = Callable[[CompletionOutput], None]


class TextDelta(Protocol):
    @property
    def text(self) -> str: ...

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def stop_reason(self) -> StopReason: ...


class Detokenizing(Protocol):
    """One choice's way from tokens to text; see `detokenizer`."""

    def push(self, token_ids: Sequence[int], final: FinishReason | None = None) -> TextDelta: ...


class RequestStream:
    """The caller's end of one request. Use one of `take`, `forward` and `collect`.

    All of them raise the `BatonError` with which the request failed, after what came before it.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        detokenizers: Sequence[Detokenizing],
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.metrics = RequestMetrics(
            arrival_time=time.time(), num_prompt_tokens=len(prompt_token_ids)
        )
        self.finished = False  # by tokens, an error or a cancel; deltas may still be waiting
        self._detokenizers = detokenizers
        self._arrival_s = time.monotonic()
        self._on_close: Callable[[], None] | None = None
        self._on_end: Callable[[], None] | None = None
        self._deltas: list[CompletionOutput] = []
        self._sink: Sink | None = None
        self._error: BatonError | None = None
        self._waiter: asyncio.Future[None] | None = None

    # --- the caller's side ------------------------------------------------------------------

    async def started(self) -> None:
        """Return once there is something to take. Until then an error can be an HTTP status."""
        while not self._deltas and not self.finished:
            await self._wait()
        if self._error is not None and not self._deltas:
            raise self._error

    async def take(self) -> list[CompletionOutput]:
        """Everything new, at least one delta; empty at the end of the request."""
        await self.started()
        taken, self._deltas = self._deltas, []
        return taken

    async def forward(self, sink: Sink) -> None:
        """Hand every delta to `sink` the moment it comes; return at the end of the request.

        `sink` must neither block nor raise; what it raises ends this request alone.
        """
        for delta in self._deltas:
            sink(delta)
        self._deltas.clear()
        self._sink = sink
        try:
            while not self.finished:
                await self._wait()
        finally:
            self._sink = None
        if self._error is not None:
            raise self._error

    async def collect(self) -> RequestOutput:
        """The whole answer at once."""
        whole = Cumulated(self.params.n)
        while deltas := await self.take():
            for delta in deltas:
                whole.add(delta)
        return self.output(whole.outputs())

    def output(self, outputs: list[CompletionOutput]) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=self.finished and self._error is None and not self._deltas,
            metrics=self.metrics,
        )

    def close(self) -> None:
        """Give the request up if it is not finished. Safe at any time, any number of times."""
        if not self.finished and self._on_close is not None:
            self._on_close()

    # --- the router's side ------------------------------------------------------------------

    def on_close(self, callback: Callable[[], None]) -> None:
        """To be called when the caller gives up."""
        self._on_close = callback

    def on_end(self, callback: Callable[[], None]) -> None:
        """To be called once, at the end of the request, however it ends."""
        self._on_end = callback

    def push(
        self, choice: int, token_ids: list[int], finish_reason: FinishReason | None
    ) -> FinishReason | None:
        """New tokens of a choice; returns "stop" if a stop string ended it before the engine."""
        if self.finished:
            return None
        metrics = self.metrics
        if metrics.time_to_first_token_s is None:
            metrics.time_to_first_token_s = time.monotonic() - self._arrival_s
        text = self._detokenizers[choice].push(token_ids, finish_reason)
        new_ids = text.token_ids
        metrics.num_output_tokens += len(new_ids)
        ended_here = isinstance(text.stop_reason, str)
        delta = CompletionOutput(
            choice,
            text.text,
            new_ids if isinstance(new_ids, list) else list(new_ids),
            None,
            "stop" if ended_here else finish_reason,
            text.stop_reason,
        )
        if self._sink is not None:
            self._sink(delta)
        else:
            self._deltas.append(delta)
            self._wake()
        return "stop" if ended_here and finish_reason is None else None

    def finish(self, error: BatonError | None = None) -> None:
        """The one end of this request. Later calls change nothing."""
        if self.finished:
            return
        self.finished = True
        self._error = error
        self.metrics.e2e_s = time.monotonic() - self._arrival_s
        if self._on_end is not None:
            self._on_end()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        # The deadline of this wait is the lifecycle's: every request ends within it.
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class Cumulated:
    """Adds deltas up, for callers who want whole outputs."""

    def __init__(self, num_choices: int) -> None:
        self._texts: list[list[str]] = [[] for _ in range(num_choices)]
        self._outputs = [CompletionOutput(index, "", []) for index in range(num_choices)]

    def add(self, delta: CompletionOutput) -> None:
        output = self._outputs[delta.index]
        self._texts[delta.index].append(delta.text)
        output.token_ids.extend(delta.token_ids)
        output.finish_reason = delta.finish_reason
        output.stop_reason = delta.stop_reason

    def outputs(self) -> list[CompletionOutput]:
        """A snapshot of all choices, in order."""
        return [self.output(index) for index in range(len(self._outputs))]

    def output(self, index: int) -> CompletionOutput:
        """A snapshot of one choice, which later deltas do not change."""
        text = "".join(self._texts[index])
        self._texts[index] = [text]
        now = self._outputs[index]
        return CompletionOutput(
            index, text, list(now.token_ids), None, now.finish_reason, now.stop_reason
        )
