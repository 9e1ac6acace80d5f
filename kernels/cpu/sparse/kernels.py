"""The kernels of sparse attention: the norm of an index's keys, scores of keys, and their choice.

A query is scored by itself, against tiles of keys that are cut at absolute positions, and all sums
take their terms in one order. Of keys with equal scores, the first ones are chosen. So what a query
sees depends on its own sequence alone. Products are in fp32.
"""

# ruff: noqa: PLR0913, PLR0917  (the arguments are pointers and strides)

from __future__ import annotations

import numpy as np

from baton.kernels.constants import DIGIT_BITS, TILE, WIDTH
from baton.kernels.cpu.attention import address, row_floats
from baton.kernels.cpu.products import set_product, transpose
from baton.kernels.cpu.rows import ONE, ZERO
from baton.kernels.cpu.vectors import (
    Floats,
    Int32s,
    Int64s,
    Numbers,
    every,
    fma,
    hide,
    inlined,
    kernel,
    larger,
    load,
    load_first,
    per_line,
    root,
    shift,
    store,
    store_first,
    total,
)

MAGNITUDE = 0x7FFFFFFF
LOWEST = 1 << 31
NUM_DIGITS = 32 // DIGIT_BITS
LAST_DIGIT = (1 << DIGIT_BITS) - 1


@kernel
def layer_norm(
    first: int,
    end: int,
    x: Numbers,  # [num_rows, count]
    stride_x: int,
    weight: Floats,  # [count]
    bias: Floats,  # [count]
    eps: float,
    count: int,
    out: Numbers,  # [num_rows, count]
) -> None:
    for row in range(first, end):
        here = shift(x, row * stride_x)
        there = shift(out, row * count)
        sums = every(ZERO)
        for i in range(0, count, WIDTH):
            sums = sums + load_first(here, i, count - i)
        mean = every(total(sums) / np.float32(count))
        squares = every(ZERO)
        for i in range(0, count, WIDTH):
            left = count - i
            above = load_first(here, i, left) - mean
            square = hide(above * above, 0, left)  # minus infinity past the end
            squares = squares + larger(square, every(ZERO))
        inverse = every(ONE) / root(every(total(squares) / np.float32(count) + eps))
        for i in range(0, count, WIDTH):
            left = count - i
            normed = (load_first(here, i, left) - mean) * inverse
            scaled = fma(normed, load_first(weight, i, left), load_first(bias, i, left))
            store_first(there, i, scaled, left)


@kernel
def choose_keys(
    first_unit: int,
    end_unit: int,
    scratch: Floats,
    bits: Int32s,  # of the scores, which are the last part of `scratch`
    counters: Int64s,  # one for each value of a digit
    staging: Numbers,  # 16 keys
    q: Numbers,  # [num_tokens, num_heads, head_dim]
    weights: Floats,  # [num_tokens, num_heads]
    pool: Numbers,  # the part of one layer
    tables: Int32s,  # the block tables one after the other
    items: Int64s,  # [num_items, 3]: row, position, start of a block table
    num_heads: int,
    head_dim: int,
    block_size: int,
    stride_block: int,
    num_chosen: int,
    slots: Int32s,  # [num_items, num_chosen]
) -> None:
    """Choose `num_chosen` of the keys that each item's query may see, which are more than that."""
    width = row_floats(head_dim)
    keys = shift(scratch, num_heads * width)
    products = shift(keys, TILE * width)
    scores = shift(products, num_heads * TILE)
    for unit in range(first_unit, end_unit):
        row = items[unit * 3]
        count = items[unit * 3 + 1] + 1
        table = shift(tables, items[unit * 3 + 2])
        for head in range(num_heads):
            at = (row * num_heads + head) * head_dim
            for d in range(0, head_dim, WIDTH):
                store(scratch, head * width + d, load_first(q, at + d, head_dim - d))
        for tile in range(0, count, TILE):
            end = min(tile + TILE, count)
            _unpack(
                keys,
                staging,
                pool,
                table,
                tile,
                end,
                block_size,
                stride_block,
                head_dim,
            )
            set_product(
                products,
                TILE,
                scratch,
                width,
                num_heads,
                keys,
                WIDTH,
                WIDTH * width,
                end - tile,
                head_dim,
            )
            for key in range(0, end - tile, WIDTH):
                score = every(ZERO)
                for head in range(num_heads):
                    product = larger(load(products, head * TILE + key), every(ZERO))
                    score = fma(product, every(weights[row * num_heads + head]), score)
                store(scores, tile + key, score)
        _take(
            bits,
            count,
            counters,
            table,
            block_size,
            num_chosen,
            shift(slots, unit * num_chosen),
        )


@kernel
def _unpack(
    keys: Floats,
    staging: Numbers,
    pool: Numbers,
    table: Int32s,
    first: int,
    end: int,
    block_size: int,
    stride_block: int,
    head_dim: int,
) -> None:
    """Unpack the keys `first:end`, a tile at most, to columns in fp32, 16 side by side."""
    width = row_floats(head_dim)
    # Rows of 16 keys are contiguous.
    is_whole = block_size % WIDTH == 0 and width == head_dim
    for key in range(first, end, WIDTH):
        rows = shift(pool, address(table, key, block_size, stride_block, head_dim))
        if not is_whole:
            rows = staging
            for i in range(min(WIDTH, end - key)):
                row = shift(
                    pool, address(table, key + i, block_size, stride_block, head_dim)
                )
                for d in range(head_dim):
                    staging[i * width + d] = row[d]
        columns = shift(keys, (key - first) * width)
        for d in range(0, width, per_line(pool)):
            transpose(shift(columns, d * WIDTH), rows, d, width)


@kernel
def _take(
    bits: Int32s,
    count: int,
    counters: Int64s,
    table: Int32s,
    block_size: int,
    num_chosen: int,
    slots: Int32s,
) -> None:
    """Write the slots of the `num_chosen` largest of `count` scores, in the order of the keys.

    The last of them is found digit by digit, from the highest one on, each time among the scores
    that share the digits found so far.
    """
    found = 0
    above = 0
    for number in range(NUM_DIGITS):
        low = 32 - (number + 1) * DIGIT_BITS
        for digit in range(LAST_DIGIT + 1):
            counters[digit] = 0
        for key in range(count):
            ordered = _ordered(bits[key])
            if ordered >> (low + DIGIT_BITS) == found:
                counters[ordered >> low & LAST_DIGIT] += 1
        digit = LAST_DIGIT
        while digit > 0 and above + counters[digit] < num_chosen:
            above += counters[digit]
            digit -= 1
        found = found << DIGIT_BITS | digit
    left, taken = num_chosen - above, 0  # `left` are as good as the last one
    for key in range(count):
        ordered = _ordered(bits[key])
        is_last = ordered == found and left > 0
        if ordered > found or is_last:
            left -= is_last
            slots[taken] = table[key // block_size] * block_size + key % block_size
            taken += 1


@inlined
def _ordered(bits: int) -> int:
    """Return a number of 32 bits in the order of the float with these bits."""
    word = int(bits)
    return (word ^ (word >> 31 & MAGNITUDE)) + LOWEST


@kernel
def gather_rows(
    first: int,
    end: int,
    slots: Int32s,
    pool: Numbers,  # the part of one layer
    block_size: int,
    stride_block: int,
    row_dim: int,
    out: Numbers,  # [num_slots, row_dim]
) -> None:
    for number in range(first, end):
        slot = slots[number]
        source = shift(
            pool, slot // block_size * stride_block + slot % block_size * row_dim
        )
        target = shift(out, number * row_dim)
        for d in range(row_dim):
            target[d] = source[d]
