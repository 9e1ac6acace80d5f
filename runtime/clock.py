"""The clock that is passed in as a value, so that a test can set the time.

Its seconds mean nothing to another host. Pure parts get `now_s` as an argument instead.
"""

import time
from collections.abc import Callable

Clock = Callable[[], float]


def monotonic() -> float:
    """Return the seconds on this host's monotonic clock."""
    return time.monotonic()


def boottime() -> float:
    """Return the seconds since boot, including suspend, in which a reader's leases run on."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
