"""Products of eight-bit integers for the compiled CPU kernels, on CPUs with AVX512-VNNI.

A row of inputs is rounded to bytes by a scale of its own, and each output of a weight has a scale.
Products and sums are integers, so their order cannot change a bit. The instruction takes inputs
without a sign: they are stored with 128 added, whose share of each output is taken off its sum.
"""

# ruff: noqa: ARG001, PLR0913, PLR0917  (numba's parameters; pointers)

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from baton.kernels.constants import LARGEST_BYTE, PANEL, ROUNDER, SHEET, TINY, WIDTH
from baton.kernels.cpu.products import give_results, set_sums
from baton.kernels.cpu.vectors import (
    BYTE,
    FLOATS,
    INT32,
    LANES,
    NOTHING,
    WORDS,
    Floats,
    Int32s,
    Numbers,
    constant,
    every,
    instruction,
    kernel,
    larger,
    largest,
    load,
    place,
    shift,
    store,
    total,
)

BYTES = ir.VectorType(BYTE, WIDTH)


@intrinsic
def as_floats(context: object, pointer: types.Type) -> object:
    """Return the same memory as floats."""
    signature = types.CPointer(types.float32)(pointer)
    return signature, lambda context, builder, sign, args: builder.bitcast(
        args[0], context.get_value_type(sign.return_type)
    )


@intrinsic
def _store_bytes(
    context: object, target: types.Type, index: types.Type, lanes: types.Type
) -> object:
    """Store 128 plus the nearest integers, ties to even, of numbers from -128 to 127."""

    def emit(
        builder: ir.IRBuilder, target: ir.Value, index: ir.Value, lanes: ir.Value
    ) -> ir.Value:
        shifted = builder.fadd(lanes, constant(FLOATS, ROUNDER))
        whole = builder.add(builder.bitcast(shifted, WORDS), constant(WORDS, 128))
        at = place(builder, target, index, BYTE)
        builder.store(builder.trunc(whole, BYTES), at, align=1)
        return NOTHING

    return instruction(types.none(target, types.int64, LANES), emit)


@intrinsic
def _difference(
    context: object,
    left: types.Type,
    index: types.Type,
    right: types.Type,
    other: types.Type,
) -> object:
    """Return 16 differences of integers as floats."""

    def emit(builder: ir.IRBuilder, *args: ir.Value) -> ir.Value:
        words = [
            builder.load(place(builder, pointer, index, INT32), align=4, typ=WORDS)
            for pointer, index in (args[:2], args[2:])
        ]
        return builder.sitofp(builder.sub(*words), FLOATS)

    return instruction(LANES(left, types.int64, right, types.int64), emit)


@kernel
def round_rows(
    first_row: int,
    end_row: int,
    x: Numbers,  # [num_rows, inputs]
    inputs: int,  # a multiple of WIDTH
    out: Int32s,  # [num_rows, inputs / 4]
    scales: Floats,  # [num_rows]
) -> None:
    """Write each row as bytes and the number that a step between two of them stands for.

    That of a row with NaN or infinity is NaN, and so are all outputs of the row.
    """
    zero = every(0.0)
    for row in range(first_row, end_row):
        most = every(TINY)
        lost = zero
        for i in range(row * inputs, (row + 1) * inputs, WIDTH):
            lanes = load(x, i)
            most = larger(most, larger(lanes, zero - lanes))
            lost = lost + lanes * zero
        scale = largest(most) / LARGEST_BYTE
        for i in range(row * inputs, (row + 1) * inputs, WIDTH):
            _store_bytes(out, i, load(x, i) / every(scale))
        scales[row] = scale + total(lost)


@kernel
def multiply_bytes(
    first_row: int,
    end_row: int,
    first_panel: int,
    end_panel: int,
    sums: Int32s,  # SHEET * PANEL of them
    x: Int32s,  # [num_rows, words] of four inputs
    row_scales: Floats,  # [num_rows]
    weight: Int32s,  # [num_panels, words, PANEL]
    scales: Floats,  # [num_panels * PANEL]
    offsets: Int32s,  # [num_panels * PANEL]: 128 times the sum of an output's weights
    bias: Numbers,  # [outputs]
    has_bias: int,
    words: int,
    outputs: int,
    out: Numbers,  # [num_rows, outputs]
) -> None:
    for panel in range(first_panel, end_panel):
        columns = shift(weight, panel * words * PANEL)
        for top in range(first_row, end_row, SHEET):
            count = min(SHEET, end_row - top)
            set_sums(sums, shift(x, top * words), count, columns, words)
            floats = as_floats(sums)
            first = panel * PANEL
            for row in range(count):
                factor = every(row_scales[top + row])
                for i in range(0, PANEL, WIDTH):
                    lanes = _difference(sums, row * PANEL + i, offsets, first + i)
                    store(
                        floats,
                        row * PANEL + i,
                        lanes * factor * load(scales, first + i),
                    )
            give_results(floats, count, bias, has_bias, first, outputs, out, top)
