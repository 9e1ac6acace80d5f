"""`cluster.yaml`: the description of a cluster, as typed Structs.

`reading` checks that it can work, and `processes` turns it into the list of processes. The blocks
called `settings` hold settings of `protocol.config`, as a file for `--config` does: at the top for
all processes, below a pool or a router for its own.
"""

from collections.abc import Hashable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import yaml
from msgspec import Meta

from baton.protocol.errors import ConfigError
from baton.protocol.messages import Role
from baton.runtime.fields import in_words
from baton.runtime.settings import values_of

# Settings of `protocol.config` by their dotted names, each one checked.
Settings = dict[str, object]

Name = Annotated[
    str,
    Meta(
        pattern=r"^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$",
        description="at most 40 lower-case letters, digits and dashes, the first one a letter",
    ),
]
Port = Annotated[int, Meta(ge=1, le=65535)]
PortOrFree = Annotated[int, Meta(ge=0, le=65535)]
MachineCount = Annotated[int, Meta(ge=0, le=10_000)]
Replicas = Annotated[int, Meta(ge=1, le=10_000)]
Gpus = Annotated[int, Meta(ge=0, le=64)]
SystemdScope = Literal["system", "user"]


class RouterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A router. Clients and nodes reach it at `host`; without one the platform places it."""

    host: str = ""
    port: Port = 8000
    control_port: Port = 5570
    settings: Settings = {}
    env: dict[str, str] = {}


class Pool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nodes of one role with the same settings.

    `gpus` is the number of GPUs of each node and its tensor-parallel degree; 0 computes on CPUs.
    `hosts` are addresses that take the nodes in turn; without them the platform places the nodes.
    The nodes of a host listen on `peer_port` and the ports after it; 0 takes free ones. They serve
    their metrics on `http_port` and the ports after it; 0 serves none, or 8000 on Kubernetes, which
    alone reads `max_replicas` and what follows it.
    """

    role: Role
    replicas: Replicas = 1
    gpus: Gpus = 0
    hosts: tuple[str, ...] = ()
    peer_port: PortOrFree = 0
    http_port: PortOrFree = 0
    cpus: MachineCount = 0  # of each node; 0 sets no limit
    memory_mib: Annotated[int, Meta(ge=0)] = 0  # of each node; 0 sets no limit
    # Labels or features that a node's machine must have.
    node_selector: dict[str, str] = {}
    # Further ones of the platform, such as rdma/hca: "1".
    resources: dict[str, str] = {}
    max_replicas: MachineCount = 0  # to which the pool is scaled; 0 never changes it
    pod: dict[str, object] = {}
    annotations: dict[str, str] = {}
    settings: Settings = {}
    env: dict[str, str] = {}


class SystemdOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options that only `--on systemd` reads."""

    scope: SystemdScope = "system"
    user: str = "baton"  # the user that runs the processes of system units
    # Path of `baton` on the hosts; empty takes that of this environment.
    program: str = ""


class KubernetesOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options that only `--on kubernetes` and `--on helm` read.

    `pod` has further fields of every pod's specification, such as tolerations, affinity,
    imagePullSecrets, runtimeClassName and serviceAccountName; those of a pool come after them.
    """

    namespace: str = ""  # empty takes the name of the cluster
    image: str = "baton:latest"
    model_claim: str = ""  # the PersistentVolumeClaim that holds the model folder
    # That of downloaded models and compiled kernels; empty keeps none.
    cache_claim: str = ""
    pod: dict[str, object] = {}
    annotations: dict[str, str] = {}  # of every pod
    prometheus: str = ""  # its URL, which KEDA asks when to scale pools
    # An adapter publishes baton's metrics for autoscalers.
    external_metrics: bool = False
    pod_monitor: bool = False  # for the operator of Prometheus


class SlurmOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options that only `--on slurm` reads; empty takes the default of Slurm."""

    partition: str = ""
    account: str = ""
    time: str = ""  # the longest time of the job, as sbatch takes it
    # Further ones of sbatch, for every component of the job.
    arguments: tuple[str, ...] = ()


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole cluster.yaml. Paths in it are relative to the file."""

    name: Name
    pools: dict[Name, Pool]
    model: str = ""  # folder, or name on the Hugging Face hub; empty is the demo model
    key: str = ""  # file of `baton keygen`
    # Folder for the output of the processes; empty keeps it in the state folder.
    logs: str = ""
    gpus_per_host: MachineCount = 0  # with which Slurm packs nodes; 0: a host for each
    routers: tuple[RouterSpec, ...] = (RouterSpec(),)
    settings: Settings = {}
    env: dict[str, str] = {}  # of all processes
    secrets: tuple[str, ...] = ()  # variables whose values are secret, with any name
    systemd: SystemdOptions = SystemdOptions()
    kubernetes: KubernetesOptions = KubernetesOptions()
    slurm: SlurmOptions = SlurmOptions()

    def pools_of(self, role: Role) -> dict[str, Pool]:
        return {name: pool for name, pool in self.pools.items() if pool.role == role}

    def check_no_hosts(self, advice: str) -> None:
        """Raise `ConfigError` if a host is named, for platforms that choose the hosts."""
        named = [f"routers[{i}].host" for i, one in enumerate(self.routers) if one.host]
        named += [
            f"pools.{name}.hosts" for name, pool in self.pools.items() if pool.hosts
        ]
        if named:
            raise ConfigError(f"{named[0]}: {advice}")


def parse_description(path: Path) -> Description:
    """Return the content of a cluster.yaml, whose settings are valid. Raises `ConfigError`."""
    content = read_yaml(path)
    if isinstance(content, dict) and isinstance(content.get("secrets"), dict):
        raise ConfigError(
            f"{path}: secrets is a list of names; write the values below env: "
            "secrets: [HF_TOKEN], env: {HF_TOKEN: …}"
        )
    try:
        found = msgspec.convert(content, Description)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {in_words(str(error))}") from error
    try:
        return msgspec.structs.replace(
            found,
            settings=values_of(found.settings, "settings"),
            pools={
                name: msgspec.structs.replace(
                    pool, settings=values_of(pool.settings, f"pools.{name}.settings")
                )
                for name, pool in found.pools.items()
            },
            routers=tuple(
                msgspec.structs.replace(
                    router,
                    settings=values_of(router.settings, f"routers[{i}].settings"),
                )
                for i, router in enumerate(found.routers)
            ),
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from error


def read_yaml(path: Path) -> object:
    """Return the content of a YAML file. Raises `ConfigError`."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; name the file to read"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not valid YAML: {' '.join(str(error).split())}"
        ) from error


class _UniqueKeys(yaml.SafeLoader):
    """A safe loader that refuses a key that is written twice; plain YAML takes the last one."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, object]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"{key} is written twice{node.start_mark}")
        return super().construct_mapping(node, deep=deep)
