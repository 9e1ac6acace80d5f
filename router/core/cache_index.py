"""An index of the blocks that each node's prefix cache holds, by the nodes' announcements.

It may be out of date by the time a prompt arrives at the node, so it is a guess, and the node's
own cache decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from baton.protocol.blocks import BlockKey, unpack_keys
from baton.protocol.ids import NodeId
from baton.protocol.messages import CacheChanges

# Blocks per node, each of which takes about 200 bytes here. Of a larger cache, the first blocks
# count.
MAX_BLOCKS_PER_NODE = 1 << 17
MAX_NAMED = 256


@dataclass(slots=True)
class _KnownCache:
    index: int  # the index of the node's bit in the masks
    bit: int  # the mask of this node alone, which many blocks share
    keys: set[BlockKey] = field(default_factory=set)
    next_number: int = 0  # the number of the node's next message


class CacheIndex:
    """Maps the keys of blocks to masks with a bit for each node that has the block.

    A prompt is looked up once for all nodes, and not once per node.
    """

    def __init__(self, max_blocks_per_node: int = MAX_BLOCKS_PER_NODE) -> None:
        self.num_gaps = 0  # gaps in the announcements of all nodes since the start
        self._max_blocks = max_blocks_per_node
        self._nodes: dict[NodeId, _KnownCache] = {}
        self._names: dict[int, NodeId] = {}  # by index
        self._holders: dict[BlockKey, int] = {}
        # By masks that were asked for lately.
        self._named: dict[int, tuple[NodeId, ...]] = {}

    def hear(self, node: NodeId, changes: CacheChanges) -> bool:
        """Take in an announcement. Return False if one was missed; the node must then send all."""
        if changes.number == 0:
            self.forget(node)
            index = next(index for index in count() if index not in self._names)
            self._names[index] = node
            self._named.clear()
            self._nodes[node] = _KnownCache(index, 1 << index)
        known = self._nodes.get(node)
        if known is None or known.next_number != changes.number:
            self.num_gaps += 1
            self.forget(node)
            return False
        known.next_number += 1
        removed = known.keys.intersection(unpack_keys(changes.removed))
        known.keys -= removed
        self._clear(known.index, removed)
        room = self._max_blocks - len(known.keys)
        added = unpack_keys(changes.added)[:room]
        bit = known.bit
        holders = self._holders
        known.keys.update(added)
        for key in added:
            others = holders.get(key)
            holders[key] = bit if others is None else others | bit
        return True

    def forget(self, node: NodeId) -> None:
        """Drop all entries of a node."""
        known = self._nodes.pop(node, None)
        if known is not None:
            self._clear(known.index, known.keys)
            del self._names[known.index]
            self._named.clear()

    def num_blocks(self, node: NodeId) -> int:
        """Return how many announced blocks a node holds."""
        known = self._nodes.get(node)
        return 0 if known is None else len(known.keys)

    def holders(self, key: BlockKey) -> tuple[NodeId, ...]:
        """Return the nodes that hold a block."""
        return self._nodes_in(self._holders.get(key, 0))

    def held(self, keys: Sequence[BlockKey]) -> dict[int, tuple[NodeId, ...]]:
        """Return the nodes that hold so many blocks at the front of a prompt, for each number > 0.

        A node is named once, with all that it holds.
        """
        found: dict[int, tuple[NodeId, ...]] = {}
        if not keys:
            return found
        having = self._holders.get(keys[0], 0)
        num_blocks = 0
        while having:
            num_blocks += 1
            is_last = num_blocks == len(keys)
            further = 0 if is_last else having & self._holders.get(keys[num_blocks], 0)
            if further != having:
                found[num_blocks] = self._nodes_in(having ^ further)
            having = further
        return found

    def _clear(self, index: int, keys: set[BlockKey]) -> None:
        bit = 1 << index
        holders = self._holders
        for key in keys:
            if left := holders[key] & ~bit:
                holders[key] = left
            else:
                del holders[key]

    def _nodes_in(self, mask: int) -> tuple[NodeId, ...]:
        named = self._named.get(mask)
        if named is None:
            bits = bin(mask)[:1:-1]  # from index 0 on
            named = tuple(
                self._names[index] for index, bit in enumerate(bits) if bit == "1"
            )
            if len(self._named) == MAX_NAMED:
                self._named.clear()
            self._named[mask] = named
        return named
