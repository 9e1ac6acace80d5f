"""FP8 pools for the compiled CPU kernels: rows become e4m3 codes where they are stored, and numbers
of the model's dtype, exactly, where attention unpacks a tile. `reference.to_fp8` has the format.
"""

# ruff: noqa: ARG001, PLR0913, PLR0917  (numba's parameters; pointers and strides)

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from baton.kernels.constants import FP8_SPAN, LEAST_EXPONENT, MOST_EXPONENT, TILE, WIDTH
from baton.kernels.cpu import attention as cpu_attention
from baton.kernels.cpu import pair_attention as cpu_pair_attention
from baton.kernels.cpu.attention import attention, row_floats
from baton.kernels.cpu.pair_attention import LINE
from baton.kernels.cpu.pairs import as_words, interleave, store_halves
from baton.kernels.cpu.products import transpose
from baton.kernels.cpu.vectors import (
    BYTE,
    FLOATS,
    INT32,
    LANES,
    NOTHING,
    WORDS,
    Floats,
    Int32s,
    Int64s,
    Numbers,
    Pooled,
    below,
    call,
    constant,
    every,
    inlined,
    instruction,
    kernel,
    larger,
    largest,
    load_first,
    per_line,
    place,
    prefetch,
    shift,
    store,
    total,
)

ZERO = np.float32(0)
BYTES = ir.VectorType(BYTE, WIDTH)
SHORTS = ir.VectorType(ir.IntType(16), WIDTH)
FP16S = ir.VectorType(ir.HalfType(), WIDTH)
LINE_BYTES = 64


@intrinsic
def _exponent(context: object, top: types.Type) -> object:
    """Return the exponent of a row whose largest number is `top`; of NaN and infinity 255."""

    def emit(builder: ir.IRBuilder, top: ir.Value) -> ir.Value:
        bits = builder.and_(builder.bitcast(top, INT32), INT32(0x7FFFFFFF))
        rounded = builder.add(builder.lshr(bits, INT32(20)), INT32(2))
        found = builder.sub(builder.lshr(rounded, INT32(3)), INT32(FP8_SPAN))
        is_small = builder.icmp_signed("<", found, INT32(LEAST_EXPONENT))
        is_large = builder.icmp_signed(">", found, INT32(MOST_EXPONENT))
        found = builder.select(is_small, INT32(LEAST_EXPONENT), found)
        return builder.select(is_large, INT32(255), found)

    return instruction(types.int32(types.float32), emit)


@intrinsic
def _power(context: object, exponent: types.Type) -> object:
    """Return the float with these exponent bits; from 255 on infinity, and below 0 zero."""

    def emit(builder: ir.IRBuilder, exponent: ir.Value) -> ir.Value:
        bits = builder.select(
            builder.icmp_signed(">", exponent, INT32(255)), INT32(255), exponent
        )
        bits = builder.select(builder.icmp_signed("<", bits, INT32(0)), INT32(0), bits)
        return builder.bitcast(builder.shl(bits, INT32(23)), ir.FloatType())

    return instruction(types.float32(types.int32), emit)


@intrinsic
def _store_codes(
    context: object,
    target: types.Type,
    index: types.Type,
    lanes: types.Type,
    count: types.Type,
) -> object:
    """Store the nearest e4m3 numbers, ties to even, of the first `count` lanes, up to 448."""

    def emit(
        builder: ir.IRBuilder,
        target: ir.Value,
        index: ir.Value,
        lanes: ir.Value,
        count: ir.Value,
    ) -> ir.Value:
        words = builder.bitcast(lanes, WORDS)
        size = builder.and_(words, constant(WORDS, 0x7FFFFFFF))
        odd = builder.and_(builder.lshr(size, constant(WORDS, 20)), constant(WORDS, 1))
        rounded = builder.add(size, builder.add(odd, constant(WORDS, 0x7FFFF)))
        normal = builder.sub(
            builder.lshr(rounded, constant(WORDS, 20)), constant(WORDS, 120 << 3)
        )
        # Below 2**-6, steps have one length, 2**-9, which is that of floats from 2**14 on.
        shifted = builder.fadd(builder.bitcast(size, FLOATS), constant(FLOATS, 2.0**14))
        small = builder.sub(builder.bitcast(shifted, WORDS), constant(WORDS, 141 << 23))
        is_small = builder.icmp_signed("<", size, constant(WORDS, 121 << 23))
        code = builder.select(is_small, small, normal)
        sign = builder.lshr(
            builder.and_(words, constant(WORDS, 0x80000000)), constant(WORDS, 24)
        )
        value = builder.trunc(builder.or_(code, sign), BYTES)
        at = place(builder, target, index, BYTE)
        name = "llvm.masked.store.v16i8.p0"
        call(builder, name, ir.VoidType(), value, at, INT32(1), below(builder, count))
        return NOTHING

    return instruction(types.none(target, types.int64, LANES, types.int64), emit)


@intrinsic
def _load_codes(
    context: object,
    pointer: types.Type,
    index: types.Type,
    count: types.Type,
    factor: types.Type,
) -> object:
    """Return the first `count` of 16 codes as numbers, times `factor / 256`."""

    def emit(
        builder: ir.IRBuilder,
        pointer: ir.Value,
        index: ir.Value,
        count: ir.Value,
        factor: ir.Value,
    ) -> ir.Value:
        at = place(builder, pointer, index, BYTE)
        name = "llvm.masked.load.v16i8.p0"
        zero = ir.Constant(BYTES, None)
        codes = call(builder, name, BYTES, at, INT32(1), below(builder, count), zero)
        # fp16 has the same fields and eight more powers of 2.
        wide = builder.shl(builder.sext(codes, SHORTS), constant(SHORTS, 7))
        halves = builder.bitcast(builder.and_(wide, constant(SHORTS, 0xBFFF)), FP16S)
        return builder.fmul(builder.fpext(halves, FLOATS), factor)

    return instruction(LANES(pointer, types.int64, types.int64, LANES), emit)


@inlined
def _factor(tile: Pooled, at: int) -> object:
    return every(_power(np.int32(tile[at]) + np.int32(8)))


@kernel
def store_fp8(
    first: int,
    end: int,
    rows: Numbers,  # [num_tokens, kv_heads, 2, head_dim]
    kv_heads: int,
    head_dim: int,
    slots: Int64s,
    pool: Pooled,  # of one layer
    block_size: int,
    stride_block: int,
    stride_head: int,
) -> None:
    """Store the keys and values of tokens."""
    for token in range(first, end):
        block = slots[token] // block_size
        slot = slots[token] % block_size
        num_rows = 2 * kv_heads if slots[token] >= 0 else 0
        for row in range(num_rows):
            source = shift(rows, (token * 2 * kv_heads + row) * head_dim)
            at = block * stride_block + row // 2 * stride_head
            tile = shift(pool, at + row % 2 * block_size * (head_dim + 1))
            most = every(ZERO)
            lost = every(ZERO)
            for d in range(0, head_dim, WIDTH):
                lanes = load_first(source, d, head_dim - d)
                most = larger(most, larger(lanes, every(ZERO) - lanes))
                lost = lost + lanes * every(ZERO)
            exponent = _exponent(largest(most) + total(lost))
            tile[block_size * head_dim + slot] = np.uint8(exponent)
            factor = every(_power(np.int32(254) - exponent))
            for d in range(0, head_dim, WIDTH):
                lanes = load_first(source, d, head_dim - d) * factor
                left = head_dim - d
                _store_codes(tile, slot * head_dim + d, lanes, left)


@inlined
def _prefetch_rows(
    pool: Pooled,
    table: Int32s,
    key: int,
    end: int,
    block_size: int,
    to_values: int,
    stride_block: int,
    head_dim: int,
) -> None:
    """Begin to load 16 rows of keys and of values, which one block holds."""
    if key < end and block_size % WIDTH == 0:
        at = table[key // block_size] * stride_block + key % block_size * head_dim
        for line in range(at, at + WIDTH * head_dim, LINE_BYTES):
            prefetch(pool, line)
            prefetch(pool, to_values + line)


@kernel
def _unpack(
    keys: Floats,
    values: Floats,
    staging: Numbers,
    pool: Pooled,
    table: Int32s,
    first: int,
    end: int,
    next_pool: Pooled,
    next_table: Int32s,
    next_first: int,
    next_end: int,
    block_size: int,
    to_values: int,
    stride_block: int,
    head_dim: int,
) -> None:
    """Do what `attention._unpack` does."""
    width = row_floats(head_dim)
    exponents = block_size * head_dim
    line = per_line(staging)
    for key in range(first, min(first + TILE, end), WIDTH):
        _prefetch_rows(
            next_pool,
            next_table,
            next_first + key - first,
            next_end,
            block_size,
            to_values,
            stride_block,
            head_dim,
        )
        for i in range(min(WIDTH, end - key)):
            tile = shift(pool, table[(key + i) // block_size] * stride_block)
            slot = (key + i) % block_size
            at = slot * head_dim
            of_key = _factor(tile, exponents + slot)
            of_value = _factor(tile, to_values + exponents + slot)
            row = shift(values, (key - first + i) * width)
            for d in range(0, head_dim, WIDTH):
                left = head_dim - d
                store(staging, i * width + d, _load_codes(tile, at + d, left, of_key))
                store(row, d, _load_codes(tile, to_values + at + d, left, of_value))
        columns = shift(keys, (key - first) * width)
        d = 0
        while d < width:
            transpose(shift(columns, d * WIDTH), staging, d, width)
            d += line


@kernel
def _unpack_pairs(
    keys: Floats,
    values: Floats,
    staging: Numbers,
    pool: Pooled,
    table: Int32s,
    first: int,
    end: int,
    next_pool: Pooled,
    next_table: Int32s,
    next_first: int,
    next_end: int,
    block_size: int,
    to_values: int,
    stride_block: int,
    head_dim: int,
) -> None:
    """Do what `cpu_pair_attention._unpack` does."""
    width = row_floats(head_dim)
    exponents = block_size * head_dim
    own_values = shift(staging, WIDTH * width)
    for key in range(first, min(first + TILE, end), WIDTH):
        count = min(WIDTH, end - key)
        _prefetch_rows(
            next_pool,
            next_table,
            next_first + key - first,
            next_end,
            block_size,
            to_values,
            stride_block,
            head_dim,
        )
        for i in range(count):
            tile = shift(pool, table[(key + i) // block_size] * stride_block)
            slot = (key + i) % block_size
            at = slot * head_dim
            of_key = _factor(tile, exponents + slot)
            of_value = _factor(tile, to_values + exponents + slot)
            for d in range(0, head_dim, WIDTH):
                to = i * width + d
                left = head_dim - d
                store_halves(staging, to, _load_codes(tile, at + d, left, of_key))
                store_halves(
                    own_values,
                    to,
                    _load_codes(tile, to_values + at + d, left, of_value),
                )
        pairs = shift(as_words(values), (key - first) // 2 * width)
        for i in range(0, count, 2):
            for d in range(0, width, LINE):
                to = i // 2 * width + d
                interleave(
                    shift(pairs, to), own_values, i * width + d, width, count - i
                )
        columns = shift(as_words(keys), (key - first) * (width // 2))
        for d in range(0, width, LINE):
            transpose(shift(columns, d // 2 * WIDTH), staging, d, width)


attend = attention(cpu_attention.take_queries, _unpack, cpu_attention.attend_tile)
attend_pairs = attention(
    cpu_pair_attention.take_queries, _unpack_pairs, cpu_pair_attention.attend_tile
)
