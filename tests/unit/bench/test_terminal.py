"""What people see on a terminal: while a load runs, and when it is done."""

import pytest

from baton.bench.client.load import Progress
from baton.bench.experiment import LoadProgress
from baton.bench.figures.validity import invalid, warning
from baton.bench.report.sections import shown
from tests.support.bench_records import Scene, report_of, scene_run

TIMES_S = (0.0, 0.0, 10.0, 20.0)  # made, begun, shown, shown
SHORT = Scene(duration_s=5.0)


def test_the_terminal_says_why_figures_must_not_be_used_and_a_server_cannot_command_it() -> None:
    run = scene_run(SHORT, "poisson:6")
    run.problems = [invalid("it said \x1b]0;title\x07 and \x1b[2J"), warning("few samples")]
    run.notes = ["realised 6/s", "WARNING: the rate was off"]
    text = shown(report_of([run]))
    assert text.splitlines()[-6:] == [
        "INVALID: it said  ]0;title  and  [2J",
        "WARNING: few samples",
        "realised 6/s",
        "WARNING: the rate was off",
        "",
        "INVALID: these figures are not the server's and must not be used",
    ]
    assert "\x1b" not in text


def test_a_load_is_counted_without_its_warm_up_and_tokens_are_not_said_before_they_are_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = LoadProgress(clock=iter(TIMES_S).__next__)
    label = "a load with a name so long that a terminal of eighty columns cannot hold it"
    progress.begin(label, total=9, num_warm_up=4)
    progress.show(Progress(sent=3))
    progress.show(Progress(sent=7, ended=5, failed=1, tokens=100))
    assert capsys.readouterr().err.splitlines() == [
        f"{label}: 0/5 ended  3 in flight  10 s",
        f"{label}: 1/5 ended  1 failed  2 in flight  5 tokens/s  20 s",
    ]
