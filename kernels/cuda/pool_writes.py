"""Kernels over whole KV pools: rope and store of keys and values, copies and checksums of blocks.

`reference` defines the meaning.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from baton.kernels import constants
from baton.kernels.launch import Launcher, cdiv, next_power_of_2
from baton.kernels.reference import pool_head_dim

# ruff: noqa: N803, PLR0913, PLR0917
# Compile-time values are in capitals, as in Triton's own code; arguments are pointers and strides.


def rope_and_store(
    q: Tensor,  # [num_tokens, num_heads, head_dim]
    k: Tensor | None,  # [num_tokens, kv_heads, head_dim]
    v: Tensor | None,  # [num_tokens, kv_heads, head_dim]
    positions: Tensor,  # [num_tokens]
    cos_sin: Tensor,  # [max_position, head_dim]: the cosines, then the sines
    pool: Tensor,  # [num_blocks, kv_heads, num_layers, 2, block_size, head_dim]
    layer: int,
    slot_mapping: Tensor,  # [num_tokens], -1: do not store
    q_norm_weight: Tensor | None = None,  # [head_dim]
    k_norm_weight: Tensor | None = None,  # [head_dim]
    eps: float = 1e-6,
    *,
    overlaps: bool = False,
) -> Tensor:
    """Rotate queries and keys, store keys and values, return the queries, contiguous.

    `q`, `k` and `v` may be slices of one packed projection; they are not changed. Without keys and
    values, nothing is stored. The kernel that `overlaps` starts while the one before it ends.
    """
    num_tokens, num_heads, head_dim = q.shape
    _, kv_heads, _, _, block_size, width = pool.shape
    parts = 2  # of programs: for queries, and for what is stored
    if k is None or v is None:
        parts = 1
        k = v = q
    else:
        assert k.shape == v.shape == (num_tokens, kv_heads, head_dim), (
            k.shape,
            v.shape,
            pool.shape,
        )
    assert q.stride()[1:] == k.stride()[1:] == v.stride()[1:] == (head_dim, 1), (
        "packed heads"
    )
    assert pool_head_dim(pool) == head_dim, (q.shape, pool.shape, pool.dtype)
    assert pool.stride()[3:] == (block_size * width, width, 1), (
        "a layer of a block is contiguous"
    )
    assert cos_sin.is_contiguous()
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    rows = max(next_power_of_2(num_heads), next_power_of_2(kv_heads))
    _launch_rope_store(
        (num_tokens, parts, 1),
        q,
        k,
        v,
        positions,
        cos_sin,
        pool,
        slot_mapping,
        q_norm_weight,
        k_norm_weight,
        out,
        layer * pool.stride(2),
        eps,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        pool.stride(0),
        pool.stride(1),
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        Q_ROWS=next_power_of_2(num_heads),
        KV_ROWS=next_power_of_2(kv_heads),
        HALF=next_power_of_2(head_dim // 2),
        OVERLAPS=overlaps,
        num_warps=8 if rows * head_dim > 4096 else 4,
        num_stages=1,
        enable_fp_fusion=True,
        launch_pdl=overlaps,
    )
    return out


@triton.jit(do_not_specialize=["position_ptr", "slot_ptr"])
def _rope_store_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    position_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    pool_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    layer_offset: tl.tensor,
    eps: tl.tensor,
    stride_q: tl.tensor,
    stride_k: tl.tensor,
    stride_v: tl.tensor,
    stride_block: tl.tensor,
    stride_head: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    Q_ROWS: tl.constexpr,
    KV_ROWS: tl.constexpr,
    HALF: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    if OVERLAPS:
        gdc_wait()
    half: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, HALF)[None, :]
    angle = cos_sin_ptr + tl.load(position_ptr + token).to(tl.int64) * HEAD_DIM + d
    cos = tl.load(angle, mask=d < half, other=0.0).to(tl.float32)
    sin = tl.load(angle + half, mask=d < half, other=0.0).to(tl.float32)
    if tl.program_id(1) == 0:
        head = tl.arange(0, Q_ROWS)[:, None]
        own_q = (head < HEADS) & (d < half)
        q_low, q_high = _rotated(
            q_ptr + token * stride_q + head * HEAD_DIM,
            own_q,
            q_weight_ptr,
            eps,
            cos,
            sin,
            HEAD_DIM,
            HALF,
        )
        out = out_ptr + (token * HEADS + head) * HEAD_DIM + d
        tl.store(out, q_low, mask=own_q)
        tl.store(out + half, q_high, mask=own_q)
    else:
        slot = tl.load(slot_ptr + token).to(tl.int64)
        kv_head = tl.arange(0, KV_ROWS)[:, None]
        own = (kv_head < KV_HEADS) & (slot >= 0)
        live = own & (d < half)
        place = slot // BLOCK_SIZE * stride_block + kv_head.to(tl.int64) * stride_head
        tile = pool_ptr + place + layer_offset
        low, high = _rotated(
            k_ptr + token * stride_k + kv_head * HEAD_DIM,
            live,
            k_weight_ptr,
            eps,
            cos,
            sin,
            HEAD_DIM,
            HALF,
        )
        values = v_ptr + token * stride_v + kv_head * HEAD_DIM + d
        v_low = tl.load(values, mask=live, other=0.0)
        v_high = tl.load(values + half, mask=live, other=0.0)
        if pool_ptr.dtype.element_ty == tl.uint8:
            slot %= BLOCK_SIZE
            _store_fp8(tile, slot, low, high, own, live, HEAD_DIM, BLOCK_SIZE, HALF)
            tile += BLOCK_SIZE * (HEAD_DIM + 1)
            _store_fp8(tile, slot, v_low, v_high, own, live, HEAD_DIM, BLOCK_SIZE, HALF)
        else:
            target = tile + slot % BLOCK_SIZE * HEAD_DIM + d
            tl.store(target, low, mask=live)
            tl.store(target + half, high, mask=live)
            target += BLOCK_SIZE * HEAD_DIM
            tl.store(target, v_low, mask=live)
            tl.store(target + half, v_high, mask=live)


_launch_rope_store = Launcher(_rope_store_kernel)


@triton.jit
def _rotated(
    source: tl.tensor,
    live: tl.tensor,
    weight_ptr: tl.tensor,
    eps: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    low, high = _normed_halves(source, live, weight_ptr, eps, HEAD_DIM, HALF)
    element: tl.constexpr = source.dtype.element_ty
    return (low * cos - high * sin).to(element), (high * cos + low * sin).to(element)


@triton.jit
def _store_fp8(
    tile: tl.tensor,
    slot: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    own: tl.tensor,
    live: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    """Store the halves of rows as `reference.to_fp8` says."""
    low = low.to(tl.float32)
    high = high.to(tl.float32)
    low_top = tl.max(_magnitude(low), 1)
    high_top = tl.max(_magnitude(high), 1)
    exponent = ((tl.maximum(low_top, high_top) >> 20) + 2 >> 3) - SPAN
    exponent = tl.where(exponent > MOST, 255, tl.maximum(exponent, LEAST))[:, None]
    factor = (tl.maximum(254 - exponent, 0) << 23).to(tl.float32, bitcast=True)
    target = tile + slot * HEAD_DIM + tl.arange(0, HALF)[None, :]
    tl.store(target, _e4m3(low * factor), mask=live)
    tl.store(target + HEAD_DIM // 2, _e4m3(high * factor), mask=live)
    tl.store(tile + BLOCK_SIZE * HEAD_DIM + slot, exponent.to(tl.uint8), mask=own)


@triton.jit
def _magnitude(x: tl.tensor) -> tl.tensor:
    """Return the bits of the absolute values of floats."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _e4m3(x: tl.tensor) -> tl.tensor:
    """Return the codes of the nearest e4m3 numbers, ties to even, of floats up to 448."""
    size = _magnitude(x)
    normal = (size + 0x7FFFF + (size >> 20 & 1) >> 20) - (120 << 3)
    # Below 2**-6, steps have one length, 2**-9, which is that of floats from 2**14 on.
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)
    code = tl.where(size < (121 << 23), small, normal)
    return (code | (x.to(tl.int32, bitcast=True) >> 24 & 0x80)).to(tl.uint8)


@triton.jit
def _normed_halves(
    source: tl.tensor,
    live: tl.tensor,
    weight_ptr: tl.tensor,
    eps: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    half: tl.constexpr = HEAD_DIM // 2
    d = tl.arange(0, HALF)[None, :]
    low = tl.load(source + d, mask=live, other=0.0).to(tl.float32)
    high = tl.load(source + half + d, mask=live, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD_DIM
        inverse = tl.rsqrt(mean + eps)[:, None]
        weights = weight_ptr + d
        low = low * inverse * tl.load(weights, mask=d < half, other=0.0).to(tl.float32)
        high = (
            high
            * inverse
            * tl.load(weights + half, mask=d < half, other=0.0).to(tl.float32)
        )
    return low, high


TILE = 4096  # words of 4 bytes: four 16-byte accesses in flight per thread
# Programs of a copy, which leave most multiprocessors to the steps beside it, and the words that
# each moves in a turn. On an H200 they move 1.37 TB/s, and in turns of `TILE` half as much.
COPIERS = 32
COPIED = 4 * TILE
COPY_WARPS = 32
SPAN, LEAST, MOST = map(
    tl.constexpr,
    (constants.FP8_SPAN, constants.LEAST_EXPONENT, constants.MOST_EXPONENT),
)
PLACE_FACTOR, WORD_FACTOR, MIX_FACTOR = map(tl.constexpr, constants.CHECKSUM_FACTORS)


def move_blocks(
    source: Tensor, source_ids: Tensor, target: Tensor, target_ids: Tensor
) -> None:
    """Copy block `source_ids[i]` of `source` to block `target_ids[i]`, all different, of `target`.

    Both are `[num_blocks, block_numel]`; `source` may be the memory of another GPU.
    """
    assert len(source_ids) == len(target_ids)
    assert source.shape[1] == target.shape[1]
    assert source.dtype == target.dtype
    assert source.is_contiguous()
    assert target.is_contiguous()
    source = source.view(torch.int32)
    target = target.view(torch.int32)
    words = source.shape[1]
    tiles = cdiv(words, COPIED)
    total = len(source_ids) * tiles
    _launch_copy(
        (min(total, COPIERS), 1, 1),
        source,
        target,
        source_ids,
        target_ids,
        words,
        tiles,
        total,
        TILE=COPIED,
        num_warps=COPY_WARPS,
        num_stages=1,
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize=["source_id_ptr", "target_id_ptr", "tiles", "total"])
def _copy_kernel(
    source_ptr: tl.tensor,
    target_ptr: tl.tensor,
    source_id_ptr: tl.tensor,
    target_id_ptr: tl.tensor,
    words: tl.tensor,
    tiles: tl.tensor,
    total: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        row = item // tiles
        source = tl.load(source_id_ptr + row)
        target = tl.load(target_id_ptr + row)
        w = item % tiles * TILE + tl.arange(0, TILE)
        value = tl.load(source_ptr + source.to(tl.int64) * words + w, mask=w < words)
        tl.store(target_ptr + target.to(tl.int64) * words + w, value, mask=w < words)


_launch_copy = Launcher(_copy_kernel)


def sum_blocks(pool: Tensor, ids: Tensor) -> Tensor:
    """Return the int32 checksum of each block `ids[i]` of `pool`, `[num_blocks, numel]`."""
    assert pool.is_contiguous()
    pool = pool.view(torch.int32)
    words = pool.shape[1]
    tiles = cdiv(words, TILE)
    total = len(ids) * tiles
    sums = torch.zeros(len(ids), dtype=torch.int32, device=pool.device)
    _launch_sum(
        (min(total, COPIERS), 1, 1),
        pool,
        ids,
        sums,
        words,
        tiles,
        total,
        TILE=TILE,
        num_warps=8,
        num_stages=1,
        enable_fp_fusion=True,
    )
    return sums


@triton.jit(do_not_specialize=["id_ptr", "sum_ptr", "tiles", "total"])
def _sum_kernel(
    pool_ptr: tl.tensor,
    id_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    words: tl.tensor,
    tiles: tl.tensor,
    total: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    # Each word is mixed with its place, so sums modulo 2^32 may be added in any order.
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        row = item // tiles
        block = tl.load(id_ptr + row).to(tl.int64)
        w = item % tiles * TILE + tl.arange(0, TILE)
        word = tl.load(pool_ptr + block * words + w, mask=w < words, other=0).to(
            tl.uint32
        )
        mixed = (word ^ (w.to(tl.uint32) * PLACE_FACTOR)) * WORD_FACTOR
        mixed = (mixed ^ (mixed >> 15)) * MIX_FACTOR
        mixed = tl.where(w < words, mixed ^ (mixed >> 13), 0)
        tl.atomic_add(sum_ptr + row, tl.sum(mixed.to(tl.int64), 0).to(tl.int32))


_launch_sum = Launcher(_sum_kernel)
