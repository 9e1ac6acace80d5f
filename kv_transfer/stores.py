"""Where a rank keeps blocks that its pool may lose: host memory, or two files of a local folder.

A store has slots of one block each; its node says which block is in which slot. A file's record
covers whose block it is with the same checksum as its bytes, so what is torn, damaged or of another
model is never read as a block. Nothing is synced: after a crash of the host, checksums tell.
"""

import fcntl
import mmap
import os
import struct
import zlib
from itertools import count
from pathlib import Path
from typing import Protocol

from baton.kv_transfer.interfaces import BAD_RECORD
from baton.protocol.blocks import HASH_BYTES, NO_HASH, BlockHash
from baton.protocol.errors import ConfigError, InvariantBroken, TransferError

# A change to what files hold needs another number.
_MAGIC = b"baton kv 1\n"
_TITLE_BYTES = 64
_RECORD = struct.Struct(f"<{HASH_BYTES}sI")  # the block's hash, and the checksum


class BlockStore(Protocol):
    """Slots of `block_bytes` each. One thread writes, another one reads."""

    num_slots: int

    def hashes(self) -> bytes:
        """Return what each slot held when the store was opened; `NO_HASH` if it held nothing."""
        ...

    def write(self, slot: int, block_hash: BlockHash, block: memoryview) -> None:
        """Replace what a slot holds. Raises `OSError`; the slot then holds nothing."""
        ...

    def read(self, slot: int, block_hash: BlockHash, into: memoryview) -> None:
        """Copy a block. Raises `TransferError` if the slot does not hold that block, or `OSError`.

        `into` may then have other bytes than before.
        """
        ...

    def clear(self) -> None:
        """Empty every slot, for later openings too. Raises `OSError`."""
        ...

    def close(self) -> None: ...


class MemoryStore:
    """Slots in host memory, which the system gives when they are first written."""

    def __init__(self, num_bytes: int, block_bytes: int) -> None:
        self.num_slots = num_bytes // block_bytes
        self._block_bytes = block_bytes
        self._memory = memoryview(mmap.mmap(-1, max(1, self.num_slots * block_bytes)))
        self._hashes = [NO_HASH] * self.num_slots

    def hashes(self) -> bytes:
        return NO_HASH * self.num_slots

    def write(self, slot: int, block_hash: BlockHash, block: memoryview) -> None:
        self._hashes[slot] = NO_HASH
        self._slot(slot)[:] = block
        self._hashes[slot] = block_hash

    def read(self, slot: int, block_hash: BlockHash, into: memoryview) -> None:
        if self._hashes[slot] != block_hash:
            raise _bad_record(slot)
        into[:] = self._slot(slot)

    def clear(self) -> None:
        self._hashes = [NO_HASH] * self.num_slots

    def close(self) -> None:
        self._memory = memoryview(b"")

    def _slot(self, slot: int) -> memoryview:
        start = slot * self._block_bytes
        return self._memory[start : start + self._block_bytes]


class FolderStore:
    """Slots in the file `NAME.blocks`, and a record of each in the file `NAME.index`.

    `maker` is equal for ranks whose blocks of equal hashes have equal bytes. Files of another maker
    start over, which `was_foreign` says. Raises `ConfigError` if the folder cannot be used.
    """

    def __init__(
        self, folder: Path, name: str, num_bytes: int, block_bytes: int, maker: bytes
    ) -> None:
        self.num_slots = num_bytes // (block_bytes + _RECORD.size)
        self.was_foreign = False
        self._block_bytes = block_bytes
        self._maker = maker
        self._title = _MAGIC + block_bytes.to_bytes(8, "little") + maker
        assert len(self._title) <= _TITLE_BYTES
        try:
            self._index = _opened(folder / f"{name}.index")
            self._blocks = _opened(folder / f"{name}.blocks")
            self._records = self._opened_records()
        except OSError as error:
            raise ConfigError(
                f"cache.folder: cannot use {folder}: {error.strerror}"
            ) from None

    def hashes(self) -> bytes:
        size = _RECORD.size
        records = self._records
        return b"".join(
            records[start : start + HASH_BYTES]
            for start in range(0, len(records), size)
        )

    def write(self, slot: int, block_hash: BlockHash, block: memoryview) -> None:
        self._set_record(slot, bytes(_RECORD.size))
        _write(self._blocks, block, slot * self._block_bytes)
        self._set_record(
            slot, _RECORD.pack(block_hash, self._checksum(block_hash, block))
        )

    def read(self, slot: int, block_hash: BlockHash, into: memoryview) -> None:
        held, checksum = _RECORD.unpack_from(self._records, slot * _RECORD.size)
        if held != block_hash:
            raise _bad_record(slot)
        num_bytes = os.preadv(self._blocks, [into], slot * self._block_bytes)
        if (
            num_bytes != self._block_bytes
            or self._checksum(block_hash, into) != checksum
        ):
            # The block may be saved in another slot, which must be the only one when this opens.
            self._set_record(slot, bytes(_RECORD.size))
            raise _bad_record(slot)

    def clear(self) -> None:
        self._records[:] = bytes(len(self._records))
        os.ftruncate(self._index, _TITLE_BYTES)
        os.ftruncate(self._blocks, 0)

    def close(self) -> None:
        os.close(self._index)
        os.close(self._blocks)

    def _opened_records(self) -> bytearray:
        """Return the records of this maker's files, and cut off what exceeds the slots."""
        size = self.num_slots * _RECORD.size
        title = os.pread(self._index, _TITLE_BYTES, 0)
        if title != self._title.ljust(_TITLE_BYTES, b"\0"):
            self.was_foreign = bool(title)
            os.ftruncate(self._index, 0)
            os.ftruncate(self._blocks, 0)
            _write(self._index, memoryview(self._title.ljust(_TITLE_BYTES, b"\0")), 0)
        if os.fstat(self._index).st_size > _TITLE_BYTES + size:
            os.ftruncate(self._index, _TITLE_BYTES + size)
        if os.fstat(self._blocks).st_size > self.num_slots * self._block_bytes:
            os.ftruncate(self._blocks, self.num_slots * self._block_bytes)
        records = bytearray(size)
        os.preadv(self._index, [records], _TITLE_BYTES)
        return records

    def _set_record(self, slot: int, record: bytes) -> None:
        start = slot * _RECORD.size
        self._records[start : start + _RECORD.size] = bytes(_RECORD.size)
        _write(self._index, memoryview(record), _TITLE_BYTES + start)
        self._records[start : start + _RECORD.size] = record

    def _checksum(self, block_hash: BlockHash, block: memoryview) -> int:
        return zlib.crc32(block, zlib.crc32(block_hash + self._maker))


class ClaimedFolder:
    """A part of `cache.folder` that no other process uses, until `close` or the process's end.

    It is the first free one of the role, so a node that restarts gets one that is filled already.
    Raises `ConfigError` if the folder cannot be used.
    """

    def __init__(self, folder: Path, role: str) -> None:
        try:
            self.path, self._lock = self._claim(folder, role)
        except OSError as error:
            raise ConfigError(
                f"cache.folder: cannot use {folder}: {error.strerror}"
            ) from None

    def close(self) -> None:
        os.close(self._lock)

    def _claim(self, folder: Path, role: str) -> tuple[Path, int]:
        for number in count():
            path = folder / f"{role}-{number}"
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = _opened(path / "lock")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
            except OSError:
                os.close(lock)
                raise
            else:
                return path, lock
        raise InvariantBroken("there are as many folders as numbers")


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of it. The system writes less than it was given on a disk that becomes full."""
    while len(data):
        num_bytes = os.pwrite(descriptor, data, offset)
        data = data[num_bytes:]
        offset += num_bytes


def _bad_record(slot: int) -> TransferError:
    return TransferError(
        f"slot {slot} does not hold that block any more", code=BAD_RECORD
    )
