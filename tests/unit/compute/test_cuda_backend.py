"""The CUDA backend computes what the CPU backend computes; its kernels run interpreted here."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    if sys.platform != "linux":
        pytest.skip("Triton runs on Linux only")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.interpret_backend"],
        cwd=ROOT,
        env=dict(os.environ, TRITON_INTERPRET="1"),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def test_the_kernels_behind_the_backend_give_the_same_logits(found: dict[str, Any]) -> None:
    errors = found["errors"]
    assert set(errors) == {"a prompt", "decode beside a prompt", "two that decode"}
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
