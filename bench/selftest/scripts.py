"""What the scripted server is told to do, and what it says it did.

The self-test writes a `Script` per request; `scripted_answers` turns it into bytes and moments,
`scripted_server` plays it and returns an `Answer` with the stamps of what it really wrote. Times in
a script are milliseconds from the moment at which the whole request was there. Plain data: nothing
here knows sockets, clients or metrics.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Literal

import msgspec

MODEL = "scripted"
PIECE_GAP_MS = 3.0  # between the writes that one event is split over
# Ids of tokens that answers consist of. A prompt is known by its first id, which may be any.
LOWEST_ID, NUM_IDS = 300, 7_000

Usage = Literal["final", "continuous", "none"]
Body = Literal["stream", "json", "html"]
Damage = Literal["", "swapped", "lost", "doubled", "wrong"]


class Ending(StrEnum):
    """How an answer ends once all its chunks are written."""

    DONE = "done"  # usage if asked for, then [DONE]
    NO_DONE = "no_done"  # the body ends properly, but [DONE] never came
    CUT = "cut"  # the connection is closed between two events
    RESET = "reset"  # the same, by a TCP reset
    HALF_EVENT = "half_event"  # the connection is closed in the middle of an event
    ERROR = "error"  # an error event, then the body ends
    ERROR_THEN_DONE = "error_then_done"  # some servers send [DONE] after an error, too
    MALFORMED = "malformed"  # an event that is no JSON, then [DONE]
    FOREIGN = "foreign"  # an event that is JSON, but not of this API, then [DONE]
    SILENCE = "silence"  # nothing more until the client leaves


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """One event. Events of the same moment leave in one write.

    No tokens: an empty delta, as chats open with. `pieces` writes carry the event, the last of them
    at `at_ms`. A comment carries nothing.
    """

    at_ms: float
    num_tokens: int = 1
    pieces: int = 1
    comment: bool = False


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """One answer."""

    chunks: tuple[Chunk, ...] = ()
    ending: Ending = Ending.DONE
    end_ms: float | None = None  # None: with the last chunk
    headers_ms: float | None = None  # None: in one write with the first event
    status: int = 200
    retry_after_s: float | None = None
    body: Body = "stream"
    usage: Usage = "final"
    usage_error: int = 0  # added to the tokens that were really sent
    cached_tokens: int = 0
    token_ids: bool = True  # whether they are returned where a request asks for them
    damage: Damage = ""  # to the middle of the tokens; their number stays
    crlf: bool = False
    chunked: bool = True  # else the end of the connection ends the body
    drip_bytes: int = 0  # at most so many per write, through HTTP's own framing; 0: all at once
    own_finish: bool = False  # the finish reason comes in an event without tokens

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def last_ms(self) -> float:
        """When the ending is due."""
        if self.end_ms is not None:
            return self.end_ms
        return max((chunk.at_ms for chunk in self.chunks), default=0.0)


class Write(msgspec.Struct, frozen=True, array_like=True):
    """One call that handed bytes to the kernel. Seconds on CLOCK_MONOTONIC."""

    at_s: float  # before the call
    took_s: float  # until it returned: the truth lies in between
    num_tokens: tuple[int, ...]  # of each token-carrying event that these bytes completed
    body: bool  # not headers alone


class Answer(msgspec.Struct, kw_only=True):
    """One request as the server saw it."""

    number: int | None  # None: of no script
    call: int  # how many requests with this number there were before
    received_s: float  # the whole request was there
    status: int = 0
    writes: list[Write] = msgspec.field(default_factory=list)
    ended_s: float | None = None  # the script was played to its end
    client_left: bool = False
    held_writes: int = 0  # the kernel did not take all bytes at once: the stamps mean nothing


def steady(first_ms: float, gap_ms: float, num_tokens: int) -> tuple[Chunk, ...]:
    """A token per chunk at an even pace."""
    return tuple(Chunk(first_ms + gap_ms * position) for position in range(num_tokens))


def paced(first_ms: float, gaps_ms: Sequence[float], sizes: Sequence[int]) -> tuple[Chunk, ...]:
    """Chunks of these sizes; `gaps_ms` lie between them, so there is one less."""
    chunks = [Chunk(first_ms, sizes[0])]
    for gap_ms, size in zip(gaps_ms, sizes[1:], strict=True):
        chunks.append(Chunk(chunks[-1].at_ms + gap_ms, size))
    return tuple(chunks)


def answer_ids(number: int, num_tokens: int, damage: Damage = "") -> list[int]:
    """The tokens of a number's answer: the same at every call, unless damage is wanted."""
    ids = [_token(number, position) for position in range(num_tokens)]
    middle = num_tokens // 2
    match damage:
        case "swapped":
            ids[middle - 1], ids[middle] = ids[middle], ids[middle - 1]
        case "lost":
            ids = [*ids[:middle], *ids[middle + 1 :], _token(number, num_tokens)]
        case "doubled":
            ids = [*ids[: middle + 1], *ids[middle:-1]]
        case "wrong":
            ids[middle] = _token(number, num_tokens + 1)
        case "":
            pass
    return ids


def _token(number: int, position: int) -> int:
    # Both factors are coprime to the number of ids, so an answer repeats no id.
    return LOWEST_ID + (number * 1_009 + position * 2_003) % NUM_IDS
