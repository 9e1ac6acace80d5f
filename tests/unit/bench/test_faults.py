"""How faults are written, and what is said of one whose effect is known."""

import os
import random

import pytest

from baton.bench.figures.faults import FaultSpec, Impact, Injected, Judgement, impacts, parse_fault
from baton.bench.figures.metrics import Bounds
from baton.bench.records import Arrival, Outcome, Record
from baton.protocol.errors import ConfigError

FAULT_S = 10.0
BOUNDS = Bounds(gap_max_ms=200)
STEP_S = 0.02


def stream(
    index: int, at_s: float, *, stall: tuple[float, float] | None = None, num_tokens: int = 30
) -> Record:
    """First tokens after 0.1 s, then one every 20 ms, but none while `stall` lasts."""
    stamps: list[float] = []
    now_s = at_s + 0.1
    for _ in range(num_tokens):
        if stall and stall[0] <= now_s < stall[1]:
            now_s = stall[1]
        stamps.append(now_s)
        now_s += STEP_S
    return Record(
        index=index,
        intended_s=at_s,
        sent_s=at_s,
        end_s=stamps[-1] + 0.001,
        outcome=Outcome.ANSWERED,
        arrivals=[Arrival(stamp, 1) for stamp in stamps],
    )


def refused(index: int, at_s: float) -> Record:
    return Record(
        index=index, intended_s=at_s, sent_s=at_s, end_s=at_s + 0.005, outcome=Outcome.REFUSED
    )


def load(until_s: float = 25.0, stall: tuple[float, float] | None = None) -> list[Record]:
    """Four requests a second; each lasts 0.68 s when nothing happens."""
    return [stream(index, index / 4, stall=stall) for index in range(int(until_s * 4))]


def killed(at_s: float = FAULT_S) -> Injected:
    return Injected(FaultSpec("kill", 4711, at_s), at_s)


def impact_of(
    records: list[Record], bounds: Bounds = BOUNDS, judgement: Judgement | None = None
) -> Impact:
    (found,) = impacts(records, [killed()], bounds, judgement)
    return found


# --- how they are written ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("kill:4711@10", FaultSpec("kill", 4711, 10.0)),
        ("stop:4711@1.5+2", FaultSpec("stop", 4711, 1.5, 2.0)),
        (
            "restart:4711@10=baton decode --config 'a b.yaml'",
            FaultSpec("restart", 4711, 10.0, 0.0, ("baton", "decode", "--config", "a b.yaml")),
        ),
        ("restart:4711@10+3=serve", FaultSpec("restart", 4711, 10.0, 3.0, ("serve",))),
    ],
)
def test_a_fault_is_read_and_written_alike(text: str, spec: FaultSpec) -> None:
    assert parse_fault(text) == spec
    assert str(spec) == text
    assert parse_fault(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("pause:4711@10", "write kill:PID@10"),
        ("kill:router@10", "write kill:PID@10"),
        ("kill:4711", "write kill:PID@10"),
        ("kill:4711@-1", "write kill:PID@10"),
        ("kill:4711@1.2.3", "1.2.3"),
        ("kill:4711@10+2", "a kill takes only a time"),
        ("kill:4711@10=serve", "a kill takes only a time"),
        ("stop:4711@10", "after how many seconds"),
        ("stop:4711@10+0", "after how many seconds"),
        ("restart:4711@10", "what starts it again"),
        ("restart:4711@10=", "what starts it again"),
        ("restart:4711@10='open", "No closing quotation"),
        ("kill:1@10", "not the id of a server"),
        ("kill:0@10", "not the id of a server"),
        (f"kill:{os.getpid()}@10", "not the id of a server"),
    ],
)
def test_a_fault_that_cannot_be_meant_is_refused_in_words(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match="fault") as raised:
        parse_fault(text)
    assert why in raised.value.message
    assert "\n" not in raised.value.message


# --- what one did --------------------------------------------------------------------------------


def test_a_fault_that_nobody_noticed_has_no_times_and_no_dip() -> None:
    found = impact_of(load())
    assert found.time_to_detect_s is None
    assert found.time_to_resume_s is None
    assert found.time_to_recover_s == 0.0
    assert found.goodput_dip == 0.0
    assert found.attainment_before == 1.0
    assert (found.num_failed, found.num_interrupted) == (0, 0)
    assert found.notes == ["no request noticed the fault"]


def test_what_only_later_requests_noticed_may_have_another_cause() -> None:
    found = impact_of(load(stall=(FAULT_S + 5.0, FAULT_S + 8.0)))
    assert found.time_to_detect_s == pytest.approx(5.0, abs=1.0)
    assert found.num_interrupted == 0
    assert found.notes[0].startswith("no request in flight noticed the fault")


def test_a_stall_is_noticed_at_its_limit_and_over_when_the_last_stream_goes_on() -> None:
    # Streams of 9.5 and 9.75 are in flight and get nothing until 13 s. Those that arrive meanwhile
    # get their first tokens then too.
    found = impact_of(load(stall=(FAULT_S, 13.0)))
    assert found.num_in_flight == 3  # and the one that arrives with the fault
    assert found.num_interrupted == 3
    assert found.num_resumed == 3
    assert found.num_failed == 0
    # The usual gap is 20 ms, so 200 ms are too long; the last token came just before the fault.
    assert found.time_to_detect_s == pytest.approx(0.2 - STEP_S, abs=STEP_S)
    assert found.time_to_resume_s == pytest.approx(3.0, abs=STEP_S)
    assert found.longest_wait_s == pytest.approx(3.0, abs=2 * STEP_S)


def test_recovery_begins_with_the_first_bin_from_which_attainment_stays() -> None:
    found = impact_of(load(stall=(FAULT_S, 13.0)), Bounds(ttft_ms=500, gap_max_ms=200))
    # What arrived up to 12.5 s missed a bound; in the bin from 12 s on that is three of four.
    assert found.time_to_recover_s == 3.0
    missed = [entry.num_requests - entry.num_good for entry in found.bins if entry.start_s >= 10]
    assert missed[:4] == [6, 4, 2, 0]
    assert found.goodput_dip == pytest.approx(12.0)
    assert found.goodput_before == pytest.approx(38 / 10)


def test_it_is_not_over_while_an_interrupted_stream_still_waits() -> None:
    records = load()
    # One of five at the fault: too few to bring attainment under 0.7 of that before.
    records[39] = stream(39, 9.75, stall=(FAULT_S, 12.5))
    found = impact_of(records, judgement=Judgement(recovered_share=0.7))
    assert found.time_to_resume_s == pytest.approx(2.5, abs=STEP_S)
    assert found.time_to_recover_s == 3.0


def test_a_relapse_puts_the_recovery_off() -> None:
    records = [
        refused(record.index, record.intended_s)
        if FAULT_S < record.intended_s < 11 or 14 <= record.intended_s < 15
        else record
        for record in load()
    ]
    found = impact_of(records)
    assert found.time_to_recover_s == 5.0
    assert found.num_failed == 7
    assert found.time_to_detect_s == pytest.approx(0.255)


def test_what_never_recovers_says_so() -> None:
    records = [
        refused(record.index, record.intended_s) if record.intended_s > FAULT_S else record
        for record in load()
    ]
    found = impact_of(records)
    assert found.time_to_recover_s is None
    assert found.goodput_dip == 59.0
    assert any("not recovered within 15 bins" in note for note in found.notes)


def test_bins_without_arrivals_are_as_good_as_the_one_before() -> None:
    # A closed loop of one client: its stream is interrupted for four seconds, nobody else asks.
    records = [stream(index, index * 0.7) for index in range(14)]
    records.append(stream(14, 9.8, stall=(FAULT_S, 14.0)))
    records += [stream(15 + index, 14.6 + index * 0.7) for index in range(12)]
    found = impact_of(records)
    assert [entry.num_requests for entry in found.bins if entry.start_s >= 10][:5] == [
        1,
        0,
        0,
        0,
        1,
    ]
    assert found.time_to_recover_s == 4.0


@pytest.mark.parametrize("seed", range(20))
def test_a_fault_that_hurt_nobody_takes_no_time_however_thin_the_arrivals(seed: int) -> None:
    dice, moments_s = random.Random(seed), [0.0]
    while moments_s[-1] < 60:
        moments_s.append(moments_s[-1] + dice.expovariate(1.0))
    found = impact_of([stream(index, at_s) for index, at_s in enumerate(moments_s)])
    assert found.time_to_recover_s == 0.0


def test_what_was_bad_before_an_idle_fault_is_bad_until_somebody_was_served() -> None:
    records = load(until_s=9.0)
    records += [refused(len(records), 9.1), *(stream(100 + i, 12.1 + i / 4) for i in range(40))]
    assert impact_of(records).time_to_recover_s == 2.0


def test_the_dip_of_a_closed_loop_does_not_depend_on_how_fast_refusals_come() -> None:
    # One client, 2 requests a second; the server is away for five seconds.
    def dip(refusal_s: float, judgement: Judgement) -> float:
        records = [stream(index, index / 2, num_tokens=20) for index in range(20)]
        records += [
            refused(100 + number, FAULT_S + number * refusal_s)
            for number in range(round(5.0 / refusal_s))
        ]
        records += [stream(9000 + index, 15.0 + index / 2, num_tokens=20) for index in range(40)]
        found = impact_of(records, judgement=judgement)
        assert found.time_to_recover_s == 5.0
        return found.goodput_dip

    closed = Judgement(closed_loop=True)
    assert dip(0.01, closed) == dip(1.0, closed) == pytest.approx(10.0)
    assert (dip(0.01, Judgement()), dip(1.0, Judgement())) == (500.0, 5.0)


def test_a_closed_loop_that_does_not_recover_misses_answers_until_its_end() -> None:
    records = [stream(index, index / 2, num_tokens=20) for index in range(20)]
    timed_out = stream(20, FAULT_S)
    timed_out.outcome, timed_out.end_s = Outcome.TIMED_OUT, FAULT_S + 30.0
    found = impact_of([*records, timed_out], judgement=Judgement(closed_loop=True))
    assert found.time_to_recover_s is None
    assert found.goodput_dip == pytest.approx(60.0)


def test_a_request_that_was_stopped_with_the_load_is_no_failure() -> None:
    records = load()
    last = records[-1]
    last.outcome, last.end_s = Outcome.STOPPED, last.end_s + 30.0
    assert impact_of(records).num_failed == 0


def test_the_usual_goodput_counts_answers_where_they_end() -> None:
    first, second = impacts(load(), [killed(10.0), killed(12.0)], BOUNDS)
    assert first.goodput_before == pytest.approx(4.0, rel=0.1)
    assert second.goodput_before == pytest.approx(4.0)


def test_an_interrupted_request_counts_at_the_fault_though_it_arrived_before() -> None:
    found = impact_of(load(stall=(FAULT_S, 10.5)))
    (bin_of_fault,) = [entry for entry in found.bins if entry.start_s == FAULT_S]
    assert bin_of_fault.num_requests == 6
    assert found.attainment_before == 1.0
    assert sum(entry.num_requests for entry in found.bins) == 100


def test_a_stutter_that_was_there_before_is_not_the_fault() -> None:
    records = load()
    records[8] = stream(8, 2.0, stall=(2.2, 2.9))
    records[39] = stream(39, 9.75, stall=(FAULT_S, 10.5))
    assert impact_of(records).time_to_detect_s is None


def test_failures_are_noticed_when_they_end() -> None:
    records = load()
    records[39].outcome = Outcome.TRUNCATED
    records[39].end_s = 10.02
    found = impact_of(records)
    assert found.time_to_detect_s == pytest.approx(0.02)
    assert found.time_to_resume_s is None
    assert (found.num_interrupted, found.num_resumed, found.num_failed) == (1, 0, 1)


def test_requests_after_the_next_fault_belong_to_that_one() -> None:
    records = [
        refused(record.index, record.intended_s) if record.intended_s > 18 else record
        for record in load()
    ]
    first, _ = impacts(records, [killed(), killed(18.0)], BOUNDS)
    assert first.num_failed == 0
    assert first.time_to_recover_s == 0.0


def test_two_faults_alike_are_judged_alike() -> None:
    # Requests that are in flight at either stop, eight of them, get nothing for three seconds.
    stops_s, ends_s = (20.0, 60.0), (23.0, 63.0, 100.0)
    records = []
    for index in range(400):
        end_s = next(end_s for end_s in ends_s if index / 4 < end_s)
        stall = (end_s - 3, end_s) if end_s < 100 else None
        records.append(stream(index, index / 4, stall=stall, num_tokens=100))
    faults = [killed(at_s) for at_s in stops_s]
    for found in impacts(records, faults, Bounds(ttft_ms=500, gap_max_ms=200)):
        assert found.time_to_detect_s == pytest.approx(0.2 - STEP_S, abs=STEP_S)
        assert found.time_to_resume_s == pytest.approx(3.0, abs=STEP_S)
        assert found.time_to_recover_s == 3.0
        assert found.longest_wait_s == pytest.approx(3.0, abs=2 * STEP_S)
        assert found.attainment_before == 1.0
        assert found.goodput_dip == 18.0
        assert (found.num_interrupted, found.num_resumed, found.num_failed) == (9, 9, 0)
        assert found.notes == []


def test_a_fault_amid_another_is_compared_with_what_was_before_both() -> None:
    # The second comes while everybody still waits for the first.
    records = load(stall=(FAULT_S, 14.0))
    faults, bounds = [killed(), killed(12.0)], Bounds(ttft_ms=500, gap_max_ms=200)
    first, second = impacts(records, faults, bounds, Judgement(closed_loop=True))
    assert first.time_to_detect_s == pytest.approx(0.2 - STEP_S, abs=STEP_S)
    assert first.time_to_resume_s == pytest.approx(4.0, abs=STEP_S)
    assert first.time_to_recover_s is None
    # Until the second.
    assert first.longest_wait_s == pytest.approx(2.0, abs=STEP_S)
    assert first.goodput_dip == pytest.approx(2.0 * first.goodput_before)
    assert any("let the next fault come later" in note for note in first.notes)
    assert second.attainment_before == first.attainment_before == 1.0
    assert second.goodput_before == first.goodput_before
    # A request of 11.25 s is the first to have waited for too long from the second fault on.
    assert second.time_to_detect_s == pytest.approx(0.25, abs=STEP_S)
    assert second.time_to_recover_s == 2.0
    assert any("the fault before was not recovered from" in note for note in second.notes)


def test_a_fault_before_anything_was_answered_has_nothing_to_recover_to() -> None:
    (found,) = impacts(load(), [killed(0.5)], BOUNDS)
    assert found.attainment_before is None
    assert found.time_to_recover_s is None
    assert any("let it come later" in note for note in found.notes)


def test_bounds_that_nobody_met_before_leave_nothing_to_recover() -> None:
    found = impact_of(load(), Bounds(ttft_ms=1))
    assert found.attainment_before == 0.0
    assert found.time_to_recover_s is None
    assert any("nothing to recover" in note for note in found.notes)


def test_warm_up_counts_nowhere() -> None:
    records = load()
    for record in records[:4]:
        record.warm_up = True
    found = impact_of(records)
    assert sum(entry.num_requests for entry in found.bins) == 96
