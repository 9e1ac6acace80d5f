"""The clock that is passed in as a value, so that a test can set the time.

Its seconds mean nothing to another host. Pure parts get `now_s` as an argument instead.
"""

import time
from collections.abc import Callable

Clock = Callable[[], float]


def monotonic() -> float:
    """Return the seconds on this host's monotonic clock."""
    return time.monotonic()


class Standstill:
    """Tells when a state has not changed for `limit_s`, so that slow progress is no failure."""

    def __init__(self, limit_s: float, clock: Clock = monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._state: object = None
        self._since_s = clock()

    def lasts(self, state: object) -> bool:
        """Take the state of now. Return whether it has been the same for too long."""
        now_s = self._clock()
        if state != self._state:
            self._state = state
            self._since_s = now_s
        return now_s - self._since_s > self._limit_s


def boottime() -> float:
    """Return the seconds since boot, including suspend, in which a reader's leases run on."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
