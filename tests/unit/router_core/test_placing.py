"""Attempts that wait for room: which node is full, and who passes whom."""

import msgspec

from baton.protocol.config import RouterConfig
from baton.protocol.errors import Failure
from baton.protocol.ids import Key, NodeId, RequestId
from baton.protocol.messages import NodeFacts, StepLimits
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
    """Place an attempt if its nodes have room for it; return those that have none."""
    decision = policy.choose(0.0, registry, place(name, num_tokens))
    assert decision is not None
    if not decision.full:
        charge(registry, decision)
    return set(decision.full)


def test_a_node_without_room_is_waited_for() -> None:
    """Prefill takes two steps of work at once, decode the requests of its slots and some."""
    registry, policy = cluster("p0", "d1"), CheapestPair("never", 0)
    assert [full(registry, policy, name) for name in "abc"] == [set(), set(), {"p0"}]
    for name in "ab":
        registry.release(NodeId("p0"), place(name).key)
    assert full(registry, policy, "c", 8) == set()
    registry.release(NodeId("p0"), place("c").key)
    registry.release(NodeId("d1"), place("c").key)
    # Two attempts of 50 tokens take 13 of 64 blocks each, and any attempt takes 32 at the most.
    assert full(registry, policy, "d", 180) == set()
    registry.release(NodeId("p0"), place("d").key)
    assert full(registry, policy, "e", 180) == {"d1"}
    assert full(registry, policy, "e", 52) == set()
    registry.release(NodeId("p0"), place("e").key)
    assert full(registry, policy, "f", 8) == set()
    assert full(registry, policy, "g", 1) == {"d1"}, "five attempts for four slots"
    registry.release(NodeId("d1"), place("a").key)
    assert full(registry, policy, "g", 1) == set()


def test_a_request_leaves_room_for_as_many_tokens_as_answers_have_had() -> None:
    registry, policy = cluster("p0", "d1"), CheapestPair("never", 0)
    attempt = Place(Key(RequestId("a")), 40, 1, True, 200)
    before = policy.choose(0.0, registry, attempt)
    for _ in range(100):
        policy.learn(8.0)
    after = policy.choose(0.0, registry, attempt)
    assert before is not None
    assert after is not None
    assert [decision.loads[1][1].num_blocks for decision in (before, after)] == [32, 13]


def test_an_attempt_that_waits_for_one_node_holds_up_nobody_who_goes_to_another() -> None:
    """After a second, no request passes it on its own node either, however small."""
    registry, policy, queue = (
        cluster("d0", "d1"),
        CheapestPair("always", 0),
        Admission(RouterConfig()),
    )

    placing = Placing(registry, policy, queue)

    def placed(now_s: float) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        for attempt, decision in placing.take(now_s):
            assert not isinstance(decision, Failure)
            charge(registry, decision)
            queue.placed(now_s, attempt.key)
            found.append((attempt.key.request_id, str(decision.placed.decode_node)))
        return found

    for name in "abcde":
        queue.wait(0.0, place(name, 110))
    assert placed(0.0) == [("a", "d0"), ("b", "d1"), ("c", "d0"), ("d", "d1")]
    queue.wait(0.5, place("f", 10))
    assert placed(0.5) == [("f", "d0")], "smaller"
    queue.wait(MAX_PASSED_S, place("g", 10))
    assert placed(MAX_PASSED_S) == [("g", "d0")]
    queue.wait(2.0, place("h", 10))
    assert placed(2.0) == [("h", "d0")]
    queue.wait(2.0, place("i", 10))
    assert placed(2.0) == [], "d0 has no slot left, and d1 is kept"
