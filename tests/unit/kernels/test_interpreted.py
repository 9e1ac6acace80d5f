"""Every kernel against its torch reference, in Triton's interpreter, in one process of its own."""

import json
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.support.kernel_cases import interpreter_cases
from tests.support.module_process import said_by
from tests.support.sources import written_kernels

pytestmark = pytest.mark.timeout(300)  # far more than it takes on a machine that others use


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    """What became of each case, a traceback where it failed, and the kernels that were run."""
    (line,) = said_by("tests.support.interpret_kernels", env={"TRITON_INTERPRET": "1"})
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.mark.parametrize("case", interpreter_cases())
def test_a_kernel_agrees_with_its_twin(case: str, said: dict[str, Any]) -> None:
    assert said["outcomes"][case] is None, said["outcomes"][case]


def test_no_kernel_is_without_a_case(said: dict[str, Any]) -> None:
    assert set(said["ran"]) == written_kernels()
