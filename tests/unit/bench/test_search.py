"""The search against servers whose largest rate is known, with noise, invalid runs and limits."""

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.experiment import probe_of
from baton.bench.figures.search import Found, Probe, RateSearch, SearchOptions
from baton.bench.records import Outcome
from tests.support.bench_records import case_of, ended, run_of

GOAL = 0.9
Curve = Callable[[float], float]
# The rate that is expected, its attainment, and flaws.
Step = tuple[float, float, dict[str, bool]]


def knee(rate: float, width: float = 4.0) -> Curve:
    """Attains everything at low rates, nothing at high ones, and the goal exactly at `rate`."""
    return lambda offered: min(
        1.0, max(0.0, 1 - (1 - GOAL) * (offered / rate) ** width)
    )


def run(
    curve: Curve, options: SearchOptions | None = None, reach: float = math.inf
) -> Found:
    search = RateSearch(options or SearchOptions())
    while (rate := search.next_rate()) is not None:
        search.observe(Probe(rate, curve(rate), rate <= reach))
    return search.result()


BAD: dict[str, bool] = {"invalid": True}


def test_it_doubles_bisects_rechecks_and_confirms():
    found = run(knee(5.0), SearchOptions(tolerance=0.2))
    purposes = [probe.purpose for probe in found.probes]
    assert purposes == ["up"] * 4 + ["bisect"] * 2 + ["recheck"] + ["confirm"] * 3
    assert [probe.rate for probe in found.probes[:6]] == [1, 2, 4, 8, 5.657, 4.757]
    assert (found.ending, found.confirmed) == ("found", True)
    assert (found.rate, found.failing_rate) == (4.757, 5.657)
    assert (
        found.line
        == "4.757/s holds an attainment of 90%, confirmed by 3 runs; 5.657/s does not"
    )


@pytest.mark.parametrize(
    ("curve", "options", "reach", "ending", "said"),
    [
        (
            lambda _: 0.5,
            SearchOptions(min_rate=0.1),
            math.inf,
            "never_attained",
            "not even 0.1/s holds an attainment of 90%",
        ),
        (
            knee(1000.0),
            SearchOptions(),
            50.0,
            "client_limit",
            "this client cannot send",
        ),
        (
            knee(10.0),
            SearchOptions(),
            0.0,
            "no_valid_run",
            "the client cannot measure here",
        ),
    ],
)
def test_a_search_says_how_it_ended(curve, options, reach, ending, said):
    found = run(curve, options, reach)
    assert found.ending == ending
    assert said in found.line
    assert found.confirmed is (ending == "client_limit")


@pytest.mark.parametrize(
    ("steps", "options", "next_rate", "purpose"),
    [
        # One invalid run is repeated, not believed.
        ([(1.0, 0.0, BAD), (1.0, 1.0, {})], {}, 2.0, "up"),
        # A run that outran or broke the server is evidence, and does not attain.
        ([(1.0, 1.0, {}), (2.0, 1.0, {"saturated": True})], {}, 1.414, "bisect"),
        ([(1.0, 1.0, {}), (2.0, 1.0, {"broken": True})], {}, 1.414, "bisect"),
        ([(4.0, 0.0, {})], {"start_rate": 4.0}, 2.0, "down"),
        # A recheck that the client cannot repeat does not go on for ever.
        (
            [(1.0, 1.0, {}), (2.0, 0.0, {}), (2.0, 0.0, BAD), (2.0, 0.0, BAD)],
            {"tolerance": 1},
            1.0,
            "confirm",
        ),
    ],
)
def test_each_run_decides_the_next_one(steps, options, next_rate, purpose):
    search = RateSearch(SearchOptions(**options))
    for rate, attainment, flaws in steps:
        assert search.next_rate() == rate
        marks = {f"is_{name}": True for name in flaws if name != "invalid"}
        search.observe(Probe(rate, attainment, not flaws.get("invalid"), **marks))
    assert (search.next_rate(), search.purpose) == (next_rate, purpose)


@given(
    edge=st.floats(0.02, 5000),
    width=st.floats(0.5, 20),
    start=st.floats(0.01, 100),
    tolerance=st.floats(0.01, 0.5),
    noise=st.floats(0, 0.05),
    seed=st.integers(0, 999),
)
def test_it_converges_on_any_falling_curve_within_its_noise(
    edge, width, start, tolerance, noise, seed
):
    curve = knee(edge, width)
    dice = random.Random(seed)
    options = SearchOptions(
        start_rate=start,
        tolerance=tolerance,
        max_probes=1000,
        min_rate=0.001,
        confirmations=2,
    )
    found = run(lambda rate: curve(rate) + dice.uniform(-noise, noise), options)
    if found.ending == "never_attained":
        assert curve(0.001) <= GOAL + noise
        return
    assert (found.ending, found.confirmed) == ("found", True)
    assert found.failing_rate <= found.rate * (1 + tolerance)
    # What was confirmed holds up to the noise, and the next rate does not.
    assert curve(found.rate) >= GOAL - noise
    assert curve(found.failing_rate) <= GOAL + noise


@given(
    answers=st.lists(st.integers(0, 7), min_size=40, max_size=40),
    max_probes=st.integers(1, 40),
    confirmations=st.integers(1, 4),
)
def test_however_a_server_behaves_only_confirmed_rates_are_reported_as_confirmed(
    answers, max_probes, confirmations
):
    options = SearchOptions(
        max_probes=max_probes, confirmations=confirmations, min_rate=0.02
    )
    search = RateSearch(options)
    replies = iter(answers)
    while (rate := search.next_rate()) is not None:
        answer = next(replies)  # never more than `max_probes`
        assert options.min_rate <= rate
        search.observe(
            Probe(rate, float(answer > 2), answer != 3, is_saturated=answer == 4)
        )
    found = search.result()
    confirming = [
        probe
        for probe in found.probes
        if probe.rate == found.rate and probe.is_valid and probe.purpose == "confirm"
    ]
    if found.confirmed:
        assert len(confirming) == confirmations
        assert all(probe.attainment >= options.attainment for probe in confirming)
        assert not any(probe.is_saturated for probe in confirming)
    else:
        assert found.ending in ("probes_spent", "never_attained", "no_valid_run")


@pytest.mark.parametrize(
    ("outcomes", "is_valid"),
    [
        ((Outcome.REFUSED,), True),
        # Wrong lengths are the server's fault too.
        ((Outcome.WRONG_LENGTH, Outcome.ANSWERED), True),
        # Without a socket the client says nothing of the server.
        ((Outcome.NO_SOCKET,), False),
        ((Outcome.NO_SOCKET, Outcome.ANSWERED), False),
    ],
)
def test_a_run_that_failed_says_something_of_the_server_if_the_client_could_ask(
    outcomes, is_valid
):
    found = probe_of(1.0, run_of(case_of(len(outcomes)), ended(*outcomes), ""))
    assert found.is_valid is is_valid
    assert found.is_broken is is_valid
