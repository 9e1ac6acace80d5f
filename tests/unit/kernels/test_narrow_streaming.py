"""Weights of four and eight bits on compute capability 9.0: their packing, plans and proof."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.kernels.hopper.narrow import narrow_proof, product
from baton.kernels.hopper.narrow.narrow_proof import (
    COUNTS,
    NarrowTrial,
    missing_for,
)
from baton.kernels.hopper.narrow.packing import PackedWeight, packed_weight
from baton.kernels.hopper.narrow.product import (
    MAX_SPREAD_ROWS,
    StreamedProduct,
    StreamPlan,
    plan_for,
)
from baton.kernels.proofs import ModelShapes
from baton.kernels.reference import NarrowWeight
from tests.support.compile_products import KINDS, weight_of
from tests.support.module_process import said_by
from tests.support.narrow_words import read

pytest.importorskip("triton")

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(256, 512), (200, 328), (128, 128)])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_codes_are_read_as_the_numbers_that_they_stand_for(kind, shape):
    """By the instructions of the kernel, exactly, in every output and input."""
    outputs, inputs = shape
    weight = weight_of(kind, outputs, inputs)
    packed = packed_weight(weight, CPU)
    assert packed is not None
    numbers = read(packed)
    assert torch.equal(numbers[:outputs, :inputs], weight.values(dtype=torch.float64))
    assert torch.isfinite(numbers).all()
    assert (packed.kind == "int4") == kind.startswith("int4")
    assert packed.is_half == (kind.startswith("int4") and kind != "int4 bf16")


def test_all_codes_are_among_those_that_are_tried():
    every = {"int4 fp16": 16, "mxfp4": 16, "int8 by rows": 256, "fp8 by rows": 254}
    for kind, count in every.items():
        codes = weight_of(kind, 256, 512).codes
        assert len(codes.view(torch.uint8).unique()) == count


def test_weights_whose_scales_or_groups_do_not_fit_are_not_packed():
    codes = torch.zeros(128, 256, dtype=torch.uint8)
    fp8 = codes.view(torch.float8_e4m3fn)
    zeros = torch.zeros(128, 2, dtype=torch.int32)
    ones = torch.ones(128, 2)
    odd = ones * (1 + 2**-20)
    apart = ones.clone()
    apart[64:] = 2
    short = torch.ones(128, 4), torch.zeros(128, 4, dtype=torch.int32), 64
    shorter = torch.ones(128, 16), torch.zeros(128, 16, dtype=torch.int32), 16
    for weight in (
        NarrowWeight(codes, odd, zeros, 128),
        NarrowWeight(codes, ones, zeros + 128, 128),
        NarrowWeight(codes, *shorter),
        NarrowWeight(codes.view(torch.int8), *shorter),
        NarrowWeight(codes, *shorter, is_fp4=True),
        NarrowWeight(codes, 1.5 * short[0], *short[1:], is_fp4=True),
        NarrowWeight(codes, 4 * short[0], *short[1:], is_fp4=True),
        NarrowWeight(fp8, *short),
        NarrowWeight(fp8, apart, zeros, 128),
        NarrowWeight(codes[:124], ones[:124], zeros[:124], 128),
        NarrowWeight(codes[:, :252], ones, zeros, 128),
    ):
        assert packed_weight(weight, CPU) is None
    # Scales of groups of 256, and of whole rows.
    for scales in (torch.rand(128, 1).half().float(), ones[:, :1]):
        whole = NarrowWeight(codes, scales, zeros[:, :1], 256)
        packed = packed_weight(whole, CPU)
        assert packed is not None
        assert torch.equal(read(packed), whole.values(dtype=torch.float64))


@pytest.mark.parametrize("kind", ["int4 fp16", "fp8 in blocks"])
def test_parts_follow_from_the_weight_and_tiles_from_the_rows(kind):
    for shape, parts in (((512, 1024), 2), ((512, 2048), 4), ((512, 384), 1)):
        packed = packed_weight(weight_of(kind, *shape), CPU)
        assert packed is not None
        assert packed.parts == parts
        plans = [plan_for(packed, rows) for rows in (1, 8, 9, 33, 65, 129, 5000)]
        assert [plan.tile.rows for plan in plans] == [8, 8, 32, 64, 64, 128, 128]
        for plan, rows in zip(plans, (1, 8, 9, 33, 65, 129, 5000), strict=True):
            assert plan.is_spread == (parts > 1 and rows <= MAX_SPREAD_ROWS)
            assert plan.stages >= 3


class StreamMachine:
    """Stands in for the kernel: follows a launch program by program, in fp64."""

    def __init__(self, packed: PackedWeight) -> None:
        self.numbers = read(packed)  # outputs and inputs filled up to tiles
        self.launches: list[tuple[int, int]] = []

    def __call__(
        self, grid: tuple[int, int, int], *arguments: object, **constants: int
    ) -> None:
        self.launches.append(grid[:2])
        codes, _, x, _, biases, ends, out, sums, counts, *sizes = arguments
        rows, columns, steps, parts, tiles = sizes
        assert biases is None
        assert ends is None
        assert tiles * 256 == len(self.numbers) * 2
        programs, num_parts = self.launches[-1]
        tile_rows = constants["ROWS"]
        tiles_m = -(-rows // tile_rows)
        cells = 128 * tile_rows
        assert codes.shape == [*codes.base.tensor.shape]
        values = torch.zeros(tiles_m * tile_rows, 128 * steps, dtype=torch.float64)
        values[:rows, : x.shape[1]] = x.base.tensor.double()
        if constants["IS_SPREAD"]:
            assert num_parts == parts > 1
            assert len(sums) == parts * programs * cells
            assert len(counts) >= 2 * programs
        written = torch.zeros(rows, columns)
        for program in range(programs):
            tile = program // tiles_m
            first = program % tiles_m * tile_rows
            weight = self.numbers[128 * tile : 128 * (tile + 1)]
            assert len(weight) == 128, "the tile is one of the weight's"
            total = torch.zeros(tile_rows, 128, dtype=torch.float64)
            for part in range(parts):
                inputs = slice(
                    128 * (steps * part // parts), 128 * (steps * (part + 1) // parts)
                )
                x_part = values[first : first + tile_rows, inputs]
                total += x_part @ weight[:, inputs].T
            area = np.s_[first : first + tile_rows, 128 * tile : 128 * (tile + 1)]
            live = out[area]
            live[:] = total[: live.shape[0], : live.shape[1]]
            written[area] += 1
        assert (written == 1).all(), "each number has one program"


class Described:
    """A descriptor's base that keeps its tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize("kind", ["int4 in groups of 32", "fp8 by rows"])
@pytest.mark.parametrize("shape", [(200, 2048), (264, 328)])
def test_a_launch_computes_every_number_once(kind, shape, monkeypatch):
    """In the plan of its rows, and in plans of more, as proofs and warm-up take them."""
    weight = weight_of(kind, *shape)
    made = product.streamed(weight, CPU)
    assert made is not None
    codes, streamed = made
    machine = StreamMachine(streamed.weight)
    monkeypatch.setattr(product, "launch_streaming", machine)
    described = {codes.data_ptr(): codes}

    def describe(address: int, rows: int, *_: int) -> SimpleNamespace:
        tensor = described[address]
        shape = [rows, tensor.shape[1]]
        return SimpleNamespace(base=Described(tensor), shape=shape)

    monkeypatch.setattr(product, "_words", describe)
    monkeypatch.setattr(product, "_metas", lambda *_: None)
    monkeypatch.setattr(product, "_values", describe)
    numbers = weight.values(dtype=torch.float64)
    for rows, planned in (
        (1, 1),
        (7, 128),
        (8, 5000),
        (33, 33),
        (100, 100),
        (300, 300),
    ):
        x = torch.randn(rows, shape[1]).bfloat16()
        described[x.data_ptr()] = x
        plan = plan_for(streamed.weight, planned)
        out = streamed.compute(x, plan)
        torch.testing.assert_close(out, (x.double() @ numbers.T).bfloat16())
        if rows == planned:
            assert torch.equal(streamed(x, codes), out)
    assert {parts for _, parts in machine.launches} == {1, streamed.weight.parts}


class StandIn(StreamedProduct):
    """Computes what the kernel should, except what the tests change."""

    def compute(self, x: Tensor, plan: StreamPlan, out: Tensor | None = None) -> Tensor:
        result = (x.double() @ NUMBERS[0].T).bfloat16()
        if out is None:
            return result
        out[: len(x)] = result
        return out


NUMBERS: list[Tensor] = []


def trial(stand_in: type[StandIn]) -> str:
    weight = weight_of("int4 fp16", 72, 256)
    packed = packed_weight(weight, CPU)
    assert packed is not None
    NUMBERS[:] = [weight.values(dtype=torch.float64)]
    counts = torch.zeros(4, dtype=torch.int32)
    return NarrowTrial(weight, stand_in(packed, counts)).fault()


def test_right_products_are_proven():
    assert trial(StandIn) == ""


class OtherBits(StandIn):
    def compute(self, x: Tensor, plan: StreamPlan, out: Tensor | None = None) -> Tensor:
        result = super().compute(x, plan, out)
        if len(x) == 33:
            result[32, 5] *= 1.01
        return result


class WritesBehind(StandIn):
    def compute(self, x: Tensor, plan: StreamPlan, out: Tensor | None = None) -> Tensor:
        result = super().compute(x, plan, out)
        if out is not None and plan.tile.rows == 64:
            out[len(x)] = 1.0
        return result


class Wrong(StandIn):
    def compute(self, x: Tensor, plan: StreamPlan, out: Tensor | None = None) -> Tensor:
        return super().compute(x * 1.02, plan, out)


class LeavesCounts(StandIn):
    def compute(self, x: Tensor, plan: StreamPlan, out: Tensor | None = None) -> Tensor:
        self.counts[1] = 1
        return super().compute(x, plan, out)


@pytest.mark.parametrize(
    ("stand_in", "fault"),
    [
        (OtherBits, "int4 gives 33 rows from 0 on other bits in tiles of 64"),
        (WritesBehind, "int4 writes behind its rows in tiles of 64"),
        (Wrong, "int4 is wrong in row 0 and output"),
        (LeavesCounts, "int4 leaves parts counted"),
    ],
)
def test_each_fault_is_found(stand_in, fault):
    assert trial(stand_in).startswith(fault)


def test_a_model_is_told_what_it_lacks(monkeypatch):
    shapes = ModelShapes(((128, 128), (70, 64)), 4, 4, 32, 16, narrow="fp8")
    assert missing_for(shapes, (9, 0)) == ""
    assert "capability" in missing_for(shapes, (8, 9))
    plain = ModelShapes(((128, 128),), 4, 4, 32, 16)
    assert "four or eight bits" in missing_for(plain, (9, 0))
    tried: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        narrow_proof, "fault_of", lambda weight, _: tried.append(weight.codes.shape)
    )
    assert narrow_proof.prove(shapes, "cpu") == ""
    assert tried == [(128, 128)] * 2
    assert {8, 9, 32, 33, 64, 65, 128, 129} <= {*COUNTS}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "rows",
    [8, *(pytest.param(n, marks=pytest.mark.release) for n in (32, 64, 128, 300))],
)
def test_the_kernel_compiles_for_hopper(rows, tmp_path):
    """Two programs on a multiprocessor spill a few bytes in tiles of 64, as on the card."""
    # The quick test of experts compiles this kernel for mxfp4.
    kinds = ("int4 in groups of 32",) if rows == 8 else KINDS
    lines = said_by(
        "tests.support.compile_products",
        "dense",
        str(rows),
        *kinds,
        env={"TRITON_CACHE_DIR": str(tmp_path)},
    )
    reports = json.loads(lines[-1])
    assert len(reports) == len(kinds)
    for report in reports:
        assert report["local_bytes"] <= (64 if rows >= 128 else 8), report
        assert report["shared_bytes"] <= 232_448, report
        # Of both warpgroups, for each 16 of 128 inputs.
        assert report["products"] == 16, report
