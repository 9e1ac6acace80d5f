"""The product in Gluon, for tiles whose sizes are powers of two.

A warp brings tiles of both operands by TMA, and one or two warpgroups of 64 rows multiply them, as
in `product.cu`, with the same bits: one chain over the whole inner dimension, x first.
"""

# ruff: noqa: N803, N806, PLR0913, PLR0917
# Compile-time values are in capitals, as in Triton's own code; arguments are pointers and sizes.
# mypy: disable-error-code="no-untyped-def, no-redef"

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from baton.kernels.hopper.products.variants import Grid, Variant
from baton.kernels.launch import Launcher

NUM_WARPS = 4
# Registers of a thread at the launch, by warpgroups and programs on a multiprocessor.
REGISTERS = {(2, 1): 168, (1, 1): 168, (1, 2): 128}
SWIZZLED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@dataclass(slots=True, frozen=True)
class Base:
    """The address of a matrix in bf16, for descriptors that outlive its tensor."""

    address: int
    dtype: torch.dtype = torch.bfloat16

    def data_ptr(self) -> int:
        return self.address


def describe(address: int, rows: int, inner: int, stride: int, box: int) -> object:
    """Return a descriptor of `[rows, inner]` in bf16, whose rows are `stride` apart."""
    shape = [rows, inner]
    return TensorDescriptor(Base(address), shape, [stride, 1], [box, 64], SWIZZLED)


def launch(
    variant: Variant, grid: Grid, x: object, weight: object, out: Tensor
) -> None:
    """Compute `out`, `[rows, columns]`, from descriptors of both operands."""
    launch_product(
        (grid.programs, 1, 1),
        x,
        weight,
        out,
        *out.shape,
        grid.steps,
        grid.tiles_m,
        grid.tiles_n,
        GROUPS=variant.groups,
        COLUMNS=variant.columns,
        BOX=variant.box,
        PANELS=variant.panels,
        STAGES=variant.stages,
        BAND=variant.band,
        num_warps=NUM_WARPS,
        maxnreg=REGISTERS[variant.groups, variant.per_multiprocessor],
    )


@gluon.jit
def _tile_of(unit, tiles_m, tiles_n, BAND: gl.constexpr):
    band = unit // (BAND * tiles_n)
    height = gl.minimum(tiles_m - band * BAND, BAND)
    rest = unit - band * BAND * tiles_n
    return band * BAND + rest % height, rest // height


@gluon.jit
def _multiply(
    GROUP: gl.constexpr,
    x_tiles,
    weight_tiles,
    full,
    empty,
    out_ptr,
    rows,
    columns,
    steps,
    tiles_m,
    tiles_n,
    GROUPS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
):
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    turn = 0
    for unit in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = _tile_of(unit, tiles_m, tiles_n, BAND)
        sums = gl.zeros([64, COLUMNS], gl.float32, SUMS)
        for k in range(steps):
            stage = turn % STAGES
            mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
            weight = weight_tiles.index(stage).permute((1, 0))
            x = x_tiles.index(stage * GROUPS + GROUP)
            sums = warpgroup_mma(x, weight, sums, is_async=True)
            sums = warpgroup_mma_wait(1, deps=(sums,))
            # The step before has been read by now.
            before = (turn + STAGES - 1) % STAGES
            mbarrier.arrive(empty.index(before), count=1, pred=k > 0)
            turn += 1
        sums = warpgroup_mma_wait(0, deps=(sums,))
        mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1)
        # Adding to +0 turns a sum of -0 into +0, as in CUDA C++.
        result = (sums + 0.0).to(gl.bfloat16)
        if COLUMNS < 64:
            ROWS: gl.constexpr = SUMS
        else:
            # Four lanes exchange, so that each stores 16 bytes of a row's 64.
            ROWS: gl.constexpr = gl.DistributedLinearLayout(
                reg_bases=_register_bases(COLUMNS),
                lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
                warp_bases=[[16, 0], [32, 0]],
                block_bases=[],
                shape=[64, COLUMNS],
            )
            result = gl.convert_layout(result, ROWS)
        m = tile_m * (64 * GROUPS) + GROUP * 64
        m += gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))
        n = tile_n * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, ROWS))
        target = out_ptr + m.to(gl.int64)[:, None] * columns + n[None, :]
        is_live = (m < rows)[:, None] & (n < columns)[None, :]
        gl.store(target, result, mask=is_live)


@gluon.constexpr_function
def _register_bases(columns):
    bases = [[0, 1], [0, 2], [0, 4], [8, 0]]
    width = 32
    while width < columns:
        bases.append([0, width])
        width *= 2
    return bases


@gluon.jit
def _fill(
    x_desc,
    weight_desc,
    x_boxes,
    weight_boxes,
    full,
    empty,
    steps,
    tiles_m,
    tiles_n,
    GROUPS: gl.constexpr,
    COLUMNS: gl.constexpr,
    BOX: gl.constexpr,
    PANELS: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
):
    BOXES: gl.constexpr = 64 * GROUPS // BOX
    turn = 0
    for unit in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = _tile_of(unit, tiles_m, tiles_n, BAND)
        for k in range(steps):
            stage = turn % STAGES
            mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
            barrier = full.index(stage)
            mbarrier.expect(barrier, (BOX + COLUMNS) * PANELS * 128)
            for panel in gl.static_range(PANELS):
                start = (k * PANELS + panel) * 64
                number = stage * PANELS + panel
                tma.async_copy_global_to_shared(
                    weight_desc,
                    [tile_n * COLUMNS, start],
                    barrier,
                    weight_boxes.index(number),
                )
                tma.async_copy_global_to_shared(
                    x_desc,
                    [tile_m * (64 * GROUPS), start],
                    barrier,
                    x_boxes.index(number * BOXES),
                )
            turn += 1


@gluon.jit(do_not_specialize=["rows", "steps", "tiles_m", "tiles_n"])
def product_kernel(
    x_desc,
    weight_desc,
    out_ptr,
    rows,
    columns,
    steps,
    tiles_m,
    tiles_n,
    GROUPS: gl.constexpr,
    COLUMNS: gl.constexpr,
    BOX: gl.constexpr,
    PANELS: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
):
    STEP: gl.constexpr = 64 * PANELS
    WHOLE: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=16, rank=2
    )
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES * GROUPS, 64, STEP], WHOLE)
    weight_tiles = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, COLUMNS, STEP], WHOLE
    )
    x_boxes = x_tiles._reinterpret(
        gl.bfloat16, [STAGES * PANELS * (64 * GROUPS // BOX), BOX, 64], x_desc.layout
    )
    weight_boxes = weight_tiles._reinterpret(
        gl.bfloat16, [STAGES * PANELS, COLUMNS, 64], weight_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    # Triton takes no starred arguments here.
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        FIRST,
                        x_tiles,
                        weight_tiles,
                        full,
                        empty,
                        out_ptr,
                        rows,
                        columns,
                        steps,
                        tiles_m,
                        tiles_n,
                        GROUPS,
                        COLUMNS,
                        STAGES,
                        BAND,
                    ),
                ),
                (
                    _multiply,
                    (
                        SECOND,
                        x_tiles,
                        weight_tiles,
                        full,
                        empty,
                        out_ptr,
                        rows,
                        columns,
                        steps,
                        tiles_m,
                        tiles_n,
                        GROUPS,
                        COLUMNS,
                        STAGES,
                        BAND,
                    ),
                ),
                (
                    _fill,
                    (
                        x_desc,
                        weight_desc,
                        x_boxes,
                        weight_boxes,
                        full,
                        empty,
                        steps,
                        tiles_m,
                        tiles_n,
                        GROUPS,
                        COLUMNS,
                        BOX,
                        PANELS,
                        STAGES,
                        BAND,
                    ),
                ),
            ],
            [4, 1],
            [232, 40],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        FIRST,
                        x_tiles,
                        weight_tiles,
                        full,
                        empty,
                        out_ptr,
                        rows,
                        columns,
                        steps,
                        tiles_m,
                        tiles_n,
                        GROUPS,
                        COLUMNS,
                        STAGES,
                        BAND,
                    ),
                ),
                (
                    _fill,
                    (
                        x_desc,
                        weight_desc,
                        x_boxes,
                        weight_boxes,
                        full,
                        empty,
                        steps,
                        tiles_m,
                        tiles_n,
                        GROUPS,
                        COLUMNS,
                        BOX,
                        PANELS,
                        STAGES,
                        BAND,
                    ),
                ),
            ],
            [1],
            [40],
        )


launch_product = Launcher(product_kernel)
