"""Keep a client's connection while an answer is streamed on it, without parser, request or task.

`Connection.hand_over` puts a `StreamConnection` in the place of aiohttp's objects, which take some
10 KiB, once the headers are sent. At the end of the answer a new `Connection` takes its place, or
the connection is closed. It parses nothing: what the client sends early waits for the next
`Connection`.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from baton.router.http.unread import UnreadOutput

# How much a client may send before its answer has ended.
MAX_EARLY_BYTES = 64 * 1024


class StreamOwner(Protocol):
    """What a stream's connection asks of `Connections`."""

    def closed(self, connection: "StreamConnection") -> None: ...

    def take_back(self, connection: "StreamConnection", early: bytes) -> None:
        """Let the client send its next request; `early` is what it has sent of it already."""


class StreamConnection(asyncio.Protocol):
    """Calls `on_gone` if the client leaves before `end` was called."""

    __slots__ = (
        "_early", "_goes_on", "_is_full", "_on_gone", "_owner", "open_transport",
        "unread",
    )  # fmt: skip
    is_spare = False  # a spare connection gets no streams

    def __init__(
        self,
        owner: StreamOwner,
        transport: asyncio.Transport,
        on_gone: Callable[[], None],
        *,
        is_full: bool,
    ) -> None:
        """`is_full`: the transport has more output than it should and will say when it has less."""
        self.open_transport = transport
        self.unread = UnreadOutput(transport)
        self._owner = owner
        self._on_gone: Callable[[], None] | None = on_gone
        self._is_full = is_full
        self._goes_on = False
        self._early = b""
        transport.set_protocol(self)

    def end(self, *, goes_on: bool) -> None:
        """Let the client read the rest; then take its next request, or close the connection.

        It may take as long as the client goes on reading: `Connections` cuts one that does not.
        """
        self._on_gone = None
        transport = self.open_transport
        if goes_on and not self._is_full and not transport.is_closing():
            self._owner.take_back(self, self._early)
            return
        self._goes_on = goes_on
        if not goes_on:
            transport.close()

    def abort(self) -> None:
        self.open_transport.abort()

    # --- what asyncio calls ---------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._early += data
        if len(self._early) >= MAX_EARLY_BYTES:
            self.open_transport.pause_reading()

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        if self._goes_on:
            self._owner.take_back(self, self._early)

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.closed(self)
        on_gone, self._on_gone = self._on_gone, None
        if on_gone is not None:
            on_gone()
