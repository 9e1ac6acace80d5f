"""The self-test counts every fault exactly, agrees with the metrics, and notices what is wrong.

Nothing here depends on how long anything took: that is for the command, on a quiet machine.
"""

import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from baton.bench.records import Arrival, Outcome, Record
from baton.bench.selftest import run
from baton.bench.selftest.cases import FIRST_NUMBER, Counting, Mix
from baton.bench.selftest.run import (
    SelfTest,
    SelfTestReport,
    ask_unreachable,
    play,
    served,
    show,
)
from baton.bench.selftest.scripted_server import ScriptedServer, Stage
from baton.bench.selftest.verdict import Played, judge
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


Running = tuple[ScriptedServer, Stage]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with served() as found:
        yield found


@pytest.fixture(scope="module")
def played(running: Running) -> Played:
    mix = Mix("completions", "token_ids", 32, 40.0, 1, TIMEOUT_S)
    return play(*running, "token ids", 2, mix)


@pytest.fixture(scope="module")
def true(played: Played) -> Played:
    """As if the client had read every byte in the moment in which it was written."""
    answers, start_s = played.answer_of(), played.start_s

    def at_once(record: Record) -> Record:
        if record.warm_up:
            return record
        answer = answers[record.index]
        stamps = [Arrival(one.at_s - start_s, sum(one.num_tokens)) for one in answer.writes]
        return replace(
            record,
            sent_s=answer.received_s - start_s,
            arrivals=[one for one in stamps if one.num_tokens],
            end_s=stamps[-1].at_s if stamps else record.end_s,
        )

    return changed(played, at_once)


def changed(played: Played, change: Callable[[Record], Record]) -> Played:
    records = [change(record) for record in played.result.records]
    return replace(played, result=replace(played.result, records=records))


@pytest.mark.slow
def test_every_fault_is_counted_as_often_as_it_was_scripted(played: Played) -> None:
    verdict = judge(played, tolerance_ms=1.0)
    assert verdict.wrong == []
    assert verdict.is_exact
    assert {case.outcome for case in played.cases} == set(Outcome) - {
        Outcome.UNREACHABLE,  # by `ask_unreachable`
        Outcome.NO_SOCKET,  # the client's own
        Outcome.STOPPED,  # the client's own
        Outcome.WRONG_TOKENS,  # by `verify`
    }


@pytest.mark.slow
@pytest.mark.parametrize("counting", ["text", "running_usage"])
def test_faults_are_counted_without_token_ids_too(running: Running, counting: Counting) -> None:
    mix = Mix("chat", counting, 16, 60.0, 2, TIMEOUT_S)
    verdict = judge(play(*running, counting, 1, mix), tolerance_ms=1.0)
    assert verdict.wrong == []
    assert verdict.is_exact


@pytest.mark.slow
def test_the_metrics_say_of_the_same_stamps_what_the_plain_truth_says(true: Played) -> None:
    verdict = judge(true, EXACT_MS)
    assert verdict.doubts == []
    assert len(verdict.figures) == 15
    assert all(figure.is_close for figure in verdict.figures)
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
    "no wait is told": lambda one: replace(one, retry_after_s=None),
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


@pytest.mark.slow
def test_a_start_that_cannot_be_true_is_doubted_and_shown(true: Played) -> None:
    verdict = judge(replace(true, start_s=true.start_s + 0.003), tolerance_ms=2.0)
    assert "started -3.000 to -3.000 ms from when it says" in verdict.doubts[0]
    shown = io.StringIO()
    report = SelfTestReport(SelfTest(), [judge(true, EXACT_MS), verdict], [])
    show(report, Console(file=shown, width=100))
    assert not report.ok
    for words in ("gap_max p99", "WRONG", "DEVIATES", "started -3.000"):
        assert words in shown.getvalue()


def test_requests_to_a_port_without_a_server_are_counted() -> None:
    assert ask_unreachable().is_exact


def test_what_is_written_says_where_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "selftest", lambda settings, _: SelfTestReport(settings, [], []))
    out = str(tmp_path / "selftest.json")
    assert run.main(["--seed", "7", "--json", out]) == 0
    written = msgspec.json.decode(Path(out).read_bytes(), type=SelfTestReport)
    assert written.settings.seed == 7
    assert written.provenance is not None
    assert written.provenance.command_line == [
        "baton", "bench", "selftest", "--seed", "7", "--json", out,
    ]  # fmt: skip
    assert written.provenance.machine.num_cpus >= 1


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="positive"):
        run.main(["--requests", "0"])


def test_ctrl_c_ends_it_at_once_and_without_a_verdict() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CTRL_C_IN_THE_LOAD],
        capture_output=True, text=True, check=False, timeout=60.0,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("", 130)
    first_load, last = done.stderr.splitlines()
    assert first_load.startswith("completions, tokens counted by token ids")
    assert last == "baton: interrupted"
