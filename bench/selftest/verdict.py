"""Hold a load to what the server wrote: every percentile, every fault, every token.

The truth follows the printed definitions by the plainest means and takes nothing from the client's
parser or from the way in which `metrics` computes. Pure.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from baton.bench.figures.metrics import summarise
from baton.bench.records import LoadResult, Outcome, Planned, Record
from baton.bench.selftest.answers import answer_ids
from baton.bench.selftest.cases import FIRST_NUMBER, Case, Mix
from baton.bench.selftest.scripted_server import Answer

PERCENTILES = (50, 90, 99)


class Figure(msgspec.Struct, frozen=True):
    """One percentile, in milliseconds."""

    name: str
    written: float  # by the stamps of the server
    measured: float


class Played(msgspec.Struct, frozen=True):
    """A load that ran; case, answer and record of one request share its number."""

    name: str
    mix: Mix
    cases: Sequence[Case]
    planned: Sequence[Planned]
    answers: Sequence[Answer]
    result: LoadResult
    start_s: float  # the client's start of the schedule on the monotonic clock

    def records(self) -> dict[int, Record]:
        return {one.index: one for one in self.result.records if not one.warm_up}

    def good(self) -> list[tuple[Answer, float]]:
        """Return the answers that must be counted, and when they were due."""
        answers = {(one.number or 0) - FIRST_NUMBER: one for one in self.answers}
        return [
            (answers[one.index], self.start_s + (one.at_s or 0.0))
            for one in self.planned
            if not one.warm_up and self.cases[one.index].outcome is Outcome.ANSWERED
            # A client that leaves too early may have seen no token.
            if one.index in answers and any(write.num_tokens for write in answers[one.index].writes)
        ]


class Verdict(msgspec.Struct, frozen=True):
    """The findings about one load.

    `wrong` has a line per mistake; a mistake is one on any machine. A busy machine can cause
    `doubts`, each a reason to trust no figure, and figures off the truth.
    """

    name: str
    num_requests: int
    tolerance_ms: float
    figures: list[Figure]
    wrong: list[str]
    doubts: list[str]

    @property
    def farthest_ms(self) -> float:
        return max((abs(one.measured - one.written) for one in self.figures), default=0.0)

    @property
    def ok(self) -> bool:
        return not (self.doubts or self.wrong) and self.farthest_ms <= self.tolerance_ms


def judge(played: Played, tolerance_ms: float) -> Verdict:
    """Hold a load to the truth; `tolerance_ms` is the largest error of a percentile."""
    figures, doubts = _figures(played)
    wrong = _differences(played)
    return Verdict(played.name, len(played.cases), tolerance_ms, figures, wrong, doubts)


def truth_of(answer: Answer, due_s: float) -> dict[str, list[float]]:
    """Return the samples of each metric, in ms, of an answer with a token, due at `due_s`."""
    chunks = [(one.at_s, one.num_tokens) for one in answer.writes if one.num_tokens]
    gaps, itl = [], []
    for (before_s, _), (after_s, num_tokens) in itertools.pairwise(chunks):
        gaps.append(1e3 * (after_s - before_s))
        itl += [gaps[-1] / num_tokens] * num_tokens
    return {
        "ttft": [1e3 * (chunks[0][0] - due_s)],
        "e2e": [1e3 * (answer.writes[-1].at_s - due_s)],
        "itl": itl,
        "tpot": [sum(gaps) / len(itl)] if itl else [],
        "gap_max": [max(gaps)] if gaps else [],
    }


def percentile_of(values: Sequence[float], percent: int) -> float:
    """Return the nearest rank: the smallest value that `percent` of the values do not exceed."""
    return sorted(values)[math.ceil(percent * len(values) / 100) - 1]


def _figures(played: Played) -> tuple[list[Figure], list[str]]:
    """Return every percentile, and doubts about metrics with a wrong number of samples."""
    summary = summarise(played.result)
    truths = [truth_of(answer, due_s) for answer, due_s in played.good()]
    figures, doubts = [], []
    for metric in truths[0] if truths else ():
        values = [one for truth in truths for one in truth[metric]]
        found = getattr(summary, metric)
        if (num_seen := found.count if found else 0) != len(values):
            doubts.append(f"{metric} has {num_seen} samples, not {len(values)}")
        for percent in PERCENTILES if values and found else ():
            written, measured = percentile_of(values, percent), getattr(found, f"p{percent}")
            figures.append(Figure(f"{metric} p{percent}", written, measured))
    return figures, doubts


def _differences(played: Played) -> list[str]:
    """Return how the requests that came and the records differ from the scripts."""
    records, lines = played.records(), []
    asked = Counter(one.number for one in played.answers)
    for index, case in enumerate(played.cases):
        if (times := asked[FIRST_NUMBER + index]) != 1:  # a retry would hide a failure
            lines.append(f"request {index} reached the server {times} times")
        if (record := records.get(index)) is None:
            lines.append(f"request {index}: no record")
            continue
        expected: dict[str, object] = {"outcome": case.outcome}
        if case.outcome is Outcome.ANSWERED:
            num_tokens = case.script.num_tokens
            expected |= {"num_tokens": num_tokens, "output_tokens": num_tokens}
            expected["cached_tokens"] = case.script.cached_tokens
            if played.mix.counts_ids:
                expected["token_ids"] = answer_ids(FIRST_NUMBER + index, num_tokens)
        for name, truth in expected.items():
            if (seen := getattr(record, name)) != truth:
                what = f"request {index} ({case.name}): {name} is {seen}, not {truth}"
                lines.append(f"{what}; {record.detail}")
    return lines
