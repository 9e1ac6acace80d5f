"""The proof of the products finds each way in which kernels may be wrong."""

import msgspec
import pytest
import torch
from torch import Tensor

from baton.kernels.hopper.products import product_proof
from baton.kernels.hopper.products.product_proof import (
    ProductTrial,
    counts_for,
    missing_for,
    prove,
)
from baton.kernels.hopper.products.variants import ANY_ROWS, TABLE
from baton.kernels.proofs import CANDIDATES, PRODUCTS, ModelShapes, kernels_of

QWEN3_8B = ModelShapes(
    ((6144, 4096), (4096, 4096), (24_576, 4096), (4096, 12_288), (151_936, 4096)),
    num_heads=32,
    kv_heads=8,
    head_dim=128,
    block_size=16,
)
COLUMNS, INNER = 72, 256
HOPPER = (9, 0)
CPU = torch.device("cpu")


def exact(x: Tensor, weight: Tensor) -> Tensor:
    return (x.double() @ weight.double().T).bfloat16()


class RightProduct:
    """Computes each variant right, except what the tests change."""

    has_cuda = True

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        return exact(x, weight)

    def compute(self, name: str, x: Tensor, weight: Tensor, out: Tensor) -> None:
        out.copy_(exact(x, weight))


def fault_of(product: RightProduct, fallback: product_proof.Product = exact) -> str:
    return ProductTrial(product, COLUMNS, INNER, CPU, fallback).fault()


def test_right_products_are_proven():
    assert fault_of(RightProduct()) == ""


class WrongVariant(RightProduct):
    """One variant is wrong with one number of rows, in the last bit of one number."""

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self.count = count

    def compute(self, name: str, x: Tensor, weight: Tensor, out: Tensor) -> None:
        super().compute(name, x, weight, out)
        if (name, len(x)) == (self.name, self.count):
            out.view(torch.int16)[-1, 3] ^= 1


@pytest.mark.parametrize(
    ("name", "count"), [("c64x48_r8", 7), ("c128x192", 1), ("g64x32_r16", 16)]
)
def test_a_bit_that_a_variant_has_alone_is_found(name, count):
    fault = fault_of(WrongVariant(name, count))
    row = count - 1
    assert fault == (
        f"{name} gives 1 other bits with {count} rows from 0 on, "
        f"first in row {row} and column 3"
    )


def test_without_nvrtc_only_gluon_is_proven():
    product = WrongVariant("c64x48_r8", 7)
    product.has_cuda = False
    assert fault_of(product) == ""


class WritesBehind(RightProduct):
    def compute(self, name: str, x: Tensor, weight: Tensor, out: Tensor) -> None:
        super().compute(name, x, weight, out)
        if name == "c64x64_w2":
            behind = out.as_strided((1, COLUMNS), (COLUMNS, 1), len(x) * COLUMNS)
            behind[0, 5] = 1.0


def test_a_variant_that_writes_behind_its_rows_is_found():
    assert "c64x64_w2 writes behind the last of 1 rows" in fault_of(WritesBehind())


class NothingWritten(RightProduct):
    def compute(self, name: str, x: Tensor, weight: Tensor, out: Tensor) -> None:
        super().compute(name, x, weight, out)
        out[-1, -1] = float("nan")


class NoScale(RightProduct):
    def compute(self, name: str, x: Tensor, weight: Tensor, out: Tensor) -> None:
        super().compute(name, 1.02 * x, weight, out)


@pytest.mark.parametrize("product", [NothingWritten(), NoScale()])
def test_what_all_variants_have_wrong_is_found(product):
    assert fault_of(product).startswith("g128x128 is wrong in row")


class WrongTable(RightProduct):
    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        out = exact(x, weight)
        if len(x) == 129:
            out[128] += 1
        return out


def test_a_row_behind_a_border_of_the_table_is_compared():
    assert fault_of(WrongTable()).startswith("the table gives 72 other bits with 129")


def test_the_fallback_has_to_have_the_same_bits():
    def in_halves(x: Tensor, weight: Tensor) -> Tensor:
        half = INNER // 2
        parts = (
            exact(x[:, at], weight[:, at]) for at in (slice(half), slice(half, None))
        )
        return sum(parts, torch.zeros(1).bfloat16())

    assert "Triton's kernel gives" in fault_of(RightProduct(), in_halves)


def test_minus_zeros_differ_from_zeros():
    class MinusZeros(RightProduct):
        def compute(self, name: str, x: Tensor, weight: Tensor, out: Tensor) -> None:
            super().compute(name, x, weight, out)
            if name == "c64x8_r32":
                out[out == 0] = -0.0

    assert fault_of(MinusZeros()).startswith("c64x8_r32 gives 72 other bits")


@pytest.mark.parametrize("row", TABLE)
def test_both_sides_of_every_border_are_tried(row):
    columns = min(row.max_columns, 200_000) // 8 * 8
    most = 301 if columns > 65_536 else 2200
    counts = counts_for(columns, row.min_inner + 64, most)
    for choice in row.choices:
        if choice.max_rows != ANY_ROWS:
            assert {choice.max_rows, choice.max_rows + 1} <= {*counts}
    assert counts[-1] == most > row.choices[-2].max_rows


def test_a_model_is_told_what_it_lacks():
    assert missing_for(QWEN3_8B, HOPPER) == ""
    assert "capability 9.0" in missing_for(QWEN3_8B, (10, 0))
    replace = msgspec.structs.replace
    assert "float32" in missing_for(replace(QWEN3_8B, dtype="float32"), HOPPER)
    odd = replace(QWEN3_8B, linears=((100, 96), (12, 64)))
    assert "outputs in eights" in missing_for(odd, HOPPER)


def test_each_shape_is_tried_once_and_the_first_fault_is_named(monkeypatch):
    tried: list[tuple[int, int]] = []

    class Tried(ProductTrial):
        def __init__(self, product: RightProduct, columns: int, inner: int, _: object):
            tried.append((columns, inner))

        def fault(self) -> str:
            return "it is wrong" if len(tried) == 3 else ""

    monkeypatch.setattr(product_proof, "load_product", lambda _: RightProduct())
    monkeypatch.setattr(product_proof, "ProductTrial", Tried)
    shapes = ((64, 64), (72, 64), (64, 64), (12, 64), (80, 64), (88, 64))
    model = msgspec.structs.replace(QWEN3_8B, linears=shapes)
    assert prove(model, "cpu") == "it is wrong (a weight of 80 x 64)"
    assert tried == [(64, 64), (72, 64), (80, 64)]


def test_the_candidates_name_the_proof():
    (candidate,) = (c for c in CANDIDATES if c.name == PRODUCTS)
    kernels = kernels_of(candidate)
    assert (kernels.missing_for, kernels.prove) == (missing_for, prove)
