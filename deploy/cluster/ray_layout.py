"""The request to Ray: one placement group, with a bundle and a named actor for each process.

`ray` checks it against the hosts of a Ray cluster, and starts it or writes it as YAML. Bundle,
actor and process have the same place in the plan. All bundles are reserved at once or not at all,
on as many hosts as there are (SPREAD). This file is pure.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import yaml

from baton.deploy.cluster.description import Description
from baton.deploy.cluster.placeholders import OWN_ADDRESS, filled
from baton.deploy.cluster.processes import ROUTERS, ClusterPlan, ProcessPlaces, ProcessSpec
from baton.protocol.errors import ConfigError

STRATEGY = "SPREAD"
RESTARTS = -1  # Ray restarts an actor as often as it ends
# The file of the cluster's key, which each actor holds in memory.
KEY_FILE = "$(KEY_FILE)"
PYTHON = "$(PYTHON)"  # that runs the actor, in the words of a command
# Ray's names for the resources that the description has keys for.
OWN_RESOURCES = {"CPU": "cpus", "GPU": "gpus", "memory": "memory_mib"}
HEADER = """\
# What `baton up --on ray` asks of Ray. $(ROUTER_0_ADDRESS) and $(OWN_ADDRESS) are addresses of
# hosts that Ray chooses; $(KEY_FILE) is the key, which the actor of the process holds in memory.
# The key and the values of secret_env are not in this file.
"""


class Bundle(msgspec.Struct, frozen=True):
    """The resources that Ray reserves on one host for a process. Memory is in bytes."""

    process: str
    resources: dict[str, float]
    labels: dict[str, str]


class RayHost(msgspec.Struct, frozen=True):
    """A live node of a Ray cluster."""

    node_id: str
    address: str
    resources: dict[str, float]
    labels: dict[str, str]


class RayOrders(msgspec.Struct, frozen=True):
    """The orders of a cluster's actors. Only Ray's control store keeps them: they hold secrets."""

    token: str  # unlike that of any other deployment
    processes: tuple[ProcessSpec, ...]
    key: str  # the content of the key file
    logs: str  # folder; empty keeps what a process prints in its private folder
    loopback: str = ""  # the address of all processes, if they need not leave one host


def namespace_of(name: str) -> str:
    """Return the Ray namespace of a cluster's actors."""
    return f"baton-{name}"


def router_variable(index: int) -> str:
    return f"$(ROUTER_{index}_ADDRESS)"


def places_of(description: Description, loopback: str = "") -> ProcessPlaces:
    """Return the places of processes: hosts that Ray chooses, or `loopback` for all.

    Raises `ConfigError` if the description asks for something that Ray cannot do.
    """
    for problem in _problems(description):
        raise ConfigError(problem)
    key = KEY_FILE if description.key else ""
    indices = range(len(description.routers))
    routers = tuple(loopback or router_variable(index) for index in indices)
    own = loopback or OWN_ADDRESS
    return ProcessPlaces(routers, own, listen=own, key=key)


def bundle_of(spec: ProcessSpec) -> Bundle:
    """Return the bundle of a process, which has one CPU unless the description gives a number."""
    resources = {"CPU": float(spec.cpus or 1)}
    if spec.gpus:
        resources["GPU"] = float(spec.gpus)
    if spec.memory_mib:
        resources["memory"] = float(spec.memory_mib << 20)
    resources |= {name: float(amount) for name, amount in spec.resources.items()}
    return Bundle(spec.name, resources, spec.node_selector)


def bundles_of(plan: ClusterPlan) -> tuple[Bundle, ...]:
    return tuple(map(bundle_of, plan.processes))


def total(amounts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sum of each resource."""
    sums: dict[str, float] = {}
    for one in amounts:
        for name, amount in one.items():
            sums[name] = sums.get(name, 0.0) + amount
    return sums


def shortage(bundles: Sequence[Bundle], hosts: Sequence[RayHost]) -> str:
    """Return what the hosts lack even without other work; empty if they lack nothing."""
    asked, present = total(one.resources for one in bundles), total(one.resources for one in hosts)
    for name, amount in asked.items():
        if present.get(name, 0.0) < amount:
            return (
                f"the cluster needs {text_of(name, amount)}, and all hosts of Ray together have "
                f"{text_of(name, present.get(name, 0.0))}"
            )
    for bundle in bundles:
        if not any(_fits(bundle, host) for host in hosts):
            needs = ", ".join(text_of(name, amount) for name, amount in bundle.resources.items())
            labels = ", ".join(f"{name}={value}" for name, value in bundle.labels.items())
            where = f" with the labels {labels}" if labels else ""
            return f"{bundle.process} needs a host{where} that has {needs}, and Ray has none"
    return ""


def text_of(resource: str, amount: float) -> str:
    if resource == "memory":
        return f"{amount / (1 << 20):.0f} MiB of memory"
    return f"{amount:g} {resource}"


def at_its_place(
    orders: RayOrders, process: str, addresses: Sequence[str], key_file: str = KEY_FILE
) -> tuple[ProcessSpec, ...]:
    """Return the processes of the host of `process`, this one first, as they run there.

    `addresses` holds Ray's host of every process of the orders, in order.
    """
    if orders.loopback:
        addresses = [orders.loopback] * len(orders.processes)
    hosts = {spec.name: host for spec, host in zip(orders.processes, addresses, strict=True)}
    host = hosts[process]
    values = {OWN_ADDRESS: host, KEY_FILE: key_file}
    values |= {
        router_variable(spec.index): hosts[spec.name]
        for spec in orders.processes
        if spec.pool == ROUTERS
    }
    on_host: Counter[str] = Counter()
    placed = []
    for spec in orders.processes:
        if hosts[spec.name] == host:
            placed.append(filled(spec, host, on_host[spec.pool], values))
            on_host[spec.pool] += 1
    return tuple(sorted(placed, key=lambda spec: spec.name != process))


def text_of_layout(plan: ClusterPlan) -> str:
    """Return the request to Ray as YAML, without secrets."""
    actors = [
        {
            "name": spec.name,
            "bundle": index,
            "lifetime": "detached",
            "max_restarts": RESTARTS,
            "command": list(spec.argv),
            "env": spec.env,
            "secret_env": list(spec.secret_env),
        }
        for index, spec in enumerate(plan.processes)
    ]
    bundles = bundles_of(plan)
    content = {
        "namespace": namespace_of(plan.description.name),
        "placement_group": {
            "strategy": STRATEGY,
            "bundles": [one.resources for one in bundles],
            "bundle_label_selector": [one.labels for one in bundles],
        },
        "actors": actors,
    }
    return HEADER + yaml.safe_dump(content, sort_keys=False, width=100)


def _problems(description: Description) -> Iterable[str]:
    named = [f"routers[{i}].host" for i, one in enumerate(description.routers) if one.host]
    named += [f"pools.{name}.hosts" for name, pool in description.pools.items() if pool.hosts]
    for at in named:
        yield (
            f"{at}: Ray chooses the hosts; take the line out, and give node_selector labels of "
            "Ray's nodes to restrict its choice"
        )
    for name, pool in description.pools.items():
        for resource, amount in pool.resources.items():
            at = f"pools.{name}.resources.{resource}"
            if resource in OWN_RESOURCES:
                yield f"{at}: write {OWN_RESOURCES[resource]} of the pool instead"
            elif not _is_amount(amount):
                yield f"{at}: {amount} must be the number above 0 that each node needs"


def _is_amount(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False


def _fits(bundle: Bundle, host: RayHost) -> bool:
    return all(
        host.resources.get(name, 0.0) >= amount for name, amount in bundle.resources.items()
    ) and all(
        # Ray's selectors can be expressions, such as `!in(a,b)`, which Ray alone understands.
        not text.replace("-", "").replace("_", "").replace(".", "").isalnum()
        or host.labels.get(name) == text
        for name, text in bundle.labels.items()
    )
