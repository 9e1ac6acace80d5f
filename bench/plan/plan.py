"""Make a plan of a workload and its arrivals: every request with its prompt and its time.

Everything is drawn from one seed before the load starts. Request n of a seed is the same for any
number of requests, so arms and rounds get the same requests. Drawn gaps are never stretched to hit
the rate: `realised` measures the actual one. Every function raises a `ConfigError` of one line,
which names the flag, for settings that cannot work.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from baton.bench.plan.prompts import DrawnSource, Draws
from baton.bench.plan.traces import FileSource, TraceSource
from baton.bench.records import Planned
from baton.bench.settings import ArrivalSettings, LoadSettings, Workload
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
        return (
            f"{name}:{self.rate:g}" if name else f"gamma:{self.rate:g},cv={self.cv:g}"
        )


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


def times(
    process: Gaps, *, duration_s: float | None, count: int | None, seed: int
) -> list[float]:
    """Draw the times before `duration_s`, `count` at most; one of the two bounds must be given."""
    assert duration_s is not None or count is not None
    end_s = math.inf if duration_s is None else duration_s
    expected = min(math.inf if count is None else count, process.rate * end_s)
    if expected > MAX_ARRIVALS:
        raise ConfigError(
            f"{expected:.3g} arrivals are too many: a plan holds {MAX_ARRIVALS}"
        )
    rng = np.random.default_rng([seed, _STREAM])
    arrivals: Iterator[float] = (index / process.rate for index in itertools.count())
    if process.cv:
        arrivals = itertools.accumulate(
            _gaps(rng, process.cv**-2, process.cv**2 / process.rate)
        )
    before_the_end = itertools.takewhile(lambda at_s: at_s < end_s, arrivals)
    return list(itertools.islice(before_the_end, count))


def _gaps(rng: np.random.Generator, shape: float, scale: float) -> Iterator[float]:
    """Draw gamma-distributed gaps; with shape 1 they are exponential."""
    while True:
        gaps = (
            rng.exponential(scale, 256)
            if shape == 1.0
            else rng.gamma(shape, scale, 256)
        )
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
        raise ConfigError(
            f"the {what} must lie between {low:g} and {high:g}, not at {value}"
        )
    return value


def realised(arrivals: Sequence[float]) -> Realised:
    """Measure the rate and the burstiness of a schedule, which must be in order."""
    num = len(arrivals)
    span_s = arrivals[-1] - arrivals[0] if arrivals else 0.0
    if span_s <= 0:
        return Realised(num)
    gaps = [after - before for before, after in itertools.pairwise(arrivals)]
    return Realised(
        num, len(gaps) / span_s, statistics.pstdev(gaps) / statistics.fmean(gaps)
    )


# Warm-up requests come at this rate at most, and a pause follows before the schedule starts.
WARM_UP_SPACING_S = 0.5
SETTLE_S = 2.0

# A source has the requests of each arrival, and the times of its rows where they were recorded.
Source = DrawnSource | TraceSource | FileSource


class Plan(msgspec.Struct, frozen=True):
    """Requests in the order of sending; `requests[n].index` is n, warm-up requests come first.

    `duration_s` is what was asked for, else up to the last arrival. `offered_rate` is the rate that
    was asked for, `realised` what was drawn or recorded. All three are None in a closed loop;
    `offered_rate` also when a trace plays as recorded.
    """

    requests: list[Planned]
    notes: list[str]
    realised: Realised | None = None
    offered_rate: float | None = None
    duration_s: float | None = None

    @property
    def times(self) -> list[float]:
        """Return the times without the warm-up, or none in a closed loop."""
        return [
            one.at_s
            for one in self.requests
            if not one.warm_up and one.at_s is not None
        ]


def arrivals_of(settings: ArrivalSettings, workload: Workload) -> ArrivalProcess | None:
    """Return the arrivals of an open loop, or None for a closed loop."""
    if settings.arrivals and settings.concurrency:
        raise ConfigError(
            "--arrivals is an open loop and --concurrency a closed one: choose one"
        )
    if settings.concurrency:
        return None
    text = settings.arrivals or ("trace" if workload.workload == "trace" else "")
    if not text:
        raise ConfigError(
            "say how requests arrive: --arrivals poisson:5 (open loop) or --concurrency 8 (closed "
            "loop)"
        )
    return parse_arrivals(text)


def loop_of(settings: ArrivalSettings) -> str:
    """Name the way in which requests arrive."""
    closed = f"concurrency {settings.concurrency}" if settings.concurrency else ""
    return closed or settings.arrivals or "trace"


def shaped(shape: str, rate: float) -> ArrivalProcess:
    """Return arrivals of `--shape` at a rate."""
    name, comma, rest = shape.partition(",")
    try:
        return parse_arrivals(f"{name}:{rate}{comma}{rest}")
    except ConfigError as error:
        raise ConfigError(
            f"--shape {shape!r}: write poisson, constant, gamma,cv=N or trace ({error.message})"
        ) from error


def plan_of(
    workload: Workload, load: LoadSettings, arrivals: ArrivalProcess | None
) -> Plan:
    """Return the requests of one load."""
    # The duration of a closed loop ends the sending: its requests have no times.
    duration_s = None if arrivals is None else load.duration_s or None
    count = load.requests or None
    return make_plan(
        workload, arrivals, count=count, duration_s=duration_s, warm_up=load.warm_up
    )


def reseeded(workload: Workload, place: int) -> Workload:
    """Return the workload of load number `place`: 0 has the seed as given, others a mix of both."""
    if place == 0:
        return workload
    mixed = np.random.SeedSequence([workload.seed, place]).generate_state(1)
    return msgspec.structs.replace(workload, seed=int(mixed[0]))


# The times of the arrivals, None in a closed loop, and a plan that has no requests yet.
Schedule = tuple[Sequence[float | None], Plan]


def make_plan(
    workload: Workload,
    arrivals: ArrivalProcess | None,
    *,
    count: int | None = None,
    duration_s: float | None = None,
    warm_up: int = 0,
) -> Plan:
    """Plan an open loop, or a closed one if `arrivals` is None.

    `count` and `duration_s` bound the arrivals. Warm-up requests lie before time 0. Raises
    `ConfigError`.
    """
    source = _source(workload)
    if count is None and (arrivals is None or duration_s is None):
        # Recorded times end by themselves.
        count = source.num_rows
    schedule: Schedule
    match arrivals:
        case None if count is None:
            raise ConfigError(
                "a closed loop needs --requests N, also as a limit of --duration-s"
            )
        case None:
            schedule = [None] * (count or 0), Plan([], [])
        case Recorded():
            schedule = _recorded(source, arrivals, count, duration_s)
        case _:
            schedule = _drawn(arrivals, workload.seed, count, duration_s)
    at, outline = schedule
    num = len(at)
    if source.num_rows is not None and num > source.num_rows:
        raise ConfigError(
            f"{num} requests are wanted, {workload.path} has {source.num_rows}: ask for fewer"
        )
    # Measured prompts are drawn first, so that a warm-up prompt makes way for a measured one.
    measured = [source.draw(place) for place in range(num)]
    at_once = _warm_up_times(warm_up, outline)
    drawn = [(at_s, True, source.warm_up(place)) for place, at_s in enumerate(at_once)]
    drawn += [(at_s, False, one) for one, at_s in zip(measured, at, strict=True)]
    requests = [
        msgspec.structs.replace(one, index=index, at_s=at_s, warm_up=is_warm_up)
        for index, (at_s, is_warm_up, one) in enumerate(drawn)
    ]
    notes = [*source.notes(num), *outline.notes, f"seed {workload.seed}"]
    return msgspec.structs.replace(outline, requests=requests, notes=notes)


def _source(workload: Workload) -> Source:
    draws = Draws(workload)
    kind = workload.workload
    if kind in ("trace", "file") and not workload.path:
        raise ConfigError(f"--workload {kind} needs --path FILE")
    if workload.path and kind not in ("trace", "file"):
        raise ConfigError(f"--path is for --workload trace or file, not {kind}")
    sources: dict[str, type[Source]] = {"trace": TraceSource, "file": FileSource}
    return sources.get(kind, DrawnSource)(workload, draws)


def _drawn(
    arrivals: Gaps, seed: int, count: int | None, duration_s: float | None
) -> Schedule:
    if count is None and duration_s is None:
        raise ConfigError("say how long: --requests N, --duration-s S, or both")
    at = times(arrivals, duration_s=duration_s, count=count, seed=seed)
    if not at:
        raise ConfigError(f"no request of {arrivals} arrives within {duration_s:g} s")
    reality = realised(at)
    return at, Plan(
        [], [f"{arrivals}: {reality}"], reality, arrivals.rate, duration_s or at[-1]
    )


def _recorded(
    source: Source, arrivals: Recorded, count: int | None, duration_s: float | None
) -> Schedule:
    """Take the times of the rows that are played; a rate is the mean of these rows alone."""
    if source.times is None:
        raise ConfigError(
            "arrivals 'trace' need a trace, or a file whose rows say at_s"
        )
    if count is not None and count > len(source.times):
        raise ConfigError(
            f"{count} requests are wanted of {len(source.times)} recorded ones"
        )
    at = list(source.times[:count])
    notes = []
    end_s = math.inf if duration_s is None else duration_s
    if arrivals.rate is not None:
        at = at[: round(min(len(at), arrivals.rate * end_s))]
        at, stretch = _stretched(at, arrivals.rate)
        what = f"the times of the first {len(at)} rows are stretched by {stretch:.6g}"
        notes.append(f"{what} for {arrivals.rate:g} requests/s")
    at = [at_s for at_s in at if at_s < end_s]
    if not at:
        raise ConfigError(f"no recorded request arrives within {duration_s} s")
    if duration_s is not None and len(at) == len(source.times):
        notes.append(f"the recording ends after {at[-1]:.6g} s")
    reality = realised(at)
    notes.append(f"recorded times: {reality}")
    return at, Plan([], notes, reality, arrivals.rate, duration_s or at[-1])


def _stretched(at: list[float], rate: float) -> tuple[list[float], float]:
    """Move the times to 0 and stretch them to this mean rate, which one request does not have."""
    native = realised(at).rate
    if native is None and len(at) > 1:
        raise ConfigError(
            f"the first {len(at)} recorded requests come at one moment, which has no rate to "
            "change: play more of them"
        )
    stretch = (native or rate) / rate
    return [(at_s - at[0]) * stretch for at_s in at], stretch


def _warm_up_times(warm_up: int, outline: Plan) -> list[float | None]:
    """Space them as the load, but no slower than one in half a second, and leave a silence."""
    if outline.realised is None:
        return [None] * warm_up
    rate = outline.realised.rate
    spacing_s = WARM_UP_SPACING_S if rate is None else min(WARM_UP_SPACING_S, 1 / rate)
    return [-SETTLE_S - spacing_s * (warm_up - 1 - place) for place in range(warm_up)]
