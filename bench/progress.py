"""How a load is going, for people who wait: one live line on a terminal, plain lines elsewhere.

The experiments own one and hand `show` to the load; everything goes to stderr, so that stdout holds
results alone. It decides nothing.
"""

import os
import sys
from types import TracebackType

from rich.console import Console
from rich.status import Status
from rich.text import Text

from baton.bench.client.load import Progress
from baton.runtime.clock import Clock, monotonic

LINE_EVERY_S = 5.0


class LoadProgress:
    """A context manager. `begin` names the load that `show` is about; `say` prints a line."""

    def __init__(self, console: Console | None = None, clock: Clock = monotonic) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._clock = clock
        self._status: Status | None = None
        self._label, self._total, self._num_warm_up = "", 0, 0
        self._started_s = self._printed_s = clock()
        self._last: Progress | None = None

    def __enter__(self) -> "LoadProgress":
        if self._console.is_terminal:
            self._status = self._console.status("")
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def abandon(self) -> None:
        """The process is about to end at once; may be called from a signal's handler."""
        # Whatever the interrupted code holds is not touched; the live line hid the cursor.
        cursor = b"\x1b[?25h\n" if self._status is not None else b""
        os.write(2, cursor + b"baton: ended at once; nothing was written\n")

    def begin(self, label: str, total: int, num_warm_up: int = 0) -> None:
        """The load `label` of `total` requests starts now; so many of them only warm up."""
        self._label, self._total, self._num_warm_up = label, total - num_warm_up, num_warm_up
        self._started_s = self._printed_s = self._clock()
        self._last = None
        if self._status is not None:
            self._status.update(Text(label))

    def show(self, progress: Progress) -> None:
        now_s = self._clock()
        self._last = progress
        if self._status is not None:
            self._status.update(Text(self._line(progress, now_s)))
        elif now_s - self._printed_s >= LINE_EVERY_S:
            self._printed_s = now_s
            self.say(self._line(progress, now_s))

    def say(self, line: str) -> None:
        """A line that stays."""
        if self._console.is_terminal:
            self._console.print(Text(line), soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def _line(self, progress: Progress, now_s: float) -> str:
        elapsed_s = max(now_s - self._started_s, 1e-9)
        # Warm-up goes first, so it ends first.
        ended = max(0, progress.ended - self._num_warm_up)
        parts = [f"{self._label}: {ended}/{self._total} ended"]
        if progress.failed:
            parts.append(f"{progress.failed} failed")
        parts.append(f"{progress.in_flight} in flight")
        if progress.tokens:  # counted as requests end
            parts.append(f"{progress.tokens / elapsed_s:.0f} tok/s")
        return "  ".join([*parts, f"{elapsed_s:.0f} s"])
