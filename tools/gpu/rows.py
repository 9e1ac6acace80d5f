"""Turn the measurements of the GPU sections into rows, tables and a last line for each claim.

A section runs in a process of its own and reports `Event`s; the command that started it makes rows
and tables of them here, each figure beside its floor. A claim selects checks and rows by patterns
of their keys.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from baton.bench.report.provenance import Provenance
from tools.gpu.floors import Floors, Unit, Work

State = Literal["complete", "cut short", "failed", "skipped"]
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

    Only claims that are `required` fail the report; the others are figures.
    """

    key: str
    passed: bool | None
    detail: str
    required: bool = True

    @property
    def has_failed(self) -> bool:
        return self.passed is False and self.required


class Note(msgspec.Struct, frozen=True, tag="note"):
    text: str


class Unreached(msgspec.Struct, frozen=True, tag="unreached"):
    """A case or check for which the section had no time left."""

    key: str


Event = Measured | Check | Note | Unreached | Floors


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
            self.state, self.reason = (
                "failed",
                f"{len(failed)} of its cases: {failed[0]}",
            )
        elif unreached:
            self.state = "cut short"
            self.reason = f"no time for {len(unreached)} of its cases: {unreached[0]}"


class GpuReport(msgspec.Struct):
    provenance: Provenance
    floors: Floors | None = None
    sections: list[Section] = msgspec.field(default_factory=list)
    schema: str = SCHEMA

    @property
    def has_passed(self) -> bool:
        """Return whether every section is complete. A missed target is not a failure."""
        return all(section.state == "complete" for section in self.sections)


def row_of(measured: Measured, floors: Floors | None) -> Row:
    """Return the row of a measurement, with the floor at this run's own rates."""
    timing = measured.timing
    if timing is None:
        return Row(
            measured.key,
            measured.unit,
            measured.value,
            note=measured.note,
            error=measured.error,
        )
    floor_s = None if floors is None else floors.seconds(measured.work)
    value, low, high = (
        _value(measured, seconds, floor_s)
        for seconds in (timing.median_s, timing.low_s, timing.high_s)
    )
    # The longest time, the least rate.
    if low is not None and high is not None and low > high:
        low, high = high, low
    share = floor_s / timing.median_s if floor_s else None
    host_us = None if timing.host_s is None else 1e6 * timing.host_s
    return Row(
        measured.key, measured.unit, value, low, high, share, host_us, measured.note
    )


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


def markdown(section: Section) -> str:
    """Return the section as Markdown: its rows, its checks and its notes."""
    lines = [f"## {section.title}", ""]
    if section.state != "complete":
        lines += [f"**{section.state}**: {section.reason}", ""]
    if section.rows:
        lines += [
            "| case | value | range | of floor | launch µs | note |",
            "|---|---|---|---|---|---|",
            *(_line(row) for row in section.rows),
            "",
        ]
    if section.checks:
        lines += ["| check | | detail |", "|---|---|---|"]
        lines += [
            f"| {c.key} | {_mark(c)} | {_cell(c.detail)} |" for c in section.checks
        ]
        lines.append("")
    lines += [f"- {note}" for note in section.notes]
    lines += [f"- {section.wall_s:.0f} s of a budget of {section.budget_s:.0f} s", ""]
    return "\n".join(lines)


def heading(report: GpuReport) -> str:
    """Return title, machine and definitions, which precede the sections."""
    lines = [f"# GPU benchmark, {report.provenance.created_at}", ""]
    lines.append(f"baton {report.provenance.revision}.")
    machine = report.provenance.machine
    versions = ", ".join(
        f"{name} {at}" for name, at in report.provenance.versions.items()
    )
    lines.append(
        f"{'; '.join(machine.gpus) or 'no GPU'}; {machine.system}, {versions},"
    )
    lines.append(f"{machine.num_cpus} CPUs of {machine.cpu_model}.")
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
    "*launch µs*: CPU time to launch it eagerly."
)


def _line(row: Row) -> str:
    spread = f"{_number(row.low)} to {_number(row.high)}" if row.low is not None else ""
    share = f"{100 * row.floor_share:.0f} %" if row.floor_share is not None else ""
    host = f"{row.host_us:.0f}" if row.host_us is not None else ""
    value = f"{_number(row.value)} {row.unit}" if row.value is not None else "-"
    note = f"**FAILED** {row.error}" if row.error else row.note
    cells = (row.key, value, spread, share, host, _cell(note))
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
    return {True: "ok", False: "no", None: "not tried"}[check.passed]


# --- the last lines -----------------------------------------------------------------------------

NOT_TRIED = "not tried"


class Claim(msgspec.Struct, frozen=True):
    """One line. `checks` and `rows` are patterns of keys; rows show values, checks a verdict."""

    title: str
    checks: str = ""
    rows: str = ""


CLAIMS = (
    Claim(
        "kernels = twins",
        r"(decode attention|prefill attention,|QK norm|add \+ norm|SiLU|gather and scatter"
        r"|products of|sums of|latent|sparse|penalties|sampling: device = CPU|kernels beyond).*",
    ),
    Claim("kernels are proven", r"proof of .*"),
    Claim("bits in any batch and chunking", r"(ordered|prefill attention: bits).*"),
    Claim("graph = eager", r"a replayed step has the bits.*"),
    Claim("drafts change no token", r"tokens with drafts.*"),
    Claim("capture", r"capture of .*", r"capture of .*"),
    Claim("waits per step", r"waits in a replayed step.*"),
    Claim("copies per step", r"copies to the device.*"),
    Claim("invariance per weight shape", r"rows keep their bits.*"),
    Claim("decode ms, eager", rows=r".* decode b\d+ ctx .*, eager"),
    Claim("decode ms, graph", rows=r".* decode b\d+ ctx .*, graph"),
    Claim(
        "decode ms, served by the loop", rows=r"(?!idle share).* decode b\d+ ctx \w+"
    ),
    Claim("prefill ms", rows=r".* prefill \w+( in chunks of \d+|, graph)?"),
    Claim("prefill attention and SDPA", rows=r"(prefill attention|torch SDPA) .*"),
    Claim("latent attention", rows=r"latent (decode|prefill) attention .*"),
    Claim(
        "products and cuBLAS", rows=r"(ordered|cuBLAS|int4|fp8) products of a layer.*"
    ),
    Claim("sampler", rows=r"sampling .*"),
    Claim("idle share", rows=r"idle share.*"),
    Claim("lane", r"lane .*"),
    Claim("two ranks", r"two ranks.*", r"all-reduce .*"),
    Claim("folder = transformers", r"tokens of a (folder|random model).*"),
    Claim("start conditions", r"start: .*"),
    Claim("spills", r"spills of .*"),
    Claim("ITL beside reads", rows=r"ITL .*"),
    Claim("KV reads", rows=r"KV reads .*"),
    Claim("hand-over p50 / p99", rows=r"hand-over .*"),
    Claim("split tokens = aggregated", r"greedy tokens, split against aggregated"),
    Claim(
        "streams of a killed node", r"streams of a killed.*", r"streams of a killed.*"
    ),
    Claim("start", rows=r"ready for .*"),
)


def last_lines(report: GpuReport) -> list[str]:
    """Return one line for each claim."""
    checks = [check for section in report.sections for check in section.checks]
    rows = [row for section in report.sections for row in section.rows]
    return [_claim_line(claim, checks, rows) for claim in CLAIMS]


def _claim_line(claim: Claim, checks: Sequence[Check], rows: Sequence[Row]) -> str:
    own = [
        check
        for check in checks
        if claim.checks and re.fullmatch(claim.checks, check.key)
    ]
    shown = [row for row in rows if claim.rows and re.fullmatch(claim.rows, row.key)]
    failed = [check.key for check in own if check.has_failed]
    failed += [row.key for row in shown if row.error]
    said = [*_verdict(own), *(_shown(row) for row in shown if not row.error)]
    if failed:
        said.insert(0, f"FAIL ({failed[0]}, of {len(failed)})")
    return f"{claim.title}: {'; '.join(said) or NOT_TRIED}"


def _verdict(checks: Sequence[Check]) -> list[str]:
    tried = [check for check in checks if check.passed is not None]
    if not tried:
        return [f"{NOT_TRIED} ({checks[0].detail})"] if checks else []
    if any(check.has_failed for check in tried):
        return []
    missed = [check.key for check in tried if check.passed is False]
    if missed:
        return [f"{len(tried) - len(missed)} of {len(tried)} hold, not {missed[0]}"]
    detail = f" {tried[0].detail}" if len(tried) == 1 else f" ({len(tried)})"
    return ["PASS" + detail]


def _shown(row: Row) -> str:
    if row.value is None:
        return f"{row.key} {row.note or NOT_TRIED}"
    high = f" / {row.high:.3g}" if row.key.startswith("hand-over") and row.high else ""
    share = f", {100 * row.floor_share:.0f} % of floor" if row.floor_share else ""
    return f"{row.key} {row.value:.3g}{high} {row.unit}{share}"
