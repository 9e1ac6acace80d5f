"""Which drawings a report has, each with a title and a sentence on how to read it.

`html.py` puts them into the page, `writing.py` into PNG files. Importing this loads matplotlib.
"""

from operator import attrgetter

from baton.bench.figures.metrics import Bounds
from baton.bench.report import plots
from baton.bench.report.document import Report, Run
from baton.bench.report.plots import Drawing
from baton.bench.report.series import (
    MAX_CURVES,
    Curve,
    Group,
    Histogram,
    Mark,
    Stack,
    by_rate,
    cdf,
    groups,
    itl_histogram,
    per_user,
    stage_stack,
    timeline,
)
from baton.bench.report.wording import limit

MAX_TIMELINES = 4


def drawings(report: Report) -> list[Drawing]:
    """In the order of the page; what the records cannot show is left out."""
    found = groups(report)
    bounds = report.bounds or Bounds()
    narrow = [*_against_rate(report), *_cdfs(found, bounds, len(report.runs))]
    gaps, stack = itl_histogram(found), stage_stack(found)
    # A page has two columns: what would be alone in a row fills it.
    if gaps is not None:
        narrow.append(_itl(gaps, bounds, wide=stack is None and len(narrow) % 2 == 0))
    if stack is not None:
        narrow.append(_stages(stack, len(found), wide=len(narrow) % 2 == 0))
    return [*narrow, *_timelines(report)]


def _against_rate(report: Report) -> list[Drawing]:
    """Only where at least two rates were run."""
    if len({run.rate or run.summary.offered_rate for run in report.runs}) < 2 or report.comparison:
        return []
    search = report.search
    found = search.rate if search is not None and search.confirmed else None
    drawn = []
    if attained := by_rate(report, lambda run: run.summary.attainment):
        figure = plots.against_rate(
            attained, y_label="attainment", target=report.target, found=found
        )
        caption = "Share of all arrivals that met every bound. A cross marks an invalid run."
        drawn.append(Drawing("attainment", "Attainment against rate", caption, figure))
    if good := by_rate(report, lambda run: run.summary.goodput):
        caption = "Requests per second that met every bound; the dashed line would be all of them."
        drawn.append(Drawing("goodput", "Goodput against rate", caption, plots.goodput(good)))
    if each := per_user(report, _worth):
        bounded = report.bounds is not None
        y_label = "goodput, requests/s" if bounded else "tokens/s for all users"
        caption = "What all get against what one gets. Up and to the right is better."
        title = "Goodput frontier" if bounded else "Throughput frontier"
        drawn.append(Drawing("frontier", title, caption, plots.frontier(each, y_label=y_label)))
    return drawn


def _worth(run: Run) -> float | None:
    summary = run.summary
    return summary.tokens_per_s if summary.bounds is None else summary.goodput


def _cdfs(found: list[Group], bounds: Bounds, num_runs: int) -> list[Drawing]:
    drawn = []
    chosen = f" {MAX_CURVES} of the runs are shown." if num_runs > MAX_CURVES == len(found) else ""
    asked = (
        ("ttft", "Time to first token", "TTFT, ms", "From the intended arrival"),
        ("tpot", "Time per output token", "TPOT, ms", "After the first token, a mean per request"),
    )
    for name, title, x_label, what in asked:
        figure_of = attrgetter(f"{name}_ms")
        curves = [cdf(group, figure_of) for group in found]
        shown: list[Curve] = [curve for curve in curves if curve is not None]
        if shown:
            figure = plots.cdf(shown, x_label=x_label, bounds=_marks(figure_of(bounds)))
            caption = f"{what}, of answered requests.{chosen}"
            drawn.append(Drawing(f"{name}-cdf", title, caption, figure))
    return drawn


def _marks(bound_ms: float | None) -> list[Mark]:
    return [] if bound_ms is None else [Mark(f"bound {limit(bound_ms)}", bound_ms)]


def _itl(gaps: Histogram, bounds: Bounds, *, wide: bool) -> Drawing:
    caption = "All gaps between tokens; the rare long ones are what a reader of a stream notices."
    marks = [Mark(f"gap_max {mark.label}", mark.at) for mark in _marks(bounds.gap_max_ms)]
    inside = [mark for mark in marks if mark.at <= 3 * gaps.edges[-1]]
    figure = plots.histogram(gaps, x_label="ITL, ms", marks=inside, wide=wide)
    return Drawing("itl", "Gaps between tokens", caption, figure, wide=wide)


def _stages(stack: Stack, num_groups: int, *, wide: bool) -> Drawing:
    of = "by how long the requests took" if num_groups == 1 else "for each run"
    caption = f"Mean time in each stage, {of}. The stages sum to e2e."
    figure = plots.stages(stack, wide=wide)
    return Drawing("stages", "Where the time goes", caption, figure, wide=wide)


def _timelines(report: Report) -> list[Drawing]:
    """Of the runs with faults, else of a single run: many of them would say little."""
    chosen = [run for run in report.runs if run.faults] or report.runs[:1]
    if not any(run.faults for run in chosen) and len(report.runs) > 1:
        return []
    drawn = []
    for place, run in enumerate(chosen[:MAX_TIMELINES], 1):
        shown = timeline(run, report.bounds)
        if shown is not None:
            suffix = f"-{place}" if len(chosen) > 1 else ""
            title = "Timeline" if len(chosen) == 1 else f"Timeline of {run.label}"
            caption = f"Bins of {shown.bin_s:g} s. A request counts where it arrived."
            figure = plots.timeline(shown)
            drawn.append(Drawing(f"timeline{suffix}", title, caption, figure, wide=True))
    return drawn
