"""Paged prefill attention on Hopper's tensor cores: which form of the kernel, its plan, its launch.

It computes what `baton.kernels.cuda.prefill_attention` does, at about twice the rate. A plan is
made once a step for all layers that see equally many keys.
"""

# ruff: noqa: PLR0913, PLR0917  (the signatures are the kernels': tensors, not records)

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from baton.kernels.constants import in_powers_of_2
from baton.kernels.cuda.paged import (
    NO_WINDOW,
    check_pool,
    num_programs,
)
from baton.kernels.hopper.attention.order import LARGEST_DIM, tile_keys
from baton.kernels.hopper.attention.prefill_kernel import prefill_kernel
from baton.kernels.hopper.attention.prefill_plan import plan_prefill
from baton.kernels.launch import Launcher, next_power_of_2
from baton.kernels.reference import pool_head_dim

CAPABILITY = (9, 0)
DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 80, 96, 112, 128, 256)
BLOCK_SIZES = (16, 32, 64)
ROWS = 64  # of a warpgroup
# By warpgroups: registers of a thread of the second one and of the producer, and at launch.
REGISTERS = {1: (232, 40, 255), 2: (232, 40, 168)}
# Of a producer that widens codes, which is a warpgroup.
WIDENING_REGISTERS = {1: (224, 152, 255), 2: (224, 56, 168)}

launch_prefill = Launcher(prefill_kernel)


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows are queries of one head, or of `pack` heads that share a KV head."""

    warpgroups: int
    pack: int
    dim: int  # the padded head size
    keys: int
    stages: int

    @property
    def queries(self) -> int:
        return ROWS * self.warpgroups // self.pack

    def __str__(self) -> str:
        return f"tiles of {self.queries} queries and {self.pack} heads"


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    tile: Tile
    items: Tensor  # of `plan_prefill`
    num_programs: int
    window: int | None
    cuts: bool  # whether a token has the bits that `one_decode_attention` gives it
    kv: TensorDescriptor  # of the pool; it takes the host as long as a launch


def tiles_of(q: Tensor, pool: Tensor, *, cuts: bool) -> tuple[Tile, Tile]:
    """Return the tiles for chunks of few tokens and for others. Both give a token equal bits."""
    dim = max(64, next_power_of_2(q.shape[2]))
    # The room of a tile is taken for longer where its codes are widened there.
    has_room = dim == 64 or (dim == 128 and pool.dtype == torch.uint8 and not cuts)
    stages = 3 if has_room else 2
    sizes = (dim, tile_keys(dim), stages)
    pack = next_power_of_2(q.shape[1] // pool.shape[1])
    # Two warpgroups have no room for the sums of the cuts before in heads above 128.
    warpgroups = 1 if cuts and dim > LARGEST_DIM else 2
    return Tile(1, pack, *sizes), Tile(warpgroups, 1, *sizes)


def tile_for(q: Tensor, pool: Tensor, batch: int, *, cuts: bool) -> Tile:
    """Return the tile for `batch` chunks, of which `q` are the tokens.

    Chunks that mostly fit one warpgroup's rows with all heads of a group take such tiles.
    """
    few, many = tiles_of(q, pool, cuts=cuts)
    return few if len(q) <= few.queries * batch else many


def prefill_plan(
    q: Tensor,  # [num_tokens, num_heads, head_dim]
    pool: Tensor,  # [num_blocks, kv_heads, num_layers, 2, block_size, head_dim]
    query_starts: Tensor,  # [batch + 1] int32
    context_lens: Tensor,  # [batch] int32
    window: int | None = None,
    *,
    cuts: bool = False,
    tile: Tile | None = None,
    programs: int | None = None,
) -> PrefillPlan:
    """Return the plan of a step for a pool; `q` tells sizes alone.

    `cuts` gives a token the bits that `one_decode_attention` gives it.
    """
    num_tokens, num_heads, _ = q.shape
    kv_heads = pool.shape[1]
    group = num_heads // kv_heads
    if tile is None:
        tile = tile_for(q, pool, len(context_lens), cuts=cuts)
    count = programs or num_programs(q.device, 1)
    items = plan_prefill(
        query_starts,
        context_lens,
        num_tokens,
        kv_heads,
        group,
        group if tile.pack == 1 else 1,
        tile.queries,
        tile.keys,
        2 * pool.shape[5] * pool.element_size(),
        count,
        window,
    )
    return PrefillPlan(tile, items, count, window, cuts, _rows(pool))


def paged_prefill_attention(
    q: Tensor,  # [num_tokens, num_heads, head_dim]
    pool: Tensor,  # [num_blocks, kv_heads, num_layers, 2, block_size, head_dim]
    layer: int,
    block_tables: Tensor,  # [batch, max_blocks] int32
    plan: PrefillPlan,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [num_heads] fp32
) -> Tensor:
    """Return the attention of every new token over its own past, shaped as `q`; `scale` > 0.

    The kernel does not write rows of padding.
    """
    check_pool(q, pool, block_tables)
    _, num_heads, head_dim = q.shape
    group = num_heads // pool.shape[1]
    block_size = pool.shape[4]
    tile = plan.tile
    assert block_size in BLOCK_SIZES
    assert block_size <= tile.keys
    scale_log2, cap_log2 = in_powers_of_2(scale, softcap)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    is_fp8 = pool.dtype == torch.uint8
    row = _row_of(pool)
    registers, producer_registers, most_registers = (
        WIDENING_REGISTERS if is_fp8 else REGISTERS
    )[tile.warpgroups]
    launch_prefill(
        (plan.num_programs, 1, 1),
        _queries(q, pool.shape[1], tile.pack),
        plan.kv,
        None,
        None,
        plan.items,
        block_tables,
        out,
        plan.items if sinks is None else sinks,
        pool if is_fp8 else None,
        None,
        None,
        layer * pool.stride(2) // row,
        pool.stride(0) // row,
        pool.stride(1) // row,
        block_tables.stride(0),
        plan.window or NO_WINDOW,
        scale_log2,
        cap_log2,
        num_heads,
        HEAD_DIM=head_dim,
        DIM=tile.dim,
        GROUP=group,
        PACK=tile.pack,
        WARPGROUPS=tile.warpgroups,
        STAGES=tile.stages,
        KEYS=tile.keys,
        PAGE=block_size,
        WINDOWED=plan.window is not None,
        CAPPED=softcap is not None,
        SINKS=sinks is not None,
        CUTS=plan.cuts,
        LATENT=False,
        REGISTERS=registers,
        PRODUCER_REGISTERS=producer_registers,
        num_warps=4,
        maxnreg=most_registers,
    )
    return out


def _queries(q: Tensor, kv_heads: int, pack: int) -> TensorDescriptor:
    """Describe queries so that a box is 64 rows of 64 numbers: of one head, or of a group's."""
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // kv_heads
    return described(
        q,
        [num_tokens, kv_heads, group, head_dim],
        [q.stride(0), group * head_dim, head_dim, 1],
        [ROWS // pack, 1, pack, 64],
    )


def _row_of(pool: Tensor) -> int:
    """Return the elements of a row of a pool: a slot's, or in FP8 those of a block's tile."""
    block_size, width = pool.shape[4:]
    return block_size * width if pool.dtype == torch.uint8 else width


def _rows(pool: Tensor) -> TensorDescriptor:
    """Describe a pool as rows of keys and values; a box is 64 numbers of each row of a block.

    An FP8 pool is described as tiles of codes, which have exponents between them.
    """
    block_size = pool.shape[4]
    head_dim = pool_head_dim(pool)
    row = _row_of(pool)
    is_fp8 = pool.dtype == torch.uint8
    last = sum(
        (size - 1) * stride
        for size, stride in zip(
            pool.shape[: 4 if is_fp8 else 5], pool.stride(), strict=False
        )
    )
    assert not any(stride % row for stride in pool.stride()[:3])
    if is_fp8:
        shape = [last // row + 1, block_size, head_dim]
        columns = 64 if head_dim <= 64 else 128
        return described(pool, shape, [row, head_dim, 1], [1, block_size, columns])
    return described(pool, [last // row + 1, head_dim], [head_dim, 1], [block_size, 64])


def described(
    tensor: Tensor, shape: list[int], strides: list[int], box: list[int]
) -> TensorDescriptor:
    row_bytes = box[-1] * tensor.element_size()
    layout = _layout(len(shape), tensor.element_size(), row_bytes)
    return TensorDescriptor(tensor, shape, strides, box, layout)


@functools.cache
def _layout(rank: int, num_bytes: int, row_bytes: int) -> gl.NVMMASharedLayout:
    """Return how a box lies in shared memory whose rows fill the swizzled width."""
    return gl.NVMMASharedLayout(
        swizzle_byte_width=row_bytes, element_bitwidth=8 * num_bytes, rank=rank
    )
