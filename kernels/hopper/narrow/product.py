"""The product with packed weights of four and eight bits on compute capability 9.0.

One arithmetic serves all numbers of rows: the tile's rows change with them, and the parts in which
inputs are summed do not. Experts have one part.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from baton.kernels.hopper.narrow.packing import (
    PackedWeight,
    packed_experts,
    packed_weight,
)
from baton.kernels.hopper.narrow.streaming import (
    FORMATS,
    GROUPS,
    STEP,
    UNIT,
    streaming_kernel,
)
from baton.kernels.hopper.products.gluon_product import Base
from baton.kernels.hopper.products.product import readable
from baton.kernels.launch import Launcher, next_power_of_2
from baton.kernels.reference import NarrowWeight

WORDS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
METAS = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
# Of rows, by the inputs that a copy brings.
VALUES = {
    panel: gl.NVMMASharedLayout(
        swizzle_byte_width=2 * panel, element_bitwidth=16, rank=2
    )
    for panel in (64, 32)
}
MAX_DESCRIPTORS = 4096
MAX_STAGES = 12
# Bytes of shared memory for the stages of a program, alone on a multiprocessor or one of two, and
# the registers of a thread: at the launch, and of those that multiply.
ROOM = {1: 216 << 10, 2: 108 << 10}
REGISTERS = {1: (168, 232), 2: (80, 104)}


class RowTile(NamedTuple):
    """How many rows a program computes, and how many programs a multiprocessor has."""

    rows: int
    per_multiprocessor: int


# By the most rows that it is taken for. Beyond the last one but one, a program computes all parts.
ROW_TILES = (
    (8, RowTile(8, 2)),
    (32, RowTile(32, 2)),
    (64, RowTile(64, 1)),
    (128, RowTile(64, 2)),
)
MANY_ROWS = RowTile(128, 1)
MAX_SPREAD_ROWS = 128
# By the most rows of an expert, on average.
EXPERT_TILES = (
    (4, RowTile(8, 2)),
    (8, RowTile(16, 2)),
    (32, RowTile(32, 2)),
    (64, RowTile(64, 1)),
)
# Sums of shorter groups leave two programs too few registers, except for the fewest rows.
MIN_SHARED_GROUP = 64

launch_streaming = Launcher(streaming_kernel)


class StreamPlan(NamedTuple):
    """How to compute some rows."""

    tile: RowTile
    stages: int
    is_spread: bool  # each part has a program of its own


def plan_for(weight: PackedWeight, rows: int) -> StreamPlan:
    """Return the plan for some rows: of a layer, or of all experts together."""
    tiles = EXPERT_TILES if weight.experts else ROW_TILES
    rows_each = rows / max(1, weight.experts)
    tile = next((tile for most, tile in tiles if rows_each <= most), MANY_ROWS)
    if weight.group < MIN_SHARED_GROUP and tile.rows > ROW_TILES[0][0]:
        tile = tile._replace(per_multiprocessor=1)
    codes = 1024 * FORMATS[weight.kind].bits + 256 * weight.words
    stage = GROUPS * codes + tile.rows * STEP * 2
    stages = max(2, min(MAX_STAGES, ROOM[tile.per_multiprocessor] // stage))
    is_spread = weight.parts > 1 and rows <= MAX_SPREAD_ROWS
    return StreamPlan(tile, stages, is_spread)


@dataclass(slots=True, frozen=True)
class StreamedProduct:
    """Computes `x @ weight.T` with one packed weight. It has the signature of a layer's product."""

    weight: PackedWeight
    # How many parts of a tile are done; each launch leaves zeros.
    counts: Tensor
    # Its bits are not those of the product that widens weights.
    trial: ClassVar[bytes] = b"streamed"

    def __call__(self, x: Tensor, codes: Tensor) -> Tensor:
        """Return `[rows, outputs]` of `[rows, inputs]`. `codes` are those of the weight."""
        assert codes.data_ptr() == self.weight.codes.data_ptr()
        return self.compute(x, plan_for(self.weight, max(1, len(x))))

    def compute(self, x: Tensor, plan: StreamPlan, out: Tensor | None = None) -> Tensor:
        weight = self.weight
        rows = x.shape[0]
        if out is None:
            out = x.new_empty((rows, weight.outputs))
        if rows:
            programs = weight.tiles * -(-rows // plan.tile.rows)
            assert not plan.is_spread or GROUPS * programs <= len(self.counts)
            _launch(weight, x, plan, programs, (out, self.counts))
        return out

    def prepare(self) -> None:
        """Launch each kernel that the weight may need: a captured step loads none."""
        x = self.weight.codes.new_zeros((1, self.weight.inputs), dtype=torch.bfloat16)
        for rows in (*(most for most, _ in ROW_TILES), MAX_SPREAD_ROWS + 1):
            self.compute(x, plan_for(self.weight, rows))


@dataclass(slots=True, frozen=True)
class StreamedExperts:
    """Computes each row with the weight of its expert. It has the signature of such a product."""

    weight: PackedWeight

    def __call__(
        self, x: Tensor, codes: Tensor, ends: Tensor, biases: Tensor | None = None
    ) -> Tensor:
        """Return `[rows, outputs]` of `[rows, inputs]` in the order of their experts.

        `ends`, `[experts]` int32, counts the rows up to the last one of each expert.
        """
        assert codes.data_ptr() == self.weight.codes.data_ptr()
        return self.compute(x, ends, plan_for(self.weight, len(x)), biases)

    def compute(
        self,
        x: Tensor,
        ends: Tensor,
        plan: StreamPlan,
        biases: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        weight = self.weight
        rows = x.shape[0]
        assert len(ends) == weight.experts
        if out is None:
            out = x.new_empty((rows, weight.outputs))
        if rows:
            # Each expert may have one tile that is not full.
            tiles = -(-rows // plan.tile.rows) + min(weight.experts, rows)
            programs = weight.tiles * tiles
            _launch(weight, x, plan, programs, (out, ends), (ends, biases))
        return out

    def prepare(self, biases: Tensor | None) -> None:
        """Launch each kernel that the weight may need: a captured step loads none."""
        codes = self.weight.codes
        x = codes.new_zeros((1, self.weight.inputs), dtype=torch.bfloat16)
        ends = codes.new_ones(self.weight.experts)
        for most in (*(most for most, _ in EXPERT_TILES), EXPERT_TILES[-1][0] + 1):
            plan = plan_for(self.weight, most * self.weight.experts)
            self.compute(x, ends, plan, biases)


def _launch(
    weight: PackedWeight,
    x: Tensor,
    plan: StreamPlan,
    programs: int,
    results: tuple[Tensor, Tensor],
    experts: tuple[Tensor, Tensor | None] | None = None,
) -> None:
    """Launch the kernel.

    `results` are what it computes, and how many parts of a tile are done; `experts` the ends of
    their rows, and their biases.
    """
    out, counts = results
    ends, biases = experts or (None, None)
    rows = x.shape[0]
    x, of_x = readable(x)
    cells = UNIT * GROUPS * plan.tile.rows * programs
    sums = x.new_empty(
        cells * weight.parts if plan.is_spread else 0, dtype=torch.float32
    )
    codes = _words(weight.codes.data_ptr(), len(weight.codes))
    meta = codes
    if weight.meta is not None:
        meta = _metas(weight.meta.data_ptr(), len(weight.meta))
    at_launch, multiplying = REGISTERS[plan.tile.per_multiprocessor]
    launch_streaming(
        (programs, weight.parts if plan.is_spread else 1, 1),
        codes,
        meta,
        _values(*of_x, plan.tile.rows, min(weight.group, STEP // 2)),
        weight.scales,
        biases,
        ends,
        out,
        sums,
        counts,
        rows,
        weight.outputs,
        weight.steps,
        weight.parts,
        weight.tiles,
        EXPERTS=weight.experts,
        SLOTS=next_power_of_2(max(1, weight.experts)),
        KIND=weight.kind,
        PIECES=FORMATS[weight.kind].bits // 4,
        NUM_WORDS=weight.words,
        GROUP=weight.group,
        IS_HALF=weight.is_half,
        IS_SPREAD=plan.is_spread,
        ROWS=plan.tile.rows,
        STAGES=plan.stages,
        REGISTERS=multiplying,
        num_warps=4,
        maxnreg=at_launch,
    )


@functools.lru_cache(MAX_DESCRIPTORS)
def _words(address: int, rows: int) -> object:
    base = Base(address, torch.int32)
    return TensorDescriptor(base, [rows, 32], [32, 1], [32, 32], WORDS)


@functools.lru_cache(MAX_DESCRIPTORS)
def _metas(address: int, rows: int) -> object:
    base = Base(address, torch.int32)
    return TensorDescriptor(base, [rows, UNIT], [UNIT, 1], [1, UNIT], METAS)


@functools.lru_cache(MAX_DESCRIPTORS)
def _values(
    address: int, rows: int, inner: int, stride: int, box: int, panel: int
) -> object:
    sizes = [rows, inner], [stride, 1], [box, panel]
    return TensorDescriptor(Base(address), *sizes, VALUES[panel])


def streamed(
    weight: NarrowWeight, device: torch.device
) -> tuple[Tensor, StreamedProduct] | None:
    """Return the codes on a device, and the product with them; None where they do not fit."""
    packed = packed_weight(weight, device)
    if packed is None:
        return None
    size = GROUPS * packed.tiles * max(1, MAX_SPREAD_ROWS // 64)
    counts = torch.zeros(size, dtype=torch.int32, device=device)
    product = StreamedProduct(packed, counts)
    if device.type == "cuda":
        product.prepare()
    return packed.codes, product


def streamed_experts(
    weights: Sequence[NarrowWeight], device: torch.device, biases: Tensor | None = None
) -> tuple[Tensor, StreamedExperts] | None:
    """Return the codes on a device, and the product with them; None where they do not fit.

    The product will be given `biases`.
    """
    packed = packed_experts(weights, device)
    if packed is None:
        return None
    product = StreamedExperts(packed)
    if device.type == "cuda":
        product.prepare(biases)
    return packed.codes, product
