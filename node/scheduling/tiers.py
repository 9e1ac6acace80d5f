"""Which blocks the tiers below a node's pool hold, and what is copied to them and back.

Every idle block of the prefix cache is copied to each tier that lacks it, the least recently used
one first, so evicting it later costs nothing. A block that is evicted before its turn is lost. It
is referenced while it is copied, and its slot counts as held when every rank has written it. A
slot from which a prompt is read gets no other block before that has ended.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import assert_never

from baton.kv_transfer.interfaces import (
    TIER_TIMEOUT,
    BlocksCopied,
    BlocksSaved,
    ClearTier,
    LoadPrefix,
    SaveBlocks,
    TierOpened,
    TierPart,
)
from baton.node.scheduling.block_pool import BlockPool
from baton.node.scheduling.plan import Origin, Outputs
from baton.node.scheduling.prefix_cache import CacheJournal
from baton.protocol.blocks import NO_HASH, BlockHash, pack_hashes, unpack_hashes
from baton.protocol.errors import Cancelled, Failure
from baton.protocol.ids import Key
from baton.protocol.messages import TierName

MAX_SAVE_BLOCKS = 32  # in one command
MAX_SAVES = 2  # commands that a tier has not finished
MAX_COPIED_SHARE = 1 / 8  # of a pool's blocks, in one command
FASTEST_FIRST: tuple[TierName, ...] = ("memory", "folder")
RETRY_S = 30.0  # after a write that failed, such as to a full disk
# Of failed reads, these say nothing about what slots hold.
HARMLESS = (TIER_TIMEOUT, Cancelled.code)

TierReport = TierOpened | BlocksCopied | BlocksSaved


class TierIndex:
    """The blocks of one tier by their hashes. The least recently used one makes room."""

    def __init__(
        self,
        name: TierName,
        hashes: Sequence[BlockHash],
        resting: dict[int, None],
        journal: CacheJournal,
    ) -> None:
        self.name: TierName = name
        self.num_slots = len(hashes)
        self.num_saves = 0
        self.retry_at_s = 0.0
        self.resting = resting  # idle blocks of the pool that this tier may lack
        self.pending: set[BlockHash] = set()  # that are being saved
        self._slots: OrderedDict[BlockHash, int] = OrderedDict()
        self._free: deque[int] = deque()
        self._readers: Counter[int] = Counter()  # by slot
        # Slots that are read although their blocks are dropped.
        self._orphans: set[int] = set()
        self._journal = journal
        for slot, block_hash in enumerate(hashes):
            if block_hash == NO_HASH or block_hash in self._slots:
                self._free.append(slot)
            else:
                self._slots[block_hash] = slot

    def __len__(self) -> int:
        return len(self._slots)

    def slot_of(self, block_hash: BlockHash) -> int | None:
        return self._slots.get(block_hash)

    def hottest(self) -> Iterator[BlockHash]:
        """Yield the blocks, those that were used last first."""
        return reversed(self._slots)

    def watch(self, origin: Origin) -> None:
        """Let a router get every block of the tier, and then every change."""
        self._journal.watch(origin, self._slots, self.name)

    def touch(self, block_hash: BlockHash) -> None:
        self._slots.move_to_end(block_hash)

    def take_slot(self) -> int | None:
        """Return a slot for another block, or None while every slot is read or written."""
        if self._free:
            return self._free.popleft()
        for block_hash, slot in self._slots.items():
            if not self._readers[slot]:
                del self._slots[block_hash]
                self._journal.note(block_hash, self.name, is_held=False)
                return slot
        return None

    def give_back(self, slots: Iterable[int]) -> None:
        """Free slots that were taken and hold nothing."""
        self._free.extend(slots)

    def add(self, block_hash: BlockHash, slot: int) -> None:
        """Let a slot that was taken hold a block."""
        self._slots[block_hash] = slot
        self._journal.note(block_hash, self.name, is_held=True)

    def drop(self, hashes: Iterable[BlockHash]) -> None:
        for block_hash in hashes:
            slot = self._slots.pop(block_hash, None)
            if slot is None:
                continue
            self._journal.note(block_hash, self.name, is_held=False)
            if self._readers[slot]:
                self._orphans.add(slot)
            else:
                self._free.append(slot)

    def clear(self) -> None:
        self.drop(list(self._slots))

    def retain(self, slots: Iterable[int]) -> None:
        self._readers.update(slots)

    def release(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._readers[slot] -= 1
            if self._readers[slot] > 0:
                continue
            del self._readers[slot]
            if slot in self._orphans:
                self._orphans.remove(slot)
                self._free.append(slot)


@dataclass(slots=True)
class _Save:
    tier: TierIndex
    command: SaveBlocks
    is_copied: bool = False
    is_void: bool = False  # the tier was reset meanwhile


class Tiers:
    def __init__(self, pool: BlockPool, outputs: Outputs) -> None:
        self.by_name: dict[TierName, TierIndex] = {}
        self._pool = pool
        self._outputs = outputs
        self._tickets = count(1)
        self._saves: dict[int, _Save] = {}
        self._loads: dict[Key, tuple[TierPart, ...]] = {}

    @property
    def is_copying(self) -> bool:
        """Return whether blocks of the pool will soon be idle again."""
        return any(not save.is_copied for save in self._saves.values())

    def copying(self) -> Iterable[int]:
        """Return the blocks that each have one more reference while they are copied."""
        for save in self._saves.values():
            if not save.is_copied:
                yield from save.command.block_ids

    def on_report(self, now_s: float, report: TierReport) -> None:
        match report:
            case TierOpened():
                self._opened(report)
            case BlocksCopied():
                self._copied(report)
            case BlocksSaved():
                self._saved(now_s, report)
            case _:
                assert_never(report)

    def watch(self, origin: Origin) -> None:
        """Let a router get every block of each tier, and then every change."""
        for tier in self.by_name.values():
            tier.watch(origin)

    def write_back(self, now_s: float) -> None:
        """Let each tier copy some idle blocks that it lacks."""
        for tier in self.by_name.values():
            if tier.resting and tier.num_saves < MAX_SAVES and now_s >= tier.retry_at_s:
                self._save_some(tier)

    def find(self, hashes: Sequence[BlockHash]) -> list[TierPart]:
        """Return where the first of these blocks are; a tier is named once, with all it has."""
        parts: dict[TierName, list[tuple[int, BlockHash, int]]] = {}
        for index, block_hash in enumerate(hashes):
            for tier in self.by_name.values():
                slot = tier.slot_of(block_hash)
                if slot is not None:
                    parts.setdefault(tier.name, []).append((slot, block_hash, index))
                    break
            else:
                break
        return [_part(name, found) for name, found in parts.items()]

    def load(
        self,
        key: Key,
        parts: Iterable[TierPart],
        landing: Sequence[int],
        timeout_s: float,
    ) -> None:
        """Read what `find` has returned into the blocks `landing`."""
        load = tuple(
            TierPart(
                part.tier,
                part.slots,
                part.hashes,
                tuple(landing[i] for i in part.block_ids),
            )
            for part in parts
        )
        for part in load:
            tier = self.by_name[part.tier]
            tier.retain(part.slots)
            for block_hash in unpack_hashes(part.hashes):
                tier.touch(block_hash)
        self._loads[key] = load
        self._outputs.to_connector.append(LoadPrefix(key, load, timeout_s))

    def loaded(self, key: Key, failure: Failure | None = None) -> None:
        """Note that nothing is read any more. Blocks that could not be read are forgotten."""
        for part in self._loads.pop(key, ()):
            tier = self.by_name[part.tier]
            if failure is not None and failure.code not in HARMLESS:
                tier.drop(unpack_hashes(part.hashes))
            tier.release(part.slots)

    def reset(self) -> None:
        """Forget every block, also those that are being saved."""
        for save in self._saves.values():
            save.is_void = True
        for tier in self.by_name.values():
            tier.clear()
            self._outputs.to_connector.append(ClearTier(next(self._tickets), tier.name))

    def _opened(self, report: TierOpened) -> None:
        if self._pool.caches_prefixes and not self._pool.state_blocks:
            resting = self._pool.cache.show_idle()
            hashes = unpack_hashes(report.hashes)
            journal = self._pool.cache.journal
            tier = TierIndex(report.tier, hashes, resting, journal)
            for origin in journal.origins:
                tier.watch(origin)
            tiers = {**self.by_name, report.tier: tier}
            self.by_name = {
                name: tiers[name] for name in FASTEST_FIRST if name in tiers
            }

    def _copied(self, report: BlocksCopied) -> None:
        save = self._saves[report.ticket]
        save.is_copied = True
        # The blocks are in the order in which they came to rest, and do so again.
        self._pool.release(save.command.block_ids[::-1])
        for block in save.command.block_ids:
            # Or a tier smaller than the pool would never rest.
            save.tier.resting.pop(block, None)

    def _saved(self, now_s: float, report: BlocksSaved) -> None:
        save = self._saves.pop(report.ticket, None)
        if save is None:
            return  # a tier was cleared
        tier = save.tier
        tier.num_saves -= 1
        hashes = unpack_hashes(save.command.hashes)
        tier.pending.difference_update(hashes)
        if report.failure is not None:
            tier.retry_at_s = now_s + RETRY_S
        if save.is_void or report.failure is not None:
            tier.give_back(save.command.slots)
            return
        for block_hash, slot in zip(hashes, save.command.slots, strict=True):
            tier.add(block_hash, slot)

    def _save_some(self, tier: TierIndex) -> None:
        cache = self._pool.cache
        limit = max(
            1, min(MAX_SAVE_BLOCKS, int(self._pool.num_blocks * MAX_COPIED_SHARE))
        )
        blocks: list[int] = []
        hashes: list[BlockHash] = []
        slots: list[int] = []
        for block in list(islice(tier.resting, 4 * MAX_SAVE_BLOCKS)):
            if len(blocks) == limit:
                break
            block_hash = cache.hash_of(block)
            if tier.slot_of(block_hash) is not None:
                tier.touch(block_hash)
            elif block_hash not in tier.pending:
                slot = tier.take_slot()
                if slot is None:
                    break
                blocks.append(block)
                hashes.append(block_hash)
                slots.append(slot)
            del tier.resting[block]
        if not blocks:
            return
        self._pool.retain(blocks)
        tier.pending.update(hashes)
        tier.num_saves += 1
        ticket = next(self._tickets)
        command = SaveBlocks(
            ticket, tier.name, tuple(blocks), tuple(slots), pack_hashes(hashes)
        )
        self._saves[ticket] = _Save(tier, command)
        self._outputs.to_connector.append(command)


def _part(name: TierName, found: list[tuple[int, BlockHash, int]]) -> TierPart:
    """Return a part whose `block_ids` are indices among the blocks that were looked for."""
    slots, hashes, indices = zip(*found, strict=True)
    return TierPart(name, slots, pack_hashes(hashes), indices)
