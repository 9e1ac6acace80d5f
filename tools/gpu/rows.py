"""Turn the measurements of the GPU sections into rows with a floor and a target for each figure.

A section runs in a process of its own and reports `Event`s; the command that started it makes rows
and tables of the events here. This file is pure: it has no torch and no clock.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from baton.bench.report.provenance import Provenance
from tools.gpu.cases import TARGETS_HOLD_FOR, Target, Unit
from tools.gpu.floors import Floors, Work

Verdict = Literal["stretch", "met", "missed", ""]
State = Literal["complete", "cut short", "failed", "skipped"]
RATES = ("TFLOP/s", "TB/s")
SCHEMA = "baton.tools.gpu/1"


class Timing(msgspec.Struct, frozen=True):
    """The time of one call: median, least and most over the rounds.

    `host_s` is the CPU time of the launch, where it was measured.
    """

    median_s: float
    low_s: float
    high_s: float
    rounds: int
    host_s: float | None = None


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    """One case. Without `timing`, `error` names the failure in one line, or `note` what is missing.

    `payload_bytes` are the bytes that a rate in TB/s counts, if fewer than all moved bytes. `value`
    is a figure that no time is behind.
    """

    key: str
    unit: Unit
    work: Work = Work()
    timing: Timing | None = None
    payload_bytes: int = 0
    note: str = ""
    error: str = ""
    value: float | None = None


class Check(msgspec.Struct, frozen=True, tag="check"):
    """A claim that holds or not. `passed` is None if this machine cannot try it.

    A missed target is a figure like any other; every other claim that does not hold is a failure.
    """

    key: str
    passed: bool | None
    detail: str
    is_target: bool = False

    @property
    def has_failed(self) -> bool:
        return self.passed is False and not self.is_target


class Note(msgspec.Struct, frozen=True, tag="note"):
    text: str


class Environment(msgspec.Struct, frozen=True, tag="environment"):
    gpu: str
    memory_gib: float
    multiprocessors: int
    driver: str
    clocks: str  # as nvidia-smi prints them
    torch: str
    cuda: str
    triton: str
    nixl: str
    python: str
    host: str
    num_cpus: int


class Unreached(msgspec.Struct, frozen=True, tag="unreached"):
    """A case or check for which the section had no time left."""

    key: str


Event = Measured | Check | Note | Unreached | Environment | Floors


def events_file(out: Path, section: str) -> Path:
    """Return the file that a section's process appends its events to."""
    return out / f"{section}.jsonl"


class Row(msgspec.Struct, frozen=True):
    """A row. `floor_share` is the floor's time over the measured time, 1 at the floor."""

    key: str
    unit: Unit
    value: float | None
    low: float | None = None
    high: float | None = None
    floor_share: float | None = None
    host_us: float | None = None
    target: float | None = None
    stretch: float | None = None
    verdict: Verdict = ""
    note: str = ""
    error: str = ""


class Section(msgspec.Struct):
    """The result of a section. `reason` says why the section is not complete.

    A section is complete when all of it was reached and nothing failed.
    """

    name: str
    title: str
    budget_s: float
    wall_s: float = 0.0
    state: State = "skipped"
    reason: str = ""
    rows: list[Row] = msgspec.field(default_factory=list)
    checks: list[Check] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)

    def settle(self, unreached: Sequence[str]) -> None:
        """Set the state by the rows, the checks and the keys that were not reached."""
        self.notes += [f"{key}: no time was left" for key in unreached]
        if self.state != "complete":
            return
        failed = [row.key for row in self.rows if row.error]
        failed += [check.key for check in self.checks if check.has_failed]
        if failed:
            self.state, self.reason = "failed", f"{len(failed)} of its cases: {failed[0]}"
        elif unreached:
            self.state = "cut short"
            self.reason = f"no time for {len(unreached)} of its cases: {unreached[0]}"


class GpuReport(msgspec.Struct):
    provenance: Provenance
    environment: Environment | None = None
    floors: Floors | None = None
    sections: list[Section] = msgspec.field(default_factory=list)
    schema: str = SCHEMA

    @property
    def has_passed(self) -> bool:
        """Return whether every section is complete. A missed target is not a failure."""
        return all(section.state == "complete" for section in self.sections)


class Judge(msgspec.Struct, frozen=True):
    """The maker of rows, with the run's floors, and targets where they hold."""

    floors: Floors | None
    targets: dict[str, Target]

    def row(self, measured: Measured) -> Row:
        timing = measured.timing
        if timing is None:
            return Row(
                measured.key, measured.unit, measured.value, note=measured.note,
                error=measured.error,
            )  # fmt: skip
        floor_s = None if self.floors is None else self.floors.seconds(measured.work)
        value, low, high = (
            _value(measured, seconds, floor_s)
            for seconds in (timing.median_s, timing.low_s, timing.high_s)
        )
        if low is not None and high is not None and low > high:  # the longest time, the least rate
            low, high = high, low
        target, stretch = self._target(measured, floor_s)
        return Row(
            measured.key, measured.unit, value, low, high,
            floor_s / timing.median_s if floor_s else None,
            None if timing.host_s is None else 1e6 * timing.host_s,
            target, stretch, _verdict(measured.unit, value, target, stretch), measured.note,
        )  # fmt: skip

    def _target(
        self, measured: Measured, floor_s: float | None
    ) -> tuple[float | None, float | None]:
        wanted = self.targets.get(measured.key)
        if wanted is None:
            return None, None
        if not wanted.adds_floor:
            return wanted.release, wanted.stretch
        if floor_s is None:
            return None, None
        return wanted.release + {"ms": 1e3, "µs": 1e6}.get(measured.unit, 1.0) * floor_s, None


def targets_for(environment: Environment | None, targets: dict[str, Target]) -> dict[str, Target]:
    """Return the targets, which hold for one GPU; on any other there are none."""
    holds = environment is not None and TARGETS_HOLD_FOR in environment.gpu
    return targets if holds else {}


def _value(measured: Measured, seconds: float, floor_s: float | None) -> float | None:
    match measured.unit:
        case "TFLOP/s":
            return measured.work.num_flops / seconds / 1e12
        case "TB/s":
            return (measured.payload_bytes or measured.work.num_bytes) / seconds / 1e12
        case "µs":
            return 1e6 * seconds
        case "ms":
            return 1e3 * seconds
        case "x floor":
            return seconds / floor_s if floor_s else None
        case _:
            return seconds


def _verdict(
    unit: Unit, value: float | None, target: float | None, stretch: float | None
) -> Verdict:
    if value is None or target is None:
        return ""

    def reaches(wanted: float) -> bool:
        return value >= wanted if unit in RATES else value <= wanted

    if stretch is not None and reaches(stretch):
        return "stretch"
    return "met" if reaches(target) else "missed"


def markdown(section: Section) -> str:
    """Return the section as Markdown: its rows, its checks and its notes."""
    lines = [f"## {section.title}", ""]
    if section.state != "complete":
        lines += [f"**{section.state}**: {section.reason}", ""]
    if section.rows:
        lines += [
            "| case | value | range | of floor | launch µs | target | | note |",
            "|---|---|---|---|---|---|---|---|",
            *(_line(row) for row in section.rows),
            "",
        ]
    if section.checks:
        lines += ["| check | | detail |", "|---|---|---|"]
        lines += [f"| {c.key} | {_mark(c)} | {_cell(c.detail)} |" for c in section.checks]
        lines.append("")
    lines += [f"- {note}" for note in section.notes]
    lines += [f"- {section.wall_s:.0f} s of a budget of {section.budget_s:.0f} s", ""]
    return "\n".join(lines)


def heading(report: GpuReport) -> str:
    """Return title, machine and definitions, which precede the sections."""
    lines = [f"# GPU benchmark, {report.provenance.created_at}", ""]
    lines.append(f"baton {report.provenance.revision}.")
    machine = report.environment
    if machine is not None:
        lines += [
            f"{machine.gpu}, {machine.memory_gib:.0f} GiB, {machine.multiprocessors} "
            f"multiprocessors, driver {machine.driver}, {machine.clocks}; {machine.host}, "
            f"{machine.num_cpus} CPUs; torch {machine.torch}, CUDA {machine.cuda}, triton "
            f"{machine.triton}, nixl {machine.nixl}, Python {machine.python}.",
        ]
        if TARGETS_HOLD_FOR not in machine.gpu:
            lines.append(f"Targets are of one {TARGETS_HOLD_FOR}; none holds for this GPU.")
    if report.floors is not None:
        lines.append(
            f"Floors, measured in this run: copy {report.floors.copy_tb_per_s:.2f} TB/s (read and "
            f"written), bf16 GEMM {report.floors.gemm_tflop_per_s:.0f} TFLOP/s."
        )
    return "\n".join([*lines, "", DEFINITIONS, ""])


DEFINITIONS = (
    "Median, least and most of the rounds after a warm-up. Kernels: replays of a CUDA graph over "
    "different data, by CUDA events. Steps: wall time of the runner's `execute`, host work "
    "included. *of floor*: the time that the bytes and operations need at this run's copy and GEMM "
    "rates, over the measured time. Causal attention counts 2·n²·heads·head size operations. "
    "*launch µs*: CPU time to launch it eagerly. Targets are release / stretch."
)


def _line(row: Row) -> str:
    spread = f"{_number(row.low)} to {_number(row.high)}" if row.low is not None else ""
    share = f"{100 * row.floor_share:.0f} %" if row.floor_share is not None else ""
    host = f"{row.host_us:.0f}" if row.host_us is not None else ""
    goals = [_number(goal) for goal in (row.target, row.stretch) if goal is not None]
    target = " / ".join(goals)
    if goals:
        target = ("≥ " if row.unit in RATES else "≤ ") + target
    value = f"{_number(row.value)} {row.unit}" if row.value is not None else "-"
    mark, note = ("**FAILED**", row.error) if row.error else (row.verdict, row.note)
    cells = (row.key, value, spread, share, host, target, mark, _cell(note))
    return "| " + " | ".join(cells) + " |"


def _number(value: float | None) -> str:
    """Return a number with three significant digits."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:300]


def _mark(check: Check) -> str:
    if check.has_failed:
        return "**FAILED**"
    return {True: "ok", False: "missed", None: "not tried"}[check.passed]


def ratio_check(key: str, ratio: float, least: float) -> Check:
    return Check(key, ratio >= least, f"{ratio:.2f}x, at least {least:g}x wanted", True)


def spread_check(key: str, values: Sequence[float], most: float) -> Check:
    """Check that the values lie within `most` of their middle, each way."""
    middle = (max(values) + min(values)) / 2
    spread = (max(values) - middle) / middle
    detail = f"±{100 * spread:.1f} %, at most ±{100 * most:.0f} % wanted"
    return Check(key, spread <= most, detail, is_target=True)
