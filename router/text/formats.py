"""How model families write tool calls and reasoning: a row for each format.

A row says which marks of a chat template mean that its models write so, which tags a response
has, and what is before, between and after a call's name and arguments. One parser reads all rows,
and one grammar writes them. Where a format has a parser in vLLM or SGLang, it has vLLM's name, and
the other names of both are accepted.
"""

# ruff: noqa: RUF001  (DeepSeek's tags have full-width bars)

from typing import Literal

import msgspec

# How the arguments of a call are written: a JSON object beside its name in another (`json`); a
# JSON object after the name (`named_json`); a tag for each argument (`parameters`); Python
# (`pythonic`); or a message to a recipient (`harmony`).
CallBody = Literal["json", "named_json", "parameters", "pythonic", "harmony"]


class CallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A format of tool calls."""

    name: str
    body: CallBody
    other_names: tuple[str, ...] = ()
    # A template that has all texts of one of these tuples, and "tools", shows this format.
    marks: tuple[tuple[str, ...], ...]
    section: tuple[str, str] = ("", "")  # around all calls of a response
    call: tuple[str, str] = ("", "")  # around each call
    # As a model writes a call: before its name, between name and arguments, after the arguments.
    before: str = '{"name": "'
    middle: str = '", "arguments": '
    after: str = "}"
    between: str = ""  # two calls
    is_list: bool = False  # a section holds a JSON list of calls
    has_special_tags: bool = False  # the tags are special tokens, which are to be shown
    # Of `json`: the names of the fields.
    name_key: str = "name"
    arguments_keys: tuple[str, ...] = ("arguments", "parameters")
    # Of `named_json` and `parameters`: what is before the arguments, with the name as a group.
    header: str = ""
    # Of `named_json`: after the arguments; of `parameters`: after the last one.
    footer: str = ""
    # Of `parameters`: one argument, with its name as a group; "is_text" may be another.
    parameter: str = ""
    parameter_end: str = ""
    # As a model writes an argument: before its name, between name and value, after the value.
    parameter_form: tuple[str, str, str] = ("", "", "")
    has_line_breaks: bool = False  # one around each value, which are not part of it

    @property
    def trigger(self) -> str:
        """Return the text that begins calls; "" if only a response that begins so has calls."""
        return self.section[0] or self.call[0]


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Reasoning is the text from `begin` on, or from the start of a response, to `end`."""

    name: str
    other_names: tuple[str, ...] = ()
    begin: str
    end: str


MAX_TOOL_NAME = 256
TOOL_NAME_CHARS = r"\w.:/@+-"  # of a class in a pattern
# As short as what follows it allows: some formats write a number behind a name.
_NAME = rf"(?P<name>[{TOOL_NAME_CHARS}]{{1,{MAX_TOOL_NAME}}}?)"

CALL_FORMATS = (
    CallFormat(
        name="kimi_k2",
        body="named_json",
        marks=(("<|tool_calls_section_begin|>",),),
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        call=("<|tool_call_begin|>", "<|tool_call_end|>"),
        before="<|tool_call_begin|>functions.",
        middle=":0<|tool_call_argument_begin|>",
        after="<|tool_call_end|>",
        has_special_tags=True,
        header=rf"\s*(?:functions\.)?{_NAME}(?::\d+)?\s*<\|tool_call_argument_begin\|>",
    ),
    CallFormat(
        name="deepseek_v32",
        body="parameters",
        other_names=("deepseekv32",),
        marks=(("｜DSML｜",),),
        section=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        before='\n<｜DSML｜invoke name="',
        middle='">\n',
        after="</｜DSML｜invoke>\n",
        has_special_tags=True,
        header=rf'\s*<｜DSML｜invoke name="{_NAME}">',
        footer="</｜DSML｜invoke>",
        parameter=(
            r'<｜DSML｜parameter name="(?P<key>[^"]+)"(?: string="(?P<is_text>true|false)")?>'
        ),
        parameter_end="</｜DSML｜parameter>",
        parameter_form=('<｜DSML｜parameter name="', '">', "</｜DSML｜parameter>\n"),
    ),
    CallFormat(
        name="deepseek_v3",
        body="named_json",
        other_names=("deepseekv3",),
        marks=(("<｜tool▁calls▁begin｜>", "```json"),),
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        call=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        middle="\n```json\n",
        after="\n```<｜tool▁call▁end｜>",
        between="\n",
        has_special_tags=True,
        header=rf"\s*(?:function)?\s*<｜tool▁sep｜>\s*{_NAME}\s*```json\s*",
        footer="```",
    ),
    CallFormat(
        name="deepseek_v31",
        body="named_json",
        other_names=("deepseekv31",),
        marks=(("<｜tool▁calls▁begin｜>",),),
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        call=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        before="<｜tool▁call▁begin｜>",
        middle="<｜tool▁sep｜>",
        after="<｜tool▁call▁end｜>",
        has_special_tags=True,
        header=rf"\s*{_NAME}\s*<｜tool▁sep｜>\s*",
    ),
    CallFormat(
        name="minimax_m2",
        body="parameters",
        other_names=("minimax-m2",),
        marks=(("<minimax:tool_call>",),),
        section=("<minimax:tool_call>", "</minimax:tool_call>"),
        before='\n<invoke name="',
        middle='">\n',
        after="</invoke>\n",
        header=rf'\s*<invoke name="?{_NAME}"?>',
        footer="</invoke>",
        parameter=r'<parameter name="?(?P<key>[^">]+)"?>',
        parameter_end="</parameter>",
        parameter_form=('<parameter name="', '">', "</parameter>\n"),
    ),
    CallFormat(
        name="openai",
        body="harmony",
        other_names=("gpt-oss",),
        marks=(("<|channel|>",),),
        before="<|channel|>commentary to=functions.",
        middle=" <|constrain|>json<|message|>",
        after="<|call|>",
        has_special_tags=True,
    ),
    CallFormat(
        name="qwen3_coder",
        body="parameters",
        other_names=("qwen3_xml",),
        marks=(("<tool_call>", "<function="),),
        call=("<tool_call>", "</tool_call>"),
        before="<tool_call>\n<function=",
        middle=">\n",
        after="</function>\n</tool_call>",
        between="\n",
        header=rf"\s*<function={_NAME}>",
        footer="</function>",
        parameter=r"<parameter=(?P<key>[^>\n]+)>",
        parameter_end="</parameter>",
        parameter_form=("<parameter=", ">\n", "\n</parameter>\n"),
        has_line_breaks=True,
    ),
    CallFormat(
        name="glm45",
        body="parameters",
        other_names=("glm47", "glm"),
        marks=(("<tool_call>", "<arg_key>"),),
        call=("<tool_call>", "</tool_call>"),
        before="<tool_call>",
        middle="\n",
        after="</tool_call>",
        between="\n",
        header=rf"\s*{_NAME}\s*(?=<arg_key>|</tool_call>)",
        parameter=r"<arg_key>\s*(?P<key>[^<]+?)\s*</arg_key>\s*<arg_value>",
        parameter_end="</arg_value>",
        parameter_form=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    CallFormat(
        name="phi4_mini_json",
        body="json",
        marks=(("<|tool_call|>", "<|/tool_call|>"),),
        section=("<|tool_call|>", "<|/tool_call|>"),
        between=", ",
        is_list=True,
        has_special_tags=True,
    ),
    CallFormat(
        name="granite",
        body="json",
        marks=(("<|tool_call|>",),),
        section=("<|tool_call|>", ""),
        between=", ",
        is_list=True,
        has_special_tags=True,
    ),
    CallFormat(
        name="nemotron_json",
        body="json",
        other_names=("llama_nemotron_json",),
        marks=(("<TOOLCALL>",),),
        section=("<TOOLCALL>", "</TOOLCALL>"),
        between=", ",
        is_list=True,
    ),
    CallFormat(
        name="mistral",
        body="json",
        marks=(("[TOOL_CALLS]",),),
        section=("[TOOL_CALLS]", ""),
        between=", ",
        is_list=True,
        has_special_tags=True,
        # Since v11: `[TOOL_CALLS]name[ARGS]{…}`, repeated.
        header=rf"\s*{_NAME}(?:\[CALL_ID\]\w+)?\[ARGS\]\s*",
    ),
    CallFormat(
        name="cohere_command",
        body="json",
        marks=(("<|START_ACTION|>",),),
        section=("<|START_ACTION|>", "<|END_ACTION|>"),
        before='{"tool_call_id": "0", "tool_name": "',
        middle='", "parameters": ',
        between=", ",
        is_list=True,
        has_special_tags=True,
        name_key="tool_name",
    ),
    CallFormat(
        name="command_r",
        body="json",
        marks=(("Action:", '"tool_name"'),),
        section=("Action: ```json", "```"),
        before='{"tool_name": "',
        middle='", "parameters": ',
        between=",\n",
        is_list=True,
        name_key="tool_name",
    ),
    CallFormat(
        name="hermes",
        body="json",
        other_names=("qwen", "qwen25"),
        marks=(("<tool_call>",),),
        call=("<tool_call>", "</tool_call>"),
        before='<tool_call>\n{"name": "',
        after="}\n</tool_call>",
        between="\n",
    ),
    CallFormat(
        name="jamba",
        body="json",
        marks=(("<tool_calls>",),),
        section=("<tool_calls>", "</tool_calls>"),
        between=", ",
        is_list=True,
    ),
    CallFormat(
        name="pythonic",
        body="pythonic",
        other_names=("llama4_pythonic",),
        marks=(("func_name1(",), ("<|python_start|>",)),
        is_list=True,
        before="",
        middle="(",
        after=")",
        between=", ",
    ),
    CallFormat(
        name="llama3_json",
        body="json",
        other_names=("llama3", "llama4_json"),
        marks=(("<|start_header_id|>", '"parameters": '),),
        middle='", "parameters": ',
        between="; ",
    ),
)
# Of several that a template shows, the first.
_BY_NAME = {
    name: call_format
    for call_format in CALL_FORMATS
    for name in (call_format.name, *call_format.other_names)
}

REASONING_FORMATS = (
    ReasoningFormat(
        name="think",
        other_names=(
            "qwen3",
            "deepseek_r1",
            "deepseek-r1",
            "deepseek_v3",
            "deepseek-v3",
            "glm45",
            "glm47",
            "kimi_k2",
            "kimi",
            "minimax_m2",
            "minimax",
            "hunyuan_a13b",
            "qwen3-thinking",
            "step3",
        ),
        begin="<think>",
        end="</think>",
    ),
    ReasoningFormat(name="mistral", begin="[THINK]", end="[/THINK]"),
    ReasoningFormat(name="seed_oss", begin="<seed:think>", end="</seed:think>"),
    ReasoningFormat(
        name="cohere_command", begin="<|START_THINKING|>", end="<|END_THINKING|>"
    ),
    # Channels, which the parser of their calls reads.
    ReasoningFormat(
        name="openai_gptoss",
        other_names=("gpt-oss",),
        begin="<|channel|>analysis<|message|>",
        end="<|end|>",
    ),
)
_REASONING_BY_NAME = {
    name: reasoning
    for reasoning in REASONING_FORMATS
    for name in (reasoning.name, *reasoning.other_names)
}
CALL_FORMAT_NAMES = tuple(_BY_NAME)
REASONING_FORMAT_NAMES = tuple(_REASONING_BY_NAME)


def call_format(name: str) -> CallFormat:
    """Return the format that a setting or a request names. Raises `KeyError`."""
    return _BY_NAME[name]


def reasoning_format(name: str) -> ReasoningFormat:
    """Return the format that a setting or a request names. Raises `KeyError`."""
    return _REASONING_BY_NAME[name]


def shown_call_formats(source: str) -> list[CallFormat]:
    """Return the formats of calls whose marks a template's source has, the likeliest first."""
    if "tools" not in source:
        return []
    return [
        row
        for row in CALL_FORMATS
        if any(all(text in source for text in marks) for marks in row.marks)
    ]


def shown_reasoning_format(source: str) -> ReasoningFormat | None:
    """Return the format of reasoning that a template's source has the marks of."""
    if "<|channel|>" in source:
        return _REASONING_BY_NAME["openai_gptoss"]
    return next((row for row in REASONING_FORMATS if row.end in source), None)
