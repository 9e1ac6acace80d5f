"""Products of small matrices for the compiled CPU kernels, and the product of a linear layer.

The sums of a product stay in registers while its terms are added, and every sum takes its terms one
after the other, from the first on. So neither the number of rows that are computed at once nor the
registers of a CPU change a bit. The types of the sums and of the factors decide what a term is: a
float, a pair of bf16 numbers in a word (`cpu_pairs`), or four bytes in a word (`cpu_bytes`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from baton.kernels.constants import DEPTH, FEW, MAX_STRIP, PANEL, SHEET, WIDTH
from baton.kernels.cpu.pairs import dotted, dotted_bytes
from baton.kernels.cpu.vectors import (
    FEATURES,
    FLOAT,
    FLOATS,
    HALF,
    INT32,
    INT64,
    NOTHING,
    WORDS,
    Emit,
    Factors,
    Floats,
    Int32s,
    Numbers,
    Sums,
    constant,
    element_of,
    fused,
    instruction,
    kernel,
    load,
    load_first,
    place,
    shift,
    spread,
    store,
    store_first,
)

# ruff: noqa: ARG001, PLR0913, PLR0917  (numba's parameters; pointers and strides)


# The number of rows computed at once -> the number of vectors of sums per row that fit beside the
# factors, in 32 registers of 16 floats or in 16 registers of 8.
STRIPS = (
    {MAX_STRIP: 4, 4: 4, 2: 4, 1: 4}
    if FEATURES.get("avx512f")
    else {MAX_STRIP: 1, 4: 1, 2: 2, 1: 4}
)


class Terms(NamedTuple):
    """The operations on one type of factor: load one, load 16 side by side, and `a * b + c`."""

    one: ir.Type
    lanes: ir.Type
    sums: ir.Type
    multiply: Emit


# By the types of a sum and of a factor.
TERMS = {
    (FLOAT, FLOAT): Terms(FLOAT, FLOATS, FLOATS, fused),
    (FLOAT, INT32): Terms(INT32, WORDS, FLOATS, dotted),
    (INT32, INT32): Terms(INT32, WORDS, WORDS, dotted_bytes),
}


def _strip(num_rows: int, num_vectors: int, *, is_fresh: bool) -> Callable[..., None]:
    """Add a product of `num_rows` rows and `16 * num_vectors` columns, to zeros if it is fresh."""

    def emit(
        builder: ir.IRBuilder,
        terms: Terms,
        sums: ir.Value,
        sum_stride: ir.Value,
        rows: ir.Value,
        row_stride: ir.Value,
        columns: ir.Value,
        column_stride: ir.Value,
        vector_stride: ir.Value,
        depth: ir.Value,
    ) -> ir.Value:
        held = {}
        for row in range(num_rows):
            for vector in range(num_vectors):
                start = builder.mul(INT64(row), sum_stride)
                at = place(
                    builder, sums, builder.add(start, INT64(vector * WIDTH)), FLOAT
                )
                held[row, vector] = (at, cgutils.alloca_once(builder, terms.sums))
        zeros = ir.Constant(terms.sums, None)
        for at, sum_ in held.values():
            before = zeros if is_fresh else builder.load(at, align=4, typ=terms.sums)
            builder.store(before, sum_)
        with cgutils.for_range(builder, depth) as term:
            first = builder.mul(term.index, column_stride)
            vectors = []
            for vector in range(num_vectors):
                index = builder.add(first, builder.mul(INT64(vector), vector_stride))
                at = place(builder, columns, index, terms.one)
                vectors.append(builder.load(at, align=4, typ=terms.lanes))
            for row in range(num_rows):
                index = builder.add(builder.mul(INT64(row), row_stride), term.index)
                at = place(builder, rows, index, terms.one)
                factor = builder.load(at, align=4, typ=terms.one)
                factors = spread(builder, factor, terms.lanes)
                for vector in range(num_vectors):
                    _, sum_ = held[row, vector]
                    old = builder.load(sum_, typ=terms.sums)
                    builder.store(
                        terms.multiply(builder, factors, vectors[vector], old), sum_
                    )
        for at, sum_ in held.values():
            builder.store(builder.load(sum_, typ=terms.sums), at, align=4)
        return NOTHING

    @intrinsic
    def add(
        context: object,
        sums: types.Type,
        sum_stride: types.Type,
        rows: types.Type,
        row_stride: types.Type,
        columns: types.Type,
        column_stride: types.Type,
        vector_stride: types.Type,
        depth: types.Type,
    ) -> object:
        n = types.int64
        terms = TERMS[element_of(sums), element_of(rows)]
        signature = types.none(sums, n, rows, n, columns, n, n, n)
        return instruction(
            signature, lambda builder, *args: emit(builder, terms, *args)
        )

    return add


def _product(num_rows: int, *, is_fresh: bool) -> Callable[..., None]:
    """Add a product of `num_rows` rows and any number of columns."""
    num_vectors = STRIPS[num_rows]
    wide = _strip(num_rows, num_vectors, is_fresh=is_fresh)
    narrow = _strip(num_rows, 1, is_fresh=is_fresh)

    @kernel
    def add(
        sums: Floats,
        sum_stride: int,
        rows: Factors,
        row_stride: int,
        columns: Factors,
        column_stride: int,
        vector_stride: int,
        num_columns: int,
        depth: int,
    ) -> None:
        done = 0
        while num_columns - done >= num_vectors * WIDTH:
            wide(
                shift(sums, done),
                sum_stride,
                rows,
                row_stride,
                shift(columns, done // WIDTH * vector_stride),
                column_stride,
                vector_stride,
                depth,
            )
            done += num_vectors * WIDTH
        while done < num_columns:
            narrow(
                shift(sums, done),
                sum_stride,
                rows,
                row_stride,
                shift(columns, done // WIDTH * vector_stride),
                column_stride,
                vector_stride,
                depth,
            )
            done += WIDTH

    return add


def _any_rows(*, is_fresh: bool) -> Callable[..., None]:
    """Add a product of any number of rows and columns."""
    six, four, two, one = (_product(num_rows, is_fresh=is_fresh) for num_rows in STRIPS)

    @kernel
    def add(
        sums: Floats,
        sum_stride: int,
        rows: Factors,
        row_stride: int,
        num_rows: int,
        columns: Factors,
        column_stride: int,
        vector_stride: int,
        num_columns: int,
        depth: int,
    ) -> None:
        row = 0
        while row < num_rows:
            to = shift(sums, row * sum_stride)
            of = shift(rows, row * row_stride)
            left = num_rows - row
            if left >= MAX_STRIP:
                six(
                    to,
                    sum_stride,
                    of,
                    row_stride,
                    columns,
                    column_stride,
                    vector_stride,
                    num_columns,
                    depth,
                )
                row += MAX_STRIP
            elif left >= 4:
                four(
                    to,
                    sum_stride,
                    of,
                    row_stride,
                    columns,
                    column_stride,
                    vector_stride,
                    num_columns,
                    depth,
                )
                row += 4
            elif left >= 2:
                two(
                    to,
                    sum_stride,
                    of,
                    row_stride,
                    columns,
                    column_stride,
                    vector_stride,
                    num_columns,
                    depth,
                )
                row += 2
            else:
                one(
                    to,
                    sum_stride,
                    of,
                    row_stride,
                    columns,
                    column_stride,
                    vector_stride,
                    num_columns,
                    depth,
                )
                row += 1

    return add


# `add_product` adds `rows @ columns` to `sums`, and `set_product` stores it there. Term `n` of 16
# neighbouring columns is contiguous at `columns[n * column_stride]`, and the next 16 columns begin
# `vector_stride` later. The last 16 columns are always computed as a whole.
add_product = _any_rows(is_fresh=False)
set_product = _any_rows(is_fresh=True)


@intrinsic
def transpose(
    context: object,
    target: types.Type,
    rows: types.Type,
    index: types.Type,
    stride: types.Type,
) -> object:
    """Transpose the 64 bytes from `index` on of 16 rows, `stride` apart, to columns of 16.

    The columns are floats, or words of two bf16 numbers where `target` points to words.
    """
    element = element_of(rows)
    is_split = element_of(target) is FLOAT

    def emit(
        builder: ir.IRBuilder,
        target: ir.Value,
        rows: ir.Value,
        index: ir.Value,
        stride: ir.Value,
    ) -> ir.Value:
        words = []
        for _ in range(WIDTH):
            at = place(builder, rows, index, element)
            words.append(builder.load(at, align=2, typ=WORDS))
            index = builder.add(index, stride)
        columns = _transposed(builder, words)
        if element is HALF and is_split:
            pairs = (_split(builder, column) for column in columns)
            columns = [column for pair in pairs for column in pair]
        for number, column in enumerate(columns):
            at = place(builder, target, INT64(number * WIDTH), FLOAT)
            builder.store(column, at, align=4)
        return NOTHING

    return instruction(types.none(target, rows, types.int64, types.int64), emit)


@intrinsic
def widen(
    context: object, target: types.Type, row: types.Type, index: types.Type
) -> object:
    """Convert the 64 bytes from `row[index]` on to fp32."""
    element = element_of(row)

    def emit(
        builder: ir.IRBuilder, target: ir.Value, row: ir.Value, index: ir.Value
    ) -> ir.Value:
        words = builder.load(place(builder, row, index, element), align=2, typ=WORDS)
        parts = [words]
        if element is HALF:
            even, odd = _split(builder, words)
            firsts = [lane // 2 + lane % 2 * WIDTH for lane in range(WIDTH)]
            parts = [
                builder.shuffle_vector(
                    even, odd, ir.Constant(WORDS, [i + half for i in firsts])
                )
                for half in (0, WIDTH // 2)
            ]
        for number, part in enumerate(parts):
            at = place(builder, target, INT64(number * WIDTH), FLOAT)
            builder.store(part, at, align=4)
        return NOTHING

    return instruction(types.none(target, row, types.int64), emit)


def _split(builder: ir.IRBuilder, words: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return, as words, the fp32 values of the lower and of the upper bf16 number of each word."""
    lower = builder.shl(words, constant(WORDS, 16))
    return lower, builder.and_(words, constant(WORDS, 0xFFFF0000))


def _transposed(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """Transpose 16 vectors of 16 words by shuffles of one instruction each."""

    def mix(a: ir.Value, b: ir.Value, lanes: list[int]) -> ir.Value:
        return builder.shuffle_vector(a, b, ir.Constant(WORDS, lanes))

    low = [4 * q + i for q in range(4) for i in (0, 16, 1, 17)]
    high = [lane + 2 for lane in low]
    first = [4 * q + i for q in range(4) for i in (0, 1, 16, 17)]
    second = [lane + 2 for lane in first]
    even = [q + i for q in (0, 8, 16, 24) for i in range(4)]
    odd = [lane + 4 for lane in even]
    pairs = [
        mix(rows[i & ~1], rows[i | 1], high if i & 1 else low) for i in range(WIDTH)
    ]
    # Quarter q of fours[4 * i + j] is column 4 * q + j of rows 4 * i to 4 * i + 3.
    fours = [
        mix(pairs[base + half], pairs[base + half + 2], lanes)
        for base in range(0, WIDTH, 4)
        for half in (0, 1)
        for lanes in (first, second)
    ]
    columns: list[ir.Value] = [None] * WIDTH
    for j in range(4):
        for parity, lanes in enumerate((even, odd)):
            left = mix(fours[j], fours[4 + j], lanes)
            right = mix(fours[8 + j], fours[12 + j], lanes)
            columns[4 * parity + j] = mix(left, right, even)
            columns[4 * parity + 8 + j] = mix(left, right, odd)
    return columns


@kernel
def multiply(
    first_row: int,
    end_row: int,
    first_panel: int,
    end_panel: int,
    sums: Floats,  # SHEET * PANEL of them
    x: Int32s,  # [num_rows, pairs]
    weight: Int32s,  # [num_panels, pairs, PANEL]
    bias: Numbers,  # [outputs]
    has_bias: int,
    pairs: int,
    outputs: int,
    out: Numbers,  # [num_rows, outputs]
) -> None:
    for panel in range(first_panel, end_panel):
        columns = shift(weight, panel * pairs * PANEL)
        for top in range(first_row, end_row, SHEET):
            count = min(SHEET, end_row - top)
            set_sums(sums, shift(x, top * pairs), count, columns, pairs)
            give_results(sums, count, bias, has_bias, panel * PANEL, outputs, out, top)


@kernel
def set_sums(sums: Sums, x: Int32s, count: int, panel: Int32s, words: int) -> None:
    """Set the sums of one panel of `words` and of up to SHEET rows."""
    most = DEPTH if count > FEW else words
    for word in range(0, words, most):
        rows = shift(x, word)
        columns = shift(panel, word * PANEL)
        depth = min(most, words - word)
        if word == 0:
            set_product(
                sums, PANEL, rows, words, count, columns, PANEL, WIDTH, PANEL, depth
            )
        else:
            add_product(
                sums, PANEL, rows, words, count, columns, PANEL, WIDTH, PANEL, depth
            )


@kernel
def give_results(
    sums: Floats,
    count: int,
    bias: Numbers,
    has_bias: int,
    first: int,
    outputs: int,
    out: Numbers,
    top: int,
) -> None:
    """Round the sums of a panel and of `count` rows, with the bias, to bf16."""
    for row in range(count):
        at = (top + row) * outputs
        for i in range(first, min(first + PANEL, outputs), WIDTH):
            lanes = load(sums, row * PANEL + i - first)
            if has_bias:
                lanes = lanes + load_first(bias, i, outputs - i)
            if outputs - i >= WIDTH:
                store(out, at + i, lanes)
            else:
                store_first(out, at + i, lanes, outputs - i)
