"""How fast a rank reads another's blocks: shm and nixl against memcpy and raw NIXL, in GiB/s.

The owner of the blocks is another process on this host. The ways take turns within each round and
move the same number of bytes, so that a noisy machine hits all of them; a ratio is the median of
the rounds' ratios. Times are the caller's: from posting until the end is known.
"""

import argparse
import ctypes
import os
import queue
import random
import secrets
import select
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.agent import TransferAgent, make_port
from baton.kv_transfer.host_pool import HostPool
from baton.kv_transfer.interfaces import AddPeer, PeerUp, Read, ReadEnded
from baton.kv_transfer.transports.nixl_address import NixlAddress, decode_address
from baton.kv_transfer.transports.nixl_binding import is_installed, make_agent
from baton.protocol.config import TransferConfig, TransportChoice
from baton.protocol.errors import NodeError
from baton.protocol.ids import Epoch
from baton.protocol.messages import RankAddress
from baton.runtime.clock import monotonic
from baton.runtime.process import Child, Command, die_with_parent

OWNER, READER = Epoch("bench-owner"), Epoch("bench-reader")
START_TIMEOUT_S = 60.0
MIB = 1 << 20

Ids = NDArray[np.int32]
# One run of neighbours on both sides; a run on the reader's side alone; no neighbours anywhere.
Pattern = Literal["run", "gather", "scattered"]
PATTERNS: tuple[Pattern, ...] = ("run", "gather", "scattered")
Way = Callable[[Ids, Ids], object]  # (remote, local): returns when the bytes are there


class Options(msgspec.Struct, frozen=True):
    block_bytes: int
    pool_mib: int = 256
    read_mib: int = 64
    rounds: int = 9

    @property
    def num_blocks(self) -> int:
        return self.pool_mib * MIB // self.block_bytes


class Row(msgspec.Struct, frozen=True):
    """One block size and pattern."""

    block_kib: int
    pattern: Pattern
    gib_per_s: dict[str, float]  # median
    best_gib_per_s: dict[str, float]
    ratios: dict[str, float]  # median of the rounds' ratios


class Report(msgspec.Struct, frozen=True):
    rows: list[Row]
    pool_mib: int
    read_mib: int
    rounds: int
    num_cpus: int
    load_1min: float
    ucx_tls: str


class PortReader:
    """One transport through its agent, as a node uses it."""

    def __init__(self, pool: HostPool, name: TransportChoice, owner: RankAddress) -> None:
        self._port: TransferAgent = make_port(pool, READER, TransferConfig(transport=name))
        shape = pool.shape
        self._port.send(AddPeer(OWNER, name, owner, shape.num_blocks, shape.block_bytes))
        self._generations = (0,) * shape.num_blocks
        event = self._event()
        if not isinstance(event, PeerUp):
            raise NodeError(f"{name} does not connect: {event}")

    def __call__(self, remote: Ids, local: Ids) -> None:
        ids = tuple(remote.tolist()), tuple(local.tolist())
        self._port.send(Read(0, OWNER, *ids, self._generations[: len(remote)]))
        event = self._event()
        if not isinstance(event, ReadEnded) or event.failure is not None:
            raise NodeError(f"a read failed: {event}")

    def _event(self) -> object:
        while not (events := self._port.poll()):
            select.select([self._port.fileno()], [], [], 10.0)
        return events[0]

    def close(self) -> None:
        self._port.close()


class Memcpy:
    """As many bytes in one piece, between two pools of this process.

    Pools on both sides, because the pages of a memfd are small ones and those of an array huge.
    """

    def __init__(self, pool: HostPool, options: Options) -> None:
        self._target = pool.address
        self._source = HostPool(options.num_blocks, options.block_bytes)
        self._block_bytes = options.block_bytes
        self._last = pool.shape.num_blocks

    def __call__(self, remote: Ids, local: Ids) -> None:
        count = len(remote)
        begins = [
            min(int(ids[0]), self._last - count) * self._block_bytes for ids in (remote, local)
        ]
        source, target = self._source.address + begins[0], self._target + begins[1]
        ctypes.memmove(target, source, count * self._block_bytes)


class RawNixl:
    """The same blocks through NIXL alone: one request, and a loop that asks until it is done."""

    def __init__(self, pool: HostPool, owner: NixlAddress) -> None:
        self._agent, _ = make_agent(f"bench-raw-{secrets.token_hex(4)}", "")
        shape = pool.shape
        self._agent.register_memory([(pool.address, shape.pool_bytes, 0, "")], "DRAM")
        name = self._agent.add_remote_agent(owner.metadata).decode()
        bases = (("", pool.address), (name, owner.pool_address))
        self._mine, self._theirs = (
            self._agent.prep_xfer_dlist(agent, _rows(base, owner), "DRAM") for agent, base in bases
        )

    def __call__(self, remote: Ids, local: Ids) -> None:
        handle = self._agent.make_prepped_xfer("READ", self._mine, local, self._theirs, remote)
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        handle.release()

    def close(self) -> None:
        self._mine.release()
        self._theirs.release()


def _rows(base: int, owner: NixlAddress) -> NDArray[np.uint64]:
    offsets = np.arange(owner.num_blocks, dtype=np.uint64) * np.uint64(owner.block_bytes)
    rows = np.zeros((owner.num_blocks, 3), np.uint64)
    rows[:, 0], rows[:, 1] = offsets + np.uint64(base), owner.block_bytes
    return rows


def measure(options: Options, owner: dict[str, bytes], pattern: Pattern) -> Row:
    """All ways at one block size."""
    pool = HostPool(options.num_blocks, options.block_bytes)
    ways: dict[str, Way] = {"memcpy": Memcpy(pool, options)}
    readers = [PortReader(pool, "shm", RankAddress({"shm": owner["shm"]}))]
    ways["shm"] = readers[0]
    raw = None
    if "nixl" in owner:
        readers.append(PortReader(pool, "nixl", RankAddress({"nixl": owner["nixl"]})))
        raw = RawNixl(pool, decode_address(owner["nixl"]))
        ways |= {"nixl": readers[1], "raw_nixl": raw}
    speeds = _rounds(options, ways, pattern)
    for reader in readers:
        reader.close()
    if raw is not None:
        raw.close()
    pool.close()
    pairs = [("shm", "memcpy")] + [("nixl", "raw_nixl")] * ("nixl" in ways)
    ratios = {
        f"{way}/{base}": statistics.median(
            a / b for a, b in zip(speeds[way], speeds[base], strict=True)
        )
        for way, base in pairs
    }
    return Row(
        options.block_bytes >> 10,
        pattern,
        {way: round(statistics.median(values), 2) for way, values in speeds.items()},
        {way: round(max(values), 2) for way, values in speeds.items()},
        {name: round(ratio, 3) for name, ratio in ratios.items()},
    )


def _rounds(options: Options, ways: dict[str, Way], pattern: Pattern) -> dict[str, list[float]]:
    """GiB/s of each way in each round, after one round that is not counted."""
    dice = random.Random(0)
    count = options.read_mib * MIB // options.block_bytes
    speeds: dict[str, list[float]] = {way: [] for way in ways}
    everything = np.arange(options.num_blocks, dtype=np.int32)
    for way in ways.values():  # touches every page once
        for begin in range(0, options.num_blocks - count + 1, count):
            part = everything[begin : begin + count]
            way(part, part)
    for _ in range(options.rounds):
        order = list(ways)
        dice.shuffle(order)
        for name in order:
            remote, local = _choose(dice, options.num_blocks, count, pattern)
            began_s = monotonic()
            ways[name](remote, local)
            speeds[name].append(options.read_mib / 1024 / (monotonic() - began_s))
    return speeds


def _choose(dice: random.Random, num_blocks: int, count: int, pattern: Pattern) -> tuple[Ids, Ids]:
    def run() -> Ids:
        begin = dice.randrange(num_blocks - count + 1)
        return np.arange(begin, begin + count, dtype=np.int32)

    def lone() -> Ids:
        return np.array(dice.sample(range(num_blocks), count), np.int32)

    return (run if pattern == "run" else lone)(), (lone if pattern == "scattered" else run)()


def own(options: Options) -> None:
    """The child: owns a pool, says where, and waits for its parent to end it."""
    die_with_parent()
    pool = HostPool(options.num_blocks, options.block_bytes)
    pool.buffer[:] = b"\x07" * len(pool.buffer)
    names: list[TransportChoice] = ["shm"]
    if is_installed():
        names.append("nixl")
    ports = [make_port(pool, OWNER, TransferConfig(transport=name)) for name in names]
    metadata: dict[str, bytes] = {}
    for port in ports:
        metadata |= port.address().metadata
    print("owner " + msgspec.json.encode(metadata).decode(), flush=True)
    while True:
        select.select([port.fileno() for port in ports], [], [], 60.0)


def start_owner(options: Options) -> tuple[Child, dict[str, bytes]]:
    lines: queue.Queue[str] = queue.Queue()
    arguments = ("--own", msgspec.json.encode(options).decode())
    command = Command("owner", arguments, "baton.bench.transfer")
    child = Child(command, lambda _, line: lines.put(line))
    deadline_s = monotonic() + START_TIMEOUT_S
    while child.poll() is None and monotonic() < deadline_s:
        try:
            line = lines.get(timeout=0.2)
        except queue.Empty:
            continue
        if line.startswith("owner "):
            return child, msgspec.json.decode(line[len("owner ") :], type=dict[str, bytes])
    child.stop()
    raise NodeError(f"the owner did not start: {child.tail}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m baton.bench.transfer", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--block-kib", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--pool-mib", type=int, default=256)
    parser.add_argument("--read-mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--own", help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    if parsed.own:
        own(msgspec.json.decode(parsed.own, type=Options))
    if not max(parsed.block_kib) << 10 <= parsed.read_mib * MIB <= parsed.pool_mib * MIB:
        parser.error("a block must fit a read, and a read the pool")
    rows = []
    for block_kib in parsed.block_kib:
        options = Options(block_kib << 10, parsed.pool_mib, parsed.read_mib, parsed.rounds)
        child, owner = start_owner(options)
        try:
            for pattern in PATTERNS:
                rows.append(measure(options, owner, pattern))
                print(msgspec.json.encode(rows[-1]).decode(), flush=True)
        finally:
            child.stop()
    cpus = len(os.sched_getaffinity(0))
    report = Report(
        rows, parsed.pool_mib, parsed.read_mib, parsed.rounds, cpus,
        round(os.getloadavg()[0], 2), os.environ.get("UCX_TLS", ""),
    )  # fmt: skip
    if parsed.json:
        parsed.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
