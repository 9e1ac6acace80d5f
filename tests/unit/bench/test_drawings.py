"""The curves of a report as numbers, and that they become drawings, for a page and as images."""

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.patches import Rectangle

from baton.bench.figures.faults import FaultSpec, Injected
from baton.bench.figures.metrics import Bounds, summarise
from baton.bench.records import LoadResult, Outcome, Record, Stage
from baton.bench.report.document import Report, Run
from baton.bench.report.drawings import Drawing, drawings
from baton.bench.report.pages import PALETTE
from baton.bench.report.series import (
    MAX_BINS,
    MAX_CURVES,
    Group,
    Sweep,
    gaps_ms,
    groups,
    stage_rows,
    timeline,
)
from tests.support.bench_records import Scene, answered, failed, invalid, report_of, scene_run

SHORT = Scene(duration_s=10.0)


def run_of(records: list[Record], bounds: Bounds | None = None) -> Run:
    result = LoadResult(records, [], max(record.end_s for record in records), "")
    return Run(label="run", summary=summarise(result, bounds=bounds), records=records)


def sweep(*rates: float, **options: Bounds | None) -> Report:
    runs = [
        scene_run(Scene(rate=rate, duration_s=10.0), f"{rate:g}/s", **options) for rate in rates
    ]
    return report_of(runs, command="sweep")


def drawing(report: Report, name: str) -> Drawing:
    return next(one for one in drawings(report) if one.name == name)


def names(report: Report) -> list[str]:
    return [one.name for one in drawings(report)]


def test_a_cdf_rises_to_one_over_answered_measured_requests() -> None:
    records = [answered(index, float(index), [0.001 * (index + 1)]) for index in range(4)]
    warm_up = answered(4, -1.0, [9.0])
    warm_up.warm_up = True
    report = report_of([run_of([warm_up, *records, failed(5, 0.0, Outcome.REFUSED)])])
    (axes,) = drawing(report, "ttft-cdf").figure().axes
    x, y = axes.lines[0].get_xdata(), axes.lines[0].get_ydata()
    assert np.asarray(x) == pytest.approx([1.0, 1.0, 2.0, 3.0, 4.0])
    assert np.asarray(y) == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])


def test_the_page_of_a_long_load_stays_small() -> None:
    rng = np.random.default_rng(1)
    records = [
        answered(index, float(index), [float(ttft_s)])
        for index, ttft_s in enumerate(rng.lognormal(-2, 0.5, 20_000))
    ]
    assert len(drawing(report_of([run_of(records)]), "ttft-cdf").svg()) < 60_000


def test_the_histogram_counts_a_gap_per_token_even_gaps_of_nothing() -> None:
    records = [answered(0, 0.0, [0.1, 0.11, 0.12, 0.13]), answered(1, 1.0, [0.1, 0.6])]
    gaps = gaps_ms([Group("all", [run_of(records)])])
    assert sorted(gaps) == pytest.approx([10.0, 10.0, 10.0, 500.0])
    report = report_of([run_of(records)])
    assert drawing(report, "itl").figure().axes[0].get_xscale() == "log"
    none = report_of([run_of([answered(0, 0.0, [0.1, 0.1, 0.1])])])
    (axes,) = drawing(none, "itl").figure().axes
    assert sum(axes.patches[0].get_data().values) == 2  # type: ignore[attr-defined]


def test_a_timeline_counts_every_request_and_token_once() -> None:
    records = [
        answered(0, 0.2, [0.1, 0.2, 1.3]),
        answered(1, 1.0, [0.5, 0.51]),
        failed(2, 2.5, Outcome.TRUNCATED),
    ]
    shown = timeline(run_of(records), Bounds(ttft_ms=300))
    assert shown.edges_s.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert shown.tokens_per_s.tolist() == [2.0, 3.0, 0.0]
    assert [each.tolist() for each in shown.arrivals_per_s.values()] == [
        [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0],
    ]  # fmt: skip
    assert shown.in_flight == pytest.approx([0.8, 0.5 + 0.51, 0.02])
    long = timeline(run_of([answered(at, 10.0 * at, [0.1]) for at in range(100)]), None)
    assert len(long.in_flight) <= MAX_BINS
    assert sum(long.arrivals_per_s["answered"]) * long.bin_s == pytest.approx(100)


def test_stages_are_in_the_order_of_a_request_and_sum_to_its_time() -> None:
    records = [answered(index, float(index), [0.1, 0.5]) for index in range(10)]
    for record in records:
        record.stages = [Stage("queue", 0.02), Stage("prefill", 0.08), Stage("first_step", 0.0),
                         Stage("decoding", 0.4)]  # fmt: skip
    rows = stage_rows([Group("all", [run_of(records)])])
    assert rows[0][0] == "all"
    assert all(sum(means.values()) == pytest.approx(500.0) for _, means in rows)
    (axes,) = drawing(report_of([run_of(records)]), "stages").figure().axes
    assert axes.get_legend_handles_labels()[1] == ["queue", "prefill", "decoding"]


def test_runs_of_one_label_have_a_bar_each_and_long_labels_leave_room(tmp_path: Path) -> None:
    label = "4/s, confirm " * 20
    runs = [scene_run(Scene(duration_s=10.0, seed=seed), label) for seed in range(3)]
    shown = drawing(report_of(runs), "stages")
    bars = [bar for bar in shown.figure().axes[0].patches if isinstance(bar, Rectangle)]
    assert {round(bar.get_y() + bar.get_height() / 2) for bar in bars} == {0, 1, 2}
    shown.png(tmp_path / "one.png")  # matplotlib's warnings are errors


def test_rounds_of_an_arm_are_one_curve_and_of_many_rates_some_are_shown() -> None:
    runs = [scene_run(SHORT, f"{arm}, round {place}") for place in (1, 2) for arm in ("old", "new")]
    for run in runs:
        run.arm, run.round = run.label[:3], int(run.label[-1])
    arms = report_of(runs, command="compare")
    assert [(group.label, len(group.runs)) for group in groups(arms)] == [("old", 2), ("new", 2)]
    assert "attainment" not in names(arms)
    rates = sweep(*(float(rate) for rate in range(1, 13)))
    labels = [group.label for group in groups(rates)]
    assert (len(labels), labels[0], labels[-1]) == (MAX_CURVES, "1/s", "12/s")
    shown = drawing(rates, "ttft-cdf")
    assert "8 of the runs are shown" in shown.caption
    shades = [line.get_alpha() or 0.0 for line in shown.figure().axes[0].lines[:MAX_CURVES]]
    assert shades == sorted(set(shades)), "steps of one quantity are shades of one hue"


def test_points_are_in_the_order_of_their_rates_and_an_invalid_one_is_a_cross() -> None:
    report = sweep(4.0, 1.0, 2.0)
    report.runs[0].problems = [invalid("the client was late")]
    found = Sweep(report)
    assert (found.rates, found.valid.tolist()) == ([1.0, 2.0, 4.0], [True, True, False])
    assert [group.label for group in groups(report)] == ["1/s", "2/s", "INVALID 4/s"]
    points, crosses = drawing(report, "attainment").figure().axes[0].lines[:2]
    assert len(np.asarray(points.get_xdata())) == 3
    assert np.asarray(crosses.get_xdata()).tolist() == [report.runs[0].summary.offered_rate]


def test_a_report_has_the_drawings_that_its_records_allow() -> None:
    single = ["ttft-cdf", "tpot-cdf", "itl", "stages", "timeline"]
    bare = run_of([failed(0, 0.0, Outcome.REFUSED), answered(1, 0.1, [0.1])])
    unstaged = scene_run(Scene(duration_s=10.0, stages=False), "one")
    for report, expected in (
        (report_of([scene_run(SHORT, "one")]), single),
        (report_of([unstaged]), ["ttft-cdf", "tpot-cdf", "itl", "timeline"]),
        (sweep(2.0, 4.0), ["attainment", "goodput", "frontier", *single[:-1]]),
        (sweep(2.0, 4.0, bounds=None), ["frontier", *single[:-1]]),
        (report_of([bare]), ["ttft-cdf", "timeline"]),
        (report_of([]), []),
    ):
        assert names(report) == expected
        halves = [one for one in drawings(report) if not one.wide]
        assert len(halves) % 2 == 0, "no drawing is alone in half a row"


def test_every_run_with_a_fault_has_a_timeline_with_its_mark() -> None:
    runs = [scene_run(SHORT, "one"), scene_run(SHORT, "two")]
    for run in runs:
        run.faults = [Injected(FaultSpec("stop", 4711, 3.0, 2.0), 3.0, resumed_s=5.0)]
    report = report_of(runs, command="fault")
    assert names(report)[-2:] == ["timeline-1", "timeline-2"]
    shown = drawings(report)[-1]
    assert "stop 4711" in shown.svg()
    spans = [bar for bar in shown.figure().axes[0].patches if isinstance(bar, Rectangle)]
    assert [(bar.get_x(), bar.get_width()) for bar in spans] == [(3.0, 2.0)]


def test_a_drawing_takes_its_colours_from_the_page_and_holds_well_formed_text() -> None:
    label = 'a</text><script>$x^ & "b"'
    report = sweep(2.0, 4.0)
    for run in report.runs:
        run.label = label
    for one in drawings(report):
        one.title = label
        text = one.svg()
        assert text == one.svg()
        root = ElementTree.fromstring(text)
        assert root.get("viewBox")
        assert root.get("width") is None
        assert root.get("aria-label") == label
        assert "<script" not in text
        assert not [light for light, _ in PALETTE.values() if light in text]
        assert set(re.findall(r"var\((--\w+)\)", text)) <= set(PALETTE)
        ids = re.findall(r'\bid="([^"]+)"', text)
        assert all(name.startswith(f"{one.name}-") for name in ids)
        assert set(re.findall(r'(?:href="|url\()#([^")]+)', text)) <= set(ids)
    lights = [light for light, _ in PALETTE.values()]
    assert len(set(lights)) == len(lights), "a colour is the name of its variable"


def test_an_image_says_if_it_is_not_to_be_used(tmp_path: Path) -> None:
    (first, *_) = drawings(report_of([scene_run(SHORT, "one")]))
    for name, usable in (("good.png", True), ("bad.png", False)):
        first.png(tmp_path / name, usable=usable)
    good, bad = ((tmp_path / name).read_bytes() for name in ("good.png", "bad.png"))
    assert good.startswith(b"\x89PNG\r\n")
    assert good != bad
