"""What is reported of each HTTP request that ends: lines of the log, and spans for OpenTelemetry.

The log has a line for each request that failed or was resumed, and an access log if it is on. They
contain the X-Request-Id that the client got, the last pair of nodes and the seconds of the stages,
so that a request's history can be found by its id. A trace has the stages of each prompt: its spans
are made from the times of the waterfall at the end, so nodes need no OpenTelemetry and tokens cost
nothing. It continues the trace of the client's `traceparent`.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from aiohttp import web

from baton.protocol.config import LogConfig
from baton.protocol.errors import BatonError, ConfigError, Failure
from baton.router.core.stream import RequestStream
from baton.router.http.errors import RETRY_STATUSES
from baton.router.http.metrics import STAGE_NAMES, HttpMetrics
from baton.router.outputs import RequestMetrics, waterfall
from baton.runtime.clock import Clock, monotonic
from baton.runtime.log import clip, logger

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter


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


@contextlib.contextmanager
def counted_request(request: web.Request, metrics: HttpMetrics) -> Iterator[Running]:
    """Close and count all requests that were submitted for a response, however it ends."""
    running = request[RUNNING] = Running()
    try:
        yield running
    except (asyncio.CancelledError, ConnectionError):
        running.outcome = GONE
        raise
    except BatonError as error:
        running.failed(error)
        raise
    finally:
        for stream in running.streams:
            stream.close()
            metrics.ended(stream.metrics, running.outcome, stream.params.n)


class RequestLog:
    def __init__(self, config: LogConfig, clock: Clock = monotonic) -> None:
        self._is_access = config.access
        self._slow_s = config.slow_s or inf
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
        is_slow = running is not None and took_s > self._slow_s
        if self._is_access or is_slow:
            fields = {} if running is None else _fields_of(running)
            write = log.debug if request.path in FREQUENT_PATHS else log.info
            write(
                "slow request" if is_slow else "access",
                request=request_id,
                method=request.method,
                path=clip(request.path),
                status=status,
                client=request.remote,
                s=round(took_s, 6),
                **fields,
            )
        if running is None:
            return
        if running.failure is not None:
            self._failed(running.failure, running, request_id)
        elif any(one.metrics.num_resumes for one in running.streams):
            log.info(
                "request resumed after a loss",
                request=request_id,
                **_fields_of(running),
            )
        elif any(one.metrics.num_retries for one in running.streams):
            log.info(
                "request tried again after a loss",
                request=request_id,
                **_fields_of(running),
            )

    def refused(self, request: web.BaseRequest, error: BatonError) -> None:
        """Log that a client sent what is no request."""
        if self._has_room():
            log.info(
                "a malformed request was refused",
                client=request.remote,
                status=error.http_status,
                reason=error.message,
            )

    def _failed(self, failure: Failure, running: Running, request_id: str) -> None:
        """Log a request that failed without a mistake of its client."""
        if failure.http_status < 422:
            return
        was_placed = any(one.metrics.num_attempts for one in running.streams)
        if (
            failure.http_status in RETRY_STATUSES
            and not was_placed
            and not self._has_room()
        ):
            return
        if self._num_unlogged:
            log.info(
                "further refusals were not logged one by one", number=self._num_unlogged
            )
            self._num_unlogged = 0
        log.warning(
            "request failed",
            request=request_id,
            status=failure.http_status,
            code=failure.code,
            reason=failure.message,
            **_fields_of(running),
        )

    def _has_room(self) -> bool:
        second = int(self._clock())
        if second != self._second:
            self._second = second
            self._num_refusals = 0
        self._num_refusals += 1
        if self._num_refusals <= MAX_REFUSALS_PER_S:
            return True
        self._num_unlogged += 1
        return False


def _fields_of(running: Running) -> dict[str, object]:
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
        fields["lost_by"] = ",".join(
            f"{code}:{count}" for code, count in losses.items()
        )
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
    if all_metrics[-1].path:
        fields["served"] = all_metrics[-1].path
    fields["prompt_tokens"] = sum(metrics.num_prompt_tokens for metrics in all_metrics)
    fields["output_tokens"] = sum(metrics.num_output_tokens for metrics in all_metrics)
    first_s = [
        m.time_to_first_token_s
        for m in all_metrics
        if m.time_to_first_token_s is not None
    ]
    if first_s:
        fields["first_token_s"] = round(min(first_s), 6)
    return fields


SERVICE = "baton"
CLOSE_S = 1.0


def exporter_to(endpoint: str) -> "SpanExporter":
    """Return an exporter to an OTLP collector. Raises `ConfigError` without the extra."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
            OTLPSpanExporter,
        )
    except ImportError as error:
        text = (
            "router.otlp_traces_endpoint needs OpenTelemetry: install the extra otel (`make serve "
            "EXTRAS=otel`)"
        )
        raise ConfigError(text) from error
    return OTLPSpanExporter(endpoint=endpoint)


class Tracer:
    """Call `record` for each HTTP request that asked for tokens, then `close`."""

    def __init__(self, exporter: "SpanExporter", model_name: str, version: str) -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import (
            SpanKind,
            Status,
            StatusCode,
            set_span_in_context,
        )
        from opentelemetry.trace.propagation.tracecontext import (
            TraceContextTextMapPropagator,
        )

        self._provider: TracerProvider = TracerProvider(
            # `create` has a name of its own; what OTEL_* variables say comes last.
            resource=Resource.create()
            .merge(Resource({"service.name": SERVICE, "service.version": version}))
            .merge(OTELResourceDetector().detect()),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(SERVICE, version)
        self._propagator = TraceContextTextMapPropagator()
        self._kind = SpanKind.SERVER
        self._error = Status(StatusCode.ERROR)
        self._within = set_span_in_context
        self._model_name = model_name

    def record(
        self,
        headers: Mapping[str, str],
        route: str,
        status: int,
        took_s: float,
        running: Running,
    ) -> None:
        """Make the spans of a request that has just ended."""
        ended_ns = time.time_ns()
        began_ns = ended_ns - round(took_s * 1e9)
        carried = {name: headers[name] for name in CARRIED if name in headers}
        span = self._tracer.start_span(
            f"POST {route}",
            context=self._propagator.extract(carried),
            kind=self._kind,
            attributes={
                "http.request.method": "POST",
                "http.route": route,
                "http.response.status_code": status,
                "baton.request_id": running.request_id,
            },
            start_time=began_ns,
        )
        if span.is_recording():
            within = self._within(span)
            if running.streams:
                first_ns = round(running.streams[0].metrics.arrival_time * 1e9)
                prepare = self._tracer.start_span(
                    "prepare", within, start_time=began_ns
                )
                prepare.end(max(began_ns, first_ns))
            for stream in running.streams:
                self._prompt(running.request_id, route, stream, within)
            if running.failure is not None:
                span.set_attribute("error.type", running.failure.code)
                span.set_status(self._error)
        span.end(ended_ns)

    def close(self) -> None:
        """Send the remaining spans, but do not wait long for a collector that does not answer."""
        closing = threading.Thread(
            target=self._provider.shutdown, name="traces", daemon=True
        )
        closing.start()
        closing.join(CLOSE_S)

    def _prompt(
        self, request_id: str, route: str, stream: RequestStream, within: "Context"
    ) -> None:
        metrics = stream.metrics
        is_text = route == "/v1/completions"
        began_ns = round(metrics.arrival_time * 1e9)
        attributes: dict[str, str | int | float] = {
            "gen_ai.request.model": self._model_name,
            "gen_ai.request.id": request_id,
            "gen_ai.request.n": stream.params.n,
            "gen_ai.operation.name": "text_completion" if is_text else "chat",
            "gen_ai.usage.input_tokens": metrics.num_prompt_tokens,
            "gen_ai.usage.output_tokens": metrics.num_output_tokens,
            "gen_ai.latency.time_in_queue": metrics.router_queue_s + metrics.queue_s,
            "gen_ai.latency.e2e": metrics.e2e_s or 0.0,
            "baton.path": metrics.path or "none",
            "baton.cached_tokens": metrics.num_cached_tokens,
            "baton.retries": metrics.num_retries,
            "baton.resumes": metrics.num_resumes,
            "baton.transfer_bytes": metrics.transfer_bytes,
            "baton.transfer_s": metrics.transfer_s,
        }
        if metrics.time_to_first_token_s is not None:
            attributes["gen_ai.latency.time_to_first_token"] = (
                metrics.time_to_first_token_s
            )
        ended_ns = began_ns + round((metrics.e2e_s or 0.0) * 1e9)
        span = self._tracer.start_span(
            "llm_request", within, attributes=attributes, start_time=began_ns
        )
        inside = self._within(span)
        for stage in waterfall(metrics):
            start_ns = began_ns + round(stage.start_s * 1e9)
            end_ns = began_ns + round((stage.start_s + stage.duration_s) * 1e9)
            child = self._tracer.start_span(stage.stage, inside, start_time=start_ns)
            if stage.node:
                child.set_attribute("baton.node", stage.node)
            if stage.failure:
                child.set_attribute("error.type", stage.failure)
                child.set_status(self._error)
            child.end(end_ns)
        span.end(ended_ns)
