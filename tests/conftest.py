"""What holds for every test: no talk with the network, and in CI no test that quietly did not run.

With `CI=true` a skip outside tests/gpu is a failure: CI has everything that those tests need, so a
skip there means that something was not installed or not built.
"""

import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DO_NOT_TRACK", "1")
# Many small processes share the cores, and torch's idle threads would spin on them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes says how busy the machine is, and nothing else.
settings.register_profile("baton", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("baton")

GPU_TESTS = Path(__file__).parent / "gpu"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and skips_fail(item.path):
        fail(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped and skips_fail(collector.path):
        fail(report)
    return report


def skips_fail(path: Path) -> bool:
    return os.environ.get("CI") == "true" and not path.is_relative_to(GPU_TESTS)


def fail(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
    report.outcome = "failed"
    report.longrepr = f"skipped, which CI does not accept outside tests/gpu: {reason}"
