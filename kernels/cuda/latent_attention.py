"""Latent attention over a paged pool: all heads of a token attend to the same rows.

A row is a latent part, which is the key and the value of every head, and a rotated part, which is
more of the key. A program takes a tile of heads, or of tokens and heads, so that it reads each row
once for all of them. Contexts are cut into splits at fixed absolute positions, which are merged in
order, and decode and prefill take the same tiles of keys and the same instructions. So a token's
bits depend on its own sequence alone, whatever shares its batch. `reference` defines the meaning.
"""

# ruff: noqa: N803, PLR0913, PLR0917
# Compile-time values are in capitals, as in Triton's own code; arguments are pointers and strides.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.constants import LOG2_E
from baton.kernels.cuda.paged import (
    BLOCK_SIZES,
    MAX_BATCH,
    ORDERED_SPLIT,
    interpreted,
    load_blocks,
    load_rows,
    merge,
    num_programs,
    slot_rows,
    weigh,
)
from baton.kernels.launch import Launcher, cdiv, next_power_of_2

# A tile of keys and queries of this length fits the 99 KiB of shared memory of the smallest GPUs.
MAX_LATENT = 512
MAX_ROTATED = 64
KEYS = {torch.bfloat16: 32, torch.float32: 16}
ROWS = 16  # of a tile of queries; 32 have no registers for two sums in prefill
WORKSPACE = 1 << 29  # bytes for the sums of splits; a larger batch decodes in parts


def latent_decode_attention(
    q: Tensor,  # [batch, num_heads, row_dim]
    pool: Tensor,  # [num_blocks, 1, num_layers, 1, block_size, row_dim]
    layer: int,
    block_tables: Tensor,  # [batch, max_blocks] int32
    context_lens: Tensor,  # [batch] int32
    scale: float,
    rotated: int,  # numbers at the end of a row that are no values
    *,
    of_slots: bool = False,
) -> Tensor:
    """Return the attention of one new token per sequence, `[batch, num_heads, latent]`.

    A row of length 0, the padding of a captured graph, gives zeros. There is room for as many
    splits as the table has, so tables should be no wider than the batch needs. Tables `of_slots`
    name the slot of each key, and may be more than a batch of sequences.
    """
    sizes = _sizes(
        q, pool, block_tables[:MAX_BATCH] if of_slots else block_tables, rotated
    )
    (batch, heads, _), latent = q.shape, sizes["LATENT"]
    per_entry = 1 if of_slots else pool.shape[4]
    num_splits = cdiv(block_tables.shape[1] * per_entry, ORDERED_SPLIT)
    count = min(batch, MAX_BATCH, WORKSPACE // (4 * heads * num_splits * (latent + 2)))
    count = max(1, count)
    partial = q.new_empty((count, heads, num_splits, latent), dtype=torch.float32)
    sums = q.new_empty((count, heads, num_splits, 2), dtype=torch.float32)
    out = q.new_empty((batch, heads, latent))
    for first in range(0, batch, count):
        own = slice(first, first + count)
        lens = context_lens[own]
        _launch_latent_split(
            (num_programs(q.device, 1), 1, 1),
            q[own],
            pool,
            block_tables[own],
            lens,
            partial,
            sums,
            out[own],
            len(lens),
            num_splits,
            layer * pool.stride(2),
            scale * LOG2_E,
            q.stride(0),
            pool.stride(0),
            block_tables.stride(0),
            HEADS=heads,
            MAX_BATCH=MAX_BATCH,
            OF_SLOTS=of_slots,
            **sizes,
        )
        if num_splits > 1:
            _launch_latent_merge(
                (len(lens), heads, 1),
                partial,
                sums,
                lens,
                out[own],
                num_splits,
                LATENT=latent,
                DIM=sizes["DIM"],
                SPLIT=ORDERED_SPLIT,
                num_warps=4,
                num_stages=1,
                enable_fp_fusion=True,
            )
    return out


def latent_prefill_attention(
    q: Tensor,  # [num_tokens, num_heads, row_dim]
    pool: Tensor,  # [num_blocks, 1, num_layers, 1, block_size, row_dim]
    layer: int,
    block_tables: Tensor,  # [batch, max_blocks] int32
    query_starts: Tensor,  # [batch + 1] int32
    context_lens: Tensor,  # [batch] int32
    scale: float,
    rotated: int,  # numbers at the end of a row that are no values
) -> Tensor:
    """Return the attention of every new token over its own past, `[num_tokens, num_heads, latent]`.

    The kernel does not write rows past `query_starts[-1]`, which are padding.
    """
    sizes = _sizes(q, pool, block_tables, rotated)
    num_tokens, heads, _ = q.shape
    out = q.new_empty((num_tokens, heads, sizes["LATENT"]))
    tile_heads = min(next_power_of_2(heads), ROWS)
    # The lengths are on the device, so launch as many programs as could be needed; the rest return.
    tiles = num_tokens // (ROWS // tile_heads) + len(block_tables)
    _launch_latent_prefill(
        (cdiv(heads, tile_heads), tiles, 1),
        q,
        pool,
        block_tables,
        query_starts,
        context_lens,
        out,
        len(block_tables),
        layer * pool.stride(2),
        scale * LOG2_E,
        q.stride(0),
        pool.stride(0),
        block_tables.stride(0),
        HEADS=heads,
        TILE_HEADS=tile_heads,
        MAX_BATCH=MAX_BATCH,
        **sizes,
    )
    return out


def _sizes(
    q: Tensor, pool: Tensor, block_tables: Tensor, rotated: int
) -> dict[str, int]:
    """Assert the layout that the kernels rely on, and return what both are compiled for."""
    _, kv_heads, _, planes, block_size, row_dim = pool.shape
    latent = row_dim - rotated
    assert (kv_heads, planes) == (1, 1), (
        f"not a pool of latent rows: {tuple(pool.shape)}"
    )
    assert pool.stride()[4:] == (row_dim, 1), "a layer of a block is contiguous"
    assert block_size in BLOCK_SIZES, f"block size {block_size}"
    assert latent <= MAX_LATENT, f"latent rows of {latent}"
    assert rotated <= MAX_ROTATED, f"rotated keys of {rotated}"
    assert q.shape[2] == row_dim, f"queries of {q.shape[2]}, a pool of {row_dim}"
    assert q.stride()[1:] == (row_dim, 1), "the heads of a token are contiguous"
    assert q.dtype == pool.dtype, f"queries are {q.dtype}, the pool is {pool.dtype}"
    assert len(block_tables) <= MAX_BATCH, f"a batch of {len(block_tables)}"
    assert block_tables.stride(1) == 1, "a block table is contiguous"
    return {
        "LATENT": latent,
        "ROTATED": rotated,
        "DIM": max(16, next_power_of_2(latent)),
        "TURN": max(16, next_power_of_2(rotated)),
        "ROWS": ROWS,
        "BLOCK_SIZE": block_size,
        "KEYS": KEYS[q.dtype],
        "SPLIT": ORDERED_SPLIT,
        "UPCAST": interpreted(),
        "num_warps": 8,
        "num_stages": 3 if q.dtype == torch.bfloat16 else 1,
        "enable_fp_fusion": True,
        # Else the assembler spills to fit two programs that memory has no room for.
        "maxnreg": 255,
    }


# Counts are not specialised, because variants for 1 and for multiples of 16 would be compiled
# during service.
@triton.jit(
    do_not_specialize=["batch", "num_splits", "stride_table", "table_ptr", "len_ptr"]
)
def _latent_split_kernel(
    q_ptr: tl.tensor,
    pool_ptr: tl.tensor,
    table_ptr: tl.tensor,
    len_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    out_ptr: tl.tensor,
    batch: tl.tensor,
    num_splits: tl.tensor,
    layer_offset: tl.tensor,
    scale_log2: tl.tensor,
    stride_q: tl.tensor,
    stride_block: tl.tensor,
    stride_table: tl.tensor,
    HEADS: tl.constexpr,
    MAX_BATCH: tl.constexpr,
    OF_SLOTS: tl.constexpr,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    DIM: tl.constexpr,
    TURN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    # A fixed number of programs share the splits of the batch. Tiles of heads are innermost, so
    # those that read the same rows run side by side.
    tiles: tl.constexpr = (HEADS + ROWS - 1) // ROWS
    row = tl.arange(0, MAX_BATCH)
    lens = tl.load(len_ptr + row, mask=row < batch, other=0)
    # A row of padding has one item, which writes its zeros.
    counts = tl.where(row < batch, tl.maximum(tl.cdiv(lens, SPLIT), 1), 0)
    ends = tl.cumsum(counts, 0)
    for item in range(tl.program_id(0), tl.sum(counts, 0) * tiles, tl.num_programs(0)):
        before = ends <= item // tiles
        sequence = tl.sum(before.to(tl.int32), 0)
        split = item // tiles - tl.max(tl.where(before, ends, 0), 0)
        context_len = tl.load(len_ptr + sequence)
        head = item % tiles * ROWS + tl.arange(0, ROWS)
        own = head < HEADS
        m, norm, acc = _attend(
            q_ptr + sequence.to(tl.int64) * stride_q + head * (LATENT + ROTATED),
            own,
            pool_ptr + layer_offset,
            table_ptr + sequence.to(tl.int64) * stride_table,
            split * SPLIT,
            tl.minimum(split * SPLIT + SPLIT, context_len),
            tl.full((ROWS,), 0, tl.int32) + context_len - 1,
            scale_log2,
            stride_block,
            OF_SLOTS,
            LATENT,
            ROTATED,
            DIM,
            TURN,
            ROWS,
            BLOCK_SIZE,
            KEYS,
            UPCAST,
        )
        line = sequence.to(tl.int64) * HEADS + head
        d = tl.arange(0, DIM)
        live = own[:, None] & (d < LATENT)[None, :]
        if context_len <= SPLIT:
            out = acc / tl.where(norm == 0.0, 1.0, norm)[:, None]
            target = out_ptr + line[:, None] * LATENT + d[None, :]
            tl.store(target, out.to(out_ptr.dtype.element_ty), mask=live)
        else:
            place = line * num_splits + split
            tl.store(partial_ptr + place[:, None] * LATENT + d[None, :], acc, mask=live)
            tl.store(sum_ptr + place * 2, m, mask=own)
            tl.store(sum_ptr + place * 2 + 1, norm, mask=own)


_launch_latent_split = Launcher(_latent_split_kernel)


@triton.jit(do_not_specialize=["num_splits", "len_ptr"])
def _latent_merge_kernel(
    partial_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    len_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_splits: tl.tensor,
    LATENT: tl.constexpr,
    DIM: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    sequence = tl.program_id(0)
    context_len = tl.load(len_ptr + sequence)
    if context_len <= SPLIT:
        return  # the split's own program has stored the result
    line = sequence.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    one = tl.arange(0, 1)
    d = tl.arange(0, DIM)[None, :]
    partials = partial_ptr + line * num_splits * LATENT
    sums = sum_ptr + line * num_splits * 2
    m = tl.full((1,), float("-inf"), tl.float32)
    norm = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, DIM), tl.float32)
    # Unrolled, so that loads of several splits are in flight.
    for split in tl.range(0, tl.cdiv(context_len, SPLIT), loop_unroll_factor=8):
        m, norm, acc = merge(
            m,
            norm,
            acc,
            tl.load(sums + split * 2 + one),
            tl.load(sums + split * 2 + 1 + one),
            tl.load(
                partials + split * LATENT + d + one[:, None], mask=d < LATENT, other=0.0
            ),
        )
    out = (acc / norm[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + line * LATENT + d + one[:, None], out, mask=d < LATENT)


_launch_latent_merge = Launcher(_latent_merge_kernel)


@triton.jit(
    do_not_specialize=["batch", "stride_table", "table_ptr", "start_ptr", "len_ptr"]
)
def _latent_prefill_kernel(
    q_ptr: tl.tensor,
    pool_ptr: tl.tensor,
    table_ptr: tl.tensor,
    start_ptr: tl.tensor,
    len_ptr: tl.tensor,
    out_ptr: tl.tensor,
    batch: tl.tensor,
    layer_offset: tl.tensor,
    scale_log2: tl.tensor,
    stride_q: tl.tensor,
    stride_block: tl.tensor,
    stride_table: tl.tensor,
    HEADS: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    MAX_BATCH: tl.constexpr,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    DIM: tl.constexpr,
    TURN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    # Sequence `s` owns the units from `query_starts[s] // TOKENS + s` on, as in dense prefill.
    tokens: tl.constexpr = ROWS // TILE_HEADS
    row = tl.arange(0, MAX_BATCH)
    starts = tl.load(start_ptr + row, mask=row < batch, other=0)
    unit = tl.program_id(1)
    sequence = (
        tl.sum(((starts // tokens + row <= unit) & (row < batch)).to(tl.int32), 0) - 1
    )
    query_start = tl.load(start_ptr + sequence)
    query_len = tl.load(start_ptr + sequence + 1) - query_start
    tile = unit - (query_start // tokens + sequence)
    if tile * tokens >= query_len:
        return
    # The last tile of a chunk sees the most keys, so it is started first.
    first = (tl.cdiv(query_len, tokens) - 1 - tile) * tokens
    i = tl.arange(0, ROWS)
    token = first + i // TILE_HEADS
    head = tl.program_id(0) * TILE_HEADS + i % TILE_HEADS
    own = (token < query_len) & (head < HEADS)
    context_len = tl.load(len_ptr + sequence)
    last = context_len - query_len + token  # the last key that a row sees
    end = tl.minimum(context_len - query_len + first + tokens, context_len)
    line = (query_start + token).to(tl.int64)

    m = tl.full((ROWS,), float("-inf"), tl.float32)
    norm = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM), tl.float32)
    for start in range(0, end, SPLIT):
        m_next, norm_next, acc_next = _attend(
            q_ptr + line * stride_q + head * (LATENT + ROTATED),
            own,
            pool_ptr + layer_offset,
            table_ptr + sequence.to(tl.int64) * stride_table,
            start,
            tl.minimum(start + SPLIT, end),
            last,
            scale_log2,
            stride_block,
            False,
            LATENT,
            ROTATED,
            DIM,
            TURN,
            ROWS,
            BLOCK_SIZE,
            KEYS,
            UPCAST,
        )
        m, norm, acc = merge(m, norm, acc, m_next, norm_next, acc_next)
    d = tl.arange(0, DIM)
    place = out_ptr + (line * HEADS + head)[:, None] * LATENT + d[None, :]
    out = (acc / norm[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(place, out, mask=own[:, None] & (d < LATENT)[None, :])


_launch_latent_prefill = Launcher(_latent_prefill_kernel)


@triton.jit
def _attend(
    q_rows: tl.tensor,
    own: tl.tensor,
    pool_ptr: tl.tensor,
    table: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    last: tl.tensor,
    scale_log2: tl.tensor,
    stride_block: tl.tensor,
    OF_SLOTS: tl.constexpr,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    DIM: tl.constexpr,
    TURN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    UPCAST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return maximum, sum and output of some queries over the keys `start:end` up to `last`.

    The sum is a product with ones, which adds in the order of the keys.
    """
    d = tl.arange(0, DIM)[None, :]
    r = tl.arange(0, TURN)[None, :]
    q = load_rows(q_rows[:, None] + d, own, LATENT, DIM, True)
    q_turned = load_rows(q_rows[:, None] + LATENT + r, own, ROTATED, TURN, True)
    if UPCAST:
        q = q.to(tl.float32)
        q_turned = q_turned.to(tl.float32)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    norm = tl.zeros((ROWS, 16), tl.float32)
    acc = tl.zeros((ROWS, DIM), tl.float32)
    ones = tl.full((KEYS, 16), 1.0, q.dtype)
    per_entry: tl.constexpr = 1 if OF_SLOTS else BLOCK_SIZE
    blocks = load_blocks(table, start, end, per_entry, KEYS)
    for tile in range(start, end, KEYS):
        if OF_SLOTS:
            rows = (blocks // BLOCK_SIZE).to(tl.int64) * stride_block
            rows += blocks % BLOCK_SIZE * (LATENT + ROTATED)
        else:
            rows = slot_rows(
                blocks, tile, stride_block, BLOCK_SIZE, LATENT + ROTATED, KEYS
            )
        blocks = load_blocks(table, tile + KEYS, end, per_entry, KEYS)
        n = tile + tl.arange(0, KEYS)
        k = load_rows(pool_ptr + rows[:, None] + d, n < end, LATENT, DIM, True)
        k_turned = load_rows(
            pool_ptr + rows[:, None] + LATENT + r, n < end, ROTATED, TURN, True
        )
        if UPCAST:
            k = k.to(tl.float32)
            k_turned = k_turned.to(tl.float32)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        s = tl.dot(q_turned, tl.trans(k_turned), s, input_precision="ieee")
        m, p, shrink = weigh(m, s, n[None, :] <= last[:, None], scale_log2, None, True)
        p = p.to(q.dtype)
        norm = tl.dot(p, ones, norm * shrink[:, None], input_precision="ieee")
        acc = tl.dot(p, k, acc * shrink[:, None], input_precision="ieee")
    return m, tl.max(norm, 1), acc


def turn_and_store(
    # [num_tokens, num_heads + 1, row_dim], of a token contiguous: queries, then the row.
    x: Tensor,
    positions: Tensor,  # [num_tokens]
    cos_sin: Tensor,  # [max_position, rotated]: the cosines, then the sines
    pool: Tensor,  # [num_blocks, 1, num_layers, 1, block_size, row_dim]
    layer: int,
    slot_mapping: Tensor,  # [num_tokens], -1: do not store
) -> Tensor:
    """Rotate the ends of the queries in place and store the rows, rotated too; return the queries.

    The queries are long, so they are not copied.
    """
    num_tokens, rows, row_dim = x.shape
    rotated = cos_sin.shape[1]
    assert x.stride()[1:] == (row_dim, 1), "the rows of a token are contiguous"
    assert cos_sin.is_contiguous()
    assert pool.shape[1::2] == (1, 1, row_dim), (x.shape, pool.shape)
    assert pool.stride()[4:] == (row_dim, 1), "a layer of a block is contiguous"
    _launch_turn_store(
        (num_tokens, 2, 1),
        x,
        positions,
        cos_sin,
        pool,
        slot_mapping,
        x.stride(0),
        layer * pool.stride(2),
        pool.stride(0),
        HEADS=rows - 1,
        LATENT=row_dim - rotated,
        ROTATED=rotated,
        BLOCK_SIZE=pool.shape[4],
        H_ROWS=next_power_of_2(rows - 1),
        HALF=next_power_of_2(rotated // 2),
        DIM=next_power_of_2(row_dim - rotated),
        num_warps=2,
        num_stages=1,
        enable_fp_fusion=True,
    )
    return x[:, :-1]


@triton.jit(do_not_specialize=["position_ptr", "slot_ptr"])
def _turn_store_kernel(
    x_ptr: tl.tensor,
    position_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    pool_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    stride_x: tl.tensor,
    layer_offset: tl.tensor,
    stride_block: tl.tensor,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    H_ROWS: tl.constexpr,
    HALF: tl.constexpr,
    DIM: tl.constexpr,
) -> None:
    half: tl.constexpr = ROTATED // 2
    row_dim: tl.constexpr = LATENT + ROTATED
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, HALF)[None, :]
    angle = cos_sin_ptr + tl.load(position_ptr + token).to(tl.int64) * ROTATED + i
    cos = tl.load(angle, mask=i < half, other=0.0).to(tl.float32)
    sin = tl.load(angle + half, mask=i < half, other=0.0).to(tl.float32)
    x_ptr += token * stride_x
    if tl.program_id(1) == 0:
        head = tl.arange(0, H_ROWS)[:, None]
        rows = x_ptr + head * row_dim + LATENT + i
        _turn(rows, rows, (head < HEADS) & (i < half), cos, sin, half)
    else:
        slot = tl.load(slot_ptr + token).to(tl.int64)
        row = x_ptr + HEADS * row_dim
        target = pool_ptr + layer_offset + slot // BLOCK_SIZE * stride_block
        target += slot % BLOCK_SIZE * row_dim
        _turn(
            row + LATENT + i,
            target + LATENT + i,
            (i < half) & (slot >= 0),
            cos,
            sin,
            half,
        )
        d = tl.arange(0, DIM)
        live = (d < LATENT) & (slot >= 0)
        tl.store(target + d, tl.load(row + d, mask=live), mask=live)


_launch_turn_store = Launcher(_turn_store_kernel)


@triton.jit
def _turn(
    source: tl.tensor,
    target: tl.tensor,
    live: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    half: tl.constexpr,
) -> None:
    low = tl.load(source, mask=live, other=0.0).to(tl.float32)
    high = tl.load(source + half, mask=live, other=0.0).to(tl.float32)
    element: tl.constexpr = target.dtype.element_ty
    tl.store(target, (low * cos - high * sin).to(element), mask=live)
    tl.store(target + half, (high * cos + low * sin).to(element), mask=live)
