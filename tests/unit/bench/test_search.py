"""The search against servers whose largest rate is known, with noise, invalid runs and limits."""

import math
import random
import re
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.bench.console import shown
from baton.bench.figures.search import Ending, Found, Purpose, RateSearch, SearchOptions
from baton.bench.judging import judge
from baton.bench.plan.arrivals import realised
from baton.bench.plan.plan import Plan
from baton.bench.records import Outcome, Planned
from baton.bench.report.document import Run
from baton.bench.search import is_servers_fault, observe, with_offered
from tests.support.bench_records import answered, case_of, ended, invalid, loaded, report_of

GOAL = 0.9
Curve = Callable[[float], float]


def knee(rate: float, width: float = 4.0) -> Curve:
    """Attains everything at low rates, nothing at high ones, and the goal exactly at `rate`."""
    return lambda offered: min(1.0, max(0.0, 1 - (1 - GOAL) * (offered / rate) ** width))


def run(curve: Curve, options: SearchOptions | None = None, reach: float = math.inf) -> Found:
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


@pytest.mark.parametrize(
    ("curve", "options", "reach", "ending", "said"),
    [
        (
            lambda _: 0.5,
            SearchOptions(min_rate=0.1),
            math.inf,
            Ending.NEVER_ATTAINED,
            "not even 0.1/s holds an attainment of 90%",
        ),
        (knee(1000.0), SearchOptions(), 50.0, Ending.CLIENT_LIMIT, "this client cannot send"),
        (knee(10.0), SearchOptions(), 0.0, Ending.NO_VALID_RUN, "the client cannot measure here"),
        (
            knee(1000.0),
            SearchOptions(max_rate=12.5),
            math.inf,
            Ending.RATE_LIMIT,
            "12.5/s, the lar",
        ),
    ],
)
def test_a_search_says_how_it_ended(
    curve: Curve, options: SearchOptions, reach: float, ending: Ending, said: str
) -> None:
    found = run(curve, options, reach)
    assert found.ending is ending
    assert said in found.line
    assert found.confirmed is (ending in (Ending.CLIENT_LIMIT, Ending.RATE_LIMIT))
    if ending is Ending.CLIENT_LIMIT:
        # That the client cannot send a rate is no failure of the server.
        assert 45 <= (found.rate or 0.0) <= 50
        assert found.failing_rate is None
    if ending is Ending.RATE_LIMIT:
        assert max(probe.rate for probe in found.probes) == found.rate == 12.5


def test_bounds_that_a_request_misses_when_it_is_alone_end_the_search_at_once() -> None:
    rates = RateSearch(SearchOptions(start_rate=4.0))
    rates.observe(4.0, 0.0, True)
    assert rates.next_rate() == 2.0
    rates.observe(2.0, 0.0, True, alone=True)
    assert rates.next_rate() is None
    assert rates.result().ending is Ending.NEVER_ATTAINED


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


@pytest.mark.parametrize("flaw", ["saturated", "broken"])
def test_a_run_that_outran_or_broke_the_server_is_evidence_and_does_not_attain(flaw: str) -> None:
    search = RateSearch()
    search.observe(1.0, 1.0, True)
    search.observe(2.0, 1.0, True, **{flaw: True})
    assert search.purpose is Purpose.BISECT
    assert getattr(search.probes[-1], f"is_{flaw}")


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
def test_however_a_server_behaves_only_confirmed_rates_are_reported_as_confirmed(
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


def test_a_rate_that_was_never_run_validly_is_not_said_to_be_out_of_reach() -> None:
    search = RateSearch(SearchOptions(start_rate=2.0, min_rate=1.0))
    search.observe(2.0, 0.0, True)
    for _ in range(2):
        search.observe(1.0, 0.0, False)
    found = search.result()
    assert search.next_rate() is None
    assert found.ending is Ending.NO_VALID_RUN
    assert found.line == "no run at 1/s was valid, and 2/s does not hold an attainment of 90%"


# --- runs of a search ----------------------------------------------------------------------------


def judged(rate: float, asked: float, num_wrong: int = 0) -> Run:
    """An open loop of 100 requests that are all answered well, but for the first so many."""
    at = [index / rate for index in range(100)]
    requests = [Planned(index, at_s, 2, (1,)) for index, at_s in enumerate(at)]
    plan = Plan(requests, [], realised(at), asked, at[-1])
    records = [answered(index, at_s, [0.1]) for index, at_s in enumerate(at)]
    for record in records[:num_wrong]:
        record.outcome = Outcome.WRONG_LENGTH
    return judge(case_of(plan, concurrency=0), loaded(records), "")


@pytest.mark.parametrize(
    ("rate", "off"), [(4.0, ""), (3.7, ""), (3.0, "3/s, 25% below"), (5.0, "5/s, 25% above")]
)
def test_arrivals_that_were_planned_far_off_the_rate_are_warned_of(rate: float, off: str) -> None:
    run = judged(rate, 4.0)
    assert run.summary.offered_rate == pytest.approx(rate)
    said = [problem.text for problem in run.problems if "were drawn at" in problem.text]
    text = f"the arrivals were drawn at {off} the 4/s asked for: a longer load comes closer"
    assert said == ([text] if off else [])
    assert not run.invalid


def test_a_search_says_what_the_runs_offered_that_confirmed_its_rate() -> None:
    search, report = RateSearch(SearchOptions(max_rate=4.0, start_rate=2.0)), report_of([])
    offered = iter((9.0, 9.0, 3.7, 4.2, 3.9))
    while (rate := search.next_rate()) is not None:
        run = judged(next(offered), rate)
        report.runs.append(run)
        observe(search, rate, run)
    report.search = with_offered(search.result(), report.runs)
    assert report.search.offered_rate == pytest.approx(3.9)
    assert "; 3.9/s were offered (median of the confirming runs)" in report.search.line
    assert "3.9/s were offered" in shown(report)
    unconfirmed = msgspec.structs.replace(search.result(), confirmed=False)
    assert with_offered(unconfirmed, report.runs) == unconfirmed


def test_a_rate_at_which_answers_have_a_wrong_length_is_never_confirmed() -> None:
    run = judged(4.0, 4.0, num_wrong=5)
    assert run.invalid
    assert run.summary.attainment == 0.95
    search = RateSearch(SearchOptions(min_rate=1.0))
    while (rate := search.next_rate()) is not None:
        observe(search, rate, run)
    assert [probe.attainment for probe in search.probes] == [0.95]
    report = report_of([run])
    report.search = search.result()
    assert report.search.ending is Ending.NEVER_ATTAINED
    assert re.search(r"up +95 % +server's fault +no\n", shown(report))
    assert shown(report).endswith("NOT CONFIRMED")
    # One of a hundred is a warning, and a failed request like any other.
    few = judged(4.0, 4.0, num_wrong=1)
    search = RateSearch(SearchOptions(max_rate=1.0))
    while (rate := search.next_rate()) is not None:
        observe(search, rate, few)
    assert search.result().confirmed


@pytest.mark.parametrize(
    ("outcomes", "is_valid"),
    [
        ((Outcome.REFUSED,), True),
        # Without a socket the client says nothing of the server.
        ((Outcome.NO_SOCKET,), False),
        ((Outcome.NO_SOCKET, Outcome.ANSWERED), False),
    ],
)
def test_a_run_that_failed_says_something_of_the_server_if_the_client_could_ask(
    outcomes: tuple[Outcome, ...], is_valid: bool
) -> None:
    search = RateSearch()
    observe(search, 1.0, judge(case_of(len(outcomes)), ended(*outcomes), ""))
    assert search.probes[0].is_valid is is_valid
    if is_valid:
        assert search.probes[0].attainment == 0.0


def test_answers_of_a_wrong_length_under_load_are_the_servers_fault() -> None:
    outcomes = [Outcome.ANSWERED] * 3 + [Outcome.WRONG_LENGTH]
    found = judge(case_of(4), ended(*outcomes), "")
    assert found.invalid
    assert is_servers_fault(found)
    found.problems.append(invalid("the client sent late"))
    assert not is_servers_fault(found)
