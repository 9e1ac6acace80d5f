"""Every kernel compiles for each kind of GPU, without one, and cubins keep what speed rests on."""

import json
from pathlib import Path

import pytest
import torch

from baton.kernels.cuda.paged import (
    BF16,
    FP8,
    FP32,
    WARPGROUPS,
    WARPS,
    padded,
    tilings_for,
)
from tests.support.module_process import said_by
from tests.support.sources import written_kernels

pytest.importorskip("triton")

pytestmark = pytest.mark.timeout(300)
CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))
# They hold a triangle and a state in fp32. Both were faster so on an H200 than with eight warps.
SPILLING = {"_state_intra_kernel", "_state_scan_kernel"}
Reports = list[dict[str, int | str | list[str] | None]]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """One report per kernel that the launchers launch on Hopper, from a process of its own."""
    return compiled(tmp_path_factory.mktemp("cubins"), "90")


def compiled(folder: Path, *cases: str) -> Reports:
    env = {"TRITON_CACHE_DIR": str(folder)}
    found: Reports = json.loads(
        said_by("tests.support.compile_kernels", *cases, env=env)[-1]
    )
    return found


def test_attention_of_an_8b_model_fits_a_small_gpu_and_spills_no_register(tmp_path):
    """On the GPU with the least shared memory."""
    cases = ("decode fp8 128", "decode bf16 128 guesses", "prefill bf16 128")
    check(compiled(tmp_path, "120", *cases), "120")


@pytest.mark.parametrize("gpu", ["90", "120"])
def test_a_kernel_that_overlaps_reads_only_weights_before_it_waits(gpu, tmp_path):
    """What the kernel in front writes comes later, and so do all stores and ends."""
    names = ("norm bf16", "overlapped norm bf16", "overlapped silu bf16")
    rope = "overlapped rope bf16", "overlapped rope fp8"
    reports = compiled(tmp_path, gpu, *names, *rope)
    early = {str(report["case"]): report["early"] for report in reports}
    num_loads = 2  # of 4,096 weights by 8 warps, 16 bytes each
    assert early == {
        "norm bf16": None,
        "overlapped norm bf16": ["LDG"] * num_loads,
        "overlapped silu bf16": [],
        "overlapped rope bf16": [],
        "overlapped rope fp8": [],
    }
    check(reports, gpu)


@pytest.mark.release
@pytest.mark.parametrize("gpu", ["80", "89", "90", "100", "120"])
def test_every_kernel_fits_every_gpu_and_spills_no_register(gpu, tmp_path):
    """fp32 is for parity: it may spill some bytes where no tile of it fits the registers."""
    reports = compiled(tmp_path, gpu)
    assert {report["kernel"] for report in reports} == written_kernels()
    check(reports, gpu)


def check(reports: Reports, gpu: str) -> None:
    """Every kernel fits, none for bf16 spills, and a multiprocessor has room for its programs."""
    assert len(reports) >= 3
    assert all(int(report["registers"]) >= 16 for report in reports), "no code was read"
    assert [
        report for report in reports if not report["fits"] or not report["blocks"]
    ] == []
    is_exact = gpu == "90"
    spilled = [
        r
        for r in reports
        if r["local_bytes"] and (is_exact or "fp32" not in str(r["case"]))
    ]
    spilled = [r for r in spilled if r["kernel"] not in SPILLING]
    assert [r for r in spilled if "group of 32" not in str(r["case"])] == []
    tilings = tilings_for((int(gpu) // 10, int(gpu) % 10))
    for report in (report for report in reports if report["kernel"] == "_split_kernel"):
        words = str(report["case"]).removeprefix("ordered ").split()
        dtype = {"bf16": BF16, "fp32": FP32, "fp8": FP8}[words[1]]
        wanted = tilings.decode[dtype, padded(int(words[2]))].per_multiprocessor
        wanted = (
            tilings.wide_programs if "group of 32" in str(report["case"]) else wanted
        )
        has_two = "caps" in words or "guesses" in words
        wanted = min(wanted, 2) if has_two else wanted
        if gpu in {"90", "100"} or dtype != FP32:
            assert int(report["blocks"]) >= wanted, report


@pytest.mark.parametrize("tilings", [WARPGROUPS, WARPS])
def test_ordered_sums_take_as_many_keys_in_both_attentions(tilings):
    rows = tilings.decode.keys()
    assert rows == tilings.prefill.keys() == tilings.ordered_prefill.keys()
    assert all(
        tilings.ordered_prefill[row].keys == tilings.decode[row].keys for row in rows
    )


def test_each_gpu_has_the_tables_of_its_tensor_cores():
    found = {capability: tilings_for(capability) for capability in CAPABILITIES}
    assert {
        capability for capability, is_of in found.items() if is_of is WARPGROUPS
    } == {
        (9, 0),
        (10, 0),
        (10, 3),
    }


def attention(reports: Reports, kernel: str, start: str) -> Reports:
    found = [
        r for r in reports if r["kernel"] == kernel and str(r["case"]).startswith(start)
    ]
    assert len(found) >= 3
    return found


@pytest.mark.release
def test_prefill_in_bf16_multiplies_on_warpgroups(reports):
    prefill = attention(reports, "_prefill_kernel", "prefill bf16")
    assert all(int(r["wgmma"]) >= 12 and r["mma"] == 0 for r in prefill), prefill


@pytest.mark.release
def test_the_next_scores_are_in_flight_during_the_softmax(reports):
    """One wait for products in each turn of both loops; two would leave the tensor cores idle."""
    cases = ("_prefill_kernel", "prefill bf16 128")
    (found,) = (
        report for report in reports if (report["kernel"], report["case"]) == cases
    )
    assert WARPGROUPS.prefill[torch.bfloat16, 128].ahead
    assert 0 < int(found["waits"]) <= 2 + 2 * 1 + 2 + 1, (
        "before, in, and after two loops, and last"
    )


@pytest.mark.release
def test_ordered_sums_come_from_the_same_instructions_in_both_attentions(reports):
    both = attention(reports, "_split_kernel", "ordered decode bf16")
    both += attention(reports, "_prefill_kernel", "ordered prefill bf16")
    both += attention(reports, "_latent_split_kernel", "latent bf16")
    both += attention(reports, "_latent_prefill_kernel", "latent bf16")
    assert all(int(r["mma"]) >= 16 and r["wgmma"] == 0 for r in both), both


@pytest.mark.release
def test_fp32_attention_never_rounds_to_tf32(reports):
    fp32 = [r for r in reports if "fp32" in str(r["case"])]
    assert {r["kernel"] for r in fp32} >= {"_split_kernel", "_prefill_kernel"}
    assert all(r["wgmma"] == r["mma"] == r["tf32"] == 0 for r in fp32), fp32


@pytest.mark.release
def test_every_kernel_moves_memory_sixteen_bytes_at_a_time(reports):
    """All but those that read words by a mask or samples, and what is for parity or for order.

    Of a tile of FP8 with heads of 32 a thread takes eight bytes.
    """
    narrow = {
        str(r["kernel"])
        for r in reports
        if r["wide_loads"] == 0
        and "prefill fp32" not in str(r["case"])
        and not str(r["case"]).startswith(("ordered", "decode fp8 32"))
    }
    assert narrow == {"gather_kernel", "choose_kernel", "_take_best_kernel"}
