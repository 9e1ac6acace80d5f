"""Texts to pool as token ids, and the numbers that come back as embeddings and scores.

A folder's own prompts (config_sentence_transformers.json) come before its texts, and a pair of a
reranker is filled into its chat template.
"""

import math
import operator
from array import array
from collections.abc import Sequence
from pathlib import Path

import msgspec

from baton.protocol.errors import ConfigError, RequestError
from baton.router.text.chat_template import ChatTemplate, Message
from baton.router.text.tokenizer import Text
from baton.runtime.log import clip

# What a model without roles for pairs in its template is asked, in the words of Qwen3-Reranker.
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
_INSTRUCTION = (
    "Given a web search query, retrieve relevant passages that answer the query"
)
# A shortened document may have more tokens than were left of it, so it is shortened again.
_MAX_CUTS = 8


class Prompts(msgspec.Struct, frozen=True):
    """The prompts of a folder by name, and the one that texts get if they ask for none."""

    prompts: dict[str, str | None] | None = None
    default_prompt_name: str | None = None

    @classmethod
    def load(cls, model_path: str) -> "Prompts":
        """Return a folder's prompts, of which most have none. Raises `ConfigError`."""
        file = Path(model_path) / "config_sentence_transformers.json"
        try:
            data = file.read_bytes() if file.is_file() else b"{}"
            return msgspec.json.decode(data, type=cls)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot take prompts from {file}: {error}") from error

    def named(self, name: str | None) -> str:
        """Return the prompt of that name. Raises `RequestError` if the folder has none."""
        prompts = self.prompts or {}
        if name is not None and name not in prompts:
            known = ", ".join(map(repr, prompts)) or "none"
            text = f"the model has no prompt {clip(name)!r}; it has {known}"
            raise RequestError(text, param="prompt_name")
        return prompts.get(name or self.default_prompt_name or "") or ""


class PromptOptions(msgspec.Struct, frozen=True):
    """How texts become token ids."""

    max_tokens: int  # the most that a text or pair may have
    # How many tokens are left of longer ones; None refuses these.
    cut_to: int | None = None
    add_special_tokens: bool = True
    prompt_name: str | None = None
    instruction: str | None = None  # replaces the folder's own in pairs
    max_document_tokens: int | None = None


class PooledTexts:
    """Makes the prompts of one model. Any thread may call it; all calls raise `RequestError`."""

    def __init__(
        self, text: Text, template: ChatTemplate | None, prompts: Prompts
    ) -> None:
        self._text = text
        self._template = template
        self._prompts = prompts
        self._shows_pairs = template is not None and template.shows_roles(
            "query", "document"
        )

    def of_input(self, content: str | list[int], options: PromptOptions) -> list[int]:
        """Return a text behind its prompt. Token ids are a prompt already."""
        if isinstance(content, list):
            if options.cut_to is None and len(content) > options.max_tokens:
                raise _too_long(options.max_tokens, len(content))
            return content[: options.cut_to]
        content = self._prompts.named(options.prompt_name) + content
        if options.cut_to is not None:
            return self._text.encode_cut(
                content, options.cut_to, options.add_special_tokens
            )
        return self._encoded([content], options.max_tokens, options.add_special_tokens)

    def of_pair(
        self, query: str, document: str, options: PromptOptions, *, asks: bool
    ) -> list[int]:
        """Return a query and a document as one prompt. A long document is cut, the query never.

        `asks` says that the score is made of the tokens with which a model answers.
        """
        if options.max_document_tokens is not None:
            document = self._begin_of(document, options.max_document_tokens)
        most = options.max_tokens if options.cut_to is None else options.cut_to
        for _ in range(_MAX_CUTS):
            texts, has_special_tokens = self._filled(
                query, document, options, asks=asks
            )
            if options.cut_to is None:
                return self._encoded(texts, most, not has_special_tokens)
            token_ids = self._text.encode_texts(texts, not has_special_tokens)
            if len(token_ids) <= most:
                return token_ids
            num_left = self._text.count(document) - (len(token_ids) - most)
            if num_left < 1:
                break
            document = self._begin_of(document, num_left)
        raise RequestError(
            f"truncate_prompt_tokens leaves no room for a document beside the query: {most} tokens",
            param="truncate_prompt_tokens",
        )

    def _filled(
        self, query: str, document: str, options: PromptOptions, *, asks: bool
    ) -> tuple[list[str], bool]:
        """Return the texts of a pair, and whether they have their special tokens already."""
        instruction = options.instruction or self._prompts.named(options.prompt_name)
        if self._template is not None and self._shows_pairs:
            system: list[Message] = [{"role": "system", "content": instruction}]
            pair: list[Message] = [
                {"role": "query", "content": query},
                {"role": "document", "content": document},
            ]
            messages = (system if instruction else []) + pair
            return [self._template.render(messages, add_generation_prompt=False)], True
        if not asks:
            return [instruction + query, document], False
        if self._template is None:
            text = "the model has no chat template, without which it cannot be asked for a score"
            raise RequestError(text, code="no_chat_template", http_status=404)
        instruction = instruction or _INSTRUCTION
        asked = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        chat: list[Message] = [
            {"role": "system", "content": _JUDGE},
            {"role": "user", "content": asked},
        ]
        return [self._template.render(chat, options={"enable_thinking": False})], True

    def _encoded(
        self, texts: Sequence[str], most: int, add_special_tokens: bool
    ) -> list[int]:
        try:
            token_ids = self._text.encode_texts(texts, add_special_tokens, most)
        except RequestError as error:
            if error.code == "context_length_exceeded":  # it speaks of room for output
                raise _too_long(most) from None
            raise
        if len(token_ids) > most:
            raise _too_long(most, len(token_ids))
        return token_ids

    def _begin_of(self, document: str, num_tokens: int) -> str:
        token_ids = self._text.encode_cut(
            document, num_tokens, add_special_tokens=False
        )
        begin = self._text.decode(token_ids, skip_special_tokens=False)
        # A cut within a character shows another one, which may have more tokens.
        return begin if document.startswith(begin) else begin.rstrip("\ufffd")


def embedding_of(
    numbers: bytes, dimensions: int | None, *, normalizes: bool
) -> list[float]:
    """Return a pooled row, or its first `dimensions`, with the length 1 if it `normalizes`.

    Raises `RequestError` if the row is shorter.
    """
    row = array("f", numbers)
    if dimensions is not None and dimensions > len(row):
        text = f"dimensions can be at most {len(row)}, the length of the model's embeddings"
        raise RequestError(text, param="dimensions")
    values = row[:dimensions].tolist()
    if not normalizes:
        return values
    length = math.hypot(*values) or 1.0
    return [value / length for value in values]


def cosine_of(numbers: bytes, others: bytes) -> float:
    """Return the cosine of the angle between two pooled rows."""
    first, second = (
        embedding_of(one, None, normalizes=True) for one in (numbers, others)
    )
    return math.fsum(map(operator.mul, first, second))


def score_of(numbers: bytes, *, is_probability: bool) -> float:
    """Return a classifier's only number, or the probability whose logit it is."""
    (number,) = array("f", numbers)
    if not is_probability:
        return number
    if number < 0:
        return math.exp(number) / (1 + math.exp(number))
    return 1 / (1 + math.exp(-number))


def _too_long(most: int, num_tokens: int | None = None) -> RequestError:
    length = f"at least {most + 1}" if num_tokens is None else str(num_tokens)
    return RequestError(
        f"the text is too long: {length} tokens > {most} maximum; shorten it, or cut it with "
        "truncate_prompt_tokens",
        code="context_length_exceeded",
        param="prompt",
    )
