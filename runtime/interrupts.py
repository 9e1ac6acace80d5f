"""Treat the first Ctrl-C or SIGTERM as a request to stop, and the second one as an order.

Every main uses it: a plain loop waits on it or reads `requested`, and an asyncio loop watches its
descriptor. SIGTERM leaves time to drain; Ctrl-C (SIGINT) means that a person waits for the end.
"""

import os
import select
import signal
from collections.abc import Callable
from types import FrameType, TracebackType

EXIT_INTERRUPTED = 130

EXIT_TERMINATED = 143

SignalHandler = Callable[[int, FrameType | None], object] | int | None


def end_by_signal() -> None:
    """Let SIGTERM end this process until `Interrupts` takes over.

    Otherwise the kernel drops the signal if the process is the first one of a container, and the
    container would end only after its model has been fetched.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_TERMINATED))


class Interrupts:
    """A context in which signals are noted; enter it from the main thread."""

    def __init__(
        self,
        on_first: Callable[[], object] | None = None,
        on_second: Callable[[], object] | None = None,
    ) -> None:
        """Take two callbacks that run in the handler; exit with 130 right after `on_second`."""
        self.requested = False
        self.is_hurried = False  # the stop was requested by SIGINT
        self._on_first, self._on_second = on_first, on_second
        self._previous: list[tuple[signal.Signals, SignalHandler]] = []
        self._read_end, self._write_end = -1, -1

    def __enter__(self) -> "Interrupts":
        self._read_end, self._write_end = os.pipe()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous.append((number, signal.signal(number, self._on_signal)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous:
            signal.signal(number, handler)
        os.close(self._read_end)
        os.close(self._write_end)

    def fileno(self) -> int:
        """Return a descriptor that becomes readable once a stop was requested."""
        return self._read_end

    def wait(self, timeout_s: float) -> bool:
        """Sleep up to `timeout_s`; return True as soon as a stop was requested."""
        # Not threading.Event: setting one in a handler can deadlock with the thread waiting on it.
        select.select([self._read_end], [], [], timeout_s)
        return self.requested

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.requested:
            if self._on_second is not None:
                self._on_second()
            os._exit(EXIT_INTERRUPTED)
        self.requested, self.is_hurried = True, number == signal.SIGINT
        os.write(self._write_end, b"!")
        if self._on_first is not None:
            self._on_first()
