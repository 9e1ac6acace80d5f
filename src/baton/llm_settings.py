"""Make the settings of `LLM` and `AsyncLLM` into a `ClusterConfig`.

They have the names in docs/config.md, or those of the command line's short flags, among which are
vLLM's names for the settings that mean the same.
"""

import os
from collections.abc import Mapping

import msgspec

from baton.deploy.model_folder import with_model
from baton.protocol.config import ClusterConfig, ModelConfig
from baton.protocol.errors import ConfigError
from baton.runtime.fields import did_you_mean
from baton.runtime.settings import SHORT_FLAGS, checked

Model = str | os.PathLike[str] | ModelConfig | Mapping[str, object]

# Keywords of vLLM that change nothing here, whatever their value.
IGNORED = (
    "trust_remote_code", "enforce_eager", "disable_log_stats",
    "runner",  # the folder says what its model makes
    "enable_lora", "max_cpu_loras",  # lora_modules says all of it
)  # fmt: skip
# The values of vLLM's `task`, by what they mean for `model.convert`; None: as the folder says.
TASKS = {
    "auto": None, "generate": None, "score": None, "classify": None,
    "embed": "embed", "embedding": "embed",
}  # fmt: skip
# Others, each with the value that asks for nothing, besides None.
NEUTRAL: dict[str, object] = {
    "cpu_offload_gb": 0, "load_format": "auto",
    "pipeline_parallel_size": 1, "skip_tokenizer_init": False, "swap_space": 0,
    "tokenizer_mode": "auto",
}  # fmt: skip


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
    plain: dict[str, object] = {
        "log": {"level": "warning"},
        "model": _section("model", model),
    }
    moved: list[tuple[str, object]] = []  # behind the sections, which they complete
    for name, value in settings.items():
        if name in ClusterConfig.__struct_fields__:
            plain[name] = _section(name, value)
        elif setting := SHORT_FLAGS.get(name.replace("_", "-")):
            moved.append((setting, value))
        elif name == "task" and value in TASKS:
            moved.append(("model.convert", TASKS[str(value)]))
        elif name not in IGNORED and value not in (None, NEUTRAL.get(name)):
            names = (flag.replace("-", "_") for flag in SHORT_FLAGS)
            known = [*ClusterConfig.__struct_fields__, *names, "seed"]
            hint = did_you_mean(name, known) or "; docs/config.md lists the settings"
            raise ConfigError(f"unknown setting {name}{hint}")
    for setting, value in moved:
        section, _, key = setting.partition(".")
        if value is not None:  # None takes the default
            given = _dtype(value) if key == "dtype" else value
            if key == "served_model_name" and isinstance(value, list | tuple):
                given = ",".join(map(str, value))
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
