"""Tools and reasoning over HTTP: whole, streamed, and in a stream that is resumed."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from baton.protocol.config import RouterConfig
from baton.protocol.sampling import SamplingParams
from baton.router.core.stream import RequestStream
from baton.router.http.api.prepare import ModelFormat, form_of_calls
from baton.router.http.api.turns import Function, ToolUse
from baton.router.outputs import CompletionOutput, ToolCall
from baton.router.text.chat_template import ChatTemplate
from baton.router.text.grammars import after_reasoning, checked_grammar
from baton.router.text.response_parser import Parsing, ResponseParser, ToolFormat
from tests.support.http_bench import QWEN, TEXT, served

PATH = "/v1/chat/completions"
THOUGHT = "<think>hello</think>"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
BODY: dict[str, object] = {
    "messages": [{"role": "user", "content": "hello"}],
    "tools": [{"type": "function", "function": {"name": "add"}}],
}


TOKEN_IDS = TEXT.encode_now(f"{THOUGHT} the {CALL}.")  # the last one is the end, without text


def token_by_token(stream: RequestStream) -> None:
    for token_id in TOKEN_IDS[:-1]:
        stream.push(0, [token_id], None)
    stream.push(0, TOKEN_IDS[-1:], "stop")
    stream.finish()


def joined(events: list[tuple[str, str]]) -> dict[str, Any]:
    """Return what a client makes of the deltas of a stream."""
    chunks = [json.loads(data) for _, data in events if data != "[DONE]"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    return {
        "content": "".join(delta.get("content") or "" for delta in deltas),
        "reasoning": "".join(delta.get("reasoning", "") for delta in deltas),
        "calls": [call for delta in deltas for call in delta.get("tool_calls", ())],
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
    assert (call["index"], call["function"]["name"]) == (0, "add")


def test_a_resumed_stream_goes_on_with_the_same_parts():
    def stream() -> tuple[RequestStream, list[CompletionOutput]]:
        params, parsing = SamplingParams(), Parsing("hermes", reasoning=True)
        made = RequestStream("r", None, [1], params, [TEXT.detokenizer([1], params, 0, parsing)])
        deltas: list[CompletionOutput] = []
        made.send_to(deltas.append)
        return made, deltas

    first, whole = stream()
    token_by_token(first)
    for num_received in range(len(TOKEN_IDS)):
        second, rest = stream()
        second.replay(0, TOKEN_IDS[:num_received])
        for token_id in TOKEN_IDS[num_received:-1]:
            second.push(0, [token_id], None)
        second.push(0, TOKEN_IDS[-1:], "stop")
        second.finish()
        assert rest == whole[num_received:]


@served(chat_template=ChatTemplate("{{ messages[0].content }}", {}))
async def test_tools_that_the_model_cannot_call_are_refused(bench, engine):
    reply = await bench.post(BODY, PATH)
    assert (reply.status, reply.error["param"]) == (400, "tools")
    assert not engine.streams


@pytest.mark.parametrize(
    ("source", "tools", "reasoning"),
    [
        ("{{ tools }}<tool_call></think>", "hermes", True),
        ("{{ tools }}<tool_call><function=f>", None, False),
        ("{{ tools }}[TOOL_CALLS]", "mistral", False),
        ('{{ tools }}<|start_header_id|>"parameters": ', "llama3_json", False),
        ("<tool_call>", None, False),
    ],
)
def test_the_format_is_the_one_that_the_template_shows(source, tools, reasoning):
    template = ChatTemplate("{% raw %}" + source + "{% endraw %}", {})
    assert ModelFormat.of(RouterConfig(), template) == ModelFormat(tools, reasoning)
    named = RouterConfig(tool_call_parser="mistral", reasoning_parser="none")
    assert ModelFormat.of(named, template) == ModelFormat("mistral", False)


CALLS: dict[ToolFormat, tuple[str, str]] = {
    "hermes": ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "\n"),
    "llama3_json": ('{"name": "add", "parameters": {"a": 1}}', "; "),
    "mistral": ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]', ""),
}
SCHEMA: dict[str, object] = {
    "type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "required": ["a"],
    "$defs": {"x": {"type": "integer"}},
}  # fmt: skip


@pytest.mark.parametrize("written", CALLS)
@pytest.mark.parametrize("is_required", [True, False])
@pytest.mark.parametrize(
    ("before", "is_open"), [("", None), ("Hm</think>\n\n", True), ("<think>Hm</think>\n", False)]
)
def test_a_grammar_lets_only_fitting_calls_pass_and_all_of_them_are_found(
    written, is_required, before, is_open
):
    functions = (Function("add", parameters=SCHEMA, strict=True), Function("other"))
    grammar = checked_grammar(form_of_calls(ToolUse(functions, is_required, True), written))
    if is_open is not None:
        grammar = after_reasoning(grammar, is_open=is_open)
    tokenizer = LLTokenizer("byte")

    def is_let_pass(text: str) -> bool:
        matcher, token_ids = LLMatcher(tokenizer, grammar), tokenizer.tokenize_str(before + text)
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()

    call, between = CALLS[written]
    text = call + between + call if between else call
    assert is_let_pass(text)
    parsing = Parsing(written, ("add",), reasoning=is_open is not None)
    parts = ResponseParser(parsing, is_thinking=bool(is_open)).push(before + text, is_end=True)
    calls = [part for part in parts if isinstance(part, ToolCall)]
    assert calls == [ToolCall("add", '{"a": 1}', index) for index in range(2 if between else 1)]
    assert not is_let_pass(call.replace("1", '"x"'))
    assert not is_let_pass(call.replace("add", "sub"))
    assert is_let_pass("free text") is not is_required
    if is_required:  # a call of a function that is not strict has no arguments but its own
        other = call.replace("add", "other")
        assert is_let_pass(other.replace('{"a": 1}', "{}"))
        assert not is_let_pass(other)


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
