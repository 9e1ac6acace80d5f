"""Loads that cannot succeed: refused before anything is sent, or kept and called invalid."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from baton.bench import cli
from baton.bench.client.target import Target
from baton.bench.experiments import Case, judge
from baton.bench.fault_run import faults_of, refuse_late
from baton.bench.one_load import run
from baton.bench.plan.plan import Plan
from baton.bench.records import LoadResult
from baton.bench.resolved import arrivals_of, plan_of
from baton.bench.settings import FaultSettings, RunSettings
from baton.protocol.errors import ConfigError
from tests.support.bench_records import answered

# Nobody listens there: whoever asks fails in another way.
ASKED = ("--url", "http://127.0.0.1:9", "--prompt", "4", "--output", "2", "--vocabulary", "300-400")
OPEN = ("--arrivals", "constant:1", "--requests", "5")  # at 0, 1, 2, 3 and 4 s
CLOSED = ("--concurrency", "1", "--requests", "5")
LATER_TURNS = (*OPEN, "--workload", "conversation")


def planned(settings: RunSettings | FaultSettings) -> Plan:
    arrivals = arrivals_of(settings.arrival, settings.workload)
    return plan_of(settings.workload, settings.load, arrivals)


def test_a_window_in_which_nothing_arrives_is_refused_before_there_is_a_folder(
    tmp_path: Path,
) -> None:
    out = tmp_path / "report"
    words = (*ASKED, *OPEN, "--window", "30-60", "--out", str(out))
    said = "no request arrives in --window 30-60: the first one does after 0 s and the last one"
    with pytest.raises(ConfigError, match=f"{said} after 4 s"):
        run(cli.parse("run", RunSettings, words)[0])
    assert not out.exists()


@pytest.mark.parametrize(
    "more",
    [(*OPEN, "--window", "4-5"), *((*one, "--window", "9-10") for one in (CLOSED, LATER_TURNS))],
)
def test_a_window_in_which_something_may_arrive_is_accepted(more: Sequence[str]) -> None:
    assert planned(cli.parse("run", RunSettings, (*ASKED, *more))[0]).requests


@pytest.mark.parametrize(
    ("more", "is_late"),
    [
        (OPEN, True),
        ((*OPEN, "--duration-s", "9"), False),  # for what is still answered by then
        (CLOSED, False),
        (LATER_TURNS, False),
    ],
)
def test_a_fault_after_the_end_of_a_known_schedule_is_refused(
    more: Sequence[str], is_late: bool
) -> None:
    words = (*ASKED, "--fault", "stop:4711@5+1", *more)
    settings = cli.parse("fault", FaultSettings, words)[0]
    if not is_late:
        refuse_late(faults_of(settings), planned(settings))
        return
    with pytest.raises(ConfigError, match=r"stop:4711@5\+1: the schedule ends after 4 s; give"):
        refuse_late(faults_of(settings), planned(settings))


@pytest.mark.parametrize("why_stopped", ["", "interrupted: 2 of 5 requests had been sent"])
def test_a_load_that_does_not_reach_its_window_is_kept_and_invalid(why_stopped: str) -> None:
    settings = cli.parse("run", RunSettings, (*ASKED, *CLOSED, "--window", "30-60"))[0]
    case = Case(label="a load", target=Target("http://a", "m"), plan=planned(settings),
                concurrency=1, load=settings.load)  # fmt: skip
    records = [answered(one.index, float(one.index), [0.1]) for one in case.plan.requests[:-1]]
    for record, one in zip(records, case.plan.requests, strict=False):
        record.warm_up, record.cached_tokens = one.warm_up, 500
    found = judge(case, LoadResult(records, [], 1.0, "2026-03-01T12:00:00+00:00"), why_stopped)
    assert found.summary.num_requests == 4
    texts = [problem.text for problem in found.problems if problem.is_invalid]
    assert "no request arrived in --window 30-60: the figures are of all requests" in texts
