"""Attention and the fused operations on GPUs: baton's Triton kernels behind the `Backend` protocol.

Only ranks that compute on CUDA import this file, because it imports Triton. Sequences at the head
of a batch that decode one token share a split-context kernel. From the first longer slice on, rows
go through the prefill kernel, which is exact for single tokens too.
"""

import torch
from torch import Tensor

from baton.engine.compute.attention import Batch, Scoring
from baton.kernels import reference
from baton.kernels.constants import SILU, Gate
from baton.kernels.decode_attention import paged_decode_attention
from baton.kernels.grouped_product import add_experts
from baton.kernels.paged import BLOCK_SIZES, HEAD_DIMS, LEAST_CAPABILITY, MAX_GROUP
from baton.kernels.pool_writes import rope_and_store
from baton.kernels.prefill_attention import paged_prefill_attention
from baton.kernels.rows import add_rms_norm, gate_mul


class CudaBackend:
    """The Triton kernels over a pool in device memory."""

    def __init__(
        self,
        pool: Tensor,
        num_heads: int,
        cos_sin: Tensor,  # [(num_tables,) max_position, head_dim]
        eps: float,
        *,
        is_ordered: bool = False,
    ) -> None:
        """`is_ordered` merges keys in one order, so a row's bits do not depend on the batch."""
        self.name = "triton-ordered" if is_ordered else "triton"
        self.is_batch_invariant = is_ordered
        self.pool = pool  # [num_blocks, kv_heads, num_layers, 2, block_size, head_dim]
        self.num_heads = num_heads
        self.kv_heads, self.block_size, self.head_dim = pool.shape[1], pool.shape[4], pool.shape[5]
        self.eps = eps
        self.scoring = Scoring(self.head_dim**-0.5)
        self.table_blocks = -(-cos_sin.shape[-2] // self.block_size)
        self.rotation = 0
        self._angles = cos_sin.to(pool.device).contiguous().view(-1, *cos_sin.shape[-2:])

    def begin(self, batch: Batch) -> None:
        assert batch.tables is not None, "the kernels read tables on the device"
        self._positions, self._slots, self._tables = batch.positions, batch.slots, batch.tables

    def attend(
        self, layer: int, qkv: Tensor, head_norms: Tensor | None, rows: Tensor | None = None
    ) -> Tensor:
        heads, kv_heads = self.num_heads, self.kv_heads
        qkv = qkv.view(len(qkv), -1, self.head_dim)
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        q_norm, k_norm = (None, None) if head_norms is None else (head_norms[0], head_norms[heads])
        q = rope_and_store(
            q, k, v, self._positions, self._angles[self.rotation], self.pool, layer, self._slots,
            q_norm, k_norm, self.eps,
        )  # fmt: skip
        parts: list[Tensor] = []
        tables, decoding = self._tables, self._tables.num_decoding
        if decoding:
            parts.append(
                paged_decode_attention(
                    q[:decoding], self.pool, layer, tables.blocks[:decoding],
                    tables.context_lens[:decoding], *self.scoring, ordered=self.is_batch_invariant,
                )
            )  # fmt: skip
        if decoding < len(tables.blocks):
            parts.append(
                paged_prefill_attention(
                    q[decoding:], self.pool, layer, tables.blocks[decoding:], tables.query_starts,
                    tables.context_lens[decoding:], *self.scoring, ordered=self.is_batch_invariant,
                )
            )  # fmt: skip
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.flatten(1) if rows is None else out[rows].flatten(1)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, eps)

    def gate_mul(self, gate_up: Tensor, gate: Gate = SILU) -> Tensor:
        return gate_mul(gate_up, gate)

    def soft_cap(self, x: Tensor, softcap: float) -> None:
        reference.soft_cap(x, softcap)  # an element's bits do not depend on the others

    def add_experts(self, rows: Tensor, weights: Tensor) -> Tensor:
        return add_experts(rows, weights)


def missing_for(pool_shape: tuple[int, ...], num_heads: int, capability: tuple[int, int]) -> str:
    """Return why the kernels cannot serve this model and pool; empty if they can.

    Every row of the tables fits GPUs of `LEAST_CAPABILITY` and newer ones.
    """
    _, kv_heads, _, planes, block_size, head_dim = pool_shape
    if planes == 1:
        return "latent attention has no CUDA kernel yet; plain heads (model_impl) may have one"
    if capability < LEAST_CAPABILITY:
        least, found = (".".join(map(str, one)) for one in (LEAST_CAPABILITY, capability))
        return f"the GPU has compute capability {found}; CUDA kernels need {least} (Ampere)"
    if head_dim not in HEAD_DIMS:
        return f"heads of {head_dim} have no CUDA kernel (those of {_listed(HEAD_DIMS)} have one)"
    if block_size not in BLOCK_SIZES:
        return (
            f"cache.block_size: {block_size} has no CUDA kernel; set it to {_listed(BLOCK_SIZES)}"
        )
    if (group := num_heads // kv_heads) > MAX_GROUP:
        return f"{group} query heads share a KV head; CUDA kernels take up to {MAX_GROUP}"
    return ""


def _listed(sizes: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}"
