"""Nodes that come, go, pause and do not fit, as the router sees them over real sockets."""

import asyncio
import json
import time
from typing import Any

import pytest

from baton.protocol.blocks import block_hashes, pack_keys
from baton.protocol.codec import to_router_codec
from baton.protocol.config import ClusterConfig, RouterConfig
from baton.protocol.errors import TransferError
from baton.protocol.ids import Key, NodeId, RequestId
from baton.protocol.messages import (
    CacheChanges,
    Cancel,
    Decode,
    DrainState,
    Failed,
    Peers,
    Prefill,
    Profile,
    Refused,
    ResetPrefixCache,
    TokenEntry,
    Tokens,
    WatchCache,
)
from baton.protocol.sampling import SamplingParams, Scope
from baton.router.core.node_link import BATCH, Heard, NodeLink
from baton.router.core.request import Caller
from baton.router.outputs import RequestOutput
from baton.runtime.channels.listener import Channels
from baton.runtime.channels.wire import HEADER, RESET, new_identity
from tests.support.channel_ends import bare, encoded, frame
from tests.support.http_bench import HttpBench
from tests.support.router_bench import (
    GREEDY,
    PROMPT,
    RouterBench,
    collected,
    routed,
    whole,
)
from tests.support.scripted_nodes import (
    BLOCK_SIZE,
    ScriptedNode,
    hello_of,
    node_info,
    toy_answer,
)


@routed()
async def test_a_decode_node_that_dies_is_replaced_without_a_seam(bench):
    await bench.toy(node_info("p0", "prefill"))
    dying = await bench.toy(node_info("d0", "decode"), max_steps=3)
    other = await bench.toy(node_info("d1", "decode"))
    params = SamplingParams(n=2, max_tokens=10, seed=3)
    outputs: list[RequestOutput] = []
    stream = await bench.router.submit(PROMPT, params)
    async for output in stream.outputs():
        outputs.append(output)
        if dying.is_open and all(len(o.token_ids) == 3 for o in output.outputs):
            dying.die()
    expected = [toy_answer(PROMPT, 10, choice) for choice in range(2)]
    assert [part.token_ids for part in outputs[-1].outputs] == expected
    assert outputs[-1].metrics.resumed
    resumes = [order for order in other.orders if order.key.attempt == 1]
    assert [(order.num_choices, order.num_prompt_tokens) for order in resumes] == [
        (1, 6)
    ] * 2
    assert all(len(order.token_ids) == 9 for order in resumes)
    await bench.settled()


@routed()
async def test_nodes_hear_of_their_peers_each_time_the_set_changes(bench):
    prefill, decode = await bench.pair()
    assert [info.node_id for info in (await prefill.hear(Peers)).nodes] == ["d0"]
    other = await bench.scripted(node_info("p1", "prefill"))
    assert [info.node_id for info in (await decode.hear(Peers)).nodes] == ["p0", "p1"]
    other.die()
    assert [info.node_id for info in (await decode.hear(Peers)).nodes] == ["p0"]


@routed(RouterConfig(local_prefill_tokens=4))
async def test_a_router_sends_prompts_where_they_are_cached_and_asks_again_after_a_gap(
    bench,
):
    prompt = list(range(1, 41))
    hashes = block_hashes(prompt, BLOCK_SIZE)
    await bench.toy(node_info("p0", "prefill"))
    decodes = [
        await bench.toy(node_info(f"d{number}", "decode")) for number in range(2)
    ]
    await decodes[1].hear(WatchCache)
    decodes[1].say(CacheChanges(0, pack_keys(hashes[:4])))
    decodes[1].say(CacheChanges(1, pack_keys(hashes[4:])))
    caches = bench.core.registry.caches
    await bench.until(lambda: caches.num_blocks(NodeId("d1")) == len(hashes))
    output = await whole(bench.router, prompt=prompt)
    assert (output.metrics.path, output.metrics.num_predicted_tokens) == (
        "local_prefill",
        36,
    )
    (order,) = decodes[1].orders
    assert isinstance(order, Decode)
    assert order.max_uncached_tokens == 8
    decodes[1].say(CacheChanges(3, removed=pack_keys(hashes[-1:])))
    await decodes[1].hear(WatchCache)
    assert (caches.num_blocks(NodeId("d1")), bench.core.health().num_cache_gaps) == (
        0,
        1,
    )
    assert (await whole(bench.router, prompt=prompt)).metrics.path == "disaggregated"
    decodes[1].say(CacheChanges(0, pack_keys(hashes)))
    await bench.until(lambda: caches.num_blocks(NodeId("d1")) == len(hashes))
    decodes[1].die()
    await bench.until(lambda: caches.num_blocks(NodeId("d1")) == 0)
    await bench.settled()


@routed(RouterConfig(local_prefill_tokens=4))
async def test_prompts_are_looked_for_in_caches_by_their_salt(bench):
    prompt = list(range(1, 41))
    await bench.toy(node_info("p0", "prefill"))
    decode = await bench.toy(node_info("d0", "decode"))
    await decode.hear(WatchCache)
    hashes = block_hashes(prompt, BLOCK_SIZE, root=Scope(cache_salt="mine").root)
    decode.say(CacheChanges(0, pack_keys(hashes)))
    await bench.until(
        lambda: bench.core.registry.caches.num_blocks(NodeId("d0")) == len(hashes)
    )
    for salt, num_cached in (("mine", 36), ("yours", 0), ("", 0)):
        stream = await bench.router.submit(
            prompt, GREEDY, caller=Caller(Scope(cache_salt=salt))
        )
        output = await collected(stream)
        assert output.metrics.num_predicted_tokens == num_cached


@routed()
async def test_prefix_caches_are_reset_on_every_node_if_the_setting_allows_it(bench):
    nodes = await bench.pair()
    for is_on in (False, True):
        config = ClusterConfig(router=RouterConfig(dev_endpoints=is_on))
        async with HttpBench(bench.router, config) as http:
            assert (await http.post({}, "/reset_prefix_cache")).status == (
                200 if is_on else 404
            )
            for path in ("/reset_prefix_cache", "/start_profile", "/stop_profile"):
                page = await http.post({}, path, Origin="http://127.0.0.1:3000")
                assert page.status == (403 if is_on else 404)
    for node in nodes:
        await node.hear(ResetPrefixCache)
        assert not any(isinstance(message, ResetPrefixCache) for message in node.heard)


@routed()
async def test_a_profile_is_begun_once_and_ended_once_at_the_nodes_that_still_record_it(
    bench,
):
    prefill, decode = await bench.pair()
    config = ClusterConfig(router=RouterConfig(dev_endpoints=True))
    async with HttpBench(bench.router, config) as http:

        async def asked(path: str, status: int = 200) -> dict[str, Any]:
            reply = await http.post({}, path)
            assert reply.status == status
            body: dict[str, Any] = json.loads(reply.text)
            return body

        assert (await asked("/stop_profile", 400))["error"]["code"] == "no_profile"
        begun = await asked("/start_profile")
        assert (set(begun["nodes"]), begun["lost"]) == ({"p0", "d0"}, [])
        assert (await decode.hear(Profile)).name == begun["name"]
        assert (await asked("/start_profile", 400))["error"][
            "code"
        ] == "profile_running"
        prefill.die()
        await bench.until(lambda: bench.core.registry.node(NodeId("p0")) is None)
        again = await bench.scripted(node_info("p0", "prefill", epoch="another"))
        assert await asked("/stop_profile") == {
            **begun,
            "nodes": ["d0"],
            "lost": ["p0"],
        }
        assert (await decode.hear(Profile)).name == ""
        assert not any(isinstance(message, Profile) for message in again.heard)
        assert (await asked("/start_profile"))["name"] != begun["name"]


@routed(RouterConfig(routing="least-loaded", local_prefill="never"))
async def test_a_router_that_goes_by_load_alone_asks_for_no_caches(bench):
    prefill, decode = await bench.toy_pair()
    assert (await whole(bench.router)).finished
    assert not any(
        isinstance(message, WatchCache) for message in prefill.heard + decode.heard
    )


@routed()
async def test_a_second_process_of_one_name_is_refused_and_the_first_serves_on(bench):
    _, decode = await bench.pair()
    twin = ScriptedNode(bench.endpoint, node_info("d0", "decode", epoch="another"))
    bench.nodes.append(twin)
    twin.join()
    assert (await twin.hear(Refused)).failure.code == "duplicate_node"
    stream = await bench.router.submit(PROMPT, GREEDY)
    assert (await decode.hear(Decode)).key.attempt == 0
    stream.close()
    decode.die()
    await bench.until(lambda: not bench.core.registry.in_service("decode"))
    # The name is free again.
    await bench.scripted(node_info("d0", "decode", epoch="another"))


@routed()
async def test_a_cancel_waits_for_its_process_and_not_for_another_of_the_name(bench):
    _, decode = await bench.pair()
    await bench.router.submit(PROMPT, GREEDY)
    key = (await decode.hear(Decode)).key
    decode.die()
    await bench.until(lambda: not bench.core.registry.in_service("decode"))
    twin = await bench.scripted(node_info("d0", "decode", epoch="another"))
    twin.die()
    await bench.until(lambda: not bench.core.registry.in_service("decode"))
    back = await bench.scripted(decode.info)
    assert key in (await back.hear(Cancel)).keys
    assert not any(isinstance(one, Cancel) and key in one.keys for one in twin.heard)


@routed()
async def test_a_successor_is_taken_in_although_the_router_reads_late(bench):
    """The router reads its hello and the end of the predecessor's connection together."""
    _, decode = await bench.pair()
    decode.die()
    successor = ScriptedNode(bench.endpoint, node_info("d0", "decode", epoch="another"))
    bench.nodes.append(successor)
    successor.join()
    time.sleep(0.5)  # noqa: ASYNC251  (the router's loop stands still)
    await bench.until(
        lambda: (
            [n.epoch for n in bench.core.registry.in_service("decode")] == ["another"]
        )
    )


@routed()
async def test_of_two_connections_of_a_process_the_one_that_is_not_taken_is_told(bench):
    """A stalled router may read of the older connection last."""
    info = node_info("d0", "decode")
    introduction = to_router_codec().encode(hello_of(info))
    registry = bench.core.registry
    identities = new_identity(b"d0"), new_identity(b"d0")
    with (
        bare(bench.endpoint, identities[0]) as newer,
        bare(bench.endpoint, identities[1]) as older,
    ):
        newer.send(frame(7, 0, introduction))
        await bench.until(lambda: registry.node(info.node_id) is not None)
        older.send(frame(8, 0, introduction))
        await bench.until(lambda: bool(newer.poll(0)))
        assert HEADER.unpack(newer.recv()) == (7, RESET)
        # Until it introduces itself, a connection is nobody's.
        older.send(frame(9, 0, encoded(1)))
        await bench.until(lambda: registry.node(info.node_id) is None)
        assert HEADER.unpack(older.recv()) == (8, RESET)
        assert HEADER.unpack(older.recv()) == (9, RESET)


async def until_silent(bench: RouterBench, silent: str, *others: ScriptedNode) -> None:
    """Move the clock until that decode node is out; the others are heard every second."""

    def ages() -> list[float]:
        return [
            n.heartbeat_age_s for n in bench.core.health().nodes if n.node_id != silent
        ]

    while silent in [node.node_id for node in bench.core.registry.in_service("decode")]:
        bench.clock.advance(1.0)
        for node in others:
            node.heartbeat()
        await bench.until(lambda: max(ages()) == 0)


@routed()
async def test_a_silent_node_is_out_and_back_with_its_next_heartbeat(bench):
    prefill, decode = await bench.pair()
    other = await bench.scripted(node_info("d1", "decode"))
    stream = await bench.router.submit(PROMPT, GREEDY)
    first = await decode.hear(Decode)

    await until_silent(bench, "d0", prefill, other)
    second = await other.hear(Decode)
    assert second.key.attempt == 1
    assert (await decode.hear(Cancel)).keys == (first.key,)
    states = {node.node_id: node.state for node in bench.core.health().nodes}
    assert states == {"d0": "silent", "d1": "ready", "p0": "ready"}
    decode.heartbeat()
    await bench.until(lambda: bench.core.health().status == "ready")
    stream.close()


@routed()
async def test_a_router_that_stood_still_itself_calls_a_silent_node_slow(bench):
    await bench.pair()
    bench.clock.advance(3.8)
    time.sleep(1.0)  # noqa: ASYNC251  (the router's loop stands still)
    await asyncio.sleep(0.1)
    assert {(n.state, n.heartbeat_age_s) for n in bench.core.health().nodes} == {
        ("degraded", 3.8)
    }
    assert len(bench.core.registry.in_service("decode")) == 1
    bench.clock.advance(3.8)
    await bench.until(lambda: not bench.core.registry.in_service("decode"))


@routed()
async def test_a_head_that_no_node_in_service_can_hold_lets_smaller_requests_pass(
    bench,
):
    """The largest pool is that of a node that is silent just now, so the request is no error."""
    prefill = await bench.toy(node_info("p0", "prefill"))
    small = await bench.toy(node_info("d0", "decode", num_blocks=8))
    await bench.scripted(node_info("d1", "decode"))
    await until_silent(bench, "d1", prefill, small)
    head = await bench.router.submit([1] * 100, GREEDY)
    for _ in range(3):
        assert (await whole(bench.router)).outputs[0].token_ids == toy_answer(PROMPT, 8)
    assert bench.core.health().num_queued == 1
    large = await bench.toy(node_info("d2", "decode"))
    assert (await collected(head)).outputs[0].token_ids == toy_answer([1] * 100, 8)
    assert [order.key.attempt for order in large.orders] == [0]


@routed()
async def test_handoffs_that_fail_are_counted_for_the_pair_and_shown(bench, caplog):
    """One prefill node cannot be read: no request fails, and the other one gets the work."""
    prefill, decode = await bench.pair()
    good = await bench.scripted(node_info("p1", "prefill"))
    for number in range(3):
        stream = await bench.router.submit(PROMPT, GREEDY)
        node = good
        if number == 0:
            refused = await prefill.hear(Prefill)
            decode.say(Failed(refused.key, TransferError("no route").to_failure()))
        order = await node.hear(Prefill)
        decode.say(Tokens([TokenEntry(order.key, 6, [1, 2], "stop")]))
        await stream.ended()
        assert stream.metrics.num_retries == (number == 0)
    health = bench.core.health()
    ((pair,), reason) = health.pairs, health.message
    assert (health.status, pair.num_failures) == ("degraded", 1)
    assert (pair.prefill_node, pair.decode_node, pair.reason) == (
        "p0",
        "d0",
        "no route",
    )
    assert "no route" in reason
    lines = [record for record in caplog.records if "handoff failed" in record.message]
    assert len(lines) == 1


@routed()
async def test_a_message_that_cannot_be_sent_takes_no_other_with_it(bench):
    _, decode = await bench.pair()
    first, broken, last = (
        Cancel((Key(RequestId(name)),)) for name in ("a", "\ud800", "b")
    )
    bench.core._send(decode.info.node_id, first)
    with pytest.raises(UnicodeEncodeError):
        bench.core._send(decode.info.node_id, broken)
    bench.core._send(decode.info.node_id, last)
    assert [await decode.hear(Cancel) for _ in range(2)] == [first, last]


def test_a_backlog_is_read_one_batch_in_a_turn_of_the_loop(tmp_path):
    """A router that was stalled finds its channels full, and must not hold its loop for that."""
    num_messages = 20 * BATCH
    num_batches = num_heard = 0
    info = node_info("d0", "decode")

    def on_batch(heard: Heard) -> None:
        nonlocal num_batches, num_heard
        num_batches += 1
        num_heard += sum(1 for _ in heard)

    async def batches_of_each_turn() -> list[int]:
        link = NodeLink(f"ipc://{tmp_path}/control", Channels(), on_batch, DrainState)
        counts: list[int] = []
        with bare(link.endpoint, new_identity(b"d0")) as node:
            node.send(frame(7, 0, to_router_codec().encode(hello_of(info))))
            for number in range(1, num_messages):
                node.send(frame(7, number, encoded(number)))
            while num_heard < num_messages:
                before = num_batches
                # Sending signals what waits to be read again.
                link.send(info.node_id, Cancel(()))
                await asyncio.sleep(0)
                counts.append(num_batches - before)
        link.close()
        return counts

    counts = asyncio.run(batches_of_each_turn())
    # In a turn, the callback that reads may come before this test's own, and then behind it.
    assert max(counts) <= 2
    assert sum(counts) >= 20
