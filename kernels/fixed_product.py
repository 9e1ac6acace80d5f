"""The product of a linear layer whose sums have the same order for any number of rows.

Tiles have the same shape for every batch and walk the inner dimension in steps of `BLOCK_K`, so a
row's bits depend on the row and the weight alone. If `engine.deterministic` is on, it replaces the
library's product for weights with which the library's bits change with the batch.
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
    tiles = triton.cdiv(rows, BLOCK_M) * triton.cdiv(columns, block_n)
    _fixed_product_kernel[(tiles,)](
        x, weight, out, rows, columns, inner, x.stride(0), weight.stride(0),
        BLOCK_M=BLOCK_M, BLOCK_N=block_n, BLOCK_K=block_k, BAND=BAND, UPCAST=interpreted(),
        num_warps=tilings_of(x.device).product_warps, num_stages=3, enable_fp_fusion=True,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _fixed_product_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    inner: tl.tensor,
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
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, inner, BLOCK_K):
        live = (start + k < inner)[None, :]
        x = tl.load(x_rows + start, mask=(m < rows)[:, None] & live, other=0.0)
        weight = tl.load(weight_rows + start, mask=(n < columns)[:, None] & live, other=0.0)
        if UPCAST:
            x = x.to(tl.float32)
            weight = weight.to(tl.float32)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    target = out_ptr + m.to(tl.int64)[:, None] * columns + n[None, :]
    live = (m < rows)[:, None] & (n < columns)[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=live)
