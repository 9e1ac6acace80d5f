"""The settings as a flat list: name, type, default, unit and help of each leaf of a config tree.

`flag_parser` makes flags from the list, for the server and for the benchmark. `with_values` puts
the given values back into the tree. The generator of docs/config.md prints the list.
"""

import functools
import math
from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from baton.protocol.errors import ConfigError

S = TypeVar("S", bound=msgspec.Struct)


class Field(msgspec.Struct, frozen=True):
    """One setting. `name` is dotted, `section` empty at the top level.

    The `extra` of its Meta may hold a `unit` and a `kind`, as `protocol.setting.about` writes them.
    """

    section: str
    key: str
    annotation: object
    default: object

    @property
    def name(self) -> str:
        return f"{self.section}.{self.key}" if self.section else self.key

    @property
    def plain_type(self) -> object:
        """Return the type without its annotations."""
        is_annotated = get_origin(self.annotation) is Annotated
        plain = get_args(self.annotation)[0] if is_annotated else self.annotation
        # A value for an optional text is always text, never None.
        return str if plain == str | None else plain

    @property
    def meta(self) -> Meta:
        if (found := self._meta) is None:
            raise TypeError(f"setting {self.name} has no Meta with a description")
        return found

    @property
    def is_described(self) -> bool:
        return self._meta is not None

    @property
    def _meta(self) -> Meta | None:
        extras = get_args(self.annotation)[1:]
        return next((extra for extra in extras if isinstance(extra, Meta)), None)

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the only texts that a setting or a list's entry may have; empty if any may."""
        kind = get_args(self.plain_type)[0] if self.is_list else self.plain_type
        return tuple(get_args(kind)) if get_origin(kind) is Literal else ()

    @property
    def is_bool(self) -> bool:
        return self.plain_type is bool

    @property
    def is_list(self) -> bool:
        return get_origin(self.plain_type) is tuple

    @property
    def is_repeated(self) -> bool:
        """Return whether the flag is given once per entry, which may then hold commas."""
        return (self.meta.extra or {}).get("kind") == "repeated"

    @property
    def is_path(self) -> bool:
        return (self.meta.extra or {}).get("kind") == "path"

    @property
    def unit(self) -> str:
        return str((self.meta.extra or {}).get("unit", ""))

    @property
    def flag(self) -> str:
        """Return the flag that does not name the section."""
        return "--" + self.key.replace("_", "-")

    @property
    def metavar(self) -> str:
        if self.is_repeated:
            return "TEXT"
        if self.is_list:
            return "A,B"
        if self.choices:
            return "{" + ",".join(filter(None, self.choices)) + "}"
        if self.is_bool:
            return "true|false"
        if self.is_path:
            return "PATH"
        if self.plain_type is str:
            return self.key.upper()
        return self.unit.upper() or "N"

    @property
    def meaning(self) -> str:
        """Return the description and the choices."""
        text = self.meta.description or ""
        return f"{text} ({', '.join(self.choices)})" if self.choices else text

    @property
    def shown_default(self) -> str:
        if isinstance(self.default, bool):
            return str(self.default).lower()
        if isinstance(self.default, tuple):
            return ",".join(str(entry) for entry in self.default) or "none"
        if self.default is None:
            return "unset"
        return "empty" if self.default == "" else str(self.default)

    @property
    def help(self) -> str:
        """Return the help for argparse, with percent signs escaped."""
        text = self.meta.description or ""
        if self.default not in ("", ()):
            is_float = isinstance(self.default, float)
            shown = f"{self.default:g}" if is_float else self.shown_default
            text += f" (default: {shown}{f' {self.unit}' if self.unit else ''})"
        return text.replace("%", "%%")

    def from_text(self, text: str | list[str], shown: str = "") -> object:
        """Return the value that a flag or `--set` gives. Raises `ConfigError`, naming `shown`.

        `text` is a list for a flag that was repeated.
        """
        given: object = text
        if self.is_list and isinstance(text, str):
            given = tuple(part for part in text.split(",") if part)
        return self._convert(given, text, shown, strict=False)

    def from_yaml(self, value: object) -> object:
        """Return the value that a file gives. Raises `ConfigError`."""
        return self._convert(value, value, "", strict=True)

    def _convert(self, given: object, written: object, shown: str, *, strict: bool) -> object:
        why = "expected a finite number"
        try:
            value: object = msgspec.convert(given, self.annotation, strict=strict)
            if not isinstance(value, float) or math.isfinite(value):
                return value
        except msgspec.ValidationError as error:
            why = _in_words(str(error))
        if self.choices:
            why = f"choose one of {', '.join(filter(None, self.choices))}"
        raise ConfigError(f"{shown or f'setting {self.name}'} cannot be {written!r}: {why}")


def _in_words(error: str) -> str:
    """Return msgspec's message without the names of Python's types."""
    words = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
    for kind, word in words.items():
        error = error.replace(f", got `{kind}`", "").replace(f"`{kind}`", word)
    return error.partition(" - at ")[0].replace("Expected", "expected")


@functools.cache
def fields_of(config: type[msgspec.Struct]) -> tuple[Field, ...]:
    """Return every leaf of `config`, the top level first, then section by section."""
    return _fields("", config())


def _fields(section: str, config: msgspec.Struct) -> tuple[Field, ...]:
    leaves: list[Field] = []
    nested: list[Field] = []
    for key, annotation in get_type_hints(type(config), include_extras=True).items():
        value = getattr(config, key)
        if isinstance(value, msgspec.Struct):
            nested += _fields(f"{section}.{key}" if section else key, value)
        else:
            leaves.append(Field(section, key, annotation, value))
    return (*leaves, *nested)


def with_values(config: S, values: Mapping[str, object]) -> S:
    """Return `config` with other values of the settings with these dotted names."""
    for name, value in values.items():
        config = _with_value(config, name, value)
    return config


def _with_value(config: S, name: str, value: object) -> S:
    key, _, rest = name.partition(".")
    return msgspec.structs.replace(
        config, **{key: _with_value(getattr(config, key), rest, value) if rest else value}
    )
