"""The settings of `python -m tools.transfer`, and the flags that are made of them.

`tools.transfer` reads them and writes them into its reports. Help and units are in the annotations.
A list is written as `64,256`.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton.runtime.fields import fields_of
from tools.settings_line import settings_from

MIB = 1 << 20
Pattern = Literal["run", "gather", "scattered"]
TransportName = Literal["shm", "nixl"]
Size = Annotated[int, Meta(ge=1)]


class TransferSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    block_kib: Annotated[
        tuple[Size, ...], Meta(min_length=1, description="sizes of a block", extra={"unit": "KiB"})
    ] = (64, 256, 1024, 4096)
    blocks: Annotated[
        tuple[Size, ...],
        Meta(
            min_length=1,
            description="numbers of blocks of one read; reads that do not fit are left out",
        ),
    ] = (1, 16, 64, 256, 1024)
    patterns: Annotated[
        tuple[Pattern, ...],
        Meta(min_length=1, description="where a read's blocks lie: run, gather or scattered"),
    ] = ("run", "gather", "scattered")
    transports: Annotated[
        tuple[TransportName, ...],
        Meta(description="transports to measure; by default all that work on this machine"),
    ] = ()
    reads: Annotated[int, Meta(ge=1, description="timed reads of each kind by each transport")] = (
        100
    )
    pool_mib: Annotated[
        int,
        Meta(
            ge=1, description="memory of each of the three pools of blocks", extra={"unit": "MiB"}
        ),
    ] = 256
    max_read_mib: Annotated[
        int, Meta(ge=1, description="size of the largest read", extra={"unit": "MiB"})
    ] = 64
    seed: Annotated[
        int, Meta(ge=0, description="seed of the blocks' places and of the order of turns")
    ] = 0
    verify: Annotated[
        bool,
        Meta(
            description="also measure each transport with transfer.verify_kv, and the checksums of "
            "prefill alone"
        ),
    ] = False
    json: Annotated[str, Meta(description="file to write the report to")] = ""


def command_line(settings: TransferSettings) -> list[str]:
    """Return the flags that give these settings, without the file of the report."""
    words = ["python", "-m", "tools.transfer"]
    for field in fields_of(TransferSettings):
        value = getattr(settings, field.key)
        if value != field.default and field.key != "json":
            shown = ",".join(map(str, value)) if field.is_list else str(value).lower()
            words += [field.flag, shown]
    return words


def parse(arguments: Sequence[str]) -> TransferSettings:
    summary = "Measure the transports of KV blocks."
    return settings_from(TransferSettings, "transfer", summary, arguments)
