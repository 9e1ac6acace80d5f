"""A router's report on its cluster and on the model that it serves, over HTTP and in Python."""

from typing import Literal

import msgspec

from baton.protocol.config import LocalPrefill
from baton.protocol.errors import Overloaded
from baton.protocol.ids import NodeId
from baton.protocol.messages import Role
from baton.protocol.pooling import ModelTasks
from baton.router.core.admission import ROLES, Admission, Limits
from baton.router.core.pair_health import PairTransfers
from baton.router.core.registry import Node, Registry
from baton.runtime.metrics import LostNode, NodeHealth

# A `draining` router finishes its requests and takes no new ones.
Status = Literal["starting", "ready", "degraded", "draining", "failed"]


class ServedModel(msgspec.Struct, frozen=True):
    """The model that the nodes serve, as the first ready node described it."""

    name: str  # as responses show it
    path: str
    fingerprint: str
    layout_fingerprint: str
    # Less than the model's limit if no pool could hold such a sequence.
    max_model_len: int
    vocab_size: int
    block_size: int
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = ""
    lora_modules: tuple[str, ...] = ()  # the names of the adapters of the settings
    # The names in requests of those of run time, by name.
    run_time_loras: dict[str, str] = {}
    sampling: dict[str, object] = {}  # the default of HTTP requests
    other_names: tuple[str, ...] = ()  # by which clients may ask for it, too
    tasks: ModelTasks = ModelTasks()


class Health(msgspec.Struct, frozen=True):
    """`degraded` means that some node or pair does not work. Requests are served if `can_serve`."""

    status: Status
    nodes: tuple[NodeHealth, ...]
    num_running: int  # requests that have nodes
    num_queued: int  # requests that wait for nodes
    message: str = ""
    pairs: tuple[PairTransfers, ...] = ()  # pairs whose handoffs fail
    transfers: tuple[PairTransfers, ...] = ()  # all handoffs by pair, since the start
    lost: tuple[LostNode, ...] = ()
    # Gaps in the nodes' announcements of cached blocks, since the start.
    num_cache_gaps: int = 0
    # Since nodes last made progress with the request that waits longest.
    oldest_wait_s: float = 0.0
    # Requests by the role that has no room for them.
    num_waiting_for: dict[Role, int] = {}
    # The share of its room that a node in service has given away.
    busy: dict[NodeId, float] = {}

    @property
    def can_serve(self) -> bool:
        return self.status in ("ready", "degraded")


def can_serve(
    registry: Registry, mode: LocalPrefill, *, is_pooled: bool = False
) -> bool:
    """Return whether there are nodes for an ordinary request, or for a prompt to pool."""
    has_prefill = bool(registry.in_service("prefill"))
    if is_pooled:
        return has_prefill
    return bool(registry.in_service("decode")) and (has_prefill or mode != "never")


def health_of(
    now_s: float,
    registry: Registry,
    mode: LocalPrefill,
    queue: Admission,
    oldest_wait_s: float,
) -> Health:
    nodes = nodes_health(now_s, registry)
    transfers = registry.pairs.transfers(now_s)
    status, message = _status(registry, mode, nodes)
    failing = tuple(one for one in transfers if one.reason)
    if status == "ready" and failing:
        status = "degraded"
        message = "handoffs between some pairs of nodes fail"
    return Health(
        status,
        nodes,
        queue.num_inflight,
        queue.num_queued,
        message,
        failing,
        transfers,
        registry.lost_nodes(now_s),
        registry.caches.num_gaps,
        oldest_wait_s,
        queue.num_waiting_for(),
        {
            node.node_id: node.busy
            for role in ROLES
            for node in registry.in_service(role)
        },
    )


def nodes_health(now_s: float, registry: Registry) -> tuple[NodeHealth, ...]:
    """Return the state of each node, in order of their ids."""
    return tuple(_health_of_node(now_s, registry, node) for node in registry.nodes)


def limits_of(registry: Registry, mode: LocalPrefill) -> Limits:
    """Return the limits of a request. Raises `Overloaded` until a node has been ready."""
    model = registry.model
    if model is None:
        raise Overloaded("no node is ready yet", code="not_ready", retry_after_s=1.0)
    return Limits(
        model.max_model_len,
        model.vocab_size,
        model.layout.block_size,
        None if mode == "always" else registry.largest_pool("prefill"),
        registry.largest_pool("decode"),
        model.layout.state_blocks,
    )


def _status(
    registry: Registry, mode: LocalPrefill, nodes: tuple[NodeHealth, ...]
) -> tuple[Status, str]:
    if registry.model is None:
        return "starting", "nodes are starting"
    tasks = registry.model.facts.tasks
    has_pooling = tasks.pools and can_serve(registry, mode, is_pooled=True)
    if not has_pooling and not (tasks.generates and can_serve(registry, mode)):
        return "failed", "no node is in service"
    if tasks.generates and not registry.in_service("decode"):
        return "degraded", "no decode node is in service, so no tokens can be generated"
    lacks_prefill = mode != "always" and not registry.in_service("prefill")
    if lacks_prefill or not all(node.state in ("ready", "degraded") for node in nodes):
        return "degraded", "some nodes are not in service"
    reasons = [node.reason for node in nodes if node.reason]
    return ("degraded", reasons[0]) if reasons else ("ready", "")


def _health_of_node(now_s: float, registry: Registry, node: Node) -> NodeHealth:
    lack = _lack_of(now_s, registry, node)
    return NodeHealth(
        node.node_id,
        node.role,
        "degraded" if lack else node.state,
        node.phase,
        node.done,
        node.total,
        node.load,
        max(0.0, now_s - node.heard_s),
        node.step_age_s,
        len(node.reserved),
        node.num_tokens,
        reason=lack,
        totals=node.totals,
        num_known_blocks=registry.caches.num_blocks(node.node_id),
    ).with_info(node.info)


def _lack_of(now_s: float, registry: Registry, node: Node) -> str:
    """Return why a ready node is slow, or has no partner although there are nodes for it."""
    silent_s = now_s - node.heard_s
    if node.state == "ready" and silent_s > registry.heartbeat_timeout_s:
        return f"{node.node_id} has been silent for {silent_s:.0f} s, as this router stood still"
    others = registry.in_service("decode" if node.role == "prefill" else "prefill")
    if node.state != "ready" or not others:
        return ""
    for other in others:
        prefill, decode = (node, other) if node.role == "prefill" else (other, node)
        reason = prefill.obstacles.get(decode.node_id) or registry.pairs.reason(
            now_s, prefill.process, decode.process
        )
        if decode.node_id in prefill.unreachable:
            reason = f"{prefill.node_id} cannot reach {decode.node_id}"
        if not reason:
            return ""
    return f"no {others[0].role} node can work with it: {reason}"
