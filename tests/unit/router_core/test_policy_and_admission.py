"""Which nodes an attempt goes to, by load and by what is cached, and who is let in."""

import dataclasses
import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.protocol.blocks import MIN_READ_TOKENS, block_hashes, pack_keys
from baton.protocol.config import RouterConfig
from baton.protocol.errors import Overloaded, RequestError, TransferError
from baton.protocol.ids import Epoch, Key, NodeId, RequestId
from baton.protocol.messages import (
    ANY_PREFIX_READS,
    PREFIX_READS,
    CacheChanges,
    Decode,
    NodeFacts,
    NodeInfo,
    Role,
    StepLimits,
)
from baton.protocol.sampling import Sampling, SamplingParams
from baton.router.core.admission import (
    MAX_PASSED_S,
    MAX_QUEUED_TOKENS,
    Admission,
    Limits,
    check_pooled,
    check_prompt,
    fit,
)
from baton.router.core.health import limits_of, nodes_health
from baton.router.core.pair_health import FIRST_AVOID_S
from baton.router.core.policy import FAR_READ, NEAR_READ, CheapestPair
from baton.router.core.registry import Registry
from baton.router.core.request import Attempt, NodeProcess, Tenant
from tests.support.choosing import PAIRS, choose, cluster, join, occupy, place
from tests.support.refusals import raises
from tests.support.scripted_nodes import BLOCK_SIZE, computing, node_info

UNREADABLE = TransferError("no route").to_failure()
LIMITS = Limits(100, 50, 4, prefill_blocks=20, decode_blocks=20)


def process(name: str, epoch: str = "e0") -> NodeProcess:
    return NodeId(name), Epoch(epoch)


def test_the_least_loaded_pair_is_taken_and_ties_go_by_name():
    registry = cluster(*PAIRS)
    assert choose(registry, place("a", 60)) == ("p0", "d0")
    assert choose(registry, place("b", 40)) == ("p1", "d1")
    assert choose(registry, place("c", 40)) == ("p1", "d1")
    registry.forget(RequestId("a"))
    assert choose(registry, place("d", 40)) == ("p0", "d0")


def test_a_node_that_failed_the_request_is_the_last_resort():
    registry = cluster(*PAIRS)
    failed = frozenset(process(name) for name in ("p0", "d0", "d1"))
    assert choose(registry, place("a", avoid=failed)) == ("p1", "d0")
    # A process that replaced one that failed has failed no request.
    restarted = frozenset(
        {process("p0", "before"), process("d0", "before"), process("d1")}
    )
    assert choose(cluster(*PAIRS), place("b", avoid=restarted)) == ("p0", "d0")


def test_a_pair_whose_handoff_failed_is_avoided_and_then_tried_by_one_attempt_at_a_time():
    """A prefill node whose blocks cannot be read has no load, but must not get every request."""
    registry = cluster(*PAIRS)
    for name in ("d0", "d1"):
        assert registry.pairs.failed(0.0, process("p0"), process(name), UNREADABLE)
    occupy(registry, "p1", 1000)
    assert choose(registry, place("a")) == ("p1", "d0")
    assert choose(registry, place("b")) == ("p1", "d1")
    states = {node.node_id: node.state for node in nodes_health(0.0, registry)}
    assert states == {"d0": "ready", "d1": "ready", "p0": "degraded", "p1": "ready"}
    later_s = FIRST_AVOID_S
    assert choose(registry, place("c"), now_s=later_s) == ("p0", "d0")  # the probe
    assert choose(registry, place("d"), now_s=later_s) == ("p0", "d1")
    assert choose(registry, place("e"), now_s=later_s) == ("p1", "d0")
    # A second failure in a row lasts longer; a success ends the matter.
    assert not registry.pairs.failed(later_s, process("p0"), process("d0"), UNREADABLE)
    assert not registry.pairs.allows(2.5 * later_s, process("p0"), process("d0"))
    assert registry.pairs.worked(process("p0"), process("d1"))
    assert registry.pairs.allows(later_s, process("p0"), process("d1"))
    counts = {
        one.decode_node: one.num_failures for one in registry.pairs.transfers(0.0)
    }
    assert counts == {"d1": 1, "d0": 2}
    registry.gone(NodeId("p0"))
    assert not any(one.reason for one in registry.pairs.transfers(later_s))


def test_nobody_shares_a_node_with_a_suspect_as_long_as_there_is_another():
    registry = cluster(*PAIRS)
    suspect = dataclasses.replace(place("a", 33), is_suspect=True)
    assert choose(registry, suspect) == ("p0", "d0")
    for name in "bc":
        assert choose(registry, place(name, 90)) == ("p1", "d1")
    registry.forget(suspect.key.request_id)
    assert choose(registry, place("d")) == ("p0", "d0")


def test_pairs_that_can_never_exchange_blocks_are_never_tried_and_shown():
    infos = [
        msgspec.structs.replace(info, reaches=(reach,))
        for info, reach in zip(PAIRS, ("shm@a", "shm@b", "shm@b", "shm@b"), strict=True)
    ]
    registry = cluster(*infos)  # p1 is on another host than the rest
    for name in "abc":
        pair = choose(registry, place(name), "never")
        assert pair[0] == "p0"
    reasons = {
        node.node_id: node.reason for node in nodes_health(0.0, registry) if node.reason
    }
    assert list(reasons) == ["p1"]
    assert "no common transport" in reasons["p1"]
    registry.gone(NodeId("p0"))
    assert choose(registry, place("d"), "never") is None


def test_short_prompts_stay_local_unless_the_setting_forbids():
    registry = cluster(*PAIRS)
    assert choose(registry, place("a", 32)) == (None, "d0")
    assert choose(registry, place("b", 33)) == ("p0", "d1")
    assert choose(registry, place("c", 32), "never") == ("p1", "d0")
    assert choose(registry, place("d", 90), "always") == (None, "d1")


@pytest.mark.parametrize("mode", ["auto", "never", "always"])
def test_a_prompt_to_pool_goes_to_a_prefill_node_alone(mode):
    pooled = dataclasses.replace(place("a", 8, wants_decode=False), is_pooled=True)
    assert choose(cluster(*PAIRS), pooled, mode) == ("p0", None)
    assert choose(cluster(*PAIRS[2:]), pooled, mode) is None
    assert choose(cluster(*PAIRS[:2]), place("b", 8), mode) is None


def with_states(
    name: str, role: Role, num_blocks: int = 64, state_blocks: int = 3
) -> NodeInfo:
    info = node_info(name, role, num_blocks=num_blocks)
    layout = msgspec.structs.replace(info.layout, state_blocks=state_blocks)
    return msgspec.structs.replace(info, layout=layout)


def test_blocks_of_a_prompt_without_its_state_do_not_make_it_local():
    known = block_hashes(range(60), BLOCK_SIZE)
    for nodes, expected in (
        ([node_info("p0", "prefill"), node_info("d0", "decode")], (None, "d0")),
        ([with_states("p0", "prefill"), with_states("d0", "decode")], ("p0", "d0")),
    ):
        registry = cluster(*nodes)
        assert registry.hears_cache(NodeId("d0"), CacheChanges(0, pack_keys(known)))
        assert choose(registry, place("a", 60)) == expected
        assert choose(registry, place("b", 30)) == (None, "d0"), (
            "short enough to compute"
        )


def test_a_state_takes_room_beside_the_tokens_of_each_choice():
    nodes = [with_states("p0", "prefill", 20), with_states("d0", "decode", 20)]
    limits = limits_of(cluster(*nodes), "auto")
    assert limits.max_model_len == (20 - 3) * BLOCK_SIZE
    assert fit(16, SamplingParams(max_tokens=None), limits) == (
        17 * BLOCK_SIZE - 16,
        None,
    )
    two = SamplingParams(max_tokens=None, n=2)  # 16 of 20 blocks are not shared
    assert fit(16, two, limits) == ((16 // 2 - 3) * BLOCK_SIZE, None)
    assert choose(cluster(*nodes), place(num_tokens=68)) is None
    assert choose(cluster(*nodes), place(num_tokens=56)) == ("p0", "d0")


def test_a_text_to_pool_leaves_room_for_its_state():
    nodes = [with_states("p0", "prefill", 20), with_states("d0", "decode", 20)]
    limits = limits_of(cluster(*nodes), "auto")
    check_pooled((20 - 3) * BLOCK_SIZE, limits)
    with raises(RequestError, "context_length_exceeded", "prompt"):
        check_pooled((20 - 3) * BLOCK_SIZE + 1, limits)


def test_nodes_whose_pool_is_too_small_are_passed_over():
    small = [
        node_info("p0", "prefill", num_blocks=9),
        node_info("d0", "decode", num_blocks=12),
    ]
    large = [node_info("p1", "prefill"), node_info("d1", "decode")]
    assert choose(cluster(*small, *large), place(num_tokens=40)) == ("p1", "d1")
    assert choose(cluster(*small, *large), place(num_tokens=36)) == ("p0", "d0")
    assert choose(cluster(*small), place(num_tokens=40), "never") is None


def test_the_longest_sequence_is_what_the_model_and_the_largest_pools_can_take():
    nodes = [node_info("d1", "decode", num_blocks=8), node_info("d0", "decode")]
    assert limits_of(cluster(nodes[0]), "auto").max_model_len == 32
    nodes.append(node_info("p0", "prefill", num_blocks=20))
    assert limits_of(cluster(*nodes), "auto").max_model_len == 80
    assert limits_of(cluster(*nodes), "always").max_model_len == 200, (
        "that of the model"
    )


@pytest.mark.parametrize(
    ("params", "num_prompt", "expected"),
    [
        (SamplingParams(max_tokens=10), 10, (10, None)),
        (SamplingParams(max_tokens=95), 25, (55, 55)),
        (SamplingParams(max_tokens=None), 25, (55, None)),
        (SamplingParams(max_tokens=None, n=2), 40, (20, None)),
    ],
)
def test_output_is_cut_to_the_room_there_is(params, num_prompt, expected):
    limits = Limits(80, 50, 4, prefill_blocks=20, decode_blocks=20)
    assert fit(num_prompt, params, limits) == expected


def test_what_no_pool_can_hold_is_refused_with_the_most_that_it_can():
    with raises(RequestError, "invalid_request", "max_tokens"):
        fit(40, SamplingParams(max_tokens=41), LIMITS)
    assert fit(40, SamplingParams(max_tokens=40), LIMITS) == (40, None)
    with raises(RequestError, "invalid_request", "min_tokens"):
        fit(98, SamplingParams(max_tokens=5, min_tokens=3), LIMITS)
    with raises(RequestError, "invalid_request", "prompt"):
        fit(90, SamplingParams(max_tokens=None), LIMITS)


@pytest.mark.parametrize("token_ids", [[], [50], [-1], [1] * 100, [1] * 80])
def test_prompts_that_no_node_could_compute_are_refused(token_ids):
    with pytest.raises(RequestError) as error:
        check_prompt(token_ids, LIMITS.vocab_size, LIMITS.max_model_len)
    is_long = len(token_ids) > 1
    assert error.value.code == (
        "context_length_exceeded" if is_long else "invalid_request"
    )
    assert error.value.param == "prompt"


def queue(**fields: float) -> Admission:
    config = RouterConfig(**fields)
    return Admission(config, cluster(*PAIRS), CheapestPair("never", 0))


def taken(admission: Admission) -> list[str]:
    """Give nodes to all attempts that may have them, and return their requests in order."""
    names: list[str] = []
    for attempt in admission.take(0.0):
        admission.selected(attempt.key)
        names.append(attempt.key.request_id)
    return names


def test_resumes_go_before_retries_and_these_before_what_is_new_and_need_no_room():
    admission = queue(max_inflight=2)
    for name in "abc":
        admission.wait(0.0, place(name))
    assert taken(admission) == ["a", "b"]
    admission.wait(0.0, Attempt(Key(RequestId("a"), 0, 1), (0,), 40, True, 50))
    admission.wait(
        0.0, Attempt(Key(RequestId("b"), 0, 1), (0,), 40, True, 50, is_resume=True)
    )
    assert taken(admission) == ["b", "a"]
    admission.ended(RequestId("a"))
    assert taken(admission) == ["c"]


def test_an_attempt_rather_waits_than_goes_back_at_once_to_the_nodes_that_failed_it():
    admission = queue()
    failed = frozenset(process(name) for name in ("p0", "p1", "d0"))
    attempt = Attempt(
        Key(RequestId("a"), 0, 2), (0,), 40, True, 50, avoid=failed, avoid_until_s=2.0
    )
    admission.wait(0.0, attempt)
    admission.wait(0.0, place("b"))
    assert taken(admission) == ["b"]
    assert list(admission.take(1.9)) == []
    assert [one.key for one in admission.take(2.2)] == [attempt.key]
    healthy = dataclasses.replace(attempt, avoid=frozenset({process("p0")}))
    admission.leave(attempt.key)
    admission.wait(0.0, healthy)
    assert taken(admission) == ["a"], "another node can take it"


def test_the_queue_is_bounded_in_number_and_bytes_and_says_when_to_try_again():
    admission = queue(max_queued=2)
    # Alone, any may wait.
    admission.check_room(0.0, 2 * MAX_QUEUED_TOKENS, could_serve=False)
    long = Attempt(
        Key(RequestId("a")), (0,), MAX_QUEUED_TOKENS, True, MAX_QUEUED_TOKENS + 10
    )
    admission.wait(0.0, long)
    with raises(Overloaded, "queue_full"):
        admission.check_room(0.0, 1, could_serve=False)
    admission.leave(long.key)
    for name in "bc":
        admission.check_room(0.0, 1, could_serve=False)
        admission.wait(0.0, place(name))
    with pytest.raises(Overloaded) as error:
        admission.check_room(24.0, 1, could_serve=True)
    assert (error.value.code, error.value.http_status) == ("queue_full", 429)
    assert error.value.retry_after_s == 24.0


FLOOD = Tenant("flood")
POLITE = Tenant("polite")
NUMBERS = itertools.count()


def in_turns(admission: Admission, num: int) -> str:
    """The tenants of the next attempts, each of which ends before the next gets nodes."""
    order = ""
    for _ in range(num):
        key = next(admission.take(0.0)).key
        order += admission._new[key].tenant.name[0]
        admission.selected(key)
        admission.ended(key.request_id)
    return order


def waiting_for(
    admission: Admission, tenant: Tenant, num: int, num_tokens: int = 40
) -> None:
    for _ in range(num):
        name = f"{tenant.name}{next(NUMBERS)}"
        admission.wait(0.0, place(name, num_tokens, tenant=tenant))


def test_a_client_that_comes_late_is_served_next_and_then_takes_turns():
    admission = queue()
    waiting_for(admission, FLOOD, 30)
    assert in_turns(admission, 10) == "f" * 10
    waiting_for(admission, POLITE, 5)
    assert in_turns(admission, 12) == "pfpfpfpfpfff"
    waiting_for(admission, POLITE, 1)
    assert in_turns(admission, 2) == "pf", "it has saved nothing up, and owes nothing"


def test_turns_are_by_work_and_by_weight():
    admission = queue()
    waiting_for(admission, FLOOD, 20, 90)  # 100 tokens with the output
    waiting_for(admission, POLITE, 20, 40)
    assert in_turns(admission, 12).count("p") == 8
    heavy = queue()
    waiting_for(heavy, FLOOD, 20)
    waiting_for(heavy, Tenant("paying", 3.0), 20)
    assert in_turns(heavy, 16).count("p") == 12


def test_in_a_full_queue_the_tenant_with_most_of_it_gives_way():
    admission = queue(max_queued=10)
    waiting_for(admission, FLOOD, 10)
    with pytest.raises(Overloaded) as refused:
        admission.check_room(5.0, 40, FLOOD, could_serve=True)
    last = list(admission._new)[-1]
    ((key, failure),) = admission.check_room(5.0, 40, POLITE, could_serve=True)
    assert key == last
    assert last not in admission._new
    assert failure == refused.value.to_failure()
    assert (failure.http_status, failure.code) == (429, "queue_full")
    waiting_for(admission, POLITE, 1)
    for _ in range(4):
        assert len(admission.check_room(5.0, 40, POLITE, could_serve=True)) == 1
        waiting_for(admission, POLITE, 1)
    with pytest.raises(Overloaded):  # each has its half
        admission.check_room(5.0, 40, POLITE, could_serve=True)
    ((key, _),) = admission.check_room(5.0, 40, Tenant("third"), could_serve=True)
    assert key.request_id.startswith("flood")


def test_nobody_gives_way_where_that_would_not_make_room():
    """Streams that a router takes over from another one wait, too, however many do already."""
    admission = queue(max_queued=2)
    waiting_for(admission, FLOOD, 2)
    waiting_for(admission, POLITE, 3)
    with pytest.raises(Overloaded):
        admission.check_room(0.0, 40, Tenant("third", 9.0), could_serve=True)
    assert admission.num_queued == 5


def test_a_client_that_fills_the_memory_of_the_queue_gives_way_too():
    admission = queue()
    half = MAX_QUEUED_TOKENS // 2
    for name in "ab":
        attempt = dataclasses.replace(place(name, tenant=FLOOD), num_tokens=half)
        admission.wait(0.0, attempt)
    assert len(admission.check_room(0.0, half // 4, POLITE, could_serve=True)) == 1
    with pytest.raises(Overloaded):
        admission.check_room(0.0, half * 2, POLITE, could_serve=True)


def test_clients_that_have_left_the_queue_are_forgotten():
    admission = queue()
    waiting_for(admission, FLOOD, 100)
    for number in range(50):
        waiting_for(admission, Tenant(f"once{number}"), 1)
    in_turns(admission, 100)
    waiting_for(admission, POLITE, 1)
    assert admission._fair._shares.keys() == {"flood", "polite"}
    in_turns(admission, 51)
    assert not admission._fair._shares


def test_each_attempt_waits_so_long_and_a_stream_that_began_longer():
    admission = queue(max_queued_s=30, max_inflight=1)
    admission.selected(Key(RequestId("s")))
    resume = Attempt(Key(RequestId("s"), 0, 1), (0,), 4000, True, 5000, is_resume=True)
    for now_s, attempt in ((0.0, place("a")), (1.0, resume), (2.0, place("b"))):
        admission.wait(now_s, attempt)
    assert taken(admission) == [], "no pool is large enough for the resume"
    assert admission.take_overdue(29.9) == []
    ((key, failure),) = admission.take_overdue(30.0)
    assert (key, failure.code, failure.http_status) == (
        place("a").key,
        "queue_timeout",
        503,
    )
    assert failure.retry_after_s is not None
    assert [key for key, _ in admission.take_overdue(300.9)] == [place("b").key]
    ((key, failure),) = admission.take_overdue(301.0)
    assert (key, failure.code) == (resume.key, "no_nodes")
    assert admission.num_queued == 0


def small_cluster(*names: str) -> Registry:
    """Return nodes of 64 blocks of 4 tokens, which take 4 sequences and 32 tokens in a step."""
    infos = [
        node_info(name, "prefill" if name[0] == "p" else "decode") for name in names
    ]
    facts = NodeFacts(step=StepLimits(4, 32))
    return cluster(*(msgspec.structs.replace(info, facts=facts) for info in infos))


def full(
    registry: Registry, policy: CheapestPair, name: str, num_tokens: int = 40
) -> set[str]:
    """Reserve an attempt if its nodes have room for it; return those that have none."""
    selected = policy.choose(0.0, registry, place(name, num_tokens))
    if not selected.full:
        registry.reserve(selected)
    return set(selected.full)


def test_a_node_without_room_is_waited_for():
    """Prefill takes two steps of work at once, decode the requests of its slots and some."""
    registry = small_cluster("p0", "d1")
    policy = CheapestPair("never", 0)
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


def test_a_request_leaves_room_for_as_many_tokens_as_responses_have_had():
    registry = small_cluster("p0", "d1")
    policy = CheapestPair("never", 0)
    attempt = Attempt(Key(RequestId("a")), (0,), 40, True, 200)
    assert policy.choose(0.0, registry, attempt) is attempt
    assert attempt.num_decode_blocks == 32
    for _ in range(100):
        policy.learn(8.0)
    assert policy.choose(0.0, registry, attempt) is attempt
    assert attempt.num_decode_blocks == 13


def test_an_attempt_that_waits_for_one_node_holds_up_nobody_who_goes_to_another():
    """After a second, no request passes it on its own node either, however small."""
    registry = small_cluster("d0", "d1")
    waiting = Admission(RouterConfig(), registry, CheapestPair("always", 0))

    def placed(now_s: float) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        for selected in waiting.take(now_s):
            registry.reserve(selected)
            waiting.selected(selected.key)
            found.append((selected.key.request_id, str(selected.decode_node)))
        return found

    for name in "abcde":
        waiting.wait(0.0, place(name, 110))
    assert placed(0.0) == [("a", "d0"), ("b", "d1"), ("c", "d0"), ("d", "d1")]
    waiting.wait(0.5, place("f", 10))
    assert placed(0.5) == [("f", "d0")], "smaller"
    waiting.wait(MAX_PASSED_S, place("g", 10))
    assert placed(MAX_PASSED_S) == [("g", "d0")]
    waiting.wait(2.0, place("h", 10))
    assert placed(2.0) == [("h", "d0")]
    waiting.wait(2.0, place("i", 10))
    assert placed(2.0) == [], "d0 has no slot left, and d1 is kept"


@pytest.mark.parametrize(
    ("held", "num_tokens", "busy"),
    [("p0", 64, {"p0": 1.0, "d0": 0.0}), ("d0", 1, {"p0": 0.0, "d0": 1.0})],
)
def test_the_queue_counts_for_the_role_that_has_no_room(held, num_tokens, busy):
    """Those behind the attempts that were looked at count, too."""
    registry = small_cluster("p0", "d0")
    config = RouterConfig(local_prefill="never")
    waiting = Admission(config, registry, CheapestPair("never", 0))
    for number in range(1 if held == "p0" else 5):
        occupy(registry, held, num_tokens, f"held-{number}")
    for number in range(30):
        waiting.wait(0.0, place(f"r{number}"))
    assert list(waiting.take(0.0)) == []
    role, other = ("prefill", "decode") if held == "p0" else ("decode", "prefill")
    assert waiting.num_waiting_for() == {role: 30, other: 0}
    assert {node.node_id: node.busy for node in registry.nodes} == busy
    registry.gone(NodeId(held))
    assert list(waiting.take(1.0)) == []
    assert waiting.num_waiting_for() == {role: 30, other: 0}


def holding(registry: Registry, **num_tokens: int) -> Registry:
    """Let nodes say that they hold so many tokens at the front of every prompt of `place`."""
    for name, count in num_tokens.items():
        hashes = block_hashes(range(count), BLOCK_SIZE)
        assert registry.hears_cache(NodeId(name), CacheChanges(0, pack_keys(hashes)))
    return registry


def test_a_prompt_goes_where_most_of_it_is_cached_until_the_queue_costs_more():
    registry = holding(cluster(*PAIRS), p1=36, d1=20)
    selected = CheapestPair("auto", 0).choose(0.0, registry, place("a"))
    assert (selected.prefill_node, selected.decode_node) == ("p1", "d1")
    assert (selected.num_cached_tokens, selected.num_uncached_tokens) == (36, 4)
    occupy(registry, "p1", 36)
    # As much work, and less queue.
    assert choose(registry, place("b"), "never") == ("p0", "d1")
    assert choose(registry, place("c"), "never") == ("p1", "d0")  # d1 has a sequence
    registry.gone(NodeId("p1"))
    join(registry, node_info("p1", "prefill", "e1"))
    registry.forget(RequestId("b"))
    assert choose(registry, place("d"), "never") == ("p0", "d1"), (
        "its successor has nothing cached"
    )


def lending(info: NodeInfo, compute: str = "") -> NodeInfo:
    facts = NodeFacts(features=(PREFIX_READS,))
    return msgspec.structs.replace(info, facts=facts, compute=compute)


def prefix_of(registry: Registry, num_tokens: int = 200) -> tuple[str | None, int, int]:
    """Return who lends a prefix to the chosen prefill node, which has how much, and its work."""
    selected = CheapestPair("never", 0).choose(0.0, registry, place("r", num_tokens))
    assert selected is not None
    lender = selected.prefix_node
    return lender, selected.num_cached_tokens, selected.num_uncached_tokens


@pytest.mark.parametrize(
    ("prefill", "decode", "told"),
    [("a", "a", ""), ("a", "b", "a"), ("", "b", ""), ("a", "", "")],
)
def test_decode_is_told_of_a_prompt_whose_bits_are_promised_to_be_others(
    prefill, decode, told
):
    """Without a name a node promises none, and shares what it has as before."""
    infos = [
        computing(info, compute) if compute else info
        for info, compute in zip(
            (node_info("p0", "prefill"), node_info("d0", "decode")),
            (prefill, decode),
            strict=True,
        )
    ]
    selected = CheapestPair("never", 0).choose(0.0, cluster(*infos), place("r"))
    assert selected is not None
    assert selected.prompt_compute == told
    sends = selected.start_commands([1, 2, 3], [], Sampling(seed=0, max_tokens=4))
    (message,) = (send.message for send in sends if isinstance(send.message, Decode))
    assert message.prompt_compute == told
    anyone = [
        msgspec.structs.replace(info, facts=NodeFacts(features=(ANY_PREFIX_READS,)))
        for info in infos
    ]
    selected = CheapestPair("never", 0).choose(0.0, cluster(*anyone), place("r"))
    assert selected is not None
    assert not selected.prompt_compute, "blocks of any node are as good"


def test_a_prefix_is_read_from_the_decode_node_that_takes_the_prompt_or_has_most_of_it():
    infos = [lending(info) if info.role == "decode" else info for info in PAIRS]
    registry = cluster(*infos)
    assert prefix_of(registry) == (None, 0, 200)
    holding(registry, d0=160)
    assert prefix_of(registry) == ("d0", 160, 40)
    holding(registry, d1=160)
    occupy(registry, "d0", 300)
    assert prefix_of(registry) == ("d1", 160, 40), "d1 takes the prompt"
    holding(registry, d1=80)
    assert prefix_of(registry) == ("d0", 160, 40)
    registry.gone(NodeId("p1"))
    held = 160 - MIN_READ_TOKENS + BLOCK_SIZE
    holding(registry, p0=held)
    assert prefix_of(registry) == (None, held, 200 - held), (
        "p0 has nearly as much itself"
    )
    registry.gone(NodeId("d0"))
    holding(registry, p0=0)
    assert prefix_of(registry) == ("d1", 80, 120)


def test_no_prefix_is_read_from_a_node_that_does_not_lend_or_computes_other_bits():
    other = lending(PAIRS[2], "other bits")
    for info in (PAIRS[2], other):
        registry = holding(cluster(PAIRS[0], info), d1=160)
        assert prefix_of(registry) == (None, 0, 200)
    facts = NodeFacts(features=(PREFIX_READS, ANY_PREFIX_READS))
    to_any = msgspec.structs.replace(other, facts=facts)
    assert prefix_of(holding(cluster(PAIRS[0], to_any), d1=160)) == ("d1", 160, 40)


def test_a_prompt_stays_on_decode_if_little_of_it_is_new_there():
    registry = holding(cluster(*PAIRS), d1=60)
    selected = CheapestPair("auto", 8).choose(0.0, registry, place("a", 60))
    assert selected.path == "local_prefill"
    assert selected.decode_node == "d1"
    assert selected.max_uncached_tokens == 16
    # The last token is computed in any case, so one block of what is cached is of no use.
    assert selected.num_cached_tokens == 56
    assert choose(registry, place("b", 69)) == (None, "d1")
    remote = dataclasses.replace(place("c", 60), is_remote_only=True)
    assert choose(registry, remote) == ("p0", "d0")
    # A decode node that waits for so much less than the other is given up for.
    for number in range(20):
        occupy(registry, "d1", 10, f"busy{number}")
    assert choose(registry, place("d", 60)) == ("p1", "d0")


@given(
    queued=st.lists(st.integers(0, 300), min_size=3, max_size=3),
    cached=st.lists(st.integers(0, 40).map(BLOCK_SIZE.__mul__), min_size=3, max_size=3),
    num_attempts=st.integers(1, 30),
)
def test_a_hot_prefix_unbalances_prefill_by_no_more_than_it_saves(
    queued, cached, num_attempts
):
    names = [f"p{number}" for number in range(3)]
    registry = cluster(
        *(node_info(name, "prefill") for name in names), node_info("d0", "decode")
    )
    holding(registry, **dict(zip(names, cached, strict=True)))
    for name, num_tokens in zip(names, queued, strict=True):
        occupy(registry, name, num_tokens, name)
    for number in range(num_attempts):
        before = {
            node.node_id: node.num_tokens for node in registry.in_service("prefill")
        }
        pair = choose(registry, place(f"r{number}", 160), "never")
        chosen = NodeId(pair[0] or "")
        saved = max(cached) - min(cached)
        assert before[chosen] <= min(before.values()) + saved


@given(st.lists(st.tuples(st.sampled_from("pd"), st.integers(0, 2), st.integers(0, 5))))
def test_nodes_stay_in_the_order_of_their_loads(changes):
    names = [f"{role}{number}" for role in "pd" for number in range(3)]
    registry = cluster(*(on_host(name, "a") for name in names))
    orders = [registry.by_load("prefill"), registry.by_load("decode")]
    (host,) = registry.hosts().shared
    busy: set[tuple[str, str]] = set()
    for role, number, request in changes:
        name = f"{role}{number}"
        work = name, f"busy-{request}"
        if work in busy:
            registry.release(NodeId(name), Key(RequestId(work[1])))
        else:
            occupy(registry, name, 10 * request, work[1])
        busy ^= {work}
        for order in (*orders, host.prefills, host.decodes):
            assert order.keys == sorted(order.keys)
            nodes = [registry.node(key[2]) for key in order.keys]
            assert order.keys == [node.load_key for node in nodes]


def on_host(name: str, host: str) -> NodeInfo:
    info = node_info(name, "prefill" if name[0] == "p" else "decode", num_blocks=1024)
    return msgspec.structs.replace(info, reaches=("nixl", f"shm@{host}"))


@given(
    st.lists(
        st.tuples(st.sampled_from("pd"), st.sampled_from("abc"), st.integers(0, 3)),
        min_size=2,
        max_size=12,
    )
)
def test_no_pair_of_any_two_hosts_is_cheaper_than_the_chosen_one(nodes):
    names = [f"{role}{number:02}" for number, (role, _, _) in enumerate(nodes)]
    hosts = {name: host for name, (_, host, _) in zip(names, nodes, strict=True)}
    registry = cluster(*(on_host(name, host) for name, host in hosts.items()))
    for name, (role, _, busy) in zip(names, nodes, strict=True):
        for number in range(busy):
            num_tokens = 7 if role == "p" else 90
            occupy(registry, name, num_tokens, f"busy-{number}")

    def order(prefill: str, decode: str) -> tuple[float, int, str, str]:
        first = registry.node(NodeId(prefill))
        second = registry.node(NodeId(decode))
        read = NEAR_READ if hosts[prefill] == hosts[decode] else FAR_READ
        cost = first.num_tokens + 10 * second.num_sequences + read * 160
        return cost, second.num_tokens, decode, prefill

    pairs = [
        (one, two) for one in names for two in names if one[0] == "p" and two[0] == "d"
    ]
    cheapest = min(pairs, key=lambda pair: order(*pair), default=None)
    assert choose(registry, place("a", 160), "never") == cheapest


def test_beside_a_broken_pair_a_prompt_goes_on_by_what_reading_costs_on_one_host():
    registry = cluster(*(on_host(name, "a") for name in ("p0", "p1", "d0", "d1")))
    holding(registry, d0=160)
    occupy(registry, "d0", 90)
    registry.pairs.failed(0.0, process("p0"), process("d1"), UNREADABLE)
    # To read 160 tokens costs d1 less than d0's sequence does.
    assert 160 * NEAR_READ < 10 < 160 * FAR_READ
    assert choose(registry, place("a", 160), "never") == ("p1", "d1")


def with_folder(registry: Registry, **num_tokens: int) -> Registry:
    """Let the folders of nodes hold so many tokens at the front of every prompt of `place`."""
    for name, count in num_tokens.items():
        keys = pack_keys(block_hashes(range(count), BLOCK_SIZE))
        assert registry.hears_cache(NodeId(name), CacheChanges(0, keys, tier="folder"))
    return registry


def test_a_prompt_goes_where_a_tier_has_it_unless_a_pool_does():
    registry = with_folder(cluster(*PAIRS), p1=180)
    assert choose(registry, place("a", 200), "never") == ("p1", "d0")
    registry = with_folder(holding(cluster(*PAIRS), p0=180), p1=180)
    assert choose(registry, place("a", 200), "never") == ("p0", "d0")
    registry = with_folder(holding(cluster(*PAIRS), p0=100), p1=180)
    assert choose(registry, place("a", 200), "never") == ("p1", "d0")
    registry = with_folder(cluster(*PAIRS), p1=40)
    assert choose(registry, place("a", 200), "never") == ("p0", "d0"), (
        "it is not worth a read"
    )


def test_a_decode_node_may_compute_what_it_lacks_of_a_folder():
    registry = with_folder(cluster(*PAIRS), d1=196)
    assert choose(registry, place("a", 200)) == (None, "d1")


def test_a_prefix_is_read_from_a_decode_node_that_has_it_in_a_folder_alone():
    infos = [lending(info) if info.role == "decode" else info for info in PAIRS]
    registry = with_folder(cluster(*infos), d1=160)
    assert prefix_of(registry) == ("d1", 160, 40)
    holding(registry, d0=156)
    assert prefix_of(registry) == ("d0", 156, 44), (
        "a pool lends nearly as much, and sooner"
    )
    holding(registry, d0=80)
    assert prefix_of(registry) == ("d1", 160, 40)


def test_a_missed_change_of_a_tier_is_noticed_and_its_node_takes_it_along():
    registry = with_folder(holding(cluster(*PAIRS), p1=60), p1=180)
    assert registry.hears_cache(NodeId("p1"), CacheChanges(1))
    assert not registry.hears_cache(NodeId("p1"), CacheChanges(2, tier="folder"))
    registry = with_folder(cluster(*PAIRS), p1=180)
    registry.gone(NodeId("p1"))
    join(registry, node_info("p1", "prefill", "e1"))
    assert choose(registry, place("a", 200), "never") == ("p0", "d0")
