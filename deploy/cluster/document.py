"""A YAML document as typed Structs, with messages that name the file and the key.

Unlike YAML or a plain conversion, it refuses keys that are unknown or written twice.
"""

from collections.abc import Hashable
from pathlib import Path
from typing import TypeVar, get_args, get_origin, get_type_hints

import msgspec
import yaml
from msgspec import Meta

from baton.protocol.errors import ConfigError
from baton.runtime.fields import Field, did_you_mean
from baton.runtime.settings import values_of

S = TypeVar("S", bound=msgspec.Struct)
# Settings of `protocol.config` by their dotted names, each one checked.
Settings = dict[str, object]


def read_document(path: Path) -> object:
    """Return the content of a YAML file. Raises `ConfigError`."""
    try:
        return yaml.load(path.read_text(), _UniqueKeys)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; name the file to read") from error
    except _Twice as error:
        raise ConfigError(f"{path}: {error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error


def struct_of(content: object, kind: type[S], file: str, at: str = "") -> S:
    """Return `content`, which is at key `at` of `file`, as a struct. Raises `ConfigError`."""
    where = f"{file}: {at}" if at else file
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: expected `name: value` lines, got {content!r}")
    hints = get_type_hints(kind, include_extras=True)
    for key in content:
        if key not in hints:
            raise ConfigError(
                f"{file}: unknown key {_joined(at, key)}{did_you_mean(str(key), hints)}"
            )
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in content:
            raise ConfigError(f"{where}: the key {field.name} is missing")
    return kind(
        **{key: _value(value, hints[key], file, _joined(at, key)) for key, value in content.items()}
    )


def _value(value: object, annotation: object, file: str, at: str) -> object:
    """Return the value of one key, converted to its type."""
    if annotation == Settings:
        return _settings(value, file, at)
    origin, parts = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return struct_of(value, annotation, file, at)
    if origin is tuple and _is_struct(parts[0]):
        if not isinstance(value, list):
            raise ConfigError(f"{file}: {at}: expected a list, got {value!r}")
        return tuple(struct_of(one, parts[0], file, f"{at}[{i}]") for i, one in enumerate(value))
    if origin is dict and _is_struct(parts[1]):
        if not isinstance(value, dict):
            raise ConfigError(f"{file}: {at}: expected `name: value` lines, got {value!r}")
        return {
            _leaf(key, parts[0], file, f"the name {at}.{key}"): struct_of(
                one, parts[1], file, f"{at}.{key}"
            )
            for key, one in value.items()
        }
    return _leaf(value, annotation, file, at)


def _settings(value: object, file: str, at: str) -> Settings:
    try:
        return values_of({} if value is None else value, at)
    except ConfigError as error:
        where = file if f"{at}:" in error.message else f"{file}: {at}"
        raise ConfigError(f"{where}: {error.message}") from error


def _leaf(value: object, annotation: object, file: str, at: str) -> object:
    try:
        return Field("", at, annotation, None).from_yaml(value)
    except ConfigError as error:
        said = error.message.removeprefix("setting ")
        if described := next((m.description for m in _metas(annotation) if m.description), ""):
            said = f"{at} cannot be {value!r}: expected {described}"
        raise ConfigError(f"{file}: {said}") from error


def _metas(annotation: object) -> list[Meta]:
    return [one for one in get_args(annotation) if isinstance(one, Meta)]


def _is_struct(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _joined(at: str, key: object) -> str:
    return f"{at}.{key}" if at else str(key)


class _Twice(Exception):
    """A key was written twice."""


class _UniqueKeys(yaml.SafeLoader):
    """A safe loader that refuses a key that is written twice; plain YAML takes the last one."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, object]:
        lines: dict[object, int] = {}
        for key_node, _ in node.value:
            key = key_node.value
            line = key_node.start_mark.line + 1
            if key in lines:
                raise _Twice(
                    f"{key} is written twice, in lines {lines[key]} and {line}: two pools or nodes "
                    "of one name would have the same ids; rename one or merge them"
                )
            lines[key] = line
        return super().construct_mapping(node, deep=deep)
