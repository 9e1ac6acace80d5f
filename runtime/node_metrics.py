"""The metrics of nodes: the same families on a router's page and on a node's own.

A router fills them from the beats of its nodes, a node that serves HTTP from its own counts. Pure.
"""

from collections.abc import Callable, Iterable, Mapping

import msgspec

from baton.protocol.messages import Load, NodeInfo, Role, Totals
from baton.runtime.exposition import Family, Page

_NODE = ("node", "role")


class NodeSample(msgspec.Struct, frozen=True):
    """What is known of one node at the time of a scrape."""

    node: str
    role: Role
    is_up: bool
    is_lost: bool = False  # nothing else is known of it now
    load: Load = Load()
    totals: Totals = Totals()
    beat_age_s: float = 0.0
    step_age_s: float = 0.0
    dtype: str = ""
    device: str = ""
    transports: str = ""
    tensor_parallel: int = 0  # 0 is not known
    features: str = ""
    routers: Mapping[str, bool] = {}  # whether each has the node in service, by the node's word

    def of(self, info: NodeInfo) -> "NodeSample":
        """Return the sample with what the node published of itself."""
        return msgspec.structs.replace(
            self,
            dtype=info.facts.dtype,
            device=info.facts.device,
            transports=transports_of(info),
            tensor_parallel=len(info.ranks),
            features=",".join(info.facts.features),
        )


def transports_of(info: NodeInfo) -> str:
    return "+".join(sorted({name for rank in info.ranks for name in rank.metadata}))


def _usage(load: Load) -> float:
    return 1.0 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0


_Value = Callable[[NodeSample], float]
_TABLE: tuple[tuple[Family, _Value], ...] = (
    (
        Family(
            "baton_node_up", "gauge",
            "1 while a node is heard and not stuck, 0 for a node that is silent, stuck or lost",
            _NODE,
        ),
        lambda one: one.is_up,
    ),
    (
        Family("baton_node_running_requests", "gauge",
               "Sequences (decode) or prompts (prefill) that the node computes", _NODE,
               "vllm:num_requests_running"),
        lambda one: one.load.num_running,
    ),
    (
        Family("baton_node_waiting_requests", "gauge",
               "Requests that wait on the node for KV blocks or a place in its steps", _NODE,
               "vllm:num_requests_waiting"),
        lambda one: one.load.num_waiting,
    ),
    (
        Family("baton_kv_cache_usage_perc", "gauge",
               "Share of the KV blocks in use, 1 is full; merely cached blocks count as free",
               _NODE, "vllm:kv_cache_usage_perc"),
        lambda one: _usage(one.load),
    ),
    (
        Family("baton_node_total_blocks", "gauge", "KV blocks in the pool", _NODE),
        lambda one: one.load.total_blocks,
    ),
    (
        Family("baton_node_free_blocks", "gauge", "KV blocks that are free or can be evicted",
               _NODE),
        lambda one: one.load.free_blocks,
    ),
    (
        Family("baton_node_cached_blocks", "gauge", "KV blocks that the prefix cache knows", _NODE),
        lambda one: one.load.cached_blocks,
    ),
    (
        Family("baton_node_quarantined_blocks", "gauge",
               "KV blocks out of use because bytes of a read may still land in them", _NODE),
        lambda one: one.load.quarantined_blocks,
    ),
    (
        Family("baton_prefix_cache_queries", "counter",
               "Tokens of prompts that were looked up in the prefix cache", _NODE,
               "vllm:prefix_cache_queries"),
        lambda one: one.totals.prefix_queried_tokens,
    ),
    (
        Family("baton_prefix_cache_hits", "counter",
               "Tokens of prompts that the prefix cache held", _NODE, "vllm:prefix_cache_hits"),
        lambda one: one.totals.prefix_hit_tokens,
    ),
    (
        Family("baton_num_preemptions", "counter",
               "Sequences that were sent back to the router because no KV block was left", _NODE,
               "vllm:num_preemptions"),
        lambda one: one.totals.preemptions,
    ),
    (
        Family("baton_node_prompt_tokens", "counter", "Prompt tokens that the node computed",
               _NODE),
        lambda one: one.totals.prompt_tokens,
    ),
    (
        Family("baton_node_generation_tokens", "counter", "Tokens that the node sampled", _NODE),
        lambda one: one.totals.output_tokens,
    ),
    (
        Family("baton_node_steps", "counter", "Steps of the model", _NODE),
        lambda one: one.totals.steps,
    ),
    (
        Family("baton_node_step_seconds", "counter", "Seconds in which steps ran", _NODE),
        lambda one: one.totals.steps_s,
    ),
    (
        Family("baton_node_kv_reads", "counter", "Reads of KV blocks from prefill nodes", _NODE),
        lambda one: one.totals.reads,
    ),
    (
        Family("baton_node_kv_read_bytes", "counter", "Bytes of those reads", _NODE),
        lambda one: one.totals.read_bytes,
    ),
    (
        Family("baton_node_kv_read_seconds", "counter",
               "Seconds from the post to the end of each read, added up", _NODE),
        lambda one: one.totals.reads_s,
    ),
    (
        Family("baton_node_kv_read_failures", "counter", "Reads that failed", _NODE),
        lambda one: one.totals.failed_reads,
    ),
    (
        Family("baton_node_kv_corrupt_reads", "counter",
               "Reads whose checksum was wrong (transfer.verify_kv)", _NODE),
        lambda one: one.totals.corrupt_reads,
    ),
    (
        Family("baton_node_leases_expired", "counter",
               "Handoffs whose blocks were taken back because decode did not renew the lease",
               _NODE),
        lambda one: one.totals.leases_expired,
    ),
    (
        Family("baton_node_beat_age_seconds", "gauge", "Seconds since the last beat", _NODE),
        lambda one: one.beat_age_s,
    ),
    (
        Family("baton_node_step_age_seconds", "gauge",
               "Seconds for which the oldest unfinished step has run, 0 without one", _NODE),
        lambda one: one.step_age_s,
    ),
)  # fmt: skip
_INFO = Family(
    "baton_node_info", "gauge", "What a node computes with; always 1",
    (*_NODE, "dtype", "device", "transports", "tensor_parallel", "features"),
)  # fmt: skip
_IN_SERVICE = Family(
    "baton_node_in_service", "gauge",
    "1 while that router gives the node work, 0 while it does not; on the page of the node alone",
    (*_NODE, "router"),
)  # fmt: skip
NODE_FAMILIES = (*(family for family, _ in _TABLE), _INFO, _IN_SERVICE)
# A lost node works on nothing; its last counts would only say that nothing moves.
_OF_LOST = ("baton_node_up", "baton_node_running_requests", "baton_node_waiting_requests")


def add_nodes(page: Page, samples: Iterable[NodeSample]) -> None:
    """Add the families of all these nodes to a page."""
    nodes = list(samples)
    known = [one for one in nodes if not one.is_lost]
    for family, value in _TABLE:
        shown = nodes if family.name in _OF_LOST else known
        page.add(family, {(one.node, one.role): float(value(one)) for one in shown})
    page.add(_INFO, {_info(one): 1.0 for one in known})
    standings = [(one, *item) for one in known for item in one.routers.items()]
    page.add(_IN_SERVICE, {(n.node, n.role, name): float(is_in) for n, name, is_in in standings})


def _info(one: NodeSample) -> tuple[str, ...]:
    ranks = str(one.tensor_parallel or "")
    return (one.node, one.role, one.dtype, one.device, one.transports, ranks, one.features)
