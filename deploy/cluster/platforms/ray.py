"""`baton up --on ray`: an actor for each process, in one placement group of a Ray that is there.

Ray chooses the hosts, reserves all resources at once or none, and starts actors again. A cluster is
a Ray namespace; its job is in Ray's control store, because arguments of actors are shown to
everybody. Only this file imports Ray, an optional extra.
"""

import contextlib
import logging
import os
import secrets
import signal
import socket
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import ray
from ray.exceptions import ActorDiedError, ActorUnschedulableError, RayError
from ray.experimental import internal_kv
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from baton.deploy.cluster.description import Description
from baton.deploy.cluster.hosts import on_this_machine
from baton.deploy.cluster.processes import (
    ROUTERS,
    ClusterAddresses,
    ClusterPlan,
    ProcessSpec,
    filled,
)
from baton.deploy.cluster.state import ProcessStatus, read_deployment, write_private
from baton.deploy.cluster.supervision import HostJob, HostProcesses
from baton.deploy.startup import url_of
from baton.protocol.errors import ConfigError, NodeError
from baton.runtime.clock import monotonic
from baton.runtime.process import Interrupts

TOKEN = "ray-token"  # the file of a state folder that says which job is ours
GROUP = "processes"
STORE = "baton"
# Variables of the plan; the key is a file in the memory of each actor.
OWN_ADDRESS = "$(OWN_ADDRESS)"
KEY_FILE = "$(KEY_FILE)"
OWN_RESOURCES = {"CPU": "cpus", "GPU": "gpus", "memory": "memory_mib"}
CAME_BACK = "its actor ended, and Ray started it again"
# An actor's first report waits until its process has imported baton.
REPORT_S = 5.0
CONNECT_S = 5.0
RESERVE_S = 10.0
WATCH_S = 0.1
LOOK_S = 2.0
HURRIED_S = 10.0
# The time that Ray itself takes, beyond that of the processes.
EXTRA_STOP_S = 15.0


class RayJob(msgspec.Struct, frozen=True):
    """The processes of a cluster. Only Ray's control store keeps them: they hold secrets."""

    token: str  # unlike that of any other deployment
    processes: tuple[ProcessSpec, ...]
    key: str  # the content of the key file
    logs: str  # folder; empty leaves the output to Ray's logs of the actor


class RayPlatform:
    """Implements `Platform`."""

    def __init__(self, address: str = "", *, may_wait: bool = False) -> None:
        """Take the address of a Ray cluster; empty is the one of this host.

        With `may_wait`, resources may be missing until an autoscaler adds hosts.
        """
        self._address = address or "auto"
        self._may_wait = may_wait

    def own(self, plan: ClusterPlan) -> tuple[ProcessSpec, ...]:
        return plan.processes

    def start(self, plan: ClusterPlan, folder: Path) -> None:
        namespace = self._join(plan.description.name)
        key = Path(plan.description.key).read_text(encoding="utf-8") if plan.description.key else ""
        job = RayJob(secrets.token_hex(8), plan.processes, key, plan.description.logs)
        content = msgspec.json.encode(job)
        if internal_kv._internal_kv_put(namespace, content, overwrite=False, namespace=STORE):
            raise ConfigError(
                f"{plan.description.name} runs on this Ray already, from another state folder: end "
                "it with that one, or give this cluster another name"
            )
        write_private(folder / TOKEN, job.token.encode())
        group = _start_actors(namespace, plan.processes)
        if not (self._may_wait or group.wait(RESERVE_S)):
            raise ConfigError(
                "Ray cannot reserve what all processes need (see `ray status`): ask for less, add "
                "hosts, or give --timeout to wait for hosts that an autoscaler adds"
            )

    def stop(self, folder: Path, *, is_hurried: bool = False) -> None:
        deployment = read_deployment(folder)
        if deployment is None or not (folder / TOKEN).exists():
            return
        try:
            namespace = self._join(deployment.name)
        except NodeError as error:
            raise NodeError(
                f"{error.message}; if that Ray cluster is gone for good, delete {folder}"
            ) from error
        job = _job_in(namespace)
        if job is not None and job.token == (folder / TOKEN).read_text(encoding="utf-8"):
            _end(namespace, job, is_hurried=is_hurried)
        (folder / TOKEN).unlink()

    def status(self, folder: Path) -> list[ProcessStatus]:
        deployment = read_deployment(folder)
        if deployment is None:
            return []
        namespace = self._join(deployment.name)
        job = _job_in(namespace)
        if job is None:
            return []
        if not any(_addresses()):
            note = "Ray has not reserved the resources of all processes yet"
            return [ProcessStatus(one.name, one.role, "", "waiting", note) for one in job.processes]
        return _reports(namespace, job.processes)

    def urls(self, plan: ClusterPlan, folder: Path) -> tuple[str, ...]:
        if not ray.is_initialized():
            return ()
        pairs = zip(plan.processes, _addresses(), strict=False)
        routers = [(spec, host) for spec, host in pairs if spec.role == "router" and host]
        return tuple(url_of(host, spec.ports[0].port, is_tls=spec.is_tls) for spec, host in routers)

    def _join(self, name: str) -> str:
        """Connect to Ray and return the namespace of a cluster. Raises `NodeError`."""
        namespace = f"baton-{name}"
        if not ray.is_initialized():
            _connect(self._address, namespace)
        return namespace


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
                raise ConfigError(f"{at}: write {OWN_RESOURCES[resource]} of the pool instead")
            if not amount.replace(".", "", 1).isdecimal() or not float(amount):
                raise ConfigError(f"{at}: {amount} must be the number above 0 that each node needs")
    key = KEY_FILE if description.key else ""
    routers = tuple(_router_address(index) for index in range(len(description.routers)))
    return ClusterAddresses(routers, OWN_ADDRESS, listen=OWN_ADDRESS, key=key)


def resources_of(spec: ProcessSpec) -> dict[str, float]:
    """Return what Ray reserves for a process: one CPU unless the description gives a number."""
    resources = {"CPU": float(spec.cpus or 1)}
    if spec.gpus:
        resources["GPU"] = float(spec.gpus)
    if spec.memory_mib:
        resources["memory"] = float(spec.memory_mib << 20)  # in bytes
    return resources | {name: float(amount) for name, amount in spec.resources.items()}


def at_its_place(
    processes: Sequence[ProcessSpec], name: str, addresses: Sequence[str], key_file: str
) -> ProcessSpec:
    """Return a process as it runs on its host. `addresses` holds the host of every process."""
    hosts = {spec.name: host for spec, host in zip(processes, addresses, strict=True)}
    values = {OWN_ADDRESS: hosts[name], KEY_FILE: key_file}
    on_host: Counter[str] = Counter()
    for spec in processes:
        if spec.pool == ROUTERS:
            values[_router_address(spec.index)] = hosts[spec.name]
    for spec in processes:
        if spec.name == name:
            return filled(spec, hosts[name], on_host[spec.pool], values)
        on_host[spec.pool] += hosts[spec.name] == hosts[name]
    raise AssertionError(f"{name} is not in the job")


class ProcessActor:
    """Runs one process on the host of its actor. Its only argument shows no secret.

    A process that ends is restarted. When the actor's own process ends, by any signal, the child
    ends too, and Ray restarts the actor.
    """

    def __init__(self, name: str) -> None:
        # Ray runs actors with a nice value of 15, which the process would inherit.
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        context = ray.get_runtime_context()
        job = _job_in(context.namespace)
        if job is None:
            raise NodeError(f"{name} was ended before it started")
        self._name = name
        self._job = job
        self._key_file = _in_memory(job.key)
        (role,) = (spec.role for spec in job.processes if spec.name == name)
        last_end = CAME_BACK if context.was_current_actor_reconstructed else ""
        self._status = ProcessStatus(name, role, "", "waiting", "", last_end)
        self._ending = threading.Event()
        self._is_hurried = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def report(self) -> bytes:
        """Return a `ProcessStatus` in JSON, which another release can read, too."""
        return msgspec.json.encode(self._status)

    def end(self, *, is_hurried: bool) -> None:
        """End the process, with its `grace_s` unless it is hurried, and return when it is gone."""
        self._is_hurried = is_hurried
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        """Keep the process running, and start it anew if Ray moves a router to another host."""
        spec: ProcessSpec | None = None
        processes: HostProcesses | None = None
        look_at_s = 0.0
        try:
            while not self._ending.wait(WATCH_S):
                if monotonic() >= look_at_s:
                    look_at_s = monotonic() + LOOK_S
                    now = self._placed()
                    if now is not None and now != spec:
                        if processes is not None:
                            processes.stop(is_hurried=True)
                        spec = now
                        processes = HostProcesses(HostJob(on_this_machine((now,)), self._job.logs))
                        processes.start()
                if processes is not None:
                    processes.poll()
                    (status,) = processes.statuses()
                    last_end = status.last_end or self._status.last_end
                    self._status = msgspec.structs.replace(status, last_end=last_end)
        except NodeError as error:
            self._status = msgspec.structs.replace(self._status, last_end=error.message)
        finally:
            if processes is not None:
                processes.stop(is_hurried=self._is_hurried)
            self._status = msgspec.structs.replace(self._status, state="ended", note="")

    def _placed(self) -> ProcessSpec | None:
        """Return the process at its place; None while Ray looks for hosts or does not answer."""
        try:
            addresses = _addresses()
        except (RayError, RuntimeError, OSError):
            return None
        if not (addresses and all(addresses)):
            return None
        return at_its_place(self._job.processes, self._name, addresses, self._key_file)


def _router_address(index: int) -> str:
    return f"$(ROUTER_{index}_ADDRESS)"


def _connect(address: str, namespace: str) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if address != "auto":
        _check_answers(address)
    try:
        with _handlers_kept():
            ray.init(
                address=address,
                namespace=namespace,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except (ConnectionError, RuntimeError, ValueError, AssertionError, RayError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise NodeError(f"cannot join Ray at {address}: {reason}") from error


def _check_answers(address: str) -> None:
    """Raise `NodeError` if nothing listens there, because Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise NodeError(
            f"Ray does not answer at {address} ({error}): give the HOST:PORT that `ray start "
            "--head` has printed, from a host that has joined the Ray cluster"
        ) from error


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Keep the command's signal handlers, which Ray replaces, and keep its stderr clean."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [(number, signal.getsignal(number)) for number in numbers]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for number, handler in handlers:
            signal.signal(number, handler)


def _job_in(namespace: str) -> RayJob | None:
    """Return the job of any deployment in this namespace."""
    content = internal_kv._internal_kv_get(namespace, namespace=STORE)
    return msgspec.json.decode(content, type=RayJob) if content is not None else None


def _group() -> PlacementGroup | None:
    try:
        return get_placement_group(GROUP)
    except ValueError:
        return None


def _addresses() -> list[str]:
    """Return the host of each process, in order; empty for one without a host yet."""
    group = _group()
    if group is None:
        return []
    hosts = {one["NodeID"]: one["NodeManagerAddress"] for one in ray.nodes() if one["Alive"]}
    placed = placement_group_table(group).get("bundles_to_node_id", {})
    return [hosts.get(node_id, "") for _, node_id in sorted(placed.items())]


def _start_actors(namespace: str, processes: Sequence[ProcessSpec]) -> PlacementGroup:
    """Ask for the placement group and its actors, and return at once."""
    group = placement_group(
        [resources_of(spec) for spec in processes],
        strategy="SPREAD",
        name=GROUP,
        lifetime="detached",
        bundle_label_selector=[spec.node_selector for spec in processes],
    )
    for index, spec in enumerate(processes):
        own = resources_of(spec)
        actor = ray.remote(ProcessActor).options(
            name=spec.name,
            namespace=namespace,
            lifetime="detached",
            max_restarts=-1,  # as often as it ends
            max_concurrency=4,  # `report` answers while `end` waits
            num_cpus=own.pop("CPU"),
            num_gpus=own.pop("GPU", 0),
            memory=own.pop("memory", None),
            resources=own,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
        )
        actor.remote(spec.name)
    return group


def _reports(namespace: str, processes: Sequence[ProcessSpec]) -> list[ProcessStatus]:
    """Return the status of each process; of one whose actor is late or gone, what is known."""
    found = {
        spec.name: ProcessStatus(spec.name, spec.role, "", "waiting", "its actor is starting")
        for spec in processes
    }
    asked = {}
    for name, status in found.items():
        try:
            asked[ray.get_actor(name, namespace=namespace).report.remote()] = name
        except ValueError:
            found[name] = msgspec.structs.replace(status, state="ended", note="its actor is gone")
    done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=REPORT_S) if asked else ([], [])
    for reference in done:
        name = asked[reference]
        try:
            found[name] = msgspec.json.decode(ray.get(reference), type=ProcessStatus)
        except (ActorDiedError, ActorUnschedulableError) as error:
            found[name] = msgspec.structs.replace(
                found[name], state="ended", note="", last_end=str(error).strip().rpartition("\n")[2]
            )
        except RayError:
            continue  # Ray starts it again
    return list(found.values())


def _end(namespace: str, job: RayJob, *, is_hurried: bool) -> None:
    """Let the routers finish their requests, then the nodes, and remove all actors.

    A signal, or a process that does not end in time, ends the waiting.
    """
    actors = []
    with Interrupts() as interrupts:
        for is_router in (True, False):
            ours = [spec for spec in job.processes if (spec.role == "router") is is_router]
            waited = []
            for spec in ours:
                with contextlib.suppress(ValueError):  # without an actor
                    actors.append(ray.get_actor(spec.name, namespace=namespace))
                    waited.append(actors[-1].end.remote(is_hurried=is_hurried))
            grace_s = max((one.grace_s for one in ours), default=0.0) + EXTRA_STOP_S
            deadline_s = monotonic() + (HURRIED_S if is_hurried else grace_s)
            if not any(_addresses()):
                continue  # actors without a host never answer
            while waited and monotonic() < deadline_s and not interrupts.requested:
                _, waited = ray.wait(waited, num_returns=len(waited), timeout=WATCH_S)
    for actor in actors:
        ray.kill(actor, no_restart=True)
    group = _group()
    if group is not None:
        remove_placement_group(group)
    internal_kv._internal_kv_del(namespace, namespace=STORE)


def _in_memory(key: str) -> str:
    """Return the path of a private file that vanishes with this process."""
    if not key:
        return ""
    descriptor = os.memfd_create("baton-key")
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, key.encode())
    return f"/proc/{os.getpid()}/fd/{descriptor}"
