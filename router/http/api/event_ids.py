"""The ids of events, with which a client goes on with a stream whose router is gone.

The id of an event says how much of the response its reader has by then, and what makes the response
again. A client whose router is gone sends its request once more, with the last id as
`Last-Event-ID`, to any router, as `fetch-event-source` does by itself. No node and no router keeps
anything for that.
"""

import re
import secrets
import time
from collections.abc import Sequence
from typing import Literal

import msgspec
from aiohttp import web

from baton.protocol.errors import RequestError
from baton.protocol.sampling import SEED_BITS
from baton.router.core.stream import ReceivedPart, changed, digest_of
from baton.router.http.api.schema import Endpoint, ParsedRequest

MAX_CHOICES = 16  # choices of a response that can be resumed
LAST_EVENT_ID = "Last-Event-ID"
Tail = Literal["", "/u", "/d"]
_RESPONSE = re.compile(
    r"((?:chat)?cmpl-[0-9a-f]{24}):(-?[0-9a-f]{1,10})-(-?[0-9a-f]{1,16})"
)
_PART = re.compile(r"(?:(\d{1,9})(e?)(?:@([0-9a-f]{8}))?)?")
_TAILS: dict[str, Tail] = {"": "", "u": "/u", "d": "/d"}

_ID_PREFIXES: dict[Endpoint, str] = {
    "completions": "cmpl-",
    "chat": "chatcmpl-",
    "responses": "resp_",
    "messages": "msg_",
}

# Their streams can be resumed.
_CHUNKED: tuple[Endpoint, ...] = ("completions", "chat")


def wants_ids(request: web.Request) -> bool:
    """Return whether a client can use the ids of events. Benchmarks take every line for data."""
    accepted = request.headers.get("Accept", "").lower()
    return LAST_EVENT_ID in request.headers or "text/event-stream" in accepted


class ResponseHead(msgspec.Struct, frozen=True):
    """What names a response, what makes it again, and how far its reader got."""

    id: str
    created: int  # unix seconds
    seed: int = 0  # if its client can resume it
    # Of each choice. It is empty if the response cannot be resumed.
    received: tuple[ReceivedPart, ...] = ()
    tail: Tail = ""
    model: str = ""
    system_fingerprint: str = ""

    @property
    def prefix(self) -> bytes:
        """Return how the ids of its events begin."""
        if not self.received:
            return f"{self.id}:".encode()
        return f"{self.id}:{self.created:x}-{self.seed:x}:".encode()

    @classmethod
    def from_id(cls, event_id: str) -> "ResponseHead":
        """Read an event id that a client sent back. Raises `RequestError`."""
        response, _, rest = event_id.rpartition(":")
        choices, _, tail = rest.partition("/")
        made = _RESPONSE.fullmatch(response)
        parts = [_PART.fullmatch(part) for part in choices.split(".", MAX_CHOICES)]
        received = tuple(
            _received(*part.groups()) for part in parts if part is not None
        )
        is_whole = len(received) == len(parts) <= MAX_CHOICES
        if made is None or not is_whole or tail not in _TAILS:
            text = "this is not the id of an event of a stream that can be resumed"
            raise RequestError(text, param=LAST_EVENT_ID)
        name, created, seed = made.groups()
        return cls(name, int(created, 16), int(seed, 16), received, _TAILS[tail])


def head_of(request: web.Request, parsed: ParsedRequest) -> ResponseHead:
    """Return what names a response, and where it begins if its client resumes it.

    Raises `RequestError` if the client wants to resume what it cannot.
    """
    num_choices = parsed.params.n
    is_plain = (
        not parsed.echo
        and parsed.params.logprobs is None
        and parsed.endpoint in _CHUNKED
    )
    is_one = len(parsed.packed_prompts) == 1 and num_choices <= MAX_CHOICES
    has_ids = parsed.is_streamed and is_one and is_plain
    event_id = request.headers.get(LAST_EVENT_ID)
    if event_id is not None and parsed.endpoint in _CHUNKED:
        head = ResponseHead.from_id(event_id)
        if not has_ids or not parsed.generates or len(head.received) != num_choices:
            raise changed()
        return head
    new = ResponseHead(
        f"{_ID_PREFIXES[parsed.endpoint]}{secrets.token_hex(12)}", int(time.time())
    )
    if not has_ids or not wants_ids(request):
        return new
    seed = (
        secrets.randbits(SEED_BITS)
        if parsed.params.seed is None
        else parsed.params.seed
    )
    nothing = (ReceivedPart(),) * num_choices
    return msgspec.structs.replace(new, seed=seed, received=nothing)


class EventIds:
    """Makes the ids of one stream's events.

    An id is `RESPONSE:CREATED-SEED:CHOICES`, with a part for each choice between dots: nothing
    before its first event, then the number of its tokens, an `e` after its end, and `@` with the
    digest of the tokens if there are any. `/u` is appended with the usage, and `/d` at the end.
    A response that cannot be resumed has `RESPONSE:NUMBER`.
    """

    __slots__ = ("_counts", "_digests", "_num_events", "_parts", "_prefix")

    def __init__(self, head: ResponseHead) -> None:
        """Begin where the reader of the response stands."""
        received = head.received
        self._prefix = head.prefix
        self._num_events = 0
        self._counts = [one.num_tokens for one in received]
        self._digests = [one.digest for one in received]
        self._parts = [
            _part(one.num_tokens, one.digest, has_ended=one.has_ended)
            if one.has_begun
            else b""
            for one in received
        ]

    def begin(self, choice: int) -> None:
        """Note the event that opens a choice."""
        if self._counts:
            self._parts[choice] = b"0"

    def advance(
        self, choice: int, token_ids: Sequence[int], *, has_ended: bool
    ) -> None:
        """Note an event with tokens of a choice."""
        if self._counts:
            self._counts[choice] += len(token_ids)
            digest = self._digests[choice] = digest_of(token_ids, self._digests[choice])
            self._parts[choice] = _part(
                self._counts[choice], digest, has_ended=has_ended
            )

    def current(self, tail: bytes = b"") -> bytes:
        """Return the id of the event that has just been noted."""
        if self._counts:
            return self._prefix + b".".join(self._parts) + tail
        self._num_events += 1
        return self._prefix + b"%d" % self._num_events


def _part(num_tokens: int, digest: int, *, has_ended: bool) -> bytes:
    part = (b"%de" if has_ended else b"%d") % num_tokens
    return part + b"@%08x" % digest if num_tokens else part


def _received(
    num_tokens: str | None, end: str | None, digest: str | None
) -> ReceivedPart:
    """Read the groups of a part of an event id, which are None before the choice's first event."""
    has_begun = num_tokens is not None
    has_ended = end == "e"
    return ReceivedPart(
        int(num_tokens or 0), has_begun, has_ended, int(digest or "0", 16)
    )
