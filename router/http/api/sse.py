"""Server-sent events: the deltas of one streamed response, sent as they arrive.

Each delta becomes an event that goes to the connection's transport at once, without a task switch.
While a client reads too slowly, deltas are merged per choice, and the response's task writes them
when there is room. aiohttp sends what is around the events: the headers and the end.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Protocol

from aiohttp import web
from aiohttp.http import HttpVersion11

from baton.protocol.errors import BatonError
from baton.router.core.stream import RequestStream
from baton.router.http.connections import connection_of
from baton.router.http.metrics import HttpMetrics
from baton.router.outputs import CompletionOutput, Merged, RequestMetrics
from baton.runtime.metrics import MAX_NEW

# What any response to a request must have, besides its own headers.
EXTRA_HEADERS = web.RequestKey("extra_headers", dict[str, str])
SILENCE_S = 10.0
# With this much output unwritten, deltas are merged.
FULL_BYTES = 256 * 1024
_COMMENT = b": waiting\n"


class Encoder(Protocol):
    """What makes the bytes of one response, of events in a stream or of one body.

    `take` gets every delta. Then `ending` or `failed` ends a stream, and `whole` makes a body.
    """

    def take(self, delta: CompletionOutput) -> bytes:
        """Return the events of a delta; none if it brings nothing that clients see now."""

    def ending(self, metrics: Sequence[RequestMetrics]) -> bytes:
        """Return the last events of a complete response, by the metrics of each prompt."""

    def failed(self, error: BatonError) -> bytes:
        """Return the last events of a response that failed."""

    def whole(self, metrics: Sequence[RequestMetrics]) -> bytes:
        """Return the body of a complete response."""


class DeltaCounter:
    """Counts the tokens of one prompt's choices, and the seconds between the deltas of each.

    `note` is the sink of its stream. Deltas go on to `take`, numbered among the choices of all
    prompts.
    """

    __slots__ = ("_came_s", "_gaps", "_metrics", "_offset", "_take")

    def __init__(
        self,
        metrics: HttpMetrics,
        prompt_index: int,
        num_choices: int,  # per prompt
        take: Callable[[CompletionOutput], object],
    ) -> None:
        self._metrics = metrics
        self._gaps = metrics.token_gaps
        self._offset = prompt_index * num_choices
        # When the last delta of each choice came.
        self._came_s: list[float | None] = [None] * num_choices
        self._take = take

    def note(self, delta: CompletionOutput) -> None:
        """Count a delta that has just come, and pass it on."""
        self._metrics.num_output_tokens += len(delta.token_ids)
        now_s = monotonic()
        last_s = self._came_s[delta.index]
        self._came_s[delta.index] = now_s
        if last_s is not None:
            new = self._gaps.new
            new.append(now_s - last_s)
            if len(new) >= MAX_NEW:
                self._gaps.count_new()
        delta.index += self._offset
        self._take(delta)


class EventStream:
    """Call `open`, then `relay` or `take` and `finish`, and `close` however it ended."""

    __slots__ = (
        "_connection",
        "_encoder",
        "_has_ids",
        "_held",
        "_is_chunked",
        "_is_over",
        "_loop",
        "_metrics",
        "_num_bytes",
        "_num_choices",
        "_num_left",
        "_response",
        "_silence_s",
        "_timer",
        "_transport",
        "_unwritten",
        "_wake",
        "_written_s",
    )

    def __init__(
        self,
        encoder: Encoder,
        num_choices: int,  # per prompt
        metrics: HttpMetrics,
        silence_s: float = SILENCE_S,
        *,
        has_ids: bool = False,
    ) -> None:
        self._encoder = encoder
        self._num_choices = num_choices
        self._has_ids = has_ids
        self._metrics = metrics
        self._silence_s = silence_s
        self._unwritten: list[bytes] = []
        self._num_bytes = 0  # of `_unwritten`
        self._held: Merged | None = None  # deltas for a client that reads too slowly
        self._num_left = 0  # streams that have not ended
        self._is_over = False
        self._wake: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._written_s = 0.0

    async def open(
        self, request: web.Request, headers: Mapping[str, str]
    ) -> web.StreamResponse:
        """Send the headers. From then on an error can only be an event."""
        self._response = response = web.StreamResponse(
            headers={
                **headers,
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                # Without this, nginx holds events back.
                "X-Accel-Buffering": "no",
                **request.get(EXTRA_HEADERS, {}),
            }
        )
        self._is_chunked = request.version >= HttpVersion11
        if self._is_chunked:
            response.enable_chunked_encoding()
        else:
            response.force_close()
        # It raises `ConnectionError` if the client has left.
        await response.prepare(request)
        assert request.transport is not None
        self._transport = request.transport
        self._connection = connection_of(request)
        self._written_s = monotonic()
        self._timer = self._loop.call_later(self._silence_s, self._break_silence)
        return response

    async def relay(self, streams: Sequence[RequestStream]) -> None:
        """Send what the streams bring until all have ended.

        Raises the `BatonError` of the first that failed. A client that leaves cancels this.
        """
        self._num_left = len(streams)
        for index, stream in enumerate(streams):
            counter = DeltaCounter(self._metrics, index, self._num_choices, self.take)
            stream.send_to(counter.note)
            stream.call_at_end(self._one_ended)
        while not self._is_over:
            if not self._unwritten and self._held is None:
                self._wake = self._loop.create_future()
                # This wait needs no deadline: the lifecycle ends every request within one.
                await self._wake
                self._wake = None
            await self._flush()
        for stream in streams:
            stream.raise_error()
        self.finish([stream.metrics for stream in streams])

    def take(self, delta: CompletionOutput) -> None:
        """Send a delta, or hold it while the client reads too slowly."""
        if self._is_over:  # another prompt of the request may have failed
            return
        if self._held is not None or self._num_bytes >= FULL_BYTES:
            if self._held is None:
                self._held = Merged()
            self._held.add(delta)
        elif events := self._encoder.take(delta):
            self._written_s = monotonic()
            self._put(events)

    def finish(self, metrics: Sequence[RequestMetrics]) -> None:
        """Add the last events of a complete response."""
        self._release()
        self._put(self._encoder.ending(metrics))

    def fail(self, error: BatonError) -> None:
        """Add the held deltas, then the error that ends the response."""
        self._release()
        self._metrics.failed(error)
        self._put(self._encoder.failed(error))

    async def close(self) -> None:
        """Send what was added, and end the response."""
        self._is_over = True  # nothing may follow the end on a connection that stays
        await self._flush()
        await self._response.write_eof()

    def stop(self) -> None:
        """Send no more comments. It may be called again."""
        if self._timer is not None:
            self._timer.cancel()

    def _put(self, events: bytes) -> None:
        """Write events now, or keep them while the client reads too slowly."""
        if self._connection.is_writable and not self._unwritten:
            self._write(events)
            return
        self._unwritten.append(events)
        self._num_bytes += len(events)
        self._wake_up()

    def _write(self, data: bytes) -> None:
        """Write to the transport, as `StreamResponse.write` does, which costs four calls more."""
        if self._transport.is_closing():  # the client has left
            return
        if self._is_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self._transport.write(data)

    def _release(self) -> None:
        held = self._held
        self._held = None
        for delta in held.take() if held is not None else ():
            if events := self._encoder.take(delta):
                self._put(events)

    async def _flush(self) -> None:
        """Write all events, which waits only for a client that reads too slowly."""
        if not self._connection.is_writable:
            await self._connection.has_room()
        self._release()
        if not self._unwritten:
            return
        data = b"".join(self._unwritten)
        self._unwritten.clear()
        self._num_bytes = 0
        self._written_s = monotonic()
        self._write(data)

    def _one_ended(self, stream: RequestStream) -> None:
        """End the response with the last stream, or with the first that failed."""
        self._num_left -= 1
        if stream.has_failed or self._num_left == 0:
            self._is_over = True
            self._wake_up()

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _break_silence(self) -> None:
        rest_s = self._written_s + self._silence_s - monotonic()
        if rest_s <= 0:
            if not self._unwritten and self._connection.is_writable:
                # A blank line keeps it apart from the next event, which some readers would drop
                # with it. After an event with an id, the openai package takes one for an event.
                self._write(_COMMENT if self._has_ids else _COMMENT + b"\n")
            rest_s = self._silence_s
        self._timer = self._loop.call_later(rest_s, self._break_silence)
