"""Read one streamed response as it arrives: its tokens, its usage and its faults.

Token ids give the number of tokens in a chunk. Without them, the tokens of the final usage are
spread over the chunks with text; without usage, each such chunk counts as one token. A response is
`ANSWERED` only if the stream, the usage and the forced length agree.
"""

import re
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import msgspec

from baton.bench.records import Arrival, Outcome, Record

MAX_DETAIL = 200
MAX_EVENT_BYTES = 16 << 20
_BLANK_LINE = re.compile(rb"\n\r?\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # may open a stream


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int
    prompt_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


_NULL = msgspec.Raw(b"null")


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: msgspec.Raw = _NULL
    # Some servers write errors with it and "object": "error".
    message: str | None = None


class _Piece(NamedTuple):
    """An event with a choice, as it arrived."""

    at_s: float
    has_text: bool
    num_ids: int | None  # None if the server did not send token ids


class Problem(NamedTuple):
    outcome: Outcome
    detail: str


class EventParser:
    """The parser of server-sent events from bytes that arrive in any pieces.

    `feed` never waits for bytes beyond the empty line that completes an event.
    """

    def __init__(self) -> None:
        self._rest = b""  # the bytes of the event that is not complete
        self._has_begun = False

    @property
    def in_event(self) -> bool:
        """Return whether an event began and is not complete."""
        return bool(self._rest.strip(b"\r\n"))

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of the events that became complete; `ValueError` for an endless one."""
        *blocks, self._rest = _BLANK_LINE.split(self._rest + data)
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES >> 20} MiB")
        if blocks and not self._has_begun:
            self._has_begun = True
            blocks[0] = blocks[0].removeprefix(_BYTE_ORDER_MARK)
        events = []
        for block in blocks:
            fields = [
                line.removesuffix(b"\r").partition(b":") for line in block.split(b"\n")
            ]
            lines = [
                value.removeprefix(b" ") for name, _, value in fields if name == b"data"
            ]
            if lines:
                events.append(b"\n".join(lines))
        return events


class ResponseReader:
    """Reads one response: `feed` it until the response ends, then `fill` a record."""

    def __init__(self, is_chat: bool) -> None:
        self.done = False  # [DONE] has arrived
        self.problem: Problem | None = None
        self.token_ids: list[int] | None = None
        self._is_chat = is_chat
        self._events = EventParser()
        self._pieces: list[_Piece] = []
        self.usage: _Usage | None = None
        self._finish_reason: str | None = None

    def feed(self, data: bytes, at_s: float) -> bool:
        """Read bytes that arrived; return whether the response ended, well or not."""
        try:
            events = self._events.feed(data)
        except ValueError as error:
            self.problem = Problem(Outcome.MALFORMED, str(error))
            return True
        for event in events:
            if event == b"[DONE]":
                self.done = True
                return True
            self.problem = self._on_event(event, at_s)
            if self.problem is not None:
                return True
        return False

    def cut(self, why: str) -> None:
        """Note the end of the body, which is a problem unless [DONE] has arrived."""
        if not self.done and self.problem is None:
            where = "within an event" if self._events.in_event else "without [DONE]"
            text = f"{why} {where}, after {len(self._pieces)} chunks"
            self.problem = Problem(Outcome.TRUNCATED, text)

    def fill(self, record: Record, *, num_requested: int) -> None:
        """Set the record's outcome and contents; set `forced_tokens` before the call."""
        if (usage := self.usage) is not None:
            record.prompt_tokens = usage.prompt_tokens
            record.output_tokens = usage.completion_tokens
            if usage.prompt_tokens_details is not None:
                record.cached_tokens = usage.prompt_tokens_details.cached_tokens
        record.token_ids = self.token_ids
        counts, contradiction, note = self._count(record.forced_tokens)
        record.arrivals = _arrivals(self._pieces, counts)
        problem = (
            self.problem
            or contradiction
            or self._length(sum(counts), record.forced_tokens > 0, num_requested)
        )
        record.outcome, record.detail = problem or (Outcome.ANSWERED, note)

    def _on_event(self, event: bytes, at_s: float) -> Problem | None:
        """Read one event; return its fault, or None."""
        try:
            chunk = _decode(event)
        except msgspec.ValidationError as error:
            return _malformed(f"an event is not of this API: {error}")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return _malformed(
                f"an event is not JSON: {event[:80].decode(errors='replace')}"
            )
        if chunk.usage is not None:
            self.usage = chunk.usage
        if bytes(chunk.error) != b"null":
            return Problem(Outcome.ERROR_IN_STREAM, message_of(event))
        if chunk.choices is None and chunk.message is not None:
            return Problem(Outcome.ERROR_IN_STREAM, one_line(chunk.message))
        if chunk.choices is None and chunk.usage is None:
            return _malformed(
                "an event is not of this API: it has neither choices nor usage"
            )
        return self._on_choice(chunk.choices, at_s) if chunk.choices else None

    def _on_choice(self, choices: list[_Choice], at_s: float) -> Problem | None:
        choice = choices[0]
        ids = choices[0].token_ids
        if len(choices) > 1 or choice.index != 0:
            return _malformed("an event belongs to a choice that was not requested")
        text = choice.text
        if self._is_chat:
            if (delta := choice.delta) is None:
                return _malformed("an event of a chat has no delta")
            text = delta.content or delta.reasoning_content or delta.reasoning or ""
        if text is None:
            return _malformed("an event of a completion has no text")
        if ids is not None:
            self.token_ids = self.token_ids or []
            self.token_ids += ids
        self._finish_reason = choice.finish_reason or self._finish_reason
        self._pieces.append(_Piece(at_s, bool(text), None if ids is None else len(ids)))
        return None

    def _count(self, num_forced: int) -> tuple[list[int], Problem | None, str]:
        """Return each piece's tokens, a contradiction of the server, and a note on counting."""
        pieces = self._pieces
        reported = None if self.usage is None else self.usage.completion_tokens
        # Token ids count where they come with the text, not all of them after it.
        first = next(
            (piece for piece in pieces if piece.num_ids or piece.has_text), None
        )
        if first.num_ids if first else self.token_ids is not None:
            counts = [piece.num_ids or 0 for piece in pieces]
            return counts, _differs(reported, sum(counts), "token ids arrived"), ""
        if reported is None and self.token_ids is not None:
            reported = len(self.token_ids)
        with_text = [int(piece.has_text) for piece in pieces]
        num_texts = sum(with_text)
        if reported is None or reported == num_texts:
            return with_text, None, ""
        # A token may complete no text, so usage may report more tokens, but not once all ids
        # arrived.
        if reported < num_texts or num_texts in (0, num_forced):
            return with_text, _differs(reported, num_texts, "chunks carried text"), ""
        note = (
            f"{reported} tokens in {num_texts} chunks of text: counted as spread evenly"
        )
        return _spread(with_text, reported), None, note

    def _length(
        self, num_tokens: int, is_forced: bool, num_requested: int
    ) -> Problem | None:
        if num_tokens == num_requested:
            return None
        if (
            not is_forced
            and 0 < num_tokens < num_requested
            and self._finish_reason == "stop"
        ):
            return None
        source = (
            "" if self.token_ids is not None or self.usage else " by chunks with text"
        )
        text = f"{num_tokens} tokens{source} instead of {num_requested}"
        if self._finish_reason is not None:
            text += f", finish reason {self._finish_reason}"
        return Problem(Outcome.WRONG_LENGTH, one_line(text))


def message_of(body: bytes) -> str:
    """Return an error's message, in OpenAI's shape and its relatives, else its first characters."""
    try:
        found: object = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return one_line(body[: 2 * MAX_DETAIL].decode(errors="replace"))
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and name in found:
            found = found[name]
    if isinstance(found, str):
        return one_line(found)
    return one_line(msgspec.json.encode(found).decode())


def one_line(text: str) -> str:
    """Return `text` as one line of at most `MAX_DETAIL` printable characters."""
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= MAX_DETAIL else text[: MAX_DETAIL - 1] + "…"


_decode = msgspec.json.Decoder(_Chunk).decode


def _malformed(text: str) -> Problem:
    return Problem(Outcome.MALFORMED, one_line(text))


def _differs(reported: int | None, counted: int, what: str) -> Problem | None:
    if reported is None or reported == counted:
        return None
    return Problem(
        Outcome.WRONG_USAGE, f"usage says {reported} tokens, {counted} {what}"
    )


def _spread(with_text: list[int], num_tokens: int) -> list[int]:
    """Return `num_tokens` spread over the chunks with text, as evenly as whole tokens go."""
    num_texts = sum(with_text)
    seen = 0
    counts = []
    for one in with_text:
        before = seen * num_tokens // num_texts
        seen += one
        counts.append(seen * num_tokens // num_texts - before)
    return counts


def _arrivals(pieces: list[_Piece], counts: list[int]) -> list[Arrival]:
    """Return the arrivals; tokens of one read are one arrival."""
    stamped = [
        (piece.at_s, count)
        for piece, count in zip(pieces, counts, strict=True)
        if count
    ]
    return [
        Arrival(at_s, sum(count for _, count in group))
        for at_s, group in groupby(stamped, itemgetter(0))
    ]
