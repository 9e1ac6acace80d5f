"""What the scripted server is told to do: an answer as bytes and moments. Pure.

The self-test writes a `Script` per request; the server asks for its parts and writes them. Times
are milliseconds from the moment at which the whole request was there.
"""

import json
from collections.abc import Sequence
from typing import Literal

import msgspec

from baton.bench.selftest.answers import DONE, delta, event, token, usage_body

PIECE_GAP_MS = 3.0  # between the writes that one event is split over
# Ids of tokens that answers consist of. A prompt is known by its first id, which may be any.
LOWEST_ID, NUM_IDS = 300, 7_000

Damage = Literal["", "swapped", "lost", "doubled", "wrong"]


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """One event. Events of the same moment leave in one write.

    No tokens: an empty delta, as chats open with. `pieces` writes carry the event, the last of them
    at `at_ms`. A comment carries nothing.
    """

    at_ms: float
    num_tokens: int = 1
    pieces: int = 1
    comment: bool = False


class Script(msgspec.Struct, frozen=True):
    """One answer. With a `body` it is no stream."""

    chunks: tuple[Chunk, ...] = ()
    tail: bytes | None = None  # after the chunks; None: usage if asked for, then [DONE]
    then: Literal["end", "close", "reset", "hang"] = "end"  # of the answer; the last three cut it
    end_ms: float | None = None  # None: with the last chunk
    headers_ms: float | None = None  # None: in one write with the first event
    status: int = 200
    body: bytes | None = None
    kind: str = "application/json"  # of that body
    retry_after_s: float | None = None
    usage: bool = True
    usage_error: int = 0  # added to the tokens that were really sent
    cached_tokens: int = 0
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
        """When the end is due."""
        last_ms = max((chunk.at_ms for chunk in self.chunks), default=0.0)
        return last_ms if self.end_ms is None else self.end_ms


class Wanted(msgspec.Struct, frozen=True):
    """What a request asks for."""

    is_chat: bool = False
    token_ids: bool = False
    usage: bool = False
    running_usage: bool = False
    num_prompt: int = 0


class Part(msgspec.Struct, frozen=True):
    """Bytes of the body that are due together; no bytes are the headers alone."""

    at_ms: float
    data: bytes
    num_tokens: tuple[int, ...] = ()  # of each token-carrying event that ends in these bytes


def parts_of(script: Script, wanted: Wanted, number: int) -> list[Part]:
    """Return the parts of a streamed answer in the order of their moments."""
    ids = answer_ids(number, script.num_tokens, script.damage)
    found = [] if script.headers_ms is None else [Part(script.headers_ms, b"")]
    position = 0
    for chunk in script.chunks:
        if chunk.comment:
            found += _pieces(b": still here\n\n", chunk, script)
            continue
        sent = ids[position : position + chunk.num_tokens]
        position += chunk.num_tokens
        is_last = position == len(ids) and script.tail is None and not script.own_finish
        finish = "length" if sent and is_last else None
        found += _pieces(_delta(script, wanted, sent, position, finish), chunk, script)
    tail = _closing(script, wanted) if script.tail is None else script.tail
    found.append(Part(script.last_ms, _lines(tail, script)))
    return _joined(found)


def _delta(
    script: Script, wanted: Wanted, ids: Sequence[int], num_so_far: int, finish: str | None
) -> bytes:
    text = "".join(f" t{one}" for one in ids)
    shown = ids if wanted.token_ids else None
    if wanted.is_chat:
        role = {} if num_so_far else {"role": "assistant"}
        made = delta(text, shown, finish, **role)
    else:
        made = token(text, shown, finish)
    if not (wanted.running_usage and script.usage):
        return made
    body = json.loads(made.removeprefix(b"data: "))
    return event({**body, "usage": usage_body(num_so_far, wanted.num_prompt)})


def _closing(script: Script, wanted: Wanted) -> bytes:
    """Return what a complete answer sends after its tokens."""
    num_tokens = script.num_tokens
    finish = _delta(script, wanted, (), num_tokens, "length") if script.own_finish else b""
    told = usage_body(num_tokens + script.usage_error, wanted.num_prompt, script.cached_tokens)
    is_told = wanted.usage and script.usage
    return finish + (event({"choices": [], "usage": told}) if is_told else b"") + DONE


def _lines(data: bytes, script: Script) -> bytes:
    return data.replace(b"\n", b"\r\n") if script.crlf else data


def _pieces(data: bytes, chunk: Chunk, script: Script) -> list[Part]:
    """Cut an event at even distances; its tokens count where it is complete."""
    data = _lines(data, script)
    size = -(-len(data) // chunk.pieces)
    cuts = [data[begin : begin + size] for begin in range(0, len(data), size)]
    # A parser may take the first half of "\r\n" for a line end; when it came is then ambiguous.
    while len(cuts) > 1 and not cuts[-1].strip():
        cuts[-2:] = [cuts[-2] + cuts[-1]]
    last = len(cuts) - 1
    counted = (chunk.num_tokens,) if chunk.num_tokens else ()
    return [
        Part(chunk.at_ms - PIECE_GAP_MS * (last - index), data, counted if index == last else ())
        for index, data in enumerate(cuts)
    ]


def _joined(parts: list[Part]) -> list[Part]:
    """Join the parts of one moment."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last is not None and last.at_ms == part.at_ms and last.data:
            data, num_tokens = last.data + part.data, last.num_tokens + part.num_tokens
            joined[-1] = Part(part.at_ms, data, num_tokens)
        else:
            joined.append(part)
    return joined


def steady(first_ms: float, gap_ms: float, num_tokens: int) -> tuple[Chunk, ...]:
    """Return a token per chunk at an even pace."""
    return tuple(Chunk(first_ms + gap_ms * position) for position in range(num_tokens))


def paced(first_ms: float, gaps_ms: Sequence[float], sizes: Sequence[int]) -> tuple[Chunk, ...]:
    """Return chunks of these sizes; `gaps_ms` lie between them, so there is one less."""
    chunks = [Chunk(first_ms, sizes[0])]
    for gap_ms, size in zip(gaps_ms, sizes[1:], strict=True):
        chunks.append(Chunk(chunks[-1].at_ms + gap_ms, size))
    return tuple(chunks)


def answer_ids(number: int, num_tokens: int, damage: Damage = "") -> list[int]:
    """Return the tokens of a number's answer: the same at every call, unless damage is wanted."""
    # Both factors are coprime to the number of ids, so an answer repeats no id.
    ids = [LOWEST_ID + (number * 1_009 + at * 2_003) % NUM_IDS for at in range(num_tokens + 1)]
    middle = num_tokens // 2
    match damage:
        case "swapped":
            ids[middle - 1], ids[middle] = ids[middle], ids[middle - 1]
        case "lost":
            del ids[middle]
        case "doubled":
            ids.insert(middle, ids[middle])
        case "wrong":
            ids[middle] = ids[-1]
        case "":
            pass
    return ids[:num_tokens]
