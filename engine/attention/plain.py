"""Attention and the fused operations in plain torch, for machines without kernels.

It puts the kernels' twins behind `Backend`. They are correct on every device that torch knows, but
slow. torch chooses the order of their sums, so a token's bits may depend on the rest of the batch.
"""

import torch
from torch import Tensor

from baton.engine.attention.backend import Batch
from baton.kernels import reference

QUERIES = 128  # queries of one sequence at a time, which bounds the memory for their scores


class PlainBackend:
    name = "torch"
    is_batch_invariant = False
    table_blocks = 0

    def __init__(
        self,
        pool: Tensor,  # [num_blocks, kv_heads, num_layers, 2, block_size, head_dim]
        num_heads: int,
        cos_sin: Tensor,  # [max_position, head_dim]
        eps: float,
        window: int | None,  # keys that a query sees, itself included
    ) -> None:
        self.pool = pool
        self.num_heads = num_heads
        self.block_size, self.head_dim = pool.shape[4], pool.shape[5]
        self.eps = eps
        self.window = window
        self._cos_sin = cos_sin

    def begin(self, batch: Batch) -> None:
        self._batch = batch
        width = max(-(-chunk.end // self.block_size) for chunk in batch.chunks)
        tables, starts, lengths = [], [0], []
        for chunk in batch.chunks:
            blocks = chunk.block_table[:width]
            table = [*blocks, *[0] * (width - len(blocks))]
            for first in range(0, chunk.length, QUERIES):
                last = min(first + QUERIES, chunk.length)
                tables.append(table)
                starts.append(chunk.row + last)
                lengths.append(chunk.start + last)
        self._tables, self._starts = torch.tensor(tables), torch.tensor(starts)
        self._lengths = torch.tensor(lengths)

    def attend(
        self, layer: int, qkv: Tensor, head_norms: Tensor | None, rows: Tensor | None = None
    ) -> Tensor:
        batch, heads = self._batch, self.num_heads
        own = qkv.view(len(qkv), -1, self.head_dim)
        first_value = heads + self.pool.shape[1]
        q, k, v = own[:, :heads], own[:, heads:first_value], own[:, first_value:]
        q_norm, k_norm = (None, None) if head_norms is None else (head_norms[0], head_norms[heads])
        q = reference.rope_and_store(
            q, k, v, batch.positions, self._cos_sin, self.pool, layer,
            batch.slots, q_norm, k_norm, self.eps,
        )  # fmt: skip
        out = reference.paged_prefill_attention(
            q, self.pool, layer, self._tables, self._starts, self._lengths, self.head_dim**-0.5,
            self.window,
        )  # fmt: skip
        return out.flatten(1) if rows is None else out[rows].flatten(1)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return reference.add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return reference.silu_mul(gate_up)
