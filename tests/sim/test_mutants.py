"""The schedules find faults that are put into production's code, and shrink them."""

import pytest

from tests.sim.mutants import MUTANTS, first_found, mutated, shrunk

QUICK = {
    "free blocks before their reads have ended": 3,
    "keep the channels of lost peers": 0,
    "leak the load of later attempts": 4,
    "answer into the next session": 4,
    "cache blocks before they are whole": 63,
}
SLOW = {
    "introduce half of a node in a new session": 3,
    "take tokens that the client has for new ones": 18,
    "take tokens twice during a search": 46,
    "adopt an attempt with other tokens": 110,
    "have no tombstones": 216,
}

# These have survived some hundred seeds.
ELUSIVE = [name for name in MUTANTS if name not in QUICK and name not in SLOW]


@pytest.mark.parametrize("name", QUICK)
def test_a_mutant_is_found_soon(name: str) -> None:
    assert first_found(name, range(QUICK[name], QUICK[name] + 20)) is not None


@pytest.mark.release
def test_a_schedule_that_fails_is_shrunk() -> None:
    name = "leak the load of later attempts"
    found = first_found(name, range(1, 20))
    assert found is not None
    with mutated(name):
        least = shrunk(found)
    assert least.problems
    assert sum(map(len, least.lanes)) < sum(map(len, found.lanes)) / 2


@pytest.mark.release
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SLOW)
def test_a_mutant_is_found(name: str) -> None:
    assert first_found(name, range(SLOW[name], SLOW[name] + 40)) is not None


@pytest.mark.release
@pytest.mark.timeout(1200)
@pytest.mark.xfail(reason="no seed is known that finds it")
@pytest.mark.parametrize("name", ELUSIVE)
def test_an_elusive_mutant_is_found(name: str) -> None:
    assert first_found(name, range(70, 370)) is not None
