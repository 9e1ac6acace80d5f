"""A report as CSV, one row per request, and as Markdown for a pull request or an issue.

Text that came from a server is made harmless for the program that will open it: a spreadsheet
must not compute it, and Markdown must not render it.
"""

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path

from baton.bench.figures.metrics import measure, meets
from baton.bench.records import Record
from baton.bench.report.document import Report, Run, Table
from baton.bench.report.headlines import headlines, subject
from baton.bench.report.sections import Section, background, results

Cell = str | float | int | None

_TIMINGS = (
    "lag_ms", "ttft_ms", "tpot_ms", "gap_max_ms", "e2e_ms", "ntpot_ms", "ttft_from_sent_ms",
    "e2e_from_sent_ms",
)  # fmt: skip
COLUMNS = (
    "run", "arm", "round", "rate", "index", "warm_up", "counted", "outcome", "status", "detail",
    "intended_s", "sent_s", "end_s", *_TIMINGS, "met_bounds", "arrived_tokens", "forced_tokens",
    "output_tokens", "prompt_tokens", "cached_tokens", "conversation", "turn",
)  # fmt: skip
# Within a word an underscore is none, and before anything but a name `<` opens no tag.
_MARKUP = re.compile(r"([\\`*{}\[\]>#|~$]|(?<![^\W_])_|_(?![^\W_])|<(?=[A-Za-z/!?]))")


def write_csv(report: Report, path: Path) -> None:
    """A row per request of every run, warm-up included and marked; times as in the definitions."""
    path.write_text(csv_text(report), encoding="utf-8", newline="")


def csv_text(report: Report) -> str:
    stages = list(
        dict.fromkeys(
            stage.name for run in report.runs for record in run.records for stage in record.stages
        )
    )
    written = io.StringIO(newline="")
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow([*COLUMNS, *(_cell(f"{name}_ms") for name in stages)])
    for run in report.runs:
        counted = {record.index for record in run.counted}
        for record in run.records:
            row = [*_row(run, record, record.index in counted), *_stage_times(record, stages)]
            writer.writerow([_cell(value) for value in row])
    return written.getvalue()


def markdown(report: Report) -> str:
    """Headlines, tables, and what they rest on; readable as it is."""
    return "\n".join(_blocks(report)) + "\n"


def _row(run: Run, record: Record, counted: bool) -> list[Cell]:
    timing = measure(record)
    met = meets(record, run.summary.bounds) if run.summary.bounds is not None else None
    return [
        run.label, run.arm, run.round, run.rate, record.index, int(record.warm_up), int(counted),
        record.outcome, record.status, record.detail, record.intended_s, record.sent_s,
        record.end_s, *(getattr(timing, name) for name in _TIMINGS),
        None if met is None else int(met), record.num_tokens, record.forced_tokens,
        record.output_tokens, record.prompt_tokens, record.cached_tokens, record.conversation,
        record.turn,
    ]  # fmt: skip


def _stage_times(record: Record, names: list[str]) -> list[Cell]:
    times = {stage.name: 1e3 * stage.duration_s for stage in record.stages}
    return [times.get(name) for name in names]


def _cell(value: Cell) -> Cell:
    """Text that a spreadsheet would take for a formula gets a quote before it."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return value


def _blocks(report: Report) -> Iterator[str]:
    yield f"# {_text(report.title)}"
    yield ""
    if report.invalid:
        yield "> **INVALID.** These figures are not the server's and must not be used."
        yield from (f"> - {_text(run.label)}: {_text(reason)}" for run, reason in report.invalid)
        yield ""
    shown = headlines(report)
    if shown:
        yield f"{_text(subject(report))}:"
        yield ""
    for one in shown:
        notes = "; ".join(_text(note) for note in (one.verdict, one.note) if note)
        value = _text(f"{one.value} {one.unit}")
        yield f"- {_text(one.name)}: **{value}**{f' ({notes})' if notes else ''}"
    yield from ("", *(f"- Note: {_text(note)}" for note in report.notes)) if report.notes else ()
    for section in (*results(report), *background(report)):
        yield from _section(section)


def _section(section: Section) -> Iterator[str]:
    yield from ("", f"## {_text(section.title)}")
    if section.lines:
        yield from ("", *(f"- {_text(line)}" for line in section.lines))
    for table in section.tables:
        yield from _table(table)


def _table(table: Table) -> Iterator[str]:
    yield ""
    if table.title:
        yield from (f"### {_text(table.title)}", "")
    yield _line(table.columns)
    yield "|" + "|".join(["---", *["---:" if _is_narrow(table) else "---"] * (
        len(table.columns) - 1)]) + "|"  # fmt: skip
    yield from map(_line, table.rows)
    if table.caption:
        yield from ("", _text(table.caption))


def _is_narrow(table: Table) -> bool:
    """Whether all cells are short, so that they are numbers to be compared by eye."""
    return all(len(cell) <= 16 for row in table.rows for cell in row[1:])


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(map(_text, cells)) + " |"


def _text(text: str) -> str:
    """One line on which nothing is markup."""
    return _MARKUP.sub(r"\\\1", " ".join(text.split()))
