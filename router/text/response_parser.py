"""Reasoning and tool calls in the text of a response, found while it streams.

One parser reads all formats of `formats.py`. It does not depend on how the text was cut into
deltas, so a resumed stream finds the same. A call comes in pieces: its name first, then its
arguments as they are written. Until its name is known, text may turn out only to look like a call,
and then it comes out unchanged.
"""

import json
import re
from collections.abc import Generator, Iterator, Sequence

import msgspec

from baton.protocol.messages import FinishReason
from baton.protocol.sampling import SamplingParams
from baton.router.outputs import CompletionOutput, Merged, ToolCall, merged_calls
from baton.router.text.call_values import (
    JsonScanner,
    call_of,
    end_of_python,
    json_or_none,
    python_calls_in,
    typed,
    with_escapes,
)
from baton.router.text.detokenizer import (
    Detokenizer,
    StopStrings,
    TextStream,
    num_begun,
)
from baton.router.text.formats import (
    MAX_TOOL_NAME,
    TOOL_NAME_CHARS,
    CallFormat,
    call_format,
    reasoning_format,
)

# The longest text between a tag and the arguments of a call, of which a name is the most.
_MAX_HEADER_CHARS = 400
# Without a tag, a call begins with one of these, white space aside, in so many characters.
_BARE_STARTS = ('{"name"', '{"type"', '{"function"', '{"parameters"')
_MAX_BARE_START = 100
_WHITE = re.compile(r"\s*")
_SEPARATORS = re.compile(r"[\s;,]*")
_CHANNEL = re.compile(
    r"\s{0,8}(?:<\|start\|>(?P<role>[^<]{0,300}))?<\|channel\|>(?P<channel>\w{1,40})"
    r"(?P<rest>[^<]{0,300})(?:<\|constrain\|>\w{0,40})?\s{0,8}<\|message\|>"
)
_RECIPIENT = re.compile(rf"to=(?:functions\.)?([{TOOL_NAME_CHARS}]+)")
_CHANNEL_STARTS = ("<|start|>", "<|channel|>")
_CHANNEL_ENDS = re.compile(r"<\|(?:end|return|call|start)\|>")
_PYTHON_CALLS = re.compile(
    rf"\s*\[\s*(?P<name>[^\W\d][\w.]{{0,{MAX_TOOL_NAME - 1}}})\s*\("
)


class Parsing(msgspec.Struct, frozen=True):
    """What to find in the text of a response. Formats have the names of `formats.py`."""

    tools: str = ""
    # Where no tag begins a call, only the names of the request's tools make text a call.
    tool_names: tuple[str, ...] = ()
    # The JSON schemas of each tool's arguments, for formats that write them without types.
    schemas: dict[str, dict[str, object]] = {}
    parallel_tool_calls: bool = True  # otherwise, calls after the first are dropped
    reasoning: str = ""
    include_reasoning: bool = True  # otherwise, reasoning is dropped


class Reasoning(msgspec.Struct, frozen=True):
    text: str


Part = str | Reasoning | ToolCall  # a str is content
# Yields parts, and None where more text is needed. The result says whether there was a call.
_Reader = Generator[Part | None, None, bool]


class ResponseParser:
    """The parser of one choice.

    With `parsing.reasoning`, a response that begins with its tag has reasoning up to the tag that
    ends it. If the prompt opened it (`is_thinking`), the response begins inside.
    """

    __slots__ = (
        "_format",
        "_header",
        "_held",
        "_is_cut",
        "_is_end",
        "_is_thinking",
        "_may_open",
        "_parsing",
        "_plain_until",
        "_reading",
        "_reasoning",
        "has_thought",
        "num_calls",
    )

    def __init__(self, parsing: Parsing, *, is_thinking: bool = False) -> None:
        self._parsing = parsing
        self._format = call_format(parsing.tools) if parsing.tools else None
        self._header = re.compile(self._format.header) if self._format else None
        self._reasoning = (
            reasoning_format(parsing.reasoning) if parsing.reasoning else None
        )
        self._held = ""
        self._may_open = self._reasoning is not None  # a tag may open the response
        self._is_thinking = self.has_thought = self._may_open and is_thinking
        self._is_end = self._is_cut = False
        # The character that may begin a tag, if all other text is content at once.
        self._plain_until: str | None = None
        self.num_calls = 0
        self._reading = self._read()

    @property
    def may_think(self) -> bool:
        """Return whether the text so far is reasoning, or may turn out to begin it."""
        return self._is_thinking or self._may_open

    def push(
        self, text: str, *, is_end: bool = False, is_cut: bool = False
    ) -> list[Part]:
        """Return the parts that `text` completes. Text that may become a tag is held back.

        `is_cut` says that the end is a limit, so what has begun is no content.
        """
        if self._is_plain(text):  # almost every token
            return [text]
        self._held += text
        parts = self._read_on()
        if is_end:  # afterwards, so that the end settles only what the text leaves open
            self._is_end = True
            self._is_cut = is_cut
            parts += self._read_on()
        return parts

    def _read_on(self) -> list[Part]:
        """Return the parts up to where more text is needed."""
        parts: list[Part] = []
        for part in self._reading:
            if part is None:
                break
            parts.append(part)
        return parts

    def _is_plain(self, text: str) -> bool:
        """Return whether `text` is content at once, whatever follows."""
        until = self._plain_until
        if until is None or not text or self._held:
            return False
        return not until or (until not in text and not text[-1].isspace())

    # --- inside --------------------------------------------------------------------------------

    def _read(self) -> Iterator[Part | None]:
        if self._format is not None and self._format.body == "harmony":
            yield from self._channels()
            return
        if self._reasoning is not None and self._reasoning.begin.startswith(
            "<|channel|>"
        ):
            yield from self._channels()
            return
        yield from self._reasoned()
        if self._format is not None and self._format.body == "pythonic":
            yield from self._python_calls()
        elif self._format is not None and not self._format.trigger:
            yield from self._bare_calls()
        trigger = self._format.trigger if self._format is not None else ""
        while True:
            yield from self._content_and_calls(trigger)

    def _reasoned(self) -> Iterator[Part | None]:
        """Read reasoning, and the white space after it."""
        if self._reasoning is None:
            return
        begin = self._reasoning.begin
        end = self._reasoning.end
        start = self._held.lstrip()
        while len(start) < len(begin) and begin.startswith(start) and not self._is_end:
            yield None
            start = self._held.lstrip()
        self._may_open = False
        if start.startswith(begin):
            self._held = start.removeprefix(begin)
            self._is_thinking = self.has_thought = True
        elif start and self._is_cut and begin.startswith(start):
            self._held = ""
        if not self._is_thinking:
            return
        while True:
            reasoning, tag, rest = self._held.partition(end)
            if not tag:
                reasoning, begun = _cut_begun(reasoning, end)
                rest = begun if not self._is_end else ""
                if self._is_end and not self._is_cut:
                    reasoning += begun
            self._held = rest
            if reasoning:
                yield Reasoning(reasoning)
            if tag:
                break
            yield None
        self._is_thinking = False
        yield from self._skip(_WHITE, 0)
        self._held = self._held.lstrip()

    def _content_and_calls(self, trigger: str) -> Iterator[Part | None]:
        """Read content up to a trigger, and the calls that it begins."""
        start = self._held.find(trigger) if trigger else -1
        if start < 0:
            text = self._held
            if trigger and not self._is_end:
                text = _cut_begun(text, trigger)[0].rstrip()
            elif trigger and self._is_cut:
                text = _without_cut_tag(text, trigger)
                self._held = text
            yield from self._content(len(text))
            if not self._held and not self._is_end:
                self._plain_until = trigger[:1]
            yield None
            self._plain_until = None
            return
        yield from self._content(len(self._held[:start].rstrip()))
        white = len(self._held) - len(self._held.lstrip())
        if (yield from self._section(white + len(trigger))):
            yield from self._skip(_WHITE, 0)
            self._held = self._held.lstrip()
        elif self._is_end and self._is_cut:
            self._held = ""
        else:
            yield from self._content(white + len(trigger))

    def _content(self, num_chars: int) -> Iterator[str]:
        """Yield the next characters as content."""
        text = self._held[:num_chars]
        self._held = self._held[num_chars:]
        if text:
            yield text

    def _section(self, position: int) -> _Reader:
        """Read the calls behind a trigger, which ends at `position`."""
        row = self._format
        assert row is not None, "a trigger belongs to a format"
        if not row.section[0]:
            return (yield from self._tagged_call(position))
        tags = [text for text in (*row.section, row.call[0]) if text]
        has_calls = False
        while True:
            position = yield from self._skip(_SEPARATORS, position)
            tag = yield from self._starts_with(position, tags)
            position += len(tag)
            if tag and tag == row.section[1]:
                break
            if (
                not tag
                and row.is_list
                and self._held[position : position + 1] in ("[", "]")
            ):
                position += 1
                continue
            if tag == row.section[0]:
                continue
            if row.call[0] and not tag:
                break
            if not (yield from self._tagged_call(position)):
                break
            has_calls = True
            position = 0
        if has_calls:
            is_lost = self._is_end and self._is_cut
            self._held = "" if is_lost else self._held[position:]
        return has_calls

    def _tagged_call(self, position: int) -> _Reader:
        """Read one call up to the tag that ends it. Consume nothing if it is none."""
        row = self._format
        assert row is not None, "a call belongs to a format"
        match row.body:
            case "named_json":
                is_call = yield from self._named_json(position)
            case "parameters":
                is_call = yield from self._parameters(position)
            case _:
                is_call = yield from self._json_or_named(position)
        if is_call and row.call[1]:
            position = yield from self._skip(_WHITE, 0)
            if (yield from self._starts_with(position, [row.call[1]])):
                self._held = self._held[position + len(row.call[1]) :]
        return is_call

    def _json_or_named(self, position: int) -> _Reader:
        """Read JSON objects that hold a call each, or the arguments behind a name."""
        row = self._format
        assert row is not None, "a call belongs to a format"
        position = yield from self._skip(_WHITE, position)
        if row.header and not self._held.startswith(("{", "["), position):
            return (yield from self._named_json(position))
        if self._held.startswith("[", position):
            return (yield from self._json_list(position))
        return (yield from self._json_call(position))

    def _json_list(self, position: int) -> _Reader:
        """Read a list of calls where one is expected, once it is whole."""
        scanner = JsonScanner(position)
        while (end := scanner.end_of(self._held)) is None:
            if self._is_end:
                return False
            yield None
        values = json_or_none(self._held[position:end])
        if not isinstance(values, list):
            return False
        calls = [call_of(value, self._keys) for value in values]
        if not calls or None in calls:
            return False
        for call in calls:
            assert call is not None, "checked above"
            yield from self._call(call)
        self._held = self._held[end:]
        return True

    def _json_call(self, position: int) -> _Reader:
        """Read one JSON object with a name and arguments."""
        row = self._format
        assert row is not None, "a call belongs to a format"
        header = _json_header(row)
        scanner = JsonScanner(position)
        while True:
            if not self._begins_like_call(position):
                return False
            if (match := header.match(self._held, position)) is not None:
                name = json_or_none(match["name"])
                if isinstance(name, str) and self._may_call(name):
                    self._held = self._held[match.end() :]
                    yield from self._call(ToolCall(name, ""))
                    return (yield from self._json_arguments(num_open=1))
            if (end := scanner.end_of(self._held)) is not None:
                call = call_of(json_or_none(self._held[position:end]), self._keys)
                if call is None or not self._may_call(call.name):
                    return False
                yield from self._call(call)
                self._held = self._held[end:]
                return True
            if self._is_end:
                return False
            yield None

    def _named_json(self, position: int) -> _Reader:
        """Read a name and the JSON object behind it."""
        row = self._format
        match = yield from self._header_at(position)
        if row is None or match is None:
            return False
        start = yield from self._skip(_WHITE, match.end())
        if not self._held.startswith("{", start):
            return False
        self._held = self._held[start:]
        yield from self._call(ToolCall(match["name"], ""))
        yield from self._json_arguments(num_open=0)
        if row.footer:
            position = yield from self._skip(_WHITE, 0)
            if (yield from self._starts_with(position, [row.footer])):
                self._held = self._held[position + len(row.footer) :]
        return True

    def _json_arguments(self, num_open: int) -> _Reader:
        """Give out a JSON object as it comes, then skip to the end of `num_open` others."""
        scanner = JsonScanner(0)
        num_given = 0
        was_inside = False
        while True:
            end = scanner.end_of(self._held)
            stop = scanner.position if end is None else end
            piece = with_escapes(self._held[num_given:stop], is_inside=was_inside)
            if piece:
                yield from self._more_arguments(piece)
            num_given = stop
            was_inside = scanner.is_inside_string
            if end is not None:
                break
            if self._is_end:
                self._held = ""
                return True
            yield None
        self._held = self._held[stop:]
        if num_open:
            scanner = JsonScanner(0, depth=num_open)
            while (end := scanner.end_of(self._held)) is None:
                if self._is_end:
                    self._held = ""
                    return True
                yield None
            self._held = self._held[end:]
        return True

    def _parameters(self, position: int) -> _Reader:
        """Read a name and a tag for each argument."""
        row = self._format
        match = yield from self._header_at(position)
        if row is None or match is None:
            return False
        name = match["name"]
        self._held = self._held[match.end() :]
        yield from self._call(ToolCall(name, ""))
        parameter = re.compile(row.parameter)
        ends = [text for text in (row.footer, row.call[1], row.section[1]) if text]
        num_arguments = 0
        is_cut = False
        while True:
            position = yield from self._skip(_WHITE, 0)
            found = self._match_now(parameter, position)
            while found is None and not self._is_end:
                if (yield from self._starts_with(position, ends, is_final=False)):
                    break
                yield None
                found = self._match_now(parameter, position)
            if found is None:
                break
            value, end = yield from self._until(
                row.parameter_end, found.end(), row.footer
            )
            if value is None:
                is_cut = True
                break
            argument = typed(value, found, row, self._parsing.schemas.get(name, {}))
            opening = "{" if num_arguments == 0 else ", "
            key = json.dumps(found["key"], ensure_ascii=False)
            yield from self._more_arguments(f"{opening}{key}: {argument}")
            num_arguments += 1
            self._held = self._held[end:]
        is_ended = self._held.startswith(tuple(ends), position)
        is_cut = is_cut or (self._is_cut and self._is_end and not is_ended)
        if is_cut:
            self._held = ""
            return True
        yield from self._more_arguments("}" if num_arguments else "{}")
        if row.footer and self._held.startswith(row.footer, position):
            self._held = self._held[position + len(row.footer) :]
        return True

    def _bare_calls(self) -> Iterator[Part | None]:
        """Read calls without a tag, of which the response consists if it begins with one."""
        position = yield from self._skip(_WHITE, 0)
        tag = yield from self._starts_with(position, ["<|python_tag|>"])
        if tag:
            position += len(tag)
        position = yield from self._skip(_WHITE, position)
        has_calls = False
        while position < len(self._held) and self._begins_like_call(position):
            if not (yield from self._json_call(position)):
                break
            has_calls = True
            position = yield from self._skip(_SEPARATORS, 0)
        if not has_calls and self._held.startswith("[", position):
            has_calls = yield from self._json_list_of_known(position)
        if has_calls:
            self._held = self._held.lstrip("; \n")
        elif self._is_cut and self._is_end and self._held.startswith("{", position):
            self._held = ""

    def _json_list_of_known(self, position: int) -> _Reader:
        """Read a list if it begins like one of calls, so that other lists come as they are."""
        start = yield from self._skip(_WHITE, position + 1)
        if not self._held.startswith("{", start):
            return False
        header = re.compile(r'\{\s*"(?:name|type|function|parameters)"')
        while (match := header.match(self._held, start)) is None:
            if self._is_end or len(self._held) - start > _MAX_HEADER_CHARS // 4:
                return False
            yield None
        assert match is not None, "the loop ends with a match"
        return (yield from self._json_list(position))

    def _python_calls(self) -> Iterator[Part | None]:
        """Read a list of Python calls, of which the whole response consists, once it is whole."""
        position = yield from self._skip(_WHITE, 0)
        tag = yield from self._starts_with(
            position, ["<|python_start|>", "<|python_tag|>"]
        )
        if tag:
            position += len(tag)
        match = self._match_now(_PYTHON_CALLS, position)
        while match is None:
            rest = self._held[position:].lstrip()
            is_begun = not rest or (
                rest.startswith("[") and len(rest) < _MAX_HEADER_CHARS
            )
            if self._is_end or not is_begun:
                return
            yield None
            match = self._match_now(_PYTHON_CALLS, position)
        if not self._may_call(match["name"]):
            return
        while True:
            end = end_of_python(self._held, position)
            calls = python_calls_in(self._held[position:end]) if end is not None else []
            if calls and all(self._may_call(call.name) for call in calls):
                for call in calls:
                    yield from self._call(call)
                position = yield from self._skip(_WHITE, end or 0)
                tag = yield from self._starts_with(position, ["<|python_end|>"])
                self._held = self._held[position + len(tag) :]
                return
            if end is not None or self._is_end:
                if self._is_end and self._is_cut:
                    self._held = ""
                return
            yield None

    def _channels(self) -> Iterator[Part | None]:
        """Read the messages of channels: analysis, calls to recipients, and content."""
        while len(self._held) < len(_CHANNEL_STARTS[1]) and not self._is_end:
            yield None
        self._may_open = False
        if not self._held.lstrip().startswith(_CHANNEL_STARTS):
            while True:
                yield from self._content_and_calls("")
        while True:
            match = self._match_now(_CHANNEL, 0)
            while (
                match is None
                and not self._is_end
                and len(self._held) < 2 * _MAX_HEADER_CHARS
            ):
                yield None
                match = self._match_now(_CHANNEL, 0)
            if match is None:
                if not self._is_cut:
                    yield from self._content(len(self._held))
                self._held = ""
                yield None
                continue
            recipient = _RECIPIENT.search(f"{match['role'] or ''} {match['rest']}")
            self._held = self._held[match.end() :]
            self._is_thinking = match["channel"] == "analysis"
            self.has_thought = self.has_thought or self._is_thinking
            yield from self._message(recipient[1] if recipient else "")
            self._is_thinking = False

    def _message(self, recipient: str) -> Iterator[Part | None]:
        """Read one message of a channel up to its end."""
        is_call = bool(recipient) and not self._is_thinking
        has_arguments = False
        if is_call:
            yield from self._call(ToolCall(recipient, ""))
        while True:
            end = _CHANNEL_ENDS.search(self._held)
            text = self._held[: end.start()] if end else self._held
            if end is None and not self._is_end:
                text = text[: len(text) - _num_begun_end(text)]
            self._held = self._held[len(text) :]
            if is_call:
                text = text if has_arguments else text.lstrip()
                has_arguments = has_arguments or bool(text)
                if text:
                    yield from self._more_arguments(text)
            elif self._is_thinking:
                if text:
                    yield Reasoning(text)
            elif text:
                yield text
            if end is not None or self._is_end:
                break
            if not is_call and not self._is_thinking and not self._held:
                self._plain_until = "<"
            yield None
            self._plain_until = None
        if is_call and not has_arguments and not self._is_cut:
            yield from self._more_arguments("{}")
        if end is not None and end[0] != "<|start|>":
            self._held = self._held[len(end[0]) :]

    def _begins_like_call(self, position: int) -> bool:
        """Return whether the text at a position may become a call in JSON."""
        row = self._format
        if row is None or row.trigger:
            return self._held.startswith("{", position) or position >= len(self._held)
        begun = "".join(self._held[position : position + _MAX_BARE_START].split())
        return any(
            start.startswith(begun) or begun.startswith(start) for start in _BARE_STARTS
        )

    # --- pieces of text ------------------------------------------------------------------------

    def _skip(
        self, pattern: re.Pattern[str], position: int
    ) -> Generator[None, None, int]:
        """Return the position after what the pattern matches, once something else follows."""
        while True:
            match = pattern.match(self._held, position)
            position = match.end() if match else position
            if position < len(self._held) or self._is_end:
                return position
            yield None

    def _starts_with(
        self, position: int, texts: Sequence[str], *, is_final: bool = True
    ) -> Generator[None, None, str]:
        """Return which of the texts is at a position, or "" once it is none.

        Unless the answer `is_final`, text that may become one of them is none for now.
        """
        while True:
            rest = self._held[position : position + max(map(len, texts), default=0)]
            for text in texts:
                if rest.startswith(text):
                    return text
            may_become = any(text.startswith(rest) for text in texts)
            if self._is_end or not may_become or not is_final:
                return ""
            yield None

    def _header_at(self, position: int) -> Generator[None, None, re.Match[str] | None]:
        assert self._header is not None, "the format has a header"
        while (match := self._header.match(self._held, position)) is None:
            if self._is_end or len(self._held) - position > _MAX_HEADER_CHARS:
                return None
            yield None
        return match

    def _match_now(
        self, pattern: re.Pattern[str], position: int
    ) -> re.Match[str] | None:
        return pattern.match(self._held, position)

    def _until(
        self, tag: str, position: int, other_end: str
    ) -> Generator[None, None, tuple[str | None, int]]:
        """Return the text up to a tag and the position after it; None if a limit cuts it.

        A model may leave out the tag at the end of a response.
        """
        start = position
        while (found := self._held.find(tag, start)) < 0:
            if self._is_end:
                if self._is_cut:
                    return None, len(self._held)
                last = self._held.find(other_end, position) if other_end else -1
                end = last if last >= 0 else len(self._held)
                return self._held[position:end], end
            start = max(position, len(self._held) - len(tag))
            yield None
        return self._held[position:found], found + len(tag)

    # --- calls ---------------------------------------------------------------------------------

    @property
    def _keys(self) -> tuple[str, tuple[str, ...]]:
        row = self._format
        assert row is not None, "a call belongs to a format"
        return row.name_key, row.arguments_keys

    def _may_call(self, name: str) -> bool:
        row = self._format
        needs_known = row is None or not row.trigger
        return bool(name) and (not needs_known or name in self._parsing.tool_names)

    @property
    def _is_dropped(self) -> bool:
        return self.num_calls > 1 and not self._parsing.parallel_tool_calls

    def _call(self, call: ToolCall) -> Iterator[ToolCall]:
        self.num_calls += 1
        if not self._is_dropped:
            yield msgspec.structs.replace(call, index=self.num_calls - 1)

    def _more_arguments(self, text: str) -> Iterator[ToolCall]:
        if not self._is_dropped:
            yield ToolCall("", text, self.num_calls - 1)


def _json_header(row: CallFormat) -> re.Pattern[str]:
    """Return the pattern of a call in JSON up to its arguments, if the name is before them."""
    keys = "|".join(map(re.escape, row.arguments_keys))
    first = r'(?:"tool_call_id"\s*:\s*"[^"]{0,64}"\s*,\s*)?'
    return re.compile(
        rf'\{{\s*{first}"{re.escape(row.name_key)}"\s*:\s*(?P<name>"(?:[^"\\]|\\.){{1,{MAX_TOOL_NAME}}}")\s*,'
        rf'\s*"(?:{keys})"\s*:\s*(?=\{{)'
    )


def _cut_begun(text: str, tag: str) -> tuple[str, str]:
    """Return the text up to where `tag` may begin at its end, and the rest."""
    cut = len(text) - num_begun(text, tag)
    return text[:cut], text[cut:]


def _without_cut_tag(text: str, tag: str) -> str:
    """Return the text without the tag that a limit cut, unless so little of it may be text."""
    kept, begun = _cut_begun(text, tag)
    return kept.rstrip() if len(begun) > len(tag) // 2 else text


def _num_begun_end(text: str) -> int:
    """Return how many characters at the end may begin the end of a message."""
    return max(
        num_begun(text, tag)
        for tag in ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
    )


class ParsingDetokenizer(Detokenizer):
    """A detokenizer whose outputs have reasoning and tool calls apart from the text.

    Stop strings act in the text alone, not in reasoning, calls or their tags.
    """

    __slots__ = (
        "_end_think_id",
        "_includes_reasoning",
        "_num_begun",
        "_parser",
        "_text_stops",
    )

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
        self._text_stops = self._stops
        self._stops = None
        self._parser = ResponseParser(parsing, is_thinking=is_thinking)
        self._includes_reasoning = parsing.include_reasoning
        self._end_think_id = end_think_id
        self._num_begun = 0  # tokens up to the end of the reasoning, if there is any

    def push(
        self, token_ids: list[int], final: FinishReason | None = None
    ) -> CompletionOutput | None:
        stops = self._text_stops
        if stops is not None:
            if self._is_stopped:
                return None
            if len(token_ids) > 1:
                return self._push_each(token_ids, final)
        delta = super().push(token_ids, final)
        assert delta is not None, (
            "the texts of tokens have no stop strings of their own"
        )
        parser = self._parser
        may_think = parser.may_think
        parts = parser.push(
            delta.text, is_end=final is not None, is_cut=final not in (None, "stop")
        )
        if may_think:
            counted = delta.token_ids
            end_id = self._end_think_id
            if not parser.may_think and end_id in counted and end_id is not None:
                # Few models spell it with several.
                counted = counted[: counted.index(end_id) + 1]
            self._num_begun += len(counted)
        if stops is not None:
            parts = self._up_to_stop(stops, delta, parts)
        if delta.finish_reason is None and len(parts) == 1 and parts[0] is delta.text:
            return delta
        delta.text = "".join([part for part in parts if isinstance(part, str)])
        if self._includes_reasoning:
            delta.reasoning = "".join(
                [part.text for part in parts if isinstance(part, Reasoning)]
            )
        delta.tool_calls = merged_calls(
            [part for part in parts if isinstance(part, ToolCall)]
        )
        if parser.num_calls and delta.finish_reason == "stop":
            delta.finish_reason = "tool_calls"
        return delta

    def _push_each(
        self, token_ids: list[int], final: FinishReason | None
    ) -> CompletionOutput:
        """Push tokens one by one, because those after a stop string do not count."""
        merged = Merged()
        last = len(token_ids) - 1
        for index, token_id in enumerate(token_ids):
            delta = self.push([token_id], final if index == last else None)
            assert delta is not None, "the loop ends with a stop string"
            merged.add(delta)
            if delta.finish_reason is not None:
                break
        return merged.take()[0]

    def _up_to_stop(
        self, stops: StopStrings, delta: CompletionOutput, parts: list[Part]
    ) -> list[Part]:
        """Return the parts up to the first stop string in the text, which ends the delta."""
        self._num_tokens += len(delta.token_ids)
        shown: list[Part] = []
        for part in parts:
            if isinstance(part, str):
                shown.append(self._show(stops, part))
            else:
                # A stop string does not reach over a call.
                shown += [stops.flush(), part]
            if stops.matched is not None:
                self._is_stopped = True
                delta.finish_reason = "stop"
                delta.stop_reason = stops.matched
                return shown
        if delta.finish_reason is not None:
            shown.append(stops.flush())
        return shown

    @property
    def num_reasoning_tokens(self) -> int:
        return self._num_begun if self._parser.has_thought else 0
