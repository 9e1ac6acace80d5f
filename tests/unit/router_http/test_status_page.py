"""The status page and its data, on toy nodes with a real router."""

import asyncio
import re
import urllib.request

import msgspec
import pytest

from baton.protocol.config import ClusterConfig, RouterConfig
from baton.protocol.errors import NodeError, Overloaded
from baton.protocol.ids import Key, RequestId
from baton.router.core.request import Attempt
from baton.router.core.stream import RequestStream
from baton.router.http.status import MAX_REQUESTS, PAGE, StatusDocument
from tests.support.completions import ask
from tests.support.http_bench import TEXT, HttpBench, lost, placed, served, well
from tests.support.router_process import (
    NUM_BLOCKS,
    WAIT_S,
    wait_until_ready,
    with_toy_nodes,
)

HOSTILE = "<img src=x onerror=document.title='broken'>"
LOCKED = ClusterConfig(router=RouterConfig(api_keys=("secret",)))
OFF = ClusterConfig(router=RouterConfig(page=False))


def moved(stream: RequestStream) -> None:
    placed(stream)
    failure = NodeError("d0 is lost").to_failure()
    first = stream.metrics.attempts[0]
    first.placed_at_s = 0.0
    first.lost_at_s = 0.5
    first.failure = failure.code
    stream.metrics.try_again(failure, is_resume=True)
    stream.metrics.begin(Attempt(Key(RequestId("r"), 0, 1), (0,), 1, asked_at_s=0.5))
    stream.push(0, TEXT.encode_now(" hello"), "stop")
    stream.finish()


async def document_of(bench: HttpBench) -> StatusDocument:
    reply = await bench.get("/status.json")
    assert reply.status == 200
    return msgspec.json.decode(reply.text, type=StatusDocument)


def ask_as(url: str, request_id: str) -> None:
    ask(
        url, {"prompt": [5, 6, 7], "max_tokens": 4}, **{"X-Request-Id": request_id}
    ).read()


def test_the_document_tells_of_nodes_pairs_and_requests(config, start):
    url = start(config).wait_for_url()

    def use() -> bytes:
        wait_until_ready(url)
        ask_as(url, HOSTILE)
        with urllib.request.urlopen(f"{url}/status.json", timeout=WAIT_S) as reply:
            data: bytes = reply.read()
        return data

    told = msgspec.json.decode(
        asyncio.run(with_toy_nodes(config, use)), type=StatusDocument
    )
    assert (told.status, told.model, told.num_requests) == ("ready", "tiny", 1)
    assert (told.num_prompt_tokens, told.num_output_tokens) == (3, 4)
    assert [(node["node_id"], node["role"]) for node in told.nodes] == [
        ("d0", "decode"),
        ("p0", "prefill"),
    ]
    load = told.nodes[0]["load"]
    assert load["free_blocks"] == NUM_BLOCKS
    (pair,) = told.pairs
    assert (pair.prefill_node, pair.decode_node) == ("p0", "d0")
    assert (pair.num_handoffs, pair.num_failures, pair.reason) == (1, 0, "")
    (request,) = told.requests
    assert (request.request_id, request.status, request.outcome) == (
        HOSTILE,
        200,
        "finished",
    )
    assert (request.num_prompt_tokens, request.num_output_tokens) == (3, 4)
    assert 0.0 < request.first_token_s <= request.e2e_s
    assert (request.num_attempts, request.prefill_node, request.decode_node) == (
        1,
        "p0",
        "d0",
    )
    assert sum(one.duration_s for one in request.stages) == pytest.approx(request.e2e_s)
    assert told.faults == []


@served(script=well)
async def test_only_the_last_requests_are_kept(bench):
    for number in range(MAX_REQUESTS + 2):
        headers = {"X-Request-Id": f"r{number}"}
        body = {"prompt": [5]}
        async with bench.session.post(
            "/v1/completions", json=body, headers=headers
        ) as reply:
            assert reply.status == 200
    told = await document_of(bench)
    names = [one.request_id for one in told.requests]
    assert names == [f"r{number}" for number in range(MAX_REQUESTS + 1, 1, -1)]


@served()
async def test_faults_name_what_was_lost_and_refusals_do_not_flood_them(bench, engine):
    engine.script = lost
    assert (await bench.post({"prompt": [5]})).status == 502
    engine.script = moved
    assert (await bench.post({"prompt": [5]})).status == 200
    engine.refusal = Overloaded("full", code="queue_full", http_status=429)
    for _ in range(3):
        assert (await bench.post({"prompt": [5]})).status == 429
    assert (await bench.post({"prompt": -1})).status == 400
    told = await document_of(bench)
    assert [(one.code, one.decode_node, one.count) for one in told.faults] == [
        ("queue_full", None, 3),
        ("node_lost", "d0", 1),
        ("node_lost", "d0", 1),
    ]
    assert (told.num_refused, told.num_failed) == (3, 1)
    assert [one.outcome for one in told.requests] == ["finished", "node_lost"]
    assert "node_lost" in [stage.failure for stage in told.requests[0].stages]


@served(config=LOCKED)
async def test_the_page_is_open_and_its_data_needs_the_key(bench):
    page = await bench.get("/")
    assert page.status == 200
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    policy = page.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert (await bench.get("/status.json")).status == 401
    key = {"Authorization": "Bearer secret"}
    async with bench.session.get("/status.json", headers=key) as reply:
        assert (reply.status, reply.headers["Cache-Control"]) == (200, "no-store")


@served(config=OFF)
async def test_without_the_page_there_is_neither_page_nor_data(bench):
    for path in ("/", "/status.json"):
        reply = await bench.get(path)
        assert (reply.status, reply.error["code"]) == (404, "unknown_url")


def test_the_page_sets_text_only_and_loads_nothing_else():
    page = PAGE.read_text()
    for way in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
    ):
        assert way not in page
    assert re.findall(r"https?://[^\"]+", page) == ["http://www.w3.org/2000/svg"]
    assert re.findall(r"(?:src|href)=\"([^\"]*)", page) == ["data:,"]
    assert len(re.findall(r"<script|<style", page)) == 2
