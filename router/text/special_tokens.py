"""The tokens that a model's folder names, in whichever of its files.

tokenizer.json should have all of them. transformers adds those of the other files when it loads a
tokenizer; a router refuses a folder where that would change how text becomes tokens.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from baton.protocol.errors import ConfigError

T = TypeVar("T")
# Their tokenizers are exactly what tokenizer.json says.
_PLAIN_CLASSES = ("PreTrainedTokenizer", "TokenizersBackend", "Llama")


class AddedToken(msgspec.Struct, frozen=True):
    content: str = ""
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = True
    special: bool = False


AnyToken = str | AddedToken


class _Names(msgspec.Struct):
    """The fields of tokenizer_config.json and special_tokens_map.json that name tokens."""

    bos_token: AnyToken | None = None
    eos_token: AnyToken | None = None
    unk_token: AnyToken | None = None
    sep_token: AnyToken | None = None
    pad_token: AnyToken | None = None
    cls_token: AnyToken | None = None
    mask_token: AnyToken | None = None
    additional_special_tokens: list[AnyToken] | None = None
    extra_special_tokens: list[AnyToken] | dict[str, AnyToken] | None = None
    added_tokens_decoder: dict[str, AddedToken] | UnsetType = UNSET
    add_prefix_space: bool | None = None
    split_special_tokens: bool = False
    tokenizer_class: str | None = None

    def named(self) -> Iterator[tuple[str, str]]:
        for name in _NAMES:
            if (token := getattr(self, name)) is not None:
                yield name, _text(token)

    def extra(self) -> Iterator[str]:
        extra = self.extra_special_tokens or []
        yield from map(_text, self.additional_special_tokens or [])
        yield from map(_text, extra.values() if isinstance(extra, dict) else extra)


class _Splitter(msgspec.Struct):
    """A part of tokenizer.json that cuts text into words."""

    type: str = ""
    add_prefix_space: bool | None = None
    pretokenizers: "list[_Splitter]" = []


class _Tokenizer(msgspec.Struct):
    added_tokens: list[AddedToken] = []
    pre_tokenizer: _Splitter | None = None


_NAMES = [name for name in _Names.__struct_fields__ if name.endswith("_token")]


def named_tokens(folder: Path) -> dict[str, str]:
    """Return the text of each token that templates know by a name, such as `bos_token`.

    Raises `OSError`, or `msgspec.DecodeError` for a file that is not what transformers writes.
    """
    return {name: token for names in _sources(folder) for name, token in names.named()}


def check_tokens(folder: Path) -> None:
    """Raise `ConfigError` if transformers would not read text as tokenizer.json says."""
    try:
        known = _read(folder / "tokenizer.json", _Tokenizer)
        sources = _sources(folder)
        wanted: set[str] = set()
        for names in sources:
            wanted.update(names.extra(), dict(names.named()).values())
        config = sources[0]
        if isinstance(config.added_tokens_decoder, UnsetType):
            wanted.update(_read(folder / "added_tokens.json", dict[str, int]))
            changed = set()
        else:
            changed = set(config.added_tokens_decoder.values()) - set(
                known.added_tokens
            )
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"cannot read the tokens that {folder} names: {error}"
        ) from error
    wanted -= {token.content for token in known.added_tokens}
    texts = sorted(wanted | {token.content for token in changed})
    if texts:
        _refuse(
            folder,
            f"its added_tokens lack what other files say of {', '.join(texts[:3])}",
        )
    if config.split_special_tokens:
        raise ConfigError(
            f"{folder / 'tokenizer_config.json'}: split_special_tokens is not supported: special "
            "tokens in a prompt are one token each"
        )
    is_plain = (config.tokenizer_class or _PLAIN_CLASSES[0]).startswith(_PLAIN_CLASSES)
    if config.add_prefix_space is not None and not is_plain:
        for part in _parts(known.pre_tokenizer):
            if (
                part.type == "ByteLevel"
                and part.add_prefix_space is not config.add_prefix_space
            ):
                _refuse(folder, "tokenizer_config.json has another add_prefix_space")


def missing_tokenizer(folder: Path) -> ConfigError:
    """Return the error for a folder without tokenizer.json, with a way to get one."""
    if (folder / "tiktoken.model").is_file():
        advice = (
            "the folder has its tokenizer in tiktoken.model alone; "
            "examples/kimi_tokenizer.py of baton's sources writes a tokenizer.json from it"
        )
    else:
        advice = "fetch it, or have transformers write one with save_pretrained"
    return ConfigError(
        f"model {folder} has no tokenizer.json, which baton needs: {advice}"
    )


def _refuse(folder: Path, reason: str) -> None:
    raise ConfigError(
        f"{folder / 'tokenizer.json'} is not the whole tokenizer: {reason}; "
        "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes it whole"
    )


def _parts(splitter: _Splitter | None) -> Iterator[_Splitter]:
    if splitter is not None:
        yield splitter
        for part in splitter.pretokenizers:
            yield from _parts(part)


def _sources(folder: Path) -> list[_Names]:
    """Return the names in the files that transformers reads, those that win last."""
    given = _read(folder / "tokenizer_config.json", _Names)
    if not isinstance(given.added_tokens_decoder, UnsetType):
        return [given]
    return [given, _read(folder / "special_tokens_map.json", _Names)]  # an older folder


def _read(file: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(
            file.read_bytes() if file.is_file() else b"{}", type=kind
        )
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise msgspec.DecodeError(f"{file.name}: {error}") from error


def _text(token: AnyToken) -> str:
    return token.content if isinstance(token, AddedToken) else token
