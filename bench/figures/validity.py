"""Judge whether a load measured the server, and name what a reader must know about it.

A run is INVALID when its figures are not the server's; nothing here may change a figure. A search
treats a load that outran its server as failed, because its figures would depend on the length of
the run.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec
import numpy as np

from baton.bench.figures.metrics import Bounds, Summary, counted, measure, summarise
from baton.bench.plan.plan import Plan
from baton.bench.records import LoadResult, Outcome, Planned, Record
from baton.bench.settings import Settings
from baton.protocol.errors import BatonError

MIN_LAG_GATE_MS = 5.0
LAG_GATE_OF_TTFT = 0.01
# The share of a core per process above which the client itself waits.
MAX_CLIENT_CPU = 0.6
MAX_RATE_LOSS = 0.02
MAX_WRONG_LENGTHS = 0.01  # of all requests
MAX_OFF_RATE = 0.1
MAX_CACHED_SHARE = 0.1  # of prompt tokens; a chat template may be shared
MERGING = 1.05  # mean tokens per chunk
IGNORED = ": does the server honour ignore_eos?"
CACHED = (
    "the server had prompts cached that share nothing with each other: it saw them before, so "
    "TTFT is too good; choose another --seed, or reset the cache"
)
# A queue grows if both TTFT and requests in flight do, over this many bins of arrivals.
NUM_BINS = 10
MIN_REQUESTS = 50
MIN_T = 3.0  # about one run in a hundred without growth has a slope of this many errors
MIN_FACTOR = 1.5  # last third of the arrivals over the first


class Severity(StrEnum):
    INVALID = "invalid"  # the figures are not the server's
    WARNING = "warning"  # they are the server's, but a reader must know this


class Problem(msgspec.Struct, frozen=True):
    severity: Severity
    text: str  # one line

    @property
    def is_invalid(self) -> bool:
        return self.severity is Severity.INVALID


def invalid(text: str) -> Problem:
    return Problem(Severity.INVALID, text)


def warning(text: str) -> Problem:
    return Problem(Severity.WARNING, text)


def is_valid(problems: Sequence[Problem]) -> bool:
    return not any(problem.is_invalid for problem in problems)


@dataclass(slots=True)
class Case:
    """A load, and what its records are judged by."""

    label: str
    plan: Plan
    settings: Settings
    bounds: Bounds | None
    concurrency: int  # of a closed loop; 0 for an open loop


def judge(
    case: Case, result: LoadResult, why_stopped: str
) -> tuple[Summary, list[Problem]]:
    """Return the figures of a load and all problems with them, the invalidating ones first.

    Raises `BatonError` for a load that was stopped before any request counts.
    """
    if why_stopped and not counted(result.records):
        raise BatonError(f"nothing was measured: {why_stopped}")
    problems = [invalid(why_stopped)] if why_stopped else []
    is_closed = bool(case.concurrency)
    summary = summarise(result, bounds=case.bounds, closed_loop=is_closed)
    planned = case.plan.requests
    if why_stopped or (is_closed and case.settings.load.duration_s):
        # Unsent requests are intended, or have been reported already.
        ended = {record.index for record in result.records}
        planned = [one for one in planned if one.index in ended]
    problems += [*check(result, summary, planned), *_unlike_the_settings(case, summary)]
    return summary, sorted(problems, key=lambda problem: not problem.is_invalid)


def _unlike_the_settings(case: Case, summary: Summary) -> Iterator[Problem]:
    """Find differences between the load that the settings ask for and the one that was sent."""
    workload = case.settings.workload
    plan = case.plan
    # No prompt of these begins like another one of the same load.
    is_new = (
        workload.workload in ("tokens", "text", "chat") and not workload.shared_prefix
    )
    if is_new and (summary.cached_share or 0.0) > MAX_CACHED_SHARE:
        yield warning(CACHED)
    # Drawn arrivals may be far from the rate that was asked for.
    wanted = plan.offered_rate
    drawn = plan.realised.rate if plan.realised else None
    if wanted and drawn is not None and abs(drawn / wanted - 1) > MAX_OFF_RATE:
        off = f"{abs(drawn / wanted - 1):.0%} {'above' if drawn > wanted else 'below'}"
        text = f"the arrivals were drawn at {drawn:.4g}/s, {off} the {wanted:g}/s asked for"
        yield warning(f"{text}: a longer load comes closer")


def sent_so_far(records: Sequence[Record], planned: Sequence[Planned]) -> str:
    """Return how far a stopped load got, without its warm-up."""
    sent = [one for one in records if not one.warm_up]
    num_planned = sum(not one.warm_up for one in planned)
    num_stopped = sum(one.outcome is Outcome.STOPPED for one in sent)
    rest = (
        f"; not ended by then, and in no figure: {num_stopped}" if num_stopped else ""
    )
    return f"{len(sent)} of {num_planned} requests had been sent{rest}"


def check(
    result: LoadResult, summary: Summary, planned: Sequence[Planned]
) -> list[Problem]:
    """Return all problems of a run, beginning with those that make it invalid.

    If no request was answered, that is the only problem reported.
    """
    records = counted(result.records)
    if not any(record.outcome is Outcome.ANSWERED for record in records):
        return [invalid(_all_failed(records))]
    found = [
        *_client(result, summary, planned),
        *_responses(records, planned),
        *_load(result, summary),
    ]
    if growth := find_growth(result.records):
        found.append(warning(growth))
    return sorted(found, key=lambda problem: not problem.is_invalid)


def lag_gate_ms(summary: Summary) -> float:
    """Return the largest lag p99 with which a run is valid."""
    ttft_ms = summary.ttft.p50 if summary.ttft else 0.0
    return max(MIN_LAG_GATE_MS, LAG_GATE_OF_TTFT * ttft_ms)


def _client(
    result: LoadResult, summary: Summary, planned: Sequence[Planned]
) -> Iterator[Problem]:
    """Find signs of a client that was late, busy or interrupted, and so measured itself."""
    measured = [one for one in planned if not one.warm_up]
    ended = {record.index for record in result.records}
    if missing := sum(one.index not in ended for one in measured):
        yield invalid(
            f"{missing} of {len(measured)} planned requests have no record: the load was cut short"
        )
    gate_ms = lag_gate_ms(summary)
    lag_ms = summary.lag.p99
    is_open = any(one.at_s is not None for one in measured)  # else nothing is sent late
    if is_open and lag_ms > gate_ms:
        yield invalid(
            f"the client sent late: lag p99 is {lag_ms:.1f} ms, over {gate_ms:.1f} ms "
            "(max(5 ms, 1 % of TTFT p50)); use more --processes or a machine of its own"
        )
    used = [one.cpu_s / one.wall_s for one in result.clients if one.wall_s > 0]
    if over := [share for share in used if share > MAX_CLIENT_CPU]:
        yield invalid(
            f"{len(over)} of {len(used)} client processes used up to {max(over):.0%} of a core, "
            f"over {MAX_CLIENT_CPU:.0%}: they measured their own queue; use more --processes"
        )
    due = {one.index: one.at_s for one in measured if one.at_s is not None}
    sent = sorted(one.sent_s for one in result.records if one.index in due)
    wanted = [*due.values()]
    if len(sent) < max(2, len(wanted)):
        return
    wanted_s = max(wanted) - min(wanted)
    spread_s = sent[-1] - sent[0]
    if 0 < wanted_s < (1 - MAX_RATE_LOSS) * spread_s:
        rates = [(len(sent) - 1) / over_s for over_s in (spread_s, wanted_s)]
        of = " of ".join(
            f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}" for rate in rates
        )
        yield invalid(
            f"the client could not reach the rate: it sent {of} /s; use more --processes"
        )


def _responses(
    records: Sequence[Record], planned: Sequence[Planned]
) -> Iterator[Problem]:
    """Find failures, and responses that differ from the requested work."""
    of_all = f"of {len(records)}"
    if wrong := [record for record in records if _has_wrong_length(record)]:
        is_many = len(wrong) / len(records) > MAX_WRONG_LENGTHS
        yield (invalid if is_many else warning)(
            f"{len(wrong)} {of_all} responses have another length than was requested (the first: "
            f"{wrong[0].num_tokens} tokens for {wrong[0].forced_tokens}){IGNORED}"
        )
    lengths = {one.index: len(one.prompt_ids) for one in planned}
    seen = [(one.prompt_tokens, lengths.get(one.index, 0)) for one in records]
    if cut := [(had, sent) for had, sent in seen if had is not None and had < sent]:
        yield warning(
            f"{len(cut)} {of_all} prompts were shorter for the server (the first: {cut[0][0]} "
            f"tokens of {cut[0][1]}): does it cut what is too long?"
        )
    if without := [one for one in records if one.outcome is Outcome.NO_SOCKET]:
        yield invalid(
            f"the client's machine had no socket for {len(without)} {of_all} requests "
            f"({without[0].detail}): raise its limit of open files (ulimit -n), or ask for less at "
            "once"
        )
    if failed := [one for one in records if one.outcome is not Outcome.ANSWERED]:
        detail = next((f"; for one: {one.detail}" for one in failed if one.detail), "")
        yield warning(
            f"{len(failed)} {of_all} requests failed: {_counts(failed)}{detail}"
        )


def _load(result: LoadResult, summary: Summary) -> Iterator[Problem]:
    """Find a warm-up that was not over in time, and chunks that hide gaps."""
    if late := sum(
        one.warm_up and one.end_s > summary.window.start_s for one in result.records
    ):
        yield warning(
            f"{late} warm-up requests were still running when the measured ones began"
        )
    merged = summary.tokens_per_chunk
    if merged is not None and merged > MERGING:
        yield warning(
            f"tokens arrive {merged:.2f} to a chunk on average: itl spreads the gaps between "
            "chunks, chunk_gap and gap_max do not"
        )


def _all_failed(records: Sequence[Record]) -> str:
    first = f"; the first: {records[0].detail}" if records[0].detail else ""
    is_ignored = all(record.outcome is Outcome.WRONG_LENGTH for record in records)
    text = f"all {len(records):,} requests failed: {_counts(records)}{first}"
    return text + IGNORED if is_ignored else text


def _counts(failed: Sequence[Record]) -> str:
    counts = Counter(record.outcome.value for record in failed)
    shown = ", ".join(
        f"{number:,} {outcome}" for outcome, number in sorted(counts.items())
    )
    return shown.replace("_", " ")


def _has_wrong_length(record: Record) -> bool:
    is_answered = record.outcome is Outcome.ANSWERED
    is_off = is_answered and record.forced_tokens not in (0, record.num_tokens)
    return is_off or record.outcome is Outcome.WRONG_LENGTH


def find_growth(records: Sequence[Record]) -> str:
    """Return a line about a queue that grew throughout; empty without one, or with few requests.

    Both figures have to grow: TTFT alone rises with longer prompts, requests in flight with longer
    responses.
    """
    arrived = counted(records)
    if len(arrived) < MIN_REQUESTS:
        return ""
    moments = np.array([record.intended_s for record in arrived])
    found = (
        one.outcome is Outcome.ANSWERED and measure(one).ttft_ms for one in arrived
    )
    ttfts_ms = np.array([ttft_ms or math.nan for ttft_ms in found])
    begun = np.searchsorted(moments, moments, "right")
    ended = np.searchsorted(np.sort([one.end_s for one in arrived]), moments, "right")
    waits = [part[~np.isnan(part)] for part in np.array_split(ttfts_ms, NUM_BINS)]
    if not all(len(part) for part in waits):
        return ""
    wait_ms = [float(part.mean()) for part in waits]
    in_flight = [float(part.mean()) for part in np.array_split(begun - ended, NUM_BINS)]
    if not (_grows(wait_ms) and _grows(in_flight)):
        return ""
    (first_ms, last_ms), (first, last) = _ends(wait_ms), _ends(in_flight)
    return (
        f"the load outran the server: over the run TTFT grew from {first_ms:.0f} to {last_ms:.0f} "
        f"ms and requests in flight from {first:.1f} to {last:.1f}, so a longer run would measure "
        "worse figures"
    )


def slope_in_errors(ys: Sequence[float]) -> float:
    """Return the slope of the least-squares line through points at equal distances, three at least.

    It is measured in its own standard errors, as Student's t, and very large if the line is exact.
    """
    if max(ys) == min(ys):
        return 0.0
    r = float(np.corrcoef(np.arange(len(ys)), ys)[0, 1])
    return r * math.sqrt((len(ys) - 2) / max(1 - r * r, 1e-13))


def _grows(means: Sequence[float]) -> bool:
    first, last = _ends(means)
    return slope_in_errors(means) > MIN_T and last > MIN_FACTOR * first


def _ends(means: Sequence[float]) -> tuple[float, float]:
    """Return the means of the first and the last third."""
    third = len(means) // 3
    return float(np.mean(means[:third])), float(np.mean(means[-third:]))
