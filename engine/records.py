"""A node's log of its steps and reads, for tests, benchmarks and bug reports.

`Records` keeps counters for the metrics and the stats line. When a folder is configured, it appends
one JSON line per settled step and per ended read. The node's shell calls it; schedulers never do.
"""

from dataclasses import asdict
from io import TextIOWrapper
from pathlib import Path

import msgspec

from baton.engine.block_pool import PoolCounts
from baton.engine.plan import StepPlan, StepResult
from baton.kv_transfer.interfaces import CORRUPT_BLOCKS, ReadEnded
from baton.protocol.ids import Key, NodeId
from baton.protocol.messages import Totals


class SliceRecord(msgspec.Struct, frozen=True):
    key: Key
    start: int
    length: int
    draws: int


class StepRecord(msgspec.Struct, frozen=True, tag="step"):
    """One step of a node. Times are seconds since the host's boot."""

    step_id: int
    started_s: float
    ended_s: float
    num_prompt_tokens: int
    slices: list[SliceRecord]


class ReadRecord(msgspec.Struct, frozen=True, tag="read"):
    rank: int
    ticket: int
    posted_s: float
    ended_s: float
    num_bytes: int
    failure: str | None


Record = StepRecord | ReadRecord


class Counters(msgspec.Struct):
    """The counts of a node since it started, with the names of `Totals`."""

    prompt_tokens: int = 0  # computed here
    output_tokens: int = 0  # sampled here
    steps: int = 0
    steps_s: float = 0.0
    leases_expired: int = 0
    reads: int = 0
    read_bytes: int = 0
    reads_s: float = 0.0
    failed_reads: int = 0
    corrupt_reads: int = 0  # reads whose checksums were wrong (verify_kv)

    def totals(self, pool: PoolCounts) -> Totals:
        """Return these counts and those of the pool in one `Totals`."""
        return Totals(**msgspec.structs.asdict(self), **asdict(pool))


class Records:
    def __init__(self, folder: str, node_id: NodeId) -> None:
        self.counters = Counters()
        self._encoder = msgspec.json.Encoder()
        self._file: TextIOWrapper | None = None
        if folder:
            path = Path(folder)
            path.mkdir(parents=True, exist_ok=True)
            self._file = (path / f"{node_id}.jsonl").open("a", encoding="utf-8")

    def step(self, plan: StepPlan, result: StepResult) -> None:
        counters = self.counters
        counters.steps += 1
        counters.steps_s += result.ended_s - result.started_s
        counters.output_tokens += sum(len(part.draws) for part in plan.slices)
        num_prompt_tokens = sum(
            max(0, min(part.start + part.length, part.num_prompt_tokens) - part.start)
            for part in plan.slices
        )
        counters.prompt_tokens += num_prompt_tokens
        if self._file is not None:
            slices = [SliceRecord(p.key, p.start, p.length, len(p.draws)) for p in plan.slices]
            self._write(
                StepRecord(
                    plan.step_id, result.started_s, result.ended_s, num_prompt_tokens, slices
                )
            )

    def read(self, rank: int, event: ReadEnded) -> None:
        counters = self.counters
        counters.reads += 1
        counters.read_bytes += event.num_bytes
        counters.reads_s += event.ended_s - event.posted_s
        if event.failure is not None:
            counters.failed_reads += 1
            counters.corrupt_reads += event.failure.code == CORRUPT_BLOCKS
        if self._file is not None:
            failure = event.failure.code if event.failure else None
            self._write(
                ReadRecord(
                    rank, event.ticket, event.posted_s, event.ended_s, event.num_bytes, failure
                )
            )

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, record: Record) -> None:
        assert self._file is not None
        self._file.write(self._encoder.encode(record).decode() + "\n")
        self._file.flush()


def read_records(path: Path) -> list[Record]:
    """Return the records of one node, in the order in which they were written."""
    decoder = msgspec.json.Decoder(Record)
    return [decoder.decode(line) for line in path.read_bytes().splitlines()]
