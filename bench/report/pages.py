"""A report as HTML, as Markdown for a pull request or an issue, and as CSV.

`publish.py` calls it. Text that came from a server is made harmless for the program that will open
it: a browser must not run it, Markdown must not render it, a spreadsheet must not compute it. The
HTML page is one file: style and drawings are inside, and it forbids itself to load anything.
"""

import csv
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from baton.bench.figures.metrics import measure, meets
from baton.bench.records import Record
from baton.bench.report.document import Report, Run, Table
from baton.bench.report.headlines import headlines, subject, usable
from baton.bench.report.sections import background, results
from baton.bench.report.wording import several, utc

if TYPE_CHECKING:
    from baton.bench.report.drawings import Drawing

Cell = str | float | int | None

NO_DRAWINGS = "The drawings need matplotlib, which is not installed: pip install 'baton[plots]'"

# CSS variable -> its colour in the light and in the dark scheme. The drawings have the same ones.
PALETTE = {
    "--ink": ("#1d2530", "#e4e8ee"),
    "--muted": ("#667080", "#98a3b3"),
    "--grid": ("#dfe4ea", "#313a47"),
    "--serious": ("#b93a32", "#f0857b"),
    "--paper": ("#ffffff", "#191e26"),
    "--page": ("#f5f7f9", "#11151b"),
    "--good": ("#1e7a4c", "#6cc799"),
    "--alarm": ("#b3261e", "#b53128"),
    "--c0": ("#2f6fb3", "#6fabe8"),
    "--c1": ("#cf7a2c", "#eaa05c"),
    "--c2": ("#228b7b", "#56c2b0"),
    "--c3": ("#7f5fb6", "#b59be6"),
    "--c4": ("#c14f70", "#ee8ba8"),
    "--c5": ("#7f8429", "#bfc262"),
    "--c6": ("#5a7691", "#9fb7cd"),
    "--c7": ("#8d6345", "#cda283"),
    "--c8": ("#b8951f", "#e2c556"),
    "--c9": ("#a784b4", "#d3b6dd"),
}
TIMINGS = (
    "lag_ms", "ttft_ms", "tpot_ms", "gap_max_ms", "e2e_ms", "ntpot_ms", "ttft_from_sent_ms",
    "e2e_from_sent_ms",
)  # fmt: skip
COLUMNS = (
    "run", "arm", "round", "rate", "index", "warm_up", "counted", "outcome", "status", "detail",
    "intended_s", "sent_s", "end_s", *TIMINGS, "met_bounds", "arrived_tokens", "forced_tokens",
    "output_tokens", "prompt_tokens", "cached_tokens", "conversation", "turn",
)  # fmt: skip
# An underscore within a word is not markup, and neither is `<` unless the name of a tag follows.
_MARKUP = re.compile(r"([\\`*{}\[\]>#|~$]|(?<![^\W_])_|_(?![^\W_])|<(?=[A-Za-z/!?]))")


def html(report: Report, drawn: "Sequence[Drawing] | None") -> str:
    """Return the page; without drawings (None) it says what they need."""
    pages = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    origin = report.provenance
    facts = [utc(origin.created_at), f"baton {origin.revision}", origin.machine.cpu_model]
    return pages.get_template("report.html.j2").render(
        report=report,
        facts=[*facts, *origin.machine.gpus],
        num_runs=several(len(report.runs), "run"),
        num_invalid=len({id(run) for run, _ in report.invalid}),
        usable=usable(report),
        subject=subject(report),
        headlines=headlines(report),
        drawings=drawn,
        no_drawings=NO_DRAWINGS,
        results=results(report),
        background=background(report),
        palette=PALETTE,
    )


def markdown(report: Report) -> str:
    """Return headlines, tables, and what they rest on; readable as it is."""
    return "\n".join(_blocks(report)) + "\n"


def csv_text(report: Report) -> str:
    """Return a row per request of every run, warm-up marked; times as in the definitions."""
    records = [record for run in report.runs for record in run.records]
    stages = list(dict.fromkeys(stage.name for record in records for stage in record.stages))
    written = io.StringIO(newline="")
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow([*COLUMNS, *(_cell(f"{name}_ms") for name in stages)])
    for run in report.runs:
        counted = {record.index for record in run.counted}
        for record in run.records:
            times = {stage.name: 1e3 * stage.duration_s for stage in record.stages}
            row = [*_row(run, record, record.index in counted), *map(times.get, stages)]
            writer.writerow(map(_cell, row))
    return written.getvalue()


def _row(run: Run, record: Record, counted: bool) -> list[Cell]:
    timing = measure(record)
    met = int(meets(record, run.summary.bounds)) if run.summary.bounds is not None else None
    return [
        run.label, run.arm, run.round, run.rate, record.index, int(record.warm_up), int(counted),
        record.outcome, record.status, record.detail, record.intended_s, record.sent_s,
        record.end_s, *(getattr(timing, name) for name in TIMINGS), met, record.num_tokens,
        record.forced_tokens, record.output_tokens, record.prompt_tokens, record.cached_tokens,
        record.conversation, record.turn,
    ]  # fmt: skip


def _cell(value: Cell) -> Cell:
    """Put a quote before text that a spreadsheet would take for a formula."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return value


def _blocks(report: Report) -> Iterator[str]:
    yield f"# {_text(report.title)}\n"
    if report.invalid:
        yield "> **INVALID.** These figures are not the server's and must not be used."
        yield from (f"> - {_text(run.label)}: {_text(reason)}" for run, reason in report.invalid)
        yield ""
    if shown := headlines(report):
        yield f"{_text(subject(report))}:\n"
    for one in shown:
        notes = "; ".join(_text(note) for note in (one.verdict, one.note) if note)
        value = _text(f"{one.value} {one.unit}")
        yield f"- {_text(one.name)}: **{value}**{f' ({notes})' if notes else ''}"
    yield from ("", *(f"- Note: {_text(note)}" for note in report.notes)) if report.notes else ()
    for section in (*results(report), *background(report)):
        yield f"\n## {_text(section.title)}"
        yield from ("", *(f"- {_text(line)}" for line in section.lines)) if section.lines else ()
        for table in section.tables:
            yield from _table(table)


def _table(table: Table) -> Iterator[str]:
    yield f"\n### {_text(table.title)}\n" if table.title else ""
    yield _line(table.columns)
    later = "---:" if table.is_narrow else "---"
    yield "|".join(["", "---", *[later] * (len(table.columns) - 1), ""])
    yield from map(_line, table.rows)
    yield from ("", _text(table.caption)) if table.caption else ()


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(map(_text, cells))} |"


def _text(text: str) -> str:
    """Return one line on which nothing is markup."""
    return _MARKUP.sub(r"\\\1", " ".join(text.split()))
