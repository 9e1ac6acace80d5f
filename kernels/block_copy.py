"""Gather KV blocks into a staging buffer and scatter them back, bit for bit.

A block of all layers is contiguous in the pool, so this is a copy of long rows picked by id, in
accesses of 16 bytes. A transport that needs one contiguous region of GPU memory calls it; it knows
no layout. `reference.gather_blocks` defines the meaning.
"""

# ruff: noqa: N803, PLR0913, PLR0917
# Compile-time values are in capitals, as in Triton's own code; arguments are pointers and strides.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # words of 4 bytes: four 16-byte accesses in flight per thread


def gather_blocks(pool: Tensor, block_ids: Tensor, out: Tensor) -> None:
    """Copy the blocks `block_ids` of `[num_blocks, block_numel]` to the first rows of `out`."""
    _copy(pool, out, block_ids, gather=True)


def scatter_blocks(blocks: Tensor, block_ids: Tensor, pool: Tensor) -> None:
    """Copy the first rows of `blocks` to the blocks `block_ids`, all different, of `pool`."""
    _copy(blocks, pool, block_ids, gather=False)


def _copy(source: Tensor, target: Tensor, block_ids: Tensor, *, gather: bool) -> None:
    assert source.shape[1] == target.shape[1]
    assert source.dtype == target.dtype
    assert source.is_contiguous()
    assert target.is_contiguous()
    assert len(block_ids) <= len(target if gather else source)
    source, target = source.view(torch.int32), target.view(torch.int32)
    words = source.shape[1]
    tiles = triton.cdiv(words, TILE)
    _copy_kernel[(len(block_ids) * tiles,)](
        source, target, block_ids, words, tiles, GATHER=gather, TILE=TILE,
        num_warps=8, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["id_ptr", "tiles"])
def _copy_kernel(
    source_ptr: tl.tensor,
    target_ptr: tl.tensor,
    id_ptr: tl.tensor,
    words: tl.tensor,
    tiles: tl.tensor,
    GATHER: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0) // tiles
    block = tl.load(id_ptr + row).to(tl.int64) * words
    packed = row.to(tl.int64) * words
    w = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    if GATHER:
        value = tl.load(source_ptr + block + w, mask=w < words)
        tl.store(target_ptr + packed + w, value, mask=w < words)
    else:
        value = tl.load(source_ptr + packed + w, mask=w < words)
        tl.store(target_ptr + block + w, value, mask=w < words)
