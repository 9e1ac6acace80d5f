"""Wait until a cluster serves, or name the process and the host that are not ready.

It asks the routers' /health and the platform's status.
"""

from collections.abc import Sequence
from pathlib import Path

from baton.deploy.cluster.processes import ROUTERS, ClusterPlan, ProcessSpec
from baton.deploy.cluster.state import Platform, ProcessStatus
from baton.deploy.startup import HealthReply, StartProgress, ask_health
from baton.protocol.errors import NodeError
from baton.runtime.clock import Standstill
from baton.runtime.process import Interrupts

WATCH_S = 0.2


def wait_until_ready(
    plan: ClusterPlan,
    platform: Platform,
    folder: Path,
    timeout_s: float,
    interrupts: Interrupts,
    *,
    is_absolute: bool,
) -> bool:
    """Return True when the cluster serves, False when a stop was requested.

    Raises `NodeError` for the first process that ended, or is not ready although nothing has made
    progress for `timeout_s`, or since the call if that `is_absolute`. A command that
    started no router waits only for the nodes that it has started; any other command waits for all.
    """
    own = platform.own(plan)
    is_central = any(spec.role == "router" for spec in own)
    nodes = [
        spec
        for spec in (plan.processes if is_central else own)
        if spec.role != "router"
    ]
    standstill = Standstill(timeout_s)
    progress = StartProgress()
    while not interrupts.wait(WATCH_S):
        statuses = platform.status(folder)
        _check_running(statuses)
        urls = platform.urls(plan, folder)
        missing, phases = _missing_of(plan, nodes, urls)
        if not missing:
            return True
        progress.show(phases)
        if standstill.lasts(None if is_absolute else phases):
            waiting = [
                f"{one.name} is waiting; {one.note}"
                for one in statuses
                if one.state == "waiting" and one.note
            ]
            late = (waiting or missing)[0]
            what = "not ready within" if is_absolute else "no progress for"
            raise NodeError(f"{what} {timeout_s:g} s: {late}")
    return False


def is_ready(name: str, urls: Sequence[str]) -> bool:
    """Return whether a process serves: a node at every router, a router at its own URL."""
    replies = [ask_health(url) for url in urls]
    if any(health is not None and health.router == name for health in replies):
        return True
    return all(health is not None and name in health.ready_ids for health in replies)


def check_ids(
    plan: ClusterPlan, own: Sequence[ProcessSpec], urls: Sequence[str]
) -> None:
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


def _who(process: ProcessSpec | ProcessStatus) -> str:
    return process.name + (f" on {process.host}" if process.host else "")


def _check_running(statuses: Sequence[ProcessStatus]) -> None:
    """Raise `NodeError` for the first process that has ended."""
    for status in statuses:
        if status.state == "ended" or status.last_end:
            raise NodeError(f"{_who(status)} ended while starting ({status.last_end})")


def _missing_of(
    plan: ClusterPlan, nodes: Sequence[ProcessSpec], urls: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Return a line on each router and node that is not ready, with advice; and nodes' phases.

    A node is ready when every router reports it as ready.
    """
    missing: list[str] = []
    phases: dict[str, str] = {}
    for router, url in zip(plan.pool(ROUTERS), urls, strict=False):
        health = ask_health(url)
        if health is None:
            missing.append(
                f"{_who(router)} does not answer; check that its host is up, that it was started "
                f"there, and that {url} is open"
            )
            continue
        phases |= {node.node_id: node.doing for node in health.nodes}
        missing += [
            one for spec in nodes if (one := _lack(spec, router, health)) is not None
        ]
    return missing, phases


def _lack(spec: ProcessSpec, router: ProcessSpec, health: HealthReply) -> str | None:
    node = next((node for node in health.nodes if node.node_id == spec.name), None)
    if node is None:
        control = next(port.port for port in router.ports if port.name == "control")
        where = f"port {control}" + (f" of {router.host}" if router.host else "")
        return (
            f"{_who(spec)} has not joined {router.name}; check that its host is up and reaches "
            f"{where}, that it was started there with the same key and model, and what it logged"
        )
    if node.state == "ready":
        return None
    return (
        f"{_who(spec)} is {node.doing} at {router.name}; {node.reason or 'see its log'}"
    )
