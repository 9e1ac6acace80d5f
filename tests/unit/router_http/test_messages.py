"""POST /v1/messages: Anthropic's blocks in, blocks and their events out."""

import json
from typing import Any

import pytest

from baton.protocol.config import ClusterConfig, RouterConfig
from baton.protocol.errors import RequestError
from baton.router.core.stream import RequestStream
from baton.router.http.api.anthropic import parse_message
from tests.support.http_bench import QWEN, TEXT, HttpBench, hello, lost, saying, served

PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"
TOOL: dict[str, object] = {"name": "add", "input_schema": {"type": "object"}}
SAYS = [{"role": "user", "content": "hello"}]
BODY: dict[str, object] = {
    "model": "tiny",
    "max_tokens": 90,
    "messages": SAYS,
    "tools": [TOOL],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "metadata": {"user_id": "a"},
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
SAID = f"<think>hello</think> the end. {CALL}"


async def events_of(bench: HttpBench, body: dict[str, object]) -> list[dict[str, Any]]:
    async with bench.session.post(PATH, json={**body, "stream": True}) as reply:
        blocks = (await reply.text()).removesuffix("\n\n").split("\n\n")
    events = []
    for name, data in (block.split("\n") for block in blocks):
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


@served(script=saying(SAID), chat_template=QWEN)
async def test_blocks_have_the_order_of_the_text_whole_and_streamed(bench):
    whole: Any = (await bench.post(BODY, PATH)).json
    thinking, text, call = whole["content"]
    assert thinking == {"type": "thinking", "thinking": "hello", "signature": ""}
    assert (text["type"], text["text"].strip()) == ("text", "the end.")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "add", {"a": 1})
    assert (whole["type"], whole["role"], whole["model"]) == (
        "message",
        "assistant",
        "tiny",
    )
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)
    count: Any = (
        await bench.post(
            {name: BODY[name] for name in ("messages", "tools")}, COUNT_PATH
        )
    ).json
    assert whole["usage"] == {
        "input_tokens": count["input_tokens"],
        "output_tokens": len(TEXT.encode_now(SAID)),
        "cache_read_input_tokens": 0,
        "cache_creation_input_tokens": 0,
    }

    start, *events, delta, stop = await events_of(bench, BODY)
    assert (start["type"], start["message"]["content"]) == ("message_start", [])
    assert start["message"]["usage"]["input_tokens"] == count["input_tokens"]
    assert (delta["delta"], stop) == (
        {"stop_reason": "tool_use", "stop_sequence": None},
        {"type": "message_stop"},
    )
    assert delta["usage"] == whole["usage"]
    for index, block in enumerate(whole["content"]):
        opening, *changes, closing = [one for one in events if one["index"] == index]
        assert (opening["type"], closing["type"]) == (
            "content_block_start",
            "content_block_stop",
        )
        name = {"tool_use": "partial_json"}.get(block["type"], block["type"])
        joined = "".join(one["delta"][name] for one in changes)
        assert joined == ('{"a": 1}' if name == "partial_json" else block[name])
        empty: dict[str, object] = (
            {"input": {}} if name == "partial_json" else {name: ""}
        )
        assert (
            opening["content_block"] | {"id": block.get("id")}
            == {"id": None} | block | empty
        )
    assert [one["index"] for one in events] == sorted(one["index"] for one in events)


def inside_call(stream: RequestStream) -> None:
    stream.push(0, TEXT.encode_now(CALL[:-16]), "length")
    stream.finish()


@served(script=inside_call, chat_template=QWEN)
async def test_a_call_that_is_cut_has_no_input_and_is_no_text(bench):
    for choice in ("auto", "any"):
        whole: Any = (
            await bench.post({**BODY, "tool_choice": {"type": choice}}, PATH)
        ).json
        (block,) = whole["content"]
        assert (block["type"], block["input"]) == ("tool_use", {})
        assert whole["stop_reason"] == "max_tokens"


@served(script=saying(SAID), chat_template=QWEN)
async def test_thinking_is_shown_only_if_it_is_asked_for(bench):
    for thinking in (None, {"type": "disabled"}):
        body = {**BODY, "thinking": thinking}
        (chat,) = parse_message(json.dumps(body).encode(), {}).prompts
        assert chat.options == {"enable_thinking": False, "thinking": False}
        whole: Any = (await bench.post(body, PATH)).json
        assert [block["type"] for block in whole["content"]] == ["text", "tool_use"]


def cut(stream: RequestStream) -> None:
    limit = stream.params.max_tokens
    stream.push(
        0, TEXT.encode_now(" hello the end")[:limit], "length" if limit == 1 else "stop"
    )
    stream.finish()


@served(script=cut, chat_template=QWEN)
async def test_a_message_says_why_it_ended(bench):
    plain = {"model": "tiny", "messages": SAYS}
    for more, reason, sequence in (
        ({"max_tokens": 1}, "max_tokens", None),
        ({"max_tokens": 30}, "end_turn", None),
        ({"max_tokens": 30, "stop_sequences": ["the"]}, "stop_sequence", "the"),
    ):
        whole: Any = (await bench.post({**plain, **more}, PATH)).json
        assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
        *_, delta, _ = await events_of(bench, {**plain, **more})
        assert delta["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


@served(script=lost, chat_template=QWEN)
async def test_errors_have_anthropics_form(bench):
    *_, last = await events_of(bench, BODY)
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    for body, path, status, kind in (
        ({**BODY, "model": "claude"}, PATH, 404, "not_found_error"),
        ({"messages": SAYS}, PATH, 400, "invalid_request_error"),
        (BODY, PATH + "/batches", 404, "not_found_error"),
    ):
        reply = await bench.post(body, path)
        error: Any = reply.json
        assert (reply.status, error["type"], error["error"]["type"]) == (
            status,
            "error",
            kind,
        )


@served(
    config=ClusterConfig(router=RouterConfig(api_keys=("secret",))),
    script=hello,
    chat_template=QWEN,
)
async def test_a_key_may_come_in_the_header_of_anthropics_clients(bench):
    for headers, status in (
        ({"x-api-key": "secret"}, 200),
        ({"x-api-key": "other"}, 401),
    ):
        async with bench.session.post(PATH, json=BODY, headers=headers) as reply:
            assert reply.status == status


def test_turns_become_those_of_a_chat():
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "I add.", "citations": None},
        {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
    ]
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "is_error": False,
        "content": [{"type": "text", "text": "2"}],
    }
    body = BODY | {
        "system": [
            {
                "type": "text",
                "text": "Be short.",
                "cache_control": {"type": "ephemeral"},
            }
        ],
        "messages": [
            *SAYS,
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
        ],
        "tool_choice": {
            "type": "tool",
            "name": "add",
            "disable_parallel_tool_use": True,
        },
        "output_config": {
            "format": {"type": "json_schema", "schema": {"type": "object"}}
        },
    }
    ask = parse_message(json.dumps(body).encode(), {})
    (chat,) = ask.prompts
    call = {
        "id": "t1",
        "type": "function",
        "function": {"name": "add", "arguments": {"a": 1}},
    }
    assert chat.messages == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "content": "I add.",
            "reasoning": "hm",
            "reasoning_content": "hm",
            "tool_calls": [call],
        },
        {"role": "tool", "content": "2", "tool_call_id": "t1"},
        {"role": "user", "content": "And now?"},
    ]
    assert chat.options == {"enable_thinking": True, "thinking": True}
    assert ask.tools is not None
    assert (ask.tools.is_required, ask.tools.parallel_tool_calls) == (True, False)
    assert (ask.params.max_tokens, ask.form_param) == (90, "output_config.format")
    assert ask.params.structured_outputs is not None


def test_blocks_of_the_history_that_cannot_be_shown_become_placeholders():
    image = {"type": "image", "source": {"type": "base64", "data": "aGk="}}
    search = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}}
    found = {
        "type": "web_search_tool_result",
        "tool_use_id": "s1",
        "content": {"type": "error"},
    }
    calls = [
        {"type": "tool_use", "id": name, "name": "add", "input": {}}
        for name in ("t1", "t2", "t3")
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": [image]},
        {"type": "tool_result", "tool_use_id": "t2", "content": None},
        {"type": "tool_result", "tool_use_id": "t3", "content": "no", "is_error": True},
    ]
    turns = [
        {"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": [search, found, *calls]},
        {"role": "user", "content": results},
    ]
    (chat,) = parse_message(json.dumps(BODY | {"messages": turns}).encode(), {}).prompts
    user, answer, *shown = chat.messages
    assert user["content"] == "[image]\nWhat is it?"
    assert answer["content"] == "[server_tool_use]\n[web_search_tool_result]"
    assert [turn["content"] for turn in shown] == ["[image]", "", "Error: no"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        (
            {"messages": [{**SAYS[0], "content": [{"type": "image"}]}]},
            "messages[0].content[0]",
        ),
        ({"tools": [{"name": "add"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        (
            {"tools": [TOOL | {"input_schema": {"type": "array"}}]},
            "tools[0].input_schema",
        ),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
    ],
)
def test_what_is_not_there_is_refused_by_name(change, param):
    with pytest.raises(RequestError) as caught:
        parse_message(json.dumps(BODY | change).encode(), {})
    assert caught.value.param == param
