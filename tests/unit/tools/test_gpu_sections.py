"""The GPU benchmark's kernel and engine sections call what they measure as it wants to be called.

Without a GPU: each case runs once, tiny, in the interpreter of Triton, in a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tools.gpu.rows import Check, Event, Measured, Note, Unreached

pytest.importorskip("triton")
# Some 15 seconds of CPU time; several times that on a machine that others use.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(260)]

# The interpreter rounds bf16 towards zero where a GPU and the twin round to nearest.
ROUNDED_SUMS = {"add + norm, tiny"}


@pytest.fixture(scope="module")
def events() -> list[Event]:
    child = subprocess.run(
        [sys.executable, "-m", "tests.support.interpret_gpu_figures"],
        cwd=Path(__file__).parents[3],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
    return [decoder.decode(line) for line in child.stdout.splitlines()]


def test_every_case_could_be_called(events: list[Event]) -> None:
    errors = [event for event in events if isinstance(event, Measured) and event.error]
    assert not errors
    left_out = [event for event in events if isinstance(event, Note | Unreached)]
    assert not left_out
    assert len([event for event in events if isinstance(event, Measured)]) == 17


def test_every_kernel_agrees_with_its_twin(events: list[Event]) -> None:
    checks = [event for event in events if isinstance(event, Check)]
    failed = {check.key: check.detail for check in checks if check.has_failed}
    assert failed.keys() <= ROUNDED_SUMS, failed
    assert len(checks) == 16
