"""The charts of a report: distributions of times, requests over time, and results by rate.

Each chart is one inline SVG whose colours are classes of the page's style. A chart without records
is left out.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median

import numpy as np

from baton.bench.figures.metrics import DEFINITIONS, Bounds, gaps_ms, measure, meets
from baton.bench.figures.paired import Floats
from baton.bench.records import Outcome, Record
from baton.bench.report.document import Report, Run

MAX_CURVES = 8
MAX_BINS = 240  # of a run over time
MAX_LABEL = 40  # characters
SKEWED = 12  # times the median: beyond it a linear axis squeezes most values into a corner
WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 58.0, 628.0, 22.0, 256.0  # of the frame
MAX_TICKS = 6
MAX_POINTS = 400  # of a curve; more would not be seen
FAR = 3


@dataclass(frozen=True, slots=True)
class Curve:
    """Points in the order of x. `hue` is a class of the page's style: c0 ... c7, bad or muted."""

    label: str
    x: Floats
    y: Floats
    hue: str
    is_steps: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    caption: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    marks: Sequence[Mark] = ()
    log_x: bool = False
    is_share: bool = False  # y is a share, and its axis ends at 100 %

    def svg(self) -> str:
        """Return one `<svg>` element, fit for any page: every text in it is escaped."""
        x, y = self._axes()
        marks = [mark for mark in self.marks if mark.at <= x.high]
        rows = [(y.at(value), 100 * value if self.is_share else value) for value in y.ticks]
        columns = [(x.at(value), value) for value in x.ticks]
        sign = " %" if self.is_share else ""
        grid = [f"M{LEFT} {at:.1f}H{RIGHT}" for at, _ in rows]
        grid += [f"M{at:.1f} {TOP}V{BOTTOM}" for at, _ in columns]
        return "".join([
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}">',
            _path("grid", "".join(grid)),
            *(_text(LEFT - 6, at + 4, f"{value:,g}{sign}", "end") for at, value in rows),
            *(_text(at, BOTTOM + 16, f"{value:,g}", "middle") for at, value in columns),
            _text((LEFT + RIGHT) / 2, HEIGHT - 8, self.x_label, "middle"),
            _text(4, 12, self.y_label, "start"),
            *(_marked(mark, x) for mark in marks),
            *(_path(curve.hue, _drawn(curve, x, y)) for curve in self.curves),
            "</svg>",
        ])  # fmt: skip

    def _axes(self) -> "tuple[_Axis, _Axis]":
        xs, ys = (
            np.concatenate([values[np.isfinite(values)] for values in each])
            for each in zip(*((curve.x, curve.y) for curve in self.curves), strict=True)
        )
        low, high = float(xs.min()), max(float(xs.max()), 1e-9)
        # A mark far beyond the values would squeeze them into a corner.
        high = max(high, *(mark.at for mark in self.marks if mark.at <= FAR * high), low * 1.001)
        if self.log_x:
            low = max(low, high / 1e5)
        elif low < 0.4 * high:
            low = 0.0
        top = 1.0 if self.is_share else 1.05 * float(ys.max(initial=0.0)) or 1.0
        return _Axis(low, high, LEFT, RIGHT, self.log_x), _Axis(0.0, top, BOTTOM, TOP)


@dataclass(frozen=True, slots=True)
class _Axis:
    """Where the values from `low` to `high` are drawn: from `begin` to `end`."""

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        scaled = [self.low, self.high, min(max(value, self.low), self.high)]
        low, high, place = map(math.log, scaled) if self.is_log else scaled
        return self.begin + (self.end - self.begin) * (place - low) / (high - low)

    @property
    def ticks(self) -> list[float]:
        """Return a few round numbers of the axis."""
        if self.is_log and self.high > 10 * self.low:
            steps = (1, 2, 5) if self.high < 1000 * self.low else (1,)
            found = [step * 10.0**ten for ten in range(-6, 9) for step in steps]
        else:
            rough = (self.high - self.low) / MAX_TICKS
            ten = 10.0 ** math.floor(math.log10(rough))
            step = next(size * ten for size in (1, 2, 5, 10) if size * ten >= rough)
            first = math.ceil(self.low / step)
            found = [float(f"{place * step:.6g}") for place in range(first, first + 2 * MAX_TICKS)]
        return [value for value in found if self.low <= value <= self.high * (1 + 1e-9)]


def _drawn(curve: Curve, x: _Axis, y: _Axis) -> str:
    known = np.flatnonzero(np.isfinite(curve.x) & np.isfinite(curve.y))
    chosen = known[np.linspace(0, len(known) - 1, min(len(known), MAX_POINTS)).astype(np.intp)]
    points = [(x.at(float(curve.x[at])), y.at(float(curve.y[at]))) for at in chosen]
    form = "H{:.1f}V{:.1f}" if curve.is_steps else "L{:.1f} {:.1f}"
    start = ["M{:.1f} {:.1f}".format(*point) for point in points[:1]]
    return "".join([*start, *(form.format(*point) for point in points)])


def _marked(mark: Mark, x: _Axis) -> str:
    at = x.at(mark.at)
    gap, anchor = (-5, "end") if at > (LEFT + RIGHT) / 2 else (5, "start")
    line = _path("mark", f"M{at:.1f} {TOP}V{BOTTOM}")
    return line + _text(at + gap, BOTTOM - 8, mark.label, anchor)


def _path(kind: str, drawn: str) -> str:
    return f'<path class="{kind}" d="{drawn}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def charts(report: Report) -> list[Chart]:
    """Return them in the order of the page."""
    over_time = report.runs if len(report.runs) == 1 else []
    return [
        *_against_rate(report),
        *_distributions(report),
        *(_over_time(run, report.bounds) for run in over_time if run.measured),
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
    """Draw arrivals per second by their outcome."""
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
    caption = f"Bins of {bin_s} s. A request counts where it arrived."
    title = f"Requests over time, {_short(run.label)}"
    return Chart(title, caption, "seconds from the start of the schedule", "arrivals/s", curves)


def _against_rate(report: Report) -> Iterator[Chart]:
    """Draw the results by rate, with a mark at the rate of an invalid run."""
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
