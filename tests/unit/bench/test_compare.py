"""What a comparison, or a row of loads, must say when it is less than it looks."""

import msgspec
import pytest

from baton.bench.compare import Arm, finish, same_servers
from baton.bench.figures.metrics import PRESETS
from baton.bench.records import Outcome
from baton.bench.report.document import Report, Run
from baton.bench.report.publish import is_usable
from baton.bench.sweep import mark_unfinished
from tests.support.bench_records import Scene, report_of, scene_run


def rounds(number: int) -> list[Run]:
    runs = []
    for place in range(1, number + 1):
        for arm in ("a", "b"):
            run = scene_run(Scene(duration_s=5.0, seed=place), f"{arm} {place}")
            run.arm, run.round = arm, place
            runs.append(run)
    return runs


def compared(runs: list[Run]) -> Report:
    report = report_of(runs)
    finish(report, ["a", "b"], "poisson:6")
    return report


def test_a_figure_that_one_round_lacks_is_said_to_be_left_out() -> None:
    runs = rounds(6)
    runs[1].summary = msgspec.structs.replace(runs[1].summary, goodput=0.0)
    report = compared(runs)
    assert "goodput" not in [row.name for row in report.comparison]
    (note,) = [note for note in report.notes if "not compared" in note]
    assert note == "WARNING: goodput is not compared: rounds without it, or with 0: b in 1"


def test_a_figure_that_nobody_asked_for_is_not_missed() -> None:
    runs = rounds(6)
    for run in runs:
        run.summary = msgspec.structs.replace(run.summary, goodput=None)
    assert not [note for note in compared(runs).notes if "not compared" in note]


def test_an_arm_that_answers_less_shows() -> None:
    runs = rounds(6)
    for run in runs[1::2]:
        good = run.summary.outcomes[Outcome.ANSWERED]
        fewer = {Outcome.ANSWERED.value: good // 2, Outcome.REFUSED.value: good - good // 2}
        run.summary = msgspec.structs.replace(run.summary, outcomes=fewer)
    (row,) = [row for row in compared(runs).comparison if row.name == "answered"]
    assert row.ratios["b"].median == pytest.approx(0.5, abs=0.05)
    assert row.better == "higher"


def test_a_report_says_that_some_of_many_intervals_miss() -> None:
    report = compared(rounds(6))
    (note,) = [note for note in report.notes if "by chance" in note]
    assert note.startswith(f"each of the {len(report.comparison)} intervals (sign test) misses")
    few = compared(rounds(5))
    assert not [note for note in few.notes if "by chance" in note]
    assert "fewer than 6 rounds cannot show a difference" in few.notes


def test_arms_of_one_server_are_noticed() -> None:
    arms = [Arm("a", "http://h:80/v1"), Arm("b", "http://h"), Arm("c", "http://h:81")]
    (line,) = same_servers(arms)
    assert line.startswith("WARNING: a and b are one server")
    assert same_servers(arms[1:]) == []


def test_loads_that_were_never_run_make_a_report_unusable() -> None:
    report = report_of([scene_run(Scene(duration_s=5.0), "1/s", bounds=PRESETS["chat"])])
    assert is_usable(report)
    mark_unfinished(report, 1)
    assert is_usable(report)
    mark_unfinished(report, 3)
    assert not is_usable(report)
    assert report.invalid[0][1] == "interrupted: 1 of 3 loads were run"
