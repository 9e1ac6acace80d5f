"""The metrics of the router: HTTP responses, requests, tokens, latencies and the load of the nodes.

Everything that happens once per token or per request is counted in plain numbers. docs/metrics.md
is generated from the families. If vLLM has a family of the same meaning, its name has `baton_` in
place of `vllm:`.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import get_args

from baton.protocol.errors import BatonError
from baton.protocol.messages import FinishReason
from baton.router.core.health import Health, ServedModel
from baton.router.http.errors import RETRY_STATUSES
from baton.router.outputs import RequestMetrics
from baton.runtime.metrics import Family, Histogram, Page, add_nodes

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
STAGE_NAMES = (
    "router_queue",
    "queue",
    "prefix_read",
    "prefill",
    "transfer",
    "exposed",
    "decode_queue",
    "first_step",
)
# Nodes choose the codes of their failures, so the number of codes is bounded here.
MAX_CODES = 64
OTHER_CODES = "other"
# Clients choose the names of the fields that they send.
MAX_FIELD_NAMES = 128
_FIELD_NAME = re.compile(r"[A-Za-z_][\w.-]{0,63}", re.ASCII)


_PAIR = ("prefill", "decode")

BUILD_INFO = Family(
    "baton_build_info",
    "gauge",
    "The version and the served model, as labels; always 1, and empty until a node has been ready",
    ("version", "dtype", "block_size", "max_model_len", "features"),
    "vllm:cache_config_info",
)
ANSWERS = Family(
    "baton_http_answers",
    "counter",
    "HTTP answers by route and status; 499 means that the client left",
    ("route", "status"),
)
REFUSALS = Family(
    "baton_refusals",
    "counter",
    "Errors with status 429, 503 or 504, as answers or inside streams",
    ("status", "code"),
)
IGNORED = Family(
    "baton_ignored_fields",
    "counter",
    "Requests with a field that is unknown and changes nothing, by its name without the numbers of "
    "list items; names beyond the first 128 are other",
    ("field",),
)
REQUESTS = Family(
    "baton_requests",
    "counter",
    "Ended requests, one per prompt; outcome is finished, client_gone or an error code",
    ("path", "outcome"),
)
SUCCESSES = Family(
    "baton_request_success",
    "counter",
    "Choices that ended, by the reason: stop or length",
    ("finished_reason",),
    "vllm:request_success",
)
PROMPT_TOKENS = Family(
    "baton_prompt_tokens",
    "counter",
    "Tokens of the prompts of ended requests",
    (),
    "vllm:prompt_tokens",
)
CACHED_TOKENS = Family(
    "baton_cached_prompt_tokens",
    "counter",
    "Tokens of the prompts of ended requests that a prefix cache held",
    (),
    "vllm:prompt_tokens_cached",
)
PREDICTED_TOKENS = Family(
    "baton_predicted_cached_prompt_tokens",
    "counter",
    "Tokens of the prompts of ended requests that the router expected to be cached at the chosen "
    "node",
    (),
)
MISPREDICTED_TOKENS = Family(
    "baton_mispredicted_cached_prompt_tokens",
    "counter",
    "Sum over requests of the difference between predicted and actually cached tokens",
    (),
)
OUTPUT_TOKENS = Family(
    "baton_generation_tokens",
    "counter",
    "Tokens that were sent to clients",
    (),
    "vllm:generation_tokens",
)
RETRIES = Family(
    "baton_retries",
    "counter",
    "Attempts that followed a loss before the first token, by the code of the loss",
    ("reason",),
)
RESUMES = Family(
    "baton_resumes",
    "counter",
    "Choices that went on at another node after a loss, by the code of the loss",
    ("reason",),
)
RUNNING = Family(
    "baton_num_requests_running",
    "gauge",
    "Requests that have nodes",
    (),
    "vllm:num_requests_running",
)
WAITING = Family(
    "baton_num_requests_waiting",
    "gauge",
    "Requests that wait for nodes",
    (),
    "vllm:num_requests_waiting",
)
WAITING_FOR = Family(
    "baton_router_waiting_requests",
    "gauge",
    "Requests that wait because the nodes of a role have no room or are absent; some wait for both "
    "roles",
    ("role",),
)
BUSY = Family(
    "baton_router_node_busy_ratio",
    "gauge",
    "Share of a node's room that requests have, its KV blocks included; from 1 on, requests wait "
    "for it",
    ("node", "role"),
)
FIRST_TOKEN = Family(
    "baton_time_to_first_token_seconds",
    "histogram",
    "From arrival to the first token that was sent",
    (),
    "vllm:time_to_first_token_seconds",
)
TOKEN_GAPS = Family(
    "baton_inter_token_latency_seconds",
    "histogram",
    "Between two deltas of one choice, which usually have one token each",
    (),
    "vllm:inter_token_latency_seconds",
)
PER_TOKEN = Family(
    "baton_request_time_per_output_token_seconds",
    "histogram",
    "Mean time per token after the first one, of requests with one choice",
    (),
    "vllm:request_time_per_output_token_seconds",
)
E2E = Family(
    "baton_e2e_request_latency_seconds",
    "histogram",
    "From arrival to the end, of requests that had tokens",
    (),
    "vllm:e2e_request_latency_seconds",
)
QUEUE_TIME = Family(
    "baton_request_queue_time_seconds",
    "histogram",
    "Time of waiting for nodes in the router and for blocks on the node that computes the prompt",
    (),
    "vllm:request_queue_time_seconds",
)
PREFILL_TIME = Family(
    "baton_request_prefill_time_seconds",
    "histogram",
    "Computing the prompt",
    (),
    "vllm:request_prefill_time_seconds",
)
DECODE_TIME = Family(
    "baton_request_decode_time_seconds",
    "histogram",
    "From the first token to the end",
    (),
    "vllm:request_decode_time_seconds",
)
INFERENCE_TIME = Family(
    "baton_request_inference_time_seconds",
    "histogram",
    "From arrival to the end, less the queue time",
    (),
    "vllm:request_inference_time_seconds",
)
STAGES = Family(
    "baton_stage_seconds",
    "histogram",
    "Durations of the stages of a request",
    ("stage",),
)
PROMPT_LENGTHS = Family(
    "baton_request_prompt_tokens",
    "histogram",
    "Tokens per prompt",
    (),
    "vllm:request_prompt_tokens",
)
OUTPUT_LENGTHS = Family(
    "baton_request_generation_tokens",
    "histogram",
    "Tokens that were sent per request",
    (),
    "vllm:request_generation_tokens",
)
TRANSFERS = Family(
    "baton_transfers", "counter", "Handoffs that succeeded, by pair of nodes", _PAIR
)
TRANSFER_FAILURES = Family(
    "baton_transfer_failures",
    "counter",
    "Handoffs that failed, by pair of nodes",
    _PAIR,
)
TRANSFER_BYTES = Family(
    "baton_transfer_bytes",
    "counter",
    "KV bytes that handoffs moved, by pair of nodes",
    _PAIR,
)
TRANSFER_SECONDS = Family(
    "baton_transfer_seconds",
    "counter",
    "Seconds from the first read of a handoff to the end of the last one, summed over handoffs",
    _PAIR,
)
KNOWN_BLOCKS = Family(
    "baton_known_cached_blocks",
    "gauge",
    "Blocks in the prefix cache of a node, as far as the router knows",
    ("node", "role"),
)
CACHE_GAPS = Family(
    "baton_cache_gaps",
    "counter",
    "How often the router missed an announcement of a node's cache and asked for all of it",
    (),
)
OLDEST_WAIT = Family(
    "baton_router_oldest_wait_seconds",
    "gauge",
    "Time since nodes last made progress with the running request that waits longest",
    (),
)
NODES = Family("baton_nodes", "gauge", "Nodes by role and state", ("role", "state"))

ROUTER_FAMILIES = (
    BUILD_INFO,
    ANSWERS,
    REFUSALS,
    IGNORED,
    REQUESTS,
    SUCCESSES,
    PROMPT_TOKENS,
    CACHED_TOKENS,
    PREDICTED_TOKENS,
    MISPREDICTED_TOKENS,
    OUTPUT_TOKENS,
    RETRIES,
    RESUMES,
    RUNNING,
    WAITING,
    WAITING_FOR,
    BUSY,
    FIRST_TOKEN,
    TOKEN_GAPS,
    PER_TOKEN,
    E2E,
    QUEUE_TIME,
    PREFILL_TIME,
    DECODE_TIME,
    INFERENCE_TIME,
    STAGES,
    PROMPT_LENGTHS,
    OUTPUT_LENGTHS,
    TRANSFERS,
    TRANSFER_FAILURES,
    TRANSFER_BYTES,
    TRANSFER_SECONDS,
    KNOWN_BLOCKS,
    CACHE_GAPS,
    OLDEST_WAIT,
    NODES,
)


# Counters exist from the start, because the rate of one that appears with its first event is 0.
_LOSSES = (
    "node_lost",
    "preempted",
    "transfer_failed",
    "transfer_timeout",
    "lease_expired",
)
_AT_0: dict[Family, tuple[tuple[str, ...], ...]] = {
    REFUSALS: (
        ("429", "queue_full"),
        ("503", "no_nodes"),
        ("503", "not_ready"),
        ("503", "queue_timeout"),
        ("503", "shutting_down"),
    ),
    RETRIES: tuple((code,) for code in _LOSSES),
    RESUMES: tuple((code,) for code in _LOSSES),
    SUCCESSES: tuple((reason,) for reason in get_args(FinishReason)),
}


class HttpMetrics:
    """The metrics of one router, without globals, because two routers can share a process."""

    def __init__(
        self, model_name: str = "", version: str = "", router: str = ""
    ) -> None:
        """Label every value with `router`, the name of a router that shares its port."""
        self.num_requests = 0  # requests that have ended
        self.num_refused = 0  # that clients are asked to repeat
        self.num_failed = 0  # by another error that is not the client's
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self._num_predicted_tokens = 0
        self._num_mispredicted_tokens = 0
        self.token_gaps = Histogram(TOKEN_BUCKETS_S)
        self._model_name = model_name  # until a node has been ready
        self._version = version
        self._router = router
        self._codes: set[str] = set()
        self._field_names: set[str] = set()
        counted = (ANSWERS, REFUSALS, IGNORED, REQUESTS, SUCCESSES, RETRIES, RESUMES)
        self._counts: dict[Family, Counter[tuple[str, ...]]] = {
            family: Counter(dict.fromkeys(_AT_0.get(family, ()), 0))
            for family in counted
        }
        timed = (
            FIRST_TOKEN,
            E2E,
            QUEUE_TIME,
            PREFILL_TIME,
            DECODE_TIME,
            INFERENCE_TIME,
        )
        self._observed = {one: Histogram(LATENCY_BUCKETS_S) for one in timed}
        self._observed |= {
            PER_TOKEN: Histogram(TOKEN_BUCKETS_S),
            TOKEN_GAPS: self.token_gaps,
        }
        for lengths in (PROMPT_LENGTHS, OUTPUT_LENGTHS):
            self._observed[lengths] = Histogram(LENGTH_BUCKETS)
        self._stages = [
            (f"{stage}_s", Histogram(STAGE_BUCKETS_S)) for stage in STAGE_NAMES
        ]

    # --- counting -------------------------------------------------------------------------------

    def answered(self, route: str, status: int) -> None:
        """Count an HTTP response. `route` is a pattern of the app, never a client's text."""
        self._count(ANSWERS, 1, route, str(status))

    def failed(self, error: BatonError) -> None:
        """Count an error that a client gets, as a status or an event."""
        if error.http_status in RETRY_STATUSES:
            self.num_refused += 1
            self._count(REFUSALS, 1, str(error.http_status), self._known(error.code))
        elif error.http_status >= 500:
            self.num_failed += 1

    def ignored(self, names: Iterable[str]) -> None:
        """Count the unknown fields of one request."""
        for name in names:
            self._count(IGNORED, 1, self._known_field(name))

    def _known_field(self, name: str) -> str:
        if name not in self._field_names:
            is_full = len(self._field_names) >= MAX_FIELD_NAMES
            if is_full or not _FIELD_NAME.fullmatch(name):
                return OTHER_CODES
            self._field_names.add(name)
        return name

    def ended(self, metrics: RequestMetrics, outcome: str, num_choices: int) -> None:
        """Count the end of one request of the router; an HTTP request has one per prompt."""
        self.num_requests += 1
        self.num_prompt_tokens += metrics.num_prompt_tokens
        self.num_cached_tokens += metrics.num_cached_tokens
        self._num_predicted_tokens += metrics.num_predicted_tokens
        wrong = abs(metrics.num_predicted_tokens - metrics.num_cached_tokens)
        self._num_mispredicted_tokens += wrong
        self._count(REQUESTS, 1, metrics.path or "none", self._known(outcome))
        self._observed[PROMPT_LENGTHS].observe(metrics.num_prompt_tokens)
        for reason in metrics.finish_reasons:
            self._count(SUCCESSES, 1, reason)
        for code, count in metrics.retry_codes.items():
            self._count(RETRIES, count, self._known(code))
        for code, count in metrics.resume_codes.items():
            self._count(RESUMES, count, self._known(code))
        first_s = metrics.time_to_first_token_s
        all_s = metrics.e2e_s
        if first_s is not None and all_s is not None:
            self._time(metrics, first_s, all_s, num_choices)

    def _time(
        self, metrics: RequestMetrics, first_s: float, all_s: float, num_choices: int
    ) -> None:
        queue_s = metrics.router_queue_s + metrics.queue_s
        num_tokens = metrics.num_new_tokens
        seen = {
            OUTPUT_LENGTHS: num_tokens,
            FIRST_TOKEN: first_s,
            E2E: all_s,
            QUEUE_TIME: queue_s,
            PREFILL_TIME: metrics.prefill_s,
            DECODE_TIME: all_s - first_s,
            INFERENCE_TIME: max(0.0, all_s - queue_s),
        }
        if num_choices == 1 and num_tokens > 1:
            seen[PER_TOKEN] = (all_s - first_s) / (num_tokens - 1)
        for family, number in seen.items():
            self._observed[family].observe(number)
        for name, stage in self._stages:
            stage.observe(getattr(metrics, name))

    def _count(self, family: Family, number: int, *labels: str) -> None:
        self._counts[family][labels] += number

    def _known(self, code: str) -> str:
        if code in self._codes or len(self._codes) < MAX_CODES:
            self._codes.add(code)
            return code
        return OTHER_CODES

    # --- the page -------------------------------------------------------------------------------

    def render(self, health: Health, model: ServedModel | None = None) -> bytes:
        """Return the text that a Prometheus server scrapes."""
        name = self._model_name if model is None else model.name
        page = Page(
            {"model_name": name} | ({"router": self._router} if self._router else {})
        )
        for family, counts in self._counts.items():
            page.add(family, counts)
        page.add(PROMPT_TOKENS, {(): self.num_prompt_tokens})
        page.add(CACHED_TOKENS, {(): self.num_cached_tokens})
        page.add(PREDICTED_TOKENS, {(): self._num_predicted_tokens})
        page.add(MISPREDICTED_TOKENS, {(): self._num_mispredicted_tokens})
        page.add(OUTPUT_TOKENS, {(): self.num_output_tokens})
        for family, histogram in self._observed.items():
            page.add(family, {(): histogram})
        page.add(
            STAGES, {(name.removesuffix("_s"),): stage for name, stage in self._stages}
        )
        self._add_cluster(page, health, model)
        add_nodes(page, health.nodes, health.lost)
        return page.text()

    def _add_cluster(
        self, page: Page, health: Health, model: ServedModel | None
    ) -> None:
        facts = ("", "", "")
        if model is not None:
            facts = (model.dtype, str(model.block_size), str(model.max_model_len))
        features = sorted({name for node in health.nodes for name in node.features})
        page.add(BUILD_INFO, {(self._version, *facts, ",".join(features)): 1})
        page.add(RUNNING, {(): health.num_running})
        page.add(WAITING, {(): health.num_queued})
        page.add(
            WAITING_FOR, {(role,): num for role, num in health.num_waiting_for.items()}
        )
        busy = health.busy
        roles = {
            node.node_id: node.role for node in health.nodes if node.node_id in busy
        }
        page.add(BUSY, {(node, role): busy[node] for node, role in roles.items()})
        page.add(NODES, Counter((node.role, node.state) for node in health.nodes))
        known = {
            (node.node_id, node.role): node.num_known_blocks for node in health.nodes
        }
        page.add(KNOWN_BLOCKS, known)
        page.add(CACHE_GAPS, {(): health.num_cache_gaps})
        page.add(OLDEST_WAIT, {(): health.oldest_wait_s})
        pairs = {(one.prefill_node, one.decode_node): one for one in health.transfers}
        page.add(TRANSFERS, {pair: one.num_handoffs for pair, one in pairs.items()})
        page.add(TRANSFER_FAILURES, {p: one.num_failures for p, one in pairs.items()})
        page.add(TRANSFER_BYTES, {pair: one.num_bytes for pair, one in pairs.items()})
        page.add(
            TRANSFER_SECONDS, {pair: one.transfer_s for pair, one in pairs.items()}
        )


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
