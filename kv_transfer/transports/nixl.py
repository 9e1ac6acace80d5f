"""Reads through NIXL over UCX: between hosts, and between GPUs.

Only an agent's thread calls it. Of each peer one descriptor list is prepared, with the piece of
every block that is read there, and reads name blocks in it by index. Giving up a read that is in
flight does not stop it: measured, all of its bytes landed after its handle was released and its
peer removed. So only a read that has ended, or that failed because its connection broke, counts as
quiet. A read of a frozen peer never ends; the agent keeps the deadlines.
"""

import contextlib
import hashlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.host_pool import check_piece, check_read
from baton.kv_transfer.interfaces import BlockPiece, PeerRank, PoolMemory
from baton.kv_transfer.transports.nixl_binding import Releasable, make_agent
from baton.protocol.bounds import BlockCount, NumBytes
from baton.protocol.errors import ConfigError, TransferError
from baton.protocol.ids import Epoch
from baton.runtime.clock import monotonic

WARM_UP_BYTES = 64
MAX_PARKED = 8
WARM_UP_S = 600.0  # then a warm-up that has not ended is given up, connection and all
CLOSE_WAIT_S = 1.0
CLOSE_POLL_S = 0.001
DIGEST_BYTES = 16
MAX_ADDRESS_BYTES = 1 << 20
MAX_DEVICE_DIGITS = 3

Address = Annotated[int, msgspec.Meta(ge=0, lt=(1 << 63) - 1)]


class NixlTransport:
    """Lends the pool at `memory` to other processes and reads the pools of peers.

    `memory` must stay until `close`. `network_device` is UCX's name for the device, such as
    `mlx5_0:1`; empty stays on loopback. Raises `ConfigError` when NIXL is missing or cannot start.
    """

    name = "nixl"
    connect_s = 60.0  # a cold RDMA pair may take most of it

    def __init__(self, memory: PoolMemory, epoch: Epoch, network_device: str = "") -> None:
        self._memory = memory
        self._epoch = epoch
        self._agent_name = f"baton-{epoch}-{secrets.token_hex(4)}"
        self._agent, self._errors = make_agent(
            self._agent_name, network_device, is_on_gpu=memory.device != "cpu"
        )
        self._scratch = np.zeros(WARM_UP_BYTES, np.uint8)  # a warm-up must not touch the pool
        try:
            self._sink = self._register()
        except self._errors.at_start as error:
            raise ConfigError(f"nixl cannot register the pool: {error}") from error
        # Our side of reads: the prepared pieces of all our blocks, by offset and length.
        self._targets: dict[tuple[int, int], Releasable] = {}
        self._peers: dict[PeerRank, _PreparedPeer] = {}
        # Removed with reads in flight: forgotten when the last of them has ended.
        self._leaving: list[_PreparedPeer] = []
        # Agents that were removed while their connection was well, with their metadata. Adding one
        # again reuses it: NIXL leaves a socket open at both ends when it drops a live one.
        self._parked: dict[str, bytes] = {}
        self._reads: dict[int, _Flight] = {}
        self._next_handle = 0
        self._gone: list[PeerRank] = []

    def _register(self) -> Releasable:
        """Register the pool and the scratch; return the scratch's prepared descriptor."""
        memory, scratch = self._memory, int(self._scratch.ctypes.data)
        kind, device = _segment(memory.device)
        size = memory.num_blocks * memory.block_bytes
        self._agent.register_memory([(memory.address, size, device, "")], kind)
        self._agent.register_memory([(scratch, WARM_UP_BYTES, 0, "")], "DRAM")
        return self._agent.prep_xfer_dlist("", _row(scratch, WARM_UP_BYTES, 0), "DRAM")

    def address(self) -> bytes:
        memory = self._memory
        return NixlAddress(
            self._epoch, self._agent_name, memory.device, memory.address,
            memory.num_blocks, memory.block_bytes, self._agent.get_agent_metadata(),
        ).encode()  # fmt: skip

    def add_peer(
        self, peer: PeerRank, address: bytes, num_blocks: int, block_bytes: int, piece: BlockPiece
    ) -> None:
        where = NixlAddress.decode(address)
        announced = (peer.epoch, num_blocks, block_bytes)
        if (where.epoch, where.num_blocks, where.block_bytes) != announced:
            raise TransferError("the address is not that peer's")
        check_piece(piece, block_bytes, self._memory.block_bytes)
        self.remove_peer(peer)
        same = (where, piece)
        busy = next((one for one in self._leaving if (one.where, one.piece) == same), None)
        if busy is not None:
            self._leaving.remove(busy)
            self._peers[peer] = busy
            return
        try:
            self._peers[peer] = self._prepare(where, piece)
        except self._errors.all as error:
            raise TransferError(f"nixl refuses the peer: {error}") from error

    def _prepare(self, where: "NixlAddress", piece: BlockPiece) -> "_PreparedPeer":
        """Load the metadata, prepare the pieces of the pool and post the transfer that connects."""
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
            kind, device = _segment(where.device)
            rows = _rows(memory, piece.remote_offset, piece.num_bytes)
            pieces = self._agent.prep_xfer_dlist(added, rows, kind)
            first = _row(where.pool_address, min(WARM_UP_BYTES, where.block_bytes), device)
            source = self._agent.prep_xfer_dlist(added, first, kind)
            zero = np.zeros(1, np.int32)
            handle = self._agent.make_prepped_xfer("READ", self._sink, zero, source, zero)
            peer = _PreparedPeer(where, piece, pieces, self._target(piece), source)
            peer.warm_up = _Flight(handle, peer, self._agent.transfer(handle))
            undo.pop_all()
        return peer

    def _target(self, piece: BlockPiece) -> Releasable:
        """Return where reads of that piece go; peers of one shape share it."""
        place = (piece.local_offset, piece.num_bytes)
        if place not in self._targets:
            kind, _ = _segment(self._memory.device)
            rows = _rows(self._memory, *place)
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
            self._forget_quiet_ones()

    def read(
        self,
        peer: PeerRank,
        remote: Sequence[int],
        local: Sequence[int],
        generations: Sequence[int],
    ) -> int:
        found = self._peer(peer)
        mine = self._memory.num_blocks
        source, target = check_read(remote, found.where.num_blocks, local, mine)
        order = np.argsort(target, kind="stable")  # NIXL makes one request of neighbours
        into, out_of = target[order].astype(np.int32), source[order].astype(np.int32)
        try:
            handle = self._agent.make_prepped_xfer("READ", found.target, into, found.pieces, out_of)
            state = self._agent.transfer(handle)
        except self._errors.all as error:
            raise self._failed(found, error) from error
        self._next_handle += 1
        self._reads[self._next_handle] = _Flight(handle, found, state)
        found.num_in_flight += 1
        return self._next_handle

    def test(self, handle: int) -> bool:
        flight = self._reads[handle]
        try:
            ended = self._has_ended(flight)
        except TransferError:
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
            return True  # the connection broke, and with it everything that was on its way

    def fileno(self) -> int:
        return -1

    def service(self) -> list[PeerRank]:
        self._forget_quiet_ones()
        gone, self._gone = self._gone, []
        return gone

    def close(self) -> None:
        """End the NIXL agent, and with it every read that is still in flight.

        This waits a little for them: measured, a peer that is answering over TCP may abort when its
        reader's agent goes away.
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
        # NIXL ends an agent when its last reference goes: nothing may keep one in a traceback.
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

    def _forget_quiet_ones(self) -> None:
        """Forget removed peers that have nothing in flight any more."""
        if not self._leaving:
            return
        for handle, flight in list(self._reads.items()):
            if flight.peer in self._leaving:
                self.cancel(handle)
        for peer in [peer for peer in self._leaving if not peer.num_in_flight]:
            if self._is_warming(peer):
                continue  # the next attempt finds it further on
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


class NixlAddress(msgspec.Struct, frozen=True, array_like=True):
    """An agent's metadata and where its pool lies.

    NIXL's own parser can crash on damaged metadata, so the encoded form carries a digest that is
    checked before NIXL sees a byte. It protects against damage, not against a forger: addresses may
    only be taken from authenticated peers.
    """

    epoch: Epoch
    agent: str  # unique per agent, not only per process
    device: str  # "cpu" or "cuda:0"
    pool_address: Address
    num_blocks: BlockCount
    block_bytes: NumBytes
    metadata: bytes

    def encode(self) -> bytes:
        body = msgspec.msgpack.encode(self)
        return _digest(body) + body

    @classmethod
    def decode(cls, data: bytes) -> "NixlAddress":
        """Raises `TransferError` on anything but an address."""
        digest, body = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        if len(data) > MAX_ADDRESS_BYTES or _digest(body) != digest:
            raise TransferError("not a nixl address, or a damaged one")
        try:
            return msgspec.msgpack.decode(body, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TransferError(f"not a nixl address: {error}") from error


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()


@dataclass(slots=True, eq=False)
class _PreparedPeer:
    where: NixlAddress
    piece: BlockPiece
    pieces: Releasable  # of all of its blocks
    target: Releasable  # the same pieces of ours; the transport's own
    source: Releasable  # of the warm-up
    warm_up: "_Flight | None" = None
    num_in_flight: int = 0
    gone: bool = False
    give_up_s: float = 0.0  # of a warm-up, once the peer was removed

    def release(self) -> None:
        if self.warm_up is not None:
            self.warm_up.release()
        self.pieces.release()
        self.source.release()


@dataclass(slots=True, eq=False)
class _Flight:
    handle: Releasable
    peer: _PreparedPeer
    state: str

    def release(self) -> None:
        self.handle.release()


def _segment(device: str) -> tuple[str, int]:
    """Return NIXL's memory type and device number of "cpu" or "cuda:1"."""
    kind, _, index = device.partition(":")
    if (
        kind not in ("cpu", "cuda")
        or not (index or "0").isdecimal()
        or (len(index) > MAX_DEVICE_DIGITS)
    ):
        raise TransferError(f"nixl knows no device {device!r}")
    return ("VRAM" if kind == "cuda" else "DRAM"), int(index or 0)


def _rows(memory: PoolMemory, offset: int, num_bytes: int) -> NDArray[np.uint64]:
    """Return one descriptor per block for those bytes of it: [num_blocks, 3] of address, length,
    device."""
    rows = np.empty((memory.num_blocks, 3), np.uint64)
    offsets = np.arange(memory.num_blocks, dtype=np.uint64) * np.uint64(memory.block_bytes)
    rows[:, 0] = offsets + np.uint64(memory.address + offset)
    rows[:, 1] = num_bytes
    rows[:, 2] = _segment(memory.device)[1]
    return rows


def _row(address: int, num_bytes: int, device: int) -> NDArray[np.uint64]:
    return np.array([[address, num_bytes, device]], np.uint64)
