"""The index of sparse attention over a paged pool: scores of keys, and the choice of the best.

A query is scored by itself, against tiles of keys that are cut at absolute positions, in decode
steps as in prompts. The choice finds the last chosen score digit by digit, and of equal scores
takes those of the first keys. So what a query sees depends on its own sequence alone.
`sparse_reference` defines the meaning.
"""

# ruff: noqa: N803, PLR0913, PLR0917
# Compile-time values are in capitals, as in Triton's own code; arguments are pointers and strides.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.constants import DIGIT_BITS
from baton.kernels.cuda.paged import (
    BLOCK_SIZES,
    interpreted,
    load_blocks,
    load_rows,
    slot_rows,
)
from baton.kernels.launch import Launcher, cdiv, next_power_of_2

MAX_HEADS = 64
MAX_HEAD_DIM = 128
KEYS = {torch.bfloat16: (64, 4), torch.float32: (16, 8)}  # of a tile, and its warps
SPLIT = 512  # keys that a program scores
TILE = 1024  # scores that are counted at a time
WORKSPACE = 1 << 29  # bytes for scores; a larger batch is scored in parts
BITS = tl.constexpr(DIGIT_BITS)
DIGITS = tl.constexpr(1 << DIGIT_BITS)


def choose_keys(
    q: Tensor,  # [num_tokens, num_heads, head_dim], whose heads are contiguous
    weights: Tensor,  # [num_tokens, num_heads] fp32
    keys: Tensor,  # [num_blocks, 1, num_layers, 1, block_size, head_dim]
    layer: int,
    block_tables: Tensor,  # [num_sequences, max_blocks] int32
    sequences: Tensor,  # [num_tokens] int32: each token's sequence
    num_seen: Tensor,  # [num_tokens] int32: the keys up to a token's own; 0 is padding
    num_chosen: int,
) -> Tensor:
    """Return the slots of the keys that each token sees, `[num_tokens, num_chosen]` int32.

    They are in the order of the keys. A token with fewer keys sees all, and its row ends undefined.
    """
    num_tokens, heads, head_dim = q.shape
    block_size = keys.shape[4]
    assert keys.shape[1::2] == (1, 1, head_dim), (q.shape, keys.shape)
    assert keys.stride()[4:] == (head_dim, 1), "a layer of a block is contiguous"
    assert block_size in BLOCK_SIZES, f"block size {block_size}"
    assert heads <= MAX_HEADS, f"{heads} heads"
    assert head_dim <= MAX_HEAD_DIM, f"head size {head_dim}"
    assert q.stride()[1:] == (head_dim, 1), "the heads of a token are contiguous"
    assert q.dtype == keys.dtype, f"queries are {q.dtype}, the keys are {keys.dtype}"
    assert weights.is_contiguous()
    assert block_tables.stride(1) == 1, "a block table is contiguous"
    num_keys = block_tables.shape[1] * block_size
    tile, num_warps = KEYS[q.dtype]
    count = min(num_tokens, max(1, WORKSPACE // (4 * num_keys)))
    scores = q.new_empty((count, num_keys), dtype=torch.float32)
    slots = q.new_empty((num_tokens, num_chosen), dtype=torch.int32)
    for first in range(0, num_tokens, count):
        own = slice(first, first + count)
        seen = num_seen[own]
        of = sequences[own]
        grid = (len(seen), cdiv(num_keys, SPLIT), 1)
        _launch_index_scores(
            grid,
            q[own],
            weights[own],
            keys,
            block_tables,
            of,
            seen,
            scores,
            num_keys,
            num_chosen,
            layer * keys.stride(2),
            q.stride(0),
            keys.stride(0),
            block_tables.stride(0),
            HEADS=heads,
            ROWS=max(16, next_power_of_2(heads)),
            HEAD_DIM=head_dim,
            DIM=max(16, next_power_of_2(head_dim)),
            BLOCK_SIZE=block_size,
            KEYS=tile,
            SPLIT=SPLIT,
            UPCAST=interpreted(),
            num_warps=num_warps,
            num_stages=2,
            enable_fp_fusion=True,
        )
        _launch_take_best(
            (len(seen), 1, 1),
            scores,
            block_tables,
            of,
            seen,
            slots[own],
            num_keys,
            num_chosen,
            block_tables.stride(0),
            BLOCK_SIZE=block_size,
            TILE=TILE,
            num_warps=4,
            num_stages=1,
            enable_fp_fusion=True,
        )
    return slots


# Sizes of tables are not specialised, because variants for 1 and for multiples of 16 would be
# compiled during service.
@triton.jit(
    do_not_specialize=[
        "q_ptr",
        "weight_ptr",
        "table_ptr",
        "sequence_ptr",
        "seen_ptr",
        "num_keys",
        "stride_table",
    ]
)
def _index_scores_kernel(
    q_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    key_ptr: tl.tensor,
    table_ptr: tl.tensor,
    sequence_ptr: tl.tensor,
    seen_ptr: tl.tensor,
    score_ptr: tl.tensor,
    num_keys: tl.tensor,
    num_chosen: tl.tensor,
    layer_offset: tl.tensor,
    stride_q: tl.tensor,
    stride_block: tl.tensor,
    stride_table: tl.tensor,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    seen = tl.load(seen_ptr + token)
    first = tl.program_id(1) * SPLIT
    if first >= seen or seen <= num_chosen:
        return  # the token has no such key, or sees all
    end = tl.minimum(first + SPLIT, seen)
    table = table_ptr + tl.load(sequence_ptr + token).to(tl.int64) * stride_table
    head = tl.arange(0, ROWS)
    d = tl.arange(0, DIM)[None, :]
    own = head < HEADS
    q = load_rows(
        q_ptr + token * stride_q + head[:, None] * HEAD_DIM + d,
        own,
        HEAD_DIM,
        DIM,
        True,
    )
    weight = tl.load(weight_ptr + token * HEADS + head, mask=own, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    blocks = load_blocks(table, first, end, BLOCK_SIZE, KEYS)
    for tile in range(first, end, KEYS):
        rows = slot_rows(blocks, tile, stride_block, BLOCK_SIZE, HEAD_DIM, KEYS)
        blocks = load_blocks(table, tile + KEYS, end, BLOCK_SIZE, KEYS)
        n = tile + tl.arange(0, KEYS)
        k = load_rows(
            key_ptr + layer_offset + rows[:, None] + d, n < end, HEAD_DIM, DIM, True
        )
        if UPCAST:
            k = k.to(tl.float32)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        score = tl.sum(tl.maximum(s, 0.0) * weight[:, None], 0)
        # A zero has no sign, so that zeros are equal.
        score = tl.where(score == 0.0, 0.0, score)
        tl.store(score_ptr + token * num_keys + n, score, mask=n < end)


_launch_index_scores = Launcher(_index_scores_kernel)


@triton.jit(
    do_not_specialize=[
        "table_ptr",
        "sequence_ptr",
        "seen_ptr",
        "slot_ptr",
        "num_keys",
        "stride_table",
    ]
)
def _take_best_kernel(
    score_ptr: tl.tensor,
    table_ptr: tl.tensor,
    sequence_ptr: tl.tensor,
    seen_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    num_keys: tl.tensor,
    num_chosen: tl.tensor,
    stride_table: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    seen = tl.load(seen_ptr + token)
    table = table_ptr + tl.load(sequence_ptr + token).to(tl.int64) * stride_table
    scores = score_ptr + token * num_keys
    slots = slot_ptr + token * num_chosen
    i = tl.arange(0, TILE)
    if seen <= num_chosen:
        for tile in range(0, seen, TILE):
            n = tile + i
            block = tl.load(table + n // BLOCK_SIZE, mask=n < seen, other=0)
            tl.store(slots + n, block * BLOCK_SIZE + n % BLOCK_SIZE, mask=n < seen)
        return
    # The last score that is chosen, from its highest digit on, and how many are better.
    found = tl.full((), 0, tl.int64)
    above = tl.full((), 0, tl.int32)
    digit = tl.arange(0, DIGITS)
    for low in tl.static_range(32 - BITS, -1, -BITS):
        counts = tl.zeros((DIGITS,), tl.int32)
        for tile in range(0, seen, TILE):
            ordered = _ordered(scores, tile + i, seen)
            is_like = (tile + i < seen) & ((ordered >> (low + BITS)) == found)
            own_digit = ((ordered >> low) & (DIGITS - 1)).to(tl.int32)
            counts += tl.histogram(own_digit, DIGITS, mask=is_like)
        # How many scores like it have this digit or a higher one.
        reached = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
        chosen = tl.sum((above + reached >= num_chosen).to(tl.int32), 0) - 1
        above += tl.sum(tl.where(digit > chosen, counts, 0), 0)
        found = (found << BITS) | chosen
    left = num_chosen - above  # so many of those that equal the last one
    taken = tl.full((), 0, tl.int32)
    num_equal = tl.full((), 0, tl.int32)
    for tile in range(0, seen, TILE):
        n = tile + i
        ordered = _ordered(scores, n, seen)
        is_equal = ((n < seen) & (ordered == found)).to(tl.int32)
        is_taken = (n < seen) & (ordered > found)
        is_taken = is_taken | (
            (is_equal > 0) & (num_equal + tl.cumsum(is_equal, 0) <= left)
        )
        number = taken + tl.cumsum(is_taken.to(tl.int32), 0) - 1
        block = tl.load(table + n // BLOCK_SIZE, mask=is_taken, other=0)
        tl.store(slots + number, block * BLOCK_SIZE + n % BLOCK_SIZE, mask=is_taken)
        taken += tl.sum(is_taken.to(tl.int32), 0)
        num_equal += tl.sum(is_equal, 0)


_launch_take_best = Launcher(_take_best_kernel)


@triton.jit
def _ordered(scores: tl.tensor, n: tl.tensor, seen: tl.tensor) -> tl.tensor:
    """Return numbers of 32 bits in the order of the scores."""
    score = tl.load(scores + n, mask=n < seen, other=0.0)
    word = score.to(tl.int32, bitcast=True)
    word = word ^ ((word >> 31) & 0x7FFFFFFF)
    return word.to(tl.int64) + 0x80000000
