"""Send one request of a load at its moment, read the answer to its end, and record the outcome.

`worker.py` asks many requests at once, `probe.py` single ones. Everything that takes time happens
before the moment of sending: the body is encoded and a connection is open by then, as in a client
with a pool. `ask` never raises for the behaviour of a server: that is an `Outcome`.
"""

import asyncio
import re
from collections.abc import Callable
from typing import Self

from baton.bench.client.answer_reader import Problem
from baton.bench.client.exchange import Connection, Exchange, reason_of
from baton.bench.client.target import Target, body_of, place_of, tls_of
from baton.bench.figures.stages import read_timeline, stages_of
from baton.bench.records import Outcome, Planned, Record
from baton.protocol.errors import BatonError
from baton.runtime.clock import monotonic

LEAD_S = 0.05  # a request is prepared this long before its moment
# Servers close idle connections after 5 s or more, and no request may be sent on such a connection.
IDLE_LIMIT_S = 2.0
DRAIN_S = 0.004  # the longest wait from [DONE] to the end of the body before closing


class Stopped(BatonError):
    """The session was told to end before the request was sent."""


class Session:
    """The connections to one server. An async context manager, for one event loop."""

    def __init__(self, target: Target) -> None:
        """Open no connection yet. Raises `ConfigError` for an unusable target."""
        place = place_of(target.url)
        self.stopped = False
        self.base_path = place.base_path
        self._place, self._key = place, target.api_key
        self._tls = tls_of(target) if place.is_tls else None
        self._connections: set[Connection] = set()
        self._idle: list[Connection] = []
        self._loop = asyncio.get_running_loop()
        self._under_way: set[Callable[[], object]] = set()  # calls that end requests on a stop

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        self.stop()
        for connection in self._connections:
            connection.close()
        await asyncio.sleep(0)  # transports that were aborted close in the next turn of the loop

    def stop(self) -> None:
        """Send nothing more, and give up the running requests. A second call does nothing."""
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
        """Open idle connections; a failed one is tried again, and judged, when it is needed."""
        opened = await asyncio.gather(*(self.open(timeout_s) for _ in range(num_connections)))
        for connection in opened:
            if isinstance(connection, Connection):
                self.give_back(connection)

    def take(self) -> Connection | None:
        """Return an idle connection that is young enough, for the caller alone."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_idle and monotonic() - connection.idle_since_s < IDLE_LIMIT_S:
                return connection
            self._close(connection)
        return None

    def give_back(self, connection: Connection) -> None:
        """Keep the connection for the next request if it can be used again, else close it."""
        if connection.is_idle:
            self._idle.append(connection)
        else:
            self._close(connection)

    def _close(self, connection: Connection) -> None:
        connection.close()
        self._connections.discard(connection)

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Return the bytes of a request."""
        head = [
            f"{method} {path} HTTP/1.1",
            f"Host: {self._place.authority}",
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
        """Return a new connection, for the caller alone, or the reason why there is none."""
        place = self._place
        opening = asyncio.ensure_future(
            self._loop.create_connection(Connection, place.host, place.port, ssl=self._tls)
        )
        self._under_way.add(opening.cancel)
        try:
            await asyncio.wait({opening}, timeout=timeout_s)
        finally:
            self._under_way.discard(opening.cancel)
            opening.cancel()
        if not opening.done():
            return Problem(Outcome.UNREACHABLE, f"no connection within {timeout_s:g} s")
        if opening.cancelled():
            text = "the load was stopped before there was a connection"
            return Problem(Outcome.STOPPED, text)
        if (error := opening.exception()) is not None:
            return reason_of(error)
        connection = opening.result()[1]
        self._connections.add(connection)
        return connection

    async def exchange(
        self, connection: Connection, request: bytes, exchange: Exchange, timeout_s: float
    ) -> None:
        """Send, and return when `exchange` has ended. The session then owns the connection."""

        def give_up(outcome: Outcome, why: str) -> None:
            exchange.end(monotonic(), Problem(outcome, why))

        def stop() -> None:
            give_up(Outcome.STOPPED, "the load was stopped before the answer ended")

        late = f"the answer did not end within {timeout_s:g} s"
        timer = self._loop.call_later(timeout_s, give_up, Outcome.TIMED_OUT, late)
        self._under_way.add(stop)
        try:
            connection.send(request, exchange)
            await exchange.ended
        finally:
            timer.cancel()
            self._under_way.discard(stop)
            if exchange.reader.done and connection.is_open and not connection.is_idle:
                # The end of the body most likely comes at once.
                exchange.drained = self._loop.create_future()
                await asyncio.wait({exchange.drained}, timeout=DRAIN_S)
            self.give_back(connection)


async def ask(
    session: Session, target: Target, planned: Planned, due_s: float | None = None
) -> Record:
    """Send `planned` at `due_s` on the monotonic clock (None: at once) and read the answer.

    All stamps of the record are on that clock; `planned.at_s` is not read. Raises `Stopped` if the
    session ended before the moment came.
    """
    request = session.request("POST", session.base_path + target.path, body_of(target, planned))
    intended_s = monotonic() if due_s is None else due_s
    sent_s, found = await _connected(session, target.timeout_s, intended_s, due_s is None)
    record = Record(
        index=planned.index,
        intended_s=intended_s,
        sent_s=sent_s,
        end_s=sent_s,
        outcome=Outcome.UNREACHABLE,
        forced_tokens=planned.output_tokens if target.ignore_eos else 0,
        warm_up=planned.warm_up,
    )
    if isinstance(found, Problem):
        record.end_s = monotonic()
        record.outcome, record.detail = found
        return record
    exchange = Exchange(target.is_chat)
    await session.exchange(found, request, exchange, target.timeout_s)
    _fill(record, exchange, planned)
    return record


async def _connected(
    session: Session, timeout_s: float, due_s: float, at_once: bool
) -> tuple[float, Connection | Problem]:
    """Wait until `due_s`; return the moment of sending, and a connection or a `Problem`.

    Opening starts earlier. If it takes until after the moment, the delay counts as the server's and
    not as a lag of the client; if it failed before the moment, a second attempt at the moment
    decides.
    """
    found: Connection | Problem | None = session.take()
    opening = None if found else asyncio.ensure_future(session.open(timeout_s))
    is_due = at_once or await session.until(due_s)
    sent_s = due_s if at_once else monotonic()
    is_early = not at_once and (opening is None or opening.done())
    if opening is not None:
        found = await opening
    assert found is not None
    if not is_due:
        if isinstance(found, Connection):
            session.give_back(found)
        raise Stopped("the load was stopped")
    if is_early and (isinstance(found, Problem) or not found.is_idle):
        found = await session.open(timeout_s)
    if isinstance(found, Connection) and not found.is_idle:
        session.give_back(found)
        found = Problem(Outcome.UNREACHABLE, "the server closed the connection at once")
    return sent_s, found


def _fill(record: Record, exchange: Exchange, planned: Planned) -> None:
    """Copy the results of the exchange into the record."""
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
    """Return the wait by `retry-after-ms` of OpenAI's clients or HTTP's seconds; ignore dates."""
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        if re.fullmatch(r"\d{1,9}(?:\.\d{1,9})?", value := headers.get(name, "")):
            return float(value) * unit_s
    return None
