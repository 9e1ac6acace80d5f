"""A client process of a load: sends its share on schedule, and does little else meanwhile.

Started by `load.py` with one end of a socket pair. Garbage collection is frozen, records are
encoded as requests end and leave when all have ended. The schedule is absolute: a request that is
late does not delay the ones after it.
"""

import asyncio
import contextlib
import gc
import math
import os
import resource
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from baton.bench.client.ask import LEAD_S, Session, Stopped, ask_from
from baton.bench.client.pacing import CpuShare, LoopLag, new_loop
from baton.bench.client.turns import Unit, lost_turn, next_turn, units_of
from baton.bench.client.worker_messages import (
    LENGTH,
    Batch,
    Count,
    Finished,
    Go,
    Misfit,
    Ready,
    Share,
    ToWorker,
    decode_to_worker,
    frame,
)
from baton.bench.records import Arrival, ClientProcess, Outcome, Planned, Record
from baton.protocol.errors import ConfigError
from baton.runtime.clock import monotonic
from baton.runtime.process import die_with_parent

COUNT_EVERY_S = 0.5
OPEN_AHEAD_S = 5.0
BATCH_BYTES = 1 << 20
# How long a client of a closed loop leaves a server alone that turned it away.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0
LONGEST_RETRY_AFTER_S = 10.0
# Without a token, that is. Proxies accept for a server that is not there, and close.
TURNED_AWAY = (
    Outcome.UNREACHABLE,
    Outcome.NO_SOCKET,
    Outcome.REFUSED,
    Outcome.SERVER_ERROR,
    Outcome.TRUNCATED,
)


def main() -> None:
    die_with_parent()
    end = socket.socket(fileno=int(sys.argv[1]))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_main(end))


class Tally:
    """Counts of this process, and its records: encoded, once the start is known."""

    def __init__(self, keep_text: bool) -> None:
        self.sent = self.ended = self.failed = self.tokens = 0
        self.encoded: list[bytes] = []
        self._early: list[Record] | None = []
        self._keep_text = keep_text
        self._encode = msgspec.msgpack.Encoder().encode

    def add(self, record: Record) -> None:
        """Takes its text away if nobody wants it."""
        self.ended += 1
        self.failed += record.outcome not in (Outcome.ANSWERED, Outcome.STOPPED)
        self.tokens += record.num_tokens
        if not self._keep_text:
            record.text = None
        if self._early is not None:
            self._early.append(record)
        else:
            self.encoded.append(self._encode(record))

    def start(self, later_s: float) -> None:
        """The schedule starts so much later than the zero of the records so far."""
        early, self._early = self._early or [], None
        self.encoded += [self._encode(_moved(record, -later_s)) for record in early]

    def count(self) -> Count:
        return Count(self.sent, self.ended, self.failed, self.tokens)


class Runner:
    """Sends units; their moments and all stamps count from `zero_s`."""

    def __init__(self, session: Session, share: Share, tally: Tally) -> None:
        self.zero_s = monotonic()  # until the start of the schedule is known
        self._session, self._share, self._tally = session, share, tally
        limit = share.max_concurrency
        self._room = None if limit is None else asyncio.Semaphore(limit)

    async def open_ahead(self, num_connections: int) -> None:
        """All clients of a closed loop start at once, and that is crowded enough."""
        timeout_s = min(self._share.target.timeout_s, OPEN_AHEAD_S)
        await self._session.open_ahead(num_connections, timeout_s)

    async def open_loop(self, units: Sequence[Unit]) -> None:
        """Each unit at the moment of its first request."""
        async with asyncio.TaskGroup() as group:
            for unit in sorted(units, key=_moment):
                if not await self._session.waits.until(self.zero_s + _moment(unit) - LEAD_S):
                    return
                group.create_task(self._follow(unit))

    async def closed_loop(self, units: Sequence[Unit], concurrency: int) -> None:
        """So many clients; each takes the next unit when it has the last answer.

        One that was turned away pauses first, or a server that is away for a moment would have
        been asked for everything before it is back.
        """
        waiting, waits = deque(units), self._session.waits
        stop_after_s = self._share.stop_after_s
        over_s = math.inf if stop_after_s is None else self.zero_s + stop_after_s

        async def client() -> None:
            pauses = Pauses()
            while waiting and not waits.ended and monotonic() < over_s:
                answer = await self._follow([_at_once(planned) for planned in waiting.popleft()])
                if answer is not None and waiting:
                    await waits.until(min(monotonic() + pauses.after(answer), over_s))

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(waiting))):
                group.create_task(client())

    async def _follow(self, unit: Unit) -> Record | None:
        """The turns of a unit, each after the answer to the one before; the last answer."""
        before: Planned | None = None
        answer: Record | None = None
        last: Record | None = None
        for turn in unit:
            planned = turn
            if before is not None and answer is not None:
                planned = next_turn(turn, before, answer)
                if (lost := lost_turn(planned, answer)) is not None:
                    self._tally.sent += 1
                    self._tally.add(lost)
                    before, answer = planned, lost
                    continue
            answer = last = await self._ask(planned)
            if answer is None:
                return None
            before = planned
            # Encoded without its text, perhaps, but the next turn wants it.
            text = answer.text
            self._tally.add(answer)
            answer.text = text
        return last

    async def _ask(self, planned: Planned) -> Record | None:
        """None if the load was stopped before the moment came."""
        ready_s = 0.0 if planned.at_s is None else self.zero_s + planned.at_s - LEAD_S
        if not await self._session.waits.until(ready_s):
            return None
        async with self._room or contextlib.nullcontext():
            self._tally.sent += 1
            try:
                return await ask_from(self._session, self._share.target, planned, self.zero_s)
            except Stopped:
                self._tally.sent -= 1
                return None


class Pauses:
    """How long one client waits after an answer before it asks again."""

    def __init__(self) -> None:
        self._next_s = FIRST_PAUSE_S

    def after(self, answer: Record) -> float:
        """0 unless it was turned away: what the server says, or longer each time."""
        if answer.outcome not in TURNED_AWAY or answer.arrivals:
            self._next_s = FIRST_PAUSE_S
            return 0.0
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, LONGEST_PAUSE_S)
        if (told_s := answer.retry_after_s) is None:
            return pause_s
        return min(max(told_s, FIRST_PAUSE_S), LONGEST_RETRY_AFTER_S)


class Line:
    """The load's end of the socket pair, as this process sees it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.start: asyncio.Future[float | None] = asyncio.get_running_loop().create_future()
        self._reader, self.writer = reader, writer

    async def receive(self) -> ToWorker:
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        return decode_to_worker(await self._reader.readexactly(length))

    async def listen(self, session: Session) -> None:
        """Sets `start` (None: there will be none), and stops the session when told to."""
        with contextlib.suppress(asyncio.IncompleteReadError):  # the load is gone
            while isinstance(message := await self.receive(), Go):
                self.start.set_result(message.start_s)
        session.stop()
        if not self.start.done():
            self.start.set_result(None)

    async def count(self, tally: Tally) -> None:
        while True:
            await asyncio.sleep(COUNT_EVERY_S)
            self.writer.write(frame(tally.count()))

    async def report(self, tally: Tally, client: ClientProcess) -> None:
        """All records, then the end."""
        batch: list[msgspec.Raw] = []
        num_bytes = 0
        for data in tally.encoded:
            batch.append(msgspec.Raw(data))
            num_bytes += len(data)
            if num_bytes >= BATCH_BYTES:
                self.writer.write(frame(Batch(batch)))
                await self.writer.drain()
                batch, num_bytes = [], 0
        self.writer.write(frame(Batch(batch)))
        self.writer.write(frame(tally.count()))
        self.writer.write(frame(Finished(client)))
        await self.close()

    async def close(self) -> None:
        """Returns when the load's end has taken in everything. `drain` would return before."""
        self.writer.close()
        await self.writer.wait_closed()


async def _main(end: socket.socket) -> None:
    line = Line(*await asyncio.open_connection(sock=end))
    share = await line.receive()
    assert isinstance(share, Share)
    try:
        session = Session(share.target)
    except ConfigError as error:
        line.writer.write(frame(Misfit(error.message)))
        await line.close()
        return
    tally = Tally(share.keep_text)
    async with session, asyncio.TaskGroup() as group:
        others = [
            group.create_task(line.listen(session)),
            group.create_task(line.count(tally)),
        ]
        client = await _carry_out(Runner(session, share, tally), share, line, tally)
        for other in others:
            other.cancel()
    await line.report(tally, client)


async def _carry_out(runner: Runner, share: Share, line: Line, tally: Tally) -> ClientProcess:
    """Warms up, waits for the start, and sends what is to be measured."""
    units = units_of(share.requests)
    if share.concurrency is not None:
        await runner.closed_loop([unit for unit in units if unit[0].warm_up], share.concurrency)
        units = [unit for unit in units if not unit[0].warm_up]
        await runner.open_ahead(min(share.concurrency, len(units)))
    gc.collect()
    gc.freeze()
    gc.disable()  # cycles are rare here, and a collection would stop the clock for everybody
    line.writer.write(frame(Ready()))
    start_s = await line.start
    tally.start(0.0 if start_s is None else start_s - runner.zero_s)
    lag = LoopLag(asyncio.get_running_loop())
    lag.start()
    share_of_core = CpuShare()
    watcher = asyncio.create_task(share_of_core.watch())
    ended, tokens = tally.ended, tally.tokens
    cpu_s, wall_s = time.process_time(), monotonic()
    if start_s is not None:
        runner.zero_s = start_s
        if share.concurrency is None:
            await runner.open_loop(units)
        else:
            await asyncio.sleep(start_s - monotonic())
            await runner.closed_loop(units, share.concurrency)
    lag.stop()
    watcher.cancel()
    return ClientProcess(
        pid=os.getpid(),
        cpu_s=time.process_time() - cpu_s,
        wall_s=monotonic() - wall_s,
        num_requests=tally.ended - ended,
        num_tokens=tally.tokens - tokens,
        max_loop_lag_s=lag.max_lag_s,
        busiest_cpu=share_of_core.busiest,
    )


def _moved(record: Record, by_s: float) -> Record:
    record.intended_s += by_s
    record.sent_s += by_s
    record.end_s += by_s
    if record.first_byte_s is not None:
        record.first_byte_s += by_s
    record.arrivals = [Arrival(one.at_s + by_s, one.num_tokens) for one in record.arrivals]
    return record


def _moment(unit: Unit) -> float:
    return unit[0].at_s or 0.0


def _at_once(planned: Planned) -> Planned:
    return planned if planned.at_s is None else msgspec.structs.replace(planned, at_s=None)


if __name__ == "__main__":
    main()
