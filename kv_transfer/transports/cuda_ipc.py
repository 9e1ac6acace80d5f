"""Reads between GPUs of one host: the reader maps the peer's GPU memory and one kernel copies.

The owner lends a table of generations as `shm` lends a pool. The table proves that both are on one
host, and shows when the owner has died. The address holds the handle of the GPU memory. A read is
one launch. A thread waits for its end, which wakes the agent. Then the generations are read again,
and the read fails if a block got a new owner meanwhile. A launched copy cannot be stopped, so a
read is quiesced only once the GPU has ended it. Everything that touches a GPU is in `PeerMemory`.
"""

import os
import threading
import time
from dataclasses import dataclass, field
from queue import SimpleQueue

from baton.kv_transfer.interfaces import TRIAL_BLOCKS, AddPeer, PeerRank, Read
from baton.kv_transfer.pools import (
    DevicePool,
    PeerCopy,
    PeerPool,
    PoolShape,
    SliceMap,
    SliceRead,
)
from baton.kv_transfer.transports.addresses import (
    Address,
    Pool,
    ShmAddress,
    TransportKind,
    here,
    process_space,
)
from baton.kv_transfer.transports.shm import Mapping, OwnerLinks, make_fence
from baton.protocol.config import TransferConfig
from baton.protocol.errors import TransferError
from baton.protocol.ids import Epoch

NAME = "cuda_ipc"
CLOSE_POLL_S = 0.0005


class CudaIpcTransport:
    """Lends the GPU pool `pool` to other processes of this host, and reads the pools of peers.

    Raises `ConfigError` where the memory cannot be shared.
    """

    name = NAME
    connect_s = 10.0
    min_chunk_bytes = 1 << 30  # one launch, for which the GPU needs a few milliseconds
    progress_s: float | None = None
    tells_ends = True

    def __init__(self, pool: DevicePool, epoch: Epoch) -> None:
        self._fence = make_fence()
        self._handle = pool.peers.handle()
        self._pool = pool
        self._epoch = epoch
        self._links = OwnerLinks(pool.table)
        self._peers: dict[PeerRank, _OpenPeer] = {}
        self._flights: dict[int, _Flight] = {}
        self._next_handle = 0
        # Peers that were removed with copies in flight are unmapped when the last copy has ended.
        self._leaving: list[_OpenPeer] = []
        self._ends = _Ends()
        self._links.watch(self._ends.descriptor)

    def address(self) -> bytes:
        table = ShmAddress.here(self._links.name, self._pool.table.nonce, self._epoch)
        peers = self._pool.peers
        block_bytes = self._pool.memory.block_bytes
        return CudaIpcAddress(
            table, self._handle, block_bytes, peers.gpu, peers.visible, process_space()
        ).encode()

    def add_peer(self, command: AddPeer) -> None:
        peer = command.peer
        where = CudaIpcAddress.decode(command.address.metadata[NAME])
        where.table.check(peer.epoch)
        if where.block_bytes != command.block_bytes:
            raise TransferError("the address is not that peer's")
        memory = self._pool.memory
        ours = PoolShape(memory.num_blocks, memory.block_bytes)
        theirs = PoolShape(command.num_blocks, command.block_bytes)
        slices = SliceMap(theirs, ours, command.part)
        self.remove_peer(peer)
        self._links.add(
            peer,
            where.table.socket,
            where.table.nonce,
            PoolShape(command.num_blocks, 0),
        )
        self._peers[peer] = _OpenPeer(where.handle, slices)

    def connected(self, peer: PeerRank) -> bool:
        """Open the GPU's memory once the table is mapped, so that the owner is trusted."""
        if self._links.mapping(peer) is None:
            return False
        found = self._peers[peer]
        if found.pool is None:
            found.pool = self._pool.peers.open(found.handle, found.slices.theirs)
        return True

    def remove_peer(self, peer: PeerRank) -> None:
        self._links.remove(peer)
        found = self._peers.pop(peer, None)
        if found is not None:
            self._leaving.append(found)
            self._forget_drained()

    def read(self, command: Read) -> int:
        table = self._links.mapping(command.peer)
        found = self._peers[command.peer]
        if table is None or found.pool is None:
            raise TransferError("the pool is not open yet")
        read = found.slices.read(command)
        copy = found.pool.copy(read.remote, read.local, found.slices.part.num_bytes)
        return self._flying(_Flight(command.peer, found, copy, read))

    def trial(self, peer: PeerRank) -> int:
        found = self._peers[peer]
        if found.pool is None:
            raise TransferError("the pool is not open yet")
        num_blocks = min(TRIAL_BLOCKS, found.slices.theirs.num_blocks)
        return self._flying(_Flight(peer, found, found.pool.trial(num_blocks)))

    def _flying(self, flight: "_Flight") -> int:
        self._ends.expect(flight.copy)
        self._next_handle += 1
        self._flights[self._next_handle] = flight
        flight.owner.in_flight.add(self._next_handle)
        return self._next_handle

    def test(self, handle: int) -> bool:
        flight = self._flights[handle]
        try:
            ended = flight.copy.has_ended()
        except TransferError:
            self._drop(handle)
            raise
        if not ended:
            return False
        self._drop(handle)
        # A generation is bumped before the first store of a block's next owner. So equal numbers
        # after the copy mean that nothing of the next owner was copied.
        self._fence()
        read = flight.read
        if read is None:
            return True
        self._table_of(flight).check_generations(read.blocks, read.generations)
        return True

    def cancel(self, handle: int) -> bool:
        if handle not in self._flights:
            return True
        try:
            if not self._flights[handle].copy.has_ended():
                return False
        except TransferError:
            pass  # the GPU has abandoned the copy
        self._drop(handle)
        return True

    def fileno(self) -> int:
        return self._links.fileno()

    def service(self) -> list[PeerRank]:
        self._forget_drained()
        return self._links.service()

    def close(self) -> None:
        """Wait for copies in flight, because the GPU would still store into the pool."""
        while self._flights:
            for handle in list(self._flights):
                self.cancel(handle)
            time.sleep(CLOSE_POLL_S if self._flights else 0.0)
        for peer in list(self._peers):
            self.remove_peer(peer)
        self._forget_drained()
        self._links.close()
        self._ends.close()

    def _table_of(self, flight: "_Flight") -> Mapping:
        """Return the owner's generations. Raises `TransferError` if the owner is gone."""
        if self._peers.get(flight.peer) is not flight.owner:
            raise TransferError("the peer was removed")
        table = self._links.mapping(flight.peer)
        assert table is not None, "a peer that is read has a table"
        return table

    def _drop(self, handle: int) -> None:
        self._flights.pop(handle).owner.in_flight.remove(handle)

    def _forget_drained(self) -> None:
        """Unmap the pools of removed peers that no copy reads any more."""
        for peer in list(self._leaving):
            for handle in list(peer.in_flight):
                self.cancel(handle)
            if not peer.in_flight:
                self._leaving.remove(peer)
                if peer.pool is not None:
                    peer.pool.close()


@dataclass(slots=True, eq=False)
class _OpenPeer:
    handle: bytes
    slices: SliceMap
    pool: PeerPool | None = None
    in_flight: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Flight:
    peer: PeerRank
    owner: _OpenPeer
    copy: PeerCopy
    read: SliceRead | None = None  # None of a trial


class _Ends:
    """Makes `descriptor` readable whenever a copy has ended, for which a thread waits."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._copies: SimpleQueue[PeerCopy | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name="ends of copies", daemon=True
        )
        self._thread.start()

    def expect(self, copy: PeerCopy) -> None:
        """Wait for a copy, too; they end in the order of these calls."""
        self._copies.put(copy)

    def close(self) -> None:
        self._copies.put(None)
        self._thread.join()
        os.close(self.descriptor)

    def _run(self) -> None:
        while (copy := self._copies.get()) is not None:
            copy.wait()
            os.eventfd_write(self.descriptor, 1)


class CudaIpcAddress(Address, frozen=True):
    """Where to get a rank's table of generations and its GPU memory.

    The handle opens the memory to any process of this user that sees the GPU, so addresses may only
    travel between authenticated peers.
    """

    table: ShmAddress
    handle: bytes
    block_bytes: int
    gpu: str
    visible: tuple[str, ...]  # the GPUs that the process can read from
    processes: str  # the namespaces in which CUDA's handles are valid

    def can_be_read_by(self, reader: "CudaIpcAddress") -> bool:
        """Return whether both are on one host and share handles, and the reader sees the GPU."""
        is_near = (
            self.table.shares_host(reader.table) and self.processes == reader.processes
        )
        return is_near and self.gpu in reader.visible


def _make(pool: Pool, epoch: Epoch, _: TransferConfig) -> CudaIpcTransport:
    assert isinstance(pool, DevicePool), "another pool is refused"
    return CudaIpcTransport(pool, epoch)


def _can_read(source: bytes, target: bytes) -> bool:
    return CudaIpcAddress.decode(source).can_be_read_by(CudaIpcAddress.decode(target))


CUDA_IPC = TransportKind(
    NAME,
    _make,
    lends=(DevicePool,),
    reach=lambda _: f"{here()}/{process_space()}",
    can_read=_can_read,
    unreachable="decode does not see prefill's GPU: it is on another host, hidden by "
    "CUDA_VISIBLE_DEVICES, or in a container with its own ipc or pid namespace",
)
