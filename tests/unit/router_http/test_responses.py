"""POST /v1/responses: items in, items and typed events out."""

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from baton.protocol.errors import RequestError
from baton.protocol.messages import TokenLogprobs
from baton.router.core.stream import RequestStream
from baton.router.http.api.responses_body import parse_response
from baton.router.http.api.schema import ParsedRequest
from tests.support.http_bench import QWEN, TEXT, HttpBench, hello, lost, saying, served

PATH = "/v1/responses"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TOOL: dict[str, object] = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object"},
}
BODY: dict[str, object] = {"input": "hello", "tools": [TOOL], "metadata": {"a": "b"}}
SAID = f"<think>hello</think> the {CALL} the end."
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
of_event: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


def scored(stream: RequestStream) -> None:
    for token_id in TEXT.encode_now("<think>hello</think> the end."):
        stream.push(0, [token_id], None, (TokenLogprobs(-0.5, 1, ((token_id, -0.5),)),))
    stream.push(0, [], "stop")
    stream.finish()


async def events_of(bench: HttpBench, body: dict[str, object]) -> list[dict[str, Any]]:
    """Return the events of a stream, which OpenAI's types must take."""
    # Other endpoints resume.
    headers = {"Last-Event-ID": "cmpl-000000000000000000000000:0"}
    async with bench.session.post(
        PATH, json={**body, "stream": True}, headers=headers
    ) as reply:
        blocks = (await reply.text()).removesuffix("\n\n").split("\n\n")
    events = []
    for number, (name, data) in enumerate(block.split("\n") for block in blocks):
        event = json.loads(data.removeprefix("data: "))
        assert (f"event: {event['type']}", number) == (name, event["sequence_number"])
        of_event.validate_json(data.removeprefix("data: "), strict=True)
        events.append(event)
    return events


def shown(output: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [
        (one["type"], one["status"], one.get("arguments") or one["content"][0]["text"])
        for one in output
    ]


@served(script=saying(SAID), chat_template=QWEN)
async def test_items_have_the_order_of_the_text_whole_and_streamed(bench):
    reply = await bench.post(BODY, PATH)
    Response.model_validate_json(reply.text, strict=True)
    whole: Any = reply.json
    assert shown(whole["output"]) == [
        ("reasoning", "completed", "hello"),
        ("message", "completed", "the"),
        ("function_call", "completed", '{"a": 1}'),
        ("message", "completed", "the end."),
    ]
    assert (whole["status"], whole["metadata"], whole["store"]) == (
        "completed",
        {"a": "b"},
        False,
    )
    assert whole["tools"] == [{**TOOL, "description": None, "strict": None}]
    assert len(whole["output"][2]["call_id"]) == 9
    usage = whole["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + len(TEXT.encode_now(SAID))
    assert usage["output_tokens_details"]["reasoning_tokens"] == len(
        TEXT.encode_now("<think>hello</think>")
    )
    events = await events_of(bench, BODY)
    assert [event["type"] for event in events[:2]] == [
        "response.created",
        "response.in_progress",
    ]
    assert events[-1]["type"] == "response.completed"
    assert shown(events[-1]["response"]["output"]) == shown(whole["output"])
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in done] == events[-1]["response"]["output"]
    for index, event in enumerate(done):
        parts = [one for one in events if one.get("output_index") == index]
        assert (parts[0]["type"], parts[0]["item"]["id"]) == (
            "response.output_item.added",
            event["item"]["id"],
        )
        delta = "".join(one["delta"] for one in parts if one["type"].endswith(".delta"))
        assert delta == shown([event["item"]])[0][2]
        assert {one.get("item_id", event["item"]["id"]) for one in parts} == {
            event["item"]["id"]
        }


@served(script=scored, chat_template=QWEN)
async def test_log_probabilities_are_those_of_the_message(bench):
    whole: Any = (await bench.post({"input": "hello", **LOGPROBS}, PATH)).json
    part = whole["output"][1]["content"][0]
    tokens = [
        TEXT.spell(True, token_id)[0] for token_id in TEXT.encode_now(" the end.")
    ]
    assert [one["token"] for one in part["logprobs"]] == tokens
    assert [len(one["top_logprobs"]) for one in part["logprobs"]] == [1] * len(
        part["logprobs"]
    )
    events = await events_of(bench, {"input": "hello", **LOGPROBS})
    deltas = [one for one in events if one["type"] == "response.output_text.delta"]
    assert [one for event in deltas for one in event["logprobs"]] == part["logprobs"]


@served(script=hello, chat_template=QWEN)
async def test_a_response_that_is_cut_is_incomplete(bench):
    (*_, last) = await events_of(bench, {"input": "hello", "max_output_tokens": 1})
    assert last["type"] == "response.incomplete"
    whole: Any = (
        await bench.post({"input": "hello", "max_output_tokens": 1}, PATH)
    ).json
    for response in (whole, last["response"]):
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert shown(response["output"]) == [("message", "incomplete", " hello")]


@served(script=saying(""), chat_template=QWEN)
async def test_a_response_without_text_is_an_empty_message(bench):
    whole: Any = (await bench.post({"input": "hello"}, PATH)).json
    assert shown(whole["output"]) == [("message", "completed", "")]


@served(script=lost, chat_template=QWEN)
async def test_a_stream_that_breaks_ends_with_its_error(bench):
    (*_, last) = await events_of(bench, {"input": "hello"})
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["message"] == "d0 is lost (node_lost)"
    assert shown(last["response"]["output"]) == [("message", "incomplete", " hello")]
    assert (await bench.post({"input": "hello"}, PATH)).status == 502


def parsed(**fields: object) -> ParsedRequest:
    return parse_response(json.dumps({"input": "hello", **fields}).encode(), {})


ITEMS: list[dict[str, object]] = [
    {"role": "developer", "content": "Be brief."},
    {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "sum?"}],
    },
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "encrypted_content": None,
        "content": [{"type": "reasoning_text", "text": "Hm"}],
    },
    {
        "type": "message",
        "id": "m",
        "status": "completed",
        "role": "assistant",
        "content": [
            {"type": "output_text", "text": "I add.", "annotations": [], "logprobs": []}
        ],
    },
    {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "c1",
        "name": "add",
        "arguments": '{"a":1}',
    },
    {
        "type": "function_call",
        "call_id": "c2",
        "name": "add",
        "arguments": "",
        "caller": None,
    },
    {"type": "function_call_output", "call_id": "c2", "output": "2"},
    {
        "type": "function_call_output",
        "call_id": "c1",
        "output": [{"type": "input_text", "text": "1"}],
        "status": "completed",
    },
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    {"role": "assistant", "content": "Yes."},
    {"type": "function_call", "call_id": "c3", "name": "add", "arguments": "{}"},
    {"role": "user", "content": "why?"},
]


def test_items_become_turns_in_their_order():
    ask = parsed(
        input=ITEMS, instructions="You add.", tools=[TOOL], parallel_tool_calls=False
    )
    (chat,) = ask.prompts

    def call(name: str, arguments: dict[str, object]) -> dict[str, object]:
        return {
            "id": name,
            "type": "function",
            "function": {"name": "add", "arguments": arguments},
        }

    assert chat.messages == [
        {"role": "system", "content": "You add.\n\nBe brief."},
        {"role": "user", "content": "sum?"},
        {
            "role": "assistant",
            "content": "I add.",
            "reasoning": "Hm",
            "reasoning_content": "Hm",
            "tool_calls": [call("c1", {"a": 1}), call("c2", {})],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c2"},
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
        {"role": "assistant", "content": "No."},
        {"role": "assistant", "content": "Yes.", "tool_calls": [call("c3", {})]},
        {"role": "user", "content": "why?"},
    ]
    assert chat.tools is not None
    assert chat.tools[0]["function"] == {
        "name": "add",
        "description": "",
        "parameters": {"type": "object"},
    }
    assert ask.tools is not None
    assert not ask.tools.parallel_tool_calls


def test_settings_are_those_of_a_chat():
    ask = parsed(
        max_output_tokens=7,
        temperature=0.5,
        top_k=3,
        stop=["x"],
        repetition_penalty=1.1,
        text={
            "format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
        },
        store=False,
        background=False,
        previous_response_id=None,
        truncation="disabled",
        reasoning={"effort": "low", "summary": "auto"},
        max_tool_calls=2,
        unknown=None,
        include=["reasoning.encrypted_content"],
        service_tier="auto",
    )
    params = ask.params
    assert (params.max_tokens, params.temperature, params.top_k, params.stop) == (
        7,
        0.5,
        3,
        ["x"],
    )
    assert params.structured_outputs is not None
    assert params.structured_outputs.json == {"type": "object"}
    assert (params.repetition_penalty, params.logprobs) == (1.1, None)
    assert parsed().params.max_tokens is None


@served(script=hello, chat_template=QWEN)
async def test_the_tokens_of_a_response_can_be_counted_before(bench):
    asked: dict[str, object] = {
        "input": ITEMS,
        "instructions": "You add.",
        "tools": [TOOL],
    }
    counted: Any = (await bench.post(asked, f"{PATH}/input_tokens")).json
    whole: Any = (await bench.post({**asked, "max_output_tokens": 9}, PATH)).json
    assert counted == {
        "object": "response.input_tokens",
        "input_tokens": whole["usage"]["input_tokens"],
    }


def test_what_agents_send_beside_the_conversation_changes_nothing():
    fields = {
        "reasoning": {"effort": "low", "summary": "concise"},
        "metadata": {"tags": ["a"]},
        "include": ["web_search_call.action.sources", "reasoning.encrypted_content"],
    }
    ask = parsed(**fields)
    assert ask.prompts == parsed(reasoning={"effort": "low"}).prompts
    assert ask.ignored == ("include.web_search_call.action.sources",)
    (chat,) = parsed(input=[], instructions="You add.").prompts
    assert chat.messages == [{"role": "system", "content": "You add."}]


def test_calls_of_other_tools_in_the_history_are_shown_and_other_items_become_placeholders():
    image = [{"type": "input_image", "image_url": "data:x"}]
    items = [
        {"role": "user", "content": image},
        {
            "type": "web_search_call",
            "id": "w",
            "status": "completed",
            "action": {"query": "x"},
        },
        {"type": "reasoning", "summary": [], "encrypted_content": "abc"},
        {"type": "custom_tool_call", "call_id": "a", "name": "patch", "input": "x"},
        {"type": "local_shell_call", "call_id": "b", "action": {"command": ["ls"]}},
        {"type": "custom_tool_call_output", "call_id": "a", "output": "done"},
        {"type": "local_shell_call_output", "call_id": "b", "output": image},
        {"role": "user", "content": "why?"},
    ]
    (chat,) = parsed(input=items).prompts

    def call(
        call_id: str, name: str, arguments: dict[str, object]
    ) -> dict[str, object]:
        function = {"name": name, "arguments": arguments}
        return {"id": call_id, "type": "function", "function": function}

    assert chat.messages == [
        {"role": "user", "content": "[image]"},
        {
            "role": "assistant",
            "content": "[web_search_call]",
            "tool_calls": [
                call("a", "patch", {"input": "x"}),
                call("b", "local_shell", {"command": ["ls"]}),
            ],
        },
        {"role": "tool", "content": "done", "tool_call_id": "a"},
        {"role": "tool", "content": "[image]", "tool_call_id": "b"},
        {"role": "user", "content": "why?"},
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"include": ["reasoning.encrypted_content", "web"]}, "include[1]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({**LOGPROBS, "top_logprobs": 21}, "top_logprobs"),
        ({"n": 2}, "n"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"text": {"format": {"type": "json_object"}}, "min_tokens": 2}, "min_tokens"),
        (
            {
                "text": {"format": {"type": "json_object"}},
                "structured_outputs": {"regex": "a"},
            },
            "text.format",
        ),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{**TOOL, "name": "a\nb"}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "parameters": {"type": "array"}}]}, "tools[0].parameters"),
        ({"tools": [{**TOOL, "paramters": {}}]}, "tools[0].paramters"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tool_choice": "required"}, "tools"),
        ({"input": ""}, "input"),
        ({"input": [{"type": ["message"], "role": "user"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [ITEMS[0], {"role": "user"}]}, "input[1].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [], "instructions": None}, "input"),
        (
            {"input": [{"type": "compaction", "encrypted_content": "x"}]},
            "input[0].type",
        ),
    ],
)
def test_what_cannot_be_honoured_is_named(fields, param):
    with pytest.raises(RequestError) as caught:
        parsed(**fields)
    assert (caught.value.param, caught.value.http_status) == (param, 400)
