"""Waking up on time: an event loop for measuring, and how late it was at worst.

asyncio on epoll sleeps in whole milliseconds, rounded up, so a request would leave half a
millisecond late on average. Used by the client processes. Nothing here decides when: moments are
absolute and given.
"""

import asyncio
import select
import selectors
import time
from collections import deque
from collections.abc import Callable

from baton.runtime.clock import Clock, monotonic

TICK_S = 0.01
# epoll's timeout is at most a millisecond late; the rest of a sleep is left to select.
COARSE_S = 0.003
CPU_EVERY_S = 0.5
CPU_SPAN_S = 5.0


def new_loop() -> asyncio.AbstractEventLoop:
    """An event loop whose timers are as exact as the kernel's."""
    if hasattr(selectors, "EpollSelector"):
        return asyncio.SelectorEventLoop(_fine_selector())
    return asyncio.new_event_loop()


def _fine_selector() -> selectors.BaseSelector:
    class FineSelector(selectors.EpollSelector):
        """Sleeps in microseconds: select on epoll's own descriptor takes such timeouts."""

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if timeout is None or timeout <= 0:
                return super().select(timeout)
            if timeout > COARSE_S:
                return super().select(timeout - COARSE_S / 2)
            select.select((self.fileno(),), (), (), timeout)
            return super().select(0)

    return FineSelector()


class LoopLag:
    """The longest that a running loop was late for a tick, from `start` to `stop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.max_lag_s = 0.0
        self._loop = loop
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self.max_lag_s = 0.0
        self._schedule(self._loop.time())

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        now_s = self._loop.time()
        self.max_lag_s = max(self.max_lag_s, now_s - self._due_s)
        self._schedule(now_s)

    def _schedule(self, now_s: float) -> None:
        self._due_s = now_s + TICK_S
        self._timer = self._loop.call_at(self._due_s, self._tick)


class CpuShare:
    """How much of a core this process used while it used most, over `CPU_SPAN_S` seconds."""

    def __init__(self) -> None:
        self.busiest = 0.0  # 0 until there was a whole span
        self._samples: deque[tuple[float, float]] = deque()  # clock, time of the processor

    async def watch(self, clock: Clock = monotonic) -> None:
        """Until it is cancelled."""
        while True:
            self.sample(clock(), time.process_time())
            await asyncio.sleep(CPU_EVERY_S)

    def sample(self, now_s: float, cpu_s: float) -> None:
        self._samples.append((now_s, cpu_s))
        # The newest one that is a whole span old, and all after it.
        while len(self._samples) > 1 and now_s - self._samples[1][0] >= CPU_SPAN_S:
            self._samples.popleft()
        first_s, first_cpu_s = self._samples[0]
        if now_s - first_s >= CPU_SPAN_S:
            self.busiest = max(self.busiest, (cpu_s - first_cpu_s) / (now_s - first_s))


class Waits:
    """Sleeps until absolute moments of the loop's clock, all of which `end` cuts short."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ended = False
        self._loop = loop
        self._open: set[asyncio.Future[bool]] = set()

    async def until(self, at_s: float) -> bool:
        """True at `at_s`; False as soon as the waits were ended."""
        if self.ended or at_s <= self._loop.time():
            return not self.ended
        waiting: asyncio.Future[bool] = self._loop.create_future()
        timer = self._loop.call_at(at_s, _resolve(waiting))
        self._open.add(waiting)
        try:
            return await waiting
        finally:
            timer.cancel()
            self._open.discard(waiting)

    def end(self) -> None:
        self.ended = True
        for waiting in self._open:
            if not waiting.done():
                waiting.set_result(False)


def _resolve(waiting: asyncio.Future[bool]) -> Callable[[], None]:
    def due() -> None:
        if not waiting.done():
            waiting.set_result(True)

    return due
