"""`baton render --on helm`: a description as values of the chart in `deploy/chart`.

The routers are a StatefulSet, and so is each pool: a pod is called like its node, and nodes dial a
router by the name of its pod. The description's name is that of the release.
"""

from pathlib import Path
from typing import Any

import msgspec

from baton.deploy.cluster.description import Description, Settings
from baton.deploy.cluster.processes import (
    ROUTERS,
    ClusterAddresses,
    ClusterPlan,
    ProcessSpec,
)
from baton.deploy.cluster.state import write_private
from baton.protocol.errors import ConfigError
from baton.runtime.settings import VARIABLE_PREFIX

CHART = Path(__file__).parents[2] / "chart"
Values = dict[str, Any]

# Kubernetes adds up to 11 characters to a StatefulSet's name in labels of 63.
MAX_NAME = 52
# The pools of the chart's own values; null takes one out that a description does not have.
DEFAULT_POOLS = ("prefill", "decode")
_API_KEYS = f"{VARIABLE_PREFIX}ROUTER_API_KEYS"
_HUB_TOKEN = "HF_TOKEN"  # which only the pods need that fetch the model


def addresses_of(description: Description) -> ClusterAddresses:
    """Return the names of routers. Raises `ConfigError` for what Kubernetes cannot have."""
    description.check_no_hosts(
        "Kubernetes places the processes; remove the addresses, and use node_selector to choose "
        "machines"
    )
    if any(router != description.routers[0] for router in description.routers):
        raise ConfigError(
            "routers[1]: on Kubernetes all routers are alike; give each the same"
        )
    for name in (ROUTERS, *description.pools):
        if len(whole := f"{description.name}-{name}") > MAX_NAME:
            raise ConfigError(
                f"{whole} has more than {MAX_NAME} characters; choose shorter names"
            )
    return ClusterAddresses(
        routers=tuple(
            f"{ROUTERS}-{index}" for index in range(len(description.routers))
        ),
        node="",  # the chart says where pods listen
    )


def render(plan: ClusterPlan, folder: Path) -> list[Path]:
    """Write the values, and a private file of those that are secret."""
    path = folder / "values.yaml"
    secret_path = folder / "secrets.yaml"
    path.write_text(text_of([values_of(plan)]), encoding="utf-8")
    write_private(secret_path, text_of([secrets_of(plan)]).encode())
    return [path, secret_path]


def values_of(plan: ClusterPlan) -> Values:
    """Return the values that are not secret. Raises `ConfigError`."""
    description = plan.description
    options = plan.description.kubernetes
    _check(description)
    has_folder = _is_folder(description.model)
    (router, *_), router_spec = description.routers, plan.pool(ROUTERS)[0]
    pools = {name: _pool(plan, name) for name in description.pools}
    absent: Values = {name: None for name in DEFAULT_POOLS if name not in pools}
    return _without_empty(
        model="" if has_folder else description.model,
        image=_image(options.image),
        settings=_by_section(description.settings),
        modelStorage=_without_empty(claim=options.model_claim if has_folder else ""),
        cache=_without_empty(claim=options.cache_claim),
        podAnnotations=options.annotations,
        pod=options.pod,
        podMonitor=_without_empty(enabled=options.pod_monitor),
        router=_without_empty(
            replicas=len(description.routers),
            port=router.port,
            controlPort=router.control_port,
            settings=_by_section(router.settings),
            env=_public(router_spec),
        ),
        pools=pools | absent,
    )


def secrets_of(plan: ClusterPlan) -> Values:
    """Return the values that nobody else may read: keys, tokens, secret variables."""
    description = plan.description
    specs = {spec.pool: spec for spec in reversed(plan.processes)}
    variables = {name: dict(spec.secret_env) for name, spec in specs.items()}
    tokens = {texts.pop(_HUB_TOKEN, "") for texts in variables.values()} - {""}
    is_fetched = not _is_folder(description.model)
    api_keys = variables[ROUTERS].pop(_API_KEYS, "")
    key = Path(description.key).read_text(encoding="utf-8") if description.key else ""
    secrets = {name: {"secretEnv": texts} for name, texts in variables.items() if texts}
    return _without_empty(
        clusterKey=_without_empty(value=key),
        apiKeys=_without_empty(values=api_keys.split(",") if api_keys else []),
        huggingFace=_without_empty(token=min(tokens) if tokens and is_fetched else ""),
        router=secrets.pop(ROUTERS, {}),
        pools=secrets,
    )


def text_of(documents: list[Values]) -> str:
    return "---\n".join(
        msgspec.yaml.encode(document).decode() for document in documents
    )


def _check(description: Description) -> None:
    options = description.kubernetes
    if _is_folder(description.model) and not options.model_claim:
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


def _is_folder(model: str) -> bool:
    """Return whether a description's model is a folder, and neither a hub's name nor the demo."""
    return model.startswith("/")


def _pool(plan: ClusterPlan, name: str) -> Values:
    pool = plan.description.pools[name]
    spec = plan.pool(name)[0]
    options = plan.description.kubernetes
    limits: dict[str, str] = dict(pool.resources)
    if pool.memory_mib:
        limits["memory"] = f"{pool.memory_mib}Mi"
    scaling = _without_empty(
        maxReplicas=pool.max_replicas,
        prometheus=options.prometheus,
        externalMetrics=options.external_metrics,
    )
    return _without_empty(
        role=pool.role,
        replicas=pool.replicas,
        gpus=pool.gpus,
        autoscaling=scaling if pool.max_replicas else {},
        settings=_by_section({**_threads(spec), **pool.settings}),
        httpPort=pool.http_port,
        peerPort=pool.peer_port,
        resources=_without_empty(
            requests={"cpu": str(pool.cpus)} if pool.cpus else {},
            limits=limits,
        ),
        env=_public(spec),
        podAnnotations=pool.annotations,
        nodeSelector=pool.node_selector,
        pod=pool.pod,
    )


def _threads(spec: ProcessSpec) -> Settings:
    """Return the setting that follows from a pool's CPUs, if one does."""
    start = "engine.threads="
    counts = [word.removeprefix(start) for word in spec.argv if word.startswith(start)]
    return {"engine.threads": int(counts[0])} if counts else {}


def _by_section(settings: Settings) -> dict[str, Settings]:
    """Return settings by section, without the API keys, which are secret."""
    found: dict[str, Settings] = {}
    for dotted, value in settings.items():
        section, _, name = dotted.partition(".")
        if dotted != "router.api_keys":
            found.setdefault(section, {})[name] = value
    return found


def _public(spec: ProcessSpec) -> dict[str, str]:
    """Return the variables that the description names; the chart adds those of baton."""
    return {
        name: text
        for name, text in spec.env.items()
        if not name.startswith(VARIABLE_PREFIX)
    }


def _image(image: str) -> Values:
    """Return an image's name in parts. A port in the name of a registry is no tag."""
    repository, at, digest = image.partition("@")
    if at:
        return {"repository": repository, "tag": digest}
    repository, colon, tag = image.rpartition(":")
    if colon and "/" not in tag:
        return {"repository": repository, "tag": tag}
    return {"repository": image}


def _without_empty(**values: object) -> Values:
    """Return what is described, which no empty text, list or mapping is, and no 0."""
    return {name: value for name, value in values.items() if value}
