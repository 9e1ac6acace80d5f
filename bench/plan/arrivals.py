"""Draw seeded schedules of arrivals: absolute times, before the load starts.

The first n times of a seed are the same for any number of arrivals. Drawn gaps are never stretched
to hit the rate: `realised` measures the actual rate.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from baton.protocol.errors import ConfigError

FORMS = "constant:2, poisson:5, gamma:5,cv=3, trace or trace:2"
MAX_ARRIVALS = 2_000_000
RATES = (1e-6, 1e6)  # requests/s
CVS = (0.01, 100.0)
# Separates these draws of a seed from those of prompts and lengths.
_STREAM = 1


class Gaps(msgspec.Struct, frozen=True):
    """Gaps that do not depend on each other; `cv` is their standard deviation over their mean.

    With 0 all gaps are equal and the first arrival is at 0. Otherwise gaps are gamma-distributed,
    the one before the first arrival included: 1 is a Poisson process, more is burstier.
    """

    rate: float
    cv: float

    def __str__(self) -> str:
        """Return the text that `parse_arrivals` reads back."""
        name = {0.0: "constant", 1.0: "poisson"}.get(self.cv)
        return f"{name}:{self.rate:g}" if name else f"gamma:{self.rate:g},cv={self.cv:g}"


class Recorded(msgspec.Struct, frozen=True):
    """The times of a trace or a file; a rate is the mean that the played rows are stretched to."""

    rate: float | None = None


ArrivalProcess = Gaps | Recorded


class Realised(msgspec.Struct, frozen=True):
    """The actual rate and burstiness of a schedule; None if there are too few arrivals.

    `rate` is gaps per second from the first to the last arrival, `cv` the variation of the gaps.
    """

    num_arrivals: int
    rate: float | None = None
    cv: float | None = None

    def __str__(self) -> str:
        if self.rate is None:
            return f"{self.num_arrivals} arrivals at one moment"
        return f"{self.num_arrivals} arrivals at {self.rate:.4g}/s, CV {self.cv:.3g}"


def times(process: Gaps, *, duration_s: float | None, count: int | None, seed: int) -> list[float]:
    """Draw the times before `duration_s`, `count` at most; one of the two bounds must be given."""
    assert duration_s is not None or count is not None
    end_s = math.inf if duration_s is None else duration_s
    expected = min(math.inf if count is None else count, process.rate * end_s)
    if expected > MAX_ARRIVALS:
        raise ConfigError(f"{expected:.3g} arrivals are too many: a plan holds {MAX_ARRIVALS}")
    rng = np.random.default_rng([seed, _STREAM])
    arrivals: Iterator[float] = (index / process.rate for index in itertools.count())
    if process.cv:
        arrivals = itertools.accumulate(_gaps(rng, process.cv**-2, process.cv**2 / process.rate))
    before_the_end = itertools.takewhile(lambda at_s: at_s < end_s, arrivals)
    return list(itertools.islice(before_the_end, count))


def _gaps(rng: np.random.Generator, shape: float, scale: float) -> Iterator[float]:
    """Draw gamma-distributed gaps; with shape 1 they are exponential."""
    while True:
        gaps = rng.exponential(scale, 256) if shape == 1.0 else rng.gamma(shape, scale, 256)
        yield from gaps.tolist()


def parse_arrivals(text: str) -> ArrivalProcess:
    """Return the process that a text names; `FORMS` shows them. Raises `ConfigError`."""
    name, _, rest = text.strip().partition(":")
    rate_text, has_cv, cv = rest.partition(",cv=")
    try:
        if name == "trace" and not rest:
            return Recorded()
        if bool(has_cv) is (name == "gamma"):
            rate = _between("rate", float(rate_text), RATES)
            match name:
                case "constant" | "poisson":
                    return Gaps(rate, float(name == "poisson"))
                case "gamma":
                    return Gaps(rate, _between("cv", float(cv), CVS))
                case "trace":
                    return Recorded(rate)
    except ValueError:
        pass
    raise ConfigError(f"arrivals {text!r} are none of {FORMS}")


def _between(what: str, value: float, limits: tuple[float, float]) -> float:
    low, high = limits
    if not low <= value <= high:
        raise ConfigError(f"the {what} must lie between {low:g} and {high:g}, not at {value}")
    return value


def realised(arrivals: Sequence[float]) -> Realised:
    """Measure the rate and the burstiness of a schedule, which must be in order."""
    num, span_s = len(arrivals), (arrivals[-1] - arrivals[0] if arrivals else 0.0)
    if span_s <= 0:
        return Realised(num)
    gaps = [after - before for before, after in itertools.pairwise(arrivals)]
    return Realised(num, len(gaps) / span_s, statistics.pstdev(gaps) / statistics.fmean(gaps))
