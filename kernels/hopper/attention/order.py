"""The one order in which prefill and decode attention add, so that a token has equal bits in both.

A row is a query of one head. Tile `j` holds the keys `128 j` to `128 j + 127`. Cuts of 256 keys, of
512 from 2,048 on and of 2,048 from 8,192 on have sums and a maximum of their own, which are merged
in order. A window hides keys and moves no border: what is wholly hidden changes no bit. A sink is
merged after the last cut. `tests.support.one_order` says the whole in torch, bit for bit.
"""

# ruff: noqa: N803
# Compile-time values are in capitals, as in Triton's own code.

from __future__ import annotations

import triton
import triton.language as tl

KEYS = 128  # of a tile


# All borders are multiples of the later steps, so a mask tells whether a tile opens a cut.
@triton.jit
def cut_mask(j: tl.tensor) -> tl.tensor:
    """Return the tiles of the cut around tile `j`, less one; the first has 0 in these bits."""
    return 1 + 2 * (j >= 16) + 12 * (j >= 64)


@triton.jit
def cut_of(j: tl.tensor) -> tl.tensor:
    """Return the number of the cut in which tile `j` is."""
    return (
        (j >> 1) * (j < 16)
        + (4 + (j >> 2)) * ((j >= 16) & (j < 64))
        + (16 + (j >> 4)) * (j >= 64)
    )


def num_cuts(num_keys: int) -> int:
    """Return how many cuts a context of that many keys has, at least one."""
    last = max(-(-num_keys // KEYS), 1) - 1
    if last < 16:
        return (last >> 1) + 1
    if last < 64:
        return 4 + (last >> 2) + 1
    return 16 + (last >> 4) + 1


def most_cuts(window: int) -> int:
    """Return how many cuts the keys of a query with that window can touch."""
    tiles = (window - 1) // KEYS + 2
    return tiles // 2 + 1


@triton.jit
def row_sum(w: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """Return the sums of rows of 128 weights.

    Pairs of columns are added whose numbers differ in bit 0, then 5, 6, 3, 4, 1 and 2. A sum of two
    has one result whatever threads hold them, so no layout changes it.
    """
    w = tl.sum(w.reshape(ROWS, 64, 2), 2)  # bit 0
    w = tl.sum(tl.sum(w.reshape(ROWS, 2, 2, 16), 2), 1)  # bit 5, bit 6
    w = tl.sum(tl.sum(w.reshape(ROWS, 2, 2, 4), 2), 1)  # bit 3, bit 4
    return tl.sum(tl.sum(w.reshape(ROWS, 2, 2), 2), 1)  # bit 1, bit 2
