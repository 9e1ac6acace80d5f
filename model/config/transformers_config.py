"""Whether transformers' own code computes a folder's model, from the folder's files alone.

It imports neither torch nor transformers, so a command can refuse a folder before it starts a
process. What only the model's code can tell is decided by `transformers_gate` in a rank.
"""

import ast
import importlib.metadata
import importlib.util
from functools import cache
from pathlib import Path

import msgspec

from baton.model.config.decoder_config import (
    QUANTIZATION_FILES,
    DecoderConfig,
    DecoderDtype,
)
from baton.model.config.reading import converted, read_fields
from baton.model.families.table import BY_ARCHITECTURE, OTHER_HEADS
from baton.protocol.config import ModelImpl
from baton.protocol.errors import ConfigError

_TABLE = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
_SEEING = "ForConditionalGeneration"
_WITH_TEXT = tuple(name for name in BY_ARCHITECTURE if name.endswith(_SEEING))


class TransformersConfig(msgspec.Struct, frozen=True):
    """A decoder that transformers computes, and what its attention was seen to store.

    Every layer stores `num_kv_heads` keys and values of `head_dim` numbers; narrower ones are
    padded with zeros.
    """

    architecture: str
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    dtype: DecoderDtype
    eos_token_ids: tuple[int, ...]


AnyConfig = DecoderConfig | TransformersConfig


class _Text(msgspec.Struct):
    quantization_config: dict[str, object] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None


class _Folder(_Text):
    architectures: tuple[str, ...] | None = None
    model_type: str = ""
    text_config: _Text | None = None


def runs_in_transformers(folder: Path, wanted: ModelImpl) -> bool:
    """Return whether the folder's model is one that baton's own decoder does not compute."""
    if wanted == "transformers":
        return True
    try:
        raw = _read(folder / "config.json")
    except ConfigError:
        return False  # the reader of baton's own models says what is wrong
    named = raw.architectures or ()
    known = BY_ARCHITECTURE.keys() | OTHER_HEADS
    return bool(named) and known.isdisjoint(named)


def check_for_transformers(folder: Path) -> tuple[str, str]:
    """Return the architecture and the checkpoint's dtype. Raises a one-line `ConfigError`."""
    file = folder / "config.json"
    raw = _read(file)
    known = _known_decoders()
    named = (raw.architectures or ("nothing",))[0]
    if named.endswith(_SEEING) and named not in known.values():
        raise ConfigError(
            f"{file}: architectures names {named}, which sees, hears or encodes; baton computes "
            f"text alone, and of such models reads {', '.join(_WITH_TEXT)}"
        )
    if named not in known.values():
        raise ConfigError(
            f"{file}: architectures names {named}; baton runs {', '.join(BY_ARCHITECTURE)}, "
            f"and the decoders of transformers, whose version {version()} has none of that name"
        )
    if known.get(raw.model_type) != named:
        raise ConfigError(
            f"{file}: architectures names {named}, but transformers takes model_type "
            f"{raw.model_type!r} for {known.get(raw.model_type, 'no decoder')}"
        )
    text = raw.text_config or _Text()
    is_quantized = (
        raw.quantization_config is not None or text.quantization_config is not None
    )
    if is_quantized or any((folder / name).is_file() for name in QUANTIZATION_FILES):
        raise ConfigError(
            f"{file}: quantization_config: the weights are quantized, and baton computes with "
            "bfloat16 and float32 weights only"
        )
    dtype = raw.dtype or raw.torch_dtype or text.dtype or text.torch_dtype or "float32"
    if dtype not in ("bfloat16", "float32", "float16"):
        raise ConfigError(f"{file}: dtype {dtype!r} is not supported")
    return named, dtype


def _read(file: Path) -> _Folder:
    return converted(file, read_fields(file), _Folder)


def version() -> str:
    return importlib.metadata.version("transformers")


@cache
def _known_decoders() -> dict[str, str]:
    """Return transformers' architecture of each `model_type`, read from its source.

    Importing the table would import torch.
    """
    spec = importlib.util.find_spec("transformers")
    assert spec is not None, "transformers is installed with baton"
    assert spec.submodule_search_locations is not None
    file = Path(
        spec.submodule_search_locations[0], "models", "auto", "modeling_auto.py"
    )
    for node in ast.parse(file.read_bytes()).body:
        if (
            isinstance(node, ast.Assign)
            and getattr(node.targets[0], "id", "") == _TABLE
        ):
            assert isinstance(node.value, ast.Call)
            pairs = ast.literal_eval(node.value.args[0])
            return {kind: name for kind, name in pairs if isinstance(name, str)}
    raise ConfigError(
        f"{file} of transformers {version()} has no {_TABLE}: install another version"
    )
