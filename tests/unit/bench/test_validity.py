"""What makes a run invalid, what a reader is warned of, and that a good run is left alone."""

import re
from collections.abc import Callable
from typing import TypedDict

import msgspec
import pytest

from baton.bench.figures.metrics import Window, summarise
from baton.bench.figures.validity import (
    Problem,
    Severity,
    check,
    find_growth,
    is_valid,
)
from baton.bench.records import ClientProcess, Outcome, Planned, Record
from tests.support.bench_records import load, plan_of, request, steady

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


def ended(
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
         "in a closed loop nothing is sent late, so lag cannot judge the client; its event loop "
         "was late by up to 200.0 ms"),
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
    records = changed(ended(Outcome.WRONG_LENGTH, num_tokens=4), 10)
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
        ended(outcome, "why")(record)
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
