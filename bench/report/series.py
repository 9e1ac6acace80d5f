"""The curves behind the drawings: reports in, plain lists of numbers out.

`figures.py` calls this and hands the result to `plots.py`. Pure, and without matplotlib, so that
what a drawing shows can be tested as numbers. Figures of requests come from `metrics.py` alone.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import median

import msgspec
import numpy as np

from baton.bench.figures.metrics import Bounds, Timing, chunk_gaps, measure, meets
from baton.bench.figures.stages import STAGES
from baton.bench.records import Outcome, Record
from baton.bench.report.document import Report, Run

MAX_POINTS = 400  # of a curve: more cannot be seen, and would make pages heavy
MAX_CURVES = 8
MAX_BINS = 240  # of a timeline
NUM_BARS = 60


class Curve(msgspec.Struct, frozen=True):
    """`ordered`: it is one of several steps of a quantity, such as the rate."""

    label: str
    x: list[float]
    y: list[float]
    ordered: bool = False


class Mark(msgspec.Struct, frozen=True):
    label: str
    at: float
    until: float | None = None


class Points(msgspec.Struct, frozen=True):
    """One arm: a point per run or rate. `notes` are written beside the points."""

    label: str
    x: list[float]
    y: list[float]
    valid: list[bool]
    notes: list[str]


class Histogram(msgspec.Struct, frozen=True):
    edges: list[float]
    counts: list[int]
    logarithmic: bool


class Stack(msgspec.Struct, frozen=True):
    """`values[row][name]` in milliseconds."""

    rows: list[str]
    names: list[str]
    values: list[list[float]]


class Timeline(msgspec.Struct, frozen=True):
    """Bins of `bin_s` seconds that begin at `at_s`; requests count where they arrived."""

    bin_s: float
    at_s: list[float]
    in_flight: list[float]  # mean over the bin
    tokens_per_s: list[float]
    good_per_s: list[float]
    missed_per_s: list[float]
    failed_per_s: list[float]
    good_label: str
    faults: list[Mark]


class Group(msgspec.Struct, frozen=True):
    """Runs that are shown as one: the rounds of an arm, or a single run."""

    label: str
    runs: list[Run]
    ordered: bool = False

    @property
    def answered(self) -> list[Record]:
        return [
            record
            for run in self.runs
            for record in run.counted
            if record.outcome is Outcome.ANSWERED
        ]


def groups(report: Report) -> list[Group]:
    """At most `MAX_CURVES`, evenly chosen. Rounds of one arm at one rate are taken together."""
    found: dict[tuple[str, float | None], list[Run]] = {}
    repeated = any(run.round for run in report.runs)
    for number, run in enumerate(report.runs):
        key = (run.arm, run.rate) if repeated else (str(number), None)
        found.setdefault(key, []).append(run)
    together = list(found.values())
    arms = {run.arm for run in report.runs}
    rates = {run.rate for run in report.runs}
    ordered = len(arms) == 1 and len(rates) > 1 and None not in rates
    if ordered:
        together.sort(key=lambda runs: runs[0].rate or 0.0)
    by_arm = repeated and len(found) == len(arms)
    made = [
        Group(_marked((runs[0].arm if by_arm else "") or runs[0].label, runs), runs, ordered)
        for runs in together
    ]
    if len(made) <= MAX_CURVES:
        return made
    step = (len(made) - 1) / (MAX_CURVES - 1)
    return [made[round(index * step)] for index in range(MAX_CURVES)]


def _marked(label: str, runs: Sequence[Run]) -> str:
    return f"INVALID {label}" if any(run.invalid for run in runs) else label


def cdf(group: Group, figure: Callable[[Timing], float | None]) -> Curve | None:
    """Share of answered requests at or below each value; None without any."""
    values = sorted(
        value for record in group.answered if (value := figure(measure(record))) is not None
    )
    if not values:
        return None
    x, y = [values[0]], [0.0]
    for rank in _thinned(len(values)):
        x.append(values[rank])
        y.append((rank + 1) / len(values))
    return Curve(group.label, x, y, group.ordered)


def _thinned(count: int) -> Iterable[int]:
    """Ranks from the first to the last, all of them where they are few."""
    if count <= MAX_POINTS:
        return range(count)
    # The tail keeps every sample: it is what a percentile is read from.
    tail = min(MAX_POINTS // 4, max(1, count // 50))
    body = np.linspace(0, count - 1 - tail, MAX_POINTS - tail)
    return [*dict.fromkeys(int(rank) for rank in body), *range(count - tail, count)]


def itl_histogram(runs: Sequence[Group]) -> Histogram | None:
    """All gaps between tokens, as `itl` counts them, in milliseconds."""
    parts = []
    for group in runs:
        for record in group.answered:
            gaps, tokens = chunk_gaps(record)
            parts.append(np.repeat(1e3 * gaps / tokens, tokens.astype(np.int64)))
    gaps_ms = np.concatenate(parts) if parts else np.zeros(0)
    if not len(gaps_ms):
        return None
    # A clock's resolution can make gaps of nothing, which a logarithmic axis cannot show.
    least = max(float(gaps_ms.min()), float(gaps_ms.max()) / 1e5, 1e-3)
    most = max(float(gaps_ms.max()), least * 1.001)
    logarithmic = most > 12 * float(np.median(gaps_ms))
    edges = (
        np.geomspace(least, most, NUM_BARS + 1)
        if logarithmic
        else np.linspace(least, most, NUM_BARS + 1)
    )
    counts, _ = np.histogram(np.clip(gaps_ms, edges[0], edges[-1]), edges)
    return Histogram(edges.tolist(), counts.tolist(), logarithmic)


def by_rate(report: Report, value: Callable[[Run], float | None]) -> list[Points]:
    """A value per arm and rate, the median of its rounds, against the offered rate."""
    return _points(report, lambda run: run.summary.offered_rate, value)


def per_user(report: Report, value: Callable[[Run], float | None]) -> list[Points]:
    """A value against the tokens per second of one user."""
    return _points(
        report, lambda run: 1e3 / run.summary.tpot.p50 if run.summary.tpot else None, value
    )


def _points(
    report: Report, across: Callable[[Run], float | None], value: Callable[[Run], float | None]
) -> list[Points]:
    arms: dict[str, dict[float, list[Run]]] = {}
    for run in report.runs:
        rate = run.rate if run.rate is not None else run.summary.offered_rate
        arms.setdefault(run.arm, {}).setdefault(rate or 0.0, []).append(run)
    found = []
    for arm, rates in arms.items():
        points = Points(arm, [], [], [], [])
        for rate in sorted(rates):
            x = [one for run in rates[rate] if (one := across(run)) is not None]
            y = [one for run in rates[rate] if (one := value(run)) is not None]
            if x and y:
                points.x.append(median(x))
                points.y.append(median(y))
                points.valid.append(not any(run.invalid for run in rates[rate]))
                points.notes.append(f"{rate:.3g}/s")
        if points.x:
            found.append(points)
    return found


# Of the requests sorted by e2e: which part of them, and its name.
_PARTS = (
    (0.0, 1.0, "all"),
    (0.0, 0.5, "faster half"),
    (0.5, 0.9, "next 40 %"),
    (0.9, 0.99, "next 9 %"),
    (0.99, 1.0, "slowest 1 %"),
)


def stage_stack(found: Sequence[Group]) -> Stack | None:
    """Mean time in each stage: of one group by how long its requests took, of several each."""
    staged = [[one for one in group.answered if one.stages] for group in found]
    if not any(staged):
        return None
    if len(found) > 1:
        rows = [(group.label, part) for group, part in zip(found, staged, strict=True) if part]
    else:
        ordered = sorted(staged[0], key=lambda record: record.end_s - record.intended_s)
        count = len(ordered)
        rows = [
            (label, ordered[math.floor(low * count) : math.ceil(high * count)])
            for low, high, label in _PARTS
        ]
        rows = [(label, part) for label, part in rows if part]
    found_names = {stage.name for _, part in rows for record in part for stage in record.stages}
    names = [name for name in STAGES if name in found_names]
    names += sorted(found_names.difference(STAGES))
    values = [[1e3 * _mean_stage(part, name) for name in names] for _, part in rows]
    # A stage that no request spent time in only makes the key longer.
    seen = [place for place in range(len(names)) if any(row[place] > 0 for row in values)]
    return Stack(
        [label for label, _ in rows],
        [names[place] for place in seen],
        [[row[place] for place in seen] for row in values],
    )


def _mean_stage(records: Sequence[Record], name: str) -> float:
    total = sum(
        stage.duration_s for record in records for stage in record.stages if stage.name == name
    )
    return total / len(records)


def timeline(run: Run, bounds: Bounds | None) -> Timeline | None:
    """A run second by second, or in longer bins where it lasted long."""
    records = run.measured
    if not records:
        return None
    start_s = math.floor(records[0].intended_s)
    end_s = max(record.end_s for record in records)
    bin_s = float(max(1, math.ceil((end_s - start_s) / MAX_BINS)))
    count = max(1, math.ceil((end_s - start_s) / bin_s))
    edges = start_s + bin_s * np.arange(count + 1)
    kinds = {"good": np.zeros(count), "missed": np.zeros(count), "failed": np.zeros(count)}
    flight, tokens = np.zeros(count), np.zeros(count)
    for record in records:
        place = min(int((record.intended_s - start_s) / bin_s), count - 1)
        kinds[_kind(record, bounds)][place] += 1
        inside = np.clip(edges, record.sent_s, max(record.sent_s, record.end_s))
        flight += np.diff(inside) / bin_s
        for arrival in record.arrivals:
            tokens[min(int((arrival.at_s - start_s) / bin_s), count - 1)] += arrival.num_tokens
    return Timeline(
        bin_s=bin_s,
        at_s=edges[:-1].tolist(),
        in_flight=flight.tolist(),
        tokens_per_s=(tokens / bin_s).tolist(),
        good_per_s=(kinds["good"] / bin_s).tolist(),
        missed_per_s=(kinds["missed"] / bin_s).tolist(),
        failed_per_s=(kinds["failed"] / bin_s).tolist(),
        good_label="met all bounds" if bounds else "answered",
        faults=[
            Mark(
                f"{fault.spec.kind} {fault.spec.pid}",
                fault.at_s,
                fault.resumed_s if fault.resumed_s is not None else fault.restarted_s,
            )
            for fault in run.faults
        ],
    )


def _kind(record: Record, bounds: Bounds | None) -> str:
    if record.outcome is not Outcome.ANSWERED:
        return "failed"
    return "good" if bounds is None or meets(record, bounds) else "missed"
