"""The kernels that compute row by row on CPUs: norms, rotations, storing KV, and the MLP's gate.

Each row is read and written once, and its sums take their terms in an order that depends on the
row's length alone.
"""

# ruff: noqa: PLR0913, PLR0917  (the arguments are pointers and strides)

from __future__ import annotations

import numpy as np

from baton.kernels.constants import LOG2_E, WIDTH
from baton.kernels.cpu.vectors import (
    Floats,
    Int64s,
    Numbers,
    every,
    exp2,
    fma,
    kernel,
    larger,
    load,
    load_first,
    root,
    shift,
    smaller,
    store,
    store_first,
    total,
)

ZERO = np.float32(0)
ONE = np.float32(1)
TWO = np.float32(2)
MINUS_LOG2_E = np.float32(-LOG2_E)


@kernel
def _inverse_norm(row: Numbers, count: int, eps: float) -> object:
    """Return 1 / sqrt(mean of squares + eps), in all lanes, from four sums that do not wait."""
    a = every(ZERO)
    b = every(ZERO)
    c = every(ZERO)
    d = every(ZERO)
    whole = count // (4 * WIDTH) * (4 * WIDTH)
    for i in range(0, whole, 4 * WIDTH):
        first = load(row, i)
        second = load(row, i + WIDTH)
        third = load(row, i + 2 * WIDTH)
        fourth = load(row, i + 3 * WIDTH)
        a = fma(first, first, a)
        b = fma(second, second, b)
        c = fma(third, third, c)
        d = fma(fourth, fourth, d)
    for i in range(whole, count, WIDTH):
        rest = load_first(row, i, count - i)
        a = fma(rest, rest, a)
    mean = total((a + b) + (c + d)) / np.float32(count)
    return every(ONE) / root(every(mean + eps))


@kernel
def add_rms_norm(
    first: int,
    end: int,
    x: Numbers,  # [num_rows, hidden]
    stride_x: int,
    residual: Numbers,  # [num_rows, hidden]
    has_residual: int,
    weight: Floats,  # [hidden]
    eps: float,
    hidden: int,
    normed: Numbers,  # [num_rows, hidden]
    stream: Numbers,  # [num_rows, hidden]; x itself without a residual
) -> None:
    for row in range(first, end):
        here = row * stride_x
        at = row * hidden
        if has_residual:
            for i in range(0, hidden - WIDTH + 1, WIDTH):
                store(stream, at + i, load(x, here + i) + load(residual, at + i))
            i = hidden // WIDTH * WIDTH
            rest = hidden % WIDTH
            if rest:
                old = load_first(residual, at + i, rest)
                store_first(stream, at + i, load_first(x, here + i, rest) + old, rest)
            here = at
        # The next layer adds to the rounded sum, so the norm uses the rounded sum too.
        inverse = _inverse_norm(shift(stream, here), hidden, eps)
        for i in range(0, hidden - WIDTH + 1, WIDTH):
            store(normed, at + i, load(stream, here + i) * inverse * load(weight, i))
        i = hidden // WIDTH * WIDTH
        rest = hidden % WIDTH
        if rest:
            scaled = (
                load_first(stream, here + i, rest)
                * inverse
                * load_first(weight, i, rest)
            )
            store_first(normed, at + i, scaled, rest)


@kernel
def gate_mul(
    first: int,
    end: int,
    gate_up: Numbers,  # [num_rows, 2 * features]
    features: int,
    slope: float,  # as in `constants.Gate`, times -log2(e); so is `cubic`
    cubic: float,
    limit: float,
    offset: float,
    out: Numbers,  # [num_rows, features]
) -> None:
    is_clamped = limit < np.inf
    for row in range(first, end):
        gates = 2 * row * features
        ups = (2 * row + 1) * features
        to = row * features
        for i in range(0, features, WIDTH):
            count = features - i
            if count >= WIDTH:
                gate = load(gate_up, gates + i)
                up = load(gate_up, ups + i)
            else:
                gate, up = (
                    load_first(gate_up, gates + i, count),
                    load_first(gate_up, ups + i, count),
                )
            if is_clamped:
                gate = smaller(every(limit), gate)
                up = larger(every(-limit), smaller(every(limit), up)) + every(offset)
            exponent = gate * every(slope)
            if cubic != ZERO:
                exponent = exponent + gate * gate * gate * every(cubic)
            gated = gate / (every(ONE) + exp2(exponent)) * up
            if count >= WIDTH:
                store(out, to + i, gated)
            else:
                store_first(out, to + i, gated, count)


@kernel
def sigmoid_mul(
    first: int,
    end: int,
    x: Numbers,  # [num_rows, count]
    gates: Numbers,  # [num_rows, …]
    stride_gates: int,
    count: int,
    out: Numbers,  # [num_rows, count]
) -> None:
    for row in range(first, end):
        at = row * count
        gate_at = row * stride_gates
        for i in range(0, count, WIDTH):
            left = count - i
            power = exp2(load_first(gates, gate_at + i, left) * every(MINUS_LOG2_E))
            store_first(
                out, at + i, load_first(x, at + i, left) / (every(ONE) + power), left
            )


@kernel
def soft_cap(
    first: int, end: int, x: Floats, stride: int, count: int, factor: float, cap: float
) -> None:
    """Replace the first `count` numbers of each row, `stride` apart: cap - 2 cap / (1 + 2**…)."""
    for row in range(first, end):
        for i in range(0, count, WIDTH):
            at = row * stride + i
            left = count - i
            power = exp2(load_first(x, at, left) * every(factor))
            store_first(
                x, at, every(cap) - every(TWO * cap) / (every(ONE) + power), left
            )


@kernel
def rope_and_store(
    first: int,
    end: int,
    qkv: Numbers,  # [num_tokens, num_heads + planes * kv_heads, head_dim]
    num_heads: int,
    kv_heads: int,
    planes: int,  # 2: keys and values; 1: keys, which are the values too
    head_dim: int,
    plain: int,  # numbers of a head before those that are rotated
    positions: Int64s,
    cos_sin: Floats,  # [max_position, head_dim - plain]: the cosines, then the sines
    slots: Int64s,
    norms: Floats,  # [num_heads + kv_heads, head_dim]
    has_norms: int,
    eps: float,
    pool: Numbers,  # of one layer
    block_size: int,
    stride_block: int,
    stride_head: int,
    q: Numbers,  # [num_tokens, num_heads, head_dim]
) -> None:
    half = (head_dim - plain) // 2
    for token in range(first, end):
        angles = positions[token] * 2 * half
        slot = slots[token]  # below 0: the pool has its keys and values already
        num_stored = kv_heads if slot >= 0 else 0
        place = slot // block_size * stride_block + slot % block_size * head_dim
        row = token * (num_heads + planes * kv_heads) * head_dim
        for head in range(num_heads + num_stored):
            source = shift(qkv, row + head * head_dim)
            if head < num_heads:
                target = shift(q, (token * num_heads + head) * head_dim)
            else:
                target = shift(pool, place + (head - num_heads) * stride_head)
            inverse = every(ONE)
            if has_norms:
                inverse = _inverse_norm(source, head_dim, eps)
            for i in range(plain):
                target[i] = source[i]
            source = shift(source, plain)
            target = shift(target, plain)
            for i in range(0, half, WIDTH):
                count = half - i
                low = load_first(source, i, count)
                high = load_first(source, half + i, count)
                if has_norms:
                    weights = head * head_dim + i
                    low = low * inverse * load_first(norms, weights, count)
                    high = high * inverse * load_first(norms, weights + half, count)
                cos = load_first(cos_sin, angles + i, count)
                sin = load_first(cos_sin, angles + half + i, count)
                store_first(target, i, low * cos - high * sin, count)
                store_first(target, half + i, high * cos + low * sin, count)
        for head in range((planes - 1) * num_stored):
            source = shift(qkv, row + (num_heads + kv_heads + head) * head_dim)
            target = shift(pool, place + head * stride_head + block_size * head_dim)
            for i in range(head_dim):
                target[i] = source[i]
