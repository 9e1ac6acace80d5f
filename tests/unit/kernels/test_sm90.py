"""Every kernel compiles for a Hopper GPU, without one, and the cubins keep what speed rests on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

MAX_SHARED_BYTES = 227 * 1024  # what a block may use of a Hopper multiprocessor
ROOT = Path(__file__).parents[3]
Reports = list[dict[str, int | str]]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """One report per kernel that the launchers launched, in a process that does not interpret."""
    folder = tmp_path_factory.mktemp("cubins")
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    child = subprocess.run(
        [sys.executable, "-m", "tests.support.compile_kernels", str(folder)],
        cwd=ROOT,
        env=env | {"TRITON_CACHE_DIR": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    found: Reports = json.loads(child.stdout.splitlines()[-1])
    return found


def test_every_kernel_of_the_room_is_compiled(reports: Reports) -> None:
    # A kernel has constants or pointers as its parameters; the device functions are inlined.
    written = {
        line.removeprefix("def ").rstrip("(\n")
        for path in (ROOT / "kernels").glob("*.py")
        for line in path.read_text().splitlines()
        if line.startswith("def _") and line.endswith("_kernel(")
    }
    assert len(written) == 7
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
    assert [r for r in reports if r["wide_loads"] == 0] == []
