"""The block pool against a plain model of who owns what."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.node.scheduling.block_pool import BlockPool
from baton.protocol.blocks import BlockHash, block_hashes, blocks_needed, tokens_held
from baton.protocol.errors import InvariantBroken
from baton.protocol.sampling import Scope

NUM_BLOCKS = 12
BLOCK_SIZE = 4


def hashes_of(seed: int, num_blocks: int) -> list[BlockHash]:
    return block_hashes([seed] * (num_blocks * BLOCK_SIZE), BLOCK_SIZE)


class PoolModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.held: list[list[int]] = []
        self.quarantined = 0

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_free:
            owned = {block for blocks in self.held for block in blocks}
            blocks = self.pool.allocate(count)
            assert not owned & set(blocks), "a block has two owners"
            self.held.append(blocks)
        else:
            with pytest.raises(InvariantBroken):
                self.pool.allocate(count)

    @rule(index=st.integers(0, 20))
    def retain(self, index: int) -> None:
        if self.held:
            blocks = self.held[index % len(self.held)]
            self.pool.retain(blocks)
            self.held.append(list(blocks))

    @rule(index=st.integers(0, 20))
    def release(self, index: int) -> None:
        if self.held:
            self.pool.release(self.held.pop(index % len(self.held)))

    @rule(index=st.integers(0, 20), seed=st.integers(0, 3))
    def store(self, index: int, seed: int) -> None:
        if self.held:
            blocks = self.held[index % len(self.held)]
            self.pool.store(hashes_of(seed, len(blocks)), blocks)

    @rule()
    def reset(self) -> None:
        self.pool.reset_prefix_cache()
        assert not self.pool.match(hashes_of(0, 4))
        for blocks in self.held:  # their sequences go on, and offer them when they end
            self.pool.store(hashes_of(2, len(blocks)), blocks)
        assert not self.pool.match(hashes_of(2, 4))

    @rule(seed=st.integers(0, 3), count=st.integers(0, 4))
    def match(self, seed: int, count: int) -> None:
        blocks = self.pool.match(hashes_of(seed, count))
        self.held.append(blocks)

    @rule(index=st.integers(0, 20))
    def quarantine(self, index: int) -> None:
        if not self.held:
            return
        blocks = self.held[index % len(self.held)]
        alone = [
            b
            for b in blocks
            if self.pool.references(b) == 1 and not self.pool.cache.holds(b)
        ]
        self.pool.quarantine(alone)
        self.quarantined += len(alone)
        blocks[:] = [b for b in blocks if b not in alone]

    @rule(count=st.integers(0, 3))
    def readmit(self, count: int) -> None:
        blocks = sorted(self.pool._quarantined)[:count]
        self.pool.readmit(blocks)
        self.quarantined -= len(blocks)
        if blocks:
            with pytest.raises(InvariantBroken):
                self.pool.readmit(blocks[:1])

    @invariant()
    def every_block_is_free_or_owned_or_quarantined(self) -> None:
        owned = {block for blocks in self.held for block in blocks}
        assert self.pool.num_quarantined == self.quarantined
        assert self.pool.num_free + len(owned) + self.quarantined == NUM_BLOCKS

    @invariant()
    def references_are_counted(self) -> None:
        for block in range(NUM_BLOCKS):
            expected = sum(blocks.count(block) for blocks in self.held)
            assert self.pool.references(block) == expected


PoolModel.TestCase.settings = settings(stateful_step_count=40)
TestPoolModel = PoolModel.TestCase


def test_the_tail_of_a_prefix_is_evicted_before_its_head():
    pool = BlockPool(3, BLOCK_SIZE)
    hashes = block_hashes(list(range(12)), BLOCK_SIZE)
    blocks = pool.allocate(3)
    pool.store(hashes, blocks)
    pool.release(blocks)
    assert pool.num_free == 3
    assert pool.allocate(1) == [blocks[2]]
    assert pool.match(hashes) == blocks[:2]


@given(st.integers(1, 80), st.integers(1, 9), st.integers(1, 99), st.integers(1, 5))
def test_the_tokens_that_a_pool_holds_fit_it_and_one_more_does_not(
    num_blocks, block_size, num_tokens, num_choices
):
    held = tokens_held(num_blocks, block_size, num_tokens, num_choices)
    sizes = (block_size, num_tokens)
    assert (
        held == 0 or blocks_needed(*sizes, num_tokens + held, num_choices) <= num_blocks
    )
    assert blocks_needed(*sizes, num_tokens + held + 1, num_choices) > num_blocks


def test_chains_of_different_scopes_share_no_block_whatever_the_salt():
    scopes = [Scope(), Scope("a"), Scope("", "a"), Scope("a", "a"), Scope("", "\ud800")]
    chains = [
        block_hashes(list(range(12)), BLOCK_SIZE, root=scope.root) for scope in scopes
    ]
    assert chains[0] == block_hashes(list(range(12)), BLOCK_SIZE)
    assert len({block_hash for chain in chains for block_hash in chain}) == 15
    again = block_hashes(list(range(12)), BLOCK_SIZE, chains[1][:1], scopes[1].root)
    assert again == chains[1]
