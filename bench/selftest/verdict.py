"""Whether a client saw what the scripted server wrote: every percentile, every fault, every token.

`selftest` brings the records of a load and the server's answers to it. The truth needs nothing of
the client but the start of its schedule, and that is checked: no request arrives before it was
sent, and no token before it was written. Pure.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec

from baton.bench.figures.metrics import Distribution, summarise
from baton.bench.records import LoadResult, Outcome, Planned, Record
from baton.bench.selftest.cases import FIRST_NUMBER, Case, Counting, Mix
from baton.bench.selftest.scripts import Answer, answer_ids
from baton.bench.selftest.truth import METRICS, PERCENTILES, Range, Truth, percentile_of, truth_of

SLACK_S = 1e-6  # of differences between clock readings that are rounded


class Figure(msgspec.Struct, frozen=True):
    """One percentile, in milliseconds."""

    metric: str
    percent: int
    truth: Range
    client: float
    is_close: bool

    @property
    def deviation(self) -> float:
        """From the middle of what is known."""
        return self.client - self.truth.middle


class Count(msgspec.Struct, frozen=True):
    """One kind of answer: how often it was scripted, and how often it was counted as it must be."""

    name: str
    counted_as: str
    num_scripted: int
    num_counted: int

    @property
    def is_exact(self) -> bool:
        return self.num_scripted == self.num_counted


class Reads(msgspec.Struct, frozen=True):
    """How long after their writes tokens were read: the client's part of all deviations."""

    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    num_late: int  # beyond the tolerance
    num_merged: int  # answers of which several writes were read at once; not among the others


class Verdict(msgspec.Struct, frozen=True):
    """Of one load. `wrong` has a line per request that is, `doubts` per reason to trust no figure.

    What is wrong is so on any machine; doubts, and figures off the truth, a busy one can cause.
    """

    name: str
    num_requests: int
    figures: list[Figure]
    counts: list[Count]
    outcomes: list[Count]  # over all kinds: nothing may be counted that was not scripted
    start_width_ms: float  # of what the client's stamps say about its start
    lag_p99_ms: float
    reads: Reads
    wrong: list[str]
    doubts: list[str]

    @property
    def is_exact(self) -> bool:
        """Whether every request was counted as it must be."""
        return not self.wrong and all(one.is_exact for one in (*self.counts, *self.outcomes))

    @property
    def is_close(self) -> bool:
        """Whether every percentile is where it must be."""
        return not self.doubts and all(figure.is_close for figure in self.figures)

    @property
    def ok(self) -> bool:
        return self.is_exact and self.is_close


class Played(msgspec.Struct, frozen=True):
    """A load that ran: case, answer and record `i` belong together by their number."""

    name: str
    mix: Mix
    cases: Sequence[Case]
    planned: Sequence[Planned]
    answers: Sequence[Answer]
    result: LoadResult
    start_s: float  # of the schedule, as the client says, on the monotonic clock

    def good(self) -> list[tuple[int, float]]:
        """The requests that must be answered, and when they are due."""
        due_s = {one.index: one.at_s or 0.0 for one in self.planned}
        return [
            (index, due_s[index])
            for index, case in enumerate(self.cases)
            if case.outcome is Outcome.ANSWERED
        ]


def judge(played: Played, tolerance_ms: float) -> Verdict:
    """Everything at once; `tolerance_ms` is what a percentile may be off the truth."""
    records = {one.index: one for one in played.result.records if not one.warm_up}
    wrong = [*_asked_once(played), *_crowding(played)]
    wrong += [f"request {i}: no record" for i in range(len(played.cases)) if i not in records]
    answers = {(one.number or 0) - FIRST_NUMBER: one for one in played.answers}
    for index, case in enumerate(played.cases):
        if index in records and index in answers:
            wrong += _differences(index, case, answers[index], records[index], played.mix.counting)
    summary = summarise(played.result)
    truths = [
        truth_of(answers[index], played.start_s + planned_s)
        for index, planned_s in played.good()
        if index in records and _has_tokens(answers.get(index))
    ]
    seen = {name: getattr(summary, name) for name in METRICS}
    start = possible_start(answers, records)
    doubts = [*_clock_doubts(start, played, tolerance_ms), *_sample_sizes(truths, seen)]
    return Verdict(
        name=played.name,
        num_requests=len(played.cases),
        figures=_figures(truths, seen, tolerance_ms),
        counts=_counts(played.cases, records),
        outcomes=_outcomes(played.cases, summary.outcomes),
        start_width_ms=1e3 * start.width,
        lag_p99_ms=summary.lag.p99,
        reads=_reads(played, answers, records, tolerance_ms),
        wrong=wrong,
        doubts=doubts,
    )


def _has_tokens(answer: Answer | None) -> bool:
    """A client that leaves too early may have seen none."""
    return answer is not None and any(write.num_tokens for write in answer.writes)


def possible_start(answers: dict[int, Answer], records: dict[int, Record]) -> Range:
    """When the schedule can have started, by the server's clock and the client's stamps.

    No request was there before it was sent, and no token before it was written. Over many requests
    the two come close to each other, unless stamps are early or late throughout.
    """
    latest, earliest = float("inf"), float("-inf")
    for index, record in records.items():
        if (answer := answers.get(index)) is None:
            continue
        latest = min(latest, answer.received_s - record.sent_s)
        first = next((write for write in answer.writes if write.num_tokens), None)
        if first is not None and record.arrivals:
            earliest = max(earliest, first.at_s - record.arrivals[0].at_s)
    return Range(earliest, latest)


def _clock_doubts(start: Range, played: Played, tolerance_ms: float) -> list[str]:
    lines = []
    if abs(start.distance(played.start_s)) > SLACK_S or 1e3 * start.width > tolerance_ms:
        early, late = (1e3 * (end - played.start_s) for end in (start.low, start.high))
        lines.append(
            f"by its stamps, the client started {early:+.3f} to {late:+.3f} ms from when it says"
        )
    if held := sum(answer.held_writes for answer in played.answers):
        lines.append(f"the server could not write at once, {held} times: its stamps mean nothing")
    return lines


def _reads(
    played: Played, answers: dict[int, Answer], records: dict[int, Record], tolerance_ms: float
) -> Reads:
    late_ms: list[float] = []
    num_merged = 0
    for index, _ in played.good():
        if index not in records or index not in answers:
            continue
        written = [write.at_s for write in answers[index].writes if write.num_tokens]
        read = [played.start_s + arrival.at_s for arrival in records[index].arrivals]
        if len(written) == len(read):
            late_ms += [1e3 * (b - a) for a, b in zip(written, read, strict=True)]
        else:
            num_merged += 1
    ranges = [Range(one, one) for one in late_ms or [0.0]]
    p50, p99, most = (percentile_of(ranges, percent).low for percent in (50, 99, 100))
    num_late = sum(one > tolerance_ms for one in late_ms)
    return Reads(len(late_ms), p50, p99, most, num_late, num_merged)


def _asked_once(played: Played) -> list[str]:
    """A client that tries again hides a failure."""
    asked = Counter(one.number for one in played.answers if one.number is not None)
    numbers = range(FIRST_NUMBER, FIRST_NUMBER + len(played.cases))
    return [
        f"request {number - FIRST_NUMBER} reached the server {asked[number]} times"
        for number in numbers
        if asked[number] != 1
    ]


def _crowding(played: Played) -> list[str]:
    """A request may come only after the last byte of one that it waited for."""
    moments = [(one.received_s, 1) for one in played.answers if one.writes]
    moments += [(one.writes[-1].at_s, -1) for one in played.answers if one.writes]
    num_now = num_most = 0
    for _, change in sorted(moments):
        num_now += change
        num_most = max(num_most, num_now)
    limit = played.mix.concurrency
    if limit is None or num_most <= limit:
        return []
    return [f"{num_most} requests were under way at once, not {limit} at most"]


def _differences(
    index: int, case: Case, answer: Answer, record: Record, counting: Counting
) -> list[str]:
    """What the record of one request says otherwise than the script."""
    script = case.script
    pairs: list[tuple[str, object, object]] = [("outcome", case.outcome, record.outcome)]
    if answer.writes and script.status != 200:
        pairs += [("status", script.status, record.status)]
        pairs += [("retry_after_s", script.retry_after_s, record.retry_after_s)]
    if case.outcome is Outcome.ANSWERED:
        written = sum(sum(write.num_tokens) for write in answer.writes)
        reported = None if script.usage == "none" else script.num_tokens
        cached = None if script.usage == "none" else script.cached_tokens
        pairs += [("tokens", written, record.num_tokens)]
        pairs += [("usage", reported, record.output_tokens)]
        pairs += [("cached tokens", cached, record.cached_tokens)]
        if counting == "token_ids":
            ids = answer_ids(FIRST_NUMBER + index, script.num_tokens)
            pairs += [("token ids", ids, record.token_ids)]
    return [
        f"request {index} ({case.name}): {what} is {seen}, not {truth}; {record.detail}"
        for what, truth, seen in pairs
        if truth != seen
    ]


def _sample_sizes(truths: Sequence[Truth], seen: dict[str, Distribution | None]) -> list[str]:
    """A percentile of another sample may look right by chance."""
    lines = []
    for metric in METRICS:
        num_true = sum(len(truth.of(metric)) for truth in truths)
        found = seen[metric]
        if (num_seen := found.count if found else 0) != num_true:
            lines.append(f"{metric} is of {num_seen} samples, not of {num_true}")
    return lines


def _figures(
    truths: Sequence[Truth], seen: dict[str, Distribution | None], tolerance_ms: float
) -> list[Figure]:
    figures = []
    for metric in METRICS:
        ranges = [one for truth in truths for one in truth.of(metric)]
        found = seen[metric]
        for percent in PERCENTILES if ranges and found is not None else ():
            truth = percentile_of(ranges, percent)
            client = getattr(found, f"p{percent}")
            is_close = abs(truth.distance(client)) <= tolerance_ms
            figures.append(Figure(metric, percent, truth, client, is_close))
    return figures


def _counts(cases: Sequence[Case], records: dict[int, Record]) -> list[Count]:
    scripted = Counter((case.name, case.outcome) for case in cases)
    counted = Counter(
        (case.name, records[index].outcome) for index, case in enumerate(cases) if index in records
    )
    in_order = sorted(scripted, key=lambda key: (key[1] is not Outcome.ANSWERED, key[1], key[0]))
    return [Count(*key, scripted[key], counted[key]) for key in in_order]


def _outcomes(cases: Sequence[Case], seen: dict[str, int]) -> list[Count]:
    scripted = Counter(case.outcome for case in cases)
    return [
        Count("all", outcome, scripted[outcome], seen.get(outcome, 0))
        for outcome in Outcome
        if scripted[outcome] or seen.get(outcome, 0)
    ]
