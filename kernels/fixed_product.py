"""The product of a linear layer whose sums have the same order for any number of rows.

Tiles have the same shape for every batch and walk the inner dimension in steps of `BLOCK_K`, in as
many parts as the shape of the weight says, whose sums are added in order. So a row's bits depend on
the row and the weight alone. For few rows each part has a program of its own, so that a weight with
few columns fills the device; for many rows one program computes all parts of a tile.

If `engine.deterministic` is on, it replaces the library's product for weights with which the
library's bits change with the batch.
"""

# ruff: noqa: N803, PLR0913, PLR0917
# Compile-time values are in capitals, as in Triton's own code; arguments are pointers and strides.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.paged import interpreted, tilings_of

BLOCK_M = 64
PROGRAMS = 128  # fill a large GPU; a constant, because every node cuts a weight in the same parts
LEAST_PART = 512  # of the inner dimension; adding shorter parts costs more than it saves
BAND = 8  # tiles of rows that share a tile of the weight while it is in the L2 cache


def fixed_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return `x @ weight.T`, `[rows, out]`, of `[rows, in]` and `[out, in]`."""
    rows, inner = x.shape
    columns = len(weight)
    assert weight.shape == (columns, inner)
    assert x.stride(1) == weight.stride(1) == 1
    out = x.new_empty((rows, columns))
    # fp32 is for parity only, and its tiles have the same size in bytes.
    block_n, block_k = (64, 32) if x.dtype == torch.float32 else (128, 64)
    tiles_n = triton.cdiv(columns, block_n)
    tiles = triton.cdiv(rows, BLOCK_M) * tiles_n
    num_parts = max(1, min(PROGRAMS // tiles_n, inner // LEAST_PART))
    part = triton.cdiv(triton.cdiv(inner, block_k), num_parts)  # in steps of `block_k`
    is_spread = num_parts > 1 and tiles < PROGRAMS
    sums = x.new_empty((num_parts if is_spread else 0, rows, columns), dtype=torch.float32)
    _fixed_product_kernel[(tiles, num_parts if is_spread else 1)](
        x, weight, out, sums, rows, columns, inner, part, num_parts, x.stride(0), weight.stride(0),
        BLOCK_M=BLOCK_M, BLOCK_N=block_n, BLOCK_K=block_k, BAND=BAND, UPCAST=interpreted(),
        num_warps=tilings_of(x.device).product_warps, num_stages=3, enable_fp_fusion=True,
    )  # fmt: skip
    if is_spread:
        _add_parts_kernel[(triton.cdiv(rows * columns, ADDED),)](
            sums, out, rows, columns, num_parts, BLOCK=ADDED, num_warps=4, num_stages=1
        )
    return out


@triton.jit(do_not_specialize=["rows", "part", "num_parts"])
def _fixed_product_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    inner: tl.tensor,
    part: tl.tensor,
    num_parts: tl.tensor,
    stride_x: tl.tensor,
    stride_weight: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    band = tl.program_id(0) // (BAND * tiles_n)
    height = tl.minimum(tiles_m - band * BAND, BAND)
    place = tl.program_id(0) % (BAND * tiles_n)
    m = (band * BAND + place % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = place // height * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_rows = x_ptr + m.to(tl.int64)[:, None] * stride_x + k[None, :]
    weight_rows = weight_ptr + n.to(tl.int64)[:, None] * stride_weight + k[None, :]
    steps = tl.cdiv(inner, BLOCK_K)
    own_parts = num_parts // tl.num_programs(1)
    first = tl.program_id(1) * own_parts
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for number in range(first, first + own_parts):
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(number * part, tl.minimum((number + 1) * part, steps)):
            start = step * BLOCK_K
            live = (start + k < inner)[None, :]
            x = tl.load(x_rows + start, mask=(m < rows)[:, None] & live, other=0.0)
            weight = tl.load(weight_rows + start, mask=(n < columns)[:, None] & live, other=0.0)
            if UPCAST:
                x = x.to(tl.float32)
                weight = weight.to(tl.float32)
            acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
        total += acc
    place = m.to(tl.int64)[:, None] * columns + n[None, :]
    live = (m < rows)[:, None] & (n < columns)[None, :]
    if tl.num_programs(1) > 1:
        tl.store(sum_ptr + first.to(tl.int64) * rows * columns + place, total, mask=live)
    else:
        tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=live)


ADDED = 1024  # sums of one program


@triton.jit(do_not_specialize=["rows", "num_parts"])
def _add_parts_kernel(
    sum_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    num_parts: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    size = rows * columns
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(num_parts):
        total += tl.load(sum_ptr + i, mask=i < size, other=0.0)
        sum_ptr += size
    tl.store(out_ptr + i, total.to(out_ptr.dtype.element_ty), mask=i < size)
