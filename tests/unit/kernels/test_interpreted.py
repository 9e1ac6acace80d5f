"""Every kernel against its torch twin, in Triton's interpreter, in one process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.support.kernel_cases import interpreter_cases


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    """What became of each case; a traceback where it failed."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.support.interpret_kernels"],
        cwd=Path(__file__).parents[3],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    found: dict[str, str | None] = json.loads(child.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", interpreter_cases())
def test_a_kernel_agrees_with_its_twin(case: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[case] is None, outcomes[case]
