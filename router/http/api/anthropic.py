"""POST /v1/messages and its count of tokens: bodies that become chats, and responses in their form.

The blocks of a response are in the order in which the model wrote them. Each is open until its kind
changes, and a call comes whole.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton.protocol.errors import BatonError, RequestError
from baton.protocol.sampling import Int32
from baton.router.http.api.decoding import decoded
from baton.router.http.api.event_ids import ResponseHead
from baton.router.http.api.openai_chunks import call_id
from baton.router.http.api.schema import (
    ChatBody,
    Effort,
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
    num_answered,
    placeholder,
    plain_call,
)
from baton.router.outputs import CompletionOutput, RequestMetrics, ToolCall
from baton.runtime.log import clip

Object = dict[str, object]
_ERROR_MARK = "Error: "  # before the result of a tool that failed
# The names that the fields of a chat have here.
_NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}


class Block(msgspec.Struct):
    """A block of a turn, of any type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Object | None = None
    tool_use_id: str | None = None
    content: "str | list[Block] | Object | None" = None
    is_error: bool | None = None


class MessageTurn(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolDefinition(msgspec.Struct, forbid_unknown_fields=True):
    """A function, or a tool of another `type`, which Anthropic runs or describes itself."""

    name: ToolName | None = None
    input_schema: Object | None = None
    description: str | None = None
    strict: bool | None = None
    type: str | None = None
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
    system: str | list[Block] | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    thinking: ThinkingMode | None = None
    output_config: OutputConfig | None = None
    # These change nothing about a response.
    cache_control: Anything = msgspec.UNSET
    context_management: Anything = msgspec.UNSET


class MessageBody(CountBody, kw_only=True):
    """The body of POST /v1/messages."""

    max_tokens: Int32
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
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
    body, ignored = decoded(_decoder, data)
    given = {
        name: getattr(body, name)
        for name in ("stream", "temperature", "top_p", "top_k")
    }
    more = {"stop": body.stop_sequences, "max_completion_tokens": body.max_tokens}
    return chat_of(body, defaults, ignored, **given, **more)


def chat_of(
    body: CountBody,
    defaults: Mapping[str, object],
    ignored: list[str],
    **settings: object,
) -> ParsedRequest:
    """Return what a chat with the turns of `body` asks for. Raises `RequestError`.

    `ignored` has the names of ignored fields.
    """
    choice = body.tool_choice or Choice()
    thinking = body.thinking
    thinks = thinking is not None and thinking.type != "disabled"
    chosen: dict[str, ToolChoice] = {"any": "required", "auto": "auto", "none": "none"}
    form = body.output_config.format if body.output_config is not None else None
    chat = ChatBody(
        model=body.model,
        messages=[],
        tools=[
            _tool_of(f"tools[{index}]", tool)
            for index, tool in enumerate(body.tools or ())
        ],
        tool_choice=chosen.get(choice.type) or NamedTool(FunctionName(choice.name)),
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        response_format=ResponseFormat("json_schema", JsonSchema(form.schema))
        if form
        else None,
        include_reasoning=thinks,
        chat_template_kwargs={"enable_thinking": thinks, "thinking": thinks},
        reasoning_effort=body.output_config.effort
        if body.output_config is not None
        else None,
        **settings,  # type: ignore[arg-type]
    )
    try:
        turns = _turns_of(body)
        parsed = parsed_chat(chat, turns, defaults, ignored, limit_name="max_tokens")
    except RequestError as error:
        param = (error.param or "").replace(".function.parameters", ".input_schema")
        error.param = _NAMES.get(param, param.replace(".function", "")) or None
        raise
    form_param = _NAMES.get(parsed.form_param, parsed.form_param)
    return msgspec.structs.replace(parsed, endpoint="messages", form_param=form_param)


def _tool_of(place: str, tool: ToolDefinition) -> Tool:
    if tool.type not in (None, "custom"):
        return Tool(tool.type)
    if tool.name is None or tool.input_schema is None:
        missing = "name" if tool.name is None else "input_schema"
        raise RequestError(
            f"a tool needs the field {missing}", param=f"{place}.{missing}"
        )
    function = Function(tool.name, tool.description, tool.input_schema, tool.strict)
    return Tool("function", function)


# --- the turns ----------------------------------------------------------------------------------


def _turns_of(body: CountBody) -> list[Object]:
    turns: list[Object] = []
    if body.system:
        text = _text_of("system", body.system, is_history=False)
        turns.append({"role": "system", "content": text})
    num_history = num_answered([turn.role for turn in body.messages])
    for index, turn in enumerate(body.messages):
        place = f"messages[{index}].content"
        if turn.role == "assistant":
            turns.append(_answer_of(place, turn.content))
        else:
            turns += _asked(place, turn, is_history=index < num_history)
    if body.messages[-1].role == "assistant":
        text = "messages must end with a turn of the user: baton does not continue a response"
        raise RequestError(text, code="unsupported", param="messages")
    return turns


def _answer_of(place: str, content: str | list[Block]) -> Object:
    """Return a turn of the assistant."""
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    shown: list[Block] = []
    thoughts: list[str] = []
    calls: list[Object] = []
    for number, block in enumerate(content):
        match block.type:
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass
            case "tool_use":
                calls.append(_call_of(f"{place}[{number}]", block))
            case "tool_result":
                raise RequestError(
                    "this block does not belong to assistant",
                    param=f"{place}[{number}]",
                )
            case _:
                shown.append(block)
    turn: Object = {
        "role": "assistant",
        "content": _text_of(place, shown, is_history=True),
    }
    if any(thoughts):
        turn["reasoning_content"] = turn["reasoning"] = "\n".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    return turn


def _call_of(place: str, block: Block) -> Object:
    if block.id is None or not block.name:
        missing = "id" if block.id is None else "name"
        raise RequestError(
            f"a tool_use needs the field {missing}", param=f"{place}.{missing}"
        )
    return plain_call(TurnCall(CalledFunction(block.name, block.input), id=block.id))


def _asked(place: str, turn: MessageTurn, *, is_history: bool) -> list[Object]:
    """Return a turn of the user or the system as turns: the results of tools, then the text."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    results: list[Object] = []
    texts: list[str] = []
    for number, block in enumerate(turn.content):
        block_place = f"{place}[{number}]"
        match block.type:
            case "tool_result":
                results.append(_result_of(block_place, block))
            case "tool_use" | "thinking" | "redacted_thinking":
                text = f"this block does not belong to {turn.role}"
                raise RequestError(text, param=block_place)
            case _:
                texts.append(_text_of_block(block_place, block, is_history=is_history))
    if texts:
        results.append({"role": turn.role, "content": "\n".join(texts)})
    return results


def _result_of(place: str, block: Block) -> Object:
    if block.tool_use_id is None:
        text = "a tool_result needs the field tool_use_id"
        raise RequestError(text, param=f"{place}.tool_use_id")
    content = block.content
    if isinstance(content, dict):
        raise RequestError("content must be text or blocks", param=f"{place}.content")
    shown = _text_of(f"{place}.content", content or "", is_history=True)
    if block.is_error:
        shown = f"{_ERROR_MARK}{shown}"
    return {"role": "tool", "content": shown, "tool_call_id": block.tool_use_id}


def _text_of(place: str, content: str | list[Block], *, is_history: bool) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(
        _text_of_block(f"{place}[{number}]", block, is_history=is_history)
        for number, block in enumerate(content)
    )


def _text_of_block(place: str, block: Block, *, is_history: bool) -> str:
    """Return the text of a block; a placeholder for others in what `is_history`."""
    if block.type != "text":
        if is_history:
            return placeholder(block.type)
        text = f"content of type {clip(block.type)!r} is not supported; only text is"
        raise RequestError(text, code="unsupported", param=place)
    if block.text is None:
        raise RequestError("a block of type text needs text", param=place)
    return block.text


_encode = msgspec.json.Encoder().encode
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageEvents:
    """Give deltas to `take`, then call `ending` or `failed` in a stream, else `whole`."""

    __slots__ = (
        "_blocks",
        "_events",
        "_has_begun",
        "_head",
        "_is_open",
        "_is_streamed",
        "_metrics",
        "_stop",
        "_texts",
    )

    def __init__(
        self, head: ResponseHead, metrics: RequestMetrics, *, is_streamed: bool
    ) -> None:
        """`metrics` are those of the request, as they grow."""
        self._head = head
        self._metrics = metrics
        self._is_streamed = is_streamed
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
            reason = _STOP_REASONS[delta.finish_reason]
            sequence = None
            if reason == "end_turn" and isinstance(delta.stop_reason, str):
                reason = "stop_sequence"
                sequence = delta.stop_reason
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

    def whole(self, metrics: Sequence[RequestMetrics]) -> bytes:
        """Return the object of a complete message."""
        self._close()
        return _encode(self._message(metrics[0]))

    # --- inside -----------------------------------------------------------------------------

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._emit("message_start", message=self._message(self._metrics))

    def _message(self, metrics: RequestMetrics) -> Object:
        head = {"id": self._head.id, "type": "message", "role": "assistant"}
        message = {
            **head,
            "model": self._head.model,
            "content": self._blocks,
            **self._stop,
        }
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
            name = call_id(self._head.id, 0, call.index)
            self._open({"type": "tool_use", "id": name, "name": call.name, "input": {}})
        if call.arguments:
            self._texts.append(call.arguments)
            self._change({"type": "input_json_delta", "partial_json": call.arguments})

    def _open(self, block: Object) -> None:
        self._blocks.append(block)
        self._is_open = True
        self._emit(
            "content_block_start", index=len(self._blocks) - 1, content_block=block
        )

    def _change(self, delta: Object) -> None:
        self._emit("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            block = self._blocks[-1]
            text = "".join(self._texts)
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
    kind = _ERROR_TYPES.get(
        status, "invalid_request_error" if status < 500 else "api_error"
    )
    # It may quote bytes of a header.
    message = error.message.encode(errors="replace").decode()
    details = {
        "type": kind,
        "message": message,
        "param": error.param,
        "code": error.code,
    }
    return _encode({"type": "error", "error": details})


def _usage_of(metrics: RequestMetrics) -> Object:
    cached = metrics.num_cached_tokens
    return {
        "input_tokens": metrics.num_prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,  # prompts are cached without being asked for
        "output_tokens": metrics.num_output_tokens,
    }
