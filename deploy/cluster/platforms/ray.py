"""`baton up --on ray`: routers beside the driver, and each node in an actor of an existing Ray.

`up` is Ray's driver, and the cluster ends with it. Ray chooses the hosts of the nodes, reserves
what they need at once or not at all, and starts actors again, on other hosts too. Only this file
imports Ray, an optional extra.
"""

import contextlib
import os
import signal
import socket
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec
import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, ActorUnschedulableError, RayError
from ray.util import get_node_ip_address, list_named_actors, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from baton.deploy.cluster.description import Description
from baton.deploy.cluster.hosts import on_this_machine
from baton.deploy.cluster.platforms.local import LocalPlatform
from baton.deploy.cluster.processes import (
    ROUTERS,
    ClusterAddresses,
    ClusterPlan,
    ProcessRole,
    ProcessSpec,
    filled,
)
from baton.deploy.cluster.state import ProcessStatus
from baton.deploy.cluster.supervision import HostJob, HostProcesses
from baton.deploy.startup import url_of
from baton.protocol.errors import ConfigError, NodeError

DRIVER_ADDRESS = "$(DRIVER_ADDRESS)"
OWN_ADDRESS = "$(OWN_ADDRESS)"
KEY_FILE = "$(KEY_FILE)"
OWN_RESOURCES = {"CPU": "cpus", "GPU": "gpus", "memory": "memory_mib"}
CONNECT_S = 5.0
RESERVE_S = 10.0
REPORT_S = 5.0
WATCH_S = 0.2
EXTRA_STOP_S = 15.0  # that Ray itself may take, beyond the nodes


class RayPlatform:
    """Implements `Platform`. A cluster is a namespace of Ray; actors are called `ROLE:NAME`."""

    def __init__(self, name: str, address: str = "", *, may_wait: bool = False) -> None:
        """Take the name of a cluster, and the address of Ray; empty is the one of this host.

        With `may_wait`, resources may be missing until an autoscaler adds hosts.
        """
        self._namespace = f"baton-{name}"
        self._address = address or "auto"
        self._may_wait = may_wait
        self._routers = LocalPlatform()
        # An actor ends with the last handle of its driver.
        self._actors: list[ActorHandle] = []

    def own(self, plan: ClusterPlan) -> tuple[ProcessSpec, ...]:
        return plan.processes

    def start(self, plan: ClusterPlan, folder: Path) -> None:
        self._join()
        host = get_node_ip_address()
        nodes = [spec for spec in plan.processes if spec.role != "router"]
        resources = [resources_of(spec) for spec in nodes]
        labels = [spec.node_selector for spec in nodes]
        group = placement_group(
            resources, strategy="SPREAD", bundle_label_selector=labels
        )
        if not (self._may_wait or group.wait(RESERVE_S)):
            raise ConfigError(
                "Ray cannot reserve what all nodes need (see `ray status`): ask for less, add "
                "hosts, or give --timeout to wait for hosts that an autoscaler adds"
            )
        description = plan.description
        routers = tuple(
            at_its_place(spec, host, host, description.key)
            for spec in plan.pool(ROUTERS)
        )
        self._routers = LocalPlatform((host,), is_tied=True)
        self._routers.start(ClusterPlan(description, routers), folder)
        key = Path(description.key).read_bytes() if description.key else b""
        for index, spec in enumerate(nodes):
            actor = ray.remote(NodeActor).options(
                name=f"{spec.role}:{spec.name}",
                max_restarts=-1,  # as often as it ends
                max_concurrency=3,  # `report` answers while `end` waits
                num_cpus=resources[index]["CPU"],
                num_gpus=spec.gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
            )
            self._actors.append(actor.remote(spec, key, host, description.logs))

    def stop(self, folder: Path, *, is_hurried: bool = False) -> None:
        """Let the routers finish their requests, then the nodes. Without its Ray, all is over."""
        nodes: list[ProcessStatus] = []
        with contextlib.suppress(NodeError):
            nodes = [one for one in self.status(folder) if one.state == "running"]
        self._routers.stop(folder, is_hurried=is_hurried)
        actors = []
        for node in nodes:
            with contextlib.suppress(ValueError):  # a router, or an actor that is gone
                actors.append(ray.get_actor(f"{node.role}:{node.name}"))
        if actors:
            ends = [actor.end.remote(is_hurried) for actor in actors]
            timeout_s = _longest_end_s(actors)
            ray.wait(ends, num_returns=len(ends), timeout=timeout_s)
        self._actors.clear()

    def status(self, folder: Path) -> list[ProcessStatus]:
        routers = self._routers.status(folder)
        if not routers:
            return []
        self._join()
        reports: dict[str, ObjectRef[ProcessStatus]] = {}
        for name in sorted(list_named_actors()):
            with contextlib.suppress(ValueError):  # it is gone
                reports[name] = ray.get_actor(name).report.remote()
        if reports:
            ray.wait([*reports.values()], num_returns=len(reports), timeout=REPORT_S)
        nodes = [_status_of(name, report) for name, report in reports.items()]
        return routers + nodes

    def urls(self, plan: ClusterPlan, folder: Path) -> tuple[str, ...]:
        hosts = {one.name: one.host for one in self._routers.status(folder)}
        routers = [spec for spec in plan.pool(ROUTERS) if spec.name in hosts]
        return tuple(
            url_of(hosts[spec.name], spec.ports[0].port, is_tls=spec.is_tls)
            for spec in routers
        )

    def _join(self) -> None:
        """Connect to Ray. Raises `NodeError`."""
        if ray.is_initialized():
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        handlers = [(number, signal.getsignal(number)) for number in numbers]
        try:
            if self._address != "auto":  # Ray would try for a minute
                host, _, port = self._address.rpartition(":")
                at = (host.strip("[]"), int(port))
                socket.create_connection(at, CONNECT_S).close()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ray.init(
                    self._address,
                    namespace=self._namespace,
                    log_to_driver=False,
                    logging_level="ERROR",
                )
        except (
            OSError,
            RuntimeError,
            ValueError,
            OverflowError,
            AssertionError,
            RayError,
        ) as error:
            reason = str(error).strip().partition("\n")[0]
            raise NodeError(
                f"cannot join Ray at {self._address} ({reason}): give the HOST:PORT that "
                "`ray start --head` has printed, from a host that has joined the Ray cluster"
            ) from error
        finally:
            for number, handler in handlers:  # Ray takes them
                signal.signal(number, handler)


class NodeActor:
    """Runs one node on the host of its actor; the node ends when the actor's process does."""

    def __init__(self, spec: ProcessSpec, key: bytes, driver: str, logs: str) -> None:
        # Ray runs actors with a nice value of 15, which the node would inherit.
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        spec = at_its_place(spec, driver, get_node_ip_address(), _in_memory(key))
        self._grace_s = spec.grace_s
        self._processes = HostProcesses(HostJob(on_this_machine((spec,)), logs))
        self._processes.start()
        is_back = ray.get_runtime_context().was_current_actor_reconstructed
        self._last_end = "its actor ended, and Ray started it again" if is_back else ""
        self._ending = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, daemon=True).start()

    def report(self) -> ProcessStatus:
        (status,) = self._processes.statuses()
        last_end = status.last_end or self._last_end
        return msgspec.structs.replace(status, last_end=last_end)

    def grace_s(self) -> float:
        return self._grace_s

    def end(self, is_hurried: bool) -> None:
        """End the node, with its `grace_s` unless it is hurried, and return when it is gone."""
        self._ending.set()
        with self._lock:
            self._processes.stop(is_hurried=is_hurried)

    def _watch(self) -> None:
        while not self._ending.wait(WATCH_S):
            with self._lock:
                self._processes.poll()


def addresses_of(description: Description) -> ClusterAddresses:
    """Return the places of processes. Raises `ConfigError` for what Ray cannot grant."""
    description.check_no_hosts(
        "Ray chooses the hosts; take the line out, and give node_selector labels of Ray's nodes to "
        "restrict its choice"
    )
    for name, pool in description.pools.items():
        for resource, amount in pool.resources.items():
            at = f"pools.{name}.resources.{resource}"
            if resource in OWN_RESOURCES:
                raise ConfigError(
                    f"{at}: write {OWN_RESOURCES[resource]} of the pool instead"
                )
            if not amount.replace(".", "", 1).isdecimal() or not float(amount):
                raise ConfigError(
                    f"{at}: {amount} must be the number above 0 that each node needs"
                )
    routers = (DRIVER_ADDRESS,) * len(description.routers)
    key = KEY_FILE if description.key else ""
    return ClusterAddresses(routers, OWN_ADDRESS, listen=OWN_ADDRESS, key=key)


def at_its_place(spec: ProcessSpec, driver: str, host: str, key: str) -> ProcessSpec:
    """Return a process as it runs on `host`, with the path of the cluster's key there.

    Fixed ports count up through the pool, because Ray may put any of its nodes on one host.
    """
    values = {DRIVER_ADDRESS: driver, OWN_ADDRESS: host, KEY_FILE: key}
    return filled(spec, host, spec.index, values)


def resources_of(spec: ProcessSpec) -> dict[str, float]:
    """Return what Ray reserves for a node: one CPU unless the description gives a number."""
    amounts = {"CPU": spec.cpus or 1, "GPU": spec.gpus, "memory": spec.memory_mib << 20}
    custom = {name: float(amount) for name, amount in spec.resources.items()}
    return {name: float(amount) for name, amount in amounts.items() if amount} | custom


def _longest_end_s(actors: Sequence[ActorHandle]) -> float:
    """Return how long nodes may take to end."""
    graces_s: list[float] = []
    with contextlib.suppress(RayError):
        asked = [actor.grace_s.remote() for actor in actors]
        graces_s = ray.get(asked, timeout=REPORT_S)
    return max(graces_s, default=0.0) + EXTRA_STOP_S


def _status_of(actor: str, report: ObjectRef[ProcessStatus]) -> ProcessStatus:
    """Return what an actor reports; one that does not answer is starting."""
    role, _, name = actor.partition(":")
    waiting = ProcessStatus(
        name, cast(ProcessRole, role), "", "waiting", "its actor is starting"
    )
    try:
        return cast(ProcessStatus, ray.get(report, timeout=0))
    except (ActorDiedError, ActorUnschedulableError) as error:
        reason = str(error).strip().rpartition("\n")[2]
        return msgspec.structs.replace(waiting, state="ended", note="", last_end=reason)
    except RayError:
        return waiting


def _in_memory(key: bytes) -> str:
    """Return the path of a private file that vanishes with this process."""
    if not key:
        return ""
    descriptor = os.memfd_create("baton-key")
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, key)
    return f"/proc/{os.getpid()}/fd/{descriptor}"
