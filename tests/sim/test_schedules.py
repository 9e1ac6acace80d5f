"""Every schedule of faults leaves every client with its own tokens, and every node with all blocks.

`make sim SEEDS=1000` runs more of them.
"""

import asyncio
import logging
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest

from baton.router.core.admission import Admission
from baton.router.core.pair_health import Pairs
from tests.sim.clock import SimLoop
from tests.sim.nemesis.schedule import Fault
from tests.sim.world import Result, World, simulate
from tests.support.depth import nightly

SEEDS_APIECE = 5


def seeds(first: int, quick: int, num: int) -> list[Any]:
    """Return the first of each group of seeds; all but the quick one are for every night.

    The quick ones of both tests meet all faults but two.
    """
    firsts = range(first, first + num, SEEDS_APIECE)
    return [one if one == quick else nightly(one) for one in firsts]


@pytest.fixture(autouse=True)
def no_logs():
    logging.getLogger("baton").setLevel(logging.CRITICAL)


@pytest.mark.parametrize("first", seeds(0, 80, 100))
def test_schedules_of_faults_lose_nothing(first):
    for seed in range(first, first + SEEDS_APIECE):
        result = simulate(seed)
        assert not result.problems, "\n".join(
            (f"seed {seed}", *result.log, *result.problems)
        )


@pytest.mark.parametrize("first", seeds(400, 400, 40))
def test_schedules_of_faults_lose_no_state(first):
    for seed in range(first, first + SEEDS_APIECE):
        result = simulate(seed, state_blocks=1 + seed % 3)
        assert not result.problems, "\n".join(
            (f"seed {seed}", *result.log, *result.problems)
        )


# Two choices of one request left the queue at once; a client asked for the stream of another one.
@pytest.mark.parametrize("seed", [108, 311])
def test_a_schedule_that_has_found_a_fault_finds_none(seed):
    assert not simulate(seed).problems


@pytest.mark.parametrize("seed", [4, nightly(108)])
def test_a_seed_decides_everything(seed):
    one = simulate(seed)
    again = simulate(seed)
    assert (one.met, one.fates, one.virtual_s, one.log) == (
        again.met,
        again.fates,
        again.virtual_s,
        again.log,
    )


# In which no client leaves.
@pytest.mark.parametrize("seed", [7, 10, nightly(15), nightly(17)])
def test_without_a_fault_every_handoff_lands(seed):
    met = {kind for kind, _ in simulate(seed, [[], []], lends=False).met}
    assert met.isdisjoint(("Withdrawn", "Declined", "Failed"))
    assert "Done" in met


CUT_S = 1005.0
HEALED_S = 1026.0


@dataclass
class Told:
    """What a router learns of a pair of nodes, or sends to it, and when."""

    router: int
    what: str
    pair: frozenset[str]
    at_s: float


def told_of_pairs(seed: int, lanes: list[list[Fault]]) -> tuple[Result, list[Told]]:
    told: list[Told] = []

    def note(pairs: Pairs, what: str, nodes: Iterable[str]) -> None:
        now_s = asyncio.get_event_loop().time()
        told.append(Told(id(pairs), what, frozenset(nodes), now_s))

    def failed(pairs: Pairs, now_s: float, *rest: Any) -> bool:
        note(pairs, "failed", [node for node, _epoch in rest[:2]])
        return real_failed(pairs, now_s, *rest)

    def reached(pairs: Pairs, *pair: Any) -> None:
        note(pairs, "reached", [node for node, _epoch in pair])
        real_reached(pairs, *pair)

    def take(admission: Admission, now_s: float) -> Any:
        for attempt in real_take(admission, now_s):
            nodes = attempt.prefill_node, attempt.decode_node
            note(admission._registry.pairs, "sent", filter(None, nodes))
            yield attempt

    real_failed = Pairs.failed
    real_reached = Pairs.reached
    real_take = Admission.take
    with (
        mock.patch.object(Pairs, "failed", failed),
        mock.patch.object(Pairs, "reached", reached),
        mock.patch.object(Admission, "take", take),
    ):
        return simulate(seed, lanes, lends=False), told


def has_another_pair(seed: int) -> bool:
    with closing(SimLoop()) as loop:
        return len(World(loop, seed).nodes) > 2


@pytest.mark.parametrize(
    ("first", "last", "num_meeting"), [(196, 198, 2), nightly(191, 202, 4)]
)
def test_requests_leave_a_cut_pair_within_five_seconds_and_none_probes_it(
    first, last, num_meeting
):
    """Prefill tries the channel by itself, and the pair gets requests again once it is open."""
    num_met = 0
    for seed in filter(has_another_pair, range(first, last + 1)):
        result, told = told_of_pairs(seed, [[Fault("drop peers", 4.0, 0, 0, 7.0)], []])
        assert not result.problems
        failed = [one for one in told if one.what == "failed"]
        if not failed:
            continue  # no request was on its way between the two
        num_met += 1
        pair = failed[0].pair
        first_s = failed[0].at_s
        router = failed[0].router  # the others learn it from requests of their own
        of_pair = [one for one in told if one.pair == pair and one.router == router]
        sent_s = [one.at_s for one in of_pair if one.what == "sent"]
        reached_s = next(one.at_s for one in of_pair if one.what == "reached")
        assert HEALED_S < reached_s < HEALED_S + 6.0
        for one in of_pair:
            if one.what == "failed":
                assert any(
                    CUT_S - 5.0 < at_s <= one.at_s < at_s + 5.0 for at_s in sent_s
                ), seed
        assert not any(first_s < at_s < reached_s for at_s in sent_s), seed
    assert num_met >= num_meeting
