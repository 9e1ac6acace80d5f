"""Copy KV blocks between pools, or to and from a staging buffer, bit for bit.

A block holds all layers contiguously, so these kernels copy long rows, chosen by id, in accesses of
16 bytes. The `cuda_ipc` transport copies blocks of another process with them; gather and scatter
are for a transport that needs one contiguous region. They know nothing of a block's layout.
`reference.gather_blocks` and `reference.scatter_blocks` define the meaning.
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
    _copy(pool, block_ids, out, None)


def scatter_blocks(blocks: Tensor, block_ids: Tensor, pool: Tensor) -> None:
    """Copy the first rows of `blocks` to the blocks `block_ids`, all different, of `pool`."""
    _copy(blocks, None, pool, block_ids)


def move_blocks(source: Tensor, source_ids: Tensor, target: Tensor, target_ids: Tensor) -> None:
    """Copy block `source_ids[i]` of `source` to block `target_ids[i]`, all different, of `target`.

    `source` may be the memory of another GPU that this GPU can read.
    """
    assert len(source_ids) == len(target_ids)
    _copy(source, source_ids, target, target_ids)


def _copy(
    source: Tensor, source_ids: Tensor | None, target: Tensor, target_ids: Tensor | None
) -> None:
    """Launch the copy. Where ids are None, blocks are numbered consecutively."""
    assert source.shape[1] == target.shape[1]
    assert source.dtype == target.dtype
    assert source.is_contiguous()
    assert target.is_contiguous()
    ids = source_ids if source_ids is not None else target_ids
    assert ids is not None
    for rows, of in ((source, source_ids), (target, target_ids)):
        assert of is not None or len(ids) <= len(rows)
    source, target = source.view(torch.int32), target.view(torch.int32)
    words = source.shape[1]
    tiles = triton.cdiv(words, TILE)
    _copy_kernel[(len(ids) * tiles,)](
        source, target, source_ids, target_ids, words, tiles, TILE=TILE,
        num_warps=8, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["source_id_ptr", "target_id_ptr", "tiles"])
def _copy_kernel(
    source_ptr: tl.tensor,
    target_ptr: tl.tensor,
    source_id_ptr: tl.tensor,
    target_id_ptr: tl.tensor,
    words: tl.tensor,
    tiles: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0) // tiles
    source, target = row, row
    if source_id_ptr is not None:
        source = tl.load(source_id_ptr + row)
    if target_id_ptr is not None:
        target = tl.load(target_id_ptr + row)
    w = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    value = tl.load(source_ptr + source.to(tl.int64) * words + w, mask=w < words)
    tl.store(target_ptr + target.to(tl.int64) * words + w, value, mask=w < words)
