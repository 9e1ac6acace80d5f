"""The changes of the prefix cache that have not been sent to routers yet.

`PrefixCache` notes every block that it adds or removes; the engine loop takes the messages and
sends them. A router that watches gets all blocks first and changes from then on. A block that was
added and removed between two messages is not mentioned, so the number of pending changes for a
router is at most twice the number of blocks in the pool. This file is pure.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from baton.engine.outputs import Origin
from baton.protocol.blocks import BlockHash, pack_keys
from baton.protocol.ids import MAX_KEYS
from baton.protocol.messages import CacheChanges

# A router that got a message for each step would spend more time on them than on placing requests.
INTERVAL_S = 0.1


@dataclass(slots=True)
class _Reader:
    """`untold` says which blocks the cache holds where the router assumes the opposite."""

    untold: dict[BlockHash, bool]
    number: int = 0
    due_s: float = 0.0

    @property
    def has_news(self) -> bool:
        return bool(self.untold) or self.number == 0


class CacheJournal:
    def __init__(self) -> None:
        self._readers: dict[Origin, _Reader] = {}

    def watch(self, origin: Origin, held: Iterable[BlockHash]) -> None:
        """Start over for a router: the cache holds the blocks `held`."""
        self._readers[origin] = _Reader(dict.fromkeys(held, True))

    def forget(self, origin: Origin) -> None:
        self._readers.pop(origin, None)

    def note(self, block_hash: BlockHash, *, is_held: bool) -> None:
        """Note that the cache has just added or removed a block."""
        for reader in self._readers.values():
            if reader.untold.pop(block_hash, None) is None:
                reader.untold[block_hash] = is_held

    @property
    def wake_at_s(self) -> float | None:
        """Return when `take` will have a message; None while nothing changes."""
        due = [reader.due_s for reader in self._readers.values() if reader.has_news]
        return min(due, default=None)

    def take(self, now_s: float) -> Iterator[tuple[Origin, CacheChanges]]:
        """Yield the messages that are due, which then count as sent."""
        for origin, reader in self._readers.items():
            if reader.has_news and now_s >= reader.due_s:
                yield origin, _next_part(reader)
                reader.number += 1
                reader.due_s = now_s + INTERVAL_S


def _next_part(reader: _Reader) -> CacheChanges:
    part = list(islice(reader.untold.items(), MAX_KEYS))
    for block_hash, _ in part:
        del reader.untold[block_hash]
    added = pack_keys(block_hash for block_hash, is_held in part if is_held)
    removed = pack_keys(block_hash for block_hash, is_held in part if not is_held)
    return CacheChanges(reader.number, added, removed)
