"""Find the hosts of a description that are this machine, and check what their processes need."""

import socket
from collections.abc import Sequence

import msgspec
import psutil

from baton.deploy.cluster.description import Description
from baton.deploy.cluster.processes import ClusterAddresses, ClusterPlan, ProcessSpec
from baton.deploy.cluster.reading import is_loopback
from baton.deploy.model_folder import with_model
from baton.deploy.startup import check_port
from baton.protocol.config import ClusterConfig, EngineConfig
from baton.protocol.errors import ConfigError
from baton.runtime.host import VISIBLE_GPUS, gpus_of, threads_per_rank

HERE = "127.0.0.1"
THREADS = "engine.threads"


def addresses_by_name(description: Description) -> ClusterAddresses:
    """Return the places of processes: the hosts in the description, or else this machine."""
    routers = tuple(router.host or HERE for router in description.routers)
    return ClusterAddresses(routers, HERE, host=HERE)


def chosen(plan: ClusterPlan, hosts: Sequence[str]) -> tuple[ProcessSpec, ...]:
    """Return the processes of `hosts`, or of this machine. Raises `ConfigError` without any."""
    known = dict.fromkeys(spec.host for spec in plan.processes)
    for host in hosts:
        if host not in known:
            raise ConfigError(
                f"--host {host}: the description has no such host; it has {', '.join(known)}"
            )
    wanted = hosts or [host for host in known if is_here(host)]
    if not wanted:
        raise ConfigError(
            f"none of the description's hosts is this machine ({', '.join(known)}); run this "
            "command on those hosts, or say with --host which of them this machine is"
        )
    return tuple(spec for spec in plan.processes if spec.host in wanted)


def is_here(host: str) -> bool:
    """Return whether an address or a name is one of this machine."""
    if is_loopback(host):
        return True
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    own = {one.address for owned in psutil.net_if_addrs().values() for one in owned}
    return bool(found & {address.partition("%")[0] for address in own})


def check_machine(plan: ClusterPlan, specs: Sequence[ProcessSpec]) -> None:
    """Raise `ConfigError` if this machine lacks a model, a free port or a GPU for `specs`."""
    for spec in specs:
        who = f"{spec.name} on {spec.host}"
        try:
            _check_model(plan.description, needs_weights=spec.role != "router")
            for port in spec.ports:
                hint = f"end what uses it, or change the {port.name} port in the description"
                check_port(bound_address(spec, port.name), port.port, hint)
        except ConfigError as error:
            raise ConfigError(f"{who}: {error.message}") from error
        num_gpus = len(gpus_of(0))
        missing = [number for number in spec.gpu_ids if number >= num_gpus]
        if missing:
            raise ConfigError(
                f"{who}: no GPU is left for it, because it needs GPU number {missing[0]} and this "
                f"host has {num_gpus}; lower gpus or replicas, or name more hosts"
            )


def on_this_machine(
    specs: Sequence[ProcessSpec], shared: str = ""
) -> tuple[ProcessSpec, ...]:
    """Give the processes the GPUs, CPUs and memory that this command may use.

    Nodes that compute on CPUs and set no number of threads share the CPUs. Through the file
    `shared`, they lend each other CPUs that they do not need.
    """
    num_sharing = sum(_shares_cpus(spec) for spec in specs)
    return tuple(
        _with_share(spec, num_sharing, shared)
        if _shares_cpus(spec)
        else _with_visible_gpus(spec)
        for spec in with_shared_memory(specs)
    )


def with_shared_memory(specs: Sequence[ProcessSpec]) -> list[ProcessSpec]:
    """Return the processes of one host, with its memory shared among the nodes on CPUs."""
    on_cpus = [spec for spec in specs if spec.role != "router" and not spec.gpus]
    memory = {"BATON_CACHE_SHARED_BY": str(len(on_cpus))}
    return [
        msgspec.structs.replace(spec, env=memory | spec.env)
        if spec in on_cpus
        else spec
        for spec in specs
    ]


def _shares_cpus(spec: ProcessSpec) -> bool:
    return spec.role != "router" and not spec.gpus and not _set(spec, THREADS)


def _with_visible_gpus(spec: ProcessSpec) -> ProcessSpec:
    """Return the process with GPUs among those that this command may use."""
    names = gpus_of(0)
    if not (names and spec.gpu_ids):
        return spec
    chosen_names = ",".join(names[number] for number in spec.gpu_ids)
    env = {**spec.env, VISIBLE_GPUS: chosen_names}
    return msgspec.structs.replace(spec, env=env)


def _with_share(spec: ProcessSpec, num_nodes: int, shared: str) -> ProcessSpec:
    degree = int(_set(spec, "engine.tensor_parallel_size") or 1)
    threads = threads_per_rank(EngineConfig(tensor_parallel_size=degree), num_nodes)
    env = {**spec.env, "BATON_ENGINE_THREADS": str(threads)}
    if shared and degree == 1:
        env["BATON_ENGINE_SHARED_CPUS"] = shared
    return msgspec.structs.replace(spec, env=env)


def _set(spec: ProcessSpec, setting: str) -> str:
    """Return the value that a command gives to a setting; empty if it gives none."""
    values = [
        word.partition("=")[2] for word in spec.argv if word.startswith(f"{setting}=")
    ]
    return values[-1] if values else ""


def _check_model(description: Description, *, needs_weights: bool) -> None:
    config = ClusterConfig()
    model = msgspec.structs.replace(config.model, path=description.model)
    with_model(
        msgspec.structs.replace(config, model=model), needs_weights=needs_weights
    )


def bound_address(spec: ProcessSpec, port: str) -> str:
    """Return the address that a process binds for a port."""
    return spec.env.get("BATON_ROUTER_HOST", spec.host) if port == "http" else spec.host
