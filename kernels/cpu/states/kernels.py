"""The kernels of layers that keep a state: convolutions, gates, recurrences and gated norms.

A recurrence goes token by token, in prompts as in decode steps, and its sums take their terms in
one order. So the bits of a token do not depend on how a sequence was cut into chunks, on the batch,
or on where its state was kept. A state is read and written in the blocks of the pool that hold it.
"""

# ruff: noqa: PLR0913, PLR0915, PLR0917  (the arguments are pointers; a strip is written out)

from __future__ import annotations

import numpy as np

from baton.kernels.constants import STRIP, WIDTH
from baton.kernels.cpu.rows import MINUS_LOG2_E, ONE, ZERO
from baton.kernels.cpu.vectors import (
    Floats,
    Int32s,
    Int64s,
    Numbers,
    every,
    exp2,
    fma,
    inlined,
    kernel,
    larger,
    load,
    load_first,
    log_of_rest,
    root,
    shift,
    smaller,
    store,
    store_first,
    total,
)

# Of an item: first row, tokens, first position, start of its blocks, how many of the first tokens
# the state has already, and how many of the last it does not keep.
FIELDS = 6


@inlined
def sigmoid(x: object) -> object:
    return every(ONE) / (every(ONE) + exp2(x * every(MINUS_LOG2_E)))


@kernel
def copy_part(
    flat: Floats,
    blocks: Floats,
    table: Int32s,
    offset: int,
    size: int,
    part: int,
    stride: int,
    is_stored: int,
) -> None:
    """Copy numbers `offset:offset + size` of a group's parts to `flat`, or back from it."""
    done = 0
    while done < size:
        at = offset + done
        count = min(part - at % part, size - done)
        place = shift(blocks, table[at // part] * stride + at % part)
        for i in range(count):
            if is_stored:
                place[i] = flat[done + i]
            else:
                flat[done + i] = place[i]
        done += count


@kernel
def convolve(
    first_unit: int,  # item * groups + group
    end_unit: int,
    scratch: Numbers,  # [taps, channels]
    x: Numbers,  # [num_tokens, at least groups * channels]
    stride_x: int,
    weight: Floats,  # [groups, taps, channels]
    bias: Floats,  # [groups, channels]
    has_bias: int,
    activates: int,
    pool: Numbers,
    tables: Int32s,
    items: Int64s,  # [num_items, FIELDS]
    groups: int,
    channels: int,
    taps: int,
    # Of the last inputs; this and the next three count numbers of the model's dtype.
    offset: int,
    part: int,
    stride_part: int,
    stride_block: int,
    out: Floats,  # [num_tokens, groups * channels]
) -> None:
    """Convolve each channel with its last inputs, and keep the inputs by position modulo `taps`.

    A token that is computed once more finds the inputs before it, and writes its own again; one
    that the state will not keep writes nothing.
    """
    size = taps * channels
    for unit in range(first_unit, end_unit):
        item = unit // groups * FIELDS
        group = unit % groups
        row = items[item]
        length = items[item + 1]
        num_kept = length - items[item + 5]
        position = items[item + 2]
        blocks = shift(pool, group * stride_part)
        table = shift(tables, items[item + 3])
        copy_part(scratch, blocks, table, offset, size, part, stride_block, 0)
        source = shift(x, row * stride_x + group * channels)
        target = shift(out, (row * groups + group) * channels)
        own = shift(weight, group * size)
        for token in range(length):
            for c in range(0, channels, WIDTH):
                count = channels - c
                value = every(ZERO)
                if has_bias:
                    value = load_first(bias, group * channels + c, count)
                for tap in range(taps):
                    at = token - taps + 1 + tap
                    if at >= 0:
                        number = load_first(source, at * stride_x + c, count)
                    elif position + at >= 0:
                        number = load_first(
                            scratch, (position + at) % taps * channels + c, count
                        )
                    else:
                        number = every(ZERO)
                    value = fma(
                        number, load_first(own, tap * channels + c, count), value
                    )
                if activates:
                    value = value * sigmoid(value)
                store_first(target, token * groups * channels + c, value, count)
        for token in range(max(num_kept - taps, 0), num_kept):
            kept = shift(scratch, (position + token) % taps * channels)
            for c in range(channels):
                kept[c] = source[token * stride_x + c]
        copy_part(scratch, blocks, table, offset, size, part, stride_block, 1)


@kernel
def gate_steps(
    first: int,
    end: int,
    x: Numbers,  # [num_tokens, …]: from `to_steps` on a number for each head
    stride_x: int,
    to_steps: int,
    to_betas: int,  # the same; -1: a head's step is its beta
    heads: int,
    factors: Floats,  # [heads]: of the step in a power of two
    biases: Floats,  # [heads]
    least: float,
    most: float,
    decays: Floats,  # [num_tokens, heads]
    betas: Floats,  # [num_tokens, heads]
) -> None:
    """Compute steps `softplus(x + bias)`, how much of a state they leave, and what they add."""
    for row in range(first, end):
        for h in range(0, heads, WIDTH):
            count = heads - h
            to = row * heads + h
            raw = load_first(x, row * stride_x + to_steps + h, count)
            raw = raw + load_first(biases, h, count)
            size = larger(raw, every(ZERO) - raw)
            power = exp2(size * every(MINUS_LOG2_E))
            step = larger(raw, every(ZERO)) + log_of_rest(power / (every(ONE) + power))
            step = smaller(larger(step, every(least)), every(most))
            store_first(decays, to, exp2(step * load_first(factors, h, count)), count)
            if to_betas >= 0:
                step = sigmoid(load_first(x, row * stride_x + to_betas + h, count))
            store_first(betas, to, step, count)


@kernel
def advance_states(
    first_unit: int,  # item * heads + head
    end_unit: int,
    scratch: Floats,  # five rows of keys, and a strip
    # [num_tokens, width]: groups of queries, keys and values, each of all its heads.
    x: Floats,
    width: int,
    to_queries: int,
    to_keys: int,
    to_values: int,
    heads: int,
    group_heads: int,
    key_heads: int,  # of a group
    key_dim: int,
    value_dim: int,
    strips: int,  # of a matrix
    is_normed: int,  # queries and keys have a length of 1
    scale: float,  # of queries
    # A step adds what the state lacks of a value, and not the value itself.
    corrects: int,
    # [num_tokens, heads], or [num_tokens, heads, key_dim] if they are `by_key`.
    decays: Floats,
    by_key: int,
    betas: Floats,  # [num_tokens, heads]
    skips: Floats,  # [heads]: how much of a value goes past the state
    has_skips: int,
    pool: Floats,
    tables: Int32s,
    items: Int64s,  # [num_items, FIELDS]
    offsets: Int64s,  # [group_heads, strips]; in floats, as the next three
    part: int,
    stride_part: int,
    stride_block: int,
    out: Floats,  # [num_tokens, heads * value_dim]
) -> None:
    """Let each head's matrix go through the tokens of each item, and read it after each token.

    The pool keeps the matrix without the last tokens, if these are guesses.
    A matrix S becomes `decay * S + key ⊗ delta`, with `delta = beta * value`, or, if it `corrects`,
    `beta * (value - key (decay * S))`. The result is `query S + skip * value`.
    """
    padded = -(-key_dim // WIDTH) * WIDTH
    flat = shift(scratch, 5 * padded)
    num_decays = key_dim if by_key else 1
    size = key_dim * STRIP
    groups = heads // group_heads
    for unit in range(first_unit, end_unit):
        item = unit // heads * FIELDS
        head = unit % heads
        group = head // group_heads
        own = head % group_heads
        row = items[item]
        length = items[item + 1]
        position = items[item + 2]
        table = shift(tables, items[item + 3])
        num_held = items[item + 4]
        num_kept = length - items[item + 5]
        blocks = shift(pool, group * stride_part)
        key_head = own * key_heads // group_heads
        start = shift(x, row * width + group * (width // groups))
        queries = shift(start, to_queries + key_head * key_dim)
        keys = shift(start, to_keys + key_head * key_dim)
        values = shift(start, to_values + own * value_dim)
        skip = skips[head] if has_skips else ZERO
        gates = row * heads + head
        target = shift(out, gates * value_dim)
        for strip in range(strips):
            offset = offsets[own * strips + strip]
            # A guess may be wrong, so the matrix after it is not that of the pool.
            is_in_place = num_kept == length and offset % part + size <= part
            matrix = flat
            if is_in_place:
                matrix = shift(
                    blocks, table[offset // part] * stride_block + offset % part
                )
            elif position + num_held > 0:
                copy_part(flat, blocks, table, offset, size, part, stride_block, 0)
            if position + num_held == 0:
                for i in range(0, size, WIDTH):
                    store(matrix, i, every(ZERO))
            first = 0
            while first < length:
                end = num_kept if first < num_kept else length
                _advance_strip(
                    scratch,
                    padded,
                    shift(queries, first * width),
                    shift(keys, first * width),
                    shift(values, first * width),
                    width,
                    end - first,
                    num_held - first,
                    key_dim,
                    value_dim,
                    is_normed,
                    scale,
                    corrects,
                    shift(decays, (gates + first * heads) * num_decays),
                    by_key,
                    shift(betas, gates + first * heads),
                    heads,
                    skip,
                    matrix,
                    strip * STRIP,
                    shift(target, first * heads * value_dim),
                )
                if end == num_kept and not is_in_place:
                    copy_part(flat, blocks, table, offset, size, part, stride_block, 1)
                first = end


@kernel
def _take(
    target: Floats, source: Floats, at: int, count: int, is_normed: int, scale: float
) -> None:
    """Copy a head's query or key, times `scale`, and divided by its length if `is_normed`."""
    factor = every(scale)
    if is_normed:
        squares = every(ZERO)
        for i in range(0, count, WIDTH):
            numbers = load_first(source, at + i, count - i)
            squares = fma(numbers, numbers, squares)
        factor = factor / root(every(total(squares) + np.float32(1e-6)))
    for i in range(0, count, WIDTH):
        store(target, i, load_first(source, at + i, count - i) * factor)


@kernel
def _multiply(
    target: Floats, source: Floats, factors: Floats, at: int, count: int
) -> None:
    for i in range(0, count, WIDTH):
        factor = load_first(factors, at + i, count - i)
        store(target, i, load_first(source, i, count - i) * factor)


@kernel
def _advance_strip(
    scratch: Floats,
    padded: int,
    queries: Floats,
    keys: Floats,
    values: Floats,
    width: int,
    length: int,
    num_held: int,
    key_dim: int,
    value_dim: int,
    is_normed: int,
    scale: float,
    corrects: int,
    decays: Floats,
    by_key: int,
    betas: Floats,
    heads: int,
    skip: float,
    matrix: Floats,
    column: int,
    out: Floats,
) -> None:
    """Advance 64 columns of a matrix, `[key_dim, 64]`.

    One pass over the matrix makes it that of a token, multiplies it by the query, and by the next
    token's key, which is times that token's decays if they are `by_key`.
    """
    query = scratch
    key = shift(scratch, padded)
    later = shift(scratch, 2 * padded)
    decayed = shift(scratch, 3 * padded)
    lasting = shift(scratch, 4 * padded)
    # From a token's decays to the next token's.
    step = heads * key_dim if by_key else heads
    one = column + WIDTH
    two = column + 2 * WIDTH
    three = column + 3 * WIDTH
    _take(key, keys, 0, key_dim, is_normed, ONE)
    known_key = key
    if by_key:
        _multiply(decayed, key, decays, 0, key_dim)
        known_key = decayed
    known_0 = every(ZERO)
    known_1 = every(ZERO)
    known_2 = every(ZERO)
    known_3 = every(ZERO)
    for r in range(key_dim):
        at = r * STRIP
        factor = every(known_key[r])
        known_0 = fma(load(matrix, at), factor, known_0)
        known_1 = fma(load(matrix, at + WIDTH), factor, known_1)
        known_2 = fma(load(matrix, at + 2 * WIDTH), factor, known_2)
        known_3 = fma(load(matrix, at + 3 * WIDTH), factor, known_3)
    for token in range(length):
        _take(query, queries, token * width, key_dim, is_normed, scale)
        next_token = min(token + 1, length - 1)
        _take(later, keys, next_token * width, key_dim, is_normed, ONE)
        decay = every(decays[token * step])
        beta = every(betas[token * heads])
        known_key = later
        if by_key:
            for i in range(key_dim):
                lasting[i] = decays[token * step + i] if token >= num_held else ONE
            _multiply(decayed, later, decays, next_token * step, key_dim)
            known_key = decayed
            decay = every(ONE)
        at = token * width
        value_0 = load_first(values, at + column, value_dim - column)
        value_1 = load_first(values, at + one, value_dim - one)
        value_2 = load_first(values, at + two, value_dim - two)
        value_3 = load_first(values, at + three, value_dim - three)
        delta_0, delta_1, delta_2, delta_3 = (
            value_0 * beta,
            value_1 * beta,
            value_2 * beta,
            value_3 * beta,
        )
        if corrects:
            delta_0 = (value_0 - decay * known_0) * beta
            delta_1 = (value_1 - decay * known_1) * beta
            delta_2 = (value_2 - decay * known_2) * beta
            delta_3 = (value_3 - decay * known_3) * beta
        if token < num_held:
            decay = every(ONE)
            delta_0 = every(ZERO)
            delta_1 = every(ZERO)
            delta_2 = every(ZERO)
            delta_3 = every(ZERO)
        known_0 = every(ZERO)
        known_1 = every(ZERO)
        known_2 = every(ZERO)
        known_3 = every(ZERO)
        result_0 = every(ZERO)
        result_1 = every(ZERO)
        result_2 = every(ZERO)
        result_3 = every(ZERO)
        for r in range(key_dim):
            at = r * STRIP
            factor = every(key[r])
            read = every(query[r])
            later_read = every(known_key[r])
            if by_key:
                decay = every(lasting[r])
            state_0 = fma(factor, delta_0, load(matrix, at) * decay)
            state_1 = fma(factor, delta_1, load(matrix, at + WIDTH) * decay)
            state_2 = fma(factor, delta_2, load(matrix, at + 2 * WIDTH) * decay)
            state_3 = fma(factor, delta_3, load(matrix, at + 3 * WIDTH) * decay)
            store(matrix, at, state_0)
            store(matrix, at + WIDTH, state_1)
            store(matrix, at + 2 * WIDTH, state_2)
            store(matrix, at + 3 * WIDTH, state_3)
            result_0 = fma(state_0, read, result_0)
            known_0 = fma(state_0, later_read, known_0)
            result_1 = fma(state_1, read, result_1)
            known_1 = fma(state_1, later_read, known_1)
            result_2 = fma(state_2, read, result_2)
            known_2 = fma(state_2, later_read, known_2)
            result_3 = fma(state_3, read, result_3)
            known_3 = fma(state_3, later_read, known_3)
        to = token * heads * value_dim
        past = every(skip)
        store_first(out, to + column, fma(past, value_0, result_0), value_dim - column)
        store_first(out, to + one, fma(past, value_1, result_1), value_dim - one)
        store_first(out, to + two, fma(past, value_2, result_2), value_dim - two)
        store_first(out, to + three, fma(past, value_3, result_3), value_dim - three)
        key, later = later, key


@kernel
def gated_norm(
    first: int,
    end: int,
    x: Floats,  # [num_rows, num_norms * size]; changed if `gates_first`
    gates: Numbers,  # [num_rows, …]: from `to_gates` on a number for each of `x`
    stride_gates: int,
    to_gates: int,
    num_norms: int,
    size: int,
    weight: Floats,  # [num_norms * size]
    eps: float,
    gates_first: int,
    by_sigmoid: int,  # gates are sigmoids, and not SiLUs
    out: Numbers,  # [num_rows, num_norms * size]
) -> None:
    """RMS norms of neighbouring numbers, gated after the norm, or before it by SiLUs."""
    for row in range(first, end):
        for norm in range(num_norms):
            start = norm * size
            at = row * num_norms * size + start
            gate_at = row * stride_gates + to_gates + start
            squares = every(ZERO)
            for i in range(0, size, WIDTH):
                count = size - i
                number = load_first(x, at + i, count)
                if gates_first:
                    gate = load_first(gates, gate_at + i, count)
                    number = number * (gate * sigmoid(gate))
                    store_first(x, at + i, number, count)
                squares = fma(number, number, squares)
            mean = total(squares) / np.float32(size)
            inverse = every(ONE) / root(every(mean + eps))
            for i in range(0, size, WIDTH):
                count = size - i
                number = load_first(x, at + i, count) * inverse
                number = number * load_first(weight, start + i, count)
                if not gates_first:
                    gate = load_first(gates, gate_at + i, count)
                    share = sigmoid(gate)
                    number = number * (share if by_sigmoid else gate * share)
                store_first(out, at + i, number, count)
