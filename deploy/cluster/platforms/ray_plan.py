"""What a description comes to on Ray: the addresses of processes, and what Ray is asked for."""

from baton.deploy.cluster.description import Description
from baton.deploy.cluster.processes import (
    ROUTERS,
    ClusterAddresses,
    ClusterPlan,
    ProcessSpec,
    filled,
)
from baton.protocol.errors import ConfigError

DRIVER_ADDRESS = "$(DRIVER_ADDRESS)"
OWN_ADDRESS = "$(OWN_ADDRESS)"
KEY_FILE = "$(KEY_FILE)"


def addresses_of(description: Description) -> ClusterAddresses:
    """Return the places of processes. Raises `ConfigError` if the description names hosts."""
    description.check_no_hosts(
        "Ray chooses the hosts; take the line out, and give node_selector labels of Ray's nodes to "
        "restrict its choice"
    )
    routers = (DRIVER_ADDRESS,) * len(description.routers)
    key = KEY_FILE if description.key else ""
    return ClusterAddresses(routers, OWN_ADDRESS, listen=OWN_ADDRESS, key=key)


def routers_at(host: str, plan: ClusterPlan) -> ClusterPlan:
    """Return the routers of a plan as they run beside the driver on `host`."""
    key = plan.description.key
    routers = [at_its_place(spec, host, host, key) for spec in plan.pool(ROUTERS)]
    return ClusterPlan(plan.description, tuple(routers))


def at_its_place(spec: ProcessSpec, driver: str, host: str, key: str) -> ProcessSpec:
    """Return a process as it runs on `host`, with the path of the cluster's key there.

    Fixed ports count up through the pool, because Ray may put any of its nodes on one host.
    """
    return filled(
        spec,
        host,
        spec.index,
        {DRIVER_ADDRESS: driver, OWN_ADDRESS: host, KEY_FILE: key},
    )


def resources_of(spec: ProcessSpec) -> dict[str, float]:
    """Return what Ray reserves for a node: one CPU unless the description gives a number."""
    amounts = {"CPU": spec.cpus or 1, "GPU": spec.gpus, "memory": spec.memory_mib << 20}
    try:
        custom = {name: float(amount) for name, amount in spec.resources.items()}
    except ValueError as error:
        raise ConfigError(
            f"pools.{spec.pool}.resources: give numbers: {error}"
        ) from error
    return {name: float(amount) for name, amount in amounts.items() if amount} | custom
