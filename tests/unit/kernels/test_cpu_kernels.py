"""The compiled CPU kernels against their references, and bits that depend on a row alone.

Slots that no sequence owns hold NaN, as does all of block 0, which unused table entries name.
"""

import dataclasses
import threading
from enum import Enum
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels import reference
from baton.kernels.constants import GELU_TANH, SILU, Gate
from baton.kernels.cpu.functions import AttentionWork, CpuKernels
from baton.kernels.cpu.library import CpuLibrary, has_bf16_products, load_library
from baton.kernels.cpu.threads import CpuThreads
from tools.gpu.kernel_cases import (
    LAYER,
    AttentionShape,
    Batch,
    assert_equal_bits,
    attention_batch,
    rotation_table,
)

FP32 = torch.float32
BF16 = torch.bfloat16
# The same sums in another order: fp32 to a few units in the last place, bf16 rounded once.
TOLERANCE = {FP32: (2e-6, 2e-6), BF16: (8e-3, 1e-6)}


class Kind(Enum):
    """A model's numbers, and what attention multiplies."""

    FP32 = "fp32"
    BF16 = "bf16"
    PAIRS = "pairs"  # weights are rounded to bf16 as well

    @property
    def dtype(self) -> torch.dtype:
        return FP32 if self is Kind.FP32 else BF16


PLAIN = {FP32: Kind.FP32, BF16: Kind.BF16}
KINDS = [kind for kind in Kind if kind is not Kind.PAIRS or has_bf16_products()]
GATES = (SILU, GELU_TANH, Gate(1.702, limit=7.0, offset=1.0))
RAGGED = AttentionShape(
    contexts=(200, 1, 64, 65, 33, 16), queries=(140, 1, 64, 1, 20, 3)
)


def no_progress(done: int, total: int) -> None:
    """For those who do not watch."""


@cache
def library(kind: Kind) -> CpuLibrary:
    is_bf16 = kind is not Kind.FP32
    in_pairs = kind is Kind.PAIRS
    return load_library(is_bf16=is_bf16, in_pairs=in_pairs, progress=no_progress)


def assert_close(ours: Tensor, expected: Tensor, more: float = 1) -> None:
    rtol, atol = (more * tolerance for tolerance in TOLERANCE[expected.dtype])
    torch.testing.assert_close(ours, expected, rtol=rtol, atol=atol, equal_nan=True)


def kernels(batch: Batch, kind: Kind) -> CpuKernels:
    return CpuKernels(library(kind), batch.pool, batch.q.shape[1])


def row_kernels(dtype: torch.dtype) -> CpuKernels:
    batch = attention_batch(AttentionShape((1,), (1,), dtype=dtype), "cpu")
    return kernels(batch, PLAIN[dtype])


def work(
    ours: CpuKernels, batch: Batch, spans: list[tuple[int, int, int, int]]
) -> AttentionWork:
    return ours.attention_work(batch.block_tables.flatten().numpy(), np.array(spans))


def spans_of(batch: Batch) -> list[tuple[int, int, int, int]]:
    """First row, tokens, first position, start of the block table, of each sequence."""
    starts = batch.query_starts.tolist()
    width = batch.block_tables.shape[1]
    return [
        (
            starts[i],
            starts[i + 1] - starts[i],
            end - starts[i + 1] + starts[i],
            i * width,
        )
        for i, end in enumerate(batch.context_lens.tolist())
    ]


def attended(
    batch: Batch, spans: list[tuple[int, int, int, int]], kind: Kind
) -> Tensor:
    ours = kernels(batch, kind)
    q = batch.q.contiguous()
    out = torch.full_like(q, float("nan"))
    ours.attend(q, LAYER, work(ours, batch, spans), out, batch.scale, *batch.how)
    return out


SIZES: dict[str, tuple[int, ...]] = {
    "block_size": (1, 5, 16, 24, 64, 256, 1024),
    "head_dim": (32, 48, 64, 80, 112, 128, 256),
    "num_heads": (2, 4, 6, 10, 14, 16, 32),  # of 2 KV heads
    "window": (1, 2, 15, 64, 65, 100, 199, 1000),
    "softcap": (0.5, 2.0, 50.0),
    "has_sinks": (True,),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "value"), [(s, v) for s in SIZES for v in SIZES[s]])
def test_attention_with_sizes_of_any_kind(kind, size, value):
    changed = {"dtype": kind.dtype, size: value}
    shape = dataclasses.replace(RAGGED, **changed)  # type: ignore[arg-type]
    batch = attention_batch(shape, "cpu")
    expected = reference.paged_prefill_attention(
        batch.q,
        batch.pool,
        LAYER,
        batch.block_tables,
        batch.query_starts,
        batch.context_lens,
        batch.scale,
        *batch.how,
    )
    ours = attended(batch, spans_of(batch), kind)
    if kind is Kind.PAIRS:
        torch.testing.assert_close(ours, expected, rtol=1.6e-2, atol=8e-3)
    else:
        # A cap adds an error of its own last place to each score.
        assert_close(ours, expected, 1 + (shape.softcap or 0) / 10)


@pytest.mark.parametrize("length", [1, 2, 33, 64, 300, 1100])
@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_errors_in_bf16_are_no_larger_than_those_of_torchs_attention(
    kind, spread, length
):
    """Against exact results, from flat weights over many keys to one key that has it all."""
    shape = AttentionShape((length,), (length,), head_dim=64, dtype=kind.dtype)
    batch = attention_batch(shape, "cpu")
    batch = dataclasses.replace(batch, q=(spread * batch.q).contiguous())
    numbers = batch.pool[:, :, LAYER][batch.block_tables[0, : -(-length // 16)].long()]
    k, v = (
        numbers.permute(2, 1, 0, 3, 4)
        .flatten(2, 3)[:, :, :length]
        .repeat_interleave(2, 1)
    )
    q = batch.q.transpose(0, 1)

    def error(got: Tensor, exact: Tensor) -> float:
        return (got.double() - exact).square().mean().sqrt().item()

    exact = F.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True
    )
    theirs = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[
        0
    ]
    ours = attended(batch, spans_of(batch), kind).transpose(0, 1)
    assert error(ours, exact) <= 1.1 * error(theirs, exact) + 1e-9


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (90, None), (90, 2.0)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("group", "planes"), [(1, 2), (4, 2), (6, 2), (6, 1)])
def test_chunks_and_single_tokens_get_the_bits_of_the_whole_prompt(
    kind, group, planes, window, softcap
):
    shape = AttentionShape(
        (330,),
        (330,),
        num_heads=2 * group,
        head_dim=64,
        dtype=kind.dtype,
        planes=planes,
        window=window,
        softcap=softcap,
        has_sinks=softcap is not None,
    )
    batch = attention_batch(shape, "cpu")
    whole = attended(batch, [(0, 330, 0, 0)], kind)
    for size in (1, 2, 3, 31, 64, 100, 329):
        cuts = range(0, 330, size)
        spans = [(first, min(size, 330 - first), first, 0) for first in cuts]
        assert_equal_bits(attended(batch, spans, kind), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_gets_the_same_bits_in_every_batch(kind):
    contexts = tuple(1 + 37 * i % 300 for i in range(64))
    batch = attention_batch(
        AttentionShape(contexts, (1,) * 64, head_dim=64, dtype=kind.dtype), "cpu"
    )
    spans = spans_of(batch)
    together = attended(batch, spans, kind)
    for count in (1, 2, 7, 33):
        assert_equal_bits(
            attended(batch, spans[:count], kind)[:count], together[:count]
        )


@pytest.mark.parametrize("kind", KINDS)
def test_threads_get_the_bits_of_one_thread(kind):
    """Enough of everything that four threads have a slice each."""
    shape = AttentionShape((1500, 700, 4000), (300, 700, 1), 8, 4, 64, dtype=kind.dtype)
    batch = attention_batch(shape, "cpu")
    ours = kernels(batch, kind)
    q = batch.q.contiguous()
    generator = torch.Generator().manual_seed(7)
    x, residual = torch.randn(2, 3000, 640, generator=generator).to(kind.dtype).unbind()
    qkv = torch.randn(1001, 16 * 64, generator=generator).to(kind.dtype)
    positions = torch.arange(1001)
    slots = torch.arange(1001)
    table = rotation_table(1001, 64)
    norms = qkv[0, : 12 * 64]

    def computed(num_threads: int) -> list[Tensor]:
        torch.set_num_threads(num_threads)
        plan = work(ours, batch, spans_of(batch))
        assert len(plan.cuts) == num_threads + 1, "the work is too small to be shared"
        out = torch.empty_like(q)
        ours.attend(q, LAYER, plan, out, batch.scale)
        rotated = ours.rope_and_store(qkv, 0, positions, slots, table, norms, 1e-6)
        normed, stream = ours.add_rms_norm(x, residual, x[0], 1e-6)
        return [
            out,
            rotated,
            batch.pool[:, :, 0].clone(),
            normed,
            stream,
            ours.gate_mul(x),
        ]

    before = torch.get_num_threads()
    try:
        expected = computed(1)
        for num_threads in (2, 3, 4):
            for got, alone in zip(computed(num_threads), expected, strict=True):
                assert_equal_bits(got, alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("head_dim", [32, 40, 64, 96, 256])
@pytest.mark.parametrize("has_norms", [False, True])
def test_rotation_and_store(dtype, head_dim, has_norms):
    """Scattered slots, rows of padding, and slots of others that must stay as they are."""
    generator = torch.Generator().manual_seed(1)
    packed = torch.randn(15, 6 + 2 * 2, head_dim, generator=generator).to(dtype)
    positions = torch.randint(0, 500, (15,), generator=generator)
    pool = torch.full((4, 2, 3, 2, 16, head_dim), float("nan"), dtype=dtype)
    slots = torch.randperm(64, generator=generator)[:13]
    table = rotation_table(500, head_dim)
    q_norm, k_norm = torch.randn(2, head_dim, generator=generator).to(dtype).unbind()
    norms = (
        torch.cat((q_norm.expand(6, -1), k_norm.expand(2, -1))) if has_norms else None
    )
    ours = pool.clone()
    theirs = pool.clone()
    got = CpuKernels(library(PLAIN[dtype]), ours, 6).rope_and_store(
        packed.flatten(1), LAYER, positions, slots, table, norms, 1e-5
    )
    expected = reference.rope_and_store(
        packed[:13, :6],
        packed[:13, 6:8],
        packed[:13, 8:],
        positions[:13],
        table,
        theirs,
        LAYER,
        slots,
        q_norm if has_norms else None,
        k_norm if has_norms else None,
        1e-5,
    )
    assert_close(got, expected)
    assert_close(ours, theirs)
    assert_equal_bits(ours[:, :, LAYER, 1], theirs[:, :, LAYER, 1])  # values are copied
    assert torch.equal(ours.isnan(), theirs.isnan()), (
        "a slot that was not named was written"
    )


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(576, 64), (40, 8), (48, 48)])
def test_rows_whose_last_numbers_alone_are_rotated(dtype, head_dim, rotary_dim):
    """Keys are the values, too, so a token stores one row."""
    generator = torch.Generator().manual_seed(1)
    packed = torch.randn(15, 6 + 1, head_dim, generator=generator).to(dtype)
    positions = torch.randint(0, 500, (15,), generator=generator)
    pool = torch.full((4, 1, 3, 1, 16, head_dim), float("nan"), dtype=dtype)
    slots = torch.randperm(64, generator=generator)[:13]
    table = rotation_table(500, rotary_dim)
    ours = pool.clone()
    theirs = pool.clone()
    got = CpuKernels(library(PLAIN[dtype]), ours, 6).rope_and_store(
        packed.flatten(1), LAYER, positions, slots, table, None, 1e-5
    )
    expected = reference.rope_and_store(
        packed[:13, :6],
        packed[:13, 6:],
        None,
        positions[:13],
        table,
        theirs,
        LAYER,
        slots,
    )
    assert_close(got, expected)
    assert_close(ours, theirs)
    assert_equal_bits(got[:, :, :-rotary_dim], packed[:13, :6, :-rotary_dim])
    assert torch.equal(ours.isnan(), theirs.isnan()), (
        "a slot that was not named was written"
    )


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("hidden", [8, 48, 64, 100, 512, 1000])
@pytest.mark.parametrize("has_residual", [False, True])
def test_residual_and_norm(dtype, hidden, has_residual):
    """Rows with a gap between, and the rounded sum as the new residual."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5, 2 * hidden, generator=generator).to(dtype)[:, :hidden]
    residual = (
        torch.randn(5, hidden, generator=generator).to(dtype) if has_residual else None
    )
    weight = torch.randn(hidden, generator=generator).to(dtype)
    ours = row_kernels(dtype)
    normed, stream = ours.add_rms_norm(x, residual, weight, 1e-5)
    expected, expected_stream = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert_equal_bits(stream, expected_stream)
    assert_close(normed, expected)
    assert_equal_bits(
        ours.add_rms_norm(stream[3:4], None, weight, 1e-5)[0], normed[3:4]
    )


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("features", [1, 16, 96, 344, 1023])
@pytest.mark.parametrize("gate", GATES)
def test_gate(dtype, features, gate):
    generator = torch.Generator().manual_seed(3)
    gate_up = 4 * torch.randn(3, 2 * features, generator=generator).to(dtype)
    gate_up[0, :features] = torch.linspace(-300, 300, features)
    ours = row_kernels(dtype)
    assert_close(ours.gate_mul(gate_up, gate), reference.gate_mul(gate_up, gate))


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_gates_beside_other_numbers_scale_rows(dtype):
    generator = torch.Generator().manual_seed(5)
    x, wide = (
        torch.randn(9, size, generator=generator).to(dtype) * 3 for size in (37, 90)
    )
    gates = wide[:, 50:87]
    ours = row_kernels(dtype).sigmoid_mul(x, gates)
    assert_close(ours, reference.sigmoid_mul(x, gates))
    assert torch.equal(row_kernels(dtype).sigmoid_mul(x[3:4], gates[3:4]), ours[3:4])


def test_caps_of_logits():
    logits = 20 * torch.randn(3, 1003, generator=torch.Generator().manual_seed(4))
    logits[1, 5:8] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    ours = logits.clone()
    expected = logits.clone()
    alone = logits[1:2].clone()
    for x in (ours, alone):
        row_kernels(FP32).soft_cap(x, 30.0)
    reference.soft_cap(expected, 30.0)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-5, equal_nan=True)
    assert_equal_bits(alone, ours[1:2])


def test_bf16_results_are_rounded_to_the_nearest_even_and_nan_stays():
    """The sum of a residual rounds whatever fp32 can hold, as torch rounds it."""
    bits = torch.randint(-(2**15), 2**15, (64, 2048), dtype=torch.int16)
    # NaN, infinity.
    bits[0, :4] = torch.tensor([0x7F81, 0x7FFF, -1, 0x7F80], dtype=torch.int16)
    x = bits.view(BF16)
    residual = bits.roll(1, 0).view(BF16)
    ours = row_kernels(BF16)
    _, stream = ours.add_rms_norm(x, residual, x[0], 1e-6)
    expected = x + residual
    assert torch.equal(stream.isnan(), expected.isnan())
    assert_equal_bits(stream[~stream.isnan()], expected[~expected.isnan()])


@pytest.mark.parametrize("failing", [0.0, 1.0, 2.0])
def test_an_error_is_raised_after_every_slice_has_ended(failing):
    threads = CpuThreads()
    ended = []

    def work(number: float) -> None:
        if number == failing:
            raise ValueError(f"slice {number}")
        threading.Event().wait(0.05)
        ended.append(number)

    slices = [(0.0,), (1.0,), (2.0,)]
    for _ in range(2):  # the threads live on
        ended.clear()
        with pytest.raises(ValueError, match=f"slice {failing}"):
            threads.run(work, slices)
        assert sorted(ended) == [number for (number,) in slices if number != failing]
