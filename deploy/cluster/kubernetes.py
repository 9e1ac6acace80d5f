"""`baton render --on kubernetes`: manifests for kustomize, which `kubectl apply -k` takes.

The routers are a StatefulSet, and so is each pool: a pod is called like its node, and nodes dial a
router by the name of its pod. Names, labels and selectors have the cluster's name, so that several
clusters share a namespace. `helm` writes the same objects as a chart.
"""

import hashlib
from pathlib import Path
from typing import TypeAlias

import msgspec

from baton.deploy.cluster.description import Description, Pool
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
USER = 10001  # of the image's processes
LABELS = "app.kubernetes.io/"
NODES = {"key": f"{LABELS}component", "operator": "NotIn", "values": [ROUTERS]}
HTTP_PORT = 8000  # of a node; each pod has an address of its own
GPU = "nvidia.com/gpu"
RDMA = "rdma/"
# A terminating router first leaves the Service, which takes a moment to reach kube-proxy.
LEAVE_S = 5
# Kubernetes adds up to 11 characters to a StatefulSet's name in labels of 63.
MAX_NAME = 52
SHARED = {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER}

CONFINED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True}
POD_IP = "$(POD_IP)"
# A pool is scaled so that so many requests wait for each of its nodes, and its room is so full.
WAITING_PER_NODE, BUSY = 4, 0.8


def places_of(description: Description) -> ProcessPlaces:
    """Return the places of processes. Raises `ConfigError` for what Kubernetes cannot have."""
    description.check_no_hosts(
        "Kubernetes places the processes; remove the addresses, and use node_selector to choose "
        "machines"
    )
    if any(router != description.routers[0] for router in description.routers):
        raise ConfigError("routers[1]: on Kubernetes all routers are alike; give each the same")
    for name in (ROUTERS, *description.pools):
        if len(whole := f"{description.name}-{name}") > MAX_NAME:
            raise ConfigError(f"{whole} has more than {MAX_NAME} characters; choose shorter names")
    service = f"{description.name}-{ROUTERS}"
    return ProcessPlaces(
        routers=tuple(f"{service}-{index}.{service}" for index in range(len(description.routers))),
        node=f"[{POD_IP}]",  # IPv4 or IPv6
        listen="*",
        http_port=HTTP_PORT,
        model=MODEL_FOLDER if _is_folder(description.model) else "",
        key=f"{KEY_FOLDER}/{KEY_FILE}" if description.key else "",
    )


def render(plan: ClusterPlan, folder: Path) -> list[Path]:
    """Write the files into `base`, which only this user can read, because it holds the key."""
    description = plan.description
    files = objects_of(plan)
    kustomization: Manifest = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": description.kubernetes.namespace or description.name,
        "resources": list(files),
    }
    base = folder / "base"
    make_private(base)
    for name, documents in {**files, "kustomization.yaml": [kustomization]}.items():
        write_private(base / name, text_of(documents).encode())
    return [base / name for name in (*files, "kustomization.yaml")]


def text_of(documents: list[Manifest]) -> str:
    return "---\n".join(msgspec.yaml.encode(one).decode() for one in documents)


def objects_of(plan: ClusterPlan) -> dict[str, list[Manifest]]:
    """Return the objects by file name."""
    description = plan.description
    secrets = _secrets(plan)
    files = {
        f"{name}.yaml": _processes(plan, name, secrets) for name in (ROUTERS, *description.pools)
    }
    files["clients.yaml"] = [_clients(description)]
    files["network.yaml"] = _network(plan)
    if scaled := [
        _scaled(plan, name, p) for name, p in description.pools.items() if p.max_replicas
    ]:
        files["scaling.yaml"] = scaled
    if description.kubernetes.pod_monitor:
        files["monitor.yaml"] = [_monitor(plan)]
    if secrets:
        files["secrets.yaml"] = list(secrets.values())
    return files


def _head(plan: ClusterPlan, version: str, kind: str, component: str, name: str = "") -> Manifest:
    """Return the head of an object of a component, which has the component's name."""
    labels = _labels(plan.description, component)
    name = name or f"{plan.description.name}-{component}"
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": labels}}


def _labels(description: Description, component: str = "") -> dict[str, str]:
    labels = {f"{LABELS}name": "baton", f"{LABELS}instance": description.name}
    return labels | ({f"{LABELS}component": component} if component else {})


def _processes(plan: ClusterPlan, component: str, secrets: dict[str, Manifest]) -> list[Manifest]:
    """Return the objects of the routers or of a pool."""
    description, specs = plan.description, plan.pool(component)
    own, first = _labels(description, component), specs[0]
    pool = description.pools.get(component, Pool(first.role)) if first.role != "router" else None
    service: Manifest = {"clusterIP": "None", "selector": own}
    if pool is None:
        # A router is ready only when it has nodes, so they must reach it before that.
        service["publishNotReadyAddresses"] = True
    is_scaled = pool is not None and pool.max_replicas > 0
    annotations = dict(description.kubernetes.annotations) | (pool.annotations if pool else {})
    if secrets:  # pods begin anew when a secret changes
        digest = hashlib.sha256(text_of(list(secrets.values())).encode()).hexdigest()
        annotations["baton/secrets"] = digest[:16]
    return [
        {**_head(plan, "v1", "Service", component), "spec": service},
        {
            **_head(plan, "apps/v1", "StatefulSet", component),
            "spec": {
                **({} if is_scaled else {"replicas": len(specs)}),
                "serviceName": f"{description.name}-{component}",
                "podManagementPolicy": "Parallel",
                "selector": {"matchLabels": own},
                "template": {
                    "metadata": {"labels": own, "annotations": annotations},
                    "spec": _pod(plan, first, pool),
                },
            },
        },
        {
            **_head(plan, "policy/v1", "PodDisruptionBudget", component),
            "spec": {"maxUnavailable": 1, "selector": {"matchLabels": own}},
        },
    ]


def _clients(description: Description) -> Manifest:
    """Return the Service that clients call."""
    plan, own = ClusterPlan(description, ()), _labels(description, ROUTERS)
    spec = {"selector": own, "ports": [{"name": "http", "port": 80, "targetPort": "http"}]}
    return {**_head(plan, "v1", "Service", ROUTERS, description.name), "spec": spec}


def _network(plan: ClusterPlan) -> list[Manifest]:
    """Let only nodes of the cluster reach control channels and KV; HTTP is open to all."""
    labels = _labels(plan.description)
    nodes: Manifest = {"matchLabels": labels, "matchExpressions": [NODES]}
    http = {"ports": [{"port": "http"}]}
    control = {"from": [{"podSelector": nodes}], "ports": [{"port": "control"}]}
    routers = {"podSelector": {"matchLabels": _labels(plan.description, ROUTERS)}}
    return [
        {
            **_head(plan, "networking.k8s.io/v1", "NetworkPolicy", component),
            "spec": {**selected, "policyTypes": ["Ingress"], "ingress": [http, rule]},
        }
        for component, selected, rule in (
            (ROUTERS, routers, control),
            ("nodes", {"podSelector": nodes}, {"from": [{"podSelector": nodes}]}),
        )
    ]


def _monitor(plan: ClusterPlan) -> Manifest:
    """Return what the operator of Prometheus reads; metrics get the labels of the pod."""
    spec = {
        "selector": {"matchLabels": _labels(plan.description)},
        "podTargetLabels": [f"{LABELS}instance"],
        "podMetricsEndpoints": [{"port": "http"}],
    }
    head = _head(plan, "monitoring.coreos.com/v1", "PodMonitor", "processes")
    return {**head, "spec": spec}


def _scaled(plan: ClusterPlan, component: str, pool: Pool) -> Manifest:
    """Return what scales a pool on the requests that wait for its role and on its room."""
    description, options = plan.description, plan.description.kubernetes
    target = {
        "apiVersion": "apps/v1", "kind": "StatefulSet", "name": f"{description.name}-{component}"
    }  # fmt: skip
    if options.prometheus:
        chosen = f'role="{pool.role}", app_kubernetes_io_instance="{description.name}"'
        queries = {
            f"sum(baton_router_waiting_requests{{{chosen}}})": ("AverageValue", WAITING_PER_NODE),
            f"avg(max by (node) (baton_router_node_busy_ratio{{{chosen}}}))": ("Value", BUSY),
        }
        triggers = [
            {
                "type": "prometheus",
                "metricType": kind,
                "metadata": {
                    "serverAddress": options.prometheus, "query": query, "threshold": str(limit)
                },
            }
            for query, (kind, limit) in queries.items()
        ]  # fmt: skip
        counts = {"minReplicaCount": pool.replicas, "maxReplicaCount": pool.max_replicas}
        spec = {"scaleTargetRef": target, **counts, "triggers": triggers}
        return {**_head(plan, "keda.sh/v1alpha1", "ScaledObject", component), "spec": spec}
    if not options.external_metrics:
        raise ConfigError(
            f"pools.{component}.max_replicas: nothing measures when to scale; give "
            "kubernetes.prometheus, which KEDA asks, or set kubernetes.external_metrics if an "
            "adapter publishes baton's metrics"
        )
    selector = {"role": pool.role, "app_kubernetes_io_instance": description.name}
    metric = {"name": "baton_router_waiting_requests", "selector": {"matchLabels": selector}}
    waiting = {"type": "AverageValue", "averageValue": str(WAITING_PER_NODE)}
    external = {"type": "External", "external": {"metric": metric, "target": waiting}}
    counts = {"minReplicas": pool.replicas, "maxReplicas": pool.max_replicas}
    head = _head(plan, "autoscaling/v2", "HorizontalPodAutoscaler", component)
    return {**head, "spec": {"scaleTargetRef": target, **counts, "metrics": [external]}}


def _secrets(plan: ClusterPlan) -> dict[str, Manifest]:
    """Return the Secrets by component: the cluster's key, and those of routers and pools."""
    found: dict[str, Manifest] = {}
    if path := plan.description.key:
        data = {KEY_FILE: Path(path).read_text()}
        found["key"] = {**_head(plan, "v1", "Secret", "key"), "stringData": data}
    first = {spec.pool: spec for spec in reversed(plan.processes) if spec.secret_env}
    for name, spec in first.items():
        found[name] = {**_head(plan, "v1", "Secret", name), "stringData": spec.secret_env}
    return found


def _pod(plan: ClusterPlan, spec: ProcessSpec, pool: Pool | None) -> Manifest:
    description = plan.description
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": _labels(description, spec.pool)},
    }
    own: Manifest = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # their variables would begin with BATON_, as settings do
        "terminationGracePeriodSeconds": round(spec.grace_s) + LEAVE_S,
        "securityContext": {**SHARED, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [_container(description, spec)],
        "volumes": _volumes(description),
    }
    if description.key:
        own["initContainers"] = [_key_copy(description)]
    if spec.node_selector:
        own["nodeSelector"] = dict(spec.node_selector)
    given = description.kubernetes.pod | (pool.pod if pool else {})
    if taken := sorted(own.keys() & given.keys()):
        raise ConfigError(f"kubernetes.pod.{taken[0]}: baton writes this; take it out")
    return {"topologySpreadConstraints": [spread], **own, **given}


def _container(description: Description, spec: ProcessSpec) -> Manifest:
    container: Manifest = {
        "name": "baton",
        "image": description.kubernetes.image,
        "args": [_literal(word) for word in spec.argv[1:]],
        "env": _environment(spec),
        "ports": [{"name": port.name, "containerPort": port.port} for port in spec.ports],
        "resources": _resources(spec),
        "securityContext": _confined(spec),
        **_probes(description, spec),
        "volumeMounts": [
            {"name": "scratch", "mountPath": "/tmp"},
            {"name": "cache", "mountPath": CACHE_FOLDER},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            *_model_mount(description),
            *([{"name": "key", "mountPath": KEY_FOLDER}] if description.key else []),
        ],
    }
    if spec.secret_env:
        container["envFrom"] = [{"secretRef": {"name": f"{description.name}-{spec.pool}"}}]
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
        {"name": "cache", **_claim(description.kubernetes.cache_claim)},
        # Ranks of a node and NCCL share memory there, and runtimes give it 64 MiB.
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    if _model_mount(description):
        claim = {"claimName": description.kubernetes.model_claim, "readOnly": True}
        found.append({"name": "model", "persistentVolumeClaim": claim})
    if description.key:
        found.append({"name": "secret", "secret": {"secretName": f"{description.name}-key"}})
        found.append({"name": "key", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}})
    return found


def _claim(name: str) -> Manifest:
    return {"persistentVolumeClaim": {"claimName": name}} if name else {"emptyDir": {}}


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
