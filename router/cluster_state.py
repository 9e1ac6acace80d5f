"""What the cluster as a whole can do now: its health, its limits, whether it serves requests.

Pure; `core` asks. It reads the registry and the admission and changes neither.
"""

from baton.protocol.config import LocalPrefill
from baton.protocol.errors import Overloaded
from baton.router.admission import Admission, Limits
from baton.router.health import Health, NodeHealth, Status
from baton.router.registry import Registry


def can_serve(registry: Registry, mode: LocalPrefill) -> bool:
    """Return whether there are nodes for an ordinary request."""
    has_prefill = bool(registry.in_service("prefill"))
    return bool(registry.in_service("decode")) and (has_prefill or mode != "never")


def health_of(now_s: float, registry: Registry, mode: LocalPrefill, line: Admission) -> Health:
    nodes, pairs = registry.nodes_health(now_s), registry.pairs
    status, message = _status(registry, mode, nodes)
    failing = pairs.health(now_s)
    if status == "ready" and failing:
        status, message = "degraded", "handoffs of some pairs fail"
    failures = tuple((*pair, count) for pair, count in pairs.num_failures.items())
    return Health(
        status,
        nodes,
        line.num_inflight,
        line.num_queued,
        message,
        failing,
        failures,
        pairs.transfers(),
        registry.lost_nodes(now_s),
        registry.caches.num_gaps,
    )


def limits_of(registry: Registry, mode: LocalPrefill) -> Limits:
    """Return what a request must fit; raises `Overloaded` until a node has been ready."""
    model = registry.model
    if model is None:
        raise Overloaded("no node is ready yet", code="not_ready", retry_after_s=1.0)
    return Limits(
        model.max_model_len,
        model.vocab_size,
        model.layout.block_size,
        None if mode == "always" else registry.largest_pool("prefill"),
        registry.largest_pool("decode"),
    )


def _status(
    registry: Registry, mode: LocalPrefill, nodes: tuple[NodeHealth, ...]
) -> tuple[Status, str]:
    if registry.model is None:
        return "starting", "nodes are starting"
    if not can_serve(registry, mode):
        return "failed", "no node is in service"
    lacks_prefill = mode != "always" and not registry.in_service("prefill")
    if lacks_prefill or not all(node.state in ("ready", "degraded") for node in nodes):
        return "degraded", "some nodes are not in service"
    reasons = [node.reason for node in nodes if node.reason]
    return ("degraded", reasons[0]) if reasons else ("ready", "")
