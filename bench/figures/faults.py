"""The fault of a run: its notation, and its effect on the requests around it.

`impact_of` reads the records of the load afterwards: it is pure, and sees only what a client sees,
so it holds for any server. DEFINITIONS explains every term.
"""

import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median
from typing import Literal

import msgspec

from baton.bench.figures.metrics import Bounds, counted, meets
from baton.bench.records import Outcome, Record
from baton.protocol.errors import ConfigError

FaultKind = Literal["kill", "stop"]
FEW = 20  # with fewer requests before the fault, it is unclear what is usual
FORMS = "kill:PID@10 or stop:PID@10+2 (seconds from the start)"
_FORM = re.compile(r"(?P<kind>kill|stop):(?P<pid>[0-9]+)@(?P<at>[0-9.]+)(?:\+(?P<after>[0-9.]+))?")
DEFINITIONS = {
    "wait": "time without tokens for a request in flight: from its intended arrival to its first "
    "tokens, then between tokens; each kind has a limit of its own",
    "wait limit": "the larger of stall_factor times the median wait before the fault and the "
    "longest wait before it; a wait that the fault cut into counts up to the fault",
    "time_to_detect": "fault - first moment at which a request failed or a wait passed its limit",
    "time_to_resume": "fault - next tokens (or end) of the last request that was in flight at the "
    "fault and waited beyond the limit",
    "attainment_before": "share of the requests that ended before the fault which met all bounds",
    "goodput_before": "such requests per second, from the first arrival",
    "bin": "bin_s seconds from the fault on; a request counts where it arrived, one in flight at "
    "the fault counts at the fault; an empty bin is as good as the one before it",
    "time_to_recover": "fault - start of the first bin, not before time_to_resume, from which on "
    "attainment stays at recovered_share of that before: in this bin, and over every "
    "num_steady_bins from it on",
    "goodput_dip": "good answers lost until the recovery (or the end): in an open loop arrivals "
    "times attainment_before, in a closed loop the time times goodput_before, less the good ones",
}


class FaultSpec(msgspec.Struct, frozen=True):
    """A fault of process `pid`, to be carried out `at_s` after the start of the schedule."""

    kind: FaultKind
    pid: int
    at_s: float
    after_s: float = 0.0  # how long a stop lasts

    def __str__(self) -> str:
        after = f"+{self.after_s:g}" if self.after_s else ""
        return f"{self.kind}:{self.pid}@{self.at_s:g}{after}"


class Injected(msgspec.Struct, frozen=True):
    """A fault as it was carried out. Times are seconds from the start of the schedule."""

    spec: FaultSpec
    at_s: float  # just before the signal
    gone_s: float | None = None  # the process had ended
    resumed_s: float | None = None  # SIGCONT
    problem: str = ""  # one line, if the fault could not be carried out as written


class Judgement(msgspec.Struct, frozen=True):
    """The numbers in the definitions."""

    bin_s: float = 1.0
    stall_factor: float = 10.0
    recovered_share: float = 0.9
    num_steady_bins: int = 5
    # Then the dip must not count arrivals, because failures lead to more of them.
    closed_loop: bool = False


class Bin(msgspec.Struct, frozen=True):
    start_s: float  # from the start of the schedule
    num_requests: int
    num_good: int


class Impact(msgspec.Struct, frozen=True):
    """The effect of a fault. A time is None if it never came; `notes` then say why."""

    fault: str
    at_s: float
    judgement: Judgement
    time_to_detect_s: float | None
    time_to_resume_s: float | None
    time_to_recover_s: float | None
    longest_wait_s: float  # that a request in flight at the fault had from the fault on
    attainment_before: float | None
    goodput_before: float
    goodput_dip: float
    num_in_flight: int
    num_interrupted: int  # of these: failed, or waited beyond the limit
    num_resumed: int  # of these: answered nevertheless
    num_failed: int  # of all from the fault on
    bins: list[Bin]  # before the fault and after it
    notes: list[str]


def parse_fault(text: str) -> FaultSpec:
    """Read a fault as it is written on the command line. Raises `ConfigError`."""
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"fault {text!r}: write {FORMS}")
    try:
        at_s, after_s = float(found["at"]), float(found["after"] or 0.0)
    except ValueError as error:
        raise ConfigError(f"fault {text!r}: {error}; write {FORMS}") from error
    kind, pid = msgspec.convert(found["kind"], FaultKind), int(found["pid"])
    why = {
        f"{pid} is not the id of a server's process": pid <= 1 or pid == os.getpid(),
        f"a kill takes only a time; write {FORMS}": kind == "kill" and found["after"],
        "say after how many seconds it continues: stop:PID@10+2": kind == "stop" and after_s <= 0,
    }
    for mistake, is_made in why.items():
        if is_made:
            raise ConfigError(f"fault {text!r}: {mistake}")
    return FaultSpec(kind, pid, at_s, after_s)


def impact_of(
    records: Sequence[Record], fault: Injected, bounds: Bounds, judgement: Judgement
) -> Impact:
    """Return the effect of a fault on the requests of a load."""
    return _Around(counted(records, None), fault.at_s, bounds, judgement).impact(fault)


@dataclass(slots=True)
class _Witness:
    """A request, and what it saw of a fault."""

    record: Record
    is_good: bool
    has_failed: bool
    noticed_s: list[float]  # when each wait passed its limit, then when the request failed
    resumed_s: float | None = None  # the end of the first such wait, if the request was answered
    longest_wait_s: float = 0.0  # of the waits that ended after the fault


class _Around:
    """The requests before, during and after a fault."""

    def __init__(
        self, records: Sequence[Record], at_s: float, bounds: Bounds, judgement: Judgement
    ) -> None:
        self._at_s, self._judgement = at_s, judgement
        self._limits = _wait_limits(records, at_s, judgement.stall_factor)
        self._seen = [self._witness(record, bounds) for record in records]
        self._before = [one for one in self._seen if one.record.end_s < at_s]
        self._since = [one for one in self._seen if one.record.end_s >= at_s]
        self._in_flight = [one for one in self._since if one.record.intended_s <= at_s]
        usual_s = at_s - records[0].intended_s if records else 0.0
        num_good = sum(one.is_good for one in self._before)
        self._usual_goodput = num_good / usual_s if usual_s > 0 else 0.0

    def impact(self, fault: Injected) -> Impact:
        at_s = self._at_s
        noticed = [when for one in self._since for when in one.noticed_s]
        interrupted = [one for one in self._in_flight if one.noticed_s]
        resumed = [one.resumed_s for one in self._in_flight if one.resumed_s is not None]
        good_before = [one.is_good for one in self._before]
        share = sum(good_before) / len(good_before) if good_before else None
        bins = self._bins()
        after = [entry for entry in bins if entry.start_s >= at_s]
        recovered = self._recovered(bins, after, max(resumed, default=at_s), share)
        notes = [fault.problem] if fault.problem else []
        if not interrupted:
            late = "no request in flight noticed the fault: later signs may have another cause"
            notes.append(late if noticed else "no request noticed the fault")
        return Impact(
            fault=str(fault.spec),
            at_s=at_s,
            judgement=self._judgement,
            time_to_detect_s=min(noticed) - at_s if noticed else None,
            time_to_resume_s=max(resumed) - at_s if resumed else None,
            time_to_recover_s=None if recovered is None else recovered * self._judgement.bin_s,
            longest_wait_s=max((one.longest_wait_s for one in self._in_flight), default=0.0),
            attainment_before=share,
            goodput_before=self._usual_goodput,
            goodput_dip=max(0.0, self._dip(after, recovered, share or 0.0)),
            num_in_flight=len(self._in_flight),
            num_interrupted=len(interrupted),
            num_resumed=len(resumed),
            num_failed=sum(one.has_failed for one in self._since),
            bins=bins,
            notes=notes + self._notes(share, len(after), recovered),
        )

    def _witness(self, record: Record, bounds: Bounds) -> _Witness:
        failed = record.outcome is not Outcome.ANSWERED
        seen = _Witness(record, meets(record, bounds), failed, [])
        for begin_s, end_s, is_first in _waits(record):
            limit_s = self._limits[is_first]
            if end_s >= self._at_s:
                seen.longest_wait_s = max(seen.longest_wait_s, end_s - begin_s)
            # A wait that was too long already when the fault came is not its effect.
            if self._at_s - begin_s <= limit_s < end_s - begin_s:
                if not seen.noticed_s and not failed:
                    seen.resumed_s = end_s
                seen.noticed_s.append(begin_s + limit_s)
        if failed:
            seen.noticed_s.append(record.end_s)
        return seen

    def _bins(self) -> list[Bin]:
        """Return the bins from the first arrival to the last; one of them begins at the fault."""
        at_s, bin_s = self._at_s, self._judgement.bin_s
        inside: dict[int, list[bool]] = {}
        for one in self._seen:
            begin_s = one.record.intended_s
            counts_at_s = at_s if begin_s <= at_s <= one.record.end_s else begin_s
            inside.setdefault(math.floor((counts_at_s - at_s) / bin_s), []).append(one.is_good)
        numbers = range(min(inside, default=0), max(inside, default=-1) + 1)
        met = [inside.get(number, []) for number in numbers]
        return [
            Bin(at_s + number * bin_s, len(good), sum(good))
            for number, good in zip(numbers, met, strict=True)
        ]

    def _recovered(
        self, bins: Sequence[Bin], after: Sequence[Bin], quiet_s: float, share: float | None
    ) -> int | None:
        """Return the bin after the fault from which on attainment stays; None if it never does.

        From `quiet_s` on, no stream that the fault interrupted still waits.
        """
        if not share:
            return None
        size, at_least = self._judgement.num_steady_bins, share * self._judgement.recovered_share
        # An empty bin is as good as the one before it.
        levels = list(accumulate(bins, lambda level, one: _attainment([one], level), initial=share))
        levels = levels[len(levels) - len(after) :]
        numbers, whole = range(len(after)), range(len(after) - size + 1)
        steady = [_attainment(after[place : place + size], 1.0) >= at_least for place in numbers]
        # The last windows are cut by the end, so few requests would judge the bins before them.
        first = 1 + max((place for place in whole if not steady[place]), default=-1)
        for place in numbers[first:]:
            is_good = levels[place] >= at_least and steady[place]
            if is_good and after[place].start_s >= quiet_s:
                return place
        return None

    def _dip(self, after: Sequence[Bin], recovered: int | None, share: float) -> float:
        """Return the good answers lost up to the recovery or the end; below 0 if more came."""
        if not self._judgement.closed_loop:
            return sum(share * one.num_requests - one.num_good for one in after[:recovered])
        over_s = max((one.record.end_s for one in self._since), default=self._at_s)
        if recovered is not None:
            over_s = self._at_s + recovered * self._judgement.bin_s
        num_good = sum(one.is_good for one in self._since if one.record.end_s <= over_s)
        return self._usual_goodput * (over_s - self._at_s) - num_good

    def _notes(self, share: float | None, num_after: int, recovered: int | None) -> list[str]:
        num_before, num_failed = len(self._before), sum(one.has_failed for one in self._before)
        is_lasting = bool(share) and recovered is None
        found = {
            "no request had ended before the fault: let it come later": share is None,
            "no request met its bounds before the fault: there is nothing to recover": share == 0,
            f"not recovered within {num_after} bins: let the load go on for longer": is_lasting,
            "it recovered only at the end: let the load go on for longer":
                recovered is not None and num_after - recovered < 2,
            f"only {num_before} requests had ended before the fault": 0 < num_before < FEW,
            f"{num_failed} requests had failed before the fault": num_failed > 0,
        }  # fmt: skip
        return [note for note, holds in found.items() if holds]


def _waits(record: Record) -> Iterator[tuple[float, float, bool]]:
    """Yield the times without tokens: begin, end, and whether it is the first of the request."""
    stamps = [record.intended_s, *(arrival.at_s for arrival in record.arrivals), record.end_s]
    return ((begin_s, end_s, not place) for place, (begin_s, end_s) in enumerate(pairwise(stamps)))


def _wait_limits(records: Sequence[Record], at_s: float, factor: float) -> dict[bool, float]:
    """Return the longest usual wait for the first tokens (True) and between tokens (False)."""
    waits = [wait for record in records for wait in _waits(record) if wait[0] < at_s]
    limits = {True: math.inf, False: math.inf}
    for kind in limits:
        own = [(begin_s, end_s) for begin_s, end_s, is_first in waits if is_first is kind]
        if ended_s := [end_s - begin_s for begin_s, end_s in own if end_s < at_s]:
            # A wait that the fault cut into counts as far as it had come, so that no limit can be
            # passed before the fault.
            longest_s = max(min(end_s, at_s) - begin_s for begin_s, end_s in own)
            limits[kind] = max(factor * median(ended_s), longest_s)
    return limits


def _attainment(bins: Sequence[Bin], of_nothing: float) -> float:
    num_requests = sum(entry.num_requests for entry in bins)
    return sum(entry.num_good for entry in bins) / num_requests if num_requests else of_nothing
