"""What is made of the records of one load: a run, valid or not, and what must be said of it."""

import pytest

from baton.bench.figures.validity import CACHED
from baton.bench.plan.plan import make_plan
from baton.bench.records import Outcome
from baton.bench.report.document import Run
from baton.bench.settings import Workload
from baton.protocol.errors import BatonError
from tests.support.bench_records import answered, case_of, ended, load, run_of

ANSWERED, REFUSED, STOPPED = Outcome.ANSWERED, Outcome.REFUSED, Outcome.STOPPED


def texts(run: Run, *, is_invalid: bool) -> list[str]:
    return [problem.text for problem in run.problems if problem.is_invalid is is_invalid]


def test_a_load_that_ran_to_its_end_is_judged_by_its_records() -> None:
    run = run_of(case_of(2), ended(ANSWERED, ANSWERED))
    assert not run.invalid
    assert run.summary.attainment == 1.0
    assert run.notes == ["a note"]


def test_a_load_that_was_stopped_says_so_once_and_counts_no_failure() -> None:
    why = "interrupted: 2 of 5 requests had been sent"
    run = run_of(case_of(5), ended(ANSWERED, STOPPED), why)
    assert texts(run, is_invalid=True) == [why]
    assert run.summary.attainment == 1.0
    assert not any("failed" in text for text in texts(run, is_invalid=False))


def test_a_closed_loop_that_ends_by_time_misses_nothing() -> None:
    timed = case_of(5, duration_s=1.0)
    assert not run_of(timed, ended(ANSWERED)).invalid
    assert run_of(case_of(5), ended(ANSWERED)).invalid


def test_a_load_in_which_nothing_counts_is_a_failure_and_says_why() -> None:
    with pytest.raises(BatonError, match="no request arrived"):
        run_of(case_of(1), ended())
    warm = ended(REFUSED)
    warm.records[0].warm_up = True
    for nothing in (warm, ended(STOPPED, STOPPED)):
        with pytest.raises(BatonError, match="nothing was measured: the first 1 failed"):
            run_of(case_of(2), nothing, "the first 1 failed")


@pytest.mark.parametrize("why_stopped", ["", "interrupted: 4 of 5 requests had been sent"])
def test_a_load_that_does_not_reach_its_window_is_kept_and_invalid(why_stopped: str) -> None:
    plan = make_plan(Workload(prompt="4", output="2"), None, count=5, warm_up=4)
    records = [answered(one.index, float(one.index), [0.1]) for one in plan.requests[:-1]]
    for record, one in zip(records, plan.requests, strict=False):
        record.warm_up, record.cached_tokens = one.warm_up, 500
    found = run_of(case_of(plan, window="30-60"), load(records), why_stopped)
    assert found.summary.num_requests == 4
    said = "no request arrived in --window 30-60: the figures are of all requests"
    assert said in texts(found, is_invalid=True)


@pytest.mark.parametrize(
    ("workload", "is_said"),
    [
        (Workload(), True),
        (Workload(workload="chat"), True),
        (Workload(workload="trace"), False),
    ],
)
def test_a_prefix_cache_that_helped_by_accident_is_a_warning(
    workload: Workload, is_said: bool
) -> None:
    result = ended(ANSWERED)
    result.records[0].prompt_tokens, result.records[0].cached_tokens = 100, 50
    run = run_of(case_of(1, workload=workload), result)
    assert (CACHED in texts(run, is_invalid=False)) is is_said
