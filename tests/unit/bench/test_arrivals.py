"""Schedules: the same for a seed however long, in order, at the rate that was asked for."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.bench.plan.arrivals import (
    ArrivalProcess,
    Constant,
    Gamma,
    Poisson,
    Ramp,
    Recorded,
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
DRAWN = st.one_of(
    st.builds(Constant, RATES),
    st.builds(Poisson, RATES),
    st.builds(Gamma, RATES, st.sampled_from((0.2, 1.0, 3.0))),
)
SEEDS = st.integers(0, 2**40)


@settings(deadline=None)
@given(DRAWN, SEEDS, st.integers(1, 300), st.integers(1, 300))
def test_fewer_arrivals_are_the_first_of_more(
    process: Poisson, seed: int, few: int, more: int
) -> None:
    longer = times(process, duration_s=None, count=few + more, seed=seed)
    assert times(process, duration_s=None, count=few, seed=seed) == longer[:few]


@settings(deadline=None)
@given(DRAWN, SEEDS)
def test_a_duration_cuts_the_same_schedule(process: Poisson, seed: int) -> None:
    longer = times(process, duration_s=None, count=400, seed=seed)
    end_s = longer[200]
    cut = times(process, duration_s=end_s, count=400, seed=seed)
    assert cut == [at_s for at_s in longer if at_s < end_s]


@settings(deadline=None)
@given(DRAWN | st.builds(Ramp, RATES, RATES), SEEDS)
def test_times_are_absolute_and_in_order(process: ArrivalProcess, seed: int) -> None:
    at = times(process, duration_s=30.0, count=500, seed=seed)
    assert at == sorted(at)
    assert all(0 <= at_s < 30 for at_s in at)


def test_another_seed_is_another_schedule() -> None:
    first, second = (times(Poisson(5), duration_s=None, count=9, seed=seed) for seed in (1, 2))
    assert not set(first) & set(second)


@pytest.mark.parametrize(
    ("process", "cv", "dispersion"),
    [
        (Constant(20), 0.0, 0.0),
        (Poisson(20), 1.0, 1.0),
        (Gamma(20, 0.5), 0.5, 0.25),
        (Gamma(20, 3.0), 3.0, 9.0),
    ],
)
def test_rate_and_burstiness_come_out_as_asked(
    process: ArrivalProcess, cv: float, dispersion: float
) -> None:
    """For gaps that do not depend on each other the dispersion tends to the square of the CV."""
    seen = realised(times(process, duration_s=None, count=100_000, seed=0))
    assert seen.rate == pytest.approx(20, rel=0.03)
    assert seen.cv == pytest.approx(cv, rel=0.05, abs=1e-6)
    assert seen.index_of_dispersion == pytest.approx(dispersion, rel=0.6, abs=0.01)


def test_a_gamma_of_cv_1_is_poisson() -> None:
    assert times(Gamma(5, 1), duration_s=9.0, count=None, seed=3) == times(
        Poisson(5), duration_s=9.0, count=None, seed=3
    )


@pytest.mark.parametrize("ramp", [Ramp(10, 50), Ramp(50, 10), Ramp(0, 60), Ramp(60, 0)])
def test_a_ramp_changes_its_rate_evenly(ramp: Ramp) -> None:
    at = times(ramp, duration_s=1000.0, count=None, seed=1)
    for quarter in range(4):
        middle = ramp.start_rate + (ramp.end_rate - ramp.start_rate) * (quarter + 0.5) / 4
        count = sum(quarter * 250 <= at_s < (quarter + 1) * 250 for at_s in at)
        assert count == pytest.approx(middle * 250, abs=5 * math.sqrt(middle * 250))


def test_a_seed_means_the_same_in_every_version() -> None:
    """Published runs name their seed. This fails if numpy ever draws otherwise."""
    first = times(Poisson(5), duration_s=None, count=3, seed=0)
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
        (Poisson(5), None, None, "a number of requests, a duration"),
        (Poisson(5), 0.0, None, "is not above 0"),
        (Poisson(5), math.nan, None, "is not above 0"),
        (Poisson(5), None, 0, "are none"),
        (Ramp(1, 2), None, 10, "a ramp needs a duration"),
        (Poisson(1e6), 3600.0, None, "too many"),
        (Recorded(), None, 10, "need a workload that brings times"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(
    process: ArrivalProcess, duration_s: float | None, count: int | None, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        times(process, duration_s=duration_s, count=count, seed=0)


@settings(deadline=None)
@given(DRAWN | st.builds(Ramp, RATES, RATES), RATES)
def test_the_rate_alone_changes_with_it(process: ArrivalProcess, rate: float) -> None:
    moved = at_rate(process, rate)
    assert mean_rate(moved) == pytest.approx(rate)
    assert type(moved) is type(process)
    if isinstance(process, Gamma) and isinstance(moved, Gamma):
        assert moved.cv == process.cv


def test_few_arrivals_have_no_figures_that_mean_nothing() -> None:
    assert realised([]).rate is None
    assert realised([1.0, 1.0]).rate is None
    pair = realised([1.0, 3.0])
    assert (pair.rate, pair.cv, pair.index_of_dispersion) == (0.5, 0.0, None)
    assert "2 arrivals at 0.5/s" in str(pair)
