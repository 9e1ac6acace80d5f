"""How `baton serve` ends: with its router, against processes that do not answer, and at once."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 15.0


class Running:
    """A `baton serve` that is ready, with its processes by role."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self.process = process
        self.output = output
        self.wait_for(r"(?m)^curl ")
        self.children = {
            child.cmdline()[3]: child for child in psutil.Process(process.pid).children()
        }

    def wait_for(self, pattern: str) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while re.search(pattern, self.output.read_text()) is None:
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline_s, self.output.read_text()
            time.sleep(0.05)

    def all_gone(self) -> bool:
        return not psutil.wait_procs(list(self.children.values()), timeout=STOP_TIMEOUT_S)[1]


@contextmanager
def serving(folder: Path) -> Iterator[Running]:
    output = folder / "output"
    env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "baton", "serve", "--port", "0"],
            stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True,
        )  # fmt: skip
    try:
        running = Running(process, output)
        assert set(running.children) == {"router", "prefill", "decode"}
        yield running
    finally:
        process.kill()
        process.wait()


def test_a_node_that_does_not_answer_is_ended_by_force(tmp_path: Path) -> None:
    with serving(tmp_path) as serve:
        serve.children["decode"].suspend()
        serve.process.send_signal(signal.SIGTERM)
        assert serve.process.wait(STOP_TIMEOUT_S) == 0
        assert serve.all_gone()


def test_a_second_signal_ends_everything_at_once(tmp_path: Path) -> None:
    with serving(tmp_path) as serve:
        for child in serve.children.values():
            child.suspend()  # so that the first signal has somebody to wait for
        serve.process.send_signal(signal.SIGINT)
        # Two of a kind that are pending at once would count as one.
        serve.process.send_signal(signal.SIGTERM)
        assert serve.process.wait(STOP_TIMEOUT_S) == 130
        assert serve.all_gone()


def test_a_node_that_dies_is_started_again_and_a_router_that_dies_ends_it_all(
    tmp_path: Path,
) -> None:
    with serving(tmp_path) as serve:
        serve.children["decode"].kill()
        serve.wait_for("node ended and will start again")
        serve.wait_for(r"(?s)will start again.*decode-0: ready")
        serve.children["router"].kill()
        assert serve.process.wait(STOP_TIMEOUT_S) == 1
        assert serve.all_gone()
        assert "the router ended (code -9)" in serve.output.read_text()
        assert not psutil.pid_exists(serve.children["prefill"].pid)
