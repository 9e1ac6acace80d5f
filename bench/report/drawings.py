"""The drawings of a report, each with a title and a sentence on how to read it.

The only file of baton that imports matplotlib, which is an extra: `publish.py` imports this file
when it writes pages, and does without drawings if it cannot. Figures are made through matplotlib's
object API: no window, no global state. Inline SVG names its colours as CSS variables, so a page can
show it light or dark.
"""

import html
import io
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from baton.bench.figures.faults import Injected
from baton.bench.figures.metrics import Bounds
from baton.bench.figures.paired import Floats
from baton.bench.figures.stages import STAGES, UNATTRIBUTED
from baton.bench.report.document import Report
from baton.bench.report.pages import PALETTE
from baton.bench.report.series import Group, Sweep, Timeline, gaps_ms, groups, stage_rows, timeline

WIDTH, HEIGHT = 6.4, 3.5  # inches; a page scales the drawing
PNG_DPI = 160
MAX_LABEL = 28  # characters
MAX_TIMELINES = 4
NUM_BARS = 60
INK, MUTED, GRID, SERIOUS = (
    PALETTE[f"--{name}"][0] for name in ("ink", "muted", "grid", "serious")
)
HUES = [PALETTE[f"--c{place}"][0] for place in range(10)]
# The colour of a stage, by its place: the large stages calm, neighbours far apart.
STAGE_HUES = (8, 9, 6, 1, 0, 4, 7, 3, 2, 5)
# In force both while a figure is drawn and while it is written.
styled = matplotlib.rc_context(
    {
        **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), MUTED),
        **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), GRID),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
        **dict.fromkeys(("axes.facecolor", "figure.facecolor"), "none"),
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.titlesize": 9.5,
        "font.family": "DejaVu Sans",
        "font.size": 9.5,
        "legend.borderaxespad": 0.2,
        "legend.fontsize": 8.5,
        "legend.handlelength": 1.2,
        "lines.dashed_pattern": (4, 3),
        "lines.linewidth": 1.8,
        "svg.fonttype": "none",  # text stays text: small, searchable, in the page's own font
        "svg.hashsalt": "baton",  # equal reports give equal bytes
        "text.color": INK,
        "text.parse_math": False,  # a label may hold a dollar sign
    }
)


@dataclass(slots=True)
class Drawing:
    """`name` is unique within a report, and fit for a file and an address."""

    name: str
    title: str
    caption: str
    draw: Callable[[Figure], None]
    wide: bool = False  # fills a row of the page, which has two columns

    @styled
    def figure(self) -> Figure:
        figure = Figure(figsize=((1 + self.wide) * WIDTH, HEIGHT), layout="constrained")
        self.draw(figure)
        return figure

    @styled
    def svg(self) -> str:
        """Return one `<svg>` element: CSS variables as colours, ids made unique by `name`."""
        written = io.StringIO()
        self.figure().savefig(written, format="svg", metadata={"Date": None, "Creator": None})
        text = written.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        text = re.sub(r' (?:width|height)="[^"]*"', "", text, count=2)
        text = text.replace("<svg", f'<svg role="img" aria-label="{html.escape(self.title)}"', 1)
        text = re.sub(r'\bid="([^"]+)"', rf'id="{self.name}-\1"', text)
        text = re.sub(r'(href="|url\()#', rf"\1#{self.name}-", text)
        text = re.sub(r"font-family: [^;\"]+;?|'DejaVu Sans'[^;\"]*", "", text)
        for variable, (light, _) in PALETTE.items():
            text = text.replace(light, f"var({variable})")
        return text.strip()

    @styled
    def png(self, path: Path, *, usable: bool = True) -> None:
        """Write an image on white that says what it shows, and whether it may be used."""
        figure = self.figure()
        title, colour = (self.title, INK) if usable else (f"INVALID: {self.title}", SERIOUS)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, weight="bold", color=colour)
        figure.savefig(
            path, format="png", dpi=PNG_DPI, facecolor="white", bbox_inches="tight", pad_inches=0.15
        )


def drawings(report: Report) -> list[Drawing]:
    """Return them in the order of the page; what the records cannot show is left out."""
    found = groups(report)
    narrow = [*_against_rate(report), *_of_requests(report, found)]
    if len(narrow) % 2:
        narrow[-1].wide = True
    return [*narrow, *_timelines(report)]


def _against_rate(report: Report) -> Iterator[Drawing]:
    sweep = Sweep(report)
    if len(sweep.rates) < 2 or len({run.arm for run in report.runs}) > 1:
        return
    users, worth, y_label = "Throughput", sweep.tokens_per_s, "tokens/s of all users"
    if report.bounds is not None:
        users, worth, y_label = "Goodput", sweep.goodput, "goodput, requests/s"
        caption = "Share of all arrivals that met every bound. A cross marks an invalid run."
        draw = partial(_attainment, sweep, report)
        yield Drawing("attainment", "Attainment against rate", caption, draw)
        caption = "Requests per second that met every bound; the dashed line would be all of them."
        yield Drawing("goodput", "Goodput against rate", caption, partial(_goodput, sweep))
    if np.isfinite(sweep.one_user).any():
        caption = "What all users get against what one user gets. Up and to the right is better."
        draw = partial(_frontier, sweep, worth, y_label)
        yield Drawing("frontier", f"{users} frontier", caption, draw)


def _of_requests(report: Report, found: list[Group]) -> Iterator[Drawing]:
    bounds = report.bounds or Bounds()
    fewer = sum(len(group.runs) for group in found) < len(report.runs)
    chosen = f" {len(found)} of the runs are shown." if fewer else ""
    for name, title, what, bound_ms in (
        ("ttft", "Time to first token", "From the intended arrival", bounds.ttft_ms),
        ("tpot", "Time per output token", "Mean time after the first token", bounds.tpot_ms),
    ):
        curves = [(group, times) for group in found if (times := group.times_ms(name))]
        if curves:
            draw = partial(_cdf, curves, f"{name.upper()}, ms", bound_ms)
            yield Drawing(f"{name}-cdf", title, f"{what}, of answered requests.{chosen}", draw)
    if len(gaps := gaps_ms(found)):
        caption = "All gaps between tokens; a reader of a stream notices the rare long ones."
        yield Drawing(
            "itl", "Gaps between tokens", caption, partial(_gaps, gaps, bounds.gap_max_ms)
        )
    if rows := stage_rows(found):
        of = "by how long the requests took" if len(found) == 1 else "for each run"
        caption = f"Mean time in each stage, {of}. The stages sum to e2e."
        yield Drawing("stages", "Where the time goes", caption, partial(_stages, rows))


def _timelines(report: Report) -> Iterator[Drawing]:
    """Draw the runs with faults, or a single run: the timelines of many runs would say little."""
    chosen = [run for run in report.runs if run.faults or (len(report.runs) == 1 and run.measured)]
    for place, run in enumerate(chosen[:MAX_TIMELINES], 1):
        shown = timeline(run, report.bounds)
        name, title = f"timeline-{place}", f"Timeline of {run.label}"
        if len(chosen) == 1:
            name, title = "timeline", "Timeline"
        caption = f"Bins of {shown.bin_s:g} s. A request counts where it arrived."
        yield Drawing(name, title, caption, partial(_timeline, shown, run.faults), wide=True)


def _points(sweep: Sweep, x: Floats, y: Floats, figure: Figure) -> Axes:
    """Draw a point per rate, and a cross where a run is invalid."""
    axes = figure.subplots()
    axes.plot(x, y, color=HUES[0], marker="o", markersize=4.5)
    wrong = ~sweep.valid
    axes.plot(x[wrong], y[wrong], linestyle="", marker="X", markersize=9, color=SERIOUS)
    axes.set_ylim(bottom=0.0)
    return axes


def _attainment(sweep: Sweep, report: Report, figure: Figure) -> None:
    axes = _points(sweep, sweep.offered, sweep.attainment, figure)
    axes.set(xlabel="offered rate, requests/s", ylabel="attainment", ylim=(0.0, 1.04))
    axes.set_xlim(left=0.0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.axhline(report.target, color=MUTED, linestyle="--", linewidth=1.1)
    place = (0.005, report.target)
    _note(axes, f"target {report.target:.0%}", place, (2, -3), ("axes fraction", "data"), va="top")
    search = report.search
    if search is not None and search.confirmed and search.rate is not None:
        _mark(axes, f"found {search.rate:.3g}/s", search.rate)


def _goodput(sweep: Sweep, figure: Figure) -> None:
    axes = _points(sweep, sweep.offered, sweep.goodput, figure)
    most = float(np.nanmax(sweep.offered))
    ideal = axes.plot(
        [0.0, most], [0.0, most], color=MUTED, linestyle="--", linewidth=1.1, zorder=1
    )
    ideal[0].set_label("all of them")
    axes.set(xlabel="offered rate, requests/s", ylabel="goodput, requests/s")
    axes.set_xlim(left=0.0)
    axes.legend(loc="upper left")


def _frontier(sweep: Sweep, worth: Floats, y_label: str, figure: Figure) -> None:
    axes = _points(sweep, sweep.one_user, worth, figure)
    axes.set(xlabel="tokens/s of one user (1 / TPOT p50)", ylabel=y_label)
    for rate, x, y in zip(sweep.rates, sweep.one_user, worth, strict=True):
        if np.isfinite(x) and np.isfinite(y):
            _note(axes, f"{rate:.3g}/s", (x, y), (5, 4))
    axes.margins(x=0.12, y=0.12)


def _cdf(
    curves: list[tuple[Group, list[float]]], x_label: str, bound_ms: float | None, figure: Figure
) -> None:
    """Draw the share of requests at or below each time, with the bound as a line."""
    axes = figure.subplots()
    for place, (group, times_ms) in enumerate(curves):
        # Shades of one hue where the groups are steps of one quantity, hues where they are kinds.
        hue, shade = (0, (place + 2) / (len(curves) + 1)) if group.is_step else (place, 1.0)
        axes.ecdf(times_ms, color=HUES[hue], alpha=shade, label=_short(group.label))
    axes.set(xlabel=x_label, ylabel="share of requests", ylim=(0.0, 1.02))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _time_axis(axes, np.sort(np.concatenate([times for _, times in curves])), bound_ms or 0.0)
    if bound_ms is not None:
        _mark(axes, f"bound {bound_ms:g} ms", bound_ms)
    if len(curves) > 1:
        axes.legend()


def _time_axis(axes: Axes, times_ms: Floats, bound_ms: float) -> None:
    """Make the axis logarithmic if a linear one would squeeze most values into its first tenth."""
    positive = times_ms[times_ms > 0]
    if not len(positive):
        return
    least, most = positive[0], max(positive[-1], bound_ms)
    if positive[-1] > 12 * positive[len(positive) // 2]:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(_number))
        axes.set_xlim(least * 0.9, most * 1.15)
    else:
        # Nothing is lost to the left of values that lie close together far from zero.
        axes.set_xlim(0.0 if least < 0.4 * most else 0.9 * least, most * 1.06)


def _gaps(gaps: Floats, bound_ms: float | None, figure: Figure) -> None:
    """Draw how often each gap occurred, on a logarithmic axis since the rare ones matter."""
    axes = figure.subplots()
    # A clock's resolution can make gaps of nothing, which a logarithmic axis cannot show.
    least = max(float(gaps.min()), float(gaps.max()) / 1e5, 1e-3)
    most = max(float(gaps.max()), least * 1.001)
    logarithmic = most > 12 * float(np.median(gaps))
    edges = (np.geomspace if logarithmic else np.linspace)(least, most, NUM_BARS + 1)
    counts, _ = np.histogram(np.clip(gaps, edges[0], edges[-1]), edges)
    axes.stairs(counts, edges, fill=True, color=HUES[0], alpha=0.85)
    if logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(_number))
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(_number))
    axes.set(xlabel="ITL, ms", ylabel="number of gaps")
    axes.set_ylim(bottom=0.7)
    axes.grid(False, axis="x")
    if bound_ms is not None and bound_ms <= 3 * most:
        _mark(axes, f"gap_max bound {bound_ms:g} ms", bound_ms, at_top=True)


def _stages(rows: list[tuple[str, Mapping[str, float]]], figure: Figure) -> None:
    """Draw where the time of requests goes, part by part, for each group of requests."""
    figure.set_figheight(max(HEIGHT, 1.3 + 0.42 * len(rows)))
    axes = figure.subplots()
    seen = {name for _, means in rows for name, time_ms in means.items() if time_ms > 0}
    places = range(len(rows))  # not labels: two runs may have the same one
    left = np.zeros(len(rows))
    for name in [*(name for name in STAGES if name in seen), *sorted(seen.difference(STAGES))]:
        widths = np.array([means.get(name, 0.0) for _, means in rows])
        axes.barh(places, widths, left=left, height=0.62, color=_stage_hue(name), label=name)
        left += widths
    for place, total in zip(places, left, strict=True):
        _note(axes, f"{total:,.0f} ms", (total, place), (4, -3))
    axes.set_yticks(places, [_short(label) for label, _ in rows])
    axes.tick_params(axis="y", labelcolor=INK)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("mean time, ms")
    axes.xaxis.set_major_formatter(FuncFormatter(_number))
    axes.grid(False, axis="y")
    handles, _ = axes.get_legend_handles_labels()
    columns = min(4 * round(figure.get_figwidth() / WIDTH), len(handles))
    # A legend fills column by column; the stages are to be read row by row.
    in_rows = [handle for start in range(columns) for handle in handles[start::columns]]
    axes.legend(handles=in_rows, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns)


def _stage_hue(name: str) -> str:
    """Return the hue of a stage, which is the same in every report."""
    if name == UNATTRIBUTED:
        return MUTED
    place = list(STAGES).index(name) if name in STAGES else len(STAGES) + len(name)
    return HUES[STAGE_HUES[place % len(STAGE_HUES)]]


def _timeline(shown: Timeline, faults: list[Injected], figure: Figure) -> None:
    """Draw requests in flight, tokens and good requests per second over the run, and its faults."""
    figure.set_figheight(5.4)
    flight, tokens, arrivals = figure.subplots(3, 1, sharex=True)
    flight.stairs(shown.in_flight, shown.edges_s, fill=True, color=HUES[0], alpha=0.22)
    flight.stairs(shown.in_flight, shown.edges_s, baseline=None, color=HUES[0], linewidth=1.4)
    tokens.stairs(shown.tokens_per_s, shown.edges_s, fill=True, color=HUES[2], alpha=0.75)
    below = np.zeros(len(shown.edges_s) - 1)
    for (kind, rates), hue in zip(shown.arrivals_per_s.items(), (*HUES[:2], SERIOUS), strict=True):
        if rates.any():
            bars = arrivals.stairs(below + rates, shown.edges_s, baseline=below, fill=True)
            bars.set(color=hue, alpha=0.85, label=kind)
            below = below + rates
    flight.set_title("requests in flight", loc="left")
    tokens.set_title("tokens per second", loc="left")
    arrivals.set_title("arrivals per second, by what became of them", loc="left")
    for axes in (flight, tokens, arrivals):
        axes.set_ylim(bottom=0.0)
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.grid(False, axis="x")
        for fault in faults:
            axes.axvline(fault.at_s, color=SERIOUS, linewidth=1.2)
            until_s = fault.resumed_s if fault.resumed_s is not None else fault.restarted_s
            if until_s is not None:
                axes.axvspan(fault.at_s, until_s, color=SERIOUS, alpha=0.10, linewidth=0)
    for fault in faults:
        flight.set_ylim(top=1.3 * max(1.0, *shown.in_flight))  # room for the name
        name, place = f"{fault.spec.kind} {fault.spec.pid}", (fault.at_s, 1.0)
        _note(flight, name, place, (4, -2), ("data", "axes fraction"), va="top", color=SERIOUS)
    arrivals.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3)
    arrivals.set_xlabel("seconds from the start of the schedule")
    arrivals.set_xlim(shown.edges_s[0], shown.edges_s[-1])


def _mark(axes: Axes, label: str, at: float, *, at_top: bool = False) -> None:
    """Draw a line across the drawing, with its label along it."""
    axes.axvline(at, color=MUTED, linestyle="--", linewidth=1.1)
    place, va = (at, 0.97 if at_top else 0.03), "top" if at_top else "bottom"
    _note(axes, label, place, (-3, 0), ("data", "axes fraction"), rotation=90, ha="right", va=va)


def _note(
    axes: Axes,
    text: str,
    place: tuple[float, float],
    offset: tuple[float, float],
    coordinates: str | tuple[str, str] = "data",
    **style: str | float,
) -> None:
    """Write a small text, `offset` points from `place`."""
    style = {"color": MUTED, "fontsize": 8.5, **style}
    axes.annotate(text, place, offset, coordinates, "offset points", None, None, **style)


def _number(value: float, _position: int | None) -> str:
    """Return 10,000 rather than 10 to the power of 4."""
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"


def _short(label: str) -> str:
    """Return a label that leaves room for the drawing."""
    return label if len(label) <= MAX_LABEL else f"{label[: MAX_LABEL - 1]}…"
