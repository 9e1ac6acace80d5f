"""Every figure against records whose figures are known, and what may never change one."""

import math
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.bench.figures.metrics import (
    MIN_ROUNDS,
    Bounds,
    measure,
    meets,
    nearest_rank,
    paired,
    summarise,
)
from baton.bench.records import Outcome
from baton.protocol.errors import BatonError
from tests.support.bench_records import load, loads, request, steady

BOUNDS = Bounds(ttft_ms=150, tpot_ms=60, gap_max_ms=200)


def test_latencies_count_from_the_intended_arrival():
    timing = measure(request(10.0, (0.25, 0.35, 0.65), lag_s=0.05, tail_s=0.15))
    assert msgspec.structs.asdict(timing) == pytest.approx(
        {
            "lag_ms": 50,
            "ttft_ms": 250,
            "ttft_from_sent_ms": 200,
            "tpot_ms": 200,
            "gap_max_ms": 300,
            "e2e_ms": 800,
            "ntpot_ms": 800 / 3,
            "num_tokens": 3,
        }
    )


def test_a_chunk_of_several_tokens_counts_as_so_many_gaps():
    summary = summarise(load([request(0.0, [(0.1, 2), (0.4, 3), (0.5, 1)])]))
    assert summary.itl.count == 4
    assert (summary.itl.min, summary.itl.max) == pytest.approx((100, 100))
    assert summary.chunk_gap.count == 2
    assert summary.chunk_gap.max == pytest.approx(300)
    # The first chunk brought two of the six tokens: four followed it, in 0.4 s.
    assert summary.tpot.p50 == pytest.approx(100)
    assert summary.tokens_per_chunk == pytest.approx(2)


def test_a_limit_itself_is_within_the_bounds():
    record = request(0.0, (0.125, 0.1875))
    assert meets(
        record, Bounds(ttft_ms=125, tpot_ms=62.5, gap_max_ms=62.5, e2e_ms=187.5)
    )
    for name in Bounds.__struct_fields__:
        assert not meets(record, Bounds(**{name: 62.4}))
    # An answer without a token misses a bound on the first one alone.
    assert not meets(request(0.0, ()), Bounds(ttft_ms=1000))
    assert meets(request(0.0, ()), Bounds(e2e_ms=1000))


def test_a_failure_stays_in_the_denominator_and_out_of_the_latencies():
    good = request(0.0, (0.1, 0.15))
    bad = request(0.5, (0.001, 0.002), index=1, outcome=Outcome.REFUSED)
    summary = summarise(load([good, bad]), bounds=BOUNDS)
    assert summary.num_requests == 2
    assert summary.outcomes == {"answered": 1, "refused": 1}
    assert summary.attainment == 0.5
    assert summary.ttft.count == 1
    assert summary.ttft.min == pytest.approx(100)
    assert summary.lag.count == 2


def test_what_was_stopped_and_what_warmed_up_are_in_no_figure():
    stopped = request(0.5, (0.1, 0.2), index=9, outcome=Outcome.STOPPED)
    warm = request(-1.0, (0.9, 5.0), index=99)
    warm.warm_up = True
    summary = summarise(load([warm, *steady(5), stopped]), bounds=BOUNDS)
    assert summary == summarise(load(steady(5)), bounds=BOUNDS)
    with pytest.raises(BatonError, match="no request arrived, so"):
        summarise(load([warm, stopped]))


def test_a_short_open_loop_lasts_until_its_next_request_would_come():
    # Answered at once: within 0.92 s, which is no time for ten requests at 10/s.
    records = steady(10, ttft_s=0.01, num_tokens=2)
    bounds = Bounds(ttft_ms=100.1)
    summary = summarise(load(records), bounds=bounds)
    assert summary.window.end_s == pytest.approx(1.0)
    assert (
        summary.offered_rate
        == summary.answered_rate
        == summary.goodput
        == pytest.approx(10)
    )
    assert summary.concurrency == pytest.approx(10 * 0.02)
    closed = summarise(load(records), bounds=bounds, closed_loop=True)
    assert closed.window.end_s == pytest.approx(0.92)
    assert closed.tokens_per_s == pytest.approx(20 / 0.92)


@settings(max_examples=100)
@given(records=loads(), data=st.data())
def test_the_figures_of_any_load_agree_with_each_other(records, data):
    summary = summarise(load(records), bounds=BOUNDS)
    in_another_order = data.draw(st.permutations(records))
    assert summarise(load(in_another_order), bounds=BOUNDS) == summary
    # Every arrival is in every share.
    assert summary.num_requests == sum(summary.outcomes.values()) == len(records)
    assert summary.attainment is not None
    assert summary.attainment_interval is not None
    interval = summary.attainment_interval
    assert 0 <= interval.low <= summary.attainment <= interval.high <= 1
    num_met = sum(meets(record, BOUNDS) for record in records)
    assert summary.attainment == num_met / len(records)
    good = [record for record in records if record.outcome is Outcome.ANSWERED]
    assert num_met <= summary.outcomes.get("answered", 0) == len(good)
    # No more is answered per second than was offered.
    if summary.offered_rate is not None:
        assert summary.goodput <= summary.answered_rate <= summary.offered_rate
    # Gaps per token add up to the time between the first and the last token.
    spans_ms = sum(1e3 * (one.arrivals[-1].at_s - one.arrivals[0].at_s) for one in good)
    total_ms = summary.itl.mean * summary.itl.count if summary.itl else 0.0
    assert total_ms == pytest.approx(spans_ms)


NUMBERS = st.floats(-1e6, 1e6, allow_nan=False)


@settings(max_examples=60)
@given(samples=st.lists(NUMBERS, min_size=1, max_size=60), percent=st.integers(1, 100))
def test_a_percentile_is_the_smallest_sample_that_so_many_do_not_exceed(
    samples, percent
):
    ordered = sorted(samples)
    found = nearest_rank(ordered, percent)
    assert found in samples
    # In whole numbers, where no rounding can hide a mistake.
    assert 100 * sum(one <= found for one in samples) >= percent * len(samples)
    assert 100 * sum(one < found for one in samples) < percent * len(samples)


def test_an_interval_of_the_median_covers_95_of_100_and_no_narrower_one_does():
    for num in range(MIN_ROUNDS, 60):
        found = paired([float(one) for one in range(1, num + 1)], [1.0] * num)
        # The chances of the interval found, and of that between the ranks next to its ends.
        covered, narrower = (
            Fraction(
                sum(math.comb(num, below) for below in range(rank, num - rank + 1)),
                2**num,
            )
            for rank in (int(found.low), int(found.low) + 1)
        )
        assert covered >= Fraction(95, 100) > narrower
