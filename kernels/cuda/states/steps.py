"""A state through tokens one by one: convolution, gates and matrices in one launch, pool by block.

A program takes one strip of a head's matrix through the tokens of a sequence and keeps it in
registers. The convolution's last inputs are a ring by absolute position. A step writes the entry
that nobody reads, so programs which share a key head need no order. `state_reference` defines the
meaning; queries, keys and values are rounded as the model's numbers are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels.constants import STRIP
from baton.kernels.state_layout import StateItem
from baton.kernels.state_reference import LENGTH_EPS

# ruff: noqa: N803, PLR0913, PLR0915, PLR0917, SIM108
# Compile-time values are in capitals, as in Triton's own code; their branches are statements.

ITEM = tl.constexpr(len(StateItem._fields))
_STRIP = tl.constexpr(STRIP)
_LENGTH_EPS = tl.constexpr(LENGTH_EPS)
_LINEAR = tl.constexpr(20.0)  # from where on torch takes softplus(x) as x


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    return tl.where(x > _LINEAR, x, tl.log(1.0 + tl.exp(tl.minimum(x, _LINEAR))))


@triton.jit
def silu(x: tl.tensor) -> tl.tensor:
    return x / (1.0 + tl.exp(-x))


@triton.jit
def offset_of(
    where_ptr: tl.tensor,  # the number of a block in a state's table, and an offset in its part
    table_ptr: tl.tensor,  # the state's blocks
    group: tl.tensor,
    stride_block: tl.tensor,
    stride_part: tl.tensor,
) -> tl.tensor:
    """Return where a strip, or a tail, begins in the pool."""
    block = tl.load(table_ptr + tl.load(where_ptr)).to(tl.int64)
    offset = block * stride_block + group * stride_part + tl.load(where_ptr + 1)
    return tl.multiple_of(offset, 16)


@triton.jit
def _input(
    x_ptr: tl.tensor,  # of the group's first channel
    tail_ptr: tl.tensor,
    row: tl.tensor,  # the sequence's first
    t: tl.tensor,
    start: tl.tensor,
    channels: tl.tensor,
    stride_x: tl.tensor,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
) -> tl.tensor:
    """Return the inputs of token `t` of this call, which the tail has if it is below 0."""
    position = start + t
    new = tl.load(
        x_ptr + (row + t) * stride_x + channels,
        mask=(t >= 0) & (channels >= 0),
        other=0.0,
    )
    entry = (position + TAPS) % TAPS
    old = tl.load(
        tail_ptr + entry * CHANNELS + channels,
        mask=(t < 0) & (position >= 0) & (channels >= 0),
        other=0.0,
    )
    return tl.where(t >= 0, new, old).to(tl.float32)


@triton.jit
def _convolved(
    x_ptr: tl.tensor,
    tail_ptr: tl.tensor,
    taps_ptr: tl.tensor,  # [TAPS, CHANNELS] of the group
    bias_ptr: tl.tensor,  # [CHANNELS] of the group
    row: tl.tensor,
    t: tl.tensor,
    start: tl.tensor,
    channels: tl.tensor,
    stride_x: tl.tensor,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    ACTIVATES: tl.constexpr,
) -> tl.tensor:
    y = tl.zeros(channels.shape, tl.float32)
    for tap in tl.static_range(TAPS):
        x = _input(
            x_ptr,
            tail_ptr,
            row,
            t - (TAPS - 1) + tap,
            start,
            channels,
            stride_x,
            CHANNELS,
            TAPS,
        )
        y += x * tl.load(taps_ptr + tap * CHANNELS + channels)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + channels)
    if ACTIVATES:
        y = silu(y)
    return y.to(x_ptr.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=["item_ptr", "layer", "stride_table"])
def _state_step_kernel(
    x_ptr: tl.tensor,  # [num_rows, stride_x]
    taps_ptr: tl.tensor,  # [GROUPS, TAPS, CHANNELS]
    bias_ptr: tl.tensor,
    rate_ptr: tl.tensor,  # [heads], or [heads * KEY_DIM]
    step_bias_ptr: tl.tensor,
    skip_ptr: tl.tensor,
    matrix_ptr: tl.tensor,  # the pool as fp32
    tail_ptr: tl.tensor,  # the pool as numbers of the model
    strip_ptr: tl.tensor,  # [num_layers, HEADS * strips, 2]
    tail_at_ptr: tl.tensor,  # [num_layers, 2]
    table_ptr: tl.tensor,  # [num_sequences, stride_table]
    item_ptr: tl.tensor,  # [num_sequences, ITEM]: each a `StateItem`
    out_ptr: tl.tensor,  # [num_rows, heads * VALUE_DIM]
    layer: tl.tensor,
    stride_x: tl.tensor,
    stride_table: tl.tensor,
    stride_block: tl.tensor,  # in fp32 numbers, as the next one
    stride_part: tl.tensor,
    scale: tl.tensor,
    least: tl.tensor,
    most: tl.tensor,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,  # of a group
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,  # of a strip
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    TO_STEPS: tl.constexpr,
    TO_BETAS: tl.constexpr,  # None: the steps are the betas
    BY_KEY: tl.constexpr,  # each number of a key has a step, and so a decay
    ACTIVATES: tl.constexpr,
    IS_NORMED: tl.constexpr,
    CORRECTS: tl.constexpr,
    MANY: tl.constexpr,  # False: each sequence has one token, or is padding
) -> None:
    strips: tl.constexpr = (VALUE_DIM + _STRIP - 1) // _STRIP
    heads: tl.constexpr = GROUPS * HEADS
    to_keys: tl.constexpr = KEY_HEADS * KEY_DIM
    to_values: tl.constexpr = 2 * to_keys
    program = tl.program_id(0)
    strip = program % strips
    head = program // strips % heads
    sequence = program // strips // heads
    group = head // HEADS
    of_group = head % HEADS
    item = item_ptr + sequence * ITEM
    row = tl.load(item).to(tl.int64)
    count = tl.load(item + 1)
    start = tl.load(item + 2)
    first = tl.load(item + 3)
    num_held = tl.load(item + 4)
    num_kept = count - tl.load(item + 5)
    table = table_ptr + sequence.to(tl.int64) * stride_table
    where = strip_ptr + ((layer * HEADS + of_group) * strips + strip) * 2
    matrix = matrix_ptr + offset_of(where, table, group, stride_block, stride_part)
    tail = tail_ptr + offset_of(
        tail_at_ptr + layer * 2, table, group, 2 * stride_block, 2 * stride_part
    )
    d = tl.arange(0, KEY_DIM)
    columns = tl.arange(0, COLUMNS)
    here = matrix + d[:, None] * _STRIP + columns[None, :]
    is_live = count > first
    has_state = (start + first + num_held > 0) & is_live
    s = tl.load(here, mask=has_state & (d[:, None] >= 0), other=0.0)
    key_head = of_group // (HEADS // KEY_HEADS)
    of_q = key_head * KEY_DIM + d
    of_k = to_keys + key_head * KEY_DIM + d
    of_v = to_values + of_group * VALUE_DIM + strip * _STRIP + columns
    own = x_ptr + group * CHANNELS
    taps = taps_ptr + group * TAPS * CHANNELS
    bias = None if bias_ptr is None else bias_ptr + group * CHANNELS
    of_step = head * KEY_DIM + d if BY_KEY else head
    rate = tl.load(rate_ptr + of_step)
    step_bias = tl.load(step_bias_ptr + of_step)
    out = out_ptr + head * VALUE_DIM + strip * _STRIP
    end = count if MANY else first + 1
    for t in range(first, end):
        q = _convolved(
            own,
            tail,
            taps,
            bias,
            row,
            t,
            start,
            of_q,
            stride_x,
            CHANNELS,
            TAPS,
            ACTIVATES,
        )
        k = _convolved(
            own,
            tail,
            taps,
            bias,
            row,
            t,
            start,
            of_k,
            stride_x,
            CHANNELS,
            TAPS,
            ACTIVATES,
        )
        v = _convolved(
            own,
            tail,
            taps,
            bias,
            row,
            t,
            start,
            of_v,
            stride_x,
            CHANNELS,
            TAPS,
            ACTIVATES,
        )
        if IS_NORMED:
            q = q * (tl.rsqrt(tl.sum(q * q) + _LENGTH_EPS) * scale)
            k = k * tl.rsqrt(tl.sum(k * k) + _LENGTH_EPS)
        else:
            q = q * scale
        at = x_ptr + (row + t) * stride_x
        step = softplus(tl.load(at + TO_STEPS + of_step).to(tl.float32) + step_bias)
        step = tl.minimum(tl.maximum(step, least), most)
        if TO_BETAS is None:
            beta = step
        else:
            beta = tl.sigmoid(tl.load(at + TO_BETAS + head).to(tl.float32))
        # A token that the state has already only reads it.
        is_new = t >= num_held
        decay = tl.where(is_new, tl.exp(rate * step), 1.0)
        if BY_KEY:
            s = s * decay[:, None]
        else:
            s = s * decay
        delta = v
        if CORRECTS:
            delta = v - tl.sum(s * k[:, None], 0)
        s = s + k[:, None] * tl.where(is_new, beta * delta, 0.0)[None, :]
        o = tl.sum(s * q[:, None], 0)
        if skip_ptr is not None:
            o += tl.load(skip_ptr + head) * v
        o = tl.where(is_live, o, 0.0).to(out_ptr.dtype.element_ty)
        tl.store(out + (row + t) * (heads * VALUE_DIM) + columns, o)
        if t == num_kept - 1:
            tl.store(here, s, mask=is_live & (d[:, None] >= 0))
    if count == 1:  # `_state_tails_kernel` writes more tokens
        entry = tail + start % TAPS * CHANNELS
        own += row * stride_x
        is_first = (of_group % (HEADS // KEY_HEADS) == 0) & (strip == 0)
        tl.store(entry + of_q, tl.load(own + of_q), mask=is_first & (d >= 0))
        tl.store(entry + of_k, tl.load(own + of_k), mask=is_first & (d >= 0))
        tl.store(entry + of_v, tl.load(own + of_v))


@triton.jit(do_not_specialize=["item_ptr", "layer", "stride_table"])
def _state_tails_kernel(
    x_ptr: tl.tensor,
    tail_ptr: tl.tensor,
    tail_at_ptr: tl.tensor,
    table_ptr: tl.tensor,
    item_ptr: tl.tensor,
    layer: tl.tensor,
    stride_x: tl.tensor,
    stride_table: tl.tensor,
    stride_block: tl.tensor,
    stride_part: tl.tensor,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Keep the last inputs of each sequence but its guesses'."""
    blocks: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    group = tl.program_id(0) // blocks
    c = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    sequence = tl.program_id(1)
    item = item_ptr + sequence * ITEM
    row = tl.load(item).to(tl.int64)
    num_kept = tl.load(item + 1) - tl.load(item + 5)
    start = tl.load(item + 2)
    table = table_ptr + sequence.to(tl.int64) * stride_table
    tail = tail_ptr + offset_of(
        tail_at_ptr + layer * 2, table, group, 2 * stride_block, 2 * stride_part
    )
    for number in tl.static_range(TAPS):
        t = num_kept - TAPS + number
        live = (t >= 0) & (c < CHANNELS)
        x = tl.load(
            x_ptr + (row + t) * stride_x + group * CHANNELS + c, mask=live, other=0.0
        )
        tl.store(tail + (start + t + TAPS) % TAPS * CHANNELS + c, x, mask=live)


@triton.jit(do_not_specialize=["row_ptr", "num_parts"])
def _state_norm_kernel(
    o_ptr: tl.tensor,  # [num_rows, NORMS * WIDTH]
    x_ptr: tl.tensor,  # its rows have the gates
    row_ptr: tl.tensor,  # which rows; None: all
    norm_ptr: tl.tensor,  # [NORMS * WIDTH]
    out_ptr: tl.tensor,
    num_parts: tl.tensor,  # rows times NORMS
    stride_x: tl.tensor,
    eps: tl.tensor,
    TO_GATES: tl.constexpr,
    NORMS: tl.constexpr,
    WIDTH: tl.constexpr,
    GATES_FIRST: tl.constexpr,
    BY_SIGMOID: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Write the RMS norms of parts of rows, gated."""
    part = tl.program_id(0) * PARTS + tl.arange(0, PARTS)
    d = tl.arange(0, BLOCK)
    live = (part < num_parts)[:, None] & (d < WIDTH)[None, :]
    row = (part // NORMS).to(tl.int64)
    column = (part % NORMS)[:, None] * WIDTH + d[None, :]
    source = row
    if row_ptr is not None:
        source = tl.load(row_ptr + row, mask=part < num_parts, other=0)
    o = tl.load(
        o_ptr + source[:, None] * (NORMS * WIDTH) + column, mask=live, other=0.0
    ).to(tl.float32)
    gate = tl.load(
        x_ptr + source[:, None] * stride_x + TO_GATES + column, mask=live, other=0.0
    ).to(tl.float32)
    if BY_SIGMOID:
        gate = tl.sigmoid(gate)
    else:
        gate = silu(gate)
    if GATES_FIRST:
        o = o * gate
    o = o * tl.rsqrt(tl.sum(o * o, 1) / WIDTH + eps)[:, None]
    o = o * tl.load(norm_ptr + column, mask=live, other=0.0)
    if not GATES_FIRST:
        o = o * gate
    tl.store(
        out_ptr + row[:, None] * (NORMS * WIDTH) + column,
        o.to(out_ptr.dtype.element_ty),
        mask=live,
    )
