"""Where several transports can read a peer, the fastest does after some trial reads."""

import logging

import pytest

from baton.kv_transfer.agent import AgentLimits, AgentTurns
from baton.kv_transfer.interfaces import (
    AddPeer,
    BlockSlice,
    PeerDown,
    PeerRank,
    PeerUp,
    Read,
    ReadEnded,
    RemovePeer,
)
from baton.kv_transfer.trials import LIMIT_S, ROUNDS, fastest
from baton.protocol.errors import TransferError
from baton.protocol.ids import Epoch
from baton.protocol.messages import RankAddress
from tests.support.virtual_clock import VirtualClock

PEER = PeerRank(Epoch("a"))
WHOLE = BlockSlice(0, 0, 100)
STEP_S = 0.0001


class Timed:
    """A transport whose reads take `read_s`, and which is connected `connect_after_s` later."""

    connect_s = 10.0
    min_chunk_bytes = 0
    progress_s: float | None = None
    tells_ends = False

    def __init__(self, name: str, clock: VirtualClock, read_s: float) -> None:
        self.name = name
        self.clock = clock
        self.read_s = read_s
        self.connect_after_s = 0.0
        self.failure = ""  # of trials
        self.added_s: dict[PeerRank, float] = {}
        self.ends: dict[int, float] = {}
        self.num_trials = 0
        self.num_reads = 0

    def address(self) -> bytes:
        return b""

    def add_peer(self, command: AddPeer) -> None:
        self.added_s[command.peer] = self.clock()

    def connected(self, peer: PeerRank) -> bool:
        return self.clock() >= self.added_s[peer] + self.connect_after_s

    def remove_peer(self, peer: PeerRank) -> None:
        self.added_s.pop(peer, None)

    def read(self, command: Read) -> int:
        self.num_reads += 1
        return self._post(command.peer)

    def trial(self, peer: PeerRank) -> int:
        if self.failure:
            raise TransferError(self.failure)
        self.num_trials += 1
        return self._post(peer)

    def _post(self, peer: PeerRank) -> int:
        assert peer in self.added_s, f"{self.name} does not know the peer"
        handle = len(self.ends) + 1
        self.ends[handle] = self.clock() + self.read_s
        return handle

    def test(self, handle: int) -> bool:
        return self.clock() >= self.ends[handle]

    def cancel(self, handle: int) -> bool:
        return True

    def fileno(self) -> int:
        return -1

    def service(self) -> list[PeerRank]:
        return []

    def close(self) -> None: ...


class World:
    """An agent with two transports, of which `near` is the first choice."""

    def __init__(self, near_s: float, far_s: float) -> None:
        self.clock = VirtualClock(100.0)
        self.near = Timed("near", self.clock, near_s)
        self.far = Timed("far", self.clock, far_s)
        self.turns = AgentTurns([self.near, self.far], AgentLimits(), self.clock)
        self.tickets = 0

    def add(self) -> None:
        address = RankAddress({"near": b"", "far": b""})
        self.turns.handle(AddPeer(PEER, "near", address, 9, 100, WHOLE, ("far",)))

    def run(self, seconds: float) -> list[object]:
        events: list[object] = []
        until_s = self.clock() + seconds
        while self.clock() < until_s:
            while self.turns.turn():
                pass
            events += self.turns.take_events()
            self.clock.advance(STEP_S)
        return events

    def read(self) -> str:
        """Read once, and return the transport that did."""
        self.tickets += 1
        before = self.near.num_reads, self.far.num_reads
        self.turns.handle(Read(self.tickets, PEER, (1,), (2,), (0,)))
        (end,) = self.run(0.01)
        assert isinstance(end, ReadEnded)
        assert end.failure is None
        after = self.near.num_reads, self.far.num_reads
        return "near" if after[0] > before[0] else "far"


@pytest.mark.parametrize(
    ("times", "found"),
    [
        ({"a": [3.0, 9.0, 3.0], "b": [1.0, 1.0, 50.0]}, "b"),
        ({"a": [2.0], "b": [2.5]}, "a"),
        ({"a": [2.0], "b": [1.9]}, "a"),  # not clearly faster
        ({"a": [2.0], "b": [1.0], "c": [0.5]}, "c"),
    ],
)
def test_the_least_median_wins_if_it_is_clearly_less(times, found):
    assert fastest(times, "a") == found


@pytest.mark.parametrize(
    ("near_s", "far_s", "winner"),
    [(0.001, 0.0005, "far"), (0.0005, 0.001, "near"), (0.001, 0.001, "near")],
)
def test_the_faster_transport_makes_all_reads_after_the_trials(near_s, far_s, winner):
    world = World(near_s, far_s)
    world.far.connect_after_s = 0.05
    world.add()
    assert world.run(0.01) == [PeerUp(PEER, "near")]
    assert world.read() == "near", "the first choice serves at once"
    assert world.near.num_trials == 0, "the other is not connected yet"
    world.run(0.1)
    assert world.near.num_trials == world.far.num_trials == ROUNDS
    assert [world.read() for _ in range(3)] == [winner] * 3
    loser = world.near if winner == "far" else world.far
    assert loser.added_s == {}
    world.turns.handle(RemovePeer(PEER))
    world.run(0.01)
    assert world.near.added_s == world.far.added_s == {}


@pytest.mark.parametrize("lacks", ["a connection", "trials"])
def test_a_transport_that_cannot_read_the_peer_is_one_line_of_the_log(lacks, caplog):
    world = World(0.001, 0.0001)
    world.far.failure = "no such lane" if lacks == "trials" else ""
    world.far.connect_after_s = 60.0 if lacks == "a connection" else 0.0
    world.add()
    with caplog.at_level(logging.WARNING):
        world.run(11.0)
    (record,) = caplog.records
    assert "far cannot read a peer, near does" in record.getMessage()
    assert world.far.added_s == {}
    assert world.read() == "near"


@pytest.mark.parametrize("slow", ["near", "far"])
def test_a_trial_that_does_not_end_is_given_up(slow):
    world = World(*(60.0 if name == slow else 0.001 for name in ("near", "far")))
    world.add()
    world.run(LIMIT_S + 0.1)
    assert set(world.near.added_s) == {PEER}
    assert world.far.added_s == {}
    assert world.turns.wake_at_s(60.0) is None, "nothing is waited for"


def test_no_trial_runs_beside_a_read_and_a_peer_may_leave_in_the_middle():
    world = World(0.004, 0.004)
    world.add()
    world.run(0.006)
    num_trials = world.near.num_trials + world.far.num_trials
    assert num_trials > 0
    for ticket in (1, 2):
        world.turns.handle(Read(ticket, PEER, (1,), (2,), (0,)))
    world.run(0.003)
    assert world.near.num_trials + world.far.num_trials == num_trials
    world.turns.handle(RemovePeer(PEER))
    events = world.run(0.01)
    assert sorted(event.ticket for event in events if isinstance(event, ReadEnded)) == [
        1,
        2,
    ]
    assert not any(isinstance(event, PeerDown) for event in events)
    assert world.near.added_s == world.far.added_s == {}
