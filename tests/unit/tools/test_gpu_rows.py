"""The GPU benchmark's arithmetic: floors, rates, and what there is no time for."""

from typing import Any

import msgspec
import pytest
import torch

from baton.bench.report.provenance import collect
from baton.kernels.proofs import (
    LATENT_PREFILL,
    NARROW,
    ONE_ORDER,
    PRODUCTS,
    possible,
)
from tools.gpu import __main__ as gpu
from tools.gpu import engine
from tools.gpu.cases import STEPS
from tools.gpu.floors import Floors, Work, causal_flops
from tools.gpu.rows import (
    Check,
    Event,
    GpuReport,
    Measured,
    Note,
    Section,
    Timing,
    Unreached,
    last_lines,
    row_of,
)
from tools.gpu.section import Desk
from tools.gpu.timing import Stopwatch

# What one H200 was measured to do, and the floors that follow from it.
H200 = Floors(copy_tb_per_s=4.3, gemm_tflop_per_s=790)


def test_a_rate_counts_work_over_the_median():
    timing = Timing(2e-3, 1e-3, 4e-3, 9, 30e-6)
    work = Work(num_bytes=4e9, num_flops=causal_flops(4096, 32 * 128))
    row = row_of(Measured("p", "TFLOP/s", work, timing), H200)
    assert row.value == pytest.approx(68.7, rel=0.01)
    # The longest time is the least rate.
    assert row.low == pytest.approx(34.4, rel=0.01)
    assert row.high == pytest.approx(137.4, rel=0.01)
    assert row.floor_share == pytest.approx(4e9 / 4.3e12 / 2e-3)
    assert row.host_us == pytest.approx(30)


NOTHING_WRONG: tuple[Event, ...] = (
    Check("a", True, ""),
    Check("b", None, "no NIXL"),
    Check("c", False, "slow", required=False),
    Measured("d", "ms", timing=Timing(1.0, 1.0, 1.0, 3)),
    Measured("e", "ms", note="needs 90 GiB, 80 GiB are free"),
)


@pytest.mark.parametrize(
    ("event", "state", "reason"),
    [
        (Note("warm"), "complete", ""),
        (Measured("f", "ms", error="OutOfMemoryError"), "failed", "1 of its cases: f"),
        (Check("g", False, "differs"), "failed", "1 of its cases: g"),
        (Unreached("h"), "cut short", "no time for 1 of its cases: h"),
    ],
)
def test_a_report_passes_when_everything_was_reached_and_nothing_failed(
    event, state, reason
):
    report = GpuReport(collect(["gpu"]))
    section = Section("kernels", "Kernel speed", 10.0, 5.0, "complete")
    report.sections = [section]
    gpu.fill(report, section, [*NOTHING_WRONG, event])
    assert (section.state, section.reason) == (state, reason)
    assert report.has_passed == (state == "complete")


def test_sections_share_what_is_left_of_the_time():
    shares = [share for _, _, share in gpu.SECTIONS]
    assert sum(shares) == gpu.TOTAL_S == 200.0
    assert gpu.allotted(gpu.TOTAL_S, shares) == pytest.approx(shares[0])
    # The first took nothing: the others have its time.
    assert gpu.allotted(gpu.TOTAL_S, shares[1:]) > shares[1]
    assert gpu.allotted(-3.0, shares) == 0.0
    assert gpu.allotted(20.0, shares[-1:]) == 20.0


def test_a_section_that_hangs_is_cut_short_and_the_next_one_waits_with_its_imports_done(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(gpu, "MODULE", "tests.support.section_stand_in")
    sections = ("environment", "split", "kernels")
    report = gpu.run(gpu.Options(tmp_path, 9.0, sections), [])
    assert [one.state for one in report.sections] == [
        "complete",
        "cut short",
        "complete",
    ]
    assert "**cut short**: its " in capsys.readouterr().out
    imported_s, begun_s = (
        (tmp_path / f"kernels.{what}").stat().st_mtime for what in ("imported", "begun")
    )
    assert begun_s > imported_s + 2


def test_events_make_the_section_and_a_cut_line_is_left_out(tmp_path):
    events: list[Event] = [
        H200,
        Measured(
            "prefill attention 4k",
            "TFLOP/s",
            Work(0, 1e12),
            Timing(2e-3, 1e-3, 3e-3, 5),
        ),
        Check("bits", True, "equal"),
        Note("warm"),
    ]
    path = gpu.events_file(tmp_path, "kernels")
    lines = [msgspec.json.encode(event) for event in events]
    path.write_bytes(b"\n".join([*lines, lines[2][:30]]))
    report = GpuReport(collect(["gpu"]))
    section = Section("kernels", "Kernel speed", 10.0, 5.0, "complete")
    gpu.fill(report, section, gpu.read_events(path))
    assert report.floors == H200
    assert [row.key for row in section.rows] == ["prefill attention 4k"]
    assert section.checks == [Check("bits", True, "equal")]
    assert section.notes == ["warm"]


def test_what_there_is_no_time_for_is_not_begun_and_said():
    events: list[Event] = []
    desk = Desk(Stopwatch(torch.device("cpu")), events.append, lambda: 0.0, 4.9)

    def refuse() -> Any:
        raise AssertionError("begun although there is no time")

    desk.measure(Measured("row", "ms"), refuse)
    desk.check("check", refuse)
    engine.run(desk, STEPS[:2])
    keys = ["row", "check", *(case.key for case in STEPS[:2])]
    assert events == [Unreached(key) for key in keys]


def test_the_default_is_measured_beside_false_where_proven_kernels_give_it():
    pytest.importorskip("triton")
    from tools.gpu import correctness

    assert len({case.key for case in STEPS}) == len(STEPS)
    defaults = [case for case in STEPS if case.deterministic == "auto"]
    assert {(case.kind, case.batch) for case in defaults} >= {
        ("prefill", 1),
        *(("decode", batch) for batch in (1, 32, 128)),
    }
    for case in defaults:
        assert msgspec.structs.replace(case, deterministic="false") in STEPS
        hopper = engine.kernels_of(case, (9, 0))
        assert hopper.is_ordered
        assert {PRODUCTS, ONE_ORDER} <= hopper.proven
        assert not engine.kernels_of(case, (8, 0)).is_ordered
    for shapes in correctness.OTHER_SHAPES.values():
        names = {candidate.name for candidate in possible(shapes, (9, 0))}
        assert names & {ONE_ORDER, LATENT_PREFILL}
    narrow = next(case for case in STEPS if case.shape.narrow)
    assert NARROW in engine.kernels_of(narrow, (9, 0)).proven


def test_last_lines_say_pass_fail_or_values():
    report = GpuReport(collect(["gpu"]))
    section = Section("engine", "Steps", 10.0, 5.0, "complete")
    report.sections = [section]
    gpu.fill(
        report,
        section,
        [
            Check(
                "a replayed step has the bits of the eager step of its bucket, x",
                True,
                "equal",
            ),
            Check("ordered attention: decode = prefill, 8B", False, "differ"),
            Check("rows keep their bits: library, qkv", False, "no", required=False),
            Check("rows keep their bits: fixed order, qkv", True, "yes"),
            Check(
                "lane nixl, two processes on one GPU",
                None,
                "no NIXL wheel is installed",
            ),
            Measured(
                "Qwen3-8B decode b1 ctx 1k", "ms", timing=Timing(5e-3, 4e-3, 6e-3, 5)
            ),
            Measured("capture of Qwen3-8B, time", "s", value=4.25),
        ],
    )
    said = dict(line.split(": ", 1) for line in last_lines(report))
    assert said["graph = eager"] == "PASS equal"
    assert said["bits in any batch and chunking"].startswith("FAIL (ordered attention")
    assert said["invariance per weight shape"].startswith(
        "1 of 2 hold, not rows keep their bits"
    )
    assert said["lane"] == "not tried (no NIXL wheel is installed)"
    assert said["decode ms, served by the loop"] == "Qwen3-8B decode b1 ctx 1k 5 ms"
    assert said["capture"] == "capture of Qwen3-8B, time 4.25 s"
    assert said["decode ms, eager"] == "not tried"
