"""The search for the largest rate at which enough requests meet their bounds.

The search doubles the rate, bisects, and then runs the rate that it found several times more. A
rate is confirmed only if every one of these runs attains.
"""

import math
import statistics
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

from baton.protocol.config import about
from baton.protocol.errors import ConfigError

# An invalid run shows nothing. Two in a row at one rate are the client's limit, not chance.
MAX_INVALID = 2


class SearchOptions(msgspec.Struct, frozen=True):
    attainment: Annotated[
        float, about("share of all arrivals that must meet the bounds", gt=0, le=1)
    ] = 0.9
    start_rate: Annotated[
        float, about("first rate to try, in requests/s", "requests/s", gt=0)
    ] = 1.0
    min_rate: Annotated[
        float, about("lowest rate to try, in requests/s", "requests/s", gt=0)
    ] = 0.01
    # Rates have four digits; a bracket that is hardly wider could not be bisected.
    tolerance: Annotated[
        float,
        about(
            "relative distance of the rates between which bisecting ends", ge=0.01, le=1
        ),
    ] = 0.05
    confirmations: Annotated[
        int, about("further runs that must confirm the rate", ge=1)
    ] = 3
    max_probes: Annotated[int, about("runs after which the search gives up", ge=1)] = 40


Purpose = Literal["up", "down", "bisect", "recheck", "confirm"]
Ending = Literal[
    "running",
    "found",
    "never_attained",
    "client_limit",  # the server holds what the client can send
    "no_valid_run",
    "probes_spent",
]


class Probe(msgspec.Struct, frozen=True):
    """A run of the search. The `attainment` of an invalid run means nothing.

    Saturated: the queue grew throughout, so that a longer run would attain less. Broken: its
    figures must not be used, by the server's fault. Neither attains, even with a good attainment.
    """

    rate: float
    attainment: float
    is_valid: bool
    purpose: Purpose = "up"
    is_saturated: bool = False
    is_broken: bool = False
    offered_rate: float | None = None  # drawn arrivals never have quite the rate


class Found(msgspec.Struct, frozen=True):
    """The result of a search. Unless it is `confirmed`, `rate` is only the best that was seen."""

    rate: float | None
    confirmed: bool
    ending: Ending
    failing_rate: float | None  # the lowest rate that did not attain
    line: str  # the result in words
    probes: list[Probe]
    offered_rate: float | None = None  # the median of the confirming runs


@dataclass(slots=True)
class _Rate:
    """The knowledge about one rate. It is `unreachable` if the client cannot measure there."""

    verdict: Literal["", "held", "failed", "unreachable"] = ""
    num_confirmed: int = 0
    num_invalid: int = 0  # in a row
    is_rechecked: bool = False


@dataclass(slots=True)
class RateSearch:
    """Narrows the gap between the highest rate that attains and the lowest that does not.

    Raises `ConfigError` for a first rate below the lowest one.
    """

    options: SearchOptions = field(default_factory=SearchOptions)
    probes: list[Probe] = field(default_factory=list)
    _known: dict[float, _Rate] = field(default_factory=dict)
    _next: tuple[float, Purpose] | None = None
    _ending: Ending = "running"

    def __post_init__(self) -> None:
        least = self.options.min_rate
        start = self.options.start_rate
        if not least <= start < math.inf:
            raise ConfigError(
                f"--start-rate {start:g} must not be below --min-rate {least:g}"
            )
        self._next = (start, "up")

    def next_rate(self) -> float | None:
        """Return the rate to run next, or None once the search has ended, without side effects."""
        return self._next[0] if self._next else None

    @property
    def purpose(self) -> Purpose | None:
        return self._next[1] if self._next else None

    def observe(self, probe: Probe) -> None:
        """Take in the run at `next_rate()`, whose purpose the search knows."""
        assert self._next is not None, "the search has ended"
        rate, purpose = self._next
        assert probe.rate == rate, f"{probe.rate} was run where {rate} was asked for"
        self.probes.append(msgspec.structs.replace(probe, purpose=purpose))
        known = self._known.setdefault(rate, _Rate())
        known.num_invalid = 0 if probe.is_valid else known.num_invalid + 1
        if probe.is_valid:
            is_good = probe.attainment >= self.options.attainment
            is_good = is_good and not probe.is_saturated and not probe.is_broken
            # If the rate attained before, this failure is already the second result.
            was_held = known.verdict == "held"
            known.is_rechecked |= purpose == "recheck" or (was_held and not is_good)
            known.verdict = "held" if is_good else "failed"
            known.num_confirmed += is_good and purpose == "confirm"
        elif known.num_invalid >= MAX_INVALID:
            known.is_rechecked = True
            known.verdict = "failed" if known.verdict == "failed" else "unreachable"
        if probe.is_valid or known.num_invalid >= MAX_INVALID:
            self._next = self._choose()
        if self._next is not None and len(self.probes) >= self.options.max_probes:
            self._next = None
            self._ending = "probes_spent"

    def result(self) -> Found:
        """Return the result, or the state of the search so far."""
        low = self._low()
        high = self._high()
        has_rate = self._ending in ("found", "client_limit")
        confirmed = has_rate and self._is_confirmed()
        line = self._line(low, high)
        offered = [
            probe.offered_rate
            for probe in self.probes
            if probe.rate == low and probe.purpose == "confirm" and probe.is_valid
            if probe.offered_rate is not None
        ]
        median = statistics.median(offered) if confirmed and offered else None
        if median is not None:
            line += f"; {median:.4g}/s were offered (median of the confirming runs)"
        failing = high if self._has_failed(high) else None
        probes = list(self.probes)
        return Found(low, confirmed, self._ending, failing, line, probes, median)

    def _choose(self) -> tuple[float, Purpose] | None:
        low = self._low()
        high = self._high()
        if low is None:
            assert high is not None, "a rate was run and either attained or did not"
            if high > self.options.min_rate:
                return max(_rounded(high / 2), self.options.min_rate), "down"
            has_failed = self._has_failed(high)
            self._ending = "never_attained" if has_failed else "no_valid_run"
            return None
        if high is None:
            return _rounded(2 * low), "up"
        if high > low * (1 + self.options.tolerance):
            return _rounded(math.sqrt(low * high)), "bisect"
        if self._has_failed(high) and not self._known[high].is_rechecked:
            # A single bad run must not decide the server's limit.
            return high, "recheck"
        if not self._is_confirmed():
            return low, "confirm"
        self._ending = "found" if self._has_failed(high) else "client_limit"
        return None

    def _high(self) -> float | None:
        above = [
            rate for rate, one in self._known.items() if one.verdict not in ("", "held")
        ]
        return min(above, default=None)

    def _low(self) -> float | None:
        high = self._high() or math.inf
        held = [
            rate
            for rate, one in self._known.items()
            if one.verdict == "held" and rate < high
        ]
        return max(held, default=None)

    def _has_failed(self, rate: float | None) -> bool:
        return rate is not None and self._known[rate].verdict == "failed"

    def _is_confirmed(self) -> bool:
        low = self._low()
        return (
            low is not None
            and self._known[low].num_confirmed >= self.options.confirmations
        )

    def _line(self, low: float | None, high: float | None) -> str:
        goal = f"attainment of {self.options.attainment:.0%}"
        held = "no rate" if low is None else f"{low:g}/s"
        above = "" if high is None else f"{high:g}/s"
        if self._ending == "found":
            runs = f"confirmed by {self.options.confirmations} runs"
            return f"{held} holds an {goal}, {runs}; {above} does not"
        if self._ending == "never_attained":
            if all(probe.is_broken for probe in self.probes):
                return (
                    f"no run was valid, down to {above}, and that is the server's fault"
                )
            return f"not even {above} holds an {goal}: the bounds are out of reach"
        if self._ending == "client_limit":
            return (
                f"{held} holds an {goal}, and this client cannot send {above}: the server's "
                "limit is higher; give the client more processes or a machine of its own"
            )
        if self._ending == "no_valid_run":
            return f"no run at {above} was valid: the client cannot measure here"
        spent = f"no result within {self.options.max_probes} runs"
        why = spent if self._ending == "probes_spent" else "the search has not ended"
        return f"{why}; {held} is the best that was seen, unconfirmed"


def _rounded(rate: float) -> float:
    """Return the rate with four digits, so that a report shows exactly the rate that was run."""
    return float(f"{rate:.4g}")
