"""Send one streamed answer from its headers to its end, without a task.

A handler makes an `OpenStream` and returns. The event loop then calls it when tokens come, when a
request ends and when the client leaves, so a stream that waits holds little more than its client's
transport. It knows nothing about nodes.
"""

import asyncio
from collections.abc import Callable

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from baton.protocol.errors import BatonError
from baton.router.http.connections import Connection
from baton.router.http.relay import Relay
from baton.router.http.request_log import GONE, Running
from baton.router.stream import RequestStream
from baton.runtime.log import logger

_BROKEN = "the router failed to make this answer"

log = logger("router")


class HandedOver(web.StreamResponse):
    """Stands for an answer that a stream goes on with: aiohttp sends nothing more of it."""

    def __init__(self, request_id: str) -> None:
        super().__init__(headers={"X-Request-Id": request_id})
        self.force_close()

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        pass


class OpenStream:
    """Call `begin` once the headers are sent. `count` is called when all is over."""

    __slots__ = ("_connection", "_count", "_goes_on", "_is_over", "_num_left", "_relay", "_running")

    def __init__(self, relay: Relay, running: Running, count: Callable[[], None]) -> None:
        self._relay = relay
        self._running = running
        self._count = count
        self._num_left = len(running.streams)
        self._is_over = False

    def begin(self, connection: Connection, *, goes_on: bool) -> HandedOver:
        """Relay the streams on `connection`, which may go on with further requests afterwards.

        Returns what the handler must return.
        """
        self._goes_on = goes_on
        self._connection = connection.hand_over(self._gone)
        self._running.is_open = True  # from here on, this object closes and counts the requests
        try:
            for index, stream in enumerate(self._running.streams):
                stream.send_to(self._relay.sink(index))
        except Exception:
            log.exception("a streamed answer broke", request=self._running.request_id)
            asyncio.get_running_loop().call_soon(self._end, BatonError(_BROKEN))
        for stream in self._running.streams:
            stream.call_at_end(self._one_ended)
        return HandedOver(self._running.request_id)

    def _one_ended(self, stream: RequestStream) -> None:
        """End the answer with the last stream, or with the first that failed."""
        self._num_left -= 1
        if self._is_over or not (stream.has_failed or self._num_left == 0):
            return
        try:
            stream.raise_error()
            self._relay.finish([one.metrics for one in self._running.streams])
            self._running.outcome = "finished"
        except BatonError as error:
            self._end(error)
        except Exception:
            log.exception("a streamed answer broke", request=self._running.request_id)
            self._end(BatonError(_BROKEN))
        else:
            self._end(None)

    def _end(self, error: BatonError | None) -> None:
        if self._is_over:
            return
        if error is not None:
            self._running.failed(error)
            self._relay.fail(error)
        self._relay.events.end()
        self._over()
        self._connection.end(goes_on=self._goes_on)

    def _gone(self) -> None:
        """End all requests of a client that has left."""
        if not self._is_over:
            self._running.outcome = GONE
            self._over()

    def _over(self) -> None:
        self._is_over = True
        self._relay.stop()
        self._relay.events.stop()
        self._count()
        self._running.tell_end()
