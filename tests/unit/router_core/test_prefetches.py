"""Which nodes are asked to read what, before a prompt needs it."""

import itertools

import msgspec
import pytest

from baton.protocol.blocks import (
    block_hashes,
    pack_hashes,
    pack_keys,
    prompt_keys,
    unpack_hashes,
)
from baton.protocol.ids import Key, NodeId, RequestId
from baton.protocol.messages import (
    PREFETCHES,
    PREFIX_READS,
    CacheChanges,
    HandedOver,
    HandOver,
    NodeFacts,
    NodeInfo,
    Prefetch,
    Prefetched,
    ToNode,
)
from baton.protocol.sampling import Sampling
from baton.router.core.lifecycle import Request
from baton.router.core.prefetches import (
    HALF_LIFE_S,
    HOT_REQUESTS,
    LATE_S,
    REST_S,
    HotPrefixes,
    Prefetches,
)
from baton.router.core.registry import Registry
from baton.router.core.request import Attempt
from tests.support.choosing import cluster
from tests.support.scripted_nodes import BLOCK_SIZE, node_info

HASHES = block_hashes(range(8 * BLOCK_SIZE), BLOCK_SIZE)
P0, P1, D0, D1 = (NodeId(name) for name in ("p0", "p1", "d0", "d1"))
NUM_SHARED = 25
SAMPLING = Sampling(seed=0, max_tokens=8, cache_root=b"r" * 16)
SHARED = block_hashes(
    range(NUM_SHARED * BLOCK_SIZE), BLOCK_SIZE, root=SAMPLING.cache_root
)


def sharing(name: str, compute: str = "") -> NodeInfo:
    info = node_info(name, "prefill" if name[0] == "p" else "decode")
    features = (PREFETCHES, PREFIX_READS) if info.role == "decode" else (PREFETCHES,)
    facts = NodeFacts(features=features)
    return msgspec.structs.replace(info, facts=facts, compute=compute)


class Asking:
    def __init__(self, *infos: NodeInfo) -> None:
        self.registry: Registry = cluster(*infos)
        self.sent: list[tuple[NodeId, ToNode]] = []
        numbers = itertools.count()
        self.prefetches = Prefetches(
            self.registry,
            lambda *sent: self.sent.append(sent),
            lambda: f"p{next(numbers)}",
        )

    def leaves(self, node: NodeId, number: int = 1, first: int = 0) -> None:
        self.registry.drains(node)
        message = HandOver(number, pack_hashes(HASHES[first:]), 2.0, 5.0)
        self.prefetches.hand_over(0.0, node, message)

    def asked(self) -> list[tuple[NodeId, Prefetch]]:
        return [(node, sent) for node, sent in self.sent if isinstance(sent, Prefetch)]

    def told(self) -> list[tuple[NodeId, int]]:
        return [
            (node, sent.number)
            for node, sent in self.sent
            if isinstance(sent, HandedOver)
        ]


@pytest.fixture
def asking() -> Asking:
    return Asking(*map(sharing, (P0, P1, D0, D1)))


def test_nodes_of_the_other_role_share_what_a_node_leaves(asking):
    asking.leaves(D0, 1)
    asking.leaves(D0, 2)
    [(one, first), (other, _)] = asking.asked()
    assert {one, other} == {P0, P1}
    assert (first.source, first.idle_s, first.timeout_s) == (D0, 2.0, 5.0)
    assert unpack_hashes(first.hashes) == HASHES
    assert asking.told() == []
    asking.prefetches.answered(P1 if one == P0 else P0, Prefetched(first.key, 8))
    assert asking.told() == [], "another node was asked"
    asking.prefetches.answered(one, Prefetched(first.key, 8))
    assert asking.told() == [(D0, 1)]
    asking.leaves(P0)
    assert asking.asked()[-1][0] == D1, "the other decode node leaves, too"


def test_only_what_no_other_node_holds_is_read(asking):
    held = pack_keys(HASHES[:3])
    assert asking.registry.hears_cache(P0, CacheChanges(0, held))
    assert asking.registry.hears_cache(D0, CacheChanges(0, pack_keys(HASHES)))
    assert asking.registry.hears_cache(
        D1, CacheChanges(0, pack_keys(HASHES[:5]), tier="folder")
    )
    asking.leaves(D0)
    assert unpack_hashes(asking.asked()[0][1].hashes) == HASHES[5:]
    asking.registry.drains(D1)
    asking.leaves(D0, 2)
    assert unpack_hashes(asking.asked()[1][1].hashes) == HASHES[3:], (
        "it leaves with its tiers"
    )
    asking.leaves(D0, 3, first=8)
    assert asking.told() == [(D0, 3)], "nothing is left to read"


def test_nodes_that_compute_otherwise_read_nothing():
    other = msgspec.structs.replace(node_info("p1", "prefill"), compute="y")
    for infos in (
        (sharing("d0", "x"), sharing("p0", "y")),
        (sharing("d0", "y"), other),
    ):
        asking = Asking(*infos)
        asking.leaves(D0)
        assert (asking.asked(), asking.told()) == ([], [(D0, 1)])


def test_a_node_that_leaves_is_told_of_reads_that_come_to_nothing(asking):
    asking.leaves(D0, 1)
    asking.leaves(D0, 2)
    asking.prefetches.left(asking.asked()[0][0])
    assert asking.told() == [(D0, 1)]
    asking.prefetches.tick(5.0 + LATE_S)
    assert asking.told() == [(D0, 1), (D0, 2)]
    asking.prefetches.answered(P0, Prefetched(asking.asked()[1][1].key))
    assert len(asking.told()) == 2


def hot(
    asking: Asking, now_s: float = 0.0, num_requests: int = 10, node: NodeId = P0
) -> None:
    """Let that node get as many requests with the same prefix, each with an end of its own."""
    for number in range(num_requests):
        tokens = [*range(NUM_SHARED * BLOCK_SIZE), *[500 + number] * 4 * BLOCK_SIZE]
        request = Request(
            RequestId(f"r{number}"),
            tokens,
            SAMPLING,
            block_keys=prompt_keys(tokens, BLOCK_SIZE, SAMPLING.cache_root),
        )
        selected = Attempt(
            Key(request.request_id),
            (0,),
            len(tokens),
            True,
            len(tokens) + 8,
            prefill_node=node,
            decode_node=D0,
            num_cached_tokens=NUM_SHARED * BLOCK_SIZE,
        )
        asking.prefetches.placed(now_s, selected, request)


def knowing(*nodes: NodeId) -> Asking:
    asking = Asking(*map(sharing, (P0, P1, D0, D1)))
    for node in nodes:
        assert asking.registry.hears_cache(node, CacheChanges(0, pack_keys(SHARED)))
    return asking


def test_a_prefix_that_many_requests_have_is_copied_once_to_a_second_node():
    asking = knowing(P0, D1)
    hot(asking, num_requests=int(HOT_REQUESTS) - 1)
    assert asking.asked() == []
    hot(asking, num_requests=20)
    [(reader, prefetch)] = asking.asked()
    assert (reader, prefetch.source) == (P1, D1)
    assert unpack_hashes(prefetch.hashes) == SHARED
    hot(asking, REST_S - 1, 20)
    assert len(asking.asked()) == 1, "it may not have had room for it"
    hot(asking, REST_S + 1, 20)
    assert len(asking.asked()) == 2, "it has lost it again"
    asking.prefetches.answered(P1, Prefetched(prefetch.key, NUM_SHARED))
    assert asking.told() == []


def test_a_prefix_is_not_copied_if_two_have_it_or_nobody_lends_it_or_it_cools_down():
    for nodes in ((P0, P1, D1), (P0,), (D1,)):
        asking = knowing(*nodes)
        hot(asking, num_requests=20)
        assert asking.asked() == []
    asking = knowing(P0, D1)
    for at_s in range(30):
        hot(asking, at_s * HALF_LIFE_S, int(HOT_REQUESTS / 2) - 1)
    assert asking.asked() == []


def test_prefixes_that_are_not_hot_are_forgotten():
    prefixes = HotPrefixes(max_prefixes=10)
    for number in range(100):
        assert not prefixes.note(0.0, prompt_keys([number] * 64, 4), 0)
    assert len(prefixes._heats) == 10
