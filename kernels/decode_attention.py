"""Paged decode attention: one query per sequence, its context split over the whole device.

A context is cut into splits at absolute positions; each split of each KV head is one work item, for
all query heads of that KV head at once, and a second kernel combines the splits. How a context is
cut depends on its own length alone, and one compiled variant serves every batch: a sequence gets
the same bits alone and in any batch. Called by the runner's attention layer, also under CUDA graph
capture. The meaning is `reference.paged_decode_attention`.
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
    num_programs,
    slot_rows,
)

SPLIT = 256  # tokens; the partial results are then 3 % of the bytes read (4 heads of 128, bf16)
MAX_SPLITS = 64  # per sequence: a longer context has longer splits, so the workspace stays bounded


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """How the split kernel is compiled for a dtype and head size."""

    tile: int
    num_warps: int
    num_stages: int
    per_multiprocessor: int


def tiling(dtype: torch.dtype, head_dim: int) -> DecodeTiling:
    """Tiles such that the programs of one multiprocessor keep some 100 KiB of loads in flight."""
    if dtype == torch.float32:
        return DecodeTiling(tile=32, num_warps=4, num_stages=2, per_multiprocessor=4)
    return DecodeTiling(
        tile=min(8192 // head_dim, 128), num_warps=4, num_stages=3, per_multiprocessor=3
    )


def paged_decode_attention(
    q: Tensor,  # [batch, num_heads, head_dim]
    pool: Tensor,  # [num_blocks, kv_heads, num_layers, 2, block_size, head_dim]
    layer: int,
    block_tables: Tensor,  # [batch, max_blocks] int32
    context_lens: Tensor,  # [batch] int32
    scale: float,
) -> Tensor:
    """Attention of one new token per sequence over its paged context, shaped as `q`.

    The workspace is `batch * num_heads * min(64, table width in splits) * (head_dim + 1)` floats:
    pass tables no wider than the batch may need.
    """
    check_pool(q, pool, block_tables)
    batch, num_heads, head_dim = q.shape
    kv_heads, block_size = pool.shape[1], pool.shape[4]
    num_splits = min(MAX_SPLITS, triton.cdiv(block_tables.shape[1] * block_size, SPLIT))
    partial = q.new_empty((batch, num_heads, num_splits, head_dim), dtype=torch.float32)
    lse = q.new_empty((batch, num_heads, num_splits), dtype=torch.float32)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    tiles = tiling(q.dtype, head_dim)
    _split_kernel[(num_programs(q.device, tiles.per_multiprocessor),)](
        q, pool, block_tables, context_lens, partial, lse,
        batch, num_splits, layer * pool.stride(2), scale * LOG2_E,
        q.stride(0), pool.stride(0), pool.stride(1), block_tables.stride(0),
        KV_HEADS=kv_heads, GROUP=num_heads // kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        TILE=tiles.tile, SPLIT=SPLIT, MAX_SPLITS=MAX_SPLITS, MAX_BATCH=MAX_BATCH,
        UPCAST=interpreted(),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    _combine_kernel[(batch, num_heads)](
        partial, lse, context_lens, out, num_splits,
        HEAD_DIM=head_dim, SPLIT=SPLIT, MAX_SPLITS=MAX_SPLITS,
        num_warps=4, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip
    return out


@triton.jit
def _split_size(context_len: tl.tensor, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr) -> tl.tensor:
    return tl.cdiv(tl.cdiv(context_len, SPLIT), MAX_SPLITS) * SPLIT


@triton.jit
def _locate(counts: tl.tensor, unit: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The sequence that unit number `unit` belongs to, and the unit's number within it.

    Sequence `s` has `counts[s]` units and units are numbered through. Every program works this out
    from the lengths on the device, so a captured graph serves any lengths and no program is
    launched in vain.
    """
    ends = tl.cumsum(counts, 0)
    before = ends <= unit
    return tl.sum(before.to(tl.int32), 0), unit - tl.max(tl.where(before, ends, 0), 0)


# Counts are not specialised: variants for 1 and for multiples of 16 would be compiled mid-service.
@triton.jit(do_not_specialize=["batch", "num_splits", "stride_table", "table_ptr", "len_ptr"])
def _split_kernel(
    q_ptr: tl.tensor,
    pool_ptr: tl.tensor,
    table_ptr: tl.tensor,
    len_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    batch: tl.tensor,
    num_splits: tl.tensor,
    layer_offset: tl.tensor,
    scale_log2: tl.tensor,
    stride_q: tl.tensor,
    stride_block: tl.tensor,
    stride_head: tl.tensor,
    stride_table: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MAX_BATCH: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    # A fixed number of programs share the items of the batch evenly, whatever the lengths. KV heads
    # are innermost: the items of one block run side by side and share its entry in the TLB.
    row = tl.arange(0, MAX_BATCH)
    lens = tl.load(len_ptr + row, mask=row < batch, other=0)
    size = tl.maximum(_split_size(lens, SPLIT, MAX_SPLITS), 1)
    counts = tl.cdiv(lens, size)
    for item in range(tl.program_id(0), tl.sum(counts, 0) * KV_HEADS, tl.num_programs(0)):
        kv_head = item % KV_HEADS
        sequence, split = _locate(counts, item // KV_HEADS)
        context_len = tl.load(len_ptr + sequence)
        split_size = _split_size(context_len, SPLIT, MAX_SPLITS)
        start = split * split_size
        end = tl.minimum(start + split_size, context_len)

        # tl.dot wants 16 rows at least; those past GROUP are zero and never stored.
        head = tl.arange(0, 16)
        d = tl.arange(0, HEAD_DIM)
        heads = kv_head * GROUP + head
        own = head < GROUP
        q_rows = q_ptr + sequence.to(tl.int64) * stride_q + heads * HEAD_DIM
        q = tl.load(q_rows[:, None] + d[None, :], mask=own[:, None], other=0.0)
        kv_ptr = pool_ptr + kv_head.to(tl.int64) * stride_head + layer_offset
        table = table_ptr + sequence.to(tl.int64) * stride_table
        if UPCAST:
            q = q.to(tl.float32)

        m = tl.full((16,), float("-inf"), tl.float32)
        norm = tl.zeros((16,), tl.float32)
        acc = tl.zeros((16, HEAD_DIM), tl.float32)
        blocks = load_blocks(table, start, end, BLOCK_SIZE, TILE)
        for tile_start in range(start, end, TILE):
            rows = slot_rows(blocks, tile_start, stride_block, BLOCK_SIZE, HEAD_DIM, TILE)
            blocks = load_blocks(table, tile_start + TILE, end, BLOCK_SIZE, TILE)
            live = tile_start + tl.arange(0, TILE) < end
            kv = kv_ptr + rows[:, None] + d[None, :]
            k = tl.load(kv, mask=live[:, None], other=0.0)
            # A dead slot may hold NaN, and 0 x NaN is NaN: its values must not be loaded.
            v = tl.load(kv + BLOCK_SIZE * HEAD_DIM, mask=live[:, None], other=0.0)
            if UPCAST:
                k = k.to(tl.float32)
                v = v.to(tl.float32)
            s = tl.dot(q, tl.trans(k), input_precision="ieee")
            s = tl.where(live[None, :], s * scale_log2, float("-inf"))
            m_new = tl.maximum(m, tl.max(s, 1))
            p = tl.exp2(s - m_new[:, None])
            shrink = tl.exp2(m - m_new)
            norm = norm * shrink + tl.sum(p, 1)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
            m = m_new

        place = (sequence.to(tl.int64) * KV_HEADS * GROUP + heads) * num_splits + split
        tl.store(
            partial_ptr + place[:, None] * HEAD_DIM + d[None, :],
            acc / norm[:, None],
            mask=own[:, None],
        )
        tl.store(lse_ptr + place, m + tl.log2(norm), mask=own)


@triton.jit(do_not_specialize=["num_splits", "len_ptr"])
def _combine_kernel(
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    len_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_splits: tl.tensor,
    HEAD_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
) -> None:
    sequence = tl.program_id(0)
    place = sequence.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    context_len = tl.load(len_ptr + sequence)
    size = tl.maximum(_split_size(context_len, SPLIT, MAX_SPLITS), 1)
    split = tl.arange(0, MAX_SPLITS)
    live = split < tl.cdiv(context_len, size)
    d = tl.arange(0, HEAD_DIM)
    lse = tl.load(lse_ptr + place * num_splits + split, mask=live, other=float("-inf"))
    rows = partial_ptr + (place * num_splits + split) * HEAD_DIM
    partial = tl.load(rows[:, None] + d[None, :], mask=live[:, None], other=0.0)
    # An empty context has no live split: keep the exponents finite and the result zero.
    weight = tl.where(live, tl.exp2(lse - tl.maximum(tl.max(lse, 0), -1e30)), 0.0)
    total = tl.maximum(tl.sum(weight, 0), 1e-30)
    out = tl.sum(partial * (weight / total)[:, None], 0)
    tl.store(out_ptr + place * HEAD_DIM + d, out.to(out_ptr.dtype.element_ty))
