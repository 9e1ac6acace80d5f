"""What people see on a terminal: while a load runs, and when it is done."""

import io
import re

import pytest
from rich.console import Console

from baton.bench.client.load import Progress
from baton.bench.experiment import LoadProgress
from baton.bench.figures.metrics import summarise
from baton.bench.figures.search import Ending, Found
from baton.bench.figures.validity import invalid, warning
from baton.bench.report.document import Run
from baton.bench.report.sections import LATENCIES, shown
from tests.support.bench_records import Scene, load, report_of, scene_run, steady

TIMES_S = (0.0, 0.0, 10.0, 20.0)  # made, begun, shown, shown
SHORT = Scene(duration_s=5.0)


def test_the_terminal_shows_latencies_totals_and_the_verdict() -> None:
    text = shown(report_of([scene_run(Scene(duration_s=20.0), "poisson:6")]))
    lines = text.splitlines()
    assert lines[0] == "poisson:6"
    header = next(line for line in lines if line.startswith("figure "))
    assert header.split() == ["figure", "samples", "mean", "p50", "p90", "p95", "p99", "max"]
    assert [line.split()[0] for line in lines[3:9]] == list(LATENCIES)
    for total in (r"attainment +[0-9.]+ % \(95 % interval .*", r"duration +[0-9.]+ s",
                  "tokens +[0-9,]+", "tokens per s +[0-9]+"):  # fmt: skip
        assert re.search(f"^{total}$", text, re.MULTILINE)
    assert "A p99 rests on few samples in fewer than 1,000 requests." in lines
    assert "Provenance" not in text
    assert lines[-1] == "VALID"


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


def test_of_several_runs_the_shared_warnings_are_said_once_and_the_invalid_ones_named() -> None:
    runs = [scene_run(SHORT, f"{rate}/s") for rate in (1, 2)]
    runs[0].problems = [warning("few samples")]
    runs[1].problems = [invalid("the client sent late"), warning("few samples")]
    report = report_of(runs)
    assert shown(report).splitlines()[-4:] == [
        "INVALID: 2/s: the client sent late",
        "WARNING: 2 of 2 runs: few samples",
        "",
        "INVALID: these figures are not the server's and must not be used",
    ]
    report.search = Found(1.0, True, Ending.FOUND, 2.0, "1/s holds", [])
    assert shown(report).splitlines()[-4:] == [
        "2/s was INVALID: the client sent late",
        "WARNING: 2 of 2 runs: few samples",
        "",
        "CONFIRMED",
    ]
    assert shown(report).startswith("Search\n1/s holds\n")


@pytest.mark.parametrize("count", [999, 1000])
def test_a_p99_of_few_samples_is_said_to_be_none(count: int) -> None:
    result = load(steady(count))
    run = Run(label="a", summary=summarise(result), records=result.records)
    assert ("A p99 rests on few samples" in shown(report_of([run]))) == (count < 1000)


def test_tables_of_a_narrow_terminal_are_broken_by_columns() -> None:
    report = report_of(
        [scene_run(Scene(duration_s=5.0, seed=seed), f"run {seed}") for seed in (1, 2)]
    )
    wide, narrow = shown(report).splitlines(), shown(report, 60).splitlines()
    assert max(len(line) for line in wide) > 100
    rows = [line for line in narrow if line.startswith(("run  ", "run 1", "run 2"))]
    assert len(rows) == 3 * 3
    assert all(len(line) <= 60 for line in rows)
    words = " ".join(line[5:] for line in narrow if line.startswith("run 1")).split()
    assert words == next(line[5:] for line in wide if line.startswith("run 1")).split()


@pytest.mark.parametrize(
    ("styled", "no_color", "codes"), [(False, "", False), (True, "", True), (True, "1", False)]
)
def test_colours_are_for_terminals_that_want_them(
    styled: bool, no_color: str, codes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", no_color)
    run = scene_run(SHORT, "a load")
    run.problems = [invalid("the client sent late")]
    assert ("\x1b[1;31m" in shown(report_of([run]), 80, styled=styled)) == codes


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


def test_a_terminal_has_one_live_line_and_what_is_said_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    screen = io.StringIO()
    with LoadProgress(Console(file=screen, force_terminal=True, width=80)) as progress:
        progress.begin("a load", total=5)
        progress.show(Progress(sent=2, ended=1))
        progress.say("1/s: held")
    text = screen.getvalue()
    assert "a load: 1/5 ended  1 in flight" in text
    assert "1/s: held\n" in text
    assert "\x1b[?25h" in text, "the cursor is shown again"
    assert "\x1b[3" not in text, "no colour with NO_COLOR"
