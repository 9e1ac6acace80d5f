"""What a command prints when it is done: a few aligned tables, and whether their figures hold.

`publish.py` prints `shown` of every report; the pages that `--out` writes say all of it. Pure. Text
that came from a server loses its control characters, which a terminal would obey.
"""

import io
from collections import Counter
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from baton.bench.report.document import Report, Table
from baton.bench.report.sections import Section, faults, latencies, results, totals

LATENCIES = ("ttft", "tpot", "itl", "gap_max", "e2e", "lag")
PERCENTILES = ("mean", "p50", "p90", "p99", "max")
MAX_CELL, GAP = 48, 2
UNBROKEN = 10_000  # columns
STYLES = {"INVALID": "bold red", "NOT CONFIRMED": "bold red", "WARNING": "yellow"}


def shown(report: Report, width: int = 0, *, styled: bool = False) -> str:
    """Return the text; tables beyond `width` are broken by columns, and 0 breaks none.

    `styled` is for a terminal; rich then heeds NO_COLOR and TERM.
    """
    text = io.StringIO()
    console = Console(file=text, width=width or UNBROKEN, force_terminal=styled, highlight=False)
    sections = [section for section in results(report) if not section.is_run]
    if len(report.runs) == 1:
        run = report.runs[0]
        found = latencies(run.summary, LATENCIES, PERCENTILES)
        sections.insert(0, Section("", run.label, [], [found, totals(run), *faults(run)]))
    for section in sections:
        _say(console, section.title, *section.lines, "")
        for table in section.tables:
            _say(console, *([table.title] if table.title else []))
            for grid in _grids(table, width):
                console.print(grid)
            _say(console, *([table.caption] if table.caption else []), "")
    _say(console, *map(_noted, report.notes), *_problems(report), report.verdict)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _problems(report: Report) -> list[str]:
    """Return each problem once; of several runs, what makes one invalid and what most share."""
    found = [(run, problem) for run in report.runs for problem in run.problems]
    if len(report.runs) == 1 and report.search is None:
        problems = [f"{problem.severity.upper()}: {problem.text}" for _, problem in found]
        return [*problems, *map(_noted, report.runs[0].notes)]
    # Invalid runs are no flaw of a search, which goes on until it knows what it can.
    form = "INVALID: {}: {}" if report.search is None else "note: {} was INVALID: {}"
    lines = [form.format(run.label, one.text) for run, one in found if one.is_invalid]
    shared = Counter(problem.text for _, problem in found if not problem.is_invalid)
    for text, count in shared.items():
        if 2 * count >= len(report.runs):
            lines.append(f"WARNING: {count} of {len(report.runs)} runs: {text}")
    return lines


def _noted(note: str) -> str:
    return note if note.startswith("WARNING: ") else f"note: {note}"


def _grids(table: Table, width: int) -> Iterator[Grid]:
    """Return the parts of a table that fit; the first column names the rows in each of them."""
    widths = [
        GAP + min(MAX_CELL, max(map(len, column)))
        for column in zip(table.columns, *table.rows, strict=True)
    ]
    parts = [[0]]
    for place in range(1, len(widths)):
        taken = sum(widths[one] for one in parts[-1]) + widths[place] - GAP
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
                column.justify = "right" if place else "left"
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
