"""The few figures that a reader wants first, chosen by what the command was after.

`html.py` shows them large, `tables.py` as a short list. Every one names what it is held against,
and whether it holds. Pure: text and numbers in, text out; nothing is escaped here.
"""

from collections.abc import Sequence

import msgspec

from baton.bench.figures.faults import Impact
from baton.bench.figures.metrics import Bounds, Distribution, Summary, meets
from baton.bench.figures.paired import MIN_ROUNDS
from baton.bench.report.document import Compared, Report, Run
from baton.bench.report.wording import NONE, duration, limit, number, quantity, several, share, span

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
    """Of a report without runs: none."""
    if report.search is not None:
        shown = [_searched(report), *_of_run(_searched_run(report), report)]
    elif report.comparison:
        shown = [_compared(row, arm) for row in report.comparison for arm in row.ratios]
    elif len(report.runs) > 1:
        shown = _of_sweep(report)
    elif report.runs:
        impacts = [one for impact in report.runs[0].impacts for one in _of_impact(impact)]
        shown = [*impacts, *_of_run(report.runs[0], report)]
    else:
        shown = []
    return shown[:MAX_TILES]


def subject(report: Report) -> str:
    """What the headlines are about, in one line."""
    if report.search is not None and (run := _searched_run(report)):
        return f"Largest rate that attains the bounds; the other figures are of “{run.label}”"
    if report.comparison:
        first = next(iter(report.comparison[0].medians), "")
        return f"Each arm over “{first}”, paired by round; below 1 is less"
    if len(report.runs) > 1:
        return f"Of {several(len(report.runs), 'run')}"
    return report.runs[0].label if report.runs else ""


def _of_run(run: Run | None, report: Report) -> list[Headline]:
    if run is None:
        return []
    summary = run.summary
    return [
        *_attainment(summary, report.target),
        _latency(run, "TTFT", "ttft"),
        _latency(run, "TPOT", "tpot"),
        _latency(run, "Largest gap", "gap_max"),
        _latency(run, "E2E", "e2e"),
        Headline("Output", number(summary.tokens_per_s), "tokens/s",
                 f"{number(summary.concurrency)} requests in flight, mean"),
        _failures(summary),
    ]  # fmt: skip


def _attainment(summary: Summary, target: float) -> list[Headline]:
    if summary.attainment is None:
        return [Headline("Answered", number(summary.answered_rate), "requests/s",
                         f"of {number(summary.offered_rate)} offered")]  # fmt: skip
    interval = summary.attainment_interval
    note = f"target {share(target)}"
    if interval is not None:
        note += f"; 95 % interval {span(interval.low, interval.high, 'share')}"
    attained = share(summary.attainment)
    return [
        Headline("Attainment", attained.removesuffix(" %"), "%", note,
                 summary.attainment >= target,
                 "" if summary.attainment >= target else "missed"),
        Headline("Goodput", number(summary.goodput), "requests/s",
                 f"of {number(summary.offered_rate)} offered"),
    ]  # fmt: skip


def _latency(run: Run, name: str, field: str, prefix: str = "") -> Headline:
    """The median large, since it is the steadier; beside it how many met that bound alone."""
    found: Distribution | None = getattr(run.summary, field)
    title = f"{prefix}{name} p50"
    if found is None:
        return Headline(title, NONE)
    note = f"p99 {quantity(found.p99, 'ms')}"
    bound_ms: float | None = getattr(run.summary.bounds or Bounds(), f"{field}_ms")
    if bound_ms is None:
        return Headline(title, number(found.p50), "ms", note)
    alone = Bounds(**{f"{field}_ms": bound_ms})
    records = run.counted
    within = sum(meets(record, alone) for record in records) / len(records) if records else None
    note += f"; {share(within)} within {limit(bound_ms)}"
    return Headline(title, number(found.p50), "ms", note)


def _failures(summary: Summary) -> Headline:
    failed = summary.num_requests - summary.outcomes.get("answered", 0)
    note = f"{share(failed / summary.num_requests)}; they count as missed" if failed else ""
    return Headline("Failed", f"{failed:,}", f"of {summary.num_requests:,}", note)


def _of_sweep(report: Report) -> list[Headline]:
    valid = [run for run in report.runs if not run.invalid]
    most = max(valid, key=lambda run: run.summary.tokens_per_s, default=None)
    found = []
    bounded = [run for run in valid if run.summary.attainment is not None]
    if bounded:
        attained = [run for run in bounded if (run.summary.attainment or 0.0) >= report.target]
        rates = [run.summary.offered_rate or 0.0 for run in attained]
        best = max(bounded, key=lambda run: run.summary.goodput or 0.0)
        found += [
            Headline(
                f"Highest rate with {share(report.target)} attained",
                number(max(rates, default=None)), "requests/s", "of the rates that were run",
                bool(rates), "" if rates else "none",
            ),
            Headline("Most goodput", number(best.summary.goodput), "requests/s",
                     f"{number(best.summary.offered_rate)} offered"),
        ]  # fmt: skip
    if most is not None:
        found.append(
            Headline(
                "Most output", number(most.summary.tokens_per_s), "tokens/s", f"at {most.label}"
            )
        )
    lowest = min(valid, key=lambda run: run.summary.offered_rate or 0.0, default=None)
    if lowest is not None:
        at = f"At {lowest.label}: "
        found += [_latency(lowest, "TTFT", "ttft", at), _latency(lowest, "TPOT", "tpot", at)]
    return found


def _searched(report: Report) -> Headline:
    search = report.search
    assert search is not None
    name = f"Largest rate with {share(report.target)} attained"
    if search.rate is None:
        return Headline(name, NONE, "", search.line, False, "none found")
    if not search.confirmed:
        return Headline(name, number(search.rate), "requests/s", "", False, "not confirmed")
    note = "" if search.offered_rate is None else f"{number(search.offered_rate)} offered"
    return Headline(name, number(search.rate), "requests/s", note, True, "confirmed")


def _searched_run(report: Report) -> Run | None:
    """The last run at the rate that was found."""
    assert report.search is not None
    rate = report.search.rate
    at_rate = [run for run in report.runs if run.rate is not None and run.rate == rate]
    return at_rate[-1] if at_rate else None


def _compared(row: Compared, arm: str) -> Headline:
    ratio = row.ratios[arm]
    several_arms = len(row.ratios) > 1
    holds = None
    if ratio.is_conclusive:
        holds = (ratio.median < 1.0) == (row.better == "lower")
    ends = "95 % interval" if ratio.rounds >= MIN_ROUNDS else "range"
    note = f"{ends} {span(ratio.low, ratio.high)}, {several(ratio.rounds, 'round')}"
    verdict = "no difference shown" if holds is None else "better" if holds else "worse"
    name = row.name + (f", {arm}" if several_arms else "")
    return Headline(name, f"{ratio.median:.2f}", TIMES, note, holds, verdict)


def _of_impact(impact: Impact) -> Sequence[Headline]:
    recovered = None if impact.time_to_recover_s is not None else False
    fault, _, _ = impact.fault.partition("=")
    return [
        Headline("Time to detect", *duration(impact.time_to_detect_s), fault),
        Headline("Time to recover", *duration(impact.time_to_recover_s), "", recovered,
                 "not within the run" if recovered is False else ""),
        Headline("Goodput dip", number(impact.goodput_dip), "requests",
                 f"{several(impact.num_failed, 'request')} failed from the fault on"),
    ]  # fmt: skip


def usable(report: Report) -> bool:
    """Whether the headlines may be used: of a sweep or a search, only valid runs are in them."""
    if report.comparison or len(report.runs) == 1:
        return not report.invalid
    return not report.runs or not all(run.invalid for run in report.runs)
