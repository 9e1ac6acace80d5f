"""The gate of the MLP, `silu(gate) * up`, over the packed output of one projection.

The decoder layers call it. `reference.silu_mul` defines the meaning.
"""

# ruff: noqa: N803  (compile-time values are in capitals, as in Triton's own code)

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # two 16-byte accesses per thread and operand in bf16


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up`, `[tokens, features]`, of `[tokens, 2 * features]`, gates first."""
    num_tokens, width = gate_up.shape
    assert gate_up.is_contiguous()
    assert width % 2 == 0
    features = width // 2
    out = gate_up.new_empty((num_tokens, features))
    _silu_mul_kernel[(num_tokens * triton.cdiv(features, BLOCK),)](
        gate_up, out, FEATURES=features, BLOCK=BLOCK,
        num_warps=4, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip
    return out


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    tiles: tl.constexpr = (FEATURES + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // tiles).to(tl.int64)
    f = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    live = f < FEATURES
    gate_ptr = gate_up_ptr + token * (2 * FEATURES) + f
    gate = tl.load(gate_ptr, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + FEATURES, mask=live, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + token * FEATURES + f, out.to(out_ptr.dtype.element_ty), mask=live)
