"""What the log says about requests, over real HTTP, and their traces."""

import asyncio
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping

import pytest
from aiohttp.test_utils import make_mocked_request
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from baton.protocol.config import ClusterConfig, LogConfig
from baton.protocol.errors import NodeError, Overloaded
from baton.protocol.ids import Key, NodeId, RequestId
from baton.router.core.request import Attempt
from baton.router.core.stream import RequestStream
from baton.router.http.request_log import (
    MAX_REFUSALS_PER_S,
    RequestLog,
    Running,
    Tracer,
)
from tests.support.http_bench import (
    JSON,
    TEXT,
    HttpBench,
    ScriptedEngine,
    lost,
    placed,
    served,
    well,
)
from tests.support.virtual_clock import VirtualClock

LOST = NodeError("d0 is lost").to_failure()


def begun(stream: RequestStream) -> None:
    for text in (" hello", " world"):
        stream.push(0, TEXT.encode_now(text), None)


def resumed(stream: RequestStream) -> None:
    placed(stream)
    stream.push(0, TEXT.encode_now(" hello"), None)
    stream.metrics.try_again(LOST, is_resume=True)
    stream.push(0, TEXT.encode_now(" hello"), "stop")
    stream.finish()


def fields_of(record: object) -> dict[str, object]:
    fields = getattr(record, "fields", {})
    assert isinstance(fields, dict)
    return fields


def told(
    caplog: pytest.LogCaptureFixture,
    script: Callable[[RequestStream], None],
    *,
    access: bool = False,
    slow_s: float = 0.0,
) -> list[tuple[str, dict[str, object]]]:
    """The lines about one streamed request."""
    caplog.set_level("INFO")
    caplog.clear()

    async def ask() -> str:
        engine = ScriptedEngine(script)
        async with HttpBench(
            engine, ClusterConfig(log=LogConfig(access=access, slow_s=slow_s))
        ) as bench:
            reply = await bench.post({"prompt": [5, 6], "stream": True})
        engine.close()
        return reply.headers["X-Request-Id"]

    shown = asyncio.run(ask())
    lines = [(record.message, fields_of(record)) for record in caplog.records]
    assert [fields["request"] for _, fields in lines] == [shown] * len(lines)
    return lines


def test_a_request_that_failed_has_one_line_with_its_id_nodes_and_stages(caplog):
    ((text, fields),) = told(caplog, lost)
    assert text == "request failed"
    assert (
        fields.items()
        >= {
            "status": 502,
            "code": "node_lost",
            "reason": "d0 is lost",
            "prefill": "p0",
            "decode": "d0",
            "prompt_tokens": 2,
            "output_tokens": 1,
            "attempts": 1,
            "prefill_s": 0.25,
        }.items()
    )


def test_a_request_that_was_resumed_has_one_line_that_says_why(caplog):
    ((text, fields),) = told(caplog, resumed)
    assert text == "request resumed after a loss"
    assert (fields["resumes"], fields["lost_by"]) == (1, "node_lost:1")


def test_a_request_that_went_well_has_a_line_in_the_access_log_alone(caplog):
    assert told(caplog, well) == []
    ((text, fields),) = told(caplog, well, access=True)
    assert text == "access"
    assert (
        fields.items()
        >= {
            "method": "POST",
            "path": "/v1/completions",
            "status": 200,
            "client": "127.0.0.1",
            "prefill": "p0",
            "decode": "d0",
            "prompt_tokens": 2,
            "output_tokens": 1,
            "prefill_s": 0.25,
        }.items()
    )


def test_a_slow_request_has_a_line_with_its_stages_without_the_access_log(caplog):
    assert told(caplog, well, slow_s=60.0) == []
    ((text, fields),) = told(caplog, well, slow_s=1e-6)
    assert text == "slow request"
    assert fields["prefill_s"] == 0.25
    assert fields["first_token_s"] > 0


@pytest.mark.parametrize("level", ["INFO", "DEBUG"])
def test_probes_do_not_flood_the_access_log(level, caplog):
    caplog.set_level(level)
    requests = RequestLog(LogConfig(access=True))
    for path in ("/health", "/v1/models", "/status.json"):
        requests.answered(make_mocked_request("GET", path), None, 200, "id", 0.001)
    paths = [fields_of(record)["path"] for record in caplog.records]
    every = ["/health", "/v1/models", "/status.json"]
    assert paths == (every if level == "DEBUG" else ["/v1/models"])


@served(script=begun, config=ClusterConfig(log=LogConfig(access=True)))
async def test_a_stream_of_another_router_is_logged_like_one_of_ours(
    bench, engine, caplog
):
    """Its client leaves each time, and has a name for the request."""
    caplog.set_level("INFO")
    body = {"prompt": [5], "stream": True}
    headers = {"X-Request-Id": "mine", "Accept": "text/event-stream"}
    for _ in range(2):
        async with bench.session.post(
            "/v1/completions", json=body, headers=headers
        ) as reply:
            assert reply.headers["X-Request-Id"] == "mine"
            event = await reply.content.readuntil(b"\n\n")
        (event_id,) = re.findall(rb"id: (cmpl-\S+)", event)
        headers["Last-Event-ID"] = event_id.decode()
    await engine.is_closed(2)
    await bench.get("/metrics")
    lines = [
        fields_of(record) for record in caplog.records if record.message == "access"
    ]
    assert [(one["request"], one["status"]) for one in lines[:2]] == [("mine", 499)] * 2


def test_refusals_do_not_flood_the_log(caplog):
    caplog.set_level("INFO")
    clock = VirtualClock(100.0)
    requests = RequestLog(LogConfig(), clock)
    refused = make_mocked_request("POST", "/v1/completions")
    running = Running()
    running.failed(Overloaded("full", code="queue_full", http_status=429))
    for second in range(2):
        for number in range(3 * MAX_REFUSALS_PER_S):
            requests.answered(refused, running, 429, f"{second}-{number}", 0.001)
        clock.advance(1.0)
    lines = [(record.message, fields_of(record)) for record in caplog.records]
    refusals = [fields["request"] for text, fields in lines if text == "request failed"]
    assert refusals == [
        f"{second}-{n}" for second in range(2) for n in range(MAX_REFUSALS_PER_S)
    ]
    others = [fields for text, fields in lines if text != "request failed"]
    assert others == [{"number": 2 * MAX_REFUSALS_PER_S}]


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


def timed(stream: RequestStream) -> None:
    stream.metrics.begin(Attempt(Key(RequestId("r"), 0, 0), (0,), 1, asked_at_s=0.0))
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
            async with bench.session.post(
                path, data=body, headers={**JSON, **(headers or {})}
            ):
                pass
            await bench.get("/health")  # which makes no span
        engine.close()

    asyncio.run(ask())
    tracer.close()
    spans = exporter.get_finished_spans()
    return {span.name: span for span in spans}


def parent_of(span: ReadableSpan) -> int:
    return int(span.parent.span_id)


def test_a_trace_continues_the_client_s_and_holds_the_stages():
    spans = traced(
        timed, {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b"}
    )
    assert list(spans) == [
        "prepare",
        "prefill",
        "decode",
        "llm_request",
        "POST /v1/completions",
    ]
    root = spans["POST /v1/completions"]
    request = spans["llm_request"]
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE}
    assert f"{parent_of(root):016x}" == PARENT
    assert root.context.trace_state.to_header() == "a=b"
    assert parent_of(request) == parent_of(spans["prepare"]) == root.context.span_id
    assert (
        parent_of(spans["decode"])
        == parent_of(spans["prefill"])
        == request.context.span_id
    )
    assert request.attributes["gen_ai.usage.output_tokens"] == 1
    assert spans["decode"].attributes == {"baton.node": "d0"}
    assert (spans["decode"].end_time, spans["prefill"].start_time) == (
        request.end_time,
        request.start_time,
    )


def test_a_trace_names_its_service_as_the_environment_says(monkeypatch):
    def named() -> tuple[object, object]:
        about = traced(timed)["llm_request"].resource.attributes
        return about["service.name"], about.get("deployment.environment")

    assert named() == ("baton", None)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    assert named() == ("mine", "test")


def test_an_error_marks_its_trace():
    root = traced(lost)["POST /v1/completions"]
    assert root.parent is None
    assert root.status.status_code is StatusCode.ERROR
    assert root.attributes["error.type"] == "node_lost"
    assert root.attributes["http.response.status_code"] == 502


def test_a_trace_that_the_client_does_not_sample_is_not_sent():
    assert traced(timed, {"traceparent": f"00-{TRACE}-{PARENT}-00"}) == {}


def test_a_router_without_traces_never_imports_opentelemetry():
    script = "import sys, baton.router.main; assert 'opentelemetry' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
