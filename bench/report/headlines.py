"""The few figures that a reader wants first, chosen by what the command was after.

The HTML page shows them large and the Markdown as a short list. Each one names what it is held
against, and whether it holds. Pure: text and numbers in, text out, and nothing is escaped here.
"""

import msgspec

from baton.bench.figures.faults import Impact
from baton.bench.figures.metrics import Bounds, Distribution, meets
from baton.bench.figures.paired import MIN_ROUNDS
from baton.bench.figures.search import Found
from baton.bench.report.document import Compared, Report, Run
from baton.bench.report.wording import NONE, duration, number, quantity, several, share, span

MAX_TILES = 8
TIMES = "×"  # noqa: RUF001 - the sign of multiplication


class Headline(msgspec.Struct, frozen=True):
    """`holds` is None where there is nothing to hold it against; `verdict` says it in a word."""

    name: str
    value: str
    unit: str = ""
    note: str = ""
    holds: bool | None = None
    verdict: str = ""


def headlines(report: Report) -> list[Headline]:
    """Return none for a report without runs."""
    if report.search is not None:
        shown = [_searched(report.search, report.target)]
        if run := _shown_run(report):
            shown += _of_run(run, report.target)
    elif report.comparison:
        shown = [_compared(row, arm) for row in report.comparison for arm in row.ratios]
    elif run := _shown_run(report):
        shown = [one for impact in run.impacts for one in _of_impact(impact)]
        shown += _of_run(run, report.target)
    else:
        shown = _of_sweep([run for run in report.runs if not run.invalid], report.target)
    return shown[:MAX_TILES]


def subject(report: Report) -> str:
    """Return what the headlines are about, in one line."""
    run = _shown_run(report)
    if report.search is not None and run:
        return f"Largest rate that attains the bounds; the other figures are of “{run.label}”"
    if report.comparison:
        first = next(iter(report.comparison[0].medians), "")
        return f"Each arm over “{first}”, paired by round; below 1 is less"
    return run.label if run else f"Of {several(len(report.runs), 'run')}"


def _shown_run(report: Report) -> Run | None:
    """Return the only run, or the last one at the rate that a search found."""
    if report.search is not None:
        at_rate = [run for run in report.runs if run.rate == report.search.rate]
        return at_rate[-1] if at_rate else None
    return report.runs[0] if len(report.runs) == 1 else None


def usable(report: Report) -> bool:
    """Return whether the headlines may be used: a sweep or a search shows valid runs only."""
    if report.comparison or len(report.runs) == 1:
        return not report.invalid
    return not report.runs or not all(run.invalid for run in report.runs)


def _of_run(run: Run, target: float) -> list[Headline]:
    summary = run.summary
    offered = f"of {quantity(summary.offered_rate, 'requests/s')} offered"
    if summary.attainment is None:
        first = [Headline("Answered", number(summary.answered_rate), "requests/s", offered)]
    else:
        note = f"target {share(target)}"
        if (interval := summary.attainment_interval) is not None:
            note += f"; 95 % interval {span(interval.low, interval.high, 'share')}"
        holds = summary.attainment >= target
        attained = share(summary.attainment).removesuffix(" %")
        first = [
            Headline("Attainment", attained, "%", note, holds, "" if holds else "missed"),
            Headline("Goodput", number(summary.goodput), "requests/s", offered),
        ]
    failed = summary.num_requests - summary.outcomes.get("answered", 0)
    note = f"{share(failed / summary.num_requests)}; they count as missed" if failed else ""
    in_flight = f"{number(summary.concurrency)} requests in flight, mean"
    return [
        *first,
        _latency(run, "TTFT", "ttft"),
        _latency(run, "TPOT", "tpot"),
        _latency(run, "Largest gap", "gap_max"),
        _latency(run, "E2E", "e2e"),
        Headline("Output", number(summary.tokens_per_s), "tokens/s", in_flight),
        Headline("Failed", f"{failed:,}", f"of {summary.num_requests:,}", note),
    ]


def _latency(run: Run, name: str, field: str) -> Headline:
    """Show the median large, since it is the steadier, and how many requests met that bound."""
    found: Distribution | None = getattr(run.summary, field)
    if found is None:
        return Headline(f"{name} p50", NONE)
    note = f"p99 {quantity(found.p99, 'ms')}"
    bound_ms: float | None = getattr(run.summary.bounds or Bounds(), f"{field}_ms")
    if bound_ms is not None and (records := run.counted):
        alone = Bounds(**{f"{field}_ms": bound_ms})
        within = sum(meets(record, alone) for record in records) / len(records)
        note += f"; {share(within)} within {bound_ms:g} ms"
    return Headline(f"{name} p50", number(found.p50), "ms", note)


def _of_sweep(valid: list[Run], target: float) -> list[Headline]:
    if not valid:
        return []
    found = []
    bounded = [run for run in valid if run.summary.attainment is not None]
    if bounded:
        held = [run for run in bounded if (run.summary.attainment or 0.0) >= target]
        most = max((run.summary.offered_rate or 0.0 for run in held), default=None)
        best = max(bounded, key=lambda run: run.summary.goodput or 0.0).summary
        found += [
            Headline(f"Largest rate with {share(target)} attained", number(most), "requests/s",
                     "of the rates that were run", bool(held), "" if held else "none"),
            Headline("Largest goodput", number(best.goodput), "requests/s",
                     f"{quantity(best.offered_rate, 'requests/s')} offered"),
        ]  # fmt: skip
    fastest = max(valid, key=lambda run: run.summary.tokens_per_s)
    lowest = min(valid, key=lambda run: run.summary.offered_rate or 0.0)
    return [
        *found,
        Headline("Largest output", number(fastest.summary.tokens_per_s), "tokens/s",
                 f"at {fastest.label}"),
        _latency(lowest, f"At {lowest.label}: TTFT", "ttft"),
        _latency(lowest, f"At {lowest.label}: TPOT", "tpot"),
    ]  # fmt: skip


def _searched(search: Found, target: float) -> Headline:
    name = f"Largest rate with {share(target)} attained"
    if search.rate is None:
        return Headline(name, NONE, "", search.line, False, "none found")
    verdict, note = "confirmed" if search.confirmed else "not confirmed", ""
    if search.confirmed and search.offered_rate is not None:
        note = f"{quantity(search.offered_rate, 'requests/s')} offered"
    return Headline(name, number(search.rate), "requests/s", note, search.confirmed, verdict)


def _compared(row: Compared, arm: str) -> Headline:
    ratio = row.ratios[arm]
    holds = (ratio.median < 1.0) == (row.better == "lower") if ratio.is_conclusive else None
    verdict = "no difference shown" if holds is None else "better" if holds else "worse"
    ends = "95 % interval" if ratio.rounds >= MIN_ROUNDS else "range"
    note = f"{ends} {span(ratio.low, ratio.high)}, {several(ratio.rounds, 'round')}"
    name = f"{row.name}, {arm}" if len(row.ratios) > 1 else row.name
    return Headline(name, f"{ratio.median:.2f}", TIMES, note, holds, verdict)


def _of_impact(impact: Impact) -> list[Headline]:
    recovered = None if impact.time_to_recover_s is not None else False
    verdict = "" if recovered is None else "not within the run"
    failed = f"{several(impact.num_failed, 'request')} failed from the fault on"
    fault, _, _ = impact.fault.partition("=")
    return [
        Headline("Time to detect", *duration(impact.time_to_detect_s), fault),
        Headline("Time to recover", *duration(impact.time_to_recover_s), "", recovered, verdict),
        Headline("Goodput dip", number(impact.goodput_dip), "requests", failed),
    ]
