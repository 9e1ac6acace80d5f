"""When requests arrive: seeded schedules of absolute times, drawn before the load starts.

`plan.py` asks for the times of a plan, the commands for the process that a text such as `poisson:5`
names. The first n times of a seed are the same however many are asked for. Drawn gaps are never
stretched to hit the rate: `realised` measures what came out. Nothing here reads a clock or sleeps.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from baton.protocol.errors import ConfigError

FORMS = "constant:2, poisson:5, gamma:5,cv=3, ramp:1-10, trace or trace:2"
MAX_ARRIVALS = 2_000_000
RATES = (1e-6, 1e6)  # requests/s
CVS = (0.01, 100.0)
DISPERSION_WINDOWS = 60
# Keeps the draws of a seed apart from those of prompts and lengths.
_STREAM = 1


class Gaps(msgspec.Struct, frozen=True):
    """Gaps that do not depend on each other; `cv` is their standard deviation over their mean.

    With 0 all gaps are equal and the first arrival is at 0. Otherwise gaps are gamma-distributed,
    the one before the first arrival included: 1 is a Poisson process, more is burstier.
    """

    rate: float
    cv: float


class Ramp(msgspec.Struct, frozen=True):
    """Poisson arrivals whose rate changes linearly over the duration."""

    start_rate: float
    end_rate: float


class Recorded(msgspec.Struct, frozen=True):
    """The times of a trace or a file; a rate is the mean that the played rows are stretched to."""

    rate: float | None = None


ArrivalProcess = Gaps | Ramp | Recorded
AnyProcess = TypeVar("AnyProcess", bound=ArrivalProcess)


class Realised(msgspec.Struct, frozen=True):
    """What a schedule turned out to be. A figure is None where there are too few arrivals for it.

    `rate` is gaps per second between the first and the last arrival. `cv` is the standard deviation
    of the gaps over their mean: 1 for Poisson. `index_of_dispersion` is the variance of the counts
    in 60 equal windows over their mean: 1 for Poisson, more when arrivals cluster.
    """

    num_arrivals: int
    rate: float | None = None
    cv: float | None = None
    index_of_dispersion: float | None = None
    window_s: float | None = None

    def __str__(self) -> str:
        if self.rate is None:
            return f"{self.num_arrivals} arrivals at one moment"
        parts = [f"{self.num_arrivals} arrivals at {self.rate:.4g}/s", f"CV {self.cv:.3g}"]
        if self.index_of_dispersion is not None:
            windows = f"(windows of {self.window_s:.3g} s)"
            parts.append(f"index of dispersion {self.index_of_dispersion:.3g} {windows}")
        return ", ".join(parts)


def times(
    process: Gaps | Ramp, *, duration_s: float | None, count: int | None, seed: int
) -> list[float]:
    """Return the times from 0 in seconds: at most `count` of them, all before `duration_s`.

    One of the two bounds must be given. Raises `ConfigError` when a ramp has no duration, or when
    there would be too many arrivals for a plan.
    """
    assert duration_s is not None or count is not None
    if isinstance(process, Ramp) and duration_s is None:
        raise ConfigError("a ramp needs --duration-s, the time over which its rate changes")
    end_s = math.inf if duration_s is None else duration_s
    expected = min(math.inf if count is None else count, (mean_rate(process) or 0.0) * end_s)
    if expected > MAX_ARRIVALS:
        raise ConfigError(f"{expected:.3g} arrivals are too many: a plan holds {MAX_ARRIVALS}")
    rng = np.random.default_rng([seed, _STREAM])
    arrivals: Iterator[float]
    match process:
        case Ramp():
            arrivals = _ramped(process, end_s, rng)
        case Gaps(rate, 0):
            arrivals = (index / rate for index in itertools.count())
        case Gaps(rate, cv):
            arrivals = itertools.accumulate(_gaps(rng, 1.0 / cv**2, cv**2 / rate))
    before_the_end = itertools.takewhile(lambda at_s: at_s < end_s, arrivals)
    return list(itertools.islice(before_the_end, count))


def _gaps(rng: np.random.Generator, shape: float, scale: float) -> Iterator[float]:
    """Draw gamma-distributed gaps; with shape 1 they are exponential."""
    while True:
        gaps = rng.exponential(scale, 256) if shape == 1.0 else rng.gamma(shape, scale, 256)
        yield from gaps.tolist()


def _ramped(ramp: Ramp, end_s: float, rng: np.random.Generator) -> Iterator[float]:
    """Put unit-rate arrivals through the inverse of the count that is expected by a time.

    That count is start·t + slope·t²/2; the root is written so that a slope of 0 needs no care.
    """
    slope = (ramp.end_rate - ramp.start_rate) / end_s
    expected = end_s * (ramp.start_rate + ramp.end_rate) / 2
    for count in itertools.accumulate(_gaps(rng, 1.0, 1.0)):
        if count >= expected:
            return
        root = math.sqrt(max(0.0, ramp.start_rate**2 + 2 * slope * count))
        yield 2 * count / (ramp.start_rate + root)


def mean_rate(process: ArrivalProcess) -> float | None:
    """Return requests per second over the whole schedule; None for recorded times as they are."""
    if isinstance(process, Ramp):
        return (process.start_rate + process.end_rate) / 2
    return process.rate


def at_rate(process: AnyProcess, rate: float) -> AnyProcess:
    """Return the same process at another mean rate, which sweeps and searches vary."""
    _between("rate", rate, RATES)
    if isinstance(process, Ramp):
        factor = rate * 2 / (process.start_rate + process.end_rate)
        start, end = process.start_rate * factor, process.end_rate * factor
        return msgspec.structs.replace(process, start_rate=start, end_rate=end)
    return msgspec.structs.replace(process, rate=rate)


def parse_arrivals(text: str) -> ArrivalProcess:
    """Return the process that a text names; `FORMS` shows them. Raises `ConfigError`."""
    name, _, rest = text.strip().partition(":")
    try:
        match name:
            case "constant":
                return Gaps(_between("rate", float(rest), RATES), 0.0)
            case "poisson":
                return Gaps(_between("rate", float(rest), RATES), 1.0)
            case "gamma":
                rate, cv = map(float, rest.split(",cv="))
                return Gaps(_between("rate", rate, RATES), _between("cv", cv, CVS))
            case "ramp":
                ends = [
                    _between("rate of a ramp", float(end), (0, RATES[1])) for end in rest.split("-")
                ]
                _between("larger rate of a ramp", max(ends), RATES)
                start, end = ends
                return Ramp(start, end)
            case "trace":
                return Recorded(_between("rate", float(rest), RATES) if rest else None)
    except ValueError:
        pass
    raise ConfigError(f"arrivals {text!r} are none of {FORMS}")


def _between(what: str, value: float, limits: tuple[float, float]) -> float:
    low, high = limits
    if not low <= value <= high:
        raise ConfigError(f"the {what} must lie between {low:g} and {high:g}, not at {value}")
    return value


def text_of(process: ArrivalProcess) -> str:
    """Return the text that `parse_arrivals` reads back."""
    match process:
        case Gaps(rate, 0):
            return f"constant:{rate:g}"
        case Gaps(rate, 1):
            return f"poisson:{rate:g}"
        case Gaps(rate, cv):
            return f"gamma:{rate:g},cv={cv:g}"
        case Ramp(start, end):
            return f"ramp:{start:g}-{end:g}"
        case Recorded(rate):
            return "trace" if rate is None else f"trace:{rate:g}"


def realised(arrivals: Sequence[float]) -> Realised:
    """Measure the rate and the burstiness of a schedule, which must be in order."""
    num, span_s = len(arrivals), (arrivals[-1] - arrivals[0] if arrivals else 0.0)
    if span_s <= 0:
        return Realised(num)
    gaps = [after - before for before, after in itertools.pairwise(arrivals)]
    rate, cv = len(gaps) / span_s, statistics.pstdev(gaps) / statistics.fmean(gaps)
    if num < DISPERSION_WINDOWS:
        return Realised(num, rate, cv)
    counts, _ = np.histogram(arrivals, bins=DISPERSION_WINDOWS, range=(arrivals[0], arrivals[-1]))
    dispersion = float(np.var(counts) / np.mean(counts))
    return Realised(num, rate, cv, dispersion, span_s / DISPERSION_WINDOWS)
