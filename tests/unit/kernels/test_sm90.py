"""Every kernel compiles for a Hopper GPU, without one, and the cubins keep what speed rests on."""

import json

import pytest
import torch

from baton.kernels.paged import decode_tiling, prefill_tiling
from tests.support.module_process import said_by
from tests.support.sources import written_kernels

pytest.importorskip("triton")

pytestmark = [pytest.mark.release, pytest.mark.timeout(300)]
MAX_SHARED_BYTES = 227 * 1024  # what a block may use of a Hopper multiprocessor
Reports = list[dict[str, int | str]]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """One report per kernel that the launchers launched, in a process that does not interpret."""
    env = {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cubins"))}
    found: Reports = json.loads(said_by("tests.support.compile_kernels", env=env)[-1])
    return found


def test_every_kernel_of_the_room_is_compiled_and_fits_a_multiprocessor(reports: Reports) -> None:
    assert len(written_kernels()) == 15
    assert {report["kernel"] for report in reports} == written_kernels()
    assert all(int(report["registers"]) >= 16 for report in reports), "no code was read"
    assert [report for report in reports if report["local_bytes"]] == [], "a register is spilled"
    assert [r for r in reports if int(r["shared_bytes"]) > MAX_SHARED_BYTES] == []


def attention(reports: Reports, kernel: str, start: str) -> Reports:
    found = [r for r in reports if r["kernel"] == kernel and str(r["case"]).startswith(start)]
    assert len(found) >= 3
    return found


def test_prefill_in_bf16_multiplies_on_warpgroups(reports: Reports) -> None:
    prefill = attention(reports, "_prefill_kernel", "prefill bf16")
    assert all(int(r["wgmma"]) >= 12 and r["mma"] == 0 for r in prefill), prefill


def test_the_next_scores_are_in_flight_during_the_softmax(reports: Reports) -> None:
    """One wait for products in each turn of both loops; two would leave the tensor cores idle."""
    cases = ("_prefill_kernel", "prefill bf16 128")
    (found,) = (report for report in reports if (report["kernel"], report["case"]) == cases)
    assert prefill_tiling(torch.bfloat16, 128, ordered=False).ahead
    assert 0 < int(found["waits"]) <= 2 + 2 * 1 + 2 + 1, "before, in, and after two loops, and last"


def test_ordered_sums_come_from_the_same_instructions_in_both_attentions(reports: Reports) -> None:
    both = attention(reports, "_split_kernel", "ordered decode bf16")
    both += attention(reports, "_prefill_kernel", "ordered prefill bf16")
    assert all(int(r["mma"]) >= 16 and r["wgmma"] == 0 for r in both), both


def test_as_many_programs_share_a_multiprocessor_as_the_table_says(reports: Reports) -> None:
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        for head_dim in (32, 64, 128, 256):
            (found,) = (
                r for r in reports
                if r["case"] == f"decode {name} {head_dim}" and r["kernel"] == "_split_kernel"
            )  # fmt: skip
            wanted = decode_tiling(dtype, head_dim).per_multiprocessor
            assert int(found["blocks"]) >= wanted, found
    assert decode_tiling(torch.bfloat16, 128).per_multiprocessor == 3
    assert all(int(r["blocks"]) >= 1 for r in reports)


def test_fp32_attention_never_rounds_to_tf32(reports: Reports) -> None:
    fp32 = [r for r in reports if "fp32" in str(r["case"])]
    assert {r["kernel"] for r in fp32} >= {"_split_kernel", "_prefill_kernel"}
    assert all(r["wgmma"] == r["mma"] == r["tf32"] == 0 for r in fp32), fp32


def test_every_kernel_moves_memory_sixteen_bytes_at_a_time(reports: Reports) -> None:
    """All but the one that reads tokens from everywhere, and what is for parity or for order."""
    narrow = {
        str(r["kernel"])
        for r in reports
        if r["wide_loads"] == 0
        and "prefill fp32" not in str(r["case"])
        and not str(r["case"]).startswith("ordered")
    }
    assert narrow == {"_choose_kernel"}
