"""The settings of `python -m tools.transfer`, and the flags that are made of them.

Read by `tools.transfer`; written into its reports. Help and units are in the annotations. Lists are
written `64 256` or `64,256`.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from baton.protocol.errors import ConfigError
from baton.runtime.fields import Field, fields_of
from baton.runtime.flag_parser import FlagParser

MIB = 1 << 20
Pattern = Literal["run", "gather", "scattered"]
TransportName = Literal["shm", "nixl"]
Size = Annotated[int, Meta(ge=1)]


class TransferSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    block_kib: Annotated[
        tuple[Size, ...], Meta(min_length=1, description="block sizes", extra={"unit": "KiB"})
    ] = (64, 256, 1024, 4096)
    blocks: Annotated[
        tuple[Size, ...],
        Meta(min_length=1, description="blocks of one read; reads that do not fit are left out"),
    ] = (1, 16, 64, 256, 1024)
    patterns: Annotated[
        tuple[Pattern, ...],
        Meta(min_length=1, description="where a read's blocks lie: run, gather or scattered"),
    ] = ("run", "gather", "scattered")
    transports: Annotated[
        tuple[TransportName, ...], Meta(description="shm or nixl; none takes all that work here")
    ] = ()
    reads: Annotated[int, Meta(ge=1, description="timed reads of each kind, by every way")] = 100
    pool_mib: Annotated[
        int, Meta(ge=1, description="memory for the blocks, three times", extra={"unit": "MiB"})
    ] = 256
    max_read_mib: Annotated[int, Meta(ge=1, description="largest read", extra={"unit": "MiB"})] = 64
    seed: Annotated[int, Meta(ge=0, description="of the places and of the turns")] = 0
    json: Annotated[str, Meta(description="file for the report")] = ""


def command_line(settings: TransferSettings) -> list[str]:
    """What gives these settings; the place of the report is nobody's business."""
    words = ["baton", "bench", "transfer"]
    for field in fields_of(TransferSettings):
        value = getattr(settings, field.key)
        if value != field.default and field.key != "json":
            parts = value if field.is_list else (value,)
            words += [_flag(field.key), *(str(part) for part in parts)]
    return words


def parse(arguments: Sequence[str]) -> TransferSettings:
    """Flags from the settings; a list is written `64 256` or `64,256`."""
    parser = FlagParser(
        "python -m tools.transfer", description="Measure the transports of KV blocks."
    )
    fields = {field.key: field for field in fields_of(TransferSettings)}
    for key, field in fields.items():
        nargs = "+" if field.is_list else None
        metavar = field.unit.upper() or key.upper()
        parser.add_argument(_flag(key), dest=key, nargs=nargs, metavar=metavar, help=field.help)
    given = vars(parser.parse_args(arguments))
    values = {key: _value(fields[key], text) for key, text in given.items() if text is not None}
    return msgspec.convert(values, TransferSettings)


def _value(field: Field, given: str | list[str]) -> object:
    if isinstance(given, str):
        return field.from_text(given)
    parts = [part for text in given for part in text.split(",") if part]
    try:
        return msgspec.convert(parts, field.annotation, strict=False)
    except msgspec.ValidationError as error:
        (item, _) = get_args(field.plain_type)
        names = get_args(item) if get_origin(item) is Literal else ()
        what = " or ".join(names) or "whole numbers from 1 up"
        text = f"{_flag(field.key)} cannot be {' '.join(given)!r}: expected {what}"
        raise ConfigError(text) from error


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")
