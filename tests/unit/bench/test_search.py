"""The search against servers whose largest rate is known, with noise, invalid runs and limits."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.bench.figures.search import Ending, Found, Purpose, RateSearch, SearchOptions
from baton.protocol.errors import ConfigError

GOAL = 0.9
Curve = Callable[[float], float]


def knee(rate: float, width: float = 4.0) -> Curve:
    """Attains everything at low rates, nothing at high ones, and the goal exactly at `rate`."""
    return lambda offered: min(1.0, max(0.0, 1 - (1 - GOAL) * (offered / rate) ** width))


def run(curve: Curve, options: SearchOptions | None = None, reach: float = float("inf")) -> Found:
    search = RateSearch(options or SearchOptions())
    while (rate := search.next_rate()) is not None:
        search.observe(rate, curve(rate), rate <= reach)
    return search.result()


def purposes(found: Found) -> list[str]:
    return [probe.purpose.value for probe in found.probes]


def test_it_doubles_bisects_rechecks_and_confirms() -> None:
    found = run(knee(5.0), SearchOptions(tolerance=0.2))
    assert purposes(found) == ["up"] * 4 + ["bisect"] * 2 + ["recheck"] + ["confirm"] * 3
    assert [probe.rate for probe in found.probes[:6]] == [1, 2, 4, 8, 5.657, 4.757]
    assert found.ending is Ending.FOUND
    assert found.confirmed
    assert (found.rate, found.failing_rate) == (4.757, 5.657)
    assert found.line == "4.757/s holds an attainment of 90%, confirmed by 3 runs; 5.657/s does not"


def test_it_goes_down_from_a_start_that_is_too_fast() -> None:
    found = run(knee(0.3), SearchOptions(start_rate=10))
    assert found.confirmed
    assert found.rate == pytest.approx(0.3, rel=0.05)
    assert purposes(found)[1] == "down"


def test_bounds_that_nothing_meets_end_in_never_attained() -> None:
    found = run(lambda _: 0.5, SearchOptions(min_rate=0.1))
    assert found.ending is Ending.NEVER_ATTAINED
    assert found.rate is None
    assert not found.confirmed
    assert found.line.startswith("not even 0.1/s holds an attainment of 90%")


def test_bounds_that_a_request_misses_when_it_is_alone_end_the_search_at_once() -> None:
    rates = RateSearch(SearchOptions(start_rate=4.0))
    rates.observe(4.0, 0.0, True)
    assert rates.next_rate() == 2.0
    rates.observe(2.0, 0.0, True, alone=True)
    assert rates.next_rate() is None
    assert rates.result().ending is Ending.NEVER_ATTAINED


def test_a_rate_that_the_client_cannot_send_is_no_failure_of_the_server() -> None:
    found = run(knee(1000.0), reach=50.0)
    assert found.ending is Ending.CLIENT_LIMIT
    assert found.confirmed
    assert found.rate is not None
    assert 45 <= found.rate <= 50
    assert found.failing_rate is None
    assert "this client cannot send" in found.line


def test_a_client_that_can_measure_nothing_is_told_so() -> None:
    found = run(knee(10.0), reach=0.0)
    assert found.ending is Ending.NO_VALID_RUN
    assert found.rate is None


def test_the_largest_rate_allowed_is_confirmed_and_not_passed() -> None:
    found = run(knee(1000.0), SearchOptions(max_rate=12.5))
    assert found.ending is Ending.RATE_LIMIT
    assert (found.rate, found.confirmed) == (12.5, True)
    assert max(probe.rate for probe in found.probes) == 12.5


def test_one_invalid_run_is_repeated_not_believed() -> None:
    search = RateSearch()
    search.observe(1.0, 0.0, False)
    assert search.next_rate() == 1.0
    search.observe(1.0, 1.0, True)
    assert search.next_rate() == 2.0


def test_a_recheck_that_the_client_cannot_repeat_does_not_go_on_for_ever() -> None:
    search = RateSearch(SearchOptions(tolerance=1, confirmations=1))
    search.observe(1.0, 1.0, True)
    search.observe(2.0, 0.0, True)
    for _ in range(2):
        assert search.purpose is Purpose.RECHECK
        search.observe(2.0, 0.0, False)
    search.observe(1.0, 1.0, True)
    found = search.result()
    assert (found.ending, found.rate, found.confirmed) == (Ending.FOUND, 1.0, True)


def test_a_saturated_run_does_not_attain() -> None:
    search = RateSearch()
    search.observe(1.0, 1.0, True)
    search.observe(2.0, 1.0, True, saturated=True)
    assert search.purpose is Purpose.BISECT


def test_a_run_that_the_server_broke_is_evidence_and_does_not_attain() -> None:
    search = RateSearch()
    search.observe(1.0, 1.0, True)
    search.observe(2.0, 0.95, True, broken=True)
    assert search.purpose is Purpose.BISECT
    assert search.probes[-1].is_broken


def test_a_server_that_breaks_every_run_is_not_said_to_be_too_slow() -> None:
    search = RateSearch(SearchOptions(start_rate=2.0, min_rate=1.0))
    while (rate := search.next_rate()) is not None:
        search.observe(rate, 0.95, True, broken=True)
    found = search.result()
    assert (found.ending, found.confirmed) == (Ending.NEVER_ATTAINED, False)
    assert found.line == "no run was valid, down to 1/s, and that is the server's fault"


def test_one_bad_run_far_below_the_knee_is_found_out() -> None:
    """The first run at 2/s meets a hiccup of the machine; the server holds 100/s."""
    hiccups = [2.0]

    def curve(rate: float) -> float:
        if rate in hiccups:
            hiccups.remove(rate)
            return 0.0
        return knee(100.0)(rate)

    found = run(curve)
    assert found.confirmed
    assert found.rate == pytest.approx(100, rel=0.05)


def test_a_rate_that_holds_only_sometimes_is_not_confirmed() -> None:
    """At 4 to 6/s every third run fails, so three in a row never pass; below all of them do."""
    turns = iter(range(1000))

    def curve(rate: float) -> float:
        if rate <= 4:
            return 1.0
        return 1.0 if rate < 6 and next(turns) % 3 < 2 else 0.0

    found = run(curve, SearchOptions(max_probes=100))
    assert found.confirmed
    assert found.rate is not None
    assert 3.8 <= found.rate <= 4


def test_a_search_without_runs_left_reports_nothing_as_confirmed() -> None:
    for max_probes in range(1, 12):
        found = run(knee(50.0), SearchOptions(max_probes=max_probes))
        assert found.ending is Ending.PROBES_SPENT
        assert not found.confirmed
        assert len(found.probes) == max_probes
        assert "unconfirmed" in found.line


def test_a_search_that_has_not_ended_says_so() -> None:
    search = RateSearch()
    search.observe(1.0, 1.0, True)
    found = search.result()
    assert (found.ending, found.rate, found.confirmed) == (Ending.RUNNING, 1.0, False)
    assert search.next_rate() == search.next_rate() == 2.0


@settings(max_examples=200, deadline=None)
@given(
    edge=st.floats(0.02, 5000),
    width=st.floats(0.5, 20),
    start=st.floats(0.01, 100),
    tolerance=st.floats(0.01, 0.5),
    noise=st.floats(0, 0.05),
    seed=st.integers(0, 999),
)
def test_it_converges_on_any_falling_curve_within_its_noise(
    edge: float, width: float, start: float, tolerance: float, noise: float, seed: int
) -> None:
    curve, dice = knee(edge, width), random.Random(seed)
    options = SearchOptions(
        start_rate=start, tolerance=tolerance, max_probes=1000, min_rate=0.001, confirmations=2
    )
    found = run(lambda rate: curve(rate) + dice.uniform(-noise, noise), options)
    if found.ending is Ending.NEVER_ATTAINED:
        assert curve(0.001) <= GOAL + noise
        return
    assert found.ending is Ending.FOUND
    assert found.confirmed
    assert found.rate is not None
    assert found.failing_rate is not None
    assert found.failing_rate <= found.rate * (1 + tolerance)
    # What was confirmed holds up to the noise, and the next rate does not.
    assert curve(found.rate) >= GOAL - noise
    assert curve(found.failing_rate) <= GOAL + noise


@settings(max_examples=200, deadline=None)
@given(
    answers=st.lists(st.integers(0, 7), min_size=40, max_size=40),
    max_probes=st.integers(1, 40),
    confirmations=st.integers(1, 4),
    max_rate=st.none() | st.floats(0.02, 50),
)
def test_whatever_a_server_does_only_confirmed_rates_are_reported_as_confirmed(
    answers: list[int],
    max_probes: int,
    confirmations: int,
    max_rate: float | None,
) -> None:
    options = SearchOptions(
        max_probes=max_probes, confirmations=confirmations, max_rate=max_rate or 0.0, min_rate=0.02
    )
    search, replies = RateSearch(options), iter(answers)
    while (rate := search.next_rate()) is not None:
        answer = next(replies)  # never more than `max_probes`
        assert options.min_rate <= rate <= (max_rate or rate)
        search.observe(rate, float(answer > 2), answer != 3, saturated=answer == 4)
    found = search.result()
    confirming = [
        probe
        for probe in found.probes
        if probe.rate == found.rate and probe.is_valid and probe.purpose is Purpose.CONFIRM
    ]
    if found.confirmed:
        assert len(confirming) == confirmations
        assert all(probe.attainment >= options.attainment for probe in confirming)
        assert not any(probe.is_saturated for probe in confirming)
    else:
        assert found.ending in (Ending.PROBES_SPENT, Ending.NEVER_ATTAINED, Ending.NO_VALID_RUN)


@pytest.mark.parametrize(
    "options",
    [
        SearchOptions(attainment=0.0),
        SearchOptions(attainment=90),
        SearchOptions(tolerance=0.001),
        SearchOptions(start_rate=0.0),
        SearchOptions(start_rate=float("nan")),
        SearchOptions(max_rate=0.001),
        SearchOptions(confirmations=0),
        SearchOptions(max_probes=0),
    ],
)
def test_options_that_cannot_work_are_refused(options: SearchOptions) -> None:
    with pytest.raises(ConfigError):
        RateSearch(options)


def test_a_rate_that_was_never_run_validly_is_not_said_to_be_out_of_reach() -> None:
    search = RateSearch(SearchOptions(start_rate=2.0, min_rate=1.0))
    search.observe(2.0, 0.0, True)
    for _ in range(2):
        search.observe(1.0, 0.0, False)
    found = search.result()
    assert search.next_rate() is None
    assert found.ending is Ending.NO_VALID_RUN
    assert found.line == "no run at 1/s was valid, and 2/s does not hold an attainment of 90%"
