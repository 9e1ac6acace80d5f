"""A client process of a load, which sends a share of the requests on schedule and does little else.

Garbage collection is frozen; records are encoded as requests end, and sent when all have ended. The
schedule is absolute: a late request does not delay the ones after it.
"""

import asyncio
import contextlib
import gc
import math
import os
import select
import selectors
import sys
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from multiprocessing.connection import Connection
from operator import itemgetter

import msgspec

from baton.bench.client.http import Session, send
from baton.bench.client.load import (
    LEAD_S,
    Finished,
    FromWorker,
    Load,
    Progress,
    Start,
    encode,
)
from baton.bench.records import ClientProcess, Outcome, Planned, Record
from baton.runtime.clock import monotonic
from baton.runtime.host import raise_descriptor_limit
from baton.runtime.process import die_with_parent

COUNT_EVERY_S = 0.5
OPEN_AHEAD_S = 5.0
# epoll's timeout is at most a millisecond late; the rest of a sleep is left to select.
COARSE_S = 0.003
PAUSE_S = 0.5  # of a closed loop's client after the server refused it
# These outcomes count as a refusal only without a token: a proxy may accept and then close.
TURNED_AWAY = (
    Outcome.UNREACHABLE,
    Outcome.NO_SOCKET,
    Outcome.REFUSED,
    Outcome.SERVER_ERROR,
    Outcome.TRUNCATED,
)


def main() -> None:
    die_with_parent()
    raise_descriptor_limit()
    with (
        Connection(int(sys.argv[1])) as pipe,
        asyncio.Runner(loop_factory=new_loop) as runner,
    ):
        runner.run(_work(pipe))


async def _work(pipe: Connection) -> None:
    await Worker(pipe, msgspec.msgpack.decode(pipe.recv_bytes(), type=Load)).run()


class Worker:
    """The sender of the requests of a share. All moments and stamps are on the monotonic clock."""

    def __init__(self, pipe: Connection, share: Load) -> None:
        self._pipe = pipe
        self._share = share
        self._loop = asyncio.get_running_loop()
        self._session = Session(share.target)
        self._start: asyncio.Future[float | None] = self._loop.create_future()
        self._is_stopped = False
        self._sending: asyncio.Task[None] | None = None  # a stop cancels it
        self._sent = self._ended = self._failed = self._tokens = self._ready = 0
        self._records: list[bytes] = []
        self._encode = msgspec.msgpack.Encoder().encode

    async def run(self) -> None:
        """Warm up, wait for the start, send the measured requests, and report the records."""
        self._loop.add_reader(self._pipe.fileno(), self._on_message)
        self._count()
        async with self._session:
            client = await self._carry_out()
        self._counting.cancel()
        self._loop.remove_reader(self._pipe.fileno())
        self._report(self._progress())
        self._report(Finished(client, [msgspec.Raw(data) for data in self._records]))

    def _on_message(self) -> None:
        """Handle one message. The end of the load's process is also a stop."""
        with contextlib.suppress(EOFError, ConnectionError):
            start_s: Start = msgspec.msgpack.decode(self._pipe.recv_bytes(), type=Start)
            if start_s is not None:
                self._start.set_result(start_s)
                return
        self._loop.remove_reader(self._pipe.fileno())
        self._is_stopped = True
        if self._sending is not None:
            self._sending.cancel()
        if not self._start.done():
            self._start.set_result(None)

    def _report(self, message: FromWorker) -> None:
        self._pipe.send_bytes(encode(message))

    def _count(self) -> None:
        self._report(self._progress())
        self._counting = self._loop.call_later(COUNT_EVERY_S, self._count)

    def _progress(self) -> Progress:
        return Progress(
            self._sent, self._ended, self._failed, self._tokens, self._ready
        )

    async def _carry_out(self) -> ClientProcess:
        share = self._share
        requests = self._share.requests
        if share.concurrency:
            warm_up = [one for one in requests if one.warm_up]
            await self._until_stopped(self._closed_loop(warm_up, monotonic()))
            requests = [one for one in requests if not one.warm_up]
            # All clients start at once, so connections are opened before that crowded moment.
            timeout_s = min(share.target.timeout_s, OPEN_AHEAD_S)
            num_ahead = min(share.concurrency, len(requests))
            await self._until_stopped(self._session.open_ahead(num_ahead, timeout_s))
        gc.collect()
        gc.freeze()
        gc.disable()  # cycles are rare here, and a collection would delay all requests
        self._ready = 1
        self._report(self._progress())
        start_s = await self._start
        ended = self._ended
        tokens = self._tokens
        cpu_s = time.process_time()
        wall_s = monotonic()
        if start_s is not None:
            send_all = self._closed_loop if share.concurrency else self._open_loop
            await self._until_stopped(send_all(requests, start_s))
        return ClientProcess(
            pid=os.getpid(),
            cpu_s=time.process_time() - cpu_s,
            wall_s=monotonic() - wall_s,
            num_requests=self._ended - ended,
            num_tokens=self._tokens - tokens,
        )

    async def _until_stopped(self, work: Coroutine[None, None, None]) -> None:
        self._sending = asyncio.create_task(work)
        if self._is_stopped:
            self._sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._sending

    async def _open_loop(self, requests: Sequence[Planned], start_s: float) -> None:
        """Send each request at its moment."""
        moments = [(start_s + (planned.at_s or 0.0), planned) for planned in requests]
        async with asyncio.TaskGroup() as group:
            for due_s, planned in sorted(moments, key=itemgetter(0)):
                if (wait_s := due_s - LEAD_S - monotonic()) > 0:
                    await asyncio.sleep(wait_s)
                group.create_task(self._send(planned, due_s))

    async def _closed_loop(self, requests: Sequence[Planned], start_s: float) -> None:
        """Run the clients; each sends its next request when the last one has ended.

        A client that was refused pauses, or it would spend all its requests on an absent server.
        """
        waiting = deque(requests)
        stop_after_s = self._share.stop_after_s
        over_s = math.inf if stop_after_s is None else start_s + stop_after_s

        async def client() -> None:
            while waiting and not self._is_stopped and monotonic() < over_s:
                record = await self._send(waiting.popleft(), None)
                is_refused = (
                    record and record.outcome in TURNED_AWAY and not record.arrivals
                )
                if is_refused and waiting:
                    await asyncio.sleep(min(PAUSE_S, over_s - monotonic()))

        await asyncio.sleep(start_s - monotonic())
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._share.concurrency, len(waiting))):
                group.create_task(client())

    async def _send(self, planned: Planned, due_s: float | None) -> Record | None:
        """Count and return the record; None if the load was stopped before the moment came."""
        self._sent += 1
        record = await send(self._session, self._share.target, planned, due_s)
        if record is None:
            self._sent -= 1
            return None
        self._ended += 1
        self._failed += record.outcome not in (Outcome.ANSWERED, Outcome.STOPPED)
        self._tokens += record.num_tokens
        self._records.append(self._encode(record))
        return record


def new_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop whose timers are as exact as the kernel's.

    asyncio on epoll sleeps in whole milliseconds, rounded up, so a request would leave half a
    millisecond late on average.
    """
    if not hasattr(selectors, "EpollSelector"):
        return asyncio.new_event_loop()

    class FineSelector(selectors.EpollSelector):
        """A selector with timeouts in microseconds, by select on epoll's own descriptor."""

        def select(
            self, timeout: float | None = None
        ) -> list[tuple[selectors.SelectorKey, int]]:
            if timeout is None or timeout <= 0:
                return super().select(timeout)
            if timeout > COARSE_S:
                return super().select(timeout - COARSE_S / 2)
            select.select((self.fileno(),), (), (), timeout)
            return super().select(0)

    return asyncio.SelectorEventLoop(FineSelector())


if __name__ == "__main__":
    main()
