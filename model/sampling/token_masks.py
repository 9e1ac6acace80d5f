"""Which tokens may come next in outputs that have a form: a grammar, allowed ids, bad words.

A mask is a function of `Sampling` and of the output so far, so nodes and ranks agree on it, and a
resumed sequence goes on under the same masks. So are penalties, which are kept with them. An output
is followed while every plan has its sequence; a slice with `past` begins anew, so no state crosses
a handoff.
"""

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from baton.model.sampling.penalties import CountedTokens
from baton.node.scheduling.plan import Slice
from baton.protocol.ids import Key
from baton.protocol.sampling import Sampling

MAX_GRAMMARS = 64  # compiled ones that are kept
# A step waits this long for a grammar that is new here: usual ones compile in a few milliseconds.
COMPILE_WAIT_S = 0.01
# A hostile grammar compiles in half a second, because others wait for it; a step of it takes
# milliseconds, and then ends its request.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=100_000,
    step_max_items=5_000,
    max_lexer_states=100_000,
)
Words = NDArray[np.int32]  # [ceil(vocab_size / 32)], a bit for each id


class NoMask(msgspec.Struct, frozen=True):
    """Nothing can be sampled: never, for the reason `problem`, or not yet if that is empty."""

    problem: str = ""


@dataclass(slots=True)
class _Output:
    """The output of one sequence, and what it has to be."""

    bad_words: tuple[tuple[int, ...], ...]
    allowed: Words | None  # the ids that may ever come; None if there are no rules
    matcher: LLMatcher | None
    counted: CountedTokens | None  # if there are penalties
    token_ids: list[int]
    num_matched: int = 0

    def extend(self, token_ids: tuple[int, ...]) -> None:
        self.token_ids += token_ids
        if self.counted is not None:
            self.counted.add(token_ids)

    def mask(self) -> Words | NoMask | None:
        if self.allowed is None:
            return None
        words = self.allowed.copy()
        if (matcher := self.matcher) is not None:
            matcher.consume_tokens(self.token_ids[self.num_matched :])
            self.num_matched = len(self.token_ids)
            mask = np.empty_like(words)
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if matcher.is_error():
                return NoMask(_first_line(matcher))
            words &= mask
        for *before, last in self.bad_words:
            if not before or self.token_ids[-len(before) :] == before:
                _clear(words, last)
        return words


class TokenMasks:
    """The masks of one rank."""

    def __init__(
        self, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        self.num_words = -(-vocab_size // 32)
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokenizer: LLTokenizer | None = None  # loaded with the first grammar
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._outputs: dict[Key, _Output] = {}  # of the last plan's sequences
        self._last: dict[Key, _Output] = {}

    def begin_step(self) -> None:
        """Forget the sequences that were not part of the last plan."""
        self._last = self._outputs
        self._outputs = {}

    def mask(
        self, part: Slice, tokens: tuple[int, ...], held_back: tuple[int, ...]
    ) -> Words | NoMask | None:
        """Return the ids that may follow a slice of `tokens`, without `held_back`; None for all."""
        sampling = part.sampling
        assert sampling is not None
        output: _Output | NoMask | None = self._last.get(part.key)
        if part.past is not None:
            output = self._begin(
                sampling, part.past, min(part.start, part.num_prompt_tokens)
            )
        if output is None or isinstance(output, NoMask):
            return output or NoMask()
        # Of a prompt's last chunk, the first tokens are no output.
        num_prompt = max(0, part.num_prompt_tokens - part.start)
        if output.counted is not None:
            output.counted.add_prompt(tokens[:num_prompt])
        output.extend(tokens[num_prompt:])
        self._outputs[part.key] = output
        mask = output.mask()
        if mask is None or isinstance(mask, NoMask):
            return mask
        for token_id in held_back:
            _clear(mask, token_id)
        return mask if mask.any() else NoMask("no token may follow")

    def counted(self, key: Key) -> CountedTokens | None:
        """Return the tokens of a sequence that has penalties, after `mask`."""
        output = self._outputs.get(key)
        return None if output is None else output.counted

    def prepare(self, grammar: str) -> None:
        """Begin to compile a grammar that will be needed soon."""
        if grammar:
            self._compile(grammar)

    def close(self) -> None:
        """Compile no more grammars. Otherwise, a process would wait for them as it ends."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    # --- inside --------------------------------------------------------------------------------

    def _begin(
        self, sampling: Sampling, past: tuple[int, ...], num_prompt_tokens: int
    ) -> _Output | NoMask:
        matcher = None
        words = None
        if sampling.grammar:
            future, is_new = self._compile(sampling.grammar)
            try:
                fresh = future.result(COMPILE_WAIT_S if is_new else 0)
            except TimeoutError:
                return NoMask()
            except (OSError, RuntimeError, ValueError) as error:
                return NoMask(f"llguidance cannot read the model's tokenizer: {error}")
            if fresh.is_error():
                return NoMask(_first_line(fresh))
            if not self._eos_token_ids:
                return NoMask("the model has no end-of-sequence token")
            matcher = fresh.deep_copy()
        if sampling.allowed_token_ids or sampling.bad_words or matcher is not None:
            bits = np.zeros(32 * self.num_words, np.bool_)
            if ids := sampling.allowed_token_ids:
                bits[[token_id for token_id in ids if token_id < self._vocab_size]] = (
                    True
                )
            else:
                bits[: self._vocab_size] = True
            words = np.packbits(bits, bitorder="little").view(np.int32)
        counted = (
            None if sampling.penalties is None else CountedTokens(sampling.penalties)
        )
        output = _Output(sampling.bad_words, words, matcher, counted, [])
        if counted is not None and sampling.needs_prompt:
            counted.add_prompt(past[:num_prompt_tokens])
            past = past[num_prompt_tokens:]
        output.extend(past)
        return output

    def _compile(self, grammar: str) -> tuple[Future[LLMatcher], bool]:
        future = self._compiled.pop(grammar, None)
        if is_new := future is None:
            future = self._thread.submit(self._compiled_now, grammar)
        self._compiled[grammar] = future
        if len(self._compiled) > MAX_GRAMMARS:
            # One that is still waited for would be compiled again.
            ready = (text for text, other in self._compiled.items() if other.done())
            self._compiled.pop(next(ready, ""), None)
        return future, is_new

    def _compiled_now(self, grammar: str) -> LLMatcher:
        if self._tokenizer is None:
            text = (self._folder / "tokenizer.json").read_text(encoding="utf-8")
            eos = list(self._eos_token_ids) or None
            self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=eos)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        matcher.compute_bitmask()  # the first may take far longer than those after it
        return matcher


def _clear(words: Words, token_id: int) -> None:
    if token_id >> 5 < len(words):
        words.view(np.uint32)[token_id >> 5] &= np.uint32(
            ~(1 << (token_id & 31)) & 0xFFFFFFFF
        )


def _first_line(matcher: LLMatcher) -> str:
    return matcher.get_error().partition("\n")[0]
