"""Whether a client saw what the scripted server wrote: every percentile, every fault, every token.

`selftest` brings the records of a load and the server's answers to it. The truth needs nothing of
the client but the start of its schedule, and that is checked: no request arrives before it was
sent, and no token before it was written. Pure.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec

from baton.bench.figures.metrics import Summary, summarise
from baton.bench.records import LoadResult, Outcome, Planned, Record
from baton.bench.selftest.cases import FIRST_NUMBER, Case, Mix
from baton.bench.selftest.scripted_server import Answer
from baton.bench.selftest.truth import METRICS, PERCENTILES, Range, percentile_of, truth_of

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
        """Return how far it is from the middle of what is known."""
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


class Verdict(msgspec.Struct, frozen=True):
    """What is to be said of one load.

    `wrong` has a line per mistake, and a mistake is one on any machine. A busy machine can cause
    `doubts`, each a reason to trust no figure, and figures off the truth.
    """

    name: str
    num_requests: int
    figures: list[Figure]
    counts: list[Count]
    reads: str  # how long after their writes tokens were read: the client's part of deviations
    wrong: list[str]
    doubts: list[str]

    @property
    def is_exact(self) -> bool:
        """Whether every request was counted as it must be."""
        return not self.wrong and all(one.is_exact for one in self.counts)

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

    def good(self) -> list[tuple[Answer, Record, float]]:
        """Return the answers that carried tokens and must be counted, and when they were due."""
        answers, records = self.answer_of(), self.record_of()
        due_s = {one.index: one.at_s or 0.0 for one in self.planned}
        return [
            (answers[index], records[index], self.start_s + due_s[index])
            for index, case in enumerate(self.cases)
            if case.outcome is Outcome.ANSWERED and index in answers and index in records
            # A client that leaves too early may have seen none.
            if any(write.num_tokens for write in answers[index].writes)
        ]

    def answer_of(self) -> dict[int, Answer]:
        return {(one.number or 0) - FIRST_NUMBER: one for one in self.answers}

    def record_of(self) -> dict[int, Record]:
        return {one.index: one for one in self.result.records if not one.warm_up}


def judge(played: Played, tolerance_ms: float) -> Verdict:
    """Hold a load to the truth; `tolerance_ms` is what a percentile may be off it."""
    summary = summarise(played.result)
    figures, doubts = _figures(played, summary, tolerance_ms)
    return Verdict(
        name=played.name,
        num_requests=len(played.cases),
        figures=figures,
        counts=_counts(played),
        reads=f"lag p99 {summary.lag.p99:.2f} ms; {_reads(played, tolerance_ms)}",
        wrong=[*_asked_once(played), *_differences(played, summary)],
        doubts=[*_clock_doubts(played, tolerance_ms), *doubts],
    )


def possible_start(played: Played) -> Range:
    """Return when the schedule can have started, by the server's clock and the client's stamps.

    No request was there before it was sent, and no token before it was written. Over many requests
    the two come close to each other, unless stamps are early or late throughout.
    """
    answers = played.answer_of()
    latest, earliest = float("inf"), float("-inf")
    for index, record in played.record_of().items():
        if (answer := answers.get(index)) is None:
            continue
        latest = min(latest, answer.received_s - record.sent_s)
        first = next((write for write in answer.writes if write.num_tokens), None)
        if first is not None and record.arrivals:
            earliest = max(earliest, first.at_s - record.arrivals[0].at_s)
    return Range(earliest, latest)


def _clock_doubts(played: Played, tolerance_ms: float) -> list[str]:
    start, lines = possible_start(played), []
    if abs(start.distance(played.start_s)) > SLACK_S or 1e3 * start.width > tolerance_ms:
        early, late = (1e3 * (end - played.start_s) for end in (start.low, start.high))
        lines.append(
            f"by its stamps, the client started {early:+.3f} to {late:+.3f} ms from when it says"
        )
    if held := sum(answer.held_writes for answer in played.answers):
        lines.append(f"the server could not write at once, {held} times: its stamps mean nothing")
    return lines


def _reads(played: Played, tolerance_ms: float) -> str:
    late_ms: list[float] = []
    num_merged = 0
    for answer, record, _ in played.good():
        written = [write.at_s for write in answer.writes if write.num_tokens]
        read = [played.start_s + arrival.at_s for arrival in record.arrivals]
        if len(written) == len(read):
            late_ms += [1e3 * (b - a) for a, b in zip(written, read, strict=True)]
        else:
            num_merged += 1
    ranges = [Range(one, one) for one in late_ms or [0.0]]
    p50, p99, most = (percentile_of(ranges, percent).low for percent in (50, 99, 100))
    num_late = sum(one > tolerance_ms for one in late_ms)
    return (
        f"{len(late_ms)} reads p50 {p50:.3f}, p99 {p99:.3f}, max {most:.3f} ms after their writes, "
        f"{num_late} of them late; several writes were read at once in {num_merged} answers"
    )


def _asked_once(played: Played) -> list[str]:
    """Return the requests that did not come once: a client that tries again hides a failure."""
    asked = Counter(one.number for one in played.answers if one.number is not None)
    return [
        f"request {index} reached the server {asked[FIRST_NUMBER + index]} times"
        for index in range(len(played.cases))
        if asked[FIRST_NUMBER + index] != 1
    ]


def _differences(played: Played, summary: Summary) -> list[str]:
    """Return what records, and the count of their outcomes, say otherwise than the scripts."""
    records, counting, lines = played.record_of(), played.mix.counting, []
    for index, case in enumerate(played.cases):
        if (record := records.get(index)) is None:
            lines.append(f"request {index}: no record")
            continue
        for name, truth in case.expected(FIRST_NUMBER + index, counting).items():
            if (seen := getattr(record, name)) != truth:
                what = f"request {index} ({case.name}): {name} is {seen}, not {truth}"
                lines.append(f"{what}; {record.detail}")
    scripted = Counter(case.outcome for case in played.cases)
    for outcome in Outcome:
        if (seen := summary.outcomes.get(outcome, 0)) != scripted[outcome]:
            lines.append(f"{seen} requests were counted as {outcome}, not {scripted[outcome]}")
    return lines


def _figures(
    played: Played, summary: Summary, tolerance_ms: float
) -> tuple[list[Figure], list[str]]:
    """Return every percentile, and the samples of another size: those may be right by chance."""
    truths = [truth_of(answer, due_s) for answer, _, due_s in played.good()]
    figures, doubts = [], []
    for metric in METRICS:
        ranges = [one for truth in truths for one in truth[metric]]
        found = getattr(summary, metric)
        if (num_seen := found.count if found else 0) != len(ranges):
            doubts.append(f"{metric} is of {num_seen} samples, not of {len(ranges)}")
        for percent in PERCENTILES if ranges and found else ():
            truth, client = percentile_of(ranges, percent), getattr(found, f"p{percent}")
            is_close = abs(truth.distance(client)) <= tolerance_ms
            figures.append(Figure(metric, percent, truth, client, is_close))
    return figures, doubts


def _counts(played: Played) -> list[Count]:
    records = played.record_of()
    scripted = Counter((case.name, case.outcome) for case in played.cases)
    counted = Counter(
        (case.name, records[index].outcome)
        for index, case in enumerate(played.cases)
        if index in records
    )
    in_order = sorted(scripted, key=lambda key: (key[1] is not Outcome.ANSWERED, key[1], key[0]))
    return [Count(*key, scripted[key], counted[key]) for key in in_order]
