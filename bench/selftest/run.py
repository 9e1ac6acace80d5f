"""`baton bench selftest`: the client and its metrics against a server whose token times are known.

It plays good answers and every kind of failure, from real client processes over real sockets, and
holds each percentile to the server's writes and each outcome to the script. The truth follows the
printed definitions by the plainest means and takes nothing from the client's parser or from the way
in which `metrics` computes. Run it on an idle machine: a client that must wait for it is late.
"""

import gc
import itertools
import math
import sys
from collections import Counter
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from baton.bench.client.load import Load, run_load
from baton.bench.client.target import Target
from baton.bench.figures.metrics import summarise
from baton.bench.records import LoadResult, Outcome, Planned, Record
from baton.bench.selftest.answers import answer_ids
from baton.bench.selftest.cases import FIRST_NUMBER, Case, Mix, make_cases, plan
from baton.bench.selftest.scripted_server import MODEL, Answer, ScriptedServer, Stage
from baton.bench.settings import SelfTestSettings

PERCENTILES = (50, 90, 99)
MAX_LINES = 20
BUSY = (
    "Every answer was counted correctly, so the machine may have been busy: try again when it is "
    "idle, or with real-time priority (chrt -f 10 baton bench selftest)."
)


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
            # A client that left too early may have seen no token.
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


def selftest(settings: SelfTestSettings) -> int:
    """Play all loads, one after the other; return 0 without a deviation, else 1."""
    verdicts, asked = [], (settings.requests, settings.rate)
    # Each way of counting tokens, and both APIs.
    for mix in (
        Mix(True, *asked, settings.seed, processes=2),
        Mix(False, *asked, settings.seed + 10),
    ):
        name = "completions, tokens counted by their ids" if mix.counts_ids else ""
        name = name or "chat, tokens counted by chunks of text"
        print(f"{name}: {mix.num_good} good answers and the faulty ones", file=sys.stderr)
        verdicts.append(judge(play(name, mix), settings.tolerance_ms))
    show(verdicts, Console(width=100, highlight=False))
    return 0 if all(verdict.ok for verdict in verdicts) else 1


def play(name: str, mix: Mix) -> Played:
    """Run one load, and return its cases, answers and records."""
    cases = make_cases(mix)
    stage = Stage({FIRST_NUMBER + index: case.script for index, case in enumerate(cases)})
    requests, starts = plan(cases, mix), list[float]()
    gc.collect()
    gc.freeze()  # a long garbage collection would stall scripted answers
    with ScriptedServer(stage.play) as server:
        target = Target(
            server.url, MODEL, "completions" if mix.counts_ids else "chat",
            timeout_s=mix.timeout_s, timeline=False, token_ids=mix.counts_ids,
        )  # fmt: skip
        load = Load(target, requests, processes=mix.processes)
        result = run_load(load, on_start=starts.append)
    gc.unfreeze()
    return Played(name, mix, cases, requests, stage.answers, result, *starts)


def show(verdicts: list[Verdict], console: Console) -> None:
    for verdict in verdicts:
        console.print(f"\n{verdict.name}: {verdict.num_requests} requests")
        table = Table("ms", "written", "measured", "off by", "")
        for one in verdict.figures:
            off_ms = one.measured - one.written
            is_ok = "ok" if abs(off_ms) <= verdict.tolerance_ms else "WRONG"
            numbers = (f"{one.written:.3f}", f"{one.measured:.3f}", f"{off_ms:+.3f}")
            table.add_row(one.name, *numbers, is_ok)
        console.print(table)
        lines = [*verdict.doubts, *verdict.wrong]
        for line in lines[:MAX_LINES]:
            console.print(f"  {line}", style="red", markup=False)
        if len(lines) > MAX_LINES:
            console.print(f"  and {len(lines) - MAX_LINES} more")
        if not verdict.wrong and not verdict.ok:
            console.print(f"  {BUSY}")
    num_requests = sum(verdict.num_requests for verdict in verdicts)
    farthest = max(verdict.farthest_ms for verdict in verdicts)
    console.print(
        f"{'ok' if all(one.ok for one in verdicts) else 'DEVIATES'}: {num_requests} requests, "
        f"{sum(len(one.wrong) for one in verdicts)} counted wrong; the farthest percentile is "
        f"{farthest:.3f} ms off the truth (allowed {verdicts[0].tolerance_ms:g})",
        soft_wrap=True,
    )


def judge(played: Played, tolerance_ms: float) -> Verdict:
    """Compare a load with the truth. `tolerance_ms` is the largest error of a percentile."""
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
    """Return how the received requests and the records differ from the scripts."""
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
