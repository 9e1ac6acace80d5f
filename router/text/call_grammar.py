"""The grammar of tool calls: the form of a response that has to call, or whose calls are strict."""

from collections.abc import Mapping

import msgspec

from baton.protocol.sampling import StructuredOutputsParams
from baton.router.text.formats import CallFormat
from baton.router.text.grammars import WHITE_SPACE, without_unique_items

# A schema of only these keywords names all of its properties.
_CLOSED_KEYWORDS = {
    "type",
    "properties",
    "required",
    "title",
    "description",
    "$defs",
    "$schema",
}


class CallableTool(msgspec.Struct, frozen=True):
    """A tool as a grammar sees it."""

    name: str
    parameters: dict[str, object] | None  # a JSON schema of an object
    is_strict: bool


class CallRules(msgspec.Struct, frozen=True):
    """Which calls a response may have. `form` is the schema of a response without any."""

    tools: tuple[CallableTool, ...]
    is_required: bool
    is_parallel: bool
    form: dict[str, object] | None = None


def form_of_calls(rules: CallRules, row: CallFormat) -> StructuredOutputsParams:
    """Return the form of a response in which calls fit the schemas of their tools.

    Unless a call is required, there may be text before it, or no call.
    """
    if (
        not rules.is_required
        and rules.form is None
        and row.trigger
        and row.body == "json"
    ):
        return StructuredOutputsParams(structural_tag=_tags(rules, row))
    opening, closing = row.section if row.body != "harmony" else ("", "")
    if row.is_list:
        opening += "["
        closing = "]" + closing
    more = f" ({_literal(row.between)} call)*" if row.between else " call*"
    calls = [
        _literal(opening) if opening else "",
        "call",
        _literal(closing) if closing else "",
    ]
    if rules.is_parallel:
        calls[1] += more
    other = ""
    if not rules.is_required:
        other = " | form" if rules.form is not None else " | FREE"
    lines = [
        f"start: calls{other}",
        f"calls: {' '.join(calls)}",
        "call: " + " | ".join(f"call_{number}" for number in range(len(rules.tools))),
    ]
    if rules.form is not None:
        lines.append(f"form: %json {_json_schema(rules.form)}")
    elif not rules.is_required:
        lines.append(_free_text(row))
    for number, tool in enumerate(rules.tools):
        lines += _call_lines(number, tool, row)
    return StructuredOutputsParams(grammar="\n".join(lines))


def _free_text(row: CallFormat) -> str:
    """Return the rule of a response without calls: text that does not begin like one."""
    opening = row.trigger or ("[" if row.is_list else row.before)
    first = opening[0]
    # Reasoning may begin with a tag, too.
    not_first = "<" if first == "<" else f"\\{first}<"
    return rf"FREE: /(?s:\s*([^{not_first}\s].*)?)/"


def _call_lines(number: int, tool: CallableTool, row: CallFormat) -> list[str]:
    head = _literal(row.before + tool.name + row.middle)
    call = f"call_{number}: {head} args_{number} {_literal(row.after)}"
    if row.body == "parameters":
        return [call, *_parameter_lines(number, tool, row)]
    if row.body == "pythonic":
        return [call, *_keyword_lines(number, tool)]
    return [call, f"args_{number}: %json {_literal(_schema_of(tool))}"]


def _parameter_lines(number: int, tool: CallableTool, row: CallFormat) -> list[str]:
    """Return the rules of arguments of which each has a tag."""
    before, middle, after = row.parameter_form
    parts = []
    lines = []
    for position, (key, schema, is_required) in enumerate(_properties(tool)):
        name = f"p_{number}_{position}"
        parts.append(name if is_required else f"{name}?")
        opening = before + key + middle
        texts = _texts_of(schema)
        if row.name == "deepseek_v32":
            opening = (
                f'{before}{key}" string="{"true" if texts is not None else "false"}">'
            )
        if texts is None:
            value = f"%json {_json_schema(schema)}"
            lines.append(f"{name}: {_literal(opening)} v_{name} {_literal(after)}")
            lines.append(f"v_{name}: {value}")
        elif texts:
            choices = " | ".join(_literal(opening + text + after) for text in texts)
            lines.append(f"{name}: {choices}")
        else:
            lines.append(f"{name}: {_literal(opening)} v_{name}")
            lines.append(f"v_{name}[suffix={_literal(after)}]: /(?s:.*)/")
    return [f"args_{number}: {' '.join(parts) or _literal('')}", *lines]


def _keyword_lines(number: int, tool: CallableTool) -> list[str]:
    """Return the rules of Python's keyword arguments, in the order of the schema."""
    parts: list[str] = []
    lines: list[str] = []
    for position, (key, schema, is_required) in enumerate(_properties(tool)):
        name = f"p_{number}_{position}"
        comma = _literal(", ") if parts else ""
        parts.append(f"{comma} {name}" if is_required else f"({comma} {name})?")
        lines.append(f"{name}: {_literal(f'{key}=')} v_{name}")
        lines.append(f"v_{name}: %json {_json_schema(schema)}")
    return [f"args_{number}: {' '.join(parts) or _literal('')}", *lines]


def _properties(tool: CallableTool) -> list[tuple[str, dict[str, object], bool]]:
    """Return the name and schema of each argument, the required ones first."""
    parameters = tool.parameters or {}
    properties = parameters.get("properties")
    required = parameters.get("required")
    if not isinstance(properties, dict):
        return []
    names = set(required) if isinstance(required, list) else set()
    definitions = {
        key: parameters[key] for key in ("$defs", "definitions") if key in parameters
    }
    listed = [
        (
            key,
            {**definitions, **schema} if isinstance(schema, dict) else {},
            key in names,
        )
        for key, schema in properties.items()
    ]
    return sorted(listed, key=lambda entry: not entry[2])


def _texts_of(schema: Mapping[str, object]) -> list[str] | None:
    """Return the texts of which an argument is one; [] for any text; None for other values."""
    values = schema.get("enum")
    if (
        isinstance(values, list)
        and values
        and all(isinstance(value, str) for value in values)
    ):
        return values
    return [] if schema.get("type") == "string" else None


def _tags(rules: CallRules, row: CallFormat) -> dict[str, object]:
    """Return the form of free text in which what follows a trigger is a call."""
    opening, closing = row.section
    if row.is_list:
        opening += "["
        closing = "]" + closing
    structures = [
        {
            "begin": opening + row.before + tool.name + row.middle,
            "schema": tool.parameters
            if tool.is_strict and tool.parameters
            else {"type": "object"},
            "end": row.after + closing,
        }
        for tool in rules.tools
    ]
    trigger = opening if row.section[0] else row.call[0]
    return {"structures": structures, "triggers": [trigger]}


def _schema_of(tool: CallableTool) -> dict[str, object]:
    """Return the schema of a call's arguments; only strict functions keep all of it.

    A weak model goes on with arguments of its own invention where a schema does not exclude them.
    """
    parameters = tool.parameters or {"type": "object", "properties": {}}
    rules = {"whitespace_pattern": WHITE_SPACE, "lenient": not tool.is_strict}
    if parameters.keys() <= _CLOSED_KEYWORDS and not tool.is_strict:
        parameters = {**parameters, "additionalProperties": False}
    return {**without_unique_items(parameters), "x-guidance": rules}


def _json_schema(schema: Mapping[str, object]) -> str:
    rules = {"whitespace_pattern": WHITE_SPACE, "lenient": True}
    return _literal({**schema, "x-guidance": rules})


def _literal(value: object) -> str:
    return msgspec.json.encode(value).decode()
