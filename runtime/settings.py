"""Settings of a command: defaults, a YAML file, the environment, flags, then `--set a.b=c`.

The command line and docs/config.md are generated from `protocol.config`; only the short flags of
common settings are written here. Every mistake is a `ConfigError` that names the setting.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import yaml

from baton.protocol.config import ClusterConfig
from baton.protocol.errors import ConfigError
from baton.runtime.fields import Field, FlagParser, did_you_mean, fields_of, with_values

# Settings that also have a flag without their section; many names are vLLM's.
_OWN_NAMED = (
    "router.host",
    "router.port",
    "router.uds",
    "router.control",
    "router.local_prefill",
    "router.routing",
    "router.tool_call_parser",
    "router.reasoning_parser",
    "router.api_key_file",
    "router.allowed_origins",
    "router.ssl_certfile",
    "router.ssl_keyfile",
    "router.otlp_traces_endpoint",
    "model.generation_config",
    "model.served_model_name",
    "model.chat_template",
    "model.dtype",
    "model.model_impl",
    "model.max_model_len",
    "model.lora_modules",
    "model.allow_runtime_lora_updating",
    "model.max_loras",
    "model.max_lora_rank",
    "model.convert",
    "cache.memory_mib",
    "cache.gpu_memory_utilization",
    "cache.enable_prefix_caching",
    "cache.block_size",
    "cache.kv_offloading_size",
    "engine.device",
    "engine.tensor_parallel_size",
    "engine.threads",
    "engine.kv_cache_dtype",
    "engine.max_num_batched_tokens",
    "engine.max_num_seqs",
    "engine.scheduling_policy",
    "engine.num_speculative_tokens",
    "engine.speculative_method",
    "engine.speculative_model",
    "node.id",
    "node.routers",
    "node.bind",
    "transfer.transport",
)
# The flags besides `--section-field`. `LLM` takes them as keywords.
SHORT_FLAGS = {
    "api-key": "router.api_keys",
    "model": "model.path",
    "num-gpu-blocks-override": "cache.num_blocks",
    "keys": "keys.file",
    **{name.partition(".")[2].replace("_", "-"): name for name in _OWN_NAMED},
}
# What to use instead of flags of `vllm serve` that baton does not have.
FOREIGN_FLAGS = {
    "--quantization": "leave it out, because the model's folder says how it is quantized",
    "--load-format": "leave it out, because baton reads safetensors files",
    "--trust-remote-code": "leave it out, because baton runs no code of a model's folder",
    "--tokenizer": "leave it out, because the tokenizer is that of the model's folder",
    "--revision": "download that revision with `hf download --revision` and name the folder",
    "--download-dir": "set the variable HF_HUB_CACHE to the folder",
    "--enable-auto-tool-choice": "leave it out, because tools work without it",
    "--enable-lora": "name adapters with --lora-modules, or load them later with "
    "--allow-runtime-lora-updating",
    "--enable-chunked-prefill": "leave it out, because prompts are always computed in chunks",
    "--enforce-eager": "use --engine-graphs none",
    "--data-parallel-size": "use --prefill N and --decode N, the numbers of nodes",
    "--pipeline-parallel-size": "use --tensor-parallel-size, or more nodes",
    "--api-server-count": "use --router-processes",
    "--kv-offloading-backend": "leave it out, because baton needs none for --kv-offloading-size",
    "--kv-transfer-config": "leave it out, because prefill and decode are always separate",
    "--speculative-config": "use --num-speculative-tokens, --speculative-method and "
    "--speculative-model",
    "--disable-log-requests": "leave it out, because requests are not logged by default",
    "--seed": "send `seed` with a request",
    "--root-path": "let the proxy strip the prefix of the path",
}
# The values of other servers' settings, and what to use instead.
FOREIGN_VALUES = {
    ("model.dtype", value): "baton computes in bfloat16 and float32: use bfloat16"
    for value in ("float16", "half")
}
VARIABLE_PREFIX = "BATON_"
# The variables of baton that are no settings: the keys that `chat`, `status` and `bench` send, and
# those of the examples.
OTHER_VARIABLES = ("BATON_API_KEY", "BATON_BENCH_API_KEY", "BATON_URL", "BATON_MODEL")


class Subcommand(msgspec.Struct, frozen=True):
    """A subcommand, with a flag for each setting of `sections`; "" is the top level."""

    name: str
    description: str
    sections: tuple[str, ...]


def load(
    command: "Subcommand",
    arguments: Sequence[str],
    environment: Mapping[str, str] = os.environ,
) -> ClusterConfig:
    """Return the settings that `arguments` ask for; `--help` prints and exits."""
    parsed = parser(command).parse_args(arguments)
    known = {field.name: field for field in fields_of(ClusterConfig)}
    values = {} if parsed.config is None else _of_file(Path(parsed.config))
    values |= {
        name: field.from_text(environment[variable_of(field)], variable_of(field))
        for name, field in known.items()
        if variable_of(field) in environment
    }
    if parsed.folder is not None:
        values["model.path"] = parsed.folder
    for name, text in vars(parsed).items():
        if name not in known or text is None:
            continue
        if isinstance(text, str) and (name, text) in FOREIGN_VALUES:
            raise ConfigError(f"{name} cannot be {text}: {FOREIGN_VALUES[name, text]}")
        values[name] = known[name].from_text(text)
    for assignment in parsed.set:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set {assignment}: write it as section.field=value")
        if name not in known:
            raise _unknown(f"--set {name}", name, known)
        values[name] = known[name].from_text(text)
    return checked(with_values(ClusterConfig(), values))


def to_yaml(config: ClusterConfig) -> str:
    return yaml.safe_dump(
        msgspec.to_builtins(config, builtin_types=()), sort_keys=False
    )


class SettingsInMemory:
    """Settings that children inherit, as a file that is gone with the last process that has it.

    A file on disk, with secrets in it, would stay behind if this process is killed.
    """

    def __init__(self, config: ClusterConfig) -> None:
        descriptor = os.memfd_create("baton-settings", os.MFD_CLOEXEC)
        self._file = os.fdopen(descriptor, "w", encoding="utf-8")
        self._file.write(to_yaml(config))
        self._file.flush()
        # That a child must be given, with the same number.
        self.descriptors = (descriptor,)
        self.path = f"/proc/self/fd/{descriptor}"

    def close(self) -> None:
        self._file.close()


def checked(config: ClusterConfig) -> ClusterConfig:
    """Return `config` if its settings can work together. Raises `ConfigError` if not."""
    if config.prefill == config.decode == 0:
        raise ConfigError("prefill and decode are both 0, so there would be no nodes")
    if config.prefill == 0 and config.router.local_prefill == "never":
        raise ConfigError(
            "prefill is 0 and router.local_prefill is never, so no node could compute a prompt: "
            "start a prefill node or use --local-prefill always"
        )
    if config.engine.prompt_lookup_min > config.engine.prompt_lookup_max:
        raise ConfigError("engine.prompt_lookup_min is above engine.prompt_lookup_max")
    if not config.node.routers:
        raise ConfigError("node.routers is empty: name the router's control endpoint")
    if config.router.uds and config.router_processes > 1:
        raise ConfigError(
            "router.uds is the socket of one router: leave router_processes at 1"
        )
    if config.router.uds and config.router.speaks_tls:
        raise ConfigError("router.uds serves http alone: leave out router.ssl_certfile")
    if not all(config.router.api_keys):
        raise ConfigError(
            "router.api_keys has an empty key: no client could be told from others"
        )
    if config.router.ssl_keyfile and not config.router.ssl_certfile:
        raise ConfigError(
            "router.ssl_keyfile is set without router.ssl_certfile: name the certificate with "
            "--ssl-certfile FILE"
        )
    return config


def parser(command: Subcommand) -> FlagParser:
    """Return the parser of `baton command`, with a flag per setting of its sections."""
    built = FlagParser(
        prog=f"baton {command.name}",
        usage=f"baton {command.name} [MODEL] [--config FILE] [flags] [--set A.B=C ...]",
        description=command.description,
    )
    built.foreign = FOREIGN_FLAGS
    built.add_argument(
        "folder", metavar="MODEL", nargs="?", help="the same as --model MODEL"
    )
    built.add_argument(
        "--config", metavar="FILE", help="YAML file of settings; flags override it"
    )
    built.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="A.B=C",
        help="set any setting by its dotted name; this overrides flags and may be repeated",
    )
    fields = [
        field for field in fields_of(ClusterConfig) if field.section in command.sections
    ]
    built.add_settings(fields, flags_of, lambda field: field.section or "cluster")
    return built


def flags_of(field: Field) -> tuple[str, ...]:
    """Return the flags of a setting, the short one first."""
    short = [f"--{flag}" for flag, name in SHORT_FLAGS.items() if name == field.name]
    own = "--" + field.name.replace(".", "-").replace("_", "-")
    return (*(flag for flag in short if flag != own), own)


def variable_of(field: Field) -> str:
    """Return the environment variable of a setting, such as BATON_ROUTER_PORT."""
    return VARIABLE_PREFIX + field.name.replace(".", "_").upper()


def ignored_variables(environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yield a warning for each variable that begins as those of baton do and is none of them."""
    known = [*map(variable_of, fields_of(ClusterConfig)), *OTHER_VARIABLES]
    for name in sorted(environment):
        if name.startswith(VARIABLE_PREFIX) and name not in known:
            hint = (
                did_you_mean(name, known, VARIABLE_PREFIX)
                or "; docs/config.md lists them"
            )
            yield f"the variable {name} is ignored, because no setting has this name{hint}"


def _of_file(path: Path) -> dict[str, object]:
    try:
        content: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    return {} if content is None else values_of(content, str(path))


def values_of(content: object, where: str) -> dict[str, object]:
    """Return the settings in a parsed file, or in a part of one, by their dotted names.

    The `ConfigError` for an unknown name says `where` it was found.
    """
    known = {field.name: field for field in fields_of(ClusterConfig)}
    if not isinstance(content, dict):
        raise ConfigError(
            f"{where}: expected settings as `name: value`, got {content!r}"
        )
    sections = {field.section for field in known.values()} - {""}
    leaves: dict[str, object] = {}
    for key, value in content.items():
        if key not in sections:
            leaves[str(key)] = value
        elif isinstance(value, dict):
            leaves |= {f"{key}.{inner}": leaf for inner, leaf in value.items()}
        else:
            raise ConfigError(
                f"{where}: {key} is a section; write its settings below it"
            )
    for name in leaves:
        if name not in known:
            raise _unknown(f"{where}: {name}", name, [*known, *sections])
    return {name: known[name].from_yaml(leaf) for name, leaf in leaves.items()}


def _unknown(
    shown: str, name: str, known: Sequence[str] | Mapping[str, Field]
) -> ConfigError:
    return ConfigError(f"unknown setting {shown}{did_you_mean(name, known)}")
