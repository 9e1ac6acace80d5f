"""Every schedule of faults leaves every client with its own tokens, and every node with all blocks.

`make sim SEEDS=1000` runs more of them.
"""

import asyncio
import logging
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest

from baton.router.core.pair_health import Pairs
from tests.sim.nemesis.schedule import Fault
from tests.sim.world import simulate

SEEDS_APIECE = 10


@pytest.fixture(autouse=True)
def no_logs():
    logging.getLogger("baton").setLevel(logging.CRITICAL)


@pytest.mark.parametrize("first", range(0, 100, SEEDS_APIECE))
def test_schedules_of_faults_lose_nothing(first):
    for seed in range(first, first + SEEDS_APIECE):
        result = simulate(seed)
        assert not result.problems, "\n".join((f"seed {seed}", *result.log, *result.problems))


def test_a_seed_decides_everything():
    for seed in (1, 3):
        one, again = simulate(seed), simulate(seed)
        assert (one.met, one.fates, one.virtual_s, one.log) == (
            again.met, again.fates, again.virtual_s, again.log,
        )  # fmt: skip


def test_without_a_fault_every_handoff_lands():
    for seed in (1, 7, 9, 10):
        met = {kind for kind, _ in simulate(seed, [[], []]).met}
        assert met.isdisjoint(("Withdrawn", "Declined", "Failed"))
        assert "Done" in met


CUT_S, HEALED_S = 1005.0, 1026.0


@pytest.mark.parametrize("seed", [193, 198])
def test_requests_leave_a_cut_pair_within_five_seconds_and_none_probes_it(seed):
    """Prefill tries the channel by itself, and the pair gets requests again once it is open."""
    told: list[tuple[str, object, float]] = []
    with ExitStack() as patches:
        for name in ("failed", "reached", "worked"):
            real = getattr(Pairs, name)

            def noted(pairs: Pairs, *args: Any, name: str = name, real: Any = real) -> object:
                pair = args[1:3] if name == "failed" else args
                told.append((name, pair, asyncio.get_event_loop().time()))
                return real(pairs, *args)

            patches.enter_context(mock.patch.object(Pairs, name, noted))
        calm_gap_s = simulate(seed, [[], []]).longest_gap_s
        told.clear()
        result = simulate(seed, [[Fault("drop peers", 4.0, 0, 0, 7.0)], []])
    assert not result.problems
    assert result.longest_gap_s < calm_gap_s + 5.0
    failed = [(pair, at_s) for what, pair, at_s in told if what == "failed"]
    assert failed, "no request was on its way between the two"
    assert all(CUT_S < at_s < CUT_S + 5.0 for _, at_s in failed)
    pair, _ = failed[0]
    reached_s = next(at_s for what, who, at_s in told if (what, who) == ("reached", pair))
    assert HEALED_S < reached_s < HEALED_S + 6.0
    worked_s = [at_s for what, who, at_s in told if (what, who) == ("worked", pair)]
    assert not any(CUT_S + 5.0 < at_s < reached_s for at_s in worked_s)
