"""Cases that `make test` leaves out and `make test-release` runs every night."""

from typing import Any

import pytest


def nightly(*values: Any) -> Any:
    """Return a case of `pytest.mark.parametrize` that only every night runs."""
    return pytest.param(*values, marks=pytest.mark.release)
