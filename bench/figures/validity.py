"""Whether a load measured the server or something else, and what a reader must know about it.

The experiments ask after every load. Reports print every problem, and an invalid run says so before
any figure of it. Nothing here may change a figure.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

import msgspec

from baton.bench.client.turns import NOT_SENT
from baton.bench.figures.growth import find_growth
from baton.bench.figures.metrics import Summary, Window, counted
from baton.bench.records import LoadResult, Outcome, Planned, Record
from baton.protocol.errors import BatonError

MIN_LAG_GATE_MS = 5.0
LAG_GATE_OF_TTFT = 0.01
MAX_CLIENT_CPU = 0.6  # of a core, per process: above that the client itself waits
MAX_RATE_LOSS = 0.02
MAX_WRONG_LENGTHS = 0.01  # of all requests
MERGING = 1.05  # mean tokens per chunk
IGNORED = ": does the server honour ignore_eos?"
# A window without an arrival for this long is no chance.
MANY_GAPS, EMPTY_SHARE = 10, 0.05


class Severity(StrEnum):
    INVALID = "invalid"  # the figures are not the server's
    WARNING = "warning"  # they are, but a reader must know this


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
    judged = _Judged(result, summary, planned, max_concurrency, window, records)
    found = [
        *judged.missing(), *judged.lag(), *judged.cpu(), *judged.rate(), *judged.lengths(),
        *judged.prompts(), *judged.empty_end(), *judged.sockets(), *judged.failures(),
        *judged.others(),
    ]  # fmt: skip
    return sorted(found, key=lambda problem: not problem.is_invalid)


def lag_gate_ms(summary: Summary) -> float:
    """Return the largest lag p99 with which a run is valid."""
    ttft_ms = summary.ttft.p50 if summary.ttft else 0.0
    return max(MIN_LAG_GATE_MS, LAG_GATE_OF_TTFT * ttft_ms)


@dataclass(slots=True, frozen=True)
class _Judged:
    """A load under judgement; `records` are those that count in its window, if it has one."""

    result: LoadResult
    summary: Summary
    planned: Sequence[Planned]
    max_concurrency: int | None
    window: Window | None
    records: Sequence[Record]

    def missing(self) -> Iterator[Problem]:
        ended = {record.index for record in self.result.records}
        asked = [one for one in self.planned if not one.warm_up]
        if missing := sum(one.index not in ended for one in asked):
            yield invalid(
                f"{missing} of {len(asked)} planned requests have no record: the load was cut short"
            )

    def lag(self) -> Iterator[Problem]:
        gate_ms, lag_ms = lag_gate_ms(self.summary), self.summary.lag.p99
        is_closed = all(one.at_s is None for one in self.planned if not one.warm_up)
        if is_closed or self.max_concurrency is not None:
            worst_s = max((client.max_loop_lag_s for client in self.result.clients), default=0.0)
            why = f"requests wait for one of {self.max_concurrency} slots"
            if is_closed:
                why = "in a closed loop nothing is sent late"
            if 1e3 * worst_s > gate_ms:
                yield warning(
                    f"{why}, so lag cannot judge the client; its event loop was late by up to "
                    f"{1e3 * worst_s:.1f} ms"
                )
        elif lag_ms > gate_ms:
            yield invalid(
                f"the client sent late: lag p99 is {lag_ms:.1f} ms, over {gate_ms:.1f} ms "
                "(max(5 ms, 1 % of TTFT p50)); use more --processes or a machine of its own"
            )

    def cpu(self) -> Iterator[Problem]:
        clients = [client for client in self.result.clients if client.wall_s > 0]
        # A load that ends with a long wait is idle on average, and may have been busy all the same.
        used = [max(client.cpu_s / client.wall_s, client.busiest_cpu) for client in clients]
        if over := [share for share in used if share > MAX_CLIENT_CPU]:
            yield invalid(
                f"{len(over)} of {len(self.result.clients)} client processes used up to "
                f"{max(over):.0%} of a core, over {MAX_CLIENT_CPU:.0%}: they measured their own "
                "queue; use more --processes"
            )

    def rate(self) -> Iterator[Problem]:
        arrivals = [one for one in self.planned if not one.warm_up]
        due = {one.index: one.at_s for one in arrivals if one.at_s is not None}
        sent = sorted(one.sent_s for one in self.result.records if one.index in due)
        wanted = sorted(due.values())
        if self.max_concurrency is not None or len(sent) < max(2, len(wanted)):
            return
        wanted_s, spread_s = wanted[-1] - wanted[0], sent[-1] - sent[0]
        if 0 < wanted_s < (1 - MAX_RATE_LOSS) * spread_s:
            done, asked = ((len(sent) - 1) / over_s for over_s in (spread_s, wanted_s))
            of = f"{_rounded(done)} of {_rounded(asked)} /s"
            yield invalid(
                f"the client could not reach the rate: it sent {of}; use more --processes"
            )

    def lengths(self) -> Iterator[Problem]:
        wrong = [record for record in self.records if _has_wrong_length(record)]
        if wrong:
            text = (
                f"{len(wrong)} of {len(self.records)} answers have another length than was asked "
                f"for (the first: {wrong[0].num_tokens} tokens for {wrong[0].forced_tokens})"
                f"{IGNORED}"
            )
            is_many = len(wrong) / len(self.records) > MAX_WRONG_LENGTHS
            yield invalid(text) if is_many else warning(text)

    def prompts(self) -> Iterator[Problem]:
        # Later turns are left out: they are sent longer than they were planned.
        asked = {one.index: len(one.prompt_ids) for one in self.planned if not one.turn}
        cut = [
            (record.prompt_tokens, asked[record.index])
            for record in self.records
            if record.prompt_tokens is not None
            and record.prompt_tokens < asked.get(record.index, 0)
        ]
        if cut:
            yield warning(
                f"{len(cut)} of {len(self.records)} prompts were shorter for the server (the "
                f"first: {cut[0][0]} tokens of {cut[0][1]}): does it cut what is too long?"
            )

    def empty_end(self) -> Iterator[Problem]:
        records, window = self.records, self.summary.window
        if window.end_s == max(record.end_s for record in records):
            return  # the load has no window of its own
        last_s = records[-1].intended_s
        gap_s = (last_s - records[0].intended_s) / max(1, len(records) - 1)
        empty_s = window.end_s - last_s
        if empty_s > max(MANY_GAPS * gap_s, EMPTY_SHARE * window.duration_s):
            yield warning(
                f"nothing arrived in the last {empty_s:.1f} s of the window, so its rates are too "
                "low: it should end with the load"
            )

    def sockets(self) -> Iterator[Problem]:
        if without := [one for one in self.records if one.outcome is Outcome.NO_SOCKET]:
            yield invalid(
                f"the client's machine had no socket for {len(without)} of {len(self.records)} "
                f"requests ({without[0].detail}): raise its limit of open files (ulimit -n), or "
                "ask for less at once"
            )

    def failures(self) -> Iterator[Problem]:
        if failed := [one for one in self.records if one.outcome is not Outcome.ANSWERED]:
            detail = next((f"; for one: {one.detail}" for one in failed if one.detail), "")
            counts = f"{len(failed)} of {len(self.records)} requests failed: {_counts(failed)}"
            yield warning(f"{counts}{detail}")

    def others(self) -> Iterator[Problem]:
        start_s, merged = self.summary.window.start_s, self.summary.tokens_per_chunk
        if late := sum(one.warm_up and one.end_s > start_s for one in self.result.records):
            yield warning(
                f"{late} warm-up requests were still running when the measured ones began"
            )
        if merged is not None and merged > MERGING:
            yield warning(
                f"tokens arrive {merged:.2f} to a chunk on average: itl spreads the gaps between "
                "chunks, chunk_gap and gap_max do not"
            )
        if growth := find_growth(self.result.records, self.window):
            yield warning(growth.line)


def _may_have_waited(result: LoadResult, max_concurrency: int) -> bool:
    """Whether the slots of some client process, each of which has its share, can have been full."""
    steps = [(record.sent_s, 1) for record in result.records]
    steps += [(record.end_s, -1) for record in result.records]
    in_flight = accumulate(step for _, step in sorted(steps))
    return max(in_flight, default=0) >= max_concurrency // max(1, len(result.clients))


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


def _rounded(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"


def _has_wrong_length(record: Record) -> bool:
    if record.outcome is Outcome.WRONG_LENGTH:
        # A turn after one of a wrong length is not sent, so it has none of its own.
        return not record.detail.startswith(NOT_SENT)
    is_answered = record.outcome is Outcome.ANSWERED
    return is_answered and record.forced_tokens not in (0, record.num_tokens)
