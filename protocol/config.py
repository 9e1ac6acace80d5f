"""The settings of a cluster: one frozen tree, help and units in the annotations.

The command line, `docs/config.md` and the YAML form are generated from these structs. What is
found at run time (block counts, ports, EOS ids) has types of its own and is never written back.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Dtype = Literal["auto", "float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]
TransportChoice = Literal["auto", "shm", "nixl"]
LocalPrefill = Literal["auto", "never", "always"]
LogLevel = Literal["debug", "info", "warning", "error"]

DEFAULT_CONTROL = "tcp://127.0.0.1:5570"  # where a router listens for nodes, and nodes dial


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: Annotated[str, Meta(description="Hugging Face folder; empty takes the demo model")] = ""
    name: Annotated[str, Meta(description="name in the API; empty takes the folder's name")] = ""
    dtype: Annotated[Dtype, Meta(description="weights and KV; auto takes the checkpoint's")] = (
        "auto"
    )
    max_len: Annotated[
        int,
        Meta(ge=0, description="longest sequence; 0 takes the model's", extra={"unit": "tokens"}),
    ] = 0


class CacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    block_size: Annotated[int, Meta(ge=1, description="KV block", extra={"unit": "tokens"})] = 16
    memory_mib: Annotated[
        int, Meta(ge=1, description="KV pool of one node, all ranks", extra={"unit": "MiB"})
    ] = 512
    num_blocks: Annotated[
        int, Meta(ge=0, description="KV pool; 0 derives it from memory", extra={"unit": "blocks"})
    ] = 0
    prefix: Annotated[bool, Meta(description="keep finished blocks for equal prefixes")] = True


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    device: Annotated[Device, Meta(description="auto takes a GPU when there is one")] = "auto"
    tensor_parallel: Annotated[int, Meta(ge=1, description="ranks of one node")] = 1
    threads: Annotated[int, Meta(ge=1, description="CPU compute threads of one rank")] = 1
    workers: Annotated[
        bool, Meta(description="a process per rank even for one rank (always for several)")
    ] = False
    max_num_seqs: Annotated[int, Meta(ge=1, description="sequences in one step")] = 64
    chunk_tokens: Annotated[
        int, Meta(ge=1, description="token budget of one step", extra={"unit": "tokens"})
    ] = 512


class RouterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: Annotated[str, Meta(description="HTTP address")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="HTTP port; 0 picks a free one")] = 8000
    control: Annotated[
        str | None,
        Meta(
            description=f"endpoint that nodes dial, tcp://host:port or ipc://path; unset is a "
            f"private socket for nodes that are started here, else {DEFAULT_CONTROL}"
        ),
    ] = None
    max_queued: Annotated[
        int, Meta(ge=0, description="requests that wait for a node; more get 429")
    ] = 1024
    max_inflight: Annotated[int, Meta(ge=1, description="requests on the nodes at once")] = 1024
    local_prefill: Annotated[
        LocalPrefill, Meta(description="where decode nodes may compute prompts themselves")
    ] = "auto"
    local_prefill_tokens: Annotated[
        int,
        Meta(ge=0, description="auto: prompts up to this stay local", extra={"unit": "tokens"}),
    ] = 32
    max_attempts: Annotated[int, Meta(ge=1, description="tries of a request over node losses")] = 3
    max_body_mib: Annotated[
        int, Meta(ge=1, description="largest request body", extra={"unit": "MiB"})
    ] = 16


class NodeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: Annotated[str, Meta(description="node id; empty makes one from host, role and pid")] = ""
    routers: Annotated[
        tuple[str, ...], Meta(description="control endpoints of the routers to dial")
    ] = (DEFAULT_CONTROL,)
    bind: Annotated[
        str, Meta(description="address that peer nodes dial; tcp://host (free port) or ipc://path")
    ] = "tcp://127.0.0.1"
    start_timeout_s: Annotated[
        float, Meta(gt=0, description="from start to ready", extra={"unit": "s"})
    ] = 120.0


class TransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    transport: Annotated[TransportChoice, Meta(description="auto: shm on one host, else nixl")] = (
        "auto"
    )
    lease_s: Annotated[
        float,
        Meta(gt=0, description="how long unread blocks are held for decode", extra={"unit": "s"}),
    ] = 30.0
    device: Annotated[
        str, Meta(description="network device of nixl, such as mlx5_0:1; empty is loopback only")
    ] = ""


class LogConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    level: Annotated[LogLevel, Meta(description="least severe line that is printed")] = "info"
    json: Annotated[bool, Meta(description="one JSON object a line")] = False
    stats_s: Annotated[
        float, Meta(ge=0, description="a stats line every so often; 0 is off", extra={"unit": "s"})
    ] = 10.0
    prompts: Annotated[bool, Meta(description="log prompts, cut to 200 characters")] = False
    records: Annotated[
        str, Meta(description="folder for step and transfer records of each node; empty is off")
    ] = ""


class KeysConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    file: Annotated[
        str, Meta(description="the cluster's key, one for all hosts, from `baton keygen FILE`")
    ] = ""
    insecure: Annotated[
        bool, Meta(description="reach other hosts without a key: the control network is private")
    ] = False


class ClusterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that can be set, for every process of a cluster."""

    prefill: Annotated[int, Meta(ge=0, description="prefill nodes that `serve` starts")] = 1
    decode: Annotated[int, Meta(ge=1, description="decode nodes that `serve` starts")] = 1
    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    engine: EngineConfig = EngineConfig()
    router: RouterConfig = RouterConfig()
    node: NodeConfig = NodeConfig()
    transfer: TransferConfig = TransferConfig()
    keys: KeysConfig = KeysConfig()
    log: LogConfig = LogConfig()

    @property
    def control(self) -> str:
        """The endpoint of a router that starts no nodes itself."""
        return self.router.control or DEFAULT_CONTROL
