"""A model's chat template, which turns a conversation into the text of a prompt.

A template comes with the model's folder and is a program, so it runs in jinja2's immutable sandbox,
off the event loop. Clients' messages are only data to it.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.protocol.errors import ConfigError, RequestError
from baton.router.special_tokens import named_tokens
from baton.runtime.log import clip


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct):
    """The fields of tokenizer_config.json that concern chats."""

    chat_template: str | list[_NamedTemplate] | None = None


class ChatTemplate:
    """One template. Any thread may call `render`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile a template. Raises `ConfigError` if jinja2 cannot read it."""
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
            raise ConfigError(f"the model's chat template cannot be read: {error}") from error
        self.source = source
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, model_path: str, file: str = "") -> "ChatTemplate | None":
        """Return the template of a model folder, or None. Raises `ConfigError`.

        A `file` replaces the folder's template, and must exist.
        """
        folder = Path(model_path)
        try:
            config_file = folder / "tokenizer_config.json"
            data = config_file.read_bytes() if config_file.is_file() else b"{}"
            config = msgspec.json.decode(data, type=_TokenizerConfig)
            tokens = named_tokens(folder)
            alone = Path(file) if file else folder / "chat_template.jinja"
            if file and not alone.is_file():
                raise ConfigError(f"there is no chat template {file} (model.chat_template)")
            source = alone.read_text() if alone.is_file() else _default(config.chat_template)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            text = f"cannot read the chat template in {folder}: {error}"
            raise ConfigError(text) from error
        if source is None:
            return None
        return cls(source, tokens)

    def render(
        self,
        messages: list[dict[str, object]],
        *,
        tools: list[dict[str, object]] | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, object] | None = None,
    ) -> str:
        """Return the prompt as text, special tokens included. Raises `RequestError`."""
        try:
            return self._template.render(
                {
                    **(options or {}),
                    **self._special_tokens,
                    "messages": messages,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except Exception as error:  # a template can raise any exception
            text = f"the model's chat template refused the messages: {clip(str(error))}"
            raise RequestError(text, param="messages") from error


class _GenerationTag(Extension):
    """Supports `{% generation %}`, which marks an assistant's words for training, as a no-op."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _default(templates: str | list[_NamedTemplate] | None) -> str | None:
    if isinstance(templates, list):
        return next((one.template for one in templates if one.name == "default"), None)
    return templates


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
