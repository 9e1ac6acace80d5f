"""`baton render --on kubernetes`: manifests for kustomize, which `kubectl apply -k` takes.

The routers are a StatefulSet, and so is each pool: a pod is called like its node, and nodes dial a
router by the name of its pod. Names, labels and selectors have the cluster's name, so that several
clusters share a namespace. `helm` writes the same objects as a chart.
"""

import hashlib
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import jinja2
import msgspec
import yaml

from baton.deploy.cluster.description import Description, Pool
from baton.deploy.cluster.processes import (
    ROUTERS,
    ClusterAddresses,
    ClusterPlan,
    ProcessSpec,
)
from baton.deploy.cluster.state import make_private, write_private
from baton.protocol.errors import ConfigError

Manifest: TypeAlias = dict[str, Any]

KEY_FOLDER, KEY_FILE = "/run/baton", "cluster.key"
MODEL_FOLDER = "/model"
CACHE_FOLDER = "/var/cache/baton"
LABELS = "app.kubernetes.io/"
# Of a node, and of a router's metrics, which need no API key; each pod has an address of its own.
HTTP_PORT, METRICS_PORT = 8000, 9090
GPU, RDMA = "nvidia.com/gpu", "rdma/"
# Kubernetes adds up to 11 characters to a StatefulSet's name in labels of 63.
MAX_NAME = 52
POD_IP = "$(POD_IP)"
# What templates need besides the description.
FACTS = {
    "key_folder": KEY_FOLDER, "key_file": KEY_FILE, "secret_folder": "/run/secrets/baton",
    "model_folder": MODEL_FOLDER, "cache_folder": CACHE_FOLDER,
    "user": 10001,  # of the image's processes
    # A terminating router first leaves the Service, which takes a moment to reach kube-proxy.
    "leave_s": 5,
}  # fmt: skip
_templates = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    autoescape=False,  # values stand as JSON, which YAML contains
)


def addresses_of(description: Description) -> ClusterAddresses:
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
    return ClusterAddresses(
        routers=tuple(f"{service}-{index}.{service}" for index in range(len(description.routers))),
        node=f"[{POD_IP}]",  # IPv4 or IPv6
        listen="*",
        http_port=HTTP_PORT,
        metrics_port=METRICS_PORT,
        model=MODEL_FOLDER if is_folder(description.model) else "",
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
    """Return the objects by file name. Raises `ConfigError`."""
    description, secrets = plan.description, _secrets(plan)
    check(description)
    files = {
        f"{name}.yaml": _processes(plan, name, secrets) for name in (ROUTERS, *description.pools)
    }
    files["network.yaml"] = _filled(
        "network", description, labels=partial(_labels, description),
        metadata=partial(_metadata, description),
    )  # fmt: skip
    for name, pool in description.pools.items():
        if pool.max_replicas:
            about = _metadata(description, name)
            scaled = _filled("scaling", description, metadata=about, pool=pool)
            files[f"{name}.yaml"] += scaled
    if secrets:
        files["secrets.yaml"] = secrets
    return files


def check(description: Description) -> None:
    """Raise `ConfigError` for what is missing on Kubernetes."""
    options = description.kubernetes
    if is_folder(description.model) and not options.model_claim:
        raise ConfigError(
            "kubernetes.model_claim: name the PersistentVolumeClaim that holds the model folder, "
            "or name a model of the Hugging Face hub"
        )
    for name, pool in description.pools.items():
        if pool.max_replicas and not (options.prometheus or options.external_metrics):
            raise ConfigError(
                f"pools.{name}.max_replicas: nothing measures when to scale; give "
                "kubernetes.prometheus, which KEDA asks, or set kubernetes.external_metrics if an "
                "adapter publishes baton's metrics"
            )


def _filled(template: str, description: Description, **values: object) -> list[Manifest]:
    """Return the objects of a template."""
    text = _templates.get_template(f"{template}.yaml.j2").render(
        FACTS, description=description, options=description.kubernetes, **values
    )
    return list(yaml.safe_load_all(text))


def _labels(description: Description, component: str = "") -> dict[str, str]:
    labels = {f"{LABELS}name": "baton", f"{LABELS}instance": description.name}
    return labels | ({f"{LABELS}component": component} if component else {})


def _metadata(description: Description, component: str) -> Manifest:
    return {"name": f"{description.name}-{component}", "labels": _labels(description, component)}


def _processes(plan: ClusterPlan, component: str, secrets: list[Manifest]) -> list[Manifest]:
    """Return the objects of the routers or of a pool."""
    description, specs = plan.description, plan.pool(component)
    options, spec = description.kubernetes, specs[0]
    pool = description.pools.get(component, Pool("prefill"))  # routers have no fields of one
    annotations = options.annotations | pool.annotations
    if secrets:  # pods begin anew when a secret changes
        digest = hashlib.sha256(text_of(secrets).encode()).hexdigest()
        annotations = annotations | {"baton/secrets": digest[:16]}
    objects = _filled(
        "processes",
        description,
        spec=spec,
        labels=_labels(description, component),
        metadata=_metadata(description, component),
        annotations=annotations,
        replicas=len(specs),
        is_scaled=pool.max_replicas > 0,
        args=[_literal(word) for word in spec.argv[1:]],
        env=_environment(spec),
        resources=_resources(spec),
        pins_memory=any(name.startswith(RDMA) for name in spec.resources),
        has_folder=is_folder(description.model),
        start_s=int(plan.start_timeout_s),
    )
    pod = objects[1]["spec"]["template"]["spec"]
    given = options.pod | pool.pod
    if taken := sorted((pod.keys() & given.keys()) - {"topologySpreadConstraints"}):
        raise ConfigError(f"kubernetes.pod.{taken[0]}: baton writes this; take it out")
    pod.update(given)
    return objects


def _secrets(plan: ClusterPlan) -> list[Manifest]:
    """Return the Secrets: the cluster's key, and those of the routers and of each pool."""
    given = {spec.pool: spec.secret_env for spec in reversed(plan.processes) if spec.secret_env}
    if path := plan.description.key:
        given["key"] = {KEY_FILE: Path(path).read_text(encoding="utf-8")}
    head = {"apiVersion": "v1", "kind": "Secret"}
    return [
        {**head, "metadata": _metadata(plan.description, name), "stringData": texts}
        for name, texts in given.items()
    ]


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


def is_folder(model: str) -> bool:
    """Return whether a description's model is a folder, and neither a hub's name nor the demo."""
    return model.startswith("/")
