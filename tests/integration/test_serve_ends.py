"""How `baton serve` ends: not with one of its processes, and whether or not they answer."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
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

    def wait_for(self, pattern: str) -> re.Match[str]:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while (found := re.search(pattern, self.output.read_text())) is None:
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline_s, self.output.read_text()
            time.sleep(0.05)
        return found

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


def test_a_process_that_dies_is_started_again_the_router_on_the_same_port(tmp_path: Path) -> None:
    with serving(tmp_path) as serve:
        url = serve.wait_for(r"at (http://\S+)/v1").group(1)
        serve.children["decode"].kill()
        serve.wait_for("process=decode-0 code=-9")
        serve.children["router"].kill()
        serve.wait_for("process=router code=-9")
        assert complete_when_served(url) == 2
        assert serve.children["prefill"].is_running()
        serve.children |= {"new": psutil.Process(serve.process.pid).children()[-1]}
        serve.process.send_signal(signal.SIGINT)
        assert serve.process.wait(STOP_TIMEOUT_S) == 0
        assert serve.all_gone()


def complete_when_served(url: str) -> int:
    """Return the number of tokens that a completion brings, asking until the server answers."""
    body = json.dumps({"prompt": "a", "max_tokens": 2, "ignore_eos": True}).encode()
    request = urllib.request.Request(
        f"{url}/v1/completions", body, {"Content-Type": "application/json"}
    )
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=30.0) as reply:
                return int(json.load(reply)["usage"]["completion_tokens"])
        except urllib.error.URLError:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
