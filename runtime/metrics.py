"""Metrics for Prometheus: families, cheap counters, the page, and the families of nodes.

Families are tables of `Family`, from which docs/metrics.md is generated. Counts are plain numbers
without locks, because tokens are counted one by one on the thread that owns them; they become
samples only when the page is asked for. The metrics of a node are the same on a router's page and
on its own.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeVar

import msgspec
from prometheus_client import ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from baton.protocol.ids import NodeId
from baton.protocol.messages import Load, NodeInfo, Role, Totals

CONTENT_TYPE = CONTENT_TYPE_LATEST

Labels = tuple[str, ...]


class Family(msgspec.Struct, frozen=True):
    """One family of metrics. The samples of a counter have the ending `_total` besides `name`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: Labels = ()
    vllm: str = ""  # the family of vLLM with the same meaning

    @property
    def full_name(self) -> str:
        return f"{self.name}_total" if self.kind == "counter" else self.name


MAX_NEW = 4096  # values that wait in a histogram until they are counted together


class Histogram:
    """Values by their bounds. Of very many, each is appended to `new`, which costs the least."""

    __slots__ = ("bounds", "counts", "new", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0
        self.new: list[float] = []  # not counted yet

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def count_new(self) -> None:
        """Count what is in `new`. Whoever appends calls this for every `MAX_NEW` values."""
        values = sorted(self.new)
        self.new.clear()
        self.total += sum(values)
        num_below = 0
        for index, bound in enumerate(self.bounds):
            num_counted = num_below
            num_below = bisect_right(values, bound, num_counted)
            self.counts[index] += num_below - num_counted
        self.counts[-1] += len(values) - num_below

    def buckets(self) -> list[tuple[str, float]]:
        """Return the cumulative counts with their bounds, as Prometheus writes them."""
        self.count_new()
        found = []
        so_far = 0
        for bound, count in zip(
            (*map(str, self.bounds), "+Inf"), self.counts, strict=True
        ):
            so_far += count
            found.append((bound, float(so_far)))
        return found


Values = Sequence[tuple[Labels, float | Histogram]]
AnyLabels = TypeVar("AnyLabels", bound=Labels)


class Page(Collector):
    """The families of one process with their values, and the system's figures of the process.

    Every family gets the labels of `constant` as well.
    """

    def __init__(self, constant: Mapping[str, str]) -> None:
        self._names, self._texts = tuple(constant), tuple(constant.values())
        self._families: list[tuple[Family, Values]] = []

    def add(
        self,
        family: Family,
        values: Mapping[AnyLabels, float] | Mapping[AnyLabels, Histogram],
    ) -> None:
        self._families.append((family, list(values.items())))

    def collect(self) -> Iterator[Metric]:
        for family, values in self._families:
            yield self._metric(family, values)
        yield from ProcessCollector(registry=None).collect()

    def text(self) -> bytes:
        return generate_latest(self)

    def _metric(self, family: Family, values: Values) -> Metric:
        names = (*self._names, *family.labels)
        metric: Metric = _KINDS[family.kind](family.name, family.meaning, labels=names)
        for labels, value in values:
            texts = (*self._texts, *labels)
            if isinstance(value, Histogram):
                assert isinstance(metric, HistogramMetricFamily)
                buckets = value.buckets()
                metric.add_metric(texts, buckets, value.total)
            else:
                assert isinstance(metric, CounterMetricFamily | GaugeMetricFamily)
                metric.add_metric(texts, value)
        return metric


_KINDS = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


# A `degraded` node is ready, but no node of the other role can work with it. A `draining` node gets
# no new work and ends when it has none left.
NodeState = Literal["starting", "ready", "degraded", "draining", "silent", "stuck"]


class NodeHealth(msgspec.Struct, frozen=True):
    node_id: NodeId
    role: Role
    state: NodeState
    phase: str = ""  # of the start, with `done` of `total` complete
    done: int = 0
    total: int = 0
    load: Load = Load()  # as of the last heartbeat
    heartbeat_age_s: float = 0.0
    step_age_s: float = 0.0
    num_attempts: int = 0  # charged by this router
    num_tokens: int = 0  # of those attempts
    batch_invariant: bool = False  # a token's bits depend on its own sequence alone
    compute: str = ""  # equal for nodes that compute the same bits
    reason: str = ""  # why it is degraded
    totals: Totals = Totals()  # as of the last heartbeat
    dtype: str = ""
    device: str = ""
    transports: str = ""
    tensor_parallel: int = 0  # 0: not known yet
    features: tuple[str, ...] = ()
    num_known_blocks: int = 0  # of its prefix cache, as this router knows it

    def with_info(self, info: NodeInfo | None) -> "NodeHealth":
        """Return a copy with what the node has published about itself, if it has been ready."""
        if info is None:
            return self
        names = {name for rank in info.ranks for name in rank.metadata}
        return msgspec.structs.replace(
            self,
            batch_invariant=info.batch_invariant,
            compute=info.compute,
            dtype=info.facts.dtype,
            device=info.facts.device,
            transports="+".join(sorted(names)),
            tensor_parallel=len(info.ranks),
            features=info.facts.features,
        )


class LostNode(msgspec.Struct, frozen=True):
    """A node that was in service and is gone. The router remembers it for an hour at most."""

    node_id: NodeId
    role: Role
    lost_s: float  # since its last message


_NODE = ("node", "role")


def _usage(load: Load) -> float:
    return 1.0 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0


_Value = Callable[[NodeHealth], float]


def _gauge(
    name: str, value: _Value, meaning: str, vllm: str = ""
) -> tuple[Family, _Value]:
    return Family(name, "gauge", meaning, _NODE, vllm), value


def _counter(
    name: str, value: _Value, meaning: str, vllm: str = ""
) -> tuple[Family, _Value]:
    return Family(name, "counter", meaning, _NODE, vllm), value


_TABLE = (
    _gauge(
        "baton_node_up",
        lambda one: one.state not in ("silent", "stuck"),
        "1 while a node sends heartbeats and is not stuck, 0 for one that is silent, stuck or lost",
    ),
    _gauge(
        "baton_node_running_requests",
        lambda one: one.load.num_running,
        "Sequences (decode) or prompts (prefill) that the node is computing",
        "vllm:num_requests_running",
    ),
    _gauge(
        "baton_node_waiting_requests",
        lambda one: one.load.num_waiting,
        "Requests that wait on the node for KV blocks or a place in its steps",
        "vllm:num_requests_waiting",
    ),
    _gauge(
        "baton_kv_cache_usage_perc",
        lambda one: _usage(one.load),
        "Share of the KV blocks in use, 1 is full; merely cached blocks count as free",
        "vllm:kv_cache_usage_perc",
    ),
    _gauge(
        "baton_node_total_blocks",
        lambda one: one.load.total_blocks,
        "KV blocks in the pool",
    ),
    _gauge(
        "baton_node_free_blocks",
        lambda one: one.load.free_blocks,
        "KV blocks that are free or can be evicted",
    ),
    _gauge(
        "baton_node_cached_blocks",
        lambda one: one.load.cached_blocks,
        "KV blocks that the prefix cache holds",
    ),
    _gauge(
        "baton_node_quarantined_blocks",
        lambda one: one.load.quarantined_blocks,
        "KV blocks out of use because bytes of a read may still land in them",
    ),
    _counter(
        "baton_prefix_cache_queries",
        lambda one: one.totals.prefix_queried_tokens,
        "Tokens of prompts that were looked up in the prefix cache",
        "vllm:prefix_cache_queries",
    ),
    _counter(
        "baton_prefix_cache_hits",
        lambda one: one.totals.prefix_hit_tokens,
        "Tokens of prompts that the prefix cache held",
        "vllm:prefix_cache_hits",
    ),
    _counter(
        "baton_external_prefix_cache_hits",
        lambda one: one.totals.prefix_read_tokens,
        "Tokens of prompts whose blocks were read from another node that had them cached",
        "vllm:external_prefix_cache_hits",
    ),
    _counter(
        "baton_memory_prefix_cache_hits",
        lambda one: one.totals.memory_hit_tokens,
        "Tokens of prompts whose blocks were read from host memory (cache.kv_offloading_size)",
    ),
    _counter(
        "baton_folder_prefix_cache_hits",
        lambda one: one.totals.folder_hit_tokens,
        "Tokens of prompts whose blocks were read from cache.folder",
    ),
    _counter(
        "baton_prefetched_tokens",
        lambda one: one.totals.prefetched_tokens,
        "Tokens whose blocks were read from another node before a prompt needed them",
    ),
    _counter(
        "baton_prefix_read_failures",
        lambda one: one.totals.failed_prefix_reads,
        "Prompts that were computed although a tier or another node was asked for their first "
        "tokens",
    ),
    _counter(
        "baton_num_preemptions",
        lambda one: one.totals.preemptions,
        "Sequences that were sent back to the router because no KV block was left",
        "vllm:num_preemptions",
    ),
    _counter(
        "baton_spec_decode_num_draft_tokens",
        lambda one: one.totals.spec_decode_draft_tokens,
        "Tokens that speculative decoding guessed",
        "vllm:spec_decode_num_draft_tokens",
    ),
    _counter(
        "baton_spec_decode_num_accepted_tokens",
        lambda one: one.totals.spec_decode_accepted_tokens,
        "Tokens that speculative decoding guessed right",
        "vllm:spec_decode_num_accepted_tokens",
    ),
    _counter(
        "baton_node_prompt_tokens",
        lambda one: one.totals.prompt_tokens,
        "Prompt tokens that the node computed",
    ),
    _counter(
        "baton_node_generation_tokens",
        lambda one: one.totals.output_tokens,
        "Tokens that the node sampled",
    ),
    _counter("baton_node_steps", lambda one: one.totals.steps, "Steps of the model"),
    _counter(
        "baton_node_step_seconds",
        lambda one: one.totals.steps_s,
        "Seconds in which steps ran",
    ),
    _counter(
        "baton_node_kv_reads",
        lambda one: one.totals.reads,
        "Reads of KV blocks from prefill nodes",
    ),
    _counter(
        "baton_node_kv_read_bytes",
        lambda one: one.totals.read_bytes,
        "Bytes of those reads",
    ),
    _counter(
        "baton_node_kv_read_seconds",
        lambda one: one.totals.reads_s,
        "Seconds from the post to the end of each read, added up",
    ),
    _counter(
        "baton_node_kv_read_failures",
        lambda one: one.totals.failed_reads,
        "Reads that failed",
    ),
    _counter(
        "baton_node_kv_corrupt_reads",
        lambda one: one.totals.corrupt_reads,
        "Reads whose checksum was wrong (transfer.verify_kv)",
    ),
    _counter(
        "baton_node_leases_expired",
        lambda one: one.totals.leases_expired,
        "Handoffs whose blocks were taken back because decode did not renew the lease",
    ),
    _gauge(
        "baton_node_heartbeat_age_seconds",
        lambda one: one.heartbeat_age_s,
        "Seconds since the last heartbeat",
    ),
    _gauge(
        "baton_node_step_age_seconds",
        lambda one: one.step_age_s,
        "Seconds for which the oldest unfinished step has run, 0 without one",
    ),
)
_INFO = Family(
    "baton_node_info",
    "gauge",
    "What a node computes with; always 1",
    (*_NODE, "dtype", "device", "transports", "tensor_parallel", "features"),
)
_IN_SERVICE = Family(
    "baton_node_in_service",
    "gauge",
    "1 while that router gives the node work, 0 while it does not; on the page of the node alone",
    (*_NODE, "router"),
)
NODE_FAMILIES = (*(family for family, _ in _TABLE), _INFO, _IN_SERVICE)
# A lost node works on nothing, so these are 0. Its last counts would suggest that work is stuck.
_OF_LOST = (
    "baton_node_up",
    "baton_node_running_requests",
    "baton_node_waiting_requests",
)


def add_nodes(
    page: Page,
    nodes: Sequence[NodeHealth],
    lost: Iterable[LostNode] = (),
    in_service: Mapping[tuple[NodeId, Role, str], bool] = {},
) -> None:
    """Add the families of all these nodes to a page.

    `in_service` says, by node, role and router, whether that router gives the node work.
    """
    gone = {(one.node_id, one.role): 0.0 for one in lost}
    for family, value in _TABLE:
        values = {(one.node_id, one.role): float(value(one)) for one in nodes}
        page.add(family, values | gone if family.name in _OF_LOST else values)
    page.add(_INFO, {_info(one): 1.0 for one in nodes})
    page.add(_IN_SERVICE, {names: float(is_in) for names, is_in in in_service.items()})


def _info(one: NodeHealth) -> tuple[str, ...]:
    ranks = str(one.tensor_parallel or "")
    features = ",".join(one.features)
    return (
        one.node_id,
        one.role,
        one.dtype,
        one.device,
        one.transports,
        ranks,
        features,
    )
