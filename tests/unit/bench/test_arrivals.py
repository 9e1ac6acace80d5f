"""Schedules: the same for a seed however long, in order, at the rate that was asked for."""

import math
import statistics
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.bench.plan.arrivals import (
    ArrivalProcess,
    Gaps,
    Ramp,
    Realised,
    at_rate,
    mean_rate,
    parse_arrivals,
    realised,
    text_of,
    times,
)
from baton.protocol.errors import ConfigError

# Few digits, so that a text holds them exactly.
RATES = st.sampled_from((0.25, 1.0, 5.0, 40.0, 1000.0))
GAPS = st.builds(Gaps, RATES, st.sampled_from((0.0, 0.2, 1.0, 3.0)))
DRAWN = GAPS | st.builds(Ramp, RATES, RATES)
SEEDS = st.integers(0, 2**40)


@settings(deadline=None)
@given(GAPS, SEEDS, st.integers(1, 300))
def test_a_count_and_a_duration_cut_the_same_schedule(process: Gaps, seed: int, few: int) -> None:
    longer = times(process, duration_s=None, count=400, seed=seed)
    assert times(process, duration_s=None, count=few, seed=seed) == longer[:few]
    cut = times(process, duration_s=longer[few], count=400, seed=seed)
    assert cut == [at_s for at_s in longer if at_s < longer[few]]


@settings(deadline=None)
@given(DRAWN, SEEDS)
def test_times_are_absolute_and_in_order(process: Gaps | Ramp, seed: int) -> None:
    at = times(process, duration_s=30.0, count=500, seed=seed)
    assert at == sorted(at)
    assert all(0 <= at_s < 30 for at_s in at)


def test_another_seed_is_another_schedule() -> None:
    first, second = (times(Gaps(5, 1), duration_s=None, count=9, seed=seed) for seed in (1, 2))
    assert not set(first) & set(second)


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_rate_and_burstiness_come_out_as_asked(cv: float) -> None:
    """For gaps that do not depend on each other the dispersion tends to the square of the CV.

    That of one schedule has a standard error of about 18 %, as it rests on 60 windows; the mean of
    40 has one of 3 %.
    """
    seen = [realised(times(Gaps(20, cv), duration_s=None, count=6000, seed=s)) for s in range(40)]

    def mean(figure: Callable[[Realised], float | None]) -> float:
        return statistics.fmean(found for one in seen if (found := figure(one)) is not None)

    assert mean(lambda one: one.rate) == pytest.approx(20, rel=0.02)
    assert mean(lambda one: one.cv) == pytest.approx(cv, rel=0.02, abs=1e-6)
    assert mean(lambda one: one.index_of_dispersion) == pytest.approx(cv**2, rel=0.1, abs=0.01)


@pytest.mark.parametrize("ramp", [Ramp(10, 50), Ramp(50, 10), Ramp(0, 60), Ramp(60, 0)])
def test_a_ramp_changes_its_rate_evenly(ramp: Ramp) -> None:
    at = times(ramp, duration_s=1000.0, count=None, seed=1)
    for quarter in range(4):
        middle = ramp.start_rate + (ramp.end_rate - ramp.start_rate) * (quarter + 0.5) / 4
        count = sum(quarter * 250 <= at_s < (quarter + 1) * 250 for at_s in at)
        assert count == pytest.approx(middle * 250, abs=5 * math.sqrt(middle * 250))


def test_a_seed_means_the_same_in_every_version() -> None:
    """Published runs name their seed. This fails if numpy ever draws otherwise."""
    first = times(Gaps(5, 1), duration_s=None, count=3, seed=0)
    assert first == pytest.approx([0.494250992300, 0.670773612904, 0.807459311677], abs=1e-11)


@pytest.mark.parametrize(
    "text",
    ["constant:2", "poisson:0.5", "gamma:5,cv=3", "ramp:1-10", "ramp:0-3", "trace", "trace:2"],
)
def test_a_text_is_read_and_written_back(text: str) -> None:
    assert text_of(parse_arrivals(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "", "poisson", "poisson:", "poisson:x", "poisson:0", "poisson:-1", "poisson:nan",
        "poisson:inf", "poisson:1e300", "uniform:5", "gamma:5", "gamma:5,cv=0", "gamma:5,cv=nan",
        "ramp:5", "ramp:0-0", "ramp:1-nan", "constant:5,cv=1", "trace:0",
    ],
)  # fmt: skip
def test_a_text_that_is_wrong_is_refused_in_a_line(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_arrivals(text)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("process", "duration_s", "count", "why"),
    [
        (Ramp(1, 2), None, 10, "a ramp needs --duration-s"),
        (Gaps(1e6, 1), 3600.0, None, "too many"),
        (Gaps(1, 1), None, 3_000_000, "too many"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(
    process: Gaps | Ramp, duration_s: float | None, count: int | None, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        times(process, duration_s=duration_s, count=count, seed=0)


@settings(deadline=None)
@given(DRAWN, RATES)
def test_the_rate_alone_changes_with_it(process: ArrivalProcess, rate: float) -> None:
    moved = at_rate(process, rate)
    assert mean_rate(moved) == pytest.approx(rate)
    assert type(moved) is type(process)
    if isinstance(process, Gaps) and isinstance(moved, Gaps):
        assert moved.cv == process.cv


def test_few_arrivals_have_no_figures_that_mean_nothing() -> None:
    assert realised([]).rate is None
    assert realised([1.0, 1.0]).rate is None
    pair = realised([1.0, 3.0])
    assert (pair.rate, pair.cv, pair.index_of_dispersion) == (0.5, 0.0, None)
    assert "2 arrivals at 0.5/s" in str(pair)
