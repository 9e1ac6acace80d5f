"""One request of a load: sent at its moment, read to its end, and told what became of it.

`worker.py` has many of these at once, `probe.py` single ones. Everything that takes time happens
before the moment of sending: the body is encoded and a connection is open by then, as in a client
with a pool. `ask` never raises for what a server does: that is an `Outcome`.
"""

import asyncio
import re
from collections.abc import Callable
from types import TracebackType
from typing import Self

from baton.bench.client.answer_reader import Problem, one_line
from baton.bench.client.connection import Connection, Pool, is_clients, reason_of
from baton.bench.client.exchange import Exchange
from baton.bench.client.target import Target, body_of, place_of
from baton.bench.figures.stages import read_timeline, stages_of
from baton.bench.records import Outcome, Planned, Record
from baton.protocol.errors import BatonError
from baton.runtime.clock import monotonic

LEAD_S = 0.05  # before its moment a request is made ready
DRAIN_S = 0.004  # from [DONE] to the end of the body; longer costs the connection


class Stopped(BatonError):
    """The session was told to end before the request was sent."""


class Session:
    """A server, and the connections to it. An async context manager, for one event loop."""

    def __init__(self, target: Target) -> None:
        """Raises `ConfigError`."""
        place = place_of(target.url)
        self.pool = Pool(target, place)
        self.stopped = False
        self.base_path = place.base_path
        self._authority, self._key = place.authority, target.api_key
        self._loop = asyncio.get_running_loop()
        self._under_way: set[Callable[[], object]] = set()  # what ends it when the session stops

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self.pool.close()
        await asyncio.sleep(0)  # transports that were aborted close in the next turn of the loop

    def stop(self) -> None:
        """Send nothing more, and give up what is under way. Idempotent."""
        self.stopped = True
        for end in tuple(self._under_way):
            end()

    async def until(self, at_s: float) -> bool:
        """Wait until `at_s` on the loop's clock and return True; return False on a stop."""
        if self.stopped or at_s <= self._loop.time():
            return not self.stopped
        waiting: asyncio.Future[None] = self._loop.create_future()

        def over() -> None:
            if not waiting.done():
                waiting.set_result(None)

        timer = self._loop.call_at(at_s, over)
        self._under_way.add(over)
        try:
            await waiting
        finally:
            timer.cancel()
            self._under_way.discard(over)
        return not self.stopped

    async def open_ahead(self, num_connections: int, timeout_s: float) -> None:
        """Fill the pool; what cannot be opened is tried again, and judged, when it is needed."""
        opened = await asyncio.gather(*(self.open(timeout_s) for _ in range(num_connections)))
        for connection in opened:
            if not isinstance(connection, Problem):
                self.pool.give_back(connection)

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Return the bytes of a request."""
        head = [
            f"{method} {path} HTTP/1.1",
            f"Host: {self._authority}",
            "Accept: text/event-stream, application/json",
            "Accept-Encoding: identity",
            "User-Agent: baton-bench",
        ]
        if body:
            head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        if self._key:
            head.append(f"Authorization: Bearer {self._key}")
        return "\r\n".join([*head, "", ""]).encode() + body

    async def open(self, timeout_s: float) -> Connection | Problem:
        """Return a new connection, or why there is none."""
        opening = asyncio.ensure_future(self.pool.open())
        self._under_way.add(opening.cancel)
        try:
            await asyncio.wait({opening}, timeout=timeout_s)
        finally:
            self._under_way.discard(opening.cancel)
            opening.cancel()
        if not opening.done():
            return _unreachable(f"no connection within {timeout_s:g} s")
        if opening.cancelled():
            text = "the load was stopped before there was a connection"
            return Problem(Outcome.STOPPED, text)
        if (error := opening.exception()) is None:
            return opening.result()
        outcome = Outcome.NO_SOCKET if is_clients(error) else Outcome.UNREACHABLE
        return Problem(outcome, one_line(reason_of(error)))

    async def exchange(
        self, connection: Connection, request: bytes, exchange: Exchange, timeout_s: float
    ) -> None:
        """Send, and return when `exchange` ended. The connection is the pool's from then on."""

        def give_up(outcome: Outcome, why: str) -> None:
            exchange.end(monotonic(), Problem(outcome, why))

        def stop() -> None:
            give_up(Outcome.STOPPED, "the load was stopped before the answer ended")

        late = f"no end of the answer within {timeout_s:g} s"
        timer = self._loop.call_later(timeout_s, give_up, Outcome.TIMED_OUT, late)
        self._under_way.add(stop)
        try:
            connection.send(request, exchange)
            await exchange.until_ended()
        finally:
            timer.cancel()
            self._under_way.discard(stop)
            if exchange.reader.done and connection.is_open and not connection.is_idle:
                # The end of the body is still to come, most likely at once.
                exchange.drained = self._loop.create_future()
                await asyncio.wait({exchange.drained}, timeout=DRAIN_S)
            self.pool.give_back(connection)


async def ask(
    session: Session, target: Target, planned: Planned, due_s: float | None = None
) -> Record:
    """Send `planned` at `due_s` on the monotonic clock (None: at once) and read the answer.

    All stamps of the record are on that clock; `planned.at_s` is not read. The whole prompt is in
    `planned`: a later turn of a conversation brings the turns before. Raises `Stopped` if the
    session ended before the moment came.
    """
    request = session.request("POST", session.base_path + target.path, body_of(target, planned))
    intended_s = monotonic() if due_s is None else due_s
    connection = session.pool.take()
    opening = None if connection else asyncio.ensure_future(session.open(target.timeout_s))
    is_sent = due_s is None or await session.until(due_s)
    # Opening a connection beyond the moment is the server's time, and no lag of the client.
    sent_s = intended_s if due_s is None else monotonic()
    was_opened = opening is None or opening.done()
    found = connection if opening is None else await opening
    assert found is not None
    if not is_sent:
        if isinstance(found, Connection):
            session.pool.give_back(found)
        raise Stopped("the load was stopped")
    if due_s is not None and was_opened and (isinstance(found, Problem) or not found.is_idle):
        # What failed before the moment is judged by another attempt, at the moment.
        found = await session.open(target.timeout_s)
    record = Record(
        index=planned.index,
        intended_s=intended_s,
        sent_s=sent_s,
        end_s=0.0,
        outcome=Outcome.UNREACHABLE,
        forced_tokens=planned.output_tokens if target.ignore_eos else 0,
        conversation=planned.conversation,
        turn=planned.turn,
        warm_up=planned.warm_up,
    )
    if isinstance(found, Connection) and not found.is_idle:
        session.pool.give_back(found)
        found = _unreachable("the server closed the connection at once")
    if isinstance(found, Problem):
        record.end_s = monotonic()
        record.outcome, record.detail = found
        return record
    exchange = Exchange(target.is_chat)
    await session.exchange(found, request, exchange, target.timeout_s)
    _fill(record, exchange, planned)
    return record


def _unreachable(detail: str) -> Problem:
    return Problem(Outcome.UNREACHABLE, detail)


def _fill(record: Record, exchange: Exchange, planned: Planned) -> None:
    """Set what the exchange saw."""
    reader = exchange.reader
    reader.fill(record, num_asked=planned.output_tokens)
    if exchange.problem is not None:
        record.outcome, record.detail = exchange.problem
    record.end_s, record.first_byte_s = exchange.end_s, exchange.first_byte_s
    record.status = exchange.status
    if (timeline := reader.timeline) is not None and (told := read_timeline(timeline)) is not None:
        record.stages = stages_of(told, record)
    record.retry_after_s = _retry_after_s(exchange.headers)


def _retry_after_s(headers: dict[str, str]) -> float | None:
    """From the milliseconds that OpenAI's clients read, or HTTP's seconds; not from dates."""
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        if re.fullmatch(r"\d{1,9}(?:\.\d{1,9})?", value := headers.get(name, "")):
            return float(value) * unit_s
    return None
