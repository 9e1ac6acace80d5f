"""The bytes of answers in OpenAI's API, event by event, for the scripted server and for tests.

Written apart from the client's parser and from the router's answers, so that no mistake of theirs
can hide here. Pure.
"""

import json
from collections.abc import Sequence

DONE = b"data: [DONE]\n\n"


def event(body: object) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def token(
    text: str = " a", token_ids: Sequence[int] | None = None, end: str | None = None, **more: object
) -> bytes:
    """Return a chunk of a completion; `more` are fields of the event."""
    return _chunk("text_completion", {"text": text}, token_ids, end, more)


def delta(
    text: str = " a", token_ids: Sequence[int] | None = None, end: str | None = None, **more: object
) -> bytes:
    """Return a chunk of a chat; one without text opens it with a role."""
    said = {"content": text} if text else {"role": "assistant", "content": ""}
    return _chunk("chat.completion.chunk", {"delta": said}, token_ids, end, more)


def _chunk(
    kind: str,
    said: dict[str, object],
    token_ids: Sequence[int] | None,
    end: str | None,
    more: dict[str, object],
) -> bytes:
    choice = {"index": 0, **said, "finish_reason": end}
    if token_ids is not None:
        choice["token_ids"] = list(token_ids)
    return event({"object": kind, "choices": [choice], **more})


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
