"""The sizes of each section's cases: full, smaller for a first look, or tiny for CPUs.

Only the process of a section imports it. The smoke sizes keep what tells whether a GPU works at
all: every kernel once, and the split. The tiny sizes run in Triton's interpreter, where times mean
nothing: they show that each case calls its kernel correctly.
"""

import msgspec

from tools.gpu.batches import Heads
from tools.gpu.cases import (
    KERNELS,
    STEPS,
    CopyCase,
    DecodeCase,
    KernelCases,
    KvRead,
    PrefillCase,
    SamplingCase,
    StepCase,
    TokensCase,
)
from tools.gpu.correctness import BLOCK_SIZES, MODELS, Model
from tools.gpu.floors import Shape
from tools.gpu.split import SplitPlan
from tools.gpu.transfer import TransferPlan

WEIGHTS = {  # [out, in] of Qwen3-8B
    "qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (24_576, 4096), "down": (4096, 12_288),
    "head": (151_936, 4096),
}  # fmt: skip


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
    split: SplitPlan = SplitPlan()
    transfer: TransferPlan = TransferPlan()


WHOLE = Sizes(weights=WEIGHTS)
SMOKE = Sizes(
    copy_bytes=1 << 30, models=MODELS[1:], block_sizes=(16,), steps=(), weights=None,
    split=SplitPlan(prompts=(512,), rounds=3, warm_ups=1), transfer=TransferPlan(rounds=5),
)  # fmt: skip
_TINY_SHAPE = Shape("tiny", 64, 96, 2, 2, 1, 32, 640, is_tied=True)
TINY = Sizes(
    copy_bytes=1 << 16,
    gemm_size=32,
    models=(
        Model(
            "tiny", Heads(4, 2, 32), 64, 96, 200, 64,
            decode_contexts=(37, 0, 16), long_contexts=(270,), prompts=((20, 9), (5, 3)),
            fused_tokens=5,
        ),
    ),
    block_sizes=(16,),
    kernels=KernelCases(
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
    ),
    steps=(
        StepCase(_TINY_SHAPE, "decode", 3, 20),
        StepCase(_TINY_SHAPE, "prefill", 1, 40),
        StepCase(_TINY_SHAPE, "prefill", 1, 40, chunk_tokens=16),
    ),
    weights={"small": (48, 64)},
    rounds=1,
    split=SplitPlan(
        shape=_TINY_SHAPE, device="cpu", prompts=(40,), num_tokens=8, warm_ups=1, rounds=2,
        memory_mib=64,
    ),
    transfer=TransferPlan(
        device="cpu", block_bytes=4096, reads=(KvRead("8 MB", 3), KvRead("64 MB", 7)),
        transports=("shm", "nixl"), rounds=2,
    ),
)  # fmt: skip


def sizes_of(device: str, *, is_smoke: bool) -> Sizes:
    """Return what to run; the graphs of a CPU are its own calls."""
    if device == "cpu":
        return TINY
    return SMOKE if is_smoke else WHOLE
