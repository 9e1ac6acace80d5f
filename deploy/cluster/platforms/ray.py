"""`baton up --on ray`: routers beside the driver, and each node in an actor of an existing Ray.

`up` is Ray's driver, and the cluster ends with it. Ray chooses the hosts of the nodes, reserves
what they need at once or not at all, and starts actors again, on other hosts too. Only this file
imports Ray, an optional extra.
"""

import contextlib
import os
import socket
import warnings
from pathlib import Path

import msgspec
import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError
from ray.util import get_node_ip_address, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from baton.deploy.cluster.hosts import on_this_machine
from baton.deploy.cluster.platforms.local import NODES, LocalPlatform
from baton.deploy.cluster.platforms.ray_plan import (
    at_its_place,
    resources_of,
    routers_at,
)
from baton.deploy.cluster.processes import ClusterPlan, ProcessSpec
from baton.deploy.cluster.state import ProcessStatus
from baton.deploy.cluster.supervision import HostJob, HostProcesses, write_statuses
from baton.protocol.errors import ConfigError, NodeError
from baton.runtime.channels.keys import key_in_memory

CONNECT_S = 5.0
RESERVE_S = 10.0
REPORT_S = 5.0
EXTRA_STOP_S = 15.0  # that Ray itself may take, beyond the nodes


class RayPlatform:
    """Implements `Platform` for `up`, whose state folder tells other commands of the nodes."""

    def __init__(self, address: str = "", *, may_wait: bool = False) -> None:
        """Join the Ray at HOST:PORT; empty is the one of this host. Raises `NodeError`.

        With `may_wait`, resources may be missing until an autoscaler adds hosts.
        """
        _join(address or "auto")
        self._may_wait = may_wait
        self._host = get_node_ip_address()
        self._routers = LocalPlatform((self._host,), is_tied=True)
        # An actor ends with the last handle of its driver.
        self._nodes: list[tuple[ProcessSpec, ActorHandle]] = []

    def own(self, plan: ClusterPlan) -> tuple[ProcessSpec, ...]:
        return plan.processes

    def start(self, plan: ClusterPlan, folder: Path) -> None:
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
        self._routers.start(routers_at(self._host, plan), folder)
        description = plan.description
        key = Path(description.key).read_bytes() if description.key else b""
        for index, spec in enumerate(nodes):
            actor = ray.remote(NodeActor).options(
                max_restarts=-1,  # as often as it ends
                num_cpus=resources[index]["CPU"],
                num_gpus=spec.gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
            )
            node = actor.remote(spec, key, self._host, description.logs)
            self._nodes.append((spec, node))

    def stop(self, folder: Path, *, is_hurried: bool = False) -> None:
        """Let the routers finish their requests, then the nodes."""
        running = [one.name for one in self._reported() if one.state == "running"]
        self._routers.stop(folder, is_hurried=is_hurried)
        nodes = [node for node in self._nodes if node[0].name in running]
        ends = [actor.end.remote(is_hurried) for _, actor in nodes]
        if ends:
            longest_s = max(spec.grace_s for spec, _ in nodes) + EXTRA_STOP_S
            ray.wait(ends, num_returns=len(ends), timeout=longest_s)
        self._nodes.clear()

    def status(self, folder: Path) -> list[ProcessStatus]:
        """Return the state of every process; an actor starts its node again when it is asked."""
        write_statuses(folder / NODES, self._reported())
        return self._routers.status(folder)

    def urls(self, plan: ClusterPlan, folder: Path) -> tuple[str, ...]:
        return self._routers.urls(plan, folder)

    def _reported(self) -> list[ProcessStatus]:
        reports = [actor.report.remote() for _, actor in self._nodes]
        if reports:
            ray.wait(reports, num_returns=len(reports), timeout=REPORT_S)
        return [
            _status_of(spec, report)
            for (spec, _), report in zip(self._nodes, reports, strict=True)
        ]


class NodeActor:
    """Runs one node on the host of its actor; the node ends when the actor's process does."""

    def __init__(self, spec: ProcessSpec, key: bytes, driver: str, logs: str) -> None:
        # Ray runs actors with a nice value of 15, which the node would inherit.
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        spec = at_its_place(spec, driver, get_node_ip_address(), key_in_memory(key))
        self._processes = HostProcesses(HostJob(on_this_machine((spec,)), logs))
        self._processes.start()
        is_back = ray.get_runtime_context().was_current_actor_reconstructed
        self._last_end = "its actor ended, and Ray started it again" if is_back else ""

    def report(self) -> ProcessStatus:
        """Start the node again if that is due, and return its state."""
        self._processes.poll()
        (status,) = self._processes.statuses()
        return msgspec.structs.replace(
            status, last_end=status.last_end or self._last_end
        )

    def end(self, is_hurried: bool) -> None:
        """End the node, with its `grace_s` unless it is hurried, and return when it is gone."""
        self._processes.stop(is_hurried=is_hurried)


def _status_of(spec: ProcessSpec, report: ObjectRef[ProcessStatus]) -> ProcessStatus:
    """Return what an actor reports; one that does not answer is starting."""
    try:
        status: ProcessStatus = ray.get(report, timeout=0)
    except GetTimeoutError:
        note = "its actor is starting"
        return ProcessStatus(spec.name, spec.role, "", "waiting", note)
    except RayError as error:
        reason = str(error).strip().rpartition("\n")[2]
        return ProcessStatus(spec.name, spec.role, "", "ended", last_end=reason)
    return status


def _join(address: str) -> None:
    try:
        if address != "auto":  # Ray would try for a minute
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        with warnings.catch_warnings(action="ignore"):
            ray.init(address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError, OverflowError, RayError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise NodeError(
            f"cannot join Ray at {address} ({reason}): give the HOST:PORT that `ray start --head` "
            "has printed, from a host that has joined the Ray cluster"
        ) from error
