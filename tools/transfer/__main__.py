"""Measure reads of another rank's blocks: shm and nixl against memcpy and raw NIXL, in GB/s and ms.

The command is `python -m tools.transfer`. The owner of the blocks is another process on this host.
The ways take turns within each round and move the same number of bytes, so that a noisy machine
hits all of them; a ratio is the median of the rounds' ratios. The bytes of every way are checked: a
read that brings wrong blocks fails the run.
"""

import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median

import msgspec
import numpy as np

from baton.bench.figures.paired import nearest_rank
from baton.bench.report.provenance import Provenance, collect, complete
from baton.kv_transfer.pools import HostPool, PoolShape
from baton.kv_transfer.transports.nixl_binding import is_installed
from baton.protocol.config import TransportChoice
from baton.protocol.errors import BatonError, ConfigError
from baton.runtime.clock import monotonic
from tools.block_owner import BlockOwner
from tools.json_file import json_file, save
from tools.transfer.block_readers import (
    BRINGS_NOTHING,
    MEMCPY,
    RAW_NIXL,
    Ids,
    Reader,
    readers,
)
from tools.transfer.marked_blocks import MODULE, Owned, wrong_blocks
from tools.transfer.settings import MIB, Pattern, TransferSettings, command_line, parse

SCHEMA = "baton.tools.transfer/1"
DEFINITIONS = {
    "latency": "of one read by its caller: from posting it until its end is known; one at a time",
    "gb_per_s": "10^9 bytes/s: bytes of a read / its median latency; best: / the smallest one",
    "percentile": "nearest rank on the sorted latencies",
    "memcpy": "as many bytes in one piece between two memory pools of one process, same run",
    "verified": "the same read, whose blocks are checked when they have arrived (CRC-32)",
    "sums": "the checksums of as many blocks by the agent that announces them, without a read",
    "raw_nixl": "the same blocks by one request to NIXL, without baton, same run",
    "of_memcpy": "median over the rounds of memcpy's latency / this one's; of_raw_nixl alike",
    "run": "neighbouring blocks on both sides",
    "gather": "blocks from anywhere into neighbouring ones",
    "scattered": "blocks from anywhere to anywhere",
}


class Kind(msgspec.Struct, frozen=True):
    """The reads of one kind."""

    block_bytes: int
    num_blocks: int
    pattern: Pattern

    @property
    def read_bytes(self) -> int:
        return self.block_bytes * self.num_blocks


class Row(msgspec.Struct, frozen=True):
    """The figures of one kind of read by one way."""

    kind: Kind
    way: str
    num_reads: int
    gb_per_s: float
    best_gb_per_s: float
    p50_ms: float
    p99_ms: float
    of_memcpy: float
    of_raw_nixl: float | None  # set for nixl only


class TransferReport(msgspec.Struct, frozen=True):
    schema: str
    settings: TransferSettings
    definitions: dict[str, str]
    provenance: Provenance
    ucx_tls: str  # UCX_TLS of the environment; empty leaves the choice to UCX
    rows: list[Row]
    notes: list[str]


def transfer(
    settings: TransferSettings, on_rows: Callable[[Sequence[Row]], None] | None = None
) -> TransferReport:
    """Measure every kind of read that fits, and pass each to `on_rows`. Raises `BatonError`."""
    provenance = collect(command_line(settings))
    transports, notes = _transports(settings)
    kinds, too_large = _kinds(settings)
    notes += too_large
    dice = random.Random(settings.seed)
    rows: list[Row] = []
    for block_kib in dict.fromkeys(settings.block_kib):
        shape = PoolShape(settings.pool_mib * MIB // (block_kib << 10), block_kib << 10)
        of_size = [kind for kind in kinds if kind.block_bytes == shape.block_bytes]
        if not of_size:
            continue
        for found in _measure_size(settings, shape, of_size, transports, dice):
            rows += found
            if on_rows:
                on_rows(found)
    ucx_tls = os.environ.get("UCX_TLS", "")
    done = complete(provenance)
    return TransferReport(SCHEMA, settings, DEFINITIONS, done, ucx_tls, rows, notes)


def _transports(settings: TransferSettings) -> tuple[tuple[TransportChoice, ...], list[str]]:
    if settings.transports:
        if "nixl" in settings.transports and not is_installed():
            raise ConfigError("transports: NIXL is not installed; pip install -e '.[nixl]'")
        return tuple(dict.fromkeys(settings.transports)), []
    if is_installed():
        return ("shm", "nixl"), []
    return ("shm",), ["NIXL is not installed: only shm was measured"]


def _kinds(settings: TransferSettings) -> tuple[list[Kind], list[str]]:
    """Return the kinds that fit, and a line about the others. A single block has one pattern."""
    kinds, left_out = [], []
    limit_mib = min(settings.max_read_mib, settings.pool_mib)
    for block_kib in dict.fromkeys(settings.block_kib):
        for count in dict.fromkeys(settings.blocks):
            if count * block_kib << 10 > limit_mib * MIB:
                left_out.append(f"{count} x {block_kib} KiB")
                continue
            alike: tuple[Pattern, ...] = ("run",)
            patterns = tuple(dict.fromkeys(settings.patterns)) if count > 1 else alike
            kinds += [Kind(block_kib << 10, count, pattern) for pattern in patterns]
    if not kinds:
        raise ConfigError(f"no such read fits {limit_mib} MiB; see --pool-mib, --max-read-mib")
    if left_out:
        return kinds, [f"larger than {limit_mib} MiB, left out: {', '.join(left_out)}"]
    return kinds, []


def _measure_size(
    settings: TransferSettings,
    shape: PoolShape,
    kinds: Sequence[Kind],
    transports: tuple[TransportChoice, ...],
    dice: random.Random,
) -> Iterator[list[Row]]:
    pool = HostPool(shape.num_blocks, shape.block_bytes)
    try:
        with (
            BlockOwner(MODULE, Owned(shape, transports)) as owner,
            readers(pool, owner.address.metadata, transports, settings.verify) as ways,
        ):
            _touch(shape, ways)
            for kind in kinds:
                latencies = _rounds(shape, ways, kind, settings.reads, dice)
                _check(pool, ways, kind, dice)
                yield _rows(kind, latencies)
    finally:
        pool.close()


def _touch(shape: PoolShape, ways: Mapping[str, Reader]) -> None:
    """Touch every page once by every way, so that first contacts are not measured."""
    everything = np.arange(shape.num_blocks, dtype=np.int32)
    step = max(1, 16 * MIB // shape.block_bytes)
    for way in ways.values():
        for begin in range(0, shape.num_blocks, step):
            part = everything[begin : begin + step]
            way(part, part)


def _rounds(
    shape: PoolShape, ways: Mapping[str, Reader], kind: Kind, num_reads: int, dice: random.Random
) -> dict[str, list[float]]:
    """Return the seconds of each way in each round, after one round that is not counted."""
    latencies: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(num_reads + 1):
        order = list(ways)
        dice.shuffle(order)
        for name in order:
            remote, local = _places(dice, shape.num_blocks, kind)
            began_s = monotonic()
            ways[name](remote, local)
            elapsed_s = monotonic() - began_s
            if number:
                latencies[name].append(elapsed_s)
    return latencies


def _places(dice: random.Random, num_blocks: int, kind: Kind) -> tuple[Ids, Ids]:
    """Draw (remote, local) block ids."""

    def run() -> Ids:
        begin = dice.randrange(num_blocks - kind.num_blocks + 1)
        return np.arange(begin, begin + kind.num_blocks, dtype=np.int32)

    def lone() -> Ids:
        return np.array(dice.sample(range(num_blocks), kind.num_blocks), np.int32)

    remote = run() if kind.pattern == "run" else lone()
    return remote, lone() if kind.pattern == "scattered" else run()


def _check(pool: HostPool, ways: Mapping[str, Reader], kind: Kind, dice: random.Random) -> None:
    for name, way in ways.items():
        if name in BRINGS_NOTHING:
            continue
        remote, local = _places(dice, pool.shape.num_blocks, kind)
        np.frombuffer(pool.buffer, np.uint8)[:] = 0
        way(remote, local)
        if wrong := wrong_blocks(pool, remote, local):
            raise BatonError(f"{name} brought {wrong} wrong blocks of {len(remote)}")


def _rows(kind: Kind, latencies: Mapping[str, Sequence[float]]) -> list[Row]:
    return [_row(kind, way, latencies) for way in latencies]


def _row(kind: Kind, way: str, latencies: Mapping[str, Sequence[float]]) -> Row:
    ordered = sorted(latencies[way])
    p50_s, p99_s = nearest_rank(ordered, 50), nearest_rank(ordered, 99)

    def ratio(base: str) -> float:
        pairs = zip(latencies[base], latencies[way], strict=True)
        return round(median(base_s / way_s for base_s, way_s in pairs), 3)

    return Row(
        kind,
        way,
        num_reads=len(ordered),
        gb_per_s=round(kind.read_bytes / p50_s / 1e9, 3),
        best_gb_per_s=round(kind.read_bytes / ordered[0] / 1e9, 3),
        p50_ms=round(1e3 * p50_s, 4),
        p99_ms=round(1e3 * p99_s, 4),
        of_memcpy=ratio(MEMCPY),
        of_raw_nixl=ratio(RAW_NIXL) if way == "nixl" else None,
    )


# --- as a command ---------------------------------------------------------------------------------

HEADINGS = ("block KiB", "blocks", "pattern", "way", "GB/s", "best", "p50 ms", "p99 ms")
RATIOS = ("of memcpy", "of raw NIXL")


def table(rows: Sequence[Row], heading: bool = True) -> str:
    """Return lines of equal columns."""
    lines = [(*HEADINGS, *RATIOS)] if heading else []
    for row in rows:
        of_raw = "" if row.of_raw_nixl is None else f"{row.of_raw_nixl:.2f}"
        lines.append(
            (
                str(row.kind.block_bytes >> 10), str(row.kind.num_blocks), row.kind.pattern,
                row.way, f"{row.gb_per_s:.2f}", f"{row.best_gb_per_s:.2f}", f"{row.p50_ms:.3f}",
                f"{row.p99_ms:.3f}", f"{row.of_memcpy:.2f}", of_raw,
            )
        )  # fmt: skip
    widths = (9, 7, 10, 15, 8, 8, 10, 10, 10, 12)
    return "\n".join(
        "".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def main(arguments: Sequence[str]) -> int:
    """Measure, print a table and write the report."""
    settings = parse(arguments)
    out = json_file(settings.json)
    print(table([]), flush=True)
    report = transfer(settings, lambda rows: print(table(rows, heading=False), flush=True))
    for note in report.notes:
        print(note)
    if out:
        save(out, report)
    return 0


def _alone() -> int:
    try:
        return main(sys.argv[1:])
    except BatonError as error:
        print(f"baton: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    sys.exit(_alone())
