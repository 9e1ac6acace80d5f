"""Prompts that nobody wrote: seeded token ids, or words, that never occur twice in a plan.

`workloads.py` draws one for each request. A prompt depends on the seed, its key and its length
alone, not on how many others are drawn, as long as its twin was not drawn before; no length begins
as another does. Ids are exact; a word is about one token, and how many there were only the server's
usage says.
"""

from collections.abc import Sequence

import numpy as np

from baton.bench.plan.replay import Vocabulary
from baton.protocol.errors import ConfigError

Key = tuple[int, ...]

# Longer ones do not meet by chance, so they need not be remembered.
_REMEMBERED_TOKENS = 32
_ATTEMPTS = 100
# Keep the draws of a seed apart from those of arrivals and lengths.
_STREAM, _PREFIX_STREAM = 3, 4

# Short and common, so that most tokenizers have each of them, with its space, as one token.
_TEXT = """
a able about above across act add after again age ago air all also always am among an and
animal answer any are area ask at away back ball base be bear beat become bed been before began
behind best better big bird black blue board boat body book both box boy bring brought build
burn but buy by call came can car care carry cause center certain change check child city class
clear close cold color come common cook cool could country course cover cross cry cut dark day
deep did differ direct do does dog done door down draw drive dry during each early earth ease
east eat end enough even ever every example eye face fact fall family far farm fast father feel
few field figure fill final find fine fire first fish five floor fly follow food foot for force
form found four free friend from front full game gave general get girl give go gold good got
green ground group grow had half hand happen hard has have he head hear heat help her here high
him his hold home horse hot hour house how hundred idea if in inch is island it just keep kind
king knew know land language large last late laugh lay lead learn leave left less let letter
"""
WORDS = tuple(_TEXT.split())
_PLACES = (0, len(WORDS) - 1)


class Prompts:
    """Draws the prompts of one plan, in the order in which they are asked for."""

    def __init__(self, vocabulary: Vocabulary, seed: int) -> None:
        self._vocabulary = vocabulary
        self._seed = seed
        self._drawn: set[tuple[Vocabulary, tuple[int, ...]]] = set()

    def ids(self, key: Key, num_tokens: int) -> tuple[int, ...]:
        """Token ids. Raises `ConfigError` when so many of this length cannot all differ."""
        return self._unlike_others(key, num_tokens, self._vocabulary)

    def words(self, key: Key, num_words: int) -> str:
        """Words with spaces between. Raises `ConfigError` as `ids` does."""
        return _written(self._unlike_others(key, num_words, _PLACES))

    def shared_ids(self, key: Key, num_tokens: int) -> tuple[int, ...]:
        """A prefix: the same whenever this key is asked for in this length."""
        return self._draw((_PREFIX_STREAM, *key), num_tokens, self._vocabulary)

    def shared_words(self, key: Key, num_words: int) -> str:
        return _written(self._draw((_PREFIX_STREAM, *key), num_words, _PLACES))

    def _unlike_others(self, key: Key, length: int, choices: Vocabulary) -> tuple[int, ...]:
        for attempt in range(_ATTEMPTS):
            drawn = self._draw((_STREAM, *key, attempt), length, choices)
            if length > _REMEMBERED_TOKENS:
                return drawn
            if (choices, drawn) not in self._drawn:
                self._drawn.add((choices, drawn))
                return drawn
        raise ConfigError(
            f"there are not enough prompts of {length} tokens that differ: ask for longer ones, "
            "fewer requests or a wider vocabulary"
        )

    def _draw(self, key: Key, length: int, choices: Vocabulary) -> tuple[int, ...]:
        # With the length, or a server that was asked the shorter would know the longer's start.
        rng = np.random.default_rng([self._seed, *key, length])
        return tuple(rng.integers(*choices, length, endpoint=True).tolist())


def _written(places: tuple[int, ...]) -> str:
    return " ".join(WORDS[place] for place in places)


def shared_share(
    prompts: Sequence[Sequence[int]], before: Sequence[Sequence[int]] = (), block_tokens: int = 16
) -> float:
    """Tokens that begin as an earlier prompt began, in whole blocks, of all of `prompts`: what an
    endless prefix cache would find that knew nothing but the prompts `before` them."""
    known: set[int] = set()
    num_shared = 0
    for place, prompt in enumerate((*before, *prompts), -len(before)):
        chain, is_known = 0, True
        for start in range(0, len(prompt) - block_tokens + 1, block_tokens):
            chain = hash((chain, *prompt[start : start + block_tokens]))
            is_known = is_known and chain in known
            num_shared += block_tokens * (is_known and place >= 0)
            known.add(chain)
    return num_shared / max(1, sum(len(prompt) for prompt in prompts))
