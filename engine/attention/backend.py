"""The interface of a decoder to the device it runs on, and the batch of one step.

The decoder is the same on every device. A backend provides attention over the paged pool and the
few operations that are fused differently. The rank's loader makes it and `engine.models` calls it.
A backend never sees requests, keys or plans, and never decides which token is computed.
"""

from dataclasses import dataclass
from typing import Protocol

import msgspec
from torch import Tensor


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """Tokens [start, start + length) of one sequence, in rows [row, row + length) of the batch.

    The pool holds the keys and values of every position below `start`, but not yet those of the
    chunk.
    """

    row: int
    start: int
    length: int
    block_table: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(slots=True, frozen=True)
class Tables:
    """The sequences of a batch as kernels read them on the device.

    The first `num_decoding` sequences have one row each. `query_starts` counts the rows of the
    others, beginning with their first row.
    """

    blocks: Tensor  # [num_sequences, num_blocks] int32
    context_lens: Tensor  # [num_sequences] int32; 0 is padding
    query_starts: Tensor  # [num_sequences - num_decoding + 1] int32, or empty
    num_decoding: int


@dataclass(slots=True, frozen=True)
class Batch:
    """The tokens of one step, packed: a row for each.

    `chunks` on the host and `tables` on the device describe the same; a backend reads one of them.
    """

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    slots: Tensor  # [num_tokens] int64: block * block_size + offset, -1: not stored
    chunks: tuple[Chunk, ...]
    tables: Tables | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.slots)


class Backend(Protocol):
    """One device's attention and fused operations over one pool.

    `name` differs between backends that compute different bits. `is_batch_invariant` says that the
    bits of a token depend on its own sequence alone. `table_blocks` is the number of blocks of the
    longest sequence if the backend reads `Batch.tables`, or 0 if it reads chunks.
    """

    @property
    def name(self) -> str: ...

    @property
    def is_batch_invariant(self) -> bool: ...

    @property
    def table_blocks(self) -> int: ...

    def begin(self, batch: Batch) -> None:
        """Prepare what all layers of this step share."""
        ...

    def attend(
        self, layer: int, qkv: Tensor, head_norms: Tensor | None, rows: Tensor | None = None
    ) -> Tensor:
        """Store the batch's keys and values, and return `[num_tokens, num_heads * head_dim]`.

        With `rows`, return those rows of it alone.

        `qkv` is the packed projection `[num_tokens, (num_heads + 2 * kv_heads) * head_dim]`.
        `head_norms`, one RMS norm weight for each query and key head
        `[num_heads + kv_heads, head_dim]`, is applied before the rotation.
        """
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return the RMS norm of `x + residual`, and that sum, both `[num_rows, hidden]`."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return `silu(gate) * up` of `[num_rows, 2 * features]`, gates first."""
        ...
