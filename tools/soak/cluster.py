"""The processes of a soak: a router and its nodes, started one by one as an operator would.

Everything is started by this process and signalled by its id alone. A process that ends by itself
is noted and restarted, and every line that a process prints is kept in a file.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from baton.deploy.startup import HealthReply, NodeLoad, ask_health
from baton.protocol.config import ClusterConfig, LogConfig
from baton.protocol.errors import NodeError
from baton.runtime.clock import monotonic
from baton.runtime.process import Child, Command
from baton.runtime.settings import to_yaml

READY_TIMEOUT_S = 180.0
LOOK_S = 0.1
LISTENS = "listening on http://"
IS_READY = ": ready role="
# Texts that no process may print, however its peers end.
ALARMS = ("Traceback", "Assertion failed", "a request broke", "unhandled error")


class Footprint(msgspec.Struct, frozen=True):
    """The resources that a process holds, and the blocks that a node holds."""

    descriptors: int
    threads: int
    rss_mib: int
    used_blocks: int = 0
    total_blocks: int = 0


def held_in(health: HealthReply) -> list[str]:
    """Return what is still held although no client waits for anything."""
    found: list[str] = []
    if health.num_running or health.num_queued:
        found.append(
            f"router: {health.num_running} running, {health.num_queued} queued requests"
        )
    for node in health.nodes:
        load = node.load
        if (
            load.total_blocks != load.free_blocks
            or load.num_running
            or load.num_waiting
        ):
            found.append(f"{node.node_id}: {load}")
    return found


class SoakCluster:
    """An asynchronous context manager, to be entered on the main thread."""

    def __init__(
        self, folder: Path, config: ClusterConfig, env: tuple[tuple[str, str], ...] = ()
    ) -> None:
        control = f"ipc://{folder}/control"
        self._router = msgspec.structs.replace(config.router, control=control, port=0)
        self._config = msgspec.structs.replace(config, log=LogConfig(stats_s=0.0))
        self._control = control
        self._folder = folder
        self._env = env
        self.names = ["router"]
        self.names += [f"prefill-{number}" for number in range(config.prefill)]
        self.names += [f"decode-{number}" for number in range(config.decode)]
        self.children: dict[str, Child] = {}
        self.own_ends: list[str] = []  # processes that ended by themselves
        self.alarms: list[str] = []
        self._ready: set[str] = set()  # nodes whose last process has said so
        self._expected: set[str] = set()  # processes that a fault is about to end
        self._watcher: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._router.port}"

    async def __aenter__(self) -> "SoakCluster":
        try:
            for name in self.names:
                self._start(name)
            await self.until("every node in service", self._is_ready)
            self._watcher = asyncio.create_task(self._watch())
        except BaseException:
            self._stop()
            raise
        return self

    async def __aexit__(self, *_error: object) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        self._stop()

    def send(self, name: str, number: signal.Signals) -> None:
        os.kill(self.children[name].pid, number)

    async def restart(self, name: str, number: signal.Signals) -> int:
        """End a process by a signal, start it again and return the exit code."""
        self._expected.add(name)
        self.send(name, number)
        child = self.children[name]
        await self.until(f"the end of {name}", lambda _: child.poll() is not None)
        self._start(name)
        self._expected.discard(name)
        assert child.exit_code is not None
        return child.exit_code

    async def until(self, what: str, is_so: Callable[[HealthReply], bool]) -> None:
        """Wait until the router's health shows it. Raises `NodeError` if that takes too long."""
        deadline_s = monotonic() + READY_TIMEOUT_S
        while not is_so(await self.health()):
            if monotonic() > deadline_s:
                health = msgspec.json.encode(await self.health()).decode()
                raise NodeError(f"waited {READY_TIMEOUT_S:g} s for {what}: {health}")
            await asyncio.sleep(LOOK_S)

    async def health(self) -> HealthReply:
        """Return the health, or an empty one if the router does not answer."""
        return await asyncio.to_thread(ask_health, self.url) or HealthReply()

    async def footprints(self) -> dict[str, Footprint]:
        loads = {node.node_id: node.load for node in (await self.health()).nodes}
        return {
            name: _footprint(child.pid, loads.get(name, NodeLoad()))
            for name, child in self.children.items()
        }

    def is_back(self, name: str, health: HealthReply) -> bool:
        """Return whether a process serves.

        Of a node that has just ended, a router that stood still may not know it yet.
        """
        if name == "router":
            return bool(health.ready_ids)
        return name in self._ready and name in health.ready_ids

    def _is_ready(self, health: HealthReply) -> bool:
        return health.ready_ids == set(self.names) - {"router"}

    def _start(self, name: str) -> None:
        bind = f"ipc://{self._folder}/peers-{name}"
        node = msgspec.structs.replace(
            self._config.node, id=name, routers=(self._control,), bind=bind
        )
        config = msgspec.structs.replace(self._config, router=self._router, node=node)
        self._ready.discard(name)
        settings = self._folder / f"{name}.yaml"
        settings.write_text(to_yaml(config))
        args = (name.partition("-")[0], "--config", str(settings))
        self.children[name] = Child(Command(name, args, env=self._env), self._relay)

    async def _watch(self) -> None:
        while True:
            for name, child in list(self.children.items()):
                if name not in self._expected and child.poll() is not None:
                    self.own_ends.append(
                        f"{name} ended with {child.exit_code}: {child.tail[-1:]}"
                    )
                    self._start(name)
            await asyncio.sleep(LOOK_S)

    def _stop(self) -> None:
        running = [child for child in self.children.values() if child.poll() is None]
        for child in running:
            os.kill(child.pid, signal.SIGCONT)
            child.terminate()
        for child in running:
            child.stop()

    def _relay(self, name: str, line: str) -> None:
        """Keep a line; a reader thread of each process calls this."""
        with (self._folder / f"{name}.log").open("a") as file:
            file.write(line + "\n")
        if any(alarm in line for alarm in ALARMS):
            self.alarms.append(f"{name}: {line}")
        if IS_READY in line:
            self._ready.add(name)
        if LISTENS in line and not self._router.port:
            port = int(line.partition(LISTENS)[2].split()[0].rpartition(":")[2])
            self._router = msgspec.structs.replace(self._router, port=port)


def _footprint(pid: int, load: NodeLoad) -> Footprint:
    process = psutil.Process(pid)
    return Footprint(
        process.num_fds(),
        process.num_threads(),
        process.memory_info().rss >> 20,
        load.total_blocks - load.free_blocks,
        load.total_blocks,
    )
