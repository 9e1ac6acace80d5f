"""One chart as inline SVG: curves over two axes, marks across them, and nothing else.

`charts.py` says what is drawn, the template puts title and legend around it. Colours are classes of
the page's style, so a page can be shown light or dark. Pure: numbers in, text out.
"""

import math
from dataclasses import dataclass, field
from html import escape
from typing import Literal

import numpy as np

from baton.bench.figures.paired import Floats

WIDTH, HEIGHT = 640.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 12.0, 22.0, 44.0
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
    form: Literal["line", "steps", "crosses"] = "line"


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
    curves: list[Curve]
    marks: list[Mark] = field(default_factory=list)
    log_x: bool = False
    is_share: bool = False  # y is a share, and its axis ends at 100 %

    def svg(self) -> str:
        """Return one `<svg>` element, fit for any page: every text in it is escaped."""
        x, y = self._x_axis(), self._y_axis()
        parts = [
            f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(self.title)}">'
        ]
        for value in y.ticks:
            text = f"{100 * value:g} %" if self.is_share else f"{value:,g}"
            parts.append(_line(LEFT, y.at(value), WIDTH - RIGHT, y.at(value), "grid"))
            parts.append(_text(LEFT - 6, y.at(value) + 4, text, "end"))
        for value in x.ticks:
            parts.append(_line(x.at(value), TOP, x.at(value), HEIGHT - BOTTOM, "grid"))
            parts.append(_text(x.at(value), HEIGHT - BOTTOM + 16, f"{value:,g}", "middle"))
        parts.append(_text((LEFT + WIDTH) / 2, HEIGHT - 8, self.x_label, "middle"))
        parts.append(_text(4, 12, self.y_label, "start"))
        parts += [_marked(mark, x) for mark in self.marks if mark.at <= x.high]
        parts += [_drawn(curve, x, y) for curve in self.curves]
        return "".join([*parts, "</svg>"])

    def _x_axis(self) -> "_Axis":
        known = np.concatenate([curve.x[np.isfinite(curve.x)] for curve in self.curves])
        low, high = float(known.min()), max(float(known.max()), 1e-9)
        # A mark far beyond the values would squeeze them into a corner.
        high = max(high, *(mark.at for mark in self.marks if mark.at <= FAR * high), high)
        if self.log_x:
            low = max(low, high / 1e5)
        elif low < 0.4 * high:
            low = 0.0
        return _Axis(low, max(high, low * 1.001), LEFT, WIDTH - RIGHT, self.log_x)

    def _y_axis(self) -> "_Axis":
        known = np.concatenate([curve.y[np.isfinite(curve.y)] for curve in self.curves])
        high = 1.0 if self.is_share else 1.05 * float(known.max(initial=0.0)) or 1.0
        return _Axis(0.0, high, HEIGHT - BOTTOM, TOP, False)


@dataclass(frozen=True, slots=True)
class _Axis:
    """Where the values from `low` to `high` are drawn: from `begin` to `end`."""

    low: float
    high: float
    begin: float
    end: float
    is_log: bool

    def at(self, value: float) -> float:
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.begin + (self.end - self.begin) * (value - low) / (high - low)

    @property
    def ticks(self) -> list[float]:
        """Return a few round numbers of the axis."""
        if self.is_log and self.high > 10 * self.low:
            steps = (1, 2, 5) if self.high < 1000 * self.low else (1,)
            tens = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            found = [step * 10.0**ten for ten in tens for step in steps]
        else:
            rough = (self.high - self.low) / MAX_TICKS
            ten = 10.0 ** math.floor(math.log10(rough))
            step = next(size * ten for size in (1, 2, 5, 10) if size * ten >= rough)
            first = math.ceil(self.low / step)
            found = [float(f"{place * step:.6g}") for place in range(first, first + 2 * MAX_TICKS)]
        return [value for value in found if self.low <= value <= self.high * (1 + 1e-9)]


def _drawn(curve: Curve, x: _Axis, y: _Axis) -> str:
    known = np.flatnonzero(np.isfinite(curve.x) & np.isfinite(curve.y))
    if len(known) > MAX_POINTS:
        known = known[np.unique(np.linspace(0, len(known) - 1, MAX_POINTS).astype(np.intp))]
    points = [(x.at(float(curve.x[at])), y.at(float(curve.y[at]))) for at in known]
    if curve.form == "crosses":
        ways = [f"M{a - 5:.1f} {b - 5:.1f}l10 10m0-10l-10 10" for a, b in points]
        return f'<path class="{curve.hue}" d="{"".join(ways)}"/>'
    if curve.form == "steps":
        words = [f"H{a:.1f}V{b:.1f}" for a, b in points]
    else:
        words = [f"L{a:.1f} {b:.1f}" for a, b in points]
    start = f"M{points[0][0]:.1f} {points[0][1]:.1f}" if points else ""
    return f'<path class="{curve.hue}" d="{start}{"".join(words)}"/>'


def _marked(mark: Mark, x: _Axis) -> str:
    at, bottom = x.at(mark.at), HEIGHT - BOTTOM
    band = ""
    if mark.until is not None:
        size = f'width="{x.at(mark.until) - at:.1f}" height="{bottom - TOP:g}"'
        band = f'<rect class="band" x="{at:.1f}" y="{TOP:g}" {size}/>'
    is_right = at > (LEFT + WIDTH) / 2
    label = _text(
        at + (-5 if is_right else 5), bottom - 8, mark.label, "end" if is_right else "start"
    )
    return band + _line(at, TOP, at, bottom, "mark") + label


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<path class="{kind}" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
