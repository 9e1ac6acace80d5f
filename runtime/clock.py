"""Time as a value that is passed in, so that tests and the simulator can own it.

Shells hand a `Clock` to whatever needs one; pure parts get `now_s` as an argument instead.
Seconds are this host's monotonic ones and mean nothing to another host.
"""

import time
from collections.abc import Callable

Clock = Callable[[], float]


def monotonic() -> float:
    """Seconds on this host's monotonic clock."""
    return time.monotonic()


class VirtualClock:
    """A `Clock` that only moves when told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self.now_s = start_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> float:
        """Moves on by `seconds` and returns the new time; time never goes back."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self.now_s += seconds
        return self.now_s
