"""Wait until a cluster serves, or name the process and the host that are not ready.

`baton up` calls it. It asks the routers' /health and the platform's status, and dials the
routers' control ports with the key of this host.
"""

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import zmq

from baton.deploy.cluster.platform import Platform, ProcessStatus
from baton.deploy.cluster.processes import ROUTERS, ClusterPlan, ProcessSpec
from baton.deploy.cluster.reading import config_of
from baton.deploy.health import HealthReply, ask_health
from baton.deploy.progress import StartProgress
from baton.protocol.codec import NodeInbox, Unreadable, to_router_codec
from baton.protocol.errors import NodeError
from baton.protocol.messages import ToNode, ToRouter
from baton.runtime.channels.dialer import Dialer
from baton.runtime.channels.keys import load_keys
from baton.runtime.clock import monotonic
from baton.runtime.process import Interrupts

WATCH_S = 0.2
# Handshakes in a row that fail: one may fail because a router ends.
REFUSALS = 3


def wait_until_ready(
    plan: ClusterPlan,
    platform: Platform,
    folder: Path,
    timeout_s: float,
    interrupts: Interrupts,
) -> bool:
    """Return True when the cluster serves, False when a stop was requested.

    Raises `NodeError` for the first process that ended or is not ready in time. A command that
    started no router waits only for the nodes that it has started; any other command waits for all.
    """
    own = platform.own(plan)
    is_central = any(spec.role == "router" for spec in own)
    nodes = [spec for spec in (plan.processes if is_central else own) if spec.role != "router"]
    deadline_s = monotonic() + timeout_s
    progress = StartProgress()
    keys = KeyCheck(plan)
    try:
        while not interrupts.wait(WATCH_S):
            statuses = platform.status(folder)
            _check_running(statuses)
            # Some platforms choose the routers' hosts when they start the processes.
            urls = platform.urls(plan, folder)
            keys.dial(urls)
            missing, phases = _missing_of(plan, nodes, urls)
            if not urls:
                missing = [
                    Missing(
                        status, "is waiting", status.note or "see the platform's own status of it"
                    )
                    for status in statuses
                    if status.state != "running"
                ]
            progress.show(phases)
            if keys.are_accepted() and not missing:
                return True
            if monotonic() > deadline_s:
                late = missing[0] if missing else keys.unanswered()
                raise NodeError(f"not ready within {timeout_s:g} s: {late}; {late.advice}")
        return False
    finally:
        keys.close()
        progress.stop()


def check_ids(plan: ClusterPlan, own: Sequence[ProcessSpec], urls: Sequence[str]) -> None:
    """Raise `NodeError` if a router has a node with the id of a node that is about to start."""
    for router, url in zip(plan.pool(ROUTERS), urls, strict=False):
        health = ask_health(url) or HealthReply()
        present = {node.node_id for node in health.nodes if node.state != "silent"}
        for spec in own:
            if spec.name in present:
                raise NodeError(
                    f"{_who(spec)}: {router.name} already has a node with this id; end that node, "
                    "or give the pool another name"
                )


class Missing(msgspec.Struct, frozen=True):
    """A process that is not ready, and advice."""

    process: ProcessSpec | ProcessStatus
    doing: str
    advice: str

    def __str__(self) -> str:
        return f"{_who(self.process)} {self.doing}"


def _who(process: ProcessSpec | ProcessStatus) -> str:
    return process.name + (f" on {process.host}" if process.host else "")


def _check_running(statuses: Sequence[ProcessStatus]) -> None:
    """Raise `NodeError` for the first process that has ended."""
    for status in statuses:
        if status.state == "ended" or status.last_end:
            raise NodeError(f"{_who(status)} ended while starting ({status.last_end})")


def _missing_of(
    plan: ClusterPlan, nodes: Sequence[ProcessSpec], urls: Sequence[str]
) -> tuple[list[Missing], dict[str, str]]:
    """Return the routers and those of `nodes` that are not ready, with what each is doing.

    A node is ready when every router reports it as ready.
    """
    missing: list[Missing] = []
    phases: dict[str, str] = {}
    for router, url in zip(plan.pool(ROUTERS), urls, strict=False):
        health = ask_health(url)
        if health is None:
            advice = f"see that its host is up, that it was started there, and that {url} is open"
            missing.append(Missing(router, "does not answer", advice))
            continue
        phases |= {node.node_id: node.doing for node in health.nodes}
        missing += [one for spec in nodes if (one := _lack(spec, router, health)) is not None]
    return missing, phases


def _lack(spec: ProcessSpec, router: ProcessSpec, health: HealthReply) -> Missing | None:
    node = next((node for node in health.nodes if node.node_id == spec.name), None)
    if node is None:
        control = next(port.port for port in router.ports if port.name == "control")
        where = f"port {control}" + (f" of {router.host}" if router.host else "")
        return Missing(
            spec,
            f"has not joined {router.name}",
            f"see that its host is up and reaches {where}, that it was started there with the same "
            "key and model, and what it has logged",
        )
    if node.state == "ready":
        return None
    return Missing(spec, f"is {node.doing} at {router.name}", node.reason or "see its log")


class KeyCheck:
    """Dials the control ports of `plan`'s routers, as nodes do, with the key of this host.

    Without this check, nodes that already run could be mistaken for nodes of a host with another
    key.
    """

    def __init__(self, plan: ClusterPlan) -> None:
        self._plan = plan
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dialers: list[Dialer[ToRouter, ToNode | Unreadable]] = []

    def dial(self, urls: Sequence[str]) -> None:
        """Dial the hosts of the routers' URLs, once there are any that this host can reach."""
        if self._dialers:
            return
        for router, url in zip(self._plan.pool(ROUTERS), urls, strict=False):
            host = urlsplit(url).netloc.rpartition(":")[0]
            control = next(port.port for port in router.ports if port.name == "control")
            self._dialers.append(self._dial(f"tcp://{host}:{control}"))

    def are_accepted(self) -> bool:
        """Return whether every router has accepted the key. Raises `NodeError` on a refusal."""
        for router, dialer in zip(self._plan.pool(ROUTERS), self._dialers, strict=False):
            while dialer.receive() is not None:
                pass
            if dialer.refusals >= REFUSALS:
                what = self._plan.description.key or "no key"
                raise NodeError(
                    f"{router.name} on {router.host} refuses the key of this host ({what}): copy "
                    "one key file to all hosts and start their processes again"
                )
        return all(dialer.connected for dialer in self._dialers)

    def unanswered(self) -> Missing:
        """Return the first router whose control port has not answered."""
        routers = zip(self._plan.pool(ROUTERS), self._dialers, strict=False)
        router, dialer = next(pair for pair in routers if not pair[1].connected)
        return Missing(
            router,
            f"does not answer at {dialer.endpoint}",
            "see that this port is open between the hosts",
        )

    def close(self) -> None:
        for dialer in self._dialers:
            dialer.close()
        self._context.term()

    def _dial(self, endpoint: str) -> Dialer[ToRouter, ToNode | Unreadable]:
        keys = load_keys(
            config_of(self._plan.description, {"keys.file": self._plan.description.key}).keys
        )
        return Dialer(endpoint, b"up", to_router_codec(), NodeInbox(), self._context, keys)
