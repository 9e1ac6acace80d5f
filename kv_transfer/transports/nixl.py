"""Reads through NIXL over UCX: between hosts, and between GPUs.

A warm-up read connects each pair. Between GPUs it lands in a spare block of the pool, as trials do,
because UCX would read GPU memory into host memory by TCP, which would prove nothing. Each peer has
a descriptor list with the slice of every block that is read there, and reads name blocks in it by
index. Giving up a read in flight does not stop it: in a measurement, all of its bytes landed after
its handle was released and its peer removed. So only a read that has ended, or that failed because
its connection broke, counts as quiesced. A read of a frozen peer never ends; the agent keeps the
deadlines.
"""

import contextlib
import hashlib
import secrets
import time
from dataclasses import dataclass
from typing import Annotated, Self

import msgspec
import numpy as np

from baton.kv_transfer.interfaces import (
    TRIAL_BLOCKS,
    AddPeer,
    BlockSlice,
    PeerRank,
    PoolMemory,
    Read,
)
from baton.kv_transfer.pools import DevicePool, HostPool, PoolShape, SliceMap
from baton.kv_transfer.transports.addresses import Address, Pool, TransportKind, here
from baton.kv_transfer.transports.nixl_binding import (
    WARM_UP_BYTES,
    Releasable,
    block_rows,
    is_installed,
    make_agent,
    one_row,
    segment,
    warm_up_bytes,
)
from baton.protocol.config import TransferConfig
from baton.protocol.errors import ConfigError, TransferError
from baton.protocol.ids import BlockCount, Epoch, NumBytes
from baton.runtime.clock import monotonic

NAME = "nixl"
DIGEST_BYTES = 16
MAX_ADDRESS_BYTES = 1 << 20
MAX_PARKED = 8
# After this time, a warm-up that has not ended is given up with its connection.
WARM_UP_S = 600.0
# A peer's read ends only while the UCX of the pool's owner makes progress.
PROGRESS_S = 0.001
WITHOUT_CUDA = (
    "; its UCX cannot use this GPU: install the wheel for this driver's CUDA (nixl-cu13 or "
    "nixl-cu12), or leave transfer.transport at auto, which serves the GPUs of one host without it"
)
# The end of a spare block, where `cuda_ipc` has its proof.
SPARE_END_BYTES = 64
CLOSE_WAIT_S = 1.0
CLOSE_POLL_S = 0.001

PoolAddress = Annotated[int, msgspec.Meta(ge=0, lt=(1 << 63) - 1)]


class NixlTransport:
    """Lends the pool at `memory` to other processes, and reads the pools of peers.

    `memory` must exist until `close`; on a GPU it has a spare block. `network_device` is UCX's name
    for the device, such as `mlx5_0:1`; if it is empty, UCX uses loopback. With `has_thread`, a
    thread of NIXL makes progress; without it `service` does, because on GPUs that thread crashes
    (NIXL's issue 2102). Raises `ConfigError` if NIXL is missing or cannot start.
    """

    name = NAME
    connect_s = 60.0  # a cold RDMA pair may take most of it
    min_chunk_bytes = 0
    tells_ends = False

    def __init__(
        self,
        memory: PoolMemory,
        epoch: Epoch,
        network_device: str = "",
        *,
        has_thread: bool | None = None,
    ) -> None:
        is_on_gpu = memory.device != "cpu"
        assert memory.num_spare or not is_on_gpu, "a warm-up must not touch the pool"
        has_thread = not is_on_gpu if has_thread is None else has_thread
        self.progress_s: float | None = None if has_thread else PROGRESS_S
        self._memory = memory
        self._epoch = epoch
        self._agent_name = f"baton-{epoch}-{secrets.token_hex(4)}"
        self._agent, self._errors = make_agent(
            self._agent_name, network_device, is_on_gpu=is_on_gpu, has_thread=has_thread
        )
        # Where warm-ups and trials of CPU pools land.
        self._scratch = np.zeros(max(WARM_UP_BYTES, memory.block_bytes), np.uint8)
        try:
            self._sink = self._register()
        except self._errors.at_start as error:
            hint = WITHOUT_CUDA if is_on_gpu else ""
            raise ConfigError(
                f"nixl cannot register the pool: {error}{hint}"
            ) from error
        # The local side of reads: the prepared slices of all our blocks, by offset and length.
        self._targets: dict[tuple[int, int], Releasable] = {}
        self._peers: dict[PeerRank, _PreparedPeer] = {}
        # Peers that were removed with reads in flight are forgotten when the last read has ended.
        self._leaving: list[_PreparedPeer] = []
        # Agents that were removed while their connection worked, with their metadata. Adding such
        # an agent again reuses the connection, because NIXL leaves a socket open at both ends when
        # it drops a live one.
        self._parked: dict[str, bytes] = {}
        self._reads: dict[int, _Flight] = {}
        self._next_handle = 0
        self._gone: list[PeerRank] = []

    def _register(self) -> Releasable:
        """Register the pool and the warm-up's target, and return the latter's descriptor."""
        memory = self._memory
        kind, device = segment(memory.device)
        size = (memory.num_blocks + memory.num_spare) * memory.block_bytes
        self._agent.register_memory([(memory.address, size, device, "")], kind)
        if not memory.num_spare:
            scratch = self._scratch
            row = (scratch.ctypes.data, scratch.nbytes, 0, "")
            self._agent.register_memory([row], "DRAM")
        return self._sink_of(warm_up_bytes(memory.block_bytes))

    def _sink_of(self, num_bytes: int) -> Releasable:
        """Return where reads land that no sequence wants: in the spare block, or in host memory."""
        memory = self._memory
        kind, device = segment(memory.device)
        if memory.num_spare:
            address = memory.address + memory.num_blocks * memory.block_bytes
            return self._agent.prep_xfer_dlist(
                "", one_row(address, num_bytes, device), kind
            )
        address = int(self._scratch.ctypes.data)
        return self._agent.prep_xfer_dlist("", one_row(address, num_bytes, 0), "DRAM")

    def address(self) -> bytes:
        memory = self._memory
        return NixlAddress(
            self._epoch,
            self._agent_name,
            memory.device,
            memory.address,
            memory.num_blocks,
            memory.block_bytes,
            self._agent.get_agent_metadata(),
        ).encode()

    def add_peer(self, command: AddPeer) -> None:
        peer = command.peer
        part = command.part
        where = NixlAddress.decode(command.address.metadata[NAME])
        announced = (peer.epoch, command.num_blocks, command.block_bytes)
        if (where.epoch, where.num_blocks, where.block_bytes) != announced:
            raise TransferError("the address is not that peer's")
        ours = PoolShape(self._memory.num_blocks, self._memory.block_bytes)
        shapes = SliceMap(PoolShape(where.num_blocks, where.block_bytes), ours, part)
        self.remove_peer(peer)
        same = (where, shapes)
        busy = next(
            (one for one in self._leaving if (one.where, one.shapes) == same), None
        )
        if busy is not None:
            self._leaving.remove(busy)
            self._peers[peer] = busy
            return
        try:
            self._peers[peer] = self._prepare(where, shapes)
        except self._errors.all as error:
            raise TransferError(f"nixl refuses the peer: {error}") from error

    def _prepare(self, where: "NixlAddress", shapes: SliceMap) -> "_PreparedPeer":
        """Load the metadata, prepare the slices of the pool, and post the read that connects."""
        part = shapes.part
        parked = self._parked.pop(where.agent, None)
        added = where.agent
        if parked != where.metadata:
            if parked is not None:
                self._agent.remove_remote_agent(where.agent)
            added = self._agent.add_remote_agent(where.metadata).decode()
        with contextlib.ExitStack() as undo:
            undo.callback(self._agent.remove_remote_agent, added)
            if added != where.agent:
                raise TransferError("the metadata is another agent's")
            memory = PoolMemory(
                where.pool_address, where.num_blocks, where.block_bytes, where.device
            )
            kind, device = segment(where.device)
            rows = block_rows(memory, part.remote_offset, part.num_bytes)
            slices = self._agent.prep_xfer_dlist(added, rows, kind)
            first = one_row(
                where.pool_address, warm_up_bytes(where.block_bytes), device
            )
            source = self._agent.prep_xfer_dlist(added, first, kind)
            zero = np.zeros(1, np.int32)
            handle = self._agent.make_prepped_xfer(
                "READ", self._sink, zero, source, zero
            )
            peer = _PreparedPeer(where, shapes, slices, self._target(part), source)
            peer.warm_up = _Flight(handle, peer, self._agent.transfer(handle))
            undo.pop_all()
        return peer

    def _target(self, part: BlockSlice) -> Releasable:
        """Return the target of reads of that slice, which peers of one shape share."""
        place = (part.local_offset, part.num_bytes)
        if place not in self._targets:
            kind, _ = segment(self._memory.device)
            rows = block_rows(self._memory, *place)
            self._targets[place] = self._agent.prep_xfer_dlist("", rows, kind)
        return self._targets[place]

    def connected(self, peer: PeerRank) -> bool:
        found = self._peer(peer)
        if found.warm_up is not None and self._has_ended(found.warm_up):
            found.warm_up = None
        return found.warm_up is None

    def remove_peer(self, peer: PeerRank) -> None:
        found = self._peers.pop(peer, None)
        if found is not None:
            found.give_up_s = monotonic() + WARM_UP_S
            self._leaving.append(found)
            self._forget_drained()

    def read(self, command: Read) -> int:
        found = self._peer(command.peer)
        read = found.shapes.read(command)
        # NIXL merges neighbours into one request.
        order = np.argsort(read.into, kind="stable")
        into = read.into[order].astype(np.int32)
        out_of = read.blocks[order].astype(np.int32)
        try:
            handle = self._agent.make_prepped_xfer(
                "READ", found.target, into, found.slices, out_of
            )
        except self._errors.all as error:
            raise self._failed(found, error) from error
        try:
            state = self._agent.transfer(handle)
        except self._errors.disconnected as error:
            raise self._failed(found, error) from error
        except self._errors.all:
            state = "ERR"  # some of its descriptors may have been posted
        return self._flying(_Flight(handle, found, state))

    def trial(self, peer: PeerRank) -> int:
        found = self._peer(peer)
        try:
            if found.trial is None:
                found.trial = self._trial_of(found.where)
            sink, source, num_blocks = found.trial
            zeros = np.zeros(num_blocks, np.int32)
            handle = self._agent.make_prepped_xfer(
                "READ", sink, zeros, source, np.arange(num_blocks, dtype=np.int32)
            )
            return self._flying(_Flight(handle, found, self._agent.transfer(handle)))
        except self._errors.all as error:
            raise self._failed(found, error) from error

    def _trial_of(self, where: "NixlAddress") -> tuple[Releasable, Releasable, int]:
        """Return where trials land, what they read, and the number of blocks."""
        size = min(where.block_bytes, self._memory.block_bytes)
        num_bytes = max(warm_up_bytes(size), size - SPARE_END_BYTES)
        num_blocks = min(TRIAL_BLOCKS, where.num_blocks)
        memory = PoolMemory(
            where.pool_address, num_blocks, where.block_bytes, where.device
        )
        kind, _ = segment(where.device)
        rows = block_rows(memory, 0, num_bytes)
        source = self._agent.prep_xfer_dlist(where.agent, rows, kind)
        return self._sink_of(num_bytes), source, num_blocks

    def _flying(self, flight: "_Flight") -> int:
        self._next_handle += 1
        self._reads[self._next_handle] = flight
        flight.peer.num_in_flight += 1
        return self._next_handle

    def test(self, handle: int) -> bool:
        flight = self._reads[handle]
        try:
            ended = self._has_ended(flight)
        except TransferError:
            if flight.peer.gone:
                self._drop(handle)
            raise
        if ended:
            self._drop(handle)
        return ended

    def cancel(self, handle: int) -> bool:
        if handle not in self._reads:
            return True
        try:
            return self.test(handle)
        except TransferError:
            return handle not in self._reads

    def fileno(self) -> int:
        return -1

    def service(self) -> list[PeerRank]:
        if self.progress_s is not None:
            # The read itself reports a dead peer.
            with contextlib.suppress(*self._errors.all):
                self._agent.get_new_notifs()
        self._forget_drained()
        gone = self._gone
        self._gone = []
        return gone

    def close(self) -> None:
        """End the NIXL agent, which ends every read in flight.

        It waits a little for these reads, because a peer that is answering over TCP may abort when
        its reader's agent goes away, as was measured.
        """
        for _ in range(round(CLOSE_WAIT_S / CLOSE_POLL_S)):
            if all(self.cancel(handle) for handle in list(self._reads)):
                break
            time.sleep(CLOSE_POLL_S)
        parts: list[_Flight | _PreparedPeer] = list(self._reads.values())
        parts += (*self._peers.values(), *self._leaving)
        for part in parts:
            with contextlib.suppress(*self._errors.all):
                part.release()
        for target in self._targets.values():
            target.release()
        self._targets.clear()
        self._sink.release()
        self._reads.clear()
        self._peers.clear()
        self._leaving.clear()
        # NIXL ends an agent with its last reference, so no traceback may hold one.
        del self._agent, self._sink

    def _peer(self, peer: PeerRank) -> "_PreparedPeer":
        found = self._peers.get(peer)
        if found is None:
            raise TransferError("unknown peer")
        return found

    def _has_ended(self, flight: "_Flight") -> bool:
        if flight.state == "PROC":
            try:
                flight.state = self._agent.check_xfer_state(flight.handle)
            except self._errors.all as error:
                raise self._failed(flight.peer, error) from error
        if flight.state == "ERR":
            raise TransferError("nixl could not read")
        return flight.state == "DONE"

    def _failed(self, peer: "_PreparedPeer", error: Exception) -> TransferError:
        if isinstance(error, self._errors.disconnected):
            peer.gone = True
            self._gone.extend(e for e, known in self._peers.items() if known is peer)
            return TransferError("the peer's process is gone")
        return TransferError(f"nixl could not read: {error}")

    def _drop(self, handle: int) -> None:
        flight = self._reads.pop(handle)
        flight.peer.num_in_flight -= 1
        flight.release()

    def _forget_drained(self) -> None:
        """Forget removed peers that have no reads in flight any more."""
        if not self._leaving:
            return
        for handle, flight in list(self._reads.items()):
            if flight.peer in self._leaving:
                self.cancel(handle)
        for peer in [peer for peer in self._leaving if not peer.num_in_flight]:
            if self._is_warming(peer):
                continue  # the next attempt may succeed
            self._leaving.remove(peer)
            connected = peer.warm_up is None and not peer.gone
            peer.release()
            if connected:
                self._parked[peer.where.agent] = peer.where.metadata
            else:
                self._agent.remove_remote_agent(peer.where.agent)
        while len(self._parked) > MAX_PARKED:
            agent = next(iter(self._parked))
            del self._parked[agent]
            self._agent.remove_remote_agent(agent)

    def _is_warming(self, peer: "_PreparedPeer") -> bool:
        try:
            if peer.warm_up is not None and self._has_ended(peer.warm_up):
                peer.warm_up = None
        except TransferError:
            return False
        return peer.warm_up is not None and monotonic() < peer.give_up_s


@dataclass(slots=True, eq=False)
class _PreparedPeer:
    where: "NixlAddress"
    shapes: SliceMap
    slices: Releasable  # of all of its blocks
    target: Releasable  # the same slices of ours; the transport's own
    source: Releasable  # of the warm-up
    warm_up: "_Flight | None" = None
    trial: tuple[Releasable, Releasable, int] | None = None
    num_in_flight: int = 0
    gone: bool = False
    give_up_s: float = 0.0  # of a warm-up, once the peer was removed

    def release(self) -> None:
        if self.warm_up is not None:
            self.warm_up.release()
        self.slices.release()
        self.source.release()
        if self.trial is not None:
            for part in self.trial[:2]:
                part.release()


@dataclass(slots=True, eq=False)
class _Flight:
    handle: Releasable
    peer: _PreparedPeer
    state: str

    def release(self) -> None:
        self.handle.release()


class NixlAddress(Address, frozen=True):
    """An agent's metadata and where its pool lies.

    NIXL's own parser can crash on damaged metadata, so the encoded form has a digest that is
    checked before NIXL parses anything. The digest protects against damage, not against forgery:
    addresses may only be accepted from authenticated peers.
    """

    epoch: Epoch
    agent: str  # unique per agent, not only per process
    device: str  # "cpu" or "cuda:0"
    pool_address: PoolAddress
    num_blocks: BlockCount
    block_bytes: NumBytes
    metadata: bytes

    def encode(self) -> bytes:
        body = super().encode()
        return _digest(body) + body

    @classmethod
    def decode(cls, data: bytes) -> Self:
        digest = data[:DIGEST_BYTES]
        body = data[DIGEST_BYTES:]
        if len(data) > MAX_ADDRESS_BYTES or _digest(body) != digest:
            raise TransferError("not a nixl address, or a damaged one")
        return super().decode(body)


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()


def _make(pool: Pool, epoch: Epoch, config: TransferConfig) -> NixlTransport:
    if isinstance(pool, DevicePool):
        memory = pool.memory
    else:
        memory = PoolMemory(pool.address, pool.shape.num_blocks, pool.shape.block_bytes)
    return NixlTransport(memory, epoch, config.device)


NIXL = TransportKind(
    NAME,
    _make,
    lends=(HostPool, DevicePool),
    reach=lambda config: "" if config.device else here(),
    can_read=lambda _source, _target: True,
    goes_far=True,
    is_installed=is_installed,
)
