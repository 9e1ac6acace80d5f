"""Prove the products with weights of four and eight bits on this GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from baton.kernels.hopper.narrow.product import (
    MANY_ROWS,
    ROW_TILES,
    StreamedProduct,
    plan_for,
    streamed,
)
from baton.kernels.hopper.narrow.streaming import STEP
from baton.kernels.proofs import ModelShapes
from baton.kernels.reference import NarrowWeight

CAPABILITY = (9, 0)
# More than two tiles of the most rows; and both sides of every border between tiles.
MOST_ROWS = 2 * MANY_ROWS.rows + 45
COUNTS = (1, 3, *(most + more for most, _ in ROW_TILES for more in (0, 1)), MOST_ROWS)
# What the bf16 of a result and fp32 sums of the inner dimension may err.
ROUNDING = 2.0**-8
SUM_ERROR = 5e-5
CHECKED_ROWS = 24
CHECKED_OUTPUTS = 4096
# Heads stay in bf16.
MAX_OUTPUTS = 65_536
GUARD_ROWS = 8
GUARD = 7.0
NAN_CODES = (0x7F, 0xFF)


def missing_for(shapes: ModelShapes, capability: tuple[int, int]) -> str:
    """Return why the products cannot serve a model; empty if they can."""
    if capability != CAPABILITY:
        return "they need compute capability 9.0"
    if not shapes.narrow:
        return "no weight of the model is stored in four or eight bits"
    if shapes.dtype != "bfloat16":
        return f"they multiply bfloat16, and the model computes in {shapes.dtype}"
    return ""


def prove(shapes: ModelShapes, device: str) -> str:
    """Return the first fault that products with weights of the model's shapes show."""
    for outputs, inputs in dict.fromkeys(shapes.linears):
        if outputs % 8 or inputs % 8 or outputs > MAX_OUTPUTS:
            continue
        how = shapes.narrow, shapes.narrow_group
        for weight in weights_of(*how, outputs, inputs, torch.device(device)):
            if fault := fault_of(weight, torch.device(device)):
                return f"{fault} (a weight of {outputs} x {inputs})"
    return ""


def weights_of(
    narrow: str, group: int, outputs: int, inputs: int, device: torch.device
) -> Iterator[NarrowWeight]:
    """Yield random weights of each way in which codes may have scales.

    Those of int4 are fp16 or bf16, those of int8 and FP8 by rows or not. `group` counts inputs; 0
    is all of them.
    """
    generator = torch.Generator(device).manual_seed(outputs + inputs)

    def integers(high: int, *size: int) -> Tensor:
        return torch.randint(high, size, generator=generator, device=device)

    def scales(*size: int) -> Tensor:
        return 0.5 + torch.rand(size, generator=generator, device=device)

    size = group or inputs
    groups = -(-inputs // size)
    no_zeros = torch.zeros(outputs, groups, dtype=torch.int32, device=device)
    by_row = scales(outputs, 1) / 1024
    codes = integers(16, outputs, inputs).to(torch.uint8)
    if narrow == "int4":
        zeros = integers(16, outputs, groups).int()
        # The latter are too small for fp16.
        for dtype, scale in ((torch.float16, 2.0**-6), (torch.bfloat16, 2.0**-22)):
            stored = (scales(outputs, groups) * scale).to(dtype).float()
            yield NarrowWeight(codes, stored, zeros, size)
        return
    if narrow == "fp4":
        powers = torch.exp2(integers(12, outputs, groups).float() - 10)
        yield NarrowWeight(codes, powers, no_zeros, size, is_fp4=True)
        return
    codes = integers(256, outputs, inputs).to(torch.uint8)
    if narrow == "int8":
        whole = codes.view(torch.int8)
        yield NarrowWeight(whole, by_row, no_zeros[:, :1], inputs)
        if group:
            yield NarrowWeight(whole, scales(outputs, groups) / 1024, no_zeros, size)
        return
    for nan in NAN_CODES:
        codes = codes.where(codes != nan, 0)
    fp8 = codes.view(torch.float8_e4m3fn)
    blocks = scales(-(-outputs // STEP), -(-inputs // STEP)) / 1024
    by_block = blocks.repeat_interleave(STEP, 0)[:outputs]
    yield NarrowWeight(fp8, by_block, torch.zeros_like(by_block).int(), STEP)
    yield NarrowWeight(fp8, by_row, no_zeros[:, :1], inputs)


def fault_of(weight: NarrowWeight, device: torch.device) -> str:
    """Return the first fault of one weight's product; empty if there is none."""
    made = streamed(weight, device)
    if made is None:
        return "it was not packed"
    return NarrowTrial(weight, made[1]).fault()


class NarrowTrial:
    """Random rows, and what the product of one weight makes of them in its largest tile."""

    def __init__(self, weight: NarrowWeight, product: StreamedProduct) -> None:
        self._weight = weight
        self._product = product
        device = weight.codes.device
        generator = torch.Generator(device).manual_seed(1)
        inputs = weight.codes.shape[1]
        x = torch.empty(MOST_ROWS, inputs, dtype=torch.bfloat16, device=device)
        x.normal_(generator=generator)
        x[:, 5] *= 40
        x[1] = 0
        self._x = x
        self._whole = product.compute(x, plan_for(product.weight, MOST_ROWS))

    def fault(self) -> str:
        kind = self._product.weight.kind
        faults = (self._error(), *self._of_tiles(), *self._of_counts(), self._counts())
        return next((f"{kind} {fault}" for fault in faults if fault), "")

    def _of_tiles(self) -> Iterator[str]:
        """Compare eight rows in every tile, with other rows guarded, and the same ones again."""
        few = self._x[2:10]
        for most, _ in (*ROW_TILES, (MOST_ROWS, MANY_ROWS)):
            plan = plan_for(self._product.weight, most)
            for _ in range(2):
                out = few.new_full((len(few) + GUARD_ROWS, self._outputs), GUARD)
                self._product.compute(few, plan, out)
                if not bool((out[len(few) :] == GUARD).all()):
                    yield f"writes behind its rows in tiles of {plan.tile.rows}"
                yield self._differs(out[: len(few)], 2, plan.tile.rows)

    def _of_counts(self) -> Iterator[str]:
        for count in COUNTS:
            for first in sorted({0, (MOST_ROWS - count) // 2, MOST_ROWS - count}):
                x = self._x[first : first + count]
                rows = self._product(x, self._product.weight.codes)
                plan = plan_for(self._product.weight, count)
                yield self._differs(rows, first, plan.tile.rows)

    def _counts(self) -> str:
        return "leaves parts counted" if bool(self._product.counts.any()) else ""

    @property
    def _outputs(self) -> int:
        return self._product.weight.outputs

    def _differs(self, rows: Tensor, first: int, tile: int) -> str:
        whole = self._whole[first : first + len(rows)]
        if torch.equal(rows.view(torch.int16), whole.view(torch.int16)):
            return ""
        return f"gives {len(rows)} rows from {first} on other bits in tiles of {tile}"

    def _error(self) -> str:
        """Return where the largest tile differs from the reference in fp64; empty if nowhere."""
        picked = torch.linspace(0, MOST_ROWS - 1, CHECKED_ROWS).long()
        x = self._x[picked.to(self._x.device)].double()
        got = self._whole[picked.to(self._x.device)].double()
        norms = x.norm(dim=1, keepdim=True)
        for start in range(0, self._outputs, CHECKED_OUTPUTS):
            outputs = slice(start, start + CHECKED_OUTPUTS)
            numbers = self._weight.values(outputs, torch.float64)
            wanted = x @ numbers.T
            allowed = wanted.abs() * ROUNDING + SUM_ERROR * norms * numbers.norm(dim=1)
            wrong = ~((got[:, outputs] - wanted).abs() <= allowed)
            if bool(wrong.any()):
                row, column = (int(at) for at in wrong.nonzero()[0])
                return f"is wrong in row {int(picked[row])} and output {start + column}"
        return ""
