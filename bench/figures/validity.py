"""Whether a load measured the server or something else, and what a reader must know about it.

The experiments ask after every load. Reports print every problem, and an invalid run says so before
any figure of it. A search takes a run in which the queue grew as failed, because the figures of
such a run say how long it was. Nothing here may change a figure.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec
import numpy as np

from baton.bench.client.turns import NOT_SENT
from baton.bench.figures.metrics import Summary, Window, counted, measure
from baton.bench.records import LoadResult, Outcome, Planned, Record
from baton.protocol.errors import BatonError

MIN_LAG_GATE_MS = 5.0
LAG_GATE_OF_TTFT = 0.01
MAX_CLIENT_CPU = 0.6  # of a core, per process: above that the client itself waits
MAX_RATE_LOSS = 0.02
MAX_WRONG_LENGTHS = 0.01  # of all requests
MIN_FOR_P99 = 1000
MERGING = 1.05  # mean tokens per chunk
IGNORED = ": does the server honour ignore_eos?"
# A window without an arrival for this long is no chance.
MANY_GAPS, EMPTY_SHARE = 10, 0.05

# A burst, a slow start and chance do not count as growth.
NUM_BINS = 10
MIN_REQUESTS = 50
MIN_T = 3.0  # about one run in a hundred without growth has a slope of so many errors
MIN_FACTOR = 1.5  # last third of the arrivals over the first


class Severity(StrEnum):
    INVALID = "invalid"  # the figures are not the server's
    WARNING = "warning"  # they are, but a reader must know this


class Problem(msgspec.Struct, frozen=True):
    severity: Severity
    text: str  # one line

    @property
    def is_invalid(self) -> bool:
        return self.severity is Severity.INVALID


class Growth(msgspec.Struct, frozen=True):
    """Means of the first and the last third of the arrivals."""

    first_ttft_ms: float
    last_ttft_ms: float
    first_in_flight: float
    last_in_flight: float

    @property
    def line(self) -> str:
        return (
            "the load outran the server: over the run TTFT grew from "
            f"{self.first_ttft_ms:.0f} to {self.last_ttft_ms:.0f} ms and requests in flight from "
            f"{self.first_in_flight:.1f} to {self.last_in_flight:.1f}, so a longer run would "
            "measure worse figures"
        )


@dataclass(slots=True, frozen=True)
class _Run:
    """A load under judgement; `records` are those that count in its window, if it has one."""

    result: LoadResult
    summary: Summary
    planned: Sequence[Planned]
    max_concurrency: int | None
    window: Window | None
    records: Sequence[Record]


def is_valid(problems: Sequence[Problem]) -> bool:
    return not any(problem.is_invalid for problem in problems)


def check(
    result: LoadResult,
    summary: Summary,
    planned: Sequence[Planned],
    *,
    max_concurrency: int | None = None,
) -> list[Problem]:
    """Return everything that is wrong with a run, what makes it invalid first.

    `max_concurrency` is that of an open loop whose requests wait in the client for a free slot, so
    that their lag is meant. Raises `BatonError` if no request at all was answered.
    """
    # Without a window the summary's reaches over all requests, the last arrival included.
    is_whole = len(counted(result.records, None)) == summary.num_requests
    window = None if is_whole else summary.window
    records = counted(result.records, window)
    _refuse_if_all_failed(records)
    if max_concurrency is not None and not _may_have_waited(result, max_concurrency):
        max_concurrency = None
    run = _Run(result, summary, planned, max_concurrency, window, records)
    found = [problem for find in _CHECKS for problem in find(run)]
    return sorted(found, key=lambda problem: not problem.is_invalid)


def lag_gate_ms(summary: Summary) -> float:
    """Return the largest lag p99 with which a run is valid."""
    ttft_ms = summary.ttft.p50 if summary.ttft else 0.0
    return max(MIN_LAG_GATE_MS, LAG_GATE_OF_TTFT * ttft_ms)


def find_growth(records: Sequence[Record], window: Window | None) -> Growth | None:
    """Find a queue that grew throughout; None also where too few requests arrived to say so.

    Both figures have to grow: TTFT alone rises with longer prompts, requests in flight with longer
    answers.
    """
    arrived = counted(records, window)
    if len(arrived) < MIN_REQUESTS:
        return None
    moments = np.array([record.intended_s for record in arrived])
    ttfts_ms = np.array([_ttft_ms(record) for record in arrived])
    # Requests that arrived before the window may still be in flight within it.
    every = counted(records, None)
    begun = np.searchsorted(np.sort([one.intended_s for one in every]), moments, "right")
    ended = np.searchsorted(np.sort([one.end_s for one in every]), moments, "right")
    waits = [part[~np.isnan(part)] for part in np.array_split(ttfts_ms, NUM_BINS)]
    if not all(len(part) for part in waits):
        return None
    wait_ms = [float(part.mean()) for part in waits]
    in_flight = [float(part.mean()) for part in np.array_split(begun - ended, NUM_BINS)]
    if not (_grows(wait_ms) and _grows(in_flight)):
        return None
    return Growth(*_ends(wait_ms), *_ends(in_flight))


def slope_in_errors(ys: Sequence[float]) -> float:
    """Return the slope of the least-squares line through points at equal distances, three at least.

    It is measured in its own standard errors, as Student's t, and infinite if the line is exact.
    """
    y = np.asarray(ys, np.float64)
    spread = np.arange(len(y)) - (len(y) - 1) / 2
    square = float(spread @ spread)
    slope = float(spread @ (y - y.mean())) / square
    left = y - y.mean() - slope * spread
    error = math.sqrt(float(left @ left) / (len(y) - 2) / square)
    if error == 0:
        return math.copysign(math.inf, slope) if slope else 0.0
    return slope / error


def _grows(means: Sequence[float]) -> bool:
    first, last = _ends(means)
    return slope_in_errors(means) > MIN_T and last > MIN_FACTOR * first


def _ends(means: Sequence[float]) -> tuple[float, float]:
    third = len(means) // 3
    return float(np.mean(means[:third])), float(np.mean(means[-third:]))


def _ttft_ms(record: Record) -> float:
    ttft_ms = measure(record).ttft_ms if record.outcome is Outcome.ANSWERED else None
    return ttft_ms or math.nan


def _may_have_waited(result: LoadResult, max_concurrency: int) -> bool:
    """Whether the slots of some client process, each of which has its share, can have been full."""
    steps = [(record.sent_s, 1) for record in result.records]
    steps += [(record.end_s, -1) for record in result.records]
    in_flight = most = 0
    for _, step in sorted(steps):
        in_flight += step
        most = max(most, in_flight)
    return most >= max_concurrency // max(1, len(result.clients))


def _refuse_if_all_failed(records: Sequence[Record]) -> None:
    if any(record.outcome is Outcome.ANSWERED for record in records):
        return
    first = f"; the first: {records[0].detail}" if records and records[0].detail else ""
    text = f"all {len(records):,} requests failed: {_counts(records)}{first}"
    if records and all(record.outcome is Outcome.WRONG_LENGTH for record in records):
        text += IGNORED
    raise BatonError(text, code="all_failed")


def _counts(failed: Sequence[Record]) -> str:
    counts = Counter(record.outcome.value for record in failed)
    shown = ", ".join(f"{number:,} {outcome}" for outcome, number in sorted(counts.items()))
    return shown.replace("_", " ")


def _missing(run: _Run) -> Iterator[Problem]:
    ended = {record.index for record in run.result.records}
    asked = [one for one in run.planned if not one.warm_up]
    if missing := sum(one.index not in ended for one in asked):
        yield _invalid(
            f"{missing} of {len(asked)} planned requests have no record: the load was cut short"
        )


def _lag(run: _Run) -> Iterator[Problem]:
    gate_ms, lag_ms = lag_gate_ms(run.summary), run.summary.lag.p99
    is_closed = all(one.at_s is None for one in run.planned if not one.warm_up)
    if is_closed or run.max_concurrency is not None:
        worst_s = max((client.max_loop_lag_s for client in run.result.clients), default=0.0)
        why = f"requests wait for one of {run.max_concurrency} slots"
        if is_closed:
            why = "in a closed loop nothing is sent late"
        if 1e3 * worst_s > gate_ms:
            yield _warning(
                f"{why}, so lag cannot judge the client; its event loop was late by up to "
                f"{1e3 * worst_s:.1f} ms"
            )
    elif lag_ms > gate_ms:
        yield _invalid(
            f"the client sent late: lag p99 is {lag_ms:.1f} ms, over {gate_ms:.1f} ms "
            "(max(5 ms, 1 % of TTFT p50)); use more --processes or a machine of its own"
        )


def _cpu(run: _Run) -> Iterator[Problem]:
    clients = run.result.clients
    # A load that ends with a long wait is idle on average, and may have been busy all the same.
    used = [
        max(client.cpu_s / client.wall_s, client.busiest_cpu)
        for client in clients
        if client.wall_s > 0
    ]
    if over := [share for share in used if share > MAX_CLIENT_CPU]:
        yield _invalid(
            f"{len(over)} of {len(clients)} client processes used up to {max(over):.0%} of a core, "
            f"over {MAX_CLIENT_CPU:.0%}: they measured their own queue; use more --processes"
        )


def _rate(run: _Run) -> Iterator[Problem]:
    if run.max_concurrency is not None:
        return
    due = {one.index: one.at_s for one in run.planned if one.at_s is not None and not one.warm_up}
    sent = sorted(record.sent_s for record in run.result.records if record.index in due)
    wanted = sorted(due.values())
    if len(sent) < 2 or len(sent) < len(wanted) or wanted[-1] <= wanted[0]:
        return
    spread_s = sent[-1] - sent[0]
    ratio = (wanted[-1] - wanted[0]) / spread_s if spread_s > 0 else 1.0
    if ratio < 1 - MAX_RATE_LOSS:
        rate = (len(sent) - 1) / spread_s
        of = f"{_rounded(rate)} of {_rounded(rate / ratio)} /s"
        yield _invalid(f"the client could not reach the rate: it sent {of}; use more --processes")


def _rounded(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"


def _lengths(run: _Run) -> Iterator[Problem]:
    wrong = [record for record in run.records if _has_wrong_length(record)]
    if wrong:
        first = wrong[0]
        text = (
            f"{len(wrong)} of {len(run.records)} answers have another length than was asked for "
            f"(the first: {first.num_tokens} tokens for {first.forced_tokens}){IGNORED}"
        )
        is_many = len(wrong) / len(run.records) > MAX_WRONG_LENGTHS
        yield _invalid(text) if is_many else _warning(text)


def _has_wrong_length(record: Record) -> bool:
    if record.outcome is Outcome.WRONG_LENGTH:
        # A turn after one of a wrong length is not sent, so it has none of its own.
        return not record.detail.startswith(NOT_SENT)
    is_answered = record.outcome is Outcome.ANSWERED
    return is_answered and record.forced_tokens not in (0, record.num_tokens)


def _prompts(run: _Run) -> Iterator[Problem]:
    # Later turns are left out: they are sent longer than they were planned.
    asked = {one.index: len(one.prompt_ids) for one in run.planned if not one.turn}
    cut = [
        (record.prompt_tokens, asked[record.index])
        for record in run.records
        if record.prompt_tokens is not None and record.prompt_tokens < asked.get(record.index, 0)
    ]
    if cut:
        yield _warning(
            f"{len(cut)} of {len(run.records)} prompts were shorter for the server (the first: "
            f"{cut[0][0]} tokens of {cut[0][1]}): does it cut what is too long?"
        )


def _empty_end(run: _Run) -> Iterator[Problem]:
    records, window = run.records, run.summary.window
    if window.end_s == max(record.end_s for record in records):
        return  # the load has no window of its own
    last_s = records[-1].intended_s
    gap_s = (last_s - records[0].intended_s) / max(1, len(records) - 1)
    empty_s = window.end_s - last_s
    if empty_s > max(MANY_GAPS * gap_s, EMPTY_SHARE * window.duration_s):
        yield _warning(
            f"nothing arrived in the last {empty_s:.1f} s of the window, so its rates are too low: "
            "it should end with the load"
        )


def _sockets(run: _Run) -> Iterator[Problem]:
    if without := [one for one in run.records if one.outcome is Outcome.NO_SOCKET]:
        yield _invalid(
            f"the client's machine had no socket for {len(without)} of {len(run.records)} requests "
            f"({without[0].detail}): raise its limit of open files (ulimit -n), or ask for less at "
            "once"
        )


def _failures(run: _Run) -> Iterator[Problem]:
    if failed := [one for one in run.records if one.outcome is not Outcome.ANSWERED]:
        detail = next((f"; for one: {one.detail}" for one in failed if one.detail), "")
        counts = _counts(failed)
        yield _warning(f"{len(failed)} of {len(run.records)} requests failed: {counts}{detail}")


def _warm_up(run: _Run) -> Iterator[Problem]:
    start_s = run.summary.window.start_s
    if late := sum(one.warm_up and one.end_s > start_s for one in run.result.records):
        yield _warning(f"{late} warm-up requests were still running when the measured ones began")


def _merging(run: _Run) -> Iterator[Problem]:
    merged = run.summary.tokens_per_chunk
    if merged is not None and merged > MERGING:
        yield _warning(
            f"tokens arrive {merged:.2f} to a chunk on average: itl spreads the gaps between "
            "chunks, chunk_gap and gap_max do not"
        )


def _growth(run: _Run) -> Iterator[Problem]:
    if growth := find_growth(run.result.records, run.window):
        yield _warning(growth.line)


def _samples(run: _Run) -> Iterator[Problem]:
    count = run.summary.ttft.count if run.summary.ttft else 0
    if count < MIN_FOR_P99:
        what = "p99 is the largest sample" if count < 100 else "p99 rests on few samples"
        yield _warning(f"{count} answered requests: {what}, {MIN_FOR_P99} would make it firm")


def _invalid(text: str) -> Problem:
    return Problem(Severity.INVALID, text)


def _warning(text: str) -> Problem:
    return Problem(Severity.WARNING, text)


_CHECKS = (
    _missing,
    _lag,
    _cpu,
    _rate,
    _lengths,
    _prompts,
    _empty_end,
    _sockets,
    _failures,
    _warm_up,
    _merging,
    _growth,
    _samples,
)
