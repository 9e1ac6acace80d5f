"""Which blocks hold which prefixes, and which of them nobody uses at the moment.

Only `BlockPool` calls it. Idle blocks are evicted least recently used first. A block enters whole
and settled; when the same content is offered twice, the block that came first stays.
"""

from collections import OrderedDict
from collections.abc import Sequence

from baton.protocol.block_hash import BlockHash


class PrefixCache:
    def __init__(self) -> None:
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
        """The blocks of the longest known prefix of the chain `hashes`."""
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

    def rest(self, block: int) -> None:
        """The last user of this block is gone; it may be evicted from now on."""
        self._idle[block] = None

    def revive(self, block: int) -> None:
        del self._idle[block]

    def evict(self) -> int:
        """Forget the idle block that was used least recently, and hand it over."""
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._hash_of.pop(block)]
        return block
