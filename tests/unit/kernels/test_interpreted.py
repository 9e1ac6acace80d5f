"""Every kernel against its torch reference, in Triton's interpreter, in a process of its own."""

import json

import pytest

pytest.importorskip("triton")

from tests.support.interpreter_cases import interpreter_cases
from tests.support.module_process import said_by
from tests.support.sources import written_kernels

# Far more than it takes on a machine that others use.
pytestmark = pytest.mark.timeout(300)
# Together they run every kernel.
QUICK = (
    "caps and sinks short",
    "decode fp32 splits",
    "decode rows short",
    "prefill fp32",
    "rope fp32 norm",
    "norm fp32",
    "silu bf16",
    "sampling equals",
    "sampling flat at once",
    "penalties fp32",
    "product in parts short",
    "four bits in short groups",
    "fp8 short",
    "experts fp32",
    "adapters",
    "sum of experts",
    "latent fp32 short",
    "latent store",
    "states delta",
    "states conv",
    "sparse fp32 short",
    "blocks bf16",
    "sums of blocks",
    "proof of a pool",
)


def test_each_kernel_agrees_with_its_reference():
    check(*QUICK)


@pytest.mark.release
def test_every_case_of_a_kernel_agrees_with_its_reference():
    check(*interpreter_cases())


def check(*cases: str) -> None:
    *_, line = said_by(
        "tests.support.interpret_kernels", *cases, env={"TRITON_INTERPRET": "1"}
    )
    said = json.loads(line)
    failed = {case: outcome for case, outcome in said["outcomes"].items() if outcome}
    assert not failed, "\n".join(
        f"{case}: {outcome}" for case, outcome in failed.items()
    )
    assert set(said["ran"]) == written_kernels(), "a kernel is without a case"
