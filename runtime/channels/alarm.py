"""A descriptor that becomes readable at a set time, for loops that watch descriptors only.

`wire` uses it; its owner may be an asyncio loop, a poller or a plain thread. It runs on Linux only,
as eventfd and epoll do. Python itself has these calls from 3.13 on.
"""

import ctypes
import os

from baton.protocol.errors import NodeError

CLOCK_MONOTONIC = 1  # from time.h
TFD_NONBLOCK, TFD_CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC
SHORTEST_S = 1e-6  # zero would switch the timer off


class _Interval(ctypes.Structure):
    """`struct itimerspec`: the repetition, then the first expiry, as seconds and nanoseconds."""

    _fields_ = [("times", ctypes.c_long * 4)]


class Alarm:
    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor: int = self._libc.timerfd_create(
            CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC
        )
        if self._descriptor < 0:
            raise NodeError(f"cannot make a timer: {os.strerror(ctypes.get_errno())}")

    def fileno(self) -> int:
        return self._descriptor

    def set(self, seconds: float | None) -> None:
        """Fire once after `seconds`; None means never. A call replaces the one before it."""
        whole, part = divmod(max(seconds, SHORTEST_S), 1.0) if seconds is not None else (0, 0)
        wanted = _Interval((ctypes.c_long * 4)(0, 0, int(whole), int(part * 1e9)))
        self._libc.timerfd_settime(self._descriptor, 0, ctypes.byref(wanted), None)

    def close(self) -> None:
        os.close(self._descriptor)
