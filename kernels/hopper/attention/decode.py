"""Paged decode attention on Hopper in the one order of sums that prefill has, too.

Cuts of all sequences and KV heads lie in one row, of which each program takes an equal stretch in
one pipelined loop. While a stretch holds a head from its first cut on, the cuts are merged in
registers; the others are stored, and a second kernel merges them in order. So the bits of a row
depend neither on the batch nor on the number of programs. A plan is made once a step on the device,
for all layers that see equally many keys.

Rows of a sequence, such as those of guesses, share a tile of 16 rows and the loads of its keys.
What a row does not see changes none of its bits, so a row has those that it has alone.

Codes of an FP8 pool become numbers of the model's type before they are multiplied, as in prefill.
"""

# ruff: noqa: N803, PLR0913, PLR0915, PLR0917, RUF005
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
    SINK_FACTOR,
    TILE_ROWS,
    check_pool,
    interpreted,
    load_blocks,
    load_exponents,
    merge,
    new_rows,
    num_programs,
    rows_of_tile,
    seen_by_first,
    slot_rows,
)
from baton.kernels.hopper.attention.order import (
    cut_mask,
    cut_of,
    most_cuts,
    num_cuts,
    row_sum,
    tile_keys,
)
from baton.kernels.launch import Launcher, next_power_of_2

HEAD_DIMS = (64, 80, 96, 112, 128, 256)
MAX_GROUP = 16
PROGRAMS = 2  # on a multiprocessor
PLAN_FIELDS = 8


def plan_decode(
    q: Tensor,  # [num_rows, num_heads, head_dim]
    pool: Tensor,  # [num_blocks, kv_heads, num_layers, 2, block_size, head_dim]
    context_lens: Tensor,  # [batch] int32
    window: int | None = None,  # keys that a query sees, itself included
    programs: int = 0,
    starts: Tensor | None = None,  # [batch + 1] int32: see `one_decode_attention`
) -> Tensor:
    """Return the plan of a step for a pool, int32 `[programs, 8]`; `q` tells sizes alone.

    `programs` is for tests; by default they fill the device.
    """
    count = programs or num_programs(context_lens.device, PROGRAMS)
    plan = context_lens.new_empty((count, PLAN_FIELDS))
    _launch_plan_decode(
        (count, 1, 1),
        context_lens,
        starts,
        plan,
        len(context_lens),
        window or NO_WINDOW,
        KV_HEADS=pool.shape[1],
        KEYS=tile_keys(q.shape[2]),
        MAX_BATCH=MAX_BATCH,
        num_warps=4,
    )
    return plan


def one_decode_attention(
    q: Tensor,  # [num_rows, num_heads, head_dim]
    pool: Tensor,  # [num_blocks, kv_heads, num_layers, 2, block_size, head_dim]
    layer: int,
    block_tables: Tensor,  # [batch, max_blocks] int32
    context_lens: Tensor,  # [batch] int32
    plan: Tensor,  # of `plan_decode`, for the same sizes and window
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [num_heads] fp32
    starts: Tensor | None = None,  # [batch + 1] int32
) -> Tensor:
    """Return the attention of the last tokens of sequences over their contexts, shaped as `q`.

    Each sequence has one row, or those that `starts` counts, at most `paged.rows_of_tile(group)`.
    Its context ends with the last of them. A row of length 0 and a row behind all sequences, the
    padding of a captured graph, give zeros. The workspace is `batch * rows * num_heads * cuts *
    (dim + 2)` floats, with as many cuts as the table has room for, or a window can touch; `dim` is
    the head size padded to a power of 2.
    """
    check_pool(q, pool, block_tables)
    _, num_heads, head_dim = q.shape
    batch = len(block_tables)
    kv_heads = pool.shape[1]
    block_size = pool.shape[4]
    group = num_heads // kv_heads
    assert head_dim in HEAD_DIMS
    assert group <= MAX_GROUP
    rows = 1 if starts is None else rows_of_tile(group)
    cuts = num_cuts(block_tables.shape[1] * block_size)
    if window is not None:
        cuts = min(cuts, most_cuts(window + rows - 1))
    scale_log2, cap_log2 = in_powers_of_2(scale, softcap)
    dim = next_power_of_2(head_dim)
    lines = rows * group
    parts = q.new_empty((batch, kv_heads, cuts, lines, dim), dtype=torch.float32)
    sums = q.new_empty((batch, kv_heads, cuts, lines, 2), dtype=torch.float32)
    merged = q.new_empty((batch, kv_heads), dtype=torch.int32)
    out = new_rows(q, starts)
    _launch_decode(
        (len(plan), 1, 1),
        q,
        pool,
        block_tables,
        context_lens,
        starts,
        plan,
        parts,
        sums,
        merged,
        out,
        sinks,
        batch,
        cuts,
        layer * pool.stride(2),
        scale_log2,
        cap_log2,
        window or NO_WINDOW,
        q.stride(0),
        pool.stride(0),
        pool.stride(1),
        block_tables.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        LINES=lines,
        HEAD_DIM=head_dim,
        DIM=dim,
        ROWS=TILE_ROWS,
        KEYS=tile_keys(head_dim),
        BLOCK_SIZE=block_size,
        WINDOWED=window is not None,
        CAPPED=softcap is not None,
        UPCAST=interpreted(),
        num_warps=4,
        num_stages=2,
        maxnreg=255,
    )
    if cuts > 1:
        _launch_merge_cuts(
            (batch * kv_heads, rows, 1),
            context_lens,
            starts,
            parts,
            sums,
            merged,
            out,
            sinks,
            cuts,
            window or NO_WINDOW,
            KV_HEADS=kv_heads,
            GROUP=group,
            LINES=lines,
            GROUP_ROWS=next_power_of_2(group),
            HEAD_DIM=head_dim,
            DIM=dim,
            WINDOWED=window is not None,
            num_warps=4,
        )
    return out


@triton.jit
def _tiles(length: tl.tensor, KEYS: tl.constexpr) -> tl.tensor:
    """Return the tile after a context's last; an empty one has a tile, too."""
    return tl.maximum(tl.cdiv(length, KEYS), 1)


@triton.jit
def _first_tile(
    least: tl.tensor,
    window: tl.tensor,
    KEYS: tl.constexpr,
    WINDOWED: tl.constexpr,
) -> tl.tensor:
    """Return the first tile that any row of a context sees: its first row sees `least` keys."""
    if WINDOWED:
        return tl.maximum(least - window, 0) // KEYS
    else:
        return least * 0


@triton.jit
def _cut_within(
    key: tl.tensor, least: tl.tensor, window: tl.tensor, WINDOWED: tl.constexpr
) -> tl.tensor:
    """Return the number of a key's cut among those that the rows of a context see."""
    if WINDOWED:
        return cut_of(key) - cut_of(tl.maximum(least - window, 0))
    else:
        return cut_of(key)


@triton.jit
def _first_cut(
    at: tl.tensor,
    row: tl.tensor,
    lens: tl.tensor,
    leasts: tl.tensor,
    ends: tl.tensor,
    window: tl.tensor,
    KV_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the first cut that begins at tile `at` of all tiles or later.

    That is its first tile of all, its sequence, its KV head and its first tile within them.
    """
    before = ends <= at
    sequence = tl.sum(before.to(tl.int32), 0)
    base = tl.max(tl.where(before, ends, 0), 0)
    length = tl.sum(tl.where(row == sequence, lens, 0), 0)
    least = tl.sum(tl.where(row == sequence, leasts, 0), 0)
    first = _first_tile(least, window, KEYS, True)
    end = _tiles(length, KEYS)
    head = (at - base) // (end - first)
    tile = first + (at - base) % (end - first)
    low = cut_mask(tile, KEYS)
    next_cut = tl.minimum((tile + low) & ~low, end)
    next_cut = tl.where(tile == first, tile, next_cut)
    there = at + next_cut - tile
    turn = next_cut == end
    over = turn & (head == KV_HEADS - 1)
    sequence = tl.where(over, sequence + 1, sequence)
    head = tl.where(turn, tl.where(over, 0, head + 1), head)
    after = tl.sum(tl.where(row == sequence, leasts, 0), 0)
    tile = tl.where(turn, _first_tile(after, window, KEYS, True), next_cut)
    return there, sequence, head, tile


# Counts are not specialised, because variants for 1 and for multiples of 16 would be compiled
# during service.
@triton.jit(do_not_specialize=["batch", "len_ptr", "start_ptr", "window"])
def _plan_decode_kernel(
    len_ptr: tl.tensor,
    start_ptr: tl.tensor | None,
    plan_ptr: tl.tensor,
    batch: tl.tensor,
    window: tl.tensor,
    KV_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    MAX_BATCH: tl.constexpr,
) -> None:
    """Write the stretch of a program: sequence, KV head, first tile, number of tiles, two lengths.

    Behind them are the first row of the sequence and that of the next, if they have several. As
    many programs take part as have whole rounds of cuts to do.
    """
    program = tl.program_id(0)
    row = tl.arange(0, MAX_BATCH)
    is_live = row < batch
    lens = tl.load(len_ptr + row, mask=is_live, other=0)
    tiles = _tiles(lens, KEYS)
    leasts = lens
    if start_ptr is not None:
        begins = tl.load(start_ptr + row, mask=is_live, other=0)
        stops = tl.load(start_ptr + row + 1, mask=is_live, other=0)
        leasts = seen_by_first(lens, begins, stops)
    cuts = _cut_within(tl.maximum(lens, 1) - 1, leasts, window, True) + 1
    cuts = tl.sum(tl.where(is_live, cuts, 0), 0) * KV_HEADS
    tiles -= _first_tile(leasts, window, KEYS, True)
    programs = tl.cdiv(cuts, tl.cdiv(cuts, tl.num_programs(0)))
    ends = tl.cumsum(tl.where(is_live, tiles * KV_HEADS, 0), 0)
    total = tl.max(ends, 0).to(tl.int64)
    first = (tl.minimum(program, programs) * total // programs).to(tl.int32)
    last = (tl.minimum(program + 1, programs) * total // programs).to(tl.int32)
    at, sequence, head, tile = _first_cut(
        first, row, lens, leasts, ends, window, KV_HEADS, KEYS
    )
    stop, _, _, _ = _first_cut(last, row, lens, leasts, ends, window, KV_HEADS, KEYS)
    to = plan_ptr + program * 8
    tl.store(to, sequence)
    tl.store(to + 1, head)
    tl.store(to + 2, tile)
    tl.store(to + 3, stop - at)
    # The lengths of the first two sequences save a load before that of the block table.
    tl.store(to + 4, tl.load(len_ptr + sequence, mask=sequence < batch, other=0))
    after = sequence + 1
    tl.store(to + 5, tl.load(len_ptr + after, mask=after < batch, other=0))
    if start_ptr is not None:
        is_there = sequence < batch
        tl.store(to + 6, tl.load(start_ptr + sequence, mask=is_there, other=0))
        tl.store(to + 7, tl.load(start_ptr + after, mask=is_there, other=0))


_launch_plan_decode = Launcher(_plan_decode_kernel)


@triton.jit
def _within(
    rows: tl.tensor, d: tl.tensor, HEAD_DIM: tl.constexpr, DIM: tl.constexpr
) -> tl.tensor:
    """Return which elements of live rows are of the head, not of its padding."""
    if HEAD_DIM < DIM:
        return rows[:, None] & (d < HEAD_DIM)[None, :]
    else:
        return rows[:, None]


@triton.jit
def _rows_of(
    start_ptr: tl.tensor, sequence: tl.tensor, batch: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Return the first row of a sequence, and that of the next."""
    is_there = sequence < batch
    begin = tl.load(start_ptr + sequence, mask=is_there, other=0)
    return begin, tl.load(start_ptr + sequence + 1, mask=is_there, other=0)


@triton.jit
def _load_rows(
    q_ptr: tl.tensor,
    begin: tl.tensor,
    stop: tl.tensor,
    head: tl.tensor,
    stride_q: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """Return the queries of rows `begin:stop` of a KV head."""
    d = tl.arange(0, DIM)
    # The compiler keeps registers for what does not depend on `begin`.
    line = begin * GROUP + tl.arange(0, ROWS)
    q_at = q_ptr + (line // GROUP).to(tl.int64) * stride_q
    q_at += (head * GROUP + line % GROUP) * HEAD_DIM
    return tl.load(
        q_at[:, None] + d[None, :],
        mask=_within(line < stop * GROUP, d, HEAD_DIM, DIM),
        other=0.0,
    )


@triton.jit
def _store_part(
    part_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    part: tl.tensor,
    m: tl.tensor,
    norm: tl.tensor,
    acc: tl.tensor,
    LINES: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    r = tl.arange(0, ROWS)
    is_head = r < LINES
    line = part * LINES + r
    here = part_ptr + line[:, None] * DIM + tl.arange(0, DIM)[None, :]
    tl.store(here, acc, mask=is_head[:, None])
    tl.store(sum_ptr + 2 * line, m, mask=is_head)
    tl.store(sum_ptr + 2 * line + 1, norm, mask=is_head)


@triton.jit
def _load_fp8(
    plane_ptr: tl.tensor,
    codes: tl.tensor,
    blocks: tl.tensor,
    start: tl.tensor,
    live: tl.tensor,
    q: tl.tensor,
    stride_block: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    UPCAST: tl.constexpr,
) -> tl.tensor:
    """Return what a tile of codes stands for, as `reference.from_fp8` says, in the model's type."""
    exponents = load_exponents(
        plane_ptr,
        blocks,
        start,
        live,
        stride_block,
        HEAD_DIM,
        BLOCK_SIZE,
        KEYS,
        True,
    )
    factors = (exponents << 23).to(tl.float32, bitcast=True)
    numbers = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    numbers = (numbers * factors[:, None]).to(q.dtype)
    if not UPCAST:
        # An instruction that Triton does not see through. It would take another order within each
        # 16 numbers of a product, that of bytes, which prefill does not have.
        numbers = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [numbers], dtype=q.dtype, is_pure=False, pack=2
        )
    return numbers


@triton.jit
def _capped(
    s: tl.tensor, scale_log2: tl.tensor, cap_log2: tl.tensor, UPCAST: tl.constexpr
) -> tl.tensor:
    """Return capped scores, by the instructions that prefill has."""
    e = 1.0 + tl.exp2(s * scale_log2)
    if UPCAST:
        r = 1.0 / e
    else:
        r = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;",
            "=f,f",
            [e],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return tl.fma(r, -2.0 * cap_log2, cap_log2)


@triton.jit
def _shares(
    m: tl.tensor,
    norm: tl.tensor,
    acc: tl.tensor,
    sink_ptr: tl.tensor | None,
    heads: tl.tensor,
    is_head: tl.tensor,
) -> tl.tensor:
    """Return the outputs of rows; a row that has seen no key gives zeros."""
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + heads, mask=is_head, other=0.0)
        # A plain product could become a part of the subtraction that follows.
        sink = tl.fma(sink, SINK_FACTOR, 0.0)
        top = tl.maximum(m, sink)
        old = tl.exp2(m - top)
        norm = tl.fma(norm, old, tl.exp2(sink - top))
        acc = acc * old[:, None]
    norm = tl.where(norm == 0.0, 1.0, norm)
    return acc * tl.div_rn(1.0, norm)[:, None]


@triton.jit(
    do_not_specialize=[
        "batch",
        "cuts",
        "window",
        "stride_table",
        "table_ptr",
        "len_ptr",
        "start_ptr",
    ]
)
def _decode_kernel(
    q_ptr: tl.tensor,
    pool_ptr: tl.tensor,
    table_ptr: tl.tensor,
    len_ptr: tl.tensor,
    start_ptr: tl.tensor | None,
    plan_ptr: tl.tensor,
    part_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    merged_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sink_ptr: tl.tensor | None,
    batch: tl.tensor,
    cuts: tl.tensor,
    layer_offset: tl.tensor,
    scale_log2: tl.tensor,
    cap_log2: tl.tensor,
    window: tl.tensor,
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
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    at = plan_ptr + tl.program_id(0) * 8
    sequence = tl.load(at)
    head = tl.load(at + 1)
    t = tl.load(at + 2)
    count = tl.load(at + 3)
    length = tl.load(at + 4)
    following = tl.load(at + 5)
    if count == 0:
        return
    is_fp8: tl.constexpr = pool_ptr.dtype.element_ty == tl.uint8
    to_values: tl.constexpr = BLOCK_SIZE * (HEAD_DIM + 1 if is_fp8 else HEAD_DIM)
    r = tl.arange(0, ROWS)
    d = tl.arange(0, DIM)
    i = tl.arange(0, KEYS)
    is_head = r < LINES
    # How many keys the first row of the sequence sees.
    least = length
    if start_ptr is not None:
        begin = tl.load(at + 6)
        stop = tl.load(at + 7)
        least = seen_by_first(length, begin, stop)
    # Whether another program has the beginning of the first head, and this one its last tile here.
    is_late = t != _first_tile(least, window, KEYS, WINDOWED)
    stays = count <= _tiles(length, KEYS) - t
    # Whether this program has the present head from its first cut on.
    is_whole = ~is_late
    blocks = load_blocks(
        table_ptr + sequence.to(tl.int64) * stride_table,
        t * KEYS,
        length,
        BLOCK_SIZE,
        KEYS,
    )
    if start_ptr is not None:
        q = _load_rows(q_ptr, begin, stop, head, stride_q, GROUP, HEAD_DIM, DIM, ROWS)
    else:
        q_at = q_ptr + r[:, None] * HEAD_DIM + d[None, :]
        of_head = _within(is_head, d, HEAD_DIM, DIM)
        q = tl.load(
            q_at + (sequence.to(tl.int64) * stride_q + head * GROUP * HEAD_DIM),
            mask=of_head,
            other=0.0,
        )
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    norm = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM), tl.float32)
    m_all = m
    norm_all = norm
    acc_all = acc
    for _ in range(count):
        end = _tiles(length, KEYS)
        start = t * KEYS
        live = start + i < length
        if WINDOWED:
            live = live & (start + i >= least - window)
        rows = slot_rows(blocks, start, stride_block, BLOCK_SIZE, HEAD_DIM, KEYS)
        here = pool_ptr + (head.to(tl.int64) * stride_head + layer_offset)
        here = here + rows[:, None] + d[None, :]
        loaded = _within(live, d, HEAD_DIM, DIM)
        k = tl.load(here, mask=loaded, other=0.0)
        v = tl.load(here + to_values, mask=loaded, other=0.0)
        if is_fp8:
            plane = pool_ptr + (head.to(tl.int64) * stride_head + layer_offset)
            k = _load_fp8(
                plane,
                k,
                blocks,
                start,
                live,
                q,
                stride_block,
                HEAD_DIM,
                BLOCK_SIZE,
                KEYS,
                UPCAST,
            )
            v = _load_fp8(
                plane + to_values,
                v,
                blocks,
                start,
                live,
                q,
                stride_block,
                HEAD_DIM,
                BLOCK_SIZE,
                KEYS,
                UPCAST,
            )
        opens = (t & cut_mask(t, KEYS)) == 0
        if WINDOWED:
            opens = opens | (t == _first_tile(least, window, KEYS, WINDOWED))
        closes = (t + 1 == end) | (((t + 1) & cut_mask(t + 1, KEYS)) == 0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        s = tl.dot(q.to(tl.float32) if UPCAST else q, tl.trans(k))
        factor = scale_log2
        if CAPPED:
            s = _capped(s, scale_log2, cap_log2, UPCAST)
            factor = tl.full((), 1.0, tl.float32)
        seen = live[None, :]
        if start_ptr is not None:
            own = tl.minimum(least + r // GROUP, length)
            seen = (start + i)[None, :] < own[:, None]
            if WINDOWED:
                seen = seen & ((start + i)[None, :] >= (own - window)[:, None])
        s = tl.where(seen, s, float("-inf"))
        m = tl.where(opens, float("-inf"), m)
        m_new = tl.maximum(m, tl.max(s, 1) * factor)
        top = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(tl.fma(s, factor, -top[:, None]))
        shrink = tl.exp2(m - top)  # 0 where a cut opens
        norm = tl.fma(norm, shrink, row_sum(p, ROWS, KEYS))
        acc = tl.where(opens, 0.0, acc * shrink[:, None])
        p = p.to(q_ptr.dtype.element_ty)
        acc = tl.dot(p.to(tl.float32) if UPCAST else p, v, acc)
        m = m_new
        if closes:
            line = sequence.to(tl.int64) * KV_HEADS + head
            cut = _cut_within(t * KEYS, least, window, WINDOWED)
            if is_whole:
                is_first = cut == 0
                m_all, norm_all, acc_all = merge(
                    tl.where(is_first, float("-inf"), m_all),
                    tl.where(is_first, 0.0, norm_all),
                    tl.where(is_first, 0.0, acc_all),
                    m,
                    norm,
                    acc,
                )
                if t + 1 == end:
                    heads = head * GROUP + r
                    if start_ptr is not None:
                        heads = head * GROUP + r % GROUP
                    result = _shares(m_all, norm_all, acc_all, sink_ptr, heads, is_head)
                    result = result.to(out_ptr.dtype.element_ty)
                    to_row = line * GROUP + r
                    if start_ptr is not None:
                        begin, stop = _rows_of(start_ptr, sequence, batch)
                        to_row = (begin + r // GROUP).to(tl.int64) * (KV_HEADS * GROUP)
                        to_row += heads
                        is_row = r < (stop - begin) * GROUP
                        of_head = _within(is_row, d, HEAD_DIM, DIM)
                    to = out_ptr + to_row[:, None] * HEAD_DIM + d[None, :]
                    tl.store(to, result, mask=of_head)
                    tl.store(merged_ptr + line, cut + 1)
            else:
                _store_part(
                    part_ptr,
                    sum_ptr,
                    line * cuts + cut,
                    m,
                    norm,
                    acc,
                    LINES,
                    DIM,
                    ROWS,
                )
        turn = t + 1 == end
        over = turn & (head == KV_HEADS - 1)
        sequence = tl.where(over, sequence + 1, sequence)
        head = tl.where(turn, tl.where(over, 0, head + 1), head)
        length = tl.where(over, following, length)
        after = sequence + 1
        following = tl.load(len_ptr + after, mask=after < batch, other=0)
        is_whole = is_whole | turn
        least = length
        if start_ptr is not None:
            begin, stop = _rows_of(start_ptr, sequence, batch)
            least = seen_by_first(length, begin, stop)
        if turn:
            if start_ptr is not None:
                q = _load_rows(
                    q_ptr, begin, stop, head, stride_q, GROUP, HEAD_DIM, DIM, ROWS
                )
            else:
                q = tl.load(
                    q_at + (sequence.to(tl.int64) * stride_q + head * GROUP * HEAD_DIM),
                    mask=of_head & (sequence < batch),
                    other=0.0,
                )
        t = tl.where(turn, _first_tile(least, window, KEYS, WINDOWED), t + 1)
        blocks = load_blocks(
            table_ptr + sequence.to(tl.int64) * stride_table,
            t * KEYS,
            length,
            BLOCK_SIZE,
            KEYS,
        )
    # Of a head that others finish, the cuts so far are merged and take the room of their last.
    if (t != _first_tile(least, window, KEYS, WINDOWED)) & ~(is_late & stays):
        line = sequence.to(tl.int64) * KV_HEADS + head
        num_merged = _cut_within(t * KEYS, least, window, WINDOWED)
        _store_part(
            part_ptr,
            sum_ptr,
            line * cuts + num_merged - 1,
            m_all,
            norm_all,
            acc_all,
            LINES,
            DIM,
            ROWS,
        )
        tl.store(merged_ptr + line, num_merged)


_launch_decode = Launcher(_decode_kernel)


@triton.jit
def _load_part(
    part_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    part: tl.tensor,
    live: tl.tensor,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    DIM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    g = tl.arange(0, GROUP_ROWS)
    line = part * LINES + g
    live = live & (g < GROUP)
    here = part_ptr + line[:, None] * DIM + tl.arange(0, DIM)[None, :]
    m = tl.load(sum_ptr + 2 * line, mask=live, other=float("-inf"))
    norm = tl.load(sum_ptr + 2 * line + 1, mask=live, other=0.0)
    return m, norm, tl.load(here, mask=live[:, None], other=0.0)


@triton.jit(do_not_specialize=["cuts", "window", "len_ptr", "start_ptr"])
def _merge_cuts_kernel(
    len_ptr: tl.tensor,
    start_ptr: tl.tensor | None,
    part_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    merged_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sink_ptr: tl.tensor | None,
    cuts: tl.tensor,
    window: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    WINDOWED: tl.constexpr,
) -> None:
    """Merge the cuts of a row's KV head in order, where no single program has all of them."""
    line = tl.program_id(0)
    length = tl.load(len_ptr + line // KV_HEADS)
    least = length
    to_line = line
    if start_ptr is not None:
        row = tl.program_id(1)
        begin = tl.load(start_ptr + line // KV_HEADS)
        stop = tl.load(start_ptr + line // KV_HEADS + 1)
        if row >= stop - begin:
            return
        least = seen_by_first(length, begin, stop)
        to_line = (begin + row) * KV_HEADS + line % KV_HEADS
        part_ptr += row * GROUP * DIM
        sum_ptr += row * GROUP * 2
    count = _cut_within(tl.maximum(length, 1) - 1, least, window, WINDOWED) + 1
    merged = tl.load(merged_ptr + line)
    if merged == count:
        return
    g = tl.arange(0, GROUP_ROWS)
    d = tl.arange(0, DIM)
    first = line.to(tl.int64) * cuts
    m = tl.full((GROUP_ROWS,), float("-inf"), tl.float32)
    norm = tl.zeros((GROUP_ROWS,), tl.float32)
    acc = tl.zeros((GROUP_ROWS, DIM), tl.float32)
    # Sixteen are in flight at once: a latency for all, not for each.
    for cut in tl.range(merged - 1, count, 16, num_stages=1):
        loaded = ()
        for n in tl.static_range(16):
            part = _load_part(
                part_ptr,
                sum_ptr,
                first + cut + n,
                cut + n < count,
                GROUP,
                LINES,
                GROUP_ROWS,
                DIM,
            )
            loaded = loaded + (part,)  # type: ignore[assignment]
        for n in tl.static_range(16):
            m, norm, acc = merge(m, norm, acc, loaded[n][0], loaded[n][1], loaded[n][2])
    is_head = g < GROUP
    heads = line % KV_HEADS * GROUP + g
    result = _shares(m, norm, acc, sink_ptr, heads, is_head)
    result = result.to(out_ptr.dtype.element_ty)
    to = out_ptr + (to_line.to(tl.int64) * GROUP + g)[:, None] * HEAD_DIM + d[None, :]
    tl.store(to, result, mask=_within(is_head, d, HEAD_DIM, DIM))


_launch_merge_cuts = Launcher(_merge_cuts_kernel)
