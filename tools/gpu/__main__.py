"""`python -m tools.gpu`: measure everything on a machine with an NVIDIA GPU.

The command has a time budget and writes a JSON and a Markdown report that grow with every section.
Each section runs in a process of its own, so that a kernel that breaks or hangs costs that section
only, and its memory is free when the next begins. This process touches no device. The exit code is
0 when every section is complete: all of it was reached, and no row and no check failed. Missing
software on this machine is reported and does not count as a failure. The exit code is 2 for unknown
arguments, else 1. The last lines say PASS, FAIL or a value for each claim.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from baton.bench.report.provenance import collect, complete
from baton.protocol.errors import BatonError, NodeError
from baton.runtime.clock import Clock, monotonic
from baton.runtime.process import Child, Command, die_with_parent
from tools.gpu.floors import Floors
from tools.gpu.rows import (
    Check,
    Event,
    GpuReport,
    Measured,
    Note,
    Section,
    Unreached,
    events_file,
    heading,
    last_lines,
    markdown,
    row_of,
)

MODULE = "tools.gpu"
PACKAGES = ("torch", "triton", "transformers", "nixl-cu13", "nixl-cu12")
TOTAL_S = 200.0
SMOKE_S = 120.0
CLOSING_S = 3.0  # the part of a section's time between its own end and a forced one
GONE_S = 15.0  # the longest wait for a section's process that was killed
# Name, title, and the share of the time that a section may take while the others wait. What tells
# most comes first; the first section runs on a machine that has read nothing from disk yet.
SECTIONS = (
    ("environment", "Machine and floors", 18.0),
    ("correctness", "Kernels against their torch references", 40.0),
    ("engine", "Steps of the engine", 48.0),
    ("split", "Split against aggregated", 36.0),
    ("kernels", "Kernel speed", 26.0),
    ("transfer", "Reads between two processes", 14.0),
    ("folder", "A model's folder against transformers", 10.0),
    ("ranks", "Two ranks", 8.0),
)
SMOKE_SECTIONS = ("environment", "correctness", "split", "transfer", "folder", "ranks")


class Options(msgspec.Struct, frozen=True):
    out: Path
    total_s: float = TOTAL_S
    sections: tuple[str, ...] = tuple(name for name, _, _ in SECTIONS)
    device: str = "cuda"
    is_smoke: bool = False
    model: Path | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path(".baton/gpu"), help="folder of the report"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"time for all sections, {TOTAL_S:g} or with --smoke {SMOKE_S:g} if not given",
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="first check that the GPU works: run every kernel once, and the split",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu runs every section tiny, with TRITON_INTERPRET=1, to test this command",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[name for name, _, _ in SECTIONS],
        help="sections to run",
    )
    parser.add_argument(
        "--model", type=Path, help="a model's folder to compare with transformers"
    )
    # The child gets these.
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--start", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    die_with_parent()
    try:
        check_device(given.device)
        given.out.mkdir(parents=True, exist_ok=True)
        if given.section:
            from tools.gpu.worker import Job, work

            # Imports have taken seconds, while the section before was running.
            seconds = given.seconds or float(os.read(given.start, 64))
            work(
                Job(given.section, seconds, given.device, given.smoke, given.model),
                given.out,
            )
            return 0
        seconds = given.seconds or (SMOKE_S if given.smoke else TOTAL_S)
        only = given.only or (SMOKE_SECTIONS if given.smoke else None)
        options = Options(
            given.out, seconds, chosen(only), given.device, given.smoke, given.model
        )
        report = run(options, words)
    except BatonError as error:
        print(f"baton: {error.message}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"baton: {given.out} cannot be written: {error}", file=sys.stderr)
        return 1
    print("\n".join(last_lines(report)))
    return 0 if report.has_passed else 1


def chosen(only: Sequence[str] | None) -> tuple[str, ...]:
    """Return the sections to run; the machine's always runs, because the others need its floors."""
    names = [name for name, _, _ in SECTIONS]
    return tuple(name for name in names if not only or name in only or name == names[0])


def check_device(device: str) -> None:
    """Raise `NodeError` if there is no GPU to measure."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise NodeError(
            f"no CUDA device: torch {torch.__version__} sees no GPU to measure"
        )


def run(options: Options, words: Sequence[str], clock: Clock = monotonic) -> GpuReport:
    """Run all sections, one after the other; print and write the report after each."""
    report = GpuReport(collect([MODULE, *words], PACKAGES))
    deadline_s = clock() + options.total_s
    waiting = [entry for entry in SECTIONS if entry[0] in options.sections]
    held = ""  # why the GPU is not free
    for name in options.sections:  # remove the files of an earlier run
        events_file(options.out, name).unlink(missing_ok=True)
    with contextlib.ExitStack() as running:
        following = SectionProcess(waiting[0][0], options, running)
        while waiting:
            name, title, _ = waiting[0]
            seconds = allotted(deadline_s - clock(), [share for *_, share in waiting])
            section = Section(name, title, seconds)
            report.sections.append(section)
            start_s = clock()
            process = following
            if held:
                section.state = "failed"
                section.reason = held
            else:
                process.start(section)
                if waiting[1:]:
                    following = SectionProcess(waiting[1][0], options, running)
                if not process.end(section):
                    held = f"the process of {name} would not end, and a busy GPU measures nothing"
            section.wall_s = clock() - start_s
            fill(report, section, read_events(events_file(options.out, name)))
            report.provenance = complete(report.provenance)
            write(report, options.out)
            print(
                (heading(report) if name == "environment" else "") + markdown(section),
                flush=True,
            )
            del waiting[0]
    return report


def allotted(left_s: float, shares: Sequence[float]) -> float:
    """Return the seconds for the next section; time that others left over is spread."""
    return max(0.0, left_s) * shares[0] / sum(shares)


class SectionProcess:
    """The process of a section. It imports what it needs, then waits for its time."""

    def __init__(
        self, name: str, options: Options, running: contextlib.ExitStack
    ) -> None:
        """Spawn it; leaving `running` ends it."""
        read_end, self._write_end = os.pipe()
        running.callback(os.close, self._write_end)
        log = running.enter_context((options.out / f"{name}.log").open("w"))
        arguments = (
            "--section",
            name,
            "--out",
            str(options.out),
            "--device",
            options.device,
            "--start",
            str(read_end),
            *(("--smoke",) if options.is_smoke else ()),
            *(("--model", str(options.model)) if options.model else ()),
        )
        command = Command(name, arguments, MODULE, pass_fds=(read_end,))
        try:
            self._child = Child(
                command, lambda _, line: print(line, file=log, flush=True)
            )
        finally:
            os.close(read_end)
        running.callback(self._child.stop)
        self._deadline_s = 0.0

    def start(self, section: Section) -> None:
        """Let it run, for a time that leaves it some to end by itself."""
        self._deadline_s = monotonic() + section.budget_s
        seconds = max(0.1, section.budget_s - CLOSING_S)
        with contextlib.suppress(BrokenPipeError):  # it has failed already
            os.write(self._write_end, f"{seconds:.1f}".encode())

    def end(self, section: Section) -> bool:
        """Wait until it ends or its time is over; return whether it is gone."""
        child = self._child
        if not child.wait(self._deadline_s):
            section.state = "cut short"
            section.reason = f"its {section.budget_s:.0f} s were over"
        elif child.exit_code:
            last = child.tail[-1] if child.tail else "it wrote nothing"
            section.state = "failed"
            section.reason = f"exit code {child.exit_code}: {last[:300]}"
        else:
            section.state = "complete"
        child.stop()
        # A driver that is busy can keep a killed process, and its memory, for a while.
        return child.wait(monotonic() + GONE_S)


def read_events(path: Path) -> list[Event]:
    """Return the events that a section reported, without a last line that its end cut in two."""
    decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
    events: list[Event] = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            events.append(decoder.decode(line))
        except msgspec.DecodeError:
            break
    return events


def fill(report: GpuReport, section: Section, events: Sequence[Event]) -> None:
    """Put a section's events into it, and the floors into the report."""
    unreached: list[str] = []
    for event in events:
        match event:
            case Floors():
                report.floors = event
            case Check():
                section.checks.append(event)
            case Note(text):
                section.notes.append(text)
            case Unreached(key):
                unreached.append(key)
            case Measured():
                section.rows.append(row_of(event, report.floors))
    section.settle(unreached)


def write(report: GpuReport, out: Path) -> None:
    """Write `report.json` and `report.md`, each of which is whole at every moment."""
    pages = [heading(report), *map(markdown, report.sections), *last_lines(report)]
    for name, content in (
        ("report.json", msgspec.json.format(msgspec.json.encode(report)) + b"\n"),
        ("report.md", "\n".join(pages).encode()),
    ):
        draft = out / f".{name}"
        draft.write_bytes(content)
        draft.rename(out / name)


if __name__ == "__main__":
    sys.exit(main())
