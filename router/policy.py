"""Which nodes a leg goes to: the pair that works with the least cost, ties by load, then node id.

Pure: `core` asks for every leg and charges the chosen nodes at once. The policy knows loads, sizes,
what is cached where and which pairs fail, and nothing else about requests. Every cost is counted in
prompt tokens to compute (docs/decisions/0012), so that a cached prefix weighs as much as the queue
that it saves, and no more. A node with room comes before one without, whatever it has cached, and a
pair that can never work is never chosen. `choose` finds nothing only if no node in service is large
enough, or none can pair. If it names a node that is full, the leg waits, so no prompt is computed
that has no place to go.
"""

import math
from collections.abc import Callable, Collection, Iterator

import msgspec

from baton.protocol.blocks import blocks_needed
from baton.protocol.config import LocalPrefill
from baton.protocol.ids import NodeId
from baton.protocol.messages import Role
from baton.router.outputs import Path
from baton.router.registry import Charge, Node, Registry
from baton.router.request.events import Place, Placed

# How long an answer is taken to become before any has ended, and the weight of the newest one.
FIRST_OUTPUT_TOKENS = 256.0
OUTPUT_WEIGHT = 0.05
# A handoff takes as long as computing so many tokens; to read the KV of a token that decode lacks
# takes this part of computing one, on one host and between hosts.
HANDOFF_TOKENS = 64
NEAR_READ, FAR_READ = 1 / 32, 1 / 8
# A decode node refuses a prompt that it was to compute itself, because it had the rest cached, if
# it would have to compute more than so many times what the setting allows.
MISPREDICTION = 2

# Less is better: avoided, suspects, full, cost, load, id. The node itself is never compared.
Offer = tuple[bool, int, bool, float, int, NodeId, Node]
Flags = tuple[int, int, int, float]


class Decision(msgspec.Struct, frozen=True):
    """The chosen nodes, and what each of them is charged."""

    placed: Placed
    charges: tuple[tuple[NodeId, Charge], ...]
    is_fallback: bool = False  # decode computes the prompt because no pair works
    full: tuple[NodeId, ...] = ()  # those of the nodes that have no room for it now
    num_cached_tokens: int = 0  # at the node that computes the prompt, as far as is known

    @property
    def path(self) -> Path:
        if self.placed.prefill_node is None:
            return "local_prefill"
        return "prefill_only" if self.placed.decode_node is None else "disaggregated"


class CheapestPair:
    """Where no node has said what it has cached, the least loaded nodes are the cheapest."""

    def __init__(self, local_prefill: LocalPrefill, local_prefill_tokens: int) -> None:
        self._mode = local_prefill
        self._local_tokens = local_prefill_tokens
        self._output_tokens = FIRST_OUTPUT_TOKENS

    def learn(self, num_output_tokens: float) -> None:
        """Note how long one choice of an answer became."""
        self._output_tokens += OUTPUT_WEIGHT * (num_output_tokens - self._output_tokens)

    def charge_of(self, node: Node, place: Place) -> Charge:
        """Return what a leg is charged to a decode node that runs it."""
        return _decode_charge(node, place, _likely_tokens(place, math.ceil(self._output_tokens)))

    def choose(
        self, now_s: float, registry: Registry, place: Place, kept: Collection[NodeId] = ()
    ) -> Decision | None:
        """Return nodes for a leg; None if no node in service can take it.

        Those that are `kept` for other legs count as full.
        """
        search = _PairSearch(registry, place, math.ceil(self._output_tokens), kept)
        if self._mode == "always":
            return search.local(search.local_offers())
        near = self._short_offers(search, place)
        # If all decode nodes may, a handoff of so short a prompt can only cost more.
        if near and place.num_tokens <= min(self._local_tokens, HANDOFF_TOKENS):
            return search.local(near, max_uncached=MISPREDICTION * self._local_tokens)
        prefills = search.prefill_offers()
        if not place.wants_decode and prefills:
            return search.decision(min(prefills)[-1], None)
        pair = search.cheapest_pair(now_s, prefills)
        if near and (pair is None or min(near)[:4] <= pair.flags):
            return search.local(near, max_uncached=MISPREDICTION * self._local_tokens)
        if pair is None and self._mode == "auto":
            return search.local(search.local_offers(), is_fallback=True)
        # Without a way round, a pair that failed lately is better than none.
        pair = pair or next(search.possible_pairs(prefills), None)
        return None if pair is None else search.decision(pair.prefill, pair.decode)

    def _short_offers(self, search: "_PairSearch", place: Place) -> list[Offer]:
        """Return the decode nodes that lack so little of the prompt that they may compute it."""
        if self._mode != "auto" or not place.wants_decode or place.is_remote_only:
            return []
        if place.num_tokens <= self._local_tokens:
            return search.local_offers()
        some = search.lacking_at_most(self._local_tokens)
        return [offer for offer in search.local_offers() if offer[5] in some] if some else []


class _Pair(msgspec.Struct, frozen=True):
    flags: Flags
    prefill: Node
    decode: Node


class _PairSearch:
    """The search of nodes for one leg, whose sequences will probably grow by `growth` tokens."""

    def __init__(
        self, registry: Registry, place: Place, growth: int, kept: Collection[NodeId]
    ) -> None:
        self._registry, self._place, self._kept = registry, place, kept
        self._likely_tokens = _likely_tokens(place, growth)
        self._held = registry.caches.held(place.block_keys)
        # A sequence beside this one delays each of its steps by about the time of a prompt token.
        self._seat_tokens = max(1, self._likely_tokens - place.num_tokens)
        model = registry.model
        self._block_size = 1 if model is None else model.layout.block_size

    def lacking_at_most(self, num_tokens: int) -> set[NodeId]:
        """Return the nodes of both roles that have all but so many tokens cached."""
        least = max(1, -(-(self._place.num_tokens - num_tokens) // self._block_size))
        return {node for node, num_blocks in self._held.items() if num_blocks >= least}

    def num_cached(self, node: Node) -> int:
        """Return how many tokens of the prompt the node need not compute."""
        if not self._held:
            return 0
        # The last token is computed in any case, for its logits.
        most = (self._place.num_tokens - 1) // self._block_size
        return min(self._held.get(node.node_id, 0), most) * self._block_size

    def num_uncached(self, node: Node) -> int:
        return self._place.num_tokens - self.num_cached(node)

    # --- offers ---------------------------------------------------------------------------------

    def prefill_offers(self) -> list[Offer]:
        """Return what each prefill node would cost that could hold the prompt if it were empty."""
        return self._offers("prefill", self._blocks(self._place.num_tokens, 1), self._prefill_cost)

    def local_offers(self) -> list[Offer]:
        """Return what each decode node would cost that computes the prompt itself."""
        return self._decode_offers(self._local_cost)

    def _decode_offers(self, cost: Callable[[Node], float]) -> list[Offer]:
        num_blocks = self._blocks(self._place.num_final_tokens, self._place.num_choices)
        return self._offers("decode", num_blocks, cost)

    def _offers(self, role: Role, num_blocks: int, cost: Callable[[Node], float]) -> list[Offer]:
        """Return the offers of the nodes in service whose pools have so many blocks.

        Nobody shares a node with a suspect as long as there is another node.
        """
        avoid, kept = self._place.avoid, self._kept
        likely = self._blocks(self._likely_tokens, self._place.num_choices)
        return [
            (
                bool(avoid) and node.process in avoid,
                node.num_suspects,
                node.node_id in kept or not node.has_room(min(likely, pool // 2)),
                cost(node),
                node.num_tokens,
                node.node_id,
                node,
            )
            for node in self._registry.in_service(role)
            if num_blocks <= (pool := _pool(node))
        ]

    def _prefill_cost(self, node: Node) -> float:
        return node.num_tokens + self.num_uncached(node)

    def _local_cost(self, node: Node) -> float:
        return node.num_sequences * self._seat_tokens + self.num_uncached(node)

    def _near_cost(self, node: Node) -> float:
        return node.num_sequences * self._seat_tokens + NEAR_READ * self._num_missing(node)

    def _far_cost(self, node: Node) -> float:
        return node.num_sequences * self._seat_tokens + FAR_READ * self._num_missing(node)

    def _num_missing(self, node: Node) -> int:
        """Return how many tokens of KV the node would have to read."""
        num_held = self._held.get(node.node_id, 0) * self._block_size
        return max(0, self._place.num_tokens - num_held)

    # --- pairs ----------------------------------------------------------------------------------

    def cheapest_pair(self, now_s: float, prefills: list[Offer]) -> _Pair | None:
        """Return the cheapest pair that works; None if none does."""
        if not prefills:
            return None
        for pair in sorted(self._best_pairs(prefills), key=_pair_order):
            if self._works(now_s, pair):
                return pair
        some = self.possible_pairs(prefills)
        return next((pair for pair in some if self._works(now_s, pair)), None)

    def _best_pairs(self, prefills: list[Offer]) -> Iterator[_Pair]:
        """Yield pairs of which one is the cheapest of all, if all pairs work.

        The costs of two nodes do not depend on one another, except for the way between them.
        """
        hosts = self._registry.hosts()
        decodes = self._decode_offers(self._near_cost if hosts.is_one else self._far_cost)
        if decodes:
            yield _paired(min(prefills), min(decodes))
        if hosts.is_one or not hosts.shared:
            return
        firsts = {offer[5]: offer for offer in prefills}
        saving = FAR_READ - NEAR_READ
        seconds = {
            far[5]: (*far[:3], far[3] - saving * self._num_missing(far[6]), *far[4:])
            for far in decodes
        }
        for nodes in hosts.shared:
            first = [firsts[node] for node in nodes if node in firsts]
            second = [seconds[node] for node in nodes if node in seconds]
            if first and second:
                yield _paired(min(first), min(second))

    def possible_pairs(self, prefills: list[Offer]) -> Iterator[_Pair]:
        """Yield all pairs that can exchange blocks, those with the best decode node first."""
        decodes = sorted(self._decode_offers(self._far_cost))
        prefills = sorted(prefills)
        pairs = (_paired(first, second) for second in decodes for first in prefills)
        return (pair for pair in pairs if self._registry.can_pair(pair.prefill, pair.decode))

    def _works(self, now_s: float, pair: _Pair) -> bool:
        prefill, decode = pair.prefill, pair.decode
        allows = self._registry.pairs.allows(now_s, prefill.process, decode.process)
        return allows and self._registry.can_pair(prefill, decode)

    # --- decisions ------------------------------------------------------------------------------

    def local(
        self, offers: list[Offer], *, is_fallback: bool = False, max_uncached: int | None = None
    ) -> Decision | None:
        """Return the decision that the best of these nodes computes the prompt itself."""
        if not offers:
            return None
        decision = self.decision(None, min(offers)[-1])
        placed = msgspec.structs.replace(decision.placed, max_uncached_tokens=max_uncached)
        return msgspec.structs.replace(decision, placed=placed, is_fallback=is_fallback)

    def decision(self, prefill: Node | None, decode: Node | None) -> Decision:
        place = self._place
        given: list[tuple[Node, Charge]] = []
        if prefill is not None:
            charge = Charge(self.num_uncached(prefill), 1, place.is_suspect)
            given.append((prefill, charge))
        if decode is not None:
            given.append((decode, _decode_charge(decode, place, self._likely_tokens)))
        placed = Placed(
            place.key,
            None if prefill is None else prefill.node_id,
            None if decode is None else decode.node_id,
            {node.node_id: node.epoch for node, _ in given},
        )
        return Decision(
            placed,
            tuple((node.node_id, charge) for node, charge in given),
            full=tuple(
                node.node_id
                for node, charge in given
                if node.node_id in self._kept or not node.has_room(charge.num_blocks)
            ),
            num_cached_tokens=self.num_cached(given[0][0]),
        )

    def _blocks(self, num_final_tokens: int, num_choices: int) -> int:
        num_tokens = self._place.num_tokens
        return blocks_needed(self._block_size, num_tokens, num_final_tokens, num_choices)


def _paired(prefill: Offer, decode: Offer) -> _Pair:
    first, second = prefill, decode
    flags = (
        first[0] + second[0],
        first[1] + second[1],
        first[2] + second[2],
        first[3] + second[3] + HANDOFF_TOKENS,
    )
    return _Pair(flags, first[-1], second[-1])


def _pair_order(pair: _Pair) -> tuple[Flags, int, NodeId, NodeId]:
    return pair.flags, pair.decode.num_tokens, pair.decode.node_id, pair.prefill.node_id


def _likely_tokens(place: Place, growth: int) -> int:
    return min(place.num_final_tokens, place.num_tokens + growth)


def _decode_charge(node: Node, place: Place, likely_tokens: int) -> Charge:
    assert node.info is not None
    block_size, num_choices = node.info.layout.block_size, place.num_choices
    return Charge(
        place.num_tokens * num_choices,
        num_choices,
        place.is_suspect,
        # Many choices begin one by one, so they need not wait for an empty node.
        min(
            blocks_needed(block_size, place.num_tokens, likely_tokens, num_choices),
            _pool(node) // 2,
        ),
    )


def _pool(node: Node) -> int:
    assert node.info is not None
    return node.info.num_blocks
