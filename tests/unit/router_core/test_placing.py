"""Legs that wait for room: which node is full, and who passes whom."""

import msgspec

from baton.protocol.config import RouterConfig
from baton.protocol.errors import Failure
from baton.protocol.ids import Epoch, Key, NodeId, RequestId
from baton.protocol.messages import Beat, Load, NodeFacts, StepLimits
from baton.router.policy import CheapestPair
from baton.router.queue import MAX_PASSED_S, Admission, Placing
from baton.router.registry import Registry
from baton.router.request import Place
from tests.support import choosing
from tests.support.choosing import charge, place
from tests.support.scripted_nodes import node_info


def cluster(*names: str) -> Registry:
    """Return nodes of 64 blocks of 4 tokens, which take 4 sequences and 32 tokens in a step."""
    infos = [node_info(name, "prefill" if name[0] == "p" else "decode") for name in names]
    facts = NodeFacts(step=StepLimits(4, 32))
    return choosing.cluster(*(msgspec.structs.replace(info, facts=facts) for info in infos))


def full(registry: Registry, policy: CheapestPair, name: str, num_tokens: int = 40) -> set[str]:
    """Place a leg if its nodes have room for it; return those that have none."""
    decision = policy.choose(0.0, registry, place(name, num_tokens))
    assert decision is not None
    if not decision.full:
        charge(registry, decision)
    return set(decision.full)


def test_a_node_without_room_is_waited_for() -> None:
    """Prefill takes two steps of work at once, decode as many requests as it can seat and some."""
    registry, policy = cluster("p0", "d1"), CheapestPair("never", 0)
    assert [full(registry, policy, name) for name in "abc"] == [set(), set(), {"p0"}]
    for name in "ab":
        registry.release(NodeId("p0"), place(name).key)
    assert full(registry, policy, "c", 8) == set()
    registry.release(NodeId("p0"), place("c").key)
    registry.release(NodeId("d1"), place("c").key)
    # Two legs of 50 tokens take 13 of 64 blocks each, and any leg takes 32 at the most.
    assert full(registry, policy, "d", 180) == set()
    registry.release(NodeId("p0"), place("d").key)
    assert full(registry, policy, "e", 180) == {"d1"}
    assert full(registry, policy, "e", 52) == set()
    registry.release(NodeId("p0"), place("e").key)
    assert full(registry, policy, "f", 8) == set()
    assert full(registry, policy, "g", 1) == {"d1"}, "five legs for four seats"
    registry.release(NodeId("d1"), place("a").key)
    assert full(registry, policy, "g", 1) == set()


def test_what_other_routers_gave_a_node_takes_its_seats_too() -> None:
    registry = cluster("p0", "d1")
    policy = CheapestPair("never", 0)
    assert full(registry, policy, "a") == set()
    registry.beat(1.0, Beat(NodeId("d1"), Epoch("e0"), Load(num_running=4, num_waiting=1)))
    assert full(registry, policy, "b") == {"d1"}


def test_a_request_leaves_room_for_as_many_tokens_as_answers_have_had() -> None:
    registry, policy = cluster("p0", "d1"), CheapestPair("never", 0)
    leg = Place(Key(RequestId("a")), 40, 1, True, 200)
    before = policy.choose(0.0, registry, leg)
    for _ in range(100):
        policy.learn(8.0)
    after = policy.choose(0.0, registry, leg)
    assert before is not None
    assert after is not None
    assert [decision.loads[1][1].num_blocks for decision in (before, after)] == [32, 13]


def test_a_leg_that_waits_for_one_node_holds_up_nobody_who_goes_to_another() -> None:
    """After a second, no request passes it on its own node either, however small."""
    registry, policy, line = (
        cluster("d0", "d1"),
        CheapestPair("always", 0),
        Admission(RouterConfig()),
    )

    placing = Placing(registry, policy, line)

    def placed(now_s: float) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        for leg, decision in placing.take(now_s):
            assert not isinstance(decision, Failure)
            charge(registry, decision)
            line.placed(now_s, leg.key)
            found.append((leg.key.request_id, str(decision.placed.decode_node)))
        return found

    for name in "abcde":
        line.wait(0.0, place(name, 110))
    assert placed(0.0) == [("a", "d0"), ("b", "d1"), ("c", "d0"), ("d", "d1")]
    line.wait(0.5, place("f", 10))
    assert placed(0.5) == [("f", "d0")], "smaller"
    line.wait(MAX_PASSED_S, place("g", 10))
    assert placed(MAX_PASSED_S) == [("g", "d0")]
    line.wait(2.0, place("h", 10))
    assert placed(2.0) == [("h", "d0")]
    line.wait(2.0, place("i", 10))
    assert placed(2.0) == [], "d0 has no seat left, and d1 is kept"
