"""The sampling defaults that a checkpoint names in its generation_config.json.

As in vLLM, they apply to the fields that an HTTP request leaves out. In Python they apply if a
caller passes no `SamplingParams`, because those that a caller passes are complete.
"""

from pathlib import Path

import msgspec

from baton.protocol.errors import ConfigError, RequestError
from baton.protocol.sampling import NEUTRAL, SamplingParams
from baton.runtime.log import logger

log = logger("router")


class _GenerationConfig(msgspec.Struct):
    """The fields of the file that concern sampling. Null means the usual default."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    max_new_tokens: int | None = None
    repetition_penalty: float | None = None


def default_params(model_path: str) -> SamplingParams:
    """Return the defaults of a folder's model. Raises `ConfigError` as `sampling_of_model` does."""
    return SamplingParams(**sampling_of_model(model_path))  # type: ignore[arg-type]


def sampling_of_model(model_path: str) -> dict[str, object]:
    """Return the fields of `SamplingParams` that a model folder sets.

    Raises `ConfigError` if they are not numbers. A default that baton does not support is left out,
    with one warning.
    """
    path = Path(model_path) / "generation_config.json"
    try:
        data = path.read_bytes() if path.is_file() else b"{}"
        found = msgspec.structs.asdict(msgspec.json.decode(data, type=_GenerationConfig))
        found["max_tokens"] = found.pop("max_new_tokens")
        given = {name: value for name, value in found.items() if value is not None}
        for name in NEUTRAL.keys() & given.keys():
            if given[name] not in NEUTRAL[name]:
                log.warning(f"{path} asks for {name}={given[name]}, which is not supported")
            del given[name]
        SamplingParams(**given)  # the constructor raises for values out of range
        return given
    except (OSError, msgspec.DecodeError, RequestError) as error:
        raise ConfigError(f"cannot take sampling defaults from {path}: {error}") from error
