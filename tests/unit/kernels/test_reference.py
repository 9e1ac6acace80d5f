"""The torch twins say what they should: against formulas written another way."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels import reference
from tests.support.kernel_cases import LAYER, AttentionShape, Batch, attention_batch, rotation_table


def test_decode_is_plain_attention_over_the_gathered_context() -> None:
    batch = attention_batch(AttentionShape(contexts=(37, 16, 1), queries=(1, 1, 1)), "cpu")
    out = reference.paged_decode_attention(
        batch.q, batch.pool, LAYER, batch.block_tables, batch.context_lens, batch.scale
    )
    for row in range(3):
        assert_close(out[row], _attend(batch, row, row, int(batch.context_lens[row])))


def test_decode_of_an_empty_context_is_zero() -> None:
    batch = attention_batch(AttentionShape(contexts=(0, 3), queries=(1, 1)), "cpu")
    out = reference.paged_decode_attention(
        batch.q, batch.pool, LAYER, batch.block_tables, batch.context_lens, batch.scale
    )
    assert not out[0].any()
    assert out[1].all()


def test_prefill_lets_each_token_see_its_own_past_only() -> None:
    shape = AttentionShape(contexts=(40, 7), queries=(25, 7))
    batch = attention_batch(shape, "cpu")
    out = reference.paged_prefill_attention(
        batch.q, batch.pool, LAYER, batch.block_tables, batch.query_starts, batch.context_lens,
        batch.scale,
    )  # fmt: skip
    token = 0
    for row, (length, count) in enumerate(zip(shape.contexts, shape.queries, strict=True)):
        for visible in range(length - count + 1, length + 1):
            assert_close(out[token], _attend(batch, row, token, visible))
            token += 1


def test_rotation_multiplies_each_pair_by_a_unit_complex_number() -> None:
    q, k, v = torch.randn(3, 6, 2, 32).unbind()
    positions = torch.tensor([0, 1, 7, 7, 90, 3])
    pool = torch.full((2, 2, 3, 2, 16, 32), float("nan"))
    slots = torch.tensor([0, 31, -1, 5, 17, 2])
    out = reference.rope_and_store(
        q, k, v, positions, rotation_table(91, 32), pool, LAYER, slots, None, None
    )
    angle = positions[:, None] * 10_000.0 ** (-torch.arange(16) / 16)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]

    def turned(x: Tensor) -> Tensor:
        pairs = torch.complex(x[..., :16], x[..., 16:]) * turn
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    assert_close(out, turned(q))
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert_close(pool[slot // 16, :, LAYER, 0, slot % 16], turned(k)[token])
            assert torch.equal(pool[slot // 16, :, LAYER, 1, slot % 16], v[token])
    assert int((~pool.isnan()).sum()) == 5 * 2 * 2 * 32, "only the named slots were written"


def test_head_norm_comes_before_the_rotation() -> None:
    q, k, v = torch.randn(3, 4, 2, 32).unbind()
    weight_q, weight_k = torch.randn(2, 32).unbind()
    positions, slots = torch.tensor([3, 1, 4, 15]), torch.arange(4)
    pools = torch.zeros(2, 1, 2, 3, 2, 16, 32)
    table = rotation_table(16, 32)
    fused = reference.rope_and_store(
        q, k, v, positions, table, pools[0], LAYER, slots, weight_q, weight_k, 1e-5
    )
    normed_q = F.rms_norm(q, (32,), weight_q, 1e-5)
    normed_k = F.rms_norm(k, (32,), weight_k, 1e-5)
    apart = reference.rope_and_store(
        normed_q, normed_k, v, positions, table, pools[1], LAYER, slots
    )
    assert_close(fused, apart)
    assert_close(pools[0], pools[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_of_the_rounded_sum(dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 5, 48).to(dtype).unbind()
    weight = torch.randn(48).to(dtype)
    normed, stream = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(stream, x + residual)
    expected = F.rms_norm(stream.float(), (48,), weight.float(), 1e-5).to(dtype)
    torch.testing.assert_close(normed, expected)
    first, same = reference.add_rms_norm(x, None, weight, 1e-5)
    assert same is x
    assert torch.equal(first, reference.add_rms_norm(x, torch.zeros_like(x), weight, 1e-5)[0])


def test_silu_mul_gates_the_second_half_with_the_first() -> None:
    out = reference.silu_mul(torch.tensor([[2.0, -1.0, 3.0, 5.0]]))
    gates = [2 / (1 + math.exp(-2)), -1 / (1 + math.exp(1))]
    assert_close(out, torch.tensor([[3 * gates[0], 5 * gates[1]]]))


def test_scattered_blocks_come_back_gathered() -> None:
    blocks, pool = torch.randn(3, 8), torch.zeros(6, 8)
    ids = torch.tensor([4, 1, 5], dtype=torch.int32)
    reference.scatter_blocks(blocks, ids, pool)
    assert pool[[0, 2, 3]].count_nonzero() == 0
    staging = torch.full((4, 8), 7.0)
    reference.gather_blocks(pool, ids, staging)
    assert torch.equal(staging[:3], blocks)
    assert staging[3].eq(7).all(), "rows past the ids are left alone"


def _attend(batch: Batch, row: int, token: int, visible: int) -> Tensor:
    """Attention of one token over the first `visible` slots of a sequence, gathered one by one."""
    size = batch.pool.shape[4]
    table = batch.block_tables[row].tolist()
    kv = torch.stack(
        [batch.pool[table[n // size], :, LAYER, :, n % size] for n in range(visible)], dim=2
    )  # [kv_heads, 2, visible, head_dim]
    group = batch.q.shape[1] // batch.pool.shape[1]
    k, v = kv.repeat_interleave(group, dim=0).unbind(1)
    out = F.scaled_dot_product_attention(batch.q[token][:, None], k, v, scale=batch.scale)
    return out[:, 0]


def assert_close(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
