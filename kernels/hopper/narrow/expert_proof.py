"""Prove the products of experts with weights of four and eight bits on this GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from baton.kernels.hopper.narrow.narrow_proof import (
    CAPABILITY,
    GUARD,
    GUARD_ROWS,
    ROUNDING,
    SUM_ERROR,
    weights_of,
)
from baton.kernels.hopper.narrow.product import (
    EXPERT_TILES,
    StreamedExperts,
    StreamPlan,
    plan_for,
    streamed_experts,
)
from baton.kernels.proofs import ModelShapes
from baton.kernels.reference import NarrowWeight

# Rows of the first experts and of the last one: none, less than a tile of any size, a whole tile of
# every size, and more than the largest.
COUNTS = (0, 1, 7, 128, 150, 0, 33)
# Different ones, which the experts take in turns.
NUM_WEIGHTS = 3


def missing_for(shapes: ModelShapes, capability: tuple[int, int]) -> str:
    """Return why the products cannot serve a model; empty if they can."""
    if capability != CAPABILITY:
        return "they need compute capability 9.0"
    if shapes.narrow_experts is None:
        return "no experts of the model are stored in four or eight bits"
    if shapes.dtype != "bfloat16":
        return f"they multiply bfloat16, and the model computes in {shapes.dtype}"
    if any(size % 8 for linear in shapes.narrow_experts.linears for size in linear):
        return "sizes of experts have to be multiples of 8"
    return ""


def prove(shapes: ModelShapes, device: str) -> str:
    """Return the first fault that products with experts of the model's shapes show."""
    experts = shapes.narrow_experts
    assert experts is not None
    for outputs, inputs in dict.fromkeys(experts.linears):
        sizes = experts.group, outputs, inputs, torch.device(device)
        for number, weight in enumerate(weights_of(experts.codes, *sizes)):
            # Kinds of scales are as many kernels; biases are there or not.
            if fault := fault_of(weight, experts.num_experts, has_biases=not number):
                return f"{fault} (experts of {outputs} x {inputs})"
    return ""


def fault_of(weight: NarrowWeight, num_experts: int, *, has_biases: bool) -> str:
    """Return the first fault of experts that have this weight with its outputs shifted."""
    device = weight.codes.device
    different = [shifted(weight, number) for number in range(NUM_WEIGHTS)]
    weights = [different[number % NUM_WEIGHTS] for number in range(num_experts)]
    biases = None
    if has_biases:
        generator = torch.Generator(device).manual_seed(2)
        biases = torch.empty(num_experts, len(weight.codes), device=device)
        biases = biases.normal_(generator=generator).bfloat16()
    made = streamed_experts(weights, device, biases)
    if made is None:
        return "they were not packed"
    return ExpertTrial(weights, made[1], biases).fault()


def shifted(weight: NarrowWeight, by: int) -> NarrowWeight:
    """Return a weight with blocks of its codes in another order."""
    codes = weight.codes.view(torch.uint8).roll(16 * by, 1)
    return NarrowWeight(
        codes.view(weight.codes.dtype),
        weight.scales,
        weight.zeros,
        weight.group,
        weight.is_fp4,
    )


class ExpertTrial:
    """Random rows, and what the product of experts makes of them in its largest tile."""

    def __init__(
        self,
        weights: Sequence[NarrowWeight],
        product: StreamedExperts,
        biases: Tensor | None,
    ) -> None:
        self._weights = weights
        self._product = product
        self._biases = biases
        device = weights[0].codes.device
        self._expert_of = experts_of_rows(len(weights)).to(device)
        generator = torch.Generator(device).manual_seed(1)
        sizes = len(self._expert_of), weights[0].codes.shape[1]
        x = torch.empty(sizes, dtype=torch.bfloat16, device=device)
        x.normal_(generator=generator)
        x[:, 5] *= 40
        x[1] = 0
        self._x = x
        every = torch.arange(len(x), device=device)
        self._whole = self._computed(every, self._plans()[-1])

    def fault(self) -> str:
        kind = self._product.weight.kind
        faults = (self._error(), *self._of_plans(), *self._of_counts())
        return next((f"{kind} {fault}" for fault in faults if fault), "")

    def _plans(self) -> list[StreamPlan]:
        weight = self._product.weight
        counts = (*(most for most, _ in EXPERT_TILES), EXPERT_TILES[-1][0] + 1)
        return [plan_for(weight, count * weight.experts) for count in counts]

    def _of_plans(self) -> Iterator[str]:
        """Compare all rows, and every third one, in tiles of every size, twice."""
        rows = torch.arange(len(self._x), device=self._x.device)
        for plan in self._plans():
            for picked in (rows, rows[1::3], rows):
                out = self._computed(picked, plan, has_guard=True)
                if not bool((out[len(picked) :] == GUARD).all()):
                    yield f"writes behind its rows in tiles of {plan.tile.rows}"
                yield self._differs(out[: len(picked)], picked, plan.tile.rows)

    def _of_counts(self) -> Iterator[str]:
        """Compare a few rows of some experts in the tiles that their number takes."""
        rows = torch.arange(len(self._x), device=self._x.device)
        for picked in (rows[:1], rows[5:6], rows[::40], rows[-40:]):
            plan = plan_for(self._product.weight, len(picked))
            yield self._differs(self._computed(picked, plan), picked, plan.tile.rows)

    def _computed(
        self, picked: Tensor, plan: StreamPlan, *, has_guard: bool = False
    ) -> Tensor:
        num_experts = self._product.weight.experts
        counts = torch.bincount(self._expert_of[picked], minlength=num_experts)
        ends = counts.cumsum(0).to(torch.int32)
        x = self._x[picked]
        num_rows = len(x) + GUARD_ROWS * has_guard
        out = x.new_full((num_rows, self._product.weight.outputs), GUARD)
        return self._product.compute(x, ends, plan, self._biases, out)

    def _differs(self, rows: Tensor, picked: Tensor, tile: int) -> str:
        whole = self._whole[picked]
        if torch.equal(rows.view(torch.int16), whole.view(torch.int16)):
            return ""
        return f"gives {len(rows)} rows other bits in tiles of {tile}"

    def _error(self) -> str:
        """Return where the largest tile differs from the reference in fp64; empty if nowhere.

        Of each expert, it checks the first row and the last one.
        """
        borders = self._expert_of.diff().nonzero().flatten().tolist()
        rows = (0, *borders, *(row + 1 for row in borders), len(self._x) - 1)
        for row in rows:
            expert = int(self._expert_of[row])
            numbers = self._weights[expert].values(dtype=torch.float64)
            x = self._x[row].double()
            wanted = numbers @ x
            allowed = SUM_ERROR * x.norm() * numbers.norm(dim=1)
            if self._biases is not None:
                wanted += self._biases[expert].double()
            allowed += wanted.abs() * ROUNDING
            wrong = ~((self._whole[row].double() - wanted).abs() <= allowed)
            if bool(wrong.any()):
                output = int(wrong.nonzero()[0])
                return f"is wrong in row {row} and output {output}, of expert {expert}"
        return ""


def experts_of_rows(num_experts: int) -> Tensor:
    """Return the expert of each row, in their order."""
    firsts = torch.arange(min(len(COUNTS) - 1, num_experts - 1))
    experts = torch.cat((firsts, torch.tensor([num_experts - 1])))
    return experts.repeat_interleave(torch.tensor(COUNTS[-len(experts) :]))
