"""What the scripted server is told to do: an answer as bytes and moments. Pure.

The self-test writes a `Script` per request; the server asks for its parts and writes them. Times
are milliseconds from the moment at which the whole request was there.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from baton.bench.selftest.answers import DONE, delta, event, token, usage_body

# Ids of tokens that answers consist of. A prompt is known by its first id, which may be any.
LOWEST_ID, NUM_IDS = 300, 7_000


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """One event; without a token it is an empty delta, as chats open with."""

    at_ms: float
    num_tokens: int = 1


class Script(msgspec.Struct, frozen=True):
    """One answer. With a `body` it is no stream."""

    chunks: tuple[Chunk, ...] = ()
    tail: bytes | None = None  # after the chunks; None: usage if asked for, then [DONE]
    then: Literal["end", "close", "reset", "hang"] = "end"  # the last three cut the answer
    end_ms: float | None = None  # None: with the last chunk
    status: int = 200
    body: bytes | None = None
    kind: str = "application/json"  # of that body
    retry_after_s: float | None = None
    usage: bool = True
    usage_error: int = 0  # added to the tokens that were really sent
    cached_tokens: int = 0

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

    is_chat: bool
    token_ids: bool
    usage: bool
    running_usage: bool
    num_prompt: int


class Part(msgspec.Struct, frozen=True):
    """Bytes of the body that leave in one write."""

    at_ms: float
    data: bytes
    num_tokens: tuple[int, ...] = ()  # of each event in these bytes that carries tokens


def parts_of(script: Script, wanted: Wanted, number: int) -> list[Part]:
    """Return the parts of a streamed answer; events of the same moment are one part."""
    ids, found, position = answer_ids(number, script.num_tokens), list[Part](), 0
    for at_ms, num_tokens in map(msgspec.structs.astuple, script.chunks):
        sent = ids[position : position + num_tokens]
        position += num_tokens
        is_end = num_tokens > 0 and position == len(ids) and script.tail is None
        data = _chunk(script, wanted, sent, position, "length" if is_end else None)
        found.append(Part(at_ms, data, (num_tokens,) if num_tokens else ()))
    found.append(Part(script.last_ms, _end(script, wanted) if script.tail is None else script.tail))
    joined = found[:1]
    for part in found[1:]:
        last = joined[-1]
        if part.at_ms > last.at_ms:
            joined.append(part)
        else:
            data, num_tokens = last.data + part.data, last.num_tokens + part.num_tokens
            joined[-1] = Part(last.at_ms, data, num_tokens)
    return joined


def _chunk(
    script: Script, wanted: Wanted, ids: Sequence[int], num_so_far: int, finish: str | None
) -> bytes:
    is_told = wanted.running_usage and script.usage
    more = {"usage": usage_body(num_so_far, wanted.num_prompt)} if is_told else {}
    text, shown = "".join(f" t{one}" for one in ids), ids if wanted.token_ids else None
    if wanted.is_chat:
        return delta(text, shown, finish, **more)
    return token(text, shown, finish, **more)


def _end(script: Script, wanted: Wanted) -> bytes:
    """Return what a complete answer sends after its tokens."""
    num_tokens = script.num_tokens + script.usage_error
    told = usage_body(num_tokens, wanted.num_prompt, script.cached_tokens)
    is_told = wanted.usage and script.usage
    return (event({"choices": [], "usage": told}) if is_told else b"") + DONE


def steady(first_ms: float, gap_ms: float, num_tokens: int) -> tuple[Chunk, ...]:
    """Return a token per chunk at an even pace."""
    return tuple(Chunk(first_ms + gap_ms * position) for position in range(num_tokens))


def paced(first_ms: float, gaps_ms: Sequence[float], sizes: Sequence[int]) -> tuple[Chunk, ...]:
    """Return chunks of these sizes; `gaps_ms` lie between them, so there is one less."""
    chunks = [Chunk(first_ms, sizes[0])]
    for gap_ms, size in zip(gaps_ms, sizes[1:], strict=True):
        chunks.append(Chunk(chunks[-1].at_ms + gap_ms, size))
    return tuple(chunks)


def answer_ids(number: int, num_tokens: int) -> list[int]:
    """Return the tokens of a number's answer: the same at every call."""
    # Both factors are coprime to the number of ids, so an answer repeats no id.
    return [LOWEST_ID + (number * 1_009 + at * 2_003) % NUM_IDS for at in range(num_tokens)]
