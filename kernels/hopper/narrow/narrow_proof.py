"""Prove the products with weights of four bits and FP8 on this GPU."""

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
        return "no weight of the model is stored in four bits or FP8"
    if shapes.dtype != "bfloat16":
        return f"they multiply bfloat16, and the model computes in {shapes.dtype}"
    return ""


def prove(shapes: ModelShapes, device: str) -> str:
    """Return the first fault that products with weights of the model's shapes show."""
    for outputs, inputs in dict.fromkeys(shapes.linears):
        if outputs % 8 or inputs % 8 or outputs > MAX_OUTPUTS:
            continue
        for weight in weights_of(shapes.narrow, outputs, inputs, torch.device(device)):
            if fault := fault_of(weight, torch.device(device)):
                return f"{fault} (a weight of {outputs} x {inputs})"
    return ""


def weights_of(
    narrow: str, outputs: int, inputs: int, device: torch.device
) -> Iterator[NarrowWeight]:
    """Yield random weights: int4 with scales of fp16 and of bf16, or fp8 in blocks and by rows."""
    generator = torch.Generator(device).manual_seed(outputs + inputs)
    groups = -(-inputs // STEP)

    def integers(high: int, *size: int) -> Tensor:
        return torch.randint(high, size, generator=generator, device=device)

    def scales(*size: int) -> Tensor:
        return 0.5 + torch.rand(size, generator=generator, device=device)

    zeros = integers(16, outputs, groups).int()
    if narrow == "int4":
        codes = integers(16, outputs, inputs).to(torch.uint8)
        # The latter are too small for fp16.
        for dtype, size in ((torch.float16, 2.0**-6), (torch.bfloat16, 2.0**-22)):
            stored = (scales(outputs, groups) * size).to(dtype).float()
            yield NarrowWeight(codes, stored, zeros, STEP)
        return
    codes = integers(256, outputs, inputs).to(torch.uint8)
    for nan in NAN_CODES:
        codes = codes.where(codes != nan, 0)
    fp8 = codes.view(torch.float8_e4m3fn)
    blocks = scales(-(-outputs // STEP), groups) / 1024
    by_block = blocks.repeat_interleave(STEP, 0)[:outputs]
    yield NarrowWeight(fp8, by_block, torch.zeros_like(zeros), STEP)
    by_row = scales(outputs, 1) / 1024
    yield NarrowWeight(fp8, by_row, torch.zeros_like(by_row).int(), inputs)


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
            numbers = numbers_of(self._weight, outputs)
            wanted = x @ numbers.T
            allowed = wanted.abs() * ROUNDING + SUM_ERROR * norms * numbers.norm(dim=1)
            wrong = ~((got[:, outputs] - wanted).abs() <= allowed)
            if bool(wrong.any()):
                row, column = (int(at) for at in wrong.nonzero()[0])
                return f"is wrong in row {int(picked[row])} and output {start + column}"
        return ""


def numbers_of(weight: NarrowWeight, outputs: slice = slice(None)) -> Tensor:
    """Return what the codes of some outputs stand for, `[outputs, inputs]` in fp64."""
    of = torch.arange(weight.codes.shape[1], device=weight.codes.device) // weight.group
    zeros = weight.zeros[outputs][:, of]
    scales = weight.scales[outputs][:, of]
    codes = weight.codes[outputs]
    codes = codes.float() if codes.dtype != torch.uint8 else codes
    return (codes.double() - zeros) * scales.double()
