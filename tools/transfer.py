"""`python -m tools.transfer`: measure shm and nixl against memcpy and raw NIXL, in GB/s and ms.

The owner of the blocks is another process on this host. The ways take turns within each round and
move the same number of bytes, so that a noisy machine hits all of them; a ratio is the median of
the rounds' ratios. The bytes of every way are checked: a read that brings wrong blocks fails the
run. memcpy is the floor: as many bytes in one piece within this process.
"""

import argparse
import ctypes
import os
import random
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.bench.report.provenance import Provenance, collect, complete
from baton.kv_transfer.interfaces import PoolMemory
from baton.kv_transfer.pools import HostPool
from baton.kv_transfer.transports.nixl import NixlAddress
from baton.kv_transfer.transports.nixl_binding import (
    block_rows,
    is_installed,
    make_agent,
)
from baton.protocol.config import TransportChoice
from baton.protocol.errors import BatonError, NodeError
from baton.protocol.messages import RankAddress
from baton.runtime.clock import monotonic
from tools.block_owner import (
    READ_TIMEOUT_S,
    BlockReader,
    Owned,
    block_owner,
    wrong_blocks,
)

# Neighbouring blocks on both sides; from anywhere into neighbours; from anywhere to anywhere.
PATTERNS = ("run", "gather", "scattered")
MIB = 1 << 20
MEMCPY = "memcpy"
RAW_NIXL = "raw_nixl"
HEADINGS = (
    "block KiB",
    "blocks",
    "pattern",
    "way",
    "GB/s",
    "p50 ms",
    "p99 ms",
    "of memcpy",
    "of raw NIXL",
)

Ids = NDArray[np.int32]
# Copies blocks (remote, local), and returns when they are there.
Way = Callable[[Ids, Ids], None]


class Plan(msgspec.Struct, frozen=True):
    """The reads to measure. Those larger than `max_read_mib` are left out."""

    block_kib: tuple[int, ...] = (64, 256, 1024, 4096)
    blocks: tuple[int, ...] = (1, 16, 64, 256, 1024)
    patterns: tuple[str, ...] = PATTERNS
    transports: tuple[TransportChoice, ...] = ("shm",)
    reads: int = 100
    pool_mib: int = 256
    max_read_mib: int = 64

    def kinds(self) -> Iterator["Kind"]:
        """Yield the kinds of reads that fit. A single block has one pattern."""
        for block_kib in self.block_kib:
            for count in self.blocks:
                if (
                    count * block_kib << 10
                    <= min(self.max_read_mib, self.pool_mib) * MIB
                ):
                    for pattern in self.patterns if count > 1 else ("run",):
                        yield Kind(block_kib << 10, count, pattern)


class Kind(msgspec.Struct, frozen=True):
    block_bytes: int
    num_blocks: int
    pattern: str

    @property
    def read_bytes(self) -> int:
        return self.block_bytes * self.num_blocks


class Row(msgspec.Struct, frozen=True):
    """The figures of one kind of read by one way; a rate is that of the median latency."""

    kind: Kind
    way: str
    num_reads: int
    gb_per_s: float
    p50_ms: float
    p99_ms: float
    of_memcpy: float
    of_raw_nixl: float | None  # set for nixl only


class TransferReport(msgspec.Struct, frozen=True):
    plan: Plan
    provenance: Provenance
    rows: list[Row]


def transfer(
    plan: Plan, on_rows: Callable[[Sequence[Row]], None] = lambda _: None
) -> TransferReport:
    """Measure every kind of read that fits, and pass each to `on_rows`. Raises `BatonError`."""
    provenance = collect([__name__])
    dice = random.Random(0)
    rows: list[Row] = []
    kinds = list(plan.kinds())
    for block_bytes in dict.fromkeys(kind.block_bytes for kind in kinds):
        pool = HostPool(plan.pool_mib * MIB // block_bytes, block_bytes)
        owned = Owned(pool.shape.num_blocks, block_bytes, plan.transports)
        with (
            closing(pool),
            block_owner(owned) as address,
            ways_to_read(pool, address, owned) as ways,
        ):
            _touch(pool, ways)
            for kind in (kind for kind in kinds if kind.block_bytes == block_bytes):
                latencies = _rounds(pool, ways, kind, plan.reads, dice)
                _check(pool, ways, kind, dice)
                found = [_row(kind, way, latencies) for way in latencies]
                rows += found
                on_rows(found)
    return TransferReport(plan, complete(provenance), rows)


# --- the ways -----------------------------------------------------------------------------------


@contextmanager
def ways_to_read(
    pool: HostPool, owner: RankAddress, owned: Owned
) -> Iterator[dict[str, Way]]:
    """Yield memcpy, each transport of the owner, and raw NIXL next to nixl."""
    with ExitStack() as stack:
        other = stack.enter_context(
            closing(HostPool(pool.shape.num_blocks, pool.shape.block_bytes))
        )
        found: dict[str, Way] = {
            MEMCPY: lambda remote, local: _copy(pool, other, remote, local)
        }
        for name, address in owner.metadata.items():
            reader = BlockReader(pool, name, RankAddress({name: address}), owned)
            found[name] = partial(_read, stack.enter_context(closing(reader)))
        if "nixl" in owner.metadata:
            raw = RawNixl(pool, NixlAddress.decode(owner.metadata["nixl"]))
            found[RAW_NIXL] = stack.enter_context(closing(raw)).read
        yield found


def _read(reader: BlockReader, remote: Ids, local: Ids) -> None:
    reader.read(remote.tolist(), local.tolist())


def _copy(pool: HostPool, other: HostPool, remote: Ids, local: Ids) -> None:
    """Copy as many bytes in one piece from a pool of this process, whose pages are as small."""
    count = len(remote)
    shape = pool.shape
    first, last = (
        min(int(ids[0]), shape.num_blocks - count) * shape.block_bytes
        for ids in (remote, local)
    )
    ctypes.memmove(
        pool.address + last, other.address + first, count * shape.block_bytes
    )


class RawNixl:
    """The read of the same blocks by NIXL alone: one request and a loop that polls it."""

    def __init__(self, pool: HostPool, owner: NixlAddress) -> None:
        self._agent, _ = make_agent(f"bench-raw-{secrets.token_hex(4)}", "")
        self._agent.register_memory(
            [(pool.address, pool.shape.pool_bytes, 0, "")], "DRAM"
        )
        name = self._agent.add_remote_agent(owner.metadata).decode()
        self._mine, self._theirs = (
            self._agent.prep_xfer_dlist(
                agent, block_rows(memory, 0, memory.block_bytes), "DRAM"
            )
            for agent, memory in (
                ("", PoolMemory(pool.address, owner.num_blocks, owner.block_bytes)),
                (
                    name,
                    PoolMemory(owner.pool_address, owner.num_blocks, owner.block_bytes),
                ),
            )
        )

    def read(self, remote: Ids, local: Ids) -> None:
        handle = self._agent.make_prepped_xfer(
            "READ", self._mine, local, self._theirs, remote
        )
        deadline_s = monotonic() + READ_TIMEOUT_S
        state = self._agent.transfer(handle)
        while state == "PROC" and monotonic() < deadline_s:
            state = self._agent.check_xfer_state(handle)
        handle.release()
        if state != "DONE":
            raise NodeError(f"a read over NIXL alone failed: {state}")

    def close(self) -> None:
        self._mine.release()
        self._theirs.release()


# --- the rounds ---------------------------------------------------------------------------------


def _touch(pool: HostPool, ways: Mapping[str, Way]) -> None:
    """Touch every page once by every way, so that first contacts are not measured."""
    everything = np.arange(pool.shape.num_blocks, dtype=np.int32)
    step = max(1, 16 * MIB // pool.shape.block_bytes)
    for way in ways.values():
        for begin in range(0, len(everything), step):
            part = everything[begin : begin + step]
            way(part, part)


def _rounds(
    pool: HostPool,
    ways: Mapping[str, Way],
    kind: Kind,
    num_reads: int,
    dice: random.Random,
) -> dict[str, list[float]]:
    """Return the seconds of each way in each round, after one round that is not counted."""
    latencies: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(num_reads + 1):
        order = list(ways)
        dice.shuffle(order)
        for name in order:
            remote, local = _places(dice, pool.shape.num_blocks, kind)
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


def _check(
    pool: HostPool, ways: Mapping[str, Way], kind: Kind, dice: random.Random
) -> None:
    for name, way in ways.items():
        if name == MEMCPY:
            continue
        remote, local = _places(dice, pool.shape.num_blocks, kind)
        np.frombuffer(pool.buffer, np.uint8)[:] = 0
        way(remote, local)
        if wrong := wrong_blocks(pool, remote, local):
            raise BatonError(f"{name} brought {wrong} wrong blocks of {len(remote)}")


def _row(kind: Kind, way: str, latencies: Mapping[str, Sequence[float]]) -> Row:
    ordered = sorted(latencies[way])
    p50_s, p99_s = (ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99))

    def ratio(base: str) -> float:
        pairs = zip(latencies[base], latencies[way], strict=True)
        return round(median(base_s / way_s for base_s, way_s in pairs), 3)

    return Row(
        kind,
        way,
        len(ordered),
        round(kind.read_bytes / p50_s / 1e9, 3),
        round(1e3 * p50_s, 4),
        round(1e3 * p99_s, 4),
        ratio(MEMCPY),
        ratio(RAW_NIXL) if way == "nixl" else None,
    )


def _line(row: Row) -> tuple[str, ...]:
    of_raw = "" if row.of_raw_nixl is None else f"{row.of_raw_nixl:.2f}"
    return (
        str(row.kind.block_bytes >> 10),
        str(row.kind.num_blocks),
        row.kind.pattern,
        row.way,
        f"{row.gb_per_s:.2f}",
        f"{row.p50_ms:.3f}",
        f"{row.p99_ms:.3f}",
        f"{row.of_memcpy:.2f}",
        of_raw,
    )


def _print(lines: Iterable[Sequence[str]]) -> None:
    for line in lines:
        print("".join(cell.rjust(12) for cell in line).rstrip(), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table and write the report."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.transfer", description=__doc__
    )
    common: Plan = Plan(transports=("shm", "nixl") if is_installed() else ("shm",))
    parser.add_argument("--block-kib", type=int, nargs="+", default=common.block_kib)
    parser.add_argument(
        "--blocks", type=int, nargs="+", default=common.blocks, help="of a read"
    )
    parser.add_argument(
        "--transports", nargs="+", choices=("shm", "nixl"), default=common.transports
    )
    parser.add_argument(
        "--reads", type=int, default=common.reads, help="timed reads of each kind"
    )
    parser.add_argument(
        "--pool-mib", type=int, default=common.pool_mib, help="size of each pool"
    )
    parser.add_argument("--json", default="", help="write the report to this file too")
    given = vars(parser.parse_args(arguments))
    try:
        out = Path(given.pop("json") or os.devnull)
        out.touch()  # it must be writable before the measurement
        plan = msgspec.convert(given, Plan)
        _print([HEADINGS])
        report = transfer(plan, lambda rows: _print(map(_line, rows)))
        out.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    except (BatonError, OSError) as error:
        print(f"baton: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
