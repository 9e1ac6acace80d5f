"""Real client processes count what a scripted server wrote: every token, time and failure.

The server's stamps are the truth; no test here depends on how long anything took.
"""

import itertools
import random
from collections import Counter

import pytest

from baton.bench.client.load import Load, run_load
from baton.bench.figures.metrics import summarise
from baton.bench.records import Arrival, LoadResult, Message, Outcome, Planned
from baton.bench.settings import Target
from tests.support.scripted_server import (
    DONE,
    MODEL,
    Chunk,
    Script,
    ScriptedServer,
    Stage,
    answer_ids,
    event,
    paced,
    steady,
    usage,
)

FIRST = 10_000  # the number of the first script
TIMEOUT_S = 8.0  # a silent response lasts this long, and no good one does on the busiest machine
SOME = steady(15.0, 6.0, 6)
FAILED = event({"error": {"message": "scripted failure", "type": "server_error"}})
# A script, the number of tokens that is requested of it, and the outcome.
CASES: list[tuple[Script, int, Outcome]] = [
    (Script(paced(40.0, [8.0, 250.0, 9.0], [1] * 4)), 4, Outcome.ANSWERED),  # a stall
    (Script(paced(30.0, [10.0] * 3, [3] * 4), cached_tokens=7), 12, Outcome.ANSWERED),
    (Script((*[Chunk(30.0)] * 3, *[Chunk(70.0)] * 2)), 5, Outcome.ANSWERED),  # bursts
    (Script((Chunk(40.0, 0), *steady(80.0, 6.0, 5)), end_ms=150.0), 5, Outcome.ANSWERED),
    (Script((Chunk(50.0),)), 1, Outcome.ANSWERED),
    (Script(SOME, b'data: {"ch', "close"), 6, Outcome.TRUNCATED),
    (Script(SOME, b"", "hang"), 6, Outcome.TIMED_OUT),
    (Script(SOME, FAILED + DONE), 6, Outcome.ERROR_IN_STREAM),
    (Script(SOME, b"data: {]\n\n" + DONE), 6, Outcome.MALFORMED),
    (Script(SOME, usage(9) + DONE), 6, Outcome.WRONG_USAGE),
    (Script(SOME), 8, Outcome.WRONG_LENGTH),
]


def play(by_ids: bool) -> tuple[LoadResult, Stage]:
    """Run each case four times, at random moments, over two client processes."""
    dice, at_s, planned = random.Random(1), 0.0, []
    stage = Stage({FIRST + index: case[0] for index, case in enumerate(CASES * 4)})
    for index, (_, num_tokens, _) in enumerate(CASES * 4):
        at_s += dice.expovariate(40.0)
        planned.append(
            Planned(
                index, at_s, num_tokens,
                prompt_ids=(FIRST + index, 1, 2) if by_ids else (),
                messages=() if by_ids else (Message("user", f"play script {FIRST + index}"),),
            )
        )  # fmt: skip
    with ScriptedServer(stage.play) as server:
        target = Target(
            server.url, MODEL, "completions" if by_ids else "chat",
            timeout_s=TIMEOUT_S, token_ids=by_ids,
        )  # fmt: skip
        return run_load(Load(target, planned, processes=2)), stage


@pytest.mark.parametrize("by_ids", [True, pytest.param(False, marks=pytest.mark.release)])
def test_every_token_and_failure_is_counted_as_it_was_written(by_ids: bool) -> None:
    result, stage = play(by_ids)
    assert Counter(one.number for one in stage.answers) == Counter(
        range(FIRST, FIRST + len(result.records))  # a retry would hide a failure
    )
    for record, (script, _, outcome) in zip(result.records, CASES * 4, strict=True):
        assert record.outcome == outcome, record.detail
        if outcome is Outcome.ANSWERED:
            assert record.num_tokens == record.output_tokens == script.num_tokens
            assert record.cached_tokens == script.cached_tokens
            if by_ids:
                assert record.token_ids == answer_ids(FIRST + record.index, script.num_tokens)
    check_figures(result, stage)


def check_figures(result: LoadResult, stage: Stage) -> None:
    """Give the records the server's own stamps: then every figure has a plain truth."""
    answers = {(one.number or 0) - FIRST: one for one in stage.answers}
    good = [one for one in result.records if one.outcome is Outcome.ANSWERED]
    truth: dict[str, list[float]] = {"ttft": [], "e2e": [], "itl": [], "tpot": [], "gap_max": []}
    origin_s = min(one.received_s for one in stage.answers)
    for record in good:
        writes = [(one.at_s - origin_s, one.num_tokens) for one in answers[record.index].writes]
        chunks = [pair for pair in writes if pair[1]]
        # No byte is read before it was written, and the order of arrivals is that of the writes.
        assert len(record.arrivals) <= len(chunks)
        record.arrivals = [Arrival(at_s, count) for at_s, count in chunks]
        record.end_s = writes[-1][0]
        truth["ttft"].append(chunks[0][0] - record.intended_s)
        truth["e2e"].append(record.end_s - record.intended_s)
        gaps = [(late - soon, count) for (soon, _), (late, count) in itertools.pairwise(chunks)]
        itl = [gap / count for gap, count in gaps for _ in range(count)]
        truth["itl"] += itl
        truth["tpot"] += [sum(itl) / len(itl)] if itl else []
        truth["gap_max"] += [max(gap for gap, _ in gaps)] if gaps else []
    summary = summarise(result)
    for name, values_s in truth.items():
        found, ordered = getattr(summary, name), sorted(values_s)
        assert found.count == len(ordered)
        for percent in (50, 90, 99):
            rank = -(-percent * len(ordered) // 100)
            assert getattr(found, f"p{percent}") == pytest.approx(1e3 * ordered[rank - 1])
