"""Find clients that do not read what was written for them.

`Connections` asks about every connection in turn, and cuts those clients off. The kernel says how
much a client's host has taken, so a client that reads slowly but steadily is left alone.
"""

import asyncio
import socket

# A client that has unread output must read this much of it per second on average.
MIN_BYTES_PER_S = 256
# The offset of `tcpi_bytes_acked` in Linux's struct tcp_info (include/uapi/linux/tcp.h).
_BYTES_ACKED = slice(120, 128)


class ReadingPace:
    """Judges how quickly a client takes the output that waits for it."""

    __slots__ = ("_checked_s", "_num_acked", "_unread_s")

    def __init__(self, unread_s: float, now_s: float, num_acked: int) -> None:
        """Begin at `now_s`, when the client's host has taken `num_acked` bytes."""
        self._unread_s = unread_s
        self._checked_s, self._num_acked = now_s, num_acked

    def is_too_slow(self, now_s: float, num_acked: int) -> bool:
        """Return whether the client has taken too little, which is judged once in `unread_s`."""
        passed_s = now_s - self._checked_s
        if passed_s < self._unread_s:
            return False
        num_new, self._checked_s, self._num_acked = num_acked - self._num_acked, now_s, num_acked
        return num_new < passed_s * MIN_BYTES_PER_S


class UnreadOutput:
    """The output of one connection."""

    __slots__ = ("_pace", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._pace: ReadingPace | None = None  # while there is output to read

    def has_stalled(self, now_s: float, unread_s: float) -> bool:
        """Return whether the client has had output to read for `unread_s` and did not take it."""
        if not self._transport.get_write_buffer_size():
            self._pace = None
        elif self._pace is None:
            self._pace = ReadingPace(unread_s, now_s, self._num_acked())
        else:
            return self._pace.is_too_slow(now_s, self._num_acked())
        return False

    def _num_acked(self) -> int:
        """Return how many bytes the client's host has taken so far."""
        client = self._transport.get_extra_info("socket")
        info = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return int.from_bytes(info[_BYTES_ACKED], "little")
