"""The settings of a cluster: one frozen tree, with help and units in the annotations.

The command line, `docs/config.md` and the YAML form are generated from these structs. Values that
are found at run time (block counts, ports, EOS ids) have types of their own and are never written
back.
"""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton.protocol.bounds import MAX_BLOCKS
from baton.protocol.setting import about

Dtype = Literal["auto", "float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]
KernelChoice = Literal["auto", "compiled", "torch"]
TransportChoice = Literal["auto", "shm", "cuda_ipc", "nixl"]
LocalPrefill = Literal["auto", "never", "always"]
Routing = Literal["cache-aware", "least-loaded"]
LogLevel = Literal["debug", "info", "warning", "error"]

DEFAULT_CONTROL = "tcp://127.0.0.1:5570"  # where a router listens for nodes, and nodes dial


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: Annotated[
        str,
        about(
            "folder of the model, or its name on the Hugging Face hub; empty is the demo model",
            kind="path",
        ),
    ] = ""
    name: Annotated[str, about("name of the model in the API; empty takes the folder's name")] = ""
    chat_template: Annotated[
        str, about("file with a chat template that takes the place of the model's own", kind="path")
    ] = ""
    generation_config: Annotated[
        Literal["auto", "none"],
        about(
            "sampling defaults of HTTP requests: auto takes those of the model's "
            "generation_config.json, none takes those of the API"
        ),
    ] = "auto"
    dtype: Annotated[Dtype, about("type of weights and KV blocks; auto takes the checkpoint's")] = (
        "auto"
    )
    max_len: Annotated[
        int, about("longest sequence, prompt and output; 0 takes the model's limit", "tokens", ge=0)
    ] = 0

    @property
    def shown_name(self) -> str:
        """Return the name of the model in the API and in metrics."""
        return self.name or Path(self.path).resolve().name


class CacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    block_size: Annotated[int, about("size of a KV block", "tokens", ge=1)] = 16
    memory_mib: Annotated[
        int,
        about(
            "memory for the KV pool of one node, all ranks together; 0 takes a quarter of the free "
            "memory of the host, at most what the sequences of one step can fill, or nine tenths "
            "of what weights and steps leave of a GPU",
            "MiB",
            ge=0,
        ),
    ] = 0
    shared_by: Annotated[
        int,
        about(
            "number of nodes on this host that share its memory for their pools; `serve` "
            "sets it for the nodes that it starts",
            ge=1,
        ),
    ] = 1
    gpu_shared_by: Annotated[
        int,
        about(
            "number of nodes that share this node's GPU and its memory; `serve` sets "
            "it for the nodes that it starts",
            ge=1,
        ),
    ] = 1
    num_blocks: Annotated[
        int,
        about("size of the KV pool; 0 takes what fits memory_mib", "blocks", ge=0, le=MAX_BLOCKS),
    ] = 0
    prefix: Annotated[bool, about("keep finished blocks for prompts with the same prefix")] = True


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    device: Annotated[Device, about("device to compute on; auto takes a GPU when there is one")] = (
        "auto"
    )
    tensor_parallel: Annotated[
        int, about("number of ranks over which one node splits the model", ge=1)
    ] = 1
    shared_cpus: Annotated[
        str,
        about(
            "file in which the nodes of one host note when they compute, so that a node can "
            "take the CPUs of idle ones; `serve` sets it for its nodes",
            kind="path",
        ),
    ] = ""
    threads: Annotated[
        int,
        about(
            "number of CPU threads that compute one rank; 0 divides the CPUs of this process "
            "among the nodes that one command starts and their ranks",
            ge=0,
        ),
    ] = 0
    kernels: Annotated[
        KernelChoice,
        about(
            "kernels on CPUs: compiled kernels, plain torch, or auto, which compiles them "
            "where it can"
        ),
    ] = "auto"
    deterministic: Annotated[
        bool,
        about(
            "on GPUs, compute the same bits for a token in every batch, which is slower; CPUs "
            "always do"
        ),
    ] = False
    graphs: Annotated[
        bool,
        about("replay decode steps as CUDA graphs, which take some memory; CPUs have none"),
    ] = True
    max_num_seqs: Annotated[
        int, about("most sequences in one step; 0 takes 64 on CPUs and 256 on GPUs", ge=0)
    ] = 0
    chunk_tokens: Annotated[
        int,
        about(
            "most tokens that one step computes; 0 takes 512 on CPUs and 2048 on GPUs",
            "tokens",
            ge=0,
        ),
    ] = 0


class RouterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: Annotated[str, about("address that the HTTP server binds")] = "127.0.0.1"
    port: Annotated[int, about("port of the HTTP server; 0 picks a free one", ge=0, le=65535)] = (
        8000
    )
    shares_port: Annotated[
        bool,
        about("let other routers of this user listen on the port too; each gets some connections"),
    ] = False
    own_port: Annotated[
        int,
        about(
            "another port for this router alone, for metrics where several routers share a "
            "port; 0 opens none; `serve` gives each of its routers the next port",
            ge=0,
            le=65535,
        ),
    ] = 0
    name: Annotated[
        str,
        Meta(
            max_length=128,
            pattern="^[!-.0-~]+$",  # ASCII without spaces and slashes, as the ids of nodes
            description="name of this router in /health, /metrics and the log",
        ),
    ] = "router"
    control: Annotated[
        str | None,
        about(
            "endpoint that nodes dial, as tcp://host:port or ipc://path; unset is a private "
            f"socket for nodes that are started here, else {DEFAULT_CONTROL}"
        ),
    ] = None
    max_queued: Annotated[
        int, about("most requests that wait for a node; further ones get 429", ge=0)
    ] = 1024
    max_queued_s: Annotated[
        float, about("longest wait of a request for a node; then it gets 503", "s", gt=0)
    ] = 30.0
    max_inflight: Annotated[int, about("most requests that the nodes work on at once", ge=1)] = 1024
    routing: Annotated[
        Routing,
        about(
            "how nodes are chosen: by their load and by what their prefix caches hold, or by "
            "their load alone"
        ),
    ] = "cache-aware"
    local_prefill: Annotated[
        LocalPrefill,
        about(
            "which prompts decode nodes compute themselves: those with few new tokens, none, or all"
        ),
    ] = "auto"
    local_prefill_tokens: Annotated[
        int,
        about(
            "most tokens of a prompt that a decode node computes itself under auto, because it "
            "has not cached them",
            "tokens",
            ge=0,
        ),
    ] = 32
    drain_s: Annotated[
        float,
        about("longest time in which a router that gets SIGTERM finishes its requests", "s", ge=0),
    ] = 30.0
    max_attempts: Annotated[
        int, about("most attempts in a row that bring a request no token; then it fails", ge=1)
    ] = 3
    max_body_mib: Annotated[
        int,
        about(
            "largest body of an HTTP request; the limit is lower if the model's longest prompt "
            "needs less",
            "MiB",
            ge=1,
        ),
    ] = 16
    max_connections: Annotated[
        int,
        about(
            "most open connections of clients; the limit is lower if the process may open few "
            "files",
            ge=1,
        ),
    ] = 16384
    idle_s: Annotated[
        float,
        about("how long a connection may stay open without a whole request on it", "s", gt=0),
    ] = 75.0
    unread_s: Annotated[
        float, about("how long a client may leave its answer unread until it is cut off", "s", gt=0)
    ] = 30.0
    api_keys: Annotated[
        tuple[str, ...],
        about(
            "keys, one of which a client must send; without keys every client is let in; use "
            "the flag for a key with a comma",
            kind="repeated",
        ),
    ] = ()
    api_key_file: Annotated[
        str,
        about(
            "file with the hashes of further keys, made by `baton api-key`; it is read again when "
            "it changes",
            kind="path",
        ),
    ] = ""
    tls_cert: Annotated[
        str,
        about(
            "PEM file with the router's certificate chain, which is read again when it "
            "changes; the router then speaks only https; empty speaks http",
            kind="path",
        ),
    ] = ""
    tls_key: Annotated[
        str,
        about(
            "PEM file with the private key of the certificate, without a password; empty takes it "
            "from the file of router.tls_cert",
            kind="path",
        ),
    ] = ""
    page: Annotated[
        bool,
        about(
            "serve a status page at / and its data at /status.json; the data needs a key if "
            "the router has keys"
        ),
    ] = True
    otlp_traces: Annotated[
        str,
        about(
            "URL to which traces of requests are sent, such as http://host:4318/v1/traces; "
            "empty sends none; it needs the extra otel"
        ),
    ] = ""
    allowed_origins: Annotated[
        tuple[str, ...],
        about(
            "origins of web pages that may call this router from a browser (CORS), such as "
            "https://chat.example.com, or * for all; without any, only the router's own pages "
            "may"
        ),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        about(
            "host names that requests may name in the header Host; without any, all names are "
            "allowed"
        ),
    ] = ()

    @property
    def wants_key(self) -> bool:
        return bool(self.api_keys or self.api_key_file)

    @property
    def speaks_tls(self) -> bool:
        return bool(self.tls_cert)


class NodeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: Annotated[
        str,
        Meta(
            max_length=128,  # with an epoch and a nonce it must fit the 255 bytes of an identity
            pattern="^[!-.0-~]*$",  # ASCII without spaces and slashes: it names files too
            description="id of the node; empty makes one from host, role and pid",
        ),
    ] = ""
    routers: Annotated[
        tuple[str, ...],
        about(
            "control endpoints of the routers that the node dials; file:///path names a file that "
            "holds one and is read again when it changes"
        ),
    ] = (DEFAULT_CONTROL,)
    bind: Annotated[
        str, about("address that peer nodes dial, as tcp://host (a free port) or ipc://path")
    ] = "tcp://127.0.0.1"
    drain_s: Annotated[
        float,
        about("longest time in which a node that is told to end finishes its sequences", "s", ge=0),
    ] = 30.0
    http: Annotated[
        str,
        about(
            "host:port on which the node serves /live, /ready and /metrics; port 0 picks a "
            "free one, and empty serves none; nodes that are started together count up from "
            "the port"
        ),
    ] = ""
    detached_s: Annotated[
        float,
        about(
            "how long a stream whose router is gone is kept for a client that comes back; 0 "
            "keeps no stream",
            "s",
            ge=0,
        ),
    ] = 30.0
    start_timeout_s: Annotated[
        float, about("longest time from start to ready; then the node exits", "s", gt=0)
    ] = 120.0


class TransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    transport: Annotated[
        TransportChoice,
        about(
            "how blocks are read; auto takes shm on one host, cuda_ipc between GPUs of one host, "
            "and nixl between hosts"
        ),
    ] = "auto"
    lease_s: Annotated[
        float, about("how long prefill holds unread blocks when decode does not renew", "s", gt=0)
    ] = 30.0
    verify_kv: Annotated[
        bool,
        about(
            "check a checksum of every KV block that is read; set it to the same value on all nodes"
        ),
    ] = False
    device: Annotated[
        str,
        about(
            "network devices that nixl uses, such as mlx5_0:1,eth0; empty takes the RDMA ports "
            "and the interface that leads to the other nodes or the routers"
        ),
    ] = ""


class LogConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    level: Annotated[LogLevel, about("least severe level that is logged")] = "info"
    json: Annotated[bool, about("log one JSON object per line")] = False
    access: Annotated[bool, about("log a line for every HTTP request that was answered")] = False
    stats_s: Annotated[float, about("interval of the stats line; 0 turns it off", "s", ge=0)] = 10.0
    prompts: Annotated[bool, about("log prompts, cut to 200 characters")] = False
    records: Annotated[
        str,
        about(
            "folder for each node's records of steps and transfers; empty turns them off",
            kind="path",
        ),
    ] = ""


class KeysConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    file: Annotated[
        str,
        about(
            "file with the cluster's key, the same on all hosts, made by `baton keygen FILE`; "
            "it is read again when it changes; of several keys in it, the first one counts"
        ),
    ] = ""
    insecure: Annotated[
        bool,
        about(
            "talk to other hosts without a key; use it only where the control network is private"
        ),
    ] = False


class ClusterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of all processes of a cluster."""

    prefill: Annotated[int, about("number of prefill nodes that `serve` starts", ge=0)] = 1
    decode: Annotated[int, about("number of decode nodes that `serve` starts", ge=1)] = 1
    router_processes: Annotated[
        int, about("number of router processes that `serve` starts; they share the port", ge=1)
    ] = 1
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
        """Return the endpoint of a router that starts no nodes itself."""
        return self.router.control or DEFAULT_CONTROL
