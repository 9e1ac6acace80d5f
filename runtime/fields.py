"""The settings as a flat list of fields, and the argument parser whose flags are made of them.

A field is a leaf of a config tree: name, type, default, unit and help. `with_values` puts the given
values back into the tree. The generator of docs/config.md prints the list.
"""

import argparse
import contextlib
import difflib
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import (
    Annotated,
    Literal,
    NoReturn,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta

from baton.protocol.errors import ConfigError

S = TypeVar("S", bound=msgspec.Struct)


class Field(msgspec.Struct, frozen=True):
    """One setting. `name` is dotted, `section` empty at the top level.

    The `extra` of its Meta may hold a `unit` and a `kind`, as `protocol.config.about` writes them.
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
        """Return the annotation; it has no description for a field that is no setting."""
        extras = get_args(self.annotation)[1:]
        return next((extra for extra in extras if isinstance(extra, Meta)), Meta())

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the only texts that a setting or a list's entry may have; empty if any may."""
        kind = get_args(self.plain_type)[0] if self.is_list else self.plain_type
        return tuple(get_args(kind)) if get_origin(kind) is Literal else ()

    @property
    def is_bool(self) -> bool:
        """Return whether true and false are values, or the only ones."""
        return self.plain_type is bool or set(self.choices) >= {"true", "false"}

    @property
    def is_list(self) -> bool:
        return get_origin(self.plain_type) is tuple

    @property
    def kind(self) -> str:
        """Return `repeated` for a flag that is given once per entry, which may then hold commas."""
        return str((self.meta.extra or {}).get("kind", ""))

    @property
    def unit(self) -> str:
        return str((self.meta.extra or {}).get("unit", ""))

    @property
    def flag(self) -> str:
        """Return the flag that does not name the section."""
        return "--" + self.key.replace("_", "-")

    @property
    def metavar(self) -> str:
        if self.kind == "repeated":
            return "TEXT"
        if self.is_list:
            return "A,B"
        if self.choices:
            return "{" + ",".join(filter(None, self.choices)) + "}"
        if self.is_bool:
            return "true|false"
        if self.kind == "path":
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
        if self.plain_type is str and isinstance(text, list):
            given = ",".join(text)
        if self.plain_type is int and isinstance(text, str):
            given = _whole_number(text)
        if self.is_list and isinstance(text, str):
            parts = text.split(",") if text else []
            # What is blank alone is no empty list: an API key that was lost must not open a router.
            given = [part for part in parts if part.strip()] or parts
        return self._convert(given, text, shown, strict=False)

    def from_yaml(self, value: object) -> object:
        """Return the value that a file gives. Raises `ConfigError`."""
        return self._convert(value, value, "", strict=True)

    def _convert(
        self, given: object, written: object, shown: str, *, strict: bool
    ) -> object:
        if self.is_list and isinstance(given, list):
            # A secret often ends with a line break, and lists are written with blanks.
            given = [
                entry.strip() if isinstance(entry, str) else entry for entry in given
            ]
        if self.is_bool and self.choices:
            with contextlib.suppress(msgspec.ValidationError):
                is_true = msgspec.convert(given, bool, strict=strict)
                given = "true" if is_true else "false"
        why = "expected a finite number"
        try:
            value: object = msgspec.convert(given, self.annotation, strict=strict)
            if not isinstance(value, float) or math.isfinite(value):
                return value
        except msgspec.ValidationError as error:
            why = in_words(str(error))
        if self.choices:
            why = f"choose one of {', '.join(filter(None, self.choices))}"
        raise ConfigError(
            f"{shown or f'setting {self.name}'} cannot be {written!r}: {why}"
        )


_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG])")
_FACTORS = {
    "k": 1000,
    "m": 1000**2,
    "g": 1000**3,
    "K": 1 << 10,
    "M": 1 << 20,
    "G": 1 << 30,
}


def _whole_number(text: str) -> str:
    """Return `100k` or `2K` as digits, as vLLM reads them: K, M and G are powers of 1,024."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        return text
    number = float(match[1]) * _FACTORS[match[2]]
    return str(int(number)) if number.is_integer() else text


def in_words(error: str) -> str:
    """Return msgspec's message without the names of Python's types, and with the field first."""
    words = {
        "int": "a whole number",
        "float": "a number",
        "bool": "true or false",
        "str": "text",
        "array": "a list",
        "object": "a mapping",
    }
    for kind, word in words.items():
        error = re.sub(rf", got `{kind}`", "", error)
        error = error.replace(f"`{kind}`", word)
    error, _, field = error.partition(" - at ")
    error = error.replace("Expected", "expected")
    name = field.strip("`").removeprefix("$").removeprefix(".")
    return f"{name}: {error}" if name else error


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
        config,
        **{key: _with_value(getattr(config, key), rest, value) if rest else value},
    )


# The placeholder in a flag's help for a value that is or may be a file or a folder.
PATHS = ("PATH", "FILE", "FOLDER", "MODEL")
_UNKNOWN = "unrecognized arguments: "


class FlagParser(argparse.ArgumentParser):
    """A parser without abbreviated flags: a new flag would change what an abbreviation means.

    `words` holds, by an argument's `dest`, its only possible values if there are few, and `foreign`
    what to use instead of flags of other servers.
    """

    def __init__(self, prog: str, **how: object) -> None:
        how.setdefault("formatter_class", _HelpFormatter)
        super().__init__(prog, allow_abbrev=False, **how)  # type: ignore[arg-type]
        self.words: dict[str, tuple[str, ...]] = {}
        self.foreign: dict[str, str] = {}

    def mark_values(self, path: object) -> None:
        """Mark arguments for `shtab`: those with few values, and those that are a `path`."""
        for action in self._actions:
            if action.dest in self.words:
                action.choices = self.words[action.dest]
            elif action.metavar in PATHS:
                action.complete = path  # type: ignore[attr-defined]

    def add_settings(
        self,
        fields: Iterable[Field],
        flags_of: Callable[[Field], Sequence[str]] = lambda field: (field.flag,),
        group_of: Callable[[Field], str] = lambda field: field.section,
    ) -> None:
        """Add a flag per setting, in groups with titles. A flag that is not given is None."""
        groups: dict[str, argparse._ArgumentGroup] = {}
        for field in fields:
            title = group_of(field)
            if title not in groups:
                groups[title] = self.add_argument_group(title)
            how: dict[str, object] = (
                {"nargs": "?", "const": "true"} if field.is_bool else {}
            )
            if field.kind == "repeated":
                how = {"action": "append"}
            if field.kind == "switch":
                how = {"action": "store_const", "const": "true"}
            else:
                how["metavar"] = field.metavar
            words = tuple(filter(None, field.choices))
            if field.is_bool and not words:
                words = ("true", "false")
            if words:
                self.words[field.name] = words
            groups[title].add_argument(
                *flags_of(field),
                dest=field.name,
                help=field.help,
                default=None,
                **how,  # type: ignore[arg-type]
            )

    def values_in(
        self, parsed: argparse.Namespace, fields: Iterable[Field]
    ) -> dict[str, object]:
        """Return the settings that a command line gives, by their names. Raises `ConfigError`."""
        given = vars(parsed)
        return {
            field.name: field.from_text(given[field.name], field.flag)
            for field in fields
            if given.get(field.name) is not None
        }

    def error(self, message: str) -> NoReturn:
        if not message.startswith(_UNKNOWN):
            raise ConfigError(f"{message}; see {self.prog} --help")
        unknown = message.removeprefix(_UNKNOWN)
        word = (unknown.split() or [unknown])[0].partition("=")[0]
        if not word.startswith("-"):
            raise ConfigError(
                f"{self.prog} does not take {word!r}; see {self.prog} --help"
            )
        if word in self.foreign:
            raise ConfigError(
                f"{word} is a flag of another server: {self.foreign[word]}"
            )
        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        hint = did_you_mean(word, known) or f"; see {self.prog} --help"
        raise ConfigError(f"unknown flag {word}{hint}")


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Return the end of a message about an unknown `word`; empty if no known name is similar."""
    # Compare without dashes and the names' common prefix: they make any two names look alike.
    bare = {name.lstrip("-").removeprefix(prefix): name for name in known}
    near = difflib.get_close_matches(word.lstrip("-").removeprefix(prefix), bare, n=1)
    return f"; did you mean {bare[near[0]]}?" if near else ""


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=100)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Return `--port, --router-port N`, with the value once and not after each name."""
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(
            action, self._get_default_metavar_for_optional(action)
        )
        return f"{', '.join(action.option_strings)} {value}"
