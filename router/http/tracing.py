"""Spans for OpenTelemetry: one trace per HTTP request, with the stages of each of its prompts.

The router makes all spans when the
request has ended, from the times of its waterfall, so nodes need no OpenTelemetry and tokens cost
nothing. A trace continues that of the client's `traceparent`. Only this file imports the package,
which is an extra.
"""

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from baton.protocol.errors import ConfigError
from baton.router.http.request_log import CARRIED, Running
from baton.router.outputs import waterfall
from baton.router.stream import RequestStream

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter

SERVICE = "baton"
CLOSE_S = 1.0


def exporter_to(endpoint: str) -> "SpanExporter":
    """Return an exporter to an OTLP collector. Raises `ConfigError` without the extra."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
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
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

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
                prepare = self._tracer.start_span("prepare", within, start_time=began_ns)
                prepare.end(max(began_ns, first_ns))
            for stream in running.streams:
                self._prompt(running.request_id, stream, within)
            if running.failure is not None:
                span.set_attribute("error.type", running.failure.code)
                span.set_status(self._error)
        span.end(ended_ns)

    def close(self) -> None:
        """Send the remaining spans, but do not wait long for a collector that does not answer."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(CLOSE_S)

    def _prompt(self, request_id: str, stream: RequestStream, within: "Context") -> None:
        metrics = stream.metrics
        began_ns = round(metrics.arrival_time * 1e9)
        attributes: dict[str, str | int | float] = {
            "gen_ai.request.model": self._model_name,
            "gen_ai.request.id": request_id,
            "gen_ai.request.n": stream.params.n,
            "gen_ai.usage.prompt_tokens": metrics.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": metrics.num_output_tokens,
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
            attributes["gen_ai.latency.time_to_first_token"] = metrics.time_to_first_token_s
        ended_ns = began_ns + round((metrics.e2e_s or 0.0) * 1e9)
        span = self._tracer.start_span("llm_request", within, attributes=attributes,
                                       start_time=began_ns)  # fmt: skip
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
