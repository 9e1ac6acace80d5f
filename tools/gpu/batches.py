"""Random batches over a paged pool on the device, as the attention kernels take them.

Blocks are scattered over the pool, whose values are drawn on the device: these are for speed, and
`kernel_cases` has those for correctness.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Heads:
    """The head counts of one layer of a model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Batch:
    q: Tensor  # [num_tokens, num_heads, head_dim], rows with a gap between
    pool: Tensor  # [num_blocks, kv_heads, num_layers, 2, block_size, head_dim]
    block_tables: Tensor  # [batch, max_blocks] int32
    query_starts: Tensor  # [batch + 1] int32
    context_lens: Tensor  # [batch] int32
    scale: float


@dataclass(frozen=True, slots=True)
class Layout:
    """The device, type and blocks of a batch's pool."""

    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    num_layers: int = 2


def paged_batch(
    heads: Heads,
    contexts: Sequence[int],
    queries: Sequence[int],
    layout: Layout,
) -> Batch:
    """Return a batch in which the last `queries[i]` of `contexts[i]` positions are new."""
    device, dtype = layout.device, layout.dtype
    needs = [-(-length // layout.block_size) for length in contexts]
    order = torch.split(1 + torch.randperm(sum(needs)).to(torch.int32), needs)
    tables = torch.zeros(len(needs), max(needs), dtype=torch.int32)
    for row, blocks in zip(tables, order, strict=True):
        row[: len(blocks)] = blocks
    pool = torch.empty(
        (sum(needs) + 1, heads.num_kv_heads, layout.num_layers, 2, layout.block_size,
         heads.head_dim),
        dtype=dtype, device=device,
    ).normal_()  # fmt: skip
    # Queries are a slice of a packed projection, as the engine's are.
    width = heads.num_heads + 2 * heads.num_kv_heads
    packed = torch.randn(sum(queries), width, heads.head_dim, device=device, dtype=dtype)
    return Batch(
        q=packed[:, : heads.num_heads],
        pool=pool,
        block_tables=tables.to(device),
        query_starts=torch.tensor([0, *queries]).cumsum(0).to(device, torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        scale=heads.head_dim**-0.5,
    )


def rotation_table(num_positions: int, head_dim: int, device: torch.device | str = "cpu") -> Tensor:
    """Return cosines, then sines, of rotary embeddings: `[num_positions, head_dim]` fp32."""
    inverse = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angle = torch.arange(num_positions)[:, None] * inverse
    return torch.cat([angle.cos(), angle.sin()], dim=1).to(device)
