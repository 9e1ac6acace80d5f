"""Soak a cluster on this host: `python -m tools.soak --requests 10000 --faults 1000`.

Streams with known outputs run while processes are killed, ended and frozen. The exit code is 0 only
if no token was wrong, no stream was lost, and at the end nothing was still held. Soaks with seeds
of their own may run side by side: they share nothing but the machine.
"""

import asyncio
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from baton.bench.figures.metrics import nearest_rank
from baton.deploy.model_folder import CHECKPOINT
from baton.protocol.config import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    ModelConfig,
    NodeConfig,
    RouterConfig,
    TransferConfig,
    TransportChoice,
)
from baton.protocol.errors import BatonError
from baton.runtime.clock import monotonic
from baton.runtime.fields import FlagParser, fields_of, with_values
from tools.soak.cluster import Footprint, SoakCluster, held_in
from tools.soak.faults import Fault, Faults
from tools.soak.streams import Record, Streams, draw

NAME = "soaked"
NUM_ASKS = 24
ABORT_SHARE = 0.2
# A process may hold this much more than at the start, for buffers and an idle connection.
SPARE_DESCRIPTORS = 16
SPARE_THREADS = 4
SPARE_MIB = 64
NUM_BLOCKS = 400  # of a pool, few enough to be evicted and fought over
TIER_GIB = 1 / 16
CACHE = "cache"  # the folder below that of the soak
OVER_LOOPBACK = (("UCX_TLS", "tcp"), ("UCX_NET_DEVICES", "lo"))


class SoakSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    requests: Annotated[int, Meta(ge=1, description="number of streams")] = 10_000
    faults: Annotated[int, Meta(ge=0, description="number of faults")] = 1_000
    clients: Annotated[int, Meta(ge=1, description="streams that run side by side")] = (
        12
    )
    lanes: Annotated[int, Meta(ge=1, description="faults that may overlap")] = 2
    seed: Annotated[
        int, Meta(ge=0, description="seed of the streams and of the faults")
    ] = 1
    transport: Annotated[TransportChoice, Meta(description="how blocks are read")] = (
        "auto"
    )
    model: Annotated[str, Meta(description="folder of the model")] = str(CHECKPOINT)
    vocab_size: Annotated[int, Meta(ge=4, description="prompts hold ids below it")] = (
        700
    )
    tiers: Annotated[
        bool,
        Meta(
            description="keep cached blocks in memory and in a folder, whose files are damaged"
        ),
    ] = False
    folder: Annotated[
        str, Meta(description="existing folder for the logs of all processes")
    ] = ""


class FaultRow(msgspec.Struct, frozen=True):
    """The faults of one kind on one role, and the longest gaps of the streams under them."""

    role: str
    kind: str
    num_faults: int
    num_streams: int  # that were under way during one of these faults
    num_resumed: int
    num_wrong: int
    num_lost: int
    gap_p50_s: float
    gap_p99_s: float
    gap_max_s: float


class SoakReport(msgspec.Struct, frozen=True):
    wall_s: float  # under load, from the first stream to the last end
    outcomes: dict[str, int]
    num_resumed: int
    num_refusals: int
    rows: list[FaultRow]
    problems: list[str]
    before: dict[str, Footprint]
    after: dict[str, Footprint]


async def soak(settings: SoakSettings, folder: Path) -> SoakReport:
    """Run the soak in an empty folder. Raises `BatonError` if the cluster cannot serve at all."""
    env = OVER_LOOPBACK if settings.transport == "nixl" else ()
    async with SoakCluster(folder, _config(settings, folder), env) as cluster:
        cache = folder / CACHE if settings.tiers else None
        faults = Faults(cluster, settings.seed, settings.faults, cache)
        asks = draw(settings.seed, NUM_ASKS, settings.vocab_size)
        streams = Streams(cluster.url, NAME, asks, faults.ended_router)
        await streams.learn()
        await cluster.until(
            "every block to be free", lambda health: not held_in(health)
        )
        before = await cluster.footprints()
        began_s = monotonic()
        records = await _load(settings, streams, faults)
        wall_s = monotonic() - began_s
        again = await streams.verify()
        await cluster.until(
            "every block to be free", lambda health: not held_in(health)
        )
        after = await cluster.footprints()
        problems = [*cluster.own_ends, *cluster.alarms, *faults.bad_exits]
    problems += [
        f"at the end: {record.detail}" for record in again if record.outcome != "whole"
    ]
    problems += [
        f"{r.outcome}: {r.detail}" for r in records if r.outcome in ("wrong", "lost")
    ]
    problems += _grown(before, after)
    outcomes = dict.fromkeys(("whole", "aborted", "cut", "wrong", "lost"), 0)
    for record in records:
        outcomes[record.outcome] += 1
    return SoakReport(
        wall_s,
        outcomes,
        sum(record.is_resumed for record in records),
        sum(record.num_refusals for record in records),
        _rows(faults.begun, records),
        problems,
        before,
        after,
    )


async def _load(
    settings: SoakSettings, streams: Streams, faults: Faults
) -> list[Record]:
    """Run the streams and the faults together: each fault meets about as many new streams."""
    num_begun = 0
    per_fault = settings.requests / max(settings.faults, 1)

    def may_begin() -> bool | None:
        nonlocal num_begun
        is_last = len(faults.begun) == settings.faults
        if is_last and num_begun >= settings.requests:
            return False
        # A fault that is due finds at least one stream, even if that makes one more.
        if (
            num_begun >= (len(faults.begun) + 1) * per_fault
            and streams.num_running
            and not is_last
        ):
            return None
        num_begun += 1
        return True

    def may_strike(number: int) -> bool:
        return num_begun >= (number + 0.5) * per_fault and streams.num_running > 0

    async with asyncio.TaskGroup() as group:
        group.create_task(faults.run(may_strike, settings.lanes))
        clients = [
            group.create_task(
                streams.run(
                    random.Random(f"{settings.seed}/{number}"), ABORT_SHARE, may_begin
                )
            )
            for number in range(settings.clients)
        ]
    return [record for client in clients for record in client.result()]


def _config(settings: SoakSettings, folder: Path) -> ClusterConfig:
    cache = CacheConfig(num_blocks=NUM_BLOCKS)
    if settings.tiers:
        cache = CacheConfig(
            num_blocks=NUM_BLOCKS,
            kv_offloading_size=TIER_GIB,
            folder=str(folder / CACHE),
            folder_size=TIER_GIB,
        )
    return ClusterConfig(
        prefill=2,
        decode=2,
        model=ModelConfig(path=settings.model, served_model_name=NAME),
        cache=cache,
        engine=EngineConfig(max_num_batched_tokens=64, threads=1),
        # Faults come faster here than attempts bring tokens.
        router=RouterConfig(max_attempts=8),
        node=NodeConfig(shutdown_timeout_s=2.0),
        transfer=TransferConfig(transport=settings.transport),
    )


def _rows(faults: Sequence[Fault], records: Sequence[Record]) -> list[FaultRow]:
    kinds = sorted({(fault.role, fault.kind.name) for fault in faults})
    return [_row(role, kind, faults, records) for role, kind in kinds]


def _row(
    role: str, kind: str, faults: Sequence[Fault], records: Sequence[Record]
) -> FaultRow:
    ours = [fault for fault in faults if (fault.role, fault.kind.name) == (role, kind)]
    met = [
        (fault, record)
        for fault in ours
        for record in records
        if record.began_s < fault.until_s and record.ended_s > fault.at_s
    ]
    gaps = sorted(
        record.longest_gap(fault.at_s, fault.until_s) for fault, record in met
    )
    ranks = [nearest_rank(gaps, percent) if gaps else 0.0 for percent in (50, 99, 100)]
    outcomes = Counter(record.outcome for _, record in met)
    num_resumed = sum(record.is_resumed for _, record in met)
    return FaultRow(
        role,
        kind,
        len(ours),
        len(gaps),
        num_resumed,
        outcomes["wrong"],
        outcomes["lost"],
        *ranks,
    )


def _grown(before: dict[str, Footprint], after: dict[str, Footprint]) -> list[str]:
    """Return what each process holds beyond what it held at the start."""
    found: list[str] = []
    for name, was in before.items():
        now = after[name]
        is_more = (
            now.descriptors > was.descriptors + SPARE_DESCRIPTORS
            or now.threads > was.threads + SPARE_THREADS
            or now.rss_mib > was.rss_mib + SPARE_MIB
        )
        if is_more:
            found.append(f"{name} has grown from {was} to {now}")
    return found


def table(report: SoakReport) -> str:
    """Return the report as text."""
    lines = [
        f"{'role':8} {'fault':20} {'faults':>6} {'streams':>7} {'resumed':>7} {'wrong':>5} "
        f"{'lost':>4}   longest gap p50, p99, max (s)"
    ]
    lines += [
        f"{row.role:8} {row.kind:20} {row.num_faults:6} {row.num_streams:7} {row.num_resumed:7} "
        f"{row.num_wrong:5} {row.num_lost:4}"
        f"   {row.gap_p50_s:6.2f} {row.gap_p99_s:6.2f} {row.gap_max_s:6.2f}"
        for row in report.rows
    ]
    counts = ", ".join(f"{count} {name}" for name, count in report.outcomes.items())
    lines.append(
        f"streams: {counts}; {report.num_resumed} resumed, {report.num_refusals} refusals"
    )
    num_faults = sum(row.num_faults for row in report.rows)
    per_fault_s = report.wall_s / max(num_faults, 1)
    lines.append(
        f"{num_faults} faults in {report.wall_s:.0f} s: one per {per_fault_s:.1f} s"
    )
    lines.append(
        f"{'start -> end':10}  used blocks   descriptors   threads   memory (MiB)"
    )
    for name, was in report.before.items():
        now = report.after[name]
        lines.append(
            f"{name:12} {was.used_blocks:5} -> {now.used_blocks} of {now.total_blocks}"
            f"   {was.descriptors:4} -> {now.descriptors}   {was.threads:3} -> {now.threads}"
            f"   {was.rss_mib:5} -> {now.rss_mib}"
        )
    return "\n".join([*lines, *(f"PROBLEM {problem}" for problem in report.problems)])


def parse(arguments: Sequence[str]) -> SoakSettings:
    """Return the settings; `--help` prints and exits. Raises `ConfigError`."""
    parser = FlagParser(
        "python -m tools.soak", description="Soak a cluster on this host."
    )
    fields = fields_of(SoakSettings)
    parser.add_settings(fields, group_of=lambda _: "settings")
    given = parser.parse_args(arguments)
    return with_values(SoakSettings(), parser.values_in(given, fields))


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        given = sys.argv[1:] if arguments is None else arguments
        settings = parse(given)
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            print(f"seed {settings.seed}", flush=True)
            report = asyncio.run(soak(settings, Path(settings.folder or folder)))
        print(table(report))
    except (BatonError, OSError) as error:
        print(f"baton: {error}", file=sys.stderr)
        return 1
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
