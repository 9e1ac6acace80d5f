"""Reads between processes of one host: the reader maps the peer's pool and copies its blocks.

The owner lends its memfd to readers that know the pool's nonce (`pool_links`). The reader reads the
generations again after each copy, and the read fails if a block got a new owner meanwhile. A copy
has ended when `read` returns, so nothing lands later.
"""

import ctypes
import mmap
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.interfaces import BlockSlice, PeerRank
from baton.kv_transfer.pools import HostPool, PoolShape, SliceMap
from baton.kv_transfer.transports.addresses import SHM, ShmAddress
from baton.kv_transfer.transports.pool_links import OwnerLinks
from baton.protocol.errors import ConfigError, TransferError
from baton.protocol.ids import Epoch


class ShmTransport:
    """Lends the local `pool` to other processes, and reads the pools of peers.

    Raises `ConfigError` if the order of reads cannot be enforced (`fence`).
    """

    name = SHM
    connect_s = 10.0
    min_chunk_bytes = 0
    progress_s: float | None = None

    def __init__(self, pool: HostPool, epoch: Epoch) -> None:
        self._fence = make_fence()
        self._pool = pool
        self._epoch = epoch
        self._maps: dict[PeerRank, SliceMap] = {}
        self._ended: set[int] = set()
        self._next_handle = 0
        self._links = OwnerLinks(pool)

    def address(self) -> bytes:
        return ShmAddress.here(self._links.name, self._pool.nonce, self._epoch).encode()

    def add_peer(
        self, peer: PeerRank, address: bytes, num_blocks: int, block_bytes: int, part: BlockSlice
    ) -> None:
        where = ShmAddress.decode(address)
        where.check(peer.epoch)
        slices = SliceMap(PoolShape(num_blocks, block_bytes), self._pool.shape, part)
        self._links.add(peer, where.socket, where.nonce, slices.theirs)
        self._maps[peer] = slices

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
        slices = self._maps[peer]
        read = slices.read(remote, local, generations)
        copy_blocks(
            slice_view(self._pool.buffer, slices.ours, slices.part),
            read.local,
            slice_view(mapping.file, slices.theirs, slices.part),
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


def slice_view(
    buffer: mmap.mmap | memoryview, shape: PoolShape, part: BlockSlice
) -> NDArray[np.void]:
    """Return the slices of a pool in order, as an array with one opaque element each."""
    num_slices = shape.pool_bytes // part.num_bytes
    return np.ndarray(num_slices, np.dtype((np.void, part.num_bytes)), buffer)


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
    slices = ends | _run_ends(source)
    num_slices = np.count_nonzero(slices)
    if 2 * np.count_nonzero(ends) <= num_slices:
        for begin, end in _runs(ends):
            to = target_pool[target[begin] : target[end - 1] + 1]
            np.take(source_pool, source[begin:end], out=to, mode="clip")
        return
    order = np.argsort(source, kind="stable")
    ends = _run_ends(source[order])
    if 2 * np.count_nonzero(ends) <= num_slices:
        target, source = target[order], source[order]
        for begin, end in _runs(ends):
            values = source_pool[source[begin] : source[end - 1] + 1]
            np.put(target_pool, target[begin:end], values, mode="clip")
        return
    size = target_pool.itemsize
    to_bytes, from_bytes = target_pool.view(np.uint8), source_pool.view(np.uint8)
    to_offsets, from_offsets = (target * size).tolist(), (source * size).tolist()
    for begin, end in _runs(slices):
        to, frm, length = to_offsets[begin], from_offsets[begin], (end - begin) * size
        to_bytes[to : to + length] = from_bytes[frm : frm + length]


def _run_ends(ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return True where the next id is not the neighbour of this one."""
    ends = np.ones(len(ids), np.bool_)
    np.not_equal(ids[1:] - ids[:-1], 1, out=ends[:-1])
    return ends


def _runs(ends: NDArray[np.bool_]) -> Iterable[tuple[int, int]]:
    """Return (begin, end) of each run."""
    return pairwise([0, *(np.flatnonzero(ends) + 1).tolist()])


Fence = Callable[[], None]

ORDERED_MACHINES = ("x86_64", "AMD64", "i686")
# Of membarrier, from linux/membarrier.h.
SYSCALL_NUMBERS = {"x86_64": 324, "aarch64": 283, "riscv64": 283}
GLOBAL_EXPEDITED, REGISTER_GLOBAL_EXPEDITED = 1 << 1, 1 << 2


def make_fence() -> Fence:
    """Return the fence that a reader calls between copy and check; register this process as owner.

    Raises `ConfigError` if the machine needs a fence and the kernel has none.
    """
    if platform.machine() in ORDERED_MACHINES:
        return lambda: None
    return membarrier_fence()


def membarrier_fence() -> Fence:
    """Return a fence by membarrier. Raises `ConfigError` if this kernel does not offer it."""
    number = SYSCALL_NUMBERS.get(platform.machine())
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    if number is None or syscall(number, REGISTER_GLOBAL_EXPEDITED, 0, 0) != 0:
        raise ConfigError(
            f"shm needs the membarrier system call on {platform.machine()}, and it is not allowed "
            "here; set transfer.transport to nixl"
        )

    def fence() -> None:
        if syscall(number, GLOBAL_EXPEDITED, 0, 0) != 0:
            reason = os.strerror(ctypes.get_errno())
            raise TransferError(f"membarrier failed: {reason}")

    return fence
