"""The CUDA backend computes what the CPU backend computes; its kernels run interpreted here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(sys.platform != "linux", reason="Triton runs on Linux only")
def test_the_kernels_behind_the_backend_give_the_same_logits() -> None:
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
    errors = json.loads(done.stdout.splitlines()[-1])
    assert set(errors) == {"a prompt", "decode beside a prompt", "two that decode"}
    assert all(error < 2e-5 for error in errors.values()), errors
