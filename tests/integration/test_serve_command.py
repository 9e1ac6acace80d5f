"""`baton serve` as a stranger uses it: what it prints works as pasted, and how it ends.

It ends with Ctrl-C, against processes that do not answer, and at once, but not with a process.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 30.0


class Serve:
    """A `baton serve` that is ready: its output so far, and its processes by role."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self.process = process
        self._output = output
        self.wait_for(r"(?m)^curl ")
        self.children = {
            child.cmdline()[3]: child for child in psutil.Process(process.pid).children()
        }

    @property
    def text(self) -> str:
        return self._output.read_text()

    def wait_for(self, pattern: str) -> str:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while (found := re.search(pattern, self.text)) is None:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline_s, self.text
            time.sleep(0.05)
        return found.group()

    def wait_for_exit(self) -> int:
        return self.process.wait(STOP_TIMEOUT_S)

    def all_gone(self) -> bool:
        return not psutil.wait_procs(list(self.children.values()), timeout=STOP_TIMEOUT_S)[1]


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[Serve]:
    output = folder / "output"
    env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "baton", "serve", "--port", "0", *arguments],
            stdout=file, stderr=subprocess.STDOUT, env=env, cwd=folder, start_new_session=True,
        )  # fmt: skip
    try:
        serve = Serve(process, output)
        assert set(serve.children) == {"router", "prefill", "decode"}
        yield serve
    finally:
        process.kill()
        process.wait()


def chat(*words: str, said: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "baton", "chat", *words]
    return subprocess.run(
        command, input=said, capture_output=True, text=True, check=False, timeout=60
    )


def talk_with(url: str) -> None:
    """`baton chat` remembers the conversation, forgets it at /reset, and names a refusal."""
    fact, question = "The code of Maria is 4071.", "What is the code of Maria?"
    assert chat("--url", url, f"{fact} {question}").stdout.strip() == "The code of Maria is 4071."
    remembered = chat("--url", f"{url}/v1", "--temperature", "0", said=f"{fact}\n{question}\n")
    assert remembered.stdout.splitlines()[-1].startswith("The code of Maria is 4071.")
    forgotten = chat("--url", url, said=f"{fact}\n/reset\n{question}\n/exit\n{fact}\n")
    assert len(forgotten.stdout.splitlines()) == 2
    assert "4071" not in forgotten.stdout.splitlines()[-1]
    assert chat("--url", url, "--max-tokens", "1", "Hello").stdout.split() == ["Hello"]
    refused = chat("--url", url, "--model", "nope", "Hello")
    assert refused.returncode == 1
    assert refused.stderr.splitlines() == [
        f"baton: {url} answered 404: the model 'nope' does not exist; this server has 'demo'"
    ]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--url", "http://127.0.0.1:9", "Hello"), "start a server, or name one with --url"),
        (("--url", "127.0.0.1", "Hello"), "is not a URL"),
        (("--max-tokens", "0", "Hello"), "not a number of tokens"),
    ],
)
def test_a_chat_that_cannot_be_is_one_clear_line(words: tuple[str, ...], hint: str) -> None:
    done = chat(*words)
    assert done.returncode != 0
    assert hint in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_what_serve_prints_works_as_pasted(tmp_path: Path) -> None:
    with serving(tmp_path) as serve:
        curl = serve.wait_for(r"(?m)^curl .*$")
        script = serve.wait_for(r"(?ms)^from openai import.*?^print\([^\n]*$")
        reply = subprocess.run(shlex.split(curl), capture_output=True, text=True, check=True)
        assert json.loads(reply.stdout)["choices"][0]["text"] == " 4071."
        said = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=False
        )
        assert said.returncode == 0, said.stderr
        assert said.stdout.strip() == "42."
        talk_with(re.search(r"http://[^/]+", curl).group())  # type: ignore[union-attr]
        serve.process.send_signal(signal.SIGINT)
        assert serve.wait_for_exit() == 0, serve.text
        assert serve.all_gone()
        assert "Traceback" not in serve.text


def test_nothing_outlives_a_killed_serve(tmp_path: Path) -> None:
    """Its router logs nothing, so the port it picked cannot be read from a log line."""
    with serving(tmp_path, "--log-level", "error") as serve:
        pass
    assert serve.all_gone()


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


def test_a_node_that_does_not_answer_is_ended_by_force(tmp_path: Path) -> None:
    with serving(tmp_path) as serve:
        serve.children["decode"].suspend()
        serve.process.send_signal(signal.SIGTERM)
        assert serve.wait_for_exit() == 0
        assert serve.all_gone()


def test_a_second_signal_ends_everything_at_once(tmp_path: Path) -> None:
    with serving(tmp_path) as serve:
        for child in serve.children.values():
            child.suspend()  # so that the first signal has somebody to wait for
        serve.process.send_signal(signal.SIGINT)
        # Two of a kind that are pending at once would count as one.
        serve.process.send_signal(signal.SIGTERM)
        assert serve.wait_for_exit() == 130
        assert serve.all_gone()


def test_a_process_that_dies_is_started_again_the_router_on_the_same_port(tmp_path: Path) -> None:
    with serving(tmp_path) as serve:
        url = serve.wait_for(r"http://\S+(?=/v1)")
        serve.children["decode"].kill()
        serve.wait_for("process=decode-0 code=-9")
        serve.children["router"].kill()
        serve.wait_for("process=router code=-9")
        assert complete_when_served(url) == 2
        assert serve.children["prefill"].is_running()
        serve.children |= {"new": psutil.Process(serve.process.pid).children()[-1]}
        serve.process.send_signal(signal.SIGINT)
        assert serve.wait_for_exit() == 0
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
