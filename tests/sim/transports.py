"""Transports between simulated pools, under the real `AgentTurns`.

`SimShm` reads like shared memory: at once, also from a process that is frozen or dead, and it
compares generations. `SimNixl` reads like RDMA without a progress thread at the owner: bytes land
late, a read from a frozen owner lasts until it thaws, nothing can be cancelled, and nothing is
compared, so only leases protect the reader.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, cast

from baton.kv_transfer.agent import AgentLimits, AgentTurns
from baton.kv_transfer.interfaces import (
    AddPeer,
    AgentCommand,
    AgentEvent,
    BlockSlice,
    PeerRank,
    Read,
    TierTransport,
)
from baton.node.scheduling.block_pool import BlockPool
from baton.protocol.errors import NodeError, TransferError
from baton.protocol.ids import Epoch
from tests.sim.clock import Process
from tests.sim.executor import BLOCK_BYTES, SLOT_BYTES, VOCAB, Context, SimExecutor
from tests.sim.network import world_call_at

if TYPE_CHECKING:
    from tests.sim.world import World

LIMITS = AgentLimits(read_s=6.0, quiesce_s=10.0)
POLL_S = 0.05  # a pump that nothing wakes comes after this time at the latest


@dataclass(slots=True)
class Owner:
    """A node whose ranks have pools that others can read. A rank has some heads of each block."""

    process: Process
    executor: SimExecutor
    pool: BlockPool
    num_ranks: int
    dead_ranks: set[int] = field(default_factory=set)
    lies: bool = False  # what its transports read is not what they report
    has_full_disk: bool = False
    has_slow_disk: bool = False

    def heads(self, rank: int, offset: int, num_bytes: int) -> slice:
        """Return the slots of a block that a rank has in these bytes of it."""
        first = (rank * BLOCK_BYTES // self.num_ranks + offset) // SLOT_BYTES
        return slice(first, first + num_bytes // SLOT_BYTES)

    def is_gone(self, rank: int) -> bool:
        return self.process.is_dead or rank in self.dead_ranks

    def checksums(
        self, rank: int, blocks: Sequence[int], offset: int, num_bytes: int
    ) -> tuple[int, ...]:
        """Return a checksum of these bytes of each block that a rank has."""
        heads = self.heads(rank, offset, num_bytes)
        slots = self.executor.model.slots
        rows = (tuple(map(_bits, slots[block][heads])) for block in blocks)
        return tuple(hash(row) & 0xFFFFFFFF for row in rows)


Pools = dict[Epoch, Owner]


def _bits(slot: Context | int | None) -> int:
    return slot.digest if isinstance(slot, Context) else slot or 0


@dataclass(slots=True)
class _Posted:
    owner: Owner
    part: BlockSlice
    command: Read
    generations: tuple[int, ...]  # of the blocks that it writes
    error: TransferError | None = None
    has_landed: bool = False


class SimTransport:
    """What both transports share. A read lands in the world, not on a process's time."""

    name = ""
    connect_s = 5.0
    min_chunk_bytes = 0
    progress_s: float | None = None
    tells_ends = False

    def __init__(self, world: "World", own: Owner, rank: int) -> None:
        self._world = world
        self._own = own
        self._rank = rank
        self._rng = world.rng
        self._handles = itertools.count(1)
        self._posted: dict[int, _Posted] = {}
        self._peers: dict[PeerRank, tuple[Owner, BlockSlice]] = {}
        self.wake: Callable[[], None] = lambda: None

    def address(self) -> bytes:
        return b""

    def add_peer(self, peer: AddPeer) -> None:
        owner = self._world.pools.get(peer.peer.epoch)
        if owner is None or owner.is_gone(peer.peer.rank):
            raise TransferError("the peer's process is gone")
        self._peers[peer.peer] = owner, peer.part

    def connected(self, peer: PeerRank) -> bool:
        return self._rng.random() < 0.5

    def remove_peer(self, peer: PeerRank) -> None:
        self._peers.pop(peer, None)

    def read(self, command: Read) -> int:
        generations = self._own.pool.generations_of(command.local)
        posted = _Posted(*self._peers[command.peer], command, generations)
        handle = next(self._handles)
        self._posted[handle] = posted
        self._in(self._rng.choice(self._world.landing_s), lambda: self._land(posted))
        return handle

    def test(self, handle: int) -> bool:
        posted = self._posted[handle]
        if posted.error is not None:
            raise posted.error
        if posted.has_landed:
            del self._posted[handle]
        return posted.has_landed

    def cancel(self, handle: int) -> bool:
        raise NotImplementedError

    def fileno(self) -> int:
        return -1

    def service(self) -> list[PeerRank]:
        return [
            peer for peer, (owner, _) in self._peers.items() if owner.is_gone(peer.rank)
        ]

    def close(self) -> None: ...

    def _land(self, posted: _Posted) -> None:
        raise NotImplementedError

    def _in(self, seconds: float, then: Callable[[], None]) -> None:
        world_call_at(self._world.loop, self._world.loop.time() + seconds, then)

    def check_landing(self, posted: _Posted) -> None:
        """Check that the blocks that a read writes are still those that it was given."""
        pool = self._own.pool
        local = posted.command.local
        is_kept = all(
            pool.references(block) or block in pool._quarantined for block in local
        )
        if not is_kept or pool.generations_of(local) != posted.generations:
            self._world.problem(
                f"a read of {self._own.process.name} lands in blocks of others"
            )

    def _copy(self, posted: _Posted) -> None:
        self.check_landing(posted)
        local = posted.command.local
        owner = posted.owner
        part = posted.part
        theirs = owner.heads(
            posted.command.peer.rank, part.remote_offset, part.num_bytes
        )
        ours = self._own.heads(self._rank, part.local_offset, part.num_bytes)
        slots = self._own.executor.model.slots
        for source, target in zip(posted.command.remote, local, strict=True):
            if not self._own.lies or self._rng.random() < 0.5:
                slots[target][ours] = owner.executor.model.slots[source][theirs]
            elif self._rng.random() < 0.5:  # else the block keeps what it had
                slots[target][ours] = map(
                    _altered, owner.executor.model.slots[source][theirs]
                )
        posted.has_landed = True
        self.wake()


def _altered(slot: Context | int | None) -> Context | int | None:
    """Return what looks like a slot of another prompt."""
    if isinstance(slot, Context) and slot.before is not None:
        return slot.before.then((slot.token + 1) % VOCAB)
    return slot ^ 1 if isinstance(slot, int) else slot


class SimShm(SimTransport):
    name = "shm"

    def _land(self, posted: _Posted) -> None:
        if posted not in self._posted.values() or self._own.is_gone(self._rank):
            return
        if self._own.process.is_frozen:  # the copying thread is frozen, too
            self._in(0.1, lambda: self._land(posted))
            return
        self._copy(posted)
        if self.is_stale(posted):
            posted.error = TransferError("a block has a new owner", code="stale_block")

    def is_stale(self, posted: _Posted) -> bool:
        """Return whether a block that was copied has a new owner."""
        now = [
            posted.owner.executor.generations[block] for block in posted.command.remote
        ]
        return now != list(posted.command.generations)

    def cancel(self, handle: int) -> bool:
        self._posted.pop(handle, None)
        return True


class SimNixl(SimTransport):
    name = "nixl"

    def _land(self, posted: _Posted) -> None:
        if self._own.is_gone(self._rank):
            return
        if posted.owner.is_gone(posted.command.peer.rank):
            posted.error = TransferError("the connection broke")
            self.wake()
        elif posted.owner.process.is_frozen:
            self._in(self._rng.choice((0.1, 0.5, 1.5)), lambda: self._land(posted))
        else:
            self._copy(posted)

    def cancel(self, handle: int) -> bool:
        posted = self._posted.get(handle)
        if posted is None or posted.has_landed or posted.error is not None:
            self._posted.pop(handle, None)
            return True
        return False


class SimPort:
    """A `TransferPort`: the agent of one rank, in a thread that freezes with its process."""

    def __init__(
        self,
        owner: Owner,
        rank: int,
        transports: Sequence[SimTransport],
        world: "World",
        wake: Callable[[], None],
    ) -> None:
        """The first of `transports` reads from peers, the others are tiers."""
        process = owner.process
        checksums = partial(owner.checksums, rank) if world.verifies_kv else None
        tiers = cast(Sequence[TierTransport], transports[1:])
        self._turns = AgentTurns(
            transports[:1], LIMITS, process.clock, checksums, tiers
        )
        self._process = process
        self._rng = world.rng
        self._wake = wake
        self._owner = owner
        self._rank = rank
        self._events: list[AgentEvent] = []
        self._due: asyncio.TimerHandle | None = None
        for transport in transports:
            transport.wake = lambda: process.call(self.pump)
        if tiers:
            self._pump_in(0.0)

    def fileno(self) -> int:
        return -1

    def send(self, command: AgentCommand) -> None:
        if self._is_dead:
            return
        self._turns.handle(command)
        self._pump_in(self._rng.choice((0.0, 0.001, 0.02)))

    @property
    def _is_dead(self) -> bool:
        return self._rank in self._owner.dead_ranks

    def poll(self) -> list[AgentEvent]:
        if (
            self._is_dead
            and not self._events
            and self._owner.executor.error is not None
        ):
            raise NodeError(f"the transfer agent of rank {self._rank} is gone")
        events = self._events
        self._events = []
        return events

    def pump(self) -> None:
        if self._is_dead:
            return
        while self._turns.turn():
            pass
        if events := self._turns.take_events():
            self._events += events
            self._wake()
        wake_at_s = self._turns.wake_at_s(POLL_S)
        if wake_at_s is not None:
            self._pump_in(max(wake_at_s - self._process.clock(), 0.001))

    def _pump_in(self, seconds: float) -> None:
        loop = self._process.loop
        at_s = loop.time() + seconds
        if self._due is not None:
            if self._due.when() <= at_s:
                return
            self._due.cancel()
        self._due = loop.call_at(at_s, self._pump_now)

    def _pump_now(self) -> None:
        self._due = None
        self.pump()
