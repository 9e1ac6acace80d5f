"""The body of POST /v1/responses, translated into the chat that answers it.

No response is stored, so a body that refers to an earlier one, or asks to keep its own, is refused.
"""

from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from baton.protocol.errors import RequestError
from baton.router.http.api.schema import (
    AnyBody,
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
    ContentPart,
    Function,
    FunctionName,
    NamedTool,
    Tool,
    Turn,
    TurnCall,
    plain_call,
    plain_turn,
    text_of,
    unsupported,
)
from baton.router.http.errors import decoded, invalid
from baton.runtime.log import clip

Object = dict[str, object]

_LOGPROBS = "message.output_text.logprobs"
# Reasoning comes as text, and goes back so, which makes it needless to encrypt it.
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")
# The names that the fields of a chat have here.
_NAMES = {"logprobs": "top_logprobs", "response_format": "text.format"}


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
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    # Padding against traffic analysis; baton never sends it.
    include_obfuscation: bool | None = None


class ResponseBody(AnyBody, kw_only=True):
    """The body of POST /v1/responses."""

    input: str | Annotated[list[Object], Meta(max_length=MAX_TURNS)]
    instructions: str | None = None
    max_output_tokens: Int | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    tools: Annotated[list[Object], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Object | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Int | None = None  # of hosted tools, which no response calls
    include: list[str] | None = None
    top_logprobs: Int | None = None
    chat_template_kwargs: Object | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: str | None = None
    # These are refused, because they need stored responses.
    background: bool | None = None
    previous_response_id: Anything = msgspec.UNSET
    conversation: Anything = msgspec.UNSET
    prompt: Anything = msgspec.UNSET


class _Item(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    # These change nothing about a response.
    type: object = None
    id: object = None
    status: object = None
    phase: object = None
    namespace: object = None
    caller: object = None
    created_by: object = None


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
    output: str | list[ContentPart]
    name: str | None = None


Item = MessageItem | ReasoningItem | CallItem | CallOutputItem
_ITEMS: dict[object, type[Item]] = {
    None: MessageItem,
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
}
S = TypeVar("S", bound=msgspec.Struct)
_decoder = msgspec.json.Decoder(ResponseBody)


def parse_response(data: bytes, defaults: Mapping[str, object]) -> ParsedRequest:
    """Return the checked body as what a chat asks for. Raises `RequestError`.

    `defaults` are the model's sampling parameters, for fields that the body leaves out.
    """
    body = decoded(_decoder, data)
    _check(body)
    tools = [_function_of(f"tools[{index}]", tool) for index, tool in enumerate(body.tools or ())]
    chat = ChatBody(
        **{name: getattr(body, name) for name in AnyBody.__struct_fields__},
        messages=[],
        max_completion_tokens=body.max_output_tokens,
        response_format=_form_of(body.text),
        logprobs=_LOGPROBS in (body.include or ()),
        top_logprobs=body.top_logprobs,
        tools=[Tool("function", tool) for tool in tools],
        tool_choice=_choice_of(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
    )
    try:
        parsed = parsed_chat(chat, _turns_of(body), defaults, limit_name="max_output_tokens")
    except RequestError as error:
        raise _renamed(error) from None
    return msgspec.structs.replace(
        parsed,
        endpoint="responses",
        form_param=_NAMES.get(parsed.form_param, parsed.form_param),
        settings=msgspec.json.encode(_settings(body, parsed, tools)),
    )


def _check(body: ResponseBody) -> None:
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
        if included not in _INCLUDED:
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
        return RequestError(error.message.replace(param, name), code=error.code, param=name)
    return error


def _form_of(text: TextSettings | None) -> ResponseFormat | None:
    match text.format if text is not None else None:
        case JsonFormat():
            return ResponseFormat("json_object")
        case SchemaFormat(name=name, schema=schema):
            return ResponseFormat("json_schema", JsonSchema(schema, name))
    return None


def _function_of(place: str, tool: Object) -> Function:
    if (kind := tool.get("type")) != "function":
        text = f"tools of type {clip(str(kind))!r} are not supported; only functions are"
        raise RequestError(text, code="unsupported", param=f"{place}.type")
    return _converted(place, {name: tool[name] for name in tool if name != "type"}, Function)


def _choice_of(
    choice: str | Object | None,
) -> Literal["none", "auto", "required"] | NamedTool | None:
    if not isinstance(choice, dict):
        return choice  # type: ignore[return-value]
    if choice.get("type") != "function":
        raise unsupported("tool_choice")
    return NamedTool("function", _converted("tool_choice", choice, FunctionName))


def _converted(place: str, value: Object, kind: type[S]) -> S:
    try:
        return msgspec.convert({k: v for k, v in value.items() if v is not None}, kind)
    except msgspec.ValidationError as error:
        raise invalid(str(error), kind, place) from None


# --- the turns ----------------------------------------------------------------------------------


def _turns_of(body: ResponseBody) -> list[Object]:
    """Return the items of the input, in their order, as turns in the form that templates take."""
    turns: list[Object] = []
    if body.instructions:
        turns.append({"role": "system", "content": body.instructions})
    if not body.input:
        raise RequestError("input must not be empty", param="input")
    if isinstance(body.input, str):
        return [*turns, {"role": "user", "content": body.input}]
    for index, item in enumerate(body.input):
        place, kind = f"input[{index}]", item.get("type")
        if not isinstance(kind, str | None) or kind not in _ITEMS:
            text = f"items of type {clip(str(kind))!r} are not supported"
            if kind == "item_reference":
                text += ": no response is stored, so send the item itself"
            raise RequestError(text, code="unsupported", param=f"{place}.type")
        _add(turns, place, _converted(place, item, _ITEMS[kind]))
    return turns


def _add(turns: list[Object], place: str, item: Item) -> None:
    last = turns[-1] if turns else {}
    is_answer = last.get("role") == "assistant"
    match item:
        case MessageItem(role=role, content=content):
            # Templates know no developers, and many only one turn of the system.
            role = "system" if role == "developer" else role
            turn = plain_turn(place, Turn(role, text_of(f"{place}.content", content)))
            if role == "system" == last.get("role"):
                last["content"] = f"{last['content']}\n\n{turn['content']}"
            elif role == "assistant" and is_answer and _is_only_reasoning(last):
                last["content"] = turn["content"]
            else:
                turns.append(turn)
        case ReasoningItem(summary=summary, content=parts, encrypted_content=encrypted):
            text = "\n".join(part.text or "" for part in parts or summary)
            if encrypted and not text:
                raise unsupported(f"{place}.encrypted_content")
            turns.append(plain_turn(place, Turn("assistant", reasoning=text or None)))
        case CallItem(call_id=call_id, name=name, arguments=arguments):
            call = plain_call(place, TurnCall(CalledFunction(name, arguments), id=call_id))
            if not is_answer:
                turns.append(last := plain_turn(place, Turn("assistant")))
            calls = last.setdefault("tool_calls", [])
            assert isinstance(calls, list)
            calls.append(call)
        case CallOutputItem(call_id=call_id, output=output):
            text = text_of(f"{place}.output", output)
            turns.append({"role": "tool", "content": text, "tool_call_id": call_id})


def _is_only_reasoning(turn: Object) -> bool:
    return not turn["content"] and "tool_calls" not in turn


def _settings(body: ResponseBody, parsed: ParsedRequest, tools: list[Function]) -> Object:
    """Return the fields of a response object that repeat its request."""
    text, reasoning = body.text or TextSettings(), body.reasoning or ReasoningSettings()
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
            {"type": "function", **{name: getattr(tool, name) for name in tool.__struct_fields__}}
            for tool in tools
        ],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": parsed.params.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
