"""Server-sent events over one HTTP response: framing, ids, keep-alive comments, back-pressure.

`handlers` opens one `EventStream` per streamed answer. Every token is an event, so events are
written to the transport without a task switch. The stream knows nothing about its content. It waits
for a slow client only at the end, so the sender must check `is_full` before it sends.
"""

import asyncio
import contextlib
from collections.abc import Mapping

from aiohttp import web
from aiohttp.http import HttpVersion11

SILENCE_S = 10.0
# A client may leave this much output unread before events are held back and merged.
FULL_BYTES = 256 * 1024

# No blank line follows, because after an event with an id the openai package takes one for an
# event.
_COMMENT = b": waiting\n"


class EventStream:
    """Call `open`, then `send` for every event, then `close`."""

    __slots__ = (
        "_is_chunked", "_loop", "_name", "_request", "_response", "_silence_s", "_timer",
        "_transport", "_written_s",
    )  # fmt: skip

    def __init__(
        self,
        request: web.Request,
        name: str,
        headers: Mapping[str, str],
        silence_s: float = SILENCE_S,
    ) -> None:
        """Give events ids that begin with `name` and a colon."""
        self._request = request
        self._name = name.encode()
        self._silence_s = silence_s
        self._response = web.StreamResponse(
            headers={
                **headers,
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                # Without this, nginx holds events back.
                "X-Accel-Buffering": "no",
            }
        )
        self._is_chunked = request.version >= HttpVersion11
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._written_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        """Send the headers. From then on an error can only be an event."""
        if self._is_chunked:
            self._response.enable_chunked_encoding()
        await self._response.prepare(self._request)
        self._transport = self._request.transport
        self._written_s = self._loop.time()
        self._timer = self._loop.call_later(self._silence_s, self._break_silence)

    def send(self, data: bytes, place: bytes) -> None:
        """Send one event, which must have no line breaks. It is dropped if the client is gone."""
        self._write(b"id: %b:%b\ndata: %b\n\n" % (self._name, place, data))

    @property
    def is_full(self) -> bool:
        transport = self._transport
        return transport is not None and transport.get_write_buffer_size() > FULL_BYTES

    async def close(self) -> web.StreamResponse:
        """End the response and return it, for the handler to return.

        It may take as long as the client goes on reading: `connections` cuts one that does not.
        """
        self.stop()
        with contextlib.suppress(ConnectionError):  # the client left during the last event
            await self._response.write_eof()
        return self._response

    def stop(self) -> None:
        """Send no more comments. It may be called again."""
        if self._timer is not None:
            self._timer.cancel()

    def _write(self, data: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._written_s = self._loop.time()
        if self._is_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        transport.write(data)

    def _break_silence(self) -> None:
        rest_s = self._written_s + self._silence_s - self._loop.time()
        if rest_s <= 0:
            if not self.is_full:
                self._write(_COMMENT)
            rest_s = self._silence_s
        self._timer = self._loop.call_later(rest_s, self._break_silence)
