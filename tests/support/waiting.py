"""Waits for what other processes do. How long that takes says only how busy the machine is."""

import time
from collections.abc import Callable
from typing import TypeVar

TIMEOUT_S = 90.0  # below the timeout of a test, so that `said` is heard
T = TypeVar("T")


def until(condition: Callable[[], T], said: Callable[[], object] = str) -> T:
    """Return the first result of `condition` that is true; `said` explains that none came."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not (found := condition()):
        assert time.monotonic() < deadline_s, said()
        time.sleep(0.05)
    return found
