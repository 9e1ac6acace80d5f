"""The clock that is passed in as a value, so that a test can set the time.

Shells hand a `Clock` to the parts that need one; pure parts get `now_s` as an argument instead.
Seconds are those of this host's clocks and mean nothing to another host.
"""

import time
from collections.abc import Callable

Clock = Callable[[], float]


def monotonic() -> float:
    """Return the seconds on this host's monotonic clock."""
    return time.monotonic()


def boottime() -> float:
    """Return the seconds since this host's boot, those in suspend included.

    Engine nodes count in these: a lease goes on while its reader is asleep.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)
