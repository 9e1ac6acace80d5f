"""The charts of a report: how times are distributed, how requests went over time, what rates gave.

`chart.py` draws each one. A chart that the records cannot fill is left out. Pure.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import numpy as np

from baton.bench.figures.metrics import DEFINITIONS, Bounds, gaps_ms, measure, meets
from baton.bench.figures.paired import Floats
from baton.bench.records import Outcome, Record
from baton.bench.report.chart import Chart, Curve, Mark
from baton.bench.report.document import Report, Run

MAX_CURVES = 8
MAX_BINS = 240  # of a run over time
MAX_LABEL = 40  # characters
SKEWED = 12  # times the median: beyond it a linear axis squeezes most values into a corner


def charts(report: Report) -> list[Chart]:
    """Return them in the order of the page."""
    over_time = [run for run in report.runs if run.faults or len(report.runs) == 1]
    return [
        *_against_rate(report),
        *_distributions(report),
        *(_over_time(run, report.bounds) for run in over_time[:MAX_CURVES] if run.measured),
    ]


def groups(report: Report) -> dict[str, list[Record]]:
    """Return the answered requests by the arms or labels of their runs, evenly chosen."""
    found: dict[str, list[Record]] = {}
    for run in sorted(report.runs, key=lambda run: run.rate or 0.0):
        label = f"{'INVALID ' if run.invalid else ''}{run.arm or run.label}"
        answered = [one for one in run.counted if one.outcome is Outcome.ANSWERED]
        found.setdefault(label, []).extend(answered)
    places = np.linspace(0, len(found) - 1, min(len(found), MAX_CURVES)).round()
    every = list(found.items())
    return dict(every[int(place)] for place in places)


def _distributions(report: Report) -> Iterator[Chart]:
    bounds, found = report.bounds or Bounds(), groups(report)
    for name, title, bound_ms in (
        ("ttft", "Time to first token", bounds.ttft_ms),
        ("tpot", "Time per output token", bounds.tpot_ms),
        ("itl", "Gaps between tokens", bounds.gap_max_ms),
    ):
        each = {label: np.sort(_times_ms(name, records)) for label, records in found.items()}
        # The share of the times at or below each of them.
        curves = [
            Curve(_short(label), np.append(x[:1], x), np.linspace(0.0, 1.0, len(x) + 1),
                  f"c{place}", is_steps=True)
            for place, (label, x) in enumerate(each.items())
            if len(x)
        ]  # fmt: skip
        if curves:
            every = np.concatenate([curve.x for curve in curves])
            skewed = float(every.max()) > SKEWED * float(np.median(every)) > 0
            marks = [] if bound_ms is None else [Mark(bound_ms, f"bound {bound_ms:g} ms")]
            caption = f"{name.upper()}: {DEFINITIONS[name]}."
            if len(found) == MAX_CURVES:
                caption += f" At most {MAX_CURVES} of the runs are shown."
            yield Chart(title, caption, f"{name.upper()}, ms", "share", curves, marks,
                        log_x=skewed, is_share=True)  # fmt: skip


def _times_ms(name: str, records: Sequence[Record]) -> Floats:
    if name == "itl":
        return gaps_ms(records)[1]
    times = [getattr(measure(record), f"{name}_ms") for record in records]
    return np.array([time_ms for time_ms in times if time_ms is not None], np.float64)


def _over_time(run: Run, bounds: Bounds | None) -> Chart:
    """Draw arrivals per second by what became of them, and the faults of the run."""
    records = run.measured
    start_s = math.floor(records[0].intended_s)
    took_s = max(record.end_s for record in records) - start_s
    bin_s = max(1, math.ceil(took_s / MAX_BINS))
    edges_s = start_s + bin_s * np.arange(max(1, math.ceil(took_s / bin_s)) + 1, dtype=np.float64)
    good = "met all bounds" if bounds else "answered"
    hues = {good: "c0", "answered, missed a bound": "c1", "failed": "bad"}
    at_s: dict[str, list[float]] = {kind: [] for kind in hues}
    for record in records:
        answered = record.outcome is Outcome.ANSWERED
        met = answered and (bounds is None or meets(record, bounds))
        kind = good if met else "answered, missed a bound" if answered else "failed"
        at_s[kind].append(record.intended_s)
    rates = {kind: np.histogram(found, edges_s)[0] / bin_s for kind, found in at_s.items() if found}
    curves = [
        Curve(kind, edges_s, np.append(rate[:1], rate), hues[kind], is_steps=True)
        for kind, rate in rates.items()
    ]
    marks = [
        Mark(fault.at_s, f"{fault.spec.kind} {fault.spec.pid}",
             fault.restarted_s if fault.resumed_s is None else fault.resumed_s)
        for fault in run.faults
    ]  # fmt: skip
    caption = f"Bins of {bin_s} s. A request counts where it arrived."
    title = f"Requests over time, {_short(run.label)}"
    return Chart(title, caption, "seconds from the start of the schedule", "arrivals/s", curves,
                 marks)  # fmt: skip


def _against_rate(report: Report) -> Iterator[Chart]:
    """Draw what each rate gave, with a mark at the rate of an invalid run."""
    by_rate: dict[float, list[Run]] = {}
    for run in sorted(report.runs, key=lambda run: run.rate or 0.0):
        by_rate.setdefault(run.rate or 0.0, []).append(run)
    if len(by_rate) < 2 or any(run.arm for run in report.runs):
        return
    x = _medians(by_rate, "offered_rate")
    invalid = [any(run.invalid for run in runs) for runs in by_rate.values()]
    marks = [Mark(float(at), "INVALID") for at, wrong in zip(x, invalid, strict=True) if wrong]
    fields = {"attainment": "Attainment", "goodput": "Goodput"}
    for field, title in (fields if report.bounds else {"tokens_per_s": "Throughput"}).items():
        label = field if field == "attainment" else f"{field.partition('_')[0]}/s"
        y = _medians(by_rate, field)
        curves = [Curve(label, x, y, "c0")]
        if field == "goodput":
            curves.append(Curve("all of them", x, x, "muted"))
        if field == "attainment" and report.target is not None:
            goal = np.full(len(x), report.target)
            curves.append(Curve(f"--attainment {report.target:g}", x, goal, "muted"))
        yield Chart(f"{title} against rate", DEFINITIONS[field].capitalize(), "offered requests/s",
                    label, curves, marks, is_share=field == "attainment")  # fmt: skip


def _medians(by_rate: Mapping[float, list[Run]], field: str) -> Floats:
    """Return the median of a figure over the runs of each rate, NaN where no run has it."""
    each = [[getattr(run.summary, field) for run in runs] for runs in by_rate.values()]
    known = [[value for value in values if value is not None] for values in each]
    return np.array([median(values) if values else math.nan for values in known], np.float64)


def _short(label: str) -> str:
    return label if len(label) <= MAX_LABEL else f"{label[: MAX_LABEL - 1]}…"
