"""The schedules find faults that are put into production's code, and shrink them."""

import pytest

from tests.sim.mutants import MUTANTS, first_found, mutated, shrunk

# The first seeds that are tried: the two of every run are found soon.
QUICK = {"cache blocks before they are whole": 20, "leak the load of later attempts": 1}
NUM_SEEDS = 2_000


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
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_found(name: str) -> None:
    assert first_found(name, range(1, NUM_SEEDS)) is not None, "this mutant survives"
