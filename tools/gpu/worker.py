"""One section of the GPU benchmark, in the child process that `gpu` starts for it.

Writes every event to the section's file as soon as it is known. Nothing is kept for the end: the
parent may end this process at any moment.
"""

from pathlib import Path
from typing import BinaryIO

import msgspec
import torch

from baton.protocol.errors import ConfigError
from baton.runtime.clock import monotonic
from tools.gpu.rows import Event, Note, events_file
from tools.gpu.section import Desk
from tools.gpu.timing import Stopwatch, clocks, environment, measure_floors

COPY_BYTES, GEMM_SIZE = 4 << 30, 8192


def work(section: str, out: Path, seconds: float) -> None:
    """Run it; what it raises ends the process."""
    deadline_s = monotonic() + seconds
    with events_file(out, section).open("wb") as file:
        desk = Desk(
            Stopwatch(torch.device("cuda", 0)),
            lambda event: _write(file, event),
            monotonic,
            deadline_s,
        )
        _run(section, desk, out)
        desk.emit(Note(f"at the end: {clocks()}"))


def _run(section: str, desk: Desk, out: Path) -> None:
    """Each section imports what it needs: a missing package costs that section alone."""
    match section:
        case "environment":
            desk.emit(environment())
            copy_bytes = min(COPY_BYTES, desk.watch.free_bytes() // 4)
            desk.emit(measure_floors(desk.watch, copy_bytes, GEMM_SIZE))
        case "correctness":
            from tools.gpu import correctness

            correctness.run(desk)
        case "kernels":
            from tools.gpu import kernels

            kernels.run(desk)
        case "engine":
            from tools.gpu import engine

            engine.run(desk)
        case "split":
            from tools.gpu import split

            split.run(desk, out)
        case _:
            raise ConfigError(f"there is no section {section!r}")


def _write(file: BinaryIO, event: Event) -> None:
    file.write(msgspec.json.encode(event) + b"\n")
    file.flush()
