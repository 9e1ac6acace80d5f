"""`baton serve` runs a router and its nodes on this host, from the port check to the last exit.

The router is a child like the nodes, so this process only starts, shows, watches and ends its
children: it holds no model and no request. A child that dies is restarted, a router on the same
port. Several routers may share the port: the system spreads connections over them, and every node
dials them all.
"""

import json
import shlex
import shutil
import socket
import sys
from pathlib import Path

import msgspec

from baton.deploy.startup import (
    HealthReply,
    StartProgress,
    ask_health,
    check_port,
    check_reach,
    reserve_port,
    url_of,
)
from baton.protocol.config import ClusterConfig, RouterConfig
from baton.protocol.errors import ConfigError, NodeError
from baton.runtime.channels.endpoint import parse_endpoint
from baton.runtime.clock import Standstill
from baton.runtime.local_cluster import LocalCluster, fitted_to_gpus, private_folder
from baton.runtime.log import is_json, logger, say
from baton.runtime.process import (
    Command,
    Exit,
    Interrupts,
    Supervisor,
    log_exit,
    on_hangup,
)
from baton.runtime.settings import SettingsInMemory
from baton.runtime.unix_socket import (
    SCHEME,
    check_socket_path,
    remove_left_socket,
    url_of_socket,
)

WATCH_S = 0.1
ROUTER_GRACE_S = 2.0  # the time to end, beyond the time that a drain may take
# The time for the interpreter and the router to start, added to the nodes' own deadline.
EXTRA_START_S = 20.0

log = logger("serve")


def serve(config: ClusterConfig) -> int:
    """Serve until Ctrl-C or SIGTERM and return the exit code.

    SIGTERM lets running requests finish within `router.shutdown_timeout_s`. A second one ends all
    at once. Raises `ConfigError` and `NodeError`.
    """
    if config.router.control is not None:
        check_reach(config, "router.control", config.router.control)
    server = LocalServer(config)
    on_hangup(server.renew)
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
        log.info("ready", model=config.model.shown_name, url=f"{url}/v1")
    else:
        greet = greeting if config.decode else greeting_without_tokens
        text = greet(url, config.model.shown_name, wants_key=config.router.wants_key)
        say(text, sys.stdout)


class LocalServer:
    """The processes of `serve`. Only `kill` is thread-safe."""

    def __init__(self, config: ClusterConfig) -> None:
        """Raises `ConfigError` if the port is taken."""
        self._config = config = fitted_to_gpus(config)
        router = config.router
        self._reserved: socket.socket | None = None
        if router.uds:
            check_socket_path(router.uds)
            self._url = url_of_socket(router.uds)
        else:
            # Routers of another command may share theirs.
            check_port(router.host, router.port)
            self._reserved = reserve_port(router.host, router.port)
            port: int = self._reserved.getsockname()[1]
            router = msgspec.structs.replace(router, port=port, port_is_held=True)
            self._url = url_of(router.host, port, is_tls=router.speaks_tls)
        self._folder = private_folder()
        self._routers = _router_configs(router, config.router_processes, self._folder)
        self._settings = [
            SettingsInMemory(msgspec.structs.replace(config, router=one))
            for one in self._routers
        ]
        commands = [
            # `ps` shows the name, which tells several routers apart.
            Command(
                one.name,
                (
                    "router",
                    "--config",
                    settings.path,
                    "--set",
                    f"router.name={one.name}",
                ),
                pass_fds=settings.descriptors,
            )
            for one, settings in zip(self._routers, self._settings, strict=True)
        ]
        self._router = Supervisor(tuple(commands))
        first, *others = [
            one.control for one in self._routers if one.control is not None
        ]
        self._nodes = LocalCluster(config, first, more_endpoints=tuple(others))
        # Without nodes that ended before all were ready.
        self._awaited = set(self._nodes.names)
        self._ready_routers: set[str] = set()

    @property
    def url(self) -> str:
        return self._url

    def start(self) -> None:
        """Spawn the routers and the nodes."""
        self._router.start()
        self._nodes.start()

    def wait_until_ready(self, interrupts: Interrupts) -> bool:
        """Return True when all are ready that can start, False when a stop was requested.

        Raises `NodeError` if a router or the last node of a role ended, or no node makes progress.
        """
        limit_s = self._config.node.start_timeout_s + EXTRA_START_S
        standstill = Standstill(limit_s)
        progress = StartProgress()
        seen = set[tuple[str, str]]()
        while not interrupts.wait(WATCH_S):
            for ended in self._poll():
                self._go_on_without(ended)
            # The system chooses which router gets a connection.
            for _ in self._routers:
                phases = self._ask_health()
                progress.show(phases)
                seen |= phases.items()
            if len(self._ready_routers) == len(self._routers):
                return True
            if standstill.lasts(len(seen)):
                raise NodeError(f"no progress for {limit_s:g} s (node.start_timeout_s)")
        return False

    def watch(self, interrupts: Interrupts) -> None:
        """Restart processes that die until a stop is requested."""
        while not interrupts.wait(WATCH_S):
            for ended in self._poll():
                log_exit(log, ended)

    def stop(self, *, is_hurried: bool = True) -> None:
        """End everything, beginning with the routers, which may finish their requests.

        If it is hurried, this takes five seconds at most.
        """
        shutdown_timeout_s = (
            0.0 if is_hurried else self._config.router.shutdown_timeout_s
        )
        self._router.stop(shutdown_timeout_s + ROUTER_GRACE_S, is_hurried=is_hurried)
        self._nodes.stop()
        self._give_back_address()
        for settings in self._settings:
            settings.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def renew(self) -> None:
        """Let the routers read keys and certificates again. A signal handler may call it."""
        self._router.hang_up()

    def kill(self) -> None:
        """End everything by force without waiting. A signal handler may call it."""
        self._router.kill()
        self._nodes.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _give_back_address(self) -> None:
        if self._reserved is not None:
            self._reserved.close()
        if self._config.router.uds:  # a router that was killed has left it
            remove_left_socket(self._config.router.uds)

    def _go_on_without(self, ended: Exit) -> None:
        """Start without this node, which is tried again, unless no other node has its role."""
        self._awaited.discard(ended.name)
        role = ended.name.rpartition("-")[0]
        if not any(name.startswith(f"{role}-") for name in self._awaited):
            raise NodeError(
                f"{ended.name} ended while starting (exit code {ended.code})"
            )
        log_exit(log, ended)

    def _poll(self) -> list[Exit]:
        """Restart the processes that are due and return the exits since the last call."""
        return [*self._router.poll(), *self._nodes.poll()]

    def _ask_health(self) -> dict[str, str]:
        """Return the phase of each node from a router, and note a router that is ready."""
        health = ask_health(self.url) or HealthReply()
        if health.can_serve and health.ready_ids >= self._awaited:
            self._ready_routers.add(health.router)
        return {node.node_id: node.doing for node in health.nodes}


def greeting(url: str, model: str, *, wants_key: bool = False) -> str:
    """Return a text that shows how to call the server from a shell and from Python.

    It contains no API key, because terminals and logs keep what is printed.
    """
    key = "none"
    header = ""
    if wants_key:
        key = "YOUR_KEY"
        header = " -H 'Authorization: Bearer YOUR_KEY'"
    told = (
        "The code of Lima is 4071. The code of Oslo is 2210. What is the code of Lima?"
    )
    body = json.dumps(
        {"model": model, "prompt": told, "max_tokens": 32, "temperature": 0}
    )
    shown = _as_curl_wants(url)
    asked = "What is 17 + 25?"
    python = f"""from openai import OpenAI  # pip install openai
client = OpenAI(base_url="{url}/v1", api_key="{key}")
asked = "{asked}"
answer = client.completions.create(model={json.dumps(model)}, prompt=asked, max_tokens=8)
print(answer.choices[0].text)"""
    chat = f"baton chat --url {shlex.quote(url)} {shlex.quote(asked)}"
    return f"""
baton serves {model} at {shown}/v1  (Ctrl-C stops it)

curl {shown}/v1/completions -H 'Content-Type: application/json'{header} -d {shlex.quote(body)}

{chat if url.startswith(SCHEME) else python}
"""


def greeting_without_tokens(url: str, model: str, *, wants_key: bool = False) -> str:
    """Return a text that shows how to call a server whose model only pools prompts."""
    header = " -H 'Authorization: Bearer YOUR_KEY'" if wants_key else ""
    body = json.dumps(
        {"model": model, "text_1": "What is red?", "text_2": ["Roses.", "Snow."]}
    )
    shown = _as_curl_wants(url)
    return f"""
baton serves {model} at {shown}/v1, without completions  (Ctrl-C stops it)

curl {shown}/v1/score -H 'Content-Type: application/json'{header} -d {shlex.quote(body)}
"""


def _as_curl_wants(url: str) -> str:
    """Return the URL, with curl's flag before it if it is that of a Unix socket."""
    if not url.startswith(SCHEME):
        return url
    return f"--unix-socket {shlex.quote(url.removeprefix(SCHEME))} http://localhost"


def _router_configs(
    router: RouterConfig, num_routers: int, folder: Path
) -> list[RouterConfig]:
    """Return the settings of each router process; each has an endpoint of its own for nodes."""
    control = router.control or f"ipc://{folder}/control"
    if num_routers == 1:
        return [msgspec.structs.replace(router, control=control)]
    first = router.own_port or _free_after(router, router.port, num_routers)
    return [
        msgspec.structs.replace(
            router,
            name=f"{router.name}-{index}",
            shares_port=True,
            own_port=first + index if first else 0,
            control=_nth(control, index),
        )
        for index in range(num_routers)
    ]


def _free_after(router: RouterConfig, port: int, count: int) -> int:
    """Return the port after that of the routers if it and the next ones are free, else 0."""
    try:
        for number in range(port + 1, port + 1 + count):
            check_port(router.host, number)
    except (ConfigError, OverflowError):
        log.warning(
            "the ports after that of the routers are not free, so each router's own metrics are "
            "not served: set router.own_port",
            port=port,
        )
        return 0
    return port + 1


def _nth(control: str, index: int) -> str:
    """Return the endpoint of one of several routers: the next ports, or other names of sockets."""
    address = parse_endpoint(control)
    if address.path:
        return f"{control}-{index}"
    if not address.port:
        raise ConfigError(
            "router.control needs a port when there are several router processes"
        )
    return str(msgspec.structs.replace(address, port=address.port + index))
