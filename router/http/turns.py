"""What all bodies share: errors that name the wrong field, and the turns and tools of chats."""

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from baton.protocol.errors import RequestError
from baton.runtime.fields import did_you_mean
from baton.runtime.log import clip

# A larger body is not decoded a second time to look for null fields or for a mistake.
_MAX_SECOND_BYTES = 2 * 1024 * 1024
_PLACE = re.compile(r"(?P<text>.*?)(?: - at `(?:key in )?\$\.?(?P<path>.*)`)?", re.DOTALL)
_NAMED = re.compile(r"field `(.*?)`", re.DOTALL)

# What the engine calls every field that asks for a form.
FORM_PARAM = "structured_outputs"

S = TypeVar("S", bound=msgspec.Struct)
_Fields = dict[str, msgspec.Raw]


def decoded(decoder: msgspec.json.Decoder[S], data: bytes) -> S:
    """Return the body. Raises `RequestError`. Any field may be null, even an unknown one."""
    try:
        try:
            return decoder.decode(data)
        except msgspec.ValidationError as error:
            if "unknown field" not in str(error):
                raise
            return decoder.decode(_without_nulls(data))
    except msgspec.ValidationError as error:
        raise invalid(str(error), decoder.type) from None
    except RecursionError:
        text = "the body is nested too deeply"
        raise RequestError(text, code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _malformed(str(error), data) from None


class blaming:  # noqa: N801 - a function to its callers; a generator would take five times as long
    """Let errors name the field that a client sent, by what the field was turned into."""

    __slots__ = ("_sent",)

    def __init__(self, sent: Mapping[str, str]) -> None:
        self._sent = sent

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RequestError):
            error.param = self._sent.get(error.param or "", error.param)


def _without_nulls(data: bytes) -> bytes:
    """Return a body without null fields, at its top, in its options and in each message.

    Clients send back messages of responses, with nulls in fields that requests do not have.
    """
    if len(data) > _MAX_SECOND_BYTES or b"null" not in data:
        return data
    try:
        fewer: dict[str, object] = {**_given(msgspec.json.decode(data, type=_Fields))}
        if isinstance(turns := fewer.get("messages"), msgspec.Raw):
            found = msgspec.json.decode(turns, type=list[_Fields])
            fewer["messages"] = [_given(turn) for turn in found]
        if isinstance(options := fewer.get("stream_options"), msgspec.Raw):
            fewer["stream_options"] = _given(msgspec.json.decode(options, type=_Fields))
    except msgspec.DecodeError:
        return data
    return msgspec.json.encode(fewer)


def _given(fields: _Fields) -> _Fields:
    return {name: value for name, value in fields.items() if bytes(value) != b"null"}


def _malformed(error: str, data: bytes) -> RequestError:
    """Return the error for a body that is no JSON, with the field if others read it as JSON."""
    # Some encoders write NaN, Infinity and halves of characters, which are not JSON.
    lenient = None
    with contextlib.suppress(ValueError, RecursionError):
        lenient = json.loads(data) if len(data) <= _MAX_SECOND_BYTES else None
    for name, value in lenient.items() if isinstance(lenient, dict) else ():
        try:
            json.dumps({name: value}, allow_nan=False, ensure_ascii=False).encode()
        except ValueError as mistake:
            what = "is not Unicode text: a character has only one of its two surrogates"
            if not isinstance(mistake, UnicodeEncodeError):
                what = "must be finite: NaN and Infinity are not JSON"
            shown = clip(name.encode("ascii", "backslashreplace").decode())
            return RequestError(f"{shown} {what}", param=shown)
    return RequestError(f"the body is not valid JSON: {clip(error)}", code="invalid_json")


def invalid(text: str, kind: type[msgspec.Struct], place: str = "") -> RequestError:
    """Return what msgspec says of a value of the type `kind`, which is at `place` of a body."""
    found = _PLACE.fullmatch(text)
    assert found is not None, "the pattern matches every text"
    what, path = clip(found["text"].replace("`", "")), clip(found["path"] or "")
    path = ".".join(filter(None, (place, path)))
    if named := _NAMED.search(text):
        name = clip(named[1])
        hint = (
            did_you_mean(name, kind.__struct_fields__)
            if "unknown" in what and path == place
            else ""
        )
        return RequestError(what + hint, param=f"{path}.{name}" if path else name)
    if not path:
        return RequestError(f"the body is wrong: {what}")
    # The message names the place inside a list; `param` names it only for turns, items and tools.
    param = path if path.startswith(("messages", "tools", "input")) else path.partition("[")[0]
    return RequestError(f"{path}: {what}", param=param)


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
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_EMPTY = (b"null", b"[]", b"{}", b"")


def unsupported(name: str) -> RequestError:
    return RequestError(f"{name} is not supported", code="unsupported", param=name)


def plain_turn(place: str, turn: Turn) -> dict[str, object]:
    """Return a turn in the form that templates take, with text as its content.

    `place` names the turn in errors.

    Raises `RequestError`.
    """
    refused = ["function_call"]
    if turn.role != "assistant":
        refused += _ONLY_IN_ANSWERS
    if turn.role != "tool":
        refused.append("tool_call_id")
    for name in refused:
        if _is_given(getattr(turn, name)):
            raise unsupported(f"{place}.{name}")
    plain: dict[str, object] = {
        "role": turn.role,
        "content": text_of(f"{place}.content", turn.content),
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
    return "\n".join(texts)


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
