"""The metrics of the router: HTTP answers, requests, tokens, latencies and the load of the nodes.

`handlers` and `app` count, `/metrics` renders the counts, and `main` logs a line of them at
intervals. Everything that happens once per token or per request is counted in plain numbers.
"""

from collections import Counter

from baton.protocol.errors import BatonError
from baton.router.health import Health, ServedModel
from baton.router.http import metric_families as families
from baton.router.http.responses import RETRY_STATUSES
from baton.router.outputs import RequestMetrics
from baton.runtime.metrics import Histogram, Page, add_nodes

# From a prompt of a few tokens up to a long one that waits in a queue.
LATENCY_BUCKETS_S = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 320.0, 640.0,
)  # fmt: skip
# The bounds are close together around the usual targets for the time per token.
TOKEN_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.075, 0.1,
    0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
STAGE_BUCKETS_S = (0.0005, 0.001, 0.0025, *LATENCY_BUCKETS_S)
LENGTH_BUCKETS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000,
)  # fmt: skip
STAGES = ("router_queue", "queue", "prefill", "transfer", "exposed", "decode_queue", "first_step")
# Nodes choose the codes of their failures, so the number of codes is bounded here.
MAX_CODES = 64
OTHER_CODES = "other"


class HttpMetrics:
    """The metrics of one router, without globals, because two routers can share a process."""

    def __init__(self, model_name: str = "", version: str = "", router: str = "") -> None:
        """Label every value with `router`, the name of a router that shares its port."""
        self.num_requests = 0  # requests that have ended
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self.num_predicted_tokens = 0
        self.num_mispredicted_tokens = 0
        self.token_gaps = Histogram(TOKEN_BUCKETS_S)
        self._model_name = model_name  # until a node has been ready
        self._version = version
        self._router = router
        self._answers: Counter[tuple[str, str]] = Counter()
        self._refusals: Counter[tuple[str, str]] = Counter()
        self._requests: Counter[tuple[str, str]] = Counter()
        self._codes: set[str] = set()
        self._successes: Counter[tuple[str]] = Counter()
        self._retries: Counter[tuple[str]] = Counter()
        self._resumes: Counter[tuple[str]] = Counter()
        self._first, self._e2e, self._queue, self._prefill, self._decode, self._inference = (
            Histogram(LATENCY_BUCKETS_S) for _ in range(6)
        )
        self._per_token = Histogram(TOKEN_BUCKETS_S)
        self._prompts, self._outputs = Histogram(LENGTH_BUCKETS), Histogram(LENGTH_BUCKETS)
        self._stages = [(f"{stage}_s", Histogram(STAGE_BUCKETS_S)) for stage in STAGES]

    # --- counting -------------------------------------------------------------------------------

    def answered(self, route: str, status: int) -> None:
        """Count an HTTP answer. `route` is a pattern of the app, never a client's text."""
        self._answers[route, str(status)] += 1

    def failed(self, error: BatonError) -> None:
        """Count an error of a client, sent as a status or an event, if it asks for a retry."""
        if error.http_status in RETRY_STATUSES:
            self._refusals[str(error.http_status), self._known(error.code)] += 1

    def ended(self, metrics: RequestMetrics, outcome: str, num_choices: int) -> None:
        """Count the end of one request of the router; an HTTP request has one per prompt."""
        self.num_requests += 1
        self.num_prompt_tokens += metrics.num_prompt_tokens
        self.num_cached_tokens += metrics.num_cached_tokens
        self.num_predicted_tokens += metrics.num_predicted_tokens
        wrong = abs(metrics.num_predicted_tokens - metrics.num_cached_tokens)
        self.num_mispredicted_tokens += wrong
        self._requests[metrics.path or "none", self._known(outcome)] += 1
        self._prompts.observe(metrics.num_prompt_tokens)
        for reason in metrics.finish_reasons:
            self._successes[(reason,)] += 1
        for code, count in metrics.retry_codes.items():
            self._retries[(self._known(code),)] += count
        for code, count in metrics.resume_codes.items():
            self._resumes[(self._known(code),)] += count
        first_s, all_s = metrics.time_to_first_token_s, metrics.e2e_s
        if first_s is not None and all_s is not None:
            self._time(metrics, first_s, all_s, num_choices)

    def _time(
        self, metrics: RequestMetrics, first_s: float, all_s: float, num_choices: int
    ) -> None:
        self._outputs.observe(metrics.num_new_tokens)
        queue_s = metrics.router_queue_s + metrics.queue_s
        self._first.observe(first_s)
        self._e2e.observe(all_s)
        self._queue.observe(queue_s)
        self._prefill.observe(metrics.prefill_s)
        self._decode.observe(all_s - first_s)
        self._inference.observe(max(0.0, all_s - queue_s))
        if num_choices == 1 and metrics.num_new_tokens > 1:
            self._per_token.observe((all_s - first_s) / (metrics.num_new_tokens - 1))
        for name, stage in self._stages:
            stage.observe(getattr(metrics, name))

    def _known(self, code: str) -> str:
        if code in self._codes or len(self._codes) < MAX_CODES:
            self._codes.add(code)
            return code
        return OTHER_CODES

    # --- the page -------------------------------------------------------------------------------

    def render(self, health: Health, model: ServedModel | None = None) -> bytes:
        """Return the text that a Prometheus server scrapes."""
        name = self._model_name if model is None else model.name
        page = Page({"model_name": name} | ({"router": self._router} if self._router else {}))
        self._add_requests(page)
        self._add_cluster(page, health, model)
        add_nodes(page, health.nodes, health.lost)
        return page.text()

    def _add_requests(self, page: Page) -> None:
        page.add(families.ANSWERS, self._answers)
        page.add(families.REFUSALS, self._refusals)
        page.add(families.REQUESTS, self._requests)
        page.add(families.SUCCESSES, self._successes)
        page.add(families.RETRIES, self._retries)
        page.add(families.RESUMES, self._resumes)
        page.add(families.PROMPT_TOKENS, {(): self.num_prompt_tokens})
        page.add(families.CACHED_TOKENS, {(): self.num_cached_tokens})
        page.add(families.PREDICTED_TOKENS, {(): self.num_predicted_tokens})
        page.add(families.MISPREDICTED_TOKENS, {(): self.num_mispredicted_tokens})
        page.add(families.OUTPUT_TOKENS, {(): self.num_output_tokens})
        page.add(families.FIRST_TOKEN, {(): self._first})
        page.add(families.TOKEN_GAPS, {(): self.token_gaps})
        page.add(families.PER_TOKEN, {(): self._per_token})
        page.add(families.E2E, {(): self._e2e})
        page.add(families.QUEUE_TIME, {(): self._queue})
        page.add(families.PREFILL_TIME, {(): self._prefill})
        page.add(families.DECODE_TIME, {(): self._decode})
        page.add(families.INFERENCE_TIME, {(): self._inference})
        page.add(families.PROMPT_LENGTHS, {(): self._prompts})
        page.add(families.OUTPUT_LENGTHS, {(): self._outputs})
        page.add(
            families.STAGES, {(name.removesuffix("_s"),): stage for name, stage in self._stages}
        )

    def _add_cluster(self, page: Page, health: Health, model: ServedModel | None) -> None:
        facts = ("", "", "")
        if model is not None:
            facts = (model.dtype, str(model.block_size), str(model.max_model_len))
        features = sorted({name for node in health.nodes for name in node.features})
        page.add(families.BUILD_INFO, {(self._version, *facts, ",".join(features)): 1})
        page.add(families.RUNNING, {(): health.num_running})
        page.add(families.WAITING, {(): health.num_queued})
        page.add(families.NODES, Counter((node.role, node.state) for node in health.nodes))
        known = {(node.node_id, node.role): node.num_known_blocks for node in health.nodes}
        page.add(families.KNOWN_BLOCKS, known)
        page.add(families.CACHE_GAPS, {(): health.num_cache_gaps})
        page.add(families.OLDEST_WAIT, {(): health.oldest_wait_s})
        pairs = {(one.prefill_node, one.decode_node): one for one in health.transfers}
        page.add(families.TRANSFERS, {pair: one.num_handoffs for pair, one in pairs.items()})
        page.add(families.TRANSFER_FAILURES, {p: one.num_failures for p, one in pairs.items()})
        page.add(families.TRANSFER_BYTES, {pair: one.num_bytes for pair, one in pairs.items()})
        page.add(families.TRANSFER_SECONDS, {pair: one.transfer_s for pair, one in pairs.items()})


class StatsLine:
    """Makes the lines of statistics in the log, each of what happened since the last one."""

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
