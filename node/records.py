"""What a node keeps of its steps, reads and events, for metrics, benchmarks and bug reports.

`NodeObserver` keeps counters, and appends one JSON line per settled step and per ended read when a
folder is configured. `EventRing` holds the last events of the loop, and is written to a file when
an invariant breaks. Events hold prompts, so only the user of the process may read that file.
"""

import os
import tempfile
from collections import deque
from dataclasses import asdict
from io import RawIOBase
from pathlib import Path

import msgspec

from baton.kv_transfer.interfaces import (
    BAD_RECORD,
    CORRUPT_BLOCKS,
    LEASE_EXPIRED,
    TIER_TIMEOUT,
    BlocksSaved,
    ConnectorReport,
    OfferBroken,
    ReadEnded,
    ReceiveEnded,
    Released,
)
from baton.node.heartbeat import Vitals
from baton.node.scheduling.block_pool import PoolCounts
from baton.node.scheduling.plan import StepPlan, StepResult
from baton.protocol.config import LogConfig
from baton.protocol.errors import Cancelled
from baton.protocol.ids import Key, NodeId
from baton.protocol.messages import Load, Totals
from baton.runtime.clock import Clock, boottime
from baton.runtime.log import logger

log = logger("node")


class SliceRecord(msgspec.Struct, frozen=True):
    key: Key
    start: int
    length: int
    num_samples: int


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


class NodeObserver:
    """Takes the loop's reports, for the heartbeat thread, the records and the stats line.

    It logs no stats line for an interval in which the node was idle.
    """

    def __init__(
        self,
        vitals: Vitals,
        node_id: NodeId,
        settings: LogConfig,
        clock: Clock = boottime,
    ) -> None:
        self.counters = Counters()
        self._vitals = vitals
        self._clock = clock
        self._stats_s = settings.stats_s
        self._next_stats_s = clock() + self._stats_s
        self._last = (0, 0, 0)
        self._encoder = msgspec.json.Encoder()
        self._is_failing = False  # the file of records
        self._cannot_save = False  # blocks in a tier
        self._file: RawIOBase | None = None
        if settings.records:
            path = Path(settings.records)
            path.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            # Records hold the ids of requests, which are secrets of clients.
            descriptor = os.open(path / f"{node_id}.jsonl", flags, 0o600)
            self._file = os.fdopen(descriptor, "ab", buffering=0)

    def step_started(self, at_s: float, predicted_s: float) -> None:
        self._vitals.note(step_started_s=at_s, predicted_s=predicted_s)

    def step_settled(self, plan: StepPlan, result: StepResult) -> None:
        self._vitals.note(step_started_s=None, predicted_s=0.0)
        counters = self.counters
        counters.steps += 1
        counters.steps_s += result.ended_s - result.started_s
        sampled = zip(plan.slices, result.tokens, strict=True)
        counters.output_tokens += sum(
            len(part.kept(tokens)) for part, tokens in sampled
        )
        num_prompt_tokens = sum(
            max(0, min(part.start + part.length, part.num_prompt_tokens) - part.start)
            for part in plan.slices
        )
        counters.prompt_tokens += num_prompt_tokens
        if self._file is not None:
            slices = [
                SliceRecord(p.key, p.start, p.length, len(p.samples))
                for p in plan.slices
            ]
            times = result.started_s, result.ended_s
            self._write(StepRecord(plan.step_id, *times, num_prompt_tokens, slices))

    def read_ended(self, rank: int, event: ReadEnded) -> None:
        counters = self.counters
        failure = event.failure
        counters.reads += 1
        counters.read_bytes += event.num_bytes
        counters.reads_s += event.ended_s - event.posted_s
        counters.failed_reads += failure is not None
        if failure is not None and failure.code == CORRUPT_BLOCKS:
            counters.corrupt_reads += 1
            log.error(failure.message, rank=rank, so_far=counters.corrupt_reads)
        if self._file is not None:
            times = (event.posted_s, event.ended_s)
            code = failure.code if failure else None
            self._write(ReadRecord(rank, event.ticket, *times, event.num_bytes, code))

    def reported(self, report: ConnectorReport) -> None:
        if isinstance(report, BlocksSaved):
            self._saved(report)
            return
        if (
            not isinstance(report, Released | OfferBroken | ReceiveEnded)
            or report.failure is None
        ):
            return
        failure = report.failure
        key = report.key
        if isinstance(report, Released) and failure.code == LEASE_EXPIRED:
            self.counters.leases_expired += 1
        if failure.code != Cancelled.code:
            what = "a handoff failed"
            if isinstance(report, OfferBroken):
                what = "a handoff broke off"
            elif failure.code in (BAD_RECORD, TIER_TIMEOUT):
                what = "cached blocks could not be read, so a prompt is computed"
            log.warning(
                what,
                request=key.request_id,
                attempt=key.attempt,
                code=failure.code,
                reason=failure.message,
            )

    def _saved(self, report: BlocksSaved) -> None:
        failure = report.failure
        if failure is not None and not self._cannot_save:
            log.warning(
                "cached blocks are lost when they are evicted", reason=failure.message
            )
        self._cannot_save = failure is not None

    def turned(self, load: Load, unreachable: tuple[NodeId, ...]) -> None:
        """Take the state at the end of each turn of the loop."""
        now_s = self._clock()
        self._vitals.note(turned_s=now_s, load=load, unreachable=unreachable)
        if self._stats_s and now_s >= self._next_stats_s:
            self._next_stats_s = now_s + self._stats_s
            self._log_stats(load)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, record: Record) -> None:
        assert self._file is not None
        try:
            self._file.write(self._encoder.encode(record) + b"\n")
        except OSError as error:
            if not self._is_failing:
                log.error(
                    "records are lost: their file cannot be written",
                    reason=error.strerror,
                )
            self._is_failing = True
        else:
            self._is_failing = False

    def _log_stats(self, load: Load) -> None:
        c = self.counters
        now = (c.prompt_tokens, c.output_tokens, c.read_bytes)
        prompt, output, num_bytes = (
            new - old for new, old in zip(now, self._last, strict=True)
        )
        self._last = now
        if not (prompt or output or num_bytes or load.num_running or load.num_waiting):
            return
        log.info(
            "stats",
            running=load.num_running,
            waiting=load.num_waiting,
            prompt_tokens_per_s=round(prompt / self._stats_s, 1),
            output_tokens_per_s=round(output / self._stats_s, 1),
            read_mib_per_s=round(num_bytes / self._stats_s / (1 << 20), 1),
            free_blocks=f"{load.free_blocks}/{load.total_blocks}",
            cached_blocks=load.cached_blocks,
        )


def read_records(path: Path) -> list[Record]:
    """Return the records of one node, in the order in which they were written."""
    decoder = msgspec.json.Decoder(Record)
    return [decoder.decode(line) for line in path.read_bytes().splitlines()]


# An event keeps its prompt alive, and long ones would add up to gigabytes.
MAX_TOKENS = 1_000_000


class Turned(msgspec.Struct, frozen=True):
    """A turn of the loop in which nothing came, but time may have acted."""


class Draining(msgspec.Struct, frozen=True):
    """The order to take no more requests, which came after a turn."""

    hand_over_s: float = 0.0


class EventRing:
    """The last `capacity` events of one loop, which are encoded only when they are dumped.

    It holds fewer if their prompts have more than `max_tokens` tokens together, and none of the log
    probabilities and pooled rows of a step, which may be far larger than its tokens. If none has
    been dropped, they make a new loop do the same again.
    """

    def __init__(self, capacity: int = 10_000, max_tokens: int = MAX_TOKENS) -> None:
        self._capacity = capacity
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._events: deque[_Line] = deque()
        self._turn = 0

    def begin_turn(self) -> None:
        self._turn += 1

    @property
    def is_turn_empty(self) -> bool:
        return not self._events or self._events[-1].turn != self._turn

    def record(self, now_s: float, event: msgspec.Struct, rank: int = 0) -> None:
        """Add an event, which came from `rank` if it is one of an agent's."""
        if isinstance(event, StepResult) and (
            event.logprobs or event.prompt_logprobs or event.pooled
        ):
            event = msgspec.structs.replace(
                event, logprobs=(), prompt_logprobs=(), pooled=()
            )
        events = self._events
        events.append(_Line(self._turn, now_s, rank, type(event).__name__, event))
        self._num_tokens += _num_tokens(event)
        while len(events) > self._capacity or self._num_tokens > self._max_tokens:
            self._num_tokens -= _num_tokens(events.popleft().event)

    def __len__(self) -> int:
        return len(self._events)

    def dump(self, path: Path) -> int:
        """Write one JSON object `{"turn", "now_s", "rank", "type", "event"}` per line.

        Return how many.

        The file gets mode 0600. Raises `FileExistsError` if it exists.
        """
        encoder = msgspec.json.Encoder()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            for line in self._events:
                file.write(encoder.encode(line) + b"\n")
        return len(self._events)


def folder_for_dumps(chosen: str) -> Path:
    """Return the `chosen` folder, or a new one that only this user can enter."""
    return Path(chosen or tempfile.mkdtemp(prefix="baton-events-"))


def _num_tokens(event: msgspec.Struct) -> int:
    message = getattr(event, "message", None)
    return len(getattr(message, "token_ids", ()))


class _Line(msgspec.Struct, frozen=True):
    turn: int
    now_s: float
    rank: int
    type: str
    event: msgspec.Struct
