"""Order nodes, and pairs of nodes, by what an attempt would cost there.

Keys are plain tuples, made and compared by the interpreter's own loops: a decision looks at every
node, and there may be a thousand.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count, repeat
from operator import add, attrgetter

import msgspec

from baton.protocol.ids import NodeId
from baton.router.core.pair_health import Host
from baton.router.core.registry import Node

# A handoff takes as long as computing this many tokens.
HANDOFF_TOKENS = 64
# Less is better, and comes before any cost: avoided, suspects, full.
Penalty = tuple[int, int, int]
NO_PENALTY: Penalty = (0, 0, 0)
Rank = tuple[Penalty, float]  # with the cost
# A rank, the tokens of attempts that the node has, and its place in the ranking.
NodeKey = tuple[Penalty, float, int, int]

_num_tokens = attrgetter("num_tokens")
_node_id = attrgetter("node_id")


class Ranking:
    """Nodes in order of their ids, each with what it would cost and perhaps a penalty."""

    __slots__ = ("_nodes", "keys")

    def __init__(
        self,
        nodes: Sequence[Node],
        costs: Iterable[float],
        penalties: Iterable[Penalty] | None = None,
    ) -> None:
        if penalties is None:
            penalties = repeat(NO_PENALTY, len(nodes))
        tokens = map(_num_tokens, nodes)
        self._nodes = nodes
        self.keys: list[NodeKey] = list(
            zip(penalties, costs, tokens, count(), strict=False)
        )

    def __len__(self) -> int:
        return len(self._nodes)

    def best(self) -> Node:
        """Return the best of the nodes, of which there must be one."""
        return self.node(min(self.keys))

    def best_rank(self) -> Rank:
        return min(self.keys)[:2]

    def node(self, key: NodeKey) -> Node:
        return self._nodes[key[3]]

    def keys_by_node(self) -> dict[NodeId, NodeKey]:
        return dict(zip(map(_node_id, self._nodes), self.keys, strict=True))


NO_NODES = Ranking((), ())


class RankedPair(msgspec.Struct, frozen=True):
    """A prefill and a decode node. The cost in its rank includes that of the handoff."""

    rank: Rank
    prefill: Node
    decode: Node

    @property
    def order(self) -> tuple[Rank, int, NodeId, NodeId]:
        """Less is better."""
        decode = self.decode
        return self.rank, decode.num_tokens, decode.node_id, self.prefill.node_id


def best_pair(prefills: Ranking, decodes: Ranking) -> RankedPair:
    """Return the best node of each ranking, whatever lies between them."""
    return _paired(prefills, min(prefills.keys), decodes, min(decodes.keys))


def best_of_hosts(
    hosts: Iterable[Host], prefills: Ranking, decodes: Ranking
) -> Iterator[RankedPair]:
    """Yield the best pair of each host that has nodes of both rankings."""
    first = prefills.keys_by_node()
    second = decodes.keys_by_node()
    for host in hosts:
        firsts = [first[node] for node in host.prefills if node in first]
        seconds = [second[node] for node in host.decodes if node in second]
        if firsts and seconds:
            yield _paired(prefills, min(firsts), decodes, min(seconds))


def all_pairs(prefills: Ranking, decodes: Ranking) -> Iterator[RankedPair]:
    """Yield all pairs, beginning with those of the best decode node."""
    firsts = sorted(prefills.keys)
    for second in sorted(decodes.keys):
        for first in firsts:
            yield _paired(prefills, first, decodes, second)


def _paired(
    prefills: Ranking, first: NodeKey, decodes: Ranking, second: NodeKey
) -> RankedPair:
    penalty = first[0]
    if (penalty, second[0]) != (NO_PENALTY, NO_PENALTY):
        avoided, suspects, full = map(add, penalty, second[0])
        penalty = (avoided, suspects, full)
    rank = penalty, first[1] + second[1] + HANDOFF_TOKENS
    return RankedPair(rank, prefills.node(first), decodes.node(second))
