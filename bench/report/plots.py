"""The drawings of a report, one function each: plain curves in, a matplotlib Figure out.

The only file of baton that imports matplotlib, and it is loaded when a page or an image is
written, never for a run without files. Figures are made through the object API: no window, no
global state. Inline SVG names its colours as CSS variables, so a page can show it light or dark.
"""

import html
import io
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

from baton.bench.figures.stages import STAGES, UNATTRIBUTED
from baton.bench.report.palette import CATEGORIES, GRID, INK, MUTED, SEQUENCE, SERIOUS, VARIABLES
from baton.bench.report.series import Curve, Histogram, Mark, Points, Stack, Timeline

WIDTH, HEIGHT = 6.4, 3.5  # inches; a page scales the drawing
PNG_DPI = 160
MAX_LABEL = 28  # characters
# A legend on the line of a title.
KEY: dict[str, float] = {
    "fontsize": 8.5, "borderaxespad": 0.2, "handlelength": 1.0, "handleheight": 0.9,
    "handletextpad": 0.5, "columnspacing": 1.4,
}  # fmt: skip
# Which colour a stage has, by its place: the large ones calm, neighbours far apart.
STAGE_ORDER = (8, 9, 6, 1, 0, 4, 7, 3, 2, 5)
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
        axes.plot(curve.x, curve.y, color=colour, label=_short(curve.label), drawstyle="steps-post")
    values = [value for curve in curves for value in curve.x]
    _time_axis(axes, values, [mark.at for mark in bounds])
    axes.set(xlabel=x_label, ylabel="share of requests", ylim=(0.0, 1.02))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    for mark in bounds:
        _bound(axes, mark)
    _legend(axes, curves)
    return figure


@styled
def histogram(
    shown: Histogram, *, x_label: str, marks: Sequence[Mark], wide: bool = False
) -> Figure:
    """How often each gap occurred; counts on a logarithmic axis, since the rare ones matter."""
    figure, axes = _one(HEIGHT, (1 + wide) * WIDTH)
    axes.stairs(shown.counts, shown.edges, fill=True, color=CATEGORIES[0], alpha=0.85)
    if shown.logarithmic:
        _log_scale(axes)
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.7)
    axes.yaxis.set_major_formatter(FuncFormatter(_number))
    axes.grid(False, axis="x")
    axes.set(xlabel=x_label, ylabel="number of gaps")
    for mark in marks:
        _bound(axes, mark, at_top=True)
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
def stages(stack: Stack, *, wide: bool = False) -> Figure:
    """Where the time of requests goes, part by part, for each group of requests."""
    figure, axes = _one(max(HEIGHT, 1.3 + 0.42 * len(stack.rows)), (1 + wide) * WIDTH)
    # Places, not labels: two runs may have the same label.
    rows = range(len(stack.rows))
    left = [0.0] * len(stack.rows)
    for index, name in enumerate(stack.names):
        widths = [row[index] for row in stack.values]
        axes.barh(rows, widths, left=left, height=0.62, color=_stage_colour(name), label=name)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(rows, [_short(label) for label in stack.rows])
    for row, total in zip(rows, left, strict=True):
        axes.annotate(
            f"{total:,.0f} ms", (total, row), xytext=(4, 0), textcoords="offset points",
            va="center", fontsize=8.5, color=MUTED,
        )  # fmt: skip
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("mean time, ms")
    axes.xaxis.set_major_formatter(FuncFormatter(_number))
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", labelcolor=INK)
    handles, labels = axes.get_legend_handles_labels()
    columns = min(8 if wide else 4, len(labels))
    # A legend fills column by column; the stages are to be read row by row.
    order = [place for start in range(columns) for place in range(start, len(labels), columns)]
    axes.legend(
        [handles[place] for place in order], [labels[place] for place in order],
        loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns, **KEY,
    )  # fmt: skip
    return figure


@styled
def timeline(shown: Timeline) -> Figure:
    """Requests in flight, tokens and good requests per second over the run, faults marked."""
    figure = Figure(figsize=(2 * WIDTH, 5.4), layout="constrained")
    flight, tokens, good = figure.subplots(3, 1, sharex=True)
    edges = [*shown.at_s, shown.at_s[-1] + shown.bin_s]
    flight.stairs(shown.in_flight, edges, fill=True, color=CATEGORIES[0], alpha=0.22)
    flight.stairs(shown.in_flight, edges, baseline=None, color=CATEGORIES[0], linewidth=1.4)
    tokens.stairs(shown.tokens_per_s, edges, fill=True, color=CATEGORIES[2], alpha=0.75)
    below = [0.0] * len(shown.at_s)
    for name, values, colour in (
        (shown.good_label, shown.good_per_s, CATEGORIES[0]),
        ("answered, missed a bound", shown.missed_per_s, CATEGORIES[1]),
        ("failed", shown.failed_per_s, SERIOUS),
    ):
        if any(values):
            top = [low + value for low, value in zip(below, values, strict=True)]
            good.stairs(top, edges, baseline=below, fill=True, color=colour, alpha=0.85, label=name)
            below = top
    for axes, title in (
        (flight, "requests in flight"),
        (tokens, "tokens per second"),
        (good, "arrivals per second, by what became of them"),
    ):
        axes.set_title(title, loc="left", fontsize=9.5, color=INK, pad=6)
        axes.set_ylim(bottom=0.0)
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.grid(False, axis="x")
        _faults(axes, shown.faults)
    if shown.faults:
        flight.set_ylim(top=1.3 * max(1.0, *shown.in_flight))  # room for their names
    good.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, **KEY)
    _fault_names(flight, shown.faults)
    good.set_xlabel("seconds from the start of the schedule")
    good.set_xlim(edges[0], edges[-1])
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
def png(drawing: Drawing, path: Path, *, usable: bool = True) -> None:
    """An image on white, which says by itself what it shows, and if it is not to be used."""
    figure = drawing.figure
    FigureCanvasAgg(figure)
    title = figure.suptitle(
        drawing.title if usable else f"INVALID: {drawing.title}",
        x=0.01, ha="left", fontsize=11, weight="bold", color=INK if usable else SERIOUS,
    )  # fmt: skip
    figure.savefig(
        path, format="png", dpi=PNG_DPI, facecolor="white", bbox_inches="tight", pad_inches=0.15
    )
    title.remove()


@styled
def _one(height: float = HEIGHT, width: float = WIDTH) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _colours(curves: Sequence[Curve]) -> list[str]:
    """Shades of one hue where curves are steps of one quantity, hues where they are kinds."""
    if len(curves) < 2 or not all(curve.ordered for curve in curves):
        return [CATEGORIES[index % len(CATEGORIES)] for index in range(len(curves))]
    last = len(SEQUENCE) - 1
    return [SEQUENCE[round(index * last / (len(curves) - 1))] for index in range(len(curves))]


def _stage_colour(name: str) -> str:
    """The same for a stage in every report."""
    if name == UNATTRIBUTED:
        return MUTED
    place = list(STAGES).index(name) if name in STAGES else len(STAGES) + len(name)
    return CATEGORIES[STAGE_ORDER[place % len(STAGE_ORDER)]]


def _points(axes: Axes, arms: Sequence[Points]) -> None:
    for index, arm in enumerate(arms):
        colour = CATEGORIES[index % len(CATEGORIES)]
        axes.plot(arm.x, arm.y, color=colour, marker="o", markersize=4.5, label=_short(arm.label))
        wrong = [place for place, valid in enumerate(arm.valid) if not valid]
        axes.plot(
            [arm.x[place] for place in wrong], [arm.y[place] for place in wrong], linestyle="none",
            marker="X", markersize=9, color=SERIOUS,
        )  # fmt: skip


def _bound(axes: Axes, mark: Mark, *, at_top: bool = False) -> None:
    axes.axvline(mark.at, color=MUTED, linestyle=(0, (4, 3)), linewidth=1.1)
    axes.annotate(
        mark.label, (mark.at, 0.97 if at_top else 0.03), xycoords=("data", "axes fraction"),
        xytext=(-3, 0), textcoords="offset points", rotation=90, ha="right",
        va="top" if at_top else "bottom", color=MUTED, fontsize=8.5,
    )  # fmt: skip


def _faults(axes: Axes, faults: Sequence[Mark]) -> None:
    for fault in faults:
        if fault.until is not None:
            axes.axvspan(fault.at, fault.until, color=SERIOUS, alpha=0.10, linewidth=0)
        axes.axvline(fault.at, color=SERIOUS, linewidth=1.2)


def _fault_names(axes: Axes, faults: Sequence[Mark]) -> None:
    for fault in faults:
        axes.annotate(
            _short(fault.label), (fault.at, 1.0), xycoords=("data", "axes fraction"),
            xytext=(4, -2), textcoords="offset points", va="top", color=SERIOUS, fontsize=8.5,
        )  # fmt: skip


def _legend(axes: Axes, labelled: Sequence[Curve] | Sequence[Points]) -> None:
    if len(labelled) > 1:
        axes.legend(loc="best", fontsize=8.5)


def _time_axis(axes: Axes, values: Sequence[float], bounds: Sequence[float]) -> None:
    """Logarithmic where a linear axis would squeeze most values into its first tenth."""
    positive = sorted(value for value in values if value > 0)
    if not positive:
        return
    least, most = positive[0], max(positive[-1], *bounds, 0.0)
    if positive[-1] > 12 * positive[len(positive) // 2]:
        _log_scale(axes)
        axes.set_xlim(least * 0.9, most * 1.15)
    else:
        # Nothing is lost to the left of values that lie close together far from zero.
        axes.set_xlim(0.0 if least < 0.4 * most else 0.9 * least, most * 1.06)


def _log_scale(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(_number))


def _number(value: float, _position: int | None) -> str:
    """10,000 rather than 10 to the power of 4."""
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"


def _short(label: str) -> str:
    """A label that leaves room for the drawing."""
    return label if len(label) <= MAX_LABEL else f"{label[: MAX_LABEL - 1]}…"
