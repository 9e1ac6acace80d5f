"""Run one section of the GPU benchmark in its process, at full size, smaller, or tiny for CPUs.

Every event is written at once: the parent may end this process at any moment. The smoke sizes keep
what tells whether a GPU works at all: every kernel once, and the split. The tiny sizes run in
Triton's interpreter, where times mean nothing: they show that each case calls its kernel correctly.
"""

from pathlib import Path
from typing import BinaryIO

import msgspec
import torch

from baton.bench.report.provenance import gpu_states
from baton.deploy.doctor.machine import start_findings
from baton.model.runner.compute_facts import compute_facts
from baton.protocol.errors import ConfigError
from baton.runtime.clock import monotonic
from tools.gpu.cases import (
    KERNELS,
    STEPS,
    DecodeCase,
    KernelCases,
    KvRead,
    LatentCase,
    PrefillCase,
    ProductCase,
    SamplingCase,
    StepCase,
)
from tools.gpu.correctness import BLOCK_SIZES, MODELS, Model
from tools.gpu.floors import QWEN3_06B, Shape
from tools.gpu.rows import Check, Event, Note, events_file
from tools.gpu.section import Desk
from tools.gpu.split import SplitPlan
from tools.gpu.timing import Stopwatch, measure_floors
from tools.gpu.transfer import TransferPlan

WEIGHTS = {  # [out, in] of Qwen3-8B
    "qkv": (6144, 4096),
    "output": (4096, 4096),
    "gate_up": (24_576, 4096),
    "down": (4096, 12_288),
    "head": (151_936, 4096),
}


class Sizes(msgspec.Struct, frozen=True):
    """The cases of all sections, and how often each is measured."""

    copy_bytes: int = 4 << 30
    gemm_size: int = 8192
    models: tuple[Model, ...] = MODELS
    block_sizes: tuple[int, ...] = BLOCK_SIZES
    kernels: KernelCases = KERNELS
    steps: tuple[StepCase, ...] = STEPS
    weights: dict[str, tuple[int, int]] | None = None
    rounds: int = 15
    # Untied, because a tied random model repeats its last token.
    drafting: Shape = msgspec.structs.replace(
        QWEN3_06B, name="2 layers of 0.6B", num_layers=2, vocab_size=640, is_tied=False
    )
    split: SplitPlan = SplitPlan()
    transfer: TransferPlan = TransferPlan()


WHOLE = Sizes(weights=WEIGHTS)
SMOKE = Sizes(
    copy_bytes=1 << 30,
    models=MODELS[1:],
    block_sizes=(16,),
    steps=(),
    weights=None,
    split=SplitPlan(prompts=(512,), rounds=3, warm_ups=1),
    transfer=TransferPlan(rounds=5),
)
_TINY_SHAPE = Shape("tiny", 64, 96, 2, 2, 1, 32, 640, is_tied=True)
_SMALLEST = msgspec.structs.replace(_TINY_SHAPE, num_layers=1, vocab_size=160)
_NARROW = msgspec.structs.replace(_SMALLEST, name="tiny in int4", narrow="int4")
_WINDOWED = msgspec.structs.replace(_SMALLEST, name="tiny with a window", window=9)
TINY = Sizes(
    copy_bytes=1 << 16,
    gemm_size=32,
    models=(
        Model(
            "tiny",
            (4, 2, 32),
            64,
            96,
            1100,
            64,
            decode_contexts=(37, 0, 16),
            long_contexts=(270,),
            prompts=((20, 9), (5, 3)),
        ),
    ),
    block_sizes=(16,),
    kernels=KernelCases(
        heads=(4, 2, 32),
        vocab_size=200,
        prefill=(
            PrefillCase("prefill attention tiny", 20),
            PrefillCase("prefill attention tiny, window", 20, window=9),
            PrefillCase("prefill attention tiny, FP8 pool", 20, is_fp8=True),
        ),
        decode=(
            DecodeCase("decode attention tiny", (17, 3), num_layers=2),
            DecodeCase(
                "decode attention tiny, blocks of 32",
                (17, 3),
                block_size=32,
                num_layers=2,
            ),
            DecodeCase("decode attention tiny, 3 rows", (17, 3), num_layers=2, rows=3),
            DecodeCase(
                "decode attention ragged tiny", (17, 1), unit="x floor", num_layers=2
            ),
            DecodeCase(
                "decode attention tiny, window", (17, 3), num_layers=2, window=9
            ),
            DecodeCase(
                "decode attention tiny, FP8 pool", (17, 3), num_layers=2, is_fp8=True
            ),
        ),
        sampling=(SamplingCase("sampling tiny", 3, 0.8, 5, 0.9),),
        products=(ProductCase(3, _TINY_SHAPE.linears),),
        latent_sizes=(2, 32, 16),
        latent=(
            LatentCase("latent decode attention tiny", (17, 3), (1, 1), "µs", 2),
            LatentCase("latent prefill attention tiny", (20,), (20,), "TFLOP/s", 2),
        ),
    ),
    steps=(
        StepCase(_TINY_SHAPE, "decode", 3, 20),
        StepCase(_TINY_SHAPE, "prefill", 1, 40),
        StepCase(_TINY_SHAPE, "prefill", 1, 40, max_num_batched_tokens=16),
        StepCase(_TINY_SHAPE, "decode", 3, 20, deterministic="auto"),
        StepCase(_NARROW, "prefill", 1, 12),
        StepCase(_WINDOWED, "prefill", 1, 12, deterministic="true"),
    ),
    weights={"small": (48, 64)},
    rounds=1,
    drafting=msgspec.structs.replace(_SMALLEST, is_tied=False),
    split=SplitPlan(
        shape=_TINY_SHAPE,
        device="cpu",
        prompts=(40,),
        num_tokens=8,
        warm_ups=1,
        rounds=2,
        memory_mib=64,
        stream_tokens=200,
    ),
    transfer=TransferPlan(
        device="cpu",
        block_bytes=4096,
        reads=(KvRead("8 MB", 3), KvRead("64 MB", 7)),
        transports=("shm", "nixl"),
        rounds=2,
    ),
)


def sizes_of(device: str, *, is_smoke: bool) -> Sizes:
    """Return what to run; the graphs of a CPU are its own calls."""
    if device == "cpu":
        return TINY
    return SMOKE if is_smoke else WHOLE


class Job(msgspec.Struct, frozen=True):
    """A section to run, for how long and on what."""

    section: str
    seconds: float
    device: str = "cuda"
    is_smoke: bool = False
    model: Path | None = None


def work(job: Job, out: Path) -> None:
    """Run the section; an exception from it ends the process."""
    deadline_s = monotonic() + job.seconds
    device = torch.device("cuda", 0) if job.device == "cuda" else torch.device("cpu")
    sizes = sizes_of(job.device, is_smoke=job.is_smoke)
    watch = Stopwatch(device, sizes.rounds)
    with events_file(out, job.section).open("wb") as file:
        desk = Desk(watch, lambda event: _write(file, event), monotonic, deadline_s)
        _run(job, desk, sizes, out)
        for state in gpu_states():
            desk.emit(Note(f"at the end: {state}"))


def _run(job: Job, desk: Desk, sizes: Sizes, out: Path) -> None:
    """Import and run the section: a missing package costs that section alone."""
    match job.section:
        case "environment":
            copy_bytes = min(sizes.copy_bytes, desk.watch.free_bytes() // 4)
            desk.emit(measure_floors(desk.watch, copy_bytes, sizes.gemm_size))
            for found in start_findings(compute_facts()):
                is_needed = found.level == "fault"
                key = f"start: {found.check}"
                desk.emit(
                    Check(key, found.level == "ok", found.text, required=is_needed)
                )
        case "correctness":
            from tools.gpu import correctness

            correctness.run(desk, sizes.models, sizes.block_sizes, sizes.weights)
        case "split":
            from tools.gpu import split

            split.run(desk, out, sizes.split)
        case "transfer":
            from tools.gpu import transfer

            transfer.run(desk, sizes.transfer)
        case "ranks":
            from tools.gpu import ranks

            ranks.run(desk)
        case "folder":
            from tools.gpu import folder

            folder.run(desk, job.model)
        case "kernels":
            from tools.gpu import kernels

            kernels.run(desk, sizes.kernels)
        case "engine":
            from tools.gpu import drafts, engine

            engine.run(desk, sizes.steps, sizes.rounds)
            drafts.run(desk, sizes.drafting)
        case _:
            raise ConfigError(f"there is no section {job.section!r}")


def _write(file: BinaryIO, event: Event) -> None:
    file.write(msgspec.json.encode(event) + b"\n")
    file.flush()
