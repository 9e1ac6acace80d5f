"""`baton serve`: a router and its nodes on this host, from the port check to the last exit.

The command line calls it. The router is a child like the nodes, so this process only starts, shows,
watches and ends its children: it holds no model and no request. A child that dies is started again,
the router on the same port.
"""

import json
import shlex
import shutil

import msgspec

from baton.deploy.health import HealthReply, ask_health, url_of
from baton.deploy.ports import check_port, check_reach
from baton.deploy.progress import StartProgress
from baton.protocol.config import ClusterConfig
from baton.protocol.errors import NodeError
from baton.runtime.clock import monotonic
from baton.runtime.interrupts import Interrupts
from baton.runtime.local_cluster import LocalCluster, private_folder
from baton.runtime.log import is_json, logger
from baton.runtime.port_pipe import PortPipe
from baton.runtime.process import Command, Exit, Supervisor
from baton.runtime.settings import to_yaml

WATCH_S = 0.1
ROUTER_GRACE_S = 2.0  # beyond the time that it may take to drain
# Added to the nodes' own deadline: the time for the interpreter and the router to start.
EXTRA_START_S = 20.0

log = logger("serve")


def serve(config: ClusterConfig) -> int:
    """Serve until Ctrl-C or SIGTERM and return the exit code.

    SIGTERM lets running requests finish within `router.drain_s`. A second signal ends everything
    at once. Raises `ConfigError` and `NodeError`.
    """
    if config.router.control is not None:
        check_reach(config, "router.control", config.router.control)
    check_port(config.router.host, config.router.port)
    server = LocalServer(config)
    with Interrupts(on_second=server.kill) as interrupts:
        try:
            server.start()
            if server.wait_until_ready(interrupts):
                _greet(server.url, config)
                server.watch(interrupts)
        finally:
            server.stop(is_hurried=interrupts.is_hurried)
    return 0


def _greet(url: str, config: ClusterConfig) -> None:
    if is_json():
        log.info("ready", model=config.model.name, url=f"{url}/v1")
    else:
        text = greeting(url, config.model.name, wants_key=config.router.wants_key)
        print(text, flush=True)


class LocalServer:
    """The processes behind `serve`. Only `kill` is thread-safe."""

    def __init__(self, config: ClusterConfig) -> None:
        self._folder = private_folder()
        control = config.router.control
        if control is None:
            control = f"ipc://{self._folder}/control"
        self._config = _with_router(config, control=control)
        self._port = config.router.port  # 0 until the router has reported the port that it picked
        self._port_pipe = PortPipe()
        self._progress = StartProgress()
        self._settings = self._folder / "router.yaml"
        command = Command(
            "router",
            ("router", "--config", str(self._settings)),
            env=self._port_pipe.env,
            pass_fds=self._port_pipe.pass_fds,
        )
        self._router = Supervisor((command,), monotonic, self._progress.relay)
        self._nodes = LocalCluster(self._config, control, self._progress.relay)

    @property
    def url(self) -> str:
        return url_of(self._config.router.host, self._port)

    def start(self) -> None:
        """Spawn the router and the nodes."""
        self._settings.write_text(to_yaml(self._config))
        self._router.start()
        self._nodes.start()

    def wait_until_ready(self, interrupts: Interrupts) -> bool:
        """Return True when all are ready, False when a stop was requested.

        Raises `NodeError` when a process ended or the start takes too long.
        """
        limit_s = self._config.node.start_timeout_s + EXTRA_START_S
        deadline_s = monotonic() + limit_s
        try:
            while not interrupts.wait(WATCH_S):
                for ended in self._poll():
                    raise NodeError(f"{ended.name} ended while starting (exit code {ended.code})")
                is_ready, phases = self._health()
                self._progress.show(phases)
                if is_ready:
                    return True
                if monotonic() > deadline_s:
                    raise NodeError(f"not ready within {limit_s:g} s (node.start_timeout_s)")
            return False
        finally:
            self._progress.stop()

    def watch(self, interrupts: Interrupts) -> None:
        """Restart processes that die until a stop is requested."""
        while not interrupts.wait(WATCH_S):
            for ended in self._poll():
                if ended.restart_in_s is None:
                    log.info("process was told to end and stays away", process=ended.name)
                    continue
                log.warning(
                    "process ended and will start again",
                    process=ended.name,
                    code=ended.code,
                    in_s=ended.restart_in_s,
                    exits=ended.num_exits,
                )

    def stop(self, *, is_hurried: bool = True) -> None:
        """End everything, the router first, which may finish its requests.

        If it is hurried, all of this takes five seconds at the most.
        """
        self._progress.stop()
        drain_s = 0.0 if is_hurried else self._config.router.drain_s
        self._router.stop(drain_s + ROUTER_GRACE_S, is_hurried=is_hurried)
        self._nodes.stop()
        self._port_pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """End everything by force, without waiting; safe in a signal handler."""
        self._router.kill()
        self._nodes.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _poll(self) -> list[Exit]:
        """Restart the processes that are due and return the exits since the last call."""
        return [*self._router.poll(), *self._nodes.poll()]

    def _health(self) -> tuple[bool, dict[str, str]]:
        """Return whether every node is ready and the phase of each, as the router reports them."""
        if not self._port:
            self._port = self._port_pipe.poll()
            if not self._port:
                return False, {}
            # A router that is started again listens where its clients expect it.
            self._settings.write_text(to_yaml(_with_router(self._config, port=self._port)))
        health = ask_health(self.url) or HealthReply()
        wanted = self._config.prefill + self._config.decode
        is_ready = health.can_serve and len(health.ready_ids) >= wanted
        return is_ready, {node.node_id: node.doing for node in health.nodes}


def greeting(url: str, model: str, *, wants_key: bool = False) -> str:
    """Return the text that shows how to call the server, ready to paste into shell and Python.

    It repeats no API key, because terminals and logs keep what is printed.
    """
    key, header = "none", ""
    if wants_key:
        key, header = "YOUR_KEY", " -H 'Authorization: Bearer YOUR_KEY'"
    told = "The code of Lima is 4071. The code of Oslo is 2210. What is the code of Lima?"
    body = json.dumps({"model": model, "prompt": told, "max_tokens": 32, "temperature": 0})
    return f"""
baton serves {model} at {url}/v1  (Ctrl-C stops it)

curl {url}/v1/completions -H 'Content-Type: application/json'{header} -d {shlex.quote(body)}

from openai import OpenAI  # pip install openai
client = OpenAI(base_url="{url}/v1", api_key="{key}")
asked = "What is 17 + 25?"
answer = client.completions.create(model={json.dumps(model)}, prompt=asked, max_tokens=8)
print(answer.choices[0].text)
"""


def _with_router(config: ClusterConfig, **changes: object) -> ClusterConfig:
    router = msgspec.structs.replace(config.router, **changes)
    return msgspec.structs.replace(config, router=router)
