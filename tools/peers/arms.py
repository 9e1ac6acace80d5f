"""The arms of a comparison on one machine with two cores: their processes and flags.

An arm is named by a make and options: `baton`, `baton-split`, `vllm`, `vllm+chunk=256`,
`vllm+compiled`, `vllm-pair`. Aggregated arms have both cores. vLLM's pair computes prompts on core
0 and decodes on core 1; baton's nodes have one core each and lend it while they idle, as under
`baton serve`.
"""

import glob
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from baton.protocol.errors import ConfigError
from tools.peers.servers import ServerCommand

KINDS = ("baton", "baton-split", "vllm", "vllm-pair")
MODEL_NAME = "tiny"
MAX_MODEL_LEN = 4096
KV_BYTES = 1 << 30
PREFILL_CPU = 0
DECODE_CPU = 1
PORTS_PER_ARM = 6


class Arm(msgspec.Struct, frozen=True):
    kind: str
    is_compiled: bool = False
    max_num_batched_tokens: int = 0  # 0: the server's default

    @property
    def name(self) -> str:
        """Return the name without characters that have a meaning to a shell or a flag."""
        parts = [self.kind]
        parts += ["compiled"] * self.is_compiled
        parts += (
            [f"chunk{self.max_num_batched_tokens}"]
            if self.max_num_batched_tokens
            else []
        )
        return "-".join(parts)


class ArmSite(msgspec.Struct, frozen=True):
    """The site of an arm: its model, its ports, a folder for its sockets, the installation."""

    model: Path
    ports: tuple[int, ...]
    folder: Path
    home: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    def url_of(self, index: int) -> str:
        return f"http://127.0.0.1:{self.ports[index]}"


def parse_arm(text: str) -> Arm:
    """Return the arm that `text` names. Raises `ConfigError`."""
    kind, *options = text.split("+")
    if kind not in KINDS:
        raise ConfigError(f"unknown arm {kind!r}: choose one of {', '.join(KINDS)}")
    arm = Arm(kind)
    for option in options:
        name, _, value = option.partition("=")
        if name == "compiled" and not value and kind.startswith("vllm"):
            arm = msgspec.structs.replace(arm, is_compiled=True)
        elif name == "chunk" and value.isdecimal() and int(value) > 0:
            arm = msgspec.structs.replace(arm, max_num_batched_tokens=int(value))
        else:
            raise ConfigError(
                f"arm {text!r}: unknown option {option!r}; chunk=N, and for vllm compiled are known"
            )
    return arm


def commands(arm: Arm, site: ArmSite) -> list[ServerCommand]:
    """Return the commands in starting order; the last one answers clients at `site.url`."""
    match arm.kind:
        case "baton":
            return _baton(arm, site)
        case "baton-split":
            return _baton_split(arm, site)
        case "vllm":
            return [_vllm(arm, site, 0, (), {"VLLM_CPU_OMP_THREADS_BIND": "nobind"})]
        case _:
            return _vllm_pair(arm, site)


def flags_of(listed: list[ServerCommand]) -> str:
    """Return the commands and flags of an arm as a report prints them."""
    return "\n".join(" ".join(command.argv[1:]) for command in listed) + "\n"


def _baton(arm: Arm, site: ArmSite) -> list[ServerCommand]:
    """Return the commands of one node with both cores, which computes prompts itself."""
    node = _baton_node(arm, site, "decode", {"engine.threads": 2})
    return [node, _baton_router(arm, site, "always")]


def _baton_split(arm: Arm, site: ArmSite) -> list[ServerCommand]:
    cpus = {"engine.threads": 1, "engine.shared_cpus": f"{site.folder}/{arm.name}-cpus"}
    return [
        _baton_node(arm, site, "prefill", cpus),
        _baton_node(arm, site, "decode", cpus),
        _baton_router(arm, site, "never"),
    ]


def _baton_router(arm: Arm, site: ArmSite, local_prefill: str) -> ServerCommand:
    argv = (
        *_baton_command(site, "router"),
        "--host",
        "127.0.0.1",
        "--port",
        str(site.ports[0]),
        "--control",
        _control(site),
        "--local-prefill",
        local_prefill,
    )
    return ServerCommand(f"{arm.name}-router", argv, ready_url=f"{site.url}/health")


def _baton_node(
    arm: Arm, site: ArmSite, role: str, cpus: Mapping[str, object]
) -> ServerCommand:
    settings = {
        "cache.memory_mib": KV_BYTES >> 20,
        **cpus,
    }
    if arm.max_num_batched_tokens:
        settings["engine.max_num_batched_tokens"] = arm.max_num_batched_tokens
    argv = (
        *_baton_command(site, role),
        "--routers",
        _control(site),
        "--bind",
        f"ipc://{site.folder}/{arm.name}-{role}",
        *_set(settings),
    )
    return ServerCommand(f"{arm.name}-{role}", argv)


def _baton_command(site: ArmSite, command: str) -> tuple[str, ...]:
    settings = {"model.path": site.model, "model.served_model_name": MODEL_NAME}
    return (sys.executable, "-m", "baton", command, *_set(settings))


def _set(settings: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(
        word for key, value in settings.items() for word in ("--set", f"{key}={value}")
    )


def _control(site: ArmSite) -> str:
    return f"ipc://{site.folder}/control-{site.ports[0]}"


def _vllm_pair(arm: Arm, site: ArmSite) -> list[ServerCommand]:
    """Return two servers that hand KV over through NIXL, and vLLM's router before them."""
    connector = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
    }
    servers = []
    for index, (role, cpu) in enumerate(
        (("prefill", PREFILL_CPU), ("decode", DECODE_CPU)), 1
    ):
        env = {
            "VLLM_CPU_OMP_THREADS_BIND": str(cpu),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(site.ports[index + 2]),
            "NIXL_PTHR_DELAY_US": "1000",
        }
        flags = ("--kv-transfer-config", json.dumps(connector))
        server = _vllm(arm, site, index, flags, env)
        servers.append(
            msgspec.structs.replace(server, name=f"{arm.name}-{role}", cpus=(cpu,))
        )
    router = (
        str(site.home / "venvs/router/bin/python"),
        "-m",
        "vllm_router.launch_router",
        "--host",
        "127.0.0.1",
        "--port",
        str(site.ports[0]),
        "--policy",
        "round_robin",
        "--vllm-pd-disaggregation",
        "--kv-connector",
        "nixl",
        "--prefill",
        site.url_of(1),
        "--decode",
        site.url_of(2),
        "--prometheus-host",
        "127.0.0.1",
        "--prometheus-port",
        str(site.ports[5]),
        "--max-concurrent-requests",
        "2048",
        "--log-level",
        "warning",
    )
    return [
        *servers,
        ServerCommand(f"{arm.name}-router", router, ready_url=f"{site.url}/health"),
    ]


def _vllm(
    arm: Arm, site: ArmSite, port: int, flags: tuple[str, ...], env: Mapping[str, str]
) -> ServerCommand:
    bin_folder = site.home / "venvs/vllm/bin"
    argv = [
        str(bin_folder / "vllm"),
        "serve",
        str(site.model),
        "--served-model-name",
        MODEL_NAME,
        "--host",
        "127.0.0.1",
        "--port",
        str(site.ports[port]),
        "--max-model-len",
        str(MAX_MODEL_LEN),
        "--kv-cache-memory-bytes",
        str(KV_BYTES),
        "--disable-uvicorn-access-log",
        "--enable-prompt-tokens-details",
    ]
    if not arm.is_compiled:
        argv.append("--enforce-eager")
    if arm.max_num_batched_tokens:
        argv += ["--max-num-batched-tokens", str(arm.max_num_batched_tokens)]
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_CACHE_ROOT": str(site.home / "cache"),
        "LD_PRELOAD": _preloaded(site.home),
    }
    ready = f"{site.url_of(port)}/health"
    return ServerCommand(arm.name, (*argv, *flags), quiet | dict(env), ready)


def _preloaded(home: Path) -> str:
    """Return tcmalloc and the OpenMP that vLLM's CPU build asks for, if they are installed."""
    wanted = (
        "packages/usr/lib/*/libtcmalloc_minimal.so.4",
        "venvs/vllm/lib/libiomp5.so",
    )
    return ":".join(path for part in wanted for path in glob.glob(str(home / part))[:1])
