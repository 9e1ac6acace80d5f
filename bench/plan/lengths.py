"""How long prompts and outputs are: fixed, or drawn from a distribution that a text names.

`workloads.py` draws one length per request and side. A drawn length is a whole number of tokens, at
least 1 and at most the cap, if one is given: what lies beyond is moved to the edge, so a tight cap
lowers the mean.
"""

import math
from typing import TypeVar

import msgspec
import numpy as np

from baton.protocol.errors import ConfigError

FORMS = (
    "512, uniform:100-900, normal:512,sd=100, lognormal:mean=1155,sd=1100 or choice:100,200,400; "
    "',max=N' caps all but the first"
)
MAX_LENGTH = 1 << 22


class Fixed(msgspec.Struct, frozen=True, tag="fixed"):
    tokens: int


class Uniform(msgspec.Struct, frozen=True, tag="uniform"):
    """Every length from `low` to `high`, both included, is as likely."""

    low: int
    high: int


class Normal(msgspec.Struct, frozen=True, tag="normal"):
    mean: float
    sd: float


class LogNormal(msgspec.Struct, frozen=True, tag="lognormal"):
    """`mean` and `sd` are those of the lengths, not of their logarithms."""

    mean: float
    sd: float


class Choice(msgspec.Struct, frozen=True, tag="choice"):
    """Each of these is as likely; name one twice to double its weight."""

    tokens: tuple[int, ...]


Shape = Fixed | Uniform | Normal | LogNormal | Choice
AnyShape = TypeVar("AnyShape", bound=Shape)


class Lengths(msgspec.Struct, frozen=True):
    """A distribution of lengths in tokens."""

    shape: Shape
    cap: int = MAX_LENGTH

    def draw(self, rng: np.random.Generator) -> int:
        """One length. Consumes the same draws whether or not there is a cap."""
        return round(min(max(1, _draw(self.shape, rng)), self.cap))


def _draw(shape: Shape, rng: np.random.Generator) -> float:
    match shape:
        case Fixed(tokens):
            return tokens
        case Uniform(low, high):
            return int(rng.integers(low, high, endpoint=True))
        case Normal(mean, sd):
            return rng.normal(mean, sd)
        case LogNormal(mean, sd):
            variance = math.log1p((sd / mean) ** 2)
            return rng.lognormal(math.log(mean) - variance / 2, math.sqrt(variance))
        case Choice(tokens):
            return tokens[int(rng.integers(len(tokens)))]


def parse_lengths(text: str) -> Lengths:
    """The distribution that a text names; `FORMS` shows them. Raises `ConfigError`."""
    name, separator, rest = text.strip().partition(":")
    try:
        if not separator:
            return Lengths(_checked(Fixed(int(name))))
        body, capped, cap = rest.partition(",max=")
        shape = _checked(_parse(name, body))
        if not capped:
            return Lengths(shape)
        return Lengths(shape, _checked(Fixed(int(cap))).tokens)
    except ValueError:
        allowed = f"{FORMS}; from 1 to {MAX_LENGTH} tokens"
        raise ConfigError(f"lengths {text!r} are not of the form {allowed}") from None


def _parse(name: str, body: str) -> Shape:
    if name == "uniform":
        low, _, high = body.partition("-")
        return Uniform(int(low), int(high))
    if name == "choice":
        return Choice(tuple(int(part) for part in body.split(",")))
    mean, _, sd = body.partition(",sd=")
    if name == "normal":
        return Normal(float(mean.removeprefix("mean=")), float(sd))
    if name == "lognormal":
        return LogNormal(float(mean.removeprefix("mean=")), float(sd))
    raise ValueError(name)


def _checked(shape: AnyShape) -> AnyShape:
    fits = False
    match shape:
        case Fixed(tokens):
            fits = 1 <= tokens <= MAX_LENGTH
        case Uniform(low, high):
            fits = 1 <= low <= high <= MAX_LENGTH
        case Normal(mean, sd) | LogNormal(mean, sd):
            fits = 1 <= mean <= MAX_LENGTH and 0 <= sd <= MAX_LENGTH
        case Choice(choices):
            fits = min(choices) >= 1 and max(choices) <= MAX_LENGTH
    if not fits:
        raise ValueError(shape)
    return shape
