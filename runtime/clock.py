"""The clock that is passed in as a value, so that a test can set the time.

Shells pass a `Clock` to the parts that need one; pure parts get `now_s` as an argument instead.
Seconds are those of this host's clocks and mean nothing to another host.
"""

import time
from collections.abc import Callable

Clock = Callable[[], float]


def monotonic() -> float:
    """Return the seconds on this host's monotonic clock."""
    return time.monotonic()


def boottime() -> float:
    """Return the seconds since this host's boot, including the time in suspend.

    Engine nodes use this clock, because a lease runs on while its reader is suspended.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)
