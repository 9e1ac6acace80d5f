"""The plain truth, by hand: what a few stamps come to under the printed definitions."""

import pytest

from baton.bench.selftest.scripted_server import Answer, Write
from baton.bench.selftest.truth import Range, percentile_of, truth_of


def answer(*writes: tuple[float, tuple[int, ...]], took_s: float = 0.0) -> Answer:
    stamps = [Write(at_s, took_s, num_tokens) for at_s, num_tokens in writes]
    return Answer(number=1, received_s=100.0, writes=stamps)


def exactly(value: float) -> Range:
    return Range(value, value)


# Binary fractions of a second, so that no sum is rounded.
def test_writes_without_tokens_count_only_as_the_end() -> None:
    truth = truth_of(answer((100.125, ()), (100.25, (1,)), (100.5, (1,)), (100.75, ())), 100.0)
    assert truth["ttft"] == [exactly(250)]
    assert truth["e2e"] == [exactly(750)]
    assert truth["itl"] == [exactly(250)]


def test_a_gap_is_shared_by_the_tokens_after_it() -> None:
    truth = truth_of(answer((100.0, (2,)), (100.5, (4,)), (100.625, (1,))), 99.0)
    assert truth["itl"] == [exactly(125)] * 5
    assert truth["tpot"] == [exactly(125)]  # five tokens after the first chunk, in 625 ms
    assert truth["gap_max"] == [exactly(500)]


def test_events_of_one_write_are_one_chunk() -> None:
    truth = truth_of(answer((100.0, (1,)), (100.5, (1, 3))), 100.0)
    assert truth["itl"] == [exactly(125)] * 4


def test_tokens_that_come_at_once_have_no_gaps() -> None:
    truth = truth_of(answer((100.0, (4,))), 100.0)
    assert (truth["itl"], truth["tpot"], truth["gap_max"]) == ([], [], [])


def test_the_time_that_writing_took_is_not_known_any_better() -> None:
    truth = truth_of(answer((100.0, (1,)), (100.25, (1,)), took_s=0.125), 100.0)
    assert truth["ttft"] == [Range(0.0, 125.0)]
    assert truth["gap_max"] == [Range(125.0, 375.0)]


@pytest.mark.parametrize(("percent", "value"), [(1, 1), (50, 2), (51, 3), (90, 4), (99, 4)])
def test_a_percentile_is_a_value_of_the_sample(percent: int, value: float) -> None:
    sample = [Range(v, v + 0.5) for v in (4.0, 1.0, 3.0, 2.0)]
    assert percentile_of(sample, percent) == Range(value, value + 0.5)


def test_distance_is_from_the_nearer_end() -> None:
    assert [Range(1, 3).distance(value) for value in (0.5, 1, 2, 3, 4)] == [-0.5, 0, 0, 0, 1]
