"""The changes of the prefix cache that routers have not heard of yet. Pure.

`PrefixCache` notes every block that it takes in or gives up; the engine loop takes the messages and
sends them. A router that watches hears of all blocks first and of changes from then on. A block
that came and went between two messages is not mentioned, so no more than twice the blocks of the
pool ever wait for a router.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from baton.engine.outputs import Origin
from baton.protocol.blocks import BlockHash, pack_keys
from baton.protocol.bounds import MAX_KEYS
from baton.protocol.messages import CacheChanges

# A router that hears of each step at once spends more on listening than on placing requests.
INTERVAL_S = 0.1


@dataclass(slots=True)
class _Reader:
    """`untold` maps a block to whether the cache holds it now; the router believes the opposite."""

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
        """Begin anew for a router: the cache holds the blocks `held`."""
        self._readers[origin] = _Reader(dict.fromkeys(held, True))

    def forget(self, origin: Origin) -> None:
        self._readers.pop(origin, None)

    def note(self, block_hash: BlockHash, *, is_held: bool) -> None:
        """Note that the cache has just taken a block in, or given it up."""
        for reader in self._readers.values():
            if reader.untold.pop(block_hash, None) is None:
                reader.untold[block_hash] = is_held

    @property
    def wake_at_s(self) -> float | None:
        """Return when `take` will have something to say; None as long as nothing changes."""
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
