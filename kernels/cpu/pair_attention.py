"""Paged attention of bf16 models on CPUs that multiply bf16 numbers themselves (AVX512-BF16).

It works as `attention` does, tile by tile, with sums in fp32. Queries and keys are multiplied
in bf16. Weights are rounded to bf16 before they multiply values, and the result is divided by the
sum of the rounded weights. A query takes pairs of keys in order. A key that it does not see has the
weight 0, and values past the end count as 0, so such a pair adds nothing. An infinite value may
affect the query that sees only the key before it, because the two form a pair.
"""

# ruff: noqa: PLR0913, PLR0917  (the arguments are pointers and strides)

from __future__ import annotations

import numpy as np

from baton.kernels.constants import MAX_STRIP, TILE, WIDTH
from baton.kernels.cpu.attention import HIDDEN, address, attention, row_floats
from baton.kernels.cpu.pairs import (
    as_halves,
    as_words,
    interleave,
    store_halves,
    weight,
)
from baton.kernels.cpu.products import add_product, set_product, transpose
from baton.kernels.cpu.rows import ONE, ZERO, soft_cap
from baton.kernels.cpu.vectors import (
    Floats,
    Int32s,
    Numbers,
    every,
    exp2,
    fma,
    hide,
    kernel,
    larger,
    largest,
    load,
    prefetch,
    shift,
    store,
)

LINE = 2 * WIDTH  # bf16 numbers in 64 bytes


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
    """Copy the queries side by side and clear their sums."""
    width = row_floats(head_dim)
    copies = as_halves(queries)
    for row in range(num_rows):
        at = row * head_dim + row // group * step
        tops[row] = HIDDEN
        store(sums, row * WIDTH, every(ZERO))
        for d in range(0, head_dim, WIDTH):
            store(mixed, row * width + d, every(ZERO))
        for d in range(head_dim):
            copies[row * width + d] = q[at + d]


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
    """Unpack the keys `first:end`, a tile at most, to columns of words, 16 side by side.

    Their values become rows of words, one row for two keys. Meanwhile the next tile is prefetched.
    """
    width = row_floats(head_dim)
    # Rows of 16 keys are contiguous.
    is_whole = block_size % WIDTH == 0 and width == head_dim
    for key in range(first, min(first + TILE, end), WIDTH):
        count = min(WIDTH, end - key)
        here = shift(pool, address(table, key, block_size, stride_block, head_dim))
        own_keys = here
        own_values = shift(here, to_values)
        ahead = here
        if is_whole:
            soon = next_first + key - first
            if soon < next_end:
                place = address(next_table, soon, block_size, stride_block, head_dim)
                ahead = shift(next_pool, place)
            # A first line alone, whose address the core may have to translate.
            far = key + 2 * TILE
            if far < end:
                prefetch(pool, address(table, far, block_size, stride_block, head_dim))
        else:
            own_keys = staging
            own_values = shift(staging, WIDTH * width)
            for i in range(count):
                row = shift(
                    pool, address(table, key + i, block_size, stride_block, head_dim)
                )
                for d in range(head_dim):
                    own_keys[i * width + d] = row[d]
                    own_values[i * width + d] = row[to_values + d]
        pairs = shift(as_words(values), (key - first) // 2 * width)
        for i in range(0, count, 2):
            for d in range(0, width, LINE):
                at = i * width + d
                interleave(
                    shift(pairs, i // 2 * width + d), own_values, at, width, count - i
                )
                for line in range(at, at + 2 * width, width):
                    prefetch(ahead, line)
                    prefetch(ahead, to_values + line)
        columns = shift(as_words(keys), (key - first) * (width // 2))
        for d in range(0, width, LINE):
            transpose(shift(columns, d // 2 * WIDTH), own_keys, d, width)


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
    pairs = width // 2
    for row in range(0, num_rows, MAX_STRIP):
        count = min(MAX_STRIP, num_rows - row)
        low = position + row // group
        high = position + (row + count - 1) // group
        first = max(low - window + 1, 0)
        end = min(high + 1, TILE)
        if end <= first:
            continue
        start = first // WIDTH * WIDTH
        set_product(
            shift(scores, start),
            TILE,
            shift(as_words(queries), row * pairs),
            pairs,
            count,
            shift(as_words(keys), start * pairs),
            WIDTH,
            WIDTH * pairs,
            end - start,
            head_dim // 2,
        )
        factor = np.float32(scale)
        if cap > ZERO:
            soft_cap(0, count, shift(scores, start), TILE, end - start, scale, cap)
            factor = ONE
        for i in range(count):
            own = position + (row + i) // group
            own_first = max(own - window + 1, 0)
            own_end = min(own + 1, TILE)
            of = shift(scores, i * TILE)
            to = shift(mixed, (row + i) * width)
            if own_end <= own_first:
                for key in range(start, end, WIDTH):
                    store_halves(as_halves(of), key, every(ZERO))
                continue
            if own_first > start or own_end < end or end % WIDTH:
                for key in range(start, end, WIDTH):
                    store(of, key, hide(load(of, key), own_first - key, own_end - key))
            weights = shift(sums, (row + i) * WIDTH)
            _weigh(of, start, end, factor, shift(tops, row + i), weights, to, used)
        add_product(
            shift(mixed, row * width),
            width,
            shift(as_words(scores), start // 2),
            TILE,
            count,
            shift(as_words(values), start // 2 * width),
            width,
            WIDTH,
            used,
            (end + 1) // 2 - start // 2,
        )


@kernel
def _weigh(
    scores: Floats,
    start: int,
    end: int,
    scale: float,
    top: Floats,
    sums: Floats,
    mixed: Floats,
    width: int,
) -> None:
    """Turn the scores of the keys `start:end` into bf16 weights relative to the new maximum.

    The earlier sums of weights and of weighted values are rescaled to that maximum as well.
    """
    highest = every(HIDDEN)
    for key in range(start, end, WIDTH):
        highest = larger(highest, load(scores, key))
    before = top[0]
    now = max(before, np.float32(largest(highest) * scale))
    shrink = exp2(every(before) - every(now))
    weights = load(sums, 0) * shrink
    for key in range(start, end, WIDTH):
        exponent = fma(load(scores, key), every(scale), every(-now))
        weights = weights + store_halves(as_halves(scores), key, weight(exponent))
    store(sums, 0, weights)
    if now > before:
        top[0] = now
        for d in range(0, width, WIDTH):
            store(mixed, d, load(mixed, d) * shrink)


attend = attention(take_queries, _unpack, attend_tile)
