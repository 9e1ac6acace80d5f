"""A cluster of real processes on this host, each of which a test can end or kill.

`Cluster` starts them one by one through `python -m baton`, as an operator on several hosts would,
so it also tests that. It binds loopback and ipc only and ends everything by process id.
"""

import contextlib
import json
import os
import re
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from baton.node.records import ReadRecord, Record, StepRecord, read_records
from baton.protocol.config import ClusterConfig, LogConfig
from baton.protocol.messages import Role
from baton.runtime.process import Child, Command
from baton.runtime.settings import to_yaml
from tests.support.completions import ask
from tests.support.waiting import until

START_TIMEOUT_S = 90.0


class Cluster:
    """`config.prefill` + `config.decode` nodes and `router`; a context manager.

    `env` is for the nodes, `ranks` the degree of single ones. They meet over ipc, or over the ports
    of this host. `lines` holds everything that any of them printed.
    """

    def __init__(
        self,
        folder: Path,
        config: ClusterConfig,
        env: tuple[tuple[str, str], ...] = (),
        over: Literal["ipc", "tcp"] = "ipc",
        ranks: Mapping[str, int] | None = None,
    ) -> None:
        self.folder = folder
        self.lines: list[str] = []
        self.children: dict[str, Child] = {}
        self.port = 0  # of HTTP
        self._env = env
        self._over = over
        self._ranks = ranks or {}
        # An address of this process alone on this host, so that its ports are free.
        address = "127." + ".".join(
            str(byte) for byte in os.getpid().to_bytes(3, "big")
        )
        control = (
            f"ipc://{folder}/control" if over == "ipc" else f"tcp://{address}:5570"
        )
        self.config = msgspec.structs.replace(
            config,
            router=msgspec.structs.replace(config.router, control=control, port=0),
            node=msgspec.structs.replace(config.node, routers=(control,)),
            log=LogConfig(records=str(folder / "records"), stats_s=1.0),
        )

    def __enter__(self) -> "Cluster":
        try:
            self.start_router()
            for index in range(self.config.prefill):
                self.start_node("prefill", index)
            for index in range(self.config.decode):
                self.start_node("decode", index)
            self.port = until(self._find_port, self._last_lines)
            self.wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start_node(self, role: Role, index: int) -> None:
        """Start (again) the node `role-index`."""
        name = f"{role}-{index}"
        bind = (
            f"ipc://{self.folder}/peers-{name}"
            if self._over == "ipc"
            else "tcp://127.0.0.1"
        )
        node = msgspec.structs.replace(self.config.node, id=name, bind=bind)
        degree = self._ranks.get(name, self.config.engine.tensor_parallel_size)
        engine = msgspec.structs.replace(
            self.config.engine, tensor_parallel_size=degree
        )
        self.start(
            name, msgspec.structs.replace(self.config, node=node, engine=engine), role
        )

    def start(self, name: str, config: ClusterConfig, command: str = "") -> None:
        settings = self.folder / f"{name}.yaml"
        settings.write_text(to_yaml(config))
        args = (command or name, "--config", str(settings))
        self.children[name] = Child(Command(name, args, env=self._env), self._relay)

    def command(self, *words: str) -> Child:
        """Start `baton WORDS` for this cluster; its lines are among `lines`."""
        assert self.config.router.control is not None
        args = (*words, "--control", self.config.router.control)
        return Child(Command(words[0], args), self._relay)

    def wait_for_line(self, text: str) -> None:
        until(lambda: any(text in line for line in self.lines), self._last_lines)

    def start_router(self) -> None:
        """Start the router, again on the port that it had."""
        router = msgspec.structs.replace(self.config.router, port=self.port)
        self.start("router", msgspec.structs.replace(self.config, router=router))

    def stop(self) -> None:
        for child in self.children.values():
            if child.poll() is None:
                os.kill(child.pid, signal.SIGCONT)
            child.terminate(is_hurried=True)
        for child in self.children.values():
            child.stop(is_hurried=True)

    def kill(self, name: str) -> None:
        """SIGKILL, and wait until it is gone."""
        self.children[name].kill()
        assert self.children[name].wait(time.monotonic() + START_TIMEOUT_S)

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a GET."""
        try:
            with urllib.request.urlopen(self.url(path), timeout=60.0) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def complete(self, **body: object) -> dict[str, object]:
        """The answer to one completion that is not streamed."""
        with ask(self.url(""), body) as reply:
            answer: dict[str, object] = json.loads(reply.read())
        return answer

    def stream(self, **body: object) -> Iterator[dict[str, object]]:
        """The events of a streamed completion, as they come."""
        with ask(self.url(""), {**body, "stream": True}) as reply:
            for line in reply:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    yield json.loads(line[6:])

    def num_used_blocks(self) -> int:
        """Blocks of all nodes that could not be given out, as of their last heartbeats."""
        page = self.get("/metrics")[1]
        return metric(page, "baton_node_total_blocks") - metric(
            page, "baton_node_free_blocks"
        )

    def wait_for_metric(self, name: str, value: int) -> None:
        """Until a family of the router's metrics adds up to `value`."""
        until(
            lambda: metric(self.get("/metrics")[1], name) == value,
            lambda: f"{name} differs",
        )

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def wait_until_healthy(self) -> None:
        """Until every node is in service."""

        def is_healthy() -> bool:
            self._check_alive()
            try:
                nodes = json.loads(self.get("/health")[1])["nodes"]
            except OSError:
                return False  # the router is starting again
            num_ready = sum(node["state"] == "ready" for node in nodes)
            return num_ready >= self.config.prefill + self.config.decode

        until(is_healthy, self._last_lines)

    def records(self, name: str) -> list[Record]:
        return read_records(self.folder / "records" / f"{name}.jsonl")

    def steps(self, name: str) -> list[StepRecord]:
        return [
            record for record in self.records(name) if isinstance(record, StepRecord)
        ]

    def reads(self, name: str) -> list[ReadRecord]:
        return [
            record for record in self.records(name) if isinstance(record, ReadRecord)
        ]

    def _find_port(self) -> int:
        self._check_alive()
        found = [
            re.search(r"listening on http://[^:]*:(\d+)", line)
            for line in list(self.lines)
        ]
        return next((int(one[1]) for one in found if one), 0)

    def _check_alive(self) -> None:
        for name, child in self.children.items():
            assert child.poll() is None, f"{name} ended:\n" + "\n".join(child.tail)

    def _last_lines(self) -> str:
        return "\n".join(self.lines[-40:])

    def _relay(self, name: str, line: str) -> None:
        self.lines.append(f"{name} | {line}")


def metric(page: str, name: str) -> int:
    """Return the sum of all values of a family on a page of metrics."""
    lines = [line for line in page.splitlines() if line.partition("{")[0] == name]
    return int(sum(float(line.rpartition(" ")[2]) for line in lines))


def free_port() -> int:
    """Return a port for a process that must be named before it starts; it is given out once.

    No system gives such ports to outgoing connections, and test processes have shares of them.
    """
    for port in _OWN_PORTS:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("this process has used up its ports")


_FIRST_PORT = 10_000
_PORTS_PER_PROCESS = 200
_NUM_SHARES = 110
_SHARE = _FIRST_PORT + os.getpid() % _NUM_SHARES * _PORTS_PER_PROCESS
_OWN_PORTS = iter(range(_SHARE, _SHARE + _PORTS_PER_PROCESS))
