"""The body of POST /v1/responses, translated into the chat that answers it.

No response is stored, so a body that refers to an earlier one, or asks to keep its own, is refused.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton.protocol.errors import RequestError
from baton.protocol.sampling import Int32
from baton.router.http.api.decoding import converted, count, decoded
from baton.router.http.api.schema import (
    AnyBody,
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
    AllowedList,
    AllowedTool,
    AllowedTools,
    Anything,
    CalledFunction,
    ContentPart,
    Function,
    FunctionName,
    NamedTool,
    Tool,
    ToolChoice,
    Turn,
    TurnCall,
    num_answered,
    placeholder,
    plain_call,
    plain_turn,
    text_of,
    unsupported,
)
from baton.runtime.log import clip

Object = dict[str, object]

_LOGPROBS = "message.output_text.logprobs"
# Reasoning comes as text, and goes back so, which makes it needless to encrypt it.
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")
# These are parts of items that no response has.
_NEVER_THERE = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
# The names that the fields of a chat have here.
_NAMES = {"response_format": "text.format"}


class PlainFormat(msgspec.Struct, tag_field="type", tag="text"):
    pass


class JsonFormat(msgspec.Struct, tag_field="type", tag="json_object"):
    pass


class SchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    name: str
    schema: Object
    description: str | None = None
    strict: bool | None = None


class TextSettings(msgspec.Struct, forbid_unknown_fields=True):
    format: PlainFormat | JsonFormat | SchemaFormat | None = None
    verbosity: str | None = None  # changes nothing


class ReasoningSettings(msgspec.Struct, forbid_unknown_fields=True):
    effort: Effort | None = None
    # Reasoning is given out as it is, never as a summary.
    summary: str | None = None
    generate_summary: str | None = None


class _AllowedTool(msgspec.Struct):
    type: str
    name: str = ""


class _AllowedTools(msgspec.Struct):
    mode: Literal["auto", "required"]
    tools: list[_AllowedTool]


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    # Padding against traffic analysis; baton never sends it.
    include_obfuscation: bool | None = None


class ResponseBody(AnyBody, kw_only=True):
    """The body of POST /v1/responses."""

    input: str | Annotated[list[Object], Meta(max_length=MAX_TURNS)]
    instructions: str | None = None
    max_output_tokens: Int32 | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    tools: Annotated[list[Object], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Object | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Int32 | None = None  # of hosted tools, which no response calls
    include: list[str] | None = None
    top_logprobs: Int32 | None = None
    chat_template_kwargs: Object | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: str | None = None
    # These are refused, because they need stored responses.
    background: bool | None = None
    previous_response_id: Anything = msgspec.UNSET
    conversation: Anything = msgspec.UNSET
    prompt: Anything = msgspec.UNSET


class _Item(msgspec.Struct, kw_only=True):
    type: object = None


class MessageItem(_Item, kw_only=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ContentPart]


class ReasoningItem(_Item, kw_only=True):
    summary: list[ContentPart] = []
    content: list[ContentPart] = []
    encrypted_content: str | None = None


class CallItem(_Item, kw_only=True):
    call_id: str
    name: Annotated[str, Meta(min_length=1)]
    arguments: str


class CallOutputItem(_Item, kw_only=True):
    call_id: str
    output: str | list[ContentPart] | Object = ""


class OtherCallItem(_Item, kw_only=True):
    """A call of a tool that is no function; some clients run such tools and send results."""

    call_id: str | None = None
    name: str | None = None
    input: str | None = None
    action: Object | None = None
    operation: Object | None = None


Item = MessageItem | ReasoningItem | CallItem | CallOutputItem | OtherCallItem
_ITEMS: dict[object, type[Item]] = {
    None: MessageItem,
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
}
# Items besides calls that nothing can show.
_UNSHOWN_ITEMS = ("mcp_list_tools", "mcp_approval_request", "mcp_approval_response")
_decoder = msgspec.json.Decoder(ResponseBody)


def parse_response(data: bytes, defaults: Mapping[str, object]) -> ParsedRequest:
    """Return the checked body as what a chat asks for. Raises `RequestError`.

    `defaults` are the model's sampling parameters, for fields that the body leaves out.
    """
    body, ignored = decoded(_decoder, data)
    _check(body, ignored)
    tools = [
        _tool_of(f"tools[{index}]", tool, ignored)
        for index, tool in enumerate(body.tools or ())
    ]
    chat = ChatBody(
        **{name: getattr(body, name) for name in AnyBody.__struct_fields__},
        messages=[],
        max_completion_tokens=body.max_output_tokens,
        response_format=_form_of(body.text),
        logprobs=_LOGPROBS in (body.include or ()),
        top_logprobs=body.top_logprobs,
        tools=tools,
        tool_choice=_choice_of(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
    )
    try:
        turns = _turns_of(body, ignored)
        parsed = parsed_chat(
            chat, turns, defaults, ignored, limit_name="max_output_tokens"
        )
    except RequestError as error:
        raise _renamed(error) from None
    return msgspec.structs.replace(
        parsed,
        endpoint="responses",
        form_param=_NAMES.get(parsed.form_param, parsed.form_param),
        settings=msgspec.json.encode(_settings(body, parsed, tools)),
    )


def _check(body: ResponseBody, ignored: list[str]) -> None:
    stored = {"store": body.store, "background": body.background}
    stored |= {
        name: bytes(value) != b"null"
        for name in ("previous_response_id", "conversation", "prompt")
        if isinstance(value := getattr(body, name), msgspec.Raw)
    }
    for name, is_given in stored.items():
        if is_given:
            text = f"{name} is not supported: no response is stored, so send all items as input"
            raise RequestError(text, code="unsupported", param=name)
    if body.truncation not in (None, "disabled"):
        raise unsupported("truncation")
    for index, included in enumerate(body.include or ()):
        if included in _NEVER_THERE:
            count(ignored, f"include.{included}")
        elif included not in _INCLUDED:
            text = f"{clip(included)!r} cannot be included"
            raise RequestError(text, code="unsupported", param=f"include[{index}]")
    if body.top_logprobs and _LOGPROBS not in (body.include or ()):
        text = f"top_logprobs can be used only if include has {_LOGPROBS}"
        raise RequestError(text, param="top_logprobs")
    if body.stream_options is not None and not body.stream:
        text = "stream_options can be used only if stream is true"
        raise RequestError(text, param="stream_options")


def _renamed(error: RequestError) -> RequestError:
    """Name the field of this endpoint in an error of a chat."""
    param = error.param or ""
    if param.startswith("tools["):
        error.param = param.replace("].function", "]")
    elif (name := _NAMES.get(param)) is not None:
        return RequestError(
            error.message.replace(param, name), code=error.code, param=name
        )
    return error


def _form_of(text: TextSettings | None) -> ResponseFormat | None:
    match text.format if text is not None else None:
        case JsonFormat():
            return ResponseFormat("json_object")
        case SchemaFormat(name=name, schema=schema):
            return ResponseFormat("json_schema", JsonSchema(schema, name))
    return None


def _tool_of(place: str, tool: Object, ignored: list[str]) -> Tool:
    kind = tool.get("type")
    if not isinstance(kind, str):
        raise RequestError("a tool needs a type, which is text", param=f"{place}.type")
    if kind != "function":
        return Tool(kind)
    function = {name: value for name, value in tool.items() if name != "type"}
    return Tool("function", converted(place, function, Function, ignored))


def _choice_of(choice: str | Object | None) -> ToolChoice | None:
    if not isinstance(choice, dict):
        return choice  # type: ignore[return-value]
    match choice.get("type"):
        case "function":
            return NamedTool(converted("tool_choice", choice, FunctionName))
        case "allowed_tools":
            allowed = converted("tool_choice", choice, _AllowedTools)
            tools = [
                AllowedTool(tool.type, FunctionName(tool.name))
                for tool in allowed.tools
                if tool.type == "function"
            ]
            return AllowedTools(AllowedList(allowed.mode, tools))
    raise unsupported("tool_choice")


# --- the turns ----------------------------------------------------------------------------------


def _turns_of(body: ResponseBody, ignored: list[str]) -> list[Object]:
    """Return the items of the input, in their order, as turns in the form that templates take."""
    turns: list[Object] = []
    if body.instructions:
        turns.append({"role": "system", "content": body.instructions})
    if not body.input and (isinstance(body.input, str) or not turns):
        raise RequestError("input must not be empty", param="input")
    if isinstance(body.input, str):
        return [*turns, {"role": "user", "content": body.input}]
    num_history = num_answered([_role_of(item) for item in body.input])
    for index, item in enumerate(body.input):
        place = f"input[{index}]"
        kind = _kind_of(place, item)
        turn_item = converted(place, item, kind, ignored)
        _add(turns, place, turn_item, is_history=index < num_history)
    return turns


def _role_of(item: Object) -> str:
    """Return the role of the turn that an item becomes or is a part of."""
    role = item.get("role", "assistant")
    return role if isinstance(role, str) else ""


def _kind_of(place: str, item: Object) -> type[Item]:
    kind = item.get("type")
    if not isinstance(kind, str | None):
        raise RequestError("the type of an item must be text", param=f"{place}.type")
    if kind in _ITEMS:
        return _ITEMS[kind]
    if kind is not None and kind.endswith("_call_output"):
        return CallOutputItem
    if kind is not None and (kind.endswith("_call") or kind in _UNSHOWN_ITEMS):
        return OtherCallItem
    text = f"items of type {clip(str(kind))!r} are not supported"
    if kind == "item_reference":
        text += ": no response is stored, so send the item itself"
    raise RequestError(text, code="unsupported", param=f"{place}.type")


def _add(turns: list[Object], place: str, item: Item, *, is_history: bool) -> None:
    last = turns[-1] if turns else {}
    is_answer = last.get("role") == "assistant"
    match item:
        case MessageItem(role=role, content=content):
            # Templates know no developers, and many only one turn of the system.
            role = "system" if role == "developer" else role
            text = text_of(f"{place}.content", content, is_history)
            turn = plain_turn(place, Turn(role, text))
            if role == "system" == last.get("role"):
                last["content"] = f"{last['content']}\n\n{turn['content']}"
            elif role == "assistant" and is_answer and _is_only_reasoning(last):
                last["content"] = turn["content"]
            else:
                turns.append(turn)
        case ReasoningItem(summary=summary, content=parts):
            # What another server has encrypted cannot be shown.
            text = "\n".join(part.text or "" for part in parts or summary)
            if text:
                turns.append(plain_turn(place, Turn("assistant", reasoning=text)))
        case CallItem(call_id=call_id, name=name, arguments=arguments):
            _add_call(turns, TurnCall(CalledFunction(name, arguments), id=call_id))
        case OtherCallItem(type=kind, call_id=call_id) if call_id is not None:
            name = item.name or str(kind).removesuffix("_call")
            details = item.action or item.operation or {"input": item.input or ""}
            _add_call(turns, TurnCall(CalledFunction(name, details), id=call_id))
        case OtherCallItem(type=kind):
            turns.append(plain_turn(place, Turn("assistant", placeholder(str(kind)))))
        case CallOutputItem(call_id=call_id, output=output):
            if isinstance(output, dict):
                text = placeholder(str(output.get("type", item.type)))
            else:
                text = text_of(f"{place}.output", output, is_history=True)
            turns.append({"role": "tool", "content": text, "tool_call_id": call_id})


def _add_call(turns: list[Object], call: TurnCall) -> None:
    """Add a call to the last turn of the assistant, or to a new one."""
    if not turns or turns[-1]["role"] != "assistant":
        turns.append({"role": "assistant", "content": ""})
    calls = turns[-1].setdefault("tool_calls", [])
    assert isinstance(calls, list)
    calls.append(plain_call(call))


def _is_only_reasoning(turn: Object) -> bool:
    return not turn["content"] and "tool_calls" not in turn


def _settings(body: ResponseBody, parsed: ParsedRequest, tools: list[Tool]) -> Object:
    """Return the fields of a response object that repeat its request."""
    text = body.text or TextSettings()
    reasoning = body.reasoning or ReasoningSettings()
    choice = body.tool_choice or "auto"
    return {
        "background": False,
        "frequency_penalty": parsed.params.frequency_penalty,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": parsed.params.presence_penalty,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": parsed.params.temperature,
        "text": {"format": text.format or PlainFormat(), "verbosity": text.verbosity},
        "tool_choice": choice,
        "tools": [
            {"type": "function", **msgspec.structs.asdict(tool.function)}
            for tool in tools
            if tool.function is not None
        ],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": parsed.params.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
