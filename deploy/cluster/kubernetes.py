"""`--on kubernetes`: manifests for kustomize, and `kubectl` for everything that needs a cluster.

`render` needs no cluster and no kubectl. `start` applies what `render` writes to the namespace of
the description. It creates a missing namespace, but never deletes one, because it may hold volumes.
"""

from pathlib import Path

import msgspec

from baton.deploy.cluster.description import Description
from baton.deploy.cluster.host_seat import HostSeat
from baton.deploy.cluster.manifests import (
    KEY_FILE,
    KEY_FOLDER,
    MODEL_FOLDER,
    NAME_LABEL,
    PROCESS_LABEL,
    autoscalers_of,
    base_of,
    is_folder,
    texts_of,
)
from baton.deploy.cluster.platform import PlatformOptions, ProcessState, ProcessStatus
from baton.deploy.cluster.processes import (
    ROUTERS,
    ClusterPlan,
    ProcessPlaces,
    ProcessRole,
    ProcessSpec,
)
from baton.deploy.cluster.programs import order, question
from baton.deploy.cluster.running import make_private, write_private
from baton.protocol.config import KeysConfig
from baton.protocol.errors import ConfigError, NodeError
from baton.runtime.channels.keys import load_keys

MISSING = "write the manifests with `baton render --on kubernetes`, and apply them where it is"
APPLIED = "kubernetes.json"
SELECTED = f"{NAME_LABEL}=baton"
POD_IP = "$(POD_IP)"
BASE, AUTOSCALE = "base", "overlays/autoscale"
# The reasons for which containers wait in a normal start.
USUAL = ("ContainerCreating", "PodInitializing")
STATES: dict[str, ProcessState] = {
    "Pending": "waiting", "Running": "running", "Succeeded": "ended", "Failed": "ended",
}  # fmt: skip


class Applied(msgspec.Struct, frozen=True):
    """The objects that `start` has applied, for `stop` and `status`."""

    namespace: str
    overlay: str
    processes: dict[str, tuple[str, ProcessRole]]  # name -> its pool and role


class KubernetesPlatform:
    """Implements `Platform` and `Reaching`."""

    def __init__(self, options: PlatformOptions) -> None:
        if options.hosts:
            raise ConfigError("--host: Kubernetes places the processes; use node_selector instead")

    def own(self, plan: ClusterPlan) -> tuple[ProcessSpec, ...]:
        return plan.processes

    def places(self, description: Description) -> ProcessPlaces:
        named = [name for name, pool in description.pools.items() if pool.hosts]
        if named or any(router.host for router in description.routers):
            where = f"pools.{named[0]}.hosts" if named else "routers[].host"
            raise ConfigError(
                f"{where}: Kubernetes places the processes; remove the addresses, and use "
                "node_selector to choose machines"
            )
        return ProcessPlaces(
            routers=tuple(f"{ROUTERS}-{index}" for index in range(len(description.routers))),
            node=f"[{POD_IP}]",  # IPv4 or IPv6
            listen="*",
            model=MODEL_FOLDER if is_folder(description.model) else "",
            key=f"{KEY_FOLDER}/{KEY_FILE}" if description.key else "",
        )

    def render(self, plan: ClusterPlan, folder: Path) -> list[Path]:
        """Write `base`, and an overlay for pools that grow with their queues.

        Only this user can read the folder, because it holds the key.
        """
        description = plan.description
        files = texts_of(base_of(plan, _key_of(description)))
        written = _write(folder / BASE, files, _namespace(description))
        if autoscalers := autoscalers_of(description):
            files = texts_of({"autoscale.yaml": autoscalers})
            written += _write(folder / AUTOSCALE, files, _namespace(description), f"../../{BASE}")
        return written

    def start(self, plan: ClusterPlan, folder: Path) -> None:
        self.render(plan, folder)
        namespace = _namespace(plan.description)
        overlay = AUTOSCALE if plan.description.kubernetes.max_replicas else BASE
        processes = {spec.name: (spec.pool, spec.role) for spec in plan.processes}
        applied = Applied(namespace, overlay, processes)
        if not _kubectl("get", "namespace", namespace, "--ignore-not-found", "-o", "name"):
            _kubectl("create", "namespace", namespace)
        write_private(folder / APPLIED, msgspec.json.encode(applied))
        _kubectl("apply", "-k", str(folder / overlay))

    def stop(self, folder: Path, *, is_hurried: bool = False) -> None:
        applied = _applied(folder)
        if applied is None:
            return
        how = ("--wait", "--cascade=foreground")
        if is_hurried:
            how = ("--wait=false", "--grace-period=1")
        words = ("--ignore-not-found", *how)
        _kubectl("delete", "-k", str(folder / applied.overlay), *words)
        (folder / APPLIED).unlink()

    def status(self, folder: Path) -> list[ProcessStatus]:
        applied = _applied(folder)
        if applied is None:
            return []
        pods = _pods_of(applied)
        return [_status(applied, name, pods) for name in applied.processes]

    def urls(self, plan: ClusterPlan, folder: Path) -> tuple[str, ...]:
        """Return none, because the cluster's own ingress decides what can be reached."""
        return ()

    def seats(self, plan: ClusterPlan, folder: Path) -> list[HostSeat]:
        """Treat every pod as a host: a command in it has the limits and devices of its process."""
        applied = _applied(folder)
        if applied is None:
            return []
        into = ("kubectl", "exec", "-n", applied.namespace)
        pods = _pods_of(applied)
        found = [(spec, pod) for spec in plan.processes if (pod := _pod_of(spec.name, pods))]
        return [
            HostSeat(name, (_in_pod(spec, pod),), ("baton",), (*into, name, "--"))
            for spec, pod in found
            for name in (pod.metadata.name,)
        ]


class _Terminated(msgspec.Struct, frozen=True):
    exitCode: int = 0  # noqa: N815  (the API's name)
    reason: str = ""


class _WaitingState(msgspec.Struct, frozen=True):
    reason: str = ""
    message: str = ""


class _State(msgspec.Struct, frozen=True):
    terminated: _Terminated | None = None
    waiting: _WaitingState | None = None


class _ContainerStatus(msgspec.Struct, frozen=True):
    ready: bool = False
    state: _State = _State()
    lastState: _State = _State()  # noqa: N815


class _PodStatus(msgspec.Struct, frozen=True):
    phase: str = ""
    podIP: str = ""  # noqa: N815
    containerStatuses: list[_ContainerStatus] = []  # noqa: N815
    initContainerStatuses: list[_ContainerStatus] = []  # noqa: N815


class _PodHead(msgspec.Struct, frozen=True):
    name: str
    labels: dict[str, str] = {}


class _PodSpec(msgspec.Struct, frozen=True):
    nodeName: str = ""  # noqa: N815


class _Pod(msgspec.Struct, frozen=True):
    metadata: _PodHead
    status: _PodStatus = _PodStatus()
    spec: _PodSpec = _PodSpec()


class _Pods(msgspec.Struct, frozen=True):
    items: list[_Pod] = []


def _pods_of(applied: Applied) -> list[_Pod]:
    said = _kubectl("get", "pods", "-n", applied.namespace, "-l", SELECTED, "-o", "json")
    return msgspec.json.decode(said, type=_Pods).items


def _pod_of(name: str, pods: list[_Pod]) -> _Pod | None:
    """Return the pod of a process, which is the last one listed."""
    found = [
        pod for pod in pods if name in (pod.metadata.name, pod.metadata.labels.get(PROCESS_LABEL))
    ]
    return found[-1] if found else None


def _in_pod(spec: ProcessSpec, pod: _Pod) -> ProcessSpec:
    env = {name: text.replace(POD_IP, pod.status.podIP) for name, text in spec.env.items()}
    return msgspec.structs.replace(spec, env=env)


def _status(applied: Applied, name: str, pods: list[_Pod]) -> ProcessStatus:
    _, role = applied.processes[name]
    pod = _pod_of(name, pods)
    if pod is None:
        return ProcessStatus(name, role, "", "waiting", "no pod yet")
    state = STATES.get(pod.status.phase, "unknown")
    containers = pod.status.containerStatuses
    if state == "running" and not all(container.ready for container in containers):
        state = "waiting"
    both = [*pod.status.initContainerStatuses, *containers]
    ends = [container.lastState.terminated for container in both]
    last_end = "; ".join(f"exit code {end.exitCode}: {end.reason}" for end in ends if end)
    waits = [one.state.waiting for one in both if one.state.waiting is not None]
    note = pod.metadata.name
    if waits and waits[0].reason not in ("", *USUAL):
        note += f": {waits[0].reason} {waits[0].message}".rstrip()
    return ProcessStatus(name, role, pod.spec.nodeName, state, note, last_end)


def _namespace(description: Description) -> str:
    return description.kubernetes.namespace or description.name


def _key_of(description: Description) -> bytes:
    if not description.key:
        return b""
    load_keys(KeysConfig(file=description.key))  # checks it
    return Path(description.key).read_bytes()


def _write(folder: Path, files: dict[str, str], namespace: str, *bases: str) -> list[Path]:
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": namespace,
        "resources": [*bases, *files],
    }
    files = {**files, "kustomization.yaml": msgspec.yaml.encode(kustomization).decode()}
    make_private(folder)
    for name, text in files.items():
        write_private(folder / name, text.encode())
    return [folder / name for name in files]


def _applied(folder: Path) -> Applied | None:
    try:
        return msgspec.json.decode((folder / APPLIED).read_bytes(), type=Applied)
    except FileNotFoundError:
        return None


def _kubectl(*words: str) -> str:
    """Run kubectl and return what it prints. Raises `NodeError` if it fails."""
    run = question if words[0] == "get" else order
    try:
        return run(("kubectl", *words), MISSING)
    except NodeError as error:
        raise NodeError(f"kubectl {words[0]}: {error.message}") from error
