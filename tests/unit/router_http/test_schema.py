"""Bodies of clients: every refusal names its field, and no wish is ignored.

`tests.support.bad_requests` has the rest of what is refused.
"""

import json

import pytest

from baton.protocol.errors import RequestError
from baton.router.http.api.schema import Chat, parse_chat, parse_completion


def body_of(**fields: object) -> bytes:
    return json.dumps({"prompt": "x", **fields}).encode()


def turn(**fields: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "hi", **fields}]}).encode()


def with_tools(*functions: dict[str, object], choice: object = None) -> bytes:
    tools = [{"type": "function", "function": function} for function in functions]
    return (
        turn()[:-1] + f',"tools":{json.dumps(tools)},"tool_choice":{json.dumps(choice)}}}'.encode()
    )


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (b"{}", "prompt"),
        (body_of(prompt=["x", ""]), "prompt"),
        (body_of(prompt=[[1], []]), "prompt"),
        (body_of(stop="x" * 1025), "stop"),
        (body_of(stop=["x" * 1024] * 5), "stop"),
        (body_of(stream=True, stream_options={"include": 1}), "stream_options.include"),
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
    with pytest.raises(RequestError, match=r"max_tokns; did you mean max_tokens\?$"):
        parse_completion(body_of(max_tokns=3))


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (turn(role="assistant", tool_call_id="1"), "messages[0].tool_call_id"),
        (turn(wishes=1, hopes=None), "messages[0].wishes"),
        (turn(audio={"id": "1"}), "messages[0].audio"),
        (
            with_tools({"name": "f"}, choice={"type": "function", "function": {"name": "g"}}),
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
    with pytest.raises(RequestError, match="nested"):
        parse_chat(deep.replace(b'"@"', b"[" * 200_000 + b"]" * 200_000))


def test_fields_that_ask_for_nothing_are_accepted():
    ask = parse_completion(
        body_of(
            best_of=2, n=2, suffix="", logprobs=None, use_beam_search=False, user="me",
            stream_options=None, priority=0,
        )
    )  # fmt: skip
    assert ask.prompts == ["x"]
    assert ask.params.n == 2


def test_an_answer_can_be_sent_back_as_it_came():
    answer = {
        "role": "assistant", "content": "yes", "refusal": None, "annotations": [],
        "audio": None, "function_call": None, "tool_calls": None, "reasoning": "hm",
        "provider_specific_fields": {"a": 1}, "unheard_of": None, "citations": ["b"],
        "thinking_blocks": [{"thinking": "hm"}], "reasoning_details": [{"text": "hm"}],
    }  # fmt: skip
    question = {"role": "user", "content": "null" * 100_000, "audio": None, "name": None}
    body = {
        "messages": [answer, question], "reasoning_effort": None, "modalities": None, "n": None,
        "stream": True, "stream_options": {"include_usage": True, "unheard_of": None},
    }  # fmt: skip
    ask = parse_chat(json.dumps(body).encode())
    (chat,) = ask.prompts
    assert chat.messages == [
        {"role": "assistant", "content": "yes", "reasoning_content": "hm", "reasoning": "hm"},
        {"role": "user", "content": "null" * 100_000},
    ]
    assert ask.include_usage


@pytest.mark.parametrize("data", [body_of(max_tokens=0, echo=True), body_of(max_tokens=0)])
def test_no_tokens_can_be_asked_for_only_with_an_echo(data):
    if b"echo" in data:
        assert not parse_completion(data).generates
    else:
        with pytest.raises(RequestError, match="at least 1"):
            parse_completion(data)


LONG = "k" * 100_000


@pytest.mark.parametrize(
    "data",
    [
        body_of(**{LONG: 1}),
        body_of(stream=True, stream_options={LONG: 1}),
        body_of(metadata={LONG: 1}),
        body_of(stop=[LONG]),
        body_of()[:-1] + f',"{LONG}":NaN}}'.encode(),
        body_of()[:-1] + b',"temperature":' + b"1" * 100_000 + b"}",
        turn(**{LONG: 1}),
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
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    body = {
        "messages": [
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "1", "content": "2"},
        ],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "parallel_tool_calls": False,
    }
    ask = parse_chat(json.dumps(body).encode())
    (chat,) = ask.prompts
    assert chat.messages[0]["tool_calls"] == [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
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
