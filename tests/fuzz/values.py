"""Strategies of JSON texts: bodies from the router's own description, and forms that cost much.

They are texts, because some are what no encoder writes.
"""

import json
from collections.abc import Mapping

from hypothesis import strategies as st

Strategy = st.SearchStrategy[str]
Schema = Mapping[str, object]
DEEPEST = 5
MAX_LIST_CHARS = 1 << 20
TEXTS = st.sampled_from(
    (
        "x",
        "the end",
        "",
        "</think>",
        "<tool_call>",
        "\u0000",
        "é\u2028",
        "{{ x }}",
        "a" * 5_000,
    )
)
NUMBERS = st.sampled_from(
    (
        "0",
        "1",
        "2",
        "5",
        "16",
        "-1",
        "1.5",
        "-0.0",
        "2147483648",
        "9223372036854775808",
        "1e999",
        "NaN",
        "-Infinity",
        "1e-320",
        "9" * 400,
    )
)


def nested(begin: str, end: str, depth: int, middle: str = "1") -> str:
    return begin * depth + middle + end * depth


def wide(num: int) -> str:
    return "{" + ",".join(f'"k{index}":{index}' for index in range(num)) + "}"


JUNK: Strategy = st.one_of(
    NUMBERS,
    TEXTS.map(json.dumps),
    st.sampled_from(
        ("null", "true", "[]", "{}", '"\\ud800"', "[null]", '{"":{}}', "'x'", "")
    ),
    st.integers(1, 20_000).map(lambda depth: nested("[", "]", depth)),
    st.integers(1, 20_000).map(lambda depth: nested('{"a":', "}", depth)),
    st.integers(1, 20_000).map(wide),
    st.integers(1, 20_000).map(lambda num: "[" + ",".join(["5"] * num) + "]"),
    st.integers(1, 200_000).map(lambda num: json.dumps("y" * num)),
)


@st.composite
def value_of(
    draw: st.DrawFn, schema: Schema, schemas: Mapping[str, Schema], depth: int = 0
) -> str:
    """Draw a text of a schema, in which some values are junk."""
    if draw(st.integers(0, 24)) == 0 or depth > DEEPEST:
        return draw(JUNK)
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        return draw(value_of(schemas[name], schemas, depth + 1))
    for several in ("anyOf", "oneOf"):
        if several in schema:
            option = draw(st.sampled_from(schema[several]))  # type: ignore[arg-type]
            return draw(value_of(option, schemas, depth + 1))
    if "enum" in schema:
        return json.dumps(draw(st.sampled_from(schema["enum"])))  # type: ignore[arg-type]
    if "const" in schema:
        return json.dumps(schema["const"])
    match schema.get("type"):
        case "object":
            return draw(object_of(schema, schemas, {}, depth))
        case "array":
            items = schema.get("items")
            return draw(
                list_of(items if isinstance(items, dict) else {}, schemas, depth)
            )
        case "string":
            return json.dumps(draw(TEXTS))
        case "integer" | "number":
            return draw(st.one_of(st.integers(0, 8).map(str), NUMBERS))
        case "boolean":
            return draw(st.sampled_from(("true", "false")))
        case "null":
            return "null"
    return draw(JUNK)


@st.composite
def list_of(
    draw: st.DrawFn, items: Schema, schemas: Mapping[str, Schema], depth: int
) -> str:
    values = draw(st.lists(value_of(items, schemas, depth + 1), max_size=3))
    times = draw(st.sampled_from((1, 1, 1, 1, 50, 1000)))
    text = ",".join(values)
    times = min(times, MAX_LIST_CHARS // max(len(text), 1)) or 1
    return "[" + ",".join([text] * times) + "]"


@st.composite
def object_of(
    draw: st.DrawFn,
    schema: Schema,
    schemas: Mapping[str, Schema],
    fields: Mapping[str, str],
    depth: int = 0,
) -> str:
    """Draw an object of a schema with these fields, what it requires and some others."""
    properties: dict[str, Schema] = schema.get("properties") or {}  # type: ignore[assignment]
    required: list[str] = schema.get("required") or []  # type: ignore[assignment]
    optional = [name for name in properties if name not in (*required, *fields)]
    more = draw(st.lists(st.sampled_from(optional), max_size=5)) if optional else []
    texts = dict(fields)
    for name in (*required, *more):
        if name not in fields:
            texts[name] = draw(value_of(properties[name], schemas, depth + 1))
    return (
        "{"
        + ",".join(f"{json.dumps(name)}:{text}" for name, text in texts.items())
        + "}"
    )


# --- forms ------------------------------------------------------------------------------------


def hostile_patterns() -> Strategy:
    sizes = st.sampled_from((1, 3, 10, 40, 300, 3_000))
    shapes = st.sampled_from(
        (
            "(a|b)*a(a|b){%d}",
            "(x{1,%d}){1,100}",
            "(.*a.*){%d}",
            ".{0,%d}b",
            r"(\p{L}|\d){%d}",
            "((a?){%d}){20}",
            "(?i:straße){%d}",
            '[^"]{%d,}',
            "(a|aa|aaa){%d}z",
            r"\w{%d}(?=a)",
            r"(a)\1{%d}",
            "(((((a{%d}",
            "(?:)",
            "(a*)*{%d}",
            "(?s:.*)x{%d}(?s:.*)",
        )
    )
    return st.builds(lambda shape, size: shape.replace("%d", str(size)), shapes, sizes)


@st.composite
def hostile_schemas(draw: st.DrawFn) -> str:
    patterns = draw(st.lists(hostile_patterns(), min_size=1, max_size=12))
    strings = [{"type": "string", "pattern": one} for one in patterns]
    num = draw(st.sampled_from((2, 30, 500, 5_000)))
    choices: list[object] = [
        {"allOf": strings},
        {"anyOf": strings * 5},
        {"oneOf": [*strings, {"type": "object", "required": ["a"]}]},
        {
            "type": "object",
            "properties": {f"f{i}": {"type": "string"} for i in range(num)},
        },
        {"type": "object", "patternProperties": {one: {} for one in patterns}},
        {"enum": [f"{i} {'x' * 20}" for i in range(num)]},
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}] * 4}}},
        {"type": "array", "minItems": num, "items": {"$ref": "#"}},
        {"type": "string", "minLength": num * 1_000, "maxLength": num * 1_001},
        {"type": "number", "multipleOf": 0.0007, "minimum": -num, "maximum": num},
        {"type": "array", "uniqueItems": True, "contains": {"enum": list(range(num))}},
        {"$ref": "http://127.0.0.1/a"},
        {"not": {"type": "string"}},
        {"type": "string", "format": "email"},
    ]
    text = json.dumps(draw(st.sampled_from(choices)))
    for _ in range(draw(st.sampled_from((0, 0, 1, 60, 400)))):
        text = f'{{"type":"object","properties":{{"a":{text}}}}}'
    return text


def hostile_grammars() -> Strategy:
    num = st.sampled_from((1, 20, 1_000, 6_000))
    return st.one_of(
        num.map(lambda n: "start: a\n" + "a: " + "a a | " * n + '"x"'),
        num.map(
            lambda n: (
                "start: "
                + " ".join(f"r{i}" for i in range(n))
                + "\n"
                + "\n".join(f'r{i}: r{i + 1}? "{i}"' for i in range(n))
            )
        ),
        num.map(lambda n: f"start: /(a|b)*a(a|b){{{n}}}/ /(b|a)*b(a|b){{{n}}}/"),
        num.map(lambda n: "start: " + "(" * n + '"a"' + ")?" * n),
        num.map(lambda n: "root ::= " + "[a-z] " * n),
        num.map(lambda n: f"start: A & B\nA: /(.*x){{{n}}}/\nB: /(.*y){{{n}}}/"),
        hostile_schemas().map(lambda s: f"start: %json {s}"),
        st.just('{"grammars":[{"lark_grammar":"start: @a"}]}'),
    )


@st.composite
def forms(draw: st.DrawFn) -> str:
    """Draw a value of `structured_outputs`."""
    kind = draw(
        st.sampled_from(("json", "regex", "grammar", "choice", "structural_tag"))
    )
    match kind:
        case "json":
            value = draw(hostile_schemas())
        case "regex":
            value = json.dumps(draw(hostile_patterns()))
        case "grammar":
            value = json.dumps(draw(hostile_grammars()))
        case "choice":
            num = draw(st.sampled_from((1, 100, 20_000)))
            value = json.dumps([f"{index}" for index in range(num)])
        case _:
            schema = draw(hostile_schemas())
            value = f'{{"structures":[{{"begin":"<a>","schema":{schema}}}],"triggers":["<a"]}}'
    return f'{{"{kind}":{value}}}'


@st.composite
def fields_with_a_form(draw: st.DrawFn, path: str) -> dict[str, str]:
    """Draw the fields of a body that asks for a hostile form, in a way of its endpoint."""
    schema = draw(hostile_schemas())
    named = f'{{"type":"json_schema","name":"f","schema":{schema},"strict":true}}'
    function = f'{{"name":"f","parameters":{schema},"strict":true}}'
    form = function.replace('"parameters"', '"schema"', 1)
    turn = '[{"role":"user","content":"x"}]'
    match path:
        case "/v1/completions":
            return {"prompt": '"x"', "structured_outputs": draw(forms())}
        case "/v1/chat/completions":
            asked = draw(
                st.sampled_from(
                    (
                        {
                            "response_format": f'{{"type":"json_schema","json_schema":{form}}}'
                        },
                        {
                            "tools": f'[{{"type":"function","function":{function}}}]',
                            "tool_choice": '"required"',
                        },
                        {"structured_outputs": draw(forms())},
                    )
                )
            )
            return {"messages": turn, **asked}
        case "/v1/responses":
            return {"input": '"x"', "text": f'{{"format":{named}}}'}
        case "/v1/messages":
            tool = f'{{"name":"f","input_schema":{schema}}}'
            return {
                "messages": turn,
                "tools": f"[{tool}]",
                "tool_choice": '{"type":"any"}',
            }
    return {}


# --- large bodies -----------------------------------------------------------------------------


@st.composite
def large_fields(draw: st.DrawFn, path: str) -> dict[str, str]:
    """Draw the fields of a body of up to some megabytes."""
    num = draw(st.sampled_from((1_000, 20_000, 300_000, 1_000_000)))
    words = json.dumps("hello 1 " * (num // 4))
    ids = "[" + "5," * num + "5]"
    turn = f'{{"role":"user","content":{words}}}'
    turns = (
        '[{"role":"user","content":"x"}'
        + ',{"role":"user","content":"x"}' * (num // 40)
        + "]"
    )
    stops = json.dumps([f"{index} " + "y" * 1_000 for index in range(4)])
    match path:
        case "/v1/completions":
            rows = (
                "[" + ",".join([f"[{'700,' * 4_000}5]"] * min(num // 2_000, 500)) + "]"
            )
            many = "[" + ",".join(['"the end"'] * min(num // 20, 512)) + "]"
            prompt = draw(
                st.sampled_from((words, ids, rows, many, nested("[", "]", num)))
            )
            return {"prompt": prompt, "max_tokens": "2", "stop": stops}
        case "/v1/chat/completions" | "/v1/messages" | "/v1/messages/count_tokens":
            parts = ",".join(['{"type":"text","text":"x"}'] * (num // 30))
            part_turn = f'[{{"role":"user","content":[{parts}]}}]'
            messages = draw(st.sampled_from((f"[{turn}]", turns, part_turn)))
            return {"messages": messages, "max_tokens": "2"}
        case "/v1/responses":
            return {"input": draw(st.sampled_from((words, f"[{turn}]", turns)))}
        case "/tokenize":
            return draw(
                st.sampled_from(
                    (
                        {"prompt": words, "return_token_strs": "true"},
                        {"messages": turns},
                    )
                )
            )
        case "/detokenize":
            return {"tokens": ids}
    return {}
