"""The least work of a GPU for a step or a kernel: its bytes and operations, and their time.

Times follow from model shapes and from the two rates that the same run has measured.
"""

from typing import Literal

import msgspec

Unit = Literal["TFLOP/s", "TB/s", "µs", "ms", "s", "GiB", "%", "x floor"]
BYTES_PER_VALUE = 2  # bf16 weights and KV
# Of a weight that keeps its codes; scales are left out.
NARROW_BYTES = {"int4": 0.5, "fp8": 1.0}
NARROW_GROUP = 128  # inputs that share a scale


class Work(msgspec.Struct, frozen=True):
    """The work that cannot be left out: each input read once, each output written once."""

    num_bytes: float = 0.0
    num_flops: float = 0.0


class Floors(msgspec.Struct, frozen=True, tag="floors"):
    """The best rates of this GPU, measured in the same run.

    `copy_tb_per_s` counts bytes read and bytes written; a kernel that only reads may pass it.
    """

    copy_tb_per_s: float
    gemm_tflop_per_s: float

    def seconds(self, work: Work) -> float:
        """Return the longer of the times for moving the bytes and for the operations."""
        moving_s = work.num_bytes / (1e12 * self.copy_tb_per_s)
        return max(moving_s, work.num_flops / (1e12 * self.gemm_tflop_per_s))


class Shape(msgspec.Struct, frozen=True):
    """A decoder's sizes, as its publisher's config.json gives them."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    is_tied: bool
    has_qk_norm: bool = True
    window: int | None = None  # keys that a token sees in each layer, itself included
    narrow: str = ""  # codes that the linear layers keep: a key of `NARROW_BYTES`

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """Return the outputs and inputs of the linear layers of one decoder layer."""
        heads = self.num_heads * self.head_dim
        rows = heads + 2 * self.num_kv_heads * self.head_dim
        hidden = self.hidden_size
        width = self.intermediate_size
        return (rows, hidden), (hidden, heads), (2 * width, hidden), (hidden, width)

    @property
    def layer_values(self) -> int:
        """Return the weights of the linear layers of one decoder layer."""
        return sum(outputs * inputs for outputs, inputs in self.linears)

    @property
    def body_values(self) -> int:
        return self.num_layers * self.layer_values

    @property
    def head_values(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def read_bytes(self) -> int:
        """Return the bytes of weights that every decode step reads: all but the embedding table."""
        per_weight = NARROW_BYTES.get(self.narrow, BYTES_PER_VALUE)
        return int(per_weight * self.body_values) + BYTES_PER_VALUE * self.head_values

    @property
    def stored_bytes(self) -> int:
        return self.read_bytes + (
            0 if self.is_tied else BYTES_PER_VALUE * self.head_values
        )

    @property
    def kv_bytes_per_token(self) -> int:
        return BYTES_PER_VALUE * 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def query_width(self) -> int:
        """Return the query values of one token in all layers; attention's work is proportional."""
        return self.num_layers * self.num_heads * self.head_dim

    def num_seen(self, context: int) -> int:
        """Return the keys that the last token of a context sees."""
        return context if self.window is None else min(context, self.window)


QWEN3_06B = Shape("Qwen3-0.6B", 1024, 3072, 28, 16, 8, 128, 151_936, is_tied=True)
QWEN3_8B = Shape("Qwen3-8B", 4096, 12_288, 36, 32, 8, 128, 151_936, is_tied=False)
LLAMA3_8B = Shape(
    "Llama-3-8B",
    4096,
    14_336,
    32,
    32,
    8,
    128,
    128_256,
    is_tied=False,
    has_qk_norm=False,
)
MISTRAL_7B = Shape(
    "Mistral-7B-v0.1",
    4096,
    14_336,
    32,
    32,
    8,
    128,
    32_000,
    is_tied=False,
    has_qk_norm=False,
    window=4096,
)
QWEN3_8B_INT4 = msgspec.structs.replace(
    QWEN3_8B, name="Qwen3-8B in int4", narrow="int4"
)


def decode_work(shape: Shape, batch: int, context: int) -> Work:
    """Return the work of one new token for each of `batch` sequences of `context` tokens."""
    num_seen = batch * shape.num_seen(context)
    kv_bytes = num_seen * shape.kv_bytes_per_token
    linear = 2 * batch * (shape.body_values + shape.head_values)
    attention = 4 * num_seen * shape.query_width
    return Work(shape.read_bytes + kv_bytes, linear + attention)


def prefill_work(shape: Shape, num_tokens: int) -> Work:
    """Return the work of a prompt of `num_tokens`, of which the LM head takes one row."""
    linear = 2 * num_tokens * shape.body_values + 2 * shape.head_values
    attention = causal_flops(num_tokens, shape.query_width, shape.window)
    return Work(
        shape.read_bytes + num_tokens * shape.kv_bytes_per_token, linear + attention
    )


def causal_flops(num_tokens: int, query_width: int, window: int | None = None) -> int:
    """Return the operations of causal attention, which never needs half of the score matrix."""
    hidden = 0 if window is None else max(num_tokens - window, 0)
    return 2 * (num_tokens**2 - hidden**2) * query_width
