"""Reasoning and tool calls in the text of a response, found while it streams.

They do not depend on how the text was cut into deltas, so a resumed stream finds the same. A tool
call is given out when it is whole; text that only looks like a call or a tag comes out unchanged.

The formats of tool calls have the names of vLLM's parsers:

- `hermes` (Qwen2.5, Qwen3): `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, repeated
- `llama3_json` (Llama 3.x): the content is `{"name": …, "parameters": {…}}`, several apart by `;`
- `mistral`: `[TOOL_CALLS]` and a list of calls, or `[TOOL_CALLS]name[ARGS]{…}`, repeated
"""

import json
import re
from collections.abc import Iterator
from typing import Literal

import msgspec

from baton.protocol.messages import FinishReason
from baton.protocol.sampling import SamplingParams
from baton.router.outputs import CompletionOutput, ToolCall
from baton.router.text.detokenizer import Detokenizer, TextStream, num_begun

ToolFormat = Literal["hermes", "llama3_json", "mistral"]
THINK, END_THINK = "<think>", "</think>"

_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_CALLS = "[TOOL_CALLS]"
_LLAMA_STARTS = ('{"name"', '{"type"', '{"function"', '{"parameters"')
_MAX_LLAMA_START = 100  # characters, white space included
_MISTRAL_NAME = re.compile(r"\s*([\w.-]{1,128})(?:\[CALL_ID\]\w+)?\[ARGS\]", re.ASCII)
_SEPARATORS = re.compile(r"[\s;]*")
_decoder = json.JSONDecoder()


class Parsing(msgspec.Struct, frozen=True):
    """What to find in the text of a response."""

    tools: ToolFormat | None = None
    # llama3_json has no tag, so only the names of the request's tools make JSON a call.
    tool_names: tuple[str, ...] = ()
    parallel_tool_calls: bool = True  # otherwise, calls after the first are dropped
    reasoning: bool = False
    include_reasoning: bool = True  # otherwise, reasoning is dropped


class Reasoning(msgspec.Struct, frozen=True):
    text: str


Part = str | Reasoning | ToolCall  # a str is content


class ResponseParser:
    """The parser of one choice.

    With `parsing.reasoning`, a response that begins with `<think>` has reasoning up to `</think>`.
    If the prompt opened it (`is_thinking`), the response begins inside.
    """

    __slots__ = (
        "_drops_white", "_held", "_is_start", "_is_thinking", "_may_open", "_parsing",
        "has_thought", "num_calls",
    )  # fmt: skip

    def __init__(self, parsing: Parsing, *, is_thinking: bool = False) -> None:
        self._parsing = parsing
        self._held = ""
        self._may_open = parsing.reasoning  # a tag may open the response
        self._is_thinking = self.has_thought = parsing.reasoning and is_thinking
        self._is_start = True  # no content was given out
        self._drops_white = False  # white space beside tags is no content
        self.num_calls = 0

    @property
    def may_think(self) -> bool:
        """Return whether the text so far is reasoning, or may turn out to begin it."""
        return self._is_thinking or self._may_open

    def push(self, text: str, *, is_end: bool = False) -> list[Part]:
        """Return the parts that `text` completes. Text that may become a tag is held back."""
        if self._is_plain(text):  # almost every token
            self._is_start = False
            return [text]
        self._held += text
        return list(self._parts(is_end)) if self._held else []

    def _is_plain(self, text: str) -> bool:
        """Return whether `text` is content at once, whatever follows."""
        if not text or self._held or self._drops_white or self.may_think:
            return False
        match self._parsing.tools:
            case "hermes" | "mistral" as tools:
                tag = _CALL if tools == "hermes" else _CALLS
                return tag[0] not in text and not text[-1].isspace()
            case "llama3_json":
                return not self._is_start
        return True

    # --- inside --------------------------------------------------------------------------------

    def _parts(self, is_end: bool) -> Iterator[Part]:
        if self._may_open:
            start = self._held.lstrip()
            if len(start) < len(THINK) and THINK.startswith(start) and not is_end:
                return
            self._may_open = False
            if start.startswith(THINK):
                self._held = start.removeprefix(THINK)
                self._is_thinking = self.has_thought = True
        if self._is_thinking:
            reasoning, tag, rest = self._held.partition(END_THINK)
            if not tag and not is_end:
                reasoning, rest = _cut_begun(reasoning, END_THINK)
            self._held = rest
            if reasoning:
                yield Reasoning(reasoning)
            if not tag:
                return
            self._is_thinking, self._drops_white = False, True
        if self._drops_white:
            self._held = self._held.lstrip()
        match self._parsing.tools:
            case "hermes":
                yield from self._hermes(is_end)
            case "llama3_json" if self._is_start:
                yield from self._llama(is_end)
            case "mistral":
                yield from self._mistral(is_end)
            case _:
                yield from self._content(len(self._held))

    def _content(self, num_chars: int) -> Iterator[str]:
        """Yield the next characters as content."""
        text, self._held = self._held[:num_chars], self._held[num_chars:]
        if text:
            self._is_start = self._drops_white = False
            yield text

    def _plain(self, tag: str, is_end: bool) -> Iterator[str]:
        """Yield text without `tag`, up to where a tag, or the white space before one, may begin."""
        text = self._held if is_end else _cut_begun(self._held, tag)[0].rstrip()
        yield from self._content(len(text))

    def _calls(self, calls: list[ToolCall]) -> Iterator[ToolCall]:
        self._is_start = False
        for call in calls:
            if self.num_calls == 0 or self._parsing.parallel_tool_calls:
                yield msgspec.structs.replace(call, index=self.num_calls)
                self.num_calls += 1

    def _hermes(self, is_end: bool) -> Iterator[Part]:
        while (start := self._held.find(_CALL)) >= 0:
            end = self._held.find(_END_CALL, start)
            if end < 0 and not is_end:
                yield from self._content(len(self._held[:start].rstrip()))
                return
            calls = _calls_in(self._held[start + len(_CALL) : end]) if end >= 0 else []
            if not calls:
                yield from self._content(start + len(_CALL))
                continue
            yield from self._content(len(self._held[:start].rstrip()))
            yield from self._calls(calls)
            rest = self._held.partition(_END_CALL)[2]
            self._held, self._drops_white = rest.lstrip(), True
        yield from self._plain(_CALL, is_end)

    def _mistral(self, is_end: bool) -> Iterator[Part]:
        """Everything behind the tag is calls, so they are read at the end."""
        start = self._held.find(_CALLS)
        if start < 0:
            yield from self._plain(_CALLS, is_end)
            return
        if not is_end:
            yield from self._content(len(self._held[:start].rstrip()))
            return
        calls = _mistral_calls(self._held[start:])
        yield from self._content(len(self._held[:start].rstrip()) if calls else len(self._held))
        yield from self._calls(calls)
        self._held = ""

    def _llama(self, is_end: bool) -> Iterator[Part]:
        """The whole content is calls or none is, so they are read at the end."""
        begun = "".join(self._held[:_MAX_LLAMA_START].split())
        could_be_calls = any(
            start.startswith(begun) or begun.startswith(start) for start in _LLAMA_STARTS
        )
        if not is_end and could_be_calls:
            return
        calls = _calls_in(self._held) if could_be_calls else []
        if calls and all(call.name in self._parsing.tool_names for call in calls):
            yield from self._calls(calls)
            self._held = ""
        yield from self._content(len(self._held))


def _cut_begun(text: str, tag: str) -> tuple[str, str]:
    """Return the text up to where `tag` may begin at its end, and the rest."""
    cut = len(text) - num_begun(text, tag)
    return text[:cut], text[cut:]


def _calls_in(text: str) -> list[ToolCall]:
    """Return the calls of JSON objects, or of a list of them. Empty if there is anything else."""
    calls: list[ToolCall] = []
    position = _after_separators(text, 0)
    while position < len(text):
        value, position = _json_at(text, position)
        for one in value if isinstance(value, list) else [value]:
            call = _call_of(one)
            if call is None:
                return []
            calls.append(call)
        position = _after_separators(text, position)
    return calls


def _mistral_calls(text: str) -> list[ToolCall]:
    """Return the calls in text of `[TOOL_CALLS]` parts. Empty if there is anything else."""
    calls: list[ToolCall] = []
    for part in text.split(_CALLS)[1:]:
        if (named := _MISTRAL_NAME.match(part)) is None:
            found = _calls_in(part)
        else:
            arguments, end = _json_at(part, _after_separators(part, named.end()))
            call = _call_of({"name": named[1], "arguments": arguments})
            found = [call] if call and not part[end:].strip() else []
        if not found:
            return []
        calls += found
    return calls


def _after_separators(text: str, position: int) -> int:
    found = _SEPARATORS.match(text, position)
    return found.end() if found else position


def _json_at(text: str, position: int) -> tuple[object, int]:
    """Return the JSON value at `position` and its end, or None and the end of the text."""
    try:
        value, end = _decoder.raw_decode(text, position)
        return value, end
    except (ValueError, RecursionError):
        return None, len(text)


def _call_of(value: object) -> ToolCall | None:
    if not isinstance(value, dict):
        return None
    name, given = value.get("name"), value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not name or not isinstance(given, dict):
        return None
    try:
        arguments = json.dumps(given, ensure_ascii=False, allow_nan=False)
        (name + arguments).encode()
    except (ValueError, RecursionError):  # NaN, infinity, half a character, or too deep
        return None
    return ToolCall(name, arguments)


class ParsingDetokenizer(Detokenizer):
    """A detokenizer whose outputs have reasoning and tool calls apart from the text."""

    __slots__ = ("_end_think_id", "_includes_reasoning", "_num_begun", "_parser")

    def __init__(
        self,
        index: int,
        stream: TextStream,
        params: SamplingParams,
        parsing: Parsing,
        is_thinking: bool,
        end_think_id: int | None,
    ) -> None:
        """`is_thinking` says that the prompt opened the reasoning, which `end_think_id` ends."""
        super().__init__(index, stream, params)
        self._parser = ResponseParser(parsing, is_thinking=is_thinking)
        self._includes_reasoning = parsing.include_reasoning
        self._end_think_id = end_think_id
        self._num_begun = 0  # tokens up to the end of the reasoning, if there is any

    def push(
        self, token_ids: list[int], final: FinishReason | None = None
    ) -> CompletionOutput | None:
        delta = super().push(token_ids, final)
        if delta is None:
            return None
        parser = self._parser
        may_think = parser.may_think
        parts = parser.push(delta.text, is_end=delta.finish_reason is not None)
        if may_think:
            counted, end_id = delta.token_ids, self._end_think_id
            if not parser.may_think and end_id in counted and end_id is not None:
                counted = counted[: counted.index(end_id) + 1]  # few models spell it with several
            self._num_begun += len(counted)
        if delta.finish_reason is None and len(parts) == 1 and parts[0] is delta.text:
            return delta
        delta.text = "".join([part for part in parts if isinstance(part, str)])
        if self._includes_reasoning:
            delta.reasoning = "".join([part.text for part in parts if isinstance(part, Reasoning)])
        delta.tool_calls = tuple([part for part in parts if isinstance(part, ToolCall)])
        if parser.num_calls and delta.finish_reason == "stop":
            delta.finish_reason = "tool_calls"
        return delta

    @property
    def num_reasoning_tokens(self) -> int:
        return self._num_begun if self._parser.has_thought else 0
