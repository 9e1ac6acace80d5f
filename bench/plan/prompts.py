"""Lengths and prompts that are drawn from a seed, and never come twice in a plan.

A draw depends on the seed and its key alone, and not on other draws, unless an equal one was drawn
before. Prompts of different lengths begin differently. Ids are exact; a word is about one token,
and the server's usage reports the actual number.
"""

import math
from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec
import numpy as np

from baton.bench.records import Message, Planned
from baton.bench.settings import Vocabulary, Workload, range_of
from baton.protocol.errors import ConfigError

Form = Literal["choice", "uniform", "normal", "lognormal"]
Key = tuple[int, ...]
Number = TypeVar("Number", int, float)

LENGTH_FORMS = (
    "512, uniform:100-900, normal:512,sd=100, lognormal:mean=1155,sd=1100 or "
    "choice:100,200,400"
)
MAX_LENGTH = 1 << 22
MAX_PLAN_TOKENS = 20_000_000
# Longer prompts are never equal by chance, so they need not be remembered.
_REMEMBERED_TOKENS = 32
_ATTEMPTS = 100
# The first part of every key: warm-up requests never share a draw with measured ones.
MEASURED = 0
WARM_UP = 1
# Separate the draws of one seed from each other, and from those of arrivals.
_BLOCK_STREAM = 2
_PROMPT_STREAM = 3
_PREFIX_STREAM = 4
_INPUT_STREAM = 5
_OUTPUT_STREAM = 6

# The words are short and common, so that in most tokenizers each one, with its space, is one token.
_TEXT = """
a able about above across act add after again age ago air all also always am among an and animal
answer any are area ask at away back ball base be bear beat become bed been before began behind
best better big bird black blue board boat body book both box boy bring brought build burn but buy
by call came can car care carry cause center certain change check child city class clear close
cold color come common cook cool could country course cover cross cry cut dark day deep did
"""
WORDS = tuple(_TEXT.split())
WORD_PLACES: Vocabulary = (0, len(WORDS) - 1)


class Lengths(msgspec.Struct, frozen=True):
    """A distribution of whole lengths; one beyond 1 or `MAX_LENGTH` is moved to that edge.

    `numbers` are the equally likely lengths, the two ends of a uniform distribution, or the mean
    and the standard deviation (of the lengths, also where their logarithms are normal).
    """

    form: Form
    numbers: tuple[float, ...]

    def draw(self, rng: np.random.Generator) -> int:
        return round(min(max(1, self._draw(rng)), MAX_LENGTH))

    def _draw(self, rng: np.random.Generator) -> float:
        if self.form == "choice":
            return self.numbers[int(rng.integers(len(self.numbers)))]
        first, second = self.numbers
        if self.form == "uniform":
            return int(rng.integers(int(first), int(second), endpoint=True))
        if self.form == "normal":
            return rng.normal(first, second)
        variance = math.log1p((second / first) ** 2)
        return rng.lognormal(math.log(first) - variance / 2, math.sqrt(variance))


def parse_lengths(text: str) -> Lengths:
    """Return the distribution that a text in one of `LENGTH_FORMS` names."""
    name, colon, body = text.strip().partition(":")
    try:
        match name:
            case "choice":
                return Lengths(
                    name, tuple(_possible(int(part)) for part in body.split(","))
                )
            case "uniform":
                low, high = (_possible(int(part)) for part in body.split("-"))
                return Lengths(name, (low, _possible(high, low)))
            case "normal" | "lognormal":
                mean, sd = map(float, body.removeprefix("mean=").split(",sd="))
                return Lengths(name, (_possible(mean), _possible(sd, 0)))
            case _ if not colon:
                return Lengths("choice", (_possible(int(name)),))
    except ValueError:
        pass
    allowed = f"{LENGTH_FORMS}; from 1 to {MAX_LENGTH} tokens"
    raise ConfigError(f"lengths {text!r} are not of the form {allowed}")


def _possible(value: Number, lowest: float = 1) -> Number:
    if not lowest <= value <= MAX_LENGTH:
        raise ValueError(value)
    return value


class Draws:
    """Draws lengths and prompts from one seed, in the order in which requests are planned."""

    def __init__(self, workload: Workload) -> None:
        self.vocabulary = range_of(workload.vocabulary)
        self._seed = workload.seed
        self._inputs, self._outputs = (
            parse_lengths(workload.prompt),
            parse_lengths(workload.output),
        )
        self._drawn: set[tuple[Vocabulary, tuple[int, ...]]] = set()
        self._num_tokens = 0

    def input_tokens(self, key: Key) -> int:
        return self._inputs.draw(
            np.random.default_rng([self._seed, _INPUT_STREAM, *key])
        )

    def output_tokens(self, key: Key) -> int:
        return self._outputs.draw(
            np.random.default_rng([self._seed, _OUTPUT_STREAM, *key])
        )

    def spend(self, num_tokens: int) -> None:
        """Count a prompt before it is drawn, because a plan is held in memory as a whole."""
        self._num_tokens += num_tokens
        if self._num_tokens > MAX_PLAN_TOKENS:
            raise ConfigError(
                f"the plan holds over {MAX_PLAN_TOKENS} prompt tokens: ask for fewer requests, or "
                "for shorter prompts (traces: scale them)"
            )

    def prompt(self, key: Key, length: int, choices: Vocabulary) -> tuple[int, ...]:
        """Return numbers from `choices` that differ from all prompts before, or refuse."""
        for attempt in range(_ATTEMPTS):
            drawn = self._draw((_PROMPT_STREAM, *key, attempt), length, choices)
            if length > _REMEMBERED_TOKENS:
                return drawn
            if (choices, drawn) not in self._drawn:
                self._drawn.add((choices, drawn))
                return drawn
        raise ConfigError(
            f"there are not enough prompts of {length} tokens that differ: ask for longer ones, "
            "fewer requests or a wider vocabulary"
        )

    def shared(self, key: Key, length: int, choices: Vocabulary) -> tuple[int, ...]:
        """Return a prefix: the same for every request with this key and length."""
        return self._draw((_PREFIX_STREAM, *key), length, choices)

    def block(self, hash_id: int, length: int) -> tuple[int, ...]:
        """Return the tokens of a trace's block, which depend on its id alone."""
        rng = np.random.default_rng([self._seed, _BLOCK_STREAM, hash_id])
        return tuple(rng.integers(*self.vocabulary, length, endpoint=True).tolist())

    def _draw(self, key: Key, length: int, choices: Vocabulary) -> tuple[int, ...]:
        # With the length, or a server would know how a longer prompt starts from a shorter one.
        rng = np.random.default_rng([self._seed, *key, length])
        return tuple(rng.integers(*choices, length, endpoint=True).tolist())


def written(places: Sequence[int]) -> str:
    """Return the words at these places of `WORDS`."""
    return " ".join(WORDS[place] for place in places)


class DrawnSource:
    """Requests with random prompts, without index and time."""

    num_rows: int | None = None  # there is no end
    times: Sequence[float] | None = None

    def __init__(self, workload: Workload, draws: Draws) -> None:
        self._workload = workload
        self._draws = draws
        self._kind = workload.workload

    def draw(self, place: int) -> Planned:
        return self._request((MEASURED, place, 0), (MEASURED, 0))

    def warm_up(self, place: int) -> Planned:
        return self._request((WARM_UP, place, 0), (WARM_UP, place))

    def _request(self, key: Key, prefix: Key) -> Planned:
        draws = self._draws
        num_shared = self._workload.shared_prefix
        outputs = draws.output_tokens(key)
        own = draws.input_tokens(key)
        draws.spend(num_shared + own)
        choices = draws.vocabulary if self._kind == "tokens" else WORD_PLACES
        start = draws.shared(prefix, num_shared, choices)
        rest = draws.prompt(key, own, choices)
        if self._kind == "tokens":
            return Planned(0, None, outputs, prompt_ids=start + rest)
        if self._kind == "text":
            return Planned(0, None, outputs, prompt=written(start + rest))
        system = (Message("system", written(start)),) if start else ()
        return Planned(
            0, None, outputs, messages=(*system, Message("user", written(rest)))
        )

    def notes(self, _num_arrivals: int) -> list[str]:
        if self._kind == "tokens":
            return []
        return ["a word counts as a token in prompts: the server's usage is exact"]
