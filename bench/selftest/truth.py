"""The figures of a load as the scripted server knows them, by the plainest means there are.

The self-test holds `metrics` and the client against this. It therefore imports neither, and it
follows the printed definitions in lists and loops, not in arrays. A write happened somewhere within
the call that made it, so every figure is a range: its lower and its upper end. Pure.
"""

import itertools
import math
from collections.abc import Sequence

import msgspec

from baton.bench.selftest.scripted_server import Answer

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
        """Return 0 for a value within, else how far it lies above or, negative, below."""
        if value < self.low:
            return value - self.low
        return max(0.0, value - self.high)


def truth_of(answer: Answer, intended_s: float) -> dict[str, list[Range]]:
    """Return the samples of each metric, in ms, that an answer with at least one token makes.

    `intended_s` is on the clock of its stamps.
    """
    moments = [Range(write.at_s, write.at_s + write.took_s) for write in answer.writes]
    # What left in one call came as one.
    counts = [sum(write.num_tokens) for write in answer.writes]
    chunks = [(at, num) for at, num in zip(moments, counts, strict=True) if num]
    due = Range(intended_s, intended_s)
    gaps, itl = [], []
    for (before, _), (after, num_tokens) in itertools.pairwise(chunks):
        gap = _between(before, after)
        gaps.append(gap)
        itl += [Range(gap.low / num_tokens, gap.high / num_tokens)] * num_tokens
    span = _between(chunks[0][0], chunks[-1][0])
    return {
        "ttft": [_between(due, chunks[0][0])],
        "e2e": [_between(due, moments[-1])],
        "itl": itl,
        "tpot": [Range(span.low / len(itl), span.high / len(itl))] if itl else [],
        "gap_max": [Range(max(g.low for g in gaps), max(g.high for g in gaps))] if gaps else [],
    }


def percentile_of(ranges: Sequence[Range], percent: int) -> Range:
    """Return the nearest rank: the smallest value that so many percent do not exceed.

    Both ends have their own: moving single values within their ranges keeps it between them.
    """
    rank = math.ceil(percent * len(ranges) / 100)
    low = sorted(one.low for one in ranges)[rank - 1]
    high = sorted(one.high for one in ranges)[rank - 1]
    return Range(low, high)


def _between(before: Range, after: Range) -> Range:
    """Return the time from one moment to another, in milliseconds."""
    return Range(1e3 * (after.low - before.high), 1e3 * (after.high - before.low))
