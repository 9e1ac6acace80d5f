"""The answers to an operator who drains a node. `core` calls this file, which is pure."""

from baton.protocol.ids import NodeId
from baton.protocol.messages import DrainState
from baton.router.registry import Registry


def drained(registry: Registry, node_id: NodeId) -> DrainState:
    """Give a node no more work. Return how far it is, or why it cannot be drained."""
    node = registry.node(node_id)
    if node is None:
        known = ", ".join(registry.node_ids) or "none"
        text = f"there is no node {node_id}; the nodes of this router: {known}"
        return DrainState(node_id, problem=text)
    if node.info is None:
        text = f"{node_id} is still starting: end its process instead of draining it"
        return DrainState(node_id, is_known=True, problem=text)
    registry.drains(node_id)
    num_running = node.load.num_running + node.load.num_waiting
    return DrainState(node_id, is_known=True, num_running=num_running)
