"""Make the settings of `LLM` and `AsyncLLM` into a `ClusterConfig`.

The settings are baton's own, with the names in docs/config.md, and those keywords of vLLM's
constructor that mean the same. Every other keyword of vLLM is refused with a sentence that says how
baton does it, unless its value asks for nothing.
"""

import os
from collections.abc import Mapping

import msgspec

from baton.deploy.model_folder import with_model
from baton.protocol.config import ClusterConfig, ModelConfig
from baton.protocol.errors import ConfigError
from baton.runtime.fields import did_you_mean
from baton.runtime.settings import checked

Model = str | os.PathLike[str] | ModelConfig | Mapping[str, object]

# Keyword of vLLM -> the setting of baton that means the same. None takes the default.
SAME = {
    "served_model_name": "model.name",
    "dtype": "model.dtype",
    "max_model_len": "model.max_len",
    "gpu_memory_utilization": "cache.gpu_memory_utilization",
    "block_size": "cache.block_size",
    "num_gpu_blocks_override": "cache.num_blocks",
    "enable_prefix_caching": "cache.prefix",
    "device": "engine.device",
    "tensor_parallel_size": "engine.tensor_parallel",
    "max_num_seqs": "engine.max_num_seqs",
    "max_num_batched_tokens": "engine.chunk_tokens",
}
_FOLDER = "baton serves a model folder: put the files there and name it as the model"
_NODES = "prefill=N and decode=N set how many nodes run, and tensor_parallel_size splits each"
_MEMORY = "cache={'memory_mib': N} sets the memory for the KV blocks of one node"
_TEXT = "baton generates text, and does nothing else"
_ONE_DTYPE = "KV blocks and weights have the type that dtype sets"
# Other keywords of vLLM -> the values that ask for nothing, and how baton does it.
REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "kv_cache_memory_bytes": ((None,), _MEMORY),
    "swap_space": ((None, 0), _MEMORY),
    "cpu_offload_gb": ((None, 0), _MEMORY),
    "pipeline_parallel_size": ((None, 1), _NODES),
    "data_parallel_size": ((None, 1), _NODES),
    "distributed_executor_backend": ((None, "mp"), _NODES),
    "kv_cache_dtype": ((None, "auto"), _ONE_DTYPE),
    "quantization": ((None,), _ONE_DTYPE),
    "tokenizer": ((None,), _FOLDER),
    "tokenizer_mode": ((None, "auto"), _FOLDER),
    "skip_tokenizer_init": ((None, False), _FOLDER),
    "revision": ((None,), _FOLDER),
    "tokenizer_revision": ((None,), _FOLDER),
    "download_dir": ((None,), _FOLDER),
    "load_format": ((None, "auto", "safetensors"), _FOLDER),
    "trust_remote_code": ((None, False, True), "baton runs no code of a model folder"),
    "enforce_eager": ((None, False), "baton itself knows when to record CUDA graphs"),
    "enable_chunked_prefill": ((None, True), "max_num_batched_tokens sets the size of a chunk"),
    "disable_log_stats": ((None, True), "log={'level': 'info'} shows the nodes' messages"),
    "generation_config": ((None, "auto"), "SamplingParams() takes baton's defaults instead"),
    "enable_lora": ((None, False), "baton serves no adapters"),
    "speculative_config": ((None,), "baton does not speculate"),
    "compilation_config": ((None,), "baton compiles its kernels itself"),
    "task": ((None, "auto", "generate"), _TEXT),
    "runner": ((None, "auto", "generate"), _TEXT),
    "limit_mm_per_prompt": ((None, {}), _TEXT),
    "hf_token": ((None, False), "log in with `hf auth login`, or set the variable HF_TOKEN"),
    "hf_overrides": ((None, {}), "change config.json in a copy of the model folder"),
    "kv_transfer_config": ((None,), "transfer={...} sets how KV blocks travel"),
}


def config_of(
    model: Model, settings: Mapping[str, object], config: ClusterConfig | None
) -> ClusterConfig:
    """Return the settings of a cluster on this host. Raises `ConfigError`.

    They are `config`, or made from `model` and `settings`. An empty `model` means the demo model.
    Nodes print only warnings, unless `log` says otherwise.
    """
    if config is None:
        config = _from_keywords(model, settings)
    elif model or settings:
        raise ConfigError("give a config, or a model and settings, but not both")
    return with_model(checked(config))


def _from_keywords(model: Model, settings: Mapping[str, object]) -> ClusterConfig:
    plain: dict[str, object] = {"log": {"level": "warning"}, "model": _section("model", model)}
    moved: list[tuple[str, object]] = []
    for name, value in settings.items():
        if name in ClusterConfig.__struct_fields__:
            plain[name] = _section(name, value)
        elif name in SAME:
            moved.append((name, value))
        else:
            _refuse(name, value)
    for name, value in moved:
        section, _, key = SAME[name].partition(".")
        if value is not None:
            given = _dtype(value) if name == "dtype" else value
            plain[section] = _with(plain.get(section), section, key, given)
    try:
        return msgspec.convert(plain, ClusterConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{error} in the settings of the LLM") from error


def _section(name: str, value: object) -> object:
    if isinstance(value, msgspec.Struct):
        return msgspec.to_builtins(value)
    if name == "model" and isinstance(value, str | os.PathLike):
        return {"path": os.fspath(value)}
    return dict(value) if isinstance(value, Mapping) else value


def _with(section: object, name: str, key: str, value: object) -> dict[str, object]:
    if not isinstance(section, Mapping | None):
        raise ConfigError(f"{name} must be a dict or a struct of settings")
    return {**(section or {}), key: value}


def _dtype(value: object) -> str:
    """Return a type by baton's name, from torch's own types and vLLM's short names too."""
    name = str(value).removeprefix("torch.")
    if name in ("half", "float16"):
        raise ConfigError(
            f"dtype {name} is not supported: baton computes in float32 or bfloat16, and auto takes "
            "the type of the checkpoint"
        )
    return "float32" if name == "float" else name


def _refuse(name: str, value: object) -> None:
    if name not in REFUSED:
        known = [*ClusterConfig.__struct_fields__, *SAME, "seed"]
        raise ConfigError(f"unknown setting {name}{did_you_mean(name, known)}")
    neutral, advice = REFUSED[name]
    if value not in neutral:
        raise ConfigError(f"{name} is not a setting of baton: {advice}")
