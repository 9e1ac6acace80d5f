"""What makes a run invalid, what a reader is warned of, and that a good run is left alone."""

import msgspec
import pytest

from baton.bench.figures.metrics import Window, summarise
from baton.bench.figures.validity import (
    Problem,
    Severity,
    check,
    find_growth,
    is_valid,
    lag_gate_ms,
)
from baton.bench.records import ClientProcess, LoadResult, Outcome, Planned
from baton.protocol.errors import BatonError
from tests.support.load_records import load, plan_of, request, steady

IDLE = ClientProcess(1, 10.0, 100.0, 1000, 10_000, 0.002)


def problems_of(
    result: LoadResult,
    plan: list[Planned] | None = None,
    *,
    window: Window | None = None,
    max_concurrency: int | None = None,
) -> list[Problem]:
    summary = summarise(result, window=window)
    plan = plan_of(result.records) if plan is None else plan
    return check(result, summary, plan, max_concurrency=max_concurrency)


def only(problems: list[Problem], severity: Severity) -> str:
    """The text of the one problem beside the note on few samples."""
    found = [one for one in problems if "would make it firm" not in one.text]
    assert [one.severity for one in found] == [severity], problems
    assert "\n" not in found[0].text
    return found[0].text


def test_a_good_run_has_no_problems() -> None:
    result = load(steady(1000), IDLE)
    assert problems_of(result) == []


def test_a_late_client_makes_a_run_invalid() -> None:
    records = steady(1000)
    for record in records[:11]:  # 1.1 %, so that it is the p99 that is late
        record.sent_s += 0.0051
    text = only(problems_of(load(records, IDLE)), Severity.INVALID)
    assert "lag p99 is 5.1 ms, over 5.0 ms" in text
    records[0].sent_s = records[0].intended_s
    assert problems_of(load(records, IDLE)) == []


def test_the_lag_gate_widens_with_the_ttft() -> None:
    slow = summarise(load(steady(100, ttft_s=2.0)))
    assert lag_gate_ms(slow) == pytest.approx(20)
    assert lag_gate_ms(summarise(load(steady(100, ttft_s=0.1)))) == 5


def test_lag_that_was_asked_for_is_judged_by_the_event_loop() -> None:
    records = steady(1000)
    for record in records:
        record.sent_s += 1.0
        record.end_s += 1.0
    assert problems_of(load(records, IDLE), max_concurrency=1) == []
    late = msgspec.structs.replace(IDLE, max_loop_lag_s=0.2)
    text = only(problems_of(load(records, late), max_concurrency=1), Severity.WARNING)
    assert "late by up to 200.0 ms" in text


def test_a_limit_that_no_request_met_excuses_no_lag() -> None:
    records = steady(1000)
    for record in records:
        record.sent_s += 0.02
    text = only(problems_of(load(records, IDLE), max_concurrency=1000), Severity.INVALID)
    assert "lag p99 is 20.0 ms" in text


def test_a_busy_client_makes_a_run_invalid() -> None:
    busy = msgspec.structs.replace(IDLE, cpu_s=61.0)
    text = only(problems_of(load(steady(1000), IDLE, busy)), Severity.INVALID)
    assert "1 of 2 client processes used up to 61% of a core" in text
    at_limit = msgspec.structs.replace(IDLE, cpu_s=60.0)
    assert problems_of(load(steady(1000), at_limit)) == []


def test_a_client_that_was_busy_for_a_while_is_not_saved_by_a_long_wait() -> None:
    busy = msgspec.structs.replace(IDLE, cpu_s=20.0, busiest_cpu=0.9)
    text = only(problems_of(load(steady(1000), busy)), Severity.INVALID)
    assert "1 of 1 client processes used up to 90% of a core" in text


def test_a_late_event_loop_of_a_closed_loop_is_mentioned() -> None:
    records = steady(1000)
    plan = [msgspec.structs.replace(one, at_s=None) for one in plan_of(records)]
    assert problems_of(load(records, IDLE), plan) == []
    late = msgspec.structs.replace(IDLE, max_loop_lag_s=0.2)
    text = only(problems_of(load(records, late), plan), Severity.WARNING)
    assert "in a closed loop nothing is sent late" in text
    assert "late by up to 200.0 ms" in text
    assert problems_of(load(records, late)) == []  # there the lag itself says it


def test_a_window_in_which_nothing_arrived_any_more_is_mentioned() -> None:
    records = steady(1100)  # until 110 s
    assert problems_of(load(records, IDLE), window=Window(0.0, 110.5)) == []
    text = only(problems_of(load(records, IDLE), window=Window(0.0, 270.0)), Severity.WARNING)
    assert text == (
        "nothing arrived in the last 160.1 s of the window, so its rates are too low: it should "
        "end with the load"
    )


def test_prompts_that_the_server_cut_are_mentioned() -> None:
    records = steady(1000)
    plan = [msgspec.structs.replace(one, prompt_ids=tuple(range(8))) for one in plan_of(records)]
    for record in records:
        record.prompt_tokens = 9  # with the token that opens a text
    assert problems_of(load(records, IDLE), plan) == []
    records[3].prompt_tokens = 4
    text = only(problems_of(load(records, IDLE), plan), Severity.WARNING)
    assert "1 of 1000 prompts were shorter for the server (the first: 4 tokens of 8)" in text


def test_a_rate_that_the_client_did_not_reach_makes_a_run_invalid() -> None:
    records = steady(1000)
    plan = plan_of(records)
    for record in records:  # the client fell behind steadily, and says it was meant
        record.intended_s = record.sent_s = record.intended_s * 1.1
        record.end_s += 100
    text = only(problems_of(load(records, IDLE), plan), Severity.INVALID)
    assert (
        text == "the client could not reach the rate: it sent 9.091 of 10 /s; use more --processes"
    )


def test_requests_without_a_record_make_a_run_invalid() -> None:
    records = steady(1001)
    text = only(problems_of(load(records[:1000], IDLE), plan_of(records)), Severity.INVALID)
    assert "1 of 1001 planned requests have no record" in text


def test_answers_of_another_length_make_a_run_invalid_unless_they_are_few() -> None:
    records = steady(1000)
    for record in records[:10]:
        record.outcome, record.arrivals = Outcome.WRONG_LENGTH, record.arrivals[:4]
    few = problems_of(load(records, IDLE))
    assert is_valid(few)
    assert any("10 of 1000 answers have another length" in one.text for one in few)
    assert any("4 tokens for 10" in one.text for one in few)
    # A client that did not notice changes nothing.
    records[10].arrivals = records[10].arrivals[:4]
    assert not is_valid(problems_of(load(records, IDLE)))


def test_turns_that_were_never_sent_have_no_length() -> None:
    records = steady(1000)
    for record in records[:11]:
        record.outcome, record.arrivals = Outcome.WRONG_LENGTH, []
        record.detail = "not sent: turn 0 of the conversation failed"
    assert is_valid(problems_of(load(records, IDLE)))


def test_failures_are_counted_by_kind_with_one_of_them_in_words() -> None:
    records = steady(1100)
    for record in records[:2]:
        record.outcome = Outcome.REFUSED
    records[2].outcome, records[2].detail = Outcome.TRUNCATED, "the connection ended early"
    text = only(problems_of(load(records, IDLE)), Severity.WARNING)
    assert text == (
        "3 of 1100 requests failed: 2 refused, 1 truncated; for one: the connection ended early"
    )


def test_a_client_that_had_no_socket_left_makes_the_run_invalid() -> None:
    records = steady(1100)
    records[2].outcome, records[2].detail = Outcome.NO_SOCKET, "too many open files"
    first, *_ = problems_of(load(records, IDLE))
    assert first.is_invalid
    assert first.text == (
        "the client's machine had no socket for 1 of 1100 requests (too many open files): "
        "raise its limit of open files (ulimit -n), or ask for less at once"
    )


def test_a_run_without_an_answer_is_an_error_not_a_report() -> None:
    records = [request(0.0, (), outcome=Outcome.UNREACHABLE, index=place) for place in range(3)]
    records[0].detail = "connection refused"
    with pytest.raises(BatonError, match="all 3 requests failed: 3 unreachable; the first: conn"):
        problems_of(load(records))


def test_answers_outside_the_window_do_not_save_a_run() -> None:
    records = steady(20)
    for record in records[10:]:
        record.outcome = Outcome.SERVER_ERROR
    with pytest.raises(BatonError, match="all 10 requests failed"):
        problems_of(load(records), window=Window(0.95, 9.0))
    assert is_valid(problems_of(load(records), window=Window(0.0, 0.95)))


def test_a_warm_up_that_is_not_over_is_mentioned() -> None:
    warm = request(-1.0, (0.9, 1.2), index=2000)
    warm.warm_up = True
    text = only(problems_of(load([warm, *steady(1000)], IDLE)), Severity.WARNING)
    assert text.startswith("1 warm-up requests were still running")


def test_a_server_that_merges_tokens_is_mentioned() -> None:
    records = [request(0.1 * place, [(0.1, 4), (0.2, 4)], index=place) for place in range(1000)]
    text = only(problems_of(load(records, IDLE)), Severity.WARNING)
    assert text.startswith("tokens arrive 4.00 to a chunk on average")


@pytest.mark.parametrize(
    ("count", "words"),
    [(99, "the largest sample"), (999, "rests on few samples"), (1000, None)],
)
def test_a_p99_of_few_samples_is_no_p99(count: int, words: str | None) -> None:
    problems = problems_of(load(steady(count), IDLE))
    assert [words is not None and words in one.text for one in problems] == [True] * bool(words)


def test_what_makes_a_run_invalid_comes_first() -> None:
    records = steady(10)
    for record in records:
        record.sent_s += 1
    records[0].outcome = Outcome.TIMED_OUT
    busy = msgspec.structs.replace(IDLE, cpu_s=90.0)
    severities = [one.severity for one in problems_of(load(records, busy))]
    assert severities == [Severity.INVALID] * 2 + [Severity.WARNING] * 2


def test_a_queue_that_grows_throughout_is_found() -> None:
    # Ten arrive each second and nine are served.
    growing = [
        request(place / 10, [place / 9 - place / 10 + 0.1, place / 9 - place / 10 + 0.5])
        for place in range(600)
    ]
    growth = find_growth(growing, None)
    assert growth is not None
    assert growth.last_ttft_ms > 3 * growth.first_ttft_ms
    assert growth.last_in_flight > 2 * growth.first_in_flight
    text = only(problems_of(load(growing[:400], IDLE)), Severity.WARNING)
    assert text.startswith("the load outran the server")


def test_a_steady_load_and_one_burst_are_no_growth() -> None:
    assert find_growth(steady(600), None) is None
    burst = steady(600)
    for record in burst[300:360]:
        record.arrivals = request(record.intended_s, (3.0, 3.1)).arrivals
        record.end_s = record.arrivals[-1].at_s
    assert find_growth(burst, None) is None


def test_a_slight_rise_is_no_growth() -> None:
    rising = [
        request(place / 10, (0.1 + place / 1e4, 1 + place / 1e3), index=place)
        for place in range(400)
    ]
    assert find_growth(rising, None) is None


def test_requests_from_before_a_window_are_in_flight_within_it() -> None:
    growing = [
        request(place / 10, [place / 90 + 0.1, place * 0.08 + 10], index=place)
        for place in range(900)
    ]
    growth = find_growth(growing, Window(40.0, 90.0))
    assert growth is not None
    assert growth.first_in_flight > 200


def test_a_window_in_the_middle_of_a_steady_load_shows_no_growth() -> None:
    long = [request(place / 10, (0.1, 20.0), index=place) for place in range(1000)]
    assert find_growth(long, Window(40.0, 80.0)) is None
