"""Reads between processes of one host: the reader maps the peer's pool and copies its blocks.

The owner passes its memfd over a unix socket to a reader that knows the pool's nonce
(`pool_lender`). The reader maps it read-only, finds the nonce in the mapping (the proof that both
see the same memory), and reads the generations again after each copy: a block that got a new owner
meanwhile fails the read.
Only an agent's thread calls it. A copy has ended when `read` returns, so nothing lands later. Never
`multiprocessing.shared_memory`: it unlinks when any attacher exits and outlives a killed owner.
"""

import fcntl
import mmap
import os
import select
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.host_pool import (
    NONCE_BYTES,
    HostPool,
    PoolShape,
    check_piece,
    check_read,
)
from baton.kv_transfer.interfaces import BlockPiece, PeerRank
from baton.kv_transfer.transports.fence import make_fence
from baton.kv_transfer.transports.pool_lender import PoolLender, is_trusted, unix_socket
from baton.protocol.errors import TransferError
from baton.protocol.ids import Epoch


class ShmTransport:
    """Lends the local `pool` to other processes and reads the pools of peers.

    Raises `ConfigError` where the order of reads cannot be enforced (`fence`).
    """

    name = "shm"
    connect_s = 10.0

    def __init__(self, pool: HostPool, epoch: Epoch) -> None:
        self._fence = make_fence()
        self._pool = pool
        self._epoch = epoch
        self._ended: set[int] = set()
        self._next_handle = 0
        self._peers: dict[PeerRank, _MappedPeer] = {}
        self._links: dict[int, PeerRank] = {}
        self._gone: list[PeerRank] = []
        self._poller = select.epoll()
        self._lender = PoolLender(pool)
        self._poller.register(self._lender, select.EPOLLIN)

    def address(self) -> bytes:
        host, network = this_place()
        name, nonce = self._lender.name, self._pool.nonce
        return ShmAddress(host, name, nonce, self._epoch, network).encode()

    def add_peer(
        self, peer: PeerRank, address: bytes, num_blocks: int, block_bytes: int, piece: BlockPiece
    ) -> None:
        where = ShmAddress.decode(address)
        if where.host != this_place()[0]:
            raise TransferError("the pool is on another host")
        if where.epoch != peer.epoch or len(where.nonce) != NONCE_BYTES:
            raise TransferError("the address is not that peer's")
        check_piece(piece, block_bytes, self._pool.shape.block_bytes)
        self.remove_peer(peer)
        link = unix_socket()
        try:
            link.connect("\0" + where.socket)
            if not is_trusted(link):
                raise OSError("its socket is another user's")
            link.send(where.nonce)
        except (OSError, ValueError) as error:
            link.close()
            raise TransferError(f"cannot reach the owner of the pool: {error}") from error
        shape = PoolShape(num_blocks, block_bytes)
        self._peers[peer] = _MappedPeer(link, where.nonce, shape, piece)
        self._links[link.fileno()] = peer
        self._poller.register(link, select.EPOLLIN)

    def connected(self, peer: PeerRank) -> bool:
        return self._peer(peer).mapping is not None

    def remove_peer(self, peer: PeerRank) -> None:
        found = self._peers.pop(peer, None)
        if found is not None:
            self._drop_link(found)
            if found.mapping is not None:
                found.mapping.close()

    def read(
        self,
        peer: PeerRank,
        remote: Sequence[int],
        local: Sequence[int],
        generations: Sequence[int],
    ) -> int:
        found = self._peer(peer)
        mapping, piece = found.mapping, found.piece
        if mapping is None:
            raise TransferError("the pool is not mapped yet")
        mine = self._pool.shape
        source, target = check_read(remote, mapping.shape.num_blocks, local, mine.num_blocks)
        expected = np.asarray(generations, np.int64)
        if len(expected) != len(source):
            raise TransferError("a read needs a generation for each remote block")
        copy_blocks(
            piece_view(self._pool.buffer, mine, piece),
            piece_numbers(target, mine, piece.local_offset, piece),
            piece_view(mapping.file, mapping.shape, piece),
            piece_numbers(source, mapping.shape, piece.remote_offset, piece),
        )
        # After the copy: a generation is bumped before the first store of a block's next owner, so
        # equal numbers mean that nothing of the next owner was copied.
        self._fence()
        _check_generations(mapping, source, expected)
        self._next_handle += 1
        self._ended.add(self._next_handle)
        return self._next_handle

    def test(self, handle: int) -> bool:
        self._ended.remove(handle)
        return True

    def cancel(self, handle: int) -> bool:
        self._ended.discard(handle)
        return True

    def fileno(self) -> int:
        return self._poller.fileno()

    def service(self) -> list[PeerRank]:
        for descriptor, _ in self._poller.poll(0):
            if descriptor == self._lender.fileno():
                self._lender.service()
            elif descriptor in self._links:
                self._hear_owner(descriptor)
        gone, self._gone = self._gone, []
        return gone

    def close(self) -> None:
        for peer in list(self._peers):
            self.remove_peer(peer)
        self._lender.close()
        self._poller.close()

    # --- the reader's side ----------------------------------------------------------------------

    def _peer(self, peer: PeerRank) -> "_MappedPeer":
        found = self._peers.get(peer)
        if found is None:
            raise TransferError("unknown peer")
        if found.failure:
            raise TransferError(found.failure)
        return found

    def _hear_owner(self, descriptor: int) -> None:
        """Take the pool that the owner sent, or notice that its process ended."""
        owner = self._links[descriptor]
        peer = self._peers[owner]
        assert peer.link is not None
        try:
            said, descriptors, _, _ = socket.recv_fds(peer.link, 16, 1)
        except BlockingIOError:
            return
        except OSError:
            said, descriptors = b"", []
        try:
            if descriptors and peer.mapping is None:
                peer.mapping = _Mapping(descriptors[0], peer.shape, peer.nonce)
            elif not said:
                raise TransferError("the owner of the pool is gone")
        except TransferError as error:
            peer.failure = error.message
            self._drop_link(peer)
            self._gone.append(owner)
        finally:
            for received in descriptors:
                os.close(received)

    def _drop_link(self, peer: "_MappedPeer") -> None:
        if peer.link is not None:
            del self._links[peer.link.fileno()]
            self._poller.unregister(peer.link)
            peer.link.close()
            peer.link = None


class ShmAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where the descriptor of a rank's pool can be had, and on which host."""

    host: str  # boot id of the kernel
    socket: str  # name in the abstract namespace
    nonce: bytes
    epoch: Epoch
    network: str = ""  # the namespace of the socket; an older owner does not say

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "ShmAddress":
        """Raises `TransferError` on anything but an address."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TransferError(f"not an shm address: {error}") from error


def this_place() -> tuple[str, str]:
    """Return the id of this boot of the kernel, and of the namespace of our abstract sockets."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip(), str(os.stat("/proc/self/ns/net").st_ino)


@dataclass(slots=True)
class _MappedPeer:
    link: socket.socket | None
    nonce: bytes
    shape: PoolShape
    piece: BlockPiece
    mapping: "_Mapping | None" = None
    failure: str = ""


class _Mapping:
    """A peer's pool, mapped read-only. Raises `TransferError` when it is not what was announced."""

    def __init__(self, descriptor: int, shape: PoolShape, nonce: bytes) -> None:
        self.shape = shape
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if os.fstat(descriptor).st_size != shape.file_bytes:
                raise TransferError("the pool has another size than announced")
            # Unless it is sealed, a shrinking file would be SIGBUS in the middle of a copy.
            if not seals & fcntl.F_SEAL_SHRINK:
                raise TransferError("the pool is not sealed against shrinking")
            self.file = mmap.mmap(descriptor, shape.file_bytes, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise TransferError(f"cannot map the pool: {error}") from error
        begin = shape.nonce_offset
        if self.file[begin : begin + NONCE_BYTES] != nonce:
            self.file.close()
            raise TransferError("the pool's nonce is not in the mapping: not the same memory")
        self.generations = np.frombuffer(
            self.file, np.uint32, shape.num_blocks, shape.generations_offset
        )

    def close(self) -> None:
        del self.generations  # a view would keep the file open
        self.file.close()


def piece_view(
    buffer: mmap.mmap | memoryview, shape: PoolShape, piece: BlockPiece
) -> NDArray[np.void]:
    """Return the pieces of a pool in order, each as one opaque element."""
    num_pieces = shape.pool_bytes // piece.num_bytes
    return np.ndarray(num_pieces, np.dtype((np.void, piece.num_bytes)), buffer)


def piece_numbers(
    blocks: NDArray[np.int64], shape: PoolShape, offset: int, piece: BlockPiece
) -> NDArray[np.int64]:
    """Return which element of `piece_view` lies at `offset` in each of `blocks`."""
    return blocks * (shape.block_bytes // piece.num_bytes) + offset // piece.num_bytes


def copy_blocks(
    target_pool: NDArray[np.void],
    target: NDArray[np.int64],
    source_pool: NDArray[np.void],
    source: NDArray[np.int64],
) -> None:
    """Copy element `source[i]` to `target[i]`; ids are in range, no target occurs twice.

    Neighbours in both pools are one copy. Where that joins little, a run of neighbours in one pool
    is one gather or one scatter. Each call releases the GIL, and a busy thread may then keep it: so
    fewer calls are faster. `mode="clip"` because the default would copy twice.
    """
    order = np.argsort(target, kind="stable")
    target, source = target[order], source[order]
    ends = _run_ends(target)
    pieces = ends | _run_ends(source)
    num_pieces = np.count_nonzero(pieces)
    if 2 * np.count_nonzero(ends) <= num_pieces:
        for begin, end in _runs(ends):
            to = target_pool[target[begin] : target[end - 1] + 1]
            np.take(source_pool, source[begin:end], out=to, mode="clip")
        return
    order = np.argsort(source, kind="stable")
    ends = _run_ends(source[order])
    if 2 * np.count_nonzero(ends) <= num_pieces:
        target, source = target[order], source[order]
        for begin, end in _runs(ends):
            values = source_pool[source[begin] : source[end - 1] + 1]
            np.put(target_pool, target[begin:end], values, mode="clip")
        return
    size = target_pool.itemsize
    to_bytes, from_bytes = target_pool.view(np.uint8), source_pool.view(np.uint8)
    to_offsets, from_offsets = (target * size).tolist(), (source * size).tolist()
    for begin, end in _runs(pieces):
        to_offset, from_offset, length = (
            to_offsets[begin],
            from_offsets[begin],
            (end - begin) * size,
        )
        to_bytes[to_offset : to_offset + length] = from_bytes[from_offset : from_offset + length]


def _run_ends(ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return True where the next id is not the neighbour of this one."""
    ends = np.ones(len(ids), np.bool_)
    np.not_equal(ids[1:] - ids[:-1], 1, out=ends[:-1])
    return ends


def _runs(ends: NDArray[np.bool_]) -> Iterable[tuple[int, int]]:
    """Return (begin, end) of each run."""
    return pairwise([0, *(np.flatnonzero(ends) + 1).tolist()])


def _check_generations(
    mapping: _Mapping, blocks: NDArray[np.int64], expected: NDArray[np.int64]
) -> None:
    changed = mapping.generations[blocks] != expected
    if changed.any():
        block = int(blocks[changed.argmax()])
        raise TransferError(f"block {block} of the peer has a new owner", code="stale_block")
