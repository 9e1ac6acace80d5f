"""The ring of events that a node dumps makes a fresh loop do again what the node did.

A ring holds what came to a loop, but not the turns in which time alone acts (a renewal that is due,
a lease that ends), the order to drain, log probabilities, or whose rank an event is. A replay makes
a turn when the loop wants one. So it may part from a life in which a moment decides, as that of
6 of 13 decode nodes did in seven schedules. An entry for each turn that was due would mend that.
"""

import logging
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from baton.engine.process.loop import EngineLoop
from baton.engine.process.sockets import EngineSockets, FromRouter, RouterLost
from baton.engine.scheduling.block_pool import BlockPool
from baton.engine.scheduling.plan import StepResult
from baton.kv_transfer.interfaces import (
    BlocksSummed,
    FromPeer,
    PeerDown,
    PeerLost,
    PeerUp,
    ReadDrained,
    ReadEnded,
)
from baton.protocol.messages import CacheChanges, InProgress, PromptLogprobs
from tests.sim.executor import BLOCK_SIZE
from tests.sim.members import SimNode
from tests.sim.world import Fault, simulate

FROM_LINKS = (FromRouter, RouterLost, FromPeer, PeerLost)
FROM_RANKS = (PeerUp, PeerDown, ReadEnded, ReadDrained, BlocksSummed)
KINDS = {kind.__name__: kind for kind in (*FROM_LINKS, StepResult, *FROM_RANKS)}


class _Line(msgspec.Struct):
    now_s: float
    type: str
    event: msgspec.Raw


class _Recorded:
    """The sockets, the executor and the agent of a loop, which say again what a ring holds."""

    def __init__(self) -> None:
        self.now_s = self.wake_s = 0.0
        self.links: list[object] = []
        self.results: deque[StepResult] = deque()
        self.of_rank: list[object] = []
        self.said: list[object] = []
        self.executor = mock.Mock(ports=(mock.Mock(poll=self._poll_rank),), poll=self._poll)

    def receive(self) -> list[object]:
        events, self.links = self.links, []
        return events

    def to_router(self, origin: int, message: object) -> None:
        self.said.append((origin, message))

    def to_peer(self, command: object) -> None:
        self.said.append(command)

    def watch(self, fileno: int) -> None: ...

    def wait(self, timeout_s: float) -> None:
        self.wake_s = self.now_s + max(timeout_s, 0.0001)

    def _poll(self) -> StepResult | None:
        return self.results.popleft() if self.results else None

    def _poll_rank(self) -> list[object]:
        events, self.of_rank = self.of_rank, []
        return events


def turns_of(dump: Path) -> Iterator[tuple[float, list[object]]]:
    """Return the events of each turn: of links, then of steps, then of ranks."""
    last, events, at_s = -1, [], 0.0
    for data in dump.read_bytes().splitlines():
        line = msgspec.json.decode(data, type=_Line)
        event = msgspec.json.decode(line.event, type=KINDS[line.type])
        place = 0 if isinstance(event, FROM_LINKS) else 1 if isinstance(event, StepResult) else 2
        if events and (line.now_s != at_s or place < last):
            yield at_s, events
            events = []
        at_s, last = line.now_s, place
        events.append(event)
    if events:
        yield at_s, events


def replay(node: SimNode, dump: Path) -> tuple[EngineLoop, list[object]]:
    recorded = _Recorded()
    pool = BlockPool(node.num_blocks, BLOCK_SIZE)
    loop = node.loop_with(pool, recorded.executor, recorded, lambda: recorded.now_s)  # type: ignore[arg-type]
    recorded.wake_s = float("inf")
    for at_s, events in turns_of(dump):
        while recorded.wake_s < at_s:
            recorded.now_s = recorded.wake_s
            loop.turn()
        recorded.now_s = at_s
        recorded.links = [one for one in events if isinstance(one, FROM_LINKS)]
        recorded.results.extend(one for one in events if isinstance(one, StepResult))
        recorded.of_rank = [one for one in events if isinstance(one, FROM_RANKS)]
        loop.turn()
    return loop, recorded.said


def _comparable(said: list[object]) -> list[object]:
    """Return what does not depend on turns without an event, or on log probabilities."""
    others = (CacheChanges, InProgress, PromptLogprobs)
    return [one for one in said if not (isinstance(one, tuple) and isinstance(one[1], others))]


@pytest.fixture(autouse=True)
def no_logs() -> None:
    logging.getLogger("baton").setLevel(logging.CRITICAL)


@pytest.mark.parametrize("seed", [8])
def test_a_dumped_ring_is_replayed_to_the_same_state(seed: int, tmp_path: Path) -> None:
    said: dict[EngineSockets, list[object]] = {}

    def to_router(sockets: EngineSockets, *what: Any) -> None:
        said.setdefault(sockets, []).append(what)
        real_to_router(sockets, *what)

    def to_peer(sockets: EngineSockets, command: Any) -> None:
        said.setdefault(sockets, []).append(command)
        real_to_peer(sockets, command)

    real_to_router, real_to_peer = EngineSockets.to_router, EngineSockets.to_peer
    lives: list[SimNode] = []
    real_build = SimNode._build

    def build(node: SimNode) -> None:
        real_build(node)
        lives.append(node)

    faults = [Fault(kind, 2.0, 0, 0, 2.0) for kind in ("cut", "drop", "kill router", "cut peers")]
    with (
        mock.patch.object(EngineSockets, "to_router", to_router),
        mock.patch.object(EngineSockets, "to_peer", to_peer),
        mock.patch.object(SimNode, "_build", build),
    ):
        assert not simulate(seed, [faults, []]).problems
    for node in lives:
        dump = tmp_path / node.name
        assert node.loop.ring.dump(dump)
        loop, again = replay(node, dump)
        assert _comparable(again) == _comparable(said[node.sockets])
        assert loop.scheduler.load() == node.scheduler.load()
        assert loop.scheduler.pool._references == node.pool._references
