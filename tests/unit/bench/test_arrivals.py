"""Schedules: the same for a seed however long, in order, at the rate that was asked for."""

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.bench.plan.arrivals import (
    ArrivalProcess,
    Gaps,
    Recorded,
    parse_arrivals,
    realised,
    times,
)
from baton.bench.plan.plan import shaped
from baton.protocol.errors import ConfigError

# Few digits, so that a text holds them exactly.
RATES = st.sampled_from((0.25, 1.0, 5.0, 40.0, 1000.0))
GAPS = st.builds(Gaps, RATES, st.sampled_from((0.0, 0.2, 1.0, 3.0)))
SEEDS = st.integers(0, 2**40)


@settings(deadline=None)
@given(GAPS, SEEDS, st.integers(1, 300))
def test_a_count_and_a_duration_cut_the_same_ordered_schedule(
    process: Gaps, seed: int, few: int
) -> None:
    longer = times(process, duration_s=None, count=400, seed=seed)
    assert longer == sorted(longer)
    assert longer[0] >= 0
    assert times(process, duration_s=None, count=few, seed=seed) == longer[:few]
    cut = times(process, duration_s=longer[few], count=400, seed=seed)
    assert cut == [at_s for at_s in longer if at_s < longer[few]]


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_rate_and_burstiness_come_out_as_asked(cv: float) -> None:
    seen = [realised(times(Gaps(20, cv), duration_s=None, count=6000, seed=s)) for s in range(40)]
    rates, cvs = ([getattr(one, name) for one in seen] for name in ("rate", "cv"))
    assert statistics.fmean(rates) == pytest.approx(20, rel=0.02)
    assert statistics.fmean(cvs) == pytest.approx(cv, rel=0.02, abs=1e-6)


def test_a_seed_means_the_same_in_every_version() -> None:
    """Published runs name their seed. This fails if numpy ever draws otherwise."""
    first = times(Gaps(5, 1), duration_s=None, count=3, seed=0)
    assert first == pytest.approx([0.494250992300, 0.670773612904, 0.807459311677], abs=1e-11)


@pytest.mark.parametrize("text", ["constant:2", "poisson:0.5", "gamma:5,cv=3"])
def test_a_text_is_read_and_written_back(text: str) -> None:
    assert str(parse_arrivals(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "", "poisson", "poisson:", "poisson:x", "poisson:0", "poisson:-1", "poisson:nan",
        "poisson:inf", "poisson:1e300", "uniform:5", "gamma:5", "gamma:5,cv=0", "gamma:5,cv=nan",
        "gamma:5,cv=x", "constant:5,cv=1", "trace:0", "trace:5,cv=1", "ramp:1-10",
    ],
)  # fmt: skip
def test_a_text_that_is_wrong_is_refused_in_a_line(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_arrivals(text)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("shape", "process"),
    [("constant", Gaps(40.5, 0)), ("gamma,cv=3", Gaps(40.5, 3)), ("trace", Recorded(40.5))],
)
def test_a_shape_is_taken_at_any_rate(shape: str, process: ArrivalProcess) -> None:
    assert shaped(shape, 40.5) == process
    with pytest.raises(ConfigError, match="the rate must lie between"):
        shaped(shape, 1e9)
