"""Attention and the fused operations on GPUs: baton's Triton kernels behind the `Backend` protocol.

Imported only where a rank computes on CUDA, because it imports Triton. Sequences at the head of a
batch that decode one token share a split-context kernel; from the first longer slice on, rows go
through the prefill kernel, which is exact for single tokens too.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.attention.backend import Batch, Chunk
from baton.kernels.decode_attention import paged_decode_attention
from baton.kernels.paged import BLOCK_SIZES, HEAD_DIMS, MAX_GROUP
from baton.kernels.prefill_attention import paged_prefill_attention
from baton.kernels.rms_norm import add_rms_norm
from baton.kernels.rope_store import rope_and_store
from baton.kernels.silu_mul import silu_mul


@dataclass(slots=True, frozen=True)
class Tables:
    """What a kernel reads of some sequences."""

    blocks: Tensor  # [batch, max_blocks] int32
    context_lens: Tensor  # [batch] int32
    query_starts: Tensor  # [batch + 1] int32, from the first of these sequences' rows


class CudaBackend:
    """Kernels over a pool in device memory."""

    name = "triton"
    is_batch_invariant = False  # the library's products are not known to be

    def __init__(
        self,
        pool: Tensor,
        num_heads: int,
        cos_sin: Tensor,
        eps: float,
        window: int | None = None,  # keys that a query sees, itself included
    ) -> None:
        self.pool = pool  # [num_blocks, kv_heads, num_layers, 2, block_size, head_dim]
        self.num_heads = num_heads
        self.kv_heads, self.block_size, self.head_dim = pool.shape[1], pool.shape[4], pool.shape[5]
        self.eps = eps
        self.window = window
        self.scale = self.head_dim**-0.5
        self._cos_sin = cos_sin.to(pool.device).contiguous()

    def begin(self, batch: Batch) -> None:
        self._positions = batch.positions
        self._slots = batch.slots
        chunks = batch.chunks
        self._num_decoding = next((i for i, s in enumerate(chunks) if s.length > 1), len(chunks))
        self._decoding = self._tables(chunks[: self._num_decoding])
        self._prompts = self._tables(chunks[self._num_decoding :])

    def _tables(self, chunks: tuple[Chunk, ...]) -> Tables | None:
        if not chunks:
            return None
        used = [chunk.block_table[: -(-chunk.end // self.block_size)] for chunk in chunks]
        width = max(len(blocks) for blocks in used)
        starts = [chunk.row - chunks[0].row for chunk in chunks]
        starts.append(starts[-1] + chunks[-1].length)
        return Tables(
            self._int32([[*blocks, *[0] * (width - len(blocks))] for blocks in used]),
            self._int32([chunk.end for chunk in chunks]),
            self._int32(starts),
        )

    def _int32(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.pool.device)

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
        if (some := self._decoding) is not None:
            parts.append(
                paged_decode_attention(
                    q[: self._num_decoding], self.pool, layer, some.blocks, some.context_lens,
                    self.scale, self.window,
                )
            )  # fmt: skip
        if (some := self._prompts) is not None:
            parts.append(
                paged_prefill_attention(
                    q[self._num_decoding :], self.pool, layer, some.blocks, some.query_starts,
                    some.context_lens, self.scale, self.window,
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


def missing_for(pool_shape: tuple[int, ...], num_heads: int) -> str:
    """Return why the kernels cannot serve this model and pool; empty if they can."""
    _, kv_heads, _, _, block_size, head_dim = pool_shape
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
