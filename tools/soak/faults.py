"""Faults of processes, in an order that a seed fixes: kills, orderly ends and freezes.

Each fault waits until its process is in service again. Several lanes carry faults out side by side,
so that both nodes of a role may be away at once. Every kind strikes every role about equally often,
except for the freezes of a minute, which come once in ten rounds.
"""

import asyncio
import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from baton.runtime.clock import monotonic
from tools.soak.cluster import SoakCluster

LOOK_S = 0.02
ROUNDS_PER_LONG_FREEZE = 10


Damage = Literal["", "alter", "truncate"]


class Kind(msgspec.Struct, frozen=True):
    """Freeze, wake if asked to, run for a while, then end by a signal if one is set.

    A damage is done to a file of cached blocks before that.
    """

    name: str
    freeze_s: float = 0.0
    wakes: bool = False
    awake_s: float = 0.0
    ends_by: signal.Signals | None = None
    damage: Damage = ""


KINDS = (
    Kind("kill", ends_by=signal.SIGKILL),
    Kind("term", ends_by=signal.SIGTERM),
    Kind("freeze 1 s", 1.0, wakes=True),
    Kind("freeze 6 s", 6.0, wakes=True),
    Kind("freeze, kill", 5.0, ends_by=signal.SIGKILL),
    Kind("freeze, wake, kill", 6.0, True, 1.0, signal.SIGKILL),
)
OF_FILES = (
    Kind("file altered", 0.0, True, 2.0, damage="alter"),
    Kind("file cut, kill", ends_by=signal.SIGKILL, damage="truncate"),
)
LONG = Kind("freeze 60 s", 60.0, wakes=True)
ROLES = ("prefill", "decode", "router")
# The end of a router ends its streams, which the soak counts apart.
OF_ROUTER = ("kill", "term", "freeze 1 s", "freeze 6 s")


@dataclass(slots=True)
class Fault:
    kind: Kind
    process: str
    at_s: float
    until_s: float = 0.0  # when the process was in service again; 0: not yet

    @property
    def role(self) -> str:
        return self.process.partition("-")[0]

    @property
    def ends(self) -> bool:
        return self.kind.ends_by is not None


class Faults:
    """`count` faults, in an order that `seed` fixes; some are of the files in `cache`."""

    def __init__(
        self, cluster: SoakCluster, seed: int, count: int, cache: Path | None = None
    ) -> None:
        self._cache = cache
        self.begun: list[Fault] = []
        self.bad_exits: list[str] = []
        self._cluster = cluster
        self._count = count
        self._dice = random.Random(seed)
        self._planned = plan(self._dice, damages=cache is not None)
        self._busy: set[str] = set()

    def ended_router(self, since_s: float) -> bool:
        """Return whether the router was ended by a fault that was not over at that time."""
        return any(
            fault.role == "router"
            and fault.ends
            and (not fault.until_s or fault.until_s > since_s)
            for fault in self.begun
        )

    async def run(self, may_strike: Callable[[int], bool], num_lanes: int) -> None:
        """Carry all faults out. Raises `NodeError` if a process does not come back.

        `may_strike(number)` says whether it is time for the fault of that number. `num_lanes` of
        them may overlap.
        """
        async with asyncio.TaskGroup() as lanes:
            for _ in range(num_lanes):
                lanes.create_task(self._lane(may_strike))

    async def _lane(self, may_strike: Callable[[int], bool]) -> None:
        while len(self.begun) < self._count:
            if not may_strike(len(self.begun)):
                await asyncio.sleep(LOOK_S)
                continue
            role, kind = next(self._planned)
            idle = [
                n
                for n in self._cluster.names
                if n.startswith(role) and n not in self._busy
            ]
            if not idle:
                await asyncio.sleep(LOOK_S)
                continue
            fault = Fault(kind, self._dice.choice(idle), monotonic())
            self.begun.append(fault)
            self._busy.add(fault.process)
            await self._strike(fault)
            fault.until_s = monotonic()
            self._busy.discard(fault.process)

    async def _strike(self, fault: Fault) -> None:
        kind = fault.kind
        name = fault.process
        if kind.damage and self._cache is not None:
            _damage(self._cache, kind.damage, fault.role, self._dice)
        if kind.freeze_s:
            self._cluster.send(name, signal.SIGSTOP)
            await asyncio.sleep(kind.freeze_s)
        if kind.wakes:
            self._cluster.send(name, signal.SIGCONT)
            await asyncio.sleep(kind.awake_s)
        if kind.ends_by is not None:
            code = await self._cluster.restart(name, kind.ends_by)
            if code != (0 if kind.ends_by is signal.SIGTERM else -kind.ends_by):
                self.bad_exits.append(
                    f"{name} ended with {code} after {kind.ends_by.name}"
                )

        is_back = partial(self._cluster.is_back, name)
        await self._cluster.until(f"{name} after {kind.name!r}", is_back)


def _damage(cache: Path, how: Damage, role: str, dice: random.Random) -> None:
    """Alter or cut a file of blocks of a node of that role."""
    files = [
        path for path in sorted(cache.glob(f"{role}-*/*.blocks")) if path.stat().st_size
    ]
    if not files:
        return
    path = dice.choice(files)
    at = dice.randrange(path.stat().st_size)
    if how == "truncate":
        os.truncate(path, at)
        return
    with path.open("r+b") as file:
        file.seek(at)
        [old] = file.read(1)
        file.seek(at)
        file.write(bytes([old ^ 1]))


def plan(dice: random.Random, *, damages: bool = False) -> Iterator[tuple[str, Kind]]:
    """Yield rounds of all pairs of a role and a kind, each round in an order of its own."""
    number = 0
    while True:
        number += 1
        pairs = [
            (role, kind)
            for role in ROLES
            for kind in KINDS
            if role != "router" or kind.name in OF_ROUTER
        ]
        if damages:
            pairs += [(role, kind) for role in ROLES[:2] for kind in OF_FILES]
        if number % ROUNDS_PER_LONG_FREEZE == 0:
            pairs += [(role, LONG) for role in ROLES]
        dice.shuffle(pairs)
        yield from pairs
