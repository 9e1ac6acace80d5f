"""The answers of the scripted server: single events as bytes, and scripts of whole streams.

It shares nothing with the client's parser or with the router's answers, so that no mistake of
theirs can hide here.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

DONE = b"data: [DONE]\n\n"
# Answers consist of these token ids. The first id of a prompt names its script and may be any id.
LOWEST_ID, NUM_IDS = 300, 7_000


def event(body: object) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def token(
    text: str = " a", token_ids: Sequence[int] | None = None, end: str | None = None, **more: object
) -> bytes:
    """Return a chunk of a completion; `more` holds further fields of the event."""
    choice = {"index": 0, "text": text, "finish_reason": end}
    ids = {} if token_ids is None else {"token_ids": list(token_ids)}
    return event({"choices": [choice | ids], **more})


def delta(
    text: str = " a", token_ids: Sequence[int] | None = None, end: str | None = None, **more: object
) -> bytes:
    """Return a chunk of a chat; a chunk without text opens the chat with a role."""
    said = {"content": text} if text else {"role": "assistant", "content": ""}
    choice = {"index": 0, "delta": said, "finish_reason": end}
    ids = {} if token_ids is None else {"token_ids": list(token_ids)}
    return event({"choices": [choice | ids], **more})


def usage(num_tokens: int, num_prompt: int = 3, num_cached: int | None = None) -> bytes:
    """Return the last chunk before the end."""
    return event({"choices": [], "usage": usage_body(num_tokens, num_prompt, num_cached)})


def usage_body(
    num_tokens: int, num_prompt: int = 3, num_cached: int | None = None
) -> dict[str, object]:
    body: dict[str, object] = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens}
    if num_cached is not None:
        body["prompt_tokens_details"] = {"cached_tokens": num_cached}
    return body


def error(message: str) -> bytes:
    """Return the body of a refusal."""
    return json.dumps({"error": {"message": message, "type": "server_error"}}).encode()


class Chunk(msgspec.Struct, frozen=True):
    """One event; without a token it is an empty delta, as at the start of a chat."""

    at_ms: float  # since the whole request had arrived
    num_tokens: int = 1


class Script(msgspec.Struct, frozen=True):
    """One streamed answer, and how it ends."""

    chunks: tuple[Chunk, ...] = ()
    tail: bytes | None = None  # the end after the chunks; None: usage if asked for, then [DONE]
    then: Literal["end", "close", "hang"] = "end"  # the last two cut the answer
    end_ms: float | None = None  # None: with the last chunk
    cached_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


# The moment, the bytes of the body in one write, and the number of tokens in them.
Part = tuple[float, bytes, int]


def parts_of(script: Script, asked: Mapping[str, object], number: int) -> list[Part]:
    """Return the parts of the answer to the body `asked`; events of one moment are one part."""
    ids, position = answer_ids(number, script.num_tokens), 0
    options, prompt = str(asked.get("stream_options")), prompt_of(asked)
    say, events = delta if "messages" in asked else token, list[Part]()
    for chunk in script.chunks:
        sent = ids[position : position + chunk.num_tokens]
        position += chunk.num_tokens
        is_end = bool(sent) and position == len(ids) and script.tail is None
        data = say(
            "".join(f" t{one}" for one in sent),
            sent if asked.get("return_token_ids") else None,
            "length" if is_end else None,
        )
        events.append((chunk.at_ms, data, chunk.num_tokens))
    tail = script.tail
    if tail is None:
        num_prompt = len(prompt if isinstance(prompt, list) else prompt.split())
        told = usage(len(ids), num_prompt, script.cached_tokens)
        tail = (told if "include_usage" in options else b"") + DONE
    last_ms = script.chunks[-1].at_ms if script.chunks else 0.0
    events.append((last_ms if script.end_ms is None else script.end_ms, tail, 0))
    return [
        (at_ms, b"".join(data for _, data, _ in found), sum(count for _, _, count in found))
        for at_ms, group in itertools.groupby(events, lambda part: part[0])
        if (found := list(group))
    ]


def prompt_of(asked: Mapping[str, object]) -> list[int] | str:
    """Return the token ids, the text, or the last message that a request asks about."""
    messages = asked.get("messages")
    found = messages[-1]["content"] if isinstance(messages, list) else asked.get("prompt")
    return found if isinstance(found, list) else str(found)


def steady(first_ms: float, gap_ms: float, num_tokens: int) -> tuple[Chunk, ...]:
    """Return a token per chunk at an even pace."""
    return tuple(Chunk(first_ms + gap_ms * position) for position in range(num_tokens))


def paced(first_ms: float, gaps_ms: Sequence[float], sizes: Sequence[int]) -> tuple[Chunk, ...]:
    """Return chunks of these sizes; `gaps_ms` lie between them, so there is one gap less."""
    moments = itertools.accumulate(gaps_ms, initial=first_ms)
    return tuple(Chunk(at_ms, size) for at_ms, size in zip(moments, sizes, strict=True))


def answer_ids(number: int, num_tokens: int) -> list[int]:
    """Return the tokens of a number's answer, the same at every call."""
    # Both factors are coprime to the number of ids, so an answer repeats no id.
    return [LOWEST_ID + (number * 1_009 + at * 2_003) % NUM_IDS for at in range(num_tokens)]
