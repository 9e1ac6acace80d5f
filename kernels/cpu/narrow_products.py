"""Products with weights of four bits for the compiled CPU kernels, on CPUs with AVX512-BF16.

A tile of a weight is widened to bf16, which holds its integers exactly, in memory that stays in a
core's cache. The sum over the inputs that share a scale is multiplied by it, one group after the
other, so neither the number of rows nor the size of a tile changes a bit.
"""

# ruff: noqa: ARG001, PLR0913, PLR0917  (numba's parameters; pointers)

from __future__ import annotations

import struct
from collections.abc import Iterable

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from baton.kernels.constants import DEPTH, FEW, NARROW_DEPTH, PANEL, SHEET, WIDTH
from baton.kernels.cpu.pairs import ROWS, as_words
from baton.kernels.cpu.products import add_product, give_results, set_product
from baton.kernels.cpu.vectors import (
    INT32,
    INT64,
    NOTHING,
    Floats,
    Int32s,
    Numbers,
    call,
    fma,
    inlined,
    instruction,
    kernel,
    load,
    place,
    prefetch,
    shift,
    store,
)

AHEAD = 256  # words


def _halves(numbers: Iterable[float]) -> list[int]:
    """Return the bits of numbers that bf16 holds."""
    return [
        struct.unpack("<I", struct.pack("<f", number))[0] >> 16 for number in numbers
    ]


# By the lowest five bits of a difference of two numbers below 16.
DIFFERENCES = ir.Constant(ROWS, _halves([*range(16), *range(-16, 0)]))
AHEAD = 512  # words of codes that are on their way to the cache


@intrinsic
def _widen(
    context: object,
    tile: types.Type,
    at: types.Type,
    codes: types.Type,
    index: types.Type,
    zeros: types.Type,
    zero_at: types.Type,
) -> object:
    """Widen 16 words, each of four pairs of inputs of an output."""

    def emit(
        builder: ir.IRBuilder,
        tile: ir.Value,
        at: ir.Value,
        codes: ir.Value,
        index: ir.Value,
        zeros: ir.Value,
        zero_at: ir.Value,
    ) -> ir.Value:
        words = builder.load(place(builder, codes, index, INT32), align=4, typ=ROWS)
        zero = builder.load(place(builder, zeros, zero_at, INT32), align=4, typ=ROWS)
        for pair in range(4):
            number = builder.lshr(words, ir.Constant(ROWS, [4 * pair] * 2 * WIDTH))
            number = builder.and_(number, ir.Constant(ROWS, [15] * 2 * WIDTH))
            # The instruction looks at five bits.
            difference = builder.sub(number, zero)
            name = "llvm.x86.avx512.permvar.hi.512"
            widened = call(builder, name, ROWS, DIFFERENCES, difference)
            to = place(builder, tile, builder.add(at, INT64(pair * PANEL)), INT32)
            builder.store(widened, to, align=4)
        return NOTHING

    n = types.int64
    return instruction(types.none(tile, n, codes, n, zeros, n), emit)


@inlined
def _widen_tile(
    tile: Int32s, codes: Int32s, zeros: Int32s, first: int, end: int
) -> None:
    """Write the words of the pairs `first:end` of a panel, `[end - first, PANEL]`."""
    for pair in range(first, end, 4):
        for i in range(0, PANEL, WIDTH):
            index = pair // 4 * PANEL + i
            prefetch(codes, index + AHEAD)
            _widen(tile, (pair - first) * PANEL + i, codes, index, zeros, i)


@inlined
def _add_group(
    sums: Floats, part: Floats, count: int, scales: Floats, is_first: int
) -> None:
    for i in range(0, PANEL, WIDTH):
        scale = load(scales, i)
        for at in range(i, count * PANEL, PANEL):
            lanes = (
                load(part, at) * scale
                if is_first
                else fma(load(part, at), scale, load(sums, at))
            )
            store(sums, at, lanes)


@kernel
def multiply_narrow(
    first_row: int,
    end_row: int,
    first_panel: int,
    end_panel: int,
    sums: Floats,  # twice SHEET * PANEL of them, then memory for DEPTH * PANEL words
    x: Int32s,  # [num_rows, pairs]
    codes: Int32s,  # [num_panels, inputs / 8, PANEL]
    scales: Floats,  # [num_panels, num_groups, PANEL]
    zeros: Int32s,  # as `scales`, with a zero point in both halves of a word
    group: int,  # pairs of inputs that share a scale
    bias: Numbers,  # [outputs]
    has_bias: int,
    pairs: int,
    outputs: int,
    out: Numbers,  # [num_rows, outputs]
) -> None:
    part = shift(sums, SHEET * PANEL)
    tile = as_words(shift(sums, 2 * SHEET * PANEL))
    panel_words = pairs * PANEL // 4
    num_groups = (pairs + group - 1) // group
    for panel in range(first_panel, end_panel):
        of_panel = shift(codes, panel * panel_words)
        for top in range(first_row, end_row, SHEET):
            count = min(SHEET, end_row - top)
            most = DEPTH if count > FEW else NARROW_DEPTH
            for number in range(num_groups):
                grid = (panel * num_groups + number) * PANEL
                start = number * group
                stop = min((number + 1) * group, pairs)
                for first in range(start, stop, most):
                    end = min(first + most, stop)
                    rows = shift(x, top * pairs + first)
                    _widen_tile(tile, of_panel, shift(zeros, grid), first, end)
                    depth = end - first
                    if first == start:
                        set_product(
                            part,
                            PANEL,
                            rows,
                            pairs,
                            count,
                            tile,
                            PANEL,
                            WIDTH,
                            PANEL,
                            depth,
                        )
                    else:
                        add_product(
                            part,
                            PANEL,
                            rows,
                            pairs,
                            count,
                            tile,
                            PANEL,
                            WIDTH,
                            PANEL,
                            depth,
                        )
                _add_group(sums, part, count, shift(scales, grid), number == 0)
            give_results(sums, count, bias, has_bias, panel * PANEL, outputs, out, top)
