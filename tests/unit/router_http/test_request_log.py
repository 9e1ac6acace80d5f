"""What the log says about requests, over real HTTP."""

import asyncio
import re
from collections.abc import Callable

import pytest
from aiohttp.test_utils import make_mocked_request

from baton.protocol.config import ClusterConfig, LogConfig
from baton.protocol.errors import NodeError, Overloaded
from baton.router.http.request_log import MAX_REFUSALS_PER_S, RequestLog, Running
from baton.router.stream import RequestStream
from tests.support.http_bench import TEXT, HttpBench, ScriptedEngine, lost, placed, served, well
from tests.support.virtual_clock import VirtualClock

LOST = NodeError("d0 is lost").to_failure()


def begun(stream: RequestStream) -> None:
    stream.push(0, TEXT.encode_now(" hello"), None)


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
) -> list[tuple[str, dict[str, object]]]:
    """The lines about one streamed request."""
    caplog.set_level("INFO")
    caplog.clear()

    async def ask() -> str:
        engine = ScriptedEngine(script)
        async with HttpBench(engine, ClusterConfig(log=LogConfig(access=access))) as bench:
            reply = await bench.post({"prompt": [5, 6], "stream": True})
        engine.close()
        return reply.headers["X-Request-Id"]

    shown = asyncio.run(ask())
    lines = [(record.message, fields_of(record)) for record in caplog.records]
    assert [fields["request"] for _, fields in lines] == [shown] * len(lines)
    return lines


def test_a_request_that_failed_has_one_line_with_its_id_nodes_and_stages(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ((text, fields),) = told(caplog, lost)
    assert text == "request failed"
    assert fields.items() >= {
        "status": 502, "code": "node_lost", "reason": "d0 is lost", "prefill": "p0",
        "decode": "d0", "prompt_tokens": 2, "output_tokens": 1, "attempts": 1, "prefill_s": 0.25,
    }.items()  # fmt: skip


def test_a_request_that_was_resumed_has_one_line_that_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ((text, fields),) = told(caplog, resumed)
    assert text == "request resumed after a loss"
    assert (fields["resumes"], fields["lost_by"]) == (1, "node_lost:1")


def test_a_request_that_went_well_has_a_line_in_the_access_log_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert told(caplog, well) == []
    ((text, fields),) = told(caplog, well, access=True)
    assert text == "access"
    assert fields.items() >= {
        "method": "POST", "path": "/v1/completions", "status": 200, "client": "127.0.0.1",
        "prefill": "p0", "decode": "d0", "prompt_tokens": 2, "output_tokens": 1,
    }.items()  # fmt: skip


@pytest.mark.parametrize("level", ["INFO", "DEBUG"])
def test_probes_do_not_flood_the_access_log(level: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(level)
    requests = RequestLog(LogConfig(access=True))
    for path in ("/health", "/v1/models", "/status.json"):
        requests.answered(make_mocked_request("GET", path), None, 200, "id", 0.001)
    paths = [fields_of(record)["path"] for record in caplog.records]
    every = ["/health", "/v1/models", "/status.json"]
    assert paths == (every if level == "DEBUG" else ["/v1/models"])


@served(script=begun, config=ClusterConfig(log=LogConfig(access=True)))
async def test_a_stream_of_another_router_is_logged_and_timed_like_one_of_ours(
    bench: HttpBench, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """Its client leaves each time, and has a name for the request."""
    caplog.set_level("INFO")
    body, headers = {"prompt": [5], "stream": True}, {"X-Request-Id": "mine"}
    async with bench.session.post("/v1/completions", json=body, headers=headers) as reply:
        event = await reply.content.readuntil(b"\n\n")
    (name,) = re.findall(rb"id: (cmpl-\w+):", event)
    async with bench.session.get(f"/v1/streams/{name.decode()}") as reply:
        assert reply.headers["X-Request-Id"] == "mine"
        await reply.content.readuntil(b"\n\n")
    await engine.is_closed(2)
    assert engine.streams[1].token_gaps is engine.streams[0].token_gaps is not None
    await bench.get("/metrics")
    lines = [fields_of(record) for record in caplog.records if record.message == "access"]
    assert [(one["request"], one["status"]) for one in lines[:2]] == [("mine", 499)] * 2


def test_refusals_do_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    clock = VirtualClock(100.0)
    requests = RequestLog(LogConfig(), clock)
    refused, running = make_mocked_request("POST", "/v1/completions"), Running()
    running.failed(Overloaded("full", code="queue_full", http_status=429))
    for second in range(2):
        for number in range(3 * MAX_REFUSALS_PER_S):
            requests.answered(refused, running, 429, f"{second}-{number}", 0.001)
        clock.advance(1.0)
    lines = [(record.message, fields_of(record)) for record in caplog.records]
    refusals = [fields["request"] for text, fields in lines if text == "request failed"]
    assert refusals == [f"{second}-{n}" for second in range(2) for n in range(MAX_REFUSALS_PER_S)]
    others = [fields for text, fields in lines if text != "request failed"]
    assert others == [{"number": 2 * MAX_REFUSALS_PER_S}]
