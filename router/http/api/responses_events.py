"""The object and the typed events of POST /v1/responses, made from the deltas of a choice.

Items are in the order in which the model wrote them. Each is open until its kind changes or another
call begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from baton.protocol.errors import BatonError
from baton.router.http.api.event_ids import ResponseHead
from baton.router.http.api.openai_chunks import LogprobForms, call_id, usage_of
from baton.router.http.api.schema import ParsedRequest
from baton.router.outputs import CompletionOutput, RequestMetrics, ToolCall

Kind = Literal["message", "reasoning", "function_call"]
Status = Literal["in_progress", "completed", "incomplete", "failed"]
Object = dict[str, object]

_encode = msgspec.json.Encoder().encode
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_EVENTS: dict[Kind, str] = {
    "message": "output_text",
    "reasoning": "reasoning_text",
    "function_call": "function_call_arguments",
}


@dataclass(slots=True)
class _Open:
    """The item that is being written."""

    kind: Kind
    texts: list[str] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    call: Object = field(default_factory=dict)  # its id and name


class ResponseEvents:
    """The encoder of `/v1/responses`."""

    __slots__ = (
        "_events",
        "_finish_reason",
        "_head",
        "_num_events",
        "_open",
        "_output",
        "_parsed",
        "_unplaced",
    )

    def __init__(self, parsed: ParsedRequest, head: ResponseHead) -> None:
        self._parsed = parsed
        self._head = head
        self._num_events = 0
        self._events: list[bytes] = []  # to return
        self._output: list[Object] = []  # items that are done
        self._open: _Open | None = None
        # Log probabilities of tokens whose text is held back.
        self._unplaced: list[object] = []
        self._finish_reason = ""

    def take(self, delta: CompletionOutput) -> bytes:
        self._begin()
        if delta.reasoning:
            self._add("reasoning", delta.reasoning, [])
        if delta.logprobs is not None:
            rows = zip(delta.token_ids, delta.logprobs, strict=False)
            found = LogprobForms(self._parsed.params.logprobs or 0).of_chat(rows)[
                "content"
            ]
            assert isinstance(found, list)
            self._unplaced += found
        if delta.text:
            self._add("message", delta.text, self._unplaced)
        if delta.text or delta.reasoning or delta.tool_calls:
            self._unplaced = []
        for call in delta.tool_calls:
            self._call(call)
        self._finish_reason = delta.finish_reason or ""
        return self._taken()

    def ending(self, metrics: Sequence[RequestMetrics]) -> bytes:
        status = self._end()
        self._emit(f"response.{status}", response=self._response(status, metrics[0]))
        return self._taken()

    def failed(self, error: BatonError) -> bytes:
        self._begin()
        self._close("incomplete")
        codes = {
            429: "rate_limit_exceeded",
            400: "invalid_prompt",
            422: "invalid_prompt",
        }
        code = codes.get(error.http_status, "server_error")  # clients know no others
        shown: Object = {"code": code, "message": f"{error.message} ({error.code})"}
        self._emit("response.failed", response=self._response("failed", None, shown))
        return self._taken()

    def whole(self, metrics: Sequence[RequestMetrics]) -> bytes:
        """Return the object of a complete response."""
        return bytes(self._response(self._end(), metrics[0]))

    # --- inside -----------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._num_events == 0 and self._parsed.is_streamed:
            response = self._response("in_progress", None)
            self._emit("response.created", response=response)
            self._emit("response.in_progress", response=response)

    def _end(self) -> Status:
        status: Status = (
            "incomplete" if self._finish_reason == "length" else "completed"
        )
        if not self._output and self._open is None:
            self._start("message")
        self._close(status)
        return status

    def _start(self, kind: Kind) -> _Open:
        self._open = _Open(kind)
        self._emit_item("added", self._item(kind, "in_progress", content=[]))
        self._emit_part("content_part.added", part=self._part())
        return self._open

    def _add(self, kind: Kind, text: str, logprobs: list[object]) -> None:
        item = self._open
        if item is None or item.kind != kind:
            if item is not None:
                logprobs = logprobs[-1:]  # the others are of tags between the items
            self._close("completed")
            item = self._start(kind)
        item.texts.append(text)
        item.logprobs += logprobs
        more = {"logprobs": logprobs} if kind == "message" else {}
        self._emit_part(f"{_EVENTS[kind]}.delta", delta=text, **more)

    def _close(self, status: Status) -> None:
        item = self._open
        if item is None:
            return
        if item.kind == "function_call":
            self._close_call(item, status)
            return
        part = self._part()
        more = {"logprobs": item.logprobs} if item.kind == "message" else {}
        self._emit_part(f"{_EVENTS[item.kind]}.done", text=part["text"], **more)
        self._emit_part("content_part.done", part=part)
        self._emit_item("done", self._item(item.kind, status, content=[part]))
        self._open = None

    def _call(self, call: ToolCall) -> None:
        """Begin a call, or go on with the arguments of the last one."""
        if call.name:
            self._close("completed")
            named: Object = {
                "call_id": call_id(self._head.id, 0, call.index),
                "name": call.name,
            }
            self._open = _Open("function_call", call=named)
            item = self._item("function_call", "in_progress", **named, arguments="")
            self._emit_item("added", item)
        if self._open is not None and call.arguments:
            self._open.texts.append(call.arguments)
            self._emit_arguments("delta", delta=call.arguments)

    def _close_call(self, item: _Open, status: Status) -> None:
        arguments = "".join(item.texts)
        self._emit_arguments("done", name=item.call["name"], arguments=arguments)
        done = self._item("function_call", status, **item.call, arguments=arguments)
        self._emit_item("done", done)
        self._open = None

    def _emit_arguments(self, what: str, **fields: object) -> None:
        place = {
            "item_id": self._item_id("function_call"),
            "output_index": len(self._output),
        }
        self._emit(f"response.{_EVENTS['function_call']}.{what}", **place, **fields)

    def _item(self, kind: str, status: Status, **fields: object) -> Object:
        """Return the next item of the output."""
        item = {"id": self._item_id(kind), "type": kind, "status": status, **fields}
        if kind == "message":
            item["role"] = "assistant"
        elif kind == "reasoning":
            item["summary"] = []
        return item

    def _item_id(self, kind: str) -> str:
        number = self._head.id.partition("_")[2]
        return f"{_PREFIXES[kind]}_{number}{len(self._output)}"

    def _part(self) -> Object:
        """Return the content of the open item so far."""
        item = self._open
        assert item is not None
        part: Object = {"type": _EVENTS[item.kind], "text": "".join(item.texts)}
        if item.kind == "message":
            part |= {"annotations": [], "logprobs": item.logprobs}
        return part

    def _response(
        self,
        status: Status,
        metrics: RequestMetrics | None,
        error: Object | None = None,
    ) -> msgspec.Raw:
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        response = {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "error": error,
            "incomplete_details": reason,
            "model": self._head.model,
            "output": self._output,
            "usage": None if metrics is None else _usage_of(metrics),
        }
        return msgspec.Raw(_encode(response)[:-1] + b"," + self._parsed.settings[1:])

    def _emit_item(self, what: str, item: Object) -> None:
        self._emit(
            f"response.output_item.{what}", output_index=len(self._output), item=item
        )
        if what == "done":
            self._output.append(item)

    def _emit_part(self, what: str, **fields: object) -> None:
        """Add an event of the only part of the open item."""
        if self._parsed.is_streamed and self._open is not None:
            item_id = self._item_id(self._open.kind)
            place = {
                "item_id": item_id,
                "output_index": len(self._output),
                "content_index": 0,
            }
            self._emit(f"response.{what}", **place, **fields)

    def _emit(self, what: str, **fields: object) -> None:
        if self._parsed.is_streamed:
            event = {"type": what, "sequence_number": self._num_events, **fields}
            self._num_events += 1
            self._events.append(
                b"event: %b\ndata: %b\n\n" % (what.encode(), _encode(event))
            )

    def _taken(self) -> bytes:
        events = b"".join(self._events)
        self._events.clear()
        return events


def _usage_of(metrics: RequestMetrics) -> Object:
    chat = usage_of([metrics])
    # Prompts are cached as they are computed, which no client asks for.
    cached = {"cached_tokens": metrics.num_cached_tokens, "cache_write_tokens": 0}
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": cached,
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": metrics.num_reasoning_tokens},
        "total_tokens": chat["total_tokens"],
        **{
            name: chat[name]
            for name in ("max_tokens_clamped", "resumed")
            if name in chat
        },
    }
