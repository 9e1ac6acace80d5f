"""Products with weights of four bits or FP8 on GPUs, widened a tile at a time.

A tile of codes becomes the numbers that the weight stands for, rounded to bf16, and is
multiplied as in `fixed_product`, with the same order of sums. So a row's bits depend on the row
and the weight alone, and a step reads a quarter or half of the bytes.
"""

# ruff: noqa: N803, PLR0913, PLR0917
# Compile-time values are in capitals, as in Triton's own code; arguments are pointers and strides.

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels import fixed_product
from baton.kernels.cpu_kernels import NarrowWeight
from baton.kernels.fixed_product import ADDED, BAND, BLOCK_M, LEAST_PART, _add_parts_kernel
from baton.kernels.paged import interpreted, tilings_of

BLOCK_N = 128
HALF = 32  # neighbouring inputs in the lower bits of bytes, or in the upper bits of the same bytes


@dataclass(slots=True, frozen=True)
class NarrowProduct:
    """The product with packed codes: `[outputs, inputs]` of FP8 or half as many bytes.

    The inputs are filled up to whole pairs of halves.
    """

    scales: Tensor  # [groups, outputs] fp32
    zeros: Tensor  # [groups, outputs] int32
    group: int  # inputs that share a scale, a multiple of HALF or all
    is_fp8: bool = False

    def __call__(self, x: Tensor, packed: Tensor) -> Tensor:
        """Return `x @ weight.T`, `[rows, outputs]`, of `[rows, inputs]` in bf16."""
        (rows, inner), columns = x.shape, len(packed)
        assert x.stride(1) == 1
        assert packed.shape[1] == triton.cdiv(inner, 2 * HALF) * HALF * (1 + self.is_fp8)
        out = x.new_empty((rows, columns))
        tiles_n = triton.cdiv(columns, BLOCK_N)
        tiles = triton.cdiv(rows, BLOCK_M) * tiles_n
        num_parts = max(1, min(fixed_product.PROGRAMS // tiles_n, inner // LEAST_PART))
        part = triton.cdiv(triton.cdiv(inner, 2 * HALF), num_parts)
        is_spread = num_parts > 1 and tiles < fixed_product.PROGRAMS
        sums = x.new_empty((num_parts if is_spread else 0, rows, columns), dtype=torch.float32)
        _narrow_product_kernel[(tiles, num_parts if is_spread else 1)](
            x, packed, self.scales, self.zeros, out, sums, rows, columns, inner, part, num_parts,
            self.group, x.stride(0), BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, HALF=HALF, BAND=BAND,
            IS_FP8=self.is_fp8, UPCAST=interpreted(), enable_fp_fusion=True,
            num_warps=tilings_of(x.device).product_warps, num_stages=3,
        )  # fmt: skip
        if is_spread:
            _add_parts_kernel[(triton.cdiv(rows * columns, ADDED),)](
                sums, out, rows, columns, num_parts, BLOCK=ADDED, num_warps=4, num_stages=1
            )
        return out


def packed(weight: NarrowWeight, device: torch.device) -> tuple[Tensor, NarrowProduct]:
    """Return the codes on a device, and the product with them, of a weight that `is_whole`."""
    is_fp8 = weight.codes.dtype != torch.uint8
    codes = weight.codes.view(torch.uint8).to(device)
    codes = F.pad(codes, (0, -codes.shape[1] % (2 * HALF)))
    scales, zeros = (part.T.to(device).contiguous() for part in (weight.scales, weight.zeros))
    if not is_fp8:
        low, high = codes.unflatten(1, (-1, 2, HALF)).unbind(2)
        codes = (low | high << 4).flatten(1)
    return codes, NarrowProduct(scales, zeros, weight.group, is_fp8)


@triton.jit
def _widened(codes, scales_ptr, zeros_ptr, at, live, dtype, IS_FP8: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return `[BLOCK_N, HALF]` numbers of one group."""
    scales = tl.load(scales_ptr + at, mask=live, other=0.0)
    if IS_FP8:  # fp16 has the same fields and eight more powers of 2
        bits = (codes.to(tl.uint16) & 0x80) << 8 | (codes.to(tl.uint16) & 0x7F) << 7
        numbers = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        zeros = tl.load(zeros_ptr + at, mask=live, other=0)
        numbers = (codes.to(tl.int32) - zeros[:, None]).to(tl.float32)
    return (numbers * scales[:, None]).to(dtype)


@triton.jit(do_not_specialize=["rows", "part", "num_parts"])
def _narrow_product_kernel(
    x_ptr: tl.tensor,
    packed_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    inner: tl.tensor,
    part: tl.tensor,
    num_parts: tl.tensor,
    group: tl.tensor,
    stride_x: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HALF: tl.constexpr,
    BAND: tl.constexpr,
    IS_FP8: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    band = tl.program_id(0) // (BAND * tiles_n)
    height = tl.minimum(tiles_m - band * BAND, BAND)
    place = tl.program_id(0) % (BAND * tiles_n)
    m = (band * BAND + place % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = place // height * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, HALF)
    steps = tl.cdiv(inner, 2 * HALF)
    x_rows = x_ptr + m.to(tl.int64)[:, None] * stride_x + k[None, :]
    step_bytes: tl.constexpr = 2 * HALF if IS_FP8 else HALF
    packed_rows = packed_ptr + n.to(tl.int64)[:, None] * (steps * step_bytes) + k[None, :]
    own_parts = num_parts // tl.num_programs(1)
    first = tl.program_id(1) * own_parts
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for number in range(first, first + own_parts):
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(number * part, tl.minimum((number + 1) * part, steps)):
            if not IS_FP8:
                pairs = tl.load(packed_rows + step * HALF, mask=(n < columns)[:, None], other=0)
            for half in tl.static_range(2):
                start = (2 * step + half) * HALF
                live = (m < rows)[:, None] & (start + k < inner)[None, :]
                x = tl.load(x_rows + start, mask=live, other=0.0)
                # Where `start` is beyond the inputs, numbers of the last group are multiplied by 0.
                of = tl.minimum(start, inner - 1) // group
                if IS_FP8:
                    codes = tl.load(packed_rows + start, mask=(n < columns)[:, None], other=0)
                else:
                    codes = (pairs >> (4 * half)) & 15
                weight = _widened(
                    codes, scales_ptr, zeros_ptr, of * columns + n, n < columns, x.dtype, IS_FP8
                )
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
