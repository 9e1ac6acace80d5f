"""The bytes of answers in OpenAI's API, event by event, faults included.

The scripted server and tests of clients write them. Written apart from the client's parser and from
the router's answers, so that no mistake of theirs can hide here. Pure.
"""

import json
from collections.abc import Sequence

DONE = b"data: [DONE]\n\n"


def event(body: object) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def token(
    text: str | None = " a",
    ids: Sequence[int] | None = None,
    end: str | None = None,
    **more: object,
) -> bytes:
    """Return a chunk of a completion."""
    choice: dict[str, object] = {"index": 0, "text": text, "finish_reason": end}
    if ids is not None:
        choice["token_ids"] = list(ids)
    return event({"object": "text_completion", "choices": [choice], **more})


def delta(
    content: str | None = " a",
    ids: Sequence[int] | None = None,
    end: str | None = None,
    **more: object,
) -> bytes:
    """Return a chunk of a chat; `more` are fields beside its content."""
    choice = {"index": 0, "delta": {"content": content, **more}, "finish_reason": end}
    if ids is not None:
        choice["token_ids"] = list(ids)
    return event({"object": "chat.completion.chunk", "choices": [choice]})


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
