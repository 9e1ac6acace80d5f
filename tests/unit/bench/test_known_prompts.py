"""Prompts that a server may know from an earlier load: which are the same, and what is said."""

import msgspec
import pytest

from baton.bench.plan.workload import Workload
from baton.bench.planning import reseeded
from baton.bench.report.document import Run
from baton.bench.report.publish import UNTOLD, finish
from tests.support.bench_records import Scene, report_of, scene_run


def test_no_load_of_an_experiment_has_the_seed_of_another_experiment() -> None:
    seeds = [
        [reseeded(Workload(seed=seed), place).seed for place in range(20)] for seed in range(20)
    ]
    assert [own[0] for own in seeds] == list(range(20))
    assert len({seed for own in seeds for seed in own}) == 20 * 20
    assert reseeded(Workload(seed=3), 7) == reseeded(Workload(seed=3), 7)


def load(arm: str, cached_share: float | None) -> Run:
    run = scene_run(Scene(duration_s=5.0), arm or "a load")
    run.arm = arm
    run.summary = msgspec.structs.replace(run.summary, cached_share=cached_share)
    return run


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([load("", 0.0)], []),
        ([load("", None)], [UNTOLD]),
        ([load("a", 0.0), load("b", None), load("b", None)], [f"b: {UNTOLD}"]),
    ],
)
def test_a_server_that_does_not_tell_what_it_had_cached_is_noted(
    runs: list[Run], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_of(runs)
    assert finish(report, "") == 0
    assert report.notes == said
    assert [line for line in capsys.readouterr().out.splitlines() if UNTOLD in line] == said


def test_what_a_server_had_cached_that_answered_nothing_is_not_missed() -> None:
    run = load("", None)
    run.summary = msgspec.structs.replace(run.summary, outcomes={"refused": 3})
    report = report_of([run])
    finish(report, "")
    assert report.notes == []
