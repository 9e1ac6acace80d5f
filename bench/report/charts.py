"""The charts of a report: distributions of times, and results by rate.

Each chart is one inline SVG whose colours are classes of the page's style. A chart without records
is left out.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from statistics import median

import numpy as np

from baton.bench.figures.metrics import DEFINITIONS, Bounds, Floats, gaps_ms, measure
from baton.bench.records import Outcome, Record
from baton.bench.report.document import Report, Run

MAX_CURVES = 8
WIDTH = 640
HEIGHT = 300
LEFT, RIGHT, TOP, BOTTOM = 58.0, 628.0, 22.0, 256.0  # of the frame
MAX_TICKS = 6
MAX_POINTS = 400  # of a curve; more would not be seen


@dataclass(frozen=True, slots=True)
class Curve:
    """Points in the order of x. `hue` is a class of the page's style: c0 ... c7, bad or muted."""

    label: str
    x: Floats
    y: Floats
    hue: str
    is_steps: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    caption: str
    x_label: str
    y_label: str
    curves: list[Curve]
    marks: tuple[tuple[float, str], ...] = ()  # vertical lines: x and label
    is_share: bool = False  # y is a share, and its axis ends at 100 %

    def svg(self) -> str:
        """Return one `<svg>` element, fit for any page: every text in it is escaped."""
        xs = np.concatenate([curve.x[np.isfinite(curve.x)] for curve in self.curves])
        ys = np.concatenate([curve.y[np.isfinite(curve.y)] for curve in self.curves])
        low = float(xs.min())
        high = max(float(xs.max()), 1e-9)
        # A mark far beyond the values would squeeze them into a corner.
        high = max(high, *(at for at, _ in self.marks if at <= 3 * high), low * 1.001)
        if low < 0.4 * high:
            low = 0.0
        top = 1.0 if self.is_share else 1.05 * float(ys.max(initial=0.0)) or 1.0
        x = _Axis(low, high, LEFT, RIGHT)
        y = _Axis(0.0, top, BOTTOM, TOP)
        grid = "".join(f"M{LEFT} {y.at(value):.1f}H{RIGHT}" for value in y.ticks())
        grid += "".join(f"M{x.at(value):.1f} {TOP}V{BOTTOM}" for value in x.ticks())
        rows = [
            (y.at(v), f"{100 * v:g} %" if self.is_share else f"{v:,g}")
            for v in y.ticks()
        ]
        parts = [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}">',
            _path("grid", grid),
            *(_text(LEFT - 6, at + 4, label, "end") for at, label in rows),
            *(_text(x.at(v), BOTTOM + 16, f"{v:,g}", "middle") for v in x.ticks()),
            _text((LEFT + RIGHT) / 2, HEIGHT - 8, self.x_label, "middle"),
            _text(4, 12, self.y_label, "start"),
        ]
        for value, label in self.marks:
            if value <= high:
                at = x.at(value)
                gap, anchor = (-5, "end") if at > (LEFT + RIGHT) / 2 else (5, "start")
                parts.append(_path("mark", f"M{at:.1f} {TOP}V{BOTTOM}"))
                parts.append(_text(at + gap, BOTTOM - 8, label, anchor))
        parts += [_path(curve.hue, _drawn(curve, x, y)) for curve in self.curves]
        return "".join([*parts, "</svg>"])


@dataclass(frozen=True, slots=True)
class _Axis:
    """Where the values from `low` to `high` are drawn: from `begin` to `end`."""

    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        place = min(max(value, self.low), self.high)
        return self.begin + (self.end - self.begin) * (place - self.low) / (
            self.high - self.low
        )

    def ticks(self) -> list[float]:
        """Return a few round numbers of the axis."""
        rough = (self.high - self.low) / MAX_TICKS
        ten = 10.0 ** math.floor(math.log10(rough))
        step = next(size * ten for size in (1, 2, 5, 10) if size * ten >= rough)
        first = math.ceil(self.low / step)
        found = [
            float(f"{place * step:.6g}")
            for place in range(first, first + 2 * MAX_TICKS)
        ]
        return [value for value in found if self.low <= value <= self.high * (1 + 1e-9)]


def _drawn(curve: Curve, x: _Axis, y: _Axis) -> str:
    known = np.flatnonzero(np.isfinite(curve.x) & np.isfinite(curve.y))
    chosen = known[
        np.linspace(0, len(known) - 1, min(len(known), MAX_POINTS)).astype(np.intp)
    ]
    points = [(x.at(float(curve.x[at])), y.at(float(curve.y[at]))) for at in chosen]
    form = "H{:.1f}V{:.1f}" if curve.is_steps else "L{:.1f} {:.1f}"
    start = ["M{:.1f} {:.1f}".format(*point) for point in points[:1]]
    return "".join([*start, *(form.format(*point) for point in points)])


def _path(kind: str, drawn: str) -> str:
    return f'<path class="{kind}" d="{drawn}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def charts(report: Report) -> list[Chart]:
    """Return them in the order of the page."""
    return [*_against_rate(report), *_distributions(report)]


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
    bounds = report.bounds or Bounds()
    found = groups(report)
    for name, title, bound_ms in (
        ("ttft", "Time to first token", bounds.ttft_ms),
        ("tpot", "Time per output token", bounds.tpot_ms),
        ("itl", "Gaps between tokens", bounds.gap_max_ms),
    ):
        each = [
            (label, np.sort(_times_ms(name, records)))
            for label, records in found.items()
        ]
        # The share of the times at or below each of them.
        curves = [
            Curve(
                label,
                np.append(x[:1], x),
                np.linspace(0.0, 1.0, len(x) + 1),
                f"c{place}",
                is_steps=True,
            )
            for place, (label, x) in enumerate(each)
            if len(x)
        ]
        if curves:
            marks = () if bound_ms is None else ((bound_ms, f"bound {bound_ms:g} ms"),)
            caption = f"{name.upper()}: {DEFINITIONS[name]}."
            x_label = f"{name.upper()}, ms"
            yield Chart(title, caption, x_label, "share", curves, marks, is_share=True)


def _times_ms(name: str, records: list[Record]) -> Floats:
    if name == "itl":
        return gaps_ms(records)[1]
    times = [getattr(measure(record), f"{name}_ms") for record in records]
    return np.array([time_ms for time_ms in times if time_ms is not None], np.float64)


def _against_rate(report: Report) -> Iterator[Chart]:
    """Draw the results by rate, with a mark at the rate of an invalid run."""
    by_rate: dict[float, list[Run]] = {}
    for run in sorted(report.runs, key=lambda run: run.rate or 0.0):
        by_rate.setdefault(run.rate or 0.0, []).append(run)
    if len(by_rate) < 2 or any(run.arm for run in report.runs):
        return

    def medians(field: str) -> Floats:
        each = [
            [getattr(run.summary, field) for run in runs] for runs in by_rate.values()
        ]
        known = [[value for value in values if value is not None] for values in each]
        return np.array(
            [median(values) if values else math.nan for values in known], np.float64
        )

    x = medians("offered_rate")
    is_invalid = [any(run.invalid for run in runs) for runs in by_rate.values()]
    marks = tuple(
        (float(at), "INVALID") for at, bad in zip(x, is_invalid, strict=True) if bad
    )
    if not report.bounds:
        fields = {"tokens_per_s": ("Throughput", "tokens/s")}
    else:
        fields = {
            "attainment": ("Attainment", "attainment"),
            "goodput": ("Goodput", "goodput/s"),
        }
    for field, (title, label) in fields.items():
        curves = [Curve(label, x, medians(field), "c0")]
        if field == "goodput":
            curves.append(Curve("all of them", x, x, "muted"))
        if field == "attainment" and report.target is not None:
            goal = np.full(len(x), report.target)
            curves.append(Curve(f"--attainment {report.target:g}", x, goal, "muted"))
        yield Chart(
            f"{title} against rate",
            DEFINITIONS[field].capitalize(),
            "offered requests/s",
            label,
            curves,
            marks,
            is_share=field == "attainment",
        )
