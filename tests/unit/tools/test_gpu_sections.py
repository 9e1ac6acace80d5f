"""The whole GPU benchmark runs, tiny, on a CPU: each case calls what it measures as that wants it.

Kernels run in Triton's interpreter, captured steps are called again, pools lie in host memory.
Times mean nothing here: the one run on a GPU must not end at a mistake of the tool.
"""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from baton.runtime.clock import monotonic
from tests.support.sources import REPOSITORY
from tools.gpu import __main__ as gpu
from tools.gpu import split as gpu_split
from tools.gpu.floors import Shape
from tools.gpu.rows import CLAIMS, Check, Event, GpuReport, Row
from tools.gpu.section import Desk
from tools.gpu.split import SplitPlan
from tools.gpu.timing import Stopwatch

pytest.importorskip("triton")
# Some 60 seconds of CPU time; several times that on a machine that others use.
pytestmark = [pytest.mark.release, pytest.mark.timeout(560)]


class Run(msgspec.Struct):
    lines: list[str]
    report: GpuReport

    def rows(self) -> list[Row]:
        return [row for section in self.report.sections for row in section.rows]

    def checks(self) -> list[Check]:
        return [check for section in self.report.sections for check in section.checks]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tools.gpu",
            "--device",
            "cpu",
            "--out",
            folder,
            "--seconds",
            "5000",
        ],
        cwd=REPOSITORY,
        env=env,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    logs = "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("*.log")))
    assert (folder / "report.json").exists(), done.stdout + done.stderr
    report = msgspec.json.decode((folder / "report.json").read_bytes(), type=GpuReport)
    reasons = {
        section.name: section.reason for section in report.sections if section.reason
    }
    assert reasons == {}, f"{reasons}\n{logs}"
    return Run(done.stdout.splitlines(), report)


def test_every_section_ran_and_every_case_could_be_called(ran):
    assert [section.name for section in ran.report.sections] == [
        name for name, _, _ in gpu.SECTIONS
    ]
    assert [row for row in ran.rows() if row.error] == []
    assert [
        note for s in ran.report.sections for note in s.notes if "no time" in note
    ] == []
    assert len(ran.rows()) > 25


def test_every_kernel_agrees_with_its_twin(ran):
    failed = {check.key: check.detail for check in ran.checks() if check.has_failed}
    assert failed == {}
    assert len(ran.checks()) > 20


def test_the_last_lines_say_something_of_every_claim(ran):
    last = dict(line.split(": ", 1) for line in ran.lines[-len(CLAIMS) :])
    assert list(last) == [claim.title for claim in CLAIMS]
    # Interpreted kernels have no registers, and a CPU has no kernels to prove.
    assert {title for title, said in last.items() if said.startswith("not tried")} == {
        "kernels are proven",
        "spills",
    }
    assert last["split tokens = aggregated"].startswith("PASS")
    assert last["streams of a killed node"].startswith("PASS (2)"), "resumed and equal"
    assert last["graph = eager"].startswith("PASS")
    assert "tiny decode b3 ctx 20" in last["decode ms, served by the loop"]
    assert "idle share" not in last["decode ms, served by the loop"]


SMALL = SplitPlan(
    shape=Shape("small", 64, 96, 2, 2, 1, 32, 640, is_tied=True),
    device="cpu",
    prompts=(40, 600),
    num_tokens=8,
    warm_ups=1,
    rounds=2,
    memory_mib=64,
)


def events_of(plan: SplitPlan, folder: Path, left_s: float = 90.0) -> list[Event]:
    events: list[Event] = []
    watch = Stopwatch(torch.device("cpu"))
    desk = Desk(watch, events.append, monotonic, monotonic() + left_s)
    gpu_split.run(desk, folder, plan)
    return events


def test_an_arm_that_is_not_served_is_a_failed_check(tmp_path):
    """A pool for which there is no room."""
    plan = SplitPlan(
        shape=SMALL.shape,
        device="cpu",
        prompts=(40,),
        memory_mib=1 << 24,
        warm_ups=0,
        rounds=1,
    )
    checks = [event for event in events_of(plan, tmp_path) if isinstance(event, Check)]
    assert [check.passed for check in checks] == [False, False]
    assert all("not served: " in check.detail for check in checks)
    assert "does not fit" in checks[0].detail


@pytest.mark.skipif(torch.cuda.is_available(), reason="sections would run, for minutes")
def test_a_section_that_fails_is_reported_and_the_next_one_runs(tmp_path, capsys):
    sections = gpu.chosen(["engine"])
    report = gpu.run(gpu.Options(tmp_path, 100.0, sections), ["--only", "engine"])
    assert [section.name for section in report.sections] == ["environment", "engine"]
    for section in report.sections:
        assert section.state == "failed"
        assert "no CUDA device" in section.reason
    assert not report.has_passed
    written = msgspec.json.decode(
        (tmp_path / "report.json").read_bytes(), type=GpuReport
    )
    assert written == report
    assert capsys.readouterr().out.count("**failed**") == 2
