"""The text of a model: tokens from text and back, and chats as the text of a prompt.

No other part of the router knows the tokenizer. It needs the package `tokenizers` and a
tokenizer.json: torch and transformers must never load here. A chat template comes with the model's
folder and is a program, so it runs in jinja2's immutable sandbox, off the event loop. Clients'
messages are only data to it.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Encoding, Tokenizer

from baton.protocol.errors import ConfigError, RequestError
from baton.protocol.sampling import SamplingParams
from baton.router.text.detokenizer import Decoding, Detokenizer, decoding_of
from baton.router.text.response_parser import END_THINK, THINK, Parsing, ParsingDetokenizer
from baton.router.text.special_tokens import check_tokens, named_tokens
from baton.runtime.log import clip

# Long prompts have threads of their own, so that a short one never waits behind them.
_THREADS_PER_LANE = 2
_SHORT_CHARS = 16 * 1024
# Encoding a prompt up to this length takes less time than handing it to a thread.
_MAX_CHARS_ON_LOOP = 200
# An encoding takes about 150 bytes per token. Prompts that could exceed the model's length are
# counted in parts, each of which takes a few milliseconds and a few MB.
_PART_CHARS = 16 * 1024
_USUAL_BYTES_PER_TOKEN = 4
# The most tokens by which a cut through the text of a prompt can raise the count.
_TOKENS_PER_CUT = 32
# The most tokens of a tag and the white space after it.
_TOKENS_OF_TAG = 16


class Text:
    """The tokenizer of one model. `close` ends its threads."""

    def __init__(self, tokenizer: Tokenizer, decoding: Decoding) -> None:
        self._tokenizer = tokenizer
        self._decoding = decoding
        self._short_lane = ThreadPoolExecutor(_THREADS_PER_LANE, thread_name_prefix="encode-short")
        self._long_lane = ThreadPoolExecutor(_THREADS_PER_LANE, thread_name_prefix="encode-long")
        # No token has a text of more bytes, because its spelling is at least as long as its text.
        self.max_token_bytes = max(len(token.encode()) for token in tokenizer.get_vocab())

    @classmethod
    def load(cls, model_path: str) -> "Text":
        """Load a folder's tokenizer. Raises `ConfigError` if it has no usable tokenizer.json."""
        path = Path(model_path) / "tokenizer.json"
        try:
            data = path.read_bytes()
            tokenizer = Tokenizer.from_buffer(data)
        except OSError as error:
            raise ConfigError(
                f"cannot read {path}: {error.strerror}. Baton needs a model folder with a "
                f"tokenizer.json (transformers writes one with save_pretrained)"
            ) from error
        except ValueError as error:
            raise ConfigError(f"{path} is not a tokenizer that baton can use: {error}") from error
        check_tokens(path.parent)
        # Some folders were saved with the limits of a training run, which would silently cut
        # prompts.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(tokenizer, decoding_of(tokenizer))

    async def encode(
        self, prompt: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Return the ids of `prompt`, encoded off the event loop unless it is very short.

        `add_special_tokens` adds those that the tokenizer adds. A rendered chat has them already.
        Raises `RequestError` for text that is not Unicode. `max_tokens` bounds the cost: a longer
        prompt may be refused before it is encoded whole, and the caller checks the exact length.
        """
        if len(prompt) <= _MAX_CHARS_ON_LOOP:
            return self.encode_now(prompt, add_special_tokens)
        lane = self._short_lane if len(prompt) <= _SHORT_CHARS else self._long_lane
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            lane, self.encode_now, prompt, add_special_tokens, max_tokens
        )

    def encode_now(
        self, prompt: str, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Encode on this thread, at a cost that `max_tokens` bounds. Raises `RequestError`."""
        try:
            num_bytes = len(prompt.encode())
        except UnicodeEncodeError as error:
            text = f"prompt is not Unicode text: {error.reason} at character {error.start}"
            raise RequestError(text, param="prompt") from error
        if max_tokens is not None and num_bytes > max_tokens * _USUAL_BYTES_PER_TOKEN:
            self._refuse_too_long(prompt, max_tokens)
        return self._encoding(prompt, add_special_tokens).ids

    def _refuse_too_long(self, prompt: str, max_tokens: int) -> None:
        """Raise `RequestError` as soon as the parts of a prompt have more than `max_tokens`."""
        num_tokens = 0
        for start in range(0, len(prompt), _PART_CHARS):
            part = self._encoding(prompt[start : start + _PART_CHARS], False)
            num_tokens += max(len(part) - _TOKENS_PER_CUT, 0)
            if num_tokens > max_tokens:
                raise too_long(max_tokens)

    def _encoding(self, prompt: str, add_special_tokens: bool) -> Encoding:
        # The batch call releases the GIL, and this variant computes no offsets. The tokenizer's
        # plain `encode` would block the event loop for the whole time of a long prompt.
        (encoding,) = self._tokenizer.encode_batch_fast(
            [prompt], add_special_tokens=add_special_tokens
        )
        return encoding

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        stream = self._decoding.stream((), skip_special_tokens)
        return "".join([stream.feed(token_id) for token_id in token_ids]) + stream.flush()

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, with U+FFFD for bytes that are no whole character."""
        return self._decoding.token_text(token_id)

    def spellings(self, token_ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's entry of each token."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def detokenizer(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        index: int = 0,
        parsing: Parsing | None = None,
    ) -> Detokenizer:
        """Return a detokenizer for choice `index` of a prompt, which finds what `parsing` says."""
        stream = self._decoding.stream(prompt_token_ids, params.skip_special_tokens)
        if parsing is None:
            return Detokenizer(index, stream, params)
        is_thinking = self.opens_reasoning(prompt_token_ids)
        end_id = self._tokenizer.token_to_id(END_THINK)
        return ParsingDetokenizer(index, stream, params, parsing, is_thinking, end_id)

    def opens_reasoning(self, prompt_token_ids: Sequence[int]) -> bool:
        last = self.decode(prompt_token_ids[-_TOKENS_OF_TAG:], skip_special_tokens=False)
        return last.rstrip().endswith(THINK)

    def close(self) -> None:
        for lane in (self._short_lane, self._long_lane):
            lane.shutdown(wait=False)  # the core tells waiting callers that the router has ended


def too_long(max_tokens: int) -> RequestError:
    """Return the error for a prompt with more than `max_tokens` tokens."""
    return RequestError(
        f"the prompt has more than {max_tokens} tokens, but prompt and output together may have "
        f"at most {max_tokens + 1}: shorten it",
        code="context_length_exceeded",
        param="prompt",
    )


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
