"""What is asked of every request before its body counts, and what is counted."""

import asyncio
import json
import os
import socket
import stat
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from baton.protocol.config import ClusterConfig, RouterConfig
from baton.protocol.errors import ConfigError, Overloaded, RequestError
from baton.protocol.sampling import Scope
from baton.router.core.request import Caller, Tenant
from baton.router.core.stream import RequestStream
from baton.router.http import connections
from baton.router.http.auth import Access, add_key, digest_of, read_keys
from tests.support.http_bench import (
    JSON,
    TEXT,
    HttpBench,
    Reply,
    ScriptedEngine,
    events_of,
    hello,
    served,
)
from tests.support.refusals import raises

TYPE = "Content-Type: application/json\r\n"
LOCKED = ClusterConfig(router=RouterConfig(api_keys=("first", "sécond")))
NAMED = ClusterConfig(router=RouterConfig(allowed_hosts=("llm.example", "::1")))


async def ask(bench: HttpBench, path: str = "/v1/completions", **headers: str) -> Reply:
    async with bench.session.post(
        path, data=b'{"prompt":[5]}', headers={**JSON, **headers}
    ) as reply:
        return Reply(reply.status, reply.headers, await reply.text())


@served(script=hello, config=LOCKED)
async def test_only_a_valid_key_opens_more_than_the_probes(bench, engine):
    for wrong in (
        "",
        "first",
        "Basic first",
        "Bearer",
        "Bearer firs",
        "Bearer first second",
    ):
        refused = await ask(bench, Authorization=wrong)
        assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
        assert refused.error["type"] == "authentication_error"
        assert refused.headers["WWW-Authenticate"] == "Bearer"
    for path in ("/v1/models", "/metrics", "/version", "/nothing"):
        assert (await bench.get(path)).status == 401
    assert engine.streams == []
    for right in ("Bearer first", "bearer sécond"):
        assert (await ask(bench, Authorization=right)).status == 200
    for path in ("/live", "/health"):
        assert (await bench.get(path)).status == 200


@pytest.mark.parametrize("host", ["::", "*", "0.0.0.0"])
def test_a_server_on_every_address_takes_connections_of_both_families(host, tmp_path):
    @served(script=hello, config=ClusterConfig(router=RouterConfig(host=host)))
    async def connects(bench: HttpBench) -> None:
        port = int(bench.url.rpartition(":")[2])
        addresses = ["127.0.0.1"]
        if host != "0.0.0.0" and socket.has_dualstack_ipv6():
            addresses.append("::1")
        for address in addresses:
            _, writer = await asyncio.open_connection(address, port)
            writer.close()

    connects(tmp_path=tmp_path)


def test_metrics_need_no_key_at_the_port_that_has_no_clients():
    with socket.create_server(("127.0.0.1", 0)) as free:
        own_port = free.getsockname()[1]
    config = msgspec.structs.replace(LOCKED.router, own_port=own_port)

    async def ask_both() -> dict[str, int]:
        statuses = {}
        async with HttpBench(
            ScriptedEngine(hello), ClusterConfig(router=config)
        ) as bench:
            assert (await bench.get("/metrics")).status == 401
            async with aiohttp.ClientSession(f"http://127.0.0.1:{own_port}") as session:
                for path in ("/metrics", "/v1/models", "/status.json"):
                    async with session.get(path) as reply:
                        statuses[path] = reply.status
        return statuses

    statuses = asyncio.run(ask_both())
    assert statuses == {"/metrics": 200, "/v1/models": 401, "/status.json": 401}


@served(script=hello, config=NAMED)
async def test_other_hosts_are_refused_if_hosts_are_named(bench):
    for host in ("evil.example", "llm.example.evil.example:80", "llm.example:x"):
        refused = await ask(bench, Host=host)
        assert (refused.status, refused.error["code"]) == (421, "wrong_host")
    for host in ("llm.example", "LLM.example:8000"):
        assert (await ask(bench, Host=host)).status == 200
    assert (await bench.get("/live")).status == 200


@pytest.mark.parametrize(
    ("router", "is_refused"),
    [
        (RouterConfig(), True),
        (RouterConfig(host="0.0.0.0"), False),
        (RouterConfig(allowed_hosts=("*",)), False),
        (RouterConfig(api_keys=("secret",)), False),
    ],
    ids=["loopback", "open", "all hosts", "with a key"],
)
def test_a_page_that_rebinds_its_name_to_this_host_is_refused(
    router, is_refused, tmp_path
):
    @served(script=hello, config=ClusterConfig(router=router))
    async def check(bench: HttpBench) -> None:
        for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example"):
            reply = await ask(bench, Host=host, Authorization="Bearer secret")
            assert reply.status == (421 if is_refused else 200)
            probe = await bench.get("/health", Host=host)
            assert probe.status == (421 if is_refused else 200), "it names the nodes"
        for host in (
            "localhost:8000",
            "127.0.0.1",
            "[::1]:8000",
            "10.1.2.3:80",
            "box",
            "me.local.",
        ):
            assert (
                await ask(bench, Host=host, Authorization="Bearer secret")
            ).status == 200

    check(tmp_path=tmp_path)


PAGE = "https://chat.example"
STRANGER = "https://evil.example"


async def seen_by_page(
    bench: HttpBench, method: str, origin: str
) -> tuple[int, str | None]:
    """Return the status of an answer, and the origin that may read it."""
    headers = {"Origin": origin, **JSON}
    if method == "OPTIONS":
        headers["Access-Control-Request-Method"] = "POST"
    async with bench.session.request(
        method, "/v1/completions", data=b'{"prompt":[5],"stream":true}', headers=headers
    ) as reply:
        await reply.read()
        return reply.status, reply.headers.get("Access-Control-Allow-Origin")


@served(script=hello)
async def test_no_page_of_another_origin_may_call_by_default(bench):
    assert await seen_by_page(bench, "OPTIONS", PAGE) == (405, None)
    assert await seen_by_page(bench, "POST", PAGE) == (200, None)


@pytest.mark.parametrize(("allowed", "stranger"), [(PAGE, None), ("*", STRANGER)])
@pytest.mark.parametrize("keys", [(), ("secret",)])
def test_pages_of_allowed_origins_may_call_and_need_no_key_to_ask(
    allowed, stranger, keys, tmp_path
):
    router = RouterConfig(allowed_origins=(allowed,), api_keys=keys)

    @served(script=hello, config=ClusterConfig(router=router))
    async def check(bench: HttpBench) -> None:
        assert await seen_by_page(bench, "OPTIONS", PAGE) == (204, PAGE)
        asks = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
        async with bench.session.options("/v1/messages", headers=asks) as reply:
            # Clients send x-api-key, x-stainless-os and more.
            assert reply.headers["Access-Control-Allow-Headers"] == "*, Authorization"
            assert "Access-Control-Allow-Private-Network" not in reply.headers
            assert "Baton-Max-Tokens" in reply.headers["Access-Control-Expose-Headers"]
        asks["Access-Control-Request-Private-Network"] = "true"
        async with bench.session.options("/v1/messages", headers=asks) as reply:
            assert reply.headers["Access-Control-Allow-Private-Network"] == "true"
        status = 401 if keys else 200
        assert await seen_by_page(bench, "POST", PAGE) == (status, PAGE)
        assert (await seen_by_page(bench, "POST", STRANGER))[1] == stranger

    check(tmp_path=tmp_path)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", ""]
)
@served()
async def test_a_body_that_does_not_say_it_is_json_is_415(bench, kind):
    async with bench.session.post(
        "/v1/completions",
        data=b'{"prompt":[5]}',
        headers={"Content-Type": kind} if kind else {},
        skip_auto_headers=["Content-Type"],
    ) as reply:
        assert reply.status == 415
        error = json.loads(await reply.text())["error"]
    assert error["code"] == "unsupported_media_type"
    assert "application/json" in error["message"]


@served(script=hello)
async def test_the_kind_of_json_may_have_parameters(bench):
    for kind in ("application/json; charset=utf-8", "application/vnd.api+json"):
        assert (await ask(bench, **{"Content-Type": kind})).status == 200


@served(script=hello)
async def test_every_answer_has_a_request_id_errors_too(bench):
    for path, status in (("/nothing", 404), ("/v1/completions", 405), ("/live", 200)):
        async with bench.session.get(path, headers={"X-Request-Id": "mine-7"}) as reply:
            assert (reply.status, reply.headers["X-Request-Id"]) == (status, "mine-7")
    names = {(await bench.post(b"{")).headers["X-Request-Id"] for _ in range(2)}
    assert len(names) == 2
    assert (await ask(bench, **{"X-Request-Id": "mine-8"})).headers[
        "X-Request-Id"
    ] == "mine-8"


def full(stream: RequestStream) -> None:
    stream.finish(Overloaded("full", code="queue_full", http_status=429))


def full_later(stream: RequestStream) -> None:
    stream.push(0, TEXT.encode_now(" hello"), None)
    stream.finish(Overloaded("no node", code="no_nodes"))


@served()
async def test_every_answer_that_asks_to_come_again_is_counted_and_says_when(
    bench, engine
):
    engine.refusal = Overloaded("full", code="queue_full", http_status=429)
    assert "Retry-After" in (await bench.post({"prompt": [5]})).headers
    engine.refusal = None
    engine.script = full
    assert "Retry-After" in (await bench.post({"prompt": [5]})).headers
    engine.script = full_later
    assert (await bench.post({"prompt": [5], "stream": True})).status == 200
    engine.is_ready = False
    assert "Retry-After" in (await bench.post({"prompt": [5]})).headers
    engine.is_ready = True
    text = (await bench.get("/metrics")).text
    for code, status, num in (
        ("queue_full", 429, 2),
        ("no_nodes", 503, 1),
        ("not_ready", 503, 1),
    ):
        assert f'{{code="{code}",model_name="tiny",status="{status}"}} {num}.0' in text


@served()
async def test_an_echo_of_no_tokens_is_the_prompt(bench, engine):
    body = {"prompt": ["the end", "hello"], "max_tokens": 0, "echo": True, "n": 2}
    whole = (await bench.post({**body})).json
    texts = [(choice["text"], choice["finish_reason"]) for choice in whole["choices"]]
    assert texts == [("the end", "length")] * 2 + [("hello", "length")] * 2
    num_prompt = sum(len(TEXT.encode_now(text)) for text in ("the end", "hello"))
    assert (
        whole["usage"]["prompt_tokens"] == whole["usage"]["total_tokens"] == num_prompt
    )
    streamed = await bench.post({**body, "prompt": [5, 6], "n": 1, "stream": True})
    chunk, end, done = events_of(streamed.text)
    assert json.loads(chunk[1])["choices"][0]["text"] == TEXT.decode([5, 6])
    assert json.loads(end[1])["choices"][0]["finish_reason"] == "length"
    assert done[1] == "[DONE]"
    too_long = await bench.post({**body, "prompt": [5] * 256})
    assert (too_long.status, too_long.error["code"]) == (400, "context_length_exceeded")
    assert engine.streams == []


@pytest.mark.parametrize(("max_body_mib", "limit"), [(64, 4), (1, 1)])
def test_a_body_larger_than_the_models_longest_prompt_or_the_setting_is_413(
    max_body_mib, limit, tmp_path
):
    """The model takes 256 tokens, so 4 MiB are plenty."""

    @served(config=ClusterConfig(router=RouterConfig(max_body_mib=max_body_mib)))
    async def check(bench: HttpBench) -> None:
        reply = await bench.post({"prompt": "x" * (limit * 1_100_000)})
        assert (reply.status, reply.error["code"]) == (413, "body_too_large")
        assert f"{limit} MiB" in str(reply.error["message"])

    check(tmp_path=tmp_path)


@served(script=hello, config=ClusterConfig(router=RouterConfig(max_body_mib=1)))
async def test_bodies_that_stall_lose_their_memory(bench):
    """Sixteen bodies of the largest size may be in memory at once."""
    with mock.patch.object(connections, "STALLED_S", 2.0):
        await let_bodies_stall(bench)


async def let_bodies_stall(bench: HttpBench) -> None:
    paths = ("/v1/completions", "/tokenize")  # which share the memory
    heads = [
        f"POST {path} HTTP/1.1\r\nHost: x\r\n{TYPE}Content-Length: {2**20}\r\n\r\n".encode()
        for path in paths
    ]
    coming = [await bench.dial() for _ in range(20)]
    lines = [asyncio.create_task(reader.readline()) for reader, _ in coming]
    large = {"prompt": [5], "user": "x" * 100_000}
    for number, (_, writer) in enumerate(coming):
        writer.write(heads[number % 2] + b" " * 9_000)
    assert (await bench.post(large)).status == 200  # announcements hold nothing
    assert not any(line.done() for line in lines)
    for _, writer in coming:
        writer.write(b" " * (2**20 - 9_001))
    answers = asyncio.as_completed(lines)
    assert {(await next(answers)).split()[1] for _ in range(4)} == {b"503"}
    assert (await bench.post({"prompt": [5]})).status == 200
    # Now all memory is taken, until those that have stalled are refused.
    assert {(await answer).split()[1] for answer in answers} == {b"408"}
    assert (await bench.post(large)).status == 200
    for _, writer in coming:
        writer.close()


@served()
async def test_the_description_of_the_api_has_every_path_and_the_fields_of_its_bodies(
    bench,
):
    described = (await bench.get("/openapi.json")).json
    served = {
        (route.resource.canonical, route.method.lower())
        for route in bench.app.application.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    paths: dict[str, dict[str, object]] = described["paths"]
    told = {(path, method) for path, methods in paths.items() for method in methods}
    of_pages = {("/", "get"), ("/status.json", "get"), ("/openapi.json", "get")}
    assert told == served - of_pages - {("/ping", "post")}
    schemas = described["components"]["schemas"]
    assert {"tools", "logit_bias"} <= schemas["ChatBody"]["properties"].keys()
    assert not schemas["CompletionBody"]["additionalProperties"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys"


def test_a_key_is_added_without_touching_the_others_and_is_stored_nowhere(path):
    first = add_key(path, "alice")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    # Edited by hand.
    path.write_text(path.read_text().rstrip() + "\n\n# of the batch job")
    second = add_key(path, "")
    assert first != second
    assert first not in path.read_text()
    assert " alice\n" in path.read_text()
    keys = read_keys(path)
    assert [digest_of(key.encode()) in keys for key in (first, second, "other")] == [
        True,
        True,
        False,
    ]


def test_a_line_of_the_file_may_give_its_key_another_weight(path):
    keys = [add_key(path, name) for name in ("alice", "the batch job", "weight=3", "")]
    lines = path.read_text().splitlines()
    lines[1] += " weight=0.25"
    lines[3] += "  weight=7 "
    path.write_text("\n".join(lines))
    tenants = read_keys(path)
    weights = [tenants[digest_of(key.encode())].weight for key in keys]
    assert weights == [1.0, 0.25, 3.0, 7.0]
    for wrong in ("", "0", "-1", "nan", "inf", "1000", "much"):
        path.write_text(f"{lines[0]} weight={wrong}\n")
        with pytest.raises(
            ConfigError, match=r"line 1: weight=.* is not a number from 0.01 to 10"
        ):
            read_keys(path)


def test_a_line_of_the_file_may_say_with_whom_its_key_shares_cached_blocks(path):
    keys = [add_key(path, name) for name in ("alice", "bob", "carol", "dave")]
    lines = path.read_text().splitlines()
    lines[0] += " salt=x weight=2"
    lines[1] += " weight=3 salt=x"
    lines[2] += " salt=y"
    path.write_text("\n".join(lines))
    tenants = [read_keys(path)[digest_of(key.encode())] for key in keys]
    assert [(one.weight, one.cache_salt) for one in tenants] == [
        (2.0, "x"),
        (3.0, "x"),
        (1.0, "y"),
        (1.0, ""),
    ]
    roots = [Caller.of(Scope(), one).scope.root for one in tenants]
    assert roots[0] == roots[1]
    assert len(set(roots)) == 3
    # What a client sends can look like no operator's salt, and divides what it has.
    for salt in ("x", "\0x"):
        roots += [
            Caller.of(Scope(cache_salt=salt), one).scope.root for one in tenants[1:]
        ]
    assert len(set(roots)) == 9
    path.write_text(f"{lines[3]} salt={'x' * 257}\n")
    with pytest.raises(ConfigError, match="line 1: a salt has at most 256 characters"):
        read_keys(path)


@served(script=hello, config=LOCKED)
async def test_requests_count_for_their_key(bench, engine):
    names = []
    for header in ("Bearer first", "bearer  first", "Bearer sécond"):
        assert (await ask(bench, Authorization=header)).status == 200
        names.append(engine.caller.tenant.name)
    assert names[0] == names[1] != names[2]
    assert not any("first" in name for name in names)


@served(script=hello, config=LOCKED)
async def test_the_salt_of_a_key_reaches_its_requests(bench, engine, monkeypatch):
    monkeypatch.setattr(Access, "tenant_of", lambda *_: Tenant("alice", cache_salt="x"))
    assert (await ask(bench, Authorization="Bearer first")).status == 200
    assert engine.caller.scope == Scope(tenant_salt="x")


def test_without_keys_requests_count_for_their_address_and_in_ipv6_for_its_network():
    access = Access(RouterConfig())

    def tenant(address: str) -> str:
        request = make_mocked_request("GET", "/").clone(remote=address)
        return access.tenant_of(request).name

    assert tenant("192.0.2.7") == tenant("::ffff:192.0.2.7") == "192.0.2.7"
    assert (
        tenant("2001:db8:1:2:3::1")
        == tenant("2001:db8:1:2:ffff::9")
        == "2001:db8:1:2::/64"
    )
    assert tenant("2001:db8:1:3::1") != tenant("2001:db8:1:2::1")
    assert tenant("fe80::1%eth0") == "fe80::/64"
    assert tenant("") == ""


@pytest.mark.parametrize("damage", ["sha256:12", "secret", "\ud800"])
def test_a_damaged_or_missing_file_stops_a_start(damage, path):
    path.write_bytes(b"\n" + damage.encode(errors="surrogatepass"))
    with pytest.raises(ConfigError, match=r"line 2|not text"):
        read_keys(path)
    path.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        read_keys(path)


def test_a_name_of_two_lines_is_refused(path):
    with pytest.raises(ConfigError, match="one line"):
        add_key(path, "alice\nsha256:0")
    assert not path.exists()
    with pytest.raises(ConfigError, match="cannot write"):
        add_key(Path(os.devnull) / "keys", "alice")


def test_keys_of_the_file_and_of_the_settings_are_both_taken(path):
    key = add_key(path, "alice")
    access = Access(RouterConfig(api_keys=("plain",), api_key_file=str(path)))
    only_file = Access(RouterConfig(api_key_file=str(path)))
    for given in (key, "plain"):
        access.check(request_with(given))
    only_file.check(request_with(key))
    for refusing, given in ((access, "other"), (only_file, "plain"), (only_file, "")):
        with raises(RequestError, "invalid_api_key"):
            refusing.check(request_with(given))


def request_with(key: str) -> web.Request:
    return make_mocked_request("GET", "/v1/models", {"Authorization": f"Bearer {key}"})


@served(script=hello)
async def test_a_path_with_a_doubled_version_or_a_slash_at_its_end_gets_the_right_one(
    bench,
):
    for path in ("/v1/v1/completions", "/v1/completions/"):
        reply = await bench.post({"prompt": "x"}, path)
        error: Any = reply.json
        assert reply.status == 404
        assert error["error"]["message"].endswith("did you mean /v1/completions?")
