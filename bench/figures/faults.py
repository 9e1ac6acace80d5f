"""Faults of a run: how they are written, and what one did to the requests around it.

`injector.py` carries faults out; `impacts` reads the records of the load meanwhile: pure, and seen
from the client, so it holds for any server. In short (in full: DEFINITIONS), from the fault until
detect: a request failed, or waited longer than any before and than 10 x the usual wait for tokens;
recover: the 1-s bin from which on attainment stays at 90 % of that before, and nobody still waits.
dip: the requests that would have met their bounds had all gone on as before.
"""

import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Literal

import msgspec

from baton.bench.figures.metrics import Bounds, counted, meets
from baton.bench.records import Outcome, Record
from baton.protocol.errors import ConfigError

FaultKind = Literal["kill", "stop", "restart"]
FEW = 20  # requests before the fault; fewer say little about what is usual
FORMS = "kill:PID@10, stop:PID@10+2 or restart:PID@10=COMMAND (seconds from the start)"
_FORM = re.compile(
    r"(?P<kind>kill|stop|restart):(?P<pid>[0-9]+)@(?P<at>[0-9.]+)"
    r"(?:\+(?P<after>[0-9.]+))?(?:=(?P<command>.*))?"
)
DEFINITIONS = {
    "before": "of a later fault: what arrived once the fault before it was recovered from (if it "
    "never was: what counts as before that one); and no fault counts a request that was still in "
    "flight at the next one and had not noticed it by then",
    "wait": "time without tokens for a request in flight: from its intended arrival to its first "
    "tokens, then between tokens; the two kinds are held to limits of their own",
    "wait limit": "the larger of stall_factor times the median wait before the fault and the "
    "longest one; a wait that the fault cut into counts up to it",
    "time_to_detect": "fault - first moment at which a request failed or a wait passed its limit",
    "time_to_resume": "fault - next tokens (or end) of the last request that was in flight at the "
    "fault and waited beyond the limit",
    "attainment_before": "share of the requests that ended before the fault which met all bounds",
    "bin": "bin_s seconds from the fault on; a request counts where it arrived, one in flight at "
    "the fault counts at the fault; an empty bin is as good as the one before it",
    "time_to_recover": "fault - start of the first bin, not before time_to_resume, from which on "
    "attainment stays at recovered_share of that before: in this bin, and over every "
    "num_steady_bins from it on",
    "goodput_dip": "requests, from the fault until the recovery (or the end): in an open loop "
    "those that arrived times attainment_before, less those of them that met all bounds; in a "
    "closed loop the time times goodput_before, less those that ended in it and met all bounds",
    "goodput_before": "requests that ended before the fault and met all bounds, per second from "
    "the first arrival, or the recovery from the fault before, to the fault",
}


class FaultSpec(msgspec.Struct, frozen=True):
    """What is to be done to process `pid`, `at_s` after the start of the schedule.

    `after_s`: until SIGCONT (stop), or from the death to the start of `command` (restart).
    """

    kind: FaultKind
    pid: int
    at_s: float
    after_s: float = 0.0
    command: tuple[str, ...] = ()

    def __str__(self) -> str:
        after = f"+{self.after_s:g}" if self.after_s else ""
        command = f"={shlex.join(self.command)}" if self.command else ""
        return f"{self.kind}:{self.pid}@{self.at_s:g}{after}{command}"


class Injected(msgspec.Struct, frozen=True):
    """What was done. Times are seconds from the start of the schedule, taken from the clock."""

    spec: FaultSpec
    at_s: float  # just before the signal
    gone_s: float | None = None  # the process had ended
    resumed_s: float | None = None  # SIGCONT
    restarted_s: float | None = None  # the command was started; not yet that it serves
    restarted_pid: int | None = None
    problem: str = ""  # one line, when it could not be done as written


class Judgement(msgspec.Struct, frozen=True):
    """The numbers in the definitions."""

    bin_s: float = 1.0
    stall_factor: float = 10.0
    recovered_share: float = 0.9
    num_steady_bins: int = 5
    closed_loop: bool = False  # then the dip must not count arrivals: failures bring more of them


class Bin(msgspec.Struct, frozen=True):
    start_s: float  # from the start of the schedule
    num_requests: int
    num_good: int
    num_failed: int


class Impact(msgspec.Struct, frozen=True):
    """What a fault did. A time is None where it did not come about; `notes` then say why."""

    fault: str
    at_s: float
    judgement: Judgement
    time_to_detect_s: float | None
    time_to_resume_s: float | None
    time_to_recover_s: float | None
    longest_wait_s: float  # of requests in flight at the fault, over it
    attainment_before: float | None
    goodput_before: float
    goodput_dip: float
    num_in_flight: int
    num_interrupted: int  # of these: failed, or waited beyond the limit
    num_resumed: int  # of these: answered all the same
    num_failed: int  # of all from the fault on
    bins: list[Bin]  # before the fault and after it
    notes: list[str]


def parse_fault(text: str) -> FaultSpec:
    """A fault as written on the command line; raises `ConfigError`."""
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"fault {text!r}: write {FORMS}")
    try:
        at_s, after_s = float(found["at"]), float(found["after"] or 0.0)
        command = tuple(shlex.split(found["command"] or ""))
    except ValueError as error:
        raise ConfigError(f"fault {text!r}: {error}; write {FORMS}") from error
    kind, pid = found["kind"], int(found["pid"])
    if pid <= 1 or pid == os.getpid():
        raise ConfigError(f"fault {text!r}: {pid} is not the id of a server's process")
    if kind == "kill" and (found["after"] or found["command"]):
        raise ConfigError(f"fault {text!r}: a kill takes only a time; write {FORMS}")
    if kind == "stop" and (after_s <= 0 or found["command"]):
        raise ConfigError(f"fault {text!r}: say after how many seconds it continues: stop:PID@10+2")
    if kind == "restart" and not command:
        raise ConfigError(f"fault {text!r}: say what starts it again: restart:PID@10=COMMAND")
    return FaultSpec(msgspec.convert(kind, FaultKind), pid, at_s, after_s, command)


def impacts(
    records: Sequence[Record],
    faults: Sequence[Injected],
    bounds: Bounds,
    judgement: Judgement | None = None,
) -> list[Impact]:
    """What each of `faults`, in order of time, did to the requests up to the next one."""
    records = counted(records, None)
    found: list[Impact] = []
    usual_from_s, usual_to_s = records[0].intended_s if records else math.inf, math.inf
    moments_s = pairwise([*(fault.at_s for fault in faults), math.inf])
    for fault, (at_s, until_s) in zip(faults, moments_s, strict=True):
        if not found:
            usual_to_s = at_s
        elif (recovered_s := found[-1].time_to_recover_s) is not None:
            usual_from_s, usual_to_s = found[-1].at_s + recovered_s, at_s
        scope = _Scope(usual_from_s, usual_to_s, at_s, until_s)
        found.append(_impact(records, fault, scope, bounds, judgement or Judgement()))
    return found


class _Scope(msgspec.Struct, frozen=True):
    """Which part of a load a fault is judged by."""

    usual_from_s: float  # the first arrival, or the fault before was recovered from
    usual_to_s: float  # this fault, or the first of those before that were not recovered from
    at_s: float
    until_s: float  # the next fault


def _impact(
    records: Sequence[Record], fault: Injected, scope: _Scope, bounds: Bounds, judgement: Judgement
) -> Impact:
    at_s, until_s, bin_s = scope.at_s, scope.until_s, judgement.bin_s
    limits = _WaitLimits(records, scope, judgement.stall_factor)
    seen = _Seen(records, scope, limits)
    noticed = [moment_s for record in seen.since for moment_s in limits.noticed(record)]
    noticed = [moment_s for moment_s in noticed if moment_s < until_s]
    resumed = [end_s for record in seen.in_flight if (end_s := limits.resumed_s(record))]
    met = {record.index: meets(record, bounds) for record in seen.asked}
    num_good = sum(met[record.index] for record in seen.before)
    share = num_good / len(seen.before) if seen.before else None
    goodput = seen.usual_goodput(met)
    bins = _bins(seen.asked, met, at_s, bin_s)
    after = [entry for entry in bins if entry.start_s >= at_s]
    recovered = _recovered(bins, at_s, max(resumed, default=at_s), share, judgement)
    if judgement.closed_loop:
        over_s = None if recovered is None else at_s + recovered * bin_s
        dip = seen.missing(goodput, met, over_s)
    else:
        dip = _missing(after[:recovered], share or 0.0)
    notes = [fault.problem] if fault.problem else []
    if not any(limits.noticed(record) for record in seen.in_flight):
        late = "none in flight noticed the fault: what was noticed later may have another cause"
        notes.append(late if noticed else "no request noticed the fault")
    return Impact(
        fault=str(fault.spec),
        at_s=at_s,
        judgement=judgement,
        time_to_detect_s=min(noticed) - at_s if noticed else None,
        time_to_resume_s=max(resumed) - at_s if resumed else None,
        time_to_recover_s=None if recovered is None else recovered * bin_s,
        longest_wait_s=max((_longest(record, scope) for record in seen.in_flight), default=0.0),
        attainment_before=share,
        goodput_before=goodput,
        goodput_dip=dip,
        num_in_flight=len(seen.in_flight),
        num_interrupted=sum(bool(limits.noticed(record)) for record in seen.in_flight),
        num_resumed=len(resumed),
        num_failed=sum(_failed(record) for record in seen.since),
        bins=bins,
        notes=notes + _notes(seen.before, share, after, recovered, scope),
    )


class _Seen:
    """The requests that count, by when they were there. A later fault's do not."""

    def __init__(self, records: Sequence[Record], scope: _Scope, limits: "_WaitLimits") -> None:
        self._scope = scope
        self.asked = [record for record in records if self._counts(record, limits)]
        usual = [record for record in self.asked if record.intended_s >= scope.usual_from_s]
        self.before = [record for record in usual if record.end_s < scope.usual_to_s]
        self.since = [record for record in self.asked if record.end_s >= scope.at_s]
        self.in_flight = [record for record in self.since if record.intended_s <= scope.at_s]

    def usual_goodput(self, met: Mapping[int, bool]) -> float:
        """Good answers per second, by when they ended."""
        from_s, to_s = self._scope.usual_from_s, self._scope.usual_to_s
        num_good = sum(met[record.index] for record in self.asked if from_s <= record.end_s < to_s)
        return num_good / (to_s - from_s) if from_s < to_s else 0.0

    def missing(self, goodput: float, met: Mapping[int, bool], over_s: float | None) -> float:
        """Good answers that did not come by `over_s` (None: the end) though they usually do."""
        if over_s is None:
            over_s = min(self._scope.until_s, max((one.end_s for one in self.since), default=0.0))
        num_good = sum(met[record.index] for record in self.since if record.end_s <= over_s)
        return max(0.0, goodput * (over_s - self._scope.at_s) - num_good)

    def _counts(self, record: Record, limits: "_WaitLimits") -> bool:
        until_s = self._scope.until_s
        if record.intended_s >= until_s:
            return False
        return record.end_s < until_s or any(one < until_s for one in limits.noticed(record))


class _Wait(msgspec.Struct, frozen=True):
    """Time without tokens; the first one of a request begins with its intended arrival."""

    begin_s: float
    end_s: float
    is_first: bool


def _waits(record: Record) -> list[_Wait]:
    carrying = [arrival.at_s for arrival in record.arrivals if arrival.num_tokens > 0]
    stamps = [record.intended_s, *carrying, record.end_s]
    return [_Wait(*span, is_first=not index) for index, span in enumerate(pairwise(stamps))]


def _longest(record: Record, scope: _Scope) -> float:
    return max(
        min(wait.end_s, scope.until_s) - wait.begin_s
        for wait in _waits(record)
        if wait.end_s >= scope.at_s
    )


class _WaitLimits:
    """How long a client waited at most before the fault; and what went beyond it afterwards."""

    def __init__(self, records: Sequence[Record], scope: _Scope, factor: float) -> None:
        self._at_s, self._usual_to_s = scope.at_s, scope.usual_to_s
        usual = [record for record in records if record.intended_s >= scope.usual_from_s]
        waits = [wait for record in usual for wait in _waits(record)]
        waits = [wait for wait in waits if wait.begin_s < self._usual_to_s]
        self._limits = {kind: self._limit(waits, kind, factor) for kind in (True, False)}

    def _limit(self, waits: Sequence[_Wait], is_first: bool, factor: float) -> float:
        waits = [wait for wait in waits if wait.is_first is is_first]
        ended_s = [wait.end_s - wait.begin_s for wait in waits if wait.end_s < self._usual_to_s]
        if not ended_s:
            return math.inf
        # A wait that the fault cut into counts as far as it had come, so that no limit can be
        # passed before the fault.
        longest_s = max(min(wait.end_s, self._usual_to_s) - wait.begin_s for wait in waits)
        return max(factor * median(ended_s), longest_s)

    def noticed(self, record: Record) -> list[float]:
        """When a wait passed its limit, in order; at last the failure, if it failed."""
        moments = [
            wait.begin_s + self._limits[wait.is_first] for wait in self._beyond_limit(record)
        ]
        return [*moments, record.end_s] if _failed(record) else moments

    def resumed_s(self, record: Record) -> float | None:
        """When a request that was answered in the end went on after its first such wait."""
        beyond = self._beyond_limit(record)
        return beyond[0].end_s if beyond and not _failed(record) else None

    def _beyond_limit(self, record: Record) -> list[_Wait]:
        """A wait that was too long already when the fault came is an earlier one's."""
        return [
            wait
            for wait in _waits(record)
            if self._at_s - wait.begin_s <= self._limits[wait.is_first] < wait.end_s - wait.begin_s
        ]


def _failed(record: Record) -> bool:
    return record.outcome is not Outcome.ANSWERED


def _bins(
    records: Sequence[Record], met: Mapping[int, bool], at_s: float, bin_s: float
) -> list[Bin]:
    """From the first arrival to the last; one of them begins at the fault."""
    inside: dict[int, list[Record]] = {}
    for record in records:
        is_in_flight = record.intended_s <= at_s <= record.end_s
        counts_at_s = at_s if is_in_flight else record.intended_s
        inside.setdefault(math.floor((counts_at_s - at_s) / bin_s), []).append(record)
    if not inside:
        return []
    return [
        Bin(
            start_s=at_s + number * bin_s,
            num_requests=len(found := inside.get(number, [])),
            num_good=sum(met[record.index] for record in found),
            num_failed=sum(_failed(record) for record in found),
        )
        for number in range(min(inside), max(inside) + 1)
    ]


def _recovered(
    bins: Sequence[Bin], at_s: float, quiet_s: float, share: float | None, judgement: Judgement
) -> int | None:
    """The bin after the fault from which on attainment stays; None if it never does.

    `quiet_s`: from then on no stream waits that the fault interrupted.
    """
    if not share:
        return None
    at_least, num_steady = share * judgement.recovered_share, judgement.num_steady_bins
    asked = [entry for entry in bins if entry.start_s < at_s and entry.num_requests]
    after = [entry for entry in bins if entry.start_s >= at_s]
    found, level = None, _attainment(asked[-1:], share)
    for number, entry in enumerate(after):
        level = _attainment([entry], level)
        if found is None and entry.start_s >= quiet_s and level >= at_least:
            found = number
        # No window reaches beyond the end: the last bins would be judged by a few requests alone.
        window = after[number : number + num_steady]
        is_whole = len(window) == num_steady or found == number
        if is_whole and _attainment(window, 1.0) < at_least:
            found = None
    return found


def _attainment(bins: Sequence[Bin], of_nothing: float) -> float:
    num_requests = sum(entry.num_requests for entry in bins)
    return sum(entry.num_good for entry in bins) / num_requests if num_requests else of_nothing


def _missing(bins: Sequence[Bin], share: float) -> float:
    """Requests that were not good, beyond those that usually are not."""
    return max(0.0, sum(share * entry.num_requests - entry.num_good for entry in bins))


def _notes(
    before: Sequence[Record],
    share: float | None,
    after: Sequence[Bin],
    recovered: int | None,
    scope: _Scope,
) -> list[str]:
    notes = []
    what = "load go on for longer" if math.isinf(scope.until_s) else "next fault come later"
    if scope.usual_to_s < scope.at_s:
        notes.append("the fault before was not recovered from: compared with what was before that")
    if share is None:
        notes.append("no request had ended before the fault: let it come later")
    elif share == 0:
        notes.append("no request met its bounds before the fault, so there is nothing to recover")
    elif recovered is None:
        notes.append(f"not recovered within {len(after)} bins: let the {what}")
    elif len(after) - recovered < 2:
        notes.append(f"it recovered only at the end: let the {what}")
    if 0 < len(before) < FEW:
        notes.append(f"only {len(before)} requests had ended before the fault")
    if num_failed := sum(_failed(record) for record in before):
        notes.append(f"{num_failed} requests had failed before the fault")
    return notes
