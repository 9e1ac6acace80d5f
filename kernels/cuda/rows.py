"""Kernels on rows of hidden states: residual and RMS norm in one pass, and the gate of the MLP.

One program per token keeps its row in registers, and the reduction order of a row depends on the
hidden size alone. `reference` defines the meaning.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from baton.kernels.constants import SILU, Gate
from baton.kernels.launch import Launcher, cdiv, next_power_of_2

# ruff: noqa: N803, PLR0913, PLR0917
# Compile-time values are in capitals, as in Triton's own code; arguments are pointers and strides.


def add_rms_norm(
    x: Tensor,  # [num_tokens, hidden]
    residual: Tensor | None,  # [num_tokens, hidden]
    weight: Tensor,  # [hidden]
    eps: float,
    *,
    overlaps: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of `x + residual` and the sum itself, as `(normed, new_residual)`.

    Both are new tensors, except that the sum is `x` itself without a residual. The kernel that
    `overlaps` starts while the one before it ends.
    """
    num_tokens, hidden = x.shape
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    stream = x
    if residual is not None:
        assert residual.shape == x.shape
        assert residual.is_contiguous()
        stream = torch.empty_like(normed)
    block = next_power_of_2(hidden)
    _launch_add_rms_norm(
        (num_tokens, 1, 1),
        x,
        residual,
        weight,
        normed,
        stream,
        x.stride(0),
        eps,
        HIDDEN=hidden,
        BLOCK=block,
        OVERLAPS=overlaps,
        num_warps=min(max(block // 512, 1), 16),
        num_stages=1,
        enable_fp_fusion=True,
        launch_pdl=overlaps,
    )
    return normed, stream


@triton.jit
def _add_rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    stream_ptr: tl.tensor,
    stride_x: tl.tensor,
    eps: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    live = d < HIDDEN
    weight = tl.load(weight_ptr + d, mask=live, other=0.0).to(tl.float32)
    if OVERLAPS:
        gdc_wait()
    x = tl.load(x_ptr + token * stride_x + d, mask=live, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + token * HIDDEN + d, mask=live, other=0.0).to(
            tl.float32
        )
        stream = x.to(stream_ptr.dtype.element_ty)
        tl.store(stream_ptr + token * HIDDEN + d, stream, mask=live)
        # The next layer adds to the rounded sum, so the norm uses the rounded sum too.
        x = stream.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps)
    normed = (x * inverse * weight).to(normed_ptr.dtype.element_ty)
    tl.store(normed_ptr + token * HIDDEN + d, normed, mask=live)


_launch_add_rms_norm = Launcher(_add_rms_norm_kernel)


BLOCK = 2048  # two 16-byte accesses per thread and operand in bf16


def gate_mul(gate_up: Tensor, gate: Gate = SILU, *, overlaps: bool = False) -> Tensor:
    """Return the gated numbers, `[tokens, features]`, of `[tokens, 2 * features]`, gates first."""
    num_tokens, width = gate_up.shape
    assert gate_up.is_contiguous()
    assert width % 2 == 0
    features = width // 2
    out = gate_up.new_empty((num_tokens, features))
    _launch_gate_mul(
        (num_tokens * cdiv(features, BLOCK), 1, 1),
        gate_up,
        out,
        FEATURES=features,
        BLOCK=BLOCK,
        SLOPE=gate.slope,
        CUBIC=gate.cubic,
        LIMIT=None if math.isinf(gate.limit) else gate.limit,
        OFFSET=gate.offset,
        OVERLAPS=overlaps,
        num_warps=4,
        num_stages=1,
        enable_fp_fusion=True,
        launch_pdl=overlaps,
    )
    return out


@triton.jit
def _gate_mul_kernel(
    gate_up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOPE: tl.constexpr,
    CUBIC: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    if OVERLAPS:
        gdc_wait()
    tiles: tl.constexpr = (FEATURES + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // tiles).to(tl.int64)
    f = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    live = f < FEATURES
    gate_ptr = gate_up_ptr + token * (2 * FEATURES) + f
    gate = tl.load(gate_ptr, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + FEATURES, mask=live, other=0.0).to(tl.float32)
    if LIMIT is not None:  # NaN stays NaN
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    exponent = SLOPE * gate
    if CUBIC != 0:
        exponent += CUBIC * gate * gate * gate
    out = gate * tl.sigmoid(exponent) * (up + OFFSET)
    tl.store(
        out_ptr + token * FEATURES + f, out.to(out_ptr.dtype.element_ty), mask=live
    )


_launch_gate_mul = Launcher(_gate_mul_kernel)
