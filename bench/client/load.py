"""Run one load: client processes that each send a share of the requests and return the records.

All processes count from one start on the host's monotonic clock; this process sleeps while they
run, so that it takes no CPU from them. If a process ends without its records, the load fails
instead of having fewer records.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from multiprocessing.connection import Connection, Pipe, wait

import msgspec

from baton.bench.client.http import check, tls_of
from baton.bench.records import Arrival, ClientProcess, LoadResult, Planned, Record
from baton.bench.settings import Target, server_address
from baton.protocol.errors import BatonError, ConfigError
from baton.runtime.clock import monotonic
from baton.runtime.process import Child, Command

SHOW_EVERY_S = 0.5
LOOK_EVERY_S = 0.1
START_DELAY_S = 0.1
LEAD_S = 0.05  # a request is prepared this long before its moment
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

    Running requests at a stop are `STOPPED`, and later ones have no record. Raises `ConfigError`
    for a load that cannot run, and `BatonError` if a client process fails.
    """
    clients = _Clients(on_progress, stop or threading.Event())
    with clients.running(_shares(load)):
        clients.wait_until(lambda progress: progress.ready == len(clients.progress))
        # The first request of an open loop may be due before the start, to warm up.
        first_s = min(
            [0.0, *(one.at_s for one in load.requests if one.at_s is not None)]
        )
        start_s = monotonic() + START_DELAY_S + LEAD_S - first_s
        started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
        if not clients.stopping:
            clients.tell(start_s)
        clients.wait_until(lambda _: len(clients.finished) == len(clients.progress))
    found = [clients.finished[number] for number in sorted(clients.finished)]
    records = [
        _since(start_s, _record.decode(data)) for one in found for data in one.records
    ]
    records.sort(key=lambda record: record.index)
    may_be_fewer = clients.stopping or load.stop_after_s is not None
    if len(records) != len(load.requests) and not may_be_fewer:
        text = f"{len(load.requests)} requests were planned and {len(records)} records came back"
        raise BatonError(text)
    wall_s = max([0.0, *(record.end_s for record in records)])
    return LoadResult(records, [one.client for one in found], wall_s, started_at)


def _shares(load: Load) -> list[Load]:
    """Return the share of each process, dealt in turn. Raises `ConfigError`."""
    if not load.requests:
        raise ConfigError("the load has no request")
    check(load.target, load.requests)
    if server_address(load.target.url).is_tls:
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


class _Clients:
    """The client processes, by number, and their messages."""

    def __init__(self, show: Callable[[Progress], None], stop: threading.Event) -> None:
        self.progress: list[Progress] = []
        self.finished: dict[int, Finished] = {}
        self.stopping = False
        self._show = show
        self._stop = stop
        self._pipes: list[Connection] = []
        self._children: list[Child] = []

    @contextlib.contextmanager
    def running(self, shares: list[Load]) -> Iterator[None]:
        """Start the processes; at the end of the context all are gone."""
        try:
            # All of them first, because each takes a moment.
            for number in range(len(shares)):
                ours, theirs = Pipe()
                self._pipes.append(ours)
                self.progress.append(Progress())
                descriptor = theirs.fileno()
                name = f"client-{number}"
                command = Command(
                    name, (str(descriptor),), MODULE, pass_fds=(descriptor,)
                )
                with theirs:
                    # The child keeps its last lines for the error message.
                    self._children.append(Child(command, relay=lambda *_: None))
            for number, share in enumerate(shares):
                self._send(number, share)
            yield
            for child in self._children:
                child.wait(monotonic() + EXIT_TIMEOUT_S)
        finally:
            for pipe in self._pipes:
                pipe.close()
            for child in self._children:
                child.kill()
                child.wait(monotonic() + EXIT_TIMEOUT_S)

    def tell(self, start_s: float) -> None:
        for number in range(len(self._pipes)):
            self._send(number, start_s)

    def wait_until(self, is_over: Callable[[Progress], bool]) -> None:
        """Show the progress of the processes, and stop them once `stop` is set."""
        shown_s = monotonic()
        deadline_s = shown_s + STOP_TIMEOUT_S
        while not is_over(self._sum()):
            self._receive(LOOK_EVERY_S)
            now_s = monotonic()
            if self._stop.is_set() and not self.stopping:
                self.stopping = True
                for pipe in self._pipes:
                    # `_receive` finds out how it ended.
                    with contextlib.suppress(OSError):
                        pipe.send_bytes(encode(None))
            if not self.stopping:
                deadline_s = now_s + STOP_TIMEOUT_S
            if now_s > deadline_s:
                raise BatonError("the client processes did not stop when told to")
            if now_s - shown_s >= SHOW_EVERY_S:
                shown_s = now_s
                self._show(self._sum())
        self._show(self._sum())

    def _sum(self) -> Progress:
        counts = [msgspec.structs.astuple(one) for one in self.progress]
        return Progress(*map(sum, zip(*counts, strict=True)))

    def _receive(self, timeout_s: float) -> None:
        """Handle messages for `timeout_s`. Raises `BatonError` if a process failed."""
        listening = [one for one in range(len(self._pipes)) if one not in self.finished]
        ready = wait([self._pipes[one] for one in listening], timeout_s)
        for number in listening:
            if self._pipes[number] in ready:
                try:
                    message = _from_worker.decode(self._pipes[number].recv_bytes())
                except (EOFError, OSError):
                    raise self._failed(number, "it ended before the load did") from None
                if isinstance(message, Finished):
                    self.finished[number] = message
                else:
                    self.progress[number] = message

    def _send(self, number: int, message: Load | Start) -> None:
        try:
            self._pipes[number].send_bytes(encode(message))
        except OSError as error:
            raise self._failed(number, str(error)) from None

    def _failed(self, number: int, why: str) -> BatonError:
        child = self._children[number]
        child.wait(monotonic() + EXIT_TIMEOUT_S)
        last = f": {child.tail[-1]}" if child.tail else ""
        status = (
            "is running" if child.exit_code is None else f"exit code {child.exit_code}"
        )
        return BatonError(f"client process {child.name} failed ({why}, {status}){last}")


def _since(start_s: float, record: Record) -> Record:
    """Return the record with its stamps counted from the start of the schedule."""
    for name in ("intended_s", "sent_s", "end_s", "first_byte_s"):
        if (at_s := getattr(record, name)) is not None:
            setattr(record, name, at_s - start_s)
    record.arrivals = [
        Arrival(one.at_s - start_s, one.num_tokens) for one in record.arrivals
    ]
    return record
