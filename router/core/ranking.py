"""Order nodes, and pairs of nodes, by what an attempt would cost there.

There may be a thousand nodes, so a decision looks at few of them. Nodes that have equally much of
the prompt differ only in their loads, by which the registry keeps them in order.
"""

from collections.abc import Callable, Iterable, Iterator

import msgspec

from baton.protocol.ids import NodeId
from baton.protocol.messages import Role
from baton.router.core.cache_index import NodeMask
from baton.router.core.pair_health import Host, LoadOrder
from baton.router.core.registry import Node, Registry

# A handoff takes as long as computing this many tokens.
HANDOFF_TOKENS = 64
# Less is better, and comes before any cost: avoided, suspects, full.
Penalty = tuple[int, int, int]
NO_PENALTY: Penalty = (0, 0, 0)
Rank = tuple[Penalty, float]  # with the cost
# A rank, the tokens of attempts that the node has, and its id.
NodeKey = tuple[Penalty, float, int, NodeId]


class Group(msgspec.Struct, frozen=True, gc=False):
    """Nodes where an attempt costs equally much, but for their loads."""

    nodes: NodeMask
    cost: float


class Ranking:
    """What an attempt would cost at nodes of a role, which differ by what they have of the prompt.

    `groups` have no node in common. Each unit of a node's load costs `load_tokens`.
    """

    __slots__ = ("_costs", "_groups", "_load_tokens", "_order", "_penalty", "_registry")

    def __init__(
        self,
        registry: Registry,
        role: Role,
        groups: Iterable[Group],
        load_tokens: int,
        penalty: Callable[[Node], Penalty],
    ) -> None:
        self._registry = registry
        self._order = registry.by_load(role)
        self._load_tokens = load_tokens
        self._penalty = penalty
        self._groups: list[Group] = []
        # Those of nodes in small groups.
        self._costs: dict[NodeId, float] = {}
        for group in groups:
            # Of many nodes, one comes soon in the order. Few are looked at one by one.
            if group.nodes.bit_count() ** 2 > len(self._order.keys):
                self._groups.append(group)
            else:
                names = registry.bits.nodes_in(group.nodes)
                self._costs.update(dict.fromkeys(names, group.cost))

    def __bool__(self) -> bool:
        return bool(self._groups or self._costs)

    def best(self) -> NodeKey | None:
        """Return the best node; None if there is none."""
        keys = [self._key(name, cost) for name, cost in self._costs.items()]
        keys += self._best_of_groups(self._order)
        return min(keys, default=None)

    def best_rank(self) -> Rank:
        best = self.best()
        assert best is not None, "a ranking has a node"
        return best[:2]

    def best_of(self, order: LoadOrder) -> NodeKey | None:
        """Return the best node of those in an order; None if there is none."""
        costs = self._costs
        names = [key[2] for key in order.keys if key[2] in costs]
        keys = [self._key(name, costs[name]) for name in names]
        keys += self._best_of_groups(order)
        return min(keys, default=None)

    def bound(self, order: LoadOrder) -> tuple[float, int, NodeId] | None:
        """Return what no node in an order is better than; None if none of them is ranked."""
        groups = self._groups
        if self._costs or len(groups) > 1:
            groups = [group for group in groups if group.nodes & order.nodes]
        costs = [group.cost for group in groups]
        if self._costs:
            names = [key[2] for key in order.keys if key[2] in self._costs]
            costs += [self._costs[name] for name in names]
        if not costs:
            return None
        load, num_tokens, name = order.keys[0]
        return load * self._load_tokens + min(costs), num_tokens, name

    def keys(self) -> list[NodeKey]:
        """Return the keys of all nodes, the best first."""
        keys = [self._key(name, cost) for name, cost in self._costs.items()]
        for group in self._groups:
            names = self._registry.bits.nodes_in(group.nodes)
            keys += [self._key(name, group.cost) for name in names]
        return sorted(keys)

    def _best_of_groups(self, order: LoadOrder) -> list[NodeKey]:
        """Return the best node of each large group that is in this order."""
        keys = []
        for group in self._groups:
            if members := group.nodes & order.nodes:
                keys.append(self._key(self._first(members, order), group.cost))
        return keys

    def _first(self, members: NodeMask, order: LoadOrder) -> NodeId:
        """Return the least loaded of the nodes with the least penalty."""
        found: NodeId | None = None
        least: Penalty | None = None
        node_of = self._registry.node
        for _, _, name in order.keys:
            node = node_of(name)
            if node is None or not node.bit & members:
                continue
            penalty = self._penalty(node)
            if least is None or penalty < least:
                found = name
                least = penalty
                if penalty == NO_PENALTY:
                    break
        assert found is not None, "the order has the members"
        return found

    def _key(self, name: NodeId, cost: float) -> NodeKey:
        node = self._registry.node(name)
        assert node is not None, "nodes that are ranked are in service"
        load, num_tokens, _ = node.load_key
        return self._penalty(node), load * self._load_tokens + cost, num_tokens, name


class RankedPair(msgspec.Struct, frozen=True):
    """A prefill and a decode node. The cost in its rank includes that of the handoff."""

    rank: Rank
    num_tokens: int  # of attempts that the decode node has
    decode: NodeId
    prefill: NodeId

    @property
    def order(self) -> tuple[Rank, int, NodeId, NodeId]:
        """Less is better."""
        return self.rank, self.num_tokens, self.decode, self.prefill


def best_pair(prefills: Ranking, decodes: Ranking) -> RankedPair | None:
    """Return the best node of each ranking, whatever lies between them."""
    return _paired(prefills.best(), decodes.best())


def best_of_hosts(
    hosts: Iterable[Host], prefills: Ranking, decodes: Ranking
) -> Iterator[RankedPair]:
    """Yield the best pair of each host that has nodes of both rankings."""
    for host in hosts:
        pair = _paired(prefills.best_of(host.prefills), decodes.best_of(host.decodes))
        if pair is not None:
            yield pair


def better_of_hosts(
    hosts: Iterable[Host], prefills: Ranking, decodes: Ranking, best: RankedPair
) -> RankedPair:
    """Return the best pair of any host if it is better than `best`, which is returned otherwise.

    A host is passed over if its nodes with the least load could not be better.
    """
    order = best.order
    # No pair has less, because it comes before the cost.
    penalty = best.rank[0]
    for host in hosts:
        first = prefills.bound(host.prefills)
        second = decodes.bound(host.decodes)
        if first is None or second is None:
            continue
        cost = first[0] + second[0] + HANDOFF_TOKENS
        if ((penalty, cost), second[1], second[2]) > order:
            continue
        pair = _paired(prefills.best_of(host.prefills), decodes.best_of(host.decodes))
        if pair is not None and pair.order < order:
            best = pair
            order = pair.order
    return best


def all_pairs(prefills: Ranking, decodes: Ranking) -> Iterator[RankedPair]:
    """Yield all pairs, beginning with those of the best decode node."""
    firsts = prefills.keys()
    for second in decodes.keys():  # noqa: SIM118, not a mapping
        for first in firsts:
            pair = _paired(first, second)
            assert pair is not None
            yield pair


def _paired(first: NodeKey | None, second: NodeKey | None) -> RankedPair | None:
    if first is None or second is None:
        return None
    avoided, suspects, full = first[0]
    more_avoided, more_suspects, more_full = second[0]
    penalty = avoided + more_avoided, suspects + more_suspects, full + more_full
    rank = penalty, first[1] + second[1] + HANDOFF_TOKENS
    return RankedPair(rank, second[2], second[3], first[3])
