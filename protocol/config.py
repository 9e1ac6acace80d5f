"""The settings of a cluster: one frozen tree, with help and units in the annotations.

The command line, `docs/config.md` and the YAML form are generated from these structs. Values that
are found at run time (block counts, ports, EOS ids) have types of their own and are never written
back.
"""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton.protocol.ids import MAX_BLOCKS


def about(
    description: str,
    unit: str = "",
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    kind: Literal["", "path", "repeated", "switch"] = "",
) -> Meta:
    """Return the annotation of one setting.

    The kind `path` is for a file or a folder, `repeated` for a list whose flag is given once per
    entry, and `switch` for a flag without a value.
    """
    extra: dict[str, object] = {"unit": unit} if unit else {}
    if kind:
        extra["kind"] = kind
    if gt is not None:
        return Meta(description=description, gt=gt, le=le, extra=extra)
    return Meta(description=description, ge=ge, le=le, extra=extra)


Dtype = Literal["auto", "float32", "bfloat16"]
ModelImpl = Literal["auto", "transformers"]
Convert = Literal["auto", "none", "embed", "classify"]
Device = Literal["auto", "cpu", "cuda"]
KVCacheDtype = Literal["auto", "fp8"]
KernelChoice = Literal["auto", "compiled", "torch"]
SchedulingPolicy = Literal["fcfs", "priority"]
SpeculativeMethod = Literal["ngram", "mtp", "eagle3"]
Deterministic = Literal["auto", "true", "false"]
GraphChoice = Literal["all", "prompts", "none"]
TransportChoice = Literal["auto", "shm", "cuda_ipc", "nixl"]
PrefixReads = Literal["off", "equal", "any"]
LocalPrefill = Literal["auto", "never", "always"]
Routing = Literal["cache-aware", "least-loaded"]
ToolCallParser = Literal[
    "auto",
    "none",
    "kimi_k2",
    "deepseek_v32",
    "deepseekv32",
    "deepseek_v3",
    "deepseekv3",
    "deepseek_v31",
    "deepseekv31",
    "minimax_m2",
    "minimax-m2",
    "openai",
    "gpt-oss",
    "qwen3_coder",
    "qwen3_xml",
    "glm45",
    "glm47",
    "glm",
    "phi4_mini_json",
    "granite",
    "nemotron_json",
    "llama_nemotron_json",
    "mistral",
    "cohere_command",
    "command_r",
    "hermes",
    "qwen",
    "qwen25",
    "jamba",
    "pythonic",
    "llama4_pythonic",
    "llama3_json",
    "llama3",
    "llama4_json",
]
ReasoningParser = Literal[
    "auto",
    "none",
    "think",
    "qwen3",
    "deepseek_r1",
    "deepseek-r1",
    "deepseek_v3",
    "deepseek-v3",
    "glm45",
    "glm47",
    "kimi_k2",
    "kimi",
    "minimax_m2",
    "minimax",
    "hunyuan_a13b",
    "qwen3-thinking",
    "step3",
    "mistral",
    "seed_oss",
    "cohere_command",
    "openai_gptoss",
    "gpt-oss",
]
LogLevel = Literal["debug", "info", "warning", "error"]

# Where a router listens for nodes, and where nodes dial.
DEFAULT_CONTROL = "tcp://127.0.0.1:5570"


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: Annotated[
        str,
        about(
            "folder of the model, or its name on the Hugging Face hub; empty takes the demo",
            kind="path",
        ),
    ] = ""
    served_model_name: Annotated[
        str,
        about(
            "names of the model in the API, with commas or one per flag; responses show the first; "
            "empty takes the folder's name",
            kind="repeated",
        ),
    ] = ""
    chat_template: Annotated[
        str,
        about("file with a chat template that replaces the model's own", kind="path"),
    ] = ""
    generation_config: Annotated[
        Literal["auto", "none"],
        about(
            "sampling defaults; auto takes those of generation_config.json, none the API's"
        ),
    ] = "auto"
    dtype: Annotated[
        Dtype,
        about("number type of weights and KV blocks; auto takes the checkpoint's"),
    ] = "auto"
    model_impl: Annotated[
        ModelImpl,
        about(
            "code that computes the model; auto takes baton's own decoder for the families that "
            "it has, and transformers' for all others"
        ),
    ] = "auto"
    convert: Annotated[
        Convert,
        about(
            "what the model returns for whole prompts, besides tokens: auto takes what its folder "
            "says, embed computes embeddings with any model, classify scores by the tokens yes "
            "and no, and none returns nothing"
        ),
    ] = "auto"
    max_model_len: Annotated[
        int,
        about(
            "longest prompt and output together; 0 takes the model's limit",
            "tokens",
            ge=0,
        ),
    ] = 0
    lora_modules: Annotated[
        tuple[str, ...],
        about(
            "LoRA adapters, each as name=folder; a request chooses one by its name as the model"
        ),
    ] = ()
    allow_runtime_lora_updating: Annotated[
        bool,
        about(
            "serve POST /v1/load_lora_adapter and /v1/unload_lora_adapter, which let clients make "
            "all nodes read a folder; set it on routers and nodes"
        ),
    ] = False
    max_loras: Annotated[
        int, about("most adapters that are loaded at run time at once", ge=1, le=1024)
    ] = 4
    max_lora_rank: Annotated[
        int,
        about("greatest rank of an adapter that is loaded at run time", ge=1, le=512),
    ] = 16

    @property
    def served_names(self) -> tuple[str, ...]:
        """Return the names by which clients may ask for the model, at least one."""
        names = [name.strip() for name in self.served_model_name.split(",")]
        return tuple(filter(None, names)) or (Path(self.path).resolve().name,)

    @property
    def shown_name(self) -> str:
        return self.served_names[0]


class CacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    block_size: Annotated[int, about("size of a KV block", "tokens", ge=1)] = 16
    memory_mib: Annotated[
        int,
        about(
            "memory for the KV pool of one node, all ranks together; 0 takes a quarter of the "
            "host's free memory on CPUs (at most what the sequences of one step can fill), and "
            "nine tenths of what weights and steps leave on GPUs",
            "MiB",
            ge=0,
        ),
    ] = 0
    gpu_memory_utilization: Annotated[
        float,
        about(
            "share of a GPU's memory, 0 to 1, that the nodes on it take together, with weights "
            "and steps; 0 leaves the pool's size to memory_mib; CPUs ignore it",
            ge=0,
            le=1,
        ),
    ] = 0.0
    shared_by: Annotated[
        int,
        about(
            "nodes that share this host's memory for their pools; `serve` sets it", ge=1
        ),
    ] = 1
    gpu_shared_by: Annotated[
        int,
        about("nodes that share this node's GPU and its memory; `serve` sets it", ge=1),
    ] = 1
    num_blocks: Annotated[
        int,
        about(
            "size of the KV pool; 0 takes as many blocks as fit memory_mib",
            "blocks",
            ge=0,
            le=MAX_BLOCKS,
        ),
    ] = 0
    enable_prefix_caching: Annotated[
        bool, about("keep finished blocks for prompts with the same prefix")
    ] = True
    prefix_reads: Annotated[
        PrefixReads,
        about(
            "let prefill nodes read the first tokens of a prompt from a decode node that has them "
            "cached, when that takes less time than computing them: from one that computes equal "
            "bits, or from any"
        ),
    ] = "equal"
    kv_offloading_size: Annotated[
        float,
        about(
            "host memory of one node, all ranks together, for cached blocks that its KV pool may "
            "lose; 0 keeps none there",
            "GiB",
            ge=0,
        ),
    ] = 0.0
    folder: Annotated[
        str,
        about(
            "local folder for cached blocks that the KV pools of this host's nodes may lose, which "
            "a node finds again when it restarts; empty keeps none on disk",
            kind="path",
        ),
    ] = ""
    folder_size: Annotated[
        float,
        about(
            "most bytes of one node, all ranks together, in cache.folder", "GiB", gt=0
        ),
    ] = 16.0


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    device: Annotated[
        Device, about("device to compute on; auto takes a GPU when there is one")
    ] = "auto"
    tensor_parallel_size: Annotated[
        int, about("number of ranks over which one node splits the model", ge=1)
    ] = 1
    shared_cpus: Annotated[
        str,
        about(
            "file through which nodes of one host lend idle CPUs; `serve` sets it",
            kind="path",
        ),
    ] = ""
    threads: Annotated[
        int,
        about(
            "CPU threads of a rank; 0 divides the CPUs among the nodes and their ranks",
            ge=0,
        ),
    ] = 0
    kernels: Annotated[
        KernelChoice,
        about("kernels on CPUs; auto compiles them where that is possible"),
    ] = "auto"
    kv_cache_dtype: Annotated[
        KVCacheDtype,
        about(
            "type of the numbers in KV blocks, the same on all nodes; auto takes the model's, and "
            "fp8 (e4m3, with an exponent for each KV head of a token) halves the blocks of bf16"
        ),
    ] = "auto"
    deterministic: Annotated[
        Deterministic,
        about(
            "on GPUs, compute the same bits for a token in every batch; auto does this where "
            "kernels for it that cost little are proven on the GPU at the start, and true "
            "everywhere, which may be slower; nodes on CPUs always do this"
        ),
    ] = "auto"
    graphs: Annotated[
        GraphChoice,
        about(
            "steps to replay as CUDA graphs, which take some GPU memory: all means decode steps "
            "and chunks of prompts, and on prefill nodes these alone"
        ),
    ] = "all"
    max_num_seqs: Annotated[
        int,
        about("most sequences in one step; 0 takes 64 on CPUs and 256 on GPUs", ge=0),
    ] = 0
    max_num_batched_tokens: Annotated[
        int,
        about(
            "most tokens in one step; 0 takes 512 on CPUs and 2048 on GPUs",
            "tokens",
            ge=0,
        ),
    ] = 0
    scheduling_policy: Annotated[
        SchedulingPolicy,
        about(
            "order in which a node gives KV blocks to requests; where blocks run out, decode nodes "
            "give the last in this order back first: fcfs takes the request that came first, and "
            "priority the one with the lowest `priority`"
        ),
    ] = "fcfs"
    num_speculative_tokens: Annotated[
        int,
        about(
            "most tokens that a decode step guesses for a sequence (speculative decoding); 0 "
            "guesses none",
            ge=0,
            le=16,
        ),
    ] = 0
    speculative_method: Annotated[
        SpeculativeMethod,
        about(
            "what guesses tokens, the same on all nodes: ngram takes what followed a sequence's "
            "last tokens before, mtp is the layer in the model's own folder that predicts further "
            "tokens, and eagle3 a draft in engine.speculative_model"
        ),
    ] = "ngram"
    speculative_model: Annotated[
        str, about("folder of an EAGLE-3 draft for the model", kind="path")
    ] = ""
    prompt_lookup_max: Annotated[
        int, about("number of last tokens that a guess looks up first", "tokens", ge=1)
    ] = 4
    prompt_lookup_min: Annotated[
        int, about("smallest number of last tokens that it looks up", "tokens", ge=1)
    ] = 2

    @property
    def has_draft_head(self) -> bool:
        """Return whether a part of the model guesses tokens."""
        return self.num_speculative_tokens > 0 and self.speculative_method != "ngram"


class RouterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: Annotated[
        str,
        about(
            "address to which the HTTP server binds; 0.0.0.0 is all of IPv4, :: also of IPv6"
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int, about("port of the HTTP server; 0 picks a free one", ge=0, le=65535)
    ] = 8000
    uds: Annotated[
        str,
        about(
            "path of a Unix socket on which the HTTP server listens instead of a port, for this "
            "user and group",
            kind="path",
        ),
    ] = ""
    dev_endpoints: Annotated[
        bool,
        about(
            "serve POST /reset_prefix_cache, /start_profile and /stop_profile, which slow down "
            "every client's requests"
        ),
    ] = False
    shares_port: Annotated[
        bool, about("let other routers of this user listen on the same port")
    ] = False
    port_is_held: Annotated[
        bool,
        about(
            "listen on a port that another process of this user holds, so that no stranger takes "
            "it while the router restarts; `serve` sets it"
        ),
    ] = False
    own_port: Annotated[
        int,
        about(
            "second port that belongs to this router alone, for metrics, which need no API key "
            "there; `serve` gives each of several routers the next port, beginning "
            "after the port that they share if this is 0",
            ge=0,
            le=65535,
        ),
    ] = 0
    name: Annotated[
        str,
        Meta(
            max_length=128,
            # ASCII without spaces and slashes, as the ids of nodes.
            pattern="^[!-.0-~]+$",
            description="name of this router in /health, /metrics and the log",
        ),
    ] = "router"
    control: Annotated[
        str | None,
        about(
            "endpoint that nodes dial, as tcp://host:port or ipc://path; unset takes a private "
            f"socket where the same command starts the nodes, else {DEFAULT_CONTROL}"
        ),
    ] = None
    max_queued: Annotated[
        int,
        about(
            "most requests that wait for a node; a further one gets status 429", ge=0
        ),
    ] = 1024
    max_queued_s: Annotated[
        float,
        about(
            "how long a request may wait for a node before it gets status 503",
            "s",
            gt=0,
        ),
    ] = 30.0
    max_inflight: Annotated[
        int, about("largest number of requests that the nodes work on at once", ge=1)
    ] = 1024
    routing: Annotated[
        Routing,
        about("choose nodes by their load, or also by what their prefix caches hold"),
    ] = "cache-aware"
    local_prefill: Annotated[
        LocalPrefill,
        about(
            "whether decode nodes compute prompts; auto lets them if few tokens are not cached"
        ),
    ] = "auto"
    local_prefill_tokens: Annotated[
        int,
        about(
            "under local_prefill=auto, a decode node computes a prompt itself if at most this "
            "many tokens of it are not cached there",
            "tokens",
            ge=0,
        ),
    ] = 32
    shutdown_timeout_s: Annotated[
        float,
        about(
            "how long a router that gets SIGTERM may take to finish its requests",
            "s",
            ge=0,
        ),
    ] = 30.0
    heartbeat_timeout_s: Annotated[
        float,
        about(
            "how long a node may be silent, or its connection dead, before its requests go on at "
            "other nodes; raise it on hosts that pause processes for seconds",
            "s",
            ge=2,
        ),
    ] = 3.5
    max_attempts: Annotated[
        int,
        about(
            "a request fails after this many attempts in a row that brought no token",
            ge=1,
        ),
    ] = 3
    max_body_mib: Annotated[
        int,
        about(
            "largest body of a request, or less if the longest prompt needs less",
            "MiB",
            ge=1,
        ),
    ] = 16
    max_connections: Annotated[
        int,
        about(
            "most client connections, or fewer if the process may open few files", ge=1
        ),
    ] = 16384
    idle_s: Annotated[
        float,
        about(
            "how long a connection may stay open without a complete request", "s", gt=0
        ),
    ] = 75.0
    unread_s: Annotated[
        float,
        about(
            "how long a client may leave its response unread before it is cut off",
            "s",
            gt=0,
        ),
    ] = 30.0
    tool_call_parser: Annotated[
        ToolCallParser,
        about(
            "format of the model's tool calls, by the name of vLLM's or SGLang's parser; auto "
            "takes the one that the chat template shows"
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        ReasoningParser,
        about(
            "how the model writes reasoning, which is separated from content of chats, by the "
            "name of vLLM's or SGLang's parser; auto takes what the chat template shows"
        ),
    ] = "auto"
    api_keys: Annotated[
        tuple[str, ...],
        about(
            "API keys, one of which a client must send; without keys, every client is let in; use "
            "the flag for a key with a comma",
            kind="repeated",
        ),
    ] = ()
    api_key_file: Annotated[
        str,
        about(
            "file with the hashes of further keys, made by `baton api-key`; it is read at start",
            kind="path",
        ),
    ] = ""
    ssl_certfile: Annotated[
        str,
        about(
            "PEM file of the certificate chain; with it, the router speaks only https",
            kind="path",
        ),
    ] = ""
    ssl_keyfile: Annotated[
        str,
        about(
            "PEM file with its private key; empty takes it from router.ssl_certfile",
            kind="path",
        ),
    ] = ""
    page: Annotated[
        bool,
        about(
            "serve a status page at / and its data at /status.json; clients need a key for the "
            "data if the router has keys"
        ),
    ] = True
    otlp_traces_endpoint: Annotated[
        str,
        about(
            "URL to which traces of requests go (needs the extra otel); empty sends none"
        ),
    ] = ""
    allowed_origins: Annotated[
        tuple[str, ...],
        about(
            "origins of web pages that may call this router from a browser (CORS), such as "
            "https://chat.example.com, or * for all; without this setting, only the router's own "
            "pages may call it"
        ),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        about(
            "host names that requests may name in the header Host, or * for all; without this "
            "setting, all names are allowed, or only local ones if the router has no keys and "
            "listens on loopback"
        ),
    ] = ()

    @property
    def wants_key(self) -> bool:
        return bool(self.api_keys or self.api_key_file)

    @property
    def speaks_tls(self) -> bool:
        return bool(self.ssl_certfile)

    @property
    def is_on_loopback(self) -> bool:
        return not self.uds and self.host in ("127.0.0.1", "::1", "localhost")


class NodeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: Annotated[
        str,
        Meta(
            # With an epoch and a nonce, an id must fit the 255 bytes of a ZMQ identity.
            max_length=128,
            # An id is ASCII without spaces and slashes, because it also names files.
            pattern="^[!-.0-~]*$",
            description="id of the node; empty makes one from the host's name, the role and the "
            "process id",
        ),
    ] = ""
    routers: Annotated[
        tuple[str, ...], about("control endpoints of the routers that the node dials")
    ] = (DEFAULT_CONTROL,)
    bind: Annotated[
        str,
        about(
            "address that peer nodes dial, as tcp://host (a free port) or ipc://path"
        ),
    ] = "tcp://127.0.0.1"
    shutdown_timeout_s: Annotated[
        float,
        about(
            "how long a node that is told to end may take to finish its sequences",
            "s",
            ge=0,
        ),
    ] = 30.0
    hand_over_timeout_s: Annotated[
        float,
        about(
            "how long a node that ends waits, within node.shutdown_timeout_s, until other nodes "
            "have read what it used last of its cache; 0 hands nothing over",
            "s",
            ge=0,
        ),
    ] = 5.0
    http: Annotated[
        str,
        about(
            "host:port on which the node serves /live, /ready and /metrics; port 0 picks a free "
            "port, and empty serves none of them; nodes that one command starts take consecutive "
            "ports from this one on"
        ),
    ] = ""
    start_timeout_s: Annotated[
        float,
        about(
            "how long the start of a node may make no progress; then it exits",
            "s",
            gt=0,
        ),
    ] = 120.0


class TransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    transport: Annotated[
        TransportChoice,
        about(
            "how KV blocks travel; auto takes the fastest: shm or cuda_ipc within a host, or nixl"
        ),
    ] = "auto"
    lease_s: Annotated[
        float,
        about(
            "how long prefill holds blocks for a decode node that is silent", "s", gt=0
        ),
    ] = 30.0
    verify_kv: Annotated[
        bool,
        about(
            "verify a checksum of every KV block that is read; the same on all nodes"
        ),
    ] = False
    device: Annotated[
        str,
        about(
            "network devices that nixl uses, such as mlx5_0:1,eth0; empty takes the RDMA ports "
            "and the network interface that leads to the other nodes or the routers"
        ),
    ] = ""


class LogConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    level: Annotated[
        LogLevel, about("least severe level of messages that are logged")
    ] = "info"
    json: Annotated[bool, about("log one JSON object per line")] = False
    access: Annotated[
        bool, about("log a line for every HTTP request once it is answered")
    ] = False
    slow_s: Annotated[
        float,
        about(
            "log a request that took longer, with the time of each of its stages, even without "
            "the access log; 0 logs none",
            "s",
            ge=0,
        ),
    ] = 0.0
    stats_s: Annotated[
        float,
        about(
            "interval between two lines of statistics in the log; 0 turns them off",
            "s",
            ge=0,
        ),
    ] = 10.0
    prompts: Annotated[bool, about("log prompts, each cut to 200 characters")] = False
    records: Annotated[
        str,
        about(
            "folder for each node's records of steps and transfers; empty writes none",
            kind="path",
        ),
    ] = ""


class KeysConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    file: Annotated[
        str,
        about(
            "file made by `baton keygen`, the same on all hosts; listeners use its first key"
        ),
    ] = ""
    insecure: Annotated[
        bool,
        about("talk to other hosts without a key, for private control networks only"),
    ] = False


class ClusterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of all processes of a cluster."""

    prefill: Annotated[
        int, about("number of prefill nodes that `serve` starts", ge=0)
    ] = 1
    decode: Annotated[
        int,
        about(
            "number of decode nodes that `serve` starts; a model that makes no tokens gets none",
            ge=0,
        ),
    ] = 1
    router_processes: Annotated[
        int,
        about(
            "number of router processes that `serve` starts; they share the port", ge=1
        ),
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
