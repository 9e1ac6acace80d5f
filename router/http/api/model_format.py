"""How the served model writes tool calls and reasoning, and what that means for a request."""

from itertools import takewhile

import msgspec

from baton.protocol.config import RouterConfig
from baton.protocol.errors import RequestError
from baton.protocol.sampling import StructuredOutputsParams
from baton.router.http.api.schema import ParsedRequest
from baton.router.http.api.turns import ToolUse
from baton.router.outputs import ToolCall, merged_calls
from baton.router.text.call_grammar import CallableTool, CallRules, form_of_calls
from baton.router.text.chat_template import ChatTemplate
from baton.router.text.formats import (
    CallFormat,
    call_format,
    reasoning_format,
    shown_call_formats,
    shown_reasoning_format,
)
from baton.router.text.response_parser import Parsing, ResponseParser
from baton.runtime.log import clip, logger

log = logger("router")

_PROBE_NAME = "get_weather"
_PROBE_ARGUMENTS: dict[str, object] = {"city": "Paris", "days": 2}
_PROBE_SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
}
# A grammar makes any model write this one.
_WITHOUT_FORMAT = "hermes"


class ModelFormat(msgspec.Struct, frozen=True):
    """The names of the model's formats in `formats.py`; empty where it has none."""

    tools: str = ""
    reasoning: str = ""

    @classmethod
    def of(cls, config: RouterConfig, template: ChatTemplate | None) -> "ModelFormat":
        """Return the formats that the settings name, or those of the template."""
        tools = ""
        reasoning = ""
        if config.tool_call_parser == "auto":
            tools = "" if template is None else _shown_format(template)
        elif config.tool_call_parser != "none":
            tools = call_format(config.tool_call_parser).name
        if config.reasoning_parser == "auto":
            source = "" if template is None else template.source + template.tools_source
            shown = shown_reasoning_format(source)
            reasoning = "" if shown is None else shown.name
        elif config.reasoning_parser != "none":
            reasoning = reasoning_format(config.reasoning_parser).name
        return cls(tools, reasoning)

    def apply(self, parsed: ParsedRequest) -> ParsedRequest:
        """Return a request in this format, which says what to find in its response.

        Raises `RequestError` for tools that the model cannot call.
        """
        if not parsed.is_chat or (parsed.tools is None and not self.reasoning):
            return parsed
        parsing = Parsing(
            reasoning=self.reasoning, include_reasoning=parsed.include_reasoning
        )
        sampling = {**parsed.sampling}
        if self.reasoning == "openai_gptoss":  # channels are special tokens
            sampling["skip_special_tokens"] = False
        if (tools := parsed.tools) is None:
            return msgspec.structs.replace(parsed, sampling=sampling, parsing=parsing)
        if not self.tools and not tools.is_required:
            text = (
                "the model's chat template shows no tool calls in a format that this server "
                "knows; router.tool_call_parser can name the format"
            )
            raise RequestError(text, code="unsupported", param="tools")
        row = call_format(self.tools or _WITHOUT_FORMAT)
        _check_names(tools, row)
        if row.has_special_tags:
            sampling["skip_special_tokens"] = False
        if (rules := _rules_of(parsed, tools)) is not None:
            sampling["structured_outputs"] = form_of_calls(rules, row)
            parsed = msgspec.structs.replace(parsed, form_param="tools")
        parsed = msgspec.structs.replace(parsed, sampling=sampling)
        _ = parsed.params  # min_tokens and ignore_eos are refused beside a form
        parsing = msgspec.structs.replace(
            parsing,
            tools=row.name,
            tool_names=()
            if row.trigger
            else tuple(tool.name for tool in tools.functions),
            schemas=_schemas_of(tools) if row.body == "parameters" else {},
            parallel_tool_calls=tools.parallel_tool_calls,
        )
        return msgspec.structs.replace(parsed, parsing=parsing)


def _check_names(tools: ToolUse, row: CallFormat) -> None:
    """Raise `RequestError` for a function that no call in this format can name."""
    if row.body != "pythonic":
        return
    for function in tools.functions:
        if not all(part.isidentifier() for part in function.name.split(".")):
            text = (
                f"this model calls functions in Python, where {clip(function.name)!r} is not a "
                "name; use only letters, digits and _"
            )
            raise RequestError(text, param="tools")


def _rules_of(parsed: ParsedRequest, tools: ToolUse) -> CallRules | None:
    """Return which calls a grammar has to allow; None where the response needs none.

    A form that is none of JSON is kept alone, and says itself where there may be calls. Raises
    `RequestError` for a form that cannot be enforced beside calls.
    """
    form: dict[str, object] | None = None
    if "structured_outputs" in parsed.sampling:
        wanted = parsed.params.structured_outputs
        assert wanted is not None, "the field is there"
        form = _schema_of_form(wanted)
        if tools.is_required or (tools.is_strict and form is None):
            text = f"{parsed.form_param} cannot be enforced beside tool calls that must have a form"
            raise RequestError(text, param=parsed.form_param)
    if not (tools.is_required or tools.is_strict or form is not None):
        return None
    callable_tools = tuple(
        CallableTool(function.name, function.parameters, bool(function.strict))
        for function in tools.functions
    )
    return CallRules(callable_tools, tools.is_required, tools.parallel_tool_calls, form)


def _schema_of_form(wanted: StructuredOutputsParams) -> dict[str, object] | None:
    """Return the JSON schema of a form; None of a form that is none of JSON."""
    kind, value = wanted.form
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json":
        return None
    schema = msgspec.json.decode(value) if isinstance(value, str) else value
    return schema if isinstance(schema, dict) else None


def _schemas_of(tools: ToolUse) -> dict[str, dict[str, object]]:
    return {function.name: function.parameters or {} for function in tools.functions}


def _shown_format(template: ChatTemplate) -> str:
    """Return the format of calls that a template shows, if its own calls are read in it."""
    for row in shown_call_formats(template.tools_source):
        if not _is_disproved(row, template):
            return row.name
        log.warning(
            "the chat template has the tags of a format of tool calls, but writes calls in "
            "another way, so the format is not used",
            format=row.name,
        )
    return ""


def _is_disproved(row: CallFormat, template: ChatTemplate) -> bool:
    """Return whether a call that the template renders is read as another one, or not at all.

    Nothing is known of a template that renders no calls of earlier turns.
    """
    tool = {"name": _PROBE_NAME, "description": "", "parameters": _PROBE_SCHEMA}
    call = {"name": _PROBE_NAME, "arguments": _PROBE_ARGUMENTS}
    user: dict[str, object] = {"role": "user", "content": "?"}
    turn: dict[str, object] = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "abcdefghi", "type": "function", "function": call}],
    }
    tools: list[dict[str, object]] = [{"type": "function", "function": tool}]
    try:
        before = template.render([user], tools=tools, add_generation_prompt=False)
        whole = template.render([user, turn], tools=tools, add_generation_prompt=False)
    except RequestError:
        return False
    pairs = zip(before, whole, strict=False)
    shown = whole[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) :]
    if _PROBE_NAME not in shown:
        return False
    start = shown.find(row.trigger or row.before)
    if start < 0:
        return True
    parsing = Parsing(row.name, (_PROBE_NAME,), {_PROBE_NAME: _PROBE_SCHEMA})
    parts = ResponseParser(parsing).push(shown[start:], is_end=True)
    calls = merged_calls([part for part in parts if isinstance(part, ToolCall)])
    return not calls or not _is_the_probe(calls[0])


def _is_the_probe(call: ToolCall) -> bool:
    try:
        arguments = msgspec.json.decode(call.arguments)
    except msgspec.DecodeError:
        return False
    return call.name == _PROBE_NAME and arguments == _PROBE_ARGUMENTS
