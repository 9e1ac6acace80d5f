"""Every kernel compiles for a Hopper GPU, without one, and the cubins keep what speed rests on."""

import json

import pytest

from tests.support.module_process import said_by
from tests.support.sources import REPOSITORY

pytest.importorskip("triton")

pytestmark = pytest.mark.timeout(300)  # far more than it takes on a machine that others use
MAX_SHARED_BYTES = 227 * 1024  # what a block may use of a Hopper multiprocessor
Reports = list[dict[str, int | str]]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """One report per kernel that the launchers launched, in a process that does not interpret."""
    folder = tmp_path_factory.mktemp("cubins")
    env = {"TRITON_CACHE_DIR": str(folder / "cache")}
    found: Reports = json.loads(said_by("tests.support.compile_kernels", str(folder), env=env)[-1])
    return found


def test_every_kernel_of_the_room_is_compiled(reports: Reports) -> None:
    # A kernel has constants or pointers as its parameters; the device functions are inlined.
    written = {
        line.removeprefix("def ").rstrip("(\n")
        for path in (REPOSITORY / "kernels").glob("*.py")
        for line in path.read_text().splitlines()
        if line.startswith("def _") and line.endswith("_kernel(")
    }
    assert len(written) == 10
    assert {report["kernel"] for report in reports} == written


def test_no_kernel_spills_a_register(reports: Reports) -> None:
    assert all(int(report["registers"]) >= 16 for report in reports), "no code was read"
    assert [report for report in reports if report["local_bytes"]] == []


def test_every_kernel_fits_the_shared_memory_of_a_multiprocessor(reports: Reports) -> None:
    assert [r for r in reports if int(r["shared_bytes"]) > MAX_SHARED_BYTES] == []


def test_prefill_in_bf16_multiplies_on_warpgroups(reports: Reports) -> None:
    prefill = [r for r in reports if str(r["case"]).startswith("prefill bf16")]
    assert len(prefill) == 3
    assert all(int(r["wgmma"]) >= 16 for r in prefill), prefill


def test_fp32_attention_never_rounds_to_tf32(reports: Reports) -> None:
    fp32 = [r for r in reports if str(r["case"]).endswith("fp32")]
    assert {r["kernel"] for r in fp32} >= {"_split_kernel", "_prefill_kernel"}
    assert all(r["wgmma"] == r["mma"] == r["tf32"] == 0 for r in fp32), fp32


def test_every_kernel_moves_memory_sixteen_bytes_at_a_time(reports: Reports) -> None:
    """All but the one that reads a few tokens from everywhere."""
    narrow = {str(r["kernel"]) for r in reports if r["wide_loads"] == 0}
    assert narrow == {"_choose_kernel"}
