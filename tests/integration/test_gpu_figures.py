"""The GPU benchmark's processes, on CPUs: its split section, and sections that cannot run."""

from pathlib import Path

import msgspec
import pytest
import torch

from baton.runtime.clock import monotonic
from tools.gpu import __main__ as gpu
from tools.gpu import split as gpu_split
from tools.gpu.floors import Shape
from tools.gpu.rows import Check, Event, GpuReport
from tools.gpu.section import Desk
from tools.gpu.split import SplitPlan
from tools.gpu.timing import Stopwatch

SMALL = SplitPlan(
    shape=Shape("small", 64, 96, 2, 2, 1, 32, 640, is_tied=True), device="cpu",
    prompts=(40, 600), num_tokens=8, warm_ups=1, rounds=2, memory_mib=64,
)  # fmt: skip


def events_of(plan: SplitPlan, folder: Path, left_s: float = 90.0) -> list[Event]:
    events: list[Event] = []
    watch = Stopwatch(torch.device("cpu"))
    desk = Desk(watch, events.append, monotonic, monotonic() + left_s)
    gpu_split.run(desk, folder, plan)
    return events


@pytest.mark.release
def test_an_arm_that_is_not_served_is_a_failed_check(tmp_path: Path) -> None:
    """A pool for which there is no room."""
    plan = SplitPlan(
        shape=SMALL.shape, device="cpu", prompts=(40,), memory_mib=1 << 24, warm_ups=0, rounds=1
    )
    checks = [event for event in events_of(plan, tmp_path) if isinstance(event, Check)]
    assert [check.passed for check in checks] == [False, False]
    assert all("not served: " in check.detail for check in checks)
    assert "does not fit" in checks[0].detail


@pytest.mark.release
@pytest.mark.skipif(torch.cuda.is_available(), reason="sections would run, for minutes")
def test_a_section_that_fails_is_reported_and_the_next_one_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = gpu.chosen(["engine"])
    report = gpu.run(gpu.Options(tmp_path, 100.0, sections), ["--only", "engine"])
    assert [section.name for section in report.sections] == ["environment", "engine"]
    for section in report.sections:
        assert section.state == "failed"
        assert "no CUDA device" in section.reason
    assert not report.has_passed
    written = msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=GpuReport)
    assert written == report
    assert capsys.readouterr().out.count("**failed**") == 2
