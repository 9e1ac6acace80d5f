"""Read the JSON files of a model's folder, with one-line errors that name the file."""

from pathlib import Path
from typing import TypeVar

import msgspec

from baton.model.config.families import WRAPPERS, text_family
from baton.protocol.errors import ConfigError

T = TypeVar("T")

# Fields of a model that sees images, where its `text_config` has none.
WHOLE_FIELDS = (
    "eos_token_id",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "tie_word_embeddings",
)


class ModelKind(msgspec.Struct):
    """The fields that are read first, so that an unknown architecture is reported as such."""

    architectures: tuple[str, ...] | None = None
    model_type: str = ""


def read_json(file: Path, kind: type[T]) -> T:
    """Return what a file says. Raises a one-line `ConfigError` that names the file."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None


def read_fields(file: Path) -> dict[str, object]:
    """Return the fields of a config.json; of a model that sees images, those of its text.

    Raises a one-line `ConfigError` that names the file.
    """
    whole = read_json(file, dict[str, object])
    named = converted(file, whole, ModelKind).architectures
    if not named or named[0] not in WRAPPERS:
        return whole
    if "text_config" not in whole:  # some have all fields side by side
        return whole
    text = converted(file, whole["text_config"], dict[str, object])
    kind = converted(file, text, ModelKind)
    family = text_family(named[0], kind.model_type)
    if family is None:
        raise ConfigError(
            f"{file}: text_config is a {kind.model_type}, whose text baton does not compute"
        )
    shared = {name: whole[name] for name in WHOLE_FIELDS if name in whole}
    # The head belongs to the whole model.
    head = {name: shared[name] for name in ("tie_word_embeddings",) if name in shared}
    return {**shared, **text, **head, "architectures": [family.architecture]}


def converted(file: Path, fields: object, kind: type[T]) -> T:
    """Return fields of a file as a type. Raises a one-line `ConfigError` that names the file."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {error}") from None
