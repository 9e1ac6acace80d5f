"""States through the chunks of prompts: convolution, what a chunk needs of itself, and the scan.

Chunks are cut at absolute multiples of `STATE_CHUNK` positions, so slices that begin and end there
give a token the same bits. A chunk's new values are a triangle of products (the UT transform of
Yang et al. 2024), inverted in fp32. States stay in fp32: where they enter a product of tensor
cores, they and what is added to them are two parts of bf16 each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels.constants import LOG2_E, STATE_CHUNK
from baton.kernels.cuda.states.steps import (
    _LENGTH_EPS,
    _STRIP,
    ITEM,
    offset_of,
    silu,
    softplus,
)

# ruff: noqa: N803, PLR0913, PLR0915, PLR0917
# Compile-time values are in capitals, as in Triton's own code; their branches are statements.

_CHUNK = tl.constexpr(STATE_CHUNK)
_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit(do_not_specialize=["item_ptr", "chunk_ptr", "layer", "stride_table"])
def _state_convolve_kernel(
    x_ptr: tl.tensor,
    taps_ptr: tl.tensor,  # [GROUPS, TAPS, CHANNELS]
    bias_ptr: tl.tensor,
    tail_ptr: tl.tensor,
    tail_at_ptr: tl.tensor,
    table_ptr: tl.tensor,
    item_ptr: tl.tensor,
    chunk_ptr: tl.tensor,  # [num_chunks, 2]: a sequence, and which of its tokens is lane 0
    y_ptr: tl.tensor,  # [num_rows, GROUPS * CHANNELS]
    length_ptr: tl.tensor,  # [num_rows, GROUPS * NORMED]: 1 / the length of a query or key
    layer: tl.tensor,
    stride_x: tl.tensor,
    stride_table: tl.tensor,
    stride_block: tl.tensor,
    stride_part: tl.tensor,
    GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    WIDTH: tl.constexpr,  # channels of a program: those of a query or key
    NORMED: tl.constexpr,  # queries and keys of a group, if they are normed
    ACTIVATES: tl.constexpr,
) -> None:
    """Convolve `WIDTH` channels of a chunk; program (group and channels, chunk)."""
    blocks: tl.constexpr = (CHANNELS + WIDTH - 1) // WIDTH
    group = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    sequence = tl.load(chunk_ptr + tl.program_id(1) * 2)
    lane = tl.arange(0, _CHUNK)
    t = tl.load(chunk_ptr + tl.program_id(1) * 2 + 1) + lane
    item = item_ptr + sequence * ITEM
    row = tl.load(item).to(tl.int64)
    start = tl.load(item + 2)
    live = (t >= 0) & (t < tl.load(item + 3))
    table = table_ptr + sequence.to(tl.int64) * stride_table
    tail = tail_ptr + offset_of(
        tail_at_ptr + layer * 2, table, group, 2 * stride_block, 2 * stride_part
    )
    c = block * WIDTH + tl.arange(0, WIDTH)
    x_ptr += group * CHANNELS
    taps_ptr += group * TAPS * CHANNELS
    y = tl.zeros([_CHUNK, WIDTH], tl.float32)
    for tap in tl.static_range(TAPS):
        at = t - (TAPS - 1) + tap
        new = live & (at >= 0)
        x = tl.load(
            x_ptr + (row + at)[:, None] * stride_x + c[None, :],
            mask=new[:, None] & (c < CHANNELS)[None, :],
            other=0.0,
        ).to(tl.float32)
        past = live & (at < 0) & (start + at >= 0)
        x += tl.load(
            tail + ((start + at + TAPS) % TAPS)[:, None] * CHANNELS + c[None, :],
            mask=past[:, None] & (c < CHANNELS)[None, :],
            other=0.0,
        ).to(tl.float32)
        w = tl.load(taps_ptr + tap * CHANNELS + c, mask=c < CHANNELS, other=0.0)
        y += x * w[None, :]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + group * CHANNELS + c, mask=c < CHANNELS, other=0.0)
        y += bias[None, :]
    if ACTIVATES:
        y = silu(y)
    rounded = y.to(y_ptr.dtype.element_ty)
    out = y_ptr + (row + t)[:, None] * (GROUPS * CHANNELS) + group * CHANNELS
    tl.store(out + c[None, :], rounded, mask=live[:, None] & (c < CHANNELS)[None, :])
    if NORMED > 0:
        f = rounded.to(tl.float32)
        tl.store(
            length_ptr + (row + t) * (GROUPS * NORMED) + group * NORMED + block,
            tl.rsqrt(tl.sum(f * f, 1) + _LENGTH_EPS),
            mask=live & (block < NORMED),
        )


@triton.jit
def _inverse(m: tl.tensor) -> tl.tensor:
    """Return the inverse of 1 + `m`, which is below its diagonal, `[CHUNK, CHUNK]`.

    Blocks of 16 on the diagonal come row after row; then two merges, 16 -> 32 -> 64.
    """
    blocks: tl.constexpr = _CHUNK // 16
    i = tl.arange(0, _CHUNK)
    n = tl.arange(0, blocks)
    j = tl.arange(0, 16)
    cut = tl.reshape(m, [blocks, 16, blocks, 16])
    same = n[:, None, None, None] == n[None, None, :, None]
    diagonal = -tl.sum(tl.where(same, cut, 0.0), 2)  # [blocks, 16, 16]
    inverse = diagonal
    for r in range(2, 16):
        new = tl.sum(tl.where((j == r)[None, :, None], diagonal, 0.0), 1)
        new += tl.sum(new[:, :, None] * inverse, 1)
        inverse = tl.where((j == r)[None, :, None], new[:, None, :], inverse)
    inverse += tl.where((j[:, None] == j[None, :])[None, :, :], 1.0, 0.0)
    full = tl.reshape(tl.where(same, inverse[:, :, None, :], 0.0), [_CHUNK, _CHUNK])
    for level in tl.static_range(2):
        side = (i // (16 << level))[:, None]
        other = (i // (16 << level))[None, :]
        off = tl.where((side == other + 1) & (side % 2 == 1), m, 0.0)
        full -= tl.dot(
            full,
            tl.dot(off, full, input_precision="tf32x3"),
            input_precision="tf32x3",
        )
    return full


@triton.jit(do_not_specialize=["item_ptr", "chunk_ptr", "num_rows"])
def _state_intra_kernel(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    length_ptr: tl.tensor,
    rate_ptr: tl.tensor,
    step_bias_ptr: tl.tensor,
    item_ptr: tl.tensor,
    chunk_ptr: tl.tensor,
    w_ptr: tl.tensor,  # [2, num_rows, heads, KEY_DIM]: a high and a low part
    u_ptr: tl.tensor,  # [num_rows, heads, VALUE_DIM] fp32
    p_ptr: tl.tensor,  # [num_rows, heads, CHUNK]
    decay_ptr: tl.tensor,  # [num_rows, heads]: the sum of log2 of decays in the chunk
    num_rows: tl.tensor,
    stride_x: tl.tensor,
    scale: tl.tensor,
    least: tl.tensor,
    most: tl.tensor,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    TO_STEPS: tl.constexpr,
    TO_BETAS: tl.constexpr,
    IS_NORMED: tl.constexpr,
    CORRECTS: tl.constexpr,
) -> None:
    """Compute what a chunk needs of itself alone; program (head, chunk).

    These are the sums of its gates, its attention `p`, and, with the inverse of its triangle, what
    its values are without a state, `u`, and how a state corrects them, `w`.
    """
    heads: tl.constexpr = GROUPS * HEADS
    narrow: tl.constexpr = y_ptr.dtype.element_ty
    head = tl.program_id(0)
    group = head // HEADS
    of_group = head % HEADS
    key_head = of_group // (HEADS // KEY_HEADS)
    sequence = tl.load(chunk_ptr + tl.program_id(1) * 2)
    i = tl.arange(0, _CHUNK)
    d = tl.arange(0, KEY_DIM)
    v_d = tl.arange(0, VALUE_DIM)
    t = tl.load(chunk_ptr + tl.program_id(1) * 2 + 1) + i
    item = item_ptr + sequence * ITEM
    live = (t >= 0) & (t < tl.load(item + 3))
    at = tl.load(item).to(tl.int64) + t
    y = y_ptr + at[:, None] * (GROUPS * CHANNELS) + group * CHANNELS
    of_k = (KEY_HEADS + key_head) * KEY_DIM + d
    k = tl.load(y + of_k[None, :], mask=live[:, None], other=0.0)
    rk = tl.full([_CHUNK], 1.0, tl.float32)
    rq = rk
    if IS_NORMED:
        lengths = length_ptr + at * (GROUPS * 2 * KEY_HEADS) + group * 2 * KEY_HEADS
        rk = tl.load(lengths + KEY_HEADS + key_head, mask=live, other=0.0)
        rq = tl.load(lengths + key_head, mask=live, other=0.0)
    numbers = x_ptr + at * stride_x + head
    a = tl.load(numbers + TO_STEPS, mask=live, other=0.0).to(tl.float32)
    step = softplus(a + tl.load(step_bias_ptr + head))
    step = tl.minimum(tl.maximum(step, least), most)
    if TO_BETAS is None:
        beta = tl.where(live, step, 0.0)
    else:
        b = tl.load(numbers + TO_BETAS, mask=live, other=0.0).to(tl.float32)
        beta = tl.where(live, tl.sigmoid(b), 0.0)
    g = tl.where(live, tl.load(rate_ptr + head) * step, 0.0)
    gc = tl.cumsum(g, 0) * _LOG2_E
    tl.store(decay_ptr + at * heads + head, gc, mask=live)
    span = gc[:, None] - gc[None, :]
    decay = tl.exp2(tl.where(i[:, None] >= i[None, :], span, 0.0))
    of_v = 2 * KEY_HEADS * KEY_DIM + of_group * VALUE_DIM + v_d
    v = tl.load(y + of_v[None, :], mask=live[:, None], other=0.0)
    own = at * heads + head
    if CORRECTS:
        m = tl.dot(k, tl.trans(k))
        m = m * decay * (beta * rk)[:, None] * rk[None, :]
        full = _inverse(tl.where(i[:, None] > i[None, :], m, 0.0))
        tu = full * beta[None, :]
        tw = full * (beta * rk * tl.exp2(gc))[None, :]
        tu_high = tu.to(narrow)
        tw_high = tw.to(narrow)
        u = tl.dot(tu_high, v)
        w = tl.dot(tw_high, k)
        u = tl.dot((tu - tu_high.to(tl.float32)).to(narrow), v, u)
        w = tl.dot((tw - tw_high.to(tl.float32)).to(narrow), k, w)
        w_high = w.to(narrow)
        w_low = (w - w_high.to(tl.float32)).to(narrow)
        into = w_ptr + own[:, None] * KEY_DIM + d[None, :]
        tl.store(into, w_high, mask=live[:, None])
        low = num_rows.to(tl.int64) * (heads * KEY_DIM)
        tl.store(into + low, w_low, mask=live[:, None])
    else:
        u = v.to(tl.float32) * beta[:, None]
    tl.store(u_ptr + own[:, None] * VALUE_DIM + v_d[None, :], u, mask=live[:, None])
    of_q = key_head * KEY_DIM + d
    q = tl.load(y + of_q[None, :], mask=live[:, None], other=0.0)
    p = tl.dot(q, tl.trans(k)) * decay * (rq * scale)[:, None] * rk[None, :]
    p = tl.where(i[:, None] >= i[None, :], p, 0.0)
    tl.store(
        p_ptr + own[:, None] * _CHUNK + i[None, :], p.to(narrow), mask=live[:, None]
    )


@triton.jit(do_not_specialize=["item_ptr", "layer", "num_rows", "stride_table"])
def _state_scan_kernel(
    y_ptr: tl.tensor,
    length_ptr: tl.tensor,
    w_ptr: tl.tensor,
    u_ptr: tl.tensor,
    p_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    skip_ptr: tl.tensor,
    matrix_ptr: tl.tensor,
    strip_ptr: tl.tensor,
    table_ptr: tl.tensor,
    item_ptr: tl.tensor,
    out_ptr: tl.tensor,
    layer: tl.tensor,
    num_rows: tl.tensor,
    stride_table: tl.tensor,
    stride_block: tl.tensor,
    stride_part: tl.tensor,
    scale: tl.tensor,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
    IS_NORMED: tl.constexpr,
    CORRECTS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Take states through the chunks of a sequence; program (columns, head, sequence).

    `COLUMNS` of a matrix are in registers in fp32.
    """
    strips: tl.constexpr = (VALUE_DIM + _STRIP - 1) // _STRIP
    heads: tl.constexpr = GROUPS * HEADS
    narrow: tl.constexpr = y_ptr.dtype.element_ty
    head = tl.program_id(1)
    group = head // HEADS
    of_group = head % HEADS
    key_head = of_group // (HEADS // KEY_HEADS)
    sequence = tl.program_id(2)
    item = item_ptr + sequence * ITEM
    row = tl.load(item).to(tl.int64)
    start = tl.load(item + 2)
    count = tl.load(item + 3)
    table = table_ptr + sequence.to(tl.int64) * stride_table
    column = tl.program_id(0) * COLUMNS
    where = strip_ptr + ((layer * HEADS + of_group) * strips + column // _STRIP) * 2
    matrix = matrix_ptr + offset_of(where, table, group, stride_block, stride_part)
    i = tl.arange(0, _CHUNK)
    d = tl.arange(0, KEY_DIM)
    c = tl.arange(0, COLUMNS)
    here = matrix + column % _STRIP + d[:, None] * _STRIP + c[None, :]
    s = tl.load(here, mask=(start > 0) & (count > 0) & (d[:, None] >= 0), other=0.0)
    low = num_rows.to(tl.int64) * (heads * KEY_DIM)
    of_k = (KEY_HEADS + key_head) * KEY_DIM + d
    of_q = key_head * KEY_DIM + d
    of_v = 2 * KEY_HEADS * KEY_DIM + of_group * VALUE_DIM + column + c
    lead = tl.where(count > 0, start % _CHUNK, 0)
    for t in tl.range(-lead, count, _CHUNK, num_stages=STAGES):
        live = (t + i >= 0) & (t + i < count)
        at = row + t + i
        own = at * heads + head
        y = y_ptr + at[:, None] * (GROUPS * CHANNELS) + group * CHANNELS
        u_at = u_ptr + own[:, None] * VALUE_DIM + column + c[None, :]
        vn = tl.load(u_at, mask=live[:, None], other=0.0)
        q = tl.load(y + of_q[None, :], mask=live[:, None], other=0.0)
        k = tl.load(y + of_k[None, :], mask=live[:, None], other=0.0)
        p_at = p_ptr + own[:, None] * _CHUNK + i[None, :]
        p = tl.load(p_at, mask=live[:, None], other=0.0)
        gc = tl.load(decay_ptr + own, mask=live, other=0.0)
        end = row + tl.minimum(t + _CHUNK, count) - 1
        last = tl.load(decay_ptr + end * heads + head)
        rq = tl.full([_CHUNK], 1.0, tl.float32)
        rk = rq
        if IS_NORMED:
            lengths = length_ptr + at * (GROUPS * 2 * KEY_HEADS) + group * 2 * KEY_HEADS
            rq = tl.load(lengths + key_head, mask=live, other=0.0)
            rk = tl.load(lengths + KEY_HEADS + key_head, mask=live, other=0.0)
        s_high = s.to(narrow)
        s_low = (s - s_high.to(tl.float32)).to(narrow)
        o = tl.dot(q, s_high)
        o = tl.dot(q, s_low, o)
        if CORRECTS:
            w_at = w_ptr + own[:, None] * KEY_DIM + d[None, :]
            w = tl.load(w_at, mask=live[:, None], other=0.0)
            w_low = tl.load(w_at + low, mask=live[:, None], other=0.0)
            known = tl.dot(w, s_high)
            known = tl.dot(w, s_low, known)
            known = tl.dot(w_low, s_high, known)
            vn = vn - known
        o = o * (rq * scale * tl.exp2(gc))[:, None]
        o = tl.dot(p, vn.to(narrow), o)
        added = vn * (rk * tl.exp2(last - gc))[:, None]
        added_high = added.to(narrow)
        added_low = (added - added_high.to(tl.float32)).to(narrow)
        s = tl.dot(tl.trans(k), added_high, s * tl.exp2(last))
        s = tl.dot(tl.trans(k), added_low, s)
        if skip_ptr is not None:
            v = tl.load(y + of_v[None, :], mask=live[:, None], other=0.0)
            o += tl.load(skip_ptr + head) * v.to(tl.float32)
        out = out_ptr + own[:, None] * VALUE_DIM + column + c[None, :]
        tl.store(out, o.to(narrow), mask=live[:, None])
    tl.store(here, s, mask=(count > 0) & (d[:, None] >= 0))
