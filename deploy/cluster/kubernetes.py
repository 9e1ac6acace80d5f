"""`baton render --on kubernetes`: manifests for kustomize, which `kubectl apply -k` takes.

A router is a Deployment with a Service that nodes dial before the router is ready; clients have one
Service for all routers. A pool is a StatefulSet, whose pods are called like the nodes.
"""

from pathlib import Path
from typing import TypeAlias

import msgspec

from baton.deploy.cluster.description import Description
from baton.deploy.cluster.processes import (
    ROUTERS,
    ClusterPlan,
    ProcessPlaces,
    ProcessSpec,
)
from baton.deploy.cluster.state import make_private, write_private
from baton.protocol.errors import ConfigError

Manifest: TypeAlias = dict[str, object]

KEY_FOLDER, KEY_FILE = "/run/baton", "cluster.key"
SECRET_FOLDER = "/run/secrets/baton"
MODEL_FOLDER = "/model"
CACHE_FOLDER = "/var/cache/baton"
SECRET = "baton-key"
USER = 10001  # of the image's processes
CLIENTS = "baton"  # the Service that clients call
NAME_LABEL, PROCESS_LABEL = "app.kubernetes.io/name", "baton/process"
GPU = "nvidia.com/gpu"
RDMA = "rdma/"
# A terminating router first leaves the Service, which takes a moment to reach kube-proxy.
LEAVE_S = 5
SHARED = {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER}

CONFINED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True}
POD_IP = "$(POD_IP)"


def places_of(description: Description) -> ProcessPlaces:
    """Return the places of processes. Raises `ConfigError` if the description names hosts."""
    description.check_no_hosts(
        "Kubernetes places the processes; remove the addresses, and use node_selector to choose "
        "machines"
    )
    return ProcessPlaces(
        routers=tuple(f"{ROUTERS}-{index}" for index in range(len(description.routers))),
        node=f"[{POD_IP}]",  # IPv4 or IPv6
        listen="*",
        model=MODEL_FOLDER if _is_folder(description.model) else "",
        key=f"{KEY_FOLDER}/{KEY_FILE}" if description.key else "",
    )


def render(plan: ClusterPlan, folder: Path) -> list[Path]:
    """Write the files into `base`, which only this user can read, because it holds the key."""
    description = plan.description
    key = Path(description.key).read_bytes() if description.key else b""
    files = _base_of(plan, key)
    kustomization: Manifest = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": description.kubernetes.namespace or description.name,
        "resources": list(files),
    }
    base = folder / "base"
    make_private(base)
    for name, documents in {**files, "kustomization.yaml": [kustomization]}.items():
        texts = [msgspec.yaml.encode(one) for one in documents]
        write_private(base / name, b"---\n".join(texts))
    return [base / name for name in (*files, "kustomization.yaml")]


def _base_of(plan: ClusterPlan, key: bytes) -> dict[str, list[Manifest]]:
    """Return the objects by file name; `key` is the content of the cluster's key file."""
    files = {
        f"{spec.name}.yaml": [_router(plan, spec), _control(spec)] for spec in plan.pool(ROUTERS)
    }
    files["clients.yaml"] = [_clients()]
    for name in plan.description.pools:
        files[f"{name}.yaml"] = _pool(plan, plan.pool(name))
    names = [ROUTERS, *plan.description.pools]
    files["disruption.yaml"] = [_disruption(name) for name in names]
    if secrets := _secrets(plan, key):
        files["secrets.yaml"] = secrets
    return files


def _head(version: str, kind: str, name: str, component: str) -> Manifest:
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": name, "labels": _labels(component)},
    }


def _labels(component: str) -> dict[str, str]:
    return {NAME_LABEL: "baton", "app.kubernetes.io/component": component}


def _router(plan: ClusterPlan, spec: ProcessSpec) -> Manifest:
    """Return a router's Deployment: one pod, because nodes dial each router by its own name."""
    own = {**_labels(ROUTERS), PROCESS_LABEL: spec.name}
    return {
        **_head("apps/v1", "Deployment", spec.name, ROUTERS),
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": own},
            "template": {"metadata": {"labels": own}, "spec": _pod(plan, spec)},
        },
    }


def _control(spec: ProcessSpec) -> Manifest:
    """Return the Service by which nodes dial a router."""
    control = next(port for port in spec.ports if port.name == "control")
    return {
        **_head("v1", "Service", spec.name, ROUTERS),
        "spec": {
            "selector": {**_labels(ROUTERS), PROCESS_LABEL: spec.name},
            # A router is ready only when it has nodes, so they must reach it before that.
            "publishNotReadyAddresses": True,
            "ports": [{"name": control.name, "port": control.port}],
        },
    }


def _clients() -> Manifest:
    ports = [{"name": "http", "port": 80, "targetPort": "http"}]
    spec = {"selector": _labels(ROUTERS), "ports": ports}
    return {**_head("v1", "Service", CLIENTS, ROUTERS), "spec": spec}


def _pool(plan: ClusterPlan, specs: tuple[ProcessSpec, ...]) -> list[Manifest]:
    first = specs[0]
    service = {"clusterIP": "None", "selector": _labels(first.pool)}
    return [
        {**_head("v1", "Service", first.pool, first.pool), "spec": service},
        {
            **_head("apps/v1", "StatefulSet", first.pool, first.pool),
            "spec": {
                "replicas": len(specs),
                "serviceName": first.pool,
                "podManagementPolicy": "Parallel",
                "selector": {"matchLabels": _labels(first.pool)},
                "template": {
                    "metadata": {"labels": _labels(first.pool)},
                    "spec": _pod(plan, first),
                },
            },
        },
    ]


def _disruption(component: str) -> Manifest:
    """Limit evictions to one process of a kind at a time."""
    return {
        **_head("policy/v1", "PodDisruptionBudget", component, component),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": _labels(component)}},
    }


def _secrets(plan: ClusterPlan, key: bytes) -> list[Manifest]:
    found: list[Manifest] = []
    if key:
        data = {KEY_FILE: key.decode()}
        found.append({**_head("v1", "Secret", SECRET, "key"), "stringData": data})
    first = {_owner(spec): spec for spec in reversed(plan.processes) if spec.secret_env}
    found += [
        {**_head("v1", "Secret", name, spec.pool), "stringData": spec.secret_env}
        for name, spec in first.items()
    ]
    return found


def _owner(spec: ProcessSpec) -> str:
    """Return the name of the object that runs a process: its own, or that of its pool."""
    return spec.name if spec.role == "router" else spec.pool


def _pod(plan: ClusterPlan, spec: ProcessSpec) -> Manifest:
    description = plan.description
    pod: Manifest = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # their variables would begin with BATON_, as settings do
        "terminationGracePeriodSeconds": round(spec.grace_s) + LEAVE_S,
        "securityContext": {**SHARED, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [_container(description, spec)],
        "volumes": _volumes(description),
    }
    if description.key:
        pod["initContainers"] = [_key_copy(description)]
    if spec.node_selector:
        pod["nodeSelector"] = dict(spec.node_selector)
    return pod


def _container(description: Description, spec: ProcessSpec) -> Manifest:
    container: Manifest = {
        "name": "baton",
        "image": description.kubernetes.image,
        "args": [_literal(word) for word in spec.argv[1:]],
        "env": _environment(spec),
        "ports": [{"name": port.name, "containerPort": port.port} for port in spec.ports],
        "resources": _resources(spec),
        "securityContext": _confined(spec),
        "volumeMounts": [
            {"name": "scratch", "mountPath": "/tmp"},
            {"name": "cache", "mountPath": CACHE_FOLDER},
            *_model_mount(description),
            *([{"name": "key", "mountPath": KEY_FOLDER}] if description.key else []),
        ],
    }
    if spec.secret_env:
        container["envFrom"] = [{"secretRef": {"name": _owner(spec)}}]
    # Without an http_port, only the routers know how a node is.
    if any(port.name == "http" for port in spec.ports):
        container |= _probes(description, spec)
    if spec.role == "router":
        container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(LEAVE_S)]}}}
    return container


def _probes(description: Description, spec: ProcessSpec) -> Manifest:
    start_s = ClusterPlan(description, ()).start_timeout_s
    port: Manifest = {"port": "http", **({"scheme": "HTTPS"} if spec.is_tls else {})}
    live = {"httpGet": {"path": "/live", **port}, "timeoutSeconds": 2}
    path = "/health" if spec.role == "router" else "/ready"
    ready = {"httpGet": {"path": path, **port}, "timeoutSeconds": 2}
    return {
        "startupProbe": {**live, "periodSeconds": 2, "failureThreshold": int(start_s) // 2},
        "livenessProbe": {**live, "periodSeconds": 5, "failureThreshold": 6},
        "readinessProbe": {**ready, "periodSeconds": 2, "failureThreshold": 2},
    }


def _environment(spec: ProcessSpec) -> list[Manifest]:
    found: list[Manifest] = [_from_pod("POD_IP", "status.podIP")]
    for name, text in spec.env.items():
        if name == "BATON_NODE_ID":
            found.append(_from_pod(name, "metadata.name"))
        elif name == "BATON_NODE_BIND":
            # Kubernetes fills $(POD_IP) into the variables that come after it.
            found.append({"name": name, "value": text})
        else:
            found.append({"name": name, "value": _literal(text)})
    folders = {"HOME": CACHE_FOLDER, "XDG_CACHE_HOME": CACHE_FOLDER, "HF_HOME": CACHE_FOLDER}
    return found + [{"name": name, "value": text} for name, text in folders.items()]


def _literal(text: str) -> str:
    """Return text in which Kubernetes replaces nothing."""
    return text.replace("$(", "$$(")


def _from_pod(name: str, field: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": field}}}


def _resources(spec: ProcessSpec) -> Manifest:
    """Return the container's resources. GPUs and devices must be limits, equal to requests."""
    limits: dict[str, str] = dict(spec.resources)
    if spec.gpus:
        limits[GPU] = str(spec.gpus)
    requests = {"cpu": str(spec.cpus or 1)}
    if spec.memory_mib:
        limits["memory"] = requests["memory"] = f"{spec.memory_mib}Mi"
    return {"requests": {**requests, **limits}, **({"limits": limits} if limits else {})}


def _confined(spec: ProcessSpec) -> Manifest:
    capabilities: dict[str, list[str]] = {"drop": ["ALL"]}
    if any(name.startswith(RDMA) for name in spec.resources):
        capabilities["add"] = ["IPC_LOCK"]  # RDMA pins the memory of the KV pool
    return {**CONFINED, "capabilities": capabilities}


def _key_copy(description: Description) -> Manifest:
    """Copy the key for the process alone, because a Secret's volume is open to the pod's group."""
    source = f"{SECRET_FOLDER}/{KEY_FILE}"
    return {
        "name": "key",
        "image": description.kubernetes.image,
        "command": ["install", "-m", "600", source, f"{KEY_FOLDER}/{KEY_FILE}"],
        "securityContext": {**CONFINED, "capabilities": {"drop": ["ALL"]}},
        "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}},
        "volumeMounts": [
            {"name": "secret", "mountPath": SECRET_FOLDER, "readOnly": True},
            {"name": "key", "mountPath": KEY_FOLDER},
        ],
    }


def _volumes(description: Description) -> list[Manifest]:
    found: list[Manifest] = [
        {"name": "scratch", "emptyDir": {}},
        {"name": "cache", "emptyDir": {}},
    ]
    if _model_mount(description):
        claim = {"claimName": description.kubernetes.model_claim, "readOnly": True}
        found.append({"name": "model", "persistentVolumeClaim": claim})
    if description.key:
        found.append({"name": "secret", "secret": {"secretName": SECRET}})
        found.append({"name": "key", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}})
    return found


def _is_folder(model: str) -> bool:
    """Return whether a description's model is a folder, and neither a hub's name nor the demo."""
    return model.startswith("/")


def _model_mount(description: Description) -> list[Manifest]:
    if not _is_folder(description.model):
        return []
    if not description.kubernetes.model_claim:
        raise ConfigError(
            "kubernetes.model_claim: name the PersistentVolumeClaim that holds the model folder, "
            "or name a model of the Hugging Face hub"
        )
    return [{"name": "model", "mountPath": MODEL_FOLDER, "readOnly": True}]
