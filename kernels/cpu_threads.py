"""Threads that run slices of a compiled kernel beside the calling thread.

Made for calls of tens of microseconds that run without Python's lock: a thread waits on its own
queue, and the caller takes the first slice itself. Several callers each have threads of their own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue

Arguments = tuple[float, ...]
Slice = tuple[Callable[..., object], Arguments]


class CpuThreads:
    """Starts a thread when it is first needed; they end with this object."""

    def __init__(self) -> None:
        self._inboxes: list[SimpleQueue[Slice | None]] = []
        self._done: SimpleQueue[None] = SimpleQueue()

    def run(self, function: Callable[..., object], slices: Sequence[Arguments]) -> None:
        """Call `function` with each of `slices` at once; return when all calls have."""
        others = len(slices) - 1
        while len(self._inboxes) < others:
            self._start()
        for inbox, arguments in zip(self._inboxes, slices[1:], strict=False):
            inbox.put((function, arguments))
        function(*slices[0])
        for _ in range(others):
            self._done.get()

    def _start(self) -> None:
        inbox: SimpleQueue[Slice | None] = SimpleQueue()
        name = f"kernels-{len(self._inboxes) + 1}"
        threading.Thread(target=_work, args=(inbox, self._done), name=name, daemon=True).start()
        weakref.finalize(self, inbox.put, None)
        self._inboxes.append(inbox)


def _work(inbox: SimpleQueue[Slice | None], done: SimpleQueue[None]) -> None:
    while (work := inbox.get()) is not None:
        function, arguments = work
        function(*arguments)
        done.put(None)
