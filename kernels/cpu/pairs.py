"""Pairs of bf16 numbers for the compiled CPU kernels, on CPUs with AVX512-BF16.

A word holds a pair: two neighbouring terms of a sum. One instruction adds the products of 16 pairs
to 16 fp32 sums. It treats numbers below 2**-126 as 0, and the CPU decides how it rounds between the
two terms. A sum still takes its pairs one after the other.
"""

# ruff: noqa: ARG001  (numba asks for the parameters of `intrinsic` functions)

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from baton.kernels.constants import WIDTH
from baton.kernels.cpu.vectors import (
    FLOATS,
    HALF,
    HALVES,
    INT32,
    INT64,
    LANES,
    NOTHING,
    WORDS,
    call,
    instruction,
    place,
    power,
    widened,
)

# A polynomial like `EXP2`, within 3e-6, which is enough for a weight that is rounded to bf16.
SHORT_EXP2 = (
    0.009582853876054287,
    0.055906426161527634,
    0.24024099111557007,
    0.6931241750717163,
)


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's type bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BFLOATS = ir.VectorType(_BFloat(), WIDTH)
PAIRS = ir.VectorType(_BFloat(), 2 * WIDTH)
ROWS = ir.VectorType(HALF, 2 * WIDTH)


def dotted(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """Return `c` plus the products of the pairs in the words of `a` and `b`."""
    pairs = [builder.bitcast(words, PAIRS) for words in (a, b)]
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, c, *pairs)


def dotted_bytes(
    builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value
) -> ir.Value:
    """Return the integers `c` plus the products of the four bytes in each word; those of `a` have
    no sign."""
    return call(builder, "llvm.x86.avx512.vpdpbusd.512", WORDS, c, a, b)


@intrinsic
def as_words(context: object, pointer: types.Type) -> object:
    """Return the same memory as words."""
    return _as(pointer, types.int32)


@intrinsic
def as_halves(context: object, pointer: types.Type) -> object:
    """Return the same memory as bf16 numbers."""
    return _as(pointer, types.uint16)


def _as(pointer: types.Type, element: types.Type) -> object:
    signature = types.CPointer(element)(pointer)
    return signature, lambda context, builder, sign, args: builder.bitcast(
        args[0], context.get_value_type(sign.return_type)
    )


@intrinsic
def weight(context: object, x: types.Type) -> object:
    """Return 2**x for x up to 128, as closely as bf16 needs."""
    return instruction(
        LANES(LANES), lambda builder, lanes: power(builder, lanes, SHORT_EXP2)
    )


@intrinsic
def store_halves(
    context: object, target: types.Type, index: types.Type, lanes: types.Type
) -> object:
    """Store the nearest bf16 numbers, ties to even, and return them."""

    def emit(
        builder: ir.IRBuilder, target: ir.Value, index: ir.Value, lanes: ir.Value
    ) -> ir.Value:
        rounded = call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", BFLOATS, lanes)
        halves = builder.bitcast(rounded, HALVES)
        builder.store(halves, place(builder, target, index, HALF), align=2)
        return widened(builder, halves)

    return instruction(LANES(target, types.int64, LANES), emit)


@intrinsic
def interleave(
    context: object,
    target: types.Type,
    rows: types.Type,
    index: types.Type,
    stride: types.Type,
    count: types.Type,
) -> object:
    """Make 32 words of the 64 bytes from `index` on of two rows, `stride` apart.

    Where `count` is 1, zeros take the place of the second row.
    """

    def emit(
        builder: ir.IRBuilder,
        target: ir.Value,
        rows: ir.Value,
        index: ir.Value,
        stride: ir.Value,
        count: ir.Value,
    ) -> ir.Value:
        first = builder.load(place(builder, rows, index, HALF), align=2, typ=ROWS)
        at = place(builder, rows, builder.add(index, stride), HALF)
        second = builder.load(at, align=2, typ=ROWS)
        is_alone = builder.icmp_signed("==", count, INT64(1))
        second = builder.select(is_alone, ir.Constant(ROWS, None), second)
        for half in range(2):
            lanes = [i + 2 * WIDTH * row for i in range(WIDTH) for row in range(2)]
            mask = [INT32(lane + half * WIDTH) for lane in lanes]
            mixed = builder.shuffle_vector(
                first, second, ir.Constant(ir.VectorType(INT32, 2 * WIDTH), mask)
            )
            at = place(builder, target, INT64(half * WIDTH), INT32)
            builder.store(builder.bitcast(mixed, WORDS), at, align=4)
        return NOTHING

    return instruction(
        types.none(target, rows, types.int64, types.int64, types.int64), emit
    )
