"""Lengths: whole, within bounds, with the mean and spread that the text names."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.bench.plan.lengths import MAX_LENGTH, Choice, Fixed, LogNormal, Uniform, parse_lengths
from baton.protocol.errors import ConfigError

TEXTS = (
    "512", "uniform:100-900", "normal:512,sd=100", "lognormal:mean=1155,sd=1100",
    "choice:100,200,400",
)  # fmt: skip


def drawn(text: str, num: int = 20_000) -> list[int]:
    rng = np.random.default_rng(0)
    lengths = parse_lengths(text)
    return [lengths.draw(rng) for _ in range(num)]


@pytest.mark.parametrize(
    ("text", "mean", "sd"),
    [
        ("512", 512, 0),
        ("uniform:100-900", 500, 800 / math.sqrt(12)),
        ("normal:512,sd=100", 512, 100),
        ("normal:mean=512,sd=100", 512, 100),
        ("lognormal:mean=1155,sd=1100", 1155, 1100),
        ("choice:100,200,400", 700 / 3, 124.7),
    ],
)
def test_mean_and_spread_are_those_of_the_text(text: str, mean: float, sd: float) -> None:
    lengths = drawn(text)
    assert statistics.fmean(lengths) == pytest.approx(mean, rel=0.02)
    assert statistics.pstdev(lengths) == pytest.approx(sd, rel=0.05)


@settings(deadline=None)
@given(st.sampled_from(TEXTS[1:]), st.integers(1, 600), st.integers(0, 2**32))
def test_a_length_lies_between_1_and_the_cap(text: str, cap: int, seed: int) -> None:
    length = parse_lengths(f"{text},max={cap}").draw(np.random.default_rng(seed))
    assert isinstance(length, int)
    assert 1 <= length <= cap


@settings(deadline=None)
@given(st.sampled_from(TEXTS), st.integers(0, 2**32))
def test_a_seed_draws_the_same_and_a_cap_does_not_shift_it(text: str, seed: int) -> None:
    plain, again = (np.random.default_rng(seed) for _ in range(2))
    free = [parse_lengths(text).draw(plain) for _ in range(5)]
    capped_text = text if text.isdecimal() else f"{text},max=300"
    cap = MAX_LENGTH if text.isdecimal() else 300
    assert [parse_lengths(capped_text).draw(again) for _ in range(5)] == [
        min(length, cap) for length in free
    ]


def test_a_normal_that_falls_below_1_stays_at_1() -> None:
    assert min(drawn("normal:5,sd=50")) == 1


def test_every_edge_of_a_uniform_comes_up() -> None:
    assert set(drawn("uniform:3-5", 200)) == {3, 4, 5}


def test_texts_name_their_shapes() -> None:
    assert parse_lengths(" 7 ").shape == Fixed(7)
    assert parse_lengths("uniform:1-2").shape == Uniform(1, 2)
    assert parse_lengths("choice:5,5,9").shape == Choice((5, 5, 9))
    assert parse_lengths("lognormal:9,sd=2").shape == LogNormal(9.0, 2.0)


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
