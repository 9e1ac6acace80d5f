"""The processes of a cluster: their commands, hosts and resources, and how to probe and end them.

`processes_of` is the one place that states commands; every platform runs what it returns. All
processes of a pool have the same `argv`. Their addresses and ids are in `env`, so that one systemd
template, StatefulSet or srun step can serve a pool. Slurm and Ray choose the machines, so their
plans hold variables for what only the machine of a process knows; `filled` replaces them there.
"""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Literal

import msgspec

from baton.deploy.cluster.description import Description, Pool, RouterSpec, Settings
from baton.deploy.cluster.reading import (
    config_of,
    is_loopback,
    placed_hosts,
    tensor_parallel,
)
from baton.protocol.errors import ConfigError
from baton.protocol.messages import Role
from baton.runtime.channels.endpoint import bracketed
from baton.runtime.host import VISIBLE_GPUS

ProcessRole = Role | Literal["router"]

ROUTERS = "router"  # the name of the routers, as if they were a pool
# The time from SIGTERM to a forced end, beyond the time in which requests may finish.
EXTRA_GRACE_S = 10.0

# The variable of a node for each of its ports.
_PORT_VARIABLES = {"peers": "BATON_NODE_BIND", "http": "BATON_NODE_HTTP"}
# Such as HF_TOKEN, AWS_SECRET_ACCESS_KEY and OTEL_EXPORTER_OTLP_HEADERS.
_LOOKS_SECRET = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|ACCESS_KEY|PRIVATE_KEY|_HEADERS)$",
    re.I,
)


class ClusterAddresses(msgspec.Struct, frozen=True):
    """What a platform knows about the machines, as text that is put into commands unchanged.

    An address that is known only where the process runs may be a variable that the platform fills
    in, such as `$(POD_IP)`.
    """

    routers: tuple[str, ...]  # the address of each router, which nodes and clients dial
    node: str  # the address of a node without a host of its own, which other nodes dial
    # What routers, and the HTTP of nodes, bind; empty is what is dialled.
    listen: str = ""
    host: str = ""  # the host of every process without one; empty: the platform chooses
    # Where the described key file lies there; empty is where the description says.
    key: str = ""


class NamedPort(msgspec.Struct, frozen=True):
    name: Literal["http", "control", "peers"]
    port: int


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One process. `name` is also the id of a node."""

    name: str
    role: ProcessRole
    pool: str
    index: int  # in its pool
    argv: tuple[str, ...]  # `baton ROLE ...`
    env: dict[str, str]
    # A platform writes these only where other users cannot read.
    secret_env: dict[str, str]
    host: str  # empty where the platform chooses
    ports: tuple[NamedPort, ...]
    grace_s: float  # from SIGTERM to a forced end
    gpus: int = 0
    gpu_ids: tuple[int, ...] = ()  # on its host; empty where the platform chooses
    cpus: int = 0
    memory_mib: int = 0
    node_selector: dict[str, str] = {}
    resources: dict[str, str] = {}
    is_tls: bool = False  # whether its HTTP is https


class ClusterPlan(msgspec.Struct, frozen=True):
    """A description and the processes that it comes to on one platform."""

    description: Description
    processes: tuple[ProcessSpec, ...]

    def pool(self, name: str) -> tuple[ProcessSpec, ...]:
        return tuple(process for process in self.processes if process.pool == name)

    @property
    def start_timeout_s(self) -> float:
        """Return the longest time from the start of a node until it is ready."""
        pools = self.description.pools.values()
        return max(
            config_of(self.description, p.settings).node.start_timeout_s for p in pools
        )


def plan_of(description: Description, addresses: ClusterAddresses) -> ClusterPlan:
    """Return the plan. Raises `ConfigError` if processes would reach other hosts without a key."""
    keys = config_of(description, {}).keys
    if not (
        description.key or keys.insecure or all(map(is_loopback, addresses.routers))
    ):
        raise ConfigError(
            "key: processes on several hosts need a key; make one with `baton keygen cluster.key` "
            "and write `key: cluster.key` into the description"
        )
    return ClusterPlan(description, processes_of(description, addresses))


def processes_of(
    description: Description, addresses: ClusterAddresses
) -> tuple[ProcessSpec, ...]:
    """Return every process: the routers, then the nodes pool by pool."""
    assert len(addresses.routers) == len(description.routers)
    processes = [
        _router(description, addresses, index, router)
        for index, router in enumerate(description.routers)
    ]
    gpus_taken: Counter[str] = Counter()
    for name, pool in description.pools.items():
        on_host: Counter[str] = Counter()
        for index, named in enumerate(placed_hosts(pool)):
            host = named or addresses.host
            nth = on_host[host]
            first_gpu = gpus_taken[host]
            processes.append(
                _node(description, addresses, name, index, nth=nth, first_gpu=first_gpu)
            )
            on_host[host] += bool(host)
            gpus_taken[host] += pool.gpus
    return tuple(processes)


def _router(
    description: Description,
    addresses: ClusterAddresses,
    index: int,
    router: RouterSpec,
) -> ProcessSpec:
    settings = {**_common(description, addresses), **router.settings}
    listen = addresses.listen or addresses.routers[index]
    env = {
        **description.env,
        **router.env,
        "BATON_ROUTER_PORT": str(router.port),
        "BATON_ROUTER_CONTROL": f"tcp://{bracketed(listen)}:{router.control_port}",
    }
    if "router.host" not in settings:
        env["BATON_ROUTER_HOST"] = listen
    env, secret_env = _split(description, env)
    api_keys = settings.pop("router.api_keys", ())
    assert isinstance(api_keys, tuple)
    if api_keys:
        secret_env["BATON_ROUTER_API_KEYS"] = ",".join(api_keys)
    return ProcessSpec(
        name=f"{ROUTERS}-{index}",
        role="router",
        pool=ROUTERS,
        index=index,
        argv=_argv("router", settings),
        env=env,
        secret_env=secret_env,
        host=router.host or addresses.host,
        ports=(
            NamedPort("http", router.port),
            NamedPort("control", router.control_port),
        ),
        grace_s=config_of(description, router.settings).router.shutdown_timeout_s
        + EXTRA_GRACE_S,
        is_tls=config_of(description, router.settings).router.speaks_tls,
    )


def _node(
    description: Description,
    addresses: ClusterAddresses,
    pool_name: str,
    index: int,
    *,
    nth: int,
    first_gpu: int,
) -> ProcessSpec:
    """Return node `index` of a pool, the `nth` of the pool on its host."""
    pool = description.pools[pool_name]
    named = placed_hosts(pool)[index]
    name = f"{pool_name}-{index}"
    host = named or addresses.host
    address = named or addresses.node
    config = config_of(description, pool.settings)
    port = pool.peer_port + nth if pool.peer_port else 0
    routers = [
        f"tcp://{bracketed(address)}:{router.control_port}"
        for address, router in zip(addresses.routers, description.routers, strict=True)
    ]
    env = {
        **description.env,
        **pool.env,
        "BATON_NODE_ID": name,
        "BATON_NODE_ROUTERS": ",".join(routers),
        "BATON_NODE_BIND": f"tcp://{bracketed(address)}" + (f":{port}" if port else ""),
    }
    http = pool.http_port + nth if pool.http_port else 0
    if http:
        env["BATON_NODE_HTTP"] = f"{bracketed(addresses.listen or address)}:{http}"
    gpu_ids = tuple(range(first_gpu, first_gpu + pool.gpus)) if host else ()
    if gpu_ids:
        env[VISIBLE_GPUS] = ",".join(map(str, gpu_ids))
    env, secret_env = _split(description, env)
    settings = {
        **_common(description, addresses),
        **_computing(description, pool),
        **pool.settings,
    }
    return ProcessSpec(
        name=name,
        role=pool.role,
        pool=pool_name,
        index=index,
        argv=_argv(
            pool.role,
            {k: v for k, v in settings.items() if not k.startswith("router.")},
        ),
        env=env,
        secret_env=secret_env,
        host=host,
        gpus=pool.gpus,
        gpu_ids=gpu_ids,
        cpus=pool.cpus,
        memory_mib=pool.memory_mib,
        node_selector=pool.node_selector,
        resources=pool.resources,
        ports=(
            *([NamedPort("peers", port)] if port else []),
            *([NamedPort("http", http)] if http else []),
        ),
        grace_s=config.node.shutdown_timeout_s + EXTRA_GRACE_S,
    )


def filled(
    spec: ProcessSpec, host: str, nth: int, values: Mapping[str, str]
) -> ProcessSpec:
    """Return `spec` as it runs on `host`, as the `nth` node of its pool there.

    `values` holds the text of each variable. `nth` is added to fixed ports of a node.
    """
    env = {name: _with_values(text, values) for name, text in spec.env.items()}
    if spec.role != "router":
        for port in spec.ports:
            name = _PORT_VARIABLES[port.name]
            env[name] = f"{env[name].removesuffix(str(port.port))}{port.port + nth}"
    argv = tuple(_with_values(word, values) for word in spec.argv)
    return msgspec.structs.replace(spec, argv=argv, env=env, host=host)


def _with_values(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(name, value)
    return text


def _split(
    description: Description, env: dict[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the public variables, and those that the description or their names mark as secret."""
    hidden = {
        name: text
        for name, text in env.items()
        if name in description.secrets or _LOOKS_SECRET.search(name)
    }
    return {name: text for name, text in env.items() if name not in hidden}, hidden


def _common(description: Description, addresses: ClusterAddresses) -> Settings:
    """Return the settings that all processes share."""
    settings: Settings = {}
    if description.model:
        settings["model.path"] = description.model
    if description.key:
        settings["keys.file"] = addresses.key or description.key
    return settings | description.settings


def _computing(description: Description, pool: Pool) -> Settings:
    """Return the settings that follow from a pool's GPUs and CPUs."""
    settings: Settings = {"engine.device": "cuda" if pool.gpus else "cpu"}
    degree = tensor_parallel(description, pool)
    if degree > 1:
        settings["engine.tensor_parallel_size"] = degree
    if pool.cpus and not pool.gpus:
        settings["engine.threads"] = max(1, pool.cpus // degree)
    return settings


def _argv(role: ProcessRole, settings: Settings) -> tuple[str, ...]:
    words = ["baton", role]
    for name, value in settings.items():
        if value is not None:
            words += ["--set", f"{name}={_text_of(value)}"]
    return tuple(words)


def _text_of(value: object) -> str:
    """Return a setting's value as `--set` takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value)
