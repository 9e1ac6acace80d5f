"""Paged prefill attention: a ragged batch of chunks over prefix and chunk, on tensor cores.

A program takes a tile of queries of one head and walks the keys in tiles cut at absolute positions:
first those that all its queries see, without a mask, then those on the diagonal. A query's bits
therefore depend neither on how its prompt was cut into chunks nor on the rest of the batch. With
chunks of one token it is the slower, equally exact way to decode. Called by the runner's attention
layer. The meaning is `reference.paged_prefill_attention`.
"""

# ruff: noqa: N803, PLR0913, PLR0917
# Compile-time values are in capitals, as in Triton's own code; arguments are pointers and strides.

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.paged import (
    LOG2_E,
    MAX_BATCH,
    check_pool,
    interpreted,
    load_blocks,
    slot_rows,
)


@dataclass(frozen=True, slots=True)
class PrefillTiling:
    """How the kernel is compiled for a dtype: queries by keys, and the resources for a tile."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


def tiling(dtype: torch.dtype) -> PrefillTiling:
    """Tiles that fill a Hopper multiprocessor without a spill; fp32 is for parity only."""
    if dtype == torch.float32:
        return PrefillTiling(queries=32, keys=32, num_warps=16, num_stages=2)
    return PrefillTiling(queries=128, keys=64, num_warps=8, num_stages=3)


def paged_prefill_attention(
    q: Tensor,  # [num_tokens, num_heads, head_dim]
    pool: Tensor,  # [num_blocks, kv_heads, num_layers, 2, block_size, head_dim]
    layer: int,
    block_tables: Tensor,  # [batch, max_blocks] int32
    query_starts: Tensor,  # [batch + 1] int32
    context_lens: Tensor,  # [batch] int32
    scale: float,
) -> Tensor:
    """Attention of every new token over its own past, shaped as `q`; `scale` is positive.

    Rows past `query_starts[-1]`, padding, are left unwritten.
    """
    check_pool(q, pool, block_tables)
    num_tokens, num_heads, head_dim = q.shape
    batch, kv_heads, block_size = len(block_tables), pool.shape[1], pool.shape[4]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    tiles = tiling(q.dtype)
    # The lengths are on the device: launch for the most tiles there can be; the surplus returns.
    grid = (num_heads, num_tokens // tiles.queries + batch)
    _prefill_kernel[grid](
        q, pool, block_tables, query_starts, context_lens, out,
        batch, layer * pool.stride(2), scale * LOG2_E,
        q.stride(0), pool.stride(0), pool.stride(1), block_tables.stride(0),
        GROUP=num_heads // kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        QUERIES=tiles.queries, KEYS=tiles.keys, MAX_BATCH=MAX_BATCH, UPCAST=interpreted(),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    return out


# Counts are not specialised: variants for 1 and for multiples of 16 would be compiled mid-service.
@triton.jit(
    do_not_specialize=["batch", "stride_table", "table_ptr", "start_ptr", "len_ptr"],
)
def _prefill_kernel(
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
    stride_head: tl.tensor,
    stride_table: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    MAX_BATCH: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    # Sequence `s` owns the units from `query_starts[s] // QUERIES + s` on: at times one more than
    # it needs, but found without a prefix sum.
    row = tl.arange(0, MAX_BATCH)
    starts = tl.load(start_ptr + row, mask=row < batch, other=0)
    unit = tl.program_id(1)
    sequence = tl.sum(((starts // QUERIES + row <= unit) & (row < batch)).to(tl.int32), 0) - 1
    tile = unit - (tl.load(start_ptr + sequence) // QUERIES + sequence)
    query_start = tl.load(start_ptr + sequence)
    query_len = tl.load(start_ptr + sequence + 1) - query_start
    if tile * QUERIES >= query_len:
        return
    context_len = tl.load(len_ptr + sequence)
    # The last tile of a chunk sees the most keys. It goes first: nobody waits for it at the end.
    first = (tl.cdiv(query_len, QUERIES) - 1 - tile) * QUERIES
    first_position = context_len - query_len + first

    head = tl.program_id(0)
    i = tl.arange(0, QUERIES)
    d = tl.arange(0, HEAD_DIM)
    own = first + i < query_len
    token = (query_start + first + i).to(tl.int64)
    q = tl.load(
        q_ptr + token[:, None] * stride_q + head * HEAD_DIM + d[None, :],
        mask=own[:, None],
        other=0.0,
    )
    if UPCAST:
        q = q.to(tl.float32)
    kv_ptr = pool_ptr + (head // GROUP).to(tl.int64) * stride_head + layer_offset
    table = table_ptr + sequence.to(tl.int64) * stride_table

    m = tl.full((QUERIES,), float("-inf"), tl.float32)
    norm = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, HEAD_DIM), tl.float32)
    seen_by_all = (first_position + 1) // KEYS * KEYS
    end = tl.minimum(first_position + QUERIES, context_len)
    m, norm, acc = _attend(
        m, norm, acc, q, kv_ptr, table, 0, seen_by_all, first_position, scale_log2, stride_block,
        HEAD_DIM, BLOCK_SIZE, QUERIES, KEYS, False, UPCAST,
    )  # fmt: skip
    m, norm, acc = _attend(
        m, norm, acc, q, kv_ptr, table, seen_by_all, end, first_position, scale_log2, stride_block,
        HEAD_DIM, BLOCK_SIZE, QUERIES, KEYS, True, UPCAST,
    )  # fmt: skip

    out = (acc / norm[:, None]).to(out_ptr.dtype.element_ty)
    place = (token * tl.num_programs(0) + head) * HEAD_DIM
    tl.store(out_ptr + place[:, None] + d[None, :], out, mask=own[:, None])


@triton.jit
def _attend(
    m: tl.tensor,
    norm: tl.tensor,
    acc: tl.tensor,
    q: tl.tensor,
    kv_ptr: tl.tensor,
    table: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    first_position: tl.tensor,
    scale_log2: tl.tensor,
    stride_block: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Fold the keys `start:end` into the maximum, sum and output of a tile of queries.

    This is the online softmax. Both phases run the same arithmetic, and a tile that a query does
    not see leaves its row as it was: on which side of the boundary between the phases a key falls
    cannot change a bit.
    """
    d = tl.arange(0, HEAD_DIM)
    blocks = load_blocks(table, start, end, BLOCK_SIZE, KEYS)
    for tile_start in range(start, end, KEYS):
        rows = slot_rows(blocks, tile_start, stride_block, BLOCK_SIZE, HEAD_DIM, KEYS)
        blocks = load_blocks(table, tile_start + KEYS, end, BLOCK_SIZE, KEYS)
        kv = kv_ptr + rows[:, None] + d[None, :]
        n = tile_start + tl.arange(0, KEYS)
        if MASKED:
            k = tl.load(kv, mask=(n < end)[:, None], other=0.0)
            # A dead slot may hold NaN, and 0 x NaN is NaN: its values must not be loaded.
            v = tl.load(kv + BLOCK_SIZE * HEAD_DIM, mask=(n < end)[:, None], other=0.0)
        else:
            k = tl.load(kv)
            v = tl.load(kv + BLOCK_SIZE * HEAD_DIM)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            position = first_position + tl.arange(0, QUERIES)
            visible = (n[None, :] <= position[:, None]) & (n < end)[None, :]
            s = tl.where(visible, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
        p = tl.exp2(s * scale_log2 - m_new[:, None])
        shrink = tl.exp2(m - m_new)
        norm = norm * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        m = m_new
    return m, norm, acc
