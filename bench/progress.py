"""The progress of a load, for a person who waits: one live line on a terminal, else plain lines.

Everything goes to stderr, so that stdout holds results alone.
"""

import os

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

    def __enter__(self) -> "LoadProgress":
        if self._console.is_terminal:
            self._status = self._console.status("")
            self._status.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def abandon(self) -> None:
        """Say that the process ends at once; a signal's handler may call it."""
        # The interrupted code may hold rich's locks; the live line hid the cursor.
        cursor = b"\x1b[?25h\n" if self._status is not None else b""
        os.write(2, cursor + b"baton: ended at once; nothing was written\n")

    def begin(self, label: str, total: int, num_warm_up: int = 0) -> None:
        """Start the load `label` of `total` requests, `num_warm_up` of which only warm up."""
        self._label, self._total, self._num_warm_up = label, total - num_warm_up, num_warm_up
        self._started_s = self._printed_s = self._clock()
        if self._status is not None:
            self._status.update(Text(label))

    def show(self, progress: Progress) -> None:
        now_s = self._clock()
        if self._status is not None:
            self._status.update(Text(self._line(progress, now_s)))
        elif now_s - self._printed_s >= LINE_EVERY_S:
            self._printed_s = now_s
            self.say(self._line(progress, now_s))

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self._console.print(Text(line), soft_wrap=True)

    def _line(self, progress: Progress, now_s: float) -> str:
        elapsed_s = max(now_s - self._started_s, 1e-9)
        # Warm-up goes first, so it ends first.
        ended = max(0, progress.ended - self._num_warm_up)
        failed = f"  {progress.failed} failed" if progress.failed else ""
        # Tokens are counted as requests end.
        rate = f"  {progress.tokens / elapsed_s:.0f} tokens/s" if progress.tokens else ""
        so_far = f"{self._label}: {ended}/{self._total} ended{failed}"
        return f"{so_far}  {progress.sent - progress.ended} in flight{rate}  {elapsed_s:.0f} s"
