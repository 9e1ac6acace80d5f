"""Lengths: whole, within bounds, with the mean and spread that the text names."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.bench.plan.prompts import parse_lengths
from baton.protocol.errors import ConfigError

TEXTS = (
    "uniform:100-900", "normal:512,sd=100", "lognormal:mean=1155,sd=1100", "choice:100,200,400",
)  # fmt: skip


def drawn(text: str, num: int = 20_000, seed: int = 0) -> list[int]:
    rng = np.random.default_rng(seed)
    lengths = parse_lengths(text)
    return [lengths.draw(rng) for _ in range(num)]


@pytest.mark.parametrize(
    ("text", "mean", "sd"),
    [
        (" 512 ", 512, 0),
        ("uniform:100-900", 500, 800 / math.sqrt(12)),
        ("normal:512,sd=100", 512, 100),
        ("normal:mean=512,sd=100", 512, 100),
        ("lognormal:mean=1155,sd=1100", 1155, 1100),
        ("choice:100,200,400", 700 / 3, 124.7),
        ("choice:100,100,400", 200, 141.4),  # named twice, so twice as likely
    ],
)
def test_mean_and_spread_are_those_of_the_text(text: str, mean: float, sd: float) -> None:
    lengths = drawn(text)
    assert statistics.fmean(lengths) == pytest.approx(mean, rel=0.02)
    assert statistics.pstdev(lengths) == pytest.approx(sd, rel=0.05)


@settings(deadline=None)
@given(st.sampled_from(TEXTS), st.integers(1, 600), st.integers(0, 2**32))
def test_a_cap_moves_what_lies_beyond_it_and_shifts_no_draw(text: str, cap: int, seed: int) -> None:
    capped = drawn(f"{text},max={cap}", 5, seed)
    assert capped == [min(length, cap) for length in drawn(text, 5, seed)]
    assert all(isinstance(length, int) and 1 <= length <= cap for length in capped)


def test_both_edges_come_up_and_nothing_beyond() -> None:
    assert set(drawn("uniform:3-5", 200)) == {3, 4, 5}
    assert min(drawn("normal:5,sd=50")) == 1


@pytest.mark.parametrize(
    "text",
    [
        "", "0", "-3", "1.5", "x", "uniform:9-3", "uniform:0-3", "uniform:5", "normal:512",
        "normal:nan,sd=1", "normal:5,sd=-1", "normal:5,sd=inf", "lognormal:mean=0,sd=1", "choice:",
        "choice:1,x", "choice:0,5", "zipf:3", "choice:1,max=0", "512,max=3", "99999999999",
        "lognormal:mean=5,sd=1e300", "uniform:1-9,max=1e3",
    ],
)  # fmt: skip
def test_a_text_that_is_wrong_is_refused_in_a_line(text: str) -> None:
    with pytest.raises(ConfigError, match="not of the form") as caught:
        parse_lengths(text)
    assert "\n" not in caught.value.message
