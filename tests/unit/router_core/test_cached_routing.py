"""Which nodes an attempt goes to when some of its prompt is cached."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from baton.protocol.blocks import block_hashes, pack_keys
from baton.protocol.ids import Key, NodeId, RequestId
from baton.protocol.messages import CacheChanges, NodeInfo
from baton.router.policy import FAR_READ, NEAR_READ, CheapestPair
from baton.router.registry import Registry, ReservedLoad
from tests.support.choosing import PAIRS, choose, cluster, join, place
from tests.support.scripted_nodes import BLOCK_SIZE, node_info


def holding(registry: Registry, **num_tokens: int) -> Registry:
    """Let nodes say that they hold so many tokens at the front of every prompt of `place`."""
    for name, count in num_tokens.items():
        hashes = block_hashes(range(count), BLOCK_SIZE)
        assert registry.hears_cache(NodeId(name), CacheChanges(0, pack_keys(hashes)))
    return registry


def test_a_prompt_goes_where_most_of_it_is_cached_until_the_queue_costs_more() -> None:
    registry = holding(cluster(*PAIRS), p1=36, d1=20)
    decision = CheapestPair("auto", 0).choose(0.0, registry, place("a"))
    assert (decision.placed.prefill_node, decision.placed.decode_node) == ("p1", "d1")
    assert (decision.num_cached_tokens, decision.loads[0][1].num_tokens) == (36, 4)
    registry.reserve(NodeId("p1"), Key(RequestId("busy")), ReservedLoad(36, 1))
    assert choose(registry, place("b"), "never") == ("p0", "d1")  # as much work, and less queue
    assert choose(registry, place("c"), "never") == ("p1", "d0")  # d1 has a sequence
    registry.gone(NodeId("p1"))
    join(registry, node_info("p1", "prefill", "e1"))
    registry.forget(RequestId("b"))
    assert choose(registry, place("d"), "never") == ("p0", "d1"), "its successor has nothing cached"


def test_a_prompt_stays_on_decode_if_little_of_it_is_new_there() -> None:
    registry = holding(cluster(*PAIRS), d1=60)
    decision = CheapestPair("auto", 8).choose(0.0, registry, place("a", 60))
    assert decision.path == "local_prefill"
    assert decision.placed.decode_node == "d1"
    assert decision.placed.max_uncached_tokens == 16
    # The last token is computed in any case, so one block of what is cached is of no use.
    assert decision.num_cached_tokens == 56
    assert choose(registry, place("b", 69)) == (None, "d1")
    remote = msgspec.structs.replace(place("c", 60), is_remote_only=True)
    assert choose(registry, remote) == ("p0", "d0")
    # A decode node that waits for so much less than the other is given up for.
    for number in range(20):
        registry.reserve(NodeId("d1"), Key(RequestId(f"busy{number}")), ReservedLoad(10, 1))
    assert choose(registry, place("d", 60)) == ("p1", "d0")


@given(
    queued=st.lists(st.integers(0, 300), min_size=3, max_size=3),
    cached=st.lists(st.integers(0, 40).map(BLOCK_SIZE.__mul__), min_size=3, max_size=3),
    num_attempts=st.integers(1, 30),
)
def test_a_hot_prefix_unbalances_prefill_by_no_more_than_it_saves(
    queued: list[int], cached: list[int], num_attempts: int
) -> None:
    names = [f"p{number}" for number in range(3)]
    registry = cluster(*(node_info(name, "prefill") for name in names), node_info("d0", "decode"))
    holding(registry, **dict(zip(names, cached, strict=True)))
    for name, num_tokens in zip(names, queued, strict=True):
        registry.reserve(NodeId(name), Key(RequestId(name)), ReservedLoad(num_tokens, 1))
    for number in range(num_attempts):
        before = {node.node_id: node.num_tokens for node in registry.in_service("prefill")}
        pair = choose(registry, place(f"r{number}", 160), "never")
        chosen, saved = NodeId(pair[0] or ""), max(cached) - min(cached)
        assert before[chosen] <= min(before.values()) + saved


def on_host(name: str, host: str) -> NodeInfo:
    info = node_info(name, "prefill" if name[0] == "p" else "decode", num_blocks=1024)
    return msgspec.structs.replace(info, reaches=("nixl", f"shm@{host}"))


@given(st.lists(st.tuples(st.sampled_from("pd"), st.sampled_from("abc"), st.integers(0, 3)),
                min_size=2, max_size=12))  # fmt: skip
def test_no_pair_of_any_two_hosts_is_cheaper_than_the_chosen_one(
    nodes: list[tuple[str, str, int]],
) -> None:
    names = [f"{role}{number:02}" for number, (role, _, _) in enumerate(nodes)]
    hosts = {name: host for name, (_, host, _) in zip(names, nodes, strict=True)}
    registry = cluster(*(on_host(name, host) for name, host in hosts.items()))
    for name, (role, _, busy) in zip(names, nodes, strict=True):
        for number in range(busy):
            charged = ReservedLoad(7, 1) if role == "p" else ReservedLoad(90, 1)
            registry.reserve(NodeId(name), Key(RequestId(f"busy-{number}")), charged)

    def order(prefill: str, decode: str) -> tuple[float, int, str, str]:
        first, second = registry.node(NodeId(prefill)), registry.node(NodeId(decode))
        assert first is not None
        assert second is not None
        read = NEAR_READ if hosts[prefill] == hosts[decode] else FAR_READ
        cost = first.num_tokens + 10 * second.num_sequences + read * 160
        return cost, second.num_tokens, decode, prefill

    pairs = [(one, two) for one in names for two in names if one[0] == "p" and two[0] == "d"]
    cheapest = min(pairs, key=lambda pair: order(*pair), default=None)
    assert choose(registry, place("a", 160), "never") == cheapest
