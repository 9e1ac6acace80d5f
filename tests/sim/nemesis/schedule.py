"""The kinds of faults, and the lanes of a schedule, in which one fault follows the other."""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.kv_transfer.interfaces import CORRUPT_BLOCKS, TIER_TIMEOUT
from tests.sim.members import SimNode
from tests.sim.nemesis import limits, links, processes
from tests.sim.routers import SimRouter

if TYPE_CHECKING:
    from tests.sim.world import World

NUM_FAULTS = 10  # in each lane
# Called with the world, a node, a router and a duration in seconds.
Strike = Callable[["World", SimNode, SimRouter, float], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault, and the ends of a request that it explains.

    An attempt may be lost to a fault that takes its nodes, its channels or their time away. A
    request ends with the reason for which it lost the last of its attempts, and with no other one.
    """

    strike: Strike
    explains: frozenset[str] = frozenset()


LOSS = frozenset(("node_lost", "lease_expired"))
# A reader may see that its peer's process is gone before the router does.
DEATH = LOSS | {"transfer_failed"}
PAUSE = LOSS | {"transfer_timeout", TIER_TIMEOUT}
PARTING = PAUSE  # of two nodes
KINDS: Mapping[str, Kind] = {
    "kill node": Kind(processes.kill_node, DEATH),
    "kill ranks": Kind(processes.kill_ranks, DEATH),
    "drain node": Kind(processes.drain_node, LOSS),
    "freeze node": Kind(processes.freeze_node, PAUSE),
    "suspend node": Kind(processes.suspend_node, PAUSE),
    "hang node": Kind(processes.hang_node, PAUSE),
    "kill router": Kind(processes.kill_router, LOSS),
    "end router": Kind(processes.end_router, LOSS),
    "freeze router": Kind(processes.freeze_router, LOSS),
    "kill router, freeze node": Kind(processes.kill_router_freeze_node, PAUSE),
    "cut": Kind(links.cut, LOSS),
    "cut peers": Kind(links.cut_peers, PARTING),
    "drop": Kind(links.drop, LOSS),
    "drop peers": Kind(links.drop_peers, PARTING),
    "drop one way": Kind(links.drop_one_way, LOSS),
    "drop peers one way": Kind(links.drop_peers_one_way, PARTING),
    "strand node": Kind(links.strand_node, LOSS),
    "double node": Kind(processes.double_node, LOSS),
    "drain silent node": Kind(links.drain_silent_node, LOSS),
    "isolate node": Kind(links.isolate_node, PARTING),
    "refuse": Kind(links.refuse, LOSS),
    "slow names": Kind(links.slow_names, PARTING),
    "lie": Kind(links.lie, frozenset((CORRUPT_BLOCKS,))),
    "other version": Kind(processes.start_other_version, LOSS),
    "pause all": Kind(processes.pause_all, PAUSE),
    "slow motion": Kind(processes.slow_motion, PAUSE),
    "stall router": Kind(processes.stall_router, LOSS),
    "flood": Kind(limits.flood),
    "large body": Kind(limits.send_large_body),
    "no descriptors": Kind(limits.take_descriptors, PAUSE),
    "no memory": Kind(limits.take_memory, LOSS),
    "no blocks": Kind(limits.take_blocks),
    "full disk": Kind(limits.fill_disk),
    "slow disk": Kind(limits.slow_disk, frozenset((TIER_TIMEOUT,))),
    "damaged disk": Kind(limits.damage_disk),
    "exchange keys": Kind(processes.exchange_keys, LOSS),
    "other weights": Kind(processes.bring_other_weights),
    "clock steps back": Kind(processes.step_clock_back),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a lane, which begins `after_s` after the one before it has ended."""

    kind: str
    after_s: float
    node: int
    router: int
    seconds: float


def faults_of(rng: random.Random, kinds: Sequence[str]) -> list[Fault]:
    durations = (0.5, 1.9, 2.1, 2.4, 3.0, 3.5, 4.0, 5.0, 6.1, 7.0)
    return [
        Fault(
            rng.choice(kinds),
            rng.uniform(0.2, 5),
            rng.randrange(1000),
            rng.randrange(1000),
            rng.choice(durations),
        )
        for _ in range(NUM_FAULTS)
    ]


def lanes_of(rng: random.Random) -> list[list[Fault]]:
    """Return two lanes. Few kinds of faults meet each other more often than all of them do."""
    kinds = rng.sample(list(KINDS), rng.choice((2, 4, len(KINDS))))
    return [faults_of(rng, kinds), faults_of(rng, kinds)]


class Nemesis:
    """Strikes a world with the faults of its lanes, and knows when each of them was."""

    def __init__(self, world: "World", lanes: list[list[Fault]]) -> None:
        self.lanes = lanes
        self._world = world
        self._struck: list[tuple[str, float]] = []  # each kind, and when it ended

    async def run(self) -> None:
        await asyncio.gather(*map(self._lane, self.lanes))

    def explains(self, code: str, since_s: float) -> bool:
        """Return whether a fault that lasted at this time or later explains an end."""
        struck = [kind for kind, ended_s in self._struck if ended_s >= since_s]
        return any(code in KINDS[kind].explains for kind in struck)

    async def _lane(self, faults: list[Fault]) -> None:
        world = self._world
        for fault in faults:
            await asyncio.sleep(fault.after_s)
            node = world.nodes[fault.node % len(world.nodes)]
            router = world.routers[fault.router % len(world.routers)]
            world.note(f"{fault.kind}: {node.name} {router.name} {fault.seconds:g} s")
            index = len(self._struck)
            self._struck.append((fault.kind, math.inf))
            await KINDS[fault.kind].strike(world, node, router, fault.seconds)
            self._struck[index] = fault.kind, world.loop.time()
