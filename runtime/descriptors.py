"""The descriptors of a process: how many it may open, and the warning when none is left.

Routers and nodes use it. Every connection to a port takes a descriptor of the process that listens
there, so a soft limit of 1,024 would soon be used up.
"""

import asyncio
import resource
from collections.abc import Callable

from baton.runtime.log import logger

_WARN_EVERY_S = 10.0

log = logger("connections")


def raise_descriptor_limit() -> None:
    """Let this process open as many descriptors as its hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class RareWarning:
    """Logs a warning at most every ten seconds, however often it is called."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last_s: float | None = None

    def __call__(self, text: str) -> None:
        now_s = self._clock()
        if self._last_s is None or now_s - self._last_s >= _WARN_EVERY_S:
            self._last_s = now_s
            log.warning(text)


class AcceptErrors:
    """An exception handler for the event loop that keeps failing accepts out of the log.

    asyncio reports each of them with a traceback, thousands per second when descriptors run out.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._warn = RareWarning(loop.time)

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        if str(context.get("message", "")).startswith("socket.accept()"):
            self._warn(
                f"connections cannot be accepted: {context.get('exception')}; raise the limit of "
                f"open files (ulimit -n)"
            )
        else:
            loop.default_exception_handler(context)
