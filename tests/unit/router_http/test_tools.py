"""Tools and reasoning over HTTP: whole, streamed, and in a stream that is resumed."""

# ruff: noqa: RUF001  (DeepSeek's tags have full-width bars)

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from baton.protocol.config import RouterConfig
from baton.protocol.errors import RequestError
from baton.protocol.sampling import SamplingParams, StructuredOutputsParams
from baton.router.core.stream import ReceivedPart, RequestStream, digest_of
from baton.router.http.api.model_format import ModelFormat
from baton.router.http.api.schema import parse_chat
from baton.router.http.errors import blaming
from baton.router.outputs import CompletionOutput, ToolCall, merged_calls
from baton.router.text.call_grammar import CallableTool, CallRules, form_of_calls
from baton.router.text.chat_template import ChatTemplate
from baton.router.text.formats import call_format
from baton.router.text.grammars import after_reasoning, checked_grammar
from baton.router.text.response_parser import Parsing, ResponseParser
from tests.support.http_bench import QWEN, TEXT, served
from tests.support.refusals import raises

PATH = "/v1/chat/completions"
THOUGHT = "<think>hello</think>"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
BODY: dict[str, object] = {
    "messages": [{"role": "user", "content": "hello"}],
    "tools": [{"type": "function", "function": {"name": "add"}}],
}


# The last one is the end, without text.
TOKEN_IDS = TEXT.encode_now(f"{THOUGHT} the {CALL}.")


def token_by_token(stream: RequestStream) -> None:
    for token_id in TOKEN_IDS[:-1]:
        stream.push(0, [token_id], None)
    stream.push(0, TOKEN_IDS[-1:], "stop")
    stream.finish()


def merged(pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the calls of a stream: each begins with a name, and the rest are arguments."""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if "name" in piece["function"]:
            assert (piece["type"], len(piece["id"])) == ("function", 9)
            calls.append(piece)
        else:
            assert piece.keys() == {"index", "function"}
            calls[piece["index"]]["function"]["arguments"] += piece["function"][
                "arguments"
            ]
    return calls


def joined(events: list[tuple[str, str]]) -> dict[str, Any]:
    """Return what a client makes of the deltas of a stream."""
    chunks = [json.loads(data) for _, data in events if data != "[DONE]"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    return {
        "content": "".join(delta.get("content") or "" for delta in deltas),
        "reasoning": "".join(delta.get("reasoning", "") for delta in deltas),
        "calls": merged(
            [call for delta in deltas for call in delta.get("tool_calls", ())]
        ),
        "finish": chunks[-1]["choices"][0]["finish_reason"],
    }


@served(script=token_by_token, chat_template=QWEN)
async def test_calls_and_reasoning_are_apart_from_the_content(bench):
    whole: Any = (await bench.post(BODY, PATH)).json
    (choice,) = whole["choices"]
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == ("the", "tool_calls")
    assert message["reasoning"] == message["reasoning_content"] == "hello"
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert len(call["id"]) == 9
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(
        TEXT.encode_now(THOUGHT)
    )
    silent: Any = (await bench.post({**BODY, "include_reasoning": False}, PATH)).json
    assert "reasoning" not in silent["choices"][0]["message"]
    # Without tools, a call is text.
    plain: Any = (await bench.post({**BODY, "tool_choice": "none"}, PATH)).json
    assert plain["choices"][0]["message"]["content"] == f"the {CALL}"
    assert plain["choices"][0]["finish_reason"] == "stop"


@served(script=token_by_token, chat_template=QWEN)
async def test_a_stream_has_the_parts_of_the_whole(bench):
    whole = joined((await bench.post({**BODY, "stream": True}, PATH)).events)
    assert (whole["content"], whole["reasoning"]) == ("the", "hello")
    assert whole["finish"] == "tool_calls"
    (call,) = whole["calls"]
    assert (call["index"], call["function"]) == (
        0,
        {"name": "add", "arguments": '{"a": 1}'},
    )


def test_a_resumed_stream_goes_on_with_the_same_parts():
    def stream(num_received: int) -> tuple[RequestStream, list[CompletionOutput]]:
        params = SamplingParams()
        parsing = Parsing("hermes", reasoning="think")
        detokenizers = [TEXT.detokenizer([1], params, 0, parsing)]
        part = ReceivedPart(
            num_received, True, False, digest_of(TOKEN_IDS[:num_received])
        )
        made = RequestStream("r", [1], params, detokenizers, received=[part])
        deltas: list[CompletionOutput] = []
        made.send_to(deltas.append)
        return made, deltas

    first, whole = stream(0)
    token_by_token(first)
    for num_received in range(len(TOKEN_IDS)):
        second, rest = stream(num_received)
        token_by_token(second)
        assert rest == whole[num_received:]


@served(chat_template=ChatTemplate("{{ messages[0].content }}", {}))
async def test_tools_that_the_model_cannot_call_are_refused(bench, engine):
    reply = await bench.post(BODY, PATH)
    assert (reply.status, reply.error["param"]) == (400, "tools")
    assert not engine.streams


@pytest.mark.parametrize(
    ("source", "tools", "reasoning"),
    [
        ("{{ tools }}<tool_call></think>", "hermes", "think"),
        ("{{ tools }}<tool_call><function=f>", "qwen3_coder", ""),
        ("{{ tools }}<tool_call><arg_key></think>", "glm45", "think"),
        ("{{ tools }}[TOOL_CALLS][/THINK]", "mistral", "mistral"),
        ('{{ tools }}<|start_header_id|>"parameters": ', "llama3_json", ""),
        ("{{ tools }}<|start_header_id|>[func_name1(params_name1=1)]", "pythonic", ""),
        ("{{ tools }}<｜tool▁calls▁begin｜>```json</think>", "deepseek_v3", "think"),
        ("{{ tools }}<｜tool▁calls▁begin｜>", "deepseek_v31", ""),
        ("{{ tools }}<|tool_calls_section_begin|>", "kimi_k2", ""),
        ("{{ tools }}<|channel|>analysis", "openai", "openai_gptoss"),
        ("<tool_call>", "", ""),
    ],
)
def test_the_format_is_the_one_that_the_template_shows(source, tools, reasoning):
    template = ChatTemplate("{% raw %}" + source + "{% endraw %}", {})
    assert ModelFormat.of(RouterConfig(), template) == ModelFormat(tools, reasoning)
    named = RouterConfig(tool_call_parser="qwen3_xml", reasoning_parser="deepseek_r1")
    assert ModelFormat.of(named, template) == ModelFormat("qwen3_coder", "think")
    none = RouterConfig(tool_call_parser="none", reasoning_parser="none")
    assert ModelFormat.of(none, template) == ModelFormat()


CALLS_OF_TURNS = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
)
END_OF_TURNS = "{% endfor %}{% endfor %}"
HERMES_CALL = (
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}</tool_call>"
)


def test_a_format_is_used_only_if_the_calls_of_the_template_are_read_in_it():
    template = ChatTemplate(
        "{{ tools }}" + CALLS_OF_TURNS + HERMES_CALL + END_OF_TURNS, {}
    )
    assert ModelFormat.of(RouterConfig(), template).tools == "hermes"
    for wrong in (
        "<tool_call>{{ c.function.name }}: {{ c.function.arguments }}</tool_call>",
        "calls {{ c.function.name }}{# <tool_call> #}",
    ):
        template = ChatTemplate(
            "{{ tools }}" + CALLS_OF_TURNS + wrong + END_OF_TURNS, {}
        )
        assert ModelFormat.of(RouterConfig(), template).tools == ""


# How each format writes add(a=1), and what is between two calls.
CALLS: dict[str, tuple[str, str]] = {
    "hermes": (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        "\n",
    ),
    "llama3_json": ('{"name": "add", "parameters": {"a": 1}}', "; "),
    "mistral": ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]', ""),
    "phi4_mini_json": (
        '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]<|/tool_call|>',
        "",
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "\n",
    ),
    "glm45": (
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "\n",
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        "",
    ),
    "deepseek_v31": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        "",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
        '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
        "",
    ),
    "openai": (
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>',
        "",
    ),
    "pythonic": ("[add(a=1)]", ""),
}
SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/x"}},
    "required": ["a"],
    "$defs": {"x": {"type": "integer"}},
}
TOOLS = (CallableTool("add", SCHEMA, True), CallableTool("other", None, False))


class Judge:
    """Says which texts a grammar lets pass."""

    def __init__(self, grammar: str) -> None:
        self._grammar = grammar
        self._tokenizer = LLTokenizer("byte")

    def passes(self, text: str) -> bool:
        matcher = LLMatcher(self._tokenizer, self._grammar)
        token_ids = text.encode()
        ids = self._tokenizer.tokenize_bytes(token_ids)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("written", CALLS)
@pytest.mark.parametrize("is_required", [True, False])
@pytest.mark.parametrize(
    ("before", "is_open"),
    [("", None), ("Hm</think>\n\n", True), ("<think>Hm</think>\n", False)],
)
def test_a_grammar_lets_only_fitting_calls_pass_and_all_of_them_are_found(
    written, is_required, before, is_open
):
    row = call_format(written)
    rules = CallRules(TOOLS, is_required, is_parallel=True)
    grammar = checked_grammar(form_of_calls(rules, row))
    if is_open is not None:
        grammar = after_reasoning(grammar, "think", is_open=is_open)
    judge = Judge(grammar)
    call, between = CALLS[written]
    text = call + between + call if between else call
    assert judge.passes(before + text)
    reasoning = "" if is_open is None else "think"
    parsing = Parsing(written, ("add",), {"add": SCHEMA}, reasoning=reasoning)
    # Its reasoning has a channel, and no tag.
    if written != "openai" or is_open is None:
        parser = ResponseParser(parsing, is_thinking=bool(is_open))
        parts = parser.push(before + text, is_end=True)
        calls = merged_calls([part for part in parts if isinstance(part, ToolCall)])
        expected = [("add", {"a": 1})] * (2 if between else 1)
        assert [(one.name, json.loads(one.arguments)) for one in calls] == expected
    assert not judge.passes(before + call.replace("1", '"x"'))
    assert not judge.passes(before + call.replace("add", "sub"))
    assert judge.passes(before + "free text") is not is_required
    if is_required and row.body in ("json", "named_json"):
        # A call of a function that is not strict has no arguments but its own.
        other = call.replace("add", "other")
        assert judge.passes(before + other.replace('{"a": 1}', "{}"))
        assert not judge.passes(before + other)


@pytest.mark.parametrize("written", CALLS)
@pytest.mark.parametrize(
    "name", ["mcp/files:read", "日本", "a.b-c@d", "x" * 256, "f:0"]
)
def test_every_name_that_a_tool_may_have_is_found_in_a_call(written, name):
    text = CALLS[written][0].replace("add", name)
    tool = CallableTool(name, SCHEMA, True)
    rules = CallRules((tool,), is_required=True, is_parallel=False)
    if written == "pythonic" and not name.replace(".", "").isidentifier():
        function = {"type": "function", "function": {"name": name}}
        parsed = parse_chat(json.dumps({**BODY, "tools": [function]}).encode())
        with raises(RequestError, "invalid_request", "tools"):
            ModelFormat(tools=written).apply(parsed)
        return
    row = call_format(written)
    assert Judge(checked_grammar(form_of_calls(rules, row))).passes(text)
    parser = ResponseParser(Parsing(written, (name,), {name: SCHEMA}))
    parts = [part for letter in text for part in parser.push(letter)]
    parts += parser.push("", is_end=True)
    calls = merged_calls([part for part in parts if isinstance(part, ToolCall)])
    assert [(one.name, json.loads(one.arguments)) for one in calls] == [
        (name, {"a": 1})
    ]


@pytest.mark.parametrize("is_strict", [True, False])
def test_unique_items_are_left_out_of_schemas(is_strict):
    properties: dict[str, object] = {
        "tags": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        # Here it is a name, and below it is a value.
        "uniqueItems": {"enum": [{"uniqueItems": True}]},
    }
    schema: dict[str, object] = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
    }
    text = '{"tags": [1, 1], "uniqueItems": {"uniqueItems": true}}'
    assert Judge(checked_grammar(StructuredOutputsParams(json=schema))).passes(text)
    rules = CallRules(
        (CallableTool("add", schema, is_strict),), True, is_parallel=False
    )
    judge = Judge(checked_grammar(form_of_calls(rules, call_format("hermes"))))
    assert judge.passes(
        f'<tool_call>\n{{"name": "add", "arguments": {text}}}\n</tool_call>'
    )
    wrong = text.replace("1, 1", '"1"')
    assert not judge.passes(
        f'<tool_call>\n{{"name": "add", "arguments": {wrong}}}\n</tool_call>'
    )


def test_texts_choices_and_optional_arguments_have_a_place_in_the_grammars():
    schema = {
        "type": "object",
        "properties": {
            "why": {"type": "string"},
            "unit": {"enum": ["C", "F"]},
            "n": {},
        },
        "required": ["unit"],
    }
    rules = CallRules((CallableTool("add", schema, False),), True, is_parallel=False)
    judge = Judge(checked_grammar(form_of_calls(rules, call_format("glm45"))))
    unit = "<arg_key>unit</arg_key>\n<arg_value>C</arg_value>\n"
    why = "<arg_key>why</arg_key>\n<arg_value>a <b>\nc</arg_value>\n"
    for arguments, passes in (
        (unit, True),
        (unit + why, True),
        (why, False),
        ("", False),
    ):
        assert judge.passes(f"<tool_call>add\n{arguments}</tool_call>") is passes


@served(script=token_by_token, chat_template=QWEN)
async def test_a_form_of_json_beside_tools_lets_calls_pass_too(bench, engine):
    schema = {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["x"],
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert (await bench.post({**BODY, "response_format": form}, PATH)).status == 200
    judge = Judge(checked_grammar(engine.streams[0].params.structured_outputs))
    assert judge.passes('{"x": 1}')
    assert judge.passes('<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>')
    assert not judge.passes("free text")


@served(script=token_by_token, chat_template=QWEN)
async def test_another_form_beside_tools_is_kept_alone(bench, engine):
    call = '<tool_call>{"name": "add", "arguments": null}</tool_call>'
    body = {**BODY, "structured_outputs": {"choice": [call]}}
    assert (await bench.post(body, PATH)).status == 200
    judge = Judge(checked_grammar(engine.streams[0].params.structured_outputs))
    assert judge.passes(call)
    assert not judge.passes("free text")


@served(chat_template=QWEN)
async def test_a_demand_that_cannot_be_kept_is_refused_by_name(bench, engine):
    required = {**BODY, "tool_choice": "required"}
    for more, param in (
        ({"min_tokens": 2, "max_tokens": 9}, "min_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ):
        reply = await bench.post({**required, **more}, PATH)
        assert (reply.status, reply.error["param"]) == (400, param)
    assert not engine.streams


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_schema_that_cannot_be_kept_names_its_tool(choice):
    bad = {
        "type": "object",
        "properties": {"a": {"type": "string", "format": "no-such"}},
    }
    functions = [{"name": "f"}, {"name": "g", "parameters": bad, "strict": True}]
    tools = [{"type": "function", "function": function} for function in functions]
    body = {**BODY, "tools": [{"type": "web_search"}, *tools], "tool_choice": choice}
    parsed = parse_chat(json.dumps(body).encode())
    parsed = ModelFormat(tools="hermes").apply(parsed)
    wanted = parsed.params.structured_outputs
    assert wanted is not None
    with pytest.raises(RequestError) as caught, blaming(parsed.sent):
        checked_grammar(wanted)
    assert caught.value.param == "tools[2]"
    assert (
        caught.value.message
        == "the JSON schema cannot be enforced: Unknown format: no-such"
    )
