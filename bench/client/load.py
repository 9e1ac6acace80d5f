"""Run one load: client processes that each send a share of the requests and return the records.

All processes count from one start on the host's monotonic clock; this process sleeps while they
run, so that it takes no CPU from them. Records are sent when the load is over. If a process ends
without its records, the load fails instead of having fewer records.
"""

import contextlib
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from multiprocessing.connection import Pipe, wait
from typing import Self, assert_never

import msgspec

from baton.bench.client.http import tls_of
from baton.bench.client.request import LEAD_S, check
from baton.bench.records import Arrival, ClientProcess, LoadResult, Planned, Record
from baton.bench.settings import Target, place_of
from baton.protocol.errors import BatonError, ConfigError
from baton.runtime.clock import monotonic
from baton.runtime.process import Child, Command

SHOW_EVERY_S = 0.5
LOOK_EVERY_S = 0.1
START_DELAY_S = 0.1
STOP_TIMEOUT_S = 30.0  # from a stop to the last record
EXIT_TIMEOUT_S = 2.0
MODULE = "baton.bench.client.worker"


class Load(msgspec.Struct, frozen=True):
    """Requests for a target.

    With a `concurrency`, it is a closed loop: each of that many clients sends when its last request
    has ended, but not after `stop_after_s`. Without one, every request is sent at its own moment.
    """

    target: Target
    requests: list[Planned]
    concurrency: int = 0
    processes: int = 1
    stop_after_s: float | None = None


class Progress(msgspec.Struct, frozen=True, tag=True):
    """The counts so far, warm-up included."""

    sent: int = 0
    ended: int = 0
    failed: int = 0
    tokens: int = 0
    ready: int = 0  # client processes that wait for the start, or have begun


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The last message of a client process; the stamps of its records are monotonic."""

    client: ClientProcess
    records: list[msgspec.Raw]


# The message after the load: the start of the schedule on the monotonic clock that all processes
# share, or None to send nothing more, give up the requests under way, and report.
Start = float | None
FromWorker = Progress | Finished

encode = msgspec.msgpack.Encoder().encode
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_record = msgspec.msgpack.Decoder(Record)


def run_load(
    load: Load,
    *,
    on_progress: Callable[[Progress], None] = lambda _: None,
    stop: threading.Event | None = None,
) -> LoadResult:
    """Run a load to its end; a `stop` keeps the records so far, Ctrl-C keeps none.

    Running requests at a stop are `STOPPED`, and later ones have no record. Raises
    `ConfigError` for a load that cannot run.
    """
    with Workers(deal(load), on_progress, stop or threading.Event()) as workers:
        workers.wait_until(lambda: workers.progress.ready == len(workers.ends))
        # The first request of an open loop may be due before the start, to warm up.
        first_s = min([0.0, *(one.at_s for one in load.requests if one.at_s is not None)])
        start_s = monotonic() + START_DELAY_S + LEAD_S - first_s
        started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
        if not workers.stopping:
            for end in workers.ends:
                end.send(start_s)
        workers.wait_until(lambda: all(end.finished for end in workers.ends))
        on_progress(workers.progress)
        found = [end.finished for end in workers.ends if end.finished is not None]
    records = [_since(start_s, _record.decode(data)) for one in found for data in one.records]
    records.sort(key=lambda record: record.index)
    may_be_fewer = workers.stopping or load.stop_after_s is not None
    if len(records) != len(load.requests) and not may_be_fewer:
        text = f"{len(load.requests)} requests were planned and {len(records)} records came back"
        raise BatonError(text)
    wall_s = max([0.0, *(record.end_s for record in records)])
    return LoadResult(records, [one.client for one in found], wall_s, started_at)


def deal(load: Load) -> list[Load]:
    """Return the share of each process, dealt in turn. Raises `ConfigError`."""
    if not load.requests:
        raise ConfigError("the load has no request")
    check(load.target, load.requests)
    if place_of(load.target.url).is_tls:
        tls_of(load.target)
    clients = load.concurrency
    if not clients and any(planned.at_s is None for planned in load.requests):
        raise ConfigError("an open loop needs an arrival time for every request")
    num_shares = min(load.processes, len(load.requests), clients or load.processes)
    return [
        msgspec.structs.replace(
            load,
            requests=load.requests[number::num_shares],
            concurrency=clients // num_shares + (number < clients % num_shares),
        )
        for number in range(num_shares)
    ]


class Workers:
    """The client processes and their messages. A context manager; at its end all are gone."""

    def __init__(
        self, shares: list[Load], show: Callable[[Progress], None], stop: threading.Event
    ) -> None:
        self.ends: list[_End] = []
        self.stopping = False
        self._shares, self._show, self._stop = shares, show, stop
        self._shown_s, self._deadline_s = monotonic(), 0.0
        self._stack = contextlib.ExitStack()

    @property
    def progress(self) -> Progress:
        counts = [msgspec.structs.astuple(end.progress) for end in self.ends]
        return Progress(*map(sum, zip(*counts, strict=True)))

    def __enter__(self) -> Self:
        with self._stack as stack:
            # Start all of them first, because each takes a moment.
            for number in range(len(self._shares)):
                self.ends.append(_End(f"client-{number}"))
                stack.callback(self.ends[-1].close)
            for end, share in zip(self.ends, self._shares, strict=True):
                end.send(share)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def wait_until(self, is_over: Callable[[], bool]) -> None:
        """Show the progress of the processes, and stop them once `stop` is set."""
        while not is_over():
            self.poll(LOOK_EVERY_S)
            now_s = monotonic()
            if self._stop.is_set() and not self.stopping:
                self.stopping, self._deadline_s = True, now_s + STOP_TIMEOUT_S
                for end in self.ends:
                    with contextlib.suppress(OSError):  # `poll` finds out how the process ended
                        end.pipe.send_bytes(encode(None))
            if self.stopping and now_s > self._deadline_s:
                raise BatonError("the client processes did not stop when told to")
            if now_s - self._shown_s >= SHOW_EVERY_S:
                self._shown_s = now_s
                self._show(self.progress)

    def poll(self, timeout_s: float) -> None:
        """Handle messages for `timeout_s`. Raises `BatonError` if a process failed."""
        listening = [end for end in self.ends if end.finished is None]
        heard = wait([end.pipe for end in listening], timeout_s)
        for end in listening:
            if end.pipe in heard:
                end.receive()


class _End:
    """A client process and this side of its pipe."""

    def __init__(self, name: str) -> None:
        self.progress = Progress()
        self.finished: Finished | None = None
        self.pipe, theirs = Pipe()
        descriptor = theirs.fileno()
        command = Command(name, (str(descriptor),), MODULE, pass_fds=(descriptor,))
        with theirs:
            # The child keeps its last lines for the error message.
            self._child = Child(command, relay=lambda *_: None)

    def send(self, message: Load | Start) -> None:
        try:
            self.pipe.send_bytes(encode(message))
        except OSError as error:
            raise self._gone(str(error)) from None

    def receive(self) -> None:
        """Take in the next message, of which a part has arrived."""
        try:
            message = _from_worker.decode(self.pipe.recv_bytes())
        except (EOFError, OSError):
            raise self._gone("it ended before the load did") from None
        match message:
            case Progress():
                self.progress = message
            case Finished():
                self.finished = message
            case _:
                assert_never(message)

    def close(self) -> None:
        self.pipe.close()
        if self.finished is not None:
            self._child.wait(monotonic() + EXIT_TIMEOUT_S)
        self._child.kill()
        self._child.wait(monotonic() + EXIT_TIMEOUT_S)

    def _gone(self, why: str) -> BatonError:
        self._child.wait(monotonic() + EXIT_TIMEOUT_S)
        last = f": {self._child.tail[-1]}" if self._child.tail else ""
        code = self._child.exit_code
        status = "is running" if code is None else f"exit code {code}"
        return BatonError(f"client process {self._child.name} failed ({why}, {status}){last}")


def _since(start_s: float, record: Record) -> Record:
    """Return the record with its stamps counted from the start of the schedule."""
    for name in ("intended_s", "sent_s", "end_s", "first_byte_s"):
        if (at_s := getattr(record, name)) is not None:
            setattr(record, name, at_s - start_s)
    record.arrivals = [Arrival(one.at_s - start_s, one.num_tokens) for one in record.arrivals]
    return record
