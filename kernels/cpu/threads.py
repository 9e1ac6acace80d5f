"""Threads that run slices of a compiled kernel beside the calling thread.

The calls take tens of microseconds and run without Python's lock. Each thread waits on its own
queue, and the caller computes the first slice itself. Each caller has threads of its own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue

Arguments = tuple[float, ...]
ThreadWork = tuple[Callable[..., object], Arguments]

# A small product has one thread: two threads that wait for each other also wait for the router,
# which may be using the CPU of one of them.
MIN_SHARED_NS = 300_000


class CpuThreads:
    """Threads that start when they are first needed and end with this object."""

    def __init__(self) -> None:
        self._inboxes: list[SimpleQueue[ThreadWork | None]] = []
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()

    def run(self, function: Callable[..., object], slices: Sequence[Arguments]) -> None:
        """Call `function` with each of `slices` in parallel, and return when all calls have ended.

        If a call raised an exception, raise it after all calls have ended.
        """
        others = len(slices) - 1
        if not others:
            function(*slices[0])
            return
        while len(self._inboxes) < others:
            self._start()
        for inbox, arguments in zip(self._inboxes, slices[1:], strict=False):
            inbox.put((function, arguments))
        try:
            function(*slices[0])
        finally:
            errors = [self._done.get() for _ in range(others)]
        for error in errors:
            if error is not None:
                raise error

    def _start(self) -> None:
        inbox: SimpleQueue[ThreadWork | None] = SimpleQueue()
        name = f"kernels-{len(self._inboxes) + 1}"
        threading.Thread(
            target=_work, args=(inbox, self._done), name=name, daemon=True
        ).start()
        weakref.finalize(self, inbox.put, None)
        self._inboxes.append(inbox)


def _work(
    inbox: SimpleQueue[ThreadWork | None], done: SimpleQueue[BaseException | None]
) -> None:
    while (work := inbox.get()) is not None:
        failure: BaseException | None = None
        try:
            work[0](*work[1])
        except BaseException as error:  # noqa: BLE001  (the caller raises it)
            failure = error
        # An idle thread keeps nothing: to free tensors while Python ends would abort the process.
        work = None
        done.put(failure)
        del failure
