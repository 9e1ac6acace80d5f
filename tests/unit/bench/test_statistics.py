"""Percentiles, intervals, ratios and trends, against what is known of the samples."""

import math
import random
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.bench.figures.paired import MIN_ROUNDS, batch_means, nearest_rank, paired, share_interval

NUMBERS = st.floats(-1e6, 1e6, allow_nan=False)


@settings(max_examples=60)
@given(samples=st.lists(NUMBERS, min_size=1, max_size=60), percent=st.integers(1, 100))
def test_a_percentile_is_the_smallest_sample_that_so_many_do_not_exceed(
    samples: list[float], percent: int
) -> None:
    ordered = sorted(samples)
    found = nearest_rank(ordered, percent)
    assert found in samples
    # In whole numbers, where no rounding can hide a mistake.
    assert 100 * sum(one <= found for one in samples) >= percent * len(samples)
    assert 100 * sum(one < found for one in samples) < percent * len(samples)


def test_a_ratio_is_taken_round_by_round() -> None:
    # The machine gets slower from round to round; B is always twice as slow as A.
    slow = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    found = paired(slow, [2 * one for one in slow])
    assert (found.median, found.low, found.high, found.rounds) == (0.5, 0.5, 0.5, 6)
    assert found.is_conclusive


def test_few_rounds_prove_nothing_however_alike_they_are() -> None:
    found = paired([1.0] * (MIN_ROUNDS - 1), [2.0] * (MIN_ROUNDS - 1))
    assert (found.low, found.high) == (0.5, 0.5)
    assert not found.is_conclusive


def test_an_interval_of_the_median_covers_95_of_100_and_no_narrower_one_does() -> None:
    for num in range(MIN_ROUNDS, 60):
        found = paired([float(one) for one in range(1, num + 1)], [1.0] * num)
        # The chances of the interval found, and of that between the ranks next to its ends.
        covered, narrower = (
            Fraction(sum(math.comb(num, below) for below in range(rank, num - rank + 1)), 2**num)
            for rank in (int(found.low), int(found.low) + 1)
        )
        assert covered >= Fraction(95, 100) > narrower


def test_batch_means_are_wider_where_neighbours_depend_on_each_other() -> None:
    dice = random.Random(2)
    lone = [dice.gauss(0, 1) for _ in range(2000)]
    state, bound = 0.0, []
    for _ in range(2000):
        state = 0.95 * state + dice.gauss(0, 1)
        bound.append(state)
    alone, together = batch_means(lone), batch_means(bound)
    assert alone.low < 0 < alone.high
    assert alone.high - alone.low < 0.2
    # As independent samples of its variance (3.2 squared) they would claim 0.14 to either side.
    assert together.high - together.low > 4 * 0.14
    assert batch_means([1.0] * 39) is None


def test_failures_that_come_together_widen_the_interval_of_a_share() -> None:
    spread = share_interval([index % 10 != 0 for index in range(1000)])
    burst = share_interval([index >= 100 for index in range(1000)])
    assert spread.estimate == burst.estimate == 0.9
    assert burst.high - burst.low > 3 * (spread.high - spread.low)
