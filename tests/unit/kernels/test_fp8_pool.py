"""Pools of FP8: what rows become, and attention as over a pool that holds the same numbers."""

import dataclasses
import math
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.kernels import reference
from baton.kernels.cpu.functions import CpuKernels
from baton.kernels.cpu.library import CpuLibrary, has_bf16_products, load_library
from tools.gpu.kernel_cases import (
    LAYER,
    AttentionShape,
    assert_equal_bits,
    attention_batch,
    in_fp8,
    rotation_table,
)

FP32 = torch.float32
BF16 = torch.bfloat16
HAS_PAIRS = has_bf16_products()
# Compiling takes long, so one of bf16's kinds is enough each day.
KINDS = [
    (FP32, False),
    pytest.param(BF16, False, marks=[pytest.mark.release] if HAS_PAIRS else []),
    *[(BF16, True)] * HAS_PAIRS,
]


@cache
def library(dtype: torch.dtype, in_pairs: bool, fp8_pool: bool) -> CpuLibrary:
    return load_library(
        is_bf16=dtype is BF16,
        in_pairs=in_pairs,
        fp8_pool=fp8_pool,
        progress=lambda *_: None,
    )


def spread_rows(count: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rows of any size, with numbers that become subnormal codes, zeros and ties."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(count, width, generator=generator)
    rows *= 2.0 ** torch.randint(-12, 3, (count, width), generator=generator)
    rows[1::4] = torch.randint(-448, 448, rows[1::4].shape, generator=generator) / 448
    rows *= 2.0 ** torch.randint(-110, 110, (count, 1), generator=generator)
    rows[2::8] = 0.0
    return rows.to(dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_numbers_keep_four_bits_and_bf16_holds_what_codes_stand_for(dtype):
    rows = spread_rows(4000, 24, dtype).float()
    codes, exponents = reference.to_fp8(rows)
    found = reference.from_fp8(codes, exponents)
    assert torch.equal(found, found.bfloat16().float())
    top = rows.abs().amax(-1, keepdim=True)
    # Half a step of three bits, or half the least step, at most `top / 224 / 512`.
    assert (
        (found - rows).abs() <= torch.maximum(rows.abs() / 16, top / 224 / 1024)
    ).all()
    assert (codes & 0x7F < 0x7F).all()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 2.0**127 * 1.75])
def test_a_row_that_is_not_finite_has_no_finite_number_but_spoils_no_other(bad):
    rows = torch.ones(3, 8)
    rows[1, 5] = bad
    found = reference.from_fp8(*reference.to_fp8(rows))
    assert not found[1].isfinite().any()
    assert torch.equal(found[::2], rows[::2])


@pytest.mark.parametrize(("dtype", "in_pairs"), KINDS)
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (40, 5), (128, 1)])
def test_rows_are_stored_as_codes_of_what_another_pool_would_hold(
    dtype, in_pairs, head_dim, block_size
):
    rows = spread_rows(37 * 10, head_dim, dtype).view(37, 10 * head_dim)
    rows[5, 7 * head_dim] = rows[6, 9 * head_dim + 3] = math.nan
    table = rotation_table(100, head_dim)
    positions = torch.arange(37)
    slots = torch.randperm(3 * 37)[:37]
    plain = torch.zeros(
        3 * 37 // block_size + 1, 2, 3, 2, block_size, head_dim, dtype=dtype
    )
    narrow, _ = in_fp8(plain)
    expected, _ = in_fp8(plain)
    call = (LAYER, positions, slots, table, None, 1e-6)
    q = CpuKernels(library(dtype, in_pairs, False), plain, 6).rope_and_store(
        rows, *call
    )
    ours = CpuKernels(library(dtype, in_pairs, True), narrow, 6).rope_and_store(
        rows, *call
    )
    assert_equal_bits(ours, q)
    (codes, exponents), (wanted, wanted_exponents) = map(
        reference.fp8_parts, (narrow, expected)
    )
    wanted[:], wanted_exponents[:] = reference.to_fp8(plain)
    assert torch.equal(exponents, wanted_exponents)
    is_whole = exponents < 255
    assert (~is_whole).sum() == 2
    assert torch.equal(codes[is_whole], wanted[is_whole])


SHAPES = {
    "plain": {},
    "heads of 40": {"head_dim": 40},
    "heads of 128": {"head_dim": 128},
    "heads of 80": {"head_dim": 80, "block_size": 64},
    "blocks of 5": {"block_size": 5},
    "blocks of 24": {"block_size": 24, "num_heads": 10},
    "window": {"window": 65, "head_dim": 64},
    "caps and sinks": {"softcap": 2.0, "has_sinks": True, "window": 100},
}


@pytest.mark.parametrize(("dtype", "in_pairs"), KINDS)
@pytest.mark.parametrize("name", SHAPES)
def test_attention_has_the_bits_of_a_pool_with_the_same_numbers(dtype, in_pairs, name):
    shape = AttentionShape(
        (200, 1, 64, 65, 33, 16), (140, 1, 64, 1, 20, 3), dtype=dtype
    )
    changed: dict[str, object] = SHAPES[name]  # type: ignore[assignment]
    batch = attention_batch(dataclasses.replace(shape, **changed), "cpu")  # type: ignore[arg-type]
    narrow, plain = in_fp8(batch.pool)
    starts = batch.query_starts.tolist()
    ends = batch.context_lens.tolist()
    width = batch.block_tables.shape[1]
    q = batch.q.contiguous()
    spans = [
        (
            starts[i],
            starts[i + 1] - starts[i],
            end - starts[i + 1] + starts[i],
            i * width,
        )
        for i, end in enumerate(ends)
    ]

    def attended(pool: Tensor) -> Tensor:
        kernels = CpuKernels(library(dtype, in_pairs, pool is narrow), pool, q.shape[1])
        work = kernels.attention_work(
            batch.block_tables.flatten().numpy(), np.array(spans)
        )
        out = torch.full_like(q, math.nan)
        kernels.attend(q, LAYER, work, out, batch.scale, *batch.how)
        return out

    assert_equal_bits(attended(narrow), attended(plain))
    call = (
        LAYER,
        batch.block_tables,
        batch.query_starts,
        batch.context_lens,
        batch.scale,
    )
    theirs = [
        reference.paged_prefill_attention(q, pool, *call, *batch.how)
        for pool in (narrow, plain)
    ]
    assert_equal_bits(*theirs)
