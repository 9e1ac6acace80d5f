"""The drawings of a report, one function each: plain curves in, a matplotlib Figure out.

The only file of baton that imports matplotlib, and it is loaded when a page or an image is
written, never for a run without files. Figures are made through the object API: no window, no
global state. Inline SVG names its colours as CSS variables, so a page can show it light or dark.
"""

import html
import io
import math
import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import msgspec
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from baton.bench.report.palette import CATEGORIES, GRID, INK, MUTED, SEQUENCE, SERIOUS, VARIABLES
from baton.bench.report.series import Curve, Histogram, Mark, Points, Stack, Timeline
from baton.bench.stages import UNATTRIBUTED

WIDTH, HEIGHT = 6.4, 3.5  # inches; a page scales the drawing
PNG_DPI = 160
# While a drawing is made and while it is written: both ask for the style.
styled = matplotlib.rc_context(
    {
        "font.family": "DejaVu Sans",
        "font.size": 9.5,
        "text.color": INK,
        "text.parse_math": False,  # a label may hold a dollar sign
        "axes.labelcolor": MUTED,
        "axes.edgecolor": GRID,
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "figure.facecolor": "none",
        "grid.color": GRID,
        "grid.linewidth": 0.8,
        "xtick.color": GRID,
        "ytick.color": GRID,
        "xtick.labelcolor": MUTED,
        "ytick.labelcolor": MUTED,
        "legend.frameon": False,
        "lines.linewidth": 1.8,
        "lines.solid_capstyle": "round",
        "svg.fonttype": "none",  # text stays text: small, searchable, in the page's own font
        "svg.hashsalt": "baton",  # equal reports give equal bytes
    }
)


class Drawing(msgspec.Struct, frozen=True):
    """`name` is unique within a report, and fit for a file and an address."""

    name: str
    title: str
    caption: str
    figure: Figure
    wide: bool = False


@styled
def cdf(curves: Sequence[Curve], *, x_label: str, bounds: Sequence[Mark]) -> Figure:
    """Shares of requests at or below a time, with the bounds as lines."""
    figure, axes = _one()
    colours = _colours(curves)
    for curve, colour in zip(curves, colours, strict=True):
        axes.plot(curve.x, curve.y, color=colour, label=curve.label, drawstyle="steps-post")
    values = [value for curve in curves for value in curve.x]
    _time_axis(axes, values, [mark.at for mark in bounds])
    axes.set(xlabel=x_label, ylabel="share of requests", ylim=(0.0, 1.02))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    for mark in bounds:
        _bound(axes, mark)
    _legend(axes, curves)
    return figure


@styled
def histogram(shown: Histogram, *, x_label: str, marks: Sequence[Mark]) -> Figure:
    """How often each gap occurred; counts on a logarithmic axis, since the rare ones matter."""
    figure, axes = _one()
    axes.stairs(shown.counts, shown.edges, fill=True, color=CATEGORIES[0], alpha=0.85)
    if shown.logarithmic:
        _log_scale(axes)
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.7)
    axes.yaxis.set_major_formatter(FuncFormatter(_number))
    axes.grid(False, axis="x")
    axes.set(xlabel=x_label, ylabel="number of gaps")
    for mark in marks:
        _bound(axes, mark)
    return figure


@styled
def against_rate(
    arms: Sequence[Points], *, y_label: str, target: float | None, found: float | None
) -> Figure:
    """A share of all arrivals against the offered rate; a run that is invalid is a cross."""
    figure, axes = _one()
    _points(axes, arms)
    axes.set(xlabel="offered rate, requests/s", ylabel=y_label, ylim=(0.0, 1.04))
    axes.set_xlim(left=0.0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if target is not None:
        axes.axhline(target, color=MUTED, linestyle=(0, (4, 3)), linewidth=1.1)
        axes.annotate(
            f"target {target:.0%}", (0.005, target), xycoords=("axes fraction", "data"),
            xytext=(2, -3), textcoords="offset points", va="top", color=MUTED, fontsize=8.5,
        )  # fmt: skip
    if found is not None:
        _bound(axes, Mark(f"found {found:.3g}/s", found))
    _legend(axes, arms)
    return figure


@styled
def goodput(arms: Sequence[Points]) -> Figure:
    """Requests per second that met every bound, against those that were offered."""
    figure, axes = _one()
    most = max((value for arm in arms for value in arm.x), default=1.0)
    ideal = axes.plot([0.0, most], [0.0, most], color=MUTED, linewidth=1.1, linestyle=(0, (4, 3)))
    ideal[0].set_label("all of them")
    _points(axes, arms)
    axes.set(xlabel="offered rate, requests/s", ylabel="goodput, requests/s")
    axes.set_xlim(left=0.0)
    axes.set_ylim(bottom=0.0)
    axes.legend(loc="upper left", fontsize=8.5)
    return figure


@styled
def frontier(arms: Sequence[Points], *, y_label: str) -> Figure:
    """What all users together get against what one user gets; up and to the right is better."""
    figure, axes = _one()
    _points(axes, arms)
    for arm in arms:
        for x, y, note in zip(arm.x, arm.y, arm.notes, strict=True):
            axes.annotate(
                note, (x, y), xytext=(5, 4), textcoords="offset points",
                fontsize=8, color=MUTED,
            )  # fmt: skip
    axes.set(xlabel="tokens/s for one user (1 / TPOT p50)", ylabel=y_label)
    axes.set_ylim(bottom=0.0)
    axes.margins(x=0.12, y=0.12)
    _legend(axes, arms)
    return figure


@styled
def stages(stack: Stack) -> Figure:
    """Where the time of requests goes, part by part, for each group of requests."""
    height = max(1.9, 1.1 + 0.42 * len(stack.rows))
    figure, axes = _one(height)
    left = [0.0] * len(stack.rows)
    for index, name in enumerate(stack.names):
        widths = [row[index] for row in stack.values]
        colour = MUTED if name == UNATTRIBUTED else CATEGORIES[index % len(CATEGORIES)]
        axes.barh(stack.rows, widths, left=left, height=0.62, color=colour, label=name)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, total in zip(stack.rows, left, strict=True):
        axes.annotate(
            f"{total:,.0f} ms", (total, row), xytext=(4, 0), textcoords="offset points",
            va="center", fontsize=8.5, color=MUTED,
        )  # fmt: skip
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("mean time, ms")
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", labelcolor=INK)
    axes.legend(
        loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=4, fontsize=8.5, borderaxespad=0.2,
        handlelength=1.0, handleheight=0.9, columnspacing=1.2,
    )  # fmt: skip
    return figure


@styled
def timeline(shown: Timeline) -> Figure:
    """Requests in flight, tokens and good requests per second over the run, faults marked."""
    figure = Figure(figsize=(2 * WIDTH, 5.4), layout="constrained")
    flight, tokens, good = figure.subplots(3, 1, sharex=True)
    bars = {"width": shown.bin_s * 0.86, "align": "edge"}
    flight.fill_between(
        shown.at_s, shown.in_flight, step="post", color=CATEGORIES[0], alpha=0.22, linewidth=0
    )
    flight.step(shown.at_s, shown.in_flight, where="post", color=CATEGORIES[0], linewidth=1.4)
    tokens.bar(shown.at_s, shown.tokens_per_s, color=CATEGORIES[2], alpha=0.85, **bars)
    good.bar(shown.at_s, shown.good_per_s, color=CATEGORIES[0], alpha=0.85, **bars)
    good.bar(
        shown.at_s, shown.missed_per_s, bottom=shown.good_per_s, color=CATEGORIES[1],
        alpha=0.85, **bars,
    )  # fmt: skip
    below = [a + b for a, b in zip(shown.good_per_s, shown.missed_per_s, strict=True)]
    good.bar(shown.at_s, shown.failed_per_s, bottom=below, color=SERIOUS, alpha=0.9, **bars)
    for axes, title in (
        (flight, "requests in flight"),
        (tokens, "tokens per second"),
        (good, "arrivals per second, by what became of them"),
    ):
        axes.set_title(title, loc="left", fontsize=9.5, color=INK, pad=5)
        axes.set_ylim(bottom=0.0)
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.grid(False, axis="x")
        _faults(axes, shown.faults)
    for name, colour, offset in (
        (shown.good_label, CATEGORIES[0], -15.5),
        ("answered, missed a bound", CATEGORIES[1], -8.6),
        ("failed", SERIOUS, -1.0),
    ):
        _key(good, name, colour, offset)
    _fault_names(flight, shown.faults)
    good.set_xlabel("seconds from the start of the schedule")
    good.set_xlim(shown.at_s[0], shown.at_s[-1] + shown.bin_s)
    return figure


@styled
def svg(figure: Figure, *, name: str, title: str) -> str:
    """One `<svg>` element for a page: CSS variables as colours, ids made unique by `name`."""
    FigureCanvasSVG(figure)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg\b[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg\b[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = text.replace("<svg", f'<svg role="img" aria-label="{html.escape(title)}"', 1)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'(href="|url\()#', rf"\1#{name}-", text)
    text = re.sub(r"font-family: [^;\"]+;?|'DejaVu Sans'[^;\"]*", "", text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text.strip()


@styled
def png(figure: Figure, path: Path) -> None:
    """An image on white, for slides and comments."""
    FigureCanvasAgg(figure)
    figure.savefig(path, format="png", dpi=PNG_DPI, facecolor="white")


@styled
def _one(height: float = HEIGHT) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _colours(curves: Sequence[Curve]) -> list[str]:
    """Shades of one hue where curves are steps of one quantity, hues where they are kinds."""
    if len(curves) < 2 or not all(curve.ordered for curve in curves):
        return [CATEGORIES[index % len(CATEGORIES)] for index in range(len(curves))]
    last = len(SEQUENCE) - 1
    return [SEQUENCE[round(index * last / (len(curves) - 1))] for index in range(len(curves))]


def _points(axes: Axes, arms: Sequence[Points]) -> None:
    for index, arm in enumerate(arms):
        colour = CATEGORIES[index % len(CATEGORIES)]
        axes.plot(arm.x, arm.y, color=colour, marker="o", markersize=4.5, label=arm.label)
        wrong = [place for place, valid in enumerate(arm.valid) if not valid]
        axes.plot(
            [arm.x[place] for place in wrong], [arm.y[place] for place in wrong], linestyle="none",
            marker="X", markersize=9, color=SERIOUS,
        )  # fmt: skip


def _bound(axes: Axes, mark: Mark) -> None:
    axes.axvline(mark.at, color=MUTED, linestyle=(0, (4, 3)), linewidth=1.1)
    axes.annotate(
        mark.label, (mark.at, 0.03), xycoords=("data", "axes fraction"), xytext=(-3, 0),
        textcoords="offset points", rotation=90, ha="right", va="bottom", color=MUTED, fontsize=8.5,
    )  # fmt: skip


def _faults(axes: Axes, faults: Sequence[Mark]) -> None:
    for fault in faults:
        if fault.until is not None:
            axes.axvspan(fault.at, fault.until, color=SERIOUS, alpha=0.10, linewidth=0)
        axes.axvline(fault.at, color=SERIOUS, linewidth=1.2)


def _fault_names(axes: Axes, faults: Sequence[Mark]) -> None:
    for fault in faults:
        axes.annotate(
            fault.label, (fault.at, 1.0), xycoords=("data", "axes fraction"), xytext=(4, -2),
            textcoords="offset points", va="top", color=SERIOUS, fontsize=8.5,
        )  # fmt: skip


def _key(axes: Axes, name: str, colour: str, offset: float) -> None:
    """A word in its own colour at the right end of the title line; `offset` in ems."""
    axes.annotate(
        name, (1.0, 1.0), xycoords="axes fraction", xytext=(offset * 9.5, 5),
        textcoords="offset points", ha="right", va="bottom", color=colour, fontsize=8.5,
    )  # fmt: skip


def _legend(axes: Axes, labelled: Sequence[Curve] | Sequence[Points]) -> None:
    if len(labelled) > 1:
        axes.legend(loc="best", fontsize=8.5)


def _time_axis(axes: Axes, values: Sequence[float], bounds: Sequence[float]) -> None:
    """Logarithmic where a linear axis would squeeze most values into its first tenth."""
    positive = sorted(value for value in values if value > 0)
    if not positive:
        return
    most = max(positive[-1], *bounds, 0.0)
    if positive[-1] > 12 * positive[len(positive) // 2]:
        _log_scale(axes)
        axes.set_xlim(positive[0] * 0.9, most * 1.15)
    else:
        axes.set_xlim(0.0, most * 1.06)


def _log_scale(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(_number))


def _number(value: float, _position: int | None) -> str:
    """10,000 rather than 10 to the power of 4."""
    if value <= 0 or not math.isfinite(value):
        return ""
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"
