"""Comparisons: arms, how they were started, and paired rounds."""

import msgspec
import pytest

from baton.bench.compare import arms_of, contrast, flags_of, whole_rounds
from baton.bench.figures.validity import invalid
from baton.bench.report.document import Report, Run
from baton.bench.settings import Target
from baton.protocol.errors import ConfigError
from tests.support.bench_records import report_of, scene_run


def arm_run(arm: str, number: int, *problems: str) -> Run:
    run = scene_run(f"{arm} {number}")
    run.arm, run.round = arm, number
    run.problems = [invalid(text) for text in problems]
    return run


def rounds(number: int) -> list[Run]:
    return [arm_run(arm, place) for place in range(1, number + 1) for arm in ("a", "b")]


def compared(runs: list[Run]) -> Report:
    report = report_of(runs)
    contrast(report, ["a", "b"])
    return report


def test_only_rounds_in_which_every_arm_is_valid_are_compared():
    runs = [*rounds(1), arm_run("a", 2, "late"), arm_run("b", 2), arm_run("a", 3)]
    assert [sorted(one) for one in whole_rounds(runs, ["a", "b"])] == [["a", "b"]]
    report = compared(runs)
    assert "2 rounds are not compared: an arm has no valid run in them" in report.notes
    assert all(row.ratios["b"].rounds == 1 for row in report.comparison)


def test_ratios_are_to_the_first_arm():
    runs = rounds(7)
    for run in runs[1::2]:
        faster = 2 * run.summary.tokens_per_s
        run.summary = msgspec.structs.replace(run.summary, tokens_per_s=faster)
    rows = {row.name: row for row in compared(runs).comparison}
    assert rows["tokens/s"].ratios["b"].median == pytest.approx(2.0)
    assert rows["tokens/s"].ratios["b"].is_conclusive
    assert rows["TTFT p50"].ratios["b"].median == 1.0
    assert not rows["TTFT p50"].ratios["b"].is_conclusive


def test_an_arm_has_a_name_a_server_and_perhaps_a_model():
    arms = arms_of(["a=http://a:1", "b=http://b:2/v1#org/m"], Target("", "common", timeout_s=7.0))
    assert {name: (arm.url, arm.model, arm.timeout_s) for name, arm in arms.items()} == {
        "a": ("http://a:1", "common", 7.0),
        "b": ("http://b:2/v1", "org/m", 7.0),
    }


def test_the_report_says_how_each_arm_was_started(tmp_path):
    (tmp_path / "b.yaml").write_text("engine:\n  threads: 2\n")
    given = ("a=vllm serve m --dtype half", f"b={tmp_path}/b.yaml")
    assert flags_of(given, ["a", "b"]) == [
        "a was started with: vllm serve m --dtype half",
        "b was started with: engine: threads: 2",
    ]
    for wrong, said in (("c=--tp 2", "one of a, b"), ("a=no-such-file", "neither a file nor a")):
        with pytest.raises(ConfigError, match=said):
            flags_of((wrong,), ["a", "b"])
