"""The products of a mixture of experts on GPUs: each row with the weight of its own expert.

Rows come in the order of their experts. A tile holds rows of one expert alone, has the same shape
for every batch and walks the inner dimension in steps of `BLOCK_K`, so a row's bits depend on the
row and the weight alone. The grid depends on the number of rows and not on how they are spread, so
a CUDA graph can contain it; programs beyond the last tile return at once.
"""

# ruff: noqa: N803, PLR0913, PLR0917
# Compile-time values are in capitals, as in Triton's own code; arguments are pointers and strides.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.cuda.paged import interpreted
from baton.kernels.launch import Launcher, cdiv, next_power_of_2

BLOCK_M = 64


def grouped_product(
    x: Tensor, weight: Tensor, ends: Tensor, biases: Tensor | None = None
) -> Tensor:
    """Return `x[i] @ weight[expert of i].T + biases[expert of i]`, `[rows, out]`.

    `x` is `[rows, in]` in the order of the experts, `weight` `[experts, out, in]`, and `ends`
    `[experts]` int32 counts the rows up to the last one of each expert.
    """
    (rows, inner), (experts, columns, _) = x.shape, weight.shape
    assert weight.shape[2] == inner
    assert len(ends) == experts
    assert x.stride(1) == weight.stride(2) == 1
    out = x.new_empty((rows, columns))
    # fp32 is for parity only, and its tiles have the same size in bytes.
    block_n, block_k = (64, 32) if x.dtype == torch.float32 else (128, 64)
    # Each expert may have one tile that is not full.
    most_tiles = cdiv(rows, BLOCK_M) + min(experts, rows)
    _launch_grouped_product(
        (most_tiles * cdiv(columns, block_n), 1, 1),
        x,
        weight,
        biases,
        ends,
        out,
        experts,
        columns,
        inner,
        x.stride(0),
        weight.stride(0),
        weight.stride(1),
        EXPERTS=next_power_of_2(experts),
        BLOCK_M=BLOCK_M,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        UPCAST=interpreted(),
        num_warps=4,
        num_stages=3,
        enable_fp_fusion=True,
    )
    return out


@triton.jit
def _grouped_product_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor | None,
    ends_ptr: tl.tensor,
    out_ptr: tl.tensor,
    experts: tl.tensor,
    columns: tl.tensor,
    inner: tl.tensor,
    stride_x: tl.tensor,
    stride_expert: tl.tensor,
    stride_weight: tl.tensor,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    # All tiles of columns of the same rows run side by side, and those of an expert in a row.
    tiles_n = tl.cdiv(columns, BLOCK_N)
    tile = tl.program_id(0) // tiles_n
    e = tl.arange(0, EXPERTS)
    ends = tl.load(ends_ptr + e, mask=e < experts, other=0)
    starts = tl.load(ends_ptr + e - 1, mask=(e > 0) & (e < experts), other=0)
    tiles = (ends - starts + BLOCK_M - 1) // BLOCK_M
    tile_ends = tl.cumsum(tiles, 0)
    expert = tl.sum((tile_ends <= tile).to(tl.int32), 0)
    if expert >= experts:
        return
    is_expert = e == expert
    place = tile - tl.sum(tl.where(is_expert, tile_ends - tiles, 0), 0)
    end = tl.sum(tl.where(is_expert, ends, 0), 0)
    first = tl.sum(tl.where(is_expert, starts, 0), 0) + place * BLOCK_M
    m = first + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_rows = x_ptr + m.to(tl.int64)[:, None] * stride_x + k[None, :]
    weight_ptr += expert.to(tl.int64) * stride_expert
    weight_rows = weight_ptr + n.to(tl.int64)[:, None] * stride_weight + k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, inner, BLOCK_K):
        live = (start + k < inner)[None, :]
        x = tl.load(x_rows + start, mask=(m < end)[:, None] & live, other=0.0)
        weight = tl.load(
            weight_rows + start, mask=(n < columns)[:, None] & live, other=0.0
        )
        if UPCAST:
            x = x.to(tl.float32)
            weight = weight.to(tl.float32)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert * columns + n, mask=n < columns, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    target = out_ptr + m.to(tl.int64)[:, None] * columns + n[None, :]
    live = (m < end)[:, None] & (n < columns)[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=live)


_launch_grouped_product = Launcher(_grouped_product_kernel)


BLOCK = 1024


def add_experts(rows: Tensor, weights: Tensor) -> Tensor:
    """Return each token's weighted sum `[tokens, hidden]`, added in fp32 in the order of experts.

    `rows` is `[tokens, top_k, hidden]`, `weights` `[tokens, top_k]` in fp32.
    """
    tokens, top_k, hidden = rows.shape
    assert rows.is_contiguous()
    # The stride of a single expert's weight may be any.
    assert top_k == 1 or weights.stride(1) == 1
    out = rows.new_empty((tokens, hidden))
    _launch_add_experts(
        (tokens * cdiv(hidden, BLOCK), 1, 1),
        rows,
        weights,
        out,
        weights.stride(0),
        TOP_K=top_k,
        HIDDEN=hidden,
        BLOCK=BLOCK,
        num_warps=4,
        num_stages=1,
        enable_fp_fusion=True,
    )
    return out


@triton.jit
def _add_experts_kernel(
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride_weights: tl.tensor,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    tiles: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // tiles).to(tl.int64)
    d = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    live = d < HIDDEN
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in range(TOP_K):
        weight = tl.load(weights_ptr + token * stride_weights + choice)
        row = tl.load(
            rows_ptr + (token * TOP_K + choice) * HIDDEN + d, mask=live, other=0.0
        )
        total += weight * row.to(tl.float32)
    tl.store(
        out_ptr + token * HIDDEN + d, total.to(out_ptr.dtype.element_ty), mask=live
    )


_launch_add_experts = Launcher(_add_experts_kernel)
