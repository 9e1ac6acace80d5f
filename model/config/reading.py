"""Read the JSON files of a model's folder, with one-line errors that name the file."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from baton.model.families.table import WRAPPERS, text_family
from baton.protocol.errors import ConfigError

T = TypeVar("T")
EndIds = int | Sequence[int] | None

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


class _NamedToken(msgspec.Struct):
    content: str


class _EndToken(msgspec.Struct):
    """The fields of tokenizer_config.json and special_tokens_map.json that name the end."""

    eos_token: str | _NamedToken | None = None
    added_tokens_decoder: object = msgspec.UNSET


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Tokenizer(msgspec.Struct):
    added_tokens: tuple[_AddedToken, ...] = ()


def end_token_ids(
    folder: Path, vocab_size: int, given: Sequence[EndIds]
) -> tuple[int, ...]:
    """Return the given ids and that of the tokenizer's end, in ascending order.

    Raises a one-line `ConfigError` for a file that cannot be read.
    """
    ids: set[int] = set()
    for entry in given:
        if entry is not None:
            ids |= {entry} if isinstance(entry, int) else set(entry)
    name = _end_token(folder)
    tokenizer = folder / "tokenizer.json"
    if name is not None and tokenizer.is_file():
        added = read_json(tokenizer, _Tokenizer).added_tokens
        ids |= {
            token.id
            for token in added
            if token.content == name and token.id < vocab_size
        }
    return tuple(sorted(ids))


def _end_token(folder: Path) -> str | None:
    """Return the text of the token that ends a response, as transformers finds it."""
    token = None
    for file in (folder / "tokenizer_config.json", folder / "special_tokens_map.json"):
        if not file.is_file():
            continue
        names = read_json(file, _EndToken)
        token = names.eos_token or token
        if names.added_tokens_decoder is not msgspec.UNSET:
            break  # transformers reads the other file in older folders only
    return token.content if isinstance(token, _NamedToken) else token


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
