"""Rules for every test: no network, an end to every hang, and in CI no silent skip.

With `CI=true` a skip is a failure: CI has everything that the tests need, so a skip means that
something was not installed or not built. Tests of GPUs and release tests may be skipped.
"""

import faulthandler
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, settings

from tests.support.fork_server import ForkServer

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DO_NOT_TRACK", "1")
# Many small processes share the cores, and torch's idle threads would spin on them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Some images turn this on, and then each of hundreds of processes would compile all sources anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# How long an example takes says how busy the machine is, and nothing else. A property that names no
# number of examples gets these; `--hypothesis-profile=release` is what `make test-release` takes.
settings.register_profile(
    "baton",
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("release", settings.get_profile("baton"), max_examples=1000)
settings.load_profile("baton")

GPU_TESTS = Path(__file__).parent / "gpu"
LAST_FILE = pytest.StashKey[Path]()  # of which a test ran


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from all tests but those of `tests/gpu`, which are run by themselves.

    Limits of time and of memory in the others are those of CPUs. Workers of xdist inherit this, and
    write the stacks of a crash to a file of theirs.
    """
    paths = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    if not all(path.is_relative_to(GPU_TESTS) for path in paths):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if stacks := getattr(config, "workerinput", {}).get("stacks"):
        with Path(stacks).open("wb") as file:
            os.dup2(file.fileno(), config.stash[fault_handler_stderr_fd_key])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    folder = TemporaryDirectory(prefix="baton-stacks-")
    node.config.add_cleanup(folder.cleanup)
    node.workerinput["stacks"] = str(Path(folder.name, "stacks"))


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(report: Any) -> None:
    """Say how a worker of xdist ended, beside the test that it ran then."""
    code = report.node.gateway._io.popen.wait(10)
    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    stacks = Path(report.node.workerinput["stacks"]).read_text(errors="replace")
    kills = out_of_memory_kills() - OUT_OF_MEMORY_KILLS
    report.longrepr = (
        f"{how}, {kills} kills for lack of memory: {report.longrepr}\n{stacks}"
    )


def out_of_memory_kills() -> int:
    vmstat = Path("/proc/vmstat")
    lines = vmstat.read_text().splitlines() if vmstat.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


OUT_OF_MEMORY_KILLS = out_of_memory_kills()


# The time for a test that has reached its timeout to end: `asyncio.run` alone would wait for 300 s
# for a thread that does not.
CLEAN_UP_S = 30.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End the process with the stacks of all threads if a test outlives its own timeout."""
    marker = item.get_closest_marker("timeout")
    limit_s = float(marker.args[0] if marker else item.config.getini("timeout"))
    stderr = item.config.stash[fault_handler_stderr_fd_key]
    faulthandler.dump_traceback_later(limit_s + CLEAN_UP_S, exit=True, file=stderr)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Spare the garbage collector what earlier files have left.

    A worker soon holds millions of objects (compiled kernels, libraries, tokenizers), and a
    collection that visits them all takes a second. Some tests and simulated worlds ask for one.
    """
    if item.config.stash.get(LAST_FILE, None) != item.path:
        item.config.stash[LAST_FILE] = item.path
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Undo what a command that a test runs in this process does to the logging of its process."""
    names = ("", "baton")
    before = [(name, list(logging.getLogger(name).handlers)) for name in names]
    state = [
        (logging.getLogger(name).level, logging.getLogger(name).propagate)
        for name in names
    ]
    hooks = sys.excepthook, threading.excepthook
    yield
    logging.captureWarnings(False)
    sys.excepthook, threading.excepthook = hooks
    for (name, handlers), (level, propagates) in zip(before, state, strict=True):
        known = logging.getLogger(name)
        known.handlers[:] = handlers
        known.propagate = propagates
        known.setLevel(level)


@pytest.fixture(autouse=True, scope="session")
def forked_nodes() -> Iterator[None]:
    """Fork the processes of tests that need torch, instead of importing it in each."""
    server = ForkServer()
    names = ("DEVNULL", "PIPE", "STDOUT")
    forking = SimpleNamespace(
        Popen=server.popen, **{name: getattr(subprocess, name) for name in names}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("baton.runtime.process.subprocess", forking)
        patch.setattr("tests.support.module_process.subprocess", forking)
        yield
    server.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    may_skip = (
        hasattr(report, "wasxfail") or item.get_closest_marker("release") is not None
    )
    if report.skipped and not may_skip and skips_fail(item.path):
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
    reason = (
        report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
    )
    report.outcome = "failed"
    report.longrepr = f"skipped, which CI does not accept here: {reason}"
