"""Choose the order in which waiting legs get nodes when some nodes are full.

This file is pure; `core` calls it whenever something may have changed. A leg that waits for one
node does not keep later legs from other nodes. For a while, smaller legs may even pass it on that
node; after that the node is kept for it.
"""

from collections.abc import Iterator

from baton.protocol.errors import Failure
from baton.protocol.ids import Key, NodeId
from baton.router.admission import Admission
from baton.router.policy import CheapestPair, Decision
from baton.router.registry import Registry
from baton.router.request.events import Place

MAX_PASSED_S = 1.0
# The number of waiting legs behind which later legs are considered.
MAX_PASSED = 8
# How often a stopped line is tried although no node has got room and no leg has arrived.
LOOK_S = 0.2


class Placing:
    def __init__(self, registry: Registry, policy: CheapestPair, line: Admission) -> None:
        self._registry, self._policy, self._line = registry, policy, line
        self._looked_s = 0.0
        self._stood_at = (0, 0, 0)

    def take(self, now_s: float) -> Iterator[tuple[Place, Decision | Failure]]:
        """Yield legs with their nodes, or with the reason why they may not wait.

        The caller charges the nodes of a leg, or refuses the leg, before it takes the next.
        """
        if self._stood_at == self._news() and now_s - self._looked_s < LOOK_S:
            return
        passed: set[Key] = set()
        kept: set[NodeId] = set()
        while len(passed) <= MAX_PASSED:
            waiting = self._line.head(self._registry.version, passed)
            if waiting is None:
                break
            place = waiting.place
            decision = self._policy.choose(now_s, self._registry, place, kept)
            if decision is None:
                if (failure := self._line.set_aside(place.key)) is not None:
                    yield place, failure
            elif decision.full:
                passed.add(place.key)
                if now_s - waiting.since_s >= MAX_PASSED_S:
                    kept.update(decision.full)
            else:
                yield place, decision
        self._line.rests(now_s)
        self._stood_at, self._looked_s = self._news(), now_s

    def _news(self) -> tuple[int, int, int]:
        """Return a value that changes whenever a leg that found no nodes may find some."""
        return self._registry.version, self._registry.num_releases, self._line.num_changes
