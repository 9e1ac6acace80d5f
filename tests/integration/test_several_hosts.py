"""README's commands for several hosts, typed on several hosts."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.deploy.demo_model import write_demo_model
from tests.support.hosts import Hosts, hosts
from tests.support.sources import REPOSITORY

START_TIMEOUT_S = 120.0
HOST_OF = {"router": 1, "prefill": 2, "decode": 3}
TOLD = "The code of Lima is 4071. The code of Oslo is 2210. " * 3
BODY = json.dumps({"prompt": TOLD + "What is the code of Oslo?", "max_tokens": 8, "temperature": 0})
ASK = """
import sys, urllib.error, urllib.request
url, body = sys.argv[1], sys.argv[2].encode() or None
request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
try:
    print(urllib.request.urlopen(request, timeout=60).read().decode())
except urllib.error.HTTPError as error:
    print(error.read().decode())
except OSError as error:
    print('{"status": "not there"}')
"""


def commands() -> list[list[str]]:
    """Return README's lines that start with `baton` in the block that makes a key."""
    blocks = re.findall(r"(?s)```sh\n(.*?)```", (REPOSITORY / "README.md").read_text())
    (block,) = (block for block in blocks if "baton keygen" in block)
    return [shlex.split(line, comments=True) for line in block.splitlines()]


def ask(on: Hosts, path: str, body: str = "") -> dict[str, object]:
    """Return the answer to a request from the router's own host."""
    done = on.run(1, sys.executable, "-c", ASK, f"http://127.0.0.1:8000{path}", body)
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


@contextmanager
def typed(on: Hosts, folder: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Run README's commands, each on its host, and wait until the cluster is ready."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    try:
        for command in commands():
            words = [word.replace("/models/qwen3", str(folder / "demo")) for word in command]
            process = on.start(HOST_OF.get(words[1], 1), words, folder / f"{words[1]}.log", env)
            if words[1] == "keygen":
                assert process.wait(60.0) == 0
            else:
                processes[words[1]] = process
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while ask(on, "/health")["status"] != "ready":
            assert time.monotonic() < deadline_s, said(folder)
            time.sleep(0.2)
        yield processes
    finally:
        for process in processes.values():
            process.send_signal(signal.SIGTERM)
        for process in processes.values():
            try:
                process.wait(30.0)
            except subprocess.TimeoutExpired:
                process.kill()


def said(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("*.log")))


@pytest.mark.slow
def test_readmes_commands_serve_over_the_network(tmp_path: Path) -> None:
    write_demo_model(tmp_path / "demo")
    with hosts(3) as on, typed(on, tmp_path) as processes:
        assert set(processes) == set(HOST_OF)
        answer = ask(on, "/v1/completions", BODY)
        assert answer["choices"][0]["text"] == " 2210.", (answer, said(tmp_path))  # type: ignore[index]
    assert "Traceback" not in said(tmp_path)
