"""Every kernel against its torch twin, in Triton's interpreter, in one process of its own."""

import json

import pytest

pytest.importorskip("triton")

from tests.support.kernel_cases import interpreter_cases
from tests.support.module_process import said_by

pytestmark = pytest.mark.timeout(300)  # far more than it takes on a machine that others use


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    """What became of each case; a traceback where it failed."""
    (line,) = said_by("tests.support.interpret_kernels", env={"TRITON_INTERPRET": "1"})
    found: dict[str, str | None] = json.loads(line)
    return found


@pytest.mark.parametrize("case", interpreter_cases())
def test_a_kernel_agrees_with_its_twin(case: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[case] is None, outcomes[case]
