"""A rank's tier: a store of blocks below its pool, with a thread that writes and one that reads.

For the agent it is a transport, which reads slots of the store instead of a peer's blocks. A block
is copied before it is written, so the pool has it back at once however slow the store is.
"""

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

from baton.kv_transfer.interfaces import (
    BAD_RECORD,
    AddPeer,
    AgentEvent,
    BlocksCopied,
    BlocksSaved,
    PeerRank,
    Read,
    SaveBlocks,
    SlotsHeld,
    tier_peer,
)
from baton.kv_transfer.pools import DevicePool, HostPool, available_bytes
from baton.kv_transfer.stores import BlockStore, FolderStore, MemoryStore
from baton.protocol.blocks import HASH_BYTES, unpack_hashes
from baton.protocol.config import CacheConfig
from baton.protocol.errors import ConfigError, InvariantBroken, TransferError
from baton.protocol.messages import RankAddress, TierName
from baton.runtime.log import logger

log = logger("cache")

GIB = 1 << 30
CLOSE_S = 2.0  # for the reads and writes that have begun
SLOTS_PER_MESSAGE = 1 << 15


def make_tiers(
    cache: CacheConfig,
    pool: HostPool | DevicePool,
    rank: int,
    num_ranks: int,
    maker: str,
) -> list["Tier"]:
    """Return the tiers below one rank's pool. Raises `ConfigError`.

    `maker` is equal for nodes whose blocks of equal hashes have equal bytes.
    """
    block_bytes = pool.shape.block_bytes
    tiers: list[Tier] = []
    if cache.kv_offloading_size:
        num_bytes = int(cache.kv_offloading_size * GIB) // num_ranks
        if num_bytes > available_bytes():
            raise ConfigError(
                f"cached blocks of {num_bytes >> 20} MiB do not fit the {available_bytes() >> 20} "
                "MiB of free memory; lower cache.kv_offloading_size"
            )
        tiers.append(Tier("memory", MemoryStore(num_bytes, block_bytes), pool))
    if cache.folder:
        # Blocks that were read from nodes that compute other bits are in the pool, too.
        what = f"{maker} {rank}/{num_ranks} {cache.prefix_reads == 'any'}"
        digest = hashlib.blake2b(what.encode(), digest_size=16).digest()
        folder = Path(cache.folder)
        num_bytes = int(cache.folder_size * GIB) // num_ranks
        store = FolderStore(folder, f"rank{rank}", num_bytes, block_bytes, digest)
        if store.was_foreign:
            log.warning(
                "the folder held blocks of another model, or computed in another way: it starts "
                "empty",
                folder=cache.folder,
            )
        tiers.append(Tier("folder", store, pool))
    return tiers


class Tier:
    """Saves blocks of `pool` in `store`, and reads them back. It owns the store from then on."""

    connect_s = 1.0
    min_chunk_bytes = 0
    progress_s: float | None = None
    tells_ends = False

    def __init__(
        self, name: TierName, store: BlockStore, pool: HostPool | DevicePool
    ) -> None:
        self.name: str = name
        self._peer = tier_peer(name)
        self._store = store
        self._pool = pool
        self._reader = ThreadPoolExecutor(1, f"{name} reads")
        self._writer = ThreadPoolExecutor(1, f"{name} writes")
        self._reads: dict[int, Future[None]] = {}
        self._next_handle = 0
        self._unfinished: set[Future[None]] = set()
        self._error: BaseException | None = None  # a bug, which ends the agent
        self._events: list[AgentEvent] = list(_held(name, store))
        # Around the events, which the writing thread adds, too.
        self._lock = threading.Lock()
        self._done = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @property
    def add_peer_command(self) -> AddPeer:
        """Return what makes an agent read from this tier."""
        shape = self._pool.shape
        return AddPeer(
            self._peer,
            self.name,
            RankAddress({self.name: b""}),
            self._store.num_slots,
            shape.block_bytes,
            shape.whole_block,
        )

    def address(self) -> bytes:
        return b""

    def add_peer(self, command: AddPeer) -> None:
        pass  # it is open

    def connected(self, peer: PeerRank) -> bool:
        return True

    def remove_peer(self, peer: PeerRank) -> None:
        pass

    def read(self, command: Read) -> int:
        self._next_handle += 1
        self._reads[self._next_handle] = self._submit(
            self._reader, partial(self._read, command)
        )
        return self._next_handle

    def test(self, handle: int) -> bool:
        if not self._reads[handle].done():
            return False
        self._reads.pop(handle).result()
        return True

    def cancel(self, handle: int) -> bool:
        future = self._reads.get(handle)
        if future is None:
            return True
        if not (future.cancel() or future.done()):
            return False
        del self._reads[handle]
        return True

    def fileno(self) -> int:
        return self._done

    def service(self) -> list[PeerRank]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._done)
        return []

    def save(self, command: SaveBlocks) -> None:
        """Copy blocks now, and write the copies later."""
        try:
            copies = self._pool.copies(command.block_ids)
        except TransferError as error:
            self._add_event(BlocksCopied(command.ticket))
            self._add_event(BlocksSaved(command.ticket, error.to_failure()))
            return
        self._add_event(BlocksCopied(command.ticket))
        write = partial(self._write, command, copies)
        self._submit(self._writer, partial(self._report, command.ticket, write))

    def clear(self, ticket: int) -> None:
        """Empty the store after the writes that were asked for before. BlocksSaved follows."""
        self._submit(self._writer, partial(self._report, ticket, self._store.clear))

    def take_events(self) -> list[AgentEvent]:
        if self._error is not None:
            raise InvariantBroken(f"the {self.name} tier ended: {self._error!r}")
        with self._lock:
            events = self._events
            self._events = []
        return events

    def close(self) -> None:
        """End both threads, and close the store unless it is stuck."""
        unfinished = tuple(self._unfinished)
        for future in unfinished:
            future.cancel()
        is_stuck = bool(wait(unfinished, CLOSE_S).not_done)
        for thread in (self._reader, self._writer):
            thread.shutdown(wait=not is_stuck)
        if not is_stuck:
            self._store.close()
            os.close(self._done)

    def _submit(
        self, thread: ThreadPoolExecutor, work: Callable[[], None]
    ) -> "Future[None]":
        future = thread.submit(work)
        self._unfinished.add(future)
        future.add_done_callback(self._finished)
        return future

    def _finished(self, future: "Future[None]") -> None:
        self._unfinished.discard(future)
        os.eventfd_write(self._done, 1)

    def _report(self, ticket: int, write: Callable[[], None]) -> None:
        """Write, and say how that went. The writing thread calls it."""
        failure = None
        try:
            write()
        except OSError as error:
            reason = f"cannot write to the {self.name} tier: {error.strerror}"
            failure = TransferError(reason).to_failure()
        except Exception as error:  # noqa: BLE001  `take_events` raises it in the agent
            self._error = error
        self._add_event(BlocksSaved(ticket, failure))

    def _write(self, command: SaveBlocks, copies: list[memoryview]) -> None:
        hashes = unpack_hashes(command.hashes)
        for slot, block_hash, copy in zip(command.slots, hashes, copies, strict=True):
            self._store.write(slot, block_hash, copy)

    def _read(self, command: Read) -> None:
        """Read every slot, also after a bad one: the store then forgets all that are bad."""
        hashes = unpack_hashes(command.hashes)
        failure: TransferError | None = None
        for slot, block_hash, block in zip(
            command.remote, hashes, command.local, strict=True
        ):
            try:
                self._pool.fill(block, partial(self._store.read, slot, block_hash))
            except TransferError as error:
                failure = error
            except OSError as error:
                reason = f"cannot read the {self.name} tier: {error.strerror}"
                raise TransferError(reason, code=BAD_RECORD) from error
        if failure is not None:
            raise failure

    def _add_event(self, event: AgentEvent) -> None:
        with self._lock:
            self._events.append(event)


def _held(name: TierName, store: BlockStore) -> Iterator[SlotsHeld]:
    hashes = store.hashes()
    for first in range(0, max(1, store.num_slots), SLOTS_PER_MESSAGE):
        end = first + SLOTS_PER_MESSAGE
        part = hashes[first * HASH_BYTES : end * HASH_BYTES]
        yield SlotsHeld(name, store.num_slots, first, part)
