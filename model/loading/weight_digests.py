"""Read every byte of a folder's weights once: for a digest of all, and to find damage.

Threads read beside the loading. The digest of a file is cached for as long as the file is the same.
Digests tell apart copies that differ by accident; whoever may write to a model needs no collision.
"""

import contextlib
import hashlib
import os
import re
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from baton.model.checkpoint.weight_files import Stored, stored_tensors
from baton.model.loading.weight_damage import TensorRows
from baton.node.executor import Progress
from baton.protocol.errors import ConfigError
from baton.runtime.private_cache import cache_folder, check_owner, lock, make_private

FORMAT = 1  # of digests and of what counts as damage; a change forgets what is cached
CHUNK_BYTES = 1 << 19  # stays in a core's cache for the second look
WORD_BYTES = 8
DIGEST_BYTES = 16
MAX_THREADS = 4
PROGRESS_EVERY_S = 0.5
MAX_CACHED = 1024  # files
LOCK_WAIT_S = 60.0
# A file that has just been written could be written again before its file system's clock moves on.
SETTLED_S = 2.0
_MIB = 1 << 20
_DIGEST = re.compile(rb"[0-9a-f]{%d}\n" % (2 * DIGEST_BYTES))


class FileState(NamedTuple):
    """What changes when a file is replaced or written to."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


def state_of(file: Path) -> FileState:
    """Raises `ConfigError` if the file is gone."""
    try:
        status = file.stat()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    return FileState(
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )


class WeightDigest:
    """The digest of a folder's weights, which threads begin to compute at once.

    Leaving the context ends the threads.
    """

    def __init__(self, folder: Path) -> None:
        """Raises `ConfigError` for a folder without weights."""
        self._folder = folder
        self._tensors: dict[Path, list[Stored]] = defaultdict(list)
        for name, stored in stored_tensors(folder).items():
            self._tensors[stored.file].append(Stored(stored.file, name, stored.entry))
        # From before the loading: if a state differs afterwards, another file may have been loaded.
        self._states = {file: state_of(file) for file in self._tensors}
        self._waiting = deque(self._tensors)
        self._hash = ChunkHash()
        self._digests: list[int] = []
        self._failures: list[ConfigError] = []
        self._num_read = 0
        self._stopping = threading.Event()
        num_threads = min(MAX_THREADS, len(self._waiting), os.cpu_count() or 1)
        self._threads = [
            threading.Thread(target=self._run, name="weight digest", daemon=True)
            for _ in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def result(self, progress: Progress) -> bytes:
        """Wait for the digest, which is equal for equal tensors in any split into files.

        Raises `ConfigError` for weights that are damaged, or that changed meanwhile.
        """
        num_mib = sum(state.size for state in self._states.values()) // _MIB
        for thread in self._threads:
            while thread.is_alive():
                progress("weight digests", self._num_read // _MIB, num_mib)
                thread.join(PROGRESS_EVERY_S)
        if self._failures:
            raise self._failures[0]
        for file, state in self._states.items():
            # Permissions and links, which change `ctime_ns`, do not matter here.
            if state_of(file)._replace(ctime_ns=0) != state._replace(ctime_ns=0):
                raise ConfigError(f"{file} changed while it was loaded: start again")
        return _bytes_of(sum(self._digests))

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                file = self._waiting.popleft()
            except IndexError:
                return
            try:
                digest = self._digest_of(file)
            except OSError as error:
                self._fail(ConfigError(f"{file} cannot be read: {error.strerror}"))
            except ConfigError as error:
                self._fail(error)
            else:
                self._digests.append(digest)

    def _fail(self, error: ConfigError) -> None:
        self._failures.append(error)
        self._stopping.set()

    def _digest_of(self, file: Path) -> int:
        state = self._states[file]
        with cache_entry(file, state) as entry:
            cached = entry.read() if entry is not None else None
            if cached is not None:
                self._num_read += state.size
                return cached
            digest = self._read(file)
            is_settled = (
                time.time() - max(state.mtime_ns, state.ctime_ns) / 1e9 > SETTLED_S
            )
            is_whole = not self._stopping.is_set() and state_of(file) == state
            if entry is not None and is_settled and is_whole:
                entry.write(digest)
            return digest

    def _read(self, file: Path) -> int:
        """Return the sum of the digests of a file's tensors. Raises `ConfigError` for damage."""
        total = 0
        buffer = bytearray(CHUNK_BYTES)
        with file.open("rb", buffering=0) as stream:
            for stored in sorted(
                self._tensors[file], key=lambda stored: stored.entry.data_offsets
            ):
                entry = stored.entry
                rows = TensorRows(stored.name, stored.entry, CHUNK_BYTES)
                digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
                digest.update(f"{stored.name} {entry.dtype} {entry.shape}\0".encode())
                for num_bytes in self._chunks(stream, stored, rows.chunk_bytes, buffer):
                    digest.update(self._hash.of(buffer, num_bytes))
                    rows.show(memoryview(buffer)[:num_bytes])
                if self._stopping.is_set():
                    return 0
                if problem := rows.problem(self._folder):
                    raise ConfigError(
                        f"{file}: {stored.name} {problem}: fetch the file again"
                    )
                total += int.from_bytes(digest.digest(), "big")
        return total

    def _chunks(
        self, stream: FileIO, stored: Stored, chunk_bytes: int, buffer: bytearray
    ) -> Iterator[int]:
        """Fill the buffer from its start with a tensor's chunks; yield the size of each."""
        position, end = stored.entry.data_offsets
        stream.seek(position)
        while position < end and not self._stopping.is_set():
            chunk = memoryview(buffer)[: min(chunk_bytes, end - position)]
            num_filled = 0
            while num_filled < len(chunk):
                num_bytes = stream.readinto(chunk[num_filled:])
                if not num_bytes:
                    raise ConfigError(f"{stored.file} became shorter while it was read")
                num_filled += num_bytes
            yield num_filled
            self._num_read += num_filled
            position += num_filled


class ChunkHash:
    """Multilinear hashing (Carter and Wegman, 1979): the sum of words times random odd numbers.

    numpy computes it faster than memory is read: about five times as fast as zlib's CRC-32 and ten
    times as fast as SHA-256 with the instructions for it.
    """

    def __init__(self) -> None:
        # The same on every machine.
        numbers = hashlib.shake_128(b"baton").digest(CHUNK_BYTES)
        self._factors = np.frombuffer(numbers, "<u8") | 1

    def of(self, buffer: bytearray, num_bytes: int) -> bytes:
        """Return the hash of the first bytes. Those up to a whole word are set to 0."""
        num_words = -(-num_bytes // WORD_BYTES)
        buffer[num_bytes : num_words * WORD_BYTES] = bytes(
            num_words * WORD_BYTES - num_bytes
        )
        words = np.frombuffer(buffer, "<u8", num_words)
        return bytes(np.einsum("i,i->", words, self._factors[:num_words]).tobytes())


class CacheEntry:
    """The cached digest of one file in one state, which this process alone reads and writes."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self) -> int | None:
        """Return None if nothing, or nothing whole, has been written."""
        content = os.pread(self._descriptor, 4 * DIGEST_BYTES, 0)
        return int(content, 16) if _DIGEST.fullmatch(content) else None

    def write(self, digest: int) -> None:
        # A full disk, for instance: the file is read again.
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, _bytes_of(digest).hex().encode() + b"\n", 0)


@contextlib.contextmanager
def cache_entry(file: Path, state: FileState) -> Iterator[CacheEntry | None]:
    """Lock the entry of a file, so that one of several processes reads the file for all.

    It is None where there is no cache that no other user could write to.
    """
    with contextlib.ExitStack() as undo:
        entry = None
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            folder = cache_folder("weights")
            make_private(folder)
            key = repr((FORMAT, str(file.resolve()), *state)).encode()
            path = folder / hashlib.blake2b(key, digest_size=DIGEST_BYTES).hexdigest()
            if not path.exists():
                _forget_old(folder)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o600)
            undo.callback(os.close, descriptor)
            check_owner(path)
            lock(descriptor, LOCK_WAIT_S)
            entry = CacheEntry(descriptor)
        yield entry


def _forget_old(folder: Path) -> None:
    """Remove the oldest entries, which are those of files that were replaced long ago."""
    entries = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    for path in entries[: max(0, len(entries) - MAX_CACHED)]:
        path.unlink(missing_ok=True)


def _bytes_of(digest: int) -> bytes:
    return (digest % (1 << 8 * DIGEST_BYTES)).to_bytes(DIGEST_BYTES, "big")
