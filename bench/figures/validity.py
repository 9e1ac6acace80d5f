"""Whether a load measured the server or something else, and what a reader must know about it.

`run_once` asks after every load; reports print every problem, and an invalid run says so before
any figure of it. Nothing here may change a figure.
"""

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from baton.bench.client.turns import NOT_SENT
from baton.bench.figures.metrics import Summary, Window, counted
from baton.bench.figures.saturation import find_growth
from baton.bench.records import ClientProcess, LoadResult, Outcome, Planned, Record
from baton.protocol.errors import BatonError

MIN_LAG_GATE_MS = 5.0
LAG_GATE_OF_TTFT = 0.01
MAX_CLIENT_CPU = 0.6  # of a core, per process: above that the client itself waits
MAX_RATE_LOSS = 0.02
MAX_WRONG_LENGTHS = 0.01  # of all requests
MIN_FOR_P99 = 1000
MERGING = 1.05  # mean tokens per chunk
IGNORED = ": does the server honour ignore_eos?"
# So much of a window without an arrival is no chance.
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


def is_valid(problems: Sequence[Problem]) -> bool:
    return not any(problem.is_invalid for problem in problems)


def check(
    result: LoadResult,
    summary: Summary,
    planned: Sequence[Planned],
    *,
    max_concurrency: int | None = None,
) -> list[Problem]:
    """Everything that is wrong with a run, what makes it invalid first.

    `max_concurrency`: of an open loop whose requests wait in the client for a free slot, so that
    their lag is meant. Raises `BatonError` if no request at all was answered.
    """
    window = _window_of(result, summary)
    records = counted(result.records, window)
    _refuse_if_all_failed(records)
    if max_concurrency is not None and not _may_have_waited(result, max_concurrency):
        max_concurrency = None
    found = [
        *_missing(result, planned),
        *_lag(result, summary, planned, max_concurrency),
        *_cpu(result.clients),
        *(_rate(result, planned) if max_concurrency is None else []),
        *_lengths(records),
        *_prompts(records, planned),
        *_empty_end(records, summary.window),
        *_sockets(records),
        *_failures(records),
        *_warm_up(result, summary),
        *_merging(summary),
        *_growth(result, window),
        *_samples(summary),
    ]
    return sorted(found, key=lambda problem: not problem.is_invalid)


def _may_have_waited(result: LoadResult, max_concurrency: int) -> bool:
    """Whether the slots of some client process, each of which has its share, can have been full."""
    steps = [(record.sent_s, 1) for record in result.records]
    steps += [(record.end_s, -1) for record in result.records]
    in_flight = most = 0
    for _, step in sorted(steps):
        in_flight += step
        most = max(most, in_flight)
    return most >= max_concurrency // max(1, len(result.clients))


def lag_gate_ms(summary: Summary) -> float:
    """The largest lag p99 with which a run is valid."""
    ttft_ms = summary.ttft.p50 if summary.ttft else 0.0
    return max(MIN_LAG_GATE_MS, LAG_GATE_OF_TTFT * ttft_ms)


def _window_of(result: LoadResult, summary: Summary) -> Window | None:
    # Without a window the summary's reaches over all requests, the last arrival included.
    whole = counted(result.records, None)
    return None if len(whole) == summary.num_requests else summary.window


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


def _missing(result: LoadResult, planned: Sequence[Planned]) -> list[Problem]:
    ended = {record.index for record in result.records}
    asked = [one for one in planned if not one.warm_up]
    missing = sum(one.index not in ended for one in asked)
    if not missing:
        return []
    text = f"{missing} of {len(asked)} planned requests have no record: the load was cut short"
    return [_invalid(text)]


def _lag(
    result: LoadResult,
    summary: Summary,
    planned: Sequence[Planned],
    max_concurrency: int | None,
) -> list[Problem]:
    gate_ms = lag_gate_ms(summary)
    is_closed = all(one.at_s is None for one in planned if not one.warm_up)
    if is_closed or max_concurrency is not None:
        worst_ms = 1e3 * max((client.max_loop_lag_s for client in result.clients), default=0.0)
        if worst_ms <= gate_ms:
            return []
        why = (
            "in a closed loop nothing is sent late"
            if is_closed
            else f"requests wait for one of {max_concurrency} slots"
        )
        text = (
            f"{why}, so lag cannot judge the client; its event loop was late by up to "
            f"{worst_ms:.1f} ms"
        )
        return [_warning(text)]
    if summary.lag.p99 <= gate_ms:
        return []
    text = (
        f"the client sent late: lag p99 is {summary.lag.p99:.1f} ms, over {gate_ms:.1f} ms "
        f"(max(5 ms, 1 % of TTFT p50)); use more --processes or a machine of its own"
    )
    return [_invalid(text)]


def _cpu(clients: Sequence[ClientProcess]) -> list[Problem]:
    # A load that ends with a long wait is idle on average, and may have been busy all the same.
    used = [
        max(client.cpu_s / client.wall_s, client.busiest_cpu)
        for client in clients
        if client.wall_s > 0
    ]
    over = [share for share in used if share > MAX_CLIENT_CPU]
    if not over:
        return []
    text = (
        f"{len(over)} of {len(clients)} client processes used up to {max(over):.0%} of a core, "
        f"over {MAX_CLIENT_CPU:.0%}: they measured their own queue; use more --processes"
    )
    return [_invalid(text)]


def _rate(result: LoadResult, planned: Sequence[Planned]) -> list[Problem]:
    due = {one.index: one.at_s for one in planned if one.at_s is not None and not one.warm_up}
    sent = sorted(record.sent_s for record in result.records if record.index in due)
    wanted = sorted(due.values())
    if len(sent) < 2 or len(sent) < len(wanted) or wanted[-1] <= wanted[0]:
        return []
    spread_s = sent[-1] - sent[0]
    ratio = (wanted[-1] - wanted[0]) / spread_s if spread_s > 0 else 1.0
    if ratio >= 1 - MAX_RATE_LOSS:
        return []
    rate = (len(sent) - 1) / spread_s
    of = f"{_rounded(rate)} of {_rounded(rate / ratio)} /s"
    text = f"the client could not reach the rate: it sent {of}; use more --processes"
    return [_invalid(text)]


def _rounded(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"


def _lengths(records: Sequence[Record]) -> list[Problem]:
    wrong = [
        record
        for record in records
        if (
            record.outcome is Outcome.WRONG_LENGTH
            and not record.detail.startswith(NOT_SENT)  # a turn after one of a wrong length
        )
        or (
            record.outcome is Outcome.ANSWERED
            and record.forced_tokens
            and record.num_tokens != record.forced_tokens
        )
    ]
    if not wrong:
        return []
    first = wrong[0]
    text = (
        f"{len(wrong)} of {len(records)} answers have another length than was asked for (the "
        f"first: {first.num_tokens} tokens for {first.forced_tokens}){IGNORED}"
    )
    share = len(wrong) / len(records)
    return [_invalid(text) if share > MAX_WRONG_LENGTHS else _warning(text)]


def _prompts(records: Sequence[Record], planned: Sequence[Planned]) -> list[Problem]:
    """Later turns are longer than what was planned of them."""
    asked = {one.index: len(one.prompt_ids) for one in planned if not one.turn}
    cut = [
        (record.prompt_tokens, asked[record.index])
        for record in records
        if record.prompt_tokens is not None and record.prompt_tokens < asked.get(record.index, 0)
    ]
    if not cut:
        return []
    text = (
        f"{len(cut)} of {len(records)} prompts were shorter for the server (the first: "
        f"{cut[0][0]} tokens of {cut[0][1]}): does it cut what is too long?"
    )
    return [_warning(text)]


def _empty_end(records: Sequence[Record], window: Window) -> list[Problem]:
    if window.end_s == max(record.end_s for record in records):
        return []  # nobody asked for a window
    last_s = records[-1].intended_s
    gap_s = (last_s - records[0].intended_s) / max(1, len(records) - 1)
    empty_s = window.end_s - last_s
    if empty_s <= max(MANY_GAPS * gap_s, EMPTY_SHARE * window.duration_s):
        return []
    text = (
        f"nothing arrived in the last {empty_s:.1f} s of the window, so its rates are too low: "
        "it should end with the load"
    )
    return [_warning(text)]


def _sockets(records: Sequence[Record]) -> list[Problem]:
    without = [record for record in records if record.outcome is Outcome.NO_SOCKET]
    if not without:
        return []
    text = (
        f"the client's machine had no socket for {len(without)} of {len(records)} requests "
        f"({without[0].detail}): raise its limit of open files (ulimit -n), or ask for less at once"
    )
    return [_invalid(text)]


def _failures(records: Sequence[Record]) -> list[Problem]:
    failed = [record for record in records if record.outcome is not Outcome.ANSWERED]
    if not failed:
        return []
    detail = next((f"; for one: {one.detail}" for one in failed if one.detail), "")
    text = f"{len(failed)} of {len(records)} requests failed: {_counts(failed)}{detail}"
    return [_warning(text)]


def _warm_up(result: LoadResult, summary: Summary) -> list[Problem]:
    start_s = summary.window.start_s
    late = [one for one in result.records if one.warm_up and one.end_s > start_s]
    if not late:
        return []
    text = f"{len(late)} warm-up requests were still running when the measured ones began"
    return [_warning(text)]


def _merging(summary: Summary) -> list[Problem]:
    merged = summary.tokens_per_chunk
    if merged is None or merged <= MERGING:
        return []
    text = (
        f"tokens arrive {merged:.2f} to a chunk on average: itl spreads the gaps between chunks, "
        "chunk_gap and gap_max do not"
    )
    return [_warning(text)]


def _growth(result: LoadResult, window: Window | None) -> list[Problem]:
    growth = find_growth(result.records, window)
    return [_warning(growth.line)] if growth else []


def _samples(summary: Summary) -> list[Problem]:
    count = summary.ttft.count if summary.ttft else 0
    if count >= MIN_FOR_P99:
        return []
    what = "p99 is the largest sample" if count < 100 else "p99 rests on few samples"
    return [_warning(f"{count} answered requests: {what}, {MIN_FOR_P99} would make it firm")]


def _invalid(text: str) -> Problem:
    return Problem(Severity.INVALID, text)


def _warning(text: str) -> Problem:
    return Problem(Severity.WARNING, text)
