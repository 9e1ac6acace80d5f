"""One chart as inline SVG: curves over two axes, and marks across them.

`charts.py` says what is drawn, the template puts title and legend around it. Colours are classes of
the page's style. Pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from baton.bench.figures.paired import Floats

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
    """A vertical line at `at`, or a band from there to `until`."""

    at: float
    label: str
    until: float | None = None


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
    at, band = x.at(mark.at), ""
    if mark.until is not None:
        band = _path("band", f"M{at:.1f} {TOP}H{x.at(mark.until):.1f}V{BOTTOM}H{at:.1f}Z")
    gap, anchor = (-5, "end") if at > (LEFT + RIGHT) / 2 else (5, "start")
    line = _path("mark", f"M{at:.1f} {TOP}V{BOTTOM}")
    return band + line + _text(at + gap, BOTTOM - 8, mark.label, anchor)


def _path(kind: str, drawn: str) -> str:
    return f'<path class="{kind}" d="{drawn}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
