"""What makes a run invalid, what a reader is warned of, and that a good run is left alone."""

import re
from collections.abc import Callable

import msgspec
import pytest

from baton.bench.figures.metrics import summarise
from baton.bench.figures.validity import (
    CACHED,
    Problem,
    Severity,
    check,
    find_growth,
    is_valid,
)
from baton.bench.records import ClientProcess, Outcome, Planned, Record
from baton.bench.report.document import Run
from baton.bench.settings import Workload
from baton.protocol.errors import BatonError
from tests.support.bench_records import (
    case_of,
    ended,
    load,
    plan_of,
    request,
    run_of,
    steady,
)

IDLE = ClientProcess(1, 10.0, 100.0, 1000, 10_000)
BUSY = msgspec.structs.replace(IDLE, cpu_s=61.0)
INVALID = Severity.INVALID
WARNING = Severity.WARNING
ANSWERED = Outcome.ANSWERED
REFUSED = Outcome.REFUSED
STOPPED = Outcome.STOPPED


def problems_of(
    records: list[Record],
    plan: list[Planned] | None = None,
    client: ClientProcess = IDLE,
) -> list[Problem]:
    result = load(records, IDLE, client)
    return check(result, summarise(result), plan or plan_of(records))


def changed(
    change: Callable[[Record], None], num_changed: int = 1000, num: int = 1000
) -> list[Record]:
    """A good load, the first requests of which were changed."""
    records = steady(num)
    for record in records[:num_changed]:
        change(record)
    return records


def late(by_s: float) -> Callable[[Record], None]:
    def change(record: Record) -> None:
        record.sent_s += by_s
        record.end_s += by_s

    return change


def growing(num: int) -> list[Record]:
    """Ten arrive each second and nine are served."""
    waits_s = (place / 9 - place / 10 for place in range(num))
    return [request(n / 10, (s + 0.1, s + 0.5), index=n) for n, s in enumerate(waits_s)]


def slowed(record: Record) -> None:
    """The client falls behind steadily, and says it was meant."""
    record.intended_s = record.sent_s = record.intended_s * 1.1
    record.end_s += 100


def warm_up(end_s: float) -> list[Record]:
    warm = request(-1.0, (0.5, 1.0 + end_s), index=2000)
    warm.warm_up = True
    return [warm, *steady(1000)]


def merged(num_tokens: int) -> list[Record]:
    chunks = [(0.1, num_tokens), (0.2, num_tokens)]
    return [request(0.1 * place, chunks, index=place) for place in range(1000)]


@pytest.mark.parametrize(
    "records", [steady(1000), changed(late(0.0051), 10), warm_up(-0.1)]
)
def test_a_good_run_has_no_problems(records):
    assert problems_of(records) == []


def test_nothing_is_late_in_a_closed_loop():
    plan = [msgspec.structs.replace(one, at_s=None) for one in plan_of(steady(1000))]
    assert problems_of(changed(late(0.1)), plan) == []


# Computed in the test that needs it, because every worker collects all tests.
@pytest.mark.parametrize(
    ("find", "severity", "words"),
    [
        (
            lambda: problems_of(changed(late(0.0051), 11)),
            INVALID,
            "lag p99 is 5.1 ms, over 5.0 ms",
        ),
        (
            lambda: problems_of(steady(1000), client=BUSY),
            INVALID,
            "1 of 2 client processes used up to 61% of a core",
        ),
        (
            lambda: problems_of(changed(slowed), plan_of(steady(1000))),
            INVALID,
            "the client could not reach the rate: it sent 9.091 of 10 /s; use more --processes",
        ),
        (
            lambda: problems_of(steady(1000), plan_of(steady(1001))),
            INVALID,
            "1 of 1001 planned requests have no record",
        ),
        (
            lambda: problems_of(warm_up(0.1)),
            WARNING,
            "1 warm-up requests were still running",
        ),
        (
            lambda: problems_of(merged(4)),
            WARNING,
            "tokens arrive 4.00 to a chunk on average",
        ),
        (
            lambda: problems_of(growing(400)),
            WARNING,
            "the load outran the server: over the run TTFT grew",
        ),
    ],
)
def test_a_single_problem_is_told_in_a_line(find, severity, words):
    (problem,) = find()
    assert problem.severity is severity
    assert words in problem.text
    assert "\n" not in problem.text


def test_answers_of_another_length_make_a_run_invalid_unless_they_are_few():
    records = steady(1000)
    for record in records[:10]:
        record.outcome, record.arrivals = Outcome.WRONG_LENGTH, record.arrivals[:4]
    few = problems_of(records)
    assert is_valid(few)
    assert any("10 of 1000 responses have another length" in one.text for one in few)
    # A client that did not notice changes nothing.
    records[10].arrivals = records[10].arrivals[:4]
    assert not is_valid(problems_of(records))


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        (
            Outcome.UNREACHABLE,
            "all 20 requests failed: 20 unreachable; the first: why$",
        ),
        (
            Outcome.WRONG_LENGTH,
            "20 wrong length; .*: does the server honour ignore_eos",
        ),
    ],
)
def test_a_run_without_an_answer_is_invalid_and_nothing_else_is_said(outcome, why):
    records = steady(20)
    for record in records:
        record.outcome = outcome
        record.detail = "why"
    (found,) = problems_of(records)
    assert found.is_invalid
    assert re.search(why, found.text)


def test_a_queue_that_grows_throughout_is_found():
    first_ms, last_ms, first, last = (
        float(one) for one in re.findall(r"[0-9.]+", find_growth(growing(600)))
    )
    assert last_ms > 3 * first_ms
    assert last > 2 * first
    assert find_growth(growing(49)) == ""


def texts(run: Run, *, is_invalid: bool) -> list[str]:
    return [
        problem.text for problem in run.problems if problem.is_invalid is is_invalid
    ]


def test_a_load_that_was_stopped_says_so_once_and_counts_no_failure():
    why = "interrupted: 2 of 5 requests had been sent"
    run = run_of(case_of(5), ended(ANSWERED, STOPPED), why)
    assert texts(run, is_invalid=True) == [why]
    assert run.summary.attainment == 1.0
    assert not any("failed" in text for text in texts(run, is_invalid=False))


def test_a_load_in_which_nothing_counts_is_a_failure_and_says_why():
    with pytest.raises(BatonError, match="no request arrived"):
        run_of(case_of(1), ended())
    warm = ended(REFUSED)
    warm.records[0].warm_up = True
    for nothing in (warm, ended(STOPPED, STOPPED)):
        with pytest.raises(
            BatonError, match="nothing was measured: the first 1 failed"
        ):
            run_of(case_of(2), nothing, "the first 1 failed")


def test_a_prefix_cache_that_helped_by_accident_is_a_warning():
    for workload in (Workload(), Workload(workload="trace")):
        result = ended(ANSWERED)
        result.records[0].prompt_tokens = 100
        result.records[0].cached_tokens = 50
        run = run_of(case_of(1, workload=workload), result)
        assert (CACHED in texts(run, is_invalid=False)) is (workload == Workload())
