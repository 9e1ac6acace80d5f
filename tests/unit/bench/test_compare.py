"""Comparisons: arms, how they were started, paired rounds, and what must be said of them."""

import msgspec
import pytest

from baton.bench.compare import (
    arms_of,
    contrast,
    facts_of,
    flags_of,
    parity,
    warnings,
    whole_rounds,
)
from baton.bench.figures.validity import invalid
from baton.bench.report.document import Report, Run
from baton.bench.settings import Target
from baton.protocol.errors import ConfigError
from tests.support.bench_records import Scene, report_of, scene_run


def arm_run(arm: str, number: int, *problems: str) -> Run:
    run = scene_run(Scene(duration_s=5.0, seed=number), f"{arm} {number}")
    run.arm, run.round = arm, number
    run.problems = [invalid(text) for text in problems]
    return run


def rounds(number: int) -> list[Run]:
    return [arm_run(arm, place) for place in range(1, number + 1) for arm in ("a", "b")]


def change(run: Run, **changes: object) -> None:
    run.summary = msgspec.structs.replace(run.summary, **changes)


def compared(runs: list[Run]) -> Report:
    report = report_of(runs)
    contrast(report, ["a", "b"])
    return report


# --- rounds --------------------------------------------------------------------------------------


def test_only_rounds_in_which_every_arm_is_valid_are_compared() -> None:
    runs = [*rounds(1), arm_run("a", 2, "late"), arm_run("b", 2), arm_run("a", 3)]
    assert [sorted(one) for one in whole_rounds(runs, ["a", "b"])] == [["a", "b"]]
    report = compared(runs)
    assert "2 rounds are not compared: an arm has no valid run in them" in report.notes
    assert all(row.ratios["b"].rounds == 1 for row in report.comparison)


def test_ratios_are_to_the_first_arm() -> None:
    runs = rounds(7)
    for run in runs[1::2]:
        change(run, tokens_per_s=run.summary.tokens_per_s * 2)
    rows = {row.name: row for row in compared(runs).comparison}
    assert rows["tokens/s"].ratios["b"].median == pytest.approx(2.0)
    assert rows["tokens/s"].ratios["b"].is_conclusive
    assert rows["TTFT p50"].ratios["b"].median == 1.0
    assert not rows["TTFT p50"].ratios["b"].is_conclusive


# --- arms ----------------------------------------------------------------------------------------


def test_an_arm_has_a_name_a_server_and_perhaps_a_model() -> None:
    arms = arms_of(["a=http://a:1", "b=http://b:2/v1#org/m"], Target("", "common", timeout_s=7.0))
    assert {name: (arm.url, arm.model, arm.timeout_s) for name, arm in arms.items()} == {
        "a": ("http://a:1", "common", 7.0),
        "b": ("http://b:2/v1", "org/m", 7.0),
    }


def test_flags_are_for_an_arm_that_exists() -> None:
    flags = flags_of(("a=--dtype half", "a=--threads 2"), ["a", "b"])
    assert flags == {"a": {"dtype": "half", "threads": "2"}, "b": {}}
    with pytest.raises(ConfigError, match="one of a, b"):
        flags_of(("c=--tp 2",), ["a", "b"])


# --- how they were started -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("vllm serve m --dtype bfloat16", "dtype", "bfloat16"),
        ("vllm serve Qwen/Qwen3-8B --block-size 16", "block-size", "16"),
        ("--set cache.block_size=32", "block-size", "32"),
        ("OMP_NUM_THREADS=2 vllm serve m", "omp-num-threads", "2"),
        ("engine:\n  threads: 4  # cores", "threads", "4"),
        ("--enforce-eager", "enforce-eager", "true"),
        ("a \\\n  --block-size 8", "block-size", "8"),
        ('{"args": {"dtype": "bf16", "tp": 2}}', "dtype", "bf16"),
        ('{"disable_cuda_graph": true, "x": 1}', "disable-cuda-graph", "true"),
    ],
)
def test_a_setting_is_read_as_it_was_written(text: str, name: str, value: str) -> None:
    assert facts_of(text)[name] == value


def test_a_difference_is_a_warning_and_what_is_not_known_is_told_once() -> None:
    flags = {"a": facts_of("--threads 1"), "b": facts_of("--threads 2 --dtype half")}
    rows = parity(flags)
    assert [row.same for row in rows] == ["NO", "not known"]
    assert warnings(rows, ["a", "b"]) == [
        "WARNING: the arms differ in threads (a: 1, b: 2)",
        "--flags do not show dtype (a), quantization (a, b), block size (a, b), CUDA graphs (a, b)",
    ]
    alike = "--dtype half --quantization none --block-size 1 --threads 1 --enforce-eager"
    facts = facts_of(alike)
    assert warnings(parity({"a": facts, "b": facts}), ["a", "b"]) == []
