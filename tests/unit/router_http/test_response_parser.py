"""Reasoning and tool calls are found in any text, however it is cut into deltas."""

import itertools
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.router.outputs import ToolCall
from baton.router.text.response_parser import Parsing, Part, Reasoning, ResponseParser, ToolFormat

WEATHER = '{"name": "weather", "arguments": {"city": "Öslo", "days": [1, 2]}}'
CALL = ToolCall("weather", '{"city": "Öslo", "days": [1, 2]}')
AGAIN = msgspec.structs.replace(CALL, index=1)
LLAMA = WEATHER.replace("arguments", "parameters")


def parsed(
    deltas: list[str], tools: ToolFormat | None, *, reasoning: bool = False, opened: bool = False
) -> list[Part]:
    """Return the parts with neighbours of one kind joined."""
    parser = ResponseParser(Parsing(tools, ("weather",), reasoning=reasoning), is_thinking=opened)
    parts = [part for delta in deltas for part in parser.push(delta)] + parser.push("", is_end=True)
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, str) and isinstance(last, str):
            joined[-1] = last + part
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + part.text)
        else:
            joined.append(part)
    return joined


@pytest.mark.parametrize(
    ("tools", "text", "parts"),
    [
        ("hermes", f"<tool_call>\n{WEATHER}\n</tool_call>", [CALL]),
        ("hermes", f"I look.\n<tool_call>{WEATHER}</tool_call>\n", ["I look.", CALL]),
        ("hermes", f"<tool_call>{WEATHER}</tool_call>\n" * 2, [CALL, AGAIN]),
        ("hermes", f"<tool_call>{WEATHER}</tool_call> so", [CALL, "so"]),
        ("llama3_json", LLAMA, [CALL]),
        ("llama3_json", f" {LLAMA}; {LLAMA}", [CALL, AGAIN]),
        ("mistral", f"[TOOL_CALLS][{WEATHER}, {WEATHER}]", [CALL, AGAIN]),
        ("mistral", f"Yes. [TOOL_CALLS] [{WEATHER}]", ["Yes.", CALL]),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{}[TOOL_CALLS]weather[CALL_ID]x1[ARGS]{"a": 1}',
         [ToolCall("weather", "{}"), ToolCall("weather", '{"a": 1}', 1)]),
    ],
)  # fmt: skip
def test_calls_of_every_format_are_found(tools, text, parts):
    assert parsed([text], tools) == parts
    assert parsed(list(text), tools) == parts


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("hermes", "a <tool_call> is a tag\n"),
        ("hermes", f"<tool_call>{WEATHER}"),
        ("hermes", "<tool_call>[1]</tool_call><tool_call>{</tool_call>"),
        ("hermes", " 1 < 2 <tool \n "),
        ("llama3_json", '{"name": "Ada", "parameters": {}}'),
        ("llama3_json", '{"name": "weather", "parameters": 3}'),
        ("llama3_json", f"so {LLAMA}"),
        ("llama3_json", f"{LLAMA} is a call"),
        ("mistral", "[TOOL_CALLS] none [TOOL"),
        ("mistral", f"[TOOL_CALLS]{WEATHER} and [TOOL_CALLS]x[ARGS]{{"),
        ("mistral", "[TOOL_CALLS]" + "[" * 100_000),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", r'<tool_call>{"name": "weather", "arguments": {"a": "\ud800"}}</tool_call>'),
        (None, f"<tool_call>{WEATHER}</tool_call>"),
    ],
)  # fmt: skip
def test_text_that_only_looks_like_a_call_is_unchanged(tools, text):
    assert parsed([text], tools) == [text]
    assert len(text) > 1000 or parsed(list(text), tools) == [text]


def test_reasoning_is_apart_from_content():
    text = f"\n<think>\nHm <b>, </thin\n</think>\n\n<tool_call>{WEATHER}</tool_call>"
    parts = [Reasoning("\nHm <b>, </thin\n"), CALL]
    for deltas in ([text], list(text)):
        assert parsed(deltas, "hermes", reasoning=True) == parts
    assert parsed(["Hm</think>4"], None, reasoning=True, opened=True) == [Reasoning("Hm"), "4"]
    assert parsed(["Hm"], None, reasoning=True, opened=True) == [Reasoning("Hm")]
    for content in ("4", " <thi", "a <think> b", "", "<"):
        assert parsed([content], None, reasoning=True) == ([content] if content else [])


TEXTS = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "weather",
         WEATHER, LLAMA, "[", "]", "{", "}", ";", "\n", " ", "a", '"', "<", json.dumps(WEATHER)]
    ), max_size=12,
).map("".join)  # fmt: skip


@given(
    TEXTS,
    st.lists(st.integers(0, 400), max_size=12),
    st.sampled_from(["hermes", "llama3_json", "mistral", None]),
    st.booleans(),
    st.booleans(),
)
def test_parts_do_not_depend_on_the_cuts(text, cuts, tools, reasoning, opened):
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    deltas = [text[start:end] for start, end in itertools.pairwise(edges)]
    whole = parsed([text], tools, reasoning=reasoning, opened=opened)
    assert parsed(deltas, tools, reasoning=reasoning, opened=opened) == whole
    if tools is None and not reasoning:
        assert "".join(map(str, parsed(deltas, tools))) == text
