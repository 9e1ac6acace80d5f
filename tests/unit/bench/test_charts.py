"""The curves of a report as numbers, and that they become well-formed drawings."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from baton.bench.figures.metrics import Bounds, summarise
from baton.bench.records import Outcome, Record
from baton.bench.report.charts import Chart, Curve, charts
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


def test_a_report_has_the_charts_that_its_records_allow() -> None:
    bare = run_of([failed(0, 0.0, Outcome.REFUSED), answered(1, 0.1, [0.1])])
    for report, expected in (
        (report_of([scene_run(SHORT, "one")]), DISTRIBUTIONS),
        (sweep(2.0, 4.0), ["Attainment against rate", "Goodput against rate", *DISTRIBUTIONS]),
        (sweep(2.0, 4.0, bounds=None), ["Throughput against rate", *DISTRIBUTIONS]),
        (report_of([bare]), DISTRIBUTIONS[:1]),
        (report_of([]), []),
    ):
        assert [one.title for one in charts(report)] == expected
        for one in charts(report):
            ElementTree.fromstring(one.svg())


def test_a_chart_is_small_well_formed_and_within_its_frame() -> None:
    x = np.sort(np.random.default_rng(1).lognormal(5, 1.0, 20_000))
    y = np.linspace(0, 1, len(x))
    evil = 'a</text><script>$x^ & "b"'
    curves = [
        Curve(evil, x, y, "c0", is_steps=True),
        Curve("line", x, y, "c1"),
        Curve("none", np.array([5.0, np.nan]), np.array([np.nan, 1.0]), "bad"),
    ]
    marks = ((300.0, evil),)
    found = Chart(evil, "", evil, evil, curves, marks, is_share=True)
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
