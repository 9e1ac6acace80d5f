"""Bodies of clients: every refusal names its field.

`tests.support.bad_requests` has the rest of what is refused.
"""

import json

import pytest

from baton.protocol.errors import RequestError
from baton.router.http.api.prepare import checked_prompt
from baton.router.http.api.schema import (
    Chat,
    ParsedRequest,
    parse_chat,
    parse_completion,
)
from baton.router.text.chat_template import ChatTemplate
from tests.support.refusals import raises


def body_of(**fields: object) -> bytes:
    return json.dumps({"prompt": "x", **fields}).encode()


def turn(**fields: object) -> bytes:
    return json.dumps(
        {"messages": [{"role": "user", "content": "hi", **fields}]}
    ).encode()


def with_tools(*functions: dict[str, object], choice: object = None) -> bytes:
    tools = [{"type": "function", "function": function} for function in functions]
    return (
        turn()[:-1]
        + f',"tools":{json.dumps(tools)},"tool_choice":{json.dumps(choice)}}}'.encode()
    )


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (b"{}", "prompt"),
        (body_of(prompt=["x", ""]), "prompt"),
        (body_of(prompt=[[1], []]), "prompt"),
        (body_of(stop="x" * 1025), "stop"),
        (body_of(stop=["x" * 1024] * 5), "stop"),
        (
            body_of(stream=True, stream_options={"include_usag": 1}),
            "stream_options.include_usag",
        ),
        (body_of(logit_bias=dict.fromkeys(range(1025), 0)), "logit_bias"),
        (body_of(logprobs=21, echo=True), "logprobs"),
        (body_of(prompt_logprobs=-1), "prompt_logprobs"),
        (body_of(prompt_logprobs=0, stream=True), "prompt_logprobs"),
        (body_of(cache_salt=""), "cache_salt"),
    ],
)
def test_a_wrong_field_of_a_completion_is_named(data, param):
    with pytest.raises(RequestError) as caught:
        parse_completion(data)
    assert caught.value.param == param
    assert caught.value.http_status == 400
    assert param.rsplit(".", maxsplit=1)[-1] in caught.value.message


def test_a_misspelt_field_is_answered_with_the_nearest():
    with pytest.raises(RequestError, match=r"did you mean max_tokens\?$"):
        parse_completion(body_of(max_tokns=3))


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (turn(role="assistant", tool_call_id="1"), "messages[0].tool_call_id"),
        (turn(audio={"id": "1"}), "messages[0].audio"),
        (
            with_tools(
                {"name": "f"}, choice={"type": "function", "function": {"name": "g"}}
            ),
            "tool_choice",
        ),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(data, param):
    with pytest.raises(RequestError) as caught:
        parse_chat(data)
    assert caught.value.param == param


def test_deep_nesting_where_it_would_be_skipped_is_refused():
    deep = turn(content=[{"type": "text", "text": "x", "more": "@"}])
    with raises(RequestError, "invalid_json"):
        parse_chat(deep.replace(b'"@"', b"[" * 200_000 + b"]" * 200_000))


def test_fields_that_ask_for_nothing_are_accepted():
    ask = parse_completion(
        body_of(
            best_of=2,
            n=2,
            suffix="",
            logprobs=None,
            use_beam_search=False,
            user="me",
            stream_options=None,
            priority=0,
        )
    )
    assert ask.prompts == ["x"]
    assert ask.params.n == 2


def test_an_answer_can_be_sent_back_as_it_came():
    answer = {
        "role": "assistant",
        "content": "yes",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
        "reasoning": "hm",
        "provider_specific_fields": {"a": 1},
        "unheard_of": None,
        "citations": ["b"],
        "thinking_blocks": [{"thinking": "hm"}],
        "reasoning_details": [{"text": "hm"}],
    }
    question = {
        "role": "user",
        "content": "null" * 100_000,
        "audio": None,
        "name": None,
    }
    body = {
        "messages": [answer, question],
        "reasoning_effort": None,
        "modalities": None,
        "n": None,
        "stream": True,
        "stream_options": {"include_usage": True, "unheard_of": None},
    }
    ask = parse_chat(json.dumps(body).encode())
    (chat,) = ask.prompts
    assert chat.messages == [
        {
            "role": "assistant",
            "content": "yes",
            "reasoning_content": "hm",
            "reasoning": "hm",
        },
        {"role": "user", "content": "null" * 100_000},
    ]
    assert ask.include_usage


@pytest.mark.parametrize(
    "data", [body_of(max_tokens=0, echo=True), body_of(max_tokens=0)]
)
def test_no_tokens_can_be_asked_for_only_with_an_echo(data):
    if b"echo" in data:
        assert not parse_completion(data).generates
    else:
        with raises(RequestError, "invalid_request", "max_tokens"):
            parse_completion(data)


LONG = "k" * 100_000


@pytest.mark.parametrize(
    "data",
    [
        body_of(**dict.fromkeys((LONG, *map(str, range(40))), 1)),
        body_of(response_format={"type": LONG}),
        body_of(stop=[LONG]),
        body_of()[:-1] + f',"{LONG}":NaN}}'.encode(),
        body_of()[:-1] + b',"temperature":' + b"1" * 100_000 + b"}",
        turn(content=[{"type": LONG}]),
        turn(role=3, name=LONG),
    ],
)
def test_an_error_repeats_little_of_what_a_client_sent(data):
    parse = parse_chat if b"messages" in data else parse_completion
    with pytest.raises(RequestError) as caught:
        parse(data)
    assert len(caught.value.message) < 300
    assert len(caught.value.param or "") < 300


def test_prompts_come_in_four_forms():
    forms: list[tuple[object, list[str | list[int]]]] = [
        ("ab", ["ab"]),
        ([1, 2], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ]
    for given, expected in forms:
        assert parse_completion(body_of(prompt=given)).prompts == expected


def test_a_completion_has_sixteen_tokens_by_default_and_a_chat_what_fits():
    assert parse_completion(body_of()).params.max_tokens == 16
    assert parse_completion(body_of(min_tokens=20)).params.max_tokens == 20
    assert parse_chat(turn()).params.max_tokens is None
    both = turn()[:-1] + b',"max_tokens":3,"max_completion_tokens":5}'
    assert parse_chat(both).params.max_tokens == 5


def test_what_a_body_leaves_out_comes_from_the_model_s_defaults():
    defaults = {"temperature": 0.6, "top_k": 20, "max_tokens": 3}
    params = parse_chat(turn(), defaults).params
    assert (params.temperature, params.top_k, params.max_tokens) == (0.6, 20, 3)
    given = turn()[:-1] + b',"temperature":0,"top_k":null,"max_tokens":5}'
    params = parse_chat(given, defaults).params
    assert (params.temperature, params.top_k, params.max_tokens) == (0, 20, 5)
    assert parse_completion(body_of(), defaults).params.max_tokens == 16


def test_text_parts_and_other_keys_of_a_turn_stay():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (chat,) = parse_chat(turn(content=parts, name="me")).prompts
    assert chat.messages == [{"role": "user", "content": parts, "name": "me"}]


def test_tools_and_their_turns_reach_the_template_as_objects():
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a": 1}'},
    }
    body = {
        "messages": [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [call],
                "reasoning_content": "hm",
            },
            {"role": "tool", "tool_call_id": "1", "content": "2"},
        ],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "parallel_tool_calls": False,
    }
    ask = parse_chat(json.dumps(body).encode())
    (chat,) = ask.prompts
    assert chat.messages[0]["tool_calls"] == [
        {
            "id": "1",
            "type": "function",
            "function": {"name": "f", "arguments": {"a": 1}},
        }
    ]
    assert chat.messages[1] == {"role": "tool", "content": "2", "tool_call_id": "1"}
    parameters = {"type": "object", "properties": {}}
    function = {"name": "f", "description": "", "parameters": parameters}
    assert chat.tools == [{"type": "function", "function": function}]
    assert ask.tools is not None
    assert not ask.tools.parallel_tool_calls
    none = parse_chat(json.dumps({**body, "tool_choice": "none"}).encode())
    assert none.tools is None
    assert isinstance(none.prompts[0], Chat)
    assert none.prompts[0].tools is None


def called(arguments: object) -> bytes:
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": arguments},
    }
    image = [{"type": "image_url", "image_url": {"url": "data:x"}}]
    turns = [
        {"role": "user", "content": image},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": image},
    ]
    return json.dumps({"messages": turns}).encode()


def test_images_become_placeholders_in_what_was_answered_and_in_results_of_tools():
    (chat,) = parse_chat(called("{}")).prompts
    assert isinstance(chat, Chat)
    question, _, result = chat.messages
    assert (
        question["content"]
        == result["content"]
        == [{"type": "text", "text": "[image]"}]
    )


# Templates that take the arguments of calls as objects, and as text.
TAKES = {
    "object": "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}",
    "text": "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name + ':' + c.function.arguments }}{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize(
    "arguments", ['{"zone": "U', "null", "[]", "3", '{"a":1}{"b":2}', None]
)
def test_broken_arguments_of_a_call_end_no_conversation(arguments):
    (chat,) = parse_chat(called(arguments)).prompts
    assert isinstance(chat, Chat)
    as_object = ChatTemplate(TAKES["object"], {})
    assert "f{}" in checked_prompt(chat, as_object)
    as_text = ChatTemplate(TAKES["text"], {})
    assert f"f:{arguments or '{}'}" in checked_prompt(chat, as_text)


def test_functions_take_what_other_servers_take():
    tool = {"type": "function", "strict": True}
    parameters = {"type": ["object", "null"], "properties": {}}
    tools = [{**tool, "function": {"name": "f", "parameters": parameters}}]
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools}
    use = parse_chat(json.dumps(body).encode()).tools
    assert use is not None
    (function,) = use.functions
    assert use.is_strict
    assert function.parameters == {"type": "object", "properties": {}}


@pytest.mark.parametrize(("mode", "is_required"), [("auto", False), ("required", True)])
def test_a_choice_of_allowed_tools_leaves_those_alone(mode, is_required):
    def asked(*names: str) -> ParsedRequest:
        tools = [
            {"type": "function", "function": {"name": name}} for name in ("f", "g", "h")
        ]
        allowed = [{"type": "function", "function": {"name": name}} for name in names]
        choice = {
            "type": "allowed_tools",
            "allowed_tools": {"mode": mode, "tools": allowed},
        }
        turns = [{"role": "user", "content": "hi"}]
        body = {"messages": turns, "tools": tools, "tool_choice": choice}
        return parse_chat(json.dumps(body).encode())

    ask = asked("h", "f")
    assert ask.tools is not None
    assert [function.name for function in ask.tools.functions] == ["f", "h"]
    assert ask.tools.is_required == is_required
    (chat,) = ask.prompts
    assert isinstance(chat, Chat)
    assert chat.tools is not None
    assert len(chat.tools) == 2
    with pytest.raises(RequestError) as caught:
        asked("i")
    assert caught.value.param == "tool_choice"


def test_too_many_log_probabilities_of_a_chat_are_those_of_top_logprobs():
    with raises(RequestError, "invalid_request", "top_logprobs"):
        parse_chat(turn()[:-1] + b',"logprobs":true,"top_logprobs":21}')


def test_limits_are_shown_with_all_of_their_digits():
    with pytest.raises(RequestError, match="0 and at most 2147483647"):
        parse_completion(body_of(min_tokens=-1))
