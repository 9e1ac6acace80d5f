"""Chats as the text of a prompt, by the model's own template.

A chat template comes with the model's folder and is a program, so it runs in jinja2's immutable
sandbox, off the event loop. Clients' messages are only data to it. What a client sent must reach
the prompt: a template that leaves out a message, a call or the tools is found by rendering it with
and without them, and the request is refused.
"""

import base64
import hashlib
import json
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.protocol.errors import ConfigError, RequestError
from baton.router.text.special_tokens import named_tokens
from baton.runtime.log import clip

Message = dict[str, object]
Tools = list[dict[str, object]]

TOOL_USE = "tool_use"  # the template that transformers takes where there are tools
_ADDITIONAL = "additional_chat_templates"  # the folder of templates with names
_PROBE = "batonprobe"
_PROBE_TOOL: dict[str, object] = {
    "type": "function",
    "function": {"name": _PROBE, "description": "", "parameters": {"type": "object"}},
}
_PROBE_CALL = "batoncall"
_PROBE_KEY = "batonkey"
_SHORT_ID = "abcdefghi"
_LONG_ID = "call_0123456789"
_PROBE_ARGUMENTS = {_PROBE_KEY: 1}
_ROLES = ("system", "user", "assistant", "tool")
# Appended to texts that a prompt does not have as they are, to see whether they reach it.
_MARK = "baton{}mark"
_MARKS = re.compile(r"baton(\d+)mark", re.IGNORECASE)


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct):
    """The fields of tokenizer_config.json that concern chats."""

    chat_template: str | list[_NamedTemplate] | None = None


class ChatTemplate:
    """The template of a model, and the one for chats with tools if it has two.

    Any thread may call `render`.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        tools_source: str | None = None,
    ) -> None:
        """Compile the templates. Raises `ConfigError` if jinja2 cannot read one."""
        self._special_tokens = dict(special_tokens)
        self._plain = _Program(source, self._special_tokens)
        self._with_tools = self._plain
        if tools_source is not None:
            self._with_tools = _Program(tools_source, self._special_tokens)

    @property
    def source(self) -> str:
        return self._plain.source

    @property
    def tools_source(self) -> str:
        """Return the source of the template that chats with tools take."""
        return self._with_tools.source

    @classmethod
    def load(cls, model_path: str, file: str = "") -> "ChatTemplate | None":
        """Return the template of a model folder, or None. Raises `ConfigError`.

        A `file` replaces the folder's templates, and must exist.
        """
        folder = Path(model_path)
        if file and not Path(file).is_file():
            raise ConfigError(f"there is no chat template {file} (model.chat_template)")
        try:
            tokens = named_tokens(folder)
            templates = (
                {"default": _read(Path(file))} if file else _templates_of(folder)
            )
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            text = f"cannot read the chat template in {folder}: {error}"
            raise ConfigError(text) from error
        if "default" not in templates:
            return None
        return cls(templates["default"], tokens, templates.get(TOOL_USE))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, object] | None = None,
    ) -> str:
        """Return the prompt as text, special tokens included.

        A message's content is text or a list of text parts. Raises `RequestError`.
        """
        program = self._with_tools if tools else self._plain
        values = {**(options or {}), "add_generation_prompt": add_generation_prompt}
        return program.prompt(program.adapted(messages), tools, values)

    def shows_roles(self, *roles: str) -> bool:
        """Return whether one chat may have a turn of each of these roles, and shows them all."""
        marks = [_MARK.format(index) for index in range(len(roles))]
        turns = zip(roles, marks, strict=True)
        messages: list[Message] = [
            {"role": role, "content": mark} for role, mark in turns
        ]
        try:
            prompt = self.render(messages, add_generation_prompt=False)
        except RequestError:
            return False
        return all(mark in prompt for mark in marks)

    def check_shown(
        self,
        prompt: str,
        messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, object] | None = None,
    ) -> None:
        """Raise `RequestError` for what does not reach the prompt that `render` made of it."""
        program = self._with_tools if tools else self._plain
        adapted = program.adapted(messages)

        def prompt_of(messages: Sequence[Message], tools: Tools | None) -> str:
            values = {**(options or {}), "add_generation_prompt": add_generation_prompt}
            return program.prompt(messages, tools, values)

        if tools and not program.shows_tools and prompt_of(adapted, None) == prompt:
            raise RequestError(
                "the model's chat template does not show tools to the model; model.chat_template "
                "can name a template that does",
                code="unsupported",
                param="tools",
            )
        marked, fields = _with_marks(prompt, adapted, program.shown_roles)
        if fields:
            _check_marks(prompt_of(marked, tools), fields)

    def open_ended(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        options: Mapping[str, object] | None = None,
    ) -> str:
        """Return the prompt up to the end of the last message's content, for a model to go on.

        Raises `RequestError` for a template that does not show that content.
        """
        program = self._with_tools if tools else self._plain
        *earlier, last = program.adapted(messages)
        mark = _MARK.format(len(earlier))
        values = {**(options or {}), "add_generation_prompt": False}
        marked = [*earlier, _with_mark_at_end(last, mark)]
        prompt, is_shown, _ = program.prompt(marked, tools, values).rpartition(mark)
        if not is_shown:
            raise RequestError(
                "the model's chat template does not show the end of the last message, so the "
                "model cannot continue it",
                code="unsupported",
                param="continue_final_message",
            )
        return prompt


class _Program:
    """One compiled template, and the form of messages that it takes."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = time.strftime
        try:
            self._template: Template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(
                f"the model's chat template cannot be read: {error}"
            ) from error
        self.source = source
        self._special_tokens = special_tokens
        self._knows_developers = "developer" in source
        self._takes_parts = self._shows([_user([{"type": "text", "text": _PROBE}])])
        self._takes_text = not self._takes_parts or self._shows([_user(_PROBE)])
        self.shown_roles = frozenset(filter(self._shows_role, _ROLES))
        self.shows_tools = self._shows([_user("")], [_PROBE_TOOL])
        self._reads_thinking = ".thinking" in source or "'thinking'" in source
        self._needs_null_content = self._takes_text_arguments = self._has_short_ids = (
            False
        )
        self._find_form_of_calls()
        # Whether the template takes the words of the system at the beginning alone.
        later: Message = {"role": "system", "content": ""}
        takes_later = self._shows([_user(_PROBE), later, _user("")])
        self._system_is_first = {
            "system",
            "user",
        } <= self.shown_roles and not takes_later

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Tools | None,
        values: Mapping[str, object],
    ) -> str:
        try:
            return self._template.render(
                {
                    **self._special_tokens,
                    **values,
                    "messages": messages,
                    "tools": tools,
                    "documents": None,
                }
            )
        except Exception as error:  # a template can raise any exception
            text = f"the model's chat template refused the messages: {clip(str(error))}"
            raise RequestError(text, param="messages") from error

    def adapted(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages in the form that this template takes."""
        adapted = [self._adapted(message) for message in messages]
        if self._system_is_first:
            for index, message in enumerate(adapted):
                if index and message.get("role") == "system":
                    adapted[index] = {**message, "role": "user"}
        return adapted

    def _adapted(self, message: Message) -> Message:
        content = message.get("content")
        if isinstance(content, list) and not self._takes_parts:
            message = {**message, "content": "\n".join(_texts_of(content))}
        elif isinstance(content, str) and content and not self._takes_text:
            message = {**message, "content": [{"type": "text", "text": content}]}
        if message.get("role") == "developer" and not self._knows_developers:
            message = {**message, "role": "system"}
        if message.get("tool_calls"):
            message = self._with_calls(message)
        if self._has_short_ids and message.get("tool_call_id"):
            message = {**message, "tool_call_id": _short_id(message["tool_call_id"])}
        if (
            message.get("reasoning")
            and not message.get("content")
            and self._reads_thinking
        ):
            message = {**message, "thinking": message["reasoning"]}
        return message

    def _with_calls(self, message: Message) -> Message:
        """Return a message with its calls in the form that this template reads."""
        calls = []
        for call in _calls_of(message):
            function = call["function"]
            assert isinstance(function, dict), "a call has a function"
            arguments = function.get("arguments")
            if self._takes_text_arguments and isinstance(arguments, dict):
                arguments = json.dumps(arguments, ensure_ascii=False)
            elif not self._takes_text_arguments and isinstance(arguments, str):
                arguments = _object_of(arguments)
            adapted = {**call, "function": {**function, "arguments": arguments}}
            if self._has_short_ids and "id" in call:
                adapted["id"] = _short_id(call["id"])
            calls.append(adapted)
        content = message.get("content")
        if not content and self._needs_null_content:
            content = None
        return {**message, "content": content, "tool_calls": calls}

    def _find_form_of_calls(self) -> None:
        """Find how calls of earlier turns reach a prompt: arguments, content and ids."""
        texts = (_PROBE_ARGUMENTS, json.dumps(_PROBE_ARGUMENTS))
        forms = [(content, arguments) for content in ("", None) for arguments in texts]
        prompts = [self._prompt_of_call(*form, _SHORT_ID) for form in forms]
        # Best is a form whose arguments are shown as JSON, then one that is shown at all.
        ranks = [_rank_of_call(prompt) for prompt in prompts]
        best = ranks.index(max(ranks))
        content, arguments = forms[best]
        self._needs_null_content = content is None
        self._takes_text_arguments = isinstance(arguments, str)
        is_taken = prompts[best] is not None
        self._has_short_ids = (
            is_taken and self._prompt_of_call(*forms[best], _LONG_ID) is None
        )

    def _prompt_of_call(
        self, content: str | None, arguments: object, call_id: str
    ) -> str | None:
        """Return a prompt with the call of an earlier turn; None if the template refuses it."""
        function = {"name": _PROBE_CALL, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        turn: Message = {"role": "assistant", "content": content, "tool_calls": [call]}
        result: Message = {
            "role": "tool",
            "content": "",
            "tool_call_id": call_id,
            "name": _PROBE_CALL,
        }
        try:
            return self.prompt([_user(""), turn, result], [_PROBE_TOOL], {})
        except RequestError:
            return None

    def _shows_role(self, role: str) -> bool:
        content: object = (
            _PROBE if self._takes_text else [{"type": "text", "text": _PROBE}]
        )
        message: Message = {"role": role, "content": content}
        before = [] if role in ("system", "user") else [_user("")]
        after = [_user("")] if role == "system" else []
        return self._shows([*before, message, *after])

    def _shows(self, messages: list[Message], tools: Tools | None = None) -> bool:
        """Return whether the probe reaches a prompt, without the part that it is in."""
        try:
            prompt = self.prompt(messages, tools, {"add_generation_prompt": True})
        except RequestError:
            return False
        is_dumped = tools is None and ("'type'" in prompt or '"type"' in prompt)
        return _PROBE in prompt and not is_dumped


def _rank_of_call(prompt: str | None) -> int:
    """Return how well a prompt shows the probe's call: as JSON, at all, or not."""
    if prompt is None:
        return 0
    is_dumped = f"'{_PROBE_KEY}'" in prompt or f'\\"{_PROBE_KEY}' in prompt
    if _PROBE_KEY in prompt and not is_dumped:
        return 3
    return 2 if _PROBE_CALL in prompt else 1


def _short_id(call_id: object) -> str:
    """Return an id of nine letters and digits, which some templates insist on."""
    text = str(call_id)
    if len(text) == 9 and text.isalnum():
        return text
    return base64.b32encode(hashlib.sha256(text.encode()).digest())[:9].decode()


def _user(content: object) -> Message:
    return {"role": "user", "content": content}


def _with_marks(
    prompt: str, messages: Sequence[Message], shown_roles: Collection[str]
) -> tuple[list[Message], list[str]]:
    """Return the messages with a mark in each field that may not have reached a prompt.

    The fields are in the order of their marks. Those that the prompt has as they are need none, if
    the template is known to show messages of such a role. Reasoning of earlier turns is left out on
    purpose, and not looked for.
    """
    marked = list(messages)
    fields: list[str] = []
    start = 0
    for index, message in enumerate(messages):
        texts = _texts_of(message.get("content"))
        end = _end_of(texts, prompt, start)
        if texts and (end is None or message.get("role") not in shown_roles):
            marked[index] = _with_marked_text(marked[index], _MARK.format(len(fields)))
            fields.append(f"messages[{index}].content")
        start = end or start
        names = [_name_of(call) for call in _calls_of(message)]
        if any(prompt.find(name, start) < 0 for name in names):
            marked[index] = _with_marked_calls(marked[index], _MARK.format(len(fields)))
            fields.append(f"messages[{index}].tool_calls")
    return marked, fields


def _end_of(texts: Sequence[str], prompt: str, start: int) -> int | None:
    """Return where texts end that a prompt has in this order; None if it lacks one."""
    for text in texts:
        shown = text.strip()
        found = prompt.find(shown, start)
        if found < 0:
            return None
        start = found + len(shown)
    return start


def _check_marks(prompt: str, fields: Sequence[str]) -> None:
    """Raise `RequestError` for the first field whose mark is not in the prompt with marks."""
    shown = {int(mark) for mark in _MARKS.findall(prompt)}
    for number, field in enumerate(fields):
        if number not in shown:
            raise RequestError(
                f"the model's chat template leaves out {field}, so the model would not see it",
                code="unsupported",
                param=field,
            )


def _texts_of(content: object) -> list[str]:
    """Return the texts of a content that are not empty."""
    if isinstance(content, str):
        return [content] if content.strip() else []
    if not isinstance(content, list):
        return []
    texts = (part.get("text") for part in content if isinstance(part, dict))
    return [text for text in texts if isinstance(text, str) and text.strip()]


def _with_marked_text(message: Message, mark: str) -> Message:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + mark}
    assert isinstance(content, list)
    parts = [
        {**part, "text": part["text"] + mark}
        if isinstance(part.get("text"), str)
        else part
        for part in content
    ]
    return {**message, "content": parts}


def _with_mark_at_end(message: Message, mark: str) -> Message:
    """Return a message with a mark behind the text of its content."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return {**message, "content": content + mark}
    assert isinstance(content, list)
    *parts, last = content
    return {
        **message,
        "content": [*parts, {**last, "text": f"{last.get('text', '')}{mark}"}],
    }


def _with_marked_calls(message: Message, mark: str) -> Message:
    calls = []
    for call in _calls_of(message):
        function = call["function"]
        assert isinstance(function, dict)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = json.dumps({**_object_of(arguments), mark: 0})
        elif isinstance(arguments, dict):
            arguments = {**arguments, mark: 0}
        marked = {"name": f"{function['name']}{mark}", "arguments": arguments}
        calls.append({**call, "function": {**function, **marked}})
    return {**message, "tool_calls": calls}


def _object_of(arguments: str) -> dict[str, object]:
    """Return the arguments of a call; none if their text is not that of an object."""
    try:
        decoded = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


def _calls_of(message: Message) -> Iterator[dict[str, object]]:
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        yield from (call for call in calls if isinstance(call, dict))


def _name_of(tool: Mapping[str, object]) -> str:
    """Return the name of a tool or of a call."""
    function = tool.get("function")
    return str(function.get("name", "")) if isinstance(function, dict) else ""


def _templates_of(folder: Path) -> dict[str, str]:
    """Return the templates of a folder by name, those in files of their own before others."""
    file = folder / "tokenizer_config.json"
    data = file.read_bytes() if file.is_file() else b"{}"
    config = msgspec.json.decode(data, type=_TokenizerConfig)
    templates: dict[str, str] = {}
    if isinstance(config.chat_template, list):
        templates = {named.name: named.template for named in config.chat_template}
    elif config.chat_template is not None:
        templates = {"default": config.chat_template}
    alone = folder / "chat_template.jinja"
    if alone.is_file():
        templates["default"] = _read(alone)
    more = folder / _ADDITIONAL
    if more.is_dir():
        templates |= {
            named.stem: _read(named) for named in sorted(more.glob("*.jinja"))
        }
    return templates


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8")


class _GenerationTag(Extension):
    """Supports `{% generation %}`, which marks an assistant's words for training, as a no-op."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the HTML escapes of jinja2's own filter, as transformers does."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> None:
    raise TemplateError(message)
