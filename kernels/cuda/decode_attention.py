"""Paged decode attention: the last rows of sequences, with contexts split over the whole device.

Each split of each KV head is one work item, for all query heads of that KV head at once, and for
several rows of a sequence if a tile has room for them. A second kernel combines the splits of
contexts that have more than one. If there are few sequences, a split is just long enough that one
round of the device's programs covers all splits, so a row's last bits depend on the batch.
`ordered` cuts at fixed absolute positions instead and merges the splits in order: a row then gets
the same bits alone, beside others of its sequence, in any batch, and from prefill attention. It
works under CUDA graph capture.
"""

# ruff: noqa: N803, PLR0913, PLR0915, PLR0917, SIM108
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
    TILE_ROWS,
    DecodeTiling,
    before_keys,
    check_pool,
    decode_tiling,
    fold,
    interpreted,
    load_blocks,
    load_kv,
    load_rows,
    merge,
    new_rows,
    num_programs,
    padded,
    rows_of_tile,
    seen_by_first,
    tilings_of,
)
from baton.kernels.launch import Launcher, cdiv, next_power_of_2

# Tokens; the partial results are then 3 % of the bytes read (4 heads of 128, bf16).
SPLIT = 256
# Triton 3.6 over-allocates registers for some row counts, which lowers occupancy. With a limit,
# later versions spill.
NEEDS_LIMIT = triton.__version__.startswith("3.6.")
# Per sequence: a longer context has longer splits, which bounds the workspace.
MAX_SPLITS = 64


def paged_decode_attention(
    q: Tensor,  # [num_rows, num_heads, head_dim]
    pool: Tensor,  # [num_blocks, kv_heads, num_layers, 2, block_size, head_dim]
    layer: int,
    block_tables: Tensor,  # [batch, max_blocks] int32
    context_lens: Tensor,  # [batch] int32
    scale: float,
    window: int | None = None,  # keys that a query sees, itself included
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [num_heads] fp32
    starts: Tensor | None = None,  # [batch + 1] int32
    *,
    ordered: bool = False,
) -> Tensor:
    """Return the attention of the last tokens of sequences over their contexts, shaped as `q`.

    Each sequence has one row, or those that `starts` counts, at most `rows_of_tile(group)`. Its
    context ends with the last of them. A row of length 0 and a row behind all sequences, the
    padding of a captured graph, give zeros. The workspace is `batch * rows * num_heads * splits *
    (head_dim + 2)` floats. There are at most 64 splits, or, if they are ordered, as many as the
    table has room for, so tables should be no wider than the batch needs.
    """
    check_pool(q, pool, block_tables)
    scale_log2, cap_log2 = in_powers_of_2(scale, softcap)
    _, num_heads, head_dim = q.shape
    batch = len(block_tables)
    kv_heads = pool.shape[1]
    block_size = pool.shape[4]
    tiles = decode_tiling(q, pool)
    split = ORDERED_SPLIT if ordered else SPLIT
    group = num_heads // kv_heads
    rows = 1 if starts is None else rows_of_tile(group)
    keys = min(block_tables.shape[1] * block_size, (window or NO_WINDOW) + rows - 1)
    tile_rows = max(TILE_ROWS, next_power_of_2(group))
    is_wide = tile_rows > TILE_ROWS
    share = tilings_of(q.device).wide_programs if is_wide else tiles.per_multiprocessor
    # The exponentials of a cap, or the lengths of rows, take registers of a third program.
    has_third = softcap is None and starts is None
    programs = num_programs(q.device, share if has_third else min(share, 2))
    is_few = 2 * batch * kv_heads <= programs and not ordered
    # A window may touch one more split than its length alone needs.
    num_splits = cdiv(keys, tiles.keys if is_few else split) + (window is not None)
    num_splits = num_splits if ordered else min(num_splits, MAX_SPLITS)
    lines = batch * rows
    partial = q.new_empty((lines, num_heads, num_splits, head_dim), dtype=torch.float32)
    sums = q.new_empty((lines, num_heads, num_splits, 2), dtype=torch.float32)
    counts = q.new_empty(batch, dtype=torch.int32)
    out = new_rows(q, starts)
    _launch_split(
        (programs, 1, 1),
        q,
        pool,
        block_tables,
        context_lens,
        starts,
        partial,
        sums,
        counts,
        out,
        batch,
        num_splits,
        layer * pool.stride(2),
        scale_log2,
        cap_log2 or None,
        window or NO_WINDOW,
        sinks,
        q.stride(0),
        pool.stride(0),
        pool.stride(1),
        block_tables.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        LINES=rows * group,
        HEAD_DIM=head_dim,
        DIM=padded(head_dim),
        ROWS=tile_rows,
        BLOCK_SIZE=block_size,
        KEYS=tiles.keys,
        SPLIT=split,
        MAX_BATCH=MAX_BATCH,
        ORDERED=ordered,
        UPCAST=interpreted(),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=True,
        maxnreg=_most_registers(tiles, starts, is_wide=is_wide),
    )
    if num_splits > 1:
        _launch_combine(
            (lines, num_heads, 1),
            partial,
            sums,
            counts,
            starts,
            out,
            sinks,
            num_splits,
            SHARING=rows,
            HEAD_DIM=head_dim,
            DIM=padded(head_dim),
            MAX_SPLITS=MAX_SPLITS,
            ORDERED=ordered,
            num_warps=4 if head_dim <= 256 else 16,
            num_stages=1,
            enable_fp_fusion=True,
        )
    return out


def _most_registers(
    tiles: DecodeTiling, starts: Tensor | None, *, is_wide: bool
) -> int | None:
    if starts is not None:
        return 255  # else the assembler may spill to fit a third program
    return tiles.max_registers if NEEDS_LIMIT and not is_wide else None


@triton.jit
def _common_size(
    lens: tl.tensor,  # keys that each sequence sees
    KV_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
) -> tl.tensor:
    """Return the length of splits, before the splits of long contexts are stretched.

    If every sequence can have several splits, all splits fit one round of the programs: the length
    is the number of keys divided by the number of programs, less one program per sequence for its
    short last split.
    """
    busy = tl.sum((lens > 0).to(tl.int32), 0)
    room = tl.num_programs(0) // KV_HEADS - busy
    fitting = tl.cdiv(tl.sum(lens, 0), tl.maximum(room, 1))
    return tl.where(room >= busy, tl.cdiv(tl.maximum(fitting, 1), KEYS) * KEYS, SPLIT)


@triton.jit
def _own_size(
    length: tl.tensor, common: tl.tensor, num_splits: tl.tensor, KEYS: tl.constexpr
) -> tl.tensor:
    """Return the length of a sequence's splits: `num_splits` of them hold its keys."""
    return tl.maximum(common, tl.cdiv(tl.cdiv(length, num_splits), KEYS) * KEYS)


@triton.jit
def _locate(counts: tl.tensor, unit: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the sequence to which unit `unit` belongs, and the unit's number within it.

    Sequence `s` has `counts[s]` units, and all units are numbered consecutively. Every program
    computes this from the lengths on the device, so a captured graph serves any lengths and no
    program is launched in vain.
    """
    ends = tl.cumsum(counts, 0)
    before = ends <= unit
    return tl.sum(before.to(tl.int32), 0), unit - tl.max(tl.where(before, ends, 0), 0)


# Counts are not specialised, because variants for 1 and for multiples of 16 would be compiled
# during service.
@triton.jit(
    do_not_specialize=[
        "batch",
        "num_splits",
        "window",
        "stride_table",
        "table_ptr",
        "len_ptr",
        "start_ptr",
    ]
)
def _split_kernel(
    q_ptr: tl.tensor,
    pool_ptr: tl.tensor,
    table_ptr: tl.tensor,
    len_ptr: tl.tensor,
    start_ptr: tl.tensor | None,
    partial_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    count_ptr: tl.tensor,
    out_ptr: tl.tensor,
    batch: tl.tensor,
    num_splits: tl.tensor,
    layer_offset: tl.tensor,
    scale_log2: tl.tensor,
    cap_log2: tl.tensor | None,
    window: tl.tensor,
    sink_ptr: tl.tensor | None,
    stride_q: tl.tensor,
    stride_block: tl.tensor,
    stride_head: tl.tensor,
    stride_table: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_BATCH: tl.constexpr,
    ORDERED: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    # A fixed number of programs share the items of the batch evenly, for any lengths. KV heads are
    # innermost, so the items of one block run side by side and share its TLB entry.
    row = tl.arange(0, MAX_BATCH)
    ends = tl.load(len_ptr + row, mask=row < batch, other=0)
    # Splits begin at the tile in which the window begins; ordered splits begin at absolute
    # positions.
    leasts = ends
    if start_ptr is not None:
        of_first = tl.load(start_ptr + row, mask=row < batch, other=0)
        of_next = tl.load(start_ptr + row + 1, mask=row < batch, other=0)
        leasts = seen_by_first(ends, of_first, of_next)
    begins = tl.maximum(leasts - window, 0) // (SPLIT if ORDERED else KEYS)
    begins = begins * (SPLIT if ORDERED else KEYS)
    if ORDERED:
        common = tl.full((), SPLIT, tl.int32)
        sizes = tl.full((MAX_BATCH,), SPLIT, tl.int32)
    else:
        common = _common_size(ends - begins, KV_HEADS, KEYS, SPLIT)
        sizes = _own_size(ends - begins, common, num_splits, KEYS)
    # A row of padding has one item, which writes its zeros.
    counts = tl.where(row < batch, tl.maximum(tl.cdiv(ends - begins, sizes), 1), 0)
    if tl.program_id(0) == 0:
        tl.store(count_ptr + row, counts, mask=row < batch)
    for item in range(
        tl.program_id(0), tl.sum(counts, 0) * KV_HEADS, tl.num_programs(0)
    ):
        kv_head = item % KV_HEADS
        sequence, split = _locate(counts, item // KV_HEADS)
        context_len = tl.load(len_ptr + sequence)
        least = context_len
        if start_ptr is not None:
            first_row = tl.load(start_ptr + sequence)
            next_row = tl.load(start_ptr + sequence + 1)
            least = seen_by_first(context_len, first_row, next_row)
        first_key = tl.maximum(least - window, 0)
        if ORDERED:
            begin = first_key // SPLIT * SPLIT
            size = common
        else:
            begin = first_key // KEYS * KEYS
            size = _own_size(context_len - begin, common, num_splits, KEYS)
        start = begin + split * size
        end = tl.minimum(start + size, context_len)

        # tl.dot needs at least 16 rows; those past the last line are zero and never stored.
        head = tl.arange(0, ROWS)
        d = tl.arange(0, DIM)
        heads = kv_head * GROUP + head
        own = head < GROUP
        lens = None
        q_rows = q_ptr + sequence.to(tl.int64) * stride_q + heads * HEAD_DIM
        if start_ptr is not None:
            ahead = head // GROUP
            heads = kv_head * GROUP + head % GROUP
            own = ahead < next_row - first_row
            lens = context_len - tl.maximum(next_row - first_row - 1 - ahead, 0)
            rows = (first_row + ahead).to(tl.int64)
            q_rows = q_ptr + rows * stride_q + heads * HEAD_DIM
        q = load_rows(q_rows[:, None] + d[None, :], own, HEAD_DIM, DIM, True)
        kv_ptr = pool_ptr + kv_head.to(tl.int64) * stride_head + layer_offset
        table = table_ptr + sequence.to(tl.int64) * stride_table
        if UPCAST:
            q = q.to(tl.float32)

        # Skip the tiles before the window, which would change nothing.
        m, total, acc = _attend(
            q,
            kv_ptr,
            table,
            tl.maximum(start, first_key // KEYS * KEYS),
            end,
            first_key,
            lens,
            window,
            scale_log2,
            cap_log2,
            stride_block,
            HEAD_DIM,
            DIM,
            ROWS,
            BLOCK_SIZE,
            KEYS,
            ORDERED,
            UPCAST,
        )
        line = sequence.to(tl.int64) * KV_HEADS * GROUP + heads
        to_line = line
        if start_ptr is not None:
            to_line = rows * (KV_HEADS * GROUP) + heads
            line = sequence.to(tl.int64) * (LINES // GROUP) + ahead
            line = line * (KV_HEADS * GROUP) + heads
        live = own[:, None] & (d < HEAD_DIM)[None, :]
        if context_len - begin <= size:
            if sink_ptr is not None:
                first, one, none = before_keys(sink_ptr, heads, own, ROWS, DIM)
                m, total, acc = merge(first, one, none, m, total, acc)
            total = tl.where(total == 0.0, 1.0, total)
            out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + to_line[:, None] * HEAD_DIM + d[None, :], out, mask=live)
        else:
            place = line * num_splits + split
            tl.store(
                partial_ptr + place[:, None] * HEAD_DIM + d[None, :], acc, mask=live
            )
            tl.store(sum_ptr + place * 2, m, mask=own)
            tl.store(sum_ptr + place * 2 + 1, total, mask=own)


_launch_split = Launcher(_split_kernel)


@triton.jit
def _attend(
    q: tl.tensor,
    kv_ptr: tl.tensor,
    table: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    first_key: tl.tensor,
    lens: tl.tensor | None,
    window: tl.tensor,
    scale_log2: tl.tensor,
    cap_log2: tl.tensor | None,
    stride_block: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    ORDERED: tl.constexpr,
    UPCAST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return maximum, sum and output of some heads over the keys `start:end`.

    Those of a row see as many as `lens` says, if rows differ, and of these the last `window`.
    """
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    if ORDERED:
        norm = tl.zeros((ROWS, 16), tl.float32)
    else:
        norm = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM), tl.float32)
    blocks = load_blocks(table, start, end, BLOCK_SIZE, KEYS)
    for tile_start in range(start, end, KEYS):
        n = tile_start + tl.arange(0, KEYS)
        k = load_kv(
            kv_ptr,
            blocks,
            tile_start,
            n < end,
            q,
            stride_block,
            False,
            HEAD_DIM,
            DIM,
            BLOCK_SIZE,
            KEYS,
            True,
        )
        v = load_kv(
            kv_ptr,
            blocks,
            tile_start,
            n < end,
            q,
            stride_block,
            True,
            HEAD_DIM,
            DIM,
            BLOCK_SIZE,
            KEYS,
            True,
        )
        blocks = load_blocks(table, tile_start + KEYS, end, BLOCK_SIZE, KEYS)
        if lens is None:
            visible = ((n >= first_key) & (n < end))[None, :]
        else:
            visible = n[None, :] < lens[:, None]
            visible = visible & (n[None, :] >= (lens - window)[:, None])
        m, norm, acc = fold(
            m, norm, acc, q, k, v, visible, scale_log2, cap_log2, True, ORDERED, UPCAST
        )
    if ORDERED:
        norm = tl.max(norm, 1)
    return m, norm, acc


@triton.jit(do_not_specialize=["num_splits", "count_ptr", "start_ptr"])
def _combine_kernel(
    partial_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    count_ptr: tl.tensor,
    start_ptr: tl.tensor | None,
    out_ptr: tl.tensor,
    sink_ptr: tl.tensor | None,
    num_splits: tl.tensor,
    SHARING: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    ORDERED: tl.constexpr,
) -> None:
    sequence = tl.program_id(0)
    to_row = sequence
    if start_ptr is not None:
        sequence = tl.program_id(0) // SHARING
        to_row = tl.load(start_ptr + sequence) + tl.program_id(0) % SHARING
        if to_row >= tl.load(start_ptr + sequence + 1):
            return
    count = tl.load(count_ptr + sequence)
    if count == 1:
        return  # the split's own program has stored the result
    line = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    to_line = to_row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    d = tl.arange(0, DIM)
    partials = partial_ptr + line * num_splits * HEAD_DIM
    sums = sum_ptr + line * num_splits * 2
    one = tl.arange(0, 1)
    m, norm, acc = before_keys(sink_ptr, tl.program_id(1) + one, one == 0, 1, DIM)
    if ORDERED:
        for split in range(count):
            part = partials + split * HEAD_DIM + d[None, :] + one[:, None]
            m, norm, acc = merge(
                m,
                norm,
                acc,
                tl.load(sums + split * 2 + one),
                tl.load(sums + split * 2 + 1 + one),
                tl.load(part, mask=(d < HEAD_DIM)[None, :], other=0.0),
            )
        out = tl.sum(acc / norm[:, None], 0)
    else:
        split = tl.arange(0, MAX_SPLITS)
        live = split < count
        tops = tl.load(sums + split * 2, mask=live, other=float("-inf"))
        totals = tl.load(sums + split * 2 + 1, mask=live, other=0.0)
        rows = partials + split[:, None] * HEAD_DIM + d[None, :]
        partial = load_rows(rows, live, HEAD_DIM, DIM, True)
        top = tl.maximum(tl.max(tops, 0), tl.max(m, 0))
        weight = tl.exp2(tops - top)
        total = tl.sum(weight * totals, 0) + tl.sum(tl.exp2(m - top) * norm, 0)
        out = tl.sum(partial * weight[:, None], 0) / total
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + to_line * HEAD_DIM + d, out, mask=d < HEAD_DIM)


_launch_combine = Launcher(_combine_kernel)
