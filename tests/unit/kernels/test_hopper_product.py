"""The product for compute capability 9.0: its table, its plans, and how it comes to its kernels."""

import ctypes
import logging
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from baton.kernels.hopper.products import cubin
from baton.kernels.hopper.products.cubin import CompilerMissing, load_cubin
from baton.kernels.hopper.products.driver import CudaKernels, Driver, DriverError
from baton.kernels.hopper.products.product import (
    HopperProduct,
    fits,
    load_kernels,
    readable,
    rows_of,
)
from baton.kernels.hopper.products.variants import (
    CUDA,
    GLUON,
    TABLE,
    VARIANTS,
    choose,
    grid_of,
    names_for,
)
from tests.support.hopper_machine import HopperMachine

MULTIPROCESSORS = 132
ROWS = st.integers(1, 20_000)
COLUMNS = st.integers(1, 40_000).map(lambda number: 8 * number)
INNER = st.integers(1, 400).map(lambda number: 64 * number)


@given(ROWS, COLUMNS, INNER, st.booleans())
def test_the_table_has_a_variant_for_every_product(rows, columns, inner, has_cuda):
    name = choose(rows, columns, inner, has_cuda=has_cuda)
    assert VARIANTS[name].takes(rows, inner)
    assert has_cuda or name in GLUON
    assert name in names_for(columns, inner, has_cuda=has_cuda)


def test_the_table_uses_all_variants_and_its_rows_are_in_order():
    named = {
        name
        for row in TABLE
        for choice in row.choices
        for name in (choice.best, choice.gluon)
    }
    assert named == VARIANTS.keys()
    for row in TABLE:
        borders = [choice.max_rows for choice in row.choices]
        assert borders == sorted(set(borders))
    in_order = sorted(TABLE, key=lambda row: (row.max_columns, -row.min_inner))
    assert [*TABLE] == in_order


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_fits_shared_memory_and_keeps_it_full(name):
    variant = VARIANTS[name]
    assert variant.stages >= 3
    # TMA copies at most 256 rows, and swizzled tiles begin at multiples of 1,024 bytes.
    boxes = variant.x_box, variant.weight_box
    assert all(box % 8 == 0 and box <= 256 for box in boxes)
    if variant.route == "cuda":
        asked = (variant.shared_bytes + 1024) * variant.per_multiprocessor
        assert variant.shared_bytes <= 232_448
        assert asked <= 228 << 10


@pytest.mark.parametrize("name", VARIANTS)
def test_a_grid_covers_the_output_and_fills_the_multiprocessors_at_most(name):
    variant = VARIANTS[name]
    for rows, columns in ((1, 8), (65, 1000), (300, 264), (5000, 30_000)):
        grid = grid_of(variant, rows, columns, 512, MULTIPROCESSORS)
        assert (grid.tiles_m - 1) * variant.rows < rows <= grid.tiles_m * variant.rows
        assert grid.tiles_n * variant.columns >= columns
        assert grid.programs % variant.cluster == 0
        slots = MULTIPROCESSORS * variant.per_multiprocessor
        assert 0 < grid.programs <= slots


@pytest.fixture
def machine():
    return HopperMachine()


@pytest.fixture
def kernels(machine):
    return CudaKernels(b"", Driver(machine))


@pytest.fixture
def product(kernels):
    return HopperProduct(kernels, MULTIPROCESSORS)


def operands(rows: int, columns: int, inner: int) -> tuple[Tensor, Tensor, Tensor]:
    """Whole numbers, whose sums are exact in bf16, and the product."""
    generator = torch.Generator().manual_seed(rows + columns)
    sizes = (rows, inner), (columns, inner)
    x, weight = (torch.randint(0, 2, size, generator=generator) for size in sizes)
    x *= torch.rand(x.shape, generator=generator) < 32 / inner
    expected = (x.double() @ weight.double().T).bfloat16()
    return x.bfloat16(), weight.bfloat16(), expected


@pytest.mark.parametrize("name", CUDA)
def test_the_plan_of_a_variant_computes_every_number_once(
    name, kernels, product, machine
):
    """Sizes that fill no tile, bands of more than one tile, and more tiles than programs."""
    variant = CUDA[name]
    inner = 64 * variant.panels * 3
    most = variant.max_rows or 1 << 20
    for rows, columns in ((1, 8), (7, 264), (130, 1000), (variant.rows * 17, 136)):
        x, weight, expected = operands(min(rows, most), columns, inner)
        guarded = torch.full((len(x) + 8, columns), 7.0, dtype=torch.bfloat16)
        product.compute(name, x, weight, guarded[: len(x)])
        assert torch.equal(guarded[: len(x)], expected)
        assert (guarded[len(x) :] == 7).all()
    few = HopperProduct(kernels, 4)
    out = torch.empty_like(expected)
    few.compute(name, x, weight, out)
    assert torch.equal(out, expected)
    assert set(machine.launches) == {name}


def test_rows_that_lie_in_an_odd_way_are_copied_and_others_are_not(product):
    x, weight, _ = operands(6, 264, 512)
    gaps = torch.zeros(6, 1024).bfloat16()
    gaps[:, :512] = x
    odd = torch.zeros(6 * 512 + 1).bfloat16()
    odd[1:] = x.flatten()
    columns = x.T.contiguous().T
    for rows, is_kept in (
        (x, True),
        (gaps[:, :512], True),
        (odd[1:].view(6, 512), False),
        (columns, False),
        (x[:1].expand(6, 512), False),
    ):
        assert (readable(rows)[0] is rows) == is_kept
        out = torch.empty(6, 264).bfloat16()
        product.compute("c64x48_r8", rows, weight, out)
        assert torch.equal(out, (rows.double() @ weight.double().T).bfloat16())


def test_a_tensor_map_is_made_once_for_an_address_and_a_shape(product, machine):
    x, weight, _ = operands(8, 264, 512)
    out = torch.empty(8, 264).bfloat16()
    for _ in range(3):
        product.compute("c64x48_r8", x, weight, out)
    assert machine.num_maps == 2
    product.compute("c64x48_r8", x[:5], weight, out[:5])
    assert machine.num_maps == 3


def test_weights_that_tma_cannot_read_are_left_to_triton():
    bf16 = torch.bfloat16
    whole = torch.empty(264, 128, dtype=bf16)
    wide = torch.empty(264, 132, dtype=bf16)
    assert fits(whole, rows_of(whole))
    for odd in (
        whole.float(),
        whole[:260],
        whole[:, :96],
        wide[:, 1:129],
        wide[:, :128],
        torch.empty(128, 264, dtype=bf16).T,
    ):
        assert not fits(odd, rows_of(odd))


def test_every_kernel_is_loaded_before_the_first_launch(machine):
    CudaKernels(b"", Driver(machine))
    assert machine.names == [*CUDA]
    assert machine.shared_bytes == {n: v.shared_bytes for n, v in CUDA.items()}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "baton" / "kernels"


@pytest.fixture
def compiler(monkeypatch):
    """Texts that were compiled, by a compiler that takes no time."""
    texts: list[str] = []

    def compile_(text: str) -> bytes:
        texts.append(text)
        return b"code"

    monkeypatch.setattr(cubin, "compiled", compile_)
    monkeypatch.setattr(cubin, "_version", lambda: (13, 0))
    return texts


def test_a_cubin_is_compiled_once_and_again_if_its_file_is_torn(cache, compiler):
    assert load_cubin() == load_cubin() == b"code"
    assert len(compiler) == 1
    (file,) = cache.iterdir()
    assert file.name.startswith("products-sm_90a-")
    whole = file.read_bytes()
    for number, torn in enumerate((whole[:-1], b"", whole[:40], b"\xff" + whole)):
        file.write_bytes(torn)
        assert load_cubin() == b"code"
        assert len(compiler) == number + 2
        assert file.read_bytes() == whole
    file.chmod(0o666)
    assert load_cubin() == b"code"
    assert len(compiler) == 6


@pytest.mark.usefixtures("cache")
def test_another_compiler_or_source_has_a_file_of_its_own(cache, compiler, monkeypatch):
    load_cubin()
    monkeypatch.setattr(cubin, "_version", lambda: (13, 1))
    load_cubin()
    monkeypatch.setattr(cubin, "source", lambda: "other")
    load_cubin()
    assert len(compiler) == len([*cache.iterdir()]) == 3


def test_a_cache_that_cannot_be_written_costs_time_alone(
    tmp_path, compiler, monkeypatch
):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    assert load_cubin() == load_cubin() == b"code"
    assert len(compiler) == 2


@pytest.mark.usefixtures("cache")
def test_without_nvrtc_gluon_computes_all_products_and_one_line_says_so(
    monkeypatch, caplog
):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(CompilerMissing, match="NVRTC cannot be loaded"):
        load_cubin()
    with caplog.at_level(logging.WARNING, logger="baton"):
        assert load_kernels(Driver, lambda: 0) is None
    (line,) = caplog.records
    assert "Gluon alone" in line.message


@pytest.mark.usefixtures("cache", "compiler")
def test_a_driver_that_refuses_the_kernels_leaves_products_to_gluon(machine, caplog):
    machine.fails = "load"
    with pytest.raises(DriverError, match="CUDA error 1 of loading kernels: invalid"):
        CudaKernels(b"", Driver(machine))
    with caplog.at_level(logging.WARNING, logger="baton"):
        assert load_kernels(lambda: Driver(machine), lambda: 0) is None
    assert len(caplog.records) == 1


def test_a_machine_without_a_driver_says_so(monkeypatch):
    def missing(name: str) -> None:
        raise OSError(f"{name}: no such file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(DriverError, match=r"driver cannot be loaded: libcuda\.so\.1"):
        Driver()
