"""One rank's KV pool, in host memory or a GPU's, and the slices in which others read its blocks.

In host memory a memfd holds the blocks, then (page aligned) one uint32 generation per block, then a
nonce page. Only the executor writes to it. Peers get the descriptor from the `shm` transport and
can map it only for reading: one seal forbids every other writable mapping, another forbids
shrinking the file under a reader. Nothing here imports torch: the engine implements `PeerMemory`,
the only part that touches a GPU.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.interfaces import BlockSlice, PoolMemory, Read
from baton.protocol.errors import ConfigError, TransferError

CGROUPS = Path("/sys/fs/cgroup")
NONCE_BYTES = 16
# Linux has it since 5.1; the fcntl module does not name it. Existing mappings stay writable.
_F_SEAL_FUTURE_WRITE = 0x0010
# Linux has it since 5.14; the mmap module does not name it.
_MADV_POPULATE_WRITE = 23
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE


class PoolShape(msgspec.Struct, frozen=True):
    """The offsets in a pool's file, in bytes. Both ends compute the same offsets."""

    num_blocks: int
    block_bytes: int

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def whole_block(self) -> BlockSlice:
        return BlockSlice(0, 0, self.block_bytes)

    @property
    def generations_offset(self) -> int:
        return _page_up(self.pool_bytes)

    @property
    def nonce_offset(self) -> int:
        return self.generations_offset + _page_up(4 * self.num_blocks)

    @property
    def file_bytes(self) -> int:
        return self.nonce_offset + mmap.PAGESIZE


class HostPool:
    """`num_blocks` zeroed blocks of `block_bytes`, all memory reserved at once.

    Raises `ConfigError` if there is too little memory. After `close`, existing views stay valid
    until they are dropped, but no new peer can map the pool.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.shape = PoolShape(num_blocks, block_bytes)
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        # Linux reports no error for a memfd larger than memory: its OOM killer ends the process.
        if self.shape.file_bytes > available_bytes():
            raise ConfigError(
                f"a KV pool of {self.shape.file_bytes >> 20} MiB does not fit the "
                f"{available_bytes() >> 20} MiB of free memory; lower cache.memory_mib"
            )
        self._fd = os.memfd_create(
            "baton-kv-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        )
        try:
            os.ftruncate(self._fd, self.shape.file_bytes)
            file = mmap.mmap(self._fd, self.shape.file_bytes)
            _populate(self._fd, file)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)
        except OSError as error:
            os.close(self._fd)
            size_mib = self.shape.file_bytes >> 20
            raise ConfigError(
                f"cannot reserve a KV pool of {size_mib} MiB: {error}"
            ) from error
        nonce_offset = self.shape.nonce_offset
        file[nonce_offset : nonce_offset + NONCE_BYTES] = self.nonce
        self._file = memoryview(file)

    @property
    def buffer(self) -> memoryview:
        """Return the blocks as writable bytes."""
        return self._file[: self.shape.pool_bytes]

    def copies(self, block_ids: Sequence[int]) -> list[memoryview]:
        """Return copies of settled blocks. Only the agent's thread calls it."""
        return [memoryview(bytes(self._block(block))) for block in block_ids]

    def fill(self, block: int, read: Callable[[memoryview], None]) -> None:
        """Let `read` write the bytes of a block. Any one thread may call it."""
        read(self._block(block))

    def _block(self, block: int) -> memoryview:
        start = block * self.shape.block_bytes
        return self._file[start : start + self.shape.block_bytes]

    @property
    def generations(self) -> NDArray[np.uint32]:
        """Return a writable generation per block. It grows *before* a new owner's first store."""
        offset = self.shape.generations_offset
        return np.frombuffer(self._file, np.uint32, self.shape.num_blocks, offset)

    def checksums(
        self, block_ids: Sequence[int], offset: int, num_bytes: int
    ) -> tuple[int, ...]:
        """Return the CRC-32 of a range of bytes of each block. No thread may be writing to them.

        Any thread may call it.
        """
        starts = [self.shape.block_bytes * block + offset for block in block_ids]
        return tuple(
            zlib.crc32(self._file[start : start + num_bytes]) for start in starts
        )

    @property
    def address(self) -> int:
        """Return the address of block 0 in this process."""
        return int(np.frombuffer(self._file, np.uint8).ctypes.data)

    def fileno(self) -> int:
        """Return the memfd, for passing on; -1 after `close`."""
        return self._fd

    def close(self) -> None:
        """Close the descriptor. Idempotent; the memory goes with the last view and mapping."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._file = memoryview(b"")


def _populate(descriptor: int, file: mmap.mmap) -> None:
    """Allocate every page now: a missing page would cause SIGBUS in the middle of a step.

    The pages are also mapped now, because a page fault takes five times as long as a copy. ctypes
    releases the GIL, which `mmap.madvise` does not.
    """
    address = np.frombuffer(file, np.uint8).ctypes.data
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if madvise(address, len(file), _MADV_POPULATE_WRITE) == 0:
        return
    if ctypes.get_errno() != errno.EINVAL:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.posix_fallocate(descriptor, 0, len(file))


def available_bytes() -> int:
    """Return the memory that can be taken without swapping, as the kernel estimates it.

    The limits of cgroup v2 count too: a container, job or systemd unit may have less than its host.
    """
    return min(
        [_available_on_host(), *left_by_cgroups(CGROUPS, Path("/proc/self/cgroup"))]
    )


def left_by_cgroups(root: Path, own: Path) -> Iterator[int]:
    """Yield what the limit of each cgroup around this process leaves."""
    try:
        (path,) = [
            line[3:]
            for line in own.read_text(encoding="utf-8").splitlines()
            if line.startswith("0::")
        ]
    except (OSError, ValueError):
        path = "/"
    folder = root / path.strip("/")
    for one in (folder, *folder.parents):
        if not one.is_relative_to(root):
            return
        # Without a limit the file says "max".
        with contextlib.suppress(OSError, ValueError):
            limit = int((one / "memory.max").read_text(encoding="utf-8"))
            stat = dict(
                line.split()
                for line in (one / "memory.stat")
                .read_text(encoding="utf-8")
                .splitlines()
            )
            used = int((one / "memory.current").read_text(encoding="utf-8")) - int(
                stat.get("inactive_file", 0)
            )
            yield max(0, limit - used)


def _available_on_host() -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise ConfigError("/proc/meminfo does not say how much memory is available")


def _page_up(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class PeerCopy(Protocol):
    """A copy that a GPU makes."""

    def has_ended(self) -> bool:
        """Return whether no byte of it can land any more. Raises `TransferError` if it failed."""
        ...

    def wait(self) -> None:
        """Block until it has ended or failed. A thread may wait while others ask."""
        ...


class PeerPool(Protocol):
    """The pool of another process in this process's GPU address space."""

    def copy(
        self, remote: NDArray[np.int64], local: NDArray[np.int64], num_bytes: int
    ) -> PeerCopy:
        """Launch the copy of slices `remote` of that pool to slices `local` of ours.

        Slices have `num_bytes` and are numbered from the start of a pool; the caller has checked
        the numbers. Copies end in the order of their launches. Raises `TransferError`.
        """
        ...

    def trial(self, num_blocks: int) -> PeerCopy:
        """Launch a copy of the first blocks of that pool to memory of no block."""
        ...

    def close(self) -> None:
        """Unmap the pool. No copy of it may be in flight."""
        ...


class PeerMemory(Protocol):
    """What reads between GPUs need of one. The agent's thread enters, opens and sums."""

    @property
    def gpu(self) -> str:
        """Return the id of the local pool's GPU, which is the same in all processes of the host."""
        ...

    @property
    def visible(self) -> tuple[str, ...]:
        """Return the ids of all GPUs that this process can use."""
        ...

    def handle(self) -> bytes:
        """Return the bytes with which another process opens the local pool.

        Raises `ConfigError` where the memory cannot be shared.
        """
        ...

    def enter(self) -> None:
        """Make the GPU current on the calling thread, and compile the kernels that copy."""
        ...

    def open(self, handle: bytes, shape: PoolShape) -> PeerPool:
        """Map the pool of another process. Raises `TransferError`."""
        ...

    def checksums(self, slices: NDArray[np.int64], num_bytes: int) -> tuple[int, ...]:
        """Return those of slices of the local pool, to which no step may be writing."""
        ...

    def copies(self, block_ids: Sequence[int]) -> list[memoryview]:
        """Return copies in host memory of blocks of the local pool. Raises `TransferError`."""
        ...

    def fill(self, block: int, read: Callable[[memoryview], None]) -> None:
        """Copy what `read` writes to host memory into a block. Raises `TransferError`.

        One thread calls it, which is not the agent's.
        """
        ...


@dataclass(slots=True, frozen=True)
class DevicePool:
    """A pool in a GPU's memory. `table` is a host pool with generations and empty blocks."""

    memory: PoolMemory
    table: HostPool
    peers: PeerMemory

    @property
    def shape(self) -> PoolShape:
        return PoolShape(self.memory.num_blocks, self.memory.block_bytes)

    def copies(self, block_ids: Sequence[int]) -> list[memoryview]:
        """Return copies of settled blocks. Only the agent's thread calls it."""
        return self.peers.copies(block_ids)

    def fill(self, block: int, read: Callable[[memoryview], None]) -> None:
        """Let `read` write the bytes of a block. One other thread may call it."""
        self.peers.fill(block, read)

    def checksums(
        self, block_ids: Sequence[int], offset: int, num_bytes: int
    ) -> tuple[int, ...]:
        """Return the checksum of a slice of each block. Only the agent's thread calls it."""
        part = BlockSlice(offset, offset, num_bytes)
        blocks = np.asarray(block_ids, np.int64)
        return self.peers.checksums(
            slice_ids(blocks, self.shape, offset, part), num_bytes
        )

    def close(self) -> None:
        self.table.close()


class SliceRead(NamedTuple):
    """One checked read: blocks of both pools, the peer's generations, and the slices to copy."""

    blocks: NDArray[np.int64]
    into: NDArray[np.int64]
    generations: NDArray[np.int64]
    remote: NDArray[np.int64]
    local: NDArray[np.int64]


@dataclass(slots=True, frozen=True)
class SliceMap:
    """The slices of one peer. Raises `TransferError` unless both pools can be cut into them."""

    theirs: PoolShape
    ours: PoolShape
    part: BlockSlice

    def __post_init__(self) -> None:
        size = self.part.num_bytes
        ends = (self.theirs.block_bytes, self.ours.block_bytes)
        offsets = (self.part.remote_offset, self.part.local_offset)
        for offset, block_bytes in zip(offsets, ends, strict=True):
            fits = size > 0 and 0 <= offset <= block_bytes - size
            if not fits or offset % size or block_bytes % size:
                raise TransferError(
                    f"its blocks have {ends[0]} bytes, ours {ends[1]}: {size} bytes at {offset} "
                    "are not one of several equal slices"
                )

    def read(self, command: Read) -> SliceRead:
        """Raise `TransferError` unless the ids pair and lie in their pools, and each remote block
        has a generation. Callers compute addresses from the ids."""
        blocks = np.asarray(command.remote, np.int64)
        into = np.asarray(command.local, np.int64)
        generations = np.asarray(command.generations, np.int64)
        if not len(blocks) == len(into) == len(generations):
            raise TransferError(
                "a read needs a local block and a generation for each remote block"
            )
        for ids, shape in ((blocks, self.theirs), (into, self.ours)):
            # Negative ids are huge as unsigned numbers.
            if len(ids) and int(ids.view(np.uint64).max()) >= shape.num_blocks:
                raise TransferError(
                    f"a block id is not in the range 0..{shape.num_blocks - 1}"
                )
        part = self.part
        return SliceRead(
            blocks,
            into,
            generations,
            slice_ids(blocks, self.theirs, part.remote_offset, part),
            slice_ids(into, self.ours, part.local_offset, part),
        )


def slice_ids(
    blocks: NDArray[np.int64], shape: PoolShape, offset: int, part: BlockSlice
) -> NDArray[np.int64]:
    """Return the number of the slice at `offset` in each of `blocks`."""
    return blocks * (shape.block_bytes // part.num_bytes) + offset // part.num_bytes
