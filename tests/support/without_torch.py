"""A pytest plugin that fails the run when torch was loaded by it: `-p tests.support.without_torch`.

tests/hygiene runs the tests of host-only parts under it, in a process of their own.
"""

import importlib.util
import sys

import pytest


def pytest_sessionfinish(session: pytest.Session) -> None:
    assert importlib.util.find_spec("torch") is not None, (
        "the check needs torch to be installed"
    )
    if "torch" in sys.modules:
        print("\ntorch was loaded")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
