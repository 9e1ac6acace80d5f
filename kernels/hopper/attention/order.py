"""The one order in which prefill and decode attention add, so that a token has equal bits in both.

A row is a query of one head. Tiles have 128 keys, and 64 in heads above 128. Cuts of 256 keys, of
512 from 2,048 on and of 2,048 from 8,192 on have sums and a maximum of their own, which are merged
in order. A window hides keys and moves no border: what is wholly hidden changes no bit. A sink is
merged after the last cut. `tests.support.one_order` says the whole in torch, bit for bit.
"""

# ruff: noqa: N803
# Compile-time values are in capitals, as in Triton's own code.

from __future__ import annotations

import triton
import triton.language as tl

LARGEST_DIM = 128  # of heads whose tiles have 128 keys


def tile_keys(head_dim: int) -> int:
    """Return how many keys a tile has."""
    return 128 if head_dim <= LARGEST_DIM else 64


# All borders are multiples of the later steps, so a mask tells whether a tile opens a cut.
@triton.jit
def cut_mask(j: tl.tensor, KEYS: tl.constexpr) -> tl.tensor:
    """Return the tiles of the cut around tile `j`, less one; the first has 0 in these bits."""
    steps = 1 + (j >= 2048 // KEYS) + 6 * (j >= 8192 // KEYS)
    return 256 // KEYS * steps - 1


@triton.jit
def cut_of(key: tl.tensor) -> tl.tensor:
    """Return the number of the cut in which a key is."""
    return (
        (key >> 8) * (key < 2048)
        + (4 + (key >> 9)) * ((key >= 2048) & (key < 8192))
        + (16 + (key >> 11)) * (key >= 8192)
    )


def num_cuts(num_keys: int) -> int:
    """Return how many cuts a context of that many keys has, at least one."""
    last = max(num_keys, 1) - 1
    if last < 2048:
        return (last >> 8) + 1
    if last < 8192:
        return 4 + (last >> 9) + 1
    return 16 + (last >> 11) + 1


def most_cuts(window: int) -> int:
    """Return how many cuts the keys of a query with that window can touch."""
    return (window - 2) // 256 + 2


@triton.jit
def row_sum(w: tl.tensor, ROWS: tl.constexpr, KEYS: tl.constexpr) -> tl.tensor:
    """Return the sums of rows of a tile's weights.

    Pairs of columns are added whose numbers differ in bit 0, then 5, 6 in tiles of 128 keys, 3, 4,
    1 and 2. A sum of two has one result whatever threads hold them, so no layout changes it.
    """
    w = tl.sum(w.reshape(ROWS, KEYS // 2, 2), 2)  # bit 0
    if KEYS == 128:
        w = tl.sum(w.reshape(ROWS, 2, 2, 16), 2)  # bit 5
    w = tl.sum(w.reshape(ROWS, 2, 16), 1)  # bit 6, or 5
    w = tl.sum(tl.sum(w.reshape(ROWS, 2, 2, 4), 2), 1)  # bit 3, bit 4
    return tl.sum(tl.sum(w.reshape(ROWS, 2, 2), 2), 1)  # bit 1, bit 2
