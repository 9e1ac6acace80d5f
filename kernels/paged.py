"""The shared part of both attention kernels: device functions of a paged pool, checks at launch.

A pool of rank 6 is addressed by three numbers, the element strides of a block and of a KV head and
the offset of the layer; inside, the `[2, block_size, head_dim]` tile of one layer and head is
contiguous. So a pool with another order of its first three axes runs through the same kernels.
Only the attention kernels call it; it knows nothing of sequences or plans.
"""

# ruff: noqa: N803  (compile-time values are in capitals, as in Triton's own code)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634  # the kernels exponentiate with base 2, which is one instruction
MAX_BATCH = 1024  # one compiled variant serves every batch: a row's bits cannot depend on it


def check_pool(q: Tensor, pool: Tensor, block_tables: Tensor) -> None:
    """Assert the layout that the attention kernels rely on."""
    _, kv_heads, _, two, block_size, head_dim = pool.shape
    assert two == 2, f"not a pool of keys and values: {tuple(pool.shape)}"
    assert pool.stride()[3:] == (block_size * head_dim, head_dim, 1), (
        "a layer of a block is contiguous"
    )
    assert block_size in (16, 32, 64, 128), f"block size {block_size}"
    assert head_dim in (32, 64, 128), f"head size {head_dim}"
    assert q.shape[2] == head_dim, f"queries of {q.shape[2]}, a pool of {head_dim}"
    assert q.stride()[1:] == (head_dim, 1), "the heads of a token are contiguous"
    assert q.dtype == pool.dtype, f"queries are {q.dtype}, the pool is {pool.dtype}"
    assert q.shape[1] % kv_heads == 0, f"{q.shape[1]} heads over {kv_heads} KV heads"
    assert q.shape[1] // kv_heads <= 16, f"{q.shape[1] // kv_heads} heads share a KV head"
    assert len(block_tables) <= MAX_BATCH, f"a batch of {len(block_tables)}"
    assert block_tables.stride(1) == 1, "a block table is contiguous"


def interpreted() -> bool:
    """Return whether Triton interprets kernels: `tl.dot` then multiplies the *bits* of bf16."""
    return bool(triton.knobs.runtime.interpret)


def num_programs(device: torch.device, per_multiprocessor: int) -> int:
    """Return how many programs fill the device, at `per_multiprocessor` on each multiprocessor."""
    if device.type != "cuda":
        return 4  # the interpreter runs them one after the other
    return torch.cuda.get_device_properties(device).multi_processor_count * per_multiprocessor


@triton.jit
def load_blocks(
    table_ptr: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Return the blocks of positions `start:start + TILE`: one id if one holds the tile, else each.

    Call it one tile ahead and carry the ids through the loop. Otherwise Triton's pipeliner copies
    the ids through shared memory as well, and leaves a single buffer to the keys and values that
    wait for them.
    """
    n = start if BLOCK_SIZE >= TILE else start + tl.arange(0, TILE)
    return tl.load(table_ptr + n // BLOCK_SIZE, mask=n < end, other=0)


@triton.jit
def slot_rows(
    blocks: tl.tensor,
    start: tl.tensor,
    stride_block: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Return the element offsets of the keys of `start:start + TILE` within layer and head."""
    offsets = (start % BLOCK_SIZE + tl.arange(0, TILE)) % BLOCK_SIZE
    return blocks.to(tl.int64) * stride_block + offsets * HEAD_DIM
