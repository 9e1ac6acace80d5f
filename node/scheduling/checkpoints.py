"""The copies of blocks that steps make, and the states of prompts that the prefix cache keeps.

A state has gone through all tokens before it, so a prefix can only be reused up to a position whose
state was kept: a checkpoint. It takes blocks of the pool, which the cache knows by hashes that
follow from that of the prefix. A prompt's chunks end at its checkpoints, so that the step after
such a chunk can copy the state before it goes on.
"""

from collections.abc import Iterable
from math import lcm

from baton.node.scheduling.block_pool import BlockPool
from baton.node.scheduling.plan import StepPlan
from baton.node.scheduling.request import UNIT_TOKENS, Sequence
from baton.protocol.blocks import BlockHash, blocks_for, state_hashes

# Checkpoints that a long prompt has on its way take at most this share of what its tokens take.
MAX_SHARE = 0.5

Copy = tuple[int, int]  # source block, target block
Saved = tuple[list[BlockHash], list[int]]


class StepCopies:
    """The copies of the next step and of launched ones.

    The source and the target of a copy each have one more reference until it is settled.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._next: list[Copy] = []
        self._saving: list[Saved] = []  # by copies of the next step
        self._launched: dict[int, list[Saved]] = {}  # by step

    def add(self, copies: Iterable[Copy]) -> None:
        """Take copies into the next step, whose blocks have the references that they need."""
        self._next += copies

    def restore(self, sequence: Sequence) -> None:
        """Let a sequence begin with the state of its checkpoint, if it has one."""
        if sequence.checkpoint_blocks:
            self._pool.retain(sequence.state)
            self.add(zip(sequence.checkpoint_blocks, sequence.state, strict=True))
            sequence.checkpoint_blocks = []

    def save(self, sequence: Sequence, num_kept_free: int = 0) -> None:
        """Keep the state of a sequence before its next chunk, if that is at a checkpoint.

        Where fewer than `num_kept_free` blocks would stay free, it is not kept.
        """
        pool = self._pool
        position = sequence.num_planned_tokens
        # A token that is computed once more is in the state already.
        if (
            position not in sequence.checkpoints
            or position != sequence.num_state_tokens
        ):
            return
        hashes = state_hashes(
            sequence.hash_blocks(pool.block_size, position)[-1], pool.state_blocks
        )
        is_known = len(pool.cache.lookup(hashes)) == len(hashes)
        if is_known or pool.num_free < pool.state_blocks + num_kept_free:
            return
        blocks = pool.allocate(pool.state_blocks)
        pool.retain(sequence.state)
        self.add(zip(sequence.state, blocks, strict=True))
        self._saving.append((hashes, blocks))

    def take(self, step_id: int) -> tuple[Copy, ...]:
        """Return the copies of a step that is launched now."""
        copies = tuple(self._next)
        self._next = []
        if self._saving:
            self._launched[step_id] = self._saving
            self._saving = []
        return copies

    def settle(self, plan: StepPlan) -> None:
        """Give the cache what a step has saved, and let go of the blocks of its copies."""
        for hashes, blocks in self._launched.pop(plan.step_id, ()):
            self._pool.store(hashes, blocks)
        self._release(plan.copies)

    def drop(self) -> None:
        """Give up the copies of the next step, because no sequence is left that needs them."""
        copies = self._next
        self._next = []
        self._saving = []
        self._release(copies)

    def _release(self, copies: Iterable[Copy]) -> None:
        for source, target in copies:
            self._pool.release((source, target))


def reserve(
    pool: BlockPool,
    sequence: Sequence,
    num_cacheable_tokens: int,
    num_kept_free: int = 0,
    *,
    is_computed: bool = True,
) -> int | None:
    """Give `sequence` blocks for its tokens and its state, or return None if there are too few.

    Whole blocks among the first `num_cacheable_tokens` may come from the cache; return how many
    do. `num_kept_free` blocks must stay free. Unless it `is_computed` here, its state comes with
    the blocks that the cache lacks, so no checkpoint is needed.
    """
    hashes = sequence.hash_blocks(pool.block_size, num_cacheable_tokens)
    num_known = len(hashes)
    checkpoint = list[BlockHash]()
    needs_checkpoint = is_computed and pool.state_blocks > 0
    if needs_checkpoint:
        num_known = len(pool.cache.lookup(hashes))
        num_reused, checkpoint = _last_checkpoint(pool, hashes[:num_known])
        hashes = hashes[:num_reused]
    cached = pool.match(hashes)
    saved = pool.match(checkpoint)
    num_fresh = pool.blocks_for(sequence.num_tokens) - len(cached)
    if num_fresh + pool.state_blocks + num_kept_free > pool.num_free:
        pool.release([*cached, *saved])
        return None
    pool.counts.prefix_queried_tokens += sequence.num_tokens
    pool.counts.prefix_hit_tokens += len(cached) * pool.block_size
    sequence.block_table = [*cached, *pool.allocate(num_fresh)]
    sequence.state = pool.allocate(pool.state_blocks)
    sequence.checkpoint_blocks = saved
    if needs_checkpoint and pool.caches_prefixes:
        num_shared = num_known * pool.block_size
        sequence.checkpoints = _positions(pool, sequence, len(cached), num_shared)
    return len(cached)


def num_reusable_tokens(pool: BlockPool, sequence: Sequence) -> int:
    """Return how many tokens of a prompt need not be computed here."""
    hashes = sequence.hash_blocks(pool.block_size, sequence.num_reusable_tokens)
    num_blocks = len(pool.cache.lookup(hashes))
    if pool.state_blocks:
        num_blocks, _ = _last_checkpoint(pool, hashes[:num_blocks])
    return num_blocks * pool.block_size


def _last_checkpoint(
    pool: BlockPool, hashes: list[BlockHash]
) -> tuple[int, list[BlockHash]]:
    """Return the blocks up to the last checkpoint among cached ones, and its hashes; 0 if none."""
    unit = _unit(pool) // pool.block_size
    for num_blocks in range(len(hashes) // unit * unit, 0, -unit):
        found = state_hashes(hashes[num_blocks - 1], pool.state_blocks)
        if len(pool.cache.lookup(found)) == len(found):
            return num_blocks, found
    return 0, []


def _positions(
    pool: BlockPool, sequence: Sequence, num_cached_blocks: int, num_shared_tokens: int
) -> tuple[int, ...]:
    """Return where a prompt keeps its state: before its end, where others left it, on its way.

    The blocks of `num_shared_tokens` were cached, so another prompt has begun with the same tokens,
    and the next one may. On GPUs a state has other bits behind tokens of a response, which a
    resumed sequence has, so there is no checkpoint behind them.
    """
    unit = _unit(pool)
    num_prompt_tokens = sequence.request.num_prompt_tokens
    last = min(sequence.num_tokens, num_prompt_tokens) - 1
    of_state = pool.state_blocks * pool.block_size / MAX_SHARE
    spacing = blocks_for(round(of_state), unit) * unit
    wanted = {
        last // unit * unit,
        num_shared_tokens // unit * unit,
        *range(spacing, last, spacing),
    }
    first = num_cached_blocks * pool.block_size
    return tuple(sorted(position for position in wanted if first < position <= last))


def _unit(pool: BlockPool) -> int:
    return lcm(UNIT_TOKENS, pool.block_size)
