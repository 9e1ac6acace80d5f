"""The owners of this node's KV blocks: reference counts, generations, quarantine.

The pool is a table on the host; only schedulers call it. A block is free, owned (references > 0),
idle in the prefix cache (evictable), or quarantined. Bytes of a read may still land in a
quarantined block, so the pool does not hand it out until it is readmitted.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.node.scheduling.prefix_cache import PrefixCache
from baton.protocol.blocks import BlockHash, blocks_for
from baton.protocol.errors import InvariantBroken


@dataclass(slots=True)
class PoolCounts:
    """What the scheduler has counted since the start, with the names of `Totals`."""

    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0  # sequences that gave their blocks back because none was free
    spec_decode_draft_tokens: int = 0  # guessed
    spec_decode_accepted_tokens: int = 0  # guessed right
    prefix_read_tokens: int = 0
    failed_prefix_reads: int = 0
    memory_hit_tokens: int = 0
    folder_hit_tokens: int = 0
    prefetched_tokens: int = 0

    def read_from(self, source: str, num_tokens: int) -> None:
        """Count tokens whose blocks were read from a tier or another node."""
        match source:
            case "memory":
                self.memory_hit_tokens += num_tokens
            case "folder":
                self.folder_hit_tokens += num_tokens
            case _:
                self.prefix_read_tokens += num_tokens


class BlockPool:
    """The `num_blocks` blocks of a node. Without `cache_prefixes`, released blocks are not kept.

    Where a model keeps a state for each sequence, it takes `state_blocks` of them beside those of
    the sequence's tokens. With `has_two_orders`, equal tokens of a prompt and of a response have
    different bits, and their blocks are told apart.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        cache_prefixes: bool = True,
        state_blocks: int = 0,
        has_two_orders: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.state_blocks = state_blocks
        self.has_two_orders = has_two_orders
        self.cache = PrefixCache()
        self.counts = PoolCounts()
        self.caches_prefixes = cache_prefixes
        self._free = deque(range(num_blocks))
        self._references = [0] * num_blocks
        self._generations = [0] * num_blocks
        self._fresh: dict[int, int] = {}
        self._quarantined: set[int] = set()
        self._outdated: set[int] = set()  # owned since before the cache was reset

    @property
    def num_free(self) -> int:
        """Return how many blocks `allocate` can hand out, evictable cached ones included."""
        return len(self._free) + self.cache.num_idle

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    @property
    def num_owned(self) -> int:
        return self.num_blocks - self.num_free - self.num_quarantined

    def blocks_for(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks with one reference each, of a new generation."""
        if count > self.num_free:
            raise InvariantBroken(f"allocate {count} of {self.num_free} free blocks")
        blocks = [
            self._free.popleft() if self._free else self.cache.evict()
            for _ in range(count)
        ]
        for block in blocks:
            self._references[block] = 1
            self._outdated.discard(block)
            self._generations[block] = (self._generations[block] + 1) & 0xFFFFFFFF
            self._fresh[block] = self._generations[block]
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self._references[block] == 0:
                self.cache.revive(block)
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block. Later blocks of a sequence become evictable first."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] < 0:
                raise InvariantBroken(
                    f"block {block} released more often than retained"
                )
            if self._references[block] > 0:
                continue
            if self.cache.holds(block):
                self.cache.rest(block)
            else:
                self._free.append(block)

    def quarantine(self, blocks: Iterable[int]) -> None:
        """Take owned blocks out of circulation, because bytes may still land in them."""
        for block in blocks:
            if self._references[block] != 1 or self.cache.holds(block):
                raise InvariantBroken(
                    f"block {block} is shared and cannot be quarantined"
                )
            self._references[block] = 0
            self._quarantined.add(block)

    def readmit(self, blocks: Iterable[int]) -> None:
        """Take quarantined blocks back, because nothing can land in them any more."""
        for block in blocks:
            if block not in self._quarantined:
                raise InvariantBroken(f"block {block} is not quarantined")
            self._quarantined.remove(block)
            self._free.append(block)

    def match(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Return the cached blocks of the longest known prefix, each with one more reference."""
        blocks = self.cache.lookup(hashes)
        self.retain(blocks)
        return blocks

    def store(self, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> None:
        """Offer whole, settled blocks, which are still owned, to the prefix cache."""
        if self.caches_prefixes:
            for block_hash, block in zip(hashes, blocks, strict=True):
                if block not in self._outdated:
                    self.cache.insert(block_hash, block)

    def reset_prefix_cache(self) -> None:
        """Forget the cached blocks. Sequences keep theirs, which will not be cached again."""
        self._free.extend(self.cache.clear())
        self._outdated = {
            block for block, count in enumerate(self._references) if count
        }

    def generations_of(self, blocks: Iterable[int]) -> tuple[int, ...]:
        return tuple(self._generations[block] for block in blocks)

    def are_published(self, blocks: Iterable[int]) -> bool:
        """Return whether a step has been given the generations of these blocks."""
        return self._fresh.keys().isdisjoint(blocks)

    def num_takeable(self, idle_s: float, limit: int) -> int:
        """Return how many blocks, up to `limit`, hold nothing that was used so recently."""
        num_empty = min(limit, len(self._free))
        return num_empty + self.cache.num_colder(idle_s, limit - num_empty)

    def take_fresh(self) -> tuple[tuple[int, int], ...]:
        """Return (block, generation) of every block allocated since the last call."""
        fresh = tuple(self._fresh.items())
        self._fresh.clear()
        return fresh

    def references(self, block: int) -> int:
        return self._references[block]
