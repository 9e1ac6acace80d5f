"""Normalise and rotate queries and keys and store keys and values in the pool, in one pass.

A program takes a tile of (token, head) rows of queries, keys or values, so a batch of one token and
a long chunk use the same code. The runner's attention layer calls it before attention reads the
pool, also under CUDA graph capture; padding tokens carry slot -1. `reference.rope_and_store`
defines the meaning.
"""

# ruff: noqa: N803, PLR0913, PLR0917
# Compile-time values are in capitals, as in Triton's own code; arguments are pointers and strides.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 32  # two 16-byte accesses per thread and half of a head of 128 in bf16


def rope_and_store(
    q: Tensor,  # [num_tokens, num_heads, head_dim]
    k: Tensor,  # [num_tokens, kv_heads, head_dim]
    v: Tensor,  # [num_tokens, kv_heads, head_dim]
    positions: Tensor,  # [num_tokens]
    cos_sin: Tensor,  # [max_position, head_dim]: the cosines, then the sines
    pool: Tensor,  # [num_blocks, kv_heads, num_layers, 2, block_size, head_dim]
    layer: int,
    slot_mapping: Tensor,  # [num_tokens], -1: do not store
    q_norm_weight: Tensor | None = None,  # [head_dim]
    k_norm_weight: Tensor | None = None,  # [head_dim]
    eps: float = 1e-6,
) -> Tensor:
    """Rotate queries and keys, store keys and values, return the queries, contiguous.

    `q`, `k` and `v` may be slices of one packed projection; they are not changed.
    """
    num_tokens, num_heads, head_dim = q.shape
    _, kv_heads, _, _, block_size, _ = pool.shape
    assert k.shape == v.shape == (num_tokens, kv_heads, head_dim), (k.shape, v.shape, pool.shape)
    assert q.stride()[1:] == k.stride()[1:] == v.stride()[1:] == (head_dim, 1), "packed heads"
    assert pool.stride()[3:] == (block_size * head_dim, head_dim, 1), (
        "a layer of a block is contiguous"
    )
    assert cos_sin.is_contiguous()
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    tiles = triton.cdiv(num_tokens * num_heads, ROWS) + 2 * triton.cdiv(num_tokens * kv_heads, ROWS)
    _rope_store_kernel[(tiles,)](
        q, k, v, positions, cos_sin, pool, slot_mapping, q_norm_weight, k_norm_weight, out,
        num_tokens, layer * pool.stride(2), eps,
        q.stride(0), k.stride(0), v.stride(0), pool.stride(0), pool.stride(1),
        HEADS=num_heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, ROWS=ROWS,
        num_warps=4, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_tokens", "position_ptr", "slot_ptr"])
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
    num_tokens: tl.tensor,
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
    ROWS: tl.constexpr,
) -> None:
    half: tl.constexpr = HEAD_DIM // 2
    q_tiles = tl.cdiv(num_tokens * HEADS, ROWS)
    kv_tiles = tl.cdiv(num_tokens * KV_HEADS, ROWS)
    tile = tl.program_id(0)
    d = tl.arange(0, half)[None, :]
    if tile < q_tiles:
        row = tile * ROWS + tl.arange(0, ROWS)
        token, head = (row // HEADS).to(tl.int64), row % HEADS
        live = token < num_tokens
        source = q_ptr + token * stride_q + head * HEAD_DIM
        low, high = _normed_halves(source, live, q_weight_ptr, eps, HEAD_DIM)
        low, high = _rotated(low, high, position_ptr + token, live, cos_sin_ptr, HEAD_DIM)
        target = (out_ptr + (token * HEADS + head) * HEAD_DIM)[:, None] + d
        tl.store(target, low.to(out_ptr.dtype.element_ty), mask=live[:, None])
        tl.store(target + half, high.to(out_ptr.dtype.element_ty), mask=live[:, None])
    else:
        is_value = tile >= q_tiles + kv_tiles
        row = (tile - q_tiles - is_value.to(tl.int32) * kv_tiles) * ROWS + tl.arange(0, ROWS)
        token, head = (row // KV_HEADS).to(tl.int64), row % KV_HEADS
        slot = tl.load(slot_ptr + token, mask=token < num_tokens, other=-1).to(tl.int64)
        live = slot >= 0
        place = slot // BLOCK_SIZE * stride_block + head.to(tl.int64) * stride_head + layer_offset
        target = (pool_ptr + place + slot % BLOCK_SIZE * HEAD_DIM)[:, None] + d
        if is_value:
            source = v_ptr + token * stride_v + head * HEAD_DIM
            low_bits = tl.load(source[:, None] + d, mask=live[:, None])
            high_bits = tl.load(source[:, None] + half + d, mask=live[:, None])
            target += BLOCK_SIZE * HEAD_DIM
            tl.store(target, low_bits, mask=live[:, None])
            tl.store(target + half, high_bits, mask=live[:, None])
        else:
            source = k_ptr + token * stride_k + head * HEAD_DIM
            low, high = _normed_halves(source, live, k_weight_ptr, eps, HEAD_DIM)
            low, high = _rotated(low, high, position_ptr + token, live, cos_sin_ptr, HEAD_DIM)
            tl.store(target, low.to(pool_ptr.dtype.element_ty), mask=live[:, None])
            tl.store(target + half, high.to(pool_ptr.dtype.element_ty), mask=live[:, None])


@triton.jit
def _normed_halves(
    source: tl.tensor,
    live: tl.tensor,
    weight_ptr: tl.tensor,
    eps: tl.tensor,
    HEAD_DIM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    half: tl.constexpr = HEAD_DIM // 2
    d = tl.arange(0, half)[None, :]
    low = tl.load(source[:, None] + d, mask=live[:, None], other=0.0).to(tl.float32)
    high = tl.load(source[:, None] + half + d, mask=live[:, None], other=0.0).to(tl.float32)
    if weight_ptr is not None:
        mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD_DIM
        inverse = tl.rsqrt(mean + eps)[:, None]
        low = low * inverse * tl.load(weight_ptr + d).to(tl.float32)
        high = high * inverse * tl.load(weight_ptr + half + d).to(tl.float32)
    return low, high


@triton.jit
def _rotated(
    low: tl.tensor,
    high: tl.tensor,
    position_ptr: tl.tensor,
    live: tl.tensor,
    cos_sin_ptr: tl.tensor,
    HEAD_DIM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    half: tl.constexpr = HEAD_DIM // 2
    position = tl.load(position_ptr, mask=live, other=0).to(tl.int64)
    angle = (cos_sin_ptr + position * HEAD_DIM)[:, None] + tl.arange(0, half)[None, :]
    cos = tl.load(angle, mask=live[:, None], other=0.0).to(tl.float32)
    sin = tl.load(angle + half, mask=live[:, None], other=0.0).to(tl.float32)
    return low * cos - high * sin, high * cos + low * sin
