"""The blocks that hold known prefixes, and the changes to them that routers have not heard of.

The least recently used idle block is evicted first. A block enters whole and settled. If the same
content is offered twice, the first block stays. A router that watches gets all blocks first and
changes from then on. A block that was added and removed between two messages is not mentioned, so
the number of pending changes per router is at most twice the number of blocks in the pool.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from baton.node.scheduling.plan import Origin
from baton.protocol.blocks import BlockHash, pack_keys
from baton.protocol.ids import MAX_KEYS
from baton.protocol.messages import CacheChanges, TierName

# A router that got a message for each step would spend more time on them than on placing requests.
INTERVAL_S = 0.1


@dataclass(slots=True)
class _Reader:
    """`pending` says which blocks the cache holds where the router assumes the opposite."""

    pending: dict[BlockHash, bool]
    number: int = 0
    due_s: float = 0.0

    @property
    def has_news(self) -> bool:
        return bool(self.pending) or self.number == 0


class CacheJournal:
    """The changes to a cache and to the tiers below it. No tier means the cache itself."""

    def __init__(self) -> None:
        self._readers: dict[tuple[Origin, TierName | None], _Reader] = {}

    @property
    def origins(self) -> set[Origin]:
        """Return the routers that watch."""
        return {origin for origin, _ in self._readers}

    def watch(
        self, origin: Origin, held: Iterable[BlockHash], tier: TierName | None = None
    ) -> None:
        """Start over for a router: the cache or tier holds the blocks `held`."""
        self._readers[origin, tier] = _Reader(dict.fromkeys(held, True))

    def forget(self, origin: Origin) -> None:
        for watched in [one for one in self._readers if one[0] == origin]:
            del self._readers[watched]

    def note(
        self, block_hash: BlockHash, tier: TierName | None = None, *, is_held: bool
    ) -> None:
        """Note that the cache or tier has just added or removed a block."""
        for (_, watched), reader in self._readers.items():
            if watched == tier and reader.pending.pop(block_hash, None) is None:
                reader.pending[block_hash] = is_held

    @property
    def wake_at_s(self) -> float | None:
        """Return when `take` will have a message; None while nothing changes."""
        due = [reader.due_s for reader in self._readers.values() if reader.has_news]
        return min(due, default=None)

    def take(self, now_s: float) -> Iterator[tuple[Origin, CacheChanges]]:
        """Yield the messages that are due, which then count as sent."""
        for (origin, tier), reader in self._readers.items():
            if reader.has_news and now_s >= reader.due_s:
                yield origin, _next_part(reader, tier)
                reader.number += 1
                reader.due_s = now_s + INTERVAL_S


def _next_part(reader: _Reader, tier: TierName | None) -> CacheChanges:
    part = list(islice(reader.pending.items(), MAX_KEYS))
    for block_hash, _ in part:
        del reader.pending[block_hash]
    added = pack_keys(block_hash for block_hash, is_held in part if is_held)
    removed = pack_keys(block_hash for block_hash, is_held in part if not is_held)
    return CacheChanges(reader.number, added, removed, tier)


class PrefixCache:
    """Known prefixes. Every block that is added or removed is noted in `journal`, for routers."""

    def __init__(self) -> None:
        self.journal = CacheJournal()
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}
        self._idle: OrderedDict[int, float] = OrderedDict()  # since when
        self._now_s = 0.0
        # For each tier, the idle blocks that it has not looked at, in the order of `_idle`.
        self._unsaved: list[dict[int, None]] = []

    def __len__(self) -> int:
        return len(self._hash_of)

    def tick(self, now_s: float) -> None:
        """Note the time, which only says how long blocks have been idle."""
        self._now_s = now_s

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def holds(self, block: int) -> bool:
        return block in self._hash_of

    def lookup(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Return the blocks of the longest known prefix of the chain `hashes`."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, block_hash: BlockHash, block: int) -> None:
        if block_hash not in self._block_of and block not in self._hash_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash
            self.journal.note(block_hash, is_held=True)

    def hash_of(self, block: int) -> BlockHash:
        return self._hash_of[block]

    def has(self, block_hash: BlockHash) -> bool:
        return block_hash in self._block_of

    def hottest(self) -> Iterator[tuple[BlockHash, float]]:
        """Yield the blocks, those in use first, each with the seconds since it was used."""
        for block, block_hash in self._hash_of.items():
            if block not in self._idle:
                yield block_hash, 0.0
        for block, since_s in reversed(self._idle.items()):
            yield self._hash_of[block], max(0.0, self._now_s - since_s)

    def num_colder(self, idle_s: float, limit: int) -> int:
        """Return how many blocks, up to `limit`, have been idle for longer than that."""
        since_s = self._now_s - idle_s
        colder = takewhile(lambda at_s: at_s < since_s, self._idle.values())
        return sum(1 for _ in islice(colder, limit))

    def show_idle(self) -> dict[int, None]:
        """Return the idle blocks for a tier, which removes those that it has looked at."""
        unsaved = dict.fromkeys(self._idle)
        self._unsaved.append(unsaved)
        return unsaved

    def rest(self, block: int) -> None:
        """Make a block that has lost its last user evictable."""
        self._idle[block] = self._now_s
        for unsaved in self._unsaved:
            unsaved[block] = None

    def revive(self, block: int) -> None:
        del self._idle[block]
        self._is_not_idle(block)

    def evict(self) -> int:
        """Forget the idle block that was used least recently, and return it."""
        block, _ = self._idle.popitem(last=False)
        self._is_not_idle(block)
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash]
        self.journal.note(block_hash, is_held=False)
        return block

    def clear(self) -> list[int]:
        """Forget every block, and return those that were idle."""
        for block_hash in self._block_of:
            self.journal.note(block_hash, is_held=False)
        idle = list(self._idle)
        for index in (self._block_of, self._hash_of, self._idle):
            index.clear()
        for unsaved in self._unsaved:
            unsaved.clear()
        return idle

    def watch(self, origin: Origin) -> None:
        """Let a router get every block of the cache, and then every change."""
        self.journal.watch(origin, self._block_of)

    def _is_not_idle(self, block: int) -> None:
        for unsaved in self._unsaved:
            unsaved.pop(block, None)
