"""The ids of a stream's events. Each id says how much of the answer its reader has by then.

`relay` puts them on events, and a client sends the last one back as `Last-Event-ID`. An id is
`ANSWER:CHOICES`, with a part for each choice between dots: nothing before its first event, then the
number of its tokens, and an `e` after its end. `/u` is appended with the usage, and `/d` at the end
of the answer. Answers that cannot be resumed have plain numbers. This file is pure.
"""

import re
from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from baton.protocol.errors import RequestError
from baton.router.reattach import ReceivedPart

MAX_CHOICES = 16  # choices of an answer whose events name their places
HEADER = "Last-Event-ID"
Tail = Literal["", "/u", "/d"]
_ANSWER = re.compile(r"(?:chat)?cmpl-[0-9a-f]{24}")
_CHOICES = re.compile(rf"(\d{{1,9}}e?)?(\.(\d{{1,9}}e?)?){{0,{MAX_CHOICES - 1}}}")
_TAILS: dict[str, Tail] = {"": "", "u": "/u", "d": "/d"}


class ReaderPlace(msgspec.Struct, frozen=True):
    """How far the reader of an answer got. `received` is None if the reader has nothing."""

    answer_id: str
    received: tuple[ReceivedPart, ...] | None
    tail: Tail = ""


class Places(Protocol):
    """Makes the part of an event's id after the colon."""

    def begin(self, choice: int) -> None:
        """Note the event that opens a choice."""

    def advance(self, choice: int, num_tokens: int, *, has_ended: bool) -> None:
        """Note an event with tokens of a choice."""

    def now(self, tail: Tail = "") -> bytes:
        """Return the place of the event that has just been noted."""


class Numbers:
    """Counts events, for an answer that no client can resume."""

    __slots__ = ("_num_events",)

    def __init__(self) -> None:
        self._num_events = 0

    def begin(self, choice: int) -> None:
        pass

    def advance(self, choice: int, num_tokens: int, *, has_ended: bool) -> None:
        pass

    def now(self, tail: Tail = "") -> bytes:
        self._num_events += 1
        return b"%d" % self._num_events


class Positions:
    """Counts the tokens of every choice."""

    __slots__ = ("_counts", "_parts")

    def __init__(self, received: Sequence[ReceivedPart]) -> None:
        self._counts = [one.num_tokens for one in received]
        self._parts = [_part(one) for one in received]

    def begin(self, choice: int) -> None:
        self._parts[choice] = b"0"

    def advance(self, choice: int, num_tokens: int, *, has_ended: bool) -> None:
        self._counts[choice] += num_tokens
        self._parts[choice] = (b"%de" if has_ended else b"%d") % self._counts[choice]

    def now(self, tail: Tail = "") -> bytes:
        return b".".join(self._parts) + tail.encode()


def place_of(event_id: str) -> ReaderPlace:
    """Read an event id that a client sent back. Raises `RequestError`."""
    answer_id, colon, rest = event_id.partition(":")
    choices, _, tail = rest.partition("/")
    if not (
        colon and _ANSWER.fullmatch(answer_id) and _CHOICES.fullmatch(choices) and tail in _TAILS
    ):
        text = "this is not the id of an event of a stream that can be resumed"
        raise RequestError(text, param=HEADER)
    received = tuple(
        ReceivedPart(int(part.rstrip("e") or 0), bool(part), part.endswith("e"))
        for part in choices.split(".")
    )
    return ReaderPlace(answer_id, received, _TAILS[tail])


def start_of(answer_id: str, event_id: str | None = None) -> ReaderPlace:
    """Return the place of a client that has no part of an answer.

    Raises `RequestError` if the id is malformed, or if `event_id` is not of that answer.
    """
    if _ANSWER.fullmatch(answer_id) is None:
        text = "name a stream by the id of its answer, which is the field `id` of its chunks"
        raise RequestError(text, code="stream_gone", http_status=404)
    if event_id is not None and event_id.partition(":")[0] != answer_id:
        raise RequestError(
            "this event does not belong to the stream that the URL names", param=HEADER
        )
    return ReaderPlace(answer_id, None)


def _part(received: ReceivedPart) -> bytes:
    if not received.has_begun:
        return b""
    return (b"%de" if received.has_ended else b"%d") % received.num_tokens
