"""The blocks that hold known prefixes, and which of them are idle.

Only `BlockPool` calls it. The least recently used idle block is evicted first. A block enters whole
and settled. If the same content is offered twice, the first block stays.
"""

from collections import OrderedDict
from collections.abc import Sequence

from baton.engine.cache_journal import CacheJournal
from baton.engine.outputs import Origin
from baton.protocol.blocks import BlockHash


class PrefixCache:
    """Known prefixes. Every block that is added or removed is noted in `journal`, for routers."""

    def __init__(self) -> None:
        self.journal = CacheJournal()
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hash_of)

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

    def rest(self, block: int) -> None:
        """Make a block that has lost its last user evictable."""
        self._idle[block] = None

    def revive(self, block: int) -> None:
        del self._idle[block]

    def evict(self) -> int:
        """Forget the idle block that was used least recently, and return it."""
        block, _ = self._idle.popitem(last=False)
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash]
        self.journal.note(block_hash, is_held=False)
        return block

    def watch(self, origin: Origin) -> None:
        """Let a router get every block of the cache, and then every change."""
        self.journal.watch(origin, self._block_of)
