"""`--on ray`: an actor for each process, in one placement group of a Ray cluster.

The cluster of `--address` or RAY_ADDRESS is joined; without one, `start` begins a Ray cluster on
this host and `stop` ends it. The state folder holds the address and the names of the actors. Ray
chooses the hosts and starts actors again; `stop` lets their processes drain first.
"""

import importlib.util
import math
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from baton.deploy.cluster.description import Description
from baton.deploy.cluster.host_seat import HostSeat
from baton.deploy.cluster.platform import PlatformOptions, ProcessState, ProcessStatus
from baton.deploy.cluster.processes import ClusterPlan, ProcessPlaces, ProcessRole, ProcessSpec
from baton.deploy.cluster.ray_actor import ActorReport
from baton.deploy.cluster.ray_layout import (
    PYTHON,
    RayOrders,
    at_its_place,
    bundles_of,
    namespace_of,
    places_of,
    shortage,
    text_of,
    text_of_layout,
    total,
)
from baton.deploy.cluster.ray_local import HERE, TOKEN, LocalRay, access_of
from baton.deploy.cluster.running import write_private
from baton.deploy.health import url_of
from baton.protocol.errors import ConfigError, NodeError
from baton.runtime.clock import monotonic
from baton.runtime.process import Interrupts

if TYPE_CHECKING:
    from baton.deploy.cluster.ray_binding import RayConnection

ADDRESS_VARIABLE = "RAY_ADDRESS"
DEPLOYED, LAYOUT = "ray.json", "ray.yaml"
COMMAND = "baton.deploy.cluster.ray_command"  # the module that runs a command through an actor
WATCH_S = 0.2
HURRIED_S = 10.0
# The time that Ray itself takes, beyond that of the processes.
EXTRA_STOP_S = 15.0


class RayProcess(msgspec.Struct, frozen=True):
    """The facts about a process that `up` records for later commands."""

    name: str
    role: ProcessRole
    grace_s: float


class RayDeployment(msgspec.Struct, frozen=True):
    """What `start` records for `status` and `stop`."""

    name: str
    token: str  # the token of our orders; other orders of this name are not ours
    processes: tuple[RayProcess, ...]
    needs: dict[str, float]  # the total resources that are requested from Ray
    address: str = ""  # empty until Ray has answered
    local: LocalRay | None = None


class RayPlatform:
    """Implements `Platform` and `Reaching`."""

    def __init__(self, options: PlatformOptions) -> None:
        self._options = options
        address = options.address or os.environ.get(ADDRESS_VARIABLE, "")
        self._address = "" if address == "local" else address
        self._connection: RayConnection | None = None
        # The Ray cluster that this process has started, held so that it is reaped.
        self._started: subprocess.Popen[bytes] | None = None

    @property
    def _loopback(self) -> str:
        """Return the loopback address for all processes if Ray runs on this host alone."""
        return "" if self._address else HERE

    def own(self, plan: ClusterPlan) -> tuple[ProcessSpec, ...]:
        return plan.processes

    def places(self, description: Description) -> ProcessPlaces:
        if self._options.hosts:
            raise ConfigError("--host: Ray chooses the hosts of all processes; leave this out")
        if "://" in self._address:
            raise ConfigError(
                f"{self._address}: give the HOST:PORT that `ray start --head` has printed, from a "
                "host that has joined the Ray cluster; baton does not speak to Ray's client server"
            )
        return places_of(description, self._loopback)

    def render(self, plan: ClusterPlan, folder: Path) -> list[Path]:
        path = folder / LAYOUT
        write_private(path, text_of_layout(plan).encode())
        return [path]

    def start(self, plan: ClusterPlan, folder: Path) -> None:
        _check_installed()
        bundles = bundles_of(plan)
        needs = total(one.resources for one in bundles)
        deployment = RayDeployment(
            plan.description.name,
            secrets.token_hex(8),
            tuple(RayProcess(spec.name, spec.role, spec.grace_s) for spec in plan.processes),
            needs,
        )
        address = self._address
        if not address:
            num_cpus = max(os.cpu_count() or 1, math.ceil(needs["CPU"]))
            local, self._started = LocalRay.start(folder, num_cpus)
            deployment = msgspec.structs.replace(deployment, local=local)
            _write(folder, deployment)
            address = local.wait(folder)
        connection = self.joined(msgspec.structs.replace(deployment, address=address), folder)
        deployment = msgspec.structs.replace(deployment, address=connection.address)
        _write(folder, deployment)
        problem = shortage(bundles, connection.hosts())
        if problem and not self._options.may_wait:
            raise ConfigError(
                f"Ray at {connection.address}: {problem}; ask for less, add hosts, or give "
                "--timeout to wait for hosts that an autoscaler adds"
            )
        if not connection.start(self._orders_of(plan, deployment.token), bundles):
            raise ConfigError(
                f"{deployment.name} runs on Ray at {connection.address} already, from another "
                "state folder: end it with that one, or give this cluster another name"
            )

    def stop(self, folder: Path, *, is_hurried: bool = False) -> None:
        deployment = deployment_in(folder)
        if deployment is None:
            return
        self._remove_actors(deployment, folder, is_hurried=is_hurried)
        if deployment.local is not None:
            deployment.local.stop()
        if self._started is not None:
            self._started.wait()
        for name in (DEPLOYED, TOKEN):
            (folder / name).unlink(missing_ok=True)

    def status(self, folder: Path) -> list[ProcessStatus]:
        deployment = deployment_in(folder)
        if deployment is None:
            return []
        try:
            connection = self.joined(deployment, folder)
        except NodeError as error:
            why = error.message
            return [_without_actor(one, "unknown", last_end=why) for one in deployment.processes]
        if not any(connection.addresses()):
            needs, free = deployment.needs, connection.free()
            note = (
                f"Ray has not reserved {_in_words(needs)} yet, of which are free: "
                f"{_in_words({name: free.get(name, 0.0) for name in needs})}"
            )
            return [_without_actor(one, "waiting", note) for one in deployment.processes]
        reports, gone = connection.ask([one.name for one in deployment.processes])
        return [_status(one, reports, gone) for one in deployment.processes]

    def urls(self, plan: ClusterPlan, folder: Path) -> tuple[str, ...]:
        """Return the URLs once Ray has reserved the hosts of the routers."""
        deployment = deployment_in(folder)
        if self._connection is None or deployment is None:
            return ()
        loopback = "" if deployment.local is None else HERE
        pairs = zip(plan.processes, self._connection.addresses(), strict=False)
        routers = [(spec, host) for spec, host in pairs if spec.role == "router" and host]
        return tuple(
            url_of(loopback or host, spec.ports[0].port, is_tls=spec.is_tls)
            for spec, host in routers
        )

    def seats(self, plan: ClusterPlan, folder: Path) -> list[HostSeat]:
        """Let the actors run commands beside their processes."""
        deployment = deployment_in(folder)
        if deployment is None:
            return []
        connection = self.joined(deployment, folder)
        orders, addresses = connection.orders(), connection.addresses()
        if orders is None or not (addresses and all(addresses)):
            raise NodeError("Ray has not placed all processes yet: wait until `baton up` is done")
        program = (PYTHON, "-m", "baton")
        seats: dict[str, HostSeat] = {}
        for spec in orders.processes:
            placed = at_its_place(orders, spec.name, addresses)
            first = next((one for one in placed if one.role != "router"), placed[0])
            launcher = (sys.executable, "-m", COMMAND, str(folder.absolute()), first.name)
            seats.setdefault(first.host, HostSeat(first.host, placed, program, launcher))
        return list(seats.values())

    def _orders_of(self, plan: ClusterPlan, token: str) -> RayOrders:
        key, logs = plan.description.key, plan.description.logs
        content = Path(key).read_text() if key else ""
        return RayOrders(token, plan.processes, content, logs, self._loopback)

    def _remove_actors(self, deployment: RayDeployment, folder: Path, *, is_hurried: bool) -> None:
        """Drain the processes of this deployment, and remove their actors from Ray."""
        local = deployment.local
        if not deployment.address or (local is not None and not local.process.is_alive):
            return
        try:
            connection = self.joined(deployment, folder)
        except NodeError as error:
            if local is not None:
                return  # they end with their own Ray
            raise NodeError(
                f"{error.message}; if that Ray cluster is gone for good, delete {folder}"
            ) from error
        orders = connection.orders()
        if orders is not None and orders.token == deployment.token:
            _end(connection, deployment, folder, is_hurried=is_hurried)
        connection.close()
        self._connection = None

    def joined(self, deployment: RayDeployment, folder: Path) -> "RayConnection":
        """Return the connection to Ray. Raises `NodeError`, or `ConfigError` without Ray."""
        if self._connection is None:
            _check_installed()
            if deployment.local is not None:
                # Ray reads them when it is imported.
                os.environ.update(access_of(folder))
            from baton.deploy.cluster.ray_binding import RayConnection

            self._connection = RayConnection(deployment.address, namespace_of(deployment.name))
        return self._connection


def _check_installed() -> None:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "Ray is not installed in this Python: install baton with its extra `ray`, here and on "
            "the hosts of the Ray cluster, or use another platform with --on"
        )


def _end(
    connection: "RayConnection", deployment: RayDeployment, folder: Path, *, is_hurried: bool
) -> None:
    """Let the routers finish their requests, then the nodes, and remove all actors.

    A signal, or a process that does not end in time, ends the waiting.
    """
    with Interrupts() as interrupts:
        for is_router in (True, False):
            ours = [one for one in deployment.processes if (one.role == "router") is is_router]
            grace_s = max((one.grace_s for one in ours), default=0.0) + EXTRA_STOP_S
            deadline_s = monotonic() + (HURRIED_S if is_hurried else grace_s)
            left = [one.name for one in ours] if any(connection.addresses()) else []
            while left and monotonic() < deadline_s and not interrupts.requested:
                reports, gone = connection.ask(left)
                over = {name: report for name, report in reports.items() if report.is_over}
                for name, report in over.items():
                    _write_tail(folder / "logs", name, report)
                left = [name for name in left if name not in over | gone]
                # Actors that Ray has restarted meanwhile have not been told yet.
                connection.end([name for name in left if name in reports], is_hurried=is_hurried)
                interrupts.wait(WATCH_S)
        connection.remove([one.name for one in deployment.processes])


def _write_tail(logs: Path, name: str, report: ActorReport) -> None:
    """Keep the last lines of a process here, because its host may be out of reach."""
    logs.mkdir(exist_ok=True)
    (logs / f"{name}.log").write_text("".join(f"{line}\n" for line in report.tail))


def _status(
    process: RayProcess, reports: Mapping[str, ActorReport], gone: Mapping[str, str]
) -> ProcessStatus:
    if process.name in reports:
        return reports[process.name].status
    if process.name in gone:
        return _without_actor(process, "ended", last_end=gone[process.name])
    return _without_actor(process, "waiting", "its actor is starting")


def _without_actor(
    process: RayProcess, state: ProcessState, note: str = "", last_end: str = ""
) -> ProcessStatus:
    return ProcessStatus(process.name, process.role, "", state, note, last_end)


def _in_words(amounts: Mapping[str, float]) -> str:
    return ", ".join(text_of(name, amount) for name, amount in amounts.items())


def deployment_in(folder: Path) -> RayDeployment | None:
    try:
        return msgspec.json.decode((folder / DEPLOYED).read_bytes(), type=RayDeployment)
    except FileNotFoundError:
        return None


def _write(folder: Path, deployment: RayDeployment) -> None:
    write_private(folder / DEPLOYED, msgspec.json.encode(deployment))
