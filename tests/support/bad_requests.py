"""Requests that the HTTP API has to refuse, each with the field that its response must blame.

A few that look as hard are answered: their status is 200.

Values are JSON texts, because some are wrong in ways that no encoder writes. Whoever makes a value
work deletes it from its line.
"""

import gzip
import json
from collections.abc import Iterator
from itertools import cycle
from typing import NamedTuple

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
MESSAGES = "/v1/messages"
JSON = "application/json"


class BadRequest(NamedTuple):
    path: str
    body: bytes
    param: str | None
    status: int = 400
    content_type: str = JSON
    encoding: str = ""  # Content-Encoding
    method: str = "POST"


def several(item: str, count: int) -> str:
    return "[" + ",".join([item] * count) + "]"


def nested(begin: str, end: str, depth: int = 10_000, middle: str = "") -> str:
    return begin * depth + middle + end * depth


MIB = 1 << 20
LONG = "a" * MIB
MANY = "{" + ",".join(f'"{number}":1' for number in range(5000)) + "}"
LISTS = nested("[", "]")
OBJECTS = nested('{"a":', "}", middle="1")

# The fields that a body needs besides the one that is wrong.
WHOLE = {
    COMPLETIONS: {"prompt": '"x"', "max_tokens": "4"},
    CHAT: {"messages": '[{"role":"user","content":"x"}]', "max_tokens": "4"},
    RESPONSES: {"input": '"x"', "max_output_tokens": "4"},
    MESSAGES: {"messages": '[{"role":"user","content":"x"}]', "max_tokens": "4"},
    TOKENIZE: {"prompt": '"x"'},
    DETOKENIZE: {"tokens": "[5]"},
}

# Values of a field, between blanks, that each endpoint refuses by its name.
OF_BOTH = {
    "model": r'"none" 1 [] {} true "../../etc/passwd" "tiny:adapter" "tiny\n"',
    "stream": '1 "true" [] {}',
    "stream_options": '1 [] "x" {"include_usage":1} {"include_usage":true,"more":1} {}',
    "max_tokens": '0 -1 1.5 "4" [] {} true 2147483648 -2147483649 1e999 NaN '
    + "9" * 400,
    "min_tokens": '-1 5 1.5 "4" [] true 1e999',
    "n": '0 -1 129 1.5 "2" [] {} true 1000000000 99999999999999999999 -Infinity',
    "temperature": '-1 -0.001 101 1e308 1e999 -1e999 NaN Infinity "1" [] {} true',
    "top_p": '0 -0 -0.0 -1 1.0001 1e999 NaN "1" [] true',
    "top_k": '-2 1.5 "1" [] true 2147483648 NaN',
    "min_p": '-0.1 1.1 NaN "0" [] true',
    "seed": '1.5 "1" [] true 9223372036854775808 -9223372036854775809 1e30',
    "stop": r'1 {} [1] [null] [[]] "" ["a",""] "\ud800" '
    + f'"{LONG}" {several("1", 65)}',
    "stop_token_ids": '1 "5" ["5"] [-1] [1.5] [true] {} [2147483648] '
    + several("5", 1025),
    "ignore_eos": '1 "yes" []',
    "skip_special_tokens": '0 "no" {}',
    "include_stop_str_in_output": '1 "no" {}',
    "return_token_ids": '1 "no" {}',
    "presence_penalty": '-2.1 2.1 1e999 NaN "1" [] true',
    "frequency_penalty": '-2.1 2.1 NaN "1" [] true',
    "repetition_penalty": '0 -1 101 NaN "1" [] true',
    "logit_bias": '1 [] "5" {"5":101} {"5":-100.5} {"5":"1"} {"5":null} {"x":1} {"":1} {"-1":1} '
    f'{{"1.5":1}} {{"5":NaN}} {{"5":1e999}} {{"99999":1}} {{"{"9" * 5000}":1}} {MANY}',
    "allowed_token_ids": '[] [-1] [1024] [1000000] ["5"] [true] 5 {} [99999999999999999999]',
    "bad_words": r'1 {} [1] [""] ["\u0020"] "word" ' + f'["{LONG}"] {several("9", 65)}',
    "repetition_detection": '1 [] "x" {"size":3} {"max_pattern_size":"3","min_count":2} '
    '{"max_pattern_size":3} {"max_pattern_size":3,"min_count":1} {"max_pattern_size":-1} '
    '{"max_pattern_size":2,"min_pattern_size":3,"min_count":2} {"min_pattern_size":1} '
    '{"max_pattern_size":1025,"min_count":2} {"max_pattern_size":3,"min_count":2.5}',
    "logprobs": '-1 21 1000000 "5" [] {} 1.5',
    "prompt_logprobs": '-2 21 "1" true',
    "best_of": '0 2 -1 "1" [] 1.5',
    "use_beam_search": 'true 1 "x"',
    "length_penalty": '2 "1" [] NaN',
    "truncate_prompt_tokens": '0 -2 "1" [] 1000000',
    "add_special_tokens": '1 "no" []',
    "spaces_between_special_tokens": "false 1",
    "priority": '1.5 "0" [] true 2147483648 -2147483649',
    "modalities": '["audio"] ["text","audio"] "text" 1',
    "include_reasoning": '1 "no" []',
    "user": "1 [] {} true",
    "metadata": '1 [] "x"',
    "service_tier": "1 []",
    "store": '1 "x"',
    "reasoning_effort": "1 []",
    "verbosity": "1 {}",
    "request_id": "1 []",
    "stream_interval": '0 -1 "1" 1.5 []',
    "guided_json": "{}",
    "chat_template": '"{{x}}"',
    "lora_request": '{"name":"a"}',
    "temprature": "1",
    "audio": '{"voice":"a"}',
    "functions": '[{"name":"f"}]',
    "function_call": '"auto"',
    "prompt_embeds": '"AAAA"',
    "kv_transfer_params": '{"do_remote_prefill":true}',
}
OF_ONE = {
    COMPLETIONS: {
        "prompt": 'null 1 true {} "" [] [[]] [""] [null] [1.5] [true] ["a",5] [5,"a"] [[5],5] '
        '[["a"]] [[[5]]] [-1] [1024] [[1024]] [999999999999] [[-1]] [99999999999999999999999] '
        r'"\ud800" "a\udc00\ud800" "\ud83d" ["a","\udfff"] [{"prompt":"a"}] '
        f'{several("5,[5]", 1)} {several("[5]", 513)} {LISTS} "{LONG}" {several("5", 9000)}',
        "echo": '1 "x" []',
        "suffix": '"x" 1',
        "continue_final_message": "true",
        "messages": "[]",
        "max_completion_tokens": "4",
        "tools": '[{"type":"function"}]',
    },
    CHAT: {
        "messages": 'null 1 "x" {} [] [1] [null] ["x"] [[]] [{}] '
        + several("1", 10_001),
        "max_completion_tokens": '0 -1 1.5 "4" [] 2147483648',
        "add_generation_prompt": "1 []",
        "continue_final_message": "1 []",
        "chat_template_kwargs": '1 [] "x"',
        "top_logprobs": '1 -1 21 "1" [] 1.5',
        "tools": '1 {} "x" [1]',
        "tool_choice": '1 [] "always" {} {"type":"function"} '
        '{"type":"function","function":{"name":"f"}}',
        "parallel_tool_calls": '1 "x"',
        "prompt": '"x"',
        "echo": "true",
        "suffix": '"x"',
    },
    RESPONSES: {
        "model": '"none" 1 []',
        "input": r'null 1 {} [] [1] [{}] [{"type":"cow"}] [{"type":"item_reference","id":"a"}] '
        r'"\ud800" [{"role":"user","content":[{"type":"input_image"}]}] [{"type":"function_call"}] '
        f'{several("1", 10_001)} "{LONG}" [{{"role":"user","content":"{LONG}"}}]',
        "instructions": "1 []",
        "max_output_tokens": '0 -1 1.5 "4" 1e999',
        "previous_response_id": '"resp_1"',
        "conversation": '"a" {"id":"a"}',
        "background": 'true 1 "x"',
        "store": 'true "x"',
        "text": '1 {"format":1} {"format":{"type":"cow"}} {"format":{"type":"json_schema"}}',
        "tools": '1 [1] [{}] [{"type":"web_search"}] [{"type":"function"}]',
        "tool_choice": '1 "always" {"type":"function","name":"f"}',
        "temperature": '-1 NaN "1"',
        "top_p": "0 2 NaN",
        "include": '1 ["cow"] "x"',
        "truncation": '"auto" 1',
        "stream": "1 []",
        "messages": "[]",
        "max_tokens": "4",
    },
    MESSAGES: {
        "model": '"none" 1 []',
        "messages": 'null 1 {} [] [1] [{}] [{"role":"user"}] [{"role":"tool","content":"x"}] '
        '[{"role":"assistant","content":"x"}] [{"role":"user","content":[{"type":"image"}]}] '
        '[{"role":"user","content":[{"type":"tool_use","id":"a","name":"b","input":{}}]}] '
        f'{several("1", 10_001)} [{{"role":"user","content":"{LONG}"}}] {LISTS}',
        "system": '1 {} [1] [{"type":"image"}]',
        "max_tokens": '0 -1 1.5 "4" null 1e999',
        "stop_sequences": f'1 "x" [1] ["{LONG}"]',
        "thinking": '1 "enabled" {"type":"cow"}',
        "tools": '1 [1] [{}] [{"type":"bash_20250124","name":"bash"}] [{"name":"a\\nb",'
        '"input_schema":{}}]',
        "tool_choice": '1 "auto" {"type":"cow"} {"type":"tool","name":"f"}',
        "output_config": '1 {"format":{"type":"json_schema"}} {"efort":"low"}',
        "temperature": '-1 NaN "1"',
        "mcp_servers": '[{"type":"url","url":"http://127.0.0.1:1","name":"a"}]',
        "container": '"a"',
    },
    TOKENIZE: {
        "model": '"none" 1 []',
        "prompt": r'1 [] ["x"] null {} "\ud800"',
        "messages": '1 [1] "x"',
        "add_special_tokens": '1 "x"',
        "add_generation_prompt": "1 []",
        "continue_final_message": "1 []",
        "chat_template_kwargs": "1 []",
        "return_token_strs": "1 []",
        "tools": "1 {}",
        "more": "1",
    },
    DETOKENIZE: {
        "model": '"none" 1 []',
        "tokens": '1 "x" [-1] [1024] ["5"] [1.5] [true] null {} [[5]] [99999999999999999999]',
        "more": "1",
    },
}


# Fields that change nothing, which are ignored.
IGNORED = (
    ("metadata", '{"a":1}'),
    ("metadata", '{"a":{}}'),
    ("metadata", MANY),
    ("__class__", "{}"),
    (LONG, "1"),
    ("client_metadata", '{"a":[]}'),
    ("kv_transfer_params", "{}"),
    ("n", "1"),
    ("mcp_servers", "[]"),
    ("thread", '{"type":"create"}'),
)


def of_fields() -> Iterator[BadRequest]:
    endpoints = {path: {**OF_BOTH, **OF_ONE[path]} for path in (COMPLETIONS, CHAT)}
    endpoints |= {
        path: OF_ONE[path] for path in (RESPONSES, MESSAGES, TOKENIZE, DETOKENIZE)
    }
    endpoints[CHAT]["logprobs"] = "1 [] {}"
    for path, fields in endpoints.items():
        for name, values in fields.items():
            for value in values.split(" "):
                is_name = name == "model" and value.startswith('"')
                yield of_one(path, name, value, 404 if is_name else 400)
    for path in (COMPLETIONS, CHAT, RESPONSES, MESSAGES):
        for name, value in IGNORED:
            yield of_one(path, name, value, 200)


def body_of(given: dict[str, str]) -> bytes:
    fields = [f"{json.dumps(name)}:{value}" for name, value in given.items()]
    return f"{{{','.join(fields)}}}".encode()


def string_of(**limits: object) -> str:
    return json.dumps({"type": "string", **limits})


# Forms that can be kept by no output, or are too hard to follow: nodes find that out.
DOUBLING = {
    f"a{level}": {"allOf": [{"$ref": f"#/$defs/a{level + 1}"}] * 2}
    for level in range(30)
}
HARD_SCHEMAS = (
    '{"$ref":"#"}',
    '{"allOf":[{"$ref":"#"}]}',
    '{"anyOf":[{"$ref":"#"}]}',
    '{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}}',
    json.dumps(
        {"type": "object", "properties": {f"f{number}": {} for number in range(2000)}}
    ),
)
# Those that are not too hard.
KEPT_SCHEMAS = (
    json.dumps(
        {"$ref": "#/$defs/a0", "$defs": {**DOUBLING, "a30": {"type": "string"}}}
    ),
    '{"type":"array","minItems":1000000000}',
    '{"type":"object","minProperties":1000000000}',
    string_of(minLength=1_000_000_000),
    string_of(pattern="(a{1000}){1000}"),
    string_of(pattern="(a+)+(b|b)*$"),
)
HARD_REGEXES = (
    "(a{1000}){1000}",
    "((a{100}){100}){100}",
    "[a-z]{0,1000}" * 1000,
    "x" * 200_000,
)
KEPT_REGEXES = ("(.{0,5000}){0,5000}", "(a+)+$", "(a|a)*b", "((((a*)*)*)*)*b")
HARD_GRAMMARS = (
    "start: start start",
    "start: a\na: a",
    'start: "a"{1000000000}',
    "start: /a{1000000}/",
    "start: <[99999999]>",
    "start: <|none|>",
)
SCHEMAS = (
    "1",
    "[1]",
    '"{"',
    '""',
    "null",
    "true",
    "[]",
    '{"type":"cow"}',
    '{"type":1}',
    '{"type":[]}',
    '{"type":["string","cow"]}',
    '{"$ref":"#/a"}',
    '{"$ref":1}',
    '{"$ref":"http://127.0.0.1:1/x.json"}',
    '{"$ref":"file:///etc/passwd"}',
    '{"enum":[]}',
    '{"enum":1}',
    '{"anyOf":[]}',
    '{"anyOf":1}',
    '{"allOf":{}}',
    '{"not":{}}',
    '{"type":"object","unevaluatedProperties":false}',
    '{"type":"object","properties":1}',
    '{"type":"object","properties":{"a":1}}',
    '{"type":"object","required":1}',
    '{"type":"object","required":["a"],"additionalProperties":false}',
    '{"type":"object","patternProperties":{"(":{}}}',
    '{"type":"object","propertyNames":{}}',
    '{"type":"object","dependentRequired":{"a":["b"]}}',
    '{"type":"array","contains":{}}',
    '{"type":"array","minItems":5,"maxItems":1}',
    '{"type":"array","minItems":-1}',
    '{"type":"array","items":1}',
    '{"type":"integer","minimum":5,"maximum":1}',
    '{"type":"integer","multipleOf":0}',
    '{"type":"number","minimum":"1"}',
    '{"type":"number","maximum":1e999}',
    '{"type":"integer","minimum":0.2,"maximum":0.8}',
    '{"if":{},"then":{}}',
    string_of(pattern="("),
    string_of(pattern="(?=a)b"),
    string_of(pattern="(a)\\1"),
    string_of(pattern=1),
    string_of(format="cow"),
    string_of(minLength=5, maxLength=1),
    string_of(minLength="1"),
    string_of(pattern="^a{2000}$", maxLength=1000),
    json.dumps({"enum": ["x" * 50 + str(number) for number in range(6000)]}),
    json.dumps(
        {"type": "object", "properties": {f"{'x' * 60}{i}": {} for i in range(5000)}}
    ),
    json.dumps(
        {"type": "object", "properties": {f"{number}": {} for number in range(5000)}}
    ),
    nested('{"type":"array","items":', "}", 400, "{}"),
)
REGEXES = (
    "(a",
    "a)",
    "[",
    "[z-a]",
    "*",
    "+a",
    "a{2,1}",
    "a{,",
    "(?=a)b",
    "(?!a)b",
    "(?<=a)b",
    "(?<!a)b",
    "(a)\\1",
    "(?P=x)",
    "(?P<x>a",
    "\\p{Cow}",
    "(?(1)a|b)",
    "(?>a)",
    "a{99999999999}",
    "\\k<x>",
    "(?z)a",
    "\\uD800",
    "(" * 50_000,
    "(a|" * 10_000 + ")" * 10_000,
    "x" * 300_000,
)
GRAMMARS = (
    "start: missing",
    "start",
    ":",
    'start: "a',
    "start: /(/",
    'a: "b"',
    "start: /(?=a)/",
    "\x00",
    "root ::= x",
    "root ::= (",
    "root ::= " + "(" * 50_000,
    "x" * 300_000,
    "start: @none",
    "start: " + nested("(", ")", middle='"a"'),
    "%import common.COW\nstart: COW",
    "start: %json {",
    'start: %json {"type":"cow"}',
    "start: " + " ".join(f"a{number}" for number in range(5000)),
    'start[max_tokens=-1]: "a"',
    'start: "a"\nstart: "b"',
)
TAG = '{"triggers":["<f>"],"structures":[{"begin":"<f>","schema":{},"end":""}]}'
FORMS = {
    "structured_outputs": '1 [] "x" {} {"json":{},"regex":"a"} {"cow":1} {"json":null} '
    '{"json_object":false} {"json_object":1} {"regex":""} {"regex":1} {"choice":[]} {"choice":1} '
    '{"choice":[""]} {"choice":[1]} {"choice":["a",""]} {"choice":"ab"} {"grammar":1} '
    '{"grammar":""} {"structural_tag":1} {"structural_tag":{}} {"structural_tag":"{"} '
    f'{{"choice":["{LONG}"]}} {{"choice":{several(chr(34) + "x" * 60 + chr(34), 5000)}}} '
    f'{{"structural_tag":{TAG.replace("[" + chr(34) + "<f>" + chr(34) + "]", "[]")}}} '
    f"{LISTS}",
    "response_format": '1 [] "json_object" {} {"type":"cow"} {"type":1} {"type":"json_schema"} '
    '{"type":"json_schema","json_schema":1} {"type":"json_schema","json_schema":{}} '
    '{"type":"json_schema","json_schema":{"schema":1}} {"type":"regex","regex":"a"} '
    '{"type":"structural_tag"} {"type":"structural_tag","structures":[],"triggers":[]} '
    '{"type":"structural_tag","structures":[{}],"triggers":["a"]}',
}
# Together with another field, which is blamed.
COMBINED = (
    (
        "response_format",
        {
            "response_format": '{"type":"json_object"}',
            "structured_outputs": '{"json_object":true}',
        },
    ),
    ("min_tokens", {"structured_outputs": '{"regex":"a"}', "min_tokens": "2"}),
    ("ignore_eos", {"structured_outputs": '{"regex":"a"}', "ignore_eos": "true"}),
    ("min_tokens", {"max_tokens": "2", "min_tokens": "3"}),
    ("stream_options", {"stream_options": '{"include_usage":true}', "stream": "false"}),
    ("best_of", {"n": "2", "best_of": "3"}),
    ("n", {"prompt": several('"a"', 100), "n": "100"}),
    ("max_tokens", {"max_tokens": "0", "echo": "false"}),
    (
        "echo",
        {"prompt": several('"' + "a" * 7000 + '"', 5), "echo": "true", "n": "128"},
    ),
)


def of_forms() -> Iterator[BadRequest]:
    ways = cycle(("structured_outputs", "response_format", "tools"))
    for schemas, status in ((SCHEMAS, 400), (HARD_SCHEMAS, 422), (KEPT_SCHEMAS, 200)):
        for way, schema in zip(ways, schemas, strict=False):
            fits = schema.startswith("{") and "$ref" not in schema
            fits = fits and len(schema) < 4000  # a prompt shows the tools
            yield of_schema(schema, way if fits else "structured_outputs", status)
    for kind, status, texts in (
        ("regex", 400, REGEXES),
        ("regex", 422, HARD_REGEXES),
        ("regex", 200, KEPT_REGEXES),
        ("grammar", 400, GRAMMARS),
        ("grammar", 422, HARD_GRAMMARS),
    ):
        for path, text in zip(cycle((COMPLETIONS, CHAT)), texts, strict=False):
            yield of_one(path, "structured_outputs", json.dumps({kind: text}), status)
    for path in (COMPLETIONS, CHAT):
        for name, values in FORMS.items():
            for value in values.split(" "):
                yield of_one(path, name, value)
    for param, fields in COMBINED:
        yield BadRequest(COMPLETIONS, body_of({**WHOLE[COMPLETIONS], **fields}), param)


def of_schema(schema: str, way: str, status: int) -> BadRequest:
    if way == "structured_outputs":
        return of_one(COMPLETIONS, way, f'{{"json":{schema}}}', status)
    if way == "response_format":
        form = (
            f'{{"type":"json_schema","json_schema":{{"name":"x","schema":{schema}}}}}'
        )
        return of_one(CHAT, way, form, status)
    parameters = f'{{"type":"object","properties":{{"a":{schema}}},"required":["a"]}}'
    function = f'{{"name":"f","strict":true,"parameters":{parameters}}}'
    tool = f'[{{"type":"function","function":{function}}}]'
    return of_one(CHAT, way, tool, status, tool_choice='"required"')


def of_one(
    path: str, name: str, value: str, status: int = 400, **more: str
) -> BadRequest:
    return BadRequest(path, body_of({**WHOLE[path], name: value, **more}), name, status)


NAMES = (r'"a\nb"', f'"{LONG}"', '""', "1", '"a b"', r'"a\u0000"', "null", '"a{b"')
# A function of a tool, and the part of it that is blamed.
FUNCTIONS = (
    *((f'{{"name":{name}}}', ".name") for name in NAMES),
    ("{}", ".name"),
    ("1", ""),
    ('{"name":"f","parameters":[]}', ".parameters"),
    ('{"name":"f","paramters":1}', ".paramters"),
    ('{"name":"f","parameters":{"type":"string"}}', ".parameters"),
    ('{"name":"f","parameters":{"type":["string","null"]}}', ".parameters"),
    ('{"name":"f","strict":"yes"}', ".strict"),
    ('{"name":"f","description":1}', ".description"),
)
TOOLS = (
    (
        several('{"type":"function","function":{"name":"f"}}', 2),
        "tools[1].function.name",
    ),
    (several('{"type":"function","function":{"name":"f"}}', 1025), "tools"),
    ('[{"type":"retrieval"}]', "tools[0].type"),
    ('[{"function":{"name":"f"}}]', "tools[0].type"),
    ('[{"type":"function"}]', "tools[0].function"),
    ("[1]", "tools[0]"),
    ("[]", "tools"),
    ('[{"type":"function","function":{"name":"f"},"strct":1}]', "tools[0].strct"),
)
USER = '{"role":"user","content":"x"}'
# A turn of a chat, and the part of it that is blamed.
CALL = '{"role":"assistant","tool_calls":[%s]}'
ARGUMENTS = CALL % '{"function":{"name":"f","arguments":%s}}'
PART = '{"role":"user","content":[%s]}'
TURNS = (
    ('{"content":"x"}', ".role"),
    ('{"role":1,"content":"x"}', ".role"),
    ("{}", ".role"),
    ('{"role":"","content":"x"}', ".role"),
    ('{"role":"user","content":1}', ".content"),
    ('{"role":"user","content":{}}', ".content"),
    (PART % "1", ".content[0]"),
    (PART % "{}", ".content[0].type"),
    (PART % '{"type":"text"}', ".content[0]"),
    (PART % '{"type":"text","text":1}', ".content[0].text"),
    (
        PART % '{"type":"image_url","image_url":{"url":"file:///etc/passwd"}}',
        ".content[0]",
    ),
    (PART % '{"type":"input_audio","input_audio":{}}', ".content[0]"),
    (PART % '{"type":"video_url"}', ".content[0]"),
    (PART % f'{{"type":"{LONG}"}}', ".content[0]"),
    ('{"role":"user","content":"x","name":1}', ".name"),
    ('{"role":"user","content":"x","images":["aGk="]}', ".images"),
    ('{"role":"user","content":"x","tool_call_id":"1"}', ".tool_call_id"),
    ('{"role":"user","tool_calls":[{"function":{"name":"f"}}]}', ".tool_calls"),
    ('{"role":"user","content":"x","reasoning":"y"}', ".reasoning"),
    ('{"role":"tool","content":"x","tool_call_id":1}', ".tool_call_id"),
    (
        '{"role":"assistant","function_call":{"name":"f","arguments":""}}',
        ".function_call",
    ),
    ('{"role":"assistant","tool_calls":1}', ".tool_calls"),
    (CALL % "1", ".tool_calls[0]"),
    (CALL % "{}", ".tool_calls[0].function"),
    (CALL % '{"function":{"name":""}}', ".tool_calls[0].function.name"),
    (CALL % '{"type":"custom","function":{"name":"f"}}', ".tool_calls[0].type"),
    *((ARGUMENTS % text, ".tool_calls[0].function.arguments") for text in ("1", "[1]")),
)
OF_ALL_TURNS = (
    r'{"role":"user","content":"\ud800"}',
    r'{"role":"\ud800","content":"x"}',
    ARGUMENTS % r'"\ud800"',
    f'{{"role":"user","content":"{LONG}"}}',
)


def of_chats() -> Iterator[BadRequest]:
    for function, param in FUNCTIONS:
        tools = f'[{{"type":"function","function":{function}}}]'
        yield of_one(CHAT, "tools", tools)._replace(param=f"tools[0].function{param}")
    for tools, param in TOOLS:
        given = {**WHOLE[CHAT], "tools": tools, "tool_choice": '"required"'}
        yield BadRequest(CHAT, body_of(given), param)
    for path in (CHAT, TOKENIZE):
        for turn, param in TURNS:
            given = {"messages": f"[{USER},{turn}]"}
            yield BadRequest(path, body_of(given), f"messages[1]{param}")
        for turn in OF_ALL_TURNS:
            yield BadRequest(path, body_of({"messages": f"[{turn}]"}), "messages")


def of_bodies() -> Iterator[BadRequest]:
    """Bodies that are no object, no JSON, or not what their headers say."""
    whole = {path: body_of(fields) for path, fields in WHOLE.items()}
    bomb = gzip.compress(b" " * (64 * MIB), compresslevel=1)
    for path, good in whole.items():
        for body in (
            b"",
            b"{",
            b"[]",
            b"null",
            b'"x"',
            b"1",
            good[:-1],
            good + b"}",
            b"\xff\xfe",
            good.decode().encode("utf-16"),
            b"{'prompt':'x'}",
            good[:-1] + b",}",
            b"\x00" * 9,
            LISTS.encode(),
            b"prompt=x",
            b"<x/>",
        ):
            yield BadRequest(path, body, None)
        yield BadRequest(path, MANY.encode(), "0")
        yield BadRequest(path, good[:-1] + b',"a":"\xff"}', None)
        yield BadRequest(path, b"\xef\xbb\xbf" + good, None, 200)
        for kind in (
            "",
            "text/plain",
            "multipart/form-data",
            "application/x-www-form-urlencoded",
        ):
            yield BadRequest(path, good, None, 415, kind)
        yield BadRequest(path, good, None, encoding="gzip")
        yield BadRequest(path, gzip.compress(good)[:-12], None, encoding="gzip")
        yield BadRequest(path, b'{"prompt":"' + b"x" * (5 * MIB) + b'"}', None, 413)
        yield BadRequest(path, bomb, None, 413, encoding="gzip")
        yield BadRequest(path, b"", None, 405, method="PUT")
    call = f'{{"name":"f","arguments":{OBJECTS}}}'
    turns = f'[{{"role":"assistant","tool_calls":[{{"function":{call}}}]}}]'
    tools = f'[{{"type":"function","function":{{"name":"f","parameters":{OBJECTS}}}}}]'
    deep = {
        "messages": turns,
        "tools": tools,
        "chat_template_kwargs": OBJECTS,
        "metadata": OBJECTS,
        "response_format": OBJECTS,
        "structured_outputs": f'{{"json":{OBJECTS}}}',
    }
    for name, value in deep.items():  # no decoder says where it gave up
        yield of_one(CHAT, name, value)._replace(param=None)
    yield BadRequest("/v1/embeddings", whole[CHAT], "messages")
    for path in ("/v1/none", "/v1/completions/", "//", "/v1/../v1", "/%00"):
        yield BadRequest(path, whole[CHAT], None, 404)
    yield BadRequest("/v1/models/none", b"", "model", 404, method="GET")
    yield BadRequest("/v1/models/" + "a" * 4000, b"", "model", 404, method="GET")


def bad_requests() -> list[BadRequest]:
    return [*of_fields(), *of_forms(), *of_chats(), *of_bodies()]
