"""A GPU's memory for tests of `cuda_ipc`: pools are memfds, and a launched copy ends only later.

A handle names a descriptor of the owner's process, so it is worth nothing once that has ended. Half
of a copy's blocks are there at once, and the rest lands `COPY_S` after somebody has begun to wait
for it: code that reuses or unmaps blocks too early sees it.
"""

import mmap
import os
import threading
import time
import zlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.interfaces import BlockSlice, PoolMemory
from baton.kv_transfer.pools import DevicePool, HostPool, PoolShape
from baton.kv_transfer.transports.shm import copy_blocks, slice_view
from baton.protocol.errors import ConfigError, TransferError

COPY_S = 0.002  # a GPU's own time
GPU = "GPU-0"


class MemfdMemory:
    """The `PeerMemory` over `pool`, whose generations are not read."""

    def __init__(
        self, pool: HostPool, visible: tuple[str, ...] = (GPU,), lacking: str = ""
    ) -> None:
        self.pool = pool
        self.gpu = GPU
        self.visible = visible
        self.lacking = lacking  # why memory cannot be shared
        self.thread: int | None = None  # that entered

    def handle(self) -> bytes:
        if self.lacking:
            raise ConfigError(self.lacking)
        return f"{os.getpid()} {self.pool.fileno()}".encode()

    def enter(self) -> None:
        self.thread = threading.get_ident()

    def checksums(self, slices: NDArray[np.int64], num_bytes: int) -> tuple[int, ...]:
        assert self.thread == threading.get_ident(), "a thread without the GPU"
        starts = (int(number) * num_bytes for number in slices)
        return tuple(zlib.crc32(self.pool.buffer[at : at + num_bytes]) for at in starts)

    def copies(self, block_ids: Sequence[int]) -> list[memoryview]:
        assert self.thread == threading.get_ident(), "a thread without the GPU"
        return self.pool.copies(block_ids)

    def fill(self, block: int, read: Callable[[memoryview], None]) -> None:
        staging = bytearray(self.pool.shape.block_bytes)
        read(memoryview(staging))
        self.pool.fill(block, lambda into: into.__setitem__(slice(None), staging))

    def open(self, handle: bytes, shape: PoolShape) -> "MemfdPool":
        assert self.thread == threading.get_ident(), "a thread without the GPU"
        try:
            process, number = map(int, handle.split())
            descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDONLY)
        except (OSError, ValueError) as error:
            raise TransferError(f"the memory cannot be opened: {error}") from error
        try:
            file = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        return MemfdPool(self.pool, file, shape)


class MemfdPool:
    """The `PeerPool` of a mapped memfd."""

    def __init__(self, own: HostPool, file: mmap.mmap, shape: PoolShape) -> None:
        self._own = own
        self._file = file
        self._shape = shape
        self.num_in_flight = 0

    def copy(
        self, remote: NDArray[np.int64], local: NDArray[np.int64], num_bytes: int
    ) -> "MemfdCopy":
        self.num_in_flight += 1
        half = len(remote) // 2
        self.move(remote[:half], local[:half], num_bytes)
        return MemfdCopy(self, (remote[half:], local[half:]), num_bytes)

    def trial(self, num_blocks: int) -> "MemfdCopy":
        assert num_blocks <= self._shape.num_blocks
        self.num_in_flight += 1
        none = np.array([], np.int64)
        return MemfdCopy(self, (none, none), self._shape.block_bytes)

    def move(
        self, remote: NDArray[np.int64], local: NDArray[np.int64], num_bytes: int
    ) -> None:
        part = BlockSlice(0, 0, num_bytes)
        target = slice_view(self._own.buffer, self._own.shape, part)
        copy_blocks(target, local, slice_view(self._file, self._shape, part), remote)

    def close(self) -> None:
        assert not self.num_in_flight, "unmapped under a copy"
        self._file.close()


class MemfdCopy:
    """The `PeerCopy` of slices that have not landed yet."""

    def __init__(
        self,
        pool: MemfdPool,
        slices: tuple[NDArray[np.int64], NDArray[np.int64]],
        num_bytes: int,
    ) -> None:
        self._pool = pool
        self._slices = slices
        self._num_bytes = num_bytes
        self._has_ended = False

    def has_ended(self) -> bool:
        return self._has_ended

    def wait(self) -> None:
        time.sleep(COPY_S)
        self._pool.move(*self._slices, self._num_bytes)
        self._pool.num_in_flight -= 1
        self._has_ended = True


def device_pool(pool: HostPool, *, num_spare: int = 0, **memory: object) -> DevicePool:
    """Return `pool`, less `num_spare` blocks, as a GPU's; `memory` is for `MemfdMemory`."""
    num_blocks = pool.shape.num_blocks - num_spare
    where = PoolMemory(
        pool.address, num_blocks, pool.shape.block_bytes, "cuda:0", num_spare
    )
    return DevicePool(where, HostPool(num_blocks, 0), MemfdMemory(pool, **memory))  # type: ignore[arg-type]
