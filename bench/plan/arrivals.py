"""When requests arrive: seeded schedules of absolute times, drawn before the load starts.

`workloads.py` asks for the times of a plan, the command line for the process behind a text such as
`poisson:5`. The first n times of a seed are the same however many are asked for. Drawn gaps are
never stretched to hit the rate: `realised` says what came out. No clock and no sleeping here.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence

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


class Constant(msgspec.Struct, frozen=True, tag="constant"):
    """Equal gaps; the first arrival is at 0."""

    rate: float


class Poisson(msgspec.Struct, frozen=True, tag="poisson"):
    """Exponential gaps, the one before the first arrival included."""

    rate: float


class Gamma(msgspec.Struct, frozen=True, tag="gamma"):
    """Gamma-distributed gaps: a `cv` above 1 is burstier than Poisson, below 1 smoother."""

    rate: float
    cv: float


class Ramp(msgspec.Struct, frozen=True, tag="ramp"):
    """Poisson arrivals whose rate goes linearly from one value to the other over the duration."""

    start_rate: float
    end_rate: float


class Recorded(msgspec.Struct, frozen=True, tag="trace"):
    """The times that a trace or file brings; a rate is the mean of the rows that are played.

    `workloads.py` knows the rows and stretches them; `times` refuses this one.
    """

    rate: float | None = None


ArrivalProcess = Constant | Poisson | Gamma | Ramp | Recorded


class Realised(msgspec.Struct, frozen=True):
    """What a schedule turned out to be. A figure is None where too few arrivals give none.

    `rate` is gaps per second between the first and the last arrival. `cv` is the standard deviation
    of the gaps over their mean: 1 for Poisson. `index_of_dispersion` is the variance of the counts
    in 60 equal windows over their mean: 1 for Poisson, more when arrivals cluster.
    """

    num_arrivals: int
    rate: float | None
    cv: float | None
    index_of_dispersion: float | None
    window_s: float | None

    def __str__(self) -> str:
        if self.rate is None:
            return f"{self.num_arrivals} arrivals at one moment"
        parts = [f"{self.num_arrivals} arrivals at {self.rate:.4g}/s", f"CV {self.cv:.3g}"]
        if self.index_of_dispersion is not None:
            windows = f"(windows of {self.window_s:.3g} s)"
            parts.append(f"index of dispersion {self.index_of_dispersion:.3g} {windows}")
        return ", ".join(parts)


def times(
    process: ArrivalProcess, *, duration_s: float | None, count: int | None, seed: int
) -> list[float]:
    """Absolute times in seconds from 0, up to `count` of them and before `duration_s`.

    Raises `ConfigError` when neither bound is given, a ramp has no duration, or there would be too
    many arrivals for a plan.
    """
    _check_bounds(process, duration_s, count)
    rng = np.random.default_rng([seed, _STREAM])
    end_s = math.inf if duration_s is None else duration_s
    arrivals = itertools.takewhile(lambda at_s: at_s < end_s, _endless(process, end_s, rng))
    return list(itertools.islice(arrivals, count))


def _endless(process: ArrivalProcess, end_s: float, rng: np.random.Generator) -> Iterator[float]:
    match process:
        case Constant(rate):
            return (index / rate for index in itertools.count())
        case Poisson(rate):
            return itertools.accumulate(_gaps(rng, 1.0, 1.0 / rate))
        case Gamma(rate, cv):
            return itertools.accumulate(_gaps(rng, 1.0 / cv**2, cv**2 / rate))
        case Ramp():
            return _ramped(process, end_s, rng)
        case Recorded():
            raise ConfigError("arrivals 'trace' need a workload that brings times")


def _gaps(rng: np.random.Generator, shape: float, scale: float) -> Iterator[float]:
    """Gamma-distributed gaps; with shape 1 they are exponential."""
    while True:
        gaps = rng.exponential(scale, 256) if shape == 1.0 else rng.gamma(shape, scale, 256)
        yield from gaps.tolist()


def _ramped(ramp: Ramp, end_s: float, rng: np.random.Generator) -> Iterator[float]:
    """Unit-rate arrivals put through the inverse of the expected count by a time.

    That count is start·t + slope·t²/2; the root is written so that a slope of 0 needs no care.
    """
    slope = (ramp.end_rate - ramp.start_rate) / end_s
    expected = end_s * (ramp.start_rate + ramp.end_rate) / 2
    for count in itertools.accumulate(_gaps(rng, 1.0, 1.0)):
        if count >= expected:
            return
        root = math.sqrt(max(0.0, ramp.start_rate**2 + 2 * slope * count))
        yield 2 * count / (ramp.start_rate + root)


def _check_bounds(process: ArrivalProcess, duration_s: float | None, count: int | None) -> None:
    check_process(process)
    if duration_s is None and count is None:
        raise ConfigError("an open loop needs a number of requests, a duration, or both")
    if duration_s is not None and not 0 < duration_s < math.inf:
        raise ConfigError(f"a duration of {duration_s} s is not above 0")
    if count is not None and count < 1:
        raise ConfigError(f"{count} requests are none")
    if isinstance(process, Ramp) and duration_s is None:
        raise ConfigError("a ramp needs a duration, over which its rate changes")
    rate = mean_rate(process) or 0.0
    expected = min(count or math.inf, rate * (math.inf if duration_s is None else duration_s))
    if expected > MAX_ARRIVALS:
        raise ConfigError(f"{expected:.3g} arrivals are too many: a plan holds {MAX_ARRIVALS}")


def check_process(process: ArrivalProcess) -> None:
    """Raises `ConfigError` for rates and variations that nobody can mean."""
    match process:
        case Constant(rate) | Poisson(rate):
            _between("rate", rate, *RATES)
        case Gamma(rate, cv):
            _between("rate", rate, *RATES)
            _between("cv", cv, *CVS)
        case Ramp(start, end):
            for rate in (start, end):
                _between("rate of a ramp", rate, 0.0, RATES[1])
            _between("larger rate of a ramp", max(start, end), *RATES)
        case Recorded(rate):
            if rate is not None:
                _between("rate", rate, *RATES)


def _between(what: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"the {what} lies between {low:g} and {high:g}, so it cannot be {value}")


def mean_rate(process: ArrivalProcess) -> float | None:
    """Requests per second over the whole schedule; None for recorded times as they are."""
    if isinstance(process, Ramp):
        return (process.start_rate + process.end_rate) / 2
    return process.rate


def at_rate(process: ArrivalProcess, rate: float) -> ArrivalProcess:
    """The same process at another mean rate: what sweeps and searches vary."""
    _between("rate", rate, *RATES)
    if isinstance(process, Ramp):
        factor = rate * 2 / (process.start_rate + process.end_rate)
        return Ramp(process.start_rate * factor, process.end_rate * factor)
    return msgspec.structs.replace(process, rate=rate)


def parse_arrivals(text: str) -> ArrivalProcess:
    """The process that a text names; `FORMS` shows them. Raises `ConfigError`."""
    name, _, rest = text.strip().partition(":")
    try:
        process = _parse(name, rest)
    except ValueError:
        raise ConfigError(f"arrivals {text!r} are none of {FORMS}") from None
    check_process(process)
    return process


def _parse(name: str, rest: str) -> ArrivalProcess:
    if name == "constant":
        return Constant(float(rest))
    if name == "poisson":
        return Poisson(float(rest))
    if name == "ramp":
        start, _, end = rest.partition("-")
        return Ramp(float(start), float(end))
    if name == "trace":
        return Recorded(float(rest) if rest else None)
    if name == "gamma":
        rate, separator, cv = rest.partition(",cv=")
        if separator:
            return Gamma(float(rate), float(cv))
    raise ValueError(name)


def text_of(process: ArrivalProcess) -> str:
    """The text that `parse_arrivals` reads back."""
    match process:
        case Constant(rate):
            return f"constant:{rate:g}"
        case Poisson(rate):
            return f"poisson:{rate:g}"
        case Gamma(rate, cv):
            return f"gamma:{rate:g},cv={cv:g}"
        case Ramp(start, end):
            return f"ramp:{start:g}-{end:g}"
        case Recorded(rate):
            return "trace" if rate is None else f"trace:{rate:g}"


def realised(arrivals: Sequence[float]) -> Realised:
    """Rate and burstiness of a schedule, which must be in order."""
    num, span_s = len(arrivals), (arrivals[-1] - arrivals[0] if arrivals else 0.0)
    if span_s <= 0:
        return Realised(num, None, None, None, None)
    gaps = [after - before for before, after in itertools.pairwise(arrivals)]
    cv = statistics.pstdev(gaps) / statistics.fmean(gaps)
    rate = len(gaps) / span_s
    if num < DISPERSION_WINDOWS:
        return Realised(num, rate, cv, None, None)
    counts, _ = np.histogram(arrivals, bins=DISPERSION_WINDOWS, range=(arrivals[0], arrivals[-1]))
    dispersion = float(np.var(counts) / np.mean(counts))
    return Realised(num, rate, cv, dispersion, span_s / DISPERSION_WINDOWS)
