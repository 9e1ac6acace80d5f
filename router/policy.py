"""Which nodes a leg goes to: the least loaded pair that works, ties by node id.

Pure: `core` asks for every leg and charges the chosen nodes at once. The policy knows loads, sizes
and which pairs fail, and nothing else about requests. The load of a prefill node is the number of
prompt tokens that it has yet to compute, that of a decode node the number of its sequences. A pair
that can never work is never chosen. Load never makes a leg wait here: `choose` finds nothing only
if no node in service is large enough, or none can pair.
"""

import msgspec

from baton.protocol.blocks import blocks_needed
from baton.protocol.config import LocalPrefill
from baton.protocol.ids import NodeId
from baton.protocol.messages import Role
from baton.router.outputs import Path
from baton.router.registry import Charge, Node, Registry
from baton.router.request.events import Place, Placed


class Decision(msgspec.Struct, frozen=True):
    """The chosen nodes, and what each of them is charged."""

    placed: Placed
    charges: tuple[tuple[NodeId, Charge], ...]
    is_fallback: bool = False  # decode computes the prompt because no pair works

    @property
    def path(self) -> Path:
        if self.placed.prefill_node is None:
            return "local_prefill"
        return "prefill_only" if self.placed.decode_node is None else "disaggregated"


class LeastLoaded:
    def __init__(self, local_prefill: LocalPrefill, local_prefill_tokens: int) -> None:
        self._mode = local_prefill
        self._local_tokens = local_prefill_tokens

    def choose(self, now_s: float, registry: Registry, place: Place) -> Decision | None:
        """Return nodes for a leg; None if no node in service can take it."""
        num_tokens = place.num_tokens
        decodes = _fitting(
            registry, "decode", num_tokens, place.num_final_tokens, place.num_choices
        )
        decode = min(decodes, key=lambda node: _decode_rank(node, place), default=None)
        if self._mode == "always":
            return _local(place, decode)
        if self._mode == "auto" and num_tokens <= self._local_tokens and place.wants_decode:
            return _local(place, decode)
        prefills = _fitting(registry, "prefill", num_tokens, num_tokens, 1)
        prefill = min(prefills, key=lambda node: _prefill_rank(node, place), default=None)
        if not place.wants_decode and prefill is not None:
            return _pair(place, prefill, None)
        if prefill is not None and decode is not None and _works(now_s, registry, prefill, decode):
            return _pair(place, prefill, decode)
        decodes.sort(key=lambda node: _decode_rank(node, place))
        prefills.sort(key=lambda node: _prefill_rank(node, place))
        pairs = [(p, d) for d in decodes for p in prefills if registry.can_pair(p, d)]
        best = next((pair for pair in pairs if _works(now_s, registry, *pair)), None)
        if best is None and self._mode == "auto":
            return _local(place, decode, is_fallback=True)
        # Without a way round, a pair that failed lately is better than none.
        best = best or next(iter(pairs), None)
        return None if best is None else _pair(place, *best)


def _works(now_s: float, registry: Registry, prefill: Node, decode: Node) -> bool:
    allows = registry.pairs.allows(now_s, prefill.process, decode.process)
    return allows and registry.can_pair(prefill, decode)


def _prefill_rank(node: Node, place: Place) -> tuple[bool, int, NodeId]:
    """Rank the nodes that have not failed this request first, then those with less work."""
    return node.process in place.avoid, node.num_tokens, node.node_id


def _decode_rank(node: Node, place: Place) -> tuple[bool, int, int, NodeId]:
    return node.process in place.avoid, node.num_sequences, node.num_tokens, node.node_id


def _fitting(
    registry: Registry, role: Role, num_tokens: int, num_final_tokens: int, num_choices: int
) -> list[Node]:
    """Return the nodes in service whose pool could hold these tokens if it were empty."""
    fitting: list[Node] = []
    for node in registry.in_service(role):
        assert node.info is not None
        block_size = node.info.layout.block_size
        needed = blocks_needed(block_size, num_tokens, num_final_tokens, num_choices)
        if needed <= node.info.num_blocks:
            fitting.append(node)
    return fitting


def _local(place: Place, decode: Node | None, *, is_fallback: bool = False) -> Decision | None:
    if decode is None:
        return None
    placed = Placed(place.key, None, decode.node_id, {decode.node_id: decode.epoch})
    charge = Charge(place.num_tokens * place.num_choices, place.num_choices)
    return Decision(placed, ((decode.node_id, charge),), is_fallback)


def _pair(place: Place, prefill: Node, decode: Node | None) -> Decision:
    nodes = [prefill] if decode is None else [prefill, decode]
    decode_id = None if decode is None else decode.node_id
    epochs = {node.node_id: node.epoch for node in nodes}
    placed = Placed(place.key, prefill.node_id, decode_id, epochs)
    charges = [(prefill.node_id, Charge(place.num_tokens, 1))]
    if decode is not None:
        charge = Charge(place.num_tokens * place.num_choices, place.num_choices)
        charges.append((decode.node_id, charge))
    return Decision(placed, tuple(charges))
