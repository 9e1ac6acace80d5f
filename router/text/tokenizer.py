"""The text of a model: tokens from text and back.

No other part of the router knows the tokenizer. It needs the package `tokenizers` and a
tokenizer.json: torch and transformers must never load here.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from tokenizers import Encoding, Tokenizer

from baton.protocol.errors import ConfigError, RequestError
from baton.protocol.sampling import SamplingParams
from baton.router.text.detokenizer import Decoding, Detokenizer, decoding_of
from baton.router.text.formats import reasoning_format
from baton.router.text.grammars import problem_of_tokenizer
from baton.router.text.response_parser import Parsing, ParsingDetokenizer
from baton.router.text.special_tokens import check_tokens, missing_tokenizer

# Long prompts have threads of their own, so that a short one never waits behind them.
_THREADS_PER_LANE = 2
_SHORT_CHARS = 16 * 1024
# Encoding a prompt up to this length takes less time than handing it to a thread.
MAX_CHARS_ON_LOOP = 200
# An encoding takes about 150 bytes per token. Prompts that could exceed the model's length are
# counted in parts, each of which takes a few milliseconds and a few MB.
_PART_CHARS = 16 * 1024
_USUAL_BYTES_PER_TOKEN = 4
# The most tokens by which a cut through the text of a prompt can raise the count.
_TOKENS_PER_CUT = 32
# The most tokens of a tag and the white space after it.
_TOKENS_OF_TAG = 16

T = TypeVar("T")


class Text:
    """The tokenizer of one model. `close` ends its threads."""

    def __init__(
        self, tokenizer: Tokenizer, decoding: Decoding, problem_of_forms: str = ""
    ) -> None:
        """`problem_of_forms` says why nodes cannot hold a form in these tokens, if they cannot."""
        self.problem_of_forms = problem_of_forms
        self._tokenizer = tokenizer
        self._decoding = decoding
        self._short_lane = ThreadPoolExecutor(
            _THREADS_PER_LANE, thread_name_prefix="encode-short"
        )
        self._long_lane = ThreadPoolExecutor(
            _THREADS_PER_LANE, thread_name_prefix="encode-long"
        )
        # No token has a text of more bytes, because its spelling is at least as long as its text.
        self.max_token_bytes = max(
            len(token.encode()) for token in tokenizer.get_vocab()
        )

    @classmethod
    def load(cls, model_path: str) -> "Text":
        """Load a folder's tokenizer. Raises `ConfigError` if it has no usable tokenizer.json."""
        path = Path(model_path) / "tokenizer.json"
        try:
            data = path.read_bytes()
            tokenizer = Tokenizer.from_buffer(data)
        except FileNotFoundError as error:
            raise missing_tokenizer(path.parent) from error
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(
                f"{path} is not a tokenizer that baton can use: {error}"
            ) from error
        check_tokens(path.parent)
        # Some folders were saved with the limits of a training run, which would silently cut
        # prompts.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(tokenizer, decoding_of(tokenizer), problem_of_tokenizer(data))

    async def encode(
        self,
        prompt: str,
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Return the ids of `prompt`, encoded off the event loop unless it is very short.

        `add_special_tokens` adds those that the tokenizer adds. A rendered chat has them already.
        Raises `RequestError` for text that is not Unicode. `max_tokens` bounds the cost: a longer
        prompt may be refused before it is encoded whole, and the caller checks the exact length.
        """
        if len(prompt) <= MAX_CHARS_ON_LOOP:
            return self.encode_now(prompt, add_special_tokens)
        work = partial(self.encode_now, prompt, add_special_tokens, max_tokens)
        return await self.in_thread(len(prompt), work)

    async def in_thread(self, num_chars: int, work: Callable[[], T]) -> T:
        """Return the result of work that encodes so many characters."""
        lane = self._short_lane if num_chars <= _SHORT_CHARS else self._long_lane
        return await asyncio.get_running_loop().run_in_executor(lane, work)

    def encode_now(
        self,
        prompt: str,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Encode on this thread, at a cost that `max_tokens` bounds. Raises `RequestError`."""
        try:
            num_bytes = len(prompt.encode())
        except UnicodeEncodeError as error:
            text = (
                f"prompt is not Unicode text: {error.reason} at character {error.start}"
            )
            raise RequestError(text, param="prompt") from error
        if max_tokens is not None and num_bytes > max_tokens * _USUAL_BYTES_PER_TOKEN:
            self._refuse_too_long(prompt, max_tokens)
        return self._encoding(prompt, add_special_tokens).ids

    def encode_texts(
        self,
        texts: Sequence[str],
        add_special_tokens: bool,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Encode a text, or a pair of texts as the tokenizer joins them, as `encode_now` does."""
        if len(texts) == 1:
            return self.encode_now(texts[0], add_special_tokens, max_tokens)
        for text in texts:
            self.encode_now(text, False, max_tokens)
        pair = (texts[0], texts[1])
        (encoding,) = self._tokenizer.encode_batch_fast(
            [pair], add_special_tokens=add_special_tokens
        )
        return encoding.ids

    def encode_cut(
        self, prompt: str, num_tokens: int, add_special_tokens: bool
    ) -> list[int]:
        """Return the first ids of a text, and those that the tokenizer adds, `num_tokens` in all.

        Raises `RequestError` as `encode_now` does.
        """
        if not add_special_tokens:
            return self.encode_now(prompt, False)[:num_tokens]
        whole = self.encode_now(prompt, True)
        if len(whole) <= num_tokens:
            return whole
        encoding = self._encoding(prompt, False)
        encoding.truncate(
            max(0, num_tokens - self._tokenizer.num_special_tokens_to_add(False))
        )
        return self._tokenizer.post_process(encoding).ids[:num_tokens]

    def count(self, prompt: str) -> int:
        """Return how many tokens a text has, without special ones that the tokenizer adds."""
        return len(self.encode_now(prompt, False))

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

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        stream = self._decoding.stream((), skip_special_tokens)
        return (
            "".join([stream.feed(token_id) for token_id in token_ids]) + stream.flush()
        )

    def spell(self, skip_special_tokens: bool, token_id: int) -> tuple[str, bytes]:
        """Return the text of one token, and the bytes that it adds to a response.

        The text has U+FFFD for bytes that are no whole character. A special token adds none if it
        is left out.
        """
        return self._decoding.spell(skip_special_tokens, token_id)

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
        is_thinking = False
        end_id = None
        if parsing.reasoning:
            is_thinking = self.opens_reasoning(prompt_token_ids, parsing.reasoning)
            end_id = self._tokenizer.token_to_id(
                reasoning_format(parsing.reasoning).end
            )
        return ParsingDetokenizer(index, stream, params, parsing, is_thinking, end_id)

    def opens_reasoning(self, prompt_token_ids: Sequence[int], name: str) -> bool:
        """Return whether a prompt ends with the tag that begins reasoning in this format."""
        last = self.decode(
            prompt_token_ids[-_TOKENS_OF_TAG:], skip_special_tokens=False
        )
        return last.rstrip().endswith(reasoning_format(name).begin)

    def close(self) -> None:
        for lane in (self._short_lane, self._long_lane):
            # The core tells waiting callers that the router has ended.
            lane.shutdown(wait=False)


def too_long(max_tokens: int) -> RequestError:
    """Return the error for a prompt with more than `max_tokens` tokens."""
    return RequestError(
        f"the prompt is too long: at least {max_tokens + 1} tokens > {max_tokens} maximum, which "
        "leaves room for one token of output; shorten it",
        code="context_length_exceeded",
        param="prompt",
    )
