"""Log a line for each request that failed or was resumed, and an access log if it is on.

`App` reports every answer. The lines contain the X-Request-Id that the client got, the last pair of
nodes and the seconds of the stages, so that a request's history can be found by its id.
"""

from dataclasses import dataclass, field

from aiohttp import web

from baton.protocol.config import LogConfig
from baton.protocol.errors import BatonError, Failure
from baton.router.http.metrics import STAGE_NAMES
from baton.router.http.responses import RETRY_STATUSES
from baton.router.outputs import RequestMetrics
from baton.router.stream import RequestStream
from baton.runtime.clock import Clock, monotonic
from baton.runtime.log import clip, logger

# Under overload many requests are refused; this many lines per second are enough.
MAX_REFUSALS_PER_S = 10
# Probes, scrapes and the page ask for these every second or more often, without end.
FREQUENT_PATHS = ("/live", "/health", "/metrics", "/status.json")
GONE = "client_gone"  # the outcome of a request whose client left
CARRIED = ("traceparent", "tracestate")  # headers that name the client's trace

log = logger("router")


@dataclass(slots=True)
class Running:
    """The requests of the router that one HTTP request made, and how they ended."""

    streams: list[RequestStream] = field(default_factory=list)
    outcome: str = BatonError.code  # until the end is known
    # Not the exception, whose frames refer to this object and would make a cycle.
    failure: Failure | None = None
    request_id: str = ""  # empty until the body has been read

    def failed(self, error: BatonError) -> None:
        self.outcome, self.failure = error.code, error.to_failure()


RUNNING = web.RequestKey("running", Running)


class RequestLog:
    def __init__(self, config: LogConfig, clock: Clock = monotonic) -> None:
        self._is_access = config.access
        self._clock = clock
        self._second = -1
        self._num_refusals = 0  # refusals in that second
        self._num_unlogged = 0

    def answered(
        self,
        request: web.Request,
        running: Running | None,
        status: int,
        request_id: str,
        took_s: float,
    ) -> None:
        """Log an ended HTTP request, unless it was uneventful and the access log is off."""
        request_id = request_id or (running.request_id if running is not None else "")
        if self._is_access:
            fields = {} if running is None else _sums([one.metrics for one in running.streams])
            tell = log.debug if request.path in FREQUENT_PATHS else log.info
            tell(
                "access", request=request_id, method=request.method, path=clip(request.path),
                status=status, client=request.remote, s=round(took_s, 6), **fields,
            )  # fmt: skip
        if running is None:
            return
        if running.failure is not None:
            self._failed(running.failure, running, request_id)
        elif any(one.metrics.num_resumes for one in running.streams):
            log.info("request resumed after a loss", request=request_id, **_told(running))
        elif any(one.metrics.num_retries for one in running.streams):
            log.info("request tried again after a loss", request=request_id, **_told(running))

    def _failed(self, failure: Failure, running: Running, request_id: str) -> None:
        """Log a request that failed without a mistake of its client."""
        if failure.http_status < 422:
            return
        was_placed = any(one.metrics.num_attempts for one in running.streams)
        if failure.http_status in RETRY_STATUSES and not was_placed and not self._has_room():
            return
        if self._num_unlogged:
            log.info("further refusals were not logged one by one", number=self._num_unlogged)
            self._num_unlogged = 0
        log.warning(
            "request failed", request=request_id, status=failure.http_status, code=failure.code,
            reason=failure.message, **_told(running),
        )  # fmt: skip

    def _has_room(self) -> bool:
        second = int(self._clock())
        if second != self._second:
            self._second, self._num_refusals = second, 0
        self._num_refusals += 1
        if self._num_refusals <= MAX_REFUSALS_PER_S:
            return True
        self._num_unlogged += 1
        return False


def _told(running: Running) -> dict[str, object]:
    """Return the nodes, the losses and the stages of the requests, if there are any."""
    all_metrics = [stream.metrics for stream in running.streams]
    if not all_metrics:
        return {}
    fields = _sums(all_metrics)
    losses: dict[str, int] = {}
    for metrics in all_metrics:
        for codes in (metrics.retry_codes, metrics.resume_codes):
            for code, count in codes.items():
                losses[code] = losses.get(code, 0) + count
    fields["attempts"] = max(metrics.num_attempts for metrics in all_metrics)
    fields["resumes"] = sum(metrics.num_resumes for metrics in all_metrics)
    if losses:
        fields["lost_by"] = ",".join(f"{code}:{count}" for code, count in losses.items())
    slowest = max(all_metrics, key=lambda metrics: metrics.e2e_s or 0.0)
    for stage in STAGE_NAMES:
        if seconds := getattr(slowest, f"{stage}_s"):
            fields[f"{stage}_s"] = round(seconds, 6)
    return fields


def _sums(all_metrics: list[RequestMetrics]) -> dict[str, object]:
    """Return the last pair of nodes and the numbers of tokens."""
    if not all_metrics:
        return {}
    attempts = [attempt for metrics in all_metrics for attempt in metrics.attempts[-1:]]
    nodes = {
        "prefill": attempts[-1].prefill_node if attempts else None,
        "decode": attempts[-1].decode_node if attempts else None,
    }
    fields: dict[str, object] = {role: node for role, node in nodes.items() if node}
    fields["prompt_tokens"] = sum(metrics.num_prompt_tokens for metrics in all_metrics)
    fields["output_tokens"] = sum(metrics.num_output_tokens for metrics in all_metrics)
    first_s = [m.time_to_first_token_s for m in all_metrics if m.time_to_first_token_s is not None]
    if first_s:
        fields["first_token_s"] = round(min(first_s), 6)
    return fields
