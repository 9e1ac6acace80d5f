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
    """A prompt and a decode step. What the test above compares was computed after it."""
    assert found["warm_up"] == {
        "chunks": [[0, 2], [1, 1]],
        "slots": [[0, 0], [0, 1]],
        "generations": 0,
    }
