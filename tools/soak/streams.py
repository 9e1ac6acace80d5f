"""Streams whose outputs are known: each token is compared as it comes, and gaps are timed.

`Streams` first asks every request of a fixed set once, while nothing disturbs the cluster. After
that it asks them again and classifies the end of each response. It knows no process: the caller
says when the router itself was away, because no other router can resume its streams.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import aiohttp
import msgspec

from baton.protocol.errors import BatonError
from baton.runtime.clock import monotonic

Outcome = Literal["whole", "aborted", "wrong", "lost", "cut"]
# The router sends a comment every ten seconds, and may be frozen for a minute.
SILENCE_S = 150.0
GIVE_UP_S = 300.0  # after so long without a first byte a request is lost
PAUSE_S = 0.5  # before a request that was refused is sent again
LOOK_S = 0.02
LENGTHS = (20, 90, 300, 700)  # prompt tokens: local, one chunk, several chunks
RETRY_STATUSES = (429, 503)


class Ask(msgspec.Struct, frozen=True):
    """A request whose output is a function of it: greedy if it has no seed."""

    prompt: tuple[int, ...]
    max_tokens: int
    num_choices: int
    seed: int | None

    def body(self, model: str) -> dict[str, object]:
        drawn = (
            {"temperature": 0}
            if self.seed is None
            else {"temperature": 1, "seed": self.seed}
        )
        return {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "n": self.num_choices,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **drawn,
        }


class Choice(msgspec.Struct):
    token_ids: list[int]
    index: int = 0


class Usage(msgspec.Struct):
    resumed: bool = False


class Error(msgspec.Struct):
    code: str = ""
    message: str = ""


class Event(msgspec.Struct):
    """The part of a server-sent event that the soak looks at."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Error | None = None


@dataclass(slots=True)
class Record:
    """One request from its first byte sent to its end."""

    began_s: float
    stamps: list[float] = field(default_factory=list)  # when tokens came
    outcome: Outcome = "lost"
    detail: str = ""
    num_refusals: int = 0  # answers that asked to try again later
    is_resumed: bool = False
    ended_s: float = 0.0

    def longest_gap(self, from_s: float, to_s: float) -> float:
        """Return the longest time without a token of which some part lies within these."""
        edges = [self.began_s, *self.stamps, self.ended_s]
        gaps = [b - a for a, b in pairwise(edges) if b >= from_s and a <= to_s]
        return max(gaps, default=0.0)


class _Ended(Exception):
    """The stream is over, and why."""

    def __init__(self, outcome: Outcome, detail: str = "") -> None:
        super().__init__(detail)
        self.outcome: Outcome = outcome


class Streams:
    """`was_away(since_s)` says whether the router itself ended at some time since then."""

    def __init__(
        self, url: str, model: str, asks: list[Ask], was_away: Callable[[float], bool]
    ) -> None:
        self._url = f"{url}/v1/completions"
        self._model = model
        self._asks = asks
        self._was_away = was_away
        self.num_running = 0
        self._known: list[list[list[int]]] = []  # by request and choice
        self._decoder = msgspec.json.Decoder(Event)

    async def learn(self) -> None:
        """Ask every request alone and keep its output. Raises `BatonError` if one fails."""
        async with self._session() as session:
            for ask in self._asks:
                got: list[list[int]] = [[] for _ in range(ask.num_choices)]
                record = Record(monotonic())
                await self._ask(session, record, ask, _into(got))
                self._known.append(got)
                if [len(ids) for ids in got] != [ask.max_tokens] * ask.num_choices:
                    raise BatonError(
                        f"undisturbed, a request was not answered: {record.detail}"
                    )

    async def verify(self) -> list[Record]:
        """Ask every request alone again, at the end of a run."""
        async with self._session() as session:
            return [
                await self._checked(session, n, None) for n in range(len(self._asks))
            ]

    async def run(
        self,
        dice: random.Random,
        abort_share: float,
        may_begin: Callable[[], bool | None],
    ) -> list[Record]:
        """Send requests drawn by `dice` one after another until `may_begin` returns False.

        None means not yet.
        """
        records: list[Record] = []
        async with self._session() as session:
            while (now := may_begin()) is not False:
                if now is None:
                    await asyncio.sleep(LOOK_S)
                    continue
                index = dice.randrange(len(self._asks))
                ask = self._asks[index]
                total = ask.max_tokens * ask.num_choices
                abort_at = (
                    dice.randrange(total) if dice.random() < abort_share else None
                )
                records.append(await self._checked(session, index, abort_at))
        return records

    async def _checked(
        self, session: aiohttp.ClientSession, index: int, abort_at: int | None
    ) -> Record:
        known = self._known[index]
        record = Record(monotonic())
        counts = [0] * len(known)

        def compare(choice: int, ids: list[int]) -> None:
            begin = counts[choice]
            counts[choice] = counts[choice] + len(ids)
            wanted = known[choice][begin : counts[choice]]
            if ids != wanted:
                raise _Ended(
                    "wrong",
                    f"request {index} choice {choice} from {begin}: {ids[:6]} is not {wanted[:6]}",
                )
            if abort_at is not None and sum(counts) > abort_at:
                raise _Ended("aborted")

        self.num_running += 1
        await self._ask(session, record, self._asks[index], compare)
        self.num_running -= 1
        if record.outcome == "whole" and counts != [len(ids) for ids in known]:
            record.outcome, record.detail = (
                "lost",
                f"request {index} ended after {counts} tokens",
            )
        return record

    async def _ask(
        self,
        session: aiohttp.ClientSession,
        record: Record,
        ask: Ask,
        take: Callable[[int, list[int]], None],
    ) -> None:
        """Ask until a response begins, and fill in the record."""
        try:
            while await self._is_refused(session, record, ask, take):
                if monotonic() - record.began_s > GIVE_UP_S:
                    raise _Ended("lost", f"no answer in {GIVE_UP_S:g} s")
                await asyncio.sleep(PAUSE_S)
        except _Ended as end:
            record.outcome, record.detail = end.outcome, str(end)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            record.outcome, record.detail = "lost", f"{type(error).__name__}: {error}"
        record.ended_s = monotonic()
        if record.outcome == "lost" and self._was_away(record.began_s):
            record.outcome = "cut"

    async def _is_refused(
        self,
        session: aiohttp.ClientSession,
        record: Record,
        ask: Ask,
        take: Callable[[int, list[int]], None],
    ) -> bool:
        """Return whether the request is to be sent again. Raises `_Ended` at the stream's end."""
        try:
            reply = await session.post(self._url, json=ask.body(self._model))
        except aiohttp.ClientConnectionError:
            # It was not accepted, or that is unknown.
            if self._was_away(record.began_s):
                return True
            raise
        async with reply:
            if reply.status in RETRY_STATUSES and "Retry-After" in reply.headers:
                record.num_refusals += 1
                return True
            if reply.status != 200:
                raise _Ended(
                    "lost", f"status {reply.status}: {(await reply.text())[:300]}"
                )
            async for line in reply.content:
                if line.startswith(b"data: "):
                    self._take(record, line[6:], take)
        raise _Ended("lost", "the connection ended in the midst of the stream")

    def _take(
        self, record: Record, data: bytes, take: Callable[[int, list[int]], None]
    ) -> None:
        if data.startswith(b"[DONE]"):
            raise _Ended("whole")
        event = self._decoder.decode(data)
        if event.error is not None:
            raise _Ended("lost", f"{event.error.code}: {event.error.message}")
        if event.usage is not None:
            record.is_resumed = event.usage.resumed
        for choice in event.choices:
            if choice.token_ids:
                record.stamps.append(monotonic())
                take(choice.index, choice.token_ids)

    def _session(self) -> aiohttp.ClientSession:
        # An abort must close its connection, so no connection is kept for the next request.
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True, limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_read=SILENCE_S),
        )


def _into(got: list[list[int]]) -> Callable[[int, list[int]], None]:
    return lambda choice, token_ids: got[choice].extend(token_ids)


def draw(seed: int, count: int, vocab_size: int) -> list[Ask]:
    """Draw requests: half greedy, half sampled; one in four has two choices."""
    dice = random.Random(seed)
    return [
        Ask(
            tuple(dice.randrange(3, vocab_size) for _ in range(dice.choice(LENGTHS))),
            max_tokens=dice.randrange(40, 400),
            num_choices=2 if number % 4 == 3 else 1,
            seed=None if number % 2 else dice.randrange(1 << 31),
        )
        for number in range(count)
    ]
