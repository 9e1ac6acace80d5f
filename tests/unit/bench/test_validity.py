"""What makes a run invalid, what a reader is warned of, and that a good run is left alone."""

import re
from collections.abc import Callable
from typing import TypedDict

import msgspec
import pytest

from baton.bench.figures.metrics import Window, summarise
from baton.bench.figures.validity import (
    CACHED,
    Problem,
    Severity,
    check,
    find_growth,
    is_valid,
)
from baton.bench.plan.plan import make_plan
from baton.bench.records import ClientProcess, Outcome, Planned, Record
from baton.bench.report.document import Run
from baton.bench.settings import Workload
from baton.protocol.errors import BatonError
from tests.support.bench_records import (
    answered,
    case_of,
    ended,
    load,
    plan_of,
    request,
    run_of,
    steady,
)

IDLE = ClientProcess(1, 10.0, 100.0, 1000, 10_000, 0.002)
LATE_LOOP = msgspec.structs.replace(IDLE, max_loop_lag_s=0.2)
INVALID, WARNING = Severity.INVALID, Severity.WARNING


class Options(TypedDict, total=False):
    plan: list[Planned]
    clients: tuple[ClientProcess, ...]
    window: Window | None


def problems_of(records: list[Record], options: Options | None = None) -> list[Problem]:
    more = options or {}
    result = load(records, *more.get("clients", (IDLE,)))
    summary = summarise(result, window=more.get("window"))
    plan = more.get("plan", plan_of(records))
    return check(result, summary, plan)


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


def ending(
    outcome: Outcome, detail: str = "", num_tokens: int | None = None
) -> Callable[[Record], None]:
    def change(record: Record) -> None:
        record.outcome, record.detail = outcome, detail
        record.arrivals = record.arrivals[:num_tokens]

    return change


def growing(num: int) -> list[Record]:
    """Ten arrive each second and nine are served."""
    waits_s = (place / 9 - place / 10 for place in range(num))
    return [request(n / 10, (s + 0.1, s + 0.5), index=n) for n, s in enumerate(waits_s)]


def busy(cpu_s: float, busiest_cpu: float = 0.0) -> ClientProcess:
    return msgspec.structs.replace(IDLE, cpu_s=cpu_s, busiest_cpu=busiest_cpu)


def closed(records: list[Record]) -> list[Planned]:
    return [msgspec.structs.replace(one, at_s=None) for one in plan_of(records)]


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
    "run",
    [
        (steady(1000),),
        (changed(late(0.0051), 10),),  # 1 %, so p99 is in time
        (steady(1000), {"plan": closed(steady(1000))}),
        (steady(1000), {"clients": (LATE_LOOP,)}),  # in an open loop the lag itself says it
        (steady(1000), {"clients": (busy(60.0),)}),
        (warm_up(-0.1),),
    ],
)
def test_a_good_run_has_no_problems(run: tuple[list[Record], Options]) -> None:
    assert problems_of(*run) == []


@pytest.mark.parametrize(
    ("records", "options", "severity", "words"),
    [
        (changed(late(0.0051), 11), {}, INVALID, "lag p99 is 5.1 ms, over 5.0 ms (max(5 ms, 1 % "),
        (steady(1000), {"plan": closed(steady(1000)), "clients": (LATE_LOOP,)}, WARNING,
         "the client's event loop was late by up to 200.0 ms"),
        (steady(1000), {"clients": (IDLE, busy(61.0))}, INVALID,
         "1 of 2 client processes used up to 61% of a core"),
        # A client that was busy for a while is not saved by a long wait.
        (changed(slowed), {"plan": plan_of(steady(1000))}, INVALID,
         "the client could not reach the rate: it sent 9.091 of 10 /s; use more --processes"),
        (steady(1000), {"plan": plan_of(steady(1001))}, INVALID,
         "1 of 1001 planned requests have no record"),
        (warm_up(0.1), {}, WARNING, "1 warm-up requests were still running when the measured"),
        (merged(4), {}, WARNING, "tokens arrive 4.00 to a chunk on average"),
        (growing(400), {}, WARNING, "the load outran the server: over the run TTFT grew from"),
    ],
)  # fmt: skip
def test_a_single_problem_is_told_in_a_line(
    records: list[Record], options: Options, severity: Severity, words: str
) -> None:
    (found,) = problems_of(records, options)
    assert found.severity is severity
    assert words in found.text
    assert "\n" not in found.text


def test_answers_of_another_length_make_a_run_invalid_unless_they_are_few() -> None:
    records = changed(ending(Outcome.WRONG_LENGTH, num_tokens=4), 10)
    few = problems_of(records)
    assert is_valid(few)
    said = (
        "10 of 1000 responses have another length than was requested (the first: 4 tokens for 10)"
    )
    assert any(said in one.text for one in few)
    # A client that did not notice changes nothing.
    records[10].arrivals = records[10].arrivals[:4]
    assert not is_valid(problems_of(records))


@pytest.mark.parametrize(
    ("outcome", "window", "why"),
    [
        (Outcome.UNREACHABLE, None, "all 20 requests failed: 20 unreachable; the first: why$"),
        (Outcome.WRONG_LENGTH, None, "20 wrong length; .*: does the server honour ignore_eos"),
        # Answers outside the window do not save a run.
        (Outcome.SERVER_ERROR, Window(0.95, 9.0), "all 10 requests failed: 10 server error; "),
    ],
)
def test_a_run_without_an_answer_is_invalid_and_nothing_else_is_said(
    outcome: Outcome, window: Window | None, why: str
) -> None:
    records = steady(20)
    for record in records[10 if window else 0 :]:
        ending(outcome, "why")(record)
    (found,) = problems_of(records, {"window": window})
    assert found.is_invalid
    assert re.search(why, found.text)
    if window:
        assert is_valid(problems_of(records, {"window": Window(0.0, 0.95)}))


def figures_in(line: str) -> list[float]:
    return [float(figure) for figure in re.findall(r"[0-9.]+", line)]


def test_a_queue_that_grows_throughout_is_found() -> None:
    first_ms, last_ms, first, last = figures_in(find_growth(growing(600), None))
    assert last_ms > 3 * first_ms
    assert last > 2 * first
    assert find_growth(growing(49), None) == ""


ANSWERED, REFUSED, STOPPED = Outcome.ANSWERED, Outcome.REFUSED, Outcome.STOPPED


def texts(run: Run, *, is_invalid: bool) -> list[str]:
    return [problem.text for problem in run.problems if problem.is_invalid is is_invalid]


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
