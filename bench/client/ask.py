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

import msgspec

from baton.bench.client.answer_reader import AnswerReader, Problem, message_of, one_line
from baton.bench.client.connection import Connection, Pool, is_clients, reason_of
from baton.bench.client.http_wire import ResponseParser
from baton.bench.client.pacing import Waits
from baton.bench.client.target import Target, body_of, place_of
from baton.bench.figures.stages import read_timeline, stages_of
from baton.bench.records import Arrival, Outcome, Planned, Record
from baton.protocol.errors import BatonError
from baton.runtime.clock import Clock, monotonic

LEAD_S = 0.05  # before its moment a request is made ready
MAX_BODY_BYTES = 1 << 20  # of an answer that is no stream
DRAIN_S = 1.0  # from [DONE] to the end of the body; longer costs the connection
# Of this the sender of the next request is made to wait, so that it finds the connection.
DRAIN_FIRST_S = 0.004
_STREAM = re.compile(rb"\s*(?:data|event|id|retry)?:")


class Stopped(BatonError):
    """The session was told to end before the request was sent."""


class Session:
    """A server, and the connections to it. An async context manager, for one event loop."""

    def __init__(self, target: Target) -> None:
        """Raises `ConfigError`."""
        place = place_of(target.url)
        self.pool = Pool(target, place, monotonic)
        self.waits = Waits(asyncio.get_running_loop())
        self.base_path = place.base_path
        self._authority, self._key = place.authority, target.api_key
        self._exchanges: set[Exchange] = set()
        self._openings: set[asyncio.Future[Connection]] = set()

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
        self.waits.end()
        for opening in self._openings:
            opening.cancel()
        for exchange in tuple(self._exchanges):
            problem = Problem(Outcome.STOPPED, "the load was stopped before the answer ended")
            exchange.end(monotonic(), problem)

    async def open_ahead(self, num_connections: int, timeout_s: float) -> None:
        """Fills the pool; what cannot be opened is tried again, and judged, when it is needed."""
        opened = await asyncio.gather(*(self.open(timeout_s) for _ in range(num_connections)))
        for connection in opened:
            if not isinstance(connection, Problem):
                self.pool.give_back(connection)

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of a request."""
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

    async def open(self, timeout_s: float) -> "Connection | Problem":
        """A new connection, or why there is none."""
        opening = asyncio.ensure_future(self.pool.open())
        self._openings.add(opening)
        try:
            await asyncio.wait({opening}, timeout=timeout_s)
        finally:
            self._openings.discard(opening)
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
        self, connection: Connection, request: bytes, exchange: "Exchange", timeout_s: float
    ) -> None:
        """Sends, and returns when `exchange` ended. The connection is the pool's from then on."""
        text = f"no end of the answer within {timeout_s:g} s"
        problem = Problem(Outcome.TIMED_OUT, text)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(timeout_s, lambda: exchange.end(monotonic(), problem))
        self._exchanges.add(exchange)
        try:
            connection.send(request, exchange)
            await exchange.until_ended()
        finally:
            timer.cancel()
            self._exchanges.discard(exchange)
            if exchange.reader.done and connection.is_open and not connection.is_idle:
                await self._drain(connection, exchange)
            else:
                self.pool.give_back(connection)

    async def _drain(self, connection: Connection, exchange: "Exchange") -> None:
        """The answer is done, but the end of its body is still to come, most likely at once."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(DRAIN_S, self.pool.discard, connection)
        is_over = loop.create_future()

        def drained() -> None:
            timer.cancel()
            self.pool.give_back(connection)
            if not is_over.done():
                is_over.set_result(None)

        exchange.on_body_end = drained
        await asyncio.wait({is_over}, timeout=DRAIN_FIRST_S)


class Exchange:
    """A request under way: takes the answer from its connection. Stamps are monotonic."""

    def __init__(self, is_chat: bool) -> None:
        self.reader = AnswerReader(is_chat)
        self.problem: Problem | None = None
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.body = bytearray()  # of an answer that is no stream
        self.first_byte_s: float | None = None
        self.end_s = 0.0
        self.on_body_end: Callable[[], None] | None = None
        self._is_stream = False
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def until_ended(self) -> None:
        await self._ended

    def end(self, at_s: float, problem: Problem | None = None) -> None:
        """Nothing that comes later counts."""
        if not self._ended.done():
            self.end_s, self.problem = at_s, problem
            self._ended.set_result(None)

    def received(self, response: ResponseParser, pieces: list[bytes], at_s: float) -> None:
        if self._ended.done():
            return
        if self.status is None and response.status:
            self.status, self.headers = response.status, response.headers
        if pieces and self.first_byte_s is None:
            self.first_byte_s = at_s
            kind = self.headers.get("content-type", "").lower()
            says_so = kind.startswith("text/event-stream") and not pieces[0].startswith(b"{")
            self._is_stream = self.status == 200 and (
                says_so or _STREAM.match(pieces[0]) is not None
            )
        for piece in pieces:
            if not self._is_stream:
                self.body += piece[: MAX_BODY_BYTES - len(self.body)]
            elif self.reader.feed(piece, at_s):
                self.end(at_s, self.reader.problem)
                return

    def ended(self, response: ResponseParser, at_s: float) -> None:
        if not self._ended.done():
            self.status, self.headers = response.status, response.headers
            self._finish("the body ended", at_s)
        elif self.on_body_end is not None:
            self.on_body_end()

    def lost(self, why: str, is_http: bool, at_s: float) -> None:
        if self._ended.done():
            return
        if not is_http:
            self.end(at_s, Problem(Outcome.MALFORMED, one_line(why)))
        elif self.status is None:
            text = f"{why} before an answer came"
            self.end(at_s, Problem(Outcome.TRUNCATED, text))
        else:
            self._finish(why, at_s)

    def _finish(self, why: str, at_s: float) -> None:
        if self._is_stream:
            self.reader.cut(why)
            self.end(at_s, self.reader.problem)
        else:
            self.end(at_s, self._whole(why))

    def _whole(self, why: str) -> Problem:
        """What an answer is that is no stream of events."""
        status, text = self.status or 0, message_of(bytes(self.body))
        if status in (429, 503):
            return Problem(Outcome.REFUSED, text)
        if 400 <= status < 600:
            kind = Outcome.CLIENT_ERROR if status < 500 else Outcome.SERVER_ERROR
            return Problem(kind, text)
        if status != 200:
            where = self.headers.get("location", "")
            where = f" to {where}" if where else ""
            return Problem(Outcome.MALFORMED, one_line(f"status {status}{where}"))
        if not self.body:
            return Problem(Outcome.TRUNCATED, f"{why} without any event")
        try:
            found: object = msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            found = None
        if isinstance(found, dict):
            what = f": {text}" if "error" in found else " instead of a stream of events"
            return Problem(Outcome.NOT_STREAMED, one_line(f"the answer is one JSON body{what}"))
        sort = self.headers.get("content-type", "of no type")
        return Problem(Outcome.MALFORMED, one_line(f"the answer is {sort}: {text}"))


async def ask(session: Session, target: Target, planned: Planned, clock: Clock) -> Record:
    """`ask_from` for a caller with a clock that counts from the start of its schedule."""
    return await ask_from(session, target, planned, monotonic() - clock())


async def ask_from(session: Session, target: Target, planned: Planned, zero_s: float) -> Record:
    """Sends `planned` at its `at_s` (None: at once) and reads the answer.

    The schedule starts at `zero_s` on the monotonic clock, and all stamps count from there. The
    whole prompt is in `planned`: a later turn of a conversation brings the turns before. Raises
    `Stopped` if the session ended before the moment came.
    """
    path = session.base_path + target.path
    request = session.request("POST", path, body_of(target, planned))
    if planned.at_s is None:
        # As below: opening a connection is the server's time.
        intended_s = sent_s = monotonic()
        found = session.pool.take() or await session.open(target.timeout_s)
    else:
        intended_s = planned.at_s + zero_s
        sent_s, found = await _at_its_moment(session, intended_s, target.timeout_s)
    record = Record(
        index=planned.index,
        intended_s=intended_s - zero_s,
        sent_s=sent_s - zero_s,
        end_s=0.0,
        outcome=Outcome.UNREACHABLE,
        forced_tokens=planned.output_tokens if target.ignore_eos else 0,
        conversation=planned.conversation,
        turn=planned.turn,
        warm_up=planned.warm_up,
    )
    if not isinstance(found, Problem) and not found.is_idle:
        session.pool.discard(found)
        found = _unreachable("the server closed the connection at once")
    if isinstance(found, Problem):
        record.end_s = monotonic() - zero_s
        record.outcome, record.detail = found
        return record
    exchange = Exchange(target.is_chat)
    await session.exchange(found, request, exchange, target.timeout_s)
    _fill(record, exchange, planned, zero_s)
    return record


async def _at_its_moment(
    session: Session, due_s: float, timeout_s: float
) -> tuple[float, Connection | Problem]:
    """Waits until `due_s`; the moment of sending, and a connection or why there is none.

    Opening starts before. If it takes beyond the moment, that is the server's time and not a lag
    of the client; if it failed before, the moment itself decides.
    """
    connection = session.pool.take()
    opening = None if connection else asyncio.ensure_future(session.open(timeout_s))
    if not await session.waits.until(due_s):
        if connection is not None:
            session.pool.give_back(connection)
        if opening is not None and not isinstance(opened := await opening, Problem):
            session.pool.give_back(opened)
        raise Stopped("the load was stopped")
    sent_s = monotonic()
    was_opened = opening is None or opening.done()
    found = connection if opening is None else await opening
    assert found is not None
    if was_opened and (isinstance(found, Problem) or not found.is_idle):
        found = await session.open(timeout_s)
    return sent_s, found


def _unreachable(detail: str) -> Problem:
    return Problem(Outcome.UNREACHABLE, detail)


def _fill(record: Record, exchange: Exchange, planned: Planned, zero_s: float) -> None:
    """What the exchange saw, with its stamps counted from the start of the schedule."""
    reader = exchange.reader
    reader.fill(record, num_asked=planned.output_tokens)
    if (problem := exchange.problem) is not None:
        record.outcome, record.detail = problem.outcome, problem.detail
    record.arrivals = [
        Arrival(arrival.at_s - zero_s, arrival.num_tokens) for arrival in record.arrivals
    ]
    record.end_s = exchange.end_s - zero_s
    if exchange.first_byte_s is not None:
        record.first_byte_s = exchange.first_byte_s - zero_s
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
