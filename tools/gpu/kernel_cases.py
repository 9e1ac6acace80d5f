"""Kernels held to their torch references: one check per kernel, on any device.

A check returns what it found, or raises `AssertionError`. The kernels' tests and the self-test call
the same checks.

On a CPU the checks run in Triton's interpreter, which must be chosen before Triton is imported: so
nothing here imports a kernel until a check runs. Slots that no sequence owns hold NaN, as does all
of block 0, which unused table entries and masked ids name: who reads too much cannot pass.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor

from baton.kernels.constants import SILU, Gate
from baton.model.layers.attention import DecodeRows, Tables, decode_rows
from baton.model.sampling.sampler import Sampler, SampleRow, SamplingTensors
from baton.protocol.sampling import Sampling

LAYERS = 3
LAYER = 1
# Sums have another order than in a reference, so bf16 may be off by one unit
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
    num_layers: int = LAYERS


@dataclass(frozen=True, slots=True)
class Batch:
    """What an attention kernel is called with."""

    q: Tensor  # [num_tokens, num_heads, head_dim]
    pool: Tensor  # [num_blocks, kv_heads, num_layers, planes, block_size, head_dim]
    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor
    scale: float
    how: tuple[int | None, float | None, Tensor | None]  # window, cap and sinks


def attention_batch(shape: AttentionShape, device: str, seed: int = 0) -> Batch:
    """Random queries over a pool of scattered blocks, drawn on the device.

    Equal for equal shapes and seeds.
    """
    luck = torch.Generator(device).manual_seed(seed)
    size = shape.block_size
    heads = shape.kv_heads
    dim = shape.head_dim
    planes = shape.planes
    layers = shape.num_layers
    needs = [-(-length // size) for length in shape.contexts]
    pool = torch.full(
        (sum(needs) + 1, heads, layers, planes, size, dim),
        float("nan"),
        dtype=shape.dtype,
        device=device,
    )
    order = torch.split(
        1 + torch.randperm(sum(needs), generator=luck, device=device), needs
    )
    tables = torch.zeros(len(needs), max(needs) + 2, dtype=torch.int32, device=device)
    for row, (blocks, length) in enumerate(zip(order, shape.contexts, strict=True)):
        tables[row, : len(blocks)] = blocks
        position = torch.arange(length, device=device)
        owners = blocks[position // size]
        offsets = position % size
        kv = torch.randn(
            length, heads, layers, planes, dim, generator=luck, device=device
        )
        pool[owners, :, :, :, offsets] = kv.to(shape.dtype)
    # Queries are a slice of a packed projection, as the engine's are: rows with a gap between.
    width = shape.num_heads + 2 * heads
    packed = torch.randn(sum(shape.queries), width, dim, generator=luck, device=device)
    sinks = 3 * torch.randn(shape.num_heads, generator=luck, device=device)
    return Batch(
        q=packed.to(shape.dtype)[:, : shape.num_heads],
        pool=pool,
        block_tables=tables,
        query_starts=torch.tensor([0, *shape.queries])
        .cumsum(0)
        .to(device, torch.int32),
        context_lens=torch.tensor(shape.contexts, dtype=torch.int32, device=device),
        scale=dim**-0.5,
        how=(shape.window, shape.softcap, sinks if shape.has_sinks else None),
    )


def rotation_table(
    num_positions: int, head_dim: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Return cosines, then sines, of rotary embeddings: `[num_positions, head_dim]` fp32."""
    inverse = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angle = torch.arange(num_positions)[:, None] * inverse
    return torch.cat([angle.cos(), angle.sin()], dim=1).to(device)


def in_fp8(pool: Tensor) -> tuple[Tensor, Tensor]:
    """Return a pool in FP8, and the pool of that type which holds the same numbers."""
    from baton.kernels import reference

    narrow = reference.in_fp8(pool)
    return narrow, reference.from_fp8(*reference.fp8_parts(narrow)).to(pool.dtype)


def check_fp8_pool(shape: AttentionShape, device: str, *, ordered: bool = False) -> str:
    """An FP8 pool gives what a pool with the same numbers gives, in tiles of fp32 the same bits."""
    from baton.kernels.cuda.decode_attention import paged_decode_attention
    from baton.kernels.cuda.prefill_attention import paged_prefill_attention

    case = attention_batch(shape, device)
    last = case.query_starts[1:].long() - 1
    found: list[Tensor] = []
    for pool in in_fp8(case.pool):
        call = (pool, LAYER, case.block_tables)
        found += [
            paged_decode_attention(
                case.q[last],
                *call,
                case.context_lens,
                case.scale,
                *case.how,
                ordered=ordered,
            ),
            paged_prefill_attention(
                case.q,
                *call,
                case.query_starts,
                case.context_lens,
                case.scale,
                *case.how,
                ordered=ordered,
            ),
        ]
    check = assert_equal_bits if shape.dtype == torch.float32 else assert_close
    check(found[0], found[2])
    return check(found[1], found[3])


def check_decode(shape: AttentionShape, device: str, *, ordered: bool = False) -> str:
    """One new token each; a sequence of length 0 pads a captured graph and gives zeros."""
    from baton.kernels import reference
    from baton.kernels.cuda import decode_attention

    case = attention_batch(shape, device)
    call = (case.q, case.pool, LAYER, case.block_tables, case.context_lens, case.scale)
    return assert_close(
        decode_attention.paged_decode_attention(*call, *case.how, ordered=ordered),
        reference.paged_decode_attention(*call, *case.how),
    )


def check_decode_alone(shape: AttentionShape, device: str) -> str:
    """A sequence gets the same bits alone, in a batch, and with a wider block table."""
    from baton.kernels.cuda.decode_attention import paged_decode_attention

    case = attention_batch(shape, device)
    tables = case.block_tables
    lens = case.context_lens

    def attended(rows: slice, tables: Tensor) -> Tensor:
        return paged_decode_attention(
            case.q[rows],
            case.pool,
            LAYER,
            tables[rows],
            lens[rows],
            case.scale,
            *case.how,
            ordered=True,
        )

    batched = attended(slice(None), tables)
    assert_equal_bits(
        attended(slice(None), torch.cat([tables, tables, tables], dim=1)), batched
    )
    for i in range(len(lens)):
        one = slice(i, i + 1)
        assert_equal_bits(attended(one, tables), batched[one])
    return assert_equal_bits(batched, attended(slice(None), tables))


def check_prefill(shape: AttentionShape, device: str, *, ordered: bool = False) -> str:
    """A ragged batch of chunks, some behind a cached prefix."""
    from baton.kernels import reference
    from baton.kernels.cuda import prefill_attention

    case = attention_batch(shape, device)
    call = (
        case.q,
        case.pool,
        LAYER,
        case.block_tables,
        case.query_starts,
        case.context_lens,
        case.scale,
        *case.how,
    )
    return assert_close(
        prefill_attention.paged_prefill_attention(*call, ordered=ordered),
        reference.paged_prefill_attention(*call),
    )


def check_prefill_chunks(
    shape: AttentionShape, device: str, *, ordered: bool = False
) -> str:
    """Prompts cut into chunks, one sequence at a time, give the bits of the whole batch at once."""
    from baton.kernels.cuda.prefill_attention import paged_prefill_attention

    case = attention_batch(shape, device)
    whole = paged_prefill_attention(
        case.q,
        case.pool,
        LAYER,
        case.block_tables,
        case.query_starts,
        case.context_lens,
        case.scale,
        *case.how,
        ordered=ordered,
    )
    start = 0
    for i, (length, count) in enumerate(
        zip(shape.contexts, shape.queries, strict=True)
    ):
        cut = count // 3
        for first, last in ((0, cut), (cut, count)):
            chunk = slice(start + first, start + last)
            starts = torch.tensor([0, last - first], dtype=torch.int32, device=device)
            seen = torch.tensor(
                [length - count + last], dtype=torch.int32, device=device
            )
            part = paged_prefill_attention(
                case.q[chunk],
                case.pool,
                LAYER,
                case.block_tables[i : i + 1],
                starts,
                seen,
                case.scale,
                *case.how,
                ordered=ordered,
            )
            assert_equal_bits(part, whole[chunk])
        start += count
    return f"{whole.numel()} values bit-equal"


def check_decode_as_prefill(shape: AttentionShape, device: str, every: int) -> str:
    """Each n-th token of each chunk, decoded in one batch, gets the bits that prefill gave it."""
    from baton.kernels.cuda.decode_attention import paged_decode_attention
    from baton.kernels.cuda.prefill_attention import paged_prefill_attention

    case = attention_batch(shape, device)
    whole = paged_prefill_attention(
        case.q,
        case.pool,
        LAYER,
        case.block_tables,
        case.query_starts,
        case.context_lens,
        case.scale,
        *case.how,
        ordered=True,
    )
    rows = []
    owners = []
    lens = []
    for i, (length, count) in enumerate(
        zip(shape.contexts, shape.queries, strict=True)
    ):
        for token in range(count - 1, -1, -every):
            rows.append(sum(shape.queries[:i]) + token)
            owners.append(i)
            lens.append(length - count + token + 1)
    decoded = paged_decode_attention(
        case.q[rows],
        case.pool,
        LAYER,
        case.block_tables[owners],
        torch.tensor(lens, dtype=torch.int32, device=device),
        case.scale,
        *case.how,
        ordered=True,
    )
    return assert_equal_bits(decoded, whole[rows])


def check_decode_rows(shape: AttentionShape, device: str) -> str:
    """Rows of a sequence that share tiles are right, and in one order have the bits of each alone.

    Those bits are prefill's, too. Rows of padding give zeros.
    """
    from baton.kernels import reference
    from baton.kernels.cuda.decode_attention import paged_decode_attention
    from baton.kernels.cuda.prefill_attention import paged_prefill_attention

    case = attention_batch(shape, device)
    num_rows = len(case.q)
    q = torch.cat((case.q, case.q[:2]))
    rows = rows_in_tiles(case, len(q))

    def decoded(*, ordered: bool) -> Tensor:
        out = paged_decode_attention(
            q,
            case.pool,
            LAYER,
            rows.blocks,
            rows.context_lens,
            case.scale,
            *case.how,
            rows.starts,
            ordered=ordered,
        )
        assert not out[num_rows:].any(), "the rows of padding"
        return out[:num_rows]

    call = (
        case.q,
        case.pool,
        LAYER,
        case.block_tables,
        case.query_starts,
        case.context_lens,
        case.scale,
        *case.how,
    )
    expected = reference.paged_prefill_attention(*call)
    assert_close(decoded(ordered=False), expected)
    together = decoded(ordered=True)
    assert_close(together, expected)
    owners, lens = rows_alone(shape, device)
    alone = paged_decode_attention(
        case.q,
        case.pool,
        LAYER,
        case.block_tables[owners],
        lens,
        case.scale,
        *case.how,
        ordered=True,
    )
    assert_equal_bits(together, alone)
    return assert_equal_bits(together, paged_prefill_attention(*call, ordered=True))


def rows_in_tiles(case: Batch, num_rows: int) -> DecodeRows:
    """Return the new tokens of a batch as decode attention takes them, and padding behind them."""
    from baton.kernels.cuda.paged import rows_of_tile

    count = len(case.context_lens)
    tables = Tables(
        case.block_tables,
        case.context_lens,
        case.query_starts[:0],
        count,
        decode_starts=case.query_starts if num_rows > count else None,
        num_more_rows=num_rows - count,
    )
    return decode_rows(tables, rows_of_tile(case.q.shape[1] // case.pool.shape[1]))


def rows_alone(shape: AttentionShape, device: str) -> tuple[Tensor, Tensor]:
    """Return the sequence of each new token of a batch, and how many keys it sees."""
    counts = torch.tensor(shape.queries)
    owners = torch.arange(len(counts)).repeat_interleave(counts)
    behind = counts.cumsum(0)[owners] - 1 - torch.arange(len(owners))
    lens = torch.tensor(shape.contexts)[owners] - behind
    return owners.to(device), lens.to(device, torch.int32)


def check_latent(shape: AttentionShape, device: str, rotated: int, every: int) -> str:
    """A token's attention to latent rows is right, and has the same bits however it is computed."""
    from baton.kernels import reference
    from baton.kernels.cuda.latent_attention import (
        latent_decode_attention,
        latent_prefill_attention,
    )

    case = attention_batch(shape, device)
    tail = (case.scale, rotated)

    def prefilled(
        rows: slice, tables: Tensor, starts: Sequence[int], lens: Sequence[int]
    ) -> Tensor:
        first, seen = (
            torch.tensor(one, dtype=torch.int32, device=device)
            for one in (starts, lens)
        )
        return latent_prefill_attention(
            case.q[rows], case.pool, LAYER, tables, first, seen, *tail
        )

    def decoded(
        rows: Sequence[int], owners: Sequence[int], lens: Sequence[int]
    ) -> Tensor:
        tables = case.block_tables[list(owners)]
        numbers = torch.tensor(lens, dtype=torch.int32)
        q = case.q[list(rows)]
        return latent_decode_attention(
            q, case.pool, LAYER, tables, numbers.to(device), *tail
        )

    starts = case.query_starts.tolist()
    whole = prefilled(slice(None), case.block_tables, starts, shape.contexts)
    call = (
        case.q,
        case.pool,
        LAYER,
        case.block_tables,
        case.query_starts,
        case.context_lens,
    )
    expected = reference.paged_prefill_attention(*call, case.scale)
    assert_close(whole, expected[..., :-rotated].contiguous())
    singles: list[tuple[int, int, int]] = []
    for i, (length, count) in enumerate(
        zip(shape.contexts, shape.queries, strict=True)
    ):
        cut = count // 3
        for first, last in ((0, cut), (cut, count)):
            chunk = slice(starts[i] + first, starts[i] + last)
            tables = case.block_tables[i : i + 1]
            seen = length - count + last
            part = prefilled(chunk, tables, (0, last - first), (seen,))
            assert_equal_bits(part, whole[chunk])
        tokens = range(count - 1, -1, -every)
        singles += [
            (starts[i] + token, i, length - count + token + 1) for token in tokens
        ]
    rows, owners, lens = zip(*singles, (0, 0, 0), strict=True)
    together = decoded(rows, owners, lens)
    assert_equal_bits(together[:-1], whole[list(rows[:-1])])
    assert not together[-1].any(), "the row of padding"
    # One sequence at a time.
    with patch("baton.kernels.cuda.latent_attention.WORKSPACE", 0):
        return assert_equal_bits(decoded(rows, owners, lens), together)


@dataclass(frozen=True, slots=True)
class IndexShape:
    num_heads: int
    head_dim: int
    num_chosen: int


def check_sparse(
    shape: AttentionShape, device: str, rotated: int, index: IndexShape, every: int
) -> str:
    """What queries see and their attention to it are right, with the same bits in any batch."""
    from baton.kernels import reference
    from baton.kernels.cuda.latent_attention import latent_decode_attention
    from baton.kernels.cuda.sparse_attention import choose_keys

    case = attention_batch(shape, device)
    scored = dataclasses.replace(
        shape, num_heads=index.num_heads, head_dim=index.head_dim
    )
    own = attention_batch(scored, device)  # its keys lie in the same blocks
    weights = torch.randn(len(own.q), index.num_heads, device=device)
    counts = torch.tensor(shape.queries, device=device)
    sequences = torch.arange(len(counts), device=device).repeat_interleave(counts).int()
    last = (
        case.query_starts[1:][sequences] - 1 - torch.arange(len(own.q), device=device)
    )
    num_seen = (case.context_lens[sequences] - last).int()

    def chosen(rows: Tensor, weights: Tensor, q: Tensor = own.q) -> Tensor:
        return choose_keys(
            q[rows],
            weights[rows],
            own.pool,
            LAYER,
            case.block_tables,
            sequences[rows],
            num_seen[rows],
            index.num_chosen,
        )

    def attended(rows: Tensor, slots: Tensor) -> Tensor:
        seen = num_seen[rows].clamp(max=index.num_chosen)
        return latent_decode_attention(
            case.q[rows],
            case.pool,
            LAYER,
            slots,
            seen,
            case.scale,
            rotated,
            of_slots=True,
        )

    rows = torch.arange(len(own.q), device=device)
    slots = chosen(rows, weights)
    masks = _seen_by(own, slots, weights, index.num_chosen)
    whole = attended(rows, slots)
    expected = reference.paged_prefill_attention(
        case.q,
        case.pool,
        LAYER,
        case.block_tables,
        case.query_starts,
        case.context_lens,
        case.scale,
        seen=masks,
    )
    assert_close(whole, expected[..., :-rotated].contiguous())
    equal = chosen(rows, -weights.abs(), torch.zeros_like(own.q))
    for mask in _seen_by(own, equal, torch.zeros_like(weights), index.num_chosen):
        assert mask[:, : index.num_chosen].sum() == mask.sum(), (
            "of equal keys, the first ones"
        )
    some = rows.flip(0)[::every]
    with (
        patch("baton.kernels.cuda.sparse_attention.WORKSPACE", 0),  # a token at a time
        patch("baton.kernels.cuda.latent_attention.WORKSPACE", 0),
    ):
        again = attended(some, chosen(some, weights))
    return assert_equal_bits(again, whole[some])


def _seen_by(
    case: Batch, slots: Tensor, weights: Tensor, num_chosen: int
) -> list[Tensor]:
    """Return by sequence which keys each query sees, which are known to be among the best."""
    from baton.kernels import sparse_reference

    masks: list[Tensor] = []
    size = case.pool.shape[4]
    starts = case.query_starts.tolist()
    for i, length in enumerate(case.context_lens.tolist()):
        rows = slice(starts[i], starts[i + 1])
        keys = sparse_reference.paged_keys(
            case.pool, LAYER, case.block_tables[i], length
        )
        scores = sparse_reference.index_scores(case.q[rows], weights[rows], keys)
        best = sparse_reference.chosen_keys(scores, num_chosen)
        places = torch.arange(length, device=slots.device)
        table = case.block_tables[i].long()[places // size] * size + places % size
        mask = torch.zeros_like(best)
        for row, (own, right) in enumerate(zip(slots[rows], best, strict=True)):
            count = int(right.sum())
            found = (own[:count, None] == table).int().argmax(1)
            assert torch.equal(table[found].int(), own[:count]), "slots of the sequence"
            assert (found.diff() > 0).all(), "in the order of the keys"
            mask[row, found] = True
            worst = scores[row, found].min()
            least = scores[row, right].min()
            assert worst >= least - 1e-4 * scores[row].abs().max(), "the best keys"
        masks.append(mask)
    return masks


def check_turn_store(shape: AttentionShape, device: str, rotated: int) -> str:
    """Queries and latent rows, scattered slots, and tokens of padding that are not stored."""
    from baton.kernels import reference
    from baton.kernels.cuda import latent_attention

    generator = torch.Generator().manual_seed(1)
    num_tokens = sum(shape.queries)
    heads = shape.num_heads
    size = shape.block_size
    x = torch.randn(num_tokens, heads + 1, shape.head_dim, generator=generator)
    x = x.to(device, shape.dtype)
    positions = torch.randint(0, 500, (num_tokens,), generator=generator).to(device)
    cos_sin = rotation_table(500, rotated, device)
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
    assert_close(ours, theirs)
    assert torch.equal(ours.isnan(), theirs.isnan()), (
        "a slot that was not named was written"
    )
    return assert_close(got, expected)


def check_rope_store(shape: AttentionShape, device: str, *, qk_norm: bool) -> str:
    """Packed projections, scattered slots, and padding tokens that must leave the pool alone."""
    from baton.kernels import reference
    from baton.kernels.cuda import pool_writes

    generator = torch.Generator().manual_seed(1)
    num_tokens = sum(shape.queries)
    dim = shape.head_dim
    kv_heads = shape.kv_heads
    packed = torch.randn(
        num_tokens, shape.num_heads + 2 * kv_heads, dim, generator=generator
    )
    sizes = [shape.num_heads, kv_heads, kv_heads]
    q, k, v = torch.split(packed.to(device, shape.dtype), sizes, dim=1)
    positions = torch.randint(0, 500, (num_tokens,), generator=generator).to(device)
    cos_sin = rotation_table(500, dim, device)
    num_blocks = -(-num_tokens // shape.block_size) + 1
    pool = torch.full(
        (num_blocks, kv_heads, LAYERS, 2, shape.block_size, dim),
        float("nan"),
        dtype=shape.dtype,
    ).to(device)
    slots = torch.randperm(num_blocks * shape.block_size, generator=generator)[
        :num_tokens
    ]
    slots[1::4] = -1
    slots = slots.to(device, torch.int64)
    norms: tuple[Tensor | None, Tensor | None] = (None, None)
    if qk_norm:
        weights = torch.randn(2, dim, generator=generator).to(device, shape.dtype)
        norms = (weights[0], weights[1])
    ours = pool.clone()
    theirs = pool.clone()
    tail = (LAYER, slots, *norms, 1e-5)
    got = pool_writes.rope_and_store(q, k, v, positions, cos_sin, ours, *tail)
    found = assert_close(
        got, reference.rope_and_store(q, k, v, positions, cos_sin, theirs, *tail)
    )
    assert_close(ours, theirs)
    assert torch.equal(ours.isnan(), theirs.isnan()), (
        "a slot that was not named was written"
    )
    assert_equal_bits(ours[:, :, LAYER, 1], theirs[:, :, LAYER, 1])  # values are copied
    narrow, _ = in_fp8(torch.zeros_like(pool))
    assert_equal_bits(
        pool_writes.rope_and_store(q, k, v, positions, cos_sin, narrow, *tail), got
    )
    codes, exponents = reference.to_fp8(ours.nan_to_num(0.0))
    for part, wanted in zip(
        reference.fp8_parts(narrow), (codes, exponents), strict=True
    ):
        assert torch.equal(part, wanted)
    return found


def check_add_rms_norm(
    hidden: int, dtype: torch.dtype, device: str, *, residual: bool
) -> str:
    """Rows with a gap between, and the rounded sum as the new residual."""
    from baton.kernels import reference
    from baton.kernels.cuda import rows as row_kernels

    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5, 2 * hidden, generator=generator).to(device, dtype)[:, :hidden]
    stream = (
        torch.randn(5, hidden, generator=generator).to(device, dtype)
        if residual
        else None
    )
    weight = torch.randn(hidden, generator=generator).to(device, dtype)
    got = row_kernels.add_rms_norm(x, stream, weight, 1e-5)
    expected = reference.add_rms_norm(x, stream, weight, 1e-5)
    assert_close(got[1], expected[1])
    # What is normed is the rounded sum: the stream alone gives the same bits.
    assert_equal_bits(got[0], row_kernels.add_rms_norm(got[1], None, weight, 1e-5)[0])
    return assert_close(got[0], expected[0])


def check_gate_mul(
    features: int, dtype: torch.dtype, device: str, gate: Gate = SILU
) -> str:
    """Feature counts that do and do not fill a tile."""
    from baton.kernels import reference
    from baton.kernels.cuda import rows as row_kernels

    generator = torch.Generator().manual_seed(3)
    gate_up = 4 * torch.randn(3, 2 * features, generator=generator).to(device, dtype)
    return assert_close(
        row_kernels.gate_mul(gate_up, gate), reference.gate_mul(gate_up, gate)
    )


def check_fixed_product(
    rows: int,
    inner: int,
    columns: int,
    dtype: torch.dtype,
    device: str,
    programs: int = 128,
) -> str:
    """Sizes that fill no tile, a gap between rows, and the bits of some rows computed alone.

    With few `programs`, one computes all parts of a tile, but not for the rows alone.
    """
    from baton.kernels import reference
    from baton.kernels.cuda import fixed_product as module

    generator = torch.Generator().manual_seed(6)
    x = torch.randn(rows, 2 * inner, generator=generator).to(device, dtype)[:, :inner]
    weight = (torch.randn(columns, inner, generator=generator) / inner**0.5).to(
        device, dtype
    )
    with patch.object(module, "PROGRAMS", programs):
        whole = module.fixed_product(x, weight)
        for first, count in ((0, 1), (rows // 2, 2), (rows - 9, 9)):
            part = slice(first, first + count)
            assert_equal_bits(module.fixed_product(x[part], weight), whole[part])
        return assert_close(whole, reference.fixed_product(x, weight))


def check_narrow_product(
    rows: int,
    inner: int,
    columns: int,
    group: int,
    device: str,
    *,
    is_fp8: bool = False,
) -> str:
    """Sizes that fill no tile, and the bits of some rows computed alone."""
    from baton.kernels import reference
    from baton.kernels.cuda import fixed_product as module
    from baton.kernels.reference import NarrowWeight

    generator = torch.Generator().manual_seed(6)
    size = columns, -(-inner // group)
    codes = torch.randint(16, (columns, inner), dtype=torch.uint8, generator=generator)
    scales = torch.rand(size, generator=generator) / inner**0.5 / 8
    zeros = torch.randint(16, size, dtype=torch.int32, generator=generator)
    if is_fp8:  # any but NaN, those below its least normal number, too
        codes = torch.randint(255, codes.shape, dtype=torch.uint8, generator=generator)
        codes = codes.where(codes != 127, 0).view(torch.float8_e4m3fn)
        # As the numbers are larger.
        zeros, scales = torch.zeros_like(zeros), scales / 16
    of = torch.arange(inner) // group
    weight = ((codes.float() - zeros[:, of]) * scales[:, of]).to(device, torch.bfloat16)
    narrow = NarrowWeight(codes, scales, zeros, group)
    made = module.packed(narrow, torch.device(device))
    assert made is not None
    packed, product = made
    x = torch.randn(rows, inner, generator=generator).to(device, torch.bfloat16)
    whole = product(x, packed)
    for first, count in ((0, 1), (rows // 2, 2), (rows - 9, 9)):
        part = slice(first, first + count)
        assert_equal_bits(product(x[part], packed), whole[part])
    return assert_close(whole, reference.fixed_product(x, weight))


def check_grouped_product(
    counts: Sequence[int], inner: int, columns: int, dtype: torch.dtype, device: str
) -> str:
    """Experts without a row, with a few and with several tiles; and rows among other neighbours."""
    from baton.kernels import reference
    from baton.kernels.cuda.grouped_product import grouped_product

    generator = torch.Generator().manual_seed(8)
    rows = sum(counts)
    x = torch.randn(rows, inner, generator=generator).to(device, dtype)
    weight = torch.randn(len(counts), columns, inner, generator=generator) / inner**0.5
    weight = weight.to(device, dtype)

    def ends(numbers: Tensor) -> Tensor:
        return numbers.cumsum(0).to(device, torch.int32)

    numbers = torch.tensor(counts)
    biases = torch.randn(len(counts), columns, generator=generator).to(device, dtype)
    for own in (None, biases):
        whole = grouped_product(x, weight, ends(numbers), own)
        found = assert_close(
            whole, reference.grouped_product(x, weight, ends(numbers), own)
        )
    expert_of = torch.arange(len(counts)).repeat_interleave(numbers)
    for kept in (torch.arange(rows) % 3 == 1, torch.arange(rows) == rows // 2):
        left = torch.bincount(expert_of[kept], minlength=len(counts))
        part = grouped_product(x[kept.to(device)], weight, ends(left), biases)
        assert_equal_bits(part, whole[kept.to(device)])
    return found


def check_adapters(rank: int, inner: int, columns: int, device: str) -> str:
    """Rows of three adapters in one batch; alone, in other batches, and among other adapters."""
    from baton.kernels import reference
    from baton.kernels.cuda.grouped_product import grouped_product
    from baton.model.layers.attention import AdaptedRows
    from baton.model.layers.lora import Lora
    from baton.model.layers.mlp import GroupedProduct, StackedExperts

    generator = torch.Generator().manual_seed(10)

    def numbers(*size: int) -> Tensor:
        x: Tensor = torch.randn(size, generator=generator) / size[-1] ** 0.5
        return x.to(device, torch.bfloat16)

    shrink = numbers(3, rank, inner)
    expand = numbers(3, columns, rank)
    adapters = (0, 2, -1, 2, 1, *(number % 3 for number in range(80)))
    x = numbers(len(adapters), inner)
    y = numbers(len(adapters), columns)

    def computed(rows: Sequence[int], product: GroupedProduct) -> Tensor:
        """Return some rows of the batch, each with its own adapter."""
        numbers = [adapters[row] for row in rows]
        order = [i for a in range(3) for i, number in enumerate(numbers) if number == a]
        counts = torch.tensor([numbers.count(a) for a in range(3)])
        ends = counts.cumsum(0).to(device, torch.int32)
        adapted = AdaptedRows(torch.tensor(order, device=device), ends)
        layers = (StackedExperts(matrices, product) for matrices in (shrink, expand))
        picked = torch.tensor(rows, device=device)
        return Lora(*layers)(y[picked], x[picked], adapted)

    every = range(len(adapters))
    whole = computed(every, grouped_product)
    assert_equal_bits(whole[2], y[2])
    for rows in ((0,), (4, 3), (1, 3), every[1::2], every[::-1], every[2:]):
        assert_equal_bits(computed(rows, grouped_product), whole[[*rows]])
    return assert_close(whole, computed(every, reference.grouped_product))


def check_add_experts(
    tokens: int, top_k: int, hidden: int, dtype: torch.dtype, dev: str
) -> str:
    from baton.kernels import reference
    from baton.kernels.cuda import grouped_product

    generator = torch.Generator().manual_seed(9)
    rows = torch.randn(tokens, top_k, hidden, generator=generator).to(dev, dtype)
    weights = torch.rand(tokens, 2 * top_k, generator=generator).to(dev)[:, :top_k]
    whole = grouped_product.add_experts(rows, weights)
    assert_equal_bits(grouped_product.add_experts(rows[1:2], weights[1:2]), whole[1:2])
    return assert_close(whole, reference.add_experts(rows, weights))


def check_on_warps(shape: AttentionShape, device: str) -> str:
    """Both attentions with the tiles of GPUs that multiply on warps."""
    from baton.kernels.cuda import paged

    with patch.object(paged, "tilings_of", lambda _: paged.WARPS):
        check_decode_as_prefill(shape, device, 9)
        return check_prefill(
            dataclasses.replace(shape, contexts=(70, 5), queries=(40, 5)), device
        )


def check_block_copy(numel: int, dtype: torch.dtype, device: str) -> str:
    """Any bit pattern, NaN included, arrives; blocks and rows that were not named stay."""
    from baton.kernels.cuda.pool_writes import move_blocks

    generator = torch.Generator().manual_seed(4)
    bits = torch.randint(
        -(2**31), 2**31 - 1, (7, numel), generator=generator, dtype=torch.int32
    )
    pool = bits.to(device).view(dtype)
    ids = torch.tensor([5, 0, 3], dtype=torch.int32, device=device)
    places = torch.tensor([2, 6, 1], dtype=torch.int32, device=device)
    moved = pool.flip(0).contiguous()
    expected_moved = pool.flip(0).contiguous()
    move_blocks(pool, ids, moved, places)
    expected_moved[places.long()] = pool[ids.long()]
    return assert_equal_bits(moved, expected_moved)


def check_block_sums(numel: int, device: str) -> str:
    """The kernel's sums are the reference's, and a changed bit or two exchanged words show."""
    from baton.kernels import reference
    from baton.kernels.cuda.pool_writes import sum_blocks

    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(
        -(2**31), 2**31 - 1, (4, numel), generator=generator, dtype=torch.int32
    )
    bits[3] = 0
    ids = torch.tensor([2, 0, 3, 2], dtype=torch.int32, device=device)
    sums = sum_blocks(bits.to(device), ids)
    assert_equal_bits(sums, reference.sum_blocks(bits.to(device), ids))
    assert len(set(sums.tolist())) == 3
    exchanged = bits.clone()
    changed = bits.clone()
    exchanged[2, [1, numel - 1]] = bits[2, [numel - 1, 1]]
    changed[2, -1] ^= 1 << 30
    for wrong in (exchanged, changed):
        assert int(sum_blocks(wrong.to(device), ids[:1])) != int(sums[0])
    return f"{len(sums)} sums"


def assert_close(ours: Tensor, expected: Tensor) -> str:
    """Within the rounding of the dtype; NaN where, and only where, the expected has it."""
    rtol, atol = TOLERANCE[expected.dtype]
    torch.testing.assert_close(ours, expected, rtol=rtol, atol=atol, equal_nan=True)
    error = (ours.double() - expected.double()).abs().nan_to_num()
    share = error / (atol + rtol * expected.double().abs().nan_to_num())
    return f"max error {error.max():.2e}, {100 * share.max():.0f} % of what is allowed"


def assert_equal_bits(left: Tensor, right: Tensor) -> str:
    """Equal to the last bit, NaN payloads included."""
    words = torch.int16 if left.element_size() == 2 else torch.int32
    difference = left.contiguous().view(words) != right.contiguous().view(words)
    assert not difference.any(), (
        f"{int(difference.sum())} of {left.numel()} values differ"
    )
    return f"{left.numel()} values bit-equal"


FILTERS = tuple(
    itertools.product([0.0, 0.3, 1.7], [0, 1, 40], [0.0, 0.02, 1.0], [0.05, 0.9, 1.0])
)  # temperature, top_k, min_p, top_p


def check_sampling(
    vocab: int, spread: float, dtype: torch.dtype, device: str, every: int
) -> str:
    """Every n-th combination of filters draws what torch draws.

    bf16 gives equal logits, and a third of its rows have others, which it would round. Some tokens
    cannot be drawn, a row of NaN and a row of minus infinity stand among the others, and held-back
    ids lie anywhere in a row.
    """
    rows = [
        SampleRow(
            Sampling(number - 9, 9, 0, heat, k, top_p, min_p), number % 5, number, 5
        )
        for number, (heat, k, min_p, top_p) in enumerate(FILTERS)
    ][::every]
    generator = torch.Generator().manual_seed(5)
    whole = torch.randn(len(rows), vocab + 3, generator=generator) * spread
    logits = whole.to(dtype)[:, :vocab]
    logits[:, 1::5] = -math.inf
    logits[0] = math.nan
    logits[-1] = -math.inf
    held_back = torch.randint(-vocab, vocab, (len(rows), 19), generator=generator)
    held_back = held_back.clamp(min=-1).to(torch.int32)
    held_back[0] = -1
    seen = logits.float()
    changed = None
    if dtype == torch.bfloat16:
        numbers = torch.tensor([[-(number % 3), 0] for number in range(len(rows))]).to(
            torch.int32
        )
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
    return f"{len(rows)} tokens, in a batch and alone"


def check_proof(words: int, device: str) -> str:
    """A pool whose end holds other bytes is not what its handle says."""
    from baton.model.runner.peer_memory import PROOF_BYTES, reads_proof, write_proof

    blocks = torch.ones(5, words, dtype=torch.int32, device=device)
    proof = bytes(range(PROOF_BYTES))
    assert not reads_proof(blocks, proof, blocks.device)
    write_proof(blocks, proof)
    assert reads_proof(blocks, proof, blocks.device)
    assert bool((blocks[:-1] == 1).all())
    blocks[-1, -1] += 1
    assert not reads_proof(blocks, proof, blocks.device)
    return "proven"


def check_penalties(vocab: int, dtype: torch.dtype, device: str) -> str:
    """Some samples have no row, two share one whose tokens stay, and three count their tokens."""
    from baton.kernels import reference
    from baton.kernels.constants import BIAS_SHIFT, MAX_COUNT
    from baton.kernels.cuda.token_counts import penalize_counted

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
    logits = (torch.randn(len(rows), vocab + 2, generator=luck) * 5).to(dtype)[
        :, :vocab
    ]
    counts = words.clone()
    expected = reference.penalize_counted(
        logits, counts, factors, biases, rows, token_ids
    )
    has_row = rows[:, 0] >= 0
    assert not torch.equal(expected[has_row], logits[has_row].float())
    tables = [one.to(device) for one in (words, factors, biases, rows, token_ids)]
    got = penalize_counted(logits.to(device), *tables)
    assert torch.equal(got.cpu()[has_row], expected[has_row])
    assert torch.equal(tables[0].cpu(), counts)
    return f"{got.numel()} logits bit-equal"


def drawn(
    logits: Tensor,
    rows: list[SampleRow],
    held_back: Tensor,
    changed: tuple[Tensor, Tensor] | None,
) -> list[int]:
    from baton.kernels.cuda.sampling import sample_tokens

    samples = SamplingTensors.of(rows, (), logits.device)
    on_device = held_back.to(logits.device)
    found: list[int] = sample_tokens(
        logits, samples.ints, samples.reals, on_device, changed
    ).tolist()
    return found
