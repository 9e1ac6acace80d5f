"""Reasoning and tool calls are found in any text, however it is cut into deltas."""

# ruff: noqa: RUF001  (DeepSeek's tags have full-width bars)

import itertools
import json
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.protocol.config import ReasoningParser, ToolCallParser
from baton.router.outputs import ToolCall, merged_calls
from baton.router.text.formats import (
    CALL_FORMAT_NAMES,
    CALL_FORMATS,
    REASONING_FORMAT_NAMES,
)
from baton.router.text.response_parser import Parsing, Part, Reasoning, ResponseParser

ARGUMENTS = '{"city": "Öslo", "days": [1, 2]}'
WEATHER = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
LLAMA = WEATHER.replace("arguments", "parameters")
COHERE = LLAMA.replace('"name"', '"tool_name"')
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "array"}},
}
NAMES = ("weather", "now", "edit")


def call(index: int = 0, name: str = "weather", arguments: str = ARGUMENTS) -> ToolCall:
    return ToolCall(name, arguments, index)


def parsed(
    deltas: list[str],
    tools: str,
    *,
    reasoning: str = "",
    opened: bool = False,
    is_cut: bool = False,
    last: str = "",
) -> list[Part]:
    """Return the parts with neighbours of one kind joined."""
    parsing = Parsing(tools, NAMES, {"weather": SCHEMA}, reasoning=reasoning)
    parser = ResponseParser(parsing, is_thinking=opened)
    parts = [part for delta in deltas for part in parser.push(delta)]
    parts += parser.push(last, is_end=True, is_cut=is_cut)
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, str) and isinstance(last, str):
            joined[-1] = last + part
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + part.text)
        elif (
            isinstance(part, ToolCall) and isinstance(last, ToolCall) and not part.name
        ):
            (joined[-1],) = merged_calls([last, part])
        else:
            joined.append(part)
    return joined


def in_every_way(text: str, tools: str, **options: object) -> list[Part]:
    """Return the parts of a text, which are the same whole, by character, and cut anywhere."""
    whole = parsed([text], tools, **options)
    assert parsed([], tools, last=text, **options) == whole
    assert parsed(list(text), tools, **options) == whole
    for cut in range(1, len(text)):
        assert parsed([text[:cut], text[cut:]], tools, **options) == whole
    return whole


QWEN_CODER = """<tool_call>
<function=weather>
<parameter=city>
Öslo
</parameter>
<parameter=days>
[1, 2]
</parameter>
</function>
</tool_call>"""
GLM = """<tool_call>weather
<arg_key>city</arg_key>
<arg_value>Öslo</arg_value>
<arg_key>days</arg_key>
<arg_value>[1, 2]</arg_value>
</tool_call>"""
MINIMAX = """<minimax:tool_call>
<invoke name="weather">
<parameter name="city">Öslo</parameter>
<parameter name="days">[1, 2]</parameter>
</invoke>
{more}</minimax:tool_call>"""
DSML = """<｜DSML｜function_calls>
<｜DSML｜invoke name="weather">
<｜DSML｜parameter name="city" string="true">Öslo</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">[1, 2]</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>"""
V3 = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    f"{ARGUMENTS}\n```<｜tool▁call▁end｜>"
)
V31 = f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
KIMI = (
    "<|tool_call_begin|>functions.weather:{index}<|tool_call_argument_begin|>"
    f"{ARGUMENTS.replace('{', '{{').replace('}', '}}')}<|tool_call_end|>"
)
PYTHON = "weather(city='Öslo', days=[1, 2])"
HARMONY = (
    "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    f"{ARGUMENTS}<|call|>"
)


@pytest.mark.parametrize(
    ("tools", "text", "parts"),
    [
        ("hermes", f"<tool_call>\n{WEATHER}\n</tool_call>", [call()]),
        ("hermes", f"I look.\n<tool_call>{WEATHER}</tool_call>\n", ["I look.", call()]),
        ("hermes", f"<tool_call>{WEATHER}</tool_call>\n" * 2, [call(), call(1)]),
        ("hermes", f"<tool_call>{WEATHER}</tool_call> so", [call(), "so"]),
        ("hermes", f"<tool_call>[{WEATHER}, {WEATHER}]</tool_call>", [call(), call(1)]),
        ("llama3_json", LLAMA, [call()]),
        ("llama3_json", f"<|python_tag|>{LLAMA}", [call()]),
        ("llama3_json", f" {LLAMA}; {LLAMA}", [call(), call(1)]),
        ("llama3_json", f"[{LLAMA}]", [call()]),
        ("mistral", f"[TOOL_CALLS][{WEATHER}, {WEATHER}]", [call(), call(1)]),
        ("mistral", f"Yes. [TOOL_CALLS] [{WEATHER}]", ["Yes.", call()]),
        (
            "mistral",
            '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[CALL_ID]x1[ARGS]{"a": 1}',
            [call(0, "now", "{}"), call(1, "now", '{"a": 1}')],
        ),
        ("qwen3_coder", f"So.\n{QWEN_CODER}", ["So.", call()]),
        ("qwen3_coder", f"{QWEN_CODER}\n{QWEN_CODER}", [call(), call(1)]),
        (
            "qwen3_coder",
            "<tool_call><function=now></function></tool_call>",
            [call(0, "now", "{}")],
        ),
        ("glm45", GLM, [call()]),
        (
            "glm45",
            GLM.replace("\n", "") + "<tool_call>now</tool_call>",
            [call(), call(1, "now", "{}")],
        ),
        ("minimax_m2", MINIMAX.format(more=""), [call()]),
        (
            "minimax_m2",
            MINIMAX.format(more='<invoke name="now">\n</invoke>\n'),
            [call(), call(1, "now", "{}")],
        ),
        ("deepseek_v32", DSML, [call()]),
        (
            "deepseek_v3",
            f"<｜tool▁calls▁begin｜>{V3}\n{V3}<｜tool▁calls▁end｜>",
            [call(), call(1)],
        ),
        (
            "deepseek_v31",
            f"Ok.<｜tool▁calls▁begin｜>{V31}{V31}<｜tool▁calls▁end｜>",
            ["Ok.", call(), call(1)],
        ),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|>"
            + KIMI.format(index=0)
            + KIMI.format(index=1)
            + "<|tool_calls_section_end|>",
            [call(), call(1)],
        ),
        ("phi4_mini_json", f"<|tool_call|>[{WEATHER}]<|/tool_call|>", [call()]),
        ("granite", f"<|tool_call|>[{WEATHER}, {WEATHER}]", [call(), call(1)]),
        ("nemotron_json", f"<TOOLCALL>[{WEATHER}]</TOOLCALL>", [call()]),
        (
            "cohere_command",
            f'<|START_ACTION|>[{{"tool_call_id": "0", {COHERE[1:]}]<|END_ACTION|>',
            [call()],
        ),
        ("command_r", f"Action: ```json\n[{COHERE}]\n```", [call()]),
        ("jamba", f"<tool_calls>[{WEATHER}]</tool_calls>", [call()]),
        ("pythonic", f"[{PYTHON}, now()]", [call(), call(1, "now", "{}")]),
        ("pythonic", f"<|python_start|>[{PYTHON}]<|python_end|>", [call()]),
        (
            "openai",
            f"<|channel|>analysis<|message|>Hm<|end|><|start|>assistant{HARMONY}",
            [Reasoning("Hm"), call()],
        ),
        ("openai", "<|channel|>final<|message|>So < 3.<|return|>", ["So < 3."]),
        (
            "openai",
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
            [Reasoning("a"), "b"],
        ),
        ("openai", "plain", ["plain"]),
    ],
)
def test_calls_of_every_format_are_found(tools, text, parts):
    assert in_every_way(text, tools) == parts


def test_every_format_has_a_name_that_a_setting_takes():
    assert get_args(ToolCallParser) == ("auto", "none", *CALL_FORMAT_NAMES)
    assert get_args(ReasoningParser) == ("auto", "none", *REASONING_FORMAT_NAMES)
    assert len({row.name for row in CALL_FORMATS}) == len(CALL_FORMATS)


def test_a_call_streams_its_name_first_and_then_its_arguments():
    parser = ResponseParser(Parsing("hermes"))
    pieces = [
        '<tool_call>{"name": "we',
        'ather", "argu',
        'ments": {"ci',
        'ty": "Ö',
        'slo"}',
        "}",
    ]
    found = [parser.push(piece) for piece in pieces]
    assert found == [
        [],
        [],
        [call(0, "weather", ""), call(0, "", '{"ci')],
        [call(0, "", 'ty": "Ö')],
        [call(0, "", 'slo"}')],
        [],
    ]


@pytest.mark.parametrize(
    ("tools", "text", "arguments"),
    [
        # Text that looks like the end of a call is part of an argument.
        (
            "hermes",
            '<tool_call>{"name": "edit", "arguments": {"t": "a</tool_call>b"}}</tool_call>',
            {"t": "a</tool_call>b"},
        ),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "edit", "arguments": {"t": "[TOOL_CALLS]\\"]"}}]',
            {"t": '[TOOL_CALLS]"]'},
        ),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.edit:0"
            '<|tool_call_argument_begin|>{"t": "<|tool_call_end|>"}<|tool_call_end|>'
            "<|tool_calls_section_end|>",
            {"t": "<|tool_call_end|>"},
        ),
        # Arguments that are missing, null, or encoded twice.
        ("hermes", '<tool_call>{"name": "edit"}</tool_call>', {}),
        ("hermes", '<tool_call>{"name": "edit", "arguments": null}</tool_call>', {}),
        ("hermes", '<tool_call>{"name": "edit", "arguments": "{}"}</tool_call>', {}),
        (
            "hermes",
            '<tool_call>{"name": "edit", "arguments": "{\\"a\\": 1}"}</tool_call>',
            {"a": 1},
        ),
        ("mistral", '[TOOL_CALLS][{"name": "edit"}]', {}),
        ("llama3_json", '{"name": "edit"}', {}),
        # Other orders and forms of the same.
        (
            "hermes",
            '<tool_call>{"arguments": {"a": 1}, "name": "edit"}</tool_call>',
            {"a": 1},
        ),
        (
            "hermes",
            '<tool_call>{"function": {"name": "edit", "arguments": {"a": 1}}}</tool_call>',
            {"a": 1},
        ),
        (
            "hermes",
            '<tool_call>{"name": "edit", "arguments": {"a": 1}, "id": 7}</tool_call>',
            {"a": 1},
        ),
        (
            "hermes",
            '<tool_call>{"name": "edit", "arguments": {"a": "two\nlines"}}</tool_call>',
            {"a": "two\nlines"},
        ),
        # Values without a schema are JSON where they can be.
        (
            "qwen3_coder",
            "<tool_call><function=edit><parameter=a>\n7\n</parameter><parameter=b>\n\n"
            "x\n\n</parameter><parameter=c>True</parameter></function></tool_call>",
            {"a": 7, "b": "\nx\n", "c": True},
        ),
        (
            "pythonic",
            "[edit(a='x]', b={'c': None}, d=true)]",
            {"a": "x]", "b": {"c": None}, "d": True},
        ),
        ("openai", "<|channel|>commentary to=functions.edit<|message|><|call|>", {}),
    ],
)
def test_arguments_are_read_as_what_they_are(tools, text, arguments):
    (found,) = in_every_way(text, tools)
    assert isinstance(found, ToolCall)
    assert (found.name, json.loads(found.arguments)) == ("edit", arguments)


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("hermes", "a <tool_call> is a tag\n"),
        ("hermes", "<tool_call>[1]</tool_call><tool_call>{</tool_call>"),
        ("hermes", " 1 < 2 <tool \n "),
        ("llama3_json", '{"name": "Ada", "parameters": {}}'),
        ("llama3_json", '{"name": "weather", "parameters": 3}'),
        ("llama3_json", '{"answer": 42}'),
        ("llama3_json", "[1, 2]"),
        ("llama3_json", f"so {LLAMA}"),
        ("mistral", "[TOOL_CALLS] none [TOOL"),
        ("qwen3_coder", "<tool_call>\nnothing"),
        ("glm45", "<tool_call>"),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[unknown(a=1)]"),
        ("pythonic", "[weather(1)]"),
        ("pythonic", "see [weather(city='x')]"),
        ("openai", "a <|channel|> b"),
        ("", f"<tool_call>{WEATHER}</tool_call>"),
    ],
)
def test_text_that_only_looks_like_a_call_is_unchanged(tools, text):
    assert in_every_way(text, tools) == [text]


def test_deep_text_is_text():
    text = "[TOOL_CALLS]" + "[" * 100_000
    assert parsed([text], "mistral") == [text]


@pytest.mark.parametrize(
    ("tools", "text", "parts"),
    [
        ("hermes", '<tool_call>\n{"name": "wea', []),
        ("hermes", "So.\n<tool_call", ["So."]),
        ("hermes", "2 <", ["2 <"]),
        (
            "hermes",
            '<tool_call>{"name": "now", "arguments": {"ci',
            [call(0, "now", '{"ci')],
        ),
        ("llama3_json", '{"name": "wea', []),
        ("mistral", "[TOOL_CALLS][{", []),
        (
            "qwen3_coder",
            "<tool_call>\n<function=now>\n<parameter=city>\nÖs",
            [call(0, "now", "")],
        ),
        ("pythonic", "[weather(city='Ös", []),
    ],
)
def test_a_call_that_a_limit_cuts_is_no_content(tools, text, parts):
    assert in_every_way(text, tools, is_cut=True) == parts


def test_reasoning_is_apart_from_content():
    text = f"\n<think>\nHm <b>, </thin\n</think>\n\n<tool_call>{WEATHER}</tool_call>"
    assert in_every_way(text, "hermes", reasoning="think") == [
        Reasoning("\nHm <b>, </thin\n"),
        call(),
    ]
    opened = {"reasoning": "think", "opened": True}
    assert parsed(["Hm</think>4"], "", **opened) == [Reasoning("Hm"), "4"]
    assert parsed(["Hm"], "", **opened) == [Reasoning("Hm")]
    for content in ("4", " <thi", "a <think> b", "", "<"):
        assert parsed([content], "", reasoning="think") == (
            [content] if content else []
        )
    assert parsed(["<thi"], "", reasoning="think", is_cut=True) == []
    assert parsed(["Hm</thi"], "", is_cut=True, **opened) == [Reasoning("Hm")]
    assert in_every_way("[THINK]a[/THINK]b", "", reasoning="mistral") == [
        Reasoning("a"),
        "b",
    ]


def test_only_the_first_call_is_kept_where_calls_are_not_parallel():
    parser = ResponseParser(Parsing("hermes", parallel_tool_calls=False))
    text = f"<tool_call>{WEATHER}</tool_call>"
    parts = parser.push(text * 2, is_end=True)
    assert merged_calls([part for part in parts if isinstance(part, ToolCall)]) == (
        call(),
    )


TEXTS = st.lists(
    st.sampled_from(
        [
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "weather",
            WEATHER,
            LLAMA,
            "[",
            "]",
            "{",
            "}",
            ";",
            "\n",
            " ",
            "a",
            '"',
            "<",
            json.dumps(WEATHER),
            "<function=weather>",
            "<parameter=city>",
            "</parameter>",
            "</function>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
            PYTHON,
            "(",
            ")",
            "<|channel|>",
            "analysis",
            "<|message|>",
            "<|end|>",
            "<|call|>",
            "to=functions.weather",
            V31,
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            KIMI.format(index=0),
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            ARGUMENTS,
        ]
    ),
    max_size=12,
).map("".join)


@given(
    TEXTS,
    st.lists(st.integers(0, 400), max_size=12),
    st.sampled_from(["", *(row.name for row in CALL_FORMATS)]),
    st.sampled_from(["", "think"]),
    st.tuples(*[st.booleans()] * 3),
)
def test_parts_do_not_depend_on_the_cuts(text, cuts, tools, reasoning, switches):
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    deltas = [text[start:end] for start, end in itertools.pairwise(edges)]
    opened, is_cut, ends_at_once = switches
    last = deltas.pop() if ends_at_once and deltas else ""
    options = {"reasoning": reasoning, "opened": opened, "is_cut": is_cut}
    whole = parsed([text], tools, **options)
    assert parsed(deltas, tools, last=last, **options) == whole
    if not tools and not reasoning:
        assert "".join(map(str, parsed(deltas, tools, last=last))) == text
