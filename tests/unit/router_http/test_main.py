"""The router as a process: what it prints, how it ends, what it never loads."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from baton.protocol.config import ClusterConfig, LogConfig, ModelConfig, RouterConfig
from tests.support.scripted_nodes import ToyNode, node_info, toy_answer
from tests.support.small_tokenizers import write_tokenizer

T = TypeVar("T")
WAIT_S = 60.0
SCRIPT = """
import sys
import msgspec
from baton.protocol.config import ClusterConfig
from baton.router.main import run
code = run(msgspec.json.decode(sys.argv[1], type=ClusterConfig))
assert not {"torch", "transformers", "triton"} & set(sys.modules)
sys.exit(code)
"""


class Router:
    """A router's process and the lines that it has printed."""

    def __init__(self, config: ClusterConfig) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, msgspec.json.encode(config).decode()],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []

    def wait_for(self, text: str) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if text in line:
                return line
        raise AssertionError("".join(self.lines))

    def wait_for_url(self) -> str:
        return self.wait_for("listening on http://").split("listening on ")[1].strip()

    def end(self) -> None:
        """Read what is left, until the process has ended."""
        assert self.process.stderr is not None
        self.lines += self.process.stderr
        self.process.wait(WAIT_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT_S)
        assert self.process.stderr is not None
        self.process.stderr.close()


Start = Callable[[ClusterConfig], Router]


@pytest.fixture
def config(tmp_path: Path) -> ClusterConfig:
    path = write_tokenizer(tmp_path / "tiny")
    return ClusterConfig(
        model=ModelConfig(path=path),
        router=RouterConfig(port=0, control=f"ipc://{tmp_path}/control", local_prefill="never"),
        log=LogConfig(stats_s=0.2),
    )


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts routers, which end with the test."""
    with contextlib.ExitStack() as stack:

        def start_one(config: ClusterConfig) -> Router:
            router = Router(config)
            stack.callback(router.close)
            return router

        yield start_one


async def with_toy_nodes(
    config: ClusterConfig, use: Callable[[], T], max_steps: int | None = None
) -> T:
    """What `use`, in a thread, returns while two toy nodes have dialled in."""
    nodes = [
        ToyNode(config.control, node_info("p0", "prefill")),
        ToyNode(config.control, node_info("d0", "decode"), max_steps),
    ]
    for node in nodes:
        node.join()
    try:
        return await asyncio.to_thread(use)
    finally:
        for node in nodes:
            node.die()


def ask(url: str, body: dict[str, object]) -> bytes:
    wait_until_ready(url)
    request = urllib.request.Request(f"{url}/v1/completions", msgspec.json.encode(body))
    with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
        data: bytes = reply.read()
    return data


def wait_until_ready(url: str) -> None:
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=WAIT_S):
                return
        except urllib.error.HTTPError as error:
            error.close()


def test_it_serves_logs_stats_but_no_prompt_and_ends_on_sigterm(
    config: ClusterConfig, start: Start
) -> None:
    router = start(config)
    url = router.wait_for_url()
    prompt = [5, 6, 7]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "return_token_ids": True}
    data = asyncio.run(with_toy_nodes(config, lambda: ask(url, body)))
    answer = msgspec.json.decode(data)
    assert answer["choices"][0]["token_ids"] == toy_answer(prompt, 4)
    assert "output_tokens_per_s=" in router.wait_for("stats")
    os.kill(router.process.pid, signal.SIGTERM)
    router.end()
    assert router.process.returncode == 0, router.lines
    text = "".join(router.lines)
    assert "Traceback" not in text
    assert "5, 6, 7" not in text


def test_prompts_are_logged_on_request_and_cut(config: ClusterConfig, start: Start) -> None:
    logging = msgspec.structs.replace(config, log=LogConfig(prompts=True))
    router = start(logging)
    url = router.wait_for_url()
    body = {"prompt": "y" * 150 + "z" * 49, "max_tokens": 1}
    asyncio.run(with_toy_nodes(logging, lambda: ask(url, body)))
    assert "y" * 150 in router.wait_for("text=")
    os.kill(router.process.pid, signal.SIGINT)
    router.end()
    assert router.process.returncode == 0, router.lines


def test_a_stream_that_cannot_finish_in_time_is_told_of_the_end(
    config: ClusterConfig, start: Start
) -> None:
    router = start(config)
    url = router.wait_for_url()
    body = {"prompt": [5, 6, 7], "max_tokens": 50, "stream": True}

    def read_and_end() -> list[bytes]:
        wait_until_ready(url)
        request = urllib.request.Request(f"{url}/v1/completions", msgspec.json.encode(body))
        with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
            lines = [reply.readline()]
            os.kill(router.process.pid, signal.SIGTERM)
            return lines + reply.readlines()

    lines = asyncio.run(with_toy_nodes(config, read_and_end, max_steps=3))
    router.end()
    assert router.process.returncode == 0, router.lines
    events = [line for line in lines if line.startswith(b"data: ")]
    assert msgspec.json.decode(events[-1][6:])["error"]["code"] == "shutting_down"
    assert "Traceback" not in "".join(router.lines)


def test_a_port_in_use_is_one_clear_line(config: ClusterConfig, start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        changed = msgspec.structs.replace(config.router, port=port)
        router = start(msgspec.structs.replace(config, router=changed))
        router.end()
    assert router.process.returncode == 1
    (line,) = router.lines
    assert str(port) in line
    assert "in use" in line


def test_a_model_folder_without_a_tokenizer_is_one_clear_line(
    tmp_path: Path, config: ClusterConfig, start: Start
) -> None:
    router = start(msgspec.structs.replace(config, model=ModelConfig(path=str(tmp_path))))
    router.end()
    assert router.process.returncode == 1
    (line,) = router.lines
    assert "tokenizer.json" in line
