"""Fields that no body has: refused if they would change the output, else ignored and counted."""

import json

import pytest

from baton.protocol.errors import RequestError
from baton.router.http.api.anthropic import parse_message
from baton.router.http.api.decoding import MAX_UNKNOWN_FIELDS
from baton.router.http.api.responses_body import parse_response
from baton.router.http.api.schema import ParsedRequest, parse_chat, parse_completion
from tests.support.http_bench import QWEN, HttpBench, hello, served
from tests.support.refusals import raises

TURNS = [{"role": "user", "content": "hi"}]
FUNCTION = {"type": "function", "function": {"name": "f"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}


def completion(**fields: object) -> ParsedRequest:
    return parse_completion(json.dumps({"prompt": "x", **fields}).encode())


def chat(**fields: object) -> ParsedRequest:
    return parse_chat(json.dumps({"messages": TURNS, **fields}).encode())


def response(**fields: object) -> ParsedRequest:
    return parse_response(json.dumps({"input": "hi", **fields}).encode(), {})


def message(**fields: object) -> ParsedRequest:
    return parse_message(
        json.dumps({"messages": TURNS, "max_tokens": 5, **fields}).encode(), {}
    )


BODIES = (completion, chat, response, message)


@pytest.mark.parametrize("body", BODIES)
def test_unknown_fields_that_change_nothing_are_ignored_by_name(body):
    fields = {
        "client_metadata": {"a": [1]},
        "thread": {"type": "create"},
        "mcp_servers": [],
        "documents": None,
        "rid": "7",
        "id": "x",
        "betas": ["b"],
    }
    with_them = body(**fields)
    assert set(with_them.ignored) == fields.keys() - {"documents"}
    assert (with_them.params, with_them.prompts) == (body().params, body().prompts)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    "fields",
    [
        {"mcp_servers": [{"name": "a"}]},
        {"min_p_": 1, "documents": ["a"]},
        {"ebnf": "root"},
        {"top_a": 0},
        {"extra_body": {"seed": 1}},
    ],
)
def test_an_unknown_field_that_would_change_the_output_is_refused_by_name(body, fields):
    with pytest.raises(RequestError) as caught:
        body(**fields)
    *_, name = fields
    assert (caught.value.param, caught.value.code) == (name, "unsupported")


@pytest.mark.parametrize(
    ("body", "name", "advice"),
    [
        (chat, "functions", "use tools"),
        (chat, "enable_thinking", "use chat_template_kwargs"),
        (chat, "guided_json", "use structured_outputs"),
        (chat, "max_output_tokens", "use max_tokens"),
        (response, "max_tokens", "use max_output_tokens"),
        (response, "messages", "use input"),
        (message, "stop", "use stop_sequences"),
        (message, "response_format", "use output_config"),
        (message, "enable_thinking", "use thinking"),
    ],
)
def test_a_field_of_another_api_points_to_what_does_the_same(body, name, advice):
    for value in ([], False, {"a": 1}):
        with pytest.raises(RequestError) as caught:
            body(**{name: value})
        assert caught.value.param == name
        assert caught.value.message.endswith(advice)


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (completion, {"n": 2, "messages_": 1, "max_tokenss": 1}),
        (chat, {"temprature": 1}),
        (response, {"max_ouput_token": 1}),
        (message, {"output_config": {"efort": "low"}}),
        (chat, {"tools": [{**FUNCTION, "function": {"name": "f", "paramters": {}}}]}),
        (response, {"tools": [{"type": "function", "name": "f", "descripton": ""}]}),
        (message, {"tools": [{"name": "f", "input_shema": {}}]}),
    ],
)
def test_a_field_with_up_to_two_wrong_letters_is_refused(body, fields):
    with pytest.raises(RequestError, match="did you mean"):
        body(**fields)


def test_values_that_ask_for_nothing_are_ignored():
    assert message(n=1, presence_penalty=0, logprobs=False).ignored
    for fields in ({"n": 2}, {"presence_penalty": 1}, {"logprobs": True}):
        with pytest.raises(RequestError):
            message(**fields)


@pytest.mark.parametrize("body", BODIES)
def test_a_body_may_have_few_unknown_fields(body):
    names = [f"unknown_{number}" for number in range(MAX_UNKNOWN_FIELDS + 1)]
    assert set(body(**dict.fromkeys(names[1:], 1)).ignored) == set(names[1:])
    with raises(RequestError, "invalid_request", "unknown_0"):
        body(**dict.fromkeys(names, 1))


def test_unknown_keys_of_turns_and_tools_are_ignored_and_named_without_numbers():
    keys: dict[str, object] = {
        "parsed": {"n": 1},
        "weight": 0,
        "images": [],
        "timestamp": 1,
    }
    turns = [
        *TURNS,
        {"role": "assistant", "content": "yes", **keys},
        {**TURNS[0], "weight": 1},
    ]
    tools = [{**FUNCTION, "defer_loading": True, "function": {"name": "f", "x": 1}}]
    asked = chat(messages=turns, tools=tools)
    names = {f"messages.{key}" for key in keys}
    assert set(asked.ignored) == names | {"tools.defer_loading", "tools.function.x"}
    (prompt,) = asked.prompts
    (plain,) = chat(
        messages=[*TURNS, {"role": "assistant", "content": "yes"}, *TURNS]
    ).prompts
    assert prompt.messages == plain.messages

    tool = {"name": "f", "input_schema": {}, "allowed_callers": ["direct"]}
    sent = message(messages=[{**TURNS[0], "id": "a"}], tools=[tool])
    assert set(sent.ignored) == {"messages.id", "tools.allowed_callers"}


def test_content_that_the_model_would_miss_is_refused_in_any_key_of_a_question():
    with pytest.raises(RequestError) as caught:
        chat(messages=[{**TURNS[0], "images": ["aGk="]}])
    assert caught.value.param == "messages[0].images"


@pytest.mark.parametrize(
    ("body", "function", "others"),
    [
        (chat, FUNCTION, [{"type": "custom", "custom": {"name": "patch"}}]),
        (response, {"type": "function", "name": "f"}, [{"type": "web_search"}]),
        (message, {"name": "f", "input_schema": {}}, [SEARCH, {"type": "mcp_toolset"}]),
    ],
)
def test_tools_that_servers_run_are_ignored_only_beside_functions(
    body, function, others
):
    kinds = {f"tools.{tool['type']}" for tool in others}
    beside = body(tools=[*others, function])
    assert [each.name for each in beside.tools.functions] == ["f"]
    assert kinds <= set(beside.ignored)
    none = {"type": "none"} if body is message else "none"
    assert kinds <= set(body(tools=others, tool_choice=none).ignored)
    with pytest.raises(RequestError) as caught:
        body(tools=others)
    assert caught.value.param == "tools[0].type"


def test_an_unknown_field_has_to_be_text_and_not_too_deep():
    start = b'{"prompt":"x","a":'
    for value in (b'"\xff"}', b"[" * 100_000 + b"]" * 100_000 + b"}"):
        with pytest.raises(RequestError):
            parse_completion(start + value)


def test_a_byte_order_mark_is_skipped():
    assert parse_completion(b'\xef\xbb\xbf{"prompt":"x"}').prompts == ["x"]


@served(script=hello, chat_template=QWEN)
async def test_ignored_fields_are_counted_by_name(bench: HttpBench):
    body: dict[str, object] = {"messages": TURNS, "max_tokens": 5, "speed": "fast"}
    for path, more in (
        ("/v1/messages", {}),
        ("/v1/messages/count_tokens", {"messages": [{**TURNS[0], "id": 1}]}),
    ):
        count = {
            name: value
            for name, value in {**body, **more}.items()
            if name != "max_tokens"
        }
        sent = body if path == "/v1/messages" else count
        assert (await bench.post(sent, path)).status == 200
    async with bench.session.get("/metrics") as reply:
        lines = (await reply.text()).splitlines()
    counts = [line for line in lines if line.startswith("baton_ignored_fields_total")]
    assert any('field="speed"' in line and line.endswith(" 2.0") for line in counts)
    assert any(
        'field="messages.id"' in line and line.endswith(" 1.0") for line in counts
    )
