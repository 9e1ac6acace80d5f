"""The curves of a report as numbers, and that they become drawings, for a page and as images."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.patches import Rectangle

from baton.bench.figures.faults import FaultSpec, Injected
from baton.bench.figures.metrics import PRESETS, Bounds, summarise
from baton.bench.records import LoadResult, Outcome, Record, Stage
from baton.bench.report.document import Report, Run
from baton.bench.report.figures import drawings
from baton.bench.report.palette import DARK, LIGHT, VARIABLES
from baton.bench.report.plots import png, stages, svg
from baton.bench.report.series import (
    MAX_BINS,
    MAX_CURVES,
    MAX_POINTS,
    Group,
    by_rate,
    cdf,
    groups,
    itl_histogram,
    stage_stack,
    timeline,
)
from tests.support.bench_records import Scene, answered, failed, invalid, report_of, scene_run

SHORT = Scene(duration_s=10.0)


def run_of(records: list[Record], bounds: Bounds | None = None, label: str = "run") -> Run:
    result = LoadResult(records, [], max(record.end_s for record in records), "")
    return Run(label=label, summary=summarise(result, bounds=bounds), records=records)


def sweep(*rates: float) -> Report:
    runs = []
    for rate in rates:
        scene = Scene(rate=rate, duration_s=10.0)
        runs.append(scene_run(scene, f"{rate:g}/s"))
    return report_of(runs, command="sweep")


def names(report: Report) -> list[str]:
    return [drawing.name for drawing in drawings(report)]


def test_a_cdf_rises_to_one_at_the_largest_value() -> None:
    records = [answered(index, float(index), [0.001 * (index + 1)]) for index in range(4)]
    curve = cdf(Group("all", [run_of(records)]), lambda timing: timing.ttft_ms)
    assert curve is not None
    assert curve.x == pytest.approx([1.0, 1.0, 2.0, 3.0, 4.0])
    assert curve.y == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])


def test_a_long_cdf_is_thinned_but_keeps_its_tail() -> None:
    records = [answered(index, float(index), [0.001 * (index + 1)]) for index in range(5000)]
    curve = cdf(Group("all", [run_of(records)]), lambda timing: timing.ttft_ms)
    assert curve is not None
    assert len(curve.x) <= MAX_POINTS + 1
    assert curve.x[-100:] == pytest.approx([float(value) for value in range(4901, 5001)])
    assert curve.x == sorted(curve.x)


def test_failed_and_warm_up_requests_are_in_no_curve() -> None:
    warm_up = answered(0, -1.0, [9.0])
    warm_up.warm_up = True
    records = [warm_up, failed(1, 0.0, Outcome.REFUSED), answered(2, 0.5, [0.25])]
    curve = cdf(Group("all", [run_of(records)]), lambda timing: timing.ttft_ms)
    assert curve is not None
    assert curve.x == pytest.approx([250.0, 250.0])


def test_the_histogram_counts_a_gap_per_token() -> None:
    records = [answered(0, 0.0, [0.1, 0.11, 0.12, 0.13]), answered(1, 1.0, [0.1, 0.6])]
    shown = itl_histogram([Group("all", [run_of(records)])])
    assert shown is not None
    assert sum(shown.counts) == 4
    assert shown.logarithmic
    assert (shown.edges[0], shown.edges[-1]) == pytest.approx((10.0, 500.0))


def test_gaps_of_nothing_do_not_break_the_histogram() -> None:
    shown = itl_histogram([Group("all", [run_of([answered(0, 0.0, [0.1, 0.1, 0.1])])])])
    assert shown is not None
    assert sum(shown.counts) == 2


def test_a_timeline_counts_every_request_and_token_once() -> None:
    records = [
        answered(0, 0.2, [0.1, 0.2, 1.3]),
        answered(1, 1.0, [0.5, 0.51]),
        failed(2, 2.5, Outcome.TRUNCATED),
    ]
    shown = timeline(run_of(records), Bounds(ttft_ms=300))
    assert shown is not None
    assert shown.at_s == [0.0, 1.0, 2.0]
    assert shown.tokens_per_s == [2.0, 3.0, 0.0]
    assert shown.good_per_s == [1.0, 0.0, 0.0]
    assert shown.missed_per_s == [0.0, 1.0, 0.0]
    assert shown.failed_per_s == [0.0, 0.0, 1.0]
    assert shown.in_flight == pytest.approx([0.8, 0.5 + 0.51, 0.02])


def test_a_long_run_has_longer_bins() -> None:
    records = [answered(index, 10.0 * index, [0.1]) for index in range(100)]
    shown = timeline(run_of(records), None)
    assert shown is not None
    assert len(shown.at_s) <= MAX_BINS
    assert sum(shown.good_per_s) * shown.bin_s == pytest.approx(100)


def test_runs_of_one_label_have_a_bar_each() -> None:
    runs = [scene_run(Scene(duration_s=10.0, seed=seed), "4/s, confirm") for seed in range(3)]
    stack = stage_stack(groups(report_of(runs)))
    assert stack is not None
    bars = [bar for bar in stages(stack).axes[0].patches if isinstance(bar, Rectangle)]
    middles = {round(bar.get_y() + bar.get_height() / 2) for bar in bars}
    assert middles == {0, 1, 2}


def test_stages_are_in_the_order_of_a_request_and_sum_to_its_time() -> None:
    records = []
    for index in range(10):
        record = answered(index, float(index), [0.1, 0.5])
        record.stages = [
            Stage("queue", 0.02),
            Stage("prefill", 0.08),
            Stage("first_step", 0.0),
            Stage("decoding", 0.4),
        ]
        records.append(record)
    stack = stage_stack([Group("all", [run_of(records)])])
    assert stack is not None
    assert stack.rows[0] == "all"
    assert stack.names == ["queue", "prefill", "decoding"]
    assert all(sum(row) == pytest.approx(500.0) for row in stack.values)


def test_rounds_of_an_arm_are_one_curve() -> None:
    runs = []
    for number in (1, 2):
        for arm in ("old", "new"):
            run = scene_run(SHORT, f"{arm}, round {number}")
            run.arm, run.round = arm, number
            runs.append(run)
    found = groups(report_of(runs, command="compare"))
    assert [group.label for group in found] == ["old", "new"]
    assert [len(group.runs) for group in found] == [2, 2]


def test_of_many_rates_some_curves_are_shown_the_first_and_last_among_them() -> None:
    found = groups(sweep(*(float(rate) for rate in range(1, 13))))
    assert len(found) == MAX_CURVES
    assert (found[0].label, found[-1].label) == ("1/s", "12/s")
    assert all(group.ordered for group in found)


def test_points_are_in_the_order_of_their_rates_and_know_if_they_are_valid() -> None:
    report = sweep(4.0, 1.0, 2.0)
    report.runs[0].problems = [invalid("the client was late")]
    (points,) = by_rate(report, lambda run: run.summary.attainment)
    assert points.notes == ["1/s", "2/s", "4/s"]
    assert points.valid == [True, True, False]
    assert [group.label for group in groups(report)] == ["1/s", "2/s", "INVALID 4/s"]


def test_a_report_has_the_drawings_that_its_records_allow() -> None:
    single = ["ttft-cdf", "tpot-cdf", "itl", "stages", "timeline"]
    assert names(report_of([scene_run(SHORT, "one")])) == single
    assert names(sweep(2.0, 4.0)) == ["attainment", "goodput", "frontier", *single[:-1]]
    bare = report_of([run_of([failed(0, 0.0, Outcome.REFUSED), answered(1, 0.1, [0.1])])])
    assert names(bare) == ["ttft-cdf", "timeline"]
    assert names(report_of([])) == []


def test_without_bounds_there_is_no_attainment_to_draw() -> None:
    runs = [
        scene_run(Scene(rate=rate, duration_s=10.0), f"{rate:g}/s", bounds=None)
        for rate in (2.0, 4.0)
    ]
    assert names(report_of(runs))[:1] == ["frontier"]


def test_every_run_with_a_fault_has_a_timeline_with_its_mark() -> None:
    runs = [scene_run(SHORT, "one"), scene_run(SHORT, "two")]
    for run in runs:
        run.faults = [Injected(FaultSpec("stop", 4711, 3.0, 2.0), 3.0, resumed_s=5.0)]
    report = report_of(runs, command="fault")
    assert names(report)[-2:] == ["timeline-1", "timeline-2"]
    shown = timeline(runs[0], PRESETS["chat"])
    assert shown is not None
    (mark,) = shown.faults
    assert (mark.label, mark.at, mark.until) == ("stop 4711", 3.0, 5.0)
    assert "stop 4711" in svg(drawings(report)[-1].figure, name="t", title="t")


def test_a_drawing_takes_its_colours_from_the_page_and_holds_well_formed_text() -> None:
    label = 'a</text><script>$x^ & "b"'
    report = sweep(2.0, 4.0)
    for run in report.runs:
        run.label = label
    for drawing in drawings(report):
        text = svg(drawing.figure, name=drawing.name, title=label)
        root = ElementTree.fromstring(text)
        assert root.get("viewBox")
        assert root.get("width") is None
        assert root.get("aria-label") == label
        assert "<script" not in text
        assert not [colour for colour in VARIABLES if colour in text]
        assert set(re.findall(r"var\((--\w+)\)", text)) <= set(LIGHT)
        ids = re.findall(r'\bid="([^"]+)"', text)
        assert all(one.startswith(f"{drawing.name}-") for one in ids)
        assert set(re.findall(r'(?:href="|url\()#([^")]+)', text)) <= set(ids)


def test_equal_reports_give_equal_drawings() -> None:
    report = report_of([scene_run(SHORT, "one")])
    first, second = (
        [svg(one.figure, name=one.name, title=one.title) for one in drawings(report)]
        for _ in range(2)
    )
    assert first == second


def test_an_image_says_if_it_is_not_to_be_used(tmp_path: Path) -> None:
    (drawing, *_) = drawings(report_of([scene_run(SHORT, "one")]))
    before = svg(drawing.figure, name="one", title="one")
    images = []
    for usable in (True, False):
        png(drawing, tmp_path / "one.png", usable=usable)
        images.append((tmp_path / "one.png").read_bytes())
    assert all(image.startswith(b"\x89PNG\r\n") for image in images)
    assert images[0] != images[1]
    assert svg(drawing.figure, name="one", title="one") == before


def test_no_drawing_is_alone_in_half_a_row() -> None:
    bare = scene_run(Scene(duration_s=10.0, stages=False), "one")
    for report in (report_of([bare]), report_of([scene_run(SHORT, "one")]), sweep(2.0, 4.0)):
        halves = [drawing.name for drawing in drawings(report) if not drawing.wide]
        assert len(halves) % 2 == 0


def test_long_labels_leave_room_for_the_drawing(tmp_path: Path) -> None:
    report = sweep(2.0, 4.0)
    for run in report.runs:
        run.label = "a very long label " * 20
    for drawing in drawings(report):
        if drawing.name in ("stages", "ttft-cdf"):
            png(drawing, tmp_path / "one.png")  # matplotlib's warnings are errors


def test_both_schemes_have_every_colour_and_no_two_are_equal() -> None:
    assert LIGHT.keys() == DARK.keys()
    assert len(VARIABLES) == len(LIGHT)
