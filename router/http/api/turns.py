"""The turns and tools of chats, which the bodies of all APIs share."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton.protocol.errors import RequestError
from baton.runtime.fields import did_you_mean
from baton.runtime.log import clip

MAX_TURNS = 10_000
MAX_TOOLS = 1024
Anything = msgspec.Raw | msgspec.UnsetType
ToolName = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_.-]{1,128}\Z")]


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(msgspec.Struct):
    name: Annotated[str, Meta(min_length=1)]
    arguments: str | dict[str, object] = ""  # an object, or its JSON; empty text means none


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


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, object] | None = None  # a JSON schema of an object
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function
    cache_control: Anything = msgspec.UNSET


class FunctionName(msgspec.Struct, frozen=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: FunctionName


ToolList = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


class ToolUse(msgspec.Struct, frozen=True):
    """The tools that a response may call, or must."""

    functions: tuple[Function, ...]
    is_required: bool
    parallel_tool_calls: bool

    @property
    def is_strict(self) -> bool:
        return any(function.strict for function in self.functions)


_ONLY_IN_ANSWERS = (
    "annotations", "reasoning", "tool_calls", "audio", "provider_specific_fields",
    "reasoning_details", "thinking_blocks", "citations",
)  # fmt: skip
# Those of OpenAI's API, and those that some model's template has.
ROLES = (
    "system", "developer", "user", "assistant", "tool", "function", "ipython", "environment",
    "observation", "document", "documents", "context",
)  # fmt: skip
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_EMPTY = (b"null", b"[]", b"{}", b"")


def unsupported(name: str) -> RequestError:
    return RequestError(f"{name} is not supported", code="unsupported", param=name)


def plain_turn(place: str, turn: Turn) -> dict[str, object]:
    """Return a turn in the form that templates take, with text or text parts as its content.

    `place` names the turn in errors.

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
        "content": content_of(f"{place}.content", turn.content),
    }
    if turn.name is not None:
        plain["name"] = turn.name
    if turn.tool_call_id is not None:
        plain["tool_call_id"] = turn.tool_call_id
    reasoning = turn.reasoning_content if turn.reasoning is None else turn.reasoning
    if reasoning is not None:
        plain["reasoning_content"] = plain["reasoning"] = reasoning
    if turn.tool_calls:
        plain["tool_calls"] = [
            plain_call(f"{place}.tool_calls[{number}].function", call)
            for number, call in enumerate(turn.tool_calls)
        ]
    return plain


def plain_tools(tools: list[Tool] | None) -> list[dict[str, object]] | None:
    """Return tools in the form that templates take; None if there are none.

    Raises `RequestError` for two tools of one name and for parameters that are no object.
    """
    names: set[str] = set()
    plain: list[dict[str, object]] = []
    for index, tool in enumerate(tools or ()):
        function, place = tool.function, f"tools[{index}].function"
        if function.name in names:
            text = f"there are several tools with the name {function.name}"
            raise RequestError(text, param=f"{place}.name")
        names.add(function.name)
        parameters = function.parameters or {"type": "object", "properties": {}}
        if parameters.get("type", "object") != "object":
            text = "the parameters of a tool must be the JSON schema of an object"
            raise RequestError(text, param=f"{place}.parameters")
        shown = {"name": function.name, "description": function.description or ""}
        plain.append({"type": "function", "function": {**shown, "parameters": parameters}})
    return plain or None


def tool_use_of(
    tools: list[Tool] | None, choice: ToolChoice | None, parallel: bool | None
) -> ToolUse | None:
    """Return which tools a response may call. Raises `RequestError` for a choice without them.

    A tool that is named is called once.
    """
    functions = tuple(tool.function for tool in tools or ())
    is_required = choice == "required"
    if isinstance(choice, NamedTool):
        is_required, parallel, name = True, False, choice.function.name
        functions = tuple(function for function in functions if function.name == name)
        if not functions:
            text = f"tools has no function {clip(name)!r}"
            raise RequestError(text, param="tool_choice")
    if is_required and not functions:
        raise RequestError("tool_choice asks for a call, but there are no tools", param="tools")
    if not functions or choice == "none":
        return None
    return ToolUse(functions, is_required, parallel is not False)


def text_of(place: str, content: str | list[ContentPart] | None) -> str:
    """Return the text of a content. Raises `RequestError` for any other part, at `place`."""
    parts = content_of(place, content)
    return parts if isinstance(parts, str) else "\n".join(part["text"] for part in parts)


def content_of(place: str, content: str | list[ContentPart] | None) -> str | list[dict[str, str]]:
    """Return a content as text, or as text parts if it came in parts.

    Raises `RequestError` for any other part, at `place`.
    """
    if not isinstance(content, list):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in _TEXT_PARTS or text is None:
            raise RequestError(
                f"content of type {clip(part.type)!r} is not supported; only text is",
                code="unsupported",
                param=f"{place}[{index}]",
            )
        texts.append(text)
    return [{"type": "text", "text": text} for text in texts]


def plain_call(place: str, call: TurnCall) -> dict[str, object]:
    """Return a call in the form that templates take. `place` names its function in errors."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}", type=dict[str, object])
        except (msgspec.DecodeError, RecursionError):
            text = "the arguments of a tool call must be the JSON text of an object"
            raise RequestError(text, param=f"{place}.arguments") from None
    function = {"name": call.function.name, "arguments": arguments}
    plain: dict[str, object] = {"type": "function", "function": function}
    return plain if call.id is None else {"id": call.id, **plain}


def _is_given(value: object) -> bool:
    if isinstance(value, msgspec.Raw):
        return bytes(value).strip() not in _EMPTY
    return value is not None and value is not msgspec.UNSET and value != []
