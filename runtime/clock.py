"""Time as a value that is passed in, so that a test can own it.

Shells hand a `Clock` to the parts that need one; pure parts get `now_s` as an argument instead.
Seconds are this host's monotonic ones and mean nothing to another host.
"""

import time
from collections.abc import Callable

Clock = Callable[[], float]


def monotonic() -> float:
    """Seconds on this host's monotonic clock."""
    return time.monotonic()
