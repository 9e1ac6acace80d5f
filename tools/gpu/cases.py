"""The cases of the GPU benchmark, as data: what each section measures."""

from typing import Literal

import msgspec

from tools.gpu.floors import LLAMA3_8B, QWEN3_06B, QWEN3_8B, Shape, Unit

COLD_BYTES = 256 << 20  # several times the L2 of today's GPUs


class PrefillCase(msgspec.Struct, frozen=True):
    """Causal attention of one prompt, all in one chunk."""

    key: str
    num_tokens: int
    unit: Unit = "TFLOP/s"


class DecodeCase(msgspec.Struct, frozen=True):
    """Decode attention of one layer; calls go from layer to layer, so that the L2 stays cold."""

    key: str
    contexts: tuple[int, ...]
    unit: Unit = "TB/s"
    block_size: int = 16
    num_layers: int = 8


class CopyCase(msgspec.Struct, frozen=True):
    """Blocks gathered into a staging buffer, and scattered from one."""

    key: str
    num_blocks: int
    unit: Unit = "TB/s"

    def rotation(self, block_bytes: int) -> tuple[int, int]:
        """Return how many calls have blocks of their own, and how many buffers they rotate over."""
        payload = self.num_blocks * block_bytes
        num_calls = max(4, min(64, 2 * COLD_BYTES // payload))
        return num_calls, min(num_calls, max(4, -(-COLD_BYTES // payload)))


class KvRead(msgspec.Struct, frozen=True):
    """Blocks that one process reads of another's pool."""

    name: str
    num_blocks: int

    def key(self, transport: str) -> str:
        return f"KV reads {self.name}, {transport}"


class TokensCase(msgspec.Struct, frozen=True):
    """A fused operation over `num_tokens` rows."""

    key: str
    kernel: Literal["norm", "rope", "silu"]
    num_tokens: int
    unit: Unit = "TB/s"


class SamplingCase(msgspec.Struct, frozen=True):
    """Normal logits with a deviation of `spread`: at 5 a nucleus is as small as a model's."""

    key: str
    batch: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    unit: Unit = "µs"
    spread: float = 5.0


class KernelCases(msgspec.Struct, frozen=True):
    """Everything that the kernel section runs, and the sizes that its cases share."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    block_values: int  # of one KV block over all layers
    prefill: tuple[PrefillCase, ...]
    decode: tuple[DecodeCase, ...]
    copies: tuple[CopyCase, ...]
    fused: tuple[TokensCase, ...]
    sampling: tuple[SamplingCase, ...]


class StepCase(msgspec.Struct, frozen=True):
    """A step of the whole engine: `batch` sequences that decode, or a prompt of `context` tokens.

    `max_num_batched_tokens` cuts the prompt; 0 computes it in one step.
    """

    shape: Shape
    kind: Literal["decode", "prefill"]
    batch: int
    context: int
    max_num_batched_tokens: int = 0

    @property
    def key(self) -> str:
        if self.kind == "decode":
            return f"{self.shape.name} decode b{self.batch} ctx {short(self.context)}"
        chunked = (
            f" in chunks of {self.max_num_batched_tokens}" if self.max_num_batched_tokens else ""
        )
        return f"{self.shape.name} prefill {short(self.context)}{chunked}"


def short(count: int) -> str:
    """Return 4096 as 4k."""
    return f"{count // 1024}k" if count and count % 1024 == 0 else str(count)


# Heads, widths and blocks of Qwen3-8B: a block of 16 tokens has 2.25 MiB.
KERNELS = KernelCases(
    num_heads=32, num_kv_heads=8, head_dim=128, hidden_size=4096, intermediate_size=12_288,
    vocab_size=151_936, block_values=8 * 36 * 2 * 16 * 128,
    prefill=(
        PrefillCase("prefill attention 4k", 4096),
        PrefillCase("prefill attention 8k", 8192),
        PrefillCase("prefill attention 16k", 16_384),
    ),
    decode=(
        DecodeCase("decode attention b1 ctx 1k", (1024,), "µs", num_layers=36),
        DecodeCase("decode attention b8 ctx 1k", (1024,) * 8, "µs", num_layers=36),
        DecodeCase("decode attention b32 ctx 1k", (1024,) * 32),
        DecodeCase("decode attention b128 ctx 1k", (1024,) * 128),
        DecodeCase("decode attention b32 ctx 4k", (4096,) * 32),
        DecodeCase("decode attention b8 ctx 16k", (16_384,) * 8),
        DecodeCase("decode attention b128 ctx 4k", (4096,) * 128),
        DecodeCase("decode attention b32 ctx 16k", (16_384,) * 32),
        DecodeCase("decode attention b32 ctx 4k, blocks of 32", (4096,) * 32, block_size=32),
        DecodeCase("decode attention b32 ctx 4k, blocks of 64", (4096,) * 32, block_size=64),
        DecodeCase(
            "decode attention b32 ctx 4k, blocks of 128", (4096,) * 32, block_size=128
        ),
        DecodeCase("decode attention b32 ctx 4k, pool of 36 layers", (4096,) * 32,
                   num_layers=36),
        DecodeCase("decode attention ragged, one 32k and 63 x 512", (32_768, *(512,) * 63),
                   "x floor"),
    ),
    copies=(
        CopyCase("1 block", 1, "µs"),
        CopyCase("9 MiB", 4),
        CopyCase("65 MiB", 29),
        CopyCase("261 MiB", 116),
    ),
    fused=(
        TokensCase("add + norm, 32 MiB", "norm", 4096),
        TokensCase("add + norm, b64", "norm", 64, "µs"),
        TokensCase("QK norm + rotation + store, 48 MiB", "rope", 4096),
        TokensCase("QK norm + rotation + store, b64", "rope", 64, "µs"),
        TokensCase("SiLU · mul, 96 MiB", "silu", 2048),
        TokensCase("SiLU · mul, b64", "silu", 64, "µs"),
    ),
    sampling=(
        SamplingCase("sampling b128, greedy", 128),
        SamplingCase("sampling b128, top-k 50 and top-p 0.9", 128, 0.8, 50, 0.9),
        SamplingCase("sampling b128, top-p 0.9", 128, 0.8, 0, 0.9),
        # Some of these rows need the order of the whole vocabulary, and the batch waits for them.
        SamplingCase("sampling b128, top-p 0.9, flat", 128, 0.8, 0, 0.9, spread=3.0),
    ),
)  # fmt: skip


def _decode(shape: Shape, batch: int, context: int) -> StepCase:
    return StepCase(shape, "decode", batch, context)


def _prefill(shape: Shape, context: int) -> StepCase:
    return StepCase(shape, "prefill", 1, context)


def _in_chunks(shape: Shape, context: int, max_num_batched_tokens: int) -> StepCase:
    """Return the case of a prompt as it is served."""
    return StepCase(shape, "prefill", 1, context, max_num_batched_tokens)


# The cases in the order of measuring: those that cost much memory or time come last.
STEPS = (
    _decode(QWEN3_06B, 1, 1024),
    _decode(QWEN3_06B, 32, 1024),
    _decode(QWEN3_06B, 128, 1024),
    _prefill(QWEN3_06B, 2048),
    _prefill(QWEN3_06B, 8192),
    _in_chunks(QWEN3_06B, 8192, 512),
    _decode(QWEN3_8B, 1, 1024),
    _decode(QWEN3_8B, 32, 1024),
    _decode(QWEN3_8B, 128, 1024),
    _prefill(QWEN3_8B, 2048),
    _prefill(QWEN3_8B, 8192),
    _in_chunks(QWEN3_8B, 8192, 512),
    _decode(QWEN3_8B, 128, 4096),
    _decode(LLAMA3_8B, 1, 1024),
    _decode(LLAMA3_8B, 32, 1024),
    _decode(LLAMA3_8B, 128, 1024),
)

# 9 and 65 MiB: the blocks of 64 and of 464 tokens of an 8B model.
KV_READS = (KvRead("8 MB", 4), KvRead("64 MB", 29))
GATHER, SCATTER = "gather", "scatter"
HANDOVER_PROMPTS = (512, 2048, 4096)


def handover_key(num_tokens: int) -> str:
    return f"hand-over overhead, {num_tokens} tokens"
