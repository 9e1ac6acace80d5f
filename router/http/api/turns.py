"""The turns and tools of chats, which the bodies of all APIs share."""

import contextlib
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton.protocol.errors import RequestError
from baton.router.http.api.decoding import count
from baton.router.text.formats import MAX_TOOL_NAME, TOOL_NAME_CHARS
from baton.runtime.fields import did_you_mean
from baton.runtime.log import clip

MAX_TURNS = 10_000
MAX_TOOLS = 1024
Anything = msgspec.Raw | msgspec.UnsetType
# Agents name tools after paths and servers, and in their own languages.
ToolName = Annotated[
    str, Meta(pattern=rf"\A[{TOOL_NAME_CHARS}]{{1,{MAX_TOOL_NAME}}}\Z")
]


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(msgspec.Struct):
    name: Annotated[str, Meta(min_length=1)]
    # An object, or its JSON. Empty text means none.
    arguments: str | dict[str, object] | None = None


class TurnCall(msgspec.Struct):
    """A tool call of an earlier response."""

    function: CalledFunction
    type: Literal["function"] = "function"
    id: str | None = None


class Turn(msgspec.Struct, forbid_unknown_fields=True):
    """One turn of a chat."""

    role: Annotated[str, Meta(min_length=1)]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same by its other name
    tool_calls: list[TurnCall] | None = None
    tool_call_id: str | None = None
    function_call: Anything = msgspec.UNSET
    # These change nothing about a response.
    cache_control: Anything = msgspec.UNSET
    id: Anything = msgspec.UNSET
    prefix: Anything = msgspec.UNSET
    # These are parts of responses, which clients send back unchanged.
    refusal: str | None = None
    annotations: Anything = msgspec.UNSET
    audio: Anything = msgspec.UNSET
    provider_specific_fields: Anything = msgspec.UNSET
    reasoning_details: Anything = msgspec.UNSET
    thinking_blocks: Anything = msgspec.UNSET
    citations: Anything = msgspec.UNSET


class Function(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, object] | None = None  # a JSON schema of an object
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function, or a tool of another type, which some servers run themselves."""

    type: str
    function: Function | None = None
    strict: bool | None = None  # some clients write it here
    cache_control: Anything = msgspec.UNSET


class FunctionName(msgspec.Struct, frozen=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    function: FunctionName


class AllowedTool(msgspec.Struct, frozen=True):
    type: str
    function: FunctionName | None = None


class AllowedList(msgspec.Struct, frozen=True):
    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class AllowedTools(msgspec.Struct, frozen=True, tag_field="type", tag="allowed_tools"):
    """The tools of a chat that this response may call."""

    allowed_tools: AllowedList


ToolList = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


class ToolUse(msgspec.Struct, frozen=True):
    """The tools that a response may call, or must."""

    functions: tuple[Function, ...]
    is_required: bool
    parallel_tool_calls: bool

    @property
    def is_strict(self) -> bool:
        return any(function.strict for function in self.functions)


# The model would miss them in other turns than the assistant's.
_ONLY_IN_ANSWERS = ("reasoning", "reasoning_content", "tool_calls", "audio")
# Those of OpenAI's API, and those that some model's template has.
ROLES = (
    "system",
    "developer",
    "user",
    "assistant",
    "tool",
    "function",
    "ipython",
    "environment",
    "observation",
    "document",
    "documents",
    "context",
)
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_EMPTY = (b"null", b"[]", b"{}", b"")
# What stands for a part of the history that cannot be shown; for other types, their own names.
_PLACEHOLDERS = {
    "image_url": "image",
    "input_image": "image",
    "video_url": "video",
    "input_audio": "audio",
    "input_file": "file",
}


def unsupported(name: str) -> RequestError:
    return RequestError(f"{name} is not supported", code="unsupported", param=name)


def placeholder(kind: str) -> str:
    """Return the text that stands for a part of the history that the model cannot see."""
    return f"[{clip(_PLACEHOLDERS.get(kind, kind))}]"


def num_answered(roles: Sequence[str]) -> int:
    """Return how many turns are history: those up to the last one of the assistant."""
    for index in range(len(roles) - 1, -1, -1):
        if roles[index] == "assistant":
            return index + 1
    return 0


def plain_turns(turns: Sequence[Turn]) -> list[dict[str, object]]:
    """Return turns in the form that templates take. Raises `RequestError`."""
    num_history = num_answered([turn.role for turn in turns])
    return [
        plain_turn(f"messages[{index}]", turn, is_history=index < num_history)
        for index, turn in enumerate(turns)
    ]


def plain_turn(
    place: str, turn: Turn, *, is_history: bool = False
) -> dict[str, object]:
    """Return a turn in the form that templates take, with text or text parts as its content.

    `place` names the turn in errors. Images and the like become placeholders in results of tools
    and in what `is_history`, and are refused elsewhere.

    Raises `RequestError`.
    """
    refused = ["function_call"]
    if turn.role != "assistant":
        refused += _ONLY_IN_ANSWERS
    if turn.role != "tool":
        refused.append("tool_call_id")
    if turn.role not in ROLES:
        text = f"there is no role {clip(turn.role)!r}{did_you_mean(turn.role, ROLES)}"
        raise RequestError(text, param=f"{place}.role")
    for name in refused:
        if _is_given(getattr(turn, name)):
            raise unsupported(f"{place}.{name}")
    plain: dict[str, object] = {
        "role": turn.role,
        "content": content_of(
            f"{place}.content", turn.content, is_history or turn.role == "tool"
        ),
    }
    if turn.name is not None:
        plain["name"] = turn.name
    if turn.tool_call_id is not None:
        plain["tool_call_id"] = turn.tool_call_id
    reasoning = turn.reasoning_content if turn.reasoning is None else turn.reasoning
    if reasoning is not None:
        plain["reasoning_content"] = plain["reasoning"] = reasoning
    if turn.tool_calls:
        plain["tool_calls"] = [plain_call(call) for call in turn.tool_calls]
    return plain


def functions_of(
    tools: Sequence[Tool], choice: ToolChoice | None, ignored: list[str]
) -> list[Function]:
    """Return the functions among tools, with the types of the others appended to `ignored`.

    Raises `RequestError` for two functions of one name, for parameters that are no object, and
    for tools without any function among them that the model could call instead.
    """
    functions: dict[str, Function] = {}
    has_function = any(tool.type == "function" for tool in tools)
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        if tool.type != "function":
            if not has_function and choice != "none":
                text = f"tools of type {clip(tool.type)!r} are not supported; only functions are"
                raise RequestError(text, code="unsupported", param=f"{place}.type")
            count(ignored, f"tools.{tool.type}")
            continue
        if tool.function is None:
            text = "a tool of type function needs the field function"
            raise RequestError(text, param=f"{place}.function")
        function = _checked_function(f"{place}.function", tool.function, tool.strict)
        if function.name in functions:
            text = f"there are several tools with the name {function.name}"
            raise RequestError(text, param=f"{place}.function.name")
        functions[function.name] = function
    return list(functions.values())


def _checked_function(place: str, function: Function, strict: bool | None) -> Function:
    if function.strict is None and strict is not None:
        function = msgspec.structs.replace(function, strict=strict)
    parameters = function.parameters or {}
    kind = parameters.get("type", "object")
    if kind == "object":
        return function
    if not isinstance(kind, list) or "object" not in kind:
        text = "the parameters of a tool must be the JSON schema of an object"
        raise RequestError(text, param=f"{place}.parameters")
    # Arguments are an object, whatever else the schema allows.
    return msgspec.structs.replace(
        function, parameters={**parameters, "type": "object"}
    )


def plain_tools(functions: Sequence[Function]) -> list[dict[str, object]] | None:
    """Return functions in the form that templates take; None if there are none."""
    plain: list[dict[str, object]] = []
    for function in functions:
        parameters = function.parameters or {"type": "object", "properties": {}}
        shown = {"name": function.name, "description": function.description or ""}
        plain.append(
            {"type": "function", "function": {**shown, "parameters": parameters}}
        )
    return plain or None


def allowed_of(functions: list[Function], choice: ToolChoice | None) -> list[Function]:
    """Return the functions that a choice leaves.

    Raises `RequestError` for a choice of one that is not there.
    """
    if not isinstance(choice, AllowedTools):
        return functions
    known = {function.name: function for function in functions}
    names = [
        tool.function.name
        for tool in choice.allowed_tools.tools
        if tool.function is not None
    ]
    for name in names:
        if name not in known:
            raise RequestError(
                f"tools has no function {clip(name)!r}", param="tool_choice"
            )
    return [function for function in functions if function.name in names]


def tool_use_of(
    functions: Sequence[Function], choice: ToolChoice | None, parallel: bool | None
) -> ToolUse | None:
    """Return which functions a response may call. Raises `RequestError` for a choice without them.

    A function that is named is called once.
    """
    is_required = choice == "required"
    if isinstance(choice, AllowedTools):
        is_required = choice.allowed_tools.mode == "required"
    if isinstance(choice, NamedTool):
        is_required = True
        parallel = False
        name = choice.function.name
        functions = [function for function in functions if function.name == name]
        if not functions:
            text = f"tools has no function {clip(name)!r}"
            raise RequestError(text, param="tool_choice")
    if is_required and not functions:
        raise RequestError(
            "tool_choice asks for a call, but there are no tools", param="tools"
        )
    if not functions or choice == "none":
        return None
    return ToolUse(tuple(functions), is_required, parallel is not False)


def text_of(
    place: str, content: str | list[ContentPart] | None, is_history: bool = False
) -> str:
    """Return the text of a content. Raises `RequestError` as `content_of`."""
    parts = content_of(place, content, is_history)
    return (
        parts if isinstance(parts, str) else "\n".join(part["text"] for part in parts)
    )


def content_of(
    place: str, content: str | list[ContentPart] | None, is_history: bool = False
) -> str | list[dict[str, str]]:
    """Return a content as text, or as text parts if it came in parts.

    Parts without text become placeholders in what `is_history`. Elsewhere they raise
    `RequestError`, at `place`.
    """
    if not isinstance(content, list):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in _TEXT_PARTS:
            if not is_history:
                raise RequestError(
                    f"content of type {clip(part.type)!r} is not supported; only text is",
                    code="unsupported",
                    param=f"{place}[{index}]",
                )
            text = placeholder(part.type)
        if text is None:
            missing = f"a part of type {part.type} needs text"
            raise RequestError(missing, param=f"{place}[{index}]")
        texts.append(text)
    return [{"type": "text", "text": text} for text in texts]


def plain_call(call: TurnCall) -> dict[str, object]:
    """Return a call in the form that templates take.

    Its arguments stay text if they are not the JSON of an object: a model may have written them
    so, and a conversation goes on.
    """
    arguments = call.function.arguments or {}
    if isinstance(arguments, str):
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            arguments = msgspec.json.decode(arguments, type=dict[str, object])
    function = {"name": call.function.name, "arguments": arguments}
    plain: dict[str, object] = {"type": "function", "function": function}
    return plain if call.id is None else {"id": call.id, **plain}


def _is_given(value: object) -> bool:
    if isinstance(value, msgspec.Raw):
        return bytes(value).strip() not in _EMPTY
    return value is not None and value is not msgspec.UNSET and value != []
