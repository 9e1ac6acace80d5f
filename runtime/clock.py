"""The clock that is passed in as a value, so that a test can set the time.

Shells hand a `Clock` to the parts that need one; pure parts get `now_s` as an argument instead.
Seconds are those of this host's monotonic clock and mean nothing to another host.
"""

import time
from collections.abc import Callable

Clock = Callable[[], float]


def monotonic() -> float:
    """Return the seconds on this host's monotonic clock."""
    return time.monotonic()
