"""An index of the blocks that each node's prefix cache holds, by the nodes' announcements.

It may be out of date by the time a prompt arrives at the node, so it is a guess, and the node's
own cache decides.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from baton.protocol.blocks import MIN_READ_TOKENS, BlockKey, unpack_keys
from baton.protocol.ids import NodeId
from baton.protocol.messages import CacheChanges

# Blocks per node, each of which takes about 200 bytes here. Of a larger cache, the first blocks
# count.
MAX_BLOCKS_PER_NODE = 1 << 17
# The bits of a set of nodes, each of which has one. Sets of a thousand nodes are compared at once.
NodeMask = int
FEW = 32  # so many nodes are looked for one by one


class NodeBits:
    """Gives each node a bit, the same one in every index."""

    def __init__(self) -> None:
        self._bits: dict[NodeId, NodeMask] = {}
        self._nodes: dict[int, NodeId] = {}  # by the index of the bit

    def take(self, node: NodeId) -> NodeMask:
        """Return the bit of a node, which keeps it until it gives it back."""
        bit = self._bits.get(node)
        if bit is None:
            index = next(index for index in count() if index not in self._nodes)
            bit = 1 << index
            self._bits[node] = bit
            self._nodes[index] = node
        return bit

    def give_back(self, node: NodeId) -> None:
        bit = self._bits.pop(node, None)
        if bit is not None:
            del self._nodes[bit.bit_length() - 1]

    def nodes_in(self, mask: NodeMask, limit: int | None = None) -> list[NodeId]:
        """Return the nodes of a mask in the order of their bits, or the first of them."""
        nodes = self._nodes
        num_nodes = mask.bit_count()
        if limit is not None:
            num_nodes = min(num_nodes, limit)
        elif num_nodes > FEW:
            digits = bin(mask)[:1:-1]  # from index 0 on
            return [nodes[index] for index, bit in enumerate(digits) if bit == "1"]
        found = []
        for _ in range(num_nodes):
            lowest = mask & -mask
            found.append(nodes[lowest.bit_length() - 1])
            mask ^= lowest
        return found


@dataclass(slots=True)
class _KnownCache:
    bit: NodeMask  # which many blocks share
    keys: set[BlockKey] = field(default_factory=set)
    next_number: int = 0  # the number of the node's next message


class CacheIndex:
    """Maps the keys of blocks to masks of the nodes that have the block.

    A prompt is looked up once for all nodes, and not once per node.
    """

    def __init__(
        self, bits: NodeBits, max_blocks_per_node: int = MAX_BLOCKS_PER_NODE
    ) -> None:
        self.num_gaps = 0  # gaps in the announcements of all nodes since the start
        self._bits = bits
        self._max_blocks = max_blocks_per_node
        self._nodes: dict[NodeId, _KnownCache] = {}
        self._holders: dict[BlockKey, NodeMask] = {}

    def hear(self, node: NodeId, changes: CacheChanges) -> bool:
        """Take in an announcement. Return False if one was missed; the node must then send all."""
        if changes.number == 0:
            self.forget(node)
            self._nodes[node] = _KnownCache(self._bits.take(node))
        known = self._nodes.get(node)
        if known is None or known.next_number != changes.number:
            self.num_gaps += 1
            self.forget(node)
            return False
        known.next_number += 1
        removed = known.keys.intersection(unpack_keys(changes.removed))
        known.keys -= removed
        self._clear(known.bit, removed)
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
            self._clear(known.bit, known.keys)

    def num_blocks(self, node: NodeId) -> int:
        """Return how many announced blocks a node holds."""
        known = self._nodes.get(node)
        return 0 if known is None else len(known.keys)

    def holders(self, key: BlockKey) -> NodeMask:
        """Return the nodes that hold a block."""
        return self._holders.get(key, 0)

    def held(self, keys: Sequence[BlockKey]) -> dict[int, NodeMask]:
        """Return the nodes that hold so many blocks at the front of a prompt, for each number > 0.

        A node is in one of the masks, for all that it holds.
        """
        found: dict[int, NodeMask] = {}
        if not keys:
            return found
        having = self._holders.get(keys[0], 0)
        num_blocks = 0
        while having:
            num_blocks += 1
            is_last = num_blocks == len(keys)
            further = 0 if is_last else having & self._holders.get(keys[num_blocks], 0)
            if further != having:
                found[num_blocks] = having ^ further
            having = further
        return found

    def _clear(self, bit: NodeMask, keys: set[BlockKey]) -> None:
        holders = self._holders
        for key in keys:
            if left := holders[key] & ~bit:
                holders[key] = left
            else:
                del holders[key]


@dataclass(slots=True)
class Holding:
    """Nodes that have equally much of a prompt, in tokens."""

    nodes: NodeMask = 0
    num_held: int = 0  # in their pools
    num_cached: int = 0  # of these, those that need not be computed
    saved: float = 0.0  # need not be computed, less what reading them from tiers costs
    known: float = 0.0  # about how many need not be computed

    def add_tier(self, num_tokens: int, read: float) -> None:
        """Count that many tokens, of which reading each from a tier costs `read`."""
        num_more = num_tokens - self.num_cached
        saved = self.num_cached + (1 - read) * num_more
        self.saved = max(saved, self.saved)
        self.known = max(saved, self.known)


NOTHING = Holding()


class Holdings:
    """What all nodes have of one prompt. No node is in two holdings."""

    def __init__(self) -> None:
        self._holdings: list[Holding] = []

    def __iter__(self) -> Iterator[Holding]:
        return iter(self._holdings)

    def of(self, node: NodeMask) -> Holding:
        """Return what a node has."""
        return next((one for one in self._holdings if one.nodes & node), NOTHING)

    def knowing(self, num_tokens: float) -> NodeMask:
        """Return the nodes that need not compute about so many tokens."""
        found = 0
        for one in self._holdings:
            if one.known >= num_tokens:
                found |= one.nodes
        return found

    def add_pools(self, nodes: NodeMask, num_held: int, num_cached: int) -> None:
        """Add nodes with tokens in their pools. They come before any tier."""
        holding = Holding(nodes, num_held, num_cached, num_cached, num_held)
        self._holdings.append(holding)

    def add_tiers(self, nodes: NodeMask, num_tokens: int, read: float) -> None:
        """Count the first tokens of the prompt, which a tier of each of these nodes holds."""
        others = nodes
        apart = []
        for one in self._holdings:
            others &= ~one.nodes
            both = one.nodes & nodes
            if not both or one.num_cached > num_tokens - MIN_READ_TOKENS:
                continue
            if both != one.nodes:
                apart.append(replace(one, nodes=one.nodes ^ both))
                one.nodes = both
            one.add_tier(num_tokens, read)
        self._holdings += apart
        if others and num_tokens >= MIN_READ_TOKENS:
            holding = Holding(others)
            holding.add_tier(num_tokens, read)
            self._holdings.append(holding)
