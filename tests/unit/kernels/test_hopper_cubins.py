"""The products for compute capability 9.0 compile without a GPU, and keep what speed rests on."""

import contextlib
import importlib.util
import json
from pathlib import Path

import pytest

from baton.kernels.hopper.products.variants import CUDA, GLUON, VARIANTS
from tests.support.module_process import said_by

pytest.importorskip("triton")

pytestmark = pytest.mark.timeout(300)
SHARED_BYTES = 232_448
IN_GLUON = ("g64x32_r16",)
IN_CUDA = ("c64x48_x4", "c128x128_w2")
Reports = dict[str, dict[str, int]]


def compiled(folder: Path, *names: str) -> Reports:
    lines = said_by(
        "tests.support.compile_products", *names, env={"TRITON_CACHE_DIR": str(folder)}
    )
    return {report["name"]: report for report in json.loads(lines[-1])}


def needs_nvrtc() -> None:
    reason = "needs the wheels nvidia-cuda-nvrtc and cuda-bindings"
    pytest.importorskip("cuda.bindings.nvrtc", reason=reason)


def check(reports: Reports) -> None:
    for name, report in reports.items():
        variant = VARIANTS[name]
        assert report["local_bytes"] == 0, report
        assert report["shared_bytes"] <= SHARED_BYTES, report
        # All 16 inputs of a panel's 64 are products of their own.
        assert report["products"] >= 4 * variant.panels, report
        assert report["waits"] >= 1, report
        # Each thread adds each of its sums to +0.
        assert report["zero_sums"] >= variant.columns // 2, report
        threads = (
            variant.threads if name in CUDA else 384 if variant.groups == 2 else 256
        )
        registers = report["registers"] * threads * variant.per_multiprocessor
        assert registers <= 65_536, report


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """One product in Gluon, and two in CUDA C++: with a cluster, and with two warpgroups."""
    in_cuda = IN_CUDA if has_nvrtc() else ()
    return compiled(tmp_path_factory.mktemp("cubins"), *IN_GLUON, *in_cuda)


def has_nvrtc() -> bool:
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.util.find_spec("cuda.bindings.nvrtc") is not None
    return False


def test_products_in_gluon_spill_no_register(reports):
    check({name: reports[name] for name in IN_GLUON})


def test_products_in_cuda_spill_no_register(reports):
    needs_nvrtc()
    check({name: reports[name] for name in IN_CUDA})


@pytest.mark.release
def test_every_product_fits_and_spills_no_register(tmp_path):
    needs_nvrtc()
    reports = compiled(tmp_path, *VARIANTS)
    assert reports.keys() == CUDA.keys() | GLUON.keys()
    check(reports)
