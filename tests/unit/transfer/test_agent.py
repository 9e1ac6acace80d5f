"""A transfer agent's turns on a transport that does what the test says, and its thread."""

import select
import threading
from contextlib import ExitStack, closing

import pytest

from baton.kv_transfer.agent import (
    MAX_WAIT_S,
    AgentLimits,
    AgentTurns,
    TransferAgent,
    make_port,
)
from baton.kv_transfer.interfaces import (
    AddPeer,
    AgentEvent,
    BlockSlice,
    BlocksSummed,
    CancelRead,
    PeerDown,
    PeerRank,
    PeerUp,
    Read,
    ReadDrained,
    ReadEnded,
    RemovePeer,
    SumBlocks,
)
from baton.kv_transfer.pools import HostPool
from baton.protocol.config import TransferConfig
from baton.protocol.errors import InvariantBroken, TransferError
from baton.protocol.ids import Epoch
from baton.protocol.messages import RankAddress
from tests.support.memfd_memory import device_pool
from tests.support.virtual_clock import VirtualClock

A = PeerRank(Epoch("a"))
B = PeerRank(Epoch("a"), 1)
WHOLE = BlockSlice(0, 0, 100)
LIMITS = AgentLimits(chunk_bytes=400, read_s=30, quiesce_s=5)


class ScriptedTransport:
    """Ends and fails the chunks it is told to, and cancels only if `cancels`."""

    name = "scripted"
    connect_s = 10.0
    min_chunk_bytes = 0
    progress_s: float | None = None
    tells_ends = False

    def __init__(self) -> None:
        self.up: set[PeerRank] = {A, B}
        self.gone: list[PeerRank] = []
        self.posted: list[tuple[PeerRank, tuple[int, ...], tuple[int, ...]]] = []
        self.ended: set[int] = set()
        self.failed: set[int] = set()
        self.cancels = True
        self.added: list[PeerRank] = []
        self.removed: list[PeerRank] = []

    def address(self) -> bytes:
        return b"here"

    def add_peer(self, command: AddPeer) -> None:
        self.added.append(command.peer)

    def connected(self, peer: PeerRank) -> bool:
        return peer in self.up

    def remove_peer(self, peer: PeerRank) -> None:
        self.removed.append(peer)

    def read(self, command: Read) -> int:
        self.posted.append((command.peer, command.remote, command.local))
        return len(self.posted)

    def test(self, handle: int) -> bool:
        if handle in self.failed:
            raise TransferError("failed")
        return handle in self.ended

    def cancel(self, handle: int) -> bool:
        return self.cancels

    def fileno(self) -> int:
        return -1

    def service(self) -> list[PeerRank]:
        gone = self.gone
        self.gone = []
        return gone

    def close(self) -> None: ...


class Driven:
    """`AgentTurns` with blocks of 100 bytes, so that a chunk has four."""

    def __init__(self, *peers: PeerRank) -> None:
        self.transport = ScriptedTransport()
        self.clock = VirtualClock(100.0)
        self.turns = AgentTurns([self.transport], LIMITS, self.clock)
        for peer in peers:
            self.turns.handle(add(peer))
        assert self.settle() == [PeerUp(peer, "scripted") for peer in peers]

    def settle(self) -> list[AgentEvent]:
        """Turns until nothing moves; what was reported."""
        while self.turns.turn():
            pass
        return self.turns.take_events()

    def end(self, *handles: int) -> list[AgentEvent]:
        self.transport.ended.update(handles)
        return self.settle()


def add(peer: PeerRank) -> AddPeer:
    return AddPeer(
        peer, "scripted", RankAddress({"scripted": b"there"}), 100, 100, WHOLE
    )


def read(ticket: int, num_blocks: int, peer: PeerRank = A) -> Read:
    remote = tuple(range(num_blocks))
    return Read(
        ticket, peer, remote, tuple(50 + block for block in remote), (0,) * num_blocks
    )


def ended(events: list[AgentEvent]) -> ReadEnded:
    (event,) = events
    assert isinstance(event, ReadEnded)
    return event


def test_a_read_is_cut_into_chunks_of_which_two_are_in_flight():
    driven = Driven(A)
    driven.turns.handle(read(7, 10))
    assert driven.settle() == []
    assert driven.transport.posted == [
        (A, (0, 1, 2, 3), (50, 51, 52, 53)),
        (A, (4, 5, 6, 7), (54, 55, 56, 57)),
    ]
    assert driven.end(2) == []
    assert driven.transport.posted[2:] == [(A, (8, 9), (58, 59))]
    driven.clock.advance(2.0)
    assert driven.end(1, 3) == [ReadEnded(7, 100.0, 102.0, 1000)]


def test_peers_are_served_in_turn():
    driven = Driven(A, B)
    driven.turns.handle(read(1, 12, A))
    driven.turns.handle(read(2, 12, B))
    driven.settle()
    assert [peer for peer, _, _ in driven.transport.posted] == [A, B, A, B]


def test_a_read_waits_for_its_peer_to_connect():
    driven = Driven()
    driven.transport.up = set()
    driven.turns.handle(add(A))
    driven.turns.handle(read(1, 4))
    assert driven.settle() == []
    assert driven.transport.posted == []
    driven.transport.up = {A}
    driven.transport.ended = {1}
    assert [type(event) for event in driven.settle()] == [PeerUp, ReadEnded]


def test_a_cancelled_read_posts_no_further_chunk_and_says_what_landed():
    driven = Driven(A)
    driven.turns.handle(read(1, 100))
    driven.settle()
    driven.end(1)
    driven.turns.handle(CancelRead(1))
    got = ended(driven.settle())
    assert (got.num_bytes, got.quiesced, got.failure and got.failure.code) == (
        400,
        True,
        "cancelled",
    )
    assert len(driven.transport.posted) == 3


@pytest.mark.parametrize("cancels", [True, False])
def test_a_read_that_stays_in_flight_fails_and_is_quiesced_only_if_it_was_cancelled(
    cancels,
):
    driven = Driven(A)
    driven.transport.cancels = cancels
    driven.turns.handle(read(1, 4))
    assert driven.settle() == []
    driven.clock.advance(30.0)  # its deadline
    if not cancels:
        assert driven.settle() == []
        driven.clock.advance(5.0)
    got = ended(driven.settle())
    assert (got.num_bytes, got.quiesced) == (0, cancels)
    assert got.failure is not None
    driven.clock.advance(100.0)
    assert driven.settle() == []
    driven.transport.cancels = True  # its peer went on, or is gone
    assert driven.settle() == ([] if cancels else [ReadDrained(1)])
    assert driven.turns.wake_at_s(1.0) is None


def test_a_failed_chunk_fails_the_read_and_cancels_the_other():
    driven = Driven(A)
    driven.turns.handle(read(1, 100))
    driven.settle()
    driven.transport.failed = {1}
    got = ended(driven.settle())
    assert (got.num_bytes, got.quiesced, got.failure and got.failure.message) == (
        0,
        True,
        "failed",
    )
    assert len(driven.transport.posted) == 2


def test_a_peer_that_is_gone_is_told_once_and_its_reads_fail():
    driven = Driven(A)
    driven.turns.handle(read(1, 4))
    driven.settle()
    driven.transport.gone = [A, A]
    events = driven.settle()
    assert sorted(type(event).__name__ for event in events) == ["PeerDown", "ReadEnded"]
    assert driven.transport.removed == [A]
    driven.turns.handle(read(2, 4))
    assert ended(driven.settle()).failure is not None


def test_a_peer_that_does_not_connect_in_time_is_down():
    driven = Driven()
    driven.transport.up = set()
    driven.turns.handle(add(A))
    driven.settle()
    assert driven.turns.wake_at_s(1.0) == 101.0
    driven.clock.advance(10.0)
    (event,) = driven.settle()
    assert isinstance(event, PeerDown)
    assert driven.transport.removed == [A]


def test_a_removed_peer_is_forgotten_after_its_reads_and_may_be_added_again():
    driven = Driven(A)
    driven.transport.cancels = False
    driven.turns.handle(read(1, 4))
    driven.settle()
    driven.turns.handle(RemovePeer(A))
    driven.turns.handle(add(A))
    assert driven.settle() == []
    assert driven.transport.removed == []
    driven.transport.ended = {1}
    first, second = driven.settle() + driven.settle()
    assert isinstance(first, ReadEnded)
    assert first.failure is not None
    assert second == PeerUp(A, "scripted")
    assert (driven.transport.removed, driven.transport.added) == ([A], [A, A])


def test_only_what_has_no_descriptor_is_polled():
    driven = Driven(A)
    assert driven.turns.wake_at_s(0.001) is None
    driven.transport.progress_s = 0.002  # it has no thread of its own
    assert driven.turns.wake_at_s(0.001) == 100.002
    driven.turns.handle(read(1, 4))
    driven.settle()
    assert driven.turns.wake_at_s(0.001) == 100.001
    driven.transport.progress_s = None
    driven.transport.tells_ends = True
    assert driven.turns.wake_at_s(0.001) == 100.0 + MAX_WAIT_S


def test_the_end_of_a_gpus_copy_wakes_the_agent(monkeypatch):
    monkeypatch.setattr("baton.kv_transfer.agent.MAX_WAIT_S", 60.0)
    monkeypatch.setattr("baton.kv_transfer.agent.MIN_WAIT_S", 60.0)
    config = TransferConfig(transport="cuda_ipc")
    with ExitStack() as stack:
        agents = []
        for name in "ab":
            memory = stack.enter_context(closing(HostPool(5, 4096)))
            memory.buffer[:] = name.encode() * len(memory.buffer)
            pool = stack.enter_context(closing(device_pool(memory, num_spare=1)))
            agent = make_port(pool, Epoch(name), config)
            agents.append(stack.enter_context(closing(agent)))
        owner, reader = agents
        whole = BlockSlice(0, 0, 4096)
        reader.send(AddPeer(A, "cuda_ipc", owner.address(), 4, 4096, whole))
        reader.send(Read(1, A, (0, 1, 2, 3), (3, 2, 1, 0), (0,) * 4))
        ends: list[AgentEvent] = []
        while len(ends) < 2:
            assert select.select([reader.fileno()], [], [], 10.0)[0]
            ends += reader.poll()
        assert ends[0] == PeerUp(A, "cuda_ipc")
        assert isinstance(ends[1], ReadEnded)
        assert (ends[1].failure, ends[1].num_bytes) == (None, 4 * 4096)
        assert bytes(memory.buffer[: 4 * 4096]) == b"a" * 4 * 4096


def test_the_agent_of_a_gpu_sums_slices_of_its_pool_on_its_own_thread():
    with (
        closing(HostPool(4, 4096)) as memory,
        closing(device_pool(memory, num_spare=1)) as pool,
    ):
        memory.buffer[:] = bytes(range(256)) * 64
        memory.buffer[9000] = 77
        config = TransferConfig(transport="cuda_ipc", verify_kv=True)
        agent = make_port(pool, Epoch("a"), config)
        agent.send(SumBlocks(5, (2, 1), 2048, 2))
        assert select.select([agent.fileno()], [], [], 10.0)[0]
        rows = tuple(memory.checksums((2, 1), offset, 2048) for offset in (0, 2048))
        assert rows[0][0] != rows[0][1] == rows[1][0]
        assert agent.poll() == [BlocksSummed(5, rows)]
        agent.close()


def test_the_thread_enters_the_gpu_before_it_calls_a_transport():
    transport = ScriptedTransport()
    order = []
    agent = TransferAgent(
        [transport], LIMITS, enter=lambda: order.append(threading.current_thread().name)
    )
    agent.close()
    assert order == ["transfer agent"]

    def fail() -> None:
        raise RuntimeError("no context")

    agent = TransferAgent([transport], LIMITS, enter=fail)
    assert select.select([agent.fileno()], [], [], 10.0)[0]
    with pytest.raises(InvariantBroken, match="no context"):
        agent.poll()
    agent.close()
