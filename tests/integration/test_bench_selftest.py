"""The self-test counts every fault exactly, agrees with the metrics, and notices what is wrong.

Nothing here depends on how long anything took: that is for the command, on a quiet machine.
"""

import io
import subprocess
import sys
from collections import Counter
from collections.abc import Callable

import pytest
from msgspec.structs import replace
from rich.console import Console

from baton.bench import cli
from baton.bench.records import Arrival, Outcome, Record
from baton.bench.selftest.cases import FIRST_NUMBER, Mix
from baton.bench.selftest.run import (
    Played,
    Verdict,
    judge,
    percentile_of,
    play,
    show,
    truth_of,
)
from baton.bench.selftest.scripted_server import Answer
from baton.protocol.errors import ConfigError

EXACT_MS = 1e-6
# A silent answer lasts so long, and no good one does on the busiest machine.
TIMEOUT_S = 8.0
CTRL_C_IN_THE_LOAD = """\
import signal, sys
from baton.__main__ import main
from baton.bench.client.load import Workers

def poll(workers, timeout_s, before=Workers.poll):
    before(workers, timeout_s)
    if workers.progress.sent:
        Workers.poll = before
        signal.raise_signal(signal.SIGINT)

Workers.poll = poll
# A parent of the tests may have told them to ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(["bench", "selftest"]))
"""


@pytest.fixture(scope="module")
def played() -> Played:
    mix = Mix(True, 32, 40.0, 1, TIMEOUT_S, processes=2)
    return play("token ids", mix)


@pytest.fixture(scope="module")
def true(played: Played) -> Played:
    """As if the client had read every byte in the moment in which it was written."""
    answers = {(one.number or 0) - FIRST_NUMBER: one for one in played.answers}

    def at_once(record: Record) -> Record:
        if record.warm_up:
            return record
        stamps = [
            Arrival(one.at_s - played.start_s, one.num_tokens)
            for one in answers[record.index].writes
        ]
        arrivals = [one for one in stamps if one.num_tokens]
        end_s = stamps[-1].at_s if stamps else record.end_s
        return replace(record, arrivals=arrivals, end_s=end_s)

    return changed(played, at_once)


def changed(played: Played, change: Callable[[Record], Record]) -> Played:
    records = [change(record) for record in played.result.records]
    return replace(played, result=replace(played.result, records=records))


@pytest.mark.slow
def test_every_fault_is_counted_as_often_as_it_was_scripted(played: Played) -> None:
    assert judge(played, tolerance_ms=1.0).wrong == []
    counted = Counter(record.outcome for record in played.records().values())
    assert counted == Counter(case.outcome for case in played.cases)
    assert len(counted) == 7


@pytest.mark.release
def test_faults_are_counted_without_token_ids_too() -> None:
    mix = Mix(False, 16, 60.0, 2, TIMEOUT_S)
    assert judge(play("text", mix), tolerance_ms=1.0).wrong == []


@pytest.mark.slow
def test_the_metrics_say_of_the_same_stamps_what_the_plain_truth_says(true: Played) -> None:
    verdict = judge(true, EXACT_MS)
    assert (verdict.doubts, verdict.wrong, len(verdict.figures)) == ([], [], 15)
    assert verdict.ok


def later(record: Record) -> Record:
    moved = [replace(one, at_s=one.at_s + 0.004) for one in record.arrivals]
    return replace(record, arrivals=moved, end_s=record.end_s + 0.004)


def merged(record: Record) -> Record:
    """Two arrivals taken for one."""
    pairs = [record.arrivals[at : at + 2] for at in range(0, len(record.arrivals), 2)]
    joined = [Arrival(pair[-1].at_s, sum(one.num_tokens for one in pair)) for pair in pairs]
    return replace(record, arrivals=joined)


SWAPPED = {Outcome.TRUNCATED: Outcome.MALFORMED, Outcome.MALFORMED: Outcome.TRUNCATED}
MISTAKES: dict[str, Callable[[Record], Record]] = {
    "stamps are late": later,
    "waiting to be sent is forgotten": lambda one: replace(one, intended_s=one.intended_s + 0.002),
    "two arrivals are one": merged,
    "the last tokens are lost": lambda one: replace(one, arrivals=one.arrivals[:-1]),
    "failures are forgiven": lambda one: replace(one, outcome=Outcome.ANSWERED),
    "failures are confused": lambda one: replace(
        one, outcome=SWAPPED.get(one.outcome, one.outcome)
    ),
    "tokens are reversed": lambda one: replace(one, token_ids=(one.token_ids or [])[::-1]),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_client_with_a_mistake_does_not_pass(true: Played, mistake: str) -> None:
    assert not judge(changed(true, MISTAKES[mistake]), tolerance_ms=1.0).ok


@pytest.mark.slow
def test_a_request_that_is_missing_or_came_twice_is_named(true: Played) -> None:
    records = [record for record in true.result.records if record.index != 3]
    fewer = replace(true, result=replace(true.result, records=records))
    assert "request 3: no record" in judge(fewer, 1.0).wrong
    again = next(one for one in true.answers if one.number == FIRST_NUMBER + 5)
    twice = replace(true, answers=[*true.answers, again])
    assert "request 5 reached the server 2 times" in judge(twice, 1.0).wrong


def shown(*verdicts: Verdict) -> str:
    text = io.StringIO()
    show(list(verdicts), Console(file=text, width=100))
    return text.getvalue()


@pytest.mark.slow
def test_a_start_that_cannot_be_true_shows_in_the_figures(true: Played) -> None:
    verdict = judge(replace(true, start_s=true.start_s + 0.003), tolerance_ms=2.0)
    assert not verdict.ok
    assert verdict.farthest_ms == pytest.approx(3.0)
    said = shown(judge(true, EXACT_MS), verdict)
    for words in (
        "gap_max p99",
        "WRONG",
        "DEVIATES",
        "Every answer was counted correctly",
        "3.000 ms",
    ):
        assert words in said


def test_the_last_line_never_allows_what_it_says_is_too_far(true: Played) -> None:
    said = shown(judge(true, EXACT_MS))
    assert said.rstrip().splitlines()[-1].startswith("ok: ")
    assert "the farthest percentile is 0.000 ms off the truth" in said


def answer(*writes: tuple[float, int]) -> Answer:
    return Answer(number=1, received_s=100.0, writes=[Arrival(*one) for one in writes])


# Binary fractions of a second, so that no sum is rounded.
@pytest.mark.parametrize(
    ("writes", "truth"),
    [
        # Writes without tokens count only as the end.
        (
            [(100.125, 0), (100.25, 1), (100.5, 1), (100.75, 0)],
            {"ttft": [250], "e2e": [750], "itl": [250], "tpot": [250], "gap_max": [250]},
        ),
        # A gap is shared by the tokens after it: five tokens after the first chunk, in 625 ms.
        (
            [(100.0, 2), (100.5, 4), (100.625, 1)],
            {"ttft": [0], "e2e": [625], "itl": [125] * 5, "tpot": [125], "gap_max": [500]},
        ),
        # Tokens that come at once have no gaps.
        ([(100.0, 4)], {"ttft": [0], "e2e": [0], "itl": [], "tpot": [], "gap_max": []}),
    ],
)
def test_the_plain_truth_by_hand(
    writes: list[tuple[float, int]], truth: dict[str, list[float]]
) -> None:
    assert truth_of(answer(*writes), 100.0) == truth


@pytest.mark.parametrize(("percent", "value"), [(1, 1), (50, 2), (51, 3), (90, 4), (99, 4)])
def test_a_percentile_is_a_value_of_the_sample(percent: int, value: float) -> None:
    assert percentile_of([4.0, 1.0, 3.0, 2.0], percent) == value


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="--requests cannot be '0'"):
        cli.main(["selftest", "--requests", "0"])


def test_ctrl_c_ends_it_at_once_and_without_a_verdict() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CTRL_C_IN_THE_LOAD],
        capture_output=True, text=True, check=False, timeout=60.0,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("", 130)
    first_load, last = done.stderr.splitlines()
    assert first_load.startswith("completions, tokens counted by their ids")
    assert last == "baton: interrupted"
