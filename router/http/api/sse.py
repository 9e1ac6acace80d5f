"""Server-sent events: the deltas of one streamed response, sent as they arrive.

Each delta becomes an event and is written at once, without a task switch. While a client reads too
slowly, deltas are merged per choice, and the response's task writes them when there is room.

The id of an event says how much of the response its reader has by then. A client sends the last one
back as `Last-Event-ID`, and the nodes keep the response's form, so that it can resume a stream at
any router.
"""

import asyncio
import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal, Protocol

import msgspec
from aiohttp import web
from aiohttp.http import HttpVersion11

from baton.protocol.errors import BatonError, RequestError
from baton.protocol.ids import MAX_FORM_BYTES
from baton.protocol.messages import ResumeState
from baton.protocol.sampling import SamplingParams
from baton.router.core.reattach import ReceivedPart
from baton.router.core.stream import RequestStream, Sink, digest_of
from baton.router.http.api.openai_chunks import (
    ChunkTemplate,
    ResponseWriter,
    ShownPrompt,
)
from baton.router.http.connections import connection_of
from baton.router.http.errors import error_of
from baton.router.http.metrics import HttpMetrics
from baton.router.outputs import CompletionOutput, Merged, RequestMetrics
from baton.router.text.response_parser import Parsing

# What any response to a request must have, besides its own headers.
EXTRA_HEADERS = web.RequestKey("extra_headers", dict[str, str])
SILENCE_S = 10.0
# With this much output unwritten, deltas are merged.
FULL_BYTES = 256 * 1024
_COMMENT = b": waiting\n"
# Tells a client that the response is complete.
_DONE = b"[DONE]"

MAX_CHOICES = 16  # choices of a response that can be resumed
LAST_EVENT_ID = "Last-Event-ID"
OWNER_BYTES = 16
Tail = Literal["", "/u", "/d"]
_ID = re.compile(r"(?:chat)?cmpl-[0-9a-f]{24}")
_PART = re.compile(r"(?:(\d{1,9})(e?)(?:@([0-9a-f]{8}))?)?")
_TAILS: dict[str, Tail] = {"": "", "u": "/u", "d": "/d"}


class Events(Protocol):
    """What makes the events of one response. Each method returns whole events."""

    def take(self, delta: CompletionOutput) -> bytes:
        """Return the events of a delta, none if it brings nothing that clients see."""

    def ending(self, metrics: Sequence[RequestMetrics]) -> bytes:
        """Return the last events of a complete response, by the metrics of each prompt."""

    def failed(self, error: BatonError) -> bytes:
        """Return the last events of a response that failed."""


class EventStream:
    """Call `open`, then `relay` or `sink` and `finish`, and `close` however it ended."""

    __slots__ = (
        "_connection",
        "_events",
        "_has_ids",
        "_held",
        "_is_over",
        "_loop",
        "_metrics",
        "_num_bytes",
        "_num_choices",
        "_num_left",
        "_response",
        "_silence_s",
        "_timer",
        "_unwritten",
        "_wake",
        "_written_s",
    )

    def __init__(
        self,
        events: Events,
        num_choices: int,  # per prompt
        metrics: HttpMetrics,
        silence_s: float = SILENCE_S,
        *,
        has_ids: bool = False,
    ) -> None:
        self._events = events
        self._num_choices = num_choices
        self._has_ids = has_ids
        self._metrics = metrics
        self._silence_s = silence_s
        self._unwritten: list[bytes] = []
        self._num_bytes = 0  # of `_unwritten`
        self._held: Merged | None = None  # deltas for a client that reads too slowly
        self._num_left = 0  # streams that have not ended
        self._is_over = False
        self._wake: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._written_s = 0.0

    async def open(self, request: web.Request, headers: Mapping[str, str]) -> web.StreamResponse:
        """Send the headers. From then on an error can only be an event."""
        self._response = response = web.StreamResponse(
            headers={
                **headers,
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                # Without this, nginx holds events back.
                "X-Accel-Buffering": "no",
                **request.get(EXTRA_HEADERS, {}),
            }
        )
        if request.version >= HttpVersion11:
            response.enable_chunked_encoding()
        else:
            response.force_close()
        self._connection = connection_of(request)
        await response.prepare(request)
        self._written_s = self._loop.time()
        self._timer = self._loop.call_later(self._silence_s, self._break_silence)
        return response

    async def relay(self, streams: Sequence[RequestStream]) -> None:
        """Send what the streams bring until all have ended.

        Raises the `BatonError` of the first that failed, and `ConnectionError` if the client left.
        """
        self._num_left = len(streams)
        for index, stream in enumerate(streams):
            stream.send_to(self.sink(index))
            stream.call_at_end(self._one_ended)
        while not self._is_over:
            if not self._unwritten and self._held is None:
                self._wake = self._loop.create_future()
                # This wait needs no deadline: the lifecycle ends every request within one.
                await self._wake
                self._wake = None
            await self._flush()
        for stream in streams:
            stream.raise_error()
        self.finish([stream.metrics for stream in streams])

    def sink(self, prompt_index: int) -> Sink:
        """Return the sink for the deltas of one prompt."""
        return partial(self._take, prompt_index * self._num_choices)

    def finish(self, metrics: Sequence[RequestMetrics]) -> None:
        """Add the last events of a complete response."""
        self._release()
        self._put(self._events.ending(metrics))

    def fail(self, error: BatonError) -> None:
        """Add the held deltas, then the error that ends the response."""
        self._release()
        self._metrics.failed(error)
        self._put(self._events.failed(error))

    async def close(self) -> None:
        """Send what was added, and end the response."""
        await self._flush()
        await self._response.write_eof()

    def stop(self) -> None:
        """Send no more comments. It may be called again."""
        if self._timer is not None:
            self._timer.cancel()

    def _take(self, offset: int, delta: CompletionOutput) -> None:
        if self._is_over:  # another prompt of the request has failed
            return
        self._metrics.num_output_tokens += len(delta.token_ids)
        delta.index += offset
        if self._held is None and self._num_bytes < FULL_BYTES:
            self._send(delta)
        else:
            if self._held is None:
                self._held = Merged()
            self._held.add(delta)

    def _send(self, delta: CompletionOutput) -> None:
        if events := self._events.take(delta):
            self._put(events)

    def _put(self, event: bytes) -> None:
        if not self._unwritten and self._connection.is_writable:
            self._write_now(event)
            return
        self._unwritten.append(event)
        self._num_bytes += len(event)
        self._wake_up()

    def _write_now(self, data: bytes) -> None:
        """Write without waiting, since `StreamResponse.write` waits only after it has written."""
        self._written_s = self._loop.time()
        write = self._response.write(data)
        try:
            write.send(None)
        except StopIteration:
            return
        except ConnectionError:  # the client has left, which cancels the handler
            return
        write.close()  # it would wait for the client, as `_flush` does before it writes more

    def _release(self) -> None:
        held = self._held
        self._held = None
        for delta in held.take() if held is not None else ():
            self._send(delta)

    async def _flush(self) -> None:
        """Write all events, which waits only for a client that reads too slowly."""
        if not self._connection.is_writable:
            await self._connection.has_room()
        self._release()
        if not self._unwritten:
            return
        data = b"".join(self._unwritten)
        self._unwritten.clear()
        self._num_bytes = 0
        self._written_s = self._loop.time()
        await self._response.write(data)

    def _one_ended(self, stream: RequestStream) -> None:
        """End the response with the last stream, or with the first that failed."""
        self._num_left -= 1
        if stream.has_failed or self._num_left == 0:
            self._is_over = True
            self._wake_up()

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _break_silence(self) -> None:
        rest_s = self._written_s + self._silence_s - self._loop.time()
        if rest_s <= 0:
            if not self._unwritten and self._connection.is_writable:
                # A blank line keeps it apart from the next event, which some readers would drop
                # with it. After an event with an id, the openai package takes one for an event.
                self._write_now(_COMMENT if self._has_ids else _COMMENT + b"\n")
            rest_s = self._silence_s
        self._timer = self._loop.call_later(rest_s, self._break_silence)


# --- the ids of events, and what nodes keep, so that a stream can be resumed ---------------------


def wants_ids(request: web.Request) -> bool:
    """Return whether a client can use the ids of events. Benchmarks take every line for data."""
    accepted = request.headers.get("Accept", "").lower()
    resumes = request.method == "GET" or LAST_EVENT_ID in request.headers
    return resumes or "text/event-stream" in accepted


class ResumePosition(msgspec.Struct, frozen=True):
    """How far the reader of a response got. `received` is None if the reader has nothing."""

    response_id: str
    received: tuple[ReceivedPart, ...] | None
    tail: Tail = ""

    @property
    def is_whole(self) -> bool:
        """Whether the reader has the end of every choice."""
        return self.received is not None and all(part.has_ended for part in self.received)


class ChunkEvents:
    """The events of completions and chats, which are chunks, and an end."""

    __slots__ = (
        "_has_ids",
        "_has_usage",
        "_ids",
        "_num_choices",
        "_num_prompt_tokens",
        "_prompts",
        "_templates",
        "_writer",
    )

    def __init__(
        self,
        writer: ResponseWriter,
        num_choices: int,  # per prompt
        prompts: Sequence[ShownPrompt],  # to echo, or with token ids
        num_prompt_tokens: Sequence[int],  # per prompt
        place: ResumePosition | None = None,
        *,
        has_ids: bool = False,
    ) -> None:
        """Begin at the client's `place` if it can resume the stream."""
        self._writer = writer
        self._num_choices = num_choices
        self._prompts = prompts
        self._num_prompt_tokens = num_prompt_tokens
        self._has_ids = has_ids
        self._has_usage = place is not None and place.tail != ""
        received = None
        if place is not None:
            received = place.received or (ReceivedPart(),) * num_choices
        self._ids = EventIds(writer.id, received)
        self._templates = {
            index: writer.chunks(index, num_prompt_tokens[0], one.num_tokens)
            for index, one in enumerate(received or ())
            if one.has_begun
        }

    def take(self, delta: CompletionOutput) -> bytes:
        opening = b""
        template = self._templates.get(delta.index)
        if template is None:
            opening, template = self._begin(delta.index)
        if self._has_ids:
            has_ended = delta.finish_reason is not None
            self._ids.advance(delta.index, delta.token_ids, has_ended=has_ended)
        return opening + self._event(template.fill(delta))

    def ending(self, metrics: Sequence[RequestMetrics]) -> bytes:
        closing = None if self._has_usage else self._writer.closing(metrics)
        usage = b"" if closing is None else self._event(closing, b"/u")
        return usage + self._event(_DONE, b"/d")

    def failed(self, error: BatonError) -> bytes:
        return self._event(error_of(error))

    def _begin(self, index: int) -> tuple[bytes, ChunkTemplate]:
        """Return the first event of a choice and what makes the others."""
        prompt = index // self._num_choices
        opening = b""
        num_prompt_tokens = self._num_prompt_tokens[prompt]
        template = self._templates[index] = self._writer.chunks(index, num_prompt_tokens)
        shown = self._prompts[prompt] if self._prompts else ShownPrompt()
        if self._writer.is_chat:
            self._ids.begin(index)
            opening = self._event(self._writer.opening(index, num_prompt_tokens, shown))
            return opening, template
        if shown.token_ids is not None:
            template.show_prompt(shown.token_ids)
        if shown.text is not None:
            opening = self._event(template.echo(index, shown))
        return opening, template

    def _event(self, data: bytes, tail: bytes = b"") -> bytes:
        """Return one event of `data` without line breaks. Its id, if it has one, ends in `tail`."""
        if self._has_ids:
            return b"id: %b\ndata: %b\n\n" % (self._ids.current(tail), data)
        return b"data: %b\n\n" % data


class EventIds:
    """Makes the ids of one stream's events.

    An id is `RESPONSE:CHOICES`, with a part for each choice between dots: nothing before its first
    event, then the number of its tokens, an `e` after its end, and `@` with the digest of the
    tokens if there are any. `/u` is appended with the usage, and `/d` at the end.
    A response that cannot be resumed has numbers in the place of `CHOICES`.
    """

    __slots__ = ("_counts", "_digests", "_num_events", "_parts", "_prefix")

    def __init__(self, response_id: str, received: Sequence[ReceivedPart] | None = None) -> None:
        """`received` is what the client has of each choice; None if it cannot resume."""
        self._prefix = response_id.encode() + b":"
        self._num_events = 0
        self._counts = [one.num_tokens for one in received] if received is not None else None
        self._digests = [one.digest for one in received or ()]
        self._parts = [
            _part(one.num_tokens, one.digest, has_ended=one.has_ended) if one.has_begun else b""
            for one in received or ()
        ]

    def begin(self, choice: int) -> None:
        """Note the event that opens a choice."""
        if self._counts is not None:
            self._parts[choice] = b"0"

    def advance(self, choice: int, token_ids: Sequence[int], *, has_ended: bool) -> None:
        """Note an event with tokens of a choice."""
        if self._counts is not None:
            self._counts[choice] += len(token_ids)
            digest = self._digests[choice] = digest_of(token_ids, self._digests[choice])
            self._parts[choice] = _part(self._counts[choice], digest, has_ended=has_ended)

    def current(self, tail: bytes = b"") -> bytes:
        """Return the id of the event that has just been noted."""
        if self._counts is not None:
            return self._prefix + b".".join(self._parts) + tail
        self._num_events += 1
        return self._prefix + b"%d" % self._num_events


def resume_position(event_id: str) -> ResumePosition:
    """Read an event id that a client sent back. Raises `RequestError`."""
    response_id, colon, rest = event_id.partition(":")
    choices, _, tail = rest.partition("/")
    parts = [_PART.fullmatch(part) for part in choices.split(".", MAX_CHOICES)]
    if not (colon and _ID.fullmatch(response_id) and tail in _TAILS and len(parts) <= MAX_CHOICES):
        parts = [None]
    received = tuple(_received(*part.groups()) for part in parts if part is not None)
    if len(received) < len(parts):
        text = "this is not the id of an event of a stream that can be resumed"
        raise RequestError(text, param=LAST_EVENT_ID)
    return ResumePosition(response_id, received, _TAILS[tail])


def last_event(event_id: str) -> bytes:
    """Return the event that ends a stream for a reader who has everything before it."""
    return f"id: {event_id.partition('/')[0]}/d\ndata: {_DONE.decode()}\n\n".encode()


def start_of(response_id: str, event_id: str | None = None) -> ResumePosition:
    """Return the place of a client that has no part of a response.

    Raises `RequestError` if the id is malformed, or if `event_id` is not of that response.
    """
    if _ID.fullmatch(response_id) is None:
        text = "name a stream by the id of its response, which is the field `id` of its chunks"
        raise RequestError(text, code="stream_gone", http_status=404)
    if event_id is not None and event_id.partition(":")[0] != response_id:
        raise RequestError(
            "this event does not belong to the stream that the URL names", param=LAST_EVENT_ID
        )
    return ResumePosition(response_id, None)


def _part(num_tokens: int, digest: int, *, has_ended: bool) -> bytes:
    part = (b"%de" if has_ended else b"%d") % num_tokens
    return part + b"@%08x" % digest if num_tokens else part


def _received(num_tokens: str | None, end: str | None, digest: str | None) -> ReceivedPart:
    """Read the groups of a part of an event id, which are None before the choice's first event."""
    has_begun = num_tokens is not None
    has_ended = end == "e"
    return ReceivedPart(int(num_tokens or 0), has_begun, has_ended, int(digest or "0", 16))


class Form(msgspec.Struct, frozen=True, array_like=True):
    """The form of one response: everything besides tokens on which its text and events depend."""

    writer: ResponseWriter
    sampling: dict[str, object]  # the given fields of `SamplingParams`
    request_id: str
    parsing: Parsing | None = None

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(**self.sampling)  # type: ignore[arg-type]


_encode_form = msgspec.msgpack.Encoder().encode
_decode_form = msgspec.msgpack.Decoder(Form).decode


def kept_of(form: Form, owner: bytes, num_choices: int) -> ResumeState | None:
    """Return what nodes keep of a response; None for one that cannot be resumed."""
    data = _encode_form(form)
    if num_choices > MAX_CHOICES or len(data) > MAX_FORM_BYTES:
        return None
    return ResumeState(data, owner, num_choices)


def form_of(data: bytes) -> Form:
    """Read what a node kept. Raises `RequestError` if another version of baton wrote it."""
    try:
        form = _decode_form(data)
        _ = form.params
    except (msgspec.MsgspecError, RequestError, TypeError) as error:
        text = "a router of another version began this stream: send the request again"
        raise RequestError(text, code="stream_gone", http_status=404) from error
    return form


def owner_of(authorization: str, *, wants_key: bool) -> bytes:
    """Return the client's identity, by its key; the same for all if there are no keys."""
    if not wants_key:
        return b""
    key = authorization.partition(" ")[2].strip()
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()[:OWNER_BYTES]
