"""Linear layers on GPUs whose sums have the same order for any number of rows.

Tiles have the same shape for every batch and walk the inner dimension in steps, in as many parts
as the shape of the weight says, whose sums are added in order. So a row's bits depend on the row
and the weight alone. For few rows each part has a program of its own, so that a weight with few
columns fills the device; for many rows one program computes all parts of a tile.

If `engine.deterministic` is on, `fixed_product` replaces the library's product for weights with
which the library's bits change with the batch. On compute capability 9.0 it has one part for the
weights that `kernels/hopper/products` takes, and so its bits: whichever of the two computes a
weight, a row's result is the same. `NarrowProduct` reads weights of four bits or FP8, a half or a
quarter of the bytes: a tile of codes becomes the numbers that they stand for, rounded to bf16.
"""

# ruff: noqa: N803, PLR0913, PLR0917
# Compile-time values are in capitals, as in Triton's own code; arguments are pointers and strides.

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.cuda.paged import interpreted, tilings_of
from baton.kernels.launch import Launcher, cdiv
from baton.kernels.reference import NarrowWeight

BLOCK_M = 64
# Fill a large GPU; a constant, because every node cuts a weight in the same parts.
PROGRAMS = 128
# Of the inner dimension; adding shorter parts costs more than it saves.
LEAST_PART = 512
BAND = 8  # tiles of rows that share a tile of the weight while it is in the L2 cache
# Products in one part: the widths of tiles, and their steps in flight. Where rows are few, a
# program is alone on its multiprocessor and has room for more of the short steps of narrow tiles.
ONE_CHAIN_STAGES = {128: 3, 64: 6, 32: 8}
ADDED = 1024  # sums of one program that adds parts
# Neighbouring inputs in the lower bits of bytes, or in the upper bits of the same bytes.
HALF = 32


def fixed_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return `x @ weight.T`, `[rows, out]`, of `[rows, in]` and `[out, in]`."""
    assert x.shape[1] == weight.shape[1]
    if is_one_chain(weight):
        return one_chain_product(x, weight)
    # fp32 is for parity only, and its tiles have the same size in bytes.
    sizes = (64, 32, 1) if x.dtype == torch.float32 else (128, 64, 1)
    return _in_parts(x, weight, None, sizes)


def one_chain_product(x: Tensor, weight: Tensor) -> Tensor:
    """Compute a product in one part, with tiles that are narrow enough to fill the device."""
    tiles_m = cdiv(len(x), BLOCK_M)
    widths = [*ONE_CHAIN_STAGES]
    fills = (n for n in widths if tiles_m * cdiv(len(weight), n) >= PROGRAMS)
    width = next(fills, widths[-1])
    sizes = width, 64, 1
    return _in_parts(x, weight, None, sizes, 1, ONE_CHAIN_STAGES[width])


def is_one_chain(weight: Tensor) -> bool:
    """Return whether sums have one part: where those of `kernels/hopper/products` have."""
    return (
        weight.dtype == torch.bfloat16
        and has_fitting_sizes(*weight.shape)
        and has_warpgroup_products(weight.device)
    )


def has_fitting_sizes(columns: int, inner: int) -> bool:
    """Return whether `kernels/hopper/products` takes weights of this shape."""
    return columns % 8 == 0 and inner % 64 == 0


@functools.cache
def has_warpgroup_products(device: torch.device) -> bool:
    is_gpu = device.type == "cuda"
    return is_gpu and torch.cuda.get_device_capability(device) == (9, 0)


@dataclass(slots=True, frozen=True)
class NarrowProduct:
    """The product with packed codes: `[outputs, inputs]` of FP8 or half as many bytes.

    The inputs are filled up to whole pairs of halves.
    """

    scales: Tensor  # [groups, outputs] fp32
    zeros: Tensor  # [groups, outputs] int32
    group: int  # inputs that share a scale, a multiple of HALF or all
    is_fp8: bool = False
    trial: ClassVar[bytes] = b"narrow"

    def __call__(self, x: Tensor, packed: Tensor) -> Tensor:
        """Return `x @ weight.T`, `[rows, outputs]`, of `[rows, inputs]` in bf16."""
        steps = cdiv(x.shape[1], 2 * HALF)
        assert packed.shape[1] == steps * HALF * (1 + self.is_fp8)
        return _in_parts(x, packed, self, (128, HALF, 2))


def packed(
    weight: NarrowWeight, device: torch.device
) -> tuple[Tensor, NarrowProduct] | None:
    """Return the codes on a device, and the product with them, of a weight that `is_whole`.

    None for one of int8 or MXFP4, of which it knows no product.
    """
    if weight.kind not in ("int4", "fp8"):
        return None
    is_fp8 = weight.kind == "fp8"
    codes = weight.codes.view(torch.uint8).to(device)
    codes = F.pad(codes, (0, -codes.shape[1] % (2 * HALF)))
    scales, zeros = (
        part.T.to(device).contiguous() for part in (weight.scales, weight.zeros)
    )
    if not is_fp8:
        low, high = codes.unflatten(1, (-1, 2, HALF)).unbind(2)
        codes = (low | high << 4).flatten(1)
    return codes, NarrowProduct(scales, zeros, weight.group, is_fp8)


def _in_parts(
    x: Tensor,
    weight: Tensor,
    grid: NarrowProduct | None,
    sizes: tuple[int, int, int],
    max_parts: int = PROGRAMS,
    stages: int = 3,
) -> Tensor:
    """Launch the kernel, whose tiles have `sizes`: columns, and inputs of each turn of a step."""
    (rows, inner), columns, (block_n, block_k, turns) = x.shape, len(weight), sizes
    assert x.stride(1) == weight.stride(1) == 1
    out = x.new_empty((rows, columns))
    tiles_n = cdiv(columns, block_n)
    tiles = cdiv(rows, BLOCK_M) * tiles_n
    num_parts = max(1, min(PROGRAMS // tiles_n, inner // LEAST_PART, max_parts))
    part = cdiv(cdiv(inner, block_k * turns), num_parts)  # in steps
    is_spread = num_parts > 1 and tiles < PROGRAMS
    sums = x.new_empty(
        (num_parts if is_spread else 0, rows, columns), dtype=torch.float32
    )
    scales, zeros, group = (
        (grid.scales, grid.zeros, grid.group) if grid else (None, None, 1)
    )
    _launch_product(
        (tiles, num_parts if is_spread else 1, 1),
        x,
        weight,
        scales,
        zeros,
        out,
        sums,
        rows,
        columns,
        inner,
        part,
        num_parts,
        group,
        x.stride(0),
        weight.stride(0),
        BLOCK_M=BLOCK_M,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        TURNS=turns,
        BAND=BAND,
        IS_FP8=grid is not None and grid.is_fp8,
        UPCAST=interpreted(),
        num_warps=tilings_of(x.device).product_warps,
        num_stages=stages,
        enable_fp_fusion=True,
    )
    if is_spread:
        _launch_add_parts(
            (cdiv(rows * columns, ADDED), 1, 1),
            sums,
            out,
            rows,
            columns,
            num_parts,
            BLOCK=ADDED,
            num_warps=4,
            num_stages=1,
        )
    return out


@triton.jit(do_not_specialize=["rows", "part", "num_parts"])
def _product_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor | None,
    zeros_ptr: tl.tensor | None,
    out_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    inner: tl.tensor,
    part: tl.tensor,
    num_parts: tl.tensor,
    group: tl.tensor,
    stride_x: tl.tensor,
    stride_weight: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TURNS: tl.constexpr,
    BAND: tl.constexpr,
    IS_FP8: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(columns, BLOCK_N)
    band = tl.program_id(0) // (BAND * tiles_n)
    height = tl.minimum(tiles_m - band * BAND, BAND)
    place = tl.program_id(0) % (BAND * tiles_n)
    m = (band * BAND + place % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = place // height * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_rows = x_ptr + m.to(tl.int64)[:, None] * stride_x + k[None, :]
    weight_rows = weight_ptr + n.to(tl.int64)[:, None] * stride_weight + k[None, :]
    own = (n < columns)[:, None]
    steps = tl.cdiv(inner, BLOCK_K * TURNS)
    own_parts = num_parts // tl.num_programs(1)
    first = tl.program_id(1) * own_parts
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for number in range(first, first + own_parts):
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(number * part, tl.minimum((number + 1) * part, steps)):
            if scales_ptr is not None and not IS_FP8:
                pairs = tl.load(weight_rows + step * BLOCK_K, mask=own, other=0)
            for turn in tl.static_range(TURNS):
                start = (step * TURNS + turn) * BLOCK_K
                live = (start + k < inner)[None, :]
                x = tl.load(x_rows + start, mask=(m < rows)[:, None] & live, other=0.0)
                if scales_ptr is None:
                    weight = tl.load(weight_rows + start, mask=own & live, other=0.0)
                else:
                    # Beyond the inputs, numbers of the last group are multiplied by 0.
                    grid = tl.minimum(start, inner - 1) // group * columns + n
                    if IS_FP8:
                        weight = tl.load(weight_rows + start, mask=own, other=0)
                    else:
                        weight = (pairs >> (4 * turn)) & 15
                    weight = _widened(
                        weight,
                        scales_ptr,
                        zeros_ptr,
                        grid,
                        n < columns,
                        x.dtype,
                        IS_FP8,
                    )
                if UPCAST:
                    x = x.to(tl.float32)
                    weight = weight.to(tl.float32)
                acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
        total += acc
    place = m.to(tl.int64)[:, None] * columns + n[None, :]
    live = (m < rows)[:, None] & (n < columns)[None, :]
    if tl.num_programs(1) > 1:
        tl.store(
            sum_ptr + first.to(tl.int64) * rows * columns + place, total, mask=live
        )
    else:
        tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=live)


_launch_product = Launcher(_product_kernel)


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


_launch_add_parts = Launcher(_add_parts_kernel)
