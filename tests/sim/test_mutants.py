"""The schedules find faults that are put into production's code, and shrink them."""

import pytest

from tests.sim.mutants import MUTANTS, first_found, mutated, shrunk

# One or two schedules find these. Most others take up to 120.
COMMON = (
    "free blocks before their reads have ended",
    "take tokens that the client has for new ones",
    "take an old success of libzmq for a new one",
    "begin a form anew on another node",
    "go on without a rank",
)
# Those whose schedules take least first.
QUICK_SEEDS = (5, 9, 4, 8, 7, 6, 3, 1, 0, 2)
MAX_SEEDS = 2_000
MAX_EVENTS = 30  # of what is left of a schedule


def test_mutants_alter_what_there_is():
    for name in MUTANTS:
        with mutated(name):
            pass


@pytest.mark.parametrize("name", COMMON)
def test_a_common_mutant_is_found_soon(name):
    assert first_found(name, QUICK_SEEDS) is not None


@pytest.mark.release
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found_and_its_schedule_shrunk(name):
    found = first_found(name, range(MAX_SEEDS))
    assert found is not None
    with mutated(name):
        least = shrunk(found)
    assert least.problems
    assert sum(map(len, least.lanes)) < MAX_EVENTS
