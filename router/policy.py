"""Which nodes a leg goes to: the least loaded pair that works, ties by node id.

Pure: `core` asks for every leg and charges the chosen nodes at once. The policy knows loads, sizes
and which pairs fail, and nothing else about requests. The load of a prefill node is the number of
prompt tokens that it has yet to compute, that of a decode node the number of its sequences. A pair
that can never work is never chosen. `choose` finds nothing only if no node in service is large
enough, or none can pair. If it names a node that is full, the leg waits, so no prompt is computed
that has no place to go.
"""

import math
from collections.abc import Collection

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


class Decision(msgspec.Struct, frozen=True):
    """The chosen nodes, and what each of them is charged."""

    placed: Placed
    charges: tuple[tuple[NodeId, Charge], ...]
    is_fallback: bool = False  # decode computes the prompt because no pair works
    full: tuple[NodeId, ...] = ()  # those of the nodes that have no room for it now

    @property
    def path(self) -> Path:
        if self.placed.prefill_node is None:
            return "local_prefill"
        return "prefill_only" if self.placed.decode_node is None else "disaggregated"


class LeastLoaded:
    def __init__(self, local_prefill: LocalPrefill, local_prefill_tokens: int) -> None:
        self._mode = local_prefill
        self._local_tokens = local_prefill_tokens
        self._output_tokens = FIRST_OUTPUT_TOKENS

    def learn(self, num_output_tokens: float) -> None:
        """Note how long one choice of an answer became."""
        self._output_tokens += OUTPUT_WEIGHT * (num_output_tokens - self._output_tokens)

    def charge_of(self, node: Node, place: Place) -> Charge:
        """Return what a leg is charged to a decode node that runs it."""
        return _PairSearch(place, math.ceil(self._output_tokens), ()).decode_charge(node)

    def choose(
        self, now_s: float, registry: Registry, place: Place, kept: Collection[NodeId] = ()
    ) -> Decision | None:
        """Return nodes for a leg; None if no node in service can take it.

        Those that are `kept` for other legs count as full.
        """
        search = _PairSearch(place, math.ceil(self._output_tokens), kept)
        decodes = search.fitting(registry, "decode", place.num_final_tokens, place.num_choices)
        decode = min(decodes, key=search.decode_rank, default=None)
        if self._mode == "always":
            return search.local(decode)
        if self._mode == "auto" and place.num_tokens <= self._local_tokens and place.wants_decode:
            return search.local(decode)
        prefills = search.fitting(registry, "prefill", place.num_tokens, 1)
        prefill = min(prefills, key=search.prefill_rank, default=None)
        if not place.wants_decode and prefill is not None:
            return search.pair(prefill, None)
        if prefill is not None and decode is not None and _works(now_s, registry, prefill, decode):
            return search.pair(prefill, decode)
        decodes.sort(key=search.decode_rank)
        prefills.sort(key=search.prefill_rank)
        pairs = [(p, d) for d in decodes for p in prefills if registry.can_pair(p, d)]
        best = next((pair for pair in pairs if _works(now_s, registry, *pair)), None)
        if best is None and self._mode == "auto":
            return search.local(decode, is_fallback=True)
        # Without a way round, a pair that failed lately is better than none.
        best = best or next(iter(pairs), None)
        return None if best is None else search.pair(*best)


class _PairSearch:
    """The search of nodes for one leg, whose sequences will probably grow by `growth` tokens."""

    def __init__(self, place: Place, growth: int, kept: Collection[NodeId]) -> None:
        self._place, self._kept = place, kept
        self._likely_tokens = min(place.num_final_tokens, place.num_tokens + growth)

    def fitting(
        self, registry: Registry, role: Role, num_final_tokens: int, num_choices: int
    ) -> list[Node]:
        """Return the nodes in service whose pool could hold these tokens if it were empty."""
        return [
            node
            for node in registry.in_service(role)
            if _blocks(node, self._place.num_tokens, num_final_tokens, num_choices) <= _pool(node)
        ]

    def prefill_rank(self, node: Node) -> tuple[bool, int, int, NodeId]:
        """Rank the nodes that have not failed this request first, then those with less work.

        Nobody shares a node with a suspect as long as there is another node.
        """
        is_avoided = node.process in self._place.avoid
        return is_avoided, node.num_suspects, node.num_tokens, node.node_id

    def decode_rank(self, node: Node) -> tuple[bool, int, bool, int, int, NodeId]:
        is_avoided = node.process in self._place.avoid
        is_full = self._is_full(node, self.decode_charge(node))
        load = node.num_sequences, node.num_tokens
        return is_avoided, node.num_suspects, is_full, *load, node.node_id

    def local(self, decode: Node | None, *, is_fallback: bool = False) -> Decision | None:
        if decode is None:
            return None
        return self._decision(None, decode, is_fallback=is_fallback)

    def pair(self, prefill: Node, decode: Node | None) -> Decision:
        return self._decision(prefill, decode)

    def _decision(
        self, prefill: Node | None, decode: Node | None, *, is_fallback: bool = False
    ) -> Decision:
        place = self._place
        given: list[tuple[Node, Charge]] = []
        if prefill is not None:
            given.append((prefill, Charge(place.num_tokens, 1, place.is_suspect)))
        if decode is not None:
            given.append((decode, self.decode_charge(decode)))
        placed = Placed(
            place.key,
            None if prefill is None else prefill.node_id,
            None if decode is None else decode.node_id,
            {node.node_id: node.epoch for node, _ in given},
        )
        charges = tuple((node.node_id, charge) for node, charge in given)
        full = tuple(node.node_id for node, charge in given if self._is_full(node, charge))
        return Decision(placed, charges, is_fallback, full)

    def _is_full(self, node: Node, charge: Charge) -> bool:
        return node.node_id in self._kept or not node.has_room(charge)

    def decode_charge(self, node: Node) -> Charge:
        place = self._place
        blocks = _blocks(node, place.num_tokens, self._likely_tokens, place.num_choices)
        return Charge(
            place.num_tokens * place.num_choices,
            place.num_choices,
            place.is_suspect,
            # Many choices begin one by one, so they need not wait for an empty node.
            min(blocks, _pool(node) // 2),
        )


def _works(now_s: float, registry: Registry, prefill: Node, decode: Node) -> bool:
    allows = registry.pairs.allows(now_s, prefill.process, decode.process)
    return allows and registry.can_pair(prefill, decode)


def _pool(node: Node) -> int:
    assert node.info is not None
    return node.info.num_blocks


def _blocks(node: Node, num_tokens: int, num_final_tokens: int, num_choices: int) -> int:
    assert node.info is not None
    return blocks_needed(node.info.layout.block_size, num_tokens, num_final_tokens, num_choices)
