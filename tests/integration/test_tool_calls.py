"""Calls that a request demands, through OpenAI's client and a whole cluster."""

import json
from typing import Any

import openai
import pytest

from tests.support.cluster import Cluster

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 0, "maximum": 99}},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": True}}
    for name in ("weather", "tides")
]


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "tides"}}]
)
def test_demanded_calls_fit_their_schema_whole_and_streamed(cluster: Cluster, choice: Any) -> None:
    asked: Any = {
        "model": "", "messages": [{"role": "user", "content": "the weather?"}], "tools": TOOLS,
        "tool_choice": choice, "parallel_tool_calls": choice != "required", "max_tokens": 150,
        "seed": 4,
    }  # fmt: skip
    with openai.OpenAI(base_url=cluster.url("/v1"), api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(**asked).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content is None
        (call,) = whole.message.tool_calls or ()
        assert call.type == "function"
        arguments = json.loads(call.function.arguments)
        assert set(arguments) == {"city", "days"}
        assert 0 <= arguments["days"] <= 99
        assert call.function.name == "tides" or choice == "required"
        with client.chat.completions.stream(**asked) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_completion().choices[0]
        (again,) = streamed.message.tool_calls or ()
        assert again.function.name == call.function.name
        assert again.function.arguments == call.function.arguments
        assert streamed.finish_reason == "tool_calls"
        # The turns of a call are taken back.
        asked["messages"] += [
            whole.message.model_dump(),
            {"role": "tool", "tool_call_id": call.id, "content": "rain"},
        ]
        asked |= {"tool_choice": "none", "max_tokens": 3}
        assert client.chat.completions.create(**asked).choices[0].finish_reason == "length"
