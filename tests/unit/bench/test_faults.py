"""How faults are written, and what is said of one whose effect is known."""

import os
import random
from collections.abc import Callable

import msgspec
import pytest

from baton.bench.figures import faults
from baton.bench.figures.faults import FaultSpec, Impact, Injected, Judgement, parse_fault
from baton.bench.figures.metrics import Bounds
from baton.bench.records import Outcome, Record
from baton.protocol.errors import ConfigError
from tests.support.bench_records import request

FAULT_S = 10.0
BOUNDS = Bounds(gap_max_ms=200)
STEP_S = 0.02


def stream(
    index: int, at_s: float, *, stall: tuple[float, float] | None = None, num_tokens: int = 30
) -> Record:
    """First tokens after 0.1 s, then one every 20 ms, but none while `stall` lasts."""
    after_s: list[float] = []
    now_s = 0.1
    for _ in range(num_tokens):
        if stall and stall[0] <= at_s + now_s < stall[1]:
            now_s = stall[1] - at_s
        after_s.append(now_s)
        now_s += STEP_S
    return request(at_s, after_s, index=index, tail_s=0.001)


def refused(index: int, at_s: float) -> Record:
    return request(at_s, (), index=index, tail_s=0.005, outcome=Outcome.REFUSED)


def load(until_s: float = 25.0, stall: tuple[float, float] | None = None) -> list[Record]:
    """Four requests a second; each lasts 0.68 s when nothing happens."""
    return [stream(index, index / 4, stall=stall) for index in range(int(until_s * 4))]


def impact_of(
    records: list[Record],
    bounds: Bounds = BOUNDS,
    judgement: Judgement = Judgement(),  # noqa: B008  frozen
    at_s: float = FAULT_S,
) -> Impact:
    fault = Injected(FaultSpec("kill", 4711, at_s), at_s)
    return faults.impact_of(records, fault, bounds, judgement)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("kill:4711@10", FaultSpec("kill", 4711, 10.0)),
        ("stop:4711@1.5+2", FaultSpec("stop", 4711, 1.5, 2.0)),
    ],
)  # fmt: skip
def test_a_fault_is_read_and_written_alike(text: str, spec: FaultSpec) -> None:
    assert parse_fault(text) == spec
    assert str(spec) == text


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        (["pause:4711@10", "kill:router@10", "kill:4711", "kill:4711@-1"], "write kill:PID@10"),
        (["kill:4711@1.2.3"], "1.2.3"),
        (["kill:4711@10+2"], "a kill takes only a time"),
        (["stop:4711@10", "stop:4711@10+0"], "after how many seconds"),
        (["kill:1@10", "kill:0@10", f"kill:{os.getpid()}@10"], "not the id of a server"),
    ],
)
def test_a_fault_that_cannot_be_meant_is_refused_in_words(texts: list[str], why: str) -> None:
    for text in texts:
        with pytest.raises(ConfigError, match="fault") as raised:
            parse_fault(text)
        assert why in raised.value.message
        assert "\n" not in raised.value.message


# --- what one did --------------------------------------------------------------------------------


def refused_where(is_away: Callable[[float], bool]) -> list[Record]:
    """The usual load, but what arrives while the server is away is refused."""
    return [
        refused(one.index, one.intended_s) if is_away(one.intended_s) else one for one in load()
    ]


def changed(index: int, record: Record | None = None, **changes: object) -> list[Record]:
    """The usual load with another request, or one that ended in another way."""
    records = load()
    records[index] = record or msgspec.structs.replace(records[index], **changes)
    return records


def thin(seed: int) -> list[Record]:
    dice, moments_s = random.Random(seed), [0.0]
    while moments_s[-1] < 60:
        moments_s.append(moments_s[-1] + dice.expovariate(1.0))
    return [stream(index, at_s) for index, at_s in enumerate(moments_s)]


def closed_loop(*after: Record) -> list[Record]:
    """One client that asks twice a second until the fault."""
    return [*(stream(index, index / 2, num_tokens=20) for index in range(20)), *after]


TTFT_TOO = Bounds(ttft_ms=500, gap_max_ms=200)
UNNOTICED = {
    "time_to_detect_s": None, "time_to_resume_s": None, "time_to_recover_s": 0.0,
    "goodput_dip": 0.0, "attainment_before": 1.0, "num_failed": 0, "num_interrupted": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("records", "bounds", "judgement", "expected", "note"),
    [
        pytest.param(
            load(), BOUNDS, Judgement(), UNNOTICED, "no request noticed the fault", id="unnoticed"
        ),
        *(
            # However thin the arrivals are.
            pytest.param(
                thin(seed), BOUNDS, Judgement(), {"time_to_recover_s": 0.0}, "", id=f"thin {seed}"
            )
            for seed in range(20)
        ),
        # The request in flight does not notice, but some of 13 s do, for another reason.
        pytest.param(
            load(stall=(15.0, 18.0)), BOUNDS, Judgement(), {"num_interrupted": 0},
            "no request in flight noticed the fault", id="noticed only later",
        ),
        # Streams of 9.5, 9.75 and 10 s are in flight and get nothing until 13 s, so 200 ms are too
        # long for a gap that is usually 20 ms; the last token came just before the fault.
        pytest.param(
            load(stall=(FAULT_S, 13.0)), BOUNDS, Judgement(),
            {"num_in_flight": 3, "num_interrupted": 3, "num_resumed": 3, "num_failed": 0,
             "time_to_detect_s": 0.19, "time_to_resume_s": 3.0, "longest_wait_s": 3.02},
            "", id="a stall",
        ),
        # What arrived up to 12.5 s missed a bound; in the bin from 12 s on that is two of four.
        pytest.param(
            load(stall=(FAULT_S, 13.0)), TTFT_TOO, Judgement(),
            {"time_to_recover_s": 3.0, "goodput_dip": 12.0, "goodput_before": 38 / 10},
            "", id="recovery",
        ),
        # One of five at the fault: too few to bring attainment under 0.7 of that before.
        pytest.param(
            changed(39, stream(39, 9.75, stall=(FAULT_S, 12.5))), BOUNDS,
            Judgement(recovered_share=0.7), {"time_to_resume_s": 2.5, "time_to_recover_s": 3.0},
            "", id="one stream still waits",
        ),
        pytest.param(
            refused_where(lambda at_s: FAULT_S < at_s < 11 or 14 <= at_s < 15), BOUNDS, Judgement(),
            {"time_to_recover_s": 5.0, "num_failed": 7, "time_to_detect_s": 0.255},
            "", id="a relapse",
        ),
        pytest.param(
            refused_where(lambda at_s: at_s > FAULT_S), BOUNDS, Judgement(),
            {"time_to_recover_s": None, "goodput_dip": 59.0},
            "not recovered within 15 bins", id="never recovers",
        ),
        # A closed loop of one client: its stream is interrupted, and no other client asks.
        pytest.param(
            [*(stream(index, index * 0.7) for index in range(14)),
             stream(14, 9.8, stall=(FAULT_S, 14.0)),
             *(stream(15 + index, 14.6 + index * 0.7) for index in range(12))],
            BOUNDS, Judgement(), {"time_to_recover_s": 4.0}, "", id="empty bins are as before",
        ),
        pytest.param(
            [*load(until_s=9.0), refused(99, 9.1),
             *(stream(100 + index, 12.1 + index / 4) for index in range(40))],
            BOUNDS, Judgement(), {"time_to_recover_s": 2.0}, "", id="bad before, then idle",
        ),
        pytest.param(
            closed_loop(Record(index=20, intended_s=FAULT_S, sent_s=FAULT_S, end_s=FAULT_S + 30.0,
                               outcome=Outcome.TIMED_OUT)),
            BOUNDS, Judgement(closed_loop=True), {"time_to_recover_s": None, "goodput_dip": 60.0},
            "", id="a closed loop misses answers until its end",
        ),
        pytest.param(
            changed(-1, outcome=Outcome.STOPPED, end_s=60.0), BOUNDS, Judgement(),
            {"num_failed": 0}, "", id="stopped with the load",
        ),
        pytest.param(
            changed(39, outcome=Outcome.TRUNCATED, end_s=10.02), BOUNDS, Judgement(),
            {"time_to_detect_s": 0.02, "time_to_resume_s": None, "num_interrupted": 1,
             "num_resumed": 0, "num_failed": 1}, "", id="a failure is noticed when it ends",
        ),
        pytest.param(
            load(), Bounds(ttft_ms=1), Judgement(),
            {"attainment_before": 0.0, "time_to_recover_s": None}, "nothing to recover",
            id="bounds that nothing met before",
        ),
    ],
)  # fmt: skip
def test_the_effect_of_a_fault(
    records: list[Record], bounds: Bounds, judgement: Judgement, expected: object, note: str
) -> None:
    assert isinstance(expected, dict)
    found = impact_of(records, bounds, judgement)
    assert {name: getattr(found, name) for name in expected} == pytest.approx(expected, abs=STEP_S)
    assert any(note in one for one in found.notes) or not note


def test_an_interrupted_request_counts_at_the_fault_and_warm_up_counts_nowhere() -> None:
    records = load(stall=(FAULT_S, 10.5))
    for record in records[:4]:
        record.warm_up = True
    found = impact_of(records)
    (bin_of_fault,) = [entry for entry in found.bins if entry.start_s == FAULT_S]
    assert bin_of_fault.num_requests == 6
    assert found.attainment_before == 1.0
    assert sum(entry.num_requests for entry in found.bins) == 96


def test_a_stutter_that_was_there_before_is_not_the_fault() -> None:
    records = changed(39, stream(39, 9.75, stall=(FAULT_S, 10.5)))
    records[8] = stream(8, 2.0, stall=(2.2, 2.9))
    assert impact_of(records).time_to_detect_s is None


@pytest.mark.parametrize(
    ("is_closed", "refusal_s", "dip"),
    [(True, 0.01, 10.0), (True, 1.0, 10.0), (False, 0.01, 500.0), (False, 1.0, 5.0)],
)
def test_the_dip_of_a_closed_loop_does_not_depend_on_how_fast_refusals_come(
    is_closed: bool, refusal_s: float, dip: float
) -> None:
    """The server is away for five seconds."""
    records = closed_loop(
        *(refused(100 + i, FAULT_S + i * refusal_s) for i in range(round(5.0 / refusal_s))),
        *(stream(9000 + index, 15.0 + index / 2, num_tokens=20) for index in range(40)),
    )
    found = impact_of(records, judgement=Judgement(closed_loop=is_closed))
    assert found.time_to_recover_s == 5.0
    assert found.goodput_dip == pytest.approx(dip)


def test_the_usual_goodput_counts_answers_where_they_end() -> None:
    assert impact_of(load()).goodput_before == pytest.approx(4.0, rel=0.1)


def test_a_fault_before_anything_was_answered_has_nothing_to_recover_to() -> None:
    found = impact_of(load(), at_s=0.5)
    assert (found.attainment_before, found.time_to_recover_s) == (None, None)
    assert any("let it come later" in note for note in found.notes)
