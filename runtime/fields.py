"""The settings as a flat list: name, type, default, unit and help of each leaf of a config tree.

Used by `settings`, which makes flags of it, and by the generator of docs/config.md.
"""

import functools
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from baton.protocol.errors import ConfigError


class Field(msgspec.Struct, frozen=True):
    """One setting. `name` is dotted, `section` empty at the top level."""

    section: str
    key: str
    annotation: object
    default: object

    @property
    def name(self) -> str:
        return f"{self.section}.{self.key}" if self.section else self.key

    @property
    def plain_type(self) -> object:
        """The type without its annotations."""
        is_annotated = get_origin(self.annotation) is Annotated
        plain = get_args(self.annotation)[0] if is_annotated else self.annotation
        # What may be unset is set as its type.
        return str if plain == str | None else plain

    @property
    def meta(self) -> Meta:
        for extra in get_args(self.annotation)[1:]:
            if isinstance(extra, Meta):
                return extra
        raise TypeError(f"setting {self.name} has no Meta with a description")

    @property
    def choices(self) -> tuple[str, ...]:
        is_literal = get_origin(self.plain_type) is Literal
        return tuple(get_args(self.plain_type)) if is_literal else ()

    @property
    def is_bool(self) -> bool:
        return self.plain_type is bool

    @property
    def is_list(self) -> bool:
        return get_origin(self.plain_type) is tuple

    @property
    def unit(self) -> str:
        return str((self.meta.extra or {}).get("unit", ""))

    @property
    def metavar(self) -> str:
        if self.choices:
            return "{" + ",".join(filter(None, self.choices)) + "}"
        if self.is_bool:
            return "true|false"
        if self.is_list:
            return "A,B"
        if self.plain_type is str:
            return self.key.upper()
        return self.unit.upper() or "N"

    @property
    def meaning(self) -> str:
        """Description and choices."""
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
        """For argparse, which gives the percent sign a meaning."""
        text = self.meta.description or ""
        unit = f" {self.unit}" if self.unit else ""
        return f"{text} (default: {self.shown_default}{unit})".replace("%", "%%")

    def from_text(self, text: str) -> object:
        """The value that a flag or `--set` gives; raises `ConfigError`."""
        if self.is_list:
            return self._convert(tuple(part for part in text.split(",") if part), strict=True)
        return self._convert(text, strict=False)

    def from_yaml(self, value: object) -> object:
        """The value that a file gives; raises `ConfigError`."""
        return self._convert(value, strict=True)

    def _convert(self, value: object, *, strict: bool) -> object:
        try:
            return msgspec.convert(value, self.annotation, strict=strict)
        except msgspec.ValidationError as error:
            if self.choices:
                why = f"it is one of {', '.join(filter(None, self.choices))}"
            else:
                why = _in_words(str(error))
            raise ConfigError(f"setting {self.name} cannot be {value!r}: {why}") from error


def _in_words(error: str) -> str:
    """msgspec's message for people who do not know Python's types."""
    words = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
    for kind, word in words.items():
        error = error.replace(f", got `{kind}`", "").replace(f"`{kind}`", word)
    return error.replace("Expected", "expected")


@functools.cache
def fields_of(config: type[msgspec.Struct]) -> tuple[Field, ...]:
    """Every leaf of `config`, top level first, then section by section."""
    leaves: list[Field] = []
    nested: list[Field] = []
    hints = get_type_hints(config, include_extras=True)
    for info in msgspec.structs.fields(config):
        annotation = hints[info.name]
        if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
            inner = get_type_hints(annotation, include_extras=True)
            nested += [
                Field(info.name, leaf.name, inner[leaf.name], leaf.default)
                for leaf in msgspec.structs.fields(annotation)
            ]
        else:
            leaves.append(Field("", info.name, annotation, info.default))
    return (*leaves, *nested)
