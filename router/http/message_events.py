"""The object and the events of POST /v1/messages, in Anthropic's form, from a choice's deltas.

Blocks are in the order in which the model wrote them. Each is open until its kind changes, and a
call comes whole.
"""

import msgspec

from baton.protocol.errors import BatonError
from baton.router.http.responses import Answer, call_id
from baton.router.outputs import CompletionOutput, RequestMetrics

Object = dict[str, object]

_encode = msgspec.json.Encoder().encode
_ERROR_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
    504: "timeout_error",
}  # fmt: skip
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageEvents:
    """Give deltas to `take`, then call `ending` or `failed` in a stream, else `whole`."""

    __slots__ = (
        "_answer", "_blocks", "_events", "_has_begun", "_is_open", "_is_streamed", "_metrics",
        "_stop", "_texts",
    )  # fmt: skip

    def __init__(self, answer: Answer, metrics: RequestMetrics, *, is_streamed: bool) -> None:
        """`metrics` are those of the request, as they grow."""
        self._answer, self._metrics, self._is_streamed = answer, metrics, is_streamed
        self._events: list[bytes] = []  # to return
        self._blocks: list[Object] = []
        self._texts: list[str] = []  # of the block that is open
        self._has_begun = self._is_open = False
        self._stop: Object = {"stop_reason": None, "stop_sequence": None}

    def take(self, delta: CompletionOutput) -> bytes:
        """Return the events of a delta, none if it brings nothing that clients see."""
        self._begin()
        self._add("thinking", delta.reasoning)
        self._add("text", delta.text)
        for call in delta.tool_calls:
            self._close()
            name = call_id(self._answer.id, 0, call.index)
            block: Object = {"type": "tool_use", "id": name, "name": call.name, "input": {}}
            self._open(block)
            self._change({"type": "input_json_delta", "partial_json": call.arguments})
            block["input"] = msgspec.Raw(call.arguments.encode())
            self._close()
        if delta.finish_reason is not None:
            reason, sequence = _STOP_REASONS[delta.finish_reason], None
            if reason == "end_turn" and isinstance(delta.stop_reason, str):
                reason, sequence = "stop_sequence", delta.stop_reason
            self._stop = {"stop_reason": reason, "stop_sequence": sequence}
        return self._taken()

    def ending(self, metrics: RequestMetrics) -> bytes:
        """Return the last events of a complete message."""
        self._close()
        self._emit("message_delta", delta=self._stop, usage=_usage_of(metrics))
        self._emit("message_stop")
        return self._taken()

    def failed(self, error: BatonError) -> bytes:
        """Return the last event of a message that failed."""
        self._begin()
        return self._taken() + b"event: error\ndata: %b\n\n" % message_error(error)

    def whole(self, metrics: RequestMetrics) -> bytes:
        """Return the object of a complete message."""
        self._close()
        return _encode(self._message(metrics))

    # --- inside -----------------------------------------------------------------------------

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._emit("message_start", message=self._message(self._metrics))

    def _message(self, metrics: RequestMetrics) -> Object:
        head = {"id": self._answer.id, "type": "message", "role": "assistant"}
        message = {**head, "model": self._answer.model, "content": self._blocks, **self._stop}
        return {**message, "usage": _usage_of(metrics)}

    def _add(self, kind: str, text: str) -> None:
        if not text:
            return
        if not self._is_open or self._blocks[-1]["type"] != kind:
            self._close()
            # Clients send signatures of thinking back; none is needed.
            more = {"signature": ""} if kind == "thinking" else {}
            self._open({"type": kind, kind: "", **more})
        self._texts.append(text)
        self._change({"type": f"{kind}_delta", kind: text})

    def _open(self, block: Object) -> None:
        self._blocks.append(block)
        self._is_open = True
        self._emit("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _change(self, delta: Object) -> None:
        self._emit("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            if self._texts:
                self._blocks[-1][str(self._blocks[-1]["type"])] = "".join(self._texts)
                self._texts.clear()
            self._emit("content_block_stop", index=len(self._blocks) - 1)

    def _emit(self, what: str, **fields: object) -> None:
        if self._is_streamed:
            data = _encode({"type": what, **fields})
            self._events.append(b"event: %b\ndata: %b\n\n" % (what.encode(), data))

    def _taken(self) -> bytes:
        events = b"".join(self._events)
        self._events.clear()
        return events


def message_error(error: BatonError) -> bytes:
    """Return an error in Anthropic's form, for a body or an event."""
    status = error.http_status
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    message = error.message.encode(errors="replace").decode()  # it may quote bytes of a header
    details = {"type": kind, "message": message, "param": error.param, "code": error.code}
    return _encode({"type": "error", "error": details})


def _usage_of(metrics: RequestMetrics) -> Object:
    cached = metrics.num_cached_tokens
    return {
        "input_tokens": metrics.num_prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,  # prompts are cached without being asked for
        "output_tokens": metrics.num_output_tokens,
    }
