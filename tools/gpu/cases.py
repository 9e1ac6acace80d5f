"""The cases of the GPU benchmark, as data: what each section measures."""

from typing import Literal

import msgspec

from baton.protocol.config import Deterministic
from tools.gpu.floors import (
    LLAMA3_8B,
    MISTRAL_7B,
    QWEN3_06B,
    QWEN3_8B,
    QWEN3_8B_INT4,
    Shape,
    Unit,
)

Heads = tuple[int, int, int]  # those of queries, those of keys, and their size


class PrefillCase(msgspec.Struct, frozen=True):
    """Causal attention of one prompt, all in one chunk."""

    key: str
    num_tokens: int
    unit: Unit = "TFLOP/s"
    window: int | None = None
    heads: Heads | None = None  # None: those that most cases have
    is_fp8: bool = False  # the pool


class DecodeCase(msgspec.Struct, frozen=True):
    """Decode attention of one layer; calls go from layer to layer, so that the L2 stays cold."""

    key: str
    contexts: tuple[int, ...]
    unit: Unit = "TB/s"
    block_size: int = 16
    num_layers: int = 8
    window: int | None = None
    heads: Heads | None = None  # None: those that most cases have
    is_fp8: bool = False  # the pool
    rows: int = 1  # of each sequence: its last token and guesses

    @property
    def num_seen(self) -> int:
        """Return the keys that all sequences see together."""
        return sum(min(context, self.window or context) for context in self.contexts)


class LatentCase(msgspec.Struct, frozen=True):
    """Latent attention of one layer: the last `queries[i]` of `contexts[i]` tokens are new."""

    key: str
    contexts: tuple[int, ...]
    queries: tuple[int, ...]
    unit: Unit
    num_layers: int = 8


class ProductCase(msgspec.Struct, frozen=True):
    """The linear layers of one decoder layer, one after the other, for some rows."""

    rows: int
    linears: tuple[tuple[int, int], ...]  # outputs and inputs
    unit: Unit = "µs"

    def key(self, product: str) -> str:
        return f"{product} products of a layer, {self.rows} rows"


class KvRead(msgspec.Struct, frozen=True):
    """Blocks that one process reads of another's pool."""

    name: str
    num_blocks: int

    def key(self, lane: str) -> str:
        return f"KV reads {self.name}, {lane}"


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

    heads: Heads
    vocab_size: int
    prefill: tuple[PrefillCase, ...]
    decode: tuple[DecodeCase, ...]
    sampling: tuple[SamplingCase, ...]
    products: tuple[ProductCase, ...] = ()
    # Heads of queries, and the latent and the rotated numbers of a row.
    latent_sizes: tuple[int, int, int] = (16, 512, 64)
    latent: tuple[LatentCase, ...] = ()


class StepCase(msgspec.Struct, frozen=True):
    """A step of the whole engine: `batch` sequences that decode, or a prompt of `context` tokens.

    `max_num_batched_tokens` cuts the prompt; 0 computes it in one step. `deterministic` is the
    setting that chooses the kernels.
    """

    shape: Shape
    kind: Literal["decode", "prefill"]
    batch: int
    context: int
    max_num_batched_tokens: int = 0
    deterministic: Deterministic = "false"

    @property
    def model(self) -> str:
        if self.deterministic == "false":
            return self.shape.name
        return f"{self.shape.name}, deterministic {self.deterministic},"

    @property
    def key(self) -> str:
        if self.kind == "decode":
            return f"{self.model} decode b{self.batch} ctx {short(self.context)}"
        chunked = (
            f" in chunks of {self.max_num_batched_tokens}"
            if self.max_num_batched_tokens
            else ""
        )
        return f"{self.model} prefill {short(self.context)}{chunked}"


def short(count: int) -> str:
    """Return 4096 as 4k."""
    return f"{count // 1024}k" if count and count % 1024 == 0 else str(count)


GEMMA2_9B_HEADS = (16, 8, 256)
# Heads and words of Qwen3-8B.
KERNELS = KernelCases(
    heads=(32, 8, 128),
    vocab_size=151_936,
    prefill=(
        PrefillCase("prefill attention 4k", 4096),
        PrefillCase("prefill attention 8k", 8192),
        PrefillCase("prefill attention 16k", 16_384),
        PrefillCase("prefill attention 16k, window 4k", 16_384, window=4096),
        PrefillCase("prefill attention 8k, FP8 pool", 8192, is_fp8=True),
        PrefillCase(
            "prefill attention 4k, heads of Gemma-2-9B", 4096, heads=GEMMA2_9B_HEADS
        ),
        PrefillCase(
            "prefill attention 16k, heads of Gemma-2-9B", 16_384, heads=GEMMA2_9B_HEADS
        ),
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
        DecodeCase(
            "decode attention b32 ctx 4k, blocks of 32", (4096,) * 32, block_size=32
        ),
        DecodeCase(
            "decode attention b32 ctx 4k, blocks of 64", (4096,) * 32, block_size=64
        ),
        DecodeCase(
            "decode attention b32 ctx 4k, blocks of 128", (4096,) * 32, block_size=128
        ),
        DecodeCase(
            "decode attention b32 ctx 4k, pool of 36 layers",
            (4096,) * 32,
            num_layers=36,
        ),
        DecodeCase(
            "decode attention ragged, one 32k and 63 x 512",
            (32_768, *(512,) * 63),
            "x floor",
        ),
        *(
            DecodeCase(
                f"decode attention b{batch} ctx 32k, 4 rows",
                (32_768,) * batch,
                "µs",
                rows=4,
            )
            for batch in (1, 8)
        ),
        DecodeCase(
            "decode attention b32 ctx 16k, window 4k", (16_384,) * 32, window=4096
        ),
        DecodeCase("decode attention b32 ctx 4k, FP8 pool", (4096,) * 32, is_fp8=True),
        DecodeCase(
            "decode attention b32 ctx 4k, heads of Gemma-2-9B",
            (4096,) * 32,
            heads=GEMMA2_9B_HEADS,
        ),
    ),
    sampling=(
        SamplingCase("sampling b128, greedy", 128),
        SamplingCase("sampling b128, top-k 50 and top-p 0.9", 128, 0.8, 50, 0.9),
        SamplingCase("sampling b128, top-p 0.9", 128, 0.8, 0, 0.9),
        # Some of these rows need the order of the whole vocabulary, and the batch waits for them.
        SamplingCase("sampling b128, top-p 0.9, flat", 128, 0.8, 0, 0.9, spread=3.0),
    ),
    products=tuple(
        ProductCase(rows, QWEN3_8B.linears) for rows in (1, 32, 128, 512, 2048, 8192)
    ),
    # The sizes of DeepSeek-V2-Lite, and of DeepSeek-V3 on eight ranks.
    latent=(
        *(
            LatentCase(
                f"latent decode attention b{batch} ctx 4k",
                (4096,) * batch,
                (1,) * batch,
                "µs",
            )
            for batch in (1, 32, 128)
        ),
        *(
            LatentCase(
                f"latent prefill attention {short(count)}",
                (count,),
                (count,),
                "TFLOP/s",
                num_layers=2,
            )
            for count in (4096, 8192)
        ),
    ),
)


SETTINGS: tuple[Deterministic, ...] = ("false", "auto")
WINDOWED: tuple[tuple[Literal["decode", "prefill"], int], ...] = (
    ("decode", 16),
    ("prefill", 1),
)
# The cases in the order of measuring: a section whose time is over has left out the last ones.
STEPS = (
    *(StepCase(QWEN3_8B, "decode", batch, 1024) for batch in (1, 32, 128)),
    *(StepCase(QWEN3_8B, "prefill", 1, context) for context in (64, 2048, 8192)),
    StepCase(QWEN3_8B, "prefill", 1, 8192, 512),  # as it is served
    # What the default costs beside the same cases above.
    *(
        StepCase(QWEN3_8B, "decode", batch, 1024, deterministic="auto")
        for batch in (1, 32, 128)
    ),
    StepCase(QWEN3_8B, "prefill", 1, 8192, deterministic="auto"),
    *(StepCase(QWEN3_06B, "decode", batch, 1024) for batch in (1, 32, 128)),
    *(StepCase(QWEN3_06B, "prefill", 1, context) for context in (2048, 8192)),
    StepCase(QWEN3_06B, "prefill", 1, 8192, 512),
    *(StepCase(QWEN3_8B_INT4, "decode", batch, 1024) for batch in (1, 32, 128)),
    StepCase(QWEN3_8B_INT4, "prefill", 1, 8192),
    *(
        StepCase(MISTRAL_7B, kind, batch, 8192, deterministic=setting)
        for setting in SETTINGS
        for kind, batch in WINDOWED
    ),
    StepCase(QWEN3_8B, "decode", 128, 4096),
    *(StepCase(LLAMA3_8B, "decode", batch, 1024) for batch in (1, 32, 128)),
)

# 9 and 65 MiB: the blocks of 64 and of 464 tokens of an 8B model.
KV_READS = (KvRead("8 MB", 4), KvRead("64 MB", 29))
HANDOVER_PROMPTS = (512, 2048, 4096)


def handover_key(num_tokens: int) -> str:
    return f"hand-over overhead, {num_tokens} tokens"
