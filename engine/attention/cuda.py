"""Attention and the fused operations on GPUs: baton's Triton kernels behind the `Backend` protocol.

Imported only where a rank computes on CUDA, because it imports Triton. Sequences at the head of a
batch that decode one token share a split-context kernel; from the first longer slice on, rows go
through the prefill kernel, which is exact for single tokens too.
"""

import torch
from torch import Tensor

from baton.engine.attention.backend import Batch
from baton.kernels.decode_attention import paged_decode_attention
from baton.kernels.prefill_attention import paged_prefill_attention
from baton.kernels.rms_norm import add_rms_norm
from baton.kernels.rope_store import rope_and_store
from baton.kernels.silu_mul import silu_mul


class CudaBackend:
    """Kernels over a pool in device memory."""

    name = "triton"
    is_batch_invariant = False  # the library's products are not known to be

    def __init__(self, pool: Tensor, num_heads: int, cos_sin: Tensor, eps: float) -> None:
        self.pool = pool  # [num_blocks, kv_heads, num_layers, 2, block_size, head_dim]
        self.num_heads = num_heads
        self.kv_heads, self.block_size, self.head_dim = pool.shape[1], pool.shape[4], pool.shape[5]
        self.eps = eps
        self.scale = self.head_dim**-0.5
        self.table_blocks = -(-len(cos_sin) // self.block_size)
        self._cos_sin = cos_sin.to(pool.device).contiguous()

    def begin(self, batch: Batch) -> None:
        assert batch.tables is not None, "the kernels read tables on the device"
        self._positions, self._slots, self._tables = batch.positions, batch.slots, batch.tables

    def attend(self, layer: int, qkv: Tensor, head_norms: Tensor | None) -> Tensor:
        heads, kv_heads = self.num_heads, self.kv_heads
        qkv = qkv.view(len(qkv), -1, self.head_dim)
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        q_norm, k_norm = (None, None) if head_norms is None else (head_norms[0], head_norms[heads])
        q = rope_and_store(
            q, k, v, self._positions, self._cos_sin, self.pool, layer, self._slots,
            q_norm, k_norm, self.eps,
        )  # fmt: skip
        parts: list[Tensor] = []
        tables, decoding = self._tables, self._tables.num_decoding
        if decoding:
            parts.append(
                paged_decode_attention(
                    q[:decoding], self.pool, layer, tables.blocks[:decoding],
                    tables.context_lens[:decoding], self.scale,
                )
            )  # fmt: skip
        if decoding < len(tables.blocks):
            parts.append(
                paged_prefill_attention(
                    q[decoding:], self.pool, layer, tables.blocks[decoding:], tables.query_starts,
                    tables.context_lens[decoding:], self.scale,
                )
            )  # fmt: skip
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.flatten(1)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return silu_mul(gate_up)


def missing_for(
    pool_shape: tuple[int, ...], num_heads: int, window: int | None, max_len: int
) -> str:
    """Why the kernels cannot serve this model and pool; empty when they can."""
    _, kv_heads, _, _, block_size, head_dim = pool_shape
    if head_dim not in (32, 64, 128):
        return f"heads of {head_dim} have no CUDA kernel (32, 64 and 128 do)"
    if block_size not in (16, 32, 64, 128):
        return f"cache.block_size: {block_size} has no CUDA kernel (16, 32, 64 and 128 do)"
    if num_heads // kv_heads > 8:
        return f"{num_heads // kv_heads} query heads share a KV head; CUDA kernels take up to 8"
    if window is not None and window < max_len:
        return f"a sliding window of {window} has no CUDA kernel; set model.max_len to it or less"
    return ""
