"""Server-sent events over one HTTP response: framing, ids, keep-alive comments, back-pressure.

`handlers` opens one `EventStream` per streamed answer. Every token is an event, so events are
written to the transport without a task switch. The stream knows nothing about its content. It never
waits for a slow client, so the sender must check `is_full` before it sends.
"""

import asyncio
from collections.abc import Mapping

from aiohttp import web
from aiohttp.http import HttpVersion11

# What any answer to a request must have, besides its own headers.
EXTRA_HEADERS = web.RequestKey("extra_headers", dict[str, str])
SILENCE_S = 10.0
# A client may leave this much output unread before events are held back and merged.
FULL_BYTES = 256 * 1024
# No blank line follows, because after an event with an id the openai package takes one for an
# event.
_COMMENT = b": waiting\n"
_LAST_CHUNK = b"0\r\n\r\n"


class EventStream:
    """Call `open`, then `send` for every event, then `end`."""

    __slots__ = (
        "_is_chunked", "_loop", "_name", "_silence_s", "_timer", "_transport", "_written_s",
    )  # fmt: skip

    def __init__(self, name: str, silence_s: float = SILENCE_S) -> None:
        """Give events ids that begin with `name` and a colon."""
        self._name = name.encode()
        self._silence_s = silence_s
        self._is_chunked = False
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._written_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    async def open(
        self, request: web.Request, headers: Mapping[str, str], *, goes_on: bool = True
    ) -> web.StreamResponse:
        """Send the headers. From then on an error can only be an event.

        `goes_on` is False for a connection that is closed behind the answer.
        """
        response = web.StreamResponse(
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
        if not goes_on:
            response.force_close()
        await response.prepare(request)
        self._transport = request.transport
        self._written_s = self._loop.time()
        self._timer = self._loop.call_later(self._silence_s, self._break_silence)
        return response

    def send(self, data: bytes, place: bytes) -> None:
        """Send one event, which must have no line breaks. It is dropped if the client is gone."""
        self._write(b"id: %b:%b\ndata: %b\n\n" % (self._name, place, data))

    @property
    def is_full(self) -> bool:
        transport = self._transport
        return transport is not None and transport.get_write_buffer_size() > FULL_BYTES

    def end(self) -> None:
        """Send no more events, and say so if the client cannot know it otherwise."""
        self.stop()
        transport = self._transport
        if self._is_chunked and transport is not None and not transport.is_closing():
            transport.write(_LAST_CHUNK)

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
