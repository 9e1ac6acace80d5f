"""What runs say of the rate that was asked for, in sweeps and searches."""

import re

import msgspec
import pytest

from baton.bench.client.target import Target
from baton.bench.console import shown
from baton.bench.experiments import Bench, Case, OnStart, judge
from baton.bench.figures.metrics import PRESETS
from baton.bench.figures.search import Ending, RateSearch, SearchOptions
from baton.bench.plan.arrivals import realised
from baton.bench.plan.workloads import Plan
from baton.bench.records import LoadResult, Outcome, Planned
from baton.bench.report.document import Run
from baton.bench.report.headlines import headlines
from baton.bench.searching import observe, with_offered
from baton.bench.settings import LoadSettings
from baton.bench.sweep import add_run
from tests.support.bench_records import answered, report_of


def offering(rate: float, asked: float) -> Case:
    at = [index / rate for index in range(100)]
    requests = [Planned(index, at_s, 2, (1,)) for index, at_s in enumerate(at)]
    plan = Plan(requests, [], realised(at), asked, at[-1])
    return Case(
        label=f"{asked:g}/s", target=Target("http://a", "m"), plan=plan, concurrency=0,
        load=LoadSettings(), bounds=PRESETS["chat"], rate=asked,
    )  # fmt: skip


def judged(case: Case, num_wrong: int = 0) -> Run:
    """Every request is sent when it was planned and answered well, but for the first so many."""
    records = [answered(one.index, one.at_s or 0.0, [0.1]) for one in case.plan.requests]
    for record in records[:num_wrong]:
        record.outcome = Outcome.WRONG_LENGTH
    return judge(case, LoadResult(records, [], 1.0, "2026-03-01T12:00:00+00:00"), "")


class Played(Bench):
    def measure(self, case: Case, on_start: OnStart | None = None) -> Run:
        return judged(case)


@pytest.mark.parametrize(
    ("rate", "off"), [(4.0, ""), (3.7, ""), (3.0, "3/s, 25% below"), (5.0, "5/s, 25% above")]
)
def test_arrivals_that_were_planned_far_off_the_rate_are_warned_of(rate: float, off: str) -> None:
    report = report_of([])
    run = add_run(Played(), report, offering(rate, 4.0))
    assert run is not None
    assert report.runs == [run]
    assert run.summary.offered_rate == pytest.approx(rate)
    said = [problem.text for problem in run.problems if "were drawn at" in problem.text]
    text = f"the arrivals were drawn at {off} the 4/s asked for: a longer load comes closer"
    assert said == ([text] if off else [])
    assert not run.invalid


def test_a_search_says_what_the_runs_offered_that_confirmed_its_rate() -> None:
    search, report = RateSearch(SearchOptions(max_rate=4.0, start_rate=2.0)), report_of([])
    offered = iter((9.0, 9.0, 3.7, 4.2, 3.9))
    while (rate := search.next_rate()) is not None:
        run = add_run(Played(), report, offering(next(offered), rate))
        assert run is not None
        observe(search, rate, run)
    report.search = with_offered(search.result(), report.runs)
    assert report.search.offered_rate == pytest.approx(3.9)
    assert "; 3.9/s were offered (median of the confirming runs)" in report.search.line
    assert headlines(report)[0].note == "3.90 requests/s offered"
    assert "3.9/s were offered" in shown(report)
    unconfirmed = msgspec.structs.replace(search.result(), confirmed=False)
    assert with_offered(unconfirmed, report.runs) == unconfirmed


def test_a_rate_at_which_answers_have_a_wrong_length_is_never_confirmed() -> None:
    run = judged(offering(4.0, 4.0), num_wrong=5)
    assert run.invalid
    assert run.summary.attainment == 0.95
    search = RateSearch(SearchOptions(min_rate=1.0))
    while (rate := search.next_rate()) is not None:
        observe(search, rate, run)
    assert [probe.attainment for probe in search.probes] == [0.95]
    report = report_of([run])
    report.search = search.result()
    assert report.search.ending is Ending.NEVER_ATTAINED
    assert re.search(r"up +95 % +server's fault +no\n", shown(report))
    assert shown(report).endswith("NOT CONFIRMED")
    # One of a hundred is a warning, and a failed request like any other.
    few = judged(offering(4.0, 4.0), num_wrong=1)
    search = RateSearch(SearchOptions(max_rate=1.0))
    while (rate := search.next_rate()) is not None:
        observe(search, rate, few)
    assert search.result().confirmed
