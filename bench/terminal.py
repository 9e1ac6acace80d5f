"""Show a report on a terminal, and the progress of a load.

Results go to stdout, progress to stderr. Text that came from a server loses its control characters,
which a terminal would obey.
"""

import io
import os
from collections.abc import Iterator

from rich.console import Console
from rich.status import Status
from rich.table import Table as Grid
from rich.text import Text

from baton.bench.client.load import Progress
from baton.bench.report.document import Report, Table
from baton.bench.report.sections import sections
from baton.runtime.clock import Clock, monotonic

MAX_CELL, GAP = 48, 2
UNBROKEN = 10_000  # columns
LINE_EVERY_S = 5.0
STYLES = {"INVALID": "bold red", "NOT CONFIRMED": "bold red", "WARNING": "yellow"}


def shown(report: Report, width: int = 0, *, styled: bool = False) -> str:
    """Return the text; tables beyond `width` are broken by columns, and 0 breaks none.

    `styled` is for a terminal; rich then heeds NO_COLOR and TERM.
    """
    text = io.StringIO()
    console = Console(file=text, width=width or UNBROKEN, force_terminal=styled, highlight=False)
    for section in (one for one in sections(report) if not one.folded):
        _say(console, section.title)
        for table in section.tables:
            _say(console, *filter(None, [table.title]))
            for grid in _grids(table, width):
                console.print(grid)
            _say(console, *filter(None, [table.caption]), "")
        # This comes last, because people read what is printed last.
        _say(console, *section.lines, *([""] if section.lines else []))
    _say(console, report.verdict)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _grids(table: Table, width: int) -> Iterator[Grid]:
    """Return the parts of a table that fit; the first column names the rows in each of them."""
    sizes = [
        GAP + min(MAX_CELL, max(map(len, column)))
        for column in zip(table.columns, *table.rows, strict=True)
    ]
    parts = [[0]]
    for place in range(1, len(sizes)):
        taken = sum(sizes[one] for one in parts[-1]) + sizes[place] - GAP
        if width and taken > width and len(parts[-1]) > 1 and not table.is_pairs:
            parts.append([0])
        parts[-1].append(place)
    for part in parts:
        grid = Grid(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
        grid.show_header = not table.is_pairs
        for place in part:
            grid.add_column(_text(table.columns[place]))
            if not table.is_pairs:
                column = grid.columns[-1]
                column.justify = "right" if place and table.is_narrow else "left"
                column.no_wrap, column.max_width = True, MAX_CELL
        for row in table.rows:
            grid.add_row(*(_text(row[place]) for place in part))
        yield grid


def _say(console: Console, *lines: str) -> None:
    for line in lines:
        style = next((STYLES[word] for word in STYLES if line.startswith(word)), "")
        console.print(_text(line, style), soft_wrap=True)


def _text(text: str, style: str = "") -> Text:
    return Text("".join(letter if letter.isprintable() else " " for letter in text), style)


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
