"""`python -m tools.gpu`: everything there is to measure on a machine with an NVIDIA GPU.

One command, a time budget, a JSON and a Markdown report that grow with every section. Each section
runs in a process of its own, so that a broken kernel, or one that hangs, costs that section only,
and its memory is gone when the next begins. This process touches no device. Exit code 0 when every
section is complete: all of it was reached, and no row and no check failed. What this machine lacks
is said and does not count, and a missed target is a figure, not a failure. Else 1, or 2 for words
that mean nothing.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from baton.bench.report.provenance import collect, complete
from baton.protocol.errors import BatonError, NodeError
from baton.runtime.clock import Clock, monotonic
from baton.runtime.process import Child, Command, die_with_parent
from tools.gpu.cases import targets
from tools.gpu.floors import Floors
from tools.gpu.rows import (
    Check,
    Environment,
    Event,
    GpuReport,
    Judge,
    Measured,
    Note,
    Section,
    Unreached,
    events_file,
    heading,
    markdown,
    targets_for,
)

MODULE = "tools.gpu"
TOTAL_S = 510.0
CLOSING_S = 5.0  # of a section's time, between its own end and being ended
GONE_S = 15.0  # for a section's process that was killed
# Name, title, and the share of the time that it may take while the others wait. The first meets a
# machine on which nothing was read from disk yet.
SECTIONS = (
    ("environment", "Machine and floors", 90.0),
    ("correctness", "Kernels against their torch twins", 95.0),
    ("kernels", "Kernel speed", 135.0),
    ("engine", "Steps of the engine", 110.0),
    ("split", "Split against colocated", 80.0),
)


class Options(msgspec.Struct, frozen=True):
    out: Path
    total_s: float = TOTAL_S
    sections: tuple[str, ...] = tuple(name for name, _, _ in SECTIONS)


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(".baton/gpu"), help="folder of the report")
    parser.add_argument("--seconds", type=float, default=TOTAL_S, help="for everything")
    parser.add_argument(
        "--only", nargs="+", choices=[name for name, _, _ in SECTIONS], help="these sections alone"
    )
    parser.add_argument("--section", help=argparse.SUPPRESS)  # the child
    given = parser.parse_args(words)
    die_with_parent()
    try:
        check_device()
        given.out.mkdir(parents=True, exist_ok=True)
        if given.section:
            from tools.gpu.worker import work

            work(given.section, given.out, given.seconds)
            return 0
        report = run(Options(given.out, given.seconds, chosen(given.only)), words)
    except BatonError as error:
        print(f"baton: {error.message}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"baton: {given.out} cannot be written: {error}", file=sys.stderr)
        return 1
    return 0 if report.has_passed else 1


def chosen(only: Sequence[str] | None) -> tuple[str, ...]:
    """Which sections run: the machine's always does, the others need its floors."""
    names = [name for name, _, _ in SECTIONS]
    return tuple(name for name in names if not only or name in only or name == names[0])


def check_device() -> None:
    """Raises `NodeError` where there is nothing to measure."""
    import torch

    if not torch.cuda.is_available():
        raise NodeError(f"no CUDA device: torch {torch.__version__} sees no GPU to measure")


def run(options: Options, words: Sequence[str], clock: Clock = monotonic) -> GpuReport:
    """All sections, one after the other; prints and writes after each."""
    settings = {"total_s": options.total_s, "sections": options.sections}
    report = GpuReport(collect(settings, [MODULE, *words]))
    deadline_s = clock() + options.total_s
    waiting = [entry for entry in SECTIONS if entry[0] in options.sections]
    held = ""  # why the GPU is not free
    for name in options.sections:  # what an earlier run left here
        events_file(options.out, name).unlink(missing_ok=True)
    while waiting:
        name, title, _ = waiting[0]
        seconds = allotted(deadline_s - clock(), [share for _, _, share in waiting])
        section = Section(name, title, seconds)
        report.sections.append(section)
        start_s = clock()
        if held:
            section.state, section.reason = "failed", held
        elif not _run_section(section, options.out):
            held = f"the process of {name} would not end, and a busy GPU measures nothing"
        section.wall_s = clock() - start_s
        fill(report, section, read_events(events_file(options.out, name)))
        report.provenance = complete(report.provenance)
        write(report, options.out)
        print((heading(report) if name == "environment" else "") + markdown(section), flush=True)
        del waiting[0]
    return report


def allotted(left_s: float, shares: Sequence[float]) -> float:
    """Seconds for the first of the sections that wait: what others left over is spread."""
    return max(0.0, left_s) * shares[0] / sum(shares)


def _run_section(section: Section, out: Path) -> bool:
    """In a child that ends with this process, or when its time is over; whether it is gone."""
    arguments = (
        "--section", section.name, "--out", str(out),
        "--seconds", f"{max(0.0, section.budget_s - CLOSING_S):.1f}",
    )  # fmt: skip
    deadline_s = monotonic() + section.budget_s
    with (out / f"{section.name}.log").open("w") as log:
        child = Child(
            Command(section.name, arguments, MODULE),
            lambda _, line: print(line, file=log, flush=True),
        )
        try:
            if not child.wait(deadline_s):
                section.state = "cut short"
                section.reason = f"its {section.budget_s:.0f} s were over"
            elif child.exit_code:
                last = child.tail[-1] if child.tail else "it wrote nothing"
                section.state = "failed"
                section.reason = f"exit code {child.exit_code}: {last[:300]}"
            else:
                section.state = "complete"
        finally:
            child.stop()
        # A driver that is busy can keep a killed process, and its memory, for a while.
        return child.wait(monotonic() + GONE_S)


def read_events(path: Path) -> list[Event]:
    """What a section reported; a line that its end cut in two is left out."""
    decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
    events: list[Event] = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            events.append(decoder.decode(line))
        except msgspec.DecodeError:
            break
    return events


def fill(report: GpuReport, section: Section, events: Sequence[Event]) -> None:
    """Put what the section reported into it and, if it is about the machine, the report."""
    unreached: list[str] = []
    for event in events:
        match event:
            case Environment():
                report.environment = event
            case Floors():
                report.floors = event
            case Check():
                section.checks.append(event)
            case Note(text):
                section.notes.append(text)
            case Unreached(key):
                unreached.append(key)
            case Measured():
                judge = Judge(report.floors, targets_for(report.environment, targets()))
                section.rows.append(judge.row(event))
    section.settle(unreached)


def write(report: GpuReport, out: Path) -> None:
    """`report.json` and `report.md`, whole at every moment."""
    pages = [heading(report), *map(markdown, report.sections)]
    for name, content in (
        ("report.json", msgspec.json.format(msgspec.json.encode(report)) + b"\n"),
        ("report.md", "\n".join(pages).encode()),
    ):
        draft = out / f".{name}"
        draft.write_bytes(content)
        draft.rename(out / name)


if __name__ == "__main__":
    sys.exit(main())
