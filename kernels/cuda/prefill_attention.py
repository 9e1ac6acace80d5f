"""Paged prefill attention: a ragged batch of chunks over prefix and chunk, on tensor cores.

A program takes a tile of queries of one head and walks the keys in tiles cut at absolute positions:
first those that all its queries see, without a mask, then those on the diagonal. If there are
enough registers, the scores of the next tile are computed while those of this tile become weights
(`ahead`). A query's bits depend neither on how its prompt was cut into chunks nor on the rest of
the batch. With `ordered`, keys are cut into splits as in decode, and the bits equal those of
decode.
"""

# ruff: noqa: N803, PLR0913, PLR0917
# Compile-time values are in capitals, as in Triton's own code; arguments are pointers and strides.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.constants import in_powers_of_2
from baton.kernels.cuda.paged import (
    MAX_BATCH,
    NO_WINDOW,
    ORDERED_SPLIT,
    before_keys,
    check_pool,
    fold,
    interpreted,
    load_blocks,
    load_kv,
    load_rows,
    merge,
    padded,
    prefill_tiling,
    weigh,
)
from baton.kernels.launch import Launcher


def paged_prefill_attention(
    q: Tensor,  # [num_tokens, num_heads, head_dim]
    pool: Tensor,  # [num_blocks, kv_heads, num_layers, 2, block_size, head_dim]
    layer: int,
    block_tables: Tensor,  # [batch, max_blocks] int32
    query_starts: Tensor,  # [batch + 1] int32
    context_lens: Tensor,  # [batch] int32
    scale: float,
    window: int | None = None,  # keys that a query sees, itself included
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [num_heads] fp32
    *,
    ordered: bool = False,
) -> Tensor:
    """Return the attention of every new token over its own past, shaped as `q`; `scale` > 0.

    `ordered` gives a token the bits that decode gives it, which is slower. The kernel does not
    write rows past `query_starts[-1]`, which are padding.
    """
    check_pool(q, pool, block_tables)
    scale_log2, cap_log2 = in_powers_of_2(scale, softcap)
    num_tokens, num_heads, head_dim = q.shape
    batch = len(block_tables)
    kv_heads = pool.shape[1]
    block_size = pool.shape[4]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    tiles = prefill_tiling(q, pool, ordered=ordered)
    # The lengths are on the device, so launch as many programs as could be needed; the rest return.
    grid = (num_heads, num_tokens // tiles.queries + batch, 1)
    _launch_prefill(
        grid,
        q,
        pool,
        block_tables,
        query_starts,
        context_lens,
        out,
        batch,
        layer * pool.stride(2),
        scale_log2,
        cap_log2 or None,
        window or NO_WINDOW,
        sinks,
        q.stride(0),
        pool.stride(0),
        pool.stride(1),
        block_tables.stride(0),
        GROUP=num_heads // kv_heads,
        HEAD_DIM=head_dim,
        DIM=padded(head_dim),
        BLOCK_SIZE=block_size,
        WINDOWED=window is not None,
        SPLIT=ORDERED_SPLIT if ordered else 0,
        QUERIES=tiles.queries,
        KEYS=tiles.keys,
        AHEAD=tiles.ahead,
        MAX_BATCH=MAX_BATCH,
        UPCAST=interpreted(),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=True,
    )
    return out


# Counts are not specialised, because variants for 1 and for multiples of 16 would be compiled
# during service.
@triton.jit(
    do_not_specialize=[
        "batch",
        "window",
        "stride_table",
        "table_ptr",
        "start_ptr",
        "len_ptr",
    ],
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
    cap_log2: tl.tensor | None,
    window: tl.tensor,
    sink_ptr: tl.tensor | None,
    stride_q: tl.tensor,
    stride_block: tl.tensor,
    stride_head: tl.tensor,
    stride_table: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SPLIT: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    AHEAD: tl.constexpr,
    MAX_BATCH: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    # Sequence `s` owns the units from `query_starts[s] // QUERIES + s` on. That is sometimes one
    # unit more than it needs, but finding the units takes no prefix sum.
    row = tl.arange(0, MAX_BATCH)
    starts = tl.load(start_ptr + row, mask=row < batch, other=0)
    unit = tl.program_id(1)
    sequence = (
        tl.sum(((starts // QUERIES + row <= unit) & (row < batch)).to(tl.int32), 0) - 1
    )
    tile = unit - (tl.load(start_ptr + sequence) // QUERIES + sequence)
    query_start = tl.load(start_ptr + sequence)
    query_len = tl.load(start_ptr + sequence + 1) - query_start
    if tile * QUERIES >= query_len:
        return
    context_len = tl.load(len_ptr + sequence)
    # The last tile of a chunk sees the most keys, so it is started first and does not run alone at
    # the end.
    first = (tl.cdiv(query_len, QUERIES) - 1 - tile) * QUERIES
    first_position = context_len - query_len + first

    head = tl.program_id(0)
    i = tl.arange(0, QUERIES)
    d = tl.arange(0, DIM)
    own = first + i < query_len
    token = (query_start + first + i).to(tl.int64)
    q_rows = q_ptr + token * stride_q + head * HEAD_DIM
    q = load_rows(q_rows[:, None] + d[None, :], own, HEAD_DIM, DIM, True)
    if UPCAST:
        q = q.to(tl.float32)
    kv_ptr = pool_ptr + (head // GROUP).to(tl.int64) * stride_head + layer_offset
    table = table_ptr + sequence.to(tl.int64) * stride_table

    m, norm, acc = before_keys(sink_ptr, head + 0 * i, own, QUERIES, DIM)
    end = tl.minimum(first_position + QUERIES, context_len)
    first_key = tl.maximum(first_position - window + 1, 0) // KEYS * KEYS
    if SPLIT:
        for start in range(first_key // SPLIT * SPLIT, end, SPLIT):
            m_next = tl.full((QUERIES,), float("-inf"), tl.float32)
            norm_next = tl.zeros((QUERIES, 16), tl.float32)
            acc_next = tl.zeros((QUERIES, DIM), tl.float32)
            m_next, norm_next, acc_next = _attend(
                m_next,
                norm_next,
                acc_next,
                q,
                kv_ptr,
                table,
                start,
                tl.minimum(start + SPLIT, end),
                first_position,
                window,
                scale_log2,
                cap_log2,
                stride_block,
                HEAD_DIM,
                DIM,
                BLOCK_SIZE,
                QUERIES,
                KEYS,
                True,
                WINDOWED,
                True,
                UPCAST,
            )
            m, norm, acc = merge(m, norm, acc, m_next, tl.max(norm_next, 1), acc_next)
    elif AHEAD:
        m, norm, acc = _attend_ahead(
            m,
            norm,
            acc,
            q,
            kv_ptr,
            table,
            first_key,
            end,
            first_position,
            window,
            scale_log2,
            cap_log2,
            stride_block,
            HEAD_DIM,
            DIM,
            BLOCK_SIZE,
            QUERIES,
            KEYS,
            WINDOWED,
            UPCAST,
        )
    else:
        seen_by_all = (first_position + 1) // KEYS * KEYS
        if WINDOWED:
            whole = tl.cdiv(tl.maximum(end - window, 0), KEYS) * KEYS
            whole = tl.minimum(tl.maximum(whole, first_key), seen_by_all)
            m, norm, acc = _attend(
                m,
                norm,
                acc,
                q,
                kv_ptr,
                table,
                first_key,
                whole,
                first_position,
                window,
                scale_log2,
                cap_log2,
                stride_block,
                HEAD_DIM,
                DIM,
                BLOCK_SIZE,
                QUERIES,
                KEYS,
                True,
                True,
                False,
                UPCAST,
            )
            first_key = whole
        m, norm, acc = _attend(
            m,
            norm,
            acc,
            q,
            kv_ptr,
            table,
            first_key,
            seen_by_all,
            first_position,
            window,
            scale_log2,
            cap_log2,
            stride_block,
            HEAD_DIM,
            DIM,
            BLOCK_SIZE,
            QUERIES,
            KEYS,
            False,
            WINDOWED,
            False,
            UPCAST,
        )
        m, norm, acc = _attend(
            m,
            norm,
            acc,
            q,
            kv_ptr,
            table,
            seen_by_all,
            end,
            first_position,
            window,
            scale_log2,
            cap_log2,
            stride_block,
            HEAD_DIM,
            DIM,
            BLOCK_SIZE,
            QUERIES,
            KEYS,
            True,
            WINDOWED,
            False,
            UPCAST,
        )

    out = (acc / norm[:, None]).to(out_ptr.dtype.element_ty)
    place = (token * tl.num_programs(0) + head) * HEAD_DIM
    tl.store(
        out_ptr + place[:, None] + d[None, :],
        out,
        mask=own[:, None] & (d < HEAD_DIM)[None, :],
    )


_launch_prefill = Launcher(_prefill_kernel)


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
    window: tl.tensor,
    scale_log2: tl.tensor,
    cap_log2: tl.tensor | None,
    stride_block: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    ORDERED: tl.constexpr,
    UPCAST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add the keys `start:end` to a tile of queries, with the same arithmetic in every phase.

    The place of the boundary between phases can therefore not change a bit.
    """
    blocks = load_blocks(table, start, end, BLOCK_SIZE, KEYS)
    for tile_start in range(start, end, KEYS):
        own = blocks
        blocks = load_blocks(table, tile_start + KEYS, end, BLOCK_SIZE, KEYS)
        n = tile_start + tl.arange(0, KEYS)
        k = load_kv(
            kv_ptr,
            own,
            tile_start,
            n < end,
            q,
            stride_block,
            False,
            HEAD_DIM,
            DIM,
            BLOCK_SIZE,
            KEYS,
            MASKED,
        )
        v = load_kv(
            kv_ptr,
            own,
            tile_start,
            n < end,
            q,
            stride_block,
            True,
            HEAD_DIM,
            DIM,
            BLOCK_SIZE,
            KEYS,
            MASKED,
        )
        visible = _visible(
            tile_start, end, first_position, window, QUERIES, KEYS, WINDOWED
        )
        m, norm, acc = fold(
            m,
            norm,
            acc,
            q,
            k,
            v,
            visible,
            scale_log2,
            cap_log2,
            MASKED,
            ORDERED,
            UPCAST,
        )
    return m, norm, acc


@triton.jit
def _attend_ahead(
    m: tl.tensor,
    norm: tl.tensor,
    acc: tl.tensor,
    q: tl.tensor,
    kv_ptr: tl.tensor,
    table: tl.tensor,
    first_key: tl.tensor,
    end: tl.tensor,
    first_position: tl.tensor,
    window: tl.tensor,
    scale_log2: tl.tensor,
    cap_log2: tl.tensor | None,
    stride_block: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOWED: tl.constexpr,
    UPCAST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add the keys `first_key:end` to a tile of queries, computing scores one tile ahead.

    While a tile's scores become weights, the tensor cores compute the next tile's scores; the
    weights are multiplied with their values a tile later. Triton leaves a product in flight only if
    the loop uses it in its next iteration, after a wait. The product of the values therefore comes
    first in an iteration.
    """
    blocks = load_blocks(table, first_key, end, BLOCK_SIZE, KEYS)
    after = load_blocks(table, first_key + KEYS, end, BLOCK_SIZE, KEYS)
    s = _scores(
        q,
        kv_ptr,
        blocks,
        first_key,
        stride_block,
        HEAD_DIM,
        DIM,
        BLOCK_SIZE,
        KEYS,
        UPCAST,
    )
    ahead = _scores(
        q,
        kv_ptr,
        after,
        first_key + KEYS,
        stride_block,
        HEAD_DIM,
        DIM,
        BLOCK_SIZE,
        KEYS,
        UPCAST,
    )
    after = load_blocks(table, first_key + 2 * KEYS, end, BLOCK_SIZE, KEYS)
    visible = _visible(first_key, end, first_position, window, QUERIES, KEYS, WINDOWED)
    m, p, shrink = weigh(m, s, visible, scale_log2, cap_log2, True)
    norm = norm * shrink + tl.sum(p, 1)
    start = first_key + KEYS
    seen_by_all = tl.maximum((first_position + 1) // KEYS * KEYS, start)
    if WINDOWED:
        whole = tl.cdiv(tl.maximum(end - window, 0), KEYS) * KEYS
        whole = tl.minimum(tl.maximum(whole, start), seen_by_all)
        m, norm, acc, ahead, p, blocks, after = _phase(
            m,
            norm,
            acc,
            ahead,
            p,
            blocks,
            after,
            q,
            kv_ptr,
            table,
            start,
            whole,
            end,
            first_position,
            window,
            scale_log2,
            cap_log2,
            stride_block,
            HEAD_DIM,
            DIM,
            BLOCK_SIZE,
            QUERIES,
            KEYS,
            True,
            True,
            UPCAST,
        )
        start = whole
    m, norm, acc, ahead, p, blocks, after = _phase(
        m,
        norm,
        acc,
        ahead,
        p,
        blocks,
        after,
        q,
        kv_ptr,
        table,
        start,
        seen_by_all,
        end,
        first_position,
        window,
        scale_log2,
        cap_log2,
        stride_block,
        HEAD_DIM,
        DIM,
        BLOCK_SIZE,
        QUERIES,
        KEYS,
        False,
        WINDOWED,
        UPCAST,
    )
    m, norm, acc, ahead, p, blocks, after = _phase(
        m,
        norm,
        acc,
        ahead,
        p,
        blocks,
        after,
        q,
        kv_ptr,
        table,
        seen_by_all,
        end,
        end,
        first_position,
        window,
        scale_log2,
        cap_log2,
        stride_block,
        HEAD_DIM,
        DIM,
        BLOCK_SIZE,
        QUERIES,
        KEYS,
        True,
        WINDOWED,
        UPCAST,
    )
    # Only the last tile has dead slots, whose values must not be loaded.
    last = (end - 1) // KEYS * KEYS
    v = load_kv(
        kv_ptr,
        blocks,
        last,
        last + tl.arange(0, KEYS) < end,
        q,
        stride_block,
        True,
        HEAD_DIM,
        DIM,
        BLOCK_SIZE,
        KEYS,
        True,
    )
    acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
    return m, norm, acc


@triton.jit
def _phase(
    m: tl.tensor,
    norm: tl.tensor,
    acc: tl.tensor,
    s: tl.tensor,
    p: tl.tensor,
    blocks: tl.tensor,
    after: tl.tensor,
    q: tl.tensor,
    kv_ptr: tl.tensor,
    table: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    end: tl.tensor,
    first_position: tl.tensor,
    window: tl.tensor,
    scale_log2: tl.tensor,
    cap_log2: tl.tensor | None,
    stride_block: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    UPCAST: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Turn the scores of tiles `start:stop` into weights, with the same arithmetic in every phase.

    The place of the boundary between phases can therefore not change a bit. `s` are the scores of
    the tile at `start`, `p` the weights of the tile before it; `blocks` hold the tile before it,
    `after` the next one. All are returned as they are for `stop`.
    """
    for tile_start in range(start, stop, KEYS):
        v = load_kv(
            kv_ptr,
            blocks,
            tile_start - KEYS,
            tl.arange(0, KEYS) >= 0,
            q,
            stride_block,
            True,
            HEAD_DIM,
            DIM,
            BLOCK_SIZE,
            KEYS,
            False,
        )
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
        ahead = _scores(
            q,
            kv_ptr,
            after,
            tile_start + KEYS,
            stride_block,
            HEAD_DIM,
            DIM,
            BLOCK_SIZE,
            KEYS,
            UPCAST,
        )
        blocks = load_blocks(table, tile_start, end, BLOCK_SIZE, KEYS)
        after = load_blocks(table, tile_start + 2 * KEYS, end, BLOCK_SIZE, KEYS)
        visible = _visible(
            tile_start, end, first_position, window, QUERIES, KEYS, WINDOWED
        )
        m, p, shrink = weigh(m, s, visible, scale_log2, cap_log2, MASKED)
        norm = norm * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        s = ahead
    return m, norm, acc, s, p, blocks, after


@triton.jit
def _scores(
    q: tl.tensor,
    kv_ptr: tl.tensor,
    blocks: tl.tensor,
    start: tl.tensor,
    stride_block: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    UPCAST: tl.constexpr,
) -> tl.tensor:
    """Return the products of queries and the keys `start:start + KEYS`, dead ones included.

    The contents of a dead key stay in its own column, which is masked.
    """
    k = load_kv(
        kv_ptr,
        blocks,
        start,
        tl.arange(0, KEYS) >= 0,
        q,
        stride_block,
        False,
        HEAD_DIM,
        DIM,
        BLOCK_SIZE,
        KEYS,
        False,
    )
    if UPCAST:
        k = k.to(tl.float32)
    return tl.dot(q, tl.trans(k), input_precision="ieee")


@triton.jit
def _visible(
    start: tl.tensor,
    end: tl.tensor,
    first_position: tl.tensor,
    window: tl.tensor,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOWED: tl.constexpr,
) -> tl.tensor:
    """Return which of the keys `start:start + KEYS` each query sees."""
    position = first_position + tl.arange(0, QUERIES)
    n = start + tl.arange(0, KEYS)
    visible = (n[None, :] <= position[:, None]) & (n < end)[None, :]
    if WINDOWED:
        visible &= n[None, :] > position[:, None] - window
    return visible
