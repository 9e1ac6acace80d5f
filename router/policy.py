"""Choose the nodes of an attempt: the working pair with the least cost, then least load, then id.

A cost counts prompt tokens to compute (docs/decisions/0012), so a cached prefix weighs as much as
the queue that it saves. A node with room comes before a full one, even if the full one has more
cached. `choose` returns None only if no node in service is large enough, or none can pair. If it
names a full node, the attempt waits, so no prompt is computed without a decode node to take it.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping

import msgspec

from baton.protocol.blocks import blocks_needed
from baton.protocol.config import LocalPrefill
from baton.protocol.ids import NodeId
from baton.protocol.messages import Role
from baton.router.outputs import Path
from baton.router.registry import Node, Registry, ReservedLoad
from baton.router.request import Place, Placed

# The assumed length of an answer before any has ended, and the weight of the newest one.
FIRST_OUTPUT_TOKENS = 256.0
OUTPUT_WEIGHT = 0.05
# A handoff takes as long as computing this many tokens. Reading the KV of a token takes this share
# of computing it, on one host and between hosts.
HANDOFF_TOKENS = 64
NEAR_READ, FAR_READ = 1 / 32, 1 / 8
# A decode node that was chosen because it had most of a prompt cached refuses the prompt if it
# would have to compute more than this many times what the setting allows.
MISPREDICTION = 2

# Less is better: avoided, suspects, full, cost, load, id. The node itself is never compared. A
# bid first assumes that its node has room, because checking takes long and the best node mostly
# has it.
Bid = tuple[bool, int, bool, float, int, NodeId, Node]
Flags = tuple[int, int, int, float]


class Decision(msgspec.Struct, frozen=True):
    """The chosen nodes and the load to reserve at each of them."""

    placed: Placed
    loads: tuple[tuple[NodeId, ReservedLoad], ...]
    is_fallback: bool = False  # decode computes the prompt because no pair works
    full: tuple[NodeId, ...] = ()  # the chosen nodes that have no room for it now
    num_cached_tokens: int = 0  # at the node that computes the prompt, as far as is known

    @property
    def path(self) -> Path:
        if self.placed.prefill_node is None:
            return "local_prefill"
        return "prefill_only" if self.placed.decode_node is None else "disaggregated"


class CheapestPair:
    """If no node has announced cached blocks, the least loaded nodes are the cheapest."""

    def __init__(self, local_prefill: LocalPrefill, local_prefill_tokens: int) -> None:
        self._mode = local_prefill
        self._local_tokens = local_prefill_tokens
        self._output_tokens = FIRST_OUTPUT_TOKENS

    def learn(self, num_output_tokens: float) -> None:
        """Note the length of one choice of an answer."""
        self._output_tokens += OUTPUT_WEIGHT * (num_output_tokens - self._output_tokens)

    def load_of(self, node: Node, place: Place) -> ReservedLoad:
        """Return the load of an attempt at a decode node that runs it."""
        return _decode_load(node, place, _likely_tokens(place, math.ceil(self._output_tokens)))

    def choose(
        self, now_s: float, registry: Registry, place: Place, kept: Collection[NodeId] = ()
    ) -> Decision | None:
        """Return nodes for a leg, or None if no node in service can take it.

        Nodes that are `kept` for other legs count as full.
        """
        search = _PairSearch(registry, place, math.ceil(self._output_tokens), kept)
        if self._mode == "always":
            return search.local(search.local_bids())
        near = self._short_bids(search, place)
        # If all decode nodes may compute it, a handoff of such a short prompt can only cost more.
        if near and place.num_tokens <= min(self._local_tokens, HANDOFF_TOKENS):
            return search.local(near, max_uncached=MISPREDICTION * self._local_tokens)
        prefills = search.prefill_bids()
        if not place.wants_decode and prefills:
            return search.decision(search.best(prefills)[-1], None)
        pair = search.cheapest_pair(now_s, prefills)
        if near and (pair is None or search.best(near)[:4] <= pair.flags):
            return search.local(near, max_uncached=MISPREDICTION * self._local_tokens)
        if pair is None and self._mode == "auto":
            return search.local(search.local_bids(), is_fallback=True)
        # Without an alternative, a pair that failed lately is better than none.
        pair = pair or next(search.possible_pairs(prefills), None)
        return None if pair is None else search.decision(pair.prefill, pair.decode)

    def _short_bids(self, search: "_PairSearch", place: Place) -> list[Bid]:
        """Return decode nodes that may compute the prompt, because they lack little of it."""
        if self._mode != "auto" or not place.wants_decode or place.is_remote_only:
            return []
        return search.local_bids(place.num_tokens - self._local_tokens)


class _Pair(msgspec.Struct, frozen=True):
    flags: Flags
    prefill: Node
    decode: Node


class _PairSearch:
    """The search for one leg's nodes. Its sequences will probably grow by `growth` tokens."""

    def __init__(
        self, registry: Registry, place: Place, growth: int, kept: Collection[NodeId]
    ) -> None:
        self._registry, self._place, self._kept = registry, place, kept
        self._likely_tokens = _likely_tokens(place, growth)
        # Another sequence in the batch delays each step by about the time of a prompt token.
        self._seat_tokens = max(1, self._likely_tokens - place.num_tokens)
        model = registry.model
        size = self._block_size = 1 if model is None else model.layout.block_size
        self._likely_blocks = self._blocks(self._likely_tokens, place.num_choices)
        self._held: dict[NodeId, int] = {}
        self._cached: dict[NodeId, int] = {}
        # The last token is always computed, for its logits.
        most = (place.num_tokens - 1) // size * size
        for num_blocks, nodes in registry.caches.held(place.block_keys).items():
            self._held.update(dict.fromkeys(nodes, num_blocks * size))
            self._cached.update(dict.fromkeys(nodes, min(num_blocks * size, most)))

    # --- bids -----------------------------------------------------------------------------------

    def prefill_bids(self) -> list[Bid]:
        """Return bids of the prefill nodes that could hold the prompt if they were empty."""
        nodes = self._large_enough("prefill", self._blocks(self._place.num_tokens, 1))
        return self._bids(nodes, [node.num_tokens for node in nodes], self._cached)

    def local_bids(self, least_held: int = 0) -> list[Bid]:
        """Return bids of the decode nodes that could compute the prompt themselves.

        Nodes that hold less than `least_held` tokens of the prompt make no bid.
        """
        held = self._held
        if least_held > 0 and not held:
            return []
        nodes = self._decodes()
        if least_held > 0:
            nodes = [node for node in nodes if held.get(node.node_id, 0) >= least_held]
        return self._bids(nodes, self._seats(nodes), self._cached)

    def _reading_bids(self, read: float) -> list[Bid]:
        """Return bids of the decode nodes if reading a token's KV costs `read`."""
        nodes = self._decodes()
        return self._bids(nodes, self._seats(nodes), self._held, read)

    def _seats(self, nodes: list[Node]) -> list[int]:
        return [node.num_sequences * self._seat_tokens for node in nodes]

    def _decodes(self) -> list[Node]:
        num_blocks = self._blocks(self._place.num_final_tokens, self._place.num_choices)
        return self._large_enough("decode", num_blocks)

    def _large_enough(self, role: Role, num_blocks: int) -> list[Node]:
        """Return the nodes in service whose pools have at least that many blocks."""
        return [node for node in self._registry.in_service(role) if _pool(node) >= num_blocks]

    def _bids(
        self, nodes: list[Node], waits: list[int], has: Mapping[NodeId, int], read: float = 1
    ) -> list[Bid]:
        """Return the nodes' bids: their waits, plus `read` for each token that they lack.

        No leg shares a node with a suspect while there is another node.
        """
        avoid, num_tokens = self._place.avoid, self._place.num_tokens
        return [
            (
                bool(avoid) and node.process in avoid,
                node.num_suspects,
                False,
                wait + read * (num_tokens - has.get(node.node_id, 0)),
                node.num_tokens,
                node.node_id,
                node,
            )
            for node, wait in zip(nodes, waits, strict=True)
        ]

    def best(self, bids: list[Bid]) -> Bid:
        """Return the best of these bids (at least one), with full nodes last."""
        first = min(bids)
        return first if self._has_room(first[-1]) else min(map(self._looked_at, bids))

    def _looked_at(self, bid: Bid) -> Bid:
        """Return a bid that says whether its node is full."""
        return (*bid[:2], not self._has_room(bid[-1]), *bid[3:])

    def _has_room(self, node: Node) -> bool:
        num_blocks = min(self._likely_blocks, _pool(node) // 2)
        return node.node_id not in self._kept and node.has_room(num_blocks)

    # --- pairs ----------------------------------------------------------------------------------

    def cheapest_pair(self, now_s: float, prefills: list[Bid]) -> _Pair | None:
        """Return the cheapest pair that works; None if none does."""
        if not prefills:
            return None
        # First ignore which nodes are full: if the best pair has room, it is the best of all.
        likely = min(
            self._best_pairs(prefills, min, only_least=True), key=_pair_order, default=None
        )
        if likely is None:
            return None
        if all(map(self._has_room, (likely.prefill, likely.decode))) and self._works(now_s, likely):
            return likely
        for pair in sorted(self._best_pairs(prefills, self.best), key=_pair_order):
            if self._works(now_s, pair):
                return pair
        some = self.possible_pairs(prefills)
        return next((pair for pair in some if self._works(now_s, pair)), None)

    def _best_pairs(
        self,
        prefills: list[Bid],
        best: Callable[[list[Bid]], Bid],
        *,
        only_least: bool = False,
    ) -> Iterator[_Pair]:
        """Yield the best pair of all nodes and that of each host; one of them is the cheapest.

        `best` takes one of several bids. The costs of two nodes are independent, except for the
        path between them. With `only_least`, hosts that cannot have the cheapest pair may be left
        out.
        """
        hosts = self._registry.hosts()
        decodes = self._reading_bids(NEAR_READ if hosts.is_one else FAR_READ)
        if not decodes:
            return
        first = best(prefills)
        pair = _paired(first, best(decodes))
        least_order = _pair_order(pair)
        yield pair
        if hosts.is_one or not hosts.shared:
            return
        firsts = {bid[5]: bid for bid in prefills}
        seconds = {bid[5]: bid for bid in self._reading_bids(NEAR_READ)}
        for host in hosts.shared:
            near = [seconds[node] for node in host.decodes if node in seconds]
            if not near:
                continue
            second = best(near)
            # No pair of this host costs less than one with the best prefill node of all would.
            bound = (_flags(first, second), second[4], second[5])
            if only_least and least_order < bound:
                continue
            if own := [firsts[node] for node in host.prefills if node in firsts]:
                pair = _paired(best(own), second)
                least_order = min(least_order, _pair_order(pair))
                yield pair

    def possible_pairs(self, prefills: list[Bid]) -> Iterator[_Pair]:
        """Yield all pairs that can exchange blocks, beginning with the best decode node's."""
        decodes = sorted(map(self._looked_at, self._reading_bids(FAR_READ)))
        prefills = sorted(map(self._looked_at, prefills))
        pairs = (_paired(first, second) for second in decodes for first in prefills)
        return (pair for pair in pairs if self._registry.can_pair(pair.prefill, pair.decode))

    def _works(self, now_s: float, pair: _Pair) -> bool:
        prefill, decode = pair.prefill, pair.decode
        allows = self._registry.pairs.allows(now_s, prefill.process, decode.process)
        return allows and self._registry.can_pair(prefill, decode)

    # --- decisions ------------------------------------------------------------------------------

    def local(
        self, bids: list[Bid], *, is_fallback: bool = False, max_uncached: int | None = None
    ) -> Decision | None:
        """Return the decision to let the best of these nodes compute the prompt itself."""
        if not bids:
            return None
        node = self.best(bids)[-1]
        return self.decision(None, node, is_fallback=is_fallback, max_uncached=max_uncached)

    def decision(
        self,
        prefill: Node | None,
        decode: Node | None,
        *,
        is_fallback: bool = False,
        max_uncached: int | None = None,
    ) -> Decision:
        place = self._place
        given: list[tuple[Node, ReservedLoad]] = []
        if prefill is not None:
            num_uncached = place.num_tokens - self._cached.get(prefill.node_id, 0)
            given.append((prefill, ReservedLoad(num_uncached, 1, place.is_suspect)))
        if decode is not None:
            given.append((decode, _decode_load(decode, place, self._likely_tokens)))
        placed = Placed(
            place.key,
            None if prefill is None else prefill.node_id,
            None if decode is None else decode.node_id,
            {node.node_id: node.epoch for node, _ in given},
            max_uncached,
        )
        return Decision(
            placed,
            tuple([(node.node_id, charge) for node, charge in given]),
            is_fallback,
            tuple([node.node_id for node, _ in given if not self._has_room(node)]),
            self._cached.get(given[0][0].node_id, 0),
        )

    def _blocks(self, num_final_tokens: int, num_choices: int) -> int:
        num_tokens = self._place.num_tokens
        return blocks_needed(self._block_size, num_tokens, num_final_tokens, num_choices)


def _paired(prefill: Bid, decode: Bid) -> _Pair:
    return _Pair(_flags(prefill, decode), prefill[-1], decode[-1])


def _flags(prefill: Bid, decode: Bid) -> Flags:
    return (
        prefill[0] + decode[0],
        prefill[1] + decode[1],
        prefill[2] + decode[2],
        prefill[3] + decode[3] + HANDOFF_TOKENS,
    )


def _pair_order(pair: _Pair) -> tuple[Flags, int, NodeId, NodeId]:
    return pair.flags, pair.decode.num_tokens, pair.decode.node_id, pair.prefill.node_id


def _likely_tokens(place: Place, growth: int) -> int:
    return min(place.num_final_tokens, place.num_tokens + growth)


def _decode_load(node: Node, place: Place, likely_tokens: int) -> ReservedLoad:
    assert node.info is not None
    block_size, num_choices = node.info.layout.block_size, place.num_choices
    return ReservedLoad(
        place.num_tokens * num_choices,
        num_choices,
        place.is_suspect,
        # Many choices start one by one, so they need not wait for an empty node.
        min(
            blocks_needed(block_size, place.num_tokens, likely_tokens, num_choices),
            _pool(node) // 2,
        ),
    )


def _pool(node: Node) -> int:
    assert node.info is not None
    return node.info.num_blocks
