"""How tokens are chosen: the parameters of a user, and the part of them that an engine needs.

`SamplingParams` is the public type (`baton.SamplingParams`). `Sampling` travels to the engines,
which never see text and therefore have no stop strings.
"""

import math
from typing import Literal

import msgspec

from baton.protocol.bounds import MAX_COUNT, Count, Int64
from baton.protocol.errors import RequestError

OutputKind = Literal["cumulative", "delta", "final"]
MAX_CHOICES = 128
SEED_BITS = 63


class Sampling(msgspec.Struct, frozen=True):
    """Filtering, noise and end of one sequence. The seed is always set."""

    seed: Int64
    max_tokens: Count
    min_tokens: Count = 0
    temperature: float = 1.0  # 0 is greedy
    top_k: Count = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: tuple[Count, ...] = ()
    ignore_eos: bool = False


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """What a user may ask for. Names and defaults are the usual ones of serving libraries.

    `max_tokens=None` generates until the model's length is full. `stop` takes a string or a list.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    output_kind: OutputKind = "cumulative"

    def __post_init__(self) -> None:
        _check(self)

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)


def _check(params: SamplingParams) -> None:
    """Raise `RequestError` that names the first field that is no number of its kind or range."""
    for name in ("n", "top_k", "max_tokens", "min_tokens", "seed"):
        value = getattr(params, name)
        if type(value) is not int and not (value is None and name in ("max_tokens", "seed")):
            raise RequestError(f"{name} must be an integer", param=name)
    for name in ("temperature", "top_p", "min_p"):
        value = getattr(params, name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise RequestError(f"{name} must be a number", param=name)
    _in_range("n", params.n, 1, MAX_CHOICES)
    _in_range("temperature", params.temperature, 0.0, 100.0)
    _in_range("top_p", params.top_p, 0.0, 1.0, open_low=True)
    _in_range("min_p", params.min_p, 0.0, 1.0)
    if not -1 <= params.top_k <= MAX_COUNT:
        text = f"top_k must be -1 or 0 (keep all) or positive, and at most {MAX_COUNT}"
        raise RequestError(text, param="top_k")
    if params.max_tokens is not None and params.max_tokens < 1:
        raise RequestError("max_tokens must be at least 1", param="max_tokens")
    _in_range("min_tokens", params.min_tokens, 0, MAX_COUNT)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise RequestError("min_tokens must not exceed max_tokens", param="min_tokens")
    if params.seed is not None and not -(1 << SEED_BITS) <= params.seed < 1 << SEED_BITS:
        raise RequestError("seed must fit 64 bits", param="seed")
    if not all(type(i) is int and 0 <= i <= MAX_COUNT for i in params.stop_token_ids or ()):
        text = f"stop_token_ids must be integers of at least 0 and at most {MAX_COUNT}"
        raise RequestError(text, param="stop_token_ids")
    if any(not text for text in params.stop_strings):
        raise RequestError("stop must not hold an empty string", param="stop")


def _in_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if not math.isfinite(value) or not low <= value <= high or (open_low and value == low):
        edge = "above" if open_low else "at least"
        raise RequestError(f"{name} must be {edge} {low:g} and at most {high:g}", param=name)
