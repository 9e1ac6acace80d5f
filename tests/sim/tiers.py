"""A tier of a simulated rank: the real store on a real file, behind threads that take their time.

A block is copied some time after it was asked for, so one that changes meanwhile is saved wrong.
What a node has saved outlives its process, and faults damage it.
"""

import os
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.kv_transfer.interfaces import (
    AddPeer,
    AgentEvent,
    BlocksCopied,
    BlockSlice,
    BlocksSaved,
    PeerRank,
    SaveBlocks,
    SlotsHeld,
    tier_peer,
)
from baton.kv_transfer.stores import FolderStore
from baton.protocol.blocks import HASH_BYTES, unpack_hashes
from baton.protocol.errors import TransferError
from baton.protocol.messages import RankAddress
from tests.sim.executor import BLOCK_BYTES, BLOCK_SIZE, SLOT_BYTES, Context
from tests.sim.transports import Owner, SimTransport, _Posted

if TYPE_CHECKING:
    from tests.sim.world import World

WORK_S = (0.0, 0.001, 0.02, 0.3)
SLOW_S = 3.0  # of one piece of work on a slow disk
NO_SPACE = OSError(28, "No space left on device")
RECORD_BYTES = 20
TITLE_BYTES = 64


class SimTier(SimTransport):
    name = "folder"

    def __init__(
        self, world: "World", own: Owner, rank: int, store: FolderStore
    ) -> None:
        super().__init__(world, own, rank)
        self._rng = world.tier_rng
        self._store = store
        self._size = BLOCK_BYTES // own.num_ranks
        self._free_at_s = 0.0  # when the writing thread has nothing to do
        self._events: list[AgentEvent] = [
            SlotsHeld("folder", store.num_slots, 0, store.hashes()),
        ]

    @property
    def add_peer_command(self) -> AddPeer:
        part = BlockSlice(0, 0, self._size)
        peer = tier_peer("folder")
        address = RankAddress({"folder": b""})
        return AddPeer(peer, "folder", address, self._store.num_slots, self._size, part)

    def add_peer(self, peer: AddPeer) -> None:
        self._peers[peer.peer] = self._own, peer.part

    def connected(self, peer: PeerRank) -> bool:
        return True

    def service(self) -> list[PeerRank]:
        return []

    def save(self, command: SaveBlocks) -> None:
        self._work_in(self._rng.choice(WORK_S), lambda: self._copy_out(command))

    def clear(self, ticket: int) -> None:
        self._write_in(ticket, self._store.clear)

    def take_events(self) -> list[AgentEvent]:
        events = self._events
        self._events = []
        return events

    def cancel(self, handle: int) -> bool:
        posted = self._posted.get(handle)
        if posted is None or posted.has_landed or posted.error is not None:
            self._posted.pop(handle, None)
            return True
        return False

    def _copy_out(self, command: SaveBlocks) -> None:
        heads = self._own.heads(self._rank, 0, self._size)
        slots = self._own.executor.model.slots
        copies = [self._packed(slots[block][heads]) for block in command.block_ids]
        self._events.append(BlocksCopied(command.ticket))
        self.wake()
        self._write_in(command.ticket, lambda: self._write(command, copies))

    def _write(self, command: SaveBlocks, copies: list[bytes]) -> None:
        hashes = unpack_hashes(command.hashes)
        for slot, block_hash, copy in zip(command.slots, hashes, copies, strict=True):
            if self._own.has_full_disk:
                raise NO_SPACE
            self._store.write(slot, block_hash, memoryview(copy))

    def _write_in(self, ticket: int, write: Callable[[], None]) -> None:
        """Write after everything that was asked for before."""
        now_s = self._world.loop.time()
        delay_s = SLOW_S if self._own.has_slow_disk else self._rng.choice(WORK_S)
        self._free_at_s = max(now_s, self._free_at_s) + delay_s

        def end() -> None:
            failure = None
            try:
                write()
            except OSError as error:
                failure = TransferError(str(error)).to_failure()
            self._events.append(BlocksSaved(ticket, failure))
            self.wake()

        self._work_in(self._free_at_s - now_s, end)

    def _work_in(self, seconds: float, work: Callable[[], None]) -> None:
        """Let a thread of the rank work, which stands still and dies with its process."""

        def begin() -> None:
            if self._own.is_gone(self._rank):
                return
            if self._own.process.is_frozen:
                self._in(0.1, begin)
                return
            work()

        self._in(seconds, begin)

    def _land(self, posted: _Posted) -> None:
        delay_s = SLOW_S if self._own.has_slow_disk else 0.0
        self._work_in(delay_s, lambda: self._read_in(posted))

    def _read_in(self, posted: _Posted) -> None:
        command = posted.command
        self.check_landing(posted)
        hashes = unpack_hashes(command.hashes)
        heads = self._own.heads(self._rank, 0, self._size)
        for slot, block_hash, block in zip(
            command.remote, hashes, command.local, strict=True
        ):
            content = bytearray(self._size)
            try:
                self._store.read(slot, block_hash, memoryview(content))
            except TransferError as error:
                posted.error = error
            self._own.executor.model.slots[block][heads] = self._unpacked(
                bytes(content)
            )
        posted.has_landed = posted.error is None
        self.wake()

    def _packed(self, slots: list[Context | int | None]) -> bytes:
        packed = [
            self._number_of(slot) if isinstance(slot, Context) else slot or 0
            for slot in slots
        ]
        return struct.pack(f"<{len(packed)}Q", *packed)

    def _unpacked(self, content: bytes) -> list[Context | int | None]:
        heads = self._own.heads(self._rank, 0, self._size)
        contexts = self._world.contexts
        numbers = struct.unpack(f"<{len(content) // SLOT_BYTES}Q", content)
        return [
            contexts[number % len(contexts)]
            if heads.start + offset < BLOCK_SIZE
            else number
            for offset, number in enumerate(numbers)
        ]

    def _number_of(self, context: Context) -> int:
        world = self._world
        number = world.context_numbers.setdefault(id(context), len(world.contexts))
        if number == len(world.contexts):
            world.contexts.append(context)
        return number


def damage(store: FolderStore, how: str, at: int) -> None:
    """Alter the files of a store as broken disks and strangers do."""
    blocks = store._blocks
    size = store._block_bytes
    num_bytes = os.fstat(blocks).st_size
    if not num_bytes:
        return
    at %= num_bytes
    match how:
        case "tear":
            os.ftruncate(blocks, at)
        case "alter":
            [old] = os.pread(blocks, 1, at)
            os.pwrite(blocks, bytes([old ^ 1]), at)
        case "swap":
            num_slots = num_bytes // size or 1  # a torn file may have less than one
            first = at % num_slots * size
            second = (at + 1) % num_slots * size
            one = os.pread(blocks, size, first)
            os.pwrite(blocks, os.pread(blocks, size, second), first)
            os.pwrite(blocks, one, second)
        case "rename":
            # Blocks get the hashes of their neighbours, and keep their checksums.
            records = store._records
            starts = range(0, len(records), RECORD_BYTES)
            held = [
                start for start in starts if any(records[start : start + HASH_BYTES])
            ]
            hashes = [bytes(records[start : start + HASH_BYTES]) for start in held]
            for start, block_hash in zip(held, hashes[1:] + hashes[:1], strict=True):
                records[start : start + HASH_BYTES] = block_hash
            os.pwrite(store._index, records, TITLE_BYTES)


DAMAGES = ("tear", "alter", "swap", "rename")
