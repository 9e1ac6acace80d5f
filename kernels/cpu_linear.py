"""The product of a linear layer in bf16, on CPUs with AVX512-BF16.

Each output is one sum over the pairs of its row, from the first to the last, no matter which other
rows and outputs are computed with it. For few rows, a panel of weights is one stream from memory.
For many rows, the kernel takes some of a panel's pairs at a time, which stay in the core's cache
while the rows pass. `cpu_linears` calls it.
"""

# ruff: noqa: PLR0913, PLR0917  (the arguments are pointers and sizes)

from __future__ import annotations

from baton.kernels.cpu_products import add_product, set_product
from baton.kernels.cpu_shapes import DEPTH, FEW, PANEL, SHEET, WIDTH
from baton.kernels.cpu_vectors import (
    Floats,
    Int32s,
    Numbers,
    kernel,
    load,
    load_first,
    shift,
    store,
    store_first,
)


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
        for top in range(first_row, end_row, SHEET):
            count = min(SHEET, end_row - top)
            most = DEPTH if count > FEW else pairs
            for pair in range(0, pairs, most):
                rows = shift(x, top * pairs + pair)
                columns = shift(weight, (panel * pairs + pair) * PANEL)
                depth = min(most, pairs - pair)
                if pair == 0:
                    set_product(
                        sums, PANEL, rows, pairs, count, columns, PANEL, WIDTH, PANEL, depth
                    )
                else:
                    add_product(
                        sums, PANEL, rows, pairs, count, columns, PANEL, WIDTH, PANEL, depth
                    )
            _give_results(sums, count, bias, has_bias, panel * PANEL, outputs, out, top)


@kernel
def _give_results(
    sums: Floats, count: int, bias: Numbers, has_bias: int, first: int, outputs: int,
    out: Numbers, top: int,
) -> None:  # fmt: skip
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
