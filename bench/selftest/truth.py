"""The figures of a load as the scripted server knows them, by the plainest means there are.

The self-test holds `metrics` and the client against this. It therefore imports neither, and it
follows the printed definitions in lists and loops, not in arrays. A write happened somewhere within
the call that made it, so every figure is a range: its lower and its upper end. Pure.
"""

import itertools
import math
from collections.abc import Sequence

import msgspec

from baton.bench.selftest.scripts import Answer

PERCENTILES = (50, 90, 99)
METRICS = ("ttft", "itl", "tpot", "gap_max", "e2e")


class Range(msgspec.Struct, frozen=True, array_like=True):
    """Where a value lies for certain."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    @property
    def width(self) -> float:
        return self.high - self.low

    def distance(self, value: float) -> float:
        """Of a value that should lie within: 0 where it does, negative below."""
        if value < self.low:
            return value - self.low
        return max(0.0, value - self.high)


class Truth(msgspec.Struct, frozen=True):
    """One answer, in milliseconds; `itl` has a range per token but those of the first chunk."""

    ttft: Range
    e2e: Range
    itl: list[Range]
    tpot: Range | None  # None: all tokens came at once
    gap_max: Range | None

    def of(self, metric: str) -> list[Range]:
        match metric:
            case "itl":
                return self.itl
            case "ttft" | "e2e":
                return [self.ttft if metric == "ttft" else self.e2e]
            case "tpot":
                return [] if self.tpot is None else [self.tpot]
            case "gap_max":
                return [] if self.gap_max is None else [self.gap_max]
        raise ValueError(metric)


def truth_of(answer: Answer, intended_s: float) -> Truth:
    """Of an answer with at least one token; `intended_s` is on the clock of its stamps."""
    chunks = []  # (range of the moment in seconds, tokens): all that left in one call came as one
    for write in answer.writes:
        if write.num_tokens:
            chunks.append((Range(write.at_s, write.at_s + write.took_s), sum(write.num_tokens)))
    first, first_tokens = chunks[0]
    last, _ = chunks[-1]
    gaps = []
    itl = []
    for (before, _), (after, num_tokens) in itertools.pairwise(chunks):
        gap = _between(before, after)
        gaps.append(gap)
        itl += [Range(gap.low / num_tokens, gap.high / num_tokens)] * num_tokens
    later_tokens = sum(num_tokens for _, num_tokens in chunks) - first_tokens
    due = Range(intended_s, intended_s)
    end = answer.writes[-1]
    span = _between(first, last)
    return Truth(
        ttft=_between(due, first),
        e2e=_between(due, Range(end.at_s, end.at_s + end.took_s)),
        itl=itl,
        tpot=Range(span.low / later_tokens, span.high / later_tokens) if later_tokens else None,
        gap_max=Range(max(g.low for g in gaps), max(g.high for g in gaps)) if gaps else None,
    )


def percentile_of(ranges: Sequence[Range], percent: int) -> Range:
    """The nearest rank: the smallest value that so many percent of the sample do not exceed.

    Both ends have their own: moving single values within their ranges keeps it between them.
    """
    rank = math.ceil(percent * len(ranges) / 100)
    low = sorted(one.low for one in ranges)[rank - 1]
    high = sorted(one.high for one in ranges)[rank - 1]
    return Range(low, high)


def _between(before: Range, after: Range) -> Range:
    """The time from one moment to another, in milliseconds."""
    return Range(1e3 * (after.low - before.high), 1e3 * (after.high - before.low))
