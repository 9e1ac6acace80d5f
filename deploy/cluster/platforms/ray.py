"""`baton up --on ray`: an actor for each process, in one placement group of a Ray that is there.

`up` is Ray's driver, and the cluster ends with it. Ray chooses the hosts, reserves all resources at
once or none, and starts actors again. Only this file imports Ray, an optional extra.
"""

import contextlib
import os
import secrets
import signal
import socket
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec
import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, ActorUnschedulableError, RayError
from ray.util import get_current_placement_group, list_named_actors, placement_group
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from baton.deploy.cluster.description import Description
from baton.deploy.cluster.hosts import on_this_machine
from baton.deploy.cluster.processes import (
    ROUTERS,
    ClusterAddresses,
    ClusterPlan,
    ProcessRole,
    ProcessSpec,
    filled,
)
from baton.deploy.cluster.state import ProcessStatus, write_private
from baton.deploy.cluster.supervision import HostJob, HostProcesses
from baton.deploy.startup import url_of
from baton.protocol.errors import ConfigError, NodeError

STARTED = "ray.json"  # the file of a state folder with a `Started`
OWN_ADDRESS = "$(OWN_ADDRESS)"
KEY_FILE = "$(KEY_FILE)"
OWN_RESOURCES = {"CPU": "cpus", "GPU": "gpus", "memory": "memory_mib"}
CONNECT_S = 5.0
RESERVE_S = 10.0
REPORT_S = 5.0
WATCH_S = 0.2
EXTRA_STOP_S = 15.0  # that Ray itself may take, beyond the processes


class RayJob(msgspec.Struct, frozen=True):
    """What each actor gets: all processes of the cluster, and the content of its key file."""

    processes: tuple[ProcessSpec, ...]
    key: bytes
    logs: str  # folder; empty leaves the output to Ray's logs of the actor


class Started(msgspec.Struct, frozen=True):
    """What `stop` and `status` need to know, also in other commands."""

    namespace: str
    grace_s: float  # the longest of all processes


class RayPlatform:
    """Implements `Platform`. A cluster is a namespace of Ray, in which an actor is `ROLE:NAME`."""

    def __init__(self, address: str = "", *, may_wait: bool = False) -> None:
        """Take the address of a Ray cluster; empty is the one of this host.

        With `may_wait`, resources may be missing until an autoscaler adds hosts.
        """
        self._address = address or "auto"
        self._may_wait = may_wait
        # An actor ends with the last handle of its driver.
        self._actors: list[ActorHandle] = []
        self._hosts: dict[str, str] = {}

    def own(self, plan: ClusterPlan) -> tuple[ProcessSpec, ...]:
        return plan.processes

    def start(self, plan: ClusterPlan, folder: Path) -> None:
        namespace = f"baton-{plan.description.name}-{secrets.token_hex(4)}"
        _join(self._address, namespace)
        grace_s = max(spec.grace_s for spec in plan.processes)
        write_private(
            folder / STARTED, msgspec.json.encode(Started(namespace, grace_s))
        )
        key = Path(plan.description.key).read_bytes() if plan.description.key else b""
        job = RayJob(plan.processes, key, plan.description.logs)
        resources = [resources_of(spec) for spec in plan.processes]
        labels = [spec.node_selector for spec in plan.processes]
        group = placement_group(
            resources, strategy="SPREAD", bundle_label_selector=labels
        )
        for index, spec in enumerate(plan.processes):
            options = {
                "name": f"{spec.role}:{spec.name}",
                "max_restarts": -1,  # as often as it ends
                "max_concurrency": 3,  # `report` answers while `end` waits
                "num_cpus": resources[index]["CPU"],
                "num_gpus": spec.gpus,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, index),
            }
            self._actors.append(
                ray.remote(ProcessActor).options(**options).remote(spec.name, job)
            )
        if not (self._may_wait or group.wait(RESERVE_S)):
            raise ConfigError(
                "Ray cannot reserve what all processes need (see `ray status`): ask for less, add "
                "hosts, or give --timeout to wait for hosts that an autoscaler adds"
            )

    def stop(self, folder: Path, *, is_hurried: bool = False) -> None:
        """Let the routers finish their requests, then the nodes. Without its Ray, all is over."""
        running: list[ProcessStatus] = []
        with contextlib.suppress(NodeError):
            running = [one for one in self.status(folder) if one.state == "running"]
        for is_router in (True, False):
            ends = []
            for one in running:
                if (one.role == "router") is is_router:
                    with contextlib.suppress(ValueError):  # it is gone
                        actor = ray.get_actor(f"{one.role}:{one.name}")
                        ends.append(actor.end.remote(is_hurried))
            if ends:
                timeout_s = _started_in(folder).grace_s + EXTRA_STOP_S
                ray.wait(ends, num_returns=len(ends), timeout=timeout_s)
        (folder / STARTED).unlink(missing_ok=True)
        self._actors.clear()

    def status(self, folder: Path) -> list[ProcessStatus]:
        if not (folder / STARTED).exists():
            return []
        _join(self._address, _started_in(folder).namespace)
        statuses = [_status_of(actor) for actor in sorted(list_named_actors())]
        self._hosts = {one.name: one.host for one in statuses if one.host}
        return statuses

    def urls(self, plan: ClusterPlan, folder: Path) -> tuple[str, ...]:
        routers = [spec for spec in plan.pool(ROUTERS) if spec.name in self._hosts]
        return tuple(
            url_of(self._hosts[spec.name], spec.ports[0].port, is_tls=spec.is_tls)
            for spec in routers
        )


class ProcessActor:
    """Runs one process on the host of its actor.

    When the actor's own process ends, by any signal, the child ends too, and Ray starts the actor
    again.
    """

    def __init__(self, name: str, job: RayJob) -> None:
        # Ray runs actors with a nice value of 15, which the process would inherit.
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        while not all(hosts := _hosts_now()):
            time.sleep(WATCH_S)
        spec = at_its_place(job.processes, name, hosts, _in_memory(job.key))
        self._hosts = hosts
        self._processes = HostProcesses(HostJob(on_this_machine((spec,)), job.logs))
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

    def end(self, is_hurried: bool) -> None:
        """End the process, with its `grace_s` unless it is hurried, and return when it is gone."""
        self._ending.set()
        with self._lock:
            self._processes.stop(is_hurried=is_hurried)

    def _watch(self) -> None:
        """Keep the process running; begin anew if Ray moves a router to another host."""
        while not self._ending.wait(WATCH_S):
            with self._lock:
                self._processes.poll()
            if _hosts_now() not in ([], self._hosts):
                os._exit(1)


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
    key = KEY_FILE if description.key else ""
    routers = tuple(_router_address(index) for index in range(len(description.routers)))
    return ClusterAddresses(routers, OWN_ADDRESS, listen=OWN_ADDRESS, key=key)


def resources_of(spec: ProcessSpec) -> dict[str, float]:
    """Return what Ray reserves for a process: one CPU unless the description gives a number."""
    resources = {
        "CPU": spec.cpus or 1,
        "GPU": spec.gpus,
        "memory": spec.memory_mib << 20,
    }
    custom = {name: float(amount) for name, amount in spec.resources.items()}
    return {
        name: float(amount) for name, amount in resources.items() if amount
    } | custom


def at_its_place(
    processes: Sequence[ProcessSpec], name: str, hosts: Sequence[str], key_file: str
) -> ProcessSpec:
    """Return a process as it runs on its host. `hosts` are those of all processes."""
    by_name = {spec.name: host for spec, host in zip(processes, hosts, strict=True)}
    values = {OWN_ADDRESS: by_name[name], KEY_FILE: key_file}
    (spec,) = (one for one in processes if one.name == name)
    nth = 0
    for other in processes:
        if other.pool == ROUTERS:
            values[_router_address(other.index)] = by_name[other.name]
        is_before = other.pool == spec.pool and other.index < spec.index
        nth += is_before and by_name[other.name] == by_name[name]
    return filled(spec, by_name[name], nth, values)


def _started_in(folder: Path) -> Started:
    return msgspec.json.decode((folder / STARTED).read_bytes(), type=Started)


def _router_address(index: int) -> str:
    return f"$(ROUTER_{index}_ADDRESS)"


def _join(address: str, namespace: str) -> None:
    """Connect to Ray. Raises `NodeError`."""
    if ray.is_initialized():
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [(number, signal.getsignal(number)) for number in numbers]
    try:
        if address != "auto":  # Ray would try for a minute
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(
                address, namespace=namespace, log_to_driver=False, logging_level="ERROR"
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
            f"cannot join Ray at {address} ({reason}): give the HOST:PORT that `ray start --head` "
            "has printed, from a host that has joined the Ray cluster"
        ) from error
    finally:
        for number, handler in handlers:  # Ray takes them
            signal.signal(number, handler)


def _status_of(actor: str) -> ProcessStatus:
    """Ask an actor; one that does not answer is starting."""
    role, _, name = actor.partition(":")
    waiting = ProcessStatus(
        name, cast(ProcessRole, role), "", "waiting", "its actor is starting"
    )
    try:
        report = ray.get_actor(actor).report.remote()
        return cast(ProcessStatus, ray.get(report, timeout=REPORT_S))
    except (ActorDiedError, ActorUnschedulableError) as error:
        reason = str(error).strip().rpartition("\n")[2]
        return msgspec.structs.replace(waiting, state="ended", note="", last_end=reason)
    except (RayError, ValueError):
        return waiting


def _hosts_now() -> list[str]:
    """Return the host of each process of this actor's group; empty for one without a host yet."""
    try:
        placed = placement_group_table(get_current_placement_group())[
            "bundles_to_node_id"
        ]
        nodes = {
            one["NodeID"]: one["NodeManagerAddress"]
            for one in ray.nodes()
            if one["Alive"]
        }
    except (RayError, RuntimeError, OSError):
        return []
    return [nodes.get(node_id, "") for _, node_id in sorted(placed.items())]


def _in_memory(key: bytes) -> str:
    """Return the path of a private file that vanishes with this process."""
    if not key:
        return ""
    descriptor = os.memfd_create("baton-key")
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, key)
    return f"/proc/{os.getpid()}/fd/{descriptor}"
