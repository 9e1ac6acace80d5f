"""POST /v1/messages and its count of tokens: bodies that become chats, and responses in their form.

The blocks of a response are in the order in which the model wrote them. Each is open until its kind
changes, and a call comes whole.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton.protocol.errors import BatonError, RequestError
from baton.router.http.api.openai_chunks import ResponseWriter, call_id
from baton.router.http.api.schema import (
    ChatBody,
    Effort,
    Int,
    JsonSchema,
    ParsedRequest,
    ResponseFormat,
    parsed_chat,
)
from baton.router.http.api.turns import (
    MAX_TOOLS,
    MAX_TURNS,
    Anything,
    CalledFunction,
    Function,
    FunctionName,
    NamedTool,
    Tool,
    ToolChoice,
    ToolName,
    TurnCall,
    plain_call,
)
from baton.router.http.errors import decoded
from baton.router.outputs import CompletionOutput, RequestMetrics, ToolCall

Object = dict[str, object]
# The names that the fields of a chat have here.
_NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    pass


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Object


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock] = ""


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class MessageTurn(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolDefinition(msgspec.Struct, forbid_unknown_fields=True):
    name: ToolName
    input_schema: Object
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] | None = None
    # These change nothing about a response.
    cache_control: Anything = msgspec.UNSET
    eager_input_streaming: Anything = msgspec.UNSET
    input_examples: Anything = msgspec.UNSET


class Choice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str = ""
    disable_parallel_tool_use: bool = False


class ThinkingMode(msgspec.Struct):
    type: Literal["enabled", "adaptive", "disabled"] = "disabled"


class MessageFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    schema: Object


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: MessageFormat | None = None
    effort: Effort | None = None


class CountBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: Annotated[list[MessageTurn], Meta(min_length=1, max_length=MAX_TURNS)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    thinking: ThinkingMode | None = None
    output_config: OutputConfig | None = None
    # These change nothing about a response.
    cache_control: Anything = msgspec.UNSET
    context_management: Anything = msgspec.UNSET


class MessageBody(CountBody, kw_only=True):
    """The body of POST /v1/messages."""

    max_tokens: Int
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    stop_sequences: list[str] | None = None
    # These change nothing about a response.
    metadata: Object | None = None
    service_tier: str | None = None


_decoder = msgspec.json.Decoder(MessageBody)
count_decoder = msgspec.json.Decoder(CountBody)


def parse_message(data: bytes, defaults: Mapping[str, object]) -> ParsedRequest:
    """Return the checked body as what a chat asks for. Raises `RequestError`.

    `defaults` are the model's sampling parameters, for fields that the body leaves out.
    """
    body = decoded(_decoder, data)
    given = {name: getattr(body, name) for name in ("stream", "temperature", "top_p", "top_k")}
    more = {"stop": body.stop_sequences, "max_completion_tokens": body.max_tokens}
    return chat_of(body, defaults, **given, **more)


def chat_of(body: CountBody, defaults: Mapping[str, object], **settings: object) -> ParsedRequest:
    """Return what a chat with the turns of `body` asks for. Raises `RequestError`."""
    choice, thinking = body.tool_choice or Choice(), body.thinking
    thinks = thinking is not None and thinking.type != "disabled"
    chosen: dict[str, ToolChoice] = {"any": "required", "auto": "auto", "none": "none"}
    form = body.output_config.format if body.output_config is not None else None
    chat = ChatBody(
        model=body.model,
        messages=[],
        tools=[
            Tool("function", Function(one.name, one.description, one.input_schema, one.strict))
            for one in body.tools or ()
        ],
        tool_choice=chosen.get(choice.type) or NamedTool("function", FunctionName(choice.name)),
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        response_format=ResponseFormat("json_schema", JsonSchema(form.schema)) if form else None,
        include_reasoning=thinks,
        chat_template_kwargs={"enable_thinking": thinks, "thinking": thinks},
        reasoning_effort=body.output_config.effort if body.output_config is not None else None,
        **settings,  # type: ignore[arg-type]
    )
    try:
        parsed = parsed_chat(chat, _turns_of(body), defaults, limit_name="max_tokens")
    except RequestError as error:
        param = (error.param or "").replace(".function.parameters", ".input_schema")
        error.param = _NAMES.get(param, param.replace(".function", "")) or None
        raise
    form_param = _NAMES.get(parsed.form_param, parsed.form_param)
    return msgspec.structs.replace(parsed, endpoint="messages", form_param=form_param)


def _turns_of(body: CountBody) -> list[Object]:
    turns: list[Object] = []
    if body.system:
        turns.append({"role": "system", "content": _joined(body.system)})
    for index, turn in enumerate(body.messages):
        blocks = [TextBlock(turn.content)] if isinstance(turn.content, str) else turn.content
        calls: list[Object] = []
        for number, block in enumerate(blocks):
            place = f"messages[{index}].content[{number}]"
            is_answer = turn.role == "assistant"
            if isinstance(block, ToolResultBlock) and not is_answer:
                text = _joined(block.content)
                turns.append({"role": "tool", "content": text, "tool_call_id": block.tool_use_id})
            elif isinstance(block, ToolUseBlock) and is_answer:
                call = TurnCall(CalledFunction(block.name, block.input), id=block.id)
                calls.append(plain_call(place, call))
            elif isinstance(block, ToolResultBlock | ToolUseBlock):
                raise RequestError(f"this block does not belong to {turn.role}", param=place)
        texts = [block for block in blocks if isinstance(block, TextBlock)]
        thoughts = "\n".join(one.thinking for one in blocks if isinstance(one, ThinkingBlock))
        plain: Object = {"role": turn.role, "content": _joined(texts)}
        if thoughts:
            plain["reasoning_content"] = plain["reasoning"] = thoughts
        if calls:
            plain["tool_calls"] = calls
        if texts or turn.role == "assistant":
            turns.append(plain)
    if body.messages[-1].role == "assistant":
        text = "messages must end with a turn of the user: baton does not continue a response"
        raise RequestError(text, code="unsupported", param="messages")
    return turns


def _joined(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


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
        "_blocks", "_events", "_has_begun", "_is_open", "_is_streamed", "_metrics", "_stop",
        "_texts", "_writer",
    )  # fmt: skip

    def __init__(
        self, writer: ResponseWriter, metrics: RequestMetrics, *, is_streamed: bool
    ) -> None:
        """`metrics` are those of the request, as they grow."""
        self._writer, self._metrics, self._is_streamed = writer, metrics, is_streamed
        self._events: list[bytes] = []  # to return
        self._blocks: list[Object] = []
        self._texts: list[str] = []  # of the block that is open
        self._has_begun = self._is_open = False
        self._stop: Object = {"stop_reason": None, "stop_sequence": None}

    def take(self, delta: CompletionOutput) -> bytes:
        self._begin()
        self._add("thinking", delta.reasoning)
        self._add("text", delta.text)
        for call in delta.tool_calls:
            self._call(call)
        if delta.finish_reason is not None:
            reason, sequence = _STOP_REASONS[delta.finish_reason], None
            if reason == "end_turn" and isinstance(delta.stop_reason, str):
                reason, sequence = "stop_sequence", delta.stop_reason
            self._stop = {"stop_reason": reason, "stop_sequence": sequence}
        return self._taken()

    def ending(self, metrics: Sequence[RequestMetrics]) -> bytes:
        self._close()
        self._emit("message_delta", delta=self._stop, usage=_usage_of(metrics[0]))
        self._emit("message_stop")
        return self._taken()

    def failed(self, error: BatonError) -> bytes:
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
        head = {"id": self._writer.id, "type": "message", "role": "assistant"}
        message = {**head, "model": self._writer.model, "content": self._blocks, **self._stop}
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

    def _call(self, call: ToolCall) -> None:
        """Begin a call, or go on with the arguments of the last one."""
        if call.name:
            self._close()
            name = call_id(self._writer.id, 0, call.index)
            self._open({"type": "tool_use", "id": name, "name": call.name, "input": {}})
        if call.arguments:
            self._texts.append(call.arguments)
            self._change({"type": "input_json_delta", "partial_json": call.arguments})

    def _open(self, block: Object) -> None:
        self._blocks.append(block)
        self._is_open = True
        self._emit("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _change(self, delta: Object) -> None:
        self._emit("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            block, text = self._blocks[-1], "".join(self._texts)
            if block["type"] == "tool_use":
                block["input"] = _object_of(text)
            elif text:
                block[str(block["type"])] = text
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


def _object_of(arguments: str) -> msgspec.Raw | Object:
    """Return the arguments of a call; nothing of those that a limit has cut."""
    try:
        msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return {}
    return msgspec.Raw(arguments.encode())


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
