"""The vocabulary of the simulated model, and what clients may ask of its tokens.

Nodes follow a rule by production's masks and penalties, which they have from the request. Clients
check it by arithmetic of their own.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel

from baton.model.sampling.penalties import DIVISOR, MINUEND
from baton.model.sampling.token_masks import NoMask, TokenMasks
from baton.node.scheduling.plan import Slice
from tests.sim.executor import VOCAB

EOS = tuple(range(10, 14))
LETTERS = "abcd"
# Of an even and an odd token, both of 100 or more.
PAIRS = "([ac][1-9][0-9]{2}[bd][1-9][0-9]{2})"
FEW = range(200, 240)


def word(token: int) -> str:
    """Return the text of a token, whose letter says whether its id is even."""
    return f"{LETTERS[token % len(LETTERS)]}{token:03d}"


TOKENIZER = Tokenizer(
    WordLevel({word(token): token for token in range(VOCAB)}, word(0))
)
TOKENIZER.decoder = ByteLevel()

# Called with the prompt, the output so far and a token: whether that may come next.
Allows = Callable[[Sequence[int], Sequence[int], int], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """The fields of a request, and what they ask for. With a form, the model may end a response."""

    fields: Mapping[str, object]
    allows: Allows
    is_form: bool = False


def _is_in_pairs(_: Sequence[int], output: Sequence[int], token: int) -> bool:
    if token in EOS:
        return bool(output) and len(output) % 2 == 0
    return token >= 100 and token % 2 == len(output) % 2


def _is_in_two_pairs(_: Sequence[int], output: Sequence[int], token: int) -> bool:
    if len(output) == 4:
        return token in EOS
    return _is_in_pairs((), output, token)


RULES: Mapping[str, Rule] = {
    "none": Rule({}, lambda _prompt, _output, _token: True),
    "pairs": Rule(
        {"structured_outputs": {"regex": f"{PAIRS}+"}}, _is_in_pairs, is_form=True
    ),
    "two pairs": Rule(
        {"structured_outputs": {"regex": f"{PAIRS}{{1,2}}"}},
        _is_in_two_pairs,
        is_form=True,
    ),
    "few": Rule(
        {"allowed_token_ids": list(FEW)}, lambda _prompt, _output, token: token in FEW
    ),
    "new": Rule(
        {"presence_penalty": 2.0}, lambda _prompt, output, token: token not in output
    ),
    "unheard": Rule(
        {"repetition_penalty": 2.0},
        lambda prompt, output, token: token not in output and token not in prompt,
    ),
}


class SimMasks(TokenMasks):
    """The masks of a node, whose thread compiles a grammar in `compile_s` of the node's time.

    A penalty of the simulated model rules a token out.
    """

    def __init__(
        self, clock: Callable[[], float], compile_s: Callable[[], float]
    ) -> None:
        super().__init__(Path(), VOCAB, EOS)
        self._clock = clock
        self._compile_s = compile_s
        self._ready_s: dict[str, float] = {}

    def allowed(
        self, part: Slice, tokens: tuple[int, ...]
    ) -> Callable[[int], bool] | NoMask:
        """Return what says of a token whether it may follow a slice of `tokens`."""
        words = self.mask(part, tokens, ())
        if isinstance(words, NoMask):
            return words
        bits = (
            None
            if words is None
            else np.unpackbits(words.view(np.uint8), bitorder="little")
        )
        counted = self.counted(part.key)
        penalized: frozenset[int] = frozenset()
        if counted is not None:
            changes = counted.changes
            is_changed = (changes[DIVISOR] != 1.0) | (changes[MINUEND] != 0.0)
            penalized = frozenset(counted.ids[is_changed].tolist())
        return lambda token: (
            (bits is None or bool(bits[token])) and token not in penalized
        )

    def _compile(self, grammar: str) -> tuple[Future[LLMatcher], bool]:
        now_s = self._clock()
        compiled = Future[LLMatcher]()
        if self._ready_s.setdefault(grammar, now_s + self._compile_s()) <= now_s:
            compiled.set_result(_matcher(grammar))
        return compiled, False


@cache
def _matcher(grammar: str) -> LLMatcher:
    tokenizer = LLTokenizer(TOKENIZER.to_str(), n_vocab=VOCAB, eos_token=list(EOS))
    return LLMatcher(tokenizer, grammar, log_level=0)
