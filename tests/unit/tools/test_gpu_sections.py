"""The GPU benchmark's kernel and engine sections call what they measure as it wants to be called.

Without a GPU: each case runs once, tiny, in the interpreter of Triton, in a process of its own.
"""

import msgspec
import pytest

from tests.support.module_process import said_by
from tools.gpu.rows import Check, Event, Measured, Note, Unreached

pytest.importorskip("triton")
# Some 15 seconds of CPU time; several times that on a machine that others use.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(260)]

# The interpreter rounds bf16 towards zero where a GPU and the twin round to nearest.
ROUNDED_SUMS = {"add + norm, tiny"}


@pytest.fixture(scope="module")
def events() -> list[Event]:
    env = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    lines = said_by("tests.support.interpret_gpu_figures", env=env, timeout_s=240.0)
    decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
    return [decoder.decode(line) for line in lines]


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
    assert len(checks) == 17
