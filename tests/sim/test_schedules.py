"""Every schedule of faults leaves every client with its own tokens, and every node with all blocks.

`make sim SEEDS=1000` runs more of them.
"""

import logging

import pytest

from tests.sim.world import simulate

SEEDS_APIECE = 10


@pytest.fixture(autouse=True)
def no_logs() -> None:
    logging.getLogger("baton").setLevel(logging.CRITICAL)


@pytest.mark.parametrize("first", range(0, 80, SEEDS_APIECE))
def test_schedules_of_faults_lose_nothing(first: int) -> None:
    for seed in range(first, first + SEEDS_APIECE):
        result = simulate(seed)
        assert not result.problems, "\n".join((f"seed {seed}", *result.log, *result.problems))


def test_a_seed_decides_everything() -> None:
    for seed in (1, 3):
        one, again = simulate(seed), simulate(seed)
        assert (one.met, one.fates, one.virtual_s, one.log) == (
            again.met, again.fates, again.virtual_s, again.log,
        )  # fmt: skip
