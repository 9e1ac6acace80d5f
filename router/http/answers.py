"""The JSON that clients get: completions, their chunks, usage and errors, in OpenAI's form.

`handlers` makes one `Answer` per HTTP request. The fixed part of a chunk is encoded only once per
choice, because every token is a chunk. This file is pure: no I/O, no clock.
"""

import math
from collections.abc import Sequence

import msgspec

from baton.protocol.errors import BatonError
from baton.router.outputs import CompletionOutput, RequestMetrics, waterfall

_encode = msgspec.json.Encoder().encode

# The error types that OpenAI's clients expect for a status. The code is more specific.
_ERROR_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "overloaded_error",
}
RETRY_STATUSES = (429, 503, 504)
DEFAULT_RETRY_AFTER_S = 1.0


class Answer(msgspec.Struct, frozen=True):
    """The identity and the form of one answer, which make the bytes of its parts."""

    id: str
    model: str
    created: int  # unix seconds
    is_chat: bool
    include_usage: bool  # in a stream; a whole answer always has usage
    token_ids: bool
    timeline: bool

    def opening(self, index: int) -> bytes:
        """Return the first chunk of a choice of a chat."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._head(True) + b"[" + _encode(choice) + b"]" + self._tail()

    def chunks(self, index: int) -> "ChunkTemplate":
        head = self._head(True) + b'[{"index":%d,' % index
        if self.is_chat:
            before, after = b'"delta":{"content":', b'},"logprobs":null,"finish_reason":'
        else:
            before, after = b'"text":', b',"logprobs":null,"finish_reason":'
        return ChunkTemplate(head + before, after, b"}]" + self._tail(), self.token_ids)

    def closing(self, metrics: Sequence[RequestMetrics]) -> bytes | None:
        """Return the last chunk, without choices; None if the client asked for no part of it."""
        if not (self.include_usage or self.timeline):
            return None
        data = self._head(True) + b"[]"
        if self.include_usage:
            data += b',"usage":' + _encode(usage_of(metrics))
        return data + self._timeline(metrics) + b"}"

    def whole(self, outputs: list[CompletionOutput], metrics: Sequence[RequestMetrics]) -> bytes:
        choices = _encode([self._choice(output) for output in outputs])
        usage = b',"usage":' + _encode(usage_of(metrics))
        return self._head(False) + choices + usage + self._timeline(metrics) + b"}"

    def _choice(self, output: CompletionOutput) -> dict[str, object]:
        choice: dict[str, object] = {"index": output.index}
        if self.is_chat:
            choice["message"] = {"role": "assistant", "content": output.text, "refusal": None}
        else:
            choice["text"] = output.text
        choice["logprobs"] = None
        choice["finish_reason"] = output.finish_reason
        choice["stop_reason"] = output.stop_reason
        if self.token_ids:
            choice["token_ids"] = output.token_ids
        return choice

    def _head(self, is_chunk: bool) -> bytes:
        kind = "text_completion"
        if self.is_chat:
            kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return _encode(head)[:-1] + b',"choices":'

    def _tail(self) -> bytes:
        return b',"usage":null}' if self.include_usage else b"}"

    def _timeline(self, metrics: Sequence[RequestMetrics]) -> bytes:
        if not self.timeline:
            return b""
        timeline = [{**msgspec.to_builtins(one), "waterfall": waterfall(one)} for one in metrics]
        return b',"timeline":' + _encode(timeline)


class ChunkTemplate:
    """Makes the chunks of one choice."""

    __slots__ = ("_after", "_before", "_end", "_running_end", "_token_ids")

    def __init__(self, before: bytes, after: bytes, end: bytes, token_ids: bool) -> None:
        self._before = before
        self._after = after
        self._end = end
        self._running_end = after + b"null" + end
        self._token_ids = token_ids

    def fill(self, delta: CompletionOutput) -> bytes:
        text = _encode(delta.text)
        if delta.finish_reason is None and not self._token_ids:
            return self._before + text + self._running_end
        data = self._before + text + self._after + _encode(delta.finish_reason)
        if delta.finish_reason is not None:
            data += b',"stop_reason":' + _encode(delta.stop_reason)
        if self._token_ids:
            data += b',"token_ids":' + _encode(delta.token_ids)
        return data + self._end


def usage_of(metrics: Sequence[RequestMetrics]) -> dict[str, object]:
    """Return the usage of all prompts of a request. Some fields appear only if they apply."""
    num_prompt = sum(one.num_prompt_tokens for one in metrics)
    num_output = sum(one.num_output_tokens for one in metrics)
    cached = {"cached_tokens": sum(one.num_cached_tokens for one in metrics)}
    usage: dict[str, object] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": cached,
    }
    if (clamped := clamped_to(metrics)) is not None:
        usage["max_tokens_clamped"] = clamped
    if any(one.resumed for one in metrics):
        usage["resumed"] = True
    return usage


def clamped_to(metrics: Sequence[RequestMetrics]) -> int | None:
    """Return the least to which `max_tokens` was cut; None if it was cut for no prompt."""
    limits = [one.max_tokens_clamped for one in metrics if one.max_tokens_clamped is not None]
    return min(limits, default=None)


def error_of(error: BatonError) -> bytes:
    """Return an error in OpenAI's form, for a body or an SSE event."""
    status = error.http_status
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    details = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return _encode({"error": details})


def retry_headers(error: BatonError) -> dict[str, str]:
    """Return the headers for retries: in seconds for HTTP, in ms for OpenAI's clients."""
    if error.http_status not in RETRY_STATUSES:
        return {}
    after_s = DEFAULT_RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
    return {
        "Retry-After": str(max(1, math.ceil(after_s))),
        "retry-after-ms": str(max(1, math.ceil(after_s * 1000))),
    }
