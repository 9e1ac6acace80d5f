"""Read a cluster.yaml into a checked `Description`.

`read_description` refuses what cannot work before anything starts: splits that cannot exchange KV
blocks, addresses and ports that clash, keys that others can read. Every `ConfigError` names the
file, the key and what to do.
"""

import ipaddress
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import msgspec

from baton.deploy.cluster.description import (
    Description,
    Pool,
    Settings,
    parse_description,
)
from baton.protocol.config import ClusterConfig, KeysConfig
from baton.protocol.errors import ConfigError
from baton.protocol.pairing import degrees_problem
from baton.runtime.channels.keys import load_keys
from baton.runtime.fields import with_values
from baton.runtime.host import VISIBLE_GPUS
from baton.runtime.settings import VARIABLE_PREFIX, checked

# Settings that the description decides with keys of its own, and those keys.
DECIDED = {
    "prefill": "pools",
    "decode": "pools",
    "model.path": "model",
    "router.port": "routers[].port",
    "router.uds": "routers[].port",
    "router.control": "routers[].control_port",
    "node.id": "the name of the pool",
    "node.routers": "routers",
    "node.bind": "pools.NAME.hosts and pools.NAME.peer_port",
    "node.http": "pools.NAME.http_port",
    "keys.file": "key",
}
# Sections that the processes of one pool, or one router, may have of their own.
POOL_SECTIONS = ("cache", "engine", "node", "transfer", "log")
ROUTER_SECTIONS = ("router", "log")
# Settings that must be equal in all pools, so that nodes can exchange blocks.
SHARED = ("cache.block_size", "transfer.verify_kv")


def read_description(path: Path, *, shares_hosts: bool = True) -> Description:
    """Return the checked description of a cluster.yaml. Raises `ConfigError`.

    Ports are compared unless each process has an address of its own.
    """
    description = parse_description(path)
    description = msgspec.structs.replace(
        description,
        key=_beside(path, description.key),
        logs=_beside(path, description.logs),
        model=_model_beside(path, description.model),
    )
    problems = _problems(description)
    for problem in chain(problems, _port_problems(description) if shares_hosts else ()):
        raise ConfigError(f"{path}: {problem}")
    try:
        load_keys(KeysConfig(file=description.key))
    except ConfigError as error:
        raise ConfigError(f"{path}: key: {error.message}") from error
    return description


def is_loopback(host: str) -> bool:
    """Return whether only the host itself can reach this address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def config_of(description: Description, own: Settings) -> ClusterConfig:
    """Return the settings of a process: those of all processes, then its `own`."""
    return with_values(ClusterConfig(), {**description.settings, **own})


def tensor_parallel(description: Description, pool: Pool) -> int:
    return (
        pool.gpus or config_of(description, pool.settings).engine.tensor_parallel_size
    )


def placed_hosts(pool: Pool) -> list[str]:
    """Return the host of each node, empty where the platform chooses."""
    return [
        pool.hosts[i % len(pool.hosts)] if pool.hosts else ""
        for i in range(pool.replicas)
    ]


def _problems(description: Description) -> Iterator[str]:
    """Yield problems, the plainest first, each with its key and what to do."""
    yield from _missing(description)
    yield from _settings_problems(description)
    for name, pool in description.pools.items():
        yield from _pool_problems(description, f"pools.{name}", pool)
    yield from _split_problems(description)
    yield from _host_problems(description)


def _missing(description: Description) -> Iterator[str]:
    if not description.routers:
        yield "routers: the list is empty; give one router at least, or leave the key out"
    if not description.pools_of("decode") and not _only_pools(description):
        yield (
            "pools: no pool has `role: decode`, so no node could generate tokens; add one, such as "
            "`decode: {role: decode}`, or write `model: {convert: embed}` under `settings` for "
            "embeddings alone"
        )
    if "router" in description.pools:
        yield "pools.router: this name is that of the routers; give the pool another"


def _only_pools(description: Description) -> bool:
    """Return whether prefill nodes alone are meant to serve embeddings or scores."""
    makes_more = config_of(description, {}).model.convert in ("embed", "classify")
    return makes_more and bool(description.pools_of("prefill"))


def _settings_problems(description: Description) -> Iterator[str]:
    blocks: list[tuple[str, Settings, tuple[str, ...] | None]] = [
        ("settings", description.settings, None)
    ]
    blocks += [
        (f"pools.{n}.settings", p.settings, POOL_SECTIONS)
        for n, p in description.pools.items()
    ]
    blocks += [
        (f"routers[{i}].settings", router.settings, ROUTER_SECTIONS)
        for i, router in enumerate(description.routers)
    ]
    for at, settings, sections in blocks:
        for name in settings:
            if name in DECIDED:
                yield f"{at}.{name}: {DECIDED[name]} decides this; take the line out"
            if sections is not None and name.partition(".")[0] not in sections:
                yield f"{at}.{name}: all processes share this setting; write it under `settings`"
    environments = [("env", description.env)]
    environments += [
        (f"pools.{name}.env", pool.env) for name, pool in description.pools.items()
    ]
    environments += [
        (f"routers[{i}].env", one.env) for i, one in enumerate(description.routers)
    ]
    for at, env in environments:
        for name in env:
            if name.startswith(VARIABLE_PREFIX):
                yield f"{at}.{name}: write a setting of baton under `settings`"
    for key in config_of(description, {}).router.api_keys:
        if "," in key:
            yield "settings.router.api_keys: a key must not hold a comma; choose another key"


def _pool_problems(description: Description, at: str, pool: Pool) -> Iterator[str]:
    config = config_of(description, pool.settings)
    if pool.gpus and config.engine.device == "cpu":
        yield f"{at}.gpus is {pool.gpus}, but engine.device is cpu; take one of the two out"
    if not pool.gpus and config.engine.device == "cuda":
        yield f"{at}: engine.device is cuda, but gpus is 0; say how many GPUs each node has"
    if pool.gpus and config.engine.tensor_parallel_size not in (1, pool.gpus):
        yield (
            f"{at}.settings.engine.tensor_parallel_size: "
            f"it is {config.engine.tensor_parallel_size}, but a "
            f"node has {pool.gpus} GPUs (gpus), which is its degree; take the line out"
        )
    if VISIBLE_GPUS in pool.env and pool.gpus:
        yield f"{at}.env.{VISIBLE_GPUS}: the platform sets it; take the line out"


def _split_problems(description: Description) -> Iterator[str]:
    config = config_of(description, {})
    prefill = description.pools_of("prefill")
    decode = description.pools_of("decode")
    try:
        checked(msgspec.structs.replace(config, prefill=len(prefill)))
    except ConfigError as error:
        yield f"pools: {error.message}"
    for name, pool in prefill.items():
        for other, partner in decode.items():
            ours, theirs = (
                tensor_parallel(description, one) for one in (pool, partner)
            )
            if degrees_problem(ours, theirs) is not None:
                yield (
                    f"pools.{name}.gpus is {ours} and pools.{other}.gpus is {theirs}: of the two "
                    "tensor-parallel degrees one must divide the other; change one"
                )
    for setting in SHARED:
        values = {
            name: pool.settings.get(setting, description.settings.get(setting))
            for name, pool in description.pools.items()
        }
        if len(set(values.values())) > 1:
            yield (
                f"pools.{min(values)}.settings.{setting}: it differs among the pools, which then "
                "cannot exchange KV blocks; write it once, under the `settings` of all"
            )


def _host_problems(description: Description) -> Iterator[str]:
    named: dict[str, tuple[str, ...]] = {
        f"routers[{i}].host": (one.host,) for i, one in enumerate(description.routers)
    }
    named |= {
        f"pools.{name}.hosts": pool.hosts for name, pool in description.pools.items()
    }
    empty = [at for at, hosts in named.items() if not any(hosts)]
    if empty and len(empty) < len(named):
        yield (
            f"{empty[0]}: no host is named, but other processes have one; name the hosts of all "
            "routers and pools, or of none"
        )
    is_far = any(
        host and not is_loopback(host) for hosts in named.values() for host in hosts
    )
    for at, hosts in named.items():
        for host in hosts:
            if is_far and is_loopback(host):
                yield f"{at}: other hosts cannot reach a loopback address; name one that they can"
            if host in ("0.0.0.0", "::", "*"):
                yield f"{at}: nodes cannot dial {host}; name the address of one host"


def _port_problems(description: Description) -> Iterator[str]:
    taken: dict[tuple[str, int], str] = {}
    for at, host, port in _ports(description):
        if port > 65535:
            yield f"{at}: the last node of a host would have port {port}; choose a lower port"
        other = taken.setdefault((host, port), at)
        if other != at:
            where = f"host {host}" if host else "one host"
            yield f"{at}: port {port} is that of {other} too, on {where}; choose another"


def _ports(description: Description) -> Iterator[tuple[str, str, int]]:
    """Yield (key, host, port) of everything that listens on a port of its own."""
    for i, router in enumerate(description.routers):
        yield f"routers[{i}].port", router.host, router.port
        yield f"routers[{i}].control_port", router.host, router.control_port
    for name, pool in description.pools.items():
        on_host: Counter[str] = Counter()
        for i, host in enumerate(placed_hosts(pool)):
            for key, port in (
                ("peer_port", pool.peer_port),
                ("http_port", pool.http_port),
            ):
                if port:
                    yield f"pools.{name}.{key} (node {i})", host, port + on_host[host]
            on_host[host] += 1


def _beside(path: Path, name: str) -> str:
    return str(path.absolute().parent / Path(name).expanduser()) if name else ""


def _model_beside(path: Path, name: str) -> str:
    """Return the folder beside the file, or else `name`, which may be a model of the hub."""
    is_folder = name.startswith((".", "~")) or (
        bool(name) and (path.parent / name).is_dir()
    )
    return _beside(path, name) if is_folder else name
