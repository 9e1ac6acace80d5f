"""The metrics of the router: HTTP answers, requests, tokens, latencies and the load of the nodes.

`handlers` and `app` count, `/metrics` renders the counts and `main` logs a line of them from time
to time. Tokens are counted in a plain integer, because it happens once per token.
"""

from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from baton.protocol.errors import BatonError
from baton.protocol.ids import NodeId
from baton.router.health import Health
from baton.router.http.answers import RETRY_STATUSES
from baton.router.outputs import RequestMetrics

CONTENT_TYPE = CONTENT_TYPE_LATEST
# From the gap between two tokens up to a long prompt that waits in a queue.
BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
_STAGES = ("router_queue", "queue", "prefill", "transfer", "decode_queue", "first_step")


class HttpMetrics:
    """The metrics of one router, in a registry of its own: two routers can share a process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.num_requests = 0  # those that have ended
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self._num_rendered_tokens = 0
        answers = self._counter("http_answers", "HTTP answers by route and status", "route status")
        requests = self._counter("requests", "Ended requests by path and outcome", "path outcome")
        # Finding a counter by its labels takes longer than counting.
        self._answers = cache(answers.labels)
        refusals = self._counter("refusals", "Answers that ask to try again later", "status code")
        self._refusals = cache(refusals.labels)
        self._requests = cache(requests.labels)
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of ended prompts")
        self._cached_tokens = self._counter(
            "cached_prompt_tokens", "Prompt tokens that were in a prefix cache"
        )
        self._output_tokens = self._counter("output_tokens", "Tokens handed out")
        self._retries = self._counter("retries", "Attempts after a loss before the first token")
        self._resumes = self._counter("resumes", "Sequences that went on at another node")
        self._transfer_failures = self._counter(
            "transfer_failures", "Handoffs that failed, by pair of nodes", "prefill decode"
        )
        self._rendered_failures: dict[tuple[NodeId, NodeId], int] = {}
        self._transfer_bytes = self._counter(
            "transfer_bytes", "KV bytes moved from prefill to decode nodes"
        )
        self._first = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token handed out"
        )
        self._per_token = self._histogram(
            "time_per_output_token_seconds",
            "Time per token after the first, of requests with one choice",
        )
        self._e2e = self._histogram(
            "request_seconds", "From arrival to the end, of requests that had tokens"
        )
        stages = self._histogram("stage_seconds", "Stages of a request; see docs/api.md", "stage")
        self._stages = {f"{stage}_s": stages.labels(stage) for stage in _STAGES}
        self._running = self._gauge("running_requests", "Requests that have nodes")
        self._queued = self._gauge("queued_requests", "Requests that wait for nodes")
        self._nodes = self._gauge("nodes", "Nodes by role and state", "role state")
        self._free = self._gauge(
            "node_free_blocks", "KV blocks that are free or can be evicted", "node"
        )
        self._total = self._gauge("node_total_blocks", "KV blocks in the pool", "node")

    def answered(self, route: str, status: int) -> None:
        """Count an HTTP answer. `route` is a pattern of ours, never what a client sent."""
        self._answers(route, status).inc()

    def failed(self, error: BatonError) -> None:
        """Count an error that a client got, as a status or as an event, if it says to try again."""
        if error.http_status in RETRY_STATUSES:
            self._refusals(error.http_status, error.code).inc()

    def ended(self, metrics: RequestMetrics, outcome: str, num_choices: int) -> None:
        """Count the end of one request of the router; an HTTP request has one per prompt."""
        self.num_requests += 1
        self.num_prompt_tokens += metrics.num_prompt_tokens
        self._requests(metrics.path or "none", outcome).inc()
        self._prompt_tokens.inc(metrics.num_prompt_tokens)
        self._cached_tokens.inc(metrics.num_cached_tokens)
        self._transfer_bytes.inc(metrics.transfer_bytes)
        self._retries.inc(metrics.num_retries)
        self._resumes.inc(metrics.num_resumes)
        first_s, all_s = metrics.time_to_first_token_s, metrics.e2e_s
        if first_s is None or all_s is None:
            return
        self._first.observe(first_s)
        self._e2e.observe(all_s)
        if num_choices == 1 and metrics.num_output_tokens > 1:
            self._per_token.observe((all_s - first_s) / (metrics.num_output_tokens - 1))
        for name, stage in self._stages.items():
            stage.observe(getattr(metrics, name))

    def render(self, health: Health) -> bytes:
        """Return the text that a Prometheus server scrapes."""
        self._output_tokens.inc(self.num_output_tokens - self._num_rendered_tokens)
        self._num_rendered_tokens = self.num_output_tokens
        self._running.set(health.num_running)
        self._queued.set(health.num_queued)
        for gauge in (self._nodes, self._free, self._total):
            gauge.clear()
        for node in health.nodes:
            self._nodes.labels(node.role, node.state).inc()
            self._free.labels(node.node_id).set(node.load.free_blocks)
            self._total.labels(node.node_id).set(node.load.total_blocks)
        for prefill, decode, count in health.transfer_failures:
            before = self._rendered_failures.get((prefill, decode), 0)
            new = count - before if count >= before else count  # it starts anew when forgotten
            self._transfer_failures.labels(prefill, decode).inc(new)
            self._rendered_failures[prefill, decode] = count
        return generate_latest(self._registry)

    def _counter(self, name: str, description: str, labels: str = "") -> Counter:
        return Counter(f"baton_{name}", description, labels.split(), registry=self._registry)

    def _gauge(self, name: str, description: str, labels: str = "") -> Gauge:
        return Gauge(f"baton_{name}", description, labels.split(), registry=self._registry)

    def _histogram(self, name: str, description: str, labels: str = "") -> Histogram:
        return Histogram(
            f"baton_{name}",
            description,
            labels.split(),
            registry=self._registry,
            buckets=BUCKETS_S,
        )


class StatsLine:
    """Makes the lines of the log that sum up what happened since the last one."""

    def __init__(self, metrics: HttpMetrics) -> None:
        self._metrics = metrics
        self._last = (0, 0, 0)

    def take(self, interval_s: float, health: Health) -> dict[str, object] | None:
        """Return the fields of the next line; None if nothing happened."""
        now = self._metrics
        counts = (now.num_requests, now.num_prompt_tokens, now.num_output_tokens)
        news = [count - last for count, last in zip(counts, self._last, strict=True)]
        self._last = counts
        if not any(news) and not health.num_running and not health.num_queued:
            return None
        return {
            "running": health.num_running,
            "queued": health.num_queued,
            "ended": news[0],
            "prompt_tokens_per_s": round(news[1] / interval_s, 1),
            "output_tokens_per_s": round(news[2] / interval_s, 1),
            "nodes_ready": sum(node.state == "ready" for node in health.nodes),
            "nodes": len(health.nodes),
        }
