"""The ring of events that a node dumps makes a fresh loop do again what the node did.

It holds no log probabilities, which decide nothing.
"""

import logging
from collections import defaultdict, deque
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from baton.kv_transfer.interfaces import (
    BlocksCopied,
    BlocksSaved,
    BlocksSummed,
    FromPeer,
    PeerDown,
    PeerLost,
    PeerUp,
    ReadDrained,
    ReadEnded,
    SlotsHeld,
)
from baton.node import loop
from baton.node.loop import EngineLoop
from baton.node.records import Draining, Turned
from baton.node.scheduling.block_pool import BlockPool
from baton.node.scheduling.plan import StepResult
from baton.node.sockets import EngineSockets, FromRouter, RouterLost
from baton.protocol.messages import InProgress, PromptLogprobs, Tokens
from tests.sim.executor import BLOCK_SIZE
from tests.sim.members import SimNode
from tests.sim.nemesis.schedule import Fault
from tests.sim.world import World, simulate
from tests.support.depth import nightly

FROM_LINKS = (FromRouter, RouterLost, FromPeer, PeerLost)
FROM_RANKS = (
    PeerUp,
    PeerDown,
    ReadEnded,
    ReadDrained,
    BlocksSummed,
    SlotsHeld,
    BlocksCopied,
    BlocksSaved,
)
KINDS = {
    kind.__name__: kind
    for kind in (*FROM_LINKS, StepResult, *FROM_RANKS, Turned, Draining)
}


class _Line(msgspec.Struct):
    turn: int
    now_s: float
    rank: int
    type: str
    event: msgspec.Raw


FAULTS = ("cut", "drop", "kill router", "cut peers", "drain node")


class _Recorded:
    """The sockets, the executor and the agent of a loop, which say again what a ring holds."""

    def __init__(self, num_ranks: int) -> None:
        self.now_s = 0.0
        self.links: list[object] = []
        self.results: deque[StepResult] = deque()
        self.of_rank: list[list[object]] = [[] for _ in range(num_ranks)]
        self.said: list[object] = []
        polls = (partial(self._poll_rank, rank) for rank in range(num_ranks))
        ports = tuple(mock.Mock(poll=poll) for poll in polls)
        self.executor = mock.Mock(ports=ports, poll=self._poll)

    def receive(self) -> list[object]:
        events = self.links
        self.links = []
        return events

    def to_router(self, origin: int, message: object) -> None:
        self.said.append((origin, message))

    def to_peer(self, command: object) -> None:
        self.said.append(command)

    def watch(self, fileno: int) -> None: ...

    def wait(self, timeout_s: float) -> None: ...

    def _poll(self) -> StepResult | None:
        return self.results.popleft() if self.results else None

    def _poll_rank(self, rank: int) -> list[object]:
        events = self.of_rank[rank]
        self.of_rank[rank] = []
        return events


def replay(node: SimNode, dump: Path) -> tuple[EngineLoop, list[object]]:
    recorded = _Recorded(node.num_ranks)
    pool = BlockPool(node.num_blocks, BLOCK_SIZE)
    fresh = node.loop_with(pool, recorded.executor, recorded, lambda: recorded.now_s)
    lines = map(msgspec.json.Decoder(_Line).decode, dump.read_bytes().splitlines())
    for (_, recorded.now_s, is_order), of_turn in groupby(
        lines, lambda line: (line.turn, line.now_s, line.type == "Draining")
    ):
        told = [
            (ln.rank, msgspec.json.decode(ln.event, type=KINDS[ln.type]))
            for ln in of_turn
        ]
        events = [event for _, event in told]
        recorded.links = [one for one in events if isinstance(one, FROM_LINKS)]
        recorded.results.extend(one for one in events if isinstance(one, StepResult))
        for rank, event in told:
            if isinstance(event, FROM_RANKS):
                recorded.of_rank[rank].append(event)
        if is_order:
            [order] = events
            assert isinstance(order, Draining)
            fresh.drain(order.hand_over_s)
        else:
            fresh.turn()
    return fresh, recorded.said


def _by_receiver(said: list[object]) -> dict[object, list[object]]:
    """Leave out log probabilities and reports of progress, whose time idle turns move on.

    Log probabilities part batches of tokens and change the order of the routers in a turn.
    """
    heard = defaultdict(list)
    for one in said:
        match one:
            case (_, InProgress() | PromptLogprobs()):
                pass
            case (origin, Tokens(entries=entries)):
                heard[origin].extend(entries)
            case (origin, message):
                heard[origin].append(message)
            case _:
                heard["peers"].append(one)
    return heard


@pytest.fixture(autouse=True)
def no_logs():
    logging.getLogger("baton").setLevel(logging.CRITICAL)


@pytest.mark.parametrize("seed", [8, nightly(18), nightly(19), 29])
def test_a_dumped_ring_is_replayed_to_the_same_state(seed, tmp_path):
    said: dict[EngineSockets, list[object]] = {}

    def to_router(sockets: EngineSockets, *what: Any) -> None:
        said.setdefault(sockets, []).append(what)
        real_to_router(sockets, *what)

    def to_peer(sockets: EngineSockets, command: Any) -> None:
        said.setdefault(sockets, []).append(command)
        real_to_peer(sockets, command)

    real_to_router = EngineSockets.to_router
    real_to_peer = EngineSockets.to_peer
    lives: list[SimNode] = []
    real_build = SimNode._build

    def build(node: SimNode) -> None:
        real_build(node)
        lives.append(node)

    faults = [Fault(kind, 2.0, 0, 0, 2.0) for kind in FAULTS]
    with (
        mock.patch.object(EngineSockets, "to_router", to_router),
        mock.patch.object(EngineSockets, "to_peer", to_peer),
        mock.patch.object(SimNode, "_build", build),
        mock.patch.object(World, "loses_pools", False),
        mock.patch.object(loop, "RING_EVENTS", 1_000_000),
    ):
        assert not simulate(seed, [faults, []]).problems
    for node in dict.fromkeys(lives):  # each in its last life
        dump = tmp_path / node.name
        assert node.loop.ring.dump(dump)
        with node.world.reading_eagerly():
            fresh, again = replay(node, dump)
        assert _by_receiver(again) == _by_receiver(said[node.sockets])
        assert fresh.scheduler.load() == node.scheduler.load()
        assert fresh.scheduler.pool._references == node.pool._references
