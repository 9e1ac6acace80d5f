"""One load: client processes that each send a share of the requests, and the records of all.

The experiments call `run_load`. All processes count from one start on the host's monotonic clock;
this one only sleeps meanwhile, so that it takes no time from them. What ends without its records is
an error, never a smaller number.
"""

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

import msgspec

from baton.bench.client.ask import LEAD_S
from baton.bench.client.target import Target, check
from baton.bench.client.turns import Unit, units_of
from baton.bench.client.worker_messages import (
    LENGTH,
    Batch,
    Count,
    Finished,
    FromWorker,
    Go,
    Misfit,
    Ready,
    Share,
    Stop,
    ToWorker,
    decode_from_worker,
    frame,
)
from baton.bench.records import ClientProcess, LoadResult, Planned, Record
from baton.protocol.errors import BatonError, ConfigError
from baton.runtime.clock import monotonic
from baton.runtime.process import Child, Command

SHOW_EVERY_S = 0.5
LOOK_EVERY_S = 0.1
START_DELAY_S = 0.1
SEND_TIMEOUT_S = 60.0
# From a stop to the last record.
STOP_TIMEOUT_S = 30.0
EXIT_TIMEOUT_S = 2.0
MODULE = "baton.bench.client.worker"


class Load(msgspec.Struct, frozen=True):
    """Requests for a target.

    In a closed loop (`closed`) each of `concurrency` clients sends when it has its last answer, and
    none after `stop_after_s`. In an open loop requests have their moments, and `concurrency` is how
    many may be under way at once (None: any number); waiting for that counts into latencies.
    """

    target: Target
    requests: list[Planned]
    concurrency: int | None = None
    closed: bool = False
    processes: int = 1
    stop_after_s: float | None = None
    keep_text: bool = False


class Progress(msgspec.Struct, frozen=True):
    """So far, warm-up included."""

    sent: int = 0
    ended: int = 0
    failed: int = 0
    tokens: int = 0

    @property
    def in_flight(self) -> int:
        return self.sent - self.ended


def run_load(
    load: Load,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    on_start: Callable[[float], None] | None = None,
    stop: threading.Event | None = None,
) -> LoadResult:
    """Runs it to its end; `stop` ends it early with what there is by then, Ctrl-C with nothing.

    Requests under way then are `STOPPED`, and later ones are not there. `on_start` is told
    when the schedule starts, on the monotonic clock, shortly before. Raises `ConfigError` for a
    load that cannot be, and `BatonError` when a client process fails.
    """
    shares = deal(load)
    with Workers(shares) as workers:
        overseer = _Overseer(workers, on_progress or _ignore, stop or threading.Event())
        overseer.wait_until(lambda: workers.num_ready == len(shares))
        start_s = monotonic() + START_DELAY_S + LEAD_S + _warm_up_s(load)
        started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
        if not overseer.stopping:
            if on_start is not None:
                on_start(start_s)
            workers.tell(Go(start_s))
        overseer.wait_until(lambda: workers.num_finished == len(shares))
        overseer.show()
    records = sorted(workers.records, key=lambda record: record.index)
    may_be_fewer = overseer.stopping or load.stop_after_s is not None
    if len(records) != len(load.requests) and not may_be_fewer:
        text = f"{len(load.requests)} requests were planned and {len(records)} records came back"
        raise BatonError(text)
    wall_s = max((record.end_s for record in records), default=0.0)
    return LoadResult(records, workers.clients, max(wall_s, 0.0), started_at)


def deal(load: Load) -> list[Share]:
    """A share for each process, dealt in turn; raises `ConfigError`."""
    if not load.requests:
        raise ConfigError("the load has no request")
    if load.processes < 1 or (load.concurrency is not None and load.concurrency < 1):
        raise ConfigError("a load needs at least one process and room for one request")
    if load.closed and load.concurrency is None:
        raise ConfigError("a closed loop needs a concurrency")
    check(load.target, load.requests)
    units = units_of(load.requests)
    if not load.closed and any(unit[0].at_s is None for unit in units):
        raise ConfigError("an open loop needs an arrival time for every request")
    slots = load.concurrency
    num_shares = min(load.processes, len(units), slots or load.processes)
    shares = []
    for number in range(num_shares):
        room = None if slots is None else slots // num_shares + (number < slots % num_shares)
        shares.append(
            Share(
                target=load.target,
                requests=_flat(units[number::num_shares]),
                concurrency=room if load.closed else None,
                max_concurrency=None if load.closed else room,
                stop_after_s=load.stop_after_s,
                keep_text=load.keep_text,
            )
        )
    return shares


class Workers:
    """The client processes and what came from them. A context manager; all are gone after it."""

    def __init__(self, shares: list[Share]) -> None:
        self.records: list[Record] = []
        self.clients: list[ClientProcess] = []
        self.num_ready = 0
        self._shares = shares
        self._ends: list[_End] = []
        self._selector = selectors.DefaultSelector()
        self._decode_record = msgspec.msgpack.Decoder(Record).decode

    @property
    def num_finished(self) -> int:
        return len(self.clients)

    @property
    def progress(self) -> Progress:
        counts = [end.count for end in self._ends]
        return Progress(
            sum(count.sent for count in counts),
            sum(count.ended for count in counts),
            sum(count.failed for count in counts),
            sum(count.tokens for count in counts),
        )

    def __enter__(self) -> Self:
        try:
            # All of them first, because each takes a moment to start.
            for number in range(len(self._shares)):
                self._ends.append(_End(f"client-{number}"))
            for end, share in zip(self._ends, self._shares, strict=True):
                end.send(share)
                self._selector.register(end.socket, selectors.EVENT_READ, end)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._selector.close()
        for end in self._ends:
            end.close()

    def tell(self, message: ToWorker) -> None:
        for end in self._ends:
            end.send(message)

    def stop(self) -> None:
        """Tells those that still listen. Of one that is gone, `poll` finds out what it left."""
        for end in self._ends:
            if not end.finished:
                end.stop()

    def poll(self, timeout_s: float) -> None:
        """Takes in what comes within `timeout_s`; raises `BatonError` if a process failed."""
        for key, _ in self._selector.select(timeout_s):
            end = key.data
            assert isinstance(end, _End)
            for message in end.receive():
                self._on_message(end, message)

    def _on_message(self, end: "_End", message: FromWorker) -> None:
        match message:
            case Ready():
                self.num_ready += 1
            case Count():
                end.count = message
            case Batch():
                self.records += [self._decode_record(data) for data in message.records]
            case Finished():
                self.clients.append(message.client)
                self._selector.unregister(end.socket)
                end.finished = True
            case Misfit():
                raise ConfigError(message.message)


class _End:
    """A client process and this side of its socket pair."""

    def __init__(self, name: str) -> None:
        self.count = Count(0, 0, 0, 0)
        self.finished = False
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(SEND_TIMEOUT_S)
        descriptor = theirs.fileno()
        command = Command(name, (str(descriptor),), MODULE, pass_fds=(descriptor,))
        try:
            self._child = Child(command, relay=_ignore_line)
        except BaseException:
            self.socket.close()
            raise
        finally:
            theirs.close()
        self._rest = bytearray()

    def send(self, message: ToWorker) -> None:
        try:
            self.socket.sendall(frame(message))
        except OSError as error:
            raise self._gone(str(error)) from None

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.sendall(frame(Stop()))

    def receive(self) -> list[FromWorker]:
        """What is complete of it; to be called when there is something."""
        data = b""
        with contextlib.suppress(ConnectionResetError):
            data = self.socket.recv(1 << 20)
        if not data:
            raise self._gone("it ended before the load did")
        self._rest += data
        messages = []
        while len(self._rest) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._rest)[0]
            if len(self._rest) < end:
                break
            messages.append(decode_from_worker(self._rest[LENGTH.size : end]))
            del self._rest[:end]
        return messages

    def close(self) -> None:
        self.socket.close()
        if self.finished:
            self._child.wait(monotonic() + EXIT_TIMEOUT_S)
        self._child.kill()
        self._child.wait(monotonic() + EXIT_TIMEOUT_S)

    def _gone(self, why: str) -> BatonError:
        self._child.wait(monotonic() + EXIT_TIMEOUT_S)
        last = f": {self._child.tail[-1]}" if self._child.tail else ""
        code = self._child.exit_code
        status = "is running" if code is None else f"exit code {code}"
        return BatonError(f"client process {self._child.name} failed ({why}, {status}){last}")


class _Overseer:
    """Waits for the workers, shows how they do, and stops them when told to."""

    def __init__(
        self, workers: Workers, show: Callable[[Progress], None], stop: threading.Event
    ) -> None:
        self.stopping = False
        self._workers, self._show, self._stop = workers, show, stop
        self._shown_s = monotonic()
        self._deadline_s = 0.0

    def wait_until(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            self._workers.poll(LOOK_EVERY_S)
            now_s = monotonic()
            if self._stop.is_set():
                self.stop()
            if self.stopping and now_s > self._deadline_s:
                raise BatonError("the client processes did not stop when told to")
            if now_s - self._shown_s >= SHOW_EVERY_S:
                self._shown_s = now_s
                self._show(self._workers.progress)

    def show(self) -> None:
        self._show(self._workers.progress)

    def stop(self) -> None:
        """Idempotent."""
        if not self.stopping:
            self.stopping = True
            self._deadline_s = monotonic() + STOP_TIMEOUT_S
            self._workers.stop()


def _warm_up_s(load: Load) -> float:
    """How long before the start the first request is due."""
    moments = [planned.at_s for planned in load.requests if planned.at_s is not None]
    return 0.0 if load.closed else max(0.0, -min(moments, default=0.0))


def _flat(units: list[Unit]) -> list[Planned]:
    return [planned for unit in units for planned in unit]


def _ignore_line(name: str, line: str) -> None:
    """The last lines are kept by the child, for the error that they belong to."""


def _ignore(progress: Progress) -> None:
    """Nobody wants to see it."""
