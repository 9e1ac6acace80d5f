"""Paged decode attention on Hopper in the one order of sums that prefill has, too.

Cuts of all sequences and KV heads lie in one row, of which each program takes an equal stretch in
one pipelined loop. While a stretch holds a head from its first cut on, the cuts are merged in
registers; the others are stored, and a second kernel merges them in order. So the bits of a row
depend neither on the batch nor on the number of programs. A plan is made once a step on the device,
for all layers.
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
    check_pool,
    interpreted,
    load_blocks,
    merge,
    num_programs,
    slot_rows,
)
from baton.kernels.hopper.attention.order import (
    KEYS,
    cut_mask,
    cut_of,
    num_cuts,
    row_sum,
)

HEAD_DIMS = (64, 128)
MAX_GROUP = 16
PROGRAMS = 2  # on a multiprocessor
PLAN_FIELDS = 8
TILE = tl.constexpr(KEYS)


def plan_decode(context_lens: Tensor, kv_heads: int, programs: int = 0) -> Tensor:
    """Return the plan of a step, int32 `[programs, 8]`, for contexts `[batch]` int32.

    `programs` is for tests; by default they fill the device.
    """
    count = programs or num_programs(context_lens.device, PROGRAMS)
    plan = context_lens.new_empty((count, PLAN_FIELDS))
    _plan_decode_kernel[(count,)](
        context_lens,
        plan,
        len(context_lens),
        KV_HEADS=kv_heads,
        MAX_BATCH=MAX_BATCH,
        num_warps=4,
    )
    return plan


def one_decode_attention(
    q: Tensor,  # [batch, num_heads, head_dim]
    pool: Tensor,  # [num_blocks, kv_heads, num_layers, 2, block_size, head_dim]
    layer: int,
    block_tables: Tensor,  # [batch, max_blocks] int32
    context_lens: Tensor,  # [batch] int32
    plan: Tensor,  # of `plan_decode`
    scale: float,
) -> Tensor:
    """Return the attention of one new token per sequence over its paged context, shaped as `q`.

    A row of length 0, the padding of a captured graph, gives zeros. The workspace is `batch *
    num_heads * cuts * (head_dim + 2)` floats, with as many cuts as the table has room for.
    """
    check_pool(q, pool, block_tables)
    batch, num_heads, head_dim = q.shape
    kv_heads = pool.shape[1]
    block_size = pool.shape[4]
    group = num_heads // kv_heads
    assert head_dim in HEAD_DIMS
    assert group <= MAX_GROUP
    cuts = num_cuts(block_tables.shape[1] * block_size)
    parts = q.new_empty((batch, kv_heads, cuts, group, head_dim), dtype=torch.float32)
    sums = q.new_empty((batch, kv_heads, cuts, group, 2), dtype=torch.float32)
    merged = q.new_empty((batch, kv_heads), dtype=torch.int32)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _decode_kernel[(len(plan),)](
        q,
        pool,
        block_tables,
        context_lens,
        plan,
        parts,
        sums,
        merged,
        out,
        batch,
        cuts,
        layer * pool.stride(2),
        in_powers_of_2(scale, None)[0],
        q.stride(0),
        pool.stride(0),
        pool.stride(1),
        block_tables.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        DIM=head_dim,
        ROWS=max(16, triton.next_power_of_2(group)),
        BLOCK_SIZE=block_size,
        UPCAST=interpreted(),
        num_warps=4,
        num_stages=2,
        maxnreg=255,
    )
    if cuts > 1:
        _merge_cuts_kernel[(batch * kv_heads,)](
            context_lens,
            parts,
            sums,
            merged,
            out,
            cuts,
            KV_HEADS=kv_heads,
            GROUP=group,
            GROUP_ROWS=triton.next_power_of_2(group),
            DIM=head_dim,
            num_warps=4,
        )
    return out


@triton.jit
def _tiles(length: tl.tensor) -> tl.tensor:
    return tl.maximum(tl.cdiv(length, TILE), 1)


@triton.jit
def _first_cut(
    at: tl.tensor,
    row: tl.tensor,
    lens: tl.tensor,
    ends: tl.tensor,
    KV_HEADS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the first cut that begins at tile `at` of all tiles or later.

    That is its first tile of all, its sequence, its KV head and its first tile within them.
    """
    before = ends <= at
    sequence = tl.sum(before.to(tl.int32), 0)
    base = tl.max(tl.where(before, ends, 0), 0)
    end = _tiles(tl.sum(tl.where(row == sequence, lens, 0), 0))
    head = (at - base) // end
    tile = (at - base) % end
    low = cut_mask(tile)
    next_cut = tl.minimum((tile + low) & ~low, end)
    there = at + next_cut - tile
    turn = next_cut == end
    over = turn & (head == KV_HEADS - 1)
    sequence = tl.where(over, sequence + 1, sequence)
    head = tl.where(turn, tl.where(over, 0, head + 1), head)
    return there, sequence, head, tl.where(turn, 0, next_cut)


# Counts are not specialised, because variants for 1 and for multiples of 16 would be compiled
# during service.
@triton.jit(do_not_specialize=["batch", "len_ptr"])
def _plan_decode_kernel(
    len_ptr: tl.tensor,
    plan_ptr: tl.tensor,
    batch: tl.tensor,
    KV_HEADS: tl.constexpr,
    MAX_BATCH: tl.constexpr,
) -> None:
    """Write the stretch of a program: sequence, KV head, first tile, number of tiles, two lengths.

    As many programs take part as have whole rounds of cuts to do.
    """
    program = tl.program_id(0)
    row = tl.arange(0, MAX_BATCH)
    is_live = row < batch
    lens = tl.load(len_ptr + row, mask=is_live, other=0)
    tiles = _tiles(lens)
    cuts = tl.sum(tl.where(is_live, cut_of(tiles - 1) + 1, 0), 0) * KV_HEADS
    programs = tl.cdiv(cuts, tl.cdiv(cuts, tl.num_programs(0)))
    ends = tl.cumsum(tl.where(is_live, tiles * KV_HEADS, 0), 0)
    total = tl.max(ends, 0).to(tl.int64)
    first = (tl.minimum(program, programs) * total // programs).to(tl.int32)
    last = (tl.minimum(program + 1, programs) * total // programs).to(tl.int32)
    at, sequence, head, tile = _first_cut(first, row, lens, ends, KV_HEADS)
    stop, _, _, _ = _first_cut(last, row, lens, ends, KV_HEADS)
    to = plan_ptr + program * 8
    tl.store(to, sequence)
    tl.store(to + 1, head)
    tl.store(to + 2, tile)
    tl.store(to + 3, stop - at)
    # The lengths of the first two sequences save a load before that of the block table.
    tl.store(to + 4, tl.load(len_ptr + sequence, mask=sequence < batch, other=0))
    after = sequence + 1
    tl.store(to + 5, tl.load(len_ptr + after, mask=after < batch, other=0))


@triton.jit
def _store_part(
    part_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    part: tl.tensor,
    m: tl.tensor,
    norm: tl.tensor,
    acc: tl.tensor,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    r = tl.arange(0, ROWS)
    is_head = r < GROUP
    line = part * GROUP + r
    here = part_ptr + line[:, None] * DIM + tl.arange(0, DIM)[None, :]
    tl.store(here, acc, mask=is_head[:, None])
    tl.store(sum_ptr + 2 * line, m, mask=is_head)
    tl.store(sum_ptr + 2 * line + 1, norm, mask=is_head)


@triton.jit
def _shares(acc: tl.tensor, norm: tl.tensor) -> tl.tensor:
    """Return the outputs of rows; a row that has seen no key gives zeros."""
    norm = tl.where(norm == 0.0, 1.0, norm)
    return acc * tl.div_rn(1.0, norm)[:, None]


@triton.jit(do_not_specialize=["batch", "cuts", "stride_table", "table_ptr", "len_ptr"])
def _decode_kernel(
    q_ptr: tl.tensor,
    pool_ptr: tl.tensor,
    table_ptr: tl.tensor,
    len_ptr: tl.tensor,
    plan_ptr: tl.tensor,
    part_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    merged_ptr: tl.tensor,
    out_ptr: tl.tensor,
    batch: tl.tensor,
    cuts: tl.tensor,
    layer_offset: tl.tensor,
    scale_log2: tl.tensor,
    stride_q: tl.tensor,
    stride_block: tl.tensor,
    stride_head: tl.tensor,
    stride_table: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
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
    r = tl.arange(0, ROWS)
    d = tl.arange(0, DIM)
    i = tl.arange(0, TILE)
    is_head = r < GROUP
    # Whether another program has the beginning of the first head, and this one its last tile here.
    is_late = t != 0
    stays = count <= _tiles(length) - t
    is_whole = t == 0  # whether this program has the present head from its first cut on
    blocks = load_blocks(
        table_ptr + sequence.to(tl.int64) * stride_table,
        t * TILE,
        length,
        BLOCK_SIZE,
        TILE,
    )
    q_at = q_ptr + r[:, None] * DIM + d[None, :]
    q = tl.load(
        q_at + (sequence.to(tl.int64) * stride_q + head * GROUP * DIM),
        mask=is_head[:, None],
        other=0.0,
    )
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    norm = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM), tl.float32)
    m_all = m
    norm_all = norm
    acc_all = acc
    for _ in range(count):
        end = _tiles(length)
        start = t * TILE
        live = start + i < length
        rows = slot_rows(blocks, start, stride_block, BLOCK_SIZE, DIM, TILE)
        here = pool_ptr + (head.to(tl.int64) * stride_head + layer_offset)
        here = here + rows[:, None] + d[None, :]
        k = tl.load(here, mask=live[:, None], other=0.0)
        v = tl.load(here + BLOCK_SIZE * DIM, mask=live[:, None], other=0.0)
        opens = (t & cut_mask(t)) == 0
        closes = (t + 1 == end) | (((t + 1) & cut_mask(t + 1)) == 0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        s = tl.dot(q.to(tl.float32) if UPCAST else q, tl.trans(k))
        s = tl.where(live[None, :], s, float("-inf"))
        m = tl.where(opens, float("-inf"), m)
        m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
        top = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(tl.fma(s, scale_log2, -top[:, None]))
        shrink = tl.exp2(m - top)  # 0 where a cut opens
        norm = tl.fma(norm, shrink, row_sum(p, ROWS))
        acc = tl.where(opens, 0.0, acc * shrink[:, None])
        p = p.to(pool_ptr.dtype.element_ty)
        acc = tl.dot(p.to(tl.float32) if UPCAST else p, v, acc)
        m = m_new
        if closes:
            line = sequence.to(tl.int64) * KV_HEADS + head
            cut = cut_of(t)
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
                    result = _shares(acc_all, norm_all).to(out_ptr.dtype.element_ty)
                    to = out_ptr + (line * GROUP + r)[:, None] * DIM + d[None, :]
                    tl.store(to, result, mask=is_head[:, None])
                    tl.store(merged_ptr + line, cut + 1)
            else:
                _store_part(
                    part_ptr,
                    sum_ptr,
                    line * cuts + cut,
                    m,
                    norm,
                    acc,
                    GROUP,
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
        if turn:
            q = tl.load(
                q_at + (sequence.to(tl.int64) * stride_q + head * GROUP * DIM),
                mask=is_head[:, None] & (sequence < batch),
                other=0.0,
            )
        t = tl.where(turn, 0, t + 1)
        blocks = load_blocks(
            table_ptr + sequence.to(tl.int64) * stride_table,
            t * TILE,
            length,
            BLOCK_SIZE,
            TILE,
        )
    # Of a head that others finish, the cuts so far are merged and take the room of their last.
    if (t != 0) & ~(is_late & stays):
        line = sequence.to(tl.int64) * KV_HEADS + head
        num_merged = cut_of(t)
        _store_part(
            part_ptr,
            sum_ptr,
            line * cuts + num_merged - 1,
            m_all,
            norm_all,
            acc_all,
            GROUP,
            DIM,
            ROWS,
        )
        tl.store(merged_ptr + line, num_merged)


@triton.jit
def _load_part(
    part_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    part: tl.tensor,
    live: tl.tensor,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    DIM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    g = tl.arange(0, GROUP_ROWS)
    line = part * GROUP + g
    live = live & (g < GROUP)
    here = part_ptr + line[:, None] * DIM + tl.arange(0, DIM)[None, :]
    m = tl.load(sum_ptr + 2 * line, mask=live, other=float("-inf"))
    norm = tl.load(sum_ptr + 2 * line + 1, mask=live, other=0.0)
    return m, norm, tl.load(here, mask=live[:, None], other=0.0)


@triton.jit(do_not_specialize=["cuts", "len_ptr"])
def _merge_cuts_kernel(
    len_ptr: tl.tensor,
    part_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    merged_ptr: tl.tensor,
    out_ptr: tl.tensor,
    cuts: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    DIM: tl.constexpr,
) -> None:
    """Merge the cuts of a KV head in order, where no single program has all of them."""
    line = tl.program_id(0)
    count = cut_of(_tiles(tl.load(len_ptr + line // KV_HEADS)) - 1) + 1
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
                GROUP_ROWS,
                DIM,
            )
            loaded = loaded + (part,)  # type: ignore[assignment]
        for n in tl.static_range(16):
            m, norm, acc = merge(m, norm, acc, loaded[n][0], loaded[n][1], loaded[n][2])
    result = _shares(acc, norm).to(out_ptr.dtype.element_ty)
    to = out_ptr + (line.to(tl.int64) * GROUP + g)[:, None] * DIM + d[None, :]
    tl.store(to, result, mask=(g < GROUP)[:, None])
