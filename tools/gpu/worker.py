"""Run one section of the GPU benchmark, in the child process that `gpu` starts for it.

It writes every event to the section's file as soon as it is known. Nothing is kept for the end: the
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
from tools.gpu.sizes import Sizes, sizes_of
from tools.gpu.timing import Stopwatch, clocks, environment, measure_floors


class Job(msgspec.Struct, frozen=True):
    """A section to run, for how long and on what."""

    section: str
    seconds: float
    device: str = "cuda"
    is_smoke: bool = False


def work(job: Job, out: Path) -> None:
    """Run the section; an exception from it ends the process."""
    deadline_s = monotonic() + job.seconds
    device = torch.device("cuda", 0) if job.device == "cuda" else torch.device("cpu")
    sizes = sizes_of(job.device, is_smoke=job.is_smoke)
    watch = Stopwatch(device, sizes.rounds)
    with events_file(out, job.section).open("wb") as file:
        desk = Desk(watch, lambda event: _write(file, event), monotonic, deadline_s)
        _run(job.section, desk, sizes, out)
        if job.device == "cuda":
            desk.emit(Note(f"at the end: {clocks()}"))


def _run(section: str, desk: Desk, sizes: Sizes, out: Path) -> None:
    """Import and run the section: a missing package costs that section alone."""
    match section:
        case "environment":
            desk.emit(environment(desk.device))
            copy_bytes = min(sizes.copy_bytes, desk.watch.free_bytes() // 4)
            desk.emit(measure_floors(desk.watch, copy_bytes, sizes.gemm_size))
        case "correctness":
            from tools.gpu import correctness

            correctness.run(desk, sizes.models, sizes.block_sizes, sizes.weights)
        case "split":
            from tools.gpu import split

            split.run(desk, out, sizes.split)
        case "transfer":
            from tools.gpu import transfer

            transfer.run(desk, sizes.transfer)
        case "kernels":
            from tools.gpu import kernels

            kernels.run(desk, sizes.kernels)
        case "engine":
            from tools.gpu import engine

            engine.run(desk, sizes.steps, sizes.rounds)
        case _:
            raise ConfigError(f"there is no section {section!r}")


def _write(file: BinaryIO, event: Event) -> None:
    file.write(msgspec.json.encode(event) + b"\n")
    file.flush()
