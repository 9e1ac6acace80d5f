"""Kernels held to their torch references: one check per kernel, on any device.

On a CPU the checks run in Triton's interpreter, which must be chosen before Triton is imported: so
nothing here imports a kernel until a check runs. Slots that no sequence owns hold NaN, as does all
of block 0, which unused table entries and masked ids name: who reads too much cannot pass.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor

from baton.engine.compute.sampler import Sampler, SampleRow, SamplingTensors
from baton.kernels.constants import GELU_TANH, SILU, Gate
from baton.protocol.sampling import Sampling

LAYERS, LAYER = 3, 1
# The interpreter rounds towards zero where a GPU rounds to nearest, so bf16 may be off by one unit
# in the last place of the result, and by what that does to a probability on its way there.
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2e-2, 1.6e-2)}


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """A batch of sequences: the last `queries[i]` of `contexts[i]` positions are the new ones."""

    contexts: tuple[int, ...]
    queries: tuple[int, ...]
    num_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    planes: int = 2  # 1: keys are the values, too
    softcap: float | None = None
    has_sinks: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """What an attention kernel is called with."""

    q: Tensor  # [num_tokens, num_heads, head_dim]
    pool: Tensor  # [num_blocks, kv_heads, LAYERS, planes, block_size, head_dim]
    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor
    scale: float
    how: tuple[int | None, float | None, Tensor | None]  # window, cap and sinks


def attention_batch(shape: AttentionShape, device: str, seed: int = 0) -> Batch:
    """Random queries over a pool of scattered blocks; equal for equal shapes and seeds."""
    generator = torch.Generator().manual_seed(seed)
    size, heads, dim = shape.block_size, shape.kv_heads, shape.head_dim
    needs = [-(-length // size) for length in shape.contexts]
    pool = torch.full((sum(needs) + 1, heads, LAYERS, shape.planes, size, dim), float("nan"))
    order = torch.split(1 + torch.randperm(sum(needs), generator=generator), needs)
    tables = torch.zeros(len(needs), max(needs) + 2, dtype=torch.int32)
    for row, (blocks, length) in enumerate(zip(order, shape.contexts, strict=True)):
        tables[row, : len(blocks)] = blocks
        position = torch.arange(length)
        owners, offsets = blocks[position // size], position % size
        kv = torch.randn(length, heads, LAYERS, shape.planes, dim, generator=generator)
        pool[owners, :, :, :, offsets] = kv
    num_tokens = sum(shape.queries)
    # Queries are a slice of a packed projection, as the engine's are: rows with a gap between.
    packed = torch.randn(num_tokens, shape.num_heads + 2 * heads, dim, generator=generator)
    starts = torch.tensor([0, *shape.queries]).cumsum(0)
    sinks = 3 * torch.randn(shape.num_heads, generator=generator)
    return Batch(
        q=packed.to(device, shape.dtype)[:, : shape.num_heads],
        pool=pool.to(device, shape.dtype),
        block_tables=tables.to(device),
        query_starts=starts.to(device, torch.int32),
        context_lens=torch.tensor(shape.contexts, dtype=torch.int32, device=device),
        scale=dim**-0.5,
        how=(shape.window, shape.softcap, sinks.to(device) if shape.has_sinks else None),
    )


def check_decode(shape: AttentionShape, device: str, *, ordered: bool = False) -> None:
    """One new token each; a sequence of length 0 pads a captured graph and gives zeros."""
    from baton.kernels import decode_attention, reference

    case = attention_batch(shape, device)
    call = (case.q, case.pool, LAYER, case.block_tables, case.context_lens, case.scale)
    assert_close(
        decode_attention.paged_decode_attention(*call, *case.how, ordered=ordered),
        reference.paged_decode_attention(*call, *case.how),
    )


def check_decode_alone(shape: AttentionShape, device: str) -> None:
    """A sequence gets the same bits alone, in a batch, and with a wider block table."""
    from baton.kernels.decode_attention import paged_decode_attention

    case = attention_batch(shape, device)
    tables, lens = case.block_tables, case.context_lens

    def attended(rows: slice, tables: Tensor) -> Tensor:
        return paged_decode_attention(
            case.q[rows], case.pool, LAYER, tables[rows], lens[rows], case.scale, *case.how,
            ordered=True,
        )  # fmt: skip

    batched = attended(slice(None), tables)
    assert_equal_bits(attended(slice(None), torch.cat([tables, tables, tables], dim=1)), batched)
    for i in range(len(lens)):
        one = slice(i, i + 1)
        assert_equal_bits(attended(one, tables), batched[one])


def check_prefill(shape: AttentionShape, device: str, *, ordered: bool = False) -> None:
    """A ragged batch of chunks, some behind a cached prefix."""
    from baton.kernels import prefill_attention, reference

    case = attention_batch(shape, device)
    call = (
        case.q, case.pool, LAYER, case.block_tables, case.query_starts, case.context_lens,
        case.scale, *case.how,
    )  # fmt: skip
    assert_close(
        prefill_attention.paged_prefill_attention(*call, ordered=ordered),
        reference.paged_prefill_attention(*call),
    )


def check_prefill_chunks(shape: AttentionShape, device: str, *, ordered: bool = False) -> None:
    """Prompts cut into chunks, one sequence at a time, give the bits of the whole batch at once."""
    from baton.kernels.prefill_attention import paged_prefill_attention

    case = attention_batch(shape, device)
    whole = paged_prefill_attention(
        case.q, case.pool, LAYER, case.block_tables, case.query_starts, case.context_lens,
        case.scale, *case.how, ordered=ordered,
    )  # fmt: skip
    start = 0
    for i, (length, count) in enumerate(zip(shape.contexts, shape.queries, strict=True)):
        cut = count // 3
        for first, last in ((0, cut), (cut, count)):
            chunk = slice(start + first, start + last)
            starts = torch.tensor([0, last - first], dtype=torch.int32, device=device)
            seen = torch.tensor([length - count + last], dtype=torch.int32, device=device)
            part = paged_prefill_attention(
                case.q[chunk], case.pool, LAYER, case.block_tables[i : i + 1], starts, seen,
                case.scale, *case.how, ordered=ordered,
            )  # fmt: skip
            assert_equal_bits(part, whole[chunk])
        start += count


def check_decode_as_prefill(shape: AttentionShape, device: str, every: int) -> None:
    """Each n-th token of each chunk, decoded in one batch, gets the bits that prefill gave it."""
    from baton.kernels.decode_attention import paged_decode_attention
    from baton.kernels.prefill_attention import paged_prefill_attention

    case = attention_batch(shape, device)
    whole = paged_prefill_attention(
        case.q, case.pool, LAYER, case.block_tables, case.query_starts, case.context_lens,
        case.scale, *case.how, ordered=True,
    )  # fmt: skip
    rows, owners, lens = [], [], []
    for i, (length, count) in enumerate(zip(shape.contexts, shape.queries, strict=True)):
        for token in range(count - 1, -1, -every):
            rows.append(sum(shape.queries[:i]) + token)
            owners.append(i)
            lens.append(length - count + token + 1)
    decoded = paged_decode_attention(
        case.q[rows], case.pool, LAYER, case.block_tables[owners],
        torch.tensor(lens, dtype=torch.int32, device=device), case.scale, *case.how,
        ordered=True,
    )  # fmt: skip
    assert_equal_bits(decoded, whole[rows])


def check_latent(shape: AttentionShape, device: str, rotated: int, every: int) -> None:
    """A token's attention to latent rows is right, and has the same bits however it is computed."""
    from baton.kernels import reference
    from baton.kernels.latent_attention import latent_decode_attention, latent_prefill_attention

    case = attention_batch(shape, device)
    tail = (case.scale, rotated)

    def prefilled(
        rows: slice, tables: Tensor, starts: Sequence[int], lens: Sequence[int]
    ) -> Tensor:
        numbers = (torch.tensor(one, dtype=torch.int32, device=device) for one in (starts, lens))
        return latent_prefill_attention(case.q[rows], case.pool, LAYER, tables, *numbers, *tail)

    def decoded(rows: Sequence[int], owners: Sequence[int], lens: Sequence[int]) -> Tensor:
        tables, numbers = case.block_tables[list(owners)], torch.tensor(lens, dtype=torch.int32)
        q = case.q[list(rows)]
        return latent_decode_attention(q, case.pool, LAYER, tables, numbers.to(device), *tail)

    starts = case.query_starts.tolist()
    whole = prefilled(slice(None), case.block_tables, starts, shape.contexts)
    call = (case.q, case.pool, LAYER, case.block_tables, case.query_starts, case.context_lens)
    expected = reference.paged_prefill_attention(*call, case.scale)
    assert_close(whole, expected[..., :-rotated].contiguous())
    singles: list[tuple[int, int, int]] = []
    for i, (length, count) in enumerate(zip(shape.contexts, shape.queries, strict=True)):
        cut = count // 3
        for first, last in ((0, cut), (cut, count)):
            chunk = slice(starts[i] + first, starts[i] + last)
            tables, seen = case.block_tables[i : i + 1], length - count + last
            part = prefilled(chunk, tables, (0, last - first), (seen,))
            assert_equal_bits(part, whole[chunk])
        tokens = range(count - 1, -1, -every)
        singles += [(starts[i] + token, i, length - count + token + 1) for token in tokens]
    rows, owners, lens = zip(*singles, (0, 0, 0), strict=True)
    together = decoded(rows, owners, lens)
    assert_equal_bits(together[:-1], whole[list(rows[:-1])])
    assert not together[-1].any(), "the row of padding"
    with patch("baton.kernels.latent_attention.WORKSPACE", 0):  # one sequence at a time
        assert_equal_bits(decoded(rows, owners, lens), together)


def check_turn_store(shape: AttentionShape, device: str, rotated: int) -> None:
    """Queries and latent rows, scattered slots, and tokens of padding that are not stored."""
    from baton.kernels import latent_attention, reference

    generator = torch.Generator().manual_seed(1)
    num_tokens, heads, size = sum(shape.queries), shape.num_heads, shape.block_size
    x = torch.randn(num_tokens, heads + 1, shape.head_dim, generator=generator)
    x = x.to(device, shape.dtype)
    positions = torch.randint(0, 500, (num_tokens,), generator=generator).to(device)
    cos_sin = rotation_table(500, rotated).to(device)
    num_blocks = -(-num_tokens // size) + 1
    pool = torch.full((num_blocks, 1, LAYERS, 1, size, shape.head_dim), float("nan"))
    ours = pool.to(device, shape.dtype)
    theirs = ours.clone()
    slots = torch.randperm(num_blocks * size, generator=generator)[:num_tokens]
    slots[1::4] = -1
    slots = slots.to(device, torch.int64)
    expected = reference.rope_and_store(
        x[:, :heads], x[:, heads:], None, positions, cos_sin, theirs, LAYER, slots
    )
    got = latent_attention.turn_and_store(x, positions, cos_sin, ours, LAYER, slots)
    assert_close(got, expected)
    assert_close(ours, theirs)
    assert torch.equal(ours.isnan(), theirs.isnan()), "a slot that was not named was written"


def check_rope_store(shape: AttentionShape, device: str, *, qk_norm: bool) -> None:
    """Packed projections, scattered slots, and padding tokens that must leave the pool alone."""
    from baton.kernels import pool_writes, reference

    generator = torch.Generator().manual_seed(1)
    num_tokens, dim, kv_heads = sum(shape.queries), shape.head_dim, shape.kv_heads
    packed = torch.randn(num_tokens, shape.num_heads + 2 * kv_heads, dim, generator=generator)
    sizes = [shape.num_heads, kv_heads, kv_heads]
    q, k, v = torch.split(packed.to(device, shape.dtype), sizes, dim=1)
    positions = torch.randint(0, 500, (num_tokens,), generator=generator).to(device)
    cos_sin = rotation_table(500, dim).to(device)
    num_blocks = -(-num_tokens // shape.block_size) + 1
    pool = torch.full(
        (num_blocks, kv_heads, LAYERS, 2, shape.block_size, dim), float("nan"), dtype=shape.dtype
    ).to(device)
    slots = torch.randperm(num_blocks * shape.block_size, generator=generator)[:num_tokens]
    slots[1::4] = -1
    slots = slots.to(device, torch.int64)
    norms: tuple[Tensor | None, Tensor | None] = (None, None)
    if qk_norm:
        weights = torch.randn(2, dim, generator=generator).to(device, shape.dtype)
        norms = (weights[0], weights[1])
    ours, theirs = pool.clone(), pool.clone()
    tail = (LAYER, slots, *norms, 1e-5)
    got = pool_writes.rope_and_store(q, k, v, positions, cos_sin, ours, *tail)
    assert_close(got, reference.rope_and_store(q, k, v, positions, cos_sin, theirs, *tail))
    assert_close(ours, theirs)
    assert torch.equal(ours.isnan(), theirs.isnan()), "a slot that was not named was written"
    assert_equal_bits(ours[:, :, LAYER, 1], theirs[:, :, LAYER, 1])  # values are copied


def check_add_rms_norm(hidden: int, dtype: torch.dtype, device: str, *, residual: bool) -> None:
    """Rows with a gap between, and the rounded sum as the new residual."""
    from baton.kernels import reference
    from baton.kernels import rows as row_kernels

    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5, 2 * hidden, generator=generator).to(device, dtype)[:, :hidden]
    stream = torch.randn(5, hidden, generator=generator).to(device, dtype) if residual else None
    weight = torch.randn(hidden, generator=generator).to(device, dtype)
    got = row_kernels.add_rms_norm(x, stream, weight, 1e-5)
    for ours, expected in zip(got, reference.add_rms_norm(x, stream, weight, 1e-5), strict=True):
        assert_close(ours, expected)
    # What is normed is the rounded sum: the stream alone gives the same bits.
    assert_equal_bits(got[0], row_kernels.add_rms_norm(got[1], None, weight, 1e-5)[0])


def check_gate_mul(features: int, dtype: torch.dtype, device: str, gate: Gate = SILU) -> None:
    """Feature counts that do and do not fill a tile."""
    from baton.kernels import reference
    from baton.kernels import rows as row_kernels

    generator = torch.Generator().manual_seed(3)
    gate_up = 4 * torch.randn(3, 2 * features, generator=generator).to(device, dtype)
    assert_close(row_kernels.gate_mul(gate_up, gate), reference.gate_mul(gate_up, gate))


def check_fixed_product(
    rows: int, inner: int, columns: int, dtype: torch.dtype, device: str, programs: int = 128
) -> None:
    """Sizes that fill no tile, a gap between rows, and the bits of some rows computed alone.

    With few `programs`, one computes all parts of a tile, but not for the rows alone.
    """
    from baton.kernels import fixed_product as module
    from baton.kernels import reference

    generator = torch.Generator().manual_seed(6)
    x = torch.randn(rows, 2 * inner, generator=generator).to(device, dtype)[:, :inner]
    weight = (torch.randn(columns, inner, generator=generator) / inner**0.5).to(device, dtype)
    with patch.object(module, "PROGRAMS", programs):
        whole = module.fixed_product(x, weight)
        assert_close(whole, reference.fixed_product(x, weight))
        for first, count in ((0, 1), (rows // 2, 2), (rows - 9, 9)):
            part = slice(first, first + count)
            assert_equal_bits(module.fixed_product(x[part], weight), whole[part])


def check_grouped_product(
    counts: Sequence[int], inner: int, columns: int, dtype: torch.dtype, device: str
) -> None:
    """Experts without a row, with a few and with several tiles; and rows among other neighbours."""
    from baton.kernels import reference
    from baton.kernels.grouped_product import grouped_product

    generator, rows = torch.Generator().manual_seed(8), sum(counts)
    x = torch.randn(rows, inner, generator=generator).to(device, dtype)
    weight = torch.randn(len(counts), columns, inner, generator=generator) / inner**0.5
    weight = weight.to(device, dtype)

    def ends(numbers: Tensor) -> Tensor:
        return numbers.cumsum(0).to(device, torch.int32)

    numbers = torch.tensor(counts)
    biases = torch.randn(len(counts), columns, generator=generator).to(device, dtype)
    for own in (None, biases):
        whole = grouped_product(x, weight, ends(numbers), own)
        assert_close(whole, reference.grouped_product(x, weight, ends(numbers), own))
    expert_of = torch.arange(len(counts)).repeat_interleave(numbers)
    for kept in (torch.arange(rows) % 3 == 1, torch.arange(rows) == rows // 2):
        left = torch.bincount(expert_of[kept], minlength=len(counts))
        part = grouped_product(x[kept.to(device)], weight, ends(left), biases)
        assert_equal_bits(part, whole[kept.to(device)])


def check_add_experts(tokens: int, top_k: int, hidden: int, dtype: torch.dtype, dev: str) -> None:
    from baton.kernels import grouped_product, reference

    generator = torch.Generator().manual_seed(9)
    rows = torch.randn(tokens, top_k, hidden, generator=generator).to(dev, dtype)
    weights = torch.rand(tokens, 2 * top_k, generator=generator).to(dev)[:, :top_k]
    whole = grouped_product.add_experts(rows, weights)
    assert_close(whole, reference.add_experts(rows, weights))
    assert_equal_bits(grouped_product.add_experts(rows[1:2], weights[1:2]), whole[1:2])


def check_on_warps(shape: AttentionShape, device: str) -> None:
    """Both attentions with the tiles of GPUs that multiply on warps."""
    from baton.kernels import paged

    with patch.object(paged, "tilings_of", lambda _: paged.WARPS):
        check_decode_as_prefill(shape, device, 9)
        check_prefill(_with(shape, contexts=(70, 5), queries=(40, 5)), device)


def check_block_copy(numel: int, dtype: torch.dtype, device: str) -> None:
    """Any bit pattern, NaN included, arrives; blocks and rows that were not named stay."""
    from baton.kernels.pool_writes import move_blocks

    generator = torch.Generator().manual_seed(4)
    bits = torch.randint(-(2**31), 2**31 - 1, (7, numel), generator=generator, dtype=torch.int32)
    pool = bits.to(device).view(dtype)
    ids = torch.tensor([5, 0, 3], dtype=torch.int32, device=device)
    places = torch.tensor([2, 6, 1], dtype=torch.int32, device=device)
    moved, expected_moved = pool.flip(0).contiguous(), pool.flip(0).contiguous()
    move_blocks(pool, ids, moved, places)
    expected_moved[places.long()] = pool[ids.long()]
    assert_equal_bits(moved, expected_moved)


def check_block_sums(numel: int, device: str) -> None:
    """The kernel's sums are the reference's, and a changed bit or two exchanged words show."""
    from baton.kernels import reference
    from baton.kernels.pool_writes import sum_blocks

    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(-(2**31), 2**31 - 1, (4, numel), generator=generator, dtype=torch.int32)
    bits[3] = 0
    ids = torch.tensor([2, 0, 3, 2], dtype=torch.int32, device=device)
    sums = sum_blocks(bits.to(device), ids)
    assert_equal_bits(sums, reference.sum_blocks(bits.to(device), ids))
    assert len(set(sums.tolist())) == 3
    exchanged, changed = bits.clone(), bits.clone()
    exchanged[2, [1, numel - 1]] = bits[2, [numel - 1, 1]]
    changed[2, -1] ^= 1 << 30
    for wrong in (exchanged, changed):
        assert int(sum_blocks(wrong.to(device), ids[:1])) != int(sums[0])


def rotation_table(max_position: int, head_dim: int) -> Tensor:
    """Cosines, then sines, of plain rotary embeddings with base 10,000."""
    inverse = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angle = torch.arange(max_position)[:, None] * inverse
    return torch.cat([angle.cos(), angle.sin()], dim=1)


def assert_close(ours: Tensor, expected: Tensor) -> None:
    """Within the rounding of the dtype; NaN where, and only where, the expected has it."""
    rtol, atol = TOLERANCE[expected.dtype]
    torch.testing.assert_close(ours, expected, rtol=rtol, atol=atol, equal_nan=True)


def assert_equal_bits(left: Tensor, right: Tensor) -> None:
    """Equal to the last bit, NaN payloads included."""
    words = torch.int16 if left.element_size() == 2 else torch.int32
    difference = left.contiguous().view(words) != right.contiguous().view(words)
    assert not difference.any(), f"{int(difference.sum())} of {left.numel()} values differ"


def interpreter_cases() -> dict[str, Callable[[], None]]:
    """Small cases by name: the interpreter takes some 3 ms per program and loop iteration."""
    fp32, bf16 = torch.float32, torch.bfloat16
    decode = AttentionShape(contexts=(37, 1, 0, 16), queries=(1, 1, 1, 1))
    # 3 splits of 256 tokens, the last one short; a group of 3 heads leaves rows of the tile unused.
    split = AttentionShape(contexts=(600, 256), queries=(1, 1), num_heads=3, kv_heads=1)
    prefill = AttentionShape(contexts=(70, 5, 33), queries=(40, 5, 1))
    wide = AttentionShape(contexts=(150,), queries=(140,), num_heads=1, kv_heads=1, dtype=bf16)
    # Three ordered splits, and tokens on both sides of the end of one.
    one = AttentionShape(contexts=(1060,), queries=(70,), num_heads=2, kv_heads=1)
    cut = AttentionShape(contexts=(71, 9), queries=(53, 9), num_heads=2, kv_heads=1)
    # Three splits, and tiles of four tokens on both sides of the end of one.
    latent = AttentionShape((1060, 5), (45, 5), num_heads=4, kv_heads=1, head_dim=40, planes=1)
    rope = AttentionShape(contexts=(), queries=(13,), num_heads=6)
    caps: dict[str, object] = {"softcap": 1.5, "has_sinks": True, "window": 530}
    return {
        "decode fp32": lambda: check_decode(decode, "cpu"),
        "decode fp32 splits": lambda: check_decode(split, "cpu"),
        "decode bf16": lambda: check_decode(_with(decode, dtype=bf16, block_size=32), "cpu"),
        "decode heads of 80": lambda: check_decode(_with(decode, head_dim=80), "cpu"),
        "decode group of 20": lambda: check_decode(_with(decode, num_heads=20, kv_heads=1), "cpu"),
        "decode window": lambda: check_decode(_with(split, window=70), "cpu"),
        "decode ordered": lambda: check_decode(split, "cpu", ordered=True),
        "decode alone": lambda: check_decode_alone(_with(decode, contexts=(600, 3, 0, 17)), "cpu"),
        "prefill fp32": lambda: check_prefill(prefill, "cpu"),
        "prefill bf16 tiles": lambda: check_prefill(wide, "cpu"),
        "prefill bf16 short ahead": lambda: check_prefill(
            _with(prefill, dtype=bf16, head_dim=112), "cpu"
        ),
        "prefill empty chunk": lambda: check_prefill(_with(prefill, queries=(40, 0, 1)), "cpu"),
        "prefill window": lambda: check_prefill(_with(cut, window=37), "cpu"),
        "prefill chunks bf16": lambda: check_prefill_chunks(
            _with(cut, dtype=bf16, head_dim=80), "cpu"
        ),
        "prefill chunks far window bf16": lambda: check_prefill_chunks(
            _with(wide, contexts=(330,), window=200, head_dim=128), "cpu"
        ),
        "prefill chunks window": lambda: check_prefill_chunks(_with(cut, window=20), "cpu"),
        "ordered": lambda: check_decode_as_prefill(one, "cpu", 9),
        "ordered chunks": lambda: check_prefill_chunks(
            _with(one, queries=(45,)), "cpu", ordered=True
        ),
        "ordered window": lambda: check_decode_as_prefill(_with(one, window=530), "cpu", 9),
        "ordered bf16": lambda: check_decode_as_prefill(
            _with(one, dtype=bf16, head_dim=80, queries=(45,)), "cpu", 9
        ),
        "caps and sinks": lambda: check_decode_as_prefill(_with(one, **caps), "cpu", 9),
        "decode caps and sinks": lambda: check_decode(
            _with(split, contexts=(600, 0), **caps), "cpu"
        ),
        "decode few keys, caps and sinks": lambda: check_decode(_with(decode, **caps), "cpu"),
        "prefill caps and sinks": lambda: check_prefill(_with(cut, **caps), "cpu"),
        "prefill ahead, caps and sinks": lambda: check_prefill(
            _with(prefill, dtype=bf16, head_dim=112, **caps), "cpu"
        ),
        "tiles for warps": lambda: check_on_warps(
            _with(one, dtype=bf16, head_dim=256, queries=(20,)), "cpu"
        ),
        "latent fp32": lambda: check_latent(latent, "cpu", 8, 9),
        "latent bf16": lambda: check_latent(
            _with(
                latent,
                dtype=bf16,
                num_heads=20,
                contexts=(533, 9),
                queries=(3, 9),
                head_dim=48,
                block_size=64,
            ),
            "cpu",
            16,
            2,
        ),
        "latent store": lambda: check_turn_store(_with(rope, head_dim=40), "cpu", 8),
        "latent store bf16": lambda: check_turn_store(
            _with(rope, dtype=bf16, head_dim=48, num_heads=5), "cpu", 16
        ),
        "rope fp32 norm": lambda: check_rope_store(rope, "cpu", qk_norm=True),
        "rope bf16 norm": lambda: check_rope_store(_with(rope, dtype=bf16), "cpu", qk_norm=True),
        "rope heads of 80": lambda: check_rope_store(
            _with(rope, head_dim=80, kv_heads=3), "cpu", qk_norm=True
        ),
        "norm fp32": lambda: check_add_rms_norm(48, fp32, "cpu", residual=True),
        "norm first": lambda: check_add_rms_norm(64, fp32, "cpu", residual=False),
        "silu bf16": lambda: check_gate_mul(96, bf16, "cpu"),
        "gelu fp32": lambda: check_gate_mul(96, fp32, "cpu", GELU_TANH),
        "clamped gate": lambda: check_gate_mul(96, fp32, "cpu", Gate(1.702, 0.0, 7.0, 1.0)),
        "sampling every filter": lambda: check_sampling(301, 2.0, fp32, "cpu", 2),
        "sampling equals": lambda: check_sampling(16, 0.0, bf16, "cpu", 8),
        "sampling peaked": lambda: check_sampling(4100, 9.0, bf16, "cpu", 8),
        # More tokens than are gathered, and more wanted than there are maxima.
        "sampling flat": lambda: check_sampling(9001, 0.3, fp32, "cpu", 8),
        "penalties fp32": lambda: check_penalties(1500, fp32, "cpu"),
        "penalties bf16": lambda: check_penalties(1500, bf16, "cpu"),
        "product fp32": lambda: check_fixed_product(70, 72, 65, fp32, "cpu"),
        "product in parts": lambda: check_fixed_product(300, 1580, 100, fp32, "cpu", 4),
        "product in parts bf16": lambda: check_fixed_product(130, 1580, 100, bf16, "cpu", 3),
        "product bf16": lambda: check_fixed_product(67, 130, 129, bf16, "cpu"),
        "experts fp32": lambda: check_grouped_product((3, 0, 70, 1, 0), 72, 65, fp32, "cpu"),
        "experts bf16": lambda: check_grouped_product((0, 129, 2), 130, 129, bf16, "cpu"),
        "adapters": lambda: check_grouped_product((5, 0, 9), 16, 144, bf16, "cpu"),
        "sum of experts": lambda: check_add_experts(3, 4, 1100, bf16, "cpu"),
        "proof of a pool": lambda: check_proof(24, "cpu"),
        "blocks bf16": lambda: check_block_copy(64, bf16, "cpu"),
        "sums of blocks": lambda: check_block_sums(9000, "cpu"),
    }


def _with(shape: AttentionShape, **changes: object) -> AttentionShape:
    return dataclasses.replace(shape, **changes)  # type: ignore[arg-type]


FILTERS = tuple(
    itertools.product([0.0, 0.3, 1.7], [0, 1, 40], [0.0, 0.02, 1.0], [0.05, 0.9, 1.0])
)  # temperature, top_k, min_p, top_p


def check_sampling(vocab: int, spread: float, dtype: torch.dtype, device: str, every: int) -> None:
    """Every n-th combination of filters draws what torch draws.

    bf16 gives equal logits, and a third of its rows have others, which it would round. Some tokens
    cannot be drawn, a row of NaN and a row of minus infinity stand among the others, and held-back
    ids lie anywhere in a row.
    """
    rows = [
        SampleRow(Sampling(number - 9, 9, 0, heat, k, top_p, min_p), number % 5, number, 5)
        for number, (heat, k, min_p, top_p) in enumerate(FILTERS)
    ][::every]
    generator = torch.Generator().manual_seed(5)
    whole = torch.randn(len(rows), vocab + 3, generator=generator) * spread
    logits = whole.to(dtype)[:, :vocab]
    logits[:, 1::5] = -math.inf
    logits[0], logits[-1] = math.nan, -math.inf
    held_back = torch.randint(-vocab, vocab, (len(rows), 19), generator=generator)
    held_back = held_back.clamp(min=-1).to(torch.int32)
    held_back[0] = -1
    seen, changed = logits.float(), None
    if dtype == torch.bfloat16:
        numbers = torch.tensor([[-(number % 3), 0] for number in range(len(rows))]).to(torch.int32)
        near = 1.0 + torch.randn(len(rows), vocab, generator=generator) / 1000
        changed = near.to(device), numbers.to(device)
        seen = torch.where(numbers[:, :1] >= 0, near, seen)
    for row, ids in zip(seen, held_back, strict=True):
        row[ids[ids >= 0].long()] = -math.inf
    expected = Sampler().sample_rows(seen, rows)
    got = drawn(logits.to(device), rows, held_back, changed)
    assert got == expected, f"{got} instead of {expected}"
    # Alone, with other numbers of held-back ids.
    for number in range(0, len(rows), 7):
        one = slice(number, number + 1)
        ids = held_back[one][held_back[one] >= 0][None]
        other = changed and (changed[0][one], changed[1][one])
        assert drawn(logits[one].to(device), rows[one], ids, other) == expected[one]


def check_proof(words: int, device: str) -> None:
    """A pool whose end holds other bytes is not what its handle says."""
    from baton.engine.compute.peer_memory import PROOF_BYTES, reads_proof, write_proof

    blocks = torch.ones(5, words, dtype=torch.int32, device=device)
    proof = bytes(range(PROOF_BYTES))
    assert not reads_proof(blocks, proof, blocks.device)
    write_proof(blocks, proof)
    assert reads_proof(blocks, proof, blocks.device)
    assert bool((blocks[:-1] == 1).all())
    blocks[-1, -1] += 1
    assert not reads_proof(blocks, proof, blocks.device)


def check_penalties(vocab: int, dtype: torch.dtype, device: str) -> None:
    """Some samples have no row, two share one whose tokens stay, and three count their tokens."""
    from baton.kernels import reference
    from baton.kernels.constants import BIAS_SHIFT, MAX_COUNT
    from baton.kernels.token_counts import penalize_counted

    luck = torch.Generator().manual_seed(7)
    words = torch.randint(6, (5, vocab), generator=luck, dtype=torch.int32)
    words[torch.rand(words.shape, generator=luck) < 0.8] = 0
    biases = torch.randn(5, 1024, generator=luck, dtype=torch.float64)
    words[0, 40:1000] |= torch.arange(1, 961, dtype=torch.int32) << BIAS_SHIFT
    words[3, :70] |= torch.arange(955, 1025, dtype=torch.int32) << BIAS_SHIFT
    words[4, 9] = MAX_COUNT << 1
    factors = torch.tensor([[0.5, 0.1, 1.3]] * 5).double() * torch.arange(1, 6)[:, None]
    counted = [(2, 0), (-1, 0), (0, 1), (-1, 1), (2, 0), (3, 1), (4, 1)]
    rows = torch.tensor(counted, dtype=torch.int32)
    token_ids = torch.tensor([3, 4, 45, 2, 6, vocab - 1, 9])
    logits = (torch.randn(len(rows), vocab + 2, generator=luck) * 5).to(dtype)[:, :vocab]
    counts = words.clone()
    expected = reference.penalize_counted(logits, counts, factors, biases, rows, token_ids)
    has_row = rows[:, 0] >= 0
    assert not torch.equal(expected[has_row], logits[has_row].float())
    tables = [one.to(device) for one in (words, factors, biases, rows, token_ids)]
    got = penalize_counted(logits.to(device), *tables)
    assert torch.equal(got.cpu()[has_row], expected[has_row])
    assert torch.equal(tables[0].cpu(), counts)


def drawn(
    logits: Tensor, rows: list[SampleRow], held_back: Tensor, changed: tuple[Tensor, Tensor] | None
) -> list[int]:
    from baton.kernels.device_sampling import sample_tokens

    samples = SamplingTensors.of(rows, (), logits.device)
    on_device = held_back.to(logits.device)
    return sample_tokens(logits, samples.ints, samples.reals, on_device, changed).tolist()
