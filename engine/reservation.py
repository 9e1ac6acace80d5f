"""Reserve all blocks of a prompt at once: its cached prefix, then fresh blocks.

Both schedulers call it before a prompt starts, so a prompt that has started never waits for blocks.
This file is pure.
"""

from dataclasses import dataclass

from baton.engine.block_pool import BlockPool
from baton.engine.sequence import Sequence


@dataclass(slots=True, frozen=True)
class Reservation:
    """The two parts of a block table: blocks from the prefix cache, and fresh blocks after them."""

    cached: list[int]
    fresh: list[int]


def reserve(
    pool: BlockPool, sequence: Sequence, num_cacheable_tokens: int, num_kept_free: int = 0
) -> Reservation | None:
    """Give `sequence` blocks for all its tokens, or return None if the pool has too few.

    Whole blocks among the first `num_cacheable_tokens` may come from the cache. A prompt that is
    computed here passes one token less than it has, because the last one is computed again for its
    logits. `num_kept_free` blocks must stay free.
    """
    cached = pool.match(sequence.hash_blocks(pool.block_size, num_cacheable_tokens))
    num_fresh = pool.blocks_for(sequence.num_tokens) - len(cached)
    if num_fresh + num_kept_free > pool.num_free:
        pool.release(cached)
        return None
    pool.counts.prefix_queried_tokens += sequence.num_tokens
    pool.counts.prefix_hit_tokens += len(cached) * pool.block_size
    reservation = Reservation(cached, pool.allocate(num_fresh))
    sequence.block_table = [*cached, *reservation.fresh]
    return reservation
