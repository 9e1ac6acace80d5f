"""The values in calls: JSON as it grows, Python literals, and text whose type a schema says."""

import ast
import json
import re
from collections.abc import Mapping

from baton.router.outputs import ToolCall
from baton.router.text.formats import CallFormat

_CONTROLS = re.compile(r"[\x00-\x1f]")
_OUTSIDE_STRING = re.compile(r'["{}\[\]]')
_INSIDE_STRING = re.compile(r'["\\]')
_PYTHON_NAMES = {"true": True, "false": False, "null": None}


class JsonScanner:
    """Finds the end of a JSON value in text that grows."""

    __slots__ = ("_depth", "is_inside_string", "position")

    def __init__(self, position: int, depth: int = 0) -> None:
        """Begin at a value, or inside `depth` objects whose end is looked for."""
        self.position = position
        self._depth = depth
        self.is_inside_string = False

    def end_of(self, text: str) -> int | None:
        """Return the position after the value; None until it is whole."""
        while self.position < len(text):
            if self.is_inside_string:
                found = _INSIDE_STRING.search(text, self.position)
                if found is None:
                    self.position = len(text)
                elif found[0] == '"':
                    self.is_inside_string = False
                    self.position = found.end()
                elif found.end() < len(text):
                    self.position = found.end() + 1
                else:
                    self.position = found.start()  # what is escaped has not come
                    return None
                continue
            found = _OUTSIDE_STRING.search(text, self.position)
            if found is None:
                self.position = len(text)
                return None
            self.position = found.end()
            if found[0] == '"':
                self.is_inside_string = True
            elif found[0] in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    return self.position
        return None


def with_escapes(text: str, *, is_inside: bool) -> str:
    """Return JSON with escapes for the control characters that some models write in strings."""
    if _CONTROLS.search(text) is None:
        return text
    pieces = []
    is_escaped = False
    for char in text:
        if is_inside and char < " ":
            pieces.append(json.dumps(char)[1:-1])
            is_escaped = False
            continue
        if is_inside and is_escaped:
            is_escaped = False
        elif is_inside and char == "\\":
            is_escaped = True
        elif char == '"':
            is_inside = not is_inside
        pieces.append(char)
    return "".join(pieces)


def json_or_none(text: str) -> object:
    try:
        value: object = json.loads(text, strict=False)
        return value
    except (ValueError, RecursionError):
        return None


def call_of(value: object, keys: tuple[str, tuple[str, ...]]) -> ToolCall | None:
    """Return the call that a JSON object describes; None if it describes none."""
    name_key, arguments_keys = keys
    if not isinstance(value, dict):
        return None
    function = value.get("function")
    if isinstance(function, dict):
        value = function
    name = value.get(name_key) or value.get("name")
    given: object = next(
        (value[key] for key in arguments_keys if value.get(key) is not None), {}
    )
    if isinstance(given, str):
        given = json_or_none(given or "{}")
    if not isinstance(name, str) or not name or not isinstance(given, dict):
        return None
    arguments = _json_text(given)
    return None if arguments is None else ToolCall(name, arguments)


def _json_text(value: object) -> str | None:
    """Return a value as JSON; None for NaN, half a character, or what is too deep."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
        return text
    except (ValueError, TypeError, RecursionError):
        return None


def typed(
    value: str, found: re.Match[str], row: CallFormat, schema: Mapping[str, object]
) -> str:
    """Return the value of an argument as JSON, by the schema of its tool."""
    if row.has_line_breaks:
        value = value.removeprefix("\n").removesuffix("\n")
    is_text = found.groupdict().get("is_text")
    if is_text == "true" or (is_text is None and _takes_text(schema, found["key"])):
        return json.dumps(value, ensure_ascii=False)
    stripped = value.strip()
    parsed = {"True": True, "False": False, "None": None}.get(
        stripped, json_or_none(stripped)
    )
    text = _json_text(parsed)
    if text is None or (parsed is None and stripped not in ("null", "None")):
        return json.dumps(value, ensure_ascii=False)
    return text


def _takes_text(schema: Mapping[str, object], key: str) -> bool:
    """Return whether a schema says that an argument is text, and nothing else."""
    properties = schema.get("properties")
    wanted = properties.get(key) if isinstance(properties, dict) else None
    if not isinstance(wanted, dict):
        return False
    kinds = wanted.get("type")
    if kinds is None and isinstance(values := wanted.get("enum"), list):
        return all(isinstance(value, str) for value in values)
    return kinds in ("string", ["string"])


def end_of_python(text: str, start: int) -> int | None:
    """Return the position after the list that begins there; None until it is whole."""
    depth = 0
    quote = ""
    position = start
    while position < len(text):
        char = text[position]
        if quote:
            if char == "\\":
                position += 1
            elif char == quote:
                quote = ""
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth == 0:
                return position + 1
        position += 1
    return None


def python_calls_in(text: str) -> list[ToolCall]:
    """Return the calls of a Python list. Empty if there is anything else."""
    try:
        expression = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    if not isinstance(expression, ast.List):
        return []
    calls = []
    for element in expression.elts:
        call = _python_call(element)
        if call is None:
            return []
        calls.append(call)
    return calls


def _python_call(node: ast.expr) -> ToolCall | None:
    if not isinstance(node, ast.Call) or node.args:
        return None
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            return None
        try:
            arguments[keyword.arg] = _python_value(keyword.value)
        except ValueError:
            return None
    text = _json_text(arguments)
    return None if text is None else ToolCall(ast.unparse(node.func), text)


def _python_value(node: ast.expr) -> object:
    """Return a literal, in which JSON's names of constants are known, too. Raises `ValueError`."""
    if isinstance(node, ast.Name) and node.id in _PYTHON_NAMES:
        return _PYTHON_NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_python_value(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {
            _python_value(key): _python_value(value)
            for key, value in pairs
            if key is not None
        }
    value: object = ast.literal_eval(node)
    return value
