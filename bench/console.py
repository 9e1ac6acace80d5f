"""What a command says on stdout when it is done: a few aligned tables, and whether they hold.

The experiments print `shown` of every report; the pages that `--out` writes say all of it. Pure.
Text that came from a server loses its control characters, which a terminal would obey.
"""

from collections import Counter

from baton.bench.figures.metrics import Distribution, Summary
from baton.bench.report.document import Report, Run, Table
from baton.bench.report.sections import results
from baton.bench.report.wording import number, quantity, share, span

LATENCIES = ("ttft", "tpot", "itl", "gap_max", "e2e", "lag")
PERCENTILES = ("p50", "p90", "p99", "max")
MAX_CELL = 48
GAP = "  "


def shown(report: Report, width: int = 0) -> str:
    """Without the newline at the end. Tables beyond `width` are broken by columns; 0: none are."""
    lines: list[str] = []
    if len(report.runs) == 1:
        lines += _of_run(report.runs[0], width)
    for section in results(report):
        if section.key in ("runs", "search", "comparison") or section.key.startswith("table-"):
            lines += ["", section.title, *section.lines]
            for table in section.tables:
                lines += ["", *_aligned(table, width)]
    lines += ["", *(_noted(note) for note in report.notes), *_problems(report)]
    return "\n".join(_plain(line) for line in lines).strip("\n")


def verdict(report: Report) -> str:
    if not report.runs:
        return "no run"
    if report.search is not None:
        return "CONFIRMED" if report.search.confirmed else "NOT CONFIRMED"
    if not report.invalid:
        return "VALID"
    return "INVALID: these figures are not the server's and must not be used"


def _of_run(run: Run, width: int) -> list[str]:
    summary = run.summary
    rows = []
    for name in LATENCIES:
        found: Distribution | None = getattr(summary, name)
        if found is not None:
            values = [number(getattr(found, percentile)) for percentile in PERCENTILES]
            rows.append([name, *values, f"{found.count:,}"])
    lines = _aligned(Table("", [f"{run.label} (ms)", *PERCENTILES, "samples"], rows), width)
    lines += ["", *_totals(summary)]
    for impact in run.impacts:
        lines += [
            f"fault {impact.fault}: detected after {quantity(impact.time_to_detect_s, 's')}, "
            f"recovered after {quantity(impact.time_to_recover_s, 's')}, "
            f"longest wait {quantity(impact.longest_wait_s, 's')}, "
            f"goodput dip {quantity(impact.goodput_dip, 'requests')}, {impact.num_failed} failed",
            *(f"  {note}" for note in impact.notes),
        ]
    return lines


def _totals(summary: Summary) -> list[str]:
    outcomes = ", ".join(f"{count:,} {name}" for name, count in summary.outcomes.items())
    lines = [f"{summary.num_requests:,} requests: {outcomes.replace('_', ' ')}"]
    rates = [
        f"{quantity(summary.tokens_per_s, 'tokens/s')}",
        f"offered {quantity(summary.offered_rate, '/s')}",
        f"answered {quantity(summary.answered_rate, '/s')}",
        f"{number(summary.concurrency)} in flight",
    ]
    if summary.cached_share:
        rates.append(f"{share(summary.cached_share)} of prompts cached")
    lines.append(", ".join(rates))
    if summary.attainment is not None and (interval := summary.attainment_interval) is not None:
        lines.append(
            f"attainment {share(summary.attainment)} "
            f"(95 %: {span(interval.low, interval.high, 'share')}), "
            f"goodput {quantity(summary.goodput, '/s')}; bounds: {summary.bounds}"
        )
    return lines


def _noted(note: str) -> str:
    return note if note.startswith("WARNING: ") else f"note: {note}"


def _problems(report: Report) -> list[str]:
    """Each problem once; of several runs those that make one invalid.

    Invalid runs are no flaw of a search, which goes on until it knows what it can.
    """
    lines: list[str] = []
    if report.search is not None:
        lines = [
            f"note: {run.label} was INVALID: {problem.text}"
            for run in report.runs
            for problem in run.problems
            if problem.is_invalid
        ]
        return [*lines, *_shared_warnings(report.runs), verdict(report)]
    for run in report.runs:
        where = f"{run.label}: " if len(report.runs) > 1 else ""
        lines += [
            f"{problem.severity.upper()}: {where}{problem.text}"
            for problem in run.problems
            if problem.is_invalid or not where
        ]
        if not where:
            lines += [_noted(note) for note in run.notes]
    if len(report.runs) > 1:
        lines += _shared_warnings(report.runs)
    return [*lines, verdict(report)]


def _shared_warnings(runs: list[Run]) -> list[str]:
    """Those that at least half of the runs have, once."""
    counts = Counter(
        problem.text for run in runs for problem in run.problems if not problem.is_invalid
    )
    return [
        f"WARNING: {count} of {len(runs)} runs: {text}"
        for text, count in counts.items()
        if 2 * count >= len(runs)
    ]


def _aligned(table: Table, width: int) -> list[str]:
    rows = [[_plain(cell)[:MAX_CELL] for cell in row] for row in (table.columns, *table.rows)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(table.columns))]
    lines = [table.title] if table.title else []
    for places in _breaks(widths, width):
        lines += [
            GAP.join(
                row[place].rjust(widths[place]) if place else row[place].ljust(widths[place])
                for place in places
            ).rstrip()
            for row in rows
        ]
        lines.append("")
    return [*lines[:-1], *([table.caption] if table.caption else [])]


def _breaks(widths: list[int], width: int) -> list[list[int]]:
    """The places of the columns that fit beside the first, which names the rows every time."""
    found = [[0]]
    for place in range(1, len(widths)):
        taken = sum(widths[one] + len(GAP) for one in found[-1])
        if width and len(found[-1]) > 1 and taken + widths[place] > width:
            found.append([0])
        found[-1].append(place)
    return found


def _plain(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)
