"""The self-test counts every fault exactly, agrees with the metrics, and notices what is wrong.

Nothing here depends on how long anything took: that is for the command, on a quiet machine.
"""

import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from baton.bench.records import Arrival, Outcome, Record
from baton.bench.selftest import run
from baton.bench.selftest.cases import FIRST_NUMBER, Counting, Mix
from baton.bench.selftest.run import (
    SelfTest,
    SelfTestReport,
    ask_nobody,
    play,
    served,
    show,
)
from baton.bench.selftest.scripted_server import Answer, ScriptedServer, Stage
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
    answers = {(one.number or 0) - FIRST_NUMBER: one for one in played.answers}
    records = [
        record if record.warm_up else at_once(record, answers[record.index], played.start_s)
        for record in played.result.records
    ]
    return with_records(played, records)


def at_once(record: Record, answer: Answer, start_s: float) -> Record:
    carrying = [write for write in answer.writes if write.num_tokens]
    end_s = answer.writes[-1].at_s - start_s if answer.writes else record.end_s
    return msgspec.structs.replace(
        record,
        sent_s=answer.received_s - start_s,
        arrivals=[Arrival(write.at_s - start_s, sum(write.num_tokens)) for write in carrying],
        end_s=end_s,
    )


def with_records(played: Played, records: list[Record]) -> Played:
    result = msgspec.structs.replace(played.result, records=records)
    return msgspec.structs.replace(played, result=result)


@pytest.mark.slow
def test_every_fault_is_counted_as_often_as_it_was_scripted(played: Played) -> None:
    verdict = judge(played, tolerance_ms=1.0)
    assert verdict.wrong == []
    for count in verdict.counts:
        assert count.is_exact, count
    assert {case.outcome for case in played.cases} == set(Outcome) - {
        Outcome.UNREACHABLE,  # by `ask_nobody`
        Outcome.NO_SOCKET,  # the client's own
        Outcome.STOPPED,  # the client's own
        Outcome.WRONG_TOKENS,  # by `find_damage`
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
    for figure in verdict.figures:
        assert figure.is_close, figure
    assert verdict.ok


def late(record: Record) -> Record:
    moved = [msgspec.structs.replace(one, at_s=one.at_s + 0.004) for one in record.arrivals]
    return msgspec.structs.replace(record, arrivals=moved, end_s=record.end_s + 0.004)


def forgetful(record: Record) -> Record:
    """Measured from a moment after the intended one, as of a request that waited to be sent."""
    return msgspec.structs.replace(record, intended_s=record.intended_s + 0.002)


def merged(record: Record) -> Record:
    """Two arrivals taken for one."""
    arrivals = [(index // 2, arrival) for index, arrival in enumerate(record.arrivals)]
    pairs = [[one for _, one in group] for _, group in groupby(arrivals, lambda pair: pair[0])]
    joined = [Arrival(pair[-1].at_s, sum(one.num_tokens for one in pair)) for pair in pairs]
    return msgspec.structs.replace(record, arrivals=joined)


def uncounted(record: Record) -> Record:
    return msgspec.structs.replace(record, arrivals=record.arrivals[:-1])


def forgiven(record: Record) -> Record:
    return msgspec.structs.replace(record, outcome=Outcome.ANSWERED)


def confused(record: Record) -> Record:
    swapped = {Outcome.TRUNCATED: Outcome.MALFORMED, Outcome.MALFORMED: Outcome.TRUNCATED}
    outcome = swapped.get(record.outcome, record.outcome)
    return msgspec.structs.replace(record, outcome=outcome)


def hasty(record: Record) -> Record:
    """No wait is as long as it was asked for."""
    return msgspec.structs.replace(record, retry_after_s=None)


def garbled(record: Record) -> Record:
    ids = list(reversed(record.token_ids or ()))
    return msgspec.structs.replace(record, token_ids=ids)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake", [late, forgetful, merged, uncounted, forgiven, confused, hasty, garbled]
)
def test_a_client_with_a_mistake_does_not_pass(
    true: Played, mistake: Callable[[Record], Record]
) -> None:
    records = [mistake(record) for record in true.result.records]
    assert not judge(with_records(true, records), tolerance_ms=1.0).ok


@pytest.mark.slow
def test_a_request_that_is_missing_or_came_twice_is_named(true: Played) -> None:
    fewer = [record for record in true.result.records if record.index != 3]
    assert "request 3: no record" in judge(with_records(true, fewer), 1.0).wrong
    again = next(one for one in true.answers if one.number == FIRST_NUMBER + 5)
    twice = msgspec.structs.replace(true, answers=[*true.answers, again])
    assert "request 5 reached the server 2 times" in judge(twice, 1.0).wrong


@pytest.mark.slow
def test_a_start_that_cannot_be_true_is_doubted(true: Played) -> None:
    wrong = msgspec.structs.replace(true, start_s=true.start_s + 0.003)
    [doubt] = judge(wrong, tolerance_ms=10.0).doubts
    assert "started -3.000 to -3.000 ms from when it says" in doubt


def test_requests_that_reach_nobody_are_counted() -> None:
    assert ask_nobody().is_exact


@pytest.mark.slow
def test_what_deviates_is_shown(true: Played) -> None:
    verdicts = [
        judge(true, EXACT_MS),
        judge(with_records(true, [late(r) for r in true.result.records]), 1.0),
    ]
    shown = io.StringIO()
    report = SelfTestReport(SelfTest(), verdicts, [])
    show(report, Console(file=shown, width=100))
    assert not report.ok
    assert "gap_max p99" in shown.getvalue()
    assert "WRONG" in shown.getvalue()
    assert "DEVIATES" in shown.getvalue()


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
