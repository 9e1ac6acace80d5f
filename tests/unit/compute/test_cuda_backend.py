"""The CUDA backend computes what the CPU backend computes; its kernels run interpreted here."""

import json
import sys
from typing import Any

import pytest

from tests.support.module_process import said_by

pytestmark = pytest.mark.timeout(300)  # far more than it takes on a machine that others use


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    if sys.platform != "linux":
        pytest.skip("Triton runs on Linux only")
    (line,) = said_by("tests.support.interpret_backend", env={"TRITON_INTERPRET": "1"})
    said: dict[str, Any] = json.loads(line)
    return said


def test_the_kernels_behind_the_backend_give_the_same_logits(found: dict[str, Any]) -> None:
    errors = found["errors"]
    batches = ("a prompt", "decode beside a prompt", "two that decode")
    assert set(errors) == {*batches, *(f"{name}, in one order" for name in batches)}
    assert all(error < 2e-5 for error in errors.values()), errors


def test_a_warm_up_runs_both_attentions_and_stores_in_the_first_block_only(
    found: dict[str, Any],
) -> None:
    """A prompt and two decode steps. What the test above compares was computed after it."""
    assert found["warm_up"] == {
        "chunks": [[0, 2], [1, 1], [112, 1]],
        "slots": [[0, 0], [0, 1]],
        "generations": 0,
    }


def test_warm_up_compiles_every_variant_that_random_batches_take() -> None:
    """A kernel that is compiled while requests are served holds them all up for seconds."""
    if sys.platform != "linux":
        pytest.skip("Triton runs on Linux only")
    (line,) = said_by("tests.support.list_variants")
    attention = {"_split_kernel", "_combine_kernel", "_prefill_kernel"}
    for name, found in json.loads(line).items():
        assert found["added"] == [], name
        assert set(found["warm_up"]) > attention | {"_rope_store_kernel"}, found["warm_up"]
        assert sum(found["warm_up"].values()) <= 16, found["warm_up"]
