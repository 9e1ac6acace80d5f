"""Which nodes a leg goes to: the least loaded of each role, ties by node id.

Pure: `core` asks for every leg and charges the chosen nodes at once. The policy knows loads and
sizes and nothing else about requests. The load of a prefill node is the number of prompt tokens
that it has yet to compute, that of a decode node the number of its sequences.
"""

from collections.abc import Sequence

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
    is_fallback: bool = False  # decode computes the prompt because no prefill node is ready

    @property
    def path(self) -> Path:
        if self.placed.prefill_node is None:
            return "local_prefill"
        return "prefill_only" if self.placed.decode_node is None else "disaggregated"


class LeastLoaded:
    def __init__(self, local_prefill: LocalPrefill, local_prefill_tokens: int) -> None:
        self._mode = local_prefill
        self._local_tokens = local_prefill_tokens

    def choose(self, registry: Registry, place: Place) -> Decision | None:
        """Return nodes for a leg; None if no node can take it now."""
        decode = self._decode_node(registry, place)
        prefill = self._prefill_node(registry, place)
        if self._mode == "always":
            return _local(place, decode)
        if not place.wants_decode and prefill is not None:
            return _pair(place, prefill, None)
        is_short = place.num_tokens <= self._local_tokens
        if self._mode == "auto" and is_short and place.wants_decode:
            return _local(place, decode)
        if prefill is None:
            return _local(place, decode, is_fallback=True) if self._mode == "auto" else None
        return None if decode is None else _pair(place, prefill, decode)

    def _prefill_node(self, registry: Registry, place: Place) -> Node | None:
        sizes = (place.num_tokens, place.num_tokens, 1)
        nodes = _preferred(_fitting(registry, "prefill", *sizes), place)
        return min(nodes, key=lambda n: (n.num_tokens, n.node_id), default=None)

    def _decode_node(self, registry: Registry, place: Place) -> Node | None:
        sizes = (place.num_tokens, place.num_final_tokens, place.num_choices)
        nodes = _preferred(_fitting(registry, "decode", *sizes), place)
        return min(nodes, key=lambda n: (n.num_sequences, n.num_tokens, n.node_id), default=None)


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


def _preferred(nodes: Sequence[Node], place: Place) -> Sequence[Node]:
    """Return the nodes that have not failed this request; all of them if there is no other."""
    return [node for node in nodes if node.node_id not in place.avoid] or nodes


def _local(place: Place, decode: Node | None, *, is_fallback: bool = False) -> Decision | None:
    if decode is None:
        return None
    placed = Placed(place.key, None, decode.node_id)
    charge = Charge(place.num_tokens * place.num_choices, place.num_choices)
    return Decision(placed, ((decode.node_id, charge),), is_fallback)


def _pair(place: Place, prefill: Node, decode: Node | None) -> Decision:
    placed = Placed(place.key, prefill.node_id, decode.node_id if decode is not None else None)
    charges = [(prefill.node_id, Charge(place.num_tokens, 1))]
    if decode is not None:
        charge = Charge(place.num_tokens * place.num_choices, place.num_choices)
        charges.append((decode.node_id, charge))
    return Decision(placed, tuple(charges))
