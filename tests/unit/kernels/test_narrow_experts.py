"""Experts with narrow weights on compute capability 9.0: their packing, tiles and proof."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from baton.kernels import reference
from baton.kernels.hopper.narrow import expert_proof, product
from baton.kernels.hopper.narrow.expert_proof import (
    ExpertTrial,
    experts_of_rows,
    missing_for,
)
from baton.kernels.hopper.narrow.packing import PackedWeight, packed_experts
from baton.kernels.hopper.narrow.product import (
    StreamedExperts,
    StreamPlan,
    plan_for,
)
from baton.kernels.proofs import ModelShapes, NarrowExperts
from baton.kernels.reference import NarrowWeight
from tests.support.compile_products import KINDS, weight_of
from tests.support.module_process import said_by
from tests.support.narrow_words import read

pytest.importorskip("triton")

CPU = torch.device("cpu")
NUM_EXPERTS = 5


def experts_of(kind: str, outputs: int, inputs: int) -> list[NarrowWeight]:
    weight = weight_of(kind, outputs, inputs)
    return [expert_proof.shifted(weight, number) for number in range(NUM_EXPERTS)]


@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_read_as_the_numbers_that_they_stand_for(kind):
    weights = experts_of(kind, 200, 328)
    packed = packed_experts(weights, CPU)
    assert packed is not None
    assert (packed.experts, packed.outputs, packed.parts) == (NUM_EXPERTS, 200, 1)
    numbers = read(packed).view(NUM_EXPERTS, 256, -1)
    for own, weight in zip(numbers, weights, strict=True):
        assert torch.equal(own[:200, :328], weight.values(dtype=torch.float64))
    assert torch.isfinite(numbers).all()


def test_experts_of_several_kinds_are_not_packed():
    four, eight = (weight_of(kind, 128, 256) for kind in ("mxfp4", "int8 by rows"))
    assert packed_experts([four, eight], CPU) is None
    assert packed_experts([four, weight_of("mxfp4", 256, 256)], CPU) is None


class ExpertMachine:
    """Stands in for the kernel: follows a launch program by program, in fp64."""

    def __init__(self, packed: PackedWeight) -> None:
        shape = packed.experts, 128 * packed.tiles, -1
        self.numbers = read(packed).view(shape)
        self.tile_rows: list[int] = []

    def __call__(
        self, grid: tuple[int, int, int], *arguments: object, **constants: int
    ) -> None:
        _, _, x, _, biases, ends, out, _, _, *sizes = arguments
        _, columns, steps, parts, tiles = sizes
        tile_rows = constants["ROWS"]
        self.tile_rows.append(tile_rows)
        assert (*grid[1:], parts) == (1, 1, 1)
        assert constants["SLOTS"] >= constants["EXPERTS"] == NUM_EXPERTS
        values = torch.zeros(len(x) + tile_rows, 128 * steps, dtype=torch.float64)
        values[: len(x), : x.shape[1]] = x.double()
        starts = ends - ends.diff(prepend=ends.new_zeros(1))
        row_tiles = (ends - starts + tile_rows - 1) // tile_rows
        tile_ends = row_tiles.cumsum(0)
        written = torch.zeros(len(x), columns)
        for program in range(grid[0]):
            tile = program % tiles
            place = program // tiles
            expert = int((tile_ends <= place).sum())
            if expert >= NUM_EXPERTS:
                continue
            before = place - int(tile_ends[expert] - row_tiles[expert])
            first = int(starts[expert]) + before * tile_rows
            last = min(first + tile_rows, int(ends[expert]))
            outputs = slice(128 * tile, min(128 * (tile + 1), columns))
            result = values[first:last] @ self.numbers[expert, outputs].T
            out[first:last, outputs] = result + biases[expert, outputs].double()
            written[first:last, outputs] += 1
        assert (written == 1).all(), "each number has one program"


@pytest.mark.parametrize("counts", [(0, 3, 0, 41, 1), (1, 0, 0, 0, 0), (300,) * 5])
def test_a_launch_computes_every_row_with_its_expert(counts, monkeypatch):
    weights = experts_of("int4 in groups of 32", 200, 328)
    biases = torch.randn(NUM_EXPERTS, 200).bfloat16()
    made = product.streamed_experts(weights, CPU, biases)
    assert made is not None
    codes, streamed = made
    machine = ExpertMachine(streamed.weight)
    monkeypatch.setattr(product, "launch_streaming", machine)
    x = torch.randn(sum(counts), 328).bfloat16()
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    for name in ("_words", "_metas"):
        monkeypatch.setattr(product, name, lambda *_: None)
    monkeypatch.setattr(product, "_values", lambda *_: x)
    wide = torch.stack([weight.values() for weight in weights])
    wanted = reference.grouped_product(x, wide, ends, biases)
    torch.testing.assert_close(streamed(x, codes, ends, biases), wanted)
    for rows in (4, 8, 16, 64, 65):
        plan = plan_for(streamed.weight, rows * NUM_EXPERTS)
        torch.testing.assert_close(streamed.compute(x, ends, plan, biases), wanted)
    assert machine.tile_rows[1:] == [8, 16, 32, 64, 128]


class StandIn(StreamedExperts):
    """Computes what the kernel should, except what the tests change."""

    def compute(
        self,
        x: Tensor,
        ends: Tensor,
        plan: StreamPlan,
        biases: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        result = reference.grouped_product(x, WIDE[0], ends, biases)
        assert out is not None
        out[: len(x)] = result
        return out


WIDE: list[Tensor] = []


class OtherBits(StandIn):
    def compute(self, x: Tensor, *others: object) -> Tensor:
        result = super().compute(x, *others)
        if len(x) == 1:
            result[0, 7] *= 1.01
        return result


class WritesBehind(StandIn):
    def compute(self, x: Tensor, ends: Tensor, plan: StreamPlan, *others) -> Tensor:
        result = super().compute(x, ends, plan, *others)
        if plan.tile.rows == 32 and len(result) > len(x):
            result[len(x)] = 1.0
        return result


class OtherExpert(StandIn):
    def compute(self, x: Tensor, ends: Tensor, *others: object) -> Tensor:
        return super().compute(x, (ends + 1).clamp(max=len(x)), *others)


def trial(stand_in: type[StandIn]) -> str:
    weights = experts_of("mxfp4", 72, 256)
    packed = packed_experts(weights, CPU)
    assert packed is not None
    WIDE[:] = [torch.stack([weight.values() for weight in weights])]
    biases = torch.randn(NUM_EXPERTS, 72).bfloat16()
    return ExpertTrial(weights, stand_in(packed), biases).fault()


@pytest.mark.parametrize(
    ("stand_in", "fault"),
    [
        (StandIn, ""),
        (OtherBits, "mxfp4 gives 1 rows other bits in tiles of 8"),
        (WritesBehind, "mxfp4 writes behind its rows in tiles of 32"),
        (OtherExpert, "mxfp4 is wrong in row"),
    ],
)
def test_each_fault_is_found(stand_in, fault):
    found = trial(stand_in)
    assert found.startswith(fault)
    assert bool(found) == bool(fault)


def test_rows_of_a_proof_leave_experts_without_any():
    for num_experts in (1, 5, 32, 128):
        counts = torch.bincount(experts_of_rows(num_experts), minlength=num_experts)
        assert len(counts) == num_experts
        assert counts[-1]
        assert (counts == 0).any() == (num_experts > 2)


def test_a_model_is_told_what_it_lacks(monkeypatch):
    experts = NarrowExperts(4, ((64, 128), (128, 32)), "int4", 128)
    shapes = ModelShapes((), 4, 4, 32, 16, narrow_experts=experts)
    assert missing_for(shapes, (9, 0)) == ""
    assert "capability" in missing_for(shapes, (8, 9))
    assert "four or eight bits" in missing_for(ModelShapes((), 4, 4, 32, 16), (9, 0))
    odd = NarrowExperts(4, ((60, 128),), "int4", 128)
    shapes_odd = ModelShapes((), 4, 4, 32, 16, narrow_experts=odd)
    assert "multiples of 8" in missing_for(shapes_odd, (9, 0))
    tried: list[SimpleNamespace] = []

    def note(weight: NarrowWeight, num_experts: int, *, has_biases: bool) -> str:
        tried.append((tuple(weight.codes.shape), num_experts, has_biases))
        return ""

    monkeypatch.setattr(expert_proof, "fault_of", note)
    assert expert_proof.prove(shapes, "cpu") == ""
    assert tried == [
        (shape, 4, has_biases)
        for shape in ((64, 128), (128, 32))
        for has_biases in (True, False)
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "rows",
    [4, *(pytest.param(n, marks=pytest.mark.release) for n in (8, 30, 60, 100))],
)
def test_the_kernel_compiles_for_hopper(rows, tmp_path):
    kinds = ("mxfp4",) if rows == 4 else KINDS
    lines = said_by(
        "tests.support.compile_products",
        "experts",
        str(rows),
        *kinds,
        env={"TRITON_CACHE_DIR": str(tmp_path)},
    )
    reports = json.loads(lines[-1])
    assert len(reports) == len(kinds)
    for report in reports:
        assert report["local_bytes"] <= (64 if rows == 100 else 8), report
        assert report["shared_bytes"] <= 232_448, report
        assert report["products"] == 16, report
