"""Paged attention on CPUs for chunks of any length; a decode step is a chunk of one token.

Queries walk their keys in tiles of `TILE`, cut at absolute positions, with a running maximum and
sum (online softmax). A query adds the same terms in the same order in every batch, and adds nothing
for keys that it does not see. So its bits depend on its own sequence alone, and slots past the end
may hold anything. The products here are in fp32; those of `cpu_pair_attention` are in bf16.
"""

# ruff: noqa: PLR0913, PLR0917  (the arguments are pointers and strides)

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from baton.kernels.constants import MAX_STRIP, ROWS, TILE, WIDTH, padded
from baton.kernels.cpu.products import add_product, set_product, transpose, widen
from baton.kernels.cpu.rows import ONE, ZERO, soft_cap
from baton.kernels.cpu.vectors import (
    Floats,
    Int32s,
    Int64s,
    Numbers,
    Pooled,
    every,
    exp2,
    hide,
    inlined,
    kernel,
    larger,
    largest,
    load,
    load_first,
    per_line,
    prefetch,
    shift,
    store,
    store_first,
    total,
)

HIDDEN = np.float32("-inf")

row_floats = inlined(padded)


def attention(
    take_queries: Callable[..., None],
    unpack: Callable[..., None],
    attend_tile: Callable[..., None],
) -> Callable[..., None]:
    """Return the attention kernel that is made of these three steps."""

    @kernel
    def attend(
        first_unit: int,  # item * kv_heads + KV head
        end_unit: int,
        scratch: Floats,
        staging: Numbers,  # 16 rows of a head
        q: Numbers,  # [num_tokens, num_heads, head_dim]
        pool: Pooled,  # the part of one layer
        tables: Int32s,  # the block tables one after the other
        # [num_items, 4]: first row, tokens, first position, start of a block table.
        items: Int64s,
        kv_heads: int,
        group: int,
        head_dim: int,
        block_size: int,
        to_values: int,  # from a key to its value; 0 where keys are the values
        stride_block: int,
        stride_head: int,
        window: int,
        scale: float,  # of the products; this and `cap` as `in_powers_of_2` says
        cap: float,
        sinks: Floats,  # [num_heads], for a softmax in base 2
        has_sinks: int,
        out: Numbers,  # shaped as q
    ) -> None:
        """Attend for the units `first_unit:end_unit`, each an item for one KV head."""
        width = row_floats(head_dim)
        most = max(ROWS, group)
        mixed = shift(scratch, most * width)
        keys = shift(mixed, most * width)
        values = shift(keys, TILE * width)
        scores = shift(values, TILE * width)
        sums = shift(scores, MAX_STRIP * TILE)
        tops = shift(sums, most * WIDTH)
        for unit in range(first_unit, end_unit):
            item = unit // kv_heads * 4
            head = unit % kv_heads
            num_tokens = items[item + 1]
            position = items[item + 2]
            table = shift(tables, items[item + 3])
            head_pool = shift(pool, head * stride_head)
            num_rows = num_tokens * group
            end = position + num_tokens
            # Row `r` is query head `r % group` of the KV head, of token `r // group`.
            at = ((items[item] * kv_heads + head) * group) * head_dim
            step = (kv_heads - 1) * group * head_dim  # over the heads of other KV heads
            take_queries(
                scratch,
                mixed,
                sums,
                tops,
                shift(q, at),
                num_rows,
                group,
                head_dim,
                step,
            )
            for row in range(num_rows if has_sinks else 0):
                # A key before all others, with a value of zeros.
                tops[row] = sinks[head * group + row % group]
                sums[row * WIDTH] = ONE
            for tile in range(_first_tile(position, window), end, TILE):
                next_pool = head_pool
                next_table = table
                next_tile = tile + TILE
                next_end = end
                if next_tile >= end and unit + 1 < end_unit:
                    later = (unit + 1) // kv_heads * 4
                    next_pool = shift(pool, (unit + 1) % kv_heads * stride_head)
                    next_table = shift(tables, items[later + 3])
                    next_tile = _first_tile(items[later + 2], window)
                    next_end = items[later + 1] + items[later + 2]
                unpack(
                    keys,
                    values,
                    staging,
                    head_pool,
                    table,
                    tile,
                    end,
                    next_pool,
                    next_table,
                    next_tile,
                    next_end,
                    block_size,
                    to_values,
                    stride_block,
                    head_dim,
                )
                attend_tile(
                    scratch,
                    mixed,
                    keys,
                    values,
                    scores,
                    sums,
                    tops,
                    num_rows,
                    group,
                    position - tile,
                    window,
                    head_dim,
                    scale,
                    cap,
                )
            _give_results(shift(out, at), mixed, sums, num_rows, group, head_dim, step)

    return attend


@inlined
def _first_tile(position: int, window: int) -> int:
    return max(position - window + 1, 0) // TILE * TILE


@inlined
def address(
    table: Int32s, key: int, block_size: int, stride_block: int, head_dim: int
) -> int:
    return table[key // block_size] * stride_block + key % block_size * head_dim


@kernel
def take_queries(
    queries: Floats,
    mixed: Floats,
    sums: Floats,
    tops: Floats,
    q: Numbers,
    num_rows: int,
    group: int,
    head_dim: int,
    step: int,
) -> None:
    """Convert the queries to fp32 and clear their sums."""
    width = row_floats(head_dim)
    for row in range(num_rows):
        at = row * head_dim + row // group * step
        tops[row] = HIDDEN
        store(sums, row * WIDTH, every(ZERO))
        for d in range(0, head_dim, WIDTH):
            store(queries, row * width + d, load_first(q, at + d, head_dim - d))
            store(mixed, row * width + d, every(ZERO))


@kernel
def _unpack(
    keys: Floats,
    values: Floats,
    staging: Numbers,
    pool: Numbers,
    table: Int32s,
    first: int,
    end: int,
    next_pool: Numbers,
    next_table: Int32s,
    next_first: int,
    next_end: int,
    block_size: int,
    to_values: int,
    stride_block: int,
    head_dim: int,
) -> None:
    """Unpack a tile at most: keys `first:end` to columns, 16 side by side, and values to rows.

    Both are in fp32. Meanwhile the next tile is prefetched one line at a time: a core stalls if it
    has more requests to memory than it can track.
    """
    width = row_floats(head_dim)
    line = per_line(pool)
    # Rows of 16 keys are contiguous.
    is_whole = block_size % WIDTH == 0 and width == head_dim
    for key in range(first, min(first + TILE, end), WIDTH):
        at = address(table, key, block_size, stride_block, head_dim)
        soon = next_first + key - first
        # There is no next tile: prefetch lines that are in the cache already.
        ahead = at
        if soon < next_end:
            ahead = address(next_table, soon, block_size, stride_block, head_dim)
        # A first line alone, whose address the core may have to translate.
        far = key + 2 * TILE
        if far < end:
            prefetch(pool, address(table, far, block_size, stride_block, head_dim))
        for i in range(min(WIDTH, end - key)):
            row = shift(values, (key - first + i) * width)
            if is_whole:
                here = shift(pool, at + i * head_dim)
                there = shift(next_pool, ahead + i * head_dim)
                d = 0
                while d < head_dim:
                    prefetch(there, d)
                    prefetch(there, to_values + d)
                    widen(shift(row, d), here, to_values + d)
                    d += line
            else:
                here = shift(
                    pool, address(table, key + i, block_size, stride_block, head_dim)
                )
                for d in range(head_dim):
                    staging[i * width + d] = here[d]
                for d in range(0, head_dim, WIDTH):
                    store(row, d, load_first(here, to_values + d, head_dim - d))
        columns = shift(keys, (key - first) * width)
        rows = shift(pool, at) if is_whole else staging
        d = 0
        while d < width:
            transpose(shift(columns, d * WIDTH), rows, d, width)
            d += line


@kernel
def attend_tile(
    queries: Floats,
    mixed: Floats,
    keys: Floats,
    values: Floats,
    scores: Floats,
    sums: Floats,
    tops: Floats,
    num_rows: int,
    group: int,
    position: int,
    window: int,
    head_dim: int,
    scale: float,
    cap: float,
) -> None:
    """Add a tile of keys to what the queries have seen; positions count from the tile's start."""
    width = row_floats(head_dim)
    used = -(-head_dim // WIDTH) * WIDTH
    for row in range(0, num_rows, MAX_STRIP):
        count = min(MAX_STRIP, num_rows - row)
        low = position + row // group
        high = position + (row + count - 1) // group
        first = max(low - window + 1, 0)
        end = min(high + 1, TILE)
        if end <= first:
            continue
        start = first // WIDTH * WIDTH
        # Strides are constants where possible: numba compiles the product for them, and its
        # addresses fit the registers. With variable strides the product takes twice as long.
        set_product(
            shift(scores, start),
            TILE,
            shift(queries, row * width),
            width,
            count,
            shift(keys, start * width),
            WIDTH,
            WIDTH * width,
            end - start,
            head_dim,
        )
        factor = np.float32(scale)
        if cap > ZERO:
            soft_cap(0, count, shift(scores, start), TILE, end - start, scale, cap)
            factor = ONE
        # Unless all rows see the same keys, each is mixed on its own, so that no term is added
        # for a key that it does not see.
        is_alike = max(high - window + 1, 0) == first and min(low + 1, TILE) == end
        for i in range(count):
            own = position + (row + i) // group
            own_first = max(own - window + 1, 0)
            own_end = min(own + 1, TILE)
            if own_end <= own_first:
                continue
            of = shift(scores, i * TILE)
            to = shift(mixed, (row + i) * width)
            weights = shift(sums, (row + i) * WIDTH)
            _weigh(
                of, own_first, own_end, factor, shift(tops, row + i), weights, to, used
            )
            if not is_alike:
                add_product(
                    to,
                    width,
                    shift(of, own_first),
                    TILE,
                    1,
                    shift(values, own_first * width),
                    width,
                    WIDTH,
                    used,
                    own_end - own_first,
                )
        if is_alike:
            add_product(
                shift(mixed, row * width),
                width,
                shift(scores, first),
                TILE,
                count,
                shift(values, first * width),
                width,
                WIDTH,
                used,
                end - first,
            )


@kernel
def _weigh(
    scores: Floats,
    first: int,
    end: int,
    scale: float,
    top: Floats,
    sums: Floats,
    mixed: Floats,
    width: int,
) -> None:
    """Turn the scores of the keys `first:end` of a tile into weights relative to the new maximum.

    The earlier sums of weights and of weighted values are rescaled to that maximum as well.
    """
    start = first // WIDTH * WIDTH
    highest = every(HIDDEN)
    for key in range(start, end, WIDTH):
        score = hide(load(scores, key) * every(scale), first - key, end - key)
        store(scores, key, score)
        highest = larger(highest, score)
    before = top[0]
    now = max(before, largest(highest))
    shrink = exp2(every(before) - every(now))
    weights = load(sums, 0) * shrink
    for key in range(start, end, WIDTH):
        weight = exp2(load(scores, key) - every(now))
        store(scores, key, weight)
        weights = weights + weight
    store(sums, 0, weights)
    if now > before:
        top[0] = now
        for d in range(0, width, WIDTH):
            store(mixed, d, load(mixed, d) * shrink)


@kernel
def _give_results(
    out: Numbers,
    mixed: Floats,
    sums: Floats,
    num_rows: int,
    group: int,
    head_dim: int,
    step: int,
) -> None:
    """Divide the weighted values by the sum of the weights."""
    width = row_floats(head_dim)
    for row in range(num_rows):
        at = row * head_dim + row // group * step
        norm = every(total(load(sums, row * WIDTH)))
        for d in range(0, head_dim, WIDTH):
            # Terms of 0 may decide the sign of a sum that is 0, so -0 becomes 0 here.
            value = load(mixed, row * width + d) + every(ZERO)
            store_first(out, at + d, value / norm, head_dim - d)


attend = attention(take_queries, _unpack, attend_tile)
