"""The curves of a report as numbers, and that they become well-formed drawings."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from baton.bench.figures.metrics import Bounds, summarise
from baton.bench.figures.validity import invalid
from baton.bench.records import Outcome, Record
from baton.bench.report.charts import MAX_BINS, MAX_CURVES, Chart, Curve, Mark, charts, groups
from baton.bench.report.document import Report, Run
from tests.support.bench_records import Scene, answered, failed, load, report_of, scene_run

SHORT = Scene(duration_s=10.0)
DISTRIBUTIONS = ["Time to first token", "Time per output token", "Gaps between tokens"]


def run_of(records: list[Record], bounds: Bounds | None = None) -> Run:
    return Run(label="run", summary=summarise(load(records), bounds=bounds), records=records)


def sweep(*rates: float, **options: Bounds | None) -> Report:
    runs = [
        scene_run(Scene(rate=rate, duration_s=10.0), f"{rate:g}/s", **options) for rate in rates
    ]
    return report_of(runs, command="sweep")


def chart(report: Report, title: str) -> Chart:
    return next(one for one in charts(report) if one.title.startswith(title))


def points(curve: Curve) -> tuple[list[float], list[float]]:
    return curve.x.tolist(), curve.y.tolist()


def test_a_distribution_rises_to_one_over_answered_measured_requests() -> None:
    records = [answered(index, float(index), [0.001 * (index + 1)]) for index in range(4)]
    warm_up = answered(4, -1.0, [9.0])
    warm_up.warm_up = True
    found = chart(
        report_of([run_of([warm_up, *records, failed(5, 0.0, Outcome.REFUSED)])]), "Time to first"
    )
    x, y = points(found.curves[0])
    assert x == pytest.approx([1.0, 1.0, 2.0, 3.0, 4.0])
    assert y == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert not found.log_x


def test_gaps_are_counted_per_token_and_rare_long_ones_stay_visible() -> None:
    records = [answered(0, 0.0, [0.1, 0.11, 0.12, 0.13]), answered(1, 1.0, [0.1, 0.6])]
    found = chart(report_of([run_of(records, Bounds(gap_max_ms=200))]), "Gaps")
    assert points(found.curves[0])[0][1:] == pytest.approx([10.0, 10.0, 10.0, 500.0])
    assert found.log_x
    assert found.marks == [Mark(200, "bound 200 ms")]
    nothing = chart(report_of([run_of([answered(0, 0.0, [0.1, 0.1, 0.1])])]), "Gaps")
    assert "<svg" in nothing.svg(), "a clock's resolution can make gaps of nothing"


def test_over_time_every_request_counts_once() -> None:
    records = [
        answered(0, 0.2, [0.1, 0.2, 1.3]),
        answered(1, 1.0, [0.5, 0.51]),
        failed(2, 2.5, Outcome.TRUNCATED),
    ]
    run = run_of(records, Bounds(ttft_ms=300))
    report = report_of([run])
    report.bounds = Bounds(ttft_ms=300)
    found = chart(report, "Requests over time")
    assert {curve.label: points(curve)[1][1:] for curve in found.curves} == {
        "met all bounds": [1.0, 0.0, 0.0],
        "answered, missed a bound": [0.0, 1.0, 0.0],
        "failed": [0.0, 0.0, 1.0],
    }
    assert found.curves[0].x.tolist() == [0.0, 1.0, 2.0, 3.0]
    long = run_of([answered(at, 10.0 * at, [0.1]) for at in range(100)])
    (curve,) = chart(report_of([long]), "Requests over time").curves
    assert len(curve.x) <= MAX_BINS + 1
    bin_s = curve.x[1] - curve.x[0]
    assert curve.y[1:].sum() * bin_s == pytest.approx(100)


def test_rounds_of_an_arm_are_one_curve_and_of_many_rates_some_are_shown() -> None:
    runs = [scene_run(SHORT, f"{arm}, round {place}") for place in (1, 2) for arm in ("old", "new")]
    for run in runs:
        run.arm, run.round = run.label[:3], int(run.label[-1])
    found = groups(report_of(runs, command="compare"))
    assert list(found) == ["old", "new"]
    num_answered = runs[0].summary.outcomes["answered"] + runs[2].summary.outcomes["answered"]
    assert len(found["old"]) == num_answered
    rates = sweep(*(float(rate) for rate in range(12, 0, -1)))
    labels = list(groups(rates))
    assert (len(labels), labels[0], labels[-1]) == (MAX_CURVES, "1/s", "12/s")
    assert "At most 8 of the runs are shown" in chart(rates, "Time to first").caption


def test_points_are_in_the_order_of_their_rates_and_an_invalid_one_is_marked() -> None:
    report = sweep(4.0, 1.0, 2.0)
    report.runs[0].problems = [invalid("the client was late")]
    assert list(groups(report)) == ["1/s", "2/s", "INVALID 4/s"]
    by_rate = sorted(report.runs, key=lambda run: run.rate or 0.0)
    found = chart(report, "Attainment")
    assert points(found.curves[0]) == (
        [run.summary.offered_rate for run in by_rate],
        [run.summary.attainment for run in by_rate],
    )
    offered = report.runs[0].summary.offered_rate
    assert offered is not None
    assert found.marks == [Mark(offered, "INVALID")]
    report.target = 0.9  # asked for by a search only
    assert "--attainment 0.9" in [curve.label for curve in chart(report, "Attainment").curves]


def test_a_report_has_the_charts_that_its_records_allow() -> None:
    bare = run_of([failed(0, 0.0, Outcome.REFUSED), answered(1, 0.1, [0.1])])
    over_time = "Requests over time, "
    for report, expected in (
        (report_of([scene_run(SHORT, "one")]), [*DISTRIBUTIONS, f"{over_time}one"]),
        (sweep(2.0, 4.0), ["Attainment against rate", "Goodput against rate", *DISTRIBUTIONS]),
        (sweep(2.0, 4.0, bounds=None), ["Throughput against rate", *DISTRIBUTIONS]),
        (report_of([bare]), [DISTRIBUTIONS[0], f"{over_time}run"]),
        (report_of([]), []),
    ):
        assert [one.title for one in charts(report)] == expected
        for one in charts(report):
            ElementTree.fromstring(one.svg())


@pytest.mark.parametrize("log_x", [False, True])
def test_a_chart_is_small_well_formed_and_within_its_frame(log_x: bool) -> None:
    x = np.sort(np.random.default_rng(1).lognormal(5, 1.0, 20_000))
    y = np.linspace(0, 1, len(x))
    evil = 'a</text><script>$x^ & "b"'
    curves = [
        Curve(evil, x, y, "c0", is_steps=True),
        Curve("line", x, y, "c1"),
        Curve("none", np.array([5.0, np.nan]), np.array([np.nan, 1.0]), "bad"),
    ]
    marks = [Mark(300.0, evil)]
    found = Chart(evil, "", evil, evil, curves, marks, log_x=log_x, is_share=True)
    text = found.svg()
    assert len(text) < 60_000
    assert text == found.svg()
    root = ElementTree.fromstring(text)
    assert root.get("aria-label") == evil
    assert "<script" not in text
    ticks = [one.text for one in root.iter("text")]
    assert {"0 %", "100 %", evil} <= set(ticks)
    paths = [one for one in root.iter("path") if one.get("class") in ("c0", "c1")]
    for path in paths:
        numbers = re.findall(r"-?[0-9.]+", path.get("d") or "")
        assert len(numbers) > 100
        assert all(0 <= float(number) <= 640 for number in numbers)
