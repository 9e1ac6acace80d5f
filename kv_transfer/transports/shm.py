"""Reads between processes of one host: the reader maps the peer's pool and copies its blocks.

The owner lends its memfd to readers that know the pool's nonce (`owner_links`, `pool_lender`). The
reader reads the generations again after each copy, and the read fails if a block got a new owner
meanwhile. Only an agent's thread calls it. A copy has ended when `read` returns, so nothing lands
later.
"""

import mmap
import os
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.host_pool import NONCE_BYTES, HostPool, PoolShape
from baton.kv_transfer.interfaces import BlockPiece, PeerRank
from baton.kv_transfer.transports.addresses import decode_address
from baton.kv_transfer.transports.fence import make_fence
from baton.kv_transfer.transports.owner_links import OwnerLinks
from baton.kv_transfer.transports.piece_map import PieceMap
from baton.protocol.errors import TransferError
from baton.protocol.ids import Epoch


class ShmTransport:
    """Lends the local `pool` to other processes, and reads the pools of peers.

    Raises `ConfigError` if the order of reads cannot be enforced (`fence`).
    """

    name = "shm"
    connect_s = 10.0
    least_slice_bytes = 0
    progress_s: float | None = None

    def __init__(self, pool: HostPool, epoch: Epoch) -> None:
        self._fence = make_fence()
        self._pool = pool
        self._epoch = epoch
        self._maps: dict[PeerRank, PieceMap] = {}
        self._ended: set[int] = set()
        self._next_handle = 0
        self._links = OwnerLinks(pool)

    def address(self) -> bytes:
        return ShmAddress.of(self._links, self._pool, self._epoch).encode()

    def add_peer(
        self, peer: PeerRank, address: bytes, num_blocks: int, block_bytes: int, piece: BlockPiece
    ) -> None:
        where = ShmAddress.decode(address)
        where.check(peer.epoch)
        pieces = PieceMap(PoolShape(num_blocks, block_bytes), self._pool.shape, piece)
        self._links.add(peer, where.socket, where.nonce, pieces.theirs)
        self._maps[peer] = pieces

    def connected(self, peer: PeerRank) -> bool:
        return self._links.mapping(peer) is not None

    def remove_peer(self, peer: PeerRank) -> None:
        self._links.remove(peer)
        self._maps.pop(peer, None)

    def read(
        self,
        peer: PeerRank,
        remote: Sequence[int],
        local: Sequence[int],
        generations: Sequence[int],
    ) -> int:
        mapping = self._links.mapping(peer)
        if mapping is None:
            raise TransferError("the pool is not mapped yet")
        pieces = self._maps[peer]
        read = pieces.read(remote, local, generations)
        copy_blocks(
            piece_view(self._pool.buffer, pieces.ours, pieces.piece),
            read.local,
            piece_view(mapping.file, pieces.theirs, pieces.piece),
            read.remote,
        )
        # The check follows the copy. A block's generation grows before the first store of its next
        # owner, so equal numbers mean that nothing of the next owner was copied.
        self._fence()
        mapping.check_generations(read.blocks, read.generations)
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
        return self._links.fileno()

    def service(self) -> list[PeerRank]:
        return self._links.service()

    def close(self) -> None:
        self._links.close()


class ShmAddress(msgspec.Struct, frozen=True, array_like=True):
    """The host of a rank's pool, and the socket that passes on the pool's descriptor."""

    host: str  # boot id of the kernel
    socket: str  # name in the abstract namespace
    nonce: bytes
    epoch: Epoch
    network: str = ""  # the namespace of the socket; an older owner does not publish it

    @classmethod
    def of(cls, links: OwnerLinks, pool: HostPool, epoch: Epoch) -> "ShmAddress":
        host, network = this_place()
        return cls(host, links.name, pool.nonce, epoch, network)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "ShmAddress":
        """Return the decoded address. Raises `TransferError` if `data` is not one."""
        return decode_address(data, cls, "shm")

    def check(self, peer: Epoch) -> None:
        """Raise `TransferError` unless this is an address of `peer`, on this host."""
        if self.host != this_place()[0]:
            raise TransferError("the pool is on another host")
        if self.epoch != peer or len(self.nonce) != NONCE_BYTES:
            raise TransferError("the address is not that peer's")

    def shares_host(self, other: "ShmAddress") -> bool:
        """Return whether both name one host. The nonce in the reader's mapping then proves it."""
        is_one_network = "" in (self.network, other.network) or self.network == other.network
        return self.host == other.host and is_one_network


def this_place() -> tuple[str, str]:
    """Return the ids of this boot of the kernel and of the namespace of our abstract sockets."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip(), str(os.stat("/proc/self/ns/net").st_ino)


def piece_view(
    buffer: mmap.mmap | memoryview, shape: PoolShape, piece: BlockPiece
) -> NDArray[np.void]:
    """Return the pieces of a pool in order, as an array with one opaque element each."""
    num_pieces = shape.pool_bytes // piece.num_bytes
    return np.ndarray(num_pieces, np.dtype((np.void, piece.num_bytes)), buffer)


def copy_blocks(
    target_pool: NDArray[np.void],
    target: NDArray[np.int64],
    source_pool: NDArray[np.void],
    source: NDArray[np.int64],
) -> None:
    """Copy element `source[i]` to `target[i]`; ids are in range, no target occurs twice.

    Blocks that are neighbours in both pools are copied in one call. If there are few of those, a
    run of neighbours in one pool becomes one gather or one scatter. Each call releases the GIL,
    which a busy thread may then keep, so fewer calls are faster. The default of `mode` would copy
    twice.
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
