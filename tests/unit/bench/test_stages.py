"""Stages against requests whose every part is known; and what a server may claim."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.figures.metrics import summarise
from baton.bench.figures.stages import (
    STAGES,
    UNATTRIBUTED,
    Timeline,
    read_timeline,
    stages_of,
    sum_error_s,
)
from baton.bench.records import Outcome, Record, Stage
from baton.bench.report.document import Run, Table
from baton.bench.report.sections import sections
from tests.support.bench_records import load, report_of, request

# A request as baton's router describes it: 20 ms to the first token by its clock, of which 1 ms
# went into messages between nodes, and 60 ms in all.
TIMELINE = Timeline(
    router_queue_s=0.002,
    queue_s=0.003,
    prefill_s=0.014,
    exposed_s=0.004,
    decode_queue_s=0.001,
    first_step_s=0.005,
    time_to_first_token_s=0.020,
    e2e_s=0.060,
)


def durations_ms(stages: list[Stage]) -> dict[str, float]:
    return {stage.name: round(1e3 * stage.duration_s, 6) for stage in stages}


def test_every_part_is_found_and_they_add_up() -> None:
    # 5 ms on the way in and back for the first token, 6 ms for the last; 1 ms of lag.
    # Between the first and the second token lie 12 ms, of which the stages explain 10.
    record = request(0.0, (0.026, 0.038, 0.052, 0.067), lag_s=0.001)
    record.stages = stages_of(TIMELINE, record)
    assert list(durations_ms(record.stages)) == list(STAGES)
    assert durations_ms(record.stages) == {
        "client_lag": 1,
        "before_server": 5,
        "router_queue": 2,
        "queue": 3,
        "prefill": 14,
        "exposed_transfer": 4,
        "decode_queue": 1,
        "first_step": 5,
        "decoding": 29,
        "after_server": 1,
        UNATTRIBUTED: 2,
    }
    assert sum_error_s(record) == pytest.approx(0)
    assert stages_of(TIMELINE, request(0.0, ())) == []


@pytest.mark.parametrize(
    ("timeline", "record", "expected"),
    [
        # The first token was held up and comes with the second: nothing is counted twice.
        (TIMELINE, request(0.0, [(0.037, 2), (0.049, 1), (0.065, 1)]),
         {"before_server": 5, "after_server": 0}),
        # The client sees the second token 2 ms after the first; the server says it took 10 ms.
        (TIMELINE, request(0.0, (0.025, 0.027, 0.040, 0.065)), {"decoding": 31}),
        (Timeline(router_queue_s=0.001, prefill_s=0.01, time_to_first_token_s=0.012, e2e_s=0.012),
         request(0.0, (0.015,), tail_s=0.002),
         {"before_server": 3, "after_server": 2, "decoding": 0, UNATTRIBUTED: 1}),
        # A server that says little leaves the rest unattributed.
        (Timeline(queue_s=0.03), request(0.0, (0.1, 0.2, 0.3)),
         {"queue": 30, "decoding": 100, UNATTRIBUTED: 170, "before_server": 0, "after_server": 0}),
    ],
)  # fmt: skip
def test_stamps_and_claims_that_do_not_quite_agree_still_add_up(
    timeline: Timeline, record: Record, expected: dict[str, float]
) -> None:
    record.stages = stages_of(timeline, record)
    assert expected.items() <= durations_ms(record.stages).items()
    assert sum_error_s(record) == pytest.approx(0)


def tables_of(records: list[Record]) -> list[Table]:
    run = Run(label="a load", summary=summarise(load(records)), records=records)
    tables = [table for section in sections(report_of([run])) for table in section.tables]
    return [table for table in tables if table.title == "Stages, ms"]


def test_a_server_that_claims_more_time_than_there_was_is_found_out() -> None:
    record = request(0.0, (0.02, 0.03))
    record.stages = stages_of(
        Timeline(prefill_s=0.05, time_to_first_token_s=0.02, e2e_s=0.03), record
    )
    assert sum_error_s(record) == pytest.approx(0.02)
    (table,) = tables_of([record])
    assert "their stages DO NOT ADD UP to e2e within 1 ms for 1 request" in table.caption


def test_a_table_is_of_answered_requests_and_says_how_many_had_no_timeline() -> None:
    records = [request(0.1 * place, (0.026, 0.038, 0.066), index=place) for place in range(4)]
    for record in records[:3]:
        record.stages = stages_of(TIMELINE, record)
    records[2].outcome = Outcome.TRUNCATED
    (table,) = tables_of(records)
    assert table.caption == (
        "2 requests with a timeline; their stages add up to e2e within 0.001 ms; 1 answered "
        "without one"
    )
    assert [row[0] for row in table.rows] == list(STAGES)
    assert sum(float(row[-1].strip("<>% ")) for row in table.rows) == pytest.approx(100, 0.01)
    assert tables_of(records[3:]) == []


def test_a_timeline_is_an_entry_or_a_list_of_one() -> None:
    known = b'{"queue_s":0.5,"arrival_time":1.0,"path":"local_prefill","max_tokens_clamped":null}'
    assert read_timeline(known) == Timeline(queue_s=0.5)
    assert read_timeline(msgspec.Raw(b"[" + known + b"]")) == read_timeline(known)


@pytest.mark.parametrize(
    "data", [b"null", b"[]", b"[{},{}]", b'{"queue_s":-1}', b'{"queue_s":"1"}', b"7", b"{", b"\xff"]
)
def test_what_is_no_timeline_is_none(data: bytes) -> None:
    assert read_timeline(data) is None


SECONDS = st.integers(0, 500).map(lambda ms: ms / 1e3)


@given(
    parts=st.fixed_dictionaries(
        {name: st.none() | SECONDS for name in Timeline.__struct_fields__ if name.endswith("_s")}
    ),
    gaps=st.lists(SECONDS, min_size=1, max_size=5),
    lag_s=SECONDS,
    tail_s=SECONDS,
)
def test_whatever_a_server_says_no_stage_is_negative_and_none_is_missing(
    parts: dict[str, float | None], gaps: list[float], lag_s: float, tail_s: float
) -> None:
    stamps = [lag_s + sum(gaps[: place + 1]) for place in range(len(gaps))]
    record: Record = request(0.0, stamps, lag_s=lag_s, tail_s=tail_s)
    record.stages = stages_of(msgspec.convert(parts, Timeline), record)
    assert [stage.name for stage in record.stages] == list(STAGES)
    assert all(stage.duration_s >= 0 for stage in record.stages)
    assert sum_error_s(record) > -1e-9
    if sum_error_s(record) > 1e-9:  # too much was claimed, so nothing was left over
        assert record.stages[-1].duration_s == 0
