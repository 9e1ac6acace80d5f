"""Show a report: one list of sections, which the terminal and the page both render.

A report reaches the disk and the terminal only here, so API keys are withheld here. The page is one
file: style and charts are inside, and it forbids itself to load anything. Text is plain in the
sections: each renderer escapes it, because much of it came from a server. Numbers have a few digits
and a unit; a dash means none.
"""

import io
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from baton.bench.figures.metrics import MIN_ROUNDS, Distribution
from baton.bench.report.charts import charts
from baton.bench.report.document import (
    WITHHELD,
    Compared,
    Report,
    Run,
    Table,
    flat_settings,
    withhold,
    write_json,
)
from baton.bench.report.provenance import collect, complete
from baton.bench.settings import Settings
from baton.protocol.errors import ConfigError

REPORT = "report.json"
PAGE = "report.html"
LATENCIES = ("ttft", "tpot", "itl", "gap_max", "e2e", "lag")
FURTHER_LATENCIES = ("chunk_gap", "ntpot", "ttft_from_sent")
# Fields of a summary, with their units.
TOTALS = {
    "attainment": "share",
    "goodput": "requests/s",
    "offered_rate": "requests/s",
    "answered_rate": "requests/s",
    "tokens_per_s": "",
    "num_requests": "",
    "num_tokens": "",
    "num_prompt_tokens": "",
    "cached_share": "share",
    "tokens_per_chunk": "",
    "concurrency": "",
}
PERCENTILES = ("mean", "p50", "p90", "p95", "p99", "max")
MAX_REASONS = 12
NONE = "–"  # noqa: RUF001 - the dash that a table shows
UNBROKEN = 10_000  # columns


def begin(command: str, settings: Settings) -> Report:
    """Record the machine's state before the load. Raises `ConfigError` for a bad `--out`."""
    out = _folder(settings.report.out)
    if out is not None and (out / REPORT).exists():
        raise ConfigError(
            f"--out {out} holds a report already: name another folder, or remove it"
        )
    flat = flat_settings(settings)
    words = ["baton", *sys.argv[1:]]
    if key := settings.target.api_key:
        flat["target.api_key"] = WITHHELD
        words = [
            WITHHELD if word in (key, f"--api-key={key}") else word for word in words
        ]
    return Report(command=command, title="", provenance=collect(words), settings=flat)


def finish(report: Report, folder: str, api_key: str = "") -> int:
    """Print the report and write its files, each even if the other fails, without `api_key`.

    Return 0 if its figures may be used, else 1.
    """
    report.provenance = complete(report.provenance)
    report = withhold(report, api_key)
    out = Path(folder) if folder else None
    written: list[Path] = []
    try:
        # This comes first, because the reader of the output may be gone, as with `head`.
        written = _write(report, out) if out is not None else []
    finally:
        print(shown(report), flush=True)
    for path in written:
        print(f"wrote {path}", file=sys.stderr)
    return 0 if report.verdict in ("VALID", "CONFIRMED") else 1


def html(report: Report) -> str:
    """Return the page. Text that came from a server is escaped, so that no browser runs it."""
    pages = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    origin = report.provenance
    facts = [f"baton {origin.revision}", origin.machine.cpu_model, *origin.machine.gpus]
    return pages.get_template("report.html.j2").render(
        report=report,
        facts=[utc(origin.created_at), *facts],
        charts=charts(report),
        sections=sections(report),
    )


def _write(report: Report, folder: Path) -> list[Path]:
    """Write the JSON and the page; return what was written."""
    try:
        # The records come first: if the page fails, the measurement is kept.
        write_json(report, folder / REPORT)
        (folder / PAGE).write_text(html(report), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write the report to {folder}: {error.strerror}"
        ) from error
    return [folder / REPORT, folder / PAGE]


def _folder(name: str) -> Path | None:
    """Make the folder now, so that no load runs for a report that could not be written."""
    if not name:
        return None
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "it is a file: name a folder" if folder.is_file() else error.strerror
        raise ConfigError(f"--out {name}: {why}") from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"--out {name}: the folder cannot be written")
    return folder


class Section(msgspec.Struct, frozen=True):
    title: str
    lines: list[str]
    tables: list[Table]
    folded: bool = False  # the page shows it on demand, and the terminal leaves it out


def sections(report: Report) -> list[Section]:
    """Return the results, then their basis, without empty sections."""
    found = [
        _search(report),
        _comparison(report),
        *_overview(report),
        *(_run(run, folded=len(report.runs) > 1) for run in report.runs),
        Section("Notes", report.notes, []),
        Section("Settings", [], [_pairs("", report.settings)], folded=True),
        Section(
            "Provenance",
            [],
            [_pairs("", flat_settings(report.provenance))],
            folded=True,
        ),
        Section("Definitions", [], [_pairs("", report.definitions)], folded=True),
    ]
    filled = [
        msgspec.structs.replace(
            one, tables=[table for table in one.tables if table.rows]
        )
        for one in found
    ]
    return [one for one in filled if one.lines or one.tables]


def _pairs(title: str, rows: Mapping[str, str]) -> Table:
    """Return a table of names and values without those that are not known."""
    known = [[name, value] for name, value in rows.items() if value not in ("", NONE)]
    return Table(title, ["", ""], known)


def _span(low: float, high: float, unit: str = "") -> str:
    if unit == "share":
        return f"{share(low).removesuffix(' %')} to {share(high)}"
    return f"{number(low)} to {number(high)} {unit}".strip()


def _search(report: Report) -> Section:
    if report.search is None:
        return Section("", [], [])
    rows = [
        [
            number(probe.rate),
            str(probe.purpose),
            share(probe.attainment) if probe.is_valid else NONE,
            "server's fault"
            if probe.is_broken
            else "yes"
            if probe.is_valid
            else "INVALID",
            "yes" if probe.is_saturated else "no",
        ]
        for probe in report.search.probes
    ]
    table = Table("", ["rate/s", "purpose", "attainment", "valid", "saturated"], rows)
    return Section("Search", [report.search.line], [table])


def _comparison(report: Report) -> Section:
    if not report.comparison:
        return Section("Comparison", [], [])
    first, *others = report.comparison[0].medians
    columns = [
        "figure",
        first,
        *others,
        *(f"{arm} / {first}" for arm in others),
        "better",
    ]
    rows = [
        [
            row.name,
            *(quantity(value, row.unit) for value in row.medians.values()),
            *(_ratio(row, arm) for arm in others),
            row.better,
        ]
        for row in report.comparison
    ]
    caption = (
        "Medians of the rounds. A ratio is the median of the ratios within each round, with its "
        f"95 % interval; with fewer than {MIN_ROUNDS} rounds it is their range. * no difference "
        "was shown: the interval includes 1, or there were too few rounds. Each interval misses by "
        "chance in up to 5 of 100 comparisons: a difference in one figure alone may be none."
    )
    return Section("Comparison", [], [Table("", columns, rows, caption)])


def _ratio(row: Compared, arm: str) -> str:
    ratio = row.ratios[arm]
    ends = f"{ratio.median:.3f} ({_span(ratio.low, ratio.high)})"
    return ends if ratio.is_conclusive else f"{ends} *"


def _overview(report: Report) -> Iterator[Section]:
    """Return a row per run, where there are several, and their problems."""
    if len(report.runs) < 2:
        return
    rows = [_overview_row(run) for run in report.runs]
    cells = [list(row.values()) for row in rows]
    table = Table("", list(rows[0]), cells, "Latencies are in milliseconds.")
    # Invalid runs are not a flaw of a search, which goes on as long as it can learn something.
    form = "INVALID: {}: {}" if report.search is None else "{} was INVALID: {}"
    found = [(run, problem) for run in report.runs for problem in run.problems]
    lines = [form.format(run.label, one.text) for run, one in found if one.is_invalid]
    shared = Counter(problem.text for _, problem in found if not problem.is_invalid)
    lines += [f"WARNING: {text} (runs: {count})" for text, count in shared.items()]
    yield Section("Runs", lines, [table])


def _overview_row(run: Run) -> dict[str, str]:
    summary = run.summary
    return {
        "run": run.label,
        "offered/s": number(summary.offered_rate),
        "answered/s": number(summary.answered_rate),
        "tokens/s": number(summary.tokens_per_s),
        "attainment": share(summary.attainment),
        "goodput/s": number(summary.goodput),
        "TTFT p50": _percentile(summary.ttft, "p50"),
        "TTFT p99": _percentile(summary.ttft, "p99"),
        "TPOT p50": _percentile(summary.tpot, "p50"),
        "TPOT p99": _percentile(summary.tpot, "p99"),
        "gap p99": _percentile(summary.gap_max, "p99"),
        "failed": f"{summary.num_requests - summary.outcomes.get('answered', 0):,}",
        "valid": "INVALID" if run.invalid else "warnings" if run.problems else "yes",
    }


def _run(run: Run, *, folded: bool) -> Section:
    problems = [
        f"{problem.severity.upper()}: {problem.text}" for problem in run.problems
    ]
    tables = [_latencies(run), _totals(run), _reasons(run)]
    return Section(run.label, problems + run.notes, tables, folded)


def _latencies(run: Run) -> Table:
    summary = run.summary
    known = {name: getattr(summary, name) for name in (*LATENCIES, *FURTHER_LATENCIES)}
    rows = [
        [name, f"{found.count:,}", *(_percentile(found, rank) for rank in PERCENTILES)]
        for name, found in known.items()
        if found is not None
    ]
    columns = ["figure", "samples", *PERCENTILES]
    return Table("Latency, ms", columns, rows)


def _totals(run: Run) -> Table:
    summary = run.summary
    rows = {"bounds": str(summary.bounds) if summary.bounds else "none given"}
    for field, unit in TOTALS.items():
        rows[_words(field)] = quantity(getattr(summary, field), unit)
    if (interval := summary.attainment_interval) is not None:
        ends = _span(interval.low, interval.high, "share")
        rows["attainment"] += f" (95 % interval {ends})"
    for name, count in summary.outcomes.items():
        rows[_words(name)] = f"{count:,} ({share(count / summary.num_requests)})"
    used = [client.cpu_s / client.wall_s for client in run.clients if client.wall_s > 0]
    rows["busiest client process"] = f"{share(max(used))} of a core" if used else NONE
    rows["window"] = _span(summary.window.start_s, summary.window.end_s, "s")
    return _pairs(
        "Totals",
        rows
        | {
            "duration": quantity(run.wall_s or None, "s"),
            "started": utc(run.started_at),
        },
    )


def _reasons(run: Run) -> Table:
    """Return the failures' messages, the most frequent first."""
    counts = Counter(
        (str(record.outcome).replace("_", " "), record.detail)
        for record in run.counted
        if record.outcome != "answered"
    )
    rows = [
        [f"{count:,}", *reason] for reason, count in counts.most_common(MAX_REASONS)
    ]
    return Table("What the failures said", ["requests", "outcome", "detail"], rows)


def _words(field: str) -> str:
    """Return the name of a field as words, without its unit."""
    return re.sub(r"^num_|(?<!per)_s$", "", field).replace("_", " ")


def _percentile(found: Distribution | None, name: str) -> str:
    return NONE if found is None else number(getattr(found, name))


def number(value: float | None) -> str:
    """Return three significant digits, or all digits before the point, and a count as it is."""
    if value is None or not math.isfinite(value):
        return NONE
    if isinstance(value, int) or abs(value) >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def share(value: float | None) -> str:
    """Return a percentage that says 100 % (or 0 %) only where it is all (or none)."""
    if value is None or not math.isfinite(value):
        return NONE
    text = f"{100 * value:.1f}".removesuffix(".0")
    if text in ("0", "100") and value not in (0.0, 1.0):
        return "> 99.9 %" if value > 0.5 else "< 0.1 %"
    return f"{text} %"


def quantity(value: float | None, unit: str) -> str:
    """Return a number and its unit, and a share as a percentage."""
    if unit == "share":
        return share(value)
    written = number(value)
    return written if written == NONE else f"{written} {unit}".strip()


def utc(stamp: str) -> str:
    """Return an ISO 8601 time of UTC in a form for reading."""
    return stamp.replace("T", " ").replace("+00:00", " UTC")


def shown(report: Report) -> str:
    """Return the text for a terminal or a program, without control characters of a server."""
    text = io.StringIO()
    console = Console(file=text, width=UNBROKEN, highlight=False)

    def say(*lines: str) -> None:
        for line in lines:
            console.print(_text(line), soft_wrap=True)

    for section in (one for one in sections(report) if not one.folded):
        say(section.title)
        for table in section.tables:
            say(*filter(None, [table.title]))
            console.print(_grid(table))
            say(*filter(None, [table.caption]), "")
        # This comes last, because people read what is printed last.
        say(*section.lines, *([""] if section.lines else []))
    say(report.verdict)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _grid(table: Table) -> Grid:
    grid = Grid(
        box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=any(table.columns)
    )
    for name in table.columns:
        grid.add_column(_text(name))
    for row in table.rows:
        grid.add_row(*map(_text, row))
    return grid


def _text(text: str) -> Text:
    return Text("".join(letter if letter.isprintable() else " " for letter in text))
