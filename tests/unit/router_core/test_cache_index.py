"""What a router knows of prefix caches, beside what nodes really hold.

Real caches, journals and the registry's index; only the channel between them is played, which may
lose messages, and nodes that begin again as other processes.
"""

from collections.abc import Sequence

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.node.scheduling.prefix_cache import INTERVAL_S, PrefixCache
from baton.protocol.blocks import (
    BlockHash,
    BlockKey,
    block_hashes,
    pack_keys,
    prompt_keys,
    unpack_keys,
)
from baton.protocol.ids import MAX_KEYS, Epoch, NodeId
from baton.protocol.messages import CacheChanges, Ready
from baton.router.core.cache_index import CacheIndex, NodeBits
from baton.router.core.registry import Registry
from tests.support.scripted_nodes import BLOCK_SIZE, hello_of, node_info

ROUTER = 0
NODES = [NodeId("p0"), NodeId("d0"), NodeId("d1")]
PROMPTS = [[seed] * 4 * BLOCK_SIZE for seed in range(3)]
HASHES = [block_hashes(prompt, BLOCK_SIZE) for prompt in PROMPTS]
BLOCKS = [one for hashes in HASHES for one in hashes]
NEWS = block_hashes(list(range(64 * BLOCK_SIZE)), BLOCK_SIZE)


def key_of(block_hash: BlockHash) -> BlockKey:
    return unpack_keys(pack_keys([block_hash]))[0]


class PlayedCache:
    """One node's cache, and the messages that are on their way to the router."""

    def __init__(self) -> None:
        self.cache = PrefixCache()
        self.num_blocks = 0  # that ever were in it
        self.told: set[BlockKey] = set()
        self.coming: list[CacheChanges] = []

    def take_in(self, block_hash: BlockHash) -> None:
        if not self.cache.lookup([block_hash]):
            self.cache.insert(block_hash, self.num_blocks)
            self.cache.rest(self.num_blocks)
            self.num_blocks += 1

    @property
    def held(self) -> set[BlockKey]:
        return {key_of(one) for one in (*BLOCKS, *NEWS) if self.cache.lookup([one])}


class Announcements(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.registry = Registry()
        self.now_s = 0.0
        self.epochs = 0
        self.played: dict[NodeId, PlayedCache] = {}
        for name in NODES:
            self.join(name)

    def join(self, name: NodeId) -> None:
        """Join as a new process, whose cache is empty, and which is asked for it."""
        self.epochs += 1
        info = node_info(name, "prefill" if name[0] == "p" else "decode")
        info = msgspec.structs.replace(info, epoch=Epoch(f"e{self.epochs}"))
        self.registry.hello(self.now_s, name, hello_of(info))
        self.registry.ready(self.now_s, name, Ready(info))
        self.played[name] = PlayedCache()
        self.played[name].cache.watch(ROUTER)

    def speak(self, name: NodeId) -> None:
        self.now_s += INTERVAL_S
        node = self.played[name]
        for _, changes in node.cache.journal.take(self.now_s):
            node.coming.append(changes)
            node.told.update(unpack_keys(changes.added))

    def hear(self, name: NodeId) -> None:
        node = self.played[name]
        if node.coming and not self.registry.hears_cache(name, node.coming.pop(0)):
            node.cache.watch(ROUTER)

    def known(self, name: NodeId) -> set[BlockKey]:
        """All blocks that the router would find at this node; each key is asked for alone."""
        keys = (key_of(one) for one in (*BLOCKS, *NEWS))
        return {key for key in keys if name in self.held([key])}

    def held(self, keys: Sequence[BlockKey]) -> dict[NodeId, int]:
        """How many blocks at the front of `keys` each node holds; no node is named twice."""
        found = self.registry.caches.held(keys)
        named = [
            (name, num_blocks)
            for num_blocks, nodes in found.items()
            for name in self.registry.bits.nodes_in(nodes)
        ]
        assert len(dict(named)) == len(named)
        return dict(named)

    @rule(name=st.sampled_from(NODES), block_hash=st.sampled_from(BLOCKS))
    def a_block_enters(self, name: NodeId, block_hash: BlockHash) -> None:
        self.played[name].take_in(block_hash)

    @rule(name=st.sampled_from(NODES))
    def a_block_is_evicted(self, name: NodeId) -> None:
        if self.played[name].cache.num_idle:
            self.played[name].cache.evict()

    @rule(name=st.sampled_from(NODES))
    def a_node_speaks(self, name: NodeId) -> None:
        self.speak(name)

    @rule(name=st.sampled_from(NODES))
    def the_router_hears(self, name: NodeId) -> None:
        self.hear(name)

    @rule(name=st.sampled_from(NODES))
    def a_message_is_lost(self, name: NodeId) -> None:
        if self.played[name].coming:
            self.played[name].coming.pop(0)

    @rule(name=st.sampled_from(NODES))
    def a_process_takes_the_place_of_another(self, name: NodeId) -> None:
        self.join(name)
        assert self.registry.caches.num_blocks(name) == 0

    @rule(name=st.sampled_from(NODES))
    def a_node_is_lost(self, name: NodeId) -> None:
        self.registry.gone(name)
        assert self.known(name) == set()
        self.join(name)

    @rule(name=st.sampled_from(NODES))
    def everything_arrives(self, name: NodeId) -> None:
        """A loss shows in the next word of the node. Then the router knows exactly what is held.

        The node has a word to say: a block that it has just lost and has again would be no news.
        """
        node = self.played[name]
        node.take_in(next(one for one in NEWS if key_of(one) not in node.told))
        for _ in range(3):  # the word, and the answer if it showed a gap
            self.speak(name)
            while node.coming:
                self.hear(name)
        assert self.known(name) == node.held

    @invariant()
    def nothing_is_claimed_that_was_not_told(self) -> None:
        for name, node in self.played.items():
            known = self.known(name)
            assert known <= node.told
            assert self.registry.caches.num_blocks(name) == len(known)

    @invariant()
    def a_prompt_is_found_as_far_as_its_front_is_known(self) -> None:
        for prompt, hashes in zip(PROMPTS, HASHES, strict=True):
            found = self.held(prompt_keys(prompt, BLOCK_SIZE))
            for name in NODES:
                known = self.known(name)
                front = 0
                while front < len(hashes) and key_of(hashes[front]) in known:
                    front += 1
                assert found.get(name, 0) == front


Announcements.TestCase.settings = settings(max_examples=30, stateful_step_count=40)
TestAnnouncements = Announcements.TestCase


def test_a_large_cache_is_told_in_parts_and_known_up_to_a_bound():
    cache = PrefixCache()
    index = CacheIndex(NodeBits(), max_blocks_per_node=MAX_KEYS + 10)
    hashes = block_hashes(list(range(MAX_KEYS + 100)), 1)
    for block, block_hash in enumerate(hashes):
        cache.insert(block_hash, block)
        cache.rest(block)
    cache.watch(ROUTER)
    parts = [one for at_s in (1.0, 2.0, 3.0) for _, one in cache.journal.take(at_s)]
    assert [(one.number, len(unpack_keys(one.added))) for one in parts] == [
        (0, MAX_KEYS),
        (1, 100),
    ]
    assert all(index.hear(NODES[0], one) for one in parts)
    assert index.num_blocks(NODES[0]) == MAX_KEYS + 10
    cache.evict()
    ((_, change),) = cache.journal.take(4.0)
    assert (change.added, change.removed) == (b"", pack_keys(hashes[:1]))
    assert index.hear(NODES[0], change)
    assert index.num_blocks(NODES[0]) == MAX_KEYS + 9


def test_a_router_hears_at_intervals_and_not_of_what_came_and_went():
    cache = PrefixCache()
    cache.watch(ROUTER)
    assert [one.number for _, one in cache.journal.take(0.0)] == [0]
    assert cache.journal.wake_at_s is None
    cache.insert(BLOCKS[0], 0)
    cache.rest(0)
    assert cache.journal.wake_at_s == INTERVAL_S
    assert list(cache.journal.take(0.9 * INTERVAL_S)) == []
    cache.evict()
    assert list(cache.journal.take(INTERVAL_S)) == []
    cache.journal.forget(ROUTER)
    cache.insert(BLOCKS[0], 0)
    assert list(cache.journal.take(2 * INTERVAL_S)) == []
