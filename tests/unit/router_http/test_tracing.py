"""One trace per request: the client's goes on, the stages are its spans, and off costs nothing."""

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import Callable, Mapping

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from baton.protocol.ids import Key, NodeId, RequestId
from baton.router.http.request_log import Tracer
from baton.router.stream import RequestStream
from tests.support.http_bench import JSON, TEXT, HttpBench, ScriptedEngine, lost

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def well(stream: RequestStream) -> None:
    stream.metrics.begin_attempt(Key(RequestId("r"), 0, 0), 1, 0.0)
    attempt = stream.metrics.attempts[0]
    attempt.placed_at_s, attempt.decode_node = 0.0, NodeId("d0")
    attempt.decoding_at_s = attempt.prefill_s = 1e-9
    stream.push(0, TEXT.encode_now(" hello"), "stop")
    stream.finish()


def traced(
    script: Callable[[RequestStream], None], headers: Mapping[str, str] | None = None
) -> dict[str, ReadableSpan]:
    """The spans of one request by their names."""
    exporter = InMemorySpanExporter()
    tracer = Tracer(exporter, "tiny", "1.2")

    async def ask() -> None:
        engine = ScriptedEngine(script)
        async with HttpBench(engine, tracer=tracer) as bench:
            body = io.BytesIO(json.dumps({"prompt": [5, 6]}).encode())
            path = "/v1/completions"
            async with bench.session.post(path, data=body, headers={**JSON, **(headers or {})}):
                pass
            await bench.get("/health")  # which makes no span
        engine.close()

    asyncio.run(ask())
    tracer.close()
    spans = exporter.get_finished_spans()
    return {span.name: span for span in spans}


def parent_of(span: ReadableSpan) -> int:
    return int(span.parent.span_id)


def test_a_trace_continues_the_client_s_and_holds_the_stages() -> None:
    spans = traced(well, {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b"})
    assert list(spans) == ["prepare", "prefill", "decode", "llm_request", "POST /v1/completions"]
    root, request = spans["POST /v1/completions"], spans["llm_request"]
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE}
    assert f"{parent_of(root):016x}" == PARENT
    assert root.context.trace_state.to_header() == "a=b"
    assert parent_of(request) == parent_of(spans["prepare"]) == root.context.span_id
    assert parent_of(spans["decode"]) == parent_of(spans["prefill"]) == request.context.span_id
    assert request.attributes["gen_ai.usage.completion_tokens"] == 1
    assert spans["decode"].attributes == {"baton.node": "d0"}
    assert (spans["decode"].end_time, spans["prefill"].start_time) == (
        request.end_time,
        request.start_time,
    )


def test_a_trace_names_its_service_as_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def named() -> tuple[object, object]:
        about = traced(well)["llm_request"].resource.attributes
        return about["service.name"], about.get("deployment.environment")

    assert named() == ("baton", None)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    assert named() == ("mine", "test")


def test_an_error_marks_its_trace() -> None:
    root = traced(lost)["POST /v1/completions"]
    assert root.parent is None
    assert root.status.status_code is StatusCode.ERROR
    assert root.attributes["error.type"] == "node_lost"
    assert root.attributes["http.response.status_code"] == 502


def test_a_trace_that_the_client_does_not_sample_is_not_sent() -> None:
    assert traced(well, {"traceparent": f"00-{TRACE}-{PARENT}-00"}) == {}


def test_a_router_without_traces_never_imports_opentelemetry() -> None:
    script = "import sys, baton.router.main; assert 'opentelemetry' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
