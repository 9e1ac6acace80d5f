"""A process that runs the kernel sections of the GPU benchmark in Triton's interpreter, tiny.

Triton decides at import whether it interprets, so `tests/unit/bench/test_gpu_sections.py` starts
this one, with `TRITON_INTERPRET=1`. It prints every event as a JSON line. Times mean nothing; what
counts is that each case calls its kernel as the kernel wants to be called.
"""

import sys
import warnings

import msgspec
import torch

from baton.runtime.clock import monotonic
from tools.gpu import correctness as gpu_correctness
from tools.gpu import engine as gpu_engine
from tools.gpu import kernels as gpu_kernels
from tools.gpu.batches import Heads
from tools.gpu.cases import (
    CopyCase,
    DecodeCase,
    KernelCases,
    PrefillCase,
    SamplingCase,
    StepCase,
    TokensCase,
)
from tools.gpu.correctness import Model
from tools.gpu.floors import Shape
from tools.gpu.rows import Event
from tools.gpu.section import Desk
from tools.gpu.timing import Stopwatch, measure_floors

TINY_MODEL = Model(
    "tiny", Heads(4, 2, 32), 64, 96, 200, 64,
    decode_contexts=(37, 0, 16), long_contexts=(270,), prompts=((20, 9), (5, 3)),
    fused_tokens=5,
)  # fmt: skip
TINY_CASES = KernelCases(
    num_heads=4, num_kv_heads=2, head_dim=32, hidden_size=64, intermediate_size=96,
    vocab_size=200, block_values=64,
    prefill=(PrefillCase("prefill attention tiny", 20),),
    decode=(
        DecodeCase("decode attention tiny", (17, 3), num_layers=2),
        DecodeCase("decode attention tiny, blocks of 32", (17, 3), block_size=32, num_layers=2),
        DecodeCase("decode attention ragged tiny", (17, 1), unit="x floor", num_layers=2),
    ),
    copies=(CopyCase("1 block", 1, unit="µs"), CopyCase("2 blocks", 2)),
    fused=(
        TokensCase("norm tiny", "norm", 3),
        TokensCase("rope tiny", "rope", 3, unit="µs"),
        TokensCase("silu tiny", "silu", 3),
    ),
    sampling=(SamplingCase("sampling tiny", 3, 0.8, 5, 0.9),),
)  # fmt: skip
TINY_SHAPE = Shape("tiny", 64, 96, 2, 2, 1, 32, 640, is_tied=False)
TINY_STEPS = (
    StepCase(TINY_SHAPE, "decode", 3, 20),
    StepCase(TINY_SHAPE, "prefill", 1, 40),
    StepCase(TINY_SHAPE, "prefill", 1, 40, chunk_tokens=16),
)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    watch = Stopwatch(torch.device("cpu"), rounds=1)
    # The interpreter is slow with many calls; figures are not the point.
    gpu_kernels.WARM_CALLS = 2
    desk = Desk(watch, _print, monotonic, monotonic() + 600.0)
    _print(measure_floors(watch, 1 << 16, 32))
    gpu_correctness.run(desk, (TINY_MODEL,))
    gpu_kernels.run(desk, TINY_CASES)
    gpu_engine.run(desk, TINY_STEPS, rounds=1)
    _print(gpu_engine.agreement(torch.device("cpu"), TINY_SHAPE))
    case = TINY_STEPS[0]
    cache = gpu_engine.build(case.shape, 8, desk.device).cache
    decoder = gpu_engine.random_decoder(case.shape, torch.bfloat16, desk.device)
    runner = gpu_engine.make_runner(case.shape, decoder, cache, 64, with_kernels=True)
    _print(gpu_engine.replayed(desk, runner, case, "replayed"))


def _print(event: Event) -> None:
    sys.stdout.write(msgspec.json.encode(event).decode() + "\n")


if __name__ == "__main__":
    main()
