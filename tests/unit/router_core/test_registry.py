"""Which nodes are in service, by what they say and by what they do not say."""

import msgspec
import pytest

from baton.protocol.errors import TransferError
from baton.protocol.ids import Key, NodeId, RequestId
from baton.protocol.messages import (
    PROTOCOL_VERSION,
    Heartbeat,
    Hello,
    KVLayout,
    LayerGroup,
    Load,
    NodeInfo,
    RankAddress,
    Ready,
    Role,
    Starting,
)
from baton.router.core.health import nodes_health
from baton.router.core.registry import (
    DIFFERENT_BITS,
    HEARTBEAT_TIMEOUT_S,
    LOST_KEPT_S,
    Asked,
    Change,
    Entered,
    Left,
    Notice,
    Refuse,
    Registry,
)
from tests.support.choosing import occupy
from tests.support.scripted_nodes import computing, hello_of, node_info, toy_layout

BUSY = Load(num_running=1)


def join(registry: Registry, info: NodeInfo, now_s: float = 0.0) -> None:
    registry.hello(now_s, info.node_id, hello_of(info))
    assert registry.ready(now_s, info.node_id, Ready(info)) == [Entered(info)]


def ids(registry: Registry, role: Role) -> list[str]:
    return [node.node_id for node in registry.in_service(role)]


def heartbeat(info: NodeInfo) -> Heartbeat:
    return Heartbeat(info.node_id, info.epoch, BUSY)


def test_a_node_is_in_service_from_ready_to_the_end_of_its_channel():
    registry = Registry()
    info = node_info("d0", "decode")
    peer = info.node_id
    assert registry.hello(0, peer, hello_of(info)) == []
    registry.starting(0.5, Starting(peer, info.epoch, "weights", 3, 10))
    (health,) = nodes_health(1.0, registry)
    assert (health.state, health.phase, health.done, health.heartbeat_age_s) == (
        "starting",
        "weights",
        3,
        0.5,
    )
    assert ids(registry, "decode") == []
    registry.ready(1.0, peer, Ready(info))
    assert ids(registry, "decode") == ["d0"]
    (left,) = registry.gone(peer)
    assert isinstance(left, Left)
    assert left.failure.retryable
    assert registry.gone(peer) == []
    assert registry.model == info


@pytest.mark.parametrize("is_draining", [False, True])
def test_a_node_that_asks_again_in_its_session_gets_an_answer_and_keeps_its_work(
    is_draining,
):
    registry = Registry()
    info = node_info("d0", "decode")
    peer = info.node_id
    join(registry, info)
    occupy(registry, peer, 1)
    if is_draining:
        registry.drains(peer)
    assert registry.hello(1.0, peer, hello_of(info)) == []
    assert registry.ready(1.0, peer, Ready(info)) == [Asked(peer, info.role)]
    (health,) = nodes_health(1.0, registry)
    assert (health.num_attempts, health.heartbeat_age_s) == (1, 0.0)
    assert health.state == ("draining" if is_draining else "ready")


def test_three_missed_heartbeats_and_no_less_put_a_node_out():
    registry = Registry()
    info = node_info("d0", "decode")
    join(registry, info)
    assert registry.tick(HEARTBEAT_TIMEOUT_S) == []
    assert [type(change) for change in registry.tick(HEARTBEAT_TIMEOUT_S + 0.01)] == [
        Left
    ]
    assert registry.tick(HEARTBEAT_TIMEOUT_S + 1) == []
    assert ids(registry, "decode") == []
    assert registry.heartbeat(9.0, heartbeat(info)) == [Entered(info)]


def test_the_time_in_which_the_router_hears_no_node_counts_for_none():
    registry = Registry()
    info = node_info("d0", "decode")
    join(registry, info)
    assert registry.tick(20.0, deaf_s=17.0) == []
    (health,) = nodes_health(20.0, registry)
    assert (health.state, health.reason) == (
        "degraded",
        "d0 has been silent for 20 s, as this router stood still",
    )
    assert ids(registry, "decode") == ["d0"]
    registry.heartbeat(20.0, heartbeat(info))
    assert nodes_health(20.0, registry)[0].state == "ready"
    assert registry.tick(20.0, deaf_s=17.0) == []  # what came meanwhile was read first
    assert registry.tick(23.0) == []
    (left,) = registry.tick(24.0)
    assert isinstance(left, Left)
    assert left.failure.code == "node_lost"


def test_how_long_a_node_may_be_silent_is_a_setting():
    registry = Registry(heartbeat_timeout_s=20.0)
    info = node_info("d0", "decode")
    join(registry, info)
    assert registry.tick(20.0) == []
    assert [type(change) for change in registry.tick(20.1)] == [Left]


@pytest.mark.parametrize(
    ("step_age_s", "loop_age_s", "load", "predicted_s", "is_stuck"),
    [
        (9.9, 9.9, BUSY, 0.0, False),
        (10.1, 0.0, BUSY, 0.0, True),
        (16.1, 0.0, BUSY, 2.0, True),
        (15.9, 0.0, BUSY, 2.0, False),
        (99.0, 0.0, Load(), 0.0, False),
        (0.0, 10.1, Load(), 0.0, True),
    ],
)
def test_stuck_is_an_old_step_with_work_or_a_loop_that_hangs(
    step_age_s, loop_age_s, load, predicted_s, is_stuck
):
    registry = Registry()
    info = node_info("d0", "decode")
    join(registry, info)
    message = Heartbeat(
        info.node_id, info.epoch, load, step_age_s, predicted_s, loop_age_s=loop_age_s
    )
    assert [type(one) for one in registry.heartbeat(1.0, message)] == [Left] * is_stuck
    assert (nodes_health(1.0, registry)[0].state == "stuck") == is_stuck


def test_a_node_that_drains_gets_nothing_new_and_keeps_what_it_has():
    registry = Registry()
    info = node_info("d0", "decode")
    join(registry, info)
    registry.drains(info.node_id)
    late = Heartbeat(info.node_id, info.epoch, BUSY)  # from before the drain
    assert registry.heartbeat(1.0, late) == []
    assert nodes_health(1.0, registry)[0].state == "draining"
    assert ids(registry, "decode") == []
    assert [type(change) for change in registry.tick(99.0)] == [Left]


def test_a_node_that_is_lost_is_remembered_for_an_hour_and_one_that_drained_is_not():
    registry, (lost, planned) = (
        Registry(),
        (node_info("d0", "decode"), node_info("d1", "decode")),
    )
    for info in (lost, planned):
        join(registry, info)
    registry.heartbeat(
        1.0, Heartbeat(planned.node_id, planned.epoch, Load(), is_draining=True)
    )
    (left,) = registry.gone(planned.node_id)
    assert isinstance(left, Left)
    assert left.failure.code == "draining"
    (left,) = registry.gone(lost.node_id)
    assert isinstance(left, Left)
    assert left.failure.code != "draining"
    assert [node.node_id for node in registry.lost_nodes(1.0)] == ["d0"]
    assert registry.lost_nodes(LOST_KEPT_S + 2.0) == ()
    join(registry, lost)
    registry.gone(lost.node_id)
    join(registry, lost)
    assert registry.lost_nodes(1.0) == ()


def test_a_new_process_of_the_same_name_starts_without_the_charges_of_the_old():
    registry = Registry()
    old = node_info("d0", "decode", "e0")
    join(registry, old)
    key = Key(RequestId("r"))
    occupy(registry, old.node_id, 10, "r")
    new = node_info("d0", "decode", "e1")
    assert [
        type(change) for change in registry.hello(1.0, old.node_id, hello_of(new))
    ] == [Left]
    registry.ready(1.0, old.node_id, Ready(new))
    registry.release(old.node_id, key)
    assert nodes_health(1.0, registry)[0].num_tokens == 0


def test_a_whole_cluster_may_come_back_with_other_blocks_but_not_with_another_model():
    registry = Registry()
    join(registry, node_info("d0", "decode"))
    join(registry, node_info("p0", "prefill"))
    registry.gone(NodeId("d0"))
    registry.gone(NodeId("p0"))
    stranger = node_info("d1", "decode", model="another")
    registry.hello(0.0, stranger.node_id, hello_of(stranger))
    assert [
        type(c) for c in registry.ready(0.0, stranger.node_id, Ready(stranger))
    ] == [Refuse]
    join(registry, node_info("d2", "decode", layout="another"))
    assert registry.model.layout.fingerprint == "another"


def test_the_first_node_decides_which_model_is_served():
    registry = Registry()
    stray = node_info("stray", "decode", model="another")
    join(registry, stray)
    for is_new in (True, False):  # a node asks again, and is told the same
        registry.hello(0.0, NodeId("d0"), hello_of(node_info("d0", "decode")))
        (change,) = registry.ready(0.0, NodeId("d0"), Ready(node_info("d0", "decode")))
        assert isinstance(change, Refuse)
        assert (change.failure.code, change.is_new) == ("model_mismatch", is_new)
    assert ids(registry, "decode") == ["stray"]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"layout": toy_layout("another")}, "layout_mismatch"),
        ({"vocab_size": 7}, "limits_mismatch"),
        ({"num_blocks": 0}, "impossible_node"),
    ],
)
def test_a_node_that_does_not_fit_is_refused(changes, code):
    registry = Registry()
    join(registry, node_info("d0", "decode"))
    other = msgspec.structs.replace(node_info("d1", "decode"), **changes)
    registry.hello(0.0, other.node_id, hello_of(other))
    (change,) = registry.ready(0.0, other.node_id, Ready(other))
    assert isinstance(change, Refuse)
    assert change.failure.code == code


def test_a_node_that_computes_other_bits_serves_and_is_named_once():
    registry = Registry()
    join(registry, computing(node_info("d0", "decode"), "a-1"))
    join(registry, computing(node_info("p0", "prefill"), "a-1"))
    join(registry, node_info("d1", "decode"))  # an older one, which does not say
    odd = computing(node_info("p1", "prefill"), "a-2")
    registry.hello(
        0.0, odd.node_id, Hello(PROTOCOL_VERSION, odd.node_id, odd.role, odd.epoch)
    )
    differs = Notice(DIFFERENT_BITS, odd.node_id, NodeId("d0"))
    assert registry.ready(0.0, odd.node_id, Ready(odd)) == [Entered(odd), differs]
    assert registry.heartbeat(1.0, heartbeat(odd)) == []
    assert ids(registry, "prefill") == ["p0", "p1"]
    told = {health.node_id: health for health in nodes_health(1.0, registry)}
    assert (told[odd.node_id].batch_invariant, told[odd.node_id].compute) == (
        True,
        "a-2",
    )
    assert (told[NodeId("d1")].batch_invariant, told[NodeId("d1")].compute) == (
        False,
        "",
    )


def test_a_node_whose_layers_store_something_else_is_refused_in_one_line():
    """As of one folder that baton's own decoder and transformers' code compute."""
    registry = Registry()
    kinds = LayerGroup("latent", 3, 1, 1, 40), LayerGroup("full", 3, 4, 2, 24)
    first, other = (
        msgspec.structs.replace(
            node_info(name, "decode"),
            layout=KVLayout(16, 1024, group.kind, group.kv_heads, groups=(group,)),
        )
        for name, group in zip(("d0", "d1"), kinds, strict=True)
    )
    join(registry, first)
    registry.hello(0.0, other.node_id, hello_of(other))
    (change,) = registry.ready(0.0, other.node_id, Ready(other))
    assert isinstance(change, Refuse)
    assert "3 full layers of 24, not 3 latent layers of 40" in change.failure.message


def test_nodes_whose_degrees_do_not_fit_are_never_paired_and_named_in_one_line():
    registry = Registry()
    layout = KVLayout(16, 1024, "layout", kv_heads=6)

    def ready(name: str, role: Role, num_ranks: int) -> list[Change]:
        split = msgspec.structs.replace(
            layout, block_bytes=layout.block_bytes * 6 // num_ranks
        )
        info = msgspec.structs.replace(
            node_info(name, role), layout=split, ranks=(RankAddress({}),) * num_ranks
        )
        registry.hello(0.0, info.node_id, hello_of(info))
        _, *rest = registry.ready(0.0, info.node_id, Ready(info))
        return rest

    assert (
        ready("d1", "decode", 1)
        == ready("d2", "decode", 2)
        == ready("p6", "prefill", 6)
        == []
    )
    (unpaired,) = ready("p3", "prefill", 3)
    assert isinstance(unpaired, Notice)
    assert (unpaired.node, unpaired.other) == ("p3", "d2")
    assert "prefill with 3 ranks cannot feed decode with 2" in unpaired.reason


def test_a_pair_whose_prefill_node_cannot_reach_the_other_is_not_used_until_it_can():
    registry = Registry()
    infos = node_info("p0", "prefill"), node_info("d0", "decode")
    for info in infos:
        join(registry, info)
    prefill, decode = (registry.node(info.node_id) for info in infos)
    assert prefill is not None
    assert decode is not None
    cut = msgspec.structs.replace(heartbeat(infos[0]), unreachable=(infos[1].node_id,))
    for message, can_pair in ((cut, False), (heartbeat(infos[0]), True)):
        version = registry.version
        registry.heartbeat(1.0, message)
        assert registry.can_pair(prefill, decode) == can_pair
        assert registry.version > version, "requests that wait are looked at again"


@pytest.mark.parametrize(
    ("code", "is_over"), [("node_lost", True), ("stale_block", False)]
)
def test_a_channel_that_is_open_again_ends_only_the_trouble_of_a_channel(code, is_over):
    registry = Registry()
    infos = node_info("p0", "prefill"), node_info("d0", "decode")
    for info in infos:
        join(registry, info)
    prefill, decode = ((info.node_id, info.epoch) for info in infos)
    registry.pairs.failed(
        1.0, prefill, decode, TransferError("it broke", code=code).to_failure()
    )
    registry.pairs.selected(Key(RequestId("a")), prefill, decode)
    for cut in ((infos[1].node_id,), ()):
        message = msgspec.structs.replace(heartbeat(infos[0]), unreachable=cut)
        registry.heartbeat(2.0, message)
    assert registry.pairs.allows(2.0, prefill, decode) == is_over
    registry.pairs.released(Key(RequestId("a")))
