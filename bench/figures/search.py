"""The search for the largest rate at which enough requests meet their bounds.

`searching.py` runs a load at `next_rate()` and tells `observe` what came of it, until there is no
next rate. The search doubles, bisects, then runs the rate that it found several times more: only
what every one of these runs attains is confirmed. Nothing here runs a load.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from baton.protocol.errors import ConfigError

# Of an invalid run nothing is known. Two in a row at one rate are the client's limit, not chance.
MAX_INVALID = 2


class SearchOptions(msgspec.Struct, frozen=True):
    attainment: float = 0.9  # share of all arrivals that has to meet the bounds
    start_rate: float = 1.0
    min_rate: float = 0.01
    max_rate: float | None = None  # None: until the server or the client is at its limit
    tolerance: float = 0.05  # the rate found and the next one known to fail differ by less
    confirmations: int = 3
    max_probes: int = 40


class Purpose(StrEnum):
    """Why a rate was run."""

    UP = "up"
    DOWN = "down"
    BISECT = "bisect"
    RECHECK = "recheck"  # of the rate that failed: one bad run must not be the server's limit
    CONFIRM = "confirm"


class Probe(msgspec.Struct, frozen=True):
    """A run of the search. `attainment` of an invalid one says nothing."""

    rate: float
    attainment: float
    is_valid: bool
    purpose: Purpose
    is_saturated: bool = False
    is_broken: bool = False


class Ending(StrEnum):
    RUNNING = "running"
    FOUND = "found"
    NEVER_ATTAINED = "never_attained"
    CLIENT_LIMIT = "client_limit"  # the server holds what the client can send
    RATE_LIMIT = "rate_limit"  # the server holds `max_rate`
    NO_VALID_RUN = "no_valid_run"
    PROBES_SPENT = "probes_spent"


class Found(msgspec.Struct, frozen=True):
    """What a search came to. Unless `confirmed`, `rate` is the best that was seen, no result."""

    rate: float | None
    confirmed: bool
    ending: Ending
    failing_rate: float | None  # the lowest that did not attain, if one did not
    line: str  # for a person
    probes: list[Probe]
    offered_rate: float | None = None  # the median of the confirming runs


@dataclass(slots=True)
class _Rate:
    """What is known of one rate."""

    num_confirmed: int = 0
    num_invalid: int = 0  # in a row
    is_rechecked: bool = False
    is_alone: bool = False


@dataclass(slots=True)
class RateSearch:
    """Between `low`, the highest rate that attains, and `high`, the lowest that does not."""

    options: SearchOptions = field(default_factory=SearchOptions)
    probes: list[Probe] = field(default_factory=list)
    _held: set[float] = field(default_factory=set)
    _failed: set[float] = field(default_factory=set)
    _unreachable: set[float] = field(default_factory=set)
    _known: dict[float, _Rate] = field(default_factory=dict)
    _next: tuple[float, Purpose] | None = None
    _ending: Ending = Ending.RUNNING

    def __post_init__(self) -> None:
        _check(self.options)
        start = self.options.start_rate
        self._next = (min(start, self.options.max_rate or start), Purpose.UP)

    def next_rate(self) -> float | None:
        """The rate to run now; None once the search has ended. Changes nothing."""
        return self._next[0] if self._next else None

    @property
    def purpose(self) -> Purpose | None:
        return self._next[1] if self._next else None

    def observe(
        self,
        rate: float,
        attainment: float,
        valid: bool,
        *,
        saturated: bool = False,
        broken: bool = False,
        alone: bool = False,
    ) -> None:
        """What came of the run at `next_rate()`.

        `saturated`: the queue grew throughout, so that a longer run would attain less. `broken`: by
        the server's fault its figures must not be used. Neither counts as attained, whatever the
        attainment. `alone`: hardly any two requests were there at the same time, so that a lower
        rate would attain no more.
        """
        assert self._next is not None, "the search has ended"
        assert rate == self._next[0], f"{rate} was run where {self._next[0]} was asked for"
        purpose = self._next[1]
        self.probes.append(Probe(rate, attainment, valid, purpose, saturated, broken))
        known = self._known.setdefault(rate, _Rate())
        if valid:
            known.num_invalid = 0
            is_attained = attainment >= self.options.attainment
            self._judge(rate, known, is_attained and not saturated and not broken)
            known.is_alone = alone
        else:
            known.num_invalid += 1
            if known.num_invalid >= MAX_INVALID:
                known.is_rechecked = True
                self._held.discard(rate)
                self._unreachable.add(rate)
        if valid or known.num_invalid >= MAX_INVALID:
            self._next = self._choose()
        if self._next is not None and len(self.probes) >= self.options.max_probes:
            self._next, self._ending = None, Ending.PROBES_SPENT

    def result(self) -> Found:
        """At the end, or of what is known so far."""
        low, high = self._low(), self._high()
        confirmed = self._is_confirmed() and self._ending in (
            Ending.FOUND, Ending.CLIENT_LIMIT, Ending.RATE_LIMIT,
        )  # fmt: skip
        failing = high if high in self._failed else None
        line = _line(self._ending, low, high, self.options)
        if self._ending is Ending.NO_VALID_RUN and self._failed:
            goal, lowest = self.options.attainment, min(self._failed)
            line = (
                f"no run at {high:g}/s was valid, and {lowest:g}/s does not hold an attainment of "
                f"{goal:.0%}"
            )
        if self._ending is Ending.NEVER_ATTAINED and all(one.is_broken for one in self.probes):
            line = f"no run was valid, down to {high:g}/s, and that is the server's fault"
        return Found(low, confirmed, self._ending, failing, line, list(self.probes))

    def _judge(self, rate: float, known: _Rate, is_attained: bool) -> None:
        assert self._next is not None
        purpose = self._next[1]
        known.is_rechecked |= purpose is Purpose.RECHECK
        if is_attained:
            self._failed.discard(rate)
            self._held.add(rate)
            known.num_confirmed += purpose is Purpose.CONFIRM
        else:
            # Of a rate that attained before, this was the second opinion.
            known.is_rechecked |= rate in self._held
            self._held.discard(rate)
            self._failed.add(rate)

    def _choose(self) -> tuple[float, Purpose] | None:
        low, high, limit = self._low(), self._high(), self.options.max_rate
        if low is None:
            assert high is not None, "a rate was run and either attained or did not"
            if high <= self.options.min_rate or self._known[high].is_alone:
                is_measured = high in self._failed
                self._ending = Ending.NEVER_ATTAINED if is_measured else Ending.NO_VALID_RUN
                return None
            return max(_rounded(high / 2), self.options.min_rate), Purpose.DOWN
        if high is None and (limit is None or low < limit):
            return min(_rounded(2 * low), limit or math.inf), Purpose.UP
        if high is not None and high > low * (1 + self.options.tolerance):
            return _rounded(math.sqrt(low * high)), Purpose.BISECT
        if high in self._failed and not self._known[high].is_rechecked:
            return high, Purpose.RECHECK
        if not self._is_confirmed():
            return low, Purpose.CONFIRM
        if high is None:
            self._ending = Ending.RATE_LIMIT
        else:
            self._ending = Ending.FOUND if high in self._failed else Ending.CLIENT_LIMIT
        return None

    def _high(self) -> float | None:
        return min(self._failed | self._unreachable, default=None)

    def _low(self) -> float | None:
        high = self._high()
        return max((rate for rate in self._held if high is None or rate < high), default=None)

    def _is_confirmed(self) -> bool:
        low = self._low()
        return low is not None and self._known[low].num_confirmed >= self.options.confirmations


def _rounded(rate: float) -> float:
    """Four digits, so that a rate in a report is the rate that was run."""
    return float(f"{rate:.4g}")


def _check(options: SearchOptions) -> None:
    if not 0 < options.attainment <= 1:
        raise ConfigError(f"attainment {options.attainment:g} is not a share between 0 and 1")
    # Rates have four digits; a bracket that is hardly wider could not be bisected.
    if not 0.01 <= options.tolerance <= 1:
        raise ConfigError(f"tolerance {options.tolerance:g} is not between 0.01 and 1")
    if not 0 < options.min_rate <= options.start_rate < math.inf:
        raise ConfigError(
            f"start rate {options.start_rate:g} is below the least rate {options.min_rate:g}/s, "
            "or one of them is no rate"
        )
    if options.max_rate is not None and not options.min_rate <= options.max_rate < math.inf:
        raise ConfigError(f"the largest rate {options.max_rate:g} is below {options.min_rate:g}/s")
    if options.confirmations < 1 or options.max_probes < 1:
        raise ConfigError("a search needs at least one confirmation and one probe")


def _line(ending: Ending, low: float | None, high: float | None, options: SearchOptions) -> str:
    goal = f"attainment of {options.attainment:.0%}"
    held = "no rate" if low is None else f"{low:g}/s"
    best = f"{held} is the best that was seen, unconfirmed"
    match ending:
        case Ending.FOUND:
            runs = f"confirmed by {options.confirmations} runs"
            return f"{held} holds an {goal}, {runs}; {high:g}/s does not"
        case Ending.NEVER_ATTAINED:
            return f"not even {high:g}/s holds an {goal}: the bounds are out of reach"
        case Ending.CLIENT_LIMIT:
            return (
                f"{held} holds an {goal}, and this client cannot send {high:g}/s: the server's "
                "limit is higher; give the client more processes or a machine of its own"
            )
        case Ending.RATE_LIMIT:
            return f"{held}, the largest rate allowed, holds an {goal}: the limit is higher"
        case Ending.NO_VALID_RUN:
            return f"no run was valid, down to {high:g}/s: the client cannot measure here"
        case Ending.PROBES_SPENT:
            return f"no result within {options.max_probes} runs; {best}"
        case Ending.RUNNING:
            return f"the search has not ended; {best}"
