"""The text that a command prints when it is done: the report's sections, and its verdict. Pure.

Text that came from a server loses its control characters, which a terminal would obey.
"""

import io
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from baton.bench.report.document import Report, Table
from baton.bench.report.sections import sections

MAX_CELL, GAP = 48, 2
UNBROKEN = 10_000  # columns
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
        # Last, since what is printed last is what is read.
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
