"""Statistics of samples: percentiles, intervals by ranks and by batch means, paired ratios.

No random number is drawn. Nothing here may drop a sample, or interpolate between two of them where
a percentile is asked for.
"""

import math
import statistics
from collections.abc import Sequence
from itertools import accumulate

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# With fewer rounds, even the range of all of them covers the median in fewer than 95 of 100 cases.
MIN_ROUNDS = 6
NUM_BATCHES = 20
_T_OF_19 = 2.093  # two-sided 95 % of Student's t with NUM_BATCHES - 1 degrees of freedom


class Interval(msgspec.Struct, frozen=True):
    """An estimate and the ends of its 95 % interval."""

    estimate: float
    low: float
    high: float


class Ratio(msgspec.Struct, frozen=True):
    """A over B. With fewer than `MIN_ROUNDS` rounds the ends are the range of `each`."""

    median: float
    low: float
    high: float
    rounds: int
    each: tuple[float, ...] = ()  # in the order of the rounds

    @property
    def is_conclusive(self) -> bool:
        """Return whether A and B differ, in enough rounds to say so."""
        return self.rounds >= MIN_ROUNDS and not self.low <= 1.0 <= self.high


def nearest_rank(ordered: Sequence[float] | Floats, percent: float) -> float:
    """Return the smallest of the `ordered` samples that at least `percent` % do not exceed."""
    assert len(ordered) > 0
    assert 0 < percent <= 100
    # Without the margin 99.9 * 1000 / 100, which is a little more than 999, would round up.
    rank = math.ceil(percent * len(ordered) / 100 - 1e-9)
    return float(ordered[max(1, rank) - 1])


def paired(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """Compare A with B, round i of which ran side by side. All figures are positive.

    The interval is that of the sign test: it lies between two of the ratios, and covers at least
    95 % however they are distributed, if rounds do not depend on each other.
    """
    if len(a) != len(b) or not a:
        raise ValueError(f"{len(a)} rounds of one and {len(b)} of the other cannot be paired")
    each = tuple(one / other for one, other in zip(a, b, strict=True))
    ratios, cut = sorted(each), _outside(len(each))
    return Ratio(statistics.median(each), ratios[cut], ratios[-1 - cut], len(each), each)


def _outside(num_rounds: int) -> int:
    """Return how many ratios lie below the 95 % interval of their median; as many lie above.

    More than n - k ratios lie on one side of the true median with the probability that fewer than k
    of n coins show heads, which may be 1 in 40 per side.
    """
    chances = accumulate(math.comb(num_rounds, heads) for heads in range(num_rounds + 1))
    rare = [count for count in chances if 40 * count <= 1 << num_rounds]
    return max(0, len(rare) - 1)


def batch_means(samples: Sequence[float]) -> Interval | None:
    """Estimate the mean of a sequence whose neighbours depend on each other, in order of arrival.

    The means of long batches hardly depend on each other. Return None if batches would be shorter
    than two samples.
    """
    if len(samples) < 2 * NUM_BATCHES:
        return None
    values = np.asarray(samples, np.float64)
    means = np.array([batch.mean() for batch in np.array_split(values, NUM_BATCHES)])
    half = _T_OF_19 * float(means.std(ddof=1)) / math.sqrt(NUM_BATCHES)
    middle = float(values.mean())
    return Interval(middle, middle - half, middle + half)


def share_interval(met: Sequence[bool]) -> Interval:
    """Estimate a share of a sequence that is not empty: the wider of Wilson's and batch means.

    Wilson's interval is wide for few samples; that of batch means is wide for dependent samples.
    """
    size, share, z2 = len(met), sum(met) / len(met), 1.96**2
    middle = (share + z2 / (2 * size)) / (1 + z2 / size)
    half = math.sqrt(z2 * (share * (1 - share) / size + z2 / (4 * size**2))) / (1 + z2 / size)
    low, high = middle - half, middle + half
    if (batches := batch_means(met)) is not None:
        low, high = min(low, batches.low), max(high, batches.high)
    return Interval(share, min(share, max(0.0, low)), max(share, min(1.0, high)))
