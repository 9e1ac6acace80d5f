"""Text to tokens and back: the one part of the router that knows the tokenizer.

`TextRouter` encodes a prompt once and makes a `Detokenizer` per choice. All that is needed is the
package `tokenizers` and a tokenizer.json: torch and transformers must never load here.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from baton.protocol.errors import ConfigError, RequestError
from baton.protocol.sampling import SamplingParams
from baton.router.text.detokenizer import Detokenizer
from baton.router.text.stop_strings import StopAutomaton
from baton.router.text.token_text import Decoding, decoding_of

_ENCODE_THREADS = 2
# A prompt up to this length is encoded in less time than it takes to hand it to a thread.
_MAX_CHARS_ON_LOOP = 200
_AUTOMATA_KEPT = 64


class Text:
    """The tokenizer of one model. `close` ends its threads."""

    def __init__(self, tokenizer: Tokenizer, decoding: Decoding) -> None:
        self._tokenizer = tokenizer
        self._decoding = decoding
        self._pool = ThreadPoolExecutor(_ENCODE_THREADS, thread_name_prefix="encode")
        # Many choices, or requests with the same stop strings, share one.
        self._automaton = lru_cache(maxsize=_AUTOMATA_KEPT)(StopAutomaton)

    @classmethod
    def load(cls, model_path: str) -> "Text":
        """Load a folder's tokenizer; raises `ConfigError` if it has no usable tokenizer.json."""
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
        # Some folders were saved with the limits of a training run, which silently cut prompts.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(tokenizer, decoding_of(tokenizer, data))

    async def encode(self, prompt: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `prompt`; a long one is encoded off the event loop.

        `add_special_tokens` adds those that the tokenizer adds. A rendered chat has them already.
        """
        if len(prompt) <= _MAX_CHARS_ON_LOOP:
            return self.encode_now(prompt, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self.encode_now, prompt, add_special_tokens)

    def encode_now(self, prompt: str, add_special_tokens: bool = True) -> list[int]:
        """Encode on this thread; raises `RequestError` for text that is not Unicode."""
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"prompt is not Unicode text: {error}", param="prompt") from error
        # The batch call releases the GIL, and this variant computes no offsets. The tokenizer's
        # plain `encode` would stop the event loop for as long as a long prompt takes.
        (encoding,) = self._tokenizer.encode_batch_fast(
            [prompt], add_special_tokens=add_special_tokens
        )
        return encoding.ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        stream = self._decoding.stream((), skip_special_tokens)
        return "".join([stream.feed(token_id) for token_id in token_ids]) + stream.flush()

    def detokenizer(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, index: int = 0
    ) -> Detokenizer:
        """Return a detokenizer for choice `index` of a prompt."""
        stops = tuple(params.stop_strings)
        return Detokenizer(
            index,
            self._decoding.stream(prompt_token_ids, params.skip_special_tokens),
            params,
            self._automaton(stops) if stops else None,
        )

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
