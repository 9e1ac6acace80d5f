"""The router as a process of its own, and toy nodes that dial it."""

import asyncio
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import TypeVar

import msgspec

from baton.protocol.config import ClusterConfig
from tests.support import completions
from tests.support.scripted_nodes import ToyNode, node_info

T = TypeVar("T")
StartRouter = Callable[..., "Router"]
WAIT_S = 60.0
HEARTBEAT_S = 0.5
NUM_BLOCKS = 4096  # of each node
SCRIPT = """
import resource
import sys
import msgspec
from baton.protocol.config import ClusterConfig
from baton.router.main import run
if sys.argv[2:]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[3])))
code = run(msgspec.json.decode(sys.argv[1], type=ClusterConfig))
assert not {"torch", "transformers", "triton"} & set(sys.modules)
sys.exit(code)
"""


class Router:
    """A router's process and the lines that it has printed."""

    def __init__(
        self, config: ClusterConfig, files: tuple[int, int] | None = None
    ) -> None:
        """`files` are the soft and the hard limit of open files."""
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                SCRIPT,
                msgspec.json.encode(config).decode(),
                *(str(limit) for limit in files or ()),
            ],
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
        return self.wait_for("listening on http").split("listening on ")[1].strip()

    def end(self) -> None:
        """Read what is left, until the process has ended."""
        assert self.process.stderr is not None
        self.lines += self.process.stderr
        self.process.wait(WAIT_S)

    def end_well(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Tell the process to end, as it must without an error."""
        os.kill(self.process.pid, number)
        self.end()
        assert self.process.returncode == 0, self.lines
        assert "Traceback" not in "".join(self.lines)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT_S)
        assert self.process.stderr is not None
        self.process.stderr.close()


async def with_toy_nodes(
    config: ClusterConfig, use: Callable[[], T], max_steps: int | None = None
) -> T:
    """What `use`, in a thread, returns while two toy nodes have dialled in."""
    nodes = [
        ToyNode(config.control, node_info("p0", "prefill", num_blocks=NUM_BLOCKS)),
        ToyNode(
            config.control, node_info("d0", "decode", num_blocks=NUM_BLOCKS), max_steps
        ),
    ]
    for node in nodes:
        node.join()
    using = asyncio.create_task(asyncio.to_thread(use))
    try:
        while not using.done():
            for node in nodes:
                node.heartbeat()
            await asyncio.wait([using], timeout=HEARTBEAT_S)
        return await using
    finally:
        for node in nodes:
            node.die()


def ask(url: str, body: dict[str, object]) -> bytes:
    wait_until_ready(url)
    with completions.ask(url, body) as reply:
        return reply.read()


def wait_until_ready(url: str) -> None:
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=WAIT_S):
                return
        except urllib.error.HTTPError as error:
            error.close()
