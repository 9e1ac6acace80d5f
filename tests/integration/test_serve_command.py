"""`baton serve` as a stranger uses it: what it prints works as pasted, Ctrl-C ends everything."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 3 * 5.0


class Serve:
    """A running `baton serve` and everything it has printed."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.output = folder / "output"
        env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "baton", "serve", *arguments],
                stdout=file, stderr=subprocess.STDOUT, env=env, cwd=folder,
                start_new_session=True,
            )  # fmt: skip

    @property
    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, pattern: str) -> re.Match[str]:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while (found := re.search(pattern, self.text)) is None:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline_s, self.text
            time.sleep(0.05)
        return found

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def wait_for_exit(self) -> int:
        return self.process.wait(STOP_TIMEOUT_S)


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=STOP_TIMEOUT_S)[1]


def test_what_serve_prints_works_as_pasted(tmp_path: Path) -> None:
    serve = Serve(tmp_path, "--port", "0")
    try:
        curl = serve.wait_for(r"(?m)^curl .*$").group()
        script = serve.wait_for(r"(?ms)^from openai import.*?^print\([^\n]*$").group()
        children = serve.children()
        assert len(children) >= 3
        reply = subprocess.run(shlex.split(curl), capture_output=True, text=True, check=True)
        assert json.loads(reply.stdout)["choices"][0]["text"] == " 4071."
        said = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=False
        )
        assert said.returncode == 0, said.stderr
        assert said.stdout.strip() == "42."
        serve.process.send_signal(signal.SIGINT)
        assert serve.wait_for_exit() == 0, serve.text
        assert gone(children)
        assert "Traceback" not in serve.text
    finally:
        serve.process.kill()
        serve.process.wait()


def test_nothing_outlives_a_killed_serve(tmp_path: Path) -> None:
    """Its router logs nothing, so the port it picked cannot be read from a log line."""
    serve = Serve(tmp_path, "--port", "0", "--log-level", "error")
    try:
        serve.wait_for(r"curl ")
        children = serve.children()
    finally:
        serve.process.kill()
        serve.process.wait()
    assert len(children) >= 3
    assert gone(children)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("--port", "99999"), "port"),
        (("--model", "/nowhere/at/all"), "/nowhere/at/all"),
        (("--set", "cache.block_sise=8"), "block_size"),
        (("--blok-size", "8"), "--blok-size"),
    ],
)
def test_a_mistake_is_one_clear_line(arguments: tuple[str, ...], hint: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "baton", "serve", *arguments],
        capture_output=True, text=True, cwd=tmp_path, check=False, timeout=60,
    )  # fmt: skip
    said = (done.stdout + done.stderr).strip()
    assert done.returncode != 0
    assert hint in said
    assert "Traceback" not in said
    assert len(said.splitlines()) <= 3, said


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "baton", "serve", "--port", port],
            capture_output=True, text=True, cwd=tmp_path, check=False, timeout=60,
        )  # fmt: skip
    assert done.returncode != 0
    assert f"port {port}" in done.stderr
    assert "--port" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
