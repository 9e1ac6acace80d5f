"""The shared parts of both attention kernels: softmax, loads from a paged pool, checks, tilings.

Three numbers address a pool of rank 6: the element strides of a block and of a KV head, and the
offset of the layer. The `[2, block_size, head_dim]` tile of one layer and head is contiguous. A
pool with another order of its first three axes therefore works with the same kernels.

Tilings are the compile-time choices for a number type and head size, as a table. Heads of 80, 96
and 112 use the row of the next power of two. Every row in bf16 or FP8 compiles without a spill for
the GPUs of its table. Nothing is tuned at run time, so warm-up compiles every variant.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.constants import LOG2_E
from baton.kernels.reference import pool_head_dim

# ruff: noqa: N803, PLR0913, PLR0917, SIM108
# Compile-time values are in capitals, as in Triton's own code; their branches are statements.


SINK_FACTOR = tl.constexpr(LOG2_E)  # the softmax is in base 2
HEAD_DIMS = (32, 64, 80, 96, 112, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128)
# Of layers with other heads than the rest of their pool, whose blocks are in pieces.
WIDE_HEAD_DIMS = (*HEAD_DIMS, 512)
PIECE_SIZES = (4, 8, *BLOCK_SIZES)
MAX_GROUP = 32
# Of a tile of query heads in decode; where more heads than that share a KV head, it has 32.
TILE_ROWS = 16
NO_WINDOW = 1 << 30  # keys that a query sees where a model has no sliding window
# Keys of an ordered split, which decode and prefill both sum separately.
ORDERED_SPLIT = 512
# One compiled variant serves every batch, so a row's bits cannot depend on the batch.
MAX_BATCH = 1024


def check_pool(q: Tensor, pool: Tensor, block_tables: Tensor) -> None:
    """Assert the layout that the attention kernels rely on."""
    _, kv_heads, _, two, block_size, width = pool.shape
    head_dim = pool_head_dim(pool)
    assert two == 2, f"not a pool of keys and values: {tuple(pool.shape)}"
    assert pool.stride()[3:] == (block_size * width, width, 1), (
        "a layer of a block is contiguous"
    )
    assert block_size in PIECE_SIZES, f"block size {block_size}"
    assert head_dim in WIDE_HEAD_DIMS, f"head size {head_dim}"
    assert q.shape[2] == head_dim, f"queries of {q.shape[2]}, a pool of {head_dim}"
    assert q.stride()[1:] == (head_dim, 1), "the heads of a token are contiguous"
    assert pool.dtype in {q.dtype, torch.uint8}, (
        f"queries are {q.dtype}, the pool is {pool.dtype}"
    )
    assert q.shape[1] % kv_heads == 0, f"{q.shape[1]} heads over {kv_heads} KV heads"
    assert q.shape[1] // kv_heads <= MAX_GROUP, (
        f"{q.shape[1] // kv_heads} heads share a KV head"
    )
    assert len(block_tables) <= MAX_BATCH, f"a batch of {len(block_tables)}"
    assert block_tables.stride(1) == 1, "a block table is contiguous"


def rows_of_tile(group: int) -> int:
    """Return how many rows of a sequence share a tile in decode, of `group` heads each.

    A tile is never wider for them, so a row's bits do not depend on how many lie beside it.
    """
    return max(1, TILE_ROWS // group)


def new_rows(q: Tensor, starts: Tensor | None) -> Tensor:
    """Return what decode writes to; rows behind the last of `starts`, which it does not, are 0."""
    if starts is None:
        return torch.empty_like(q, memory_format=torch.contiguous_format)
    return torch.zeros_like(q, memory_format=torch.contiguous_format)


def interpreted() -> bool:
    """Return whether Triton interprets kernels; `tl.dot` then multiplies the *bits* of bf16."""
    return bool(triton.knobs.runtime.interpret)


@functools.cache
def num_programs(device: torch.device, per_multiprocessor: int) -> int:
    """Return how many programs fill the device, at `per_multiprocessor` on each multiprocessor."""
    if device.type != "cuda":
        return 4  # the interpreter runs them one after the other
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        * per_multiprocessor
    )


@triton.jit
def seen_by_first(length: tl.tensor, begin: tl.tensor, stop: tl.tensor) -> tl.tensor:
    """Return how many keys the first of the last rows `begin:stop` of a context sees."""
    return length - tl.maximum(stop - begin - 1, 0)


@triton.jit
def load_blocks(
    table_ptr: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Return the block ids of positions `start:start + TILE`: one if one block holds them all.

    Call it one tile ahead and carry the ids through the loop. Otherwise Triton's pipeliner copies
    the ids through shared memory as well, and leaves a single buffer to the keys and values that
    wait for them.
    """
    n = start if BLOCK_SIZE >= TILE else start + tl.arange(0, TILE)
    return tl.load(table_ptr + n // BLOCK_SIZE, mask=n < end, other=0)


@triton.jit
def slot_rows(
    blocks: tl.tensor,
    start: tl.tensor,
    stride_block: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Return the element offsets of the keys of `start:start + TILE` within layer and head."""
    offsets = (start % BLOCK_SIZE + tl.arange(0, TILE)) % BLOCK_SIZE
    return blocks.to(tl.int64) * stride_block + offsets * HEAD_DIM


@triton.jit
def load_rows(
    rows: tl.tensor,
    live: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Load rows of a head, with zeros in dead rows and past the end of the head.

    A dead slot may hold NaN, and 0 x NaN is NaN, so its values must not be loaded.
    """
    d = tl.arange(0, DIM)
    if DIM == HEAD_DIM:
        if MASKED:
            values = tl.load(rows, mask=live[:, None], other=0.0)
        else:
            values = tl.load(rows)
    elif MASKED:
        values = tl.load(rows, mask=live[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    else:
        values = tl.load(rows, mask=(d < HEAD_DIM)[None, :], other=0.0)
    return values


@triton.jit
def load_kv(
    kv_ptr: tl.tensor,
    blocks: tl.tensor,
    start: tl.tensor,
    live: tl.tensor,
    q: tl.tensor,
    stride_block: tl.tensor,
    IS_VALUE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Load the keys or values of `start:start + TILE`, as numbers of the type of `q`."""
    is_fp8: tl.constexpr = kv_ptr.dtype.element_ty == tl.uint8
    rows = slot_rows(blocks, start, stride_block, BLOCK_SIZE, HEAD_DIM, TILE)
    here = kv_ptr + rows[:, None] + tl.arange(0, DIM)[None, :]
    to_values: tl.constexpr = (
        BLOCK_SIZE * (HEAD_DIM + 1) if is_fp8 else BLOCK_SIZE * HEAD_DIM
    )
    if IS_VALUE:
        here += to_values
    numbers = load_rows(here, live, HEAD_DIM, DIM, MASKED)
    if is_fp8:
        exponents = load_exponents(
            kv_ptr + to_values if IS_VALUE else kv_ptr,
            blocks,
            start,
            live,
            stride_block,
            HEAD_DIM,
            BLOCK_SIZE,
            TILE,
            MASKED,
        )
        # fp16 has the fields of e4m3 and eight more powers of 2.
        factors = (tl.minimum(exponents + 8, 255) << 23).to(tl.float32, bitcast=True)
        codes = numbers.to(tl.uint16)
        bits = (codes & 0x80) << 8 | (codes & 0x7F) << 7
        numbers = bits.to(tl.float16, bitcast=True).to(tl.float32) * factors[:, None]
    return numbers.to(q.dtype)


@triton.jit
def load_exponents(
    plane_ptr: tl.tensor,
    blocks: tl.tensor,
    start: tl.tensor,
    live: tl.tensor,
    stride_block: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Load the exponents of the keys, or values, `start:start + TILE`: from 0 to 255.

    They are loaded as words, because Triton's pipeliner leaves out single bytes.
    """
    slot = (start % BLOCK_SIZE + tl.arange(0, TILE)) % BLOCK_SIZE
    first = blocks.to(tl.int64) * stride_block + BLOCK_SIZE * HEAD_DIM + slot // 4 * 4
    words = (plane_ptr + first).to(tl.pointer_type(tl.int32), bitcast=True)
    word = tl.load(words, mask=live, other=0) if MASKED else tl.load(words)
    return word >> slot % 4 * 8 & 0xFF


@triton.jit
def fold(
    m: tl.tensor,
    norm: tl.tensor,
    acc: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    visible: tl.tensor,
    scale_log2: tl.tensor,
    cap_log2: tl.tensor | None,
    MASKED: tl.constexpr,
    ORDERED: tl.constexpr,
    UPCAST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add a tile of keys and values to the maximum, sum and output of some queries.

    This is the online softmax. A tile that a query does not see leaves the query's row as it was.
    `ORDERED` takes the sum by a product with ones, which adds in the order of the keys, because the
    order of a reduction depends on the shape of the tile. `norm` then has 16 equal columns.
    """
    if UPCAST:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    m, p, shrink = weigh(m, s, visible, scale_log2, cap_log2, MASKED)
    if ORDERED:
        ones = tl.full((s.shape[1], 16), 1.0, v.dtype)
        norm = tl.dot(
            p.to(v.dtype), ones, norm * shrink[:, None], input_precision="ieee"
        )
    else:
        norm = norm * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return m, norm, acc


@triton.jit
def weigh(
    m: tl.tensor,
    s: tl.tensor,
    visible: tl.tensor,
    scale_log2: tl.tensor,
    cap_log2: tl.tensor | None,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the new maximum, a tile's weights, and the factor that rescales the earlier sums.

    `constants.in_powers_of_2` says what `scale_log2` is with a cap.
    """
    if cap_log2 is not None:
        s = cap_log2 - 2.0 * cap_log2 / (1.0 + tl.exp2(s * scale_log2))
        scale_log2 = tl.full((), 1.0, tl.float32)
    if MASKED:
        s = tl.where(visible, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
    top = m_new
    if MASKED:  # because infinity minus infinity is NaN
        top = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(tl.fma(s, scale_log2, -top[:, None]))
    return m_new, p, tl.exp2(m - top)


@triton.jit
def before_keys(
    sink_ptr: tl.tensor | None,
    heads: tl.tensor,
    own: tl.tensor,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return maximum, sum and output of some queries before their first key.

    A sink is a key before all others whose value is zeros.
    """
    if sink_ptr is None:
        m = tl.full((ROWS,), float("-inf"), tl.float32)
        norm = tl.zeros((ROWS,), tl.float32)
    else:
        m = tl.load(sink_ptr + heads, mask=own, other=0.0).to(tl.float32) * SINK_FACTOR
        norm = tl.full((ROWS,), 1.0, tl.float32)
    return m, norm, tl.zeros((ROWS, DIM), tl.float32)


@triton.jit
def merge(
    m: tl.tensor,
    norm: tl.tensor,
    acc: tl.tensor,
    m_next: tl.tensor,
    norm_next: tl.tensor,
    acc_next: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return maximum, sum and output of two successive splits; an empty split changes no bit."""
    m_new = tl.maximum(m, m_next)
    top = tl.where(m_new == float("-inf"), 0.0, m_new)
    old = tl.exp2(m - top)
    new = tl.exp2(m_next - top)
    norm = tl.fma(norm, old, norm_next * new)
    acc = tl.fma(acc, old[:, None], acc_next * new[:, None])
    return m_new, norm, acc


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """A tile's keys and resources. `per_multiprocessor` programs share a multiprocessor.

    `max_registers` per thread make that possible where Triton 3.6 would take more.
    """

    keys: int
    num_warps: int
    num_stages: int
    per_multiprocessor: int
    max_registers: int | None = None


@dataclass(frozen=True, slots=True)
class PrefillTiling:
    """A tile's queries, keys and resources. `ahead` overlaps scores with the softmax."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int
    ahead: bool = False


FP32 = torch.float32
BF16 = torch.bfloat16
FP8 = torch.uint8
# Number type (FP8: a pool of FP8, queries in bf16), head size.
Row = tuple[torch.dtype, int]


@dataclass(frozen=True, slots=True)
class Tilings:
    decode: Mapping[Row, DecodeTiling]
    prefill: Mapping[Row, PrefillTiling]
    ordered_prefill: Mapping[Row, PrefillTiling]
    product_warps: int = 4  # of a fixed product
    # Decode programs on a multiprocessor where more than 16 query heads share a KV head.
    wide_programs: int = 2


# The first tables are for GPUs that multiply on warpgroups. A multiprocessor keeps some 100 KiB of
# loads in flight. fp32 is for parity only.
DECODE: dict[Row, DecodeTiling] = {
    (BF16, 32): DecodeTiling(128, 4, 3, 3),
    (BF16, 64): DecodeTiling(128, 4, 3, 3),
    (BF16, 128): DecodeTiling(64, 4, 3, 3, 168),
    (BF16, 256): DecodeTiling(32, 4, 3, 2),
    (BF16, 512): DecodeTiling(32, 8, 2, 1),
    (FP8, 32): DecodeTiling(32, 4, 3, 3),
    (FP8, 64): DecodeTiling(32, 4, 3, 3),
    (FP8, 128): DecodeTiling(32, 4, 3, 3),
    (FP8, 256): DecodeTiling(32, 4, 3, 2),
    (FP32, 32): DecodeTiling(32, 4, 2, 4),
    (FP32, 64): DecodeTiling(32, 4, 2, 4),
    (FP32, 128): DecodeTiling(32, 4, 2, 4),
    (FP32, 256): DecodeTiling(16, 4, 2, 3),
    (FP32, 512): DecodeTiling(16, 8, 1, 1),
}
# For heads up to 64, two programs share a multiprocessor: one computes products while the other
# computes the softmax.
PREFILL: dict[Row, PrefillTiling] = {
    (BF16, 32): PrefillTiling(128, 64, 8, 3),
    (BF16, 64): PrefillTiling(128, 64, 8, 3),
    (BF16, 128): PrefillTiling(128, 64, 8, 3, True),
    (BF16, 256): PrefillTiling(128, 32, 8, 3),
    (BF16, 512): PrefillTiling(32, 32, 8, 2),
    (FP8, 32): PrefillTiling(128, 64, 8, 3),
    (FP8, 64): PrefillTiling(128, 64, 8, 3),
    (FP8, 128): PrefillTiling(128, 64, 8, 3, True),
    (FP8, 256): PrefillTiling(128, 32, 8, 3),
    (FP32, 32): PrefillTiling(32, 32, 16, 2),
    (FP32, 64): PrefillTiling(32, 32, 16, 2),
    (FP32, 128): PrefillTiling(32, 32, 16, 2),
    (FP32, 256): PrefillTiling(16, 16, 8, 1),
    (FP32, 512): PrefillTiling(16, 16, 8, 1),
}

# For sums in decode's order: as many keys as in decode, and in bf16 fewer than 64 queries, so that
# the products use the instructions that decode's use.
ORDERED_PREFILL: dict[Row, PrefillTiling] = {
    (BF16, 32): PrefillTiling(32, 128, 4, 2),
    (BF16, 64): PrefillTiling(32, 128, 4, 2),
    (BF16, 128): PrefillTiling(32, 64, 4, 2),
    (BF16, 256): PrefillTiling(16, 32, 4, 2),
    (BF16, 512): PrefillTiling(16, 32, 8, 2),
    (FP8, 32): PrefillTiling(32, 32, 8, 2),
    (FP8, 64): PrefillTiling(32, 32, 8, 2),
    (FP8, 128): PrefillTiling(32, 32, 8, 2),
    (FP8, 256): PrefillTiling(16, 32, 8, 2),
    (FP32, 32): PrefillTiling(32, 32, 8, 2),
    (FP32, 64): PrefillTiling(32, 32, 8, 2),
    (FP32, 128): PrefillTiling(64, 32, 16, 2),
    (FP32, 256): PrefillTiling(32, 16, 8, 2),
    (FP32, 512): PrefillTiling(16, 16, 16, 1),
}


WARPGROUPS = Tilings(DECODE, PREFILL, ORDERED_PREFILL)

# For GPUs that multiply on warps: with registers for one tile of scores at a time, and for the 99
# KiB of shared memory that the smallest of them have.
WARPS = Tilings(
    {
        (BF16, 32): DecodeTiling(128, 4, 2, 2),
        (BF16, 64): DecodeTiling(128, 4, 2, 2),
        (BF16, 128): DecodeTiling(64, 4, 2, 2),
        (BF16, 256): DecodeTiling(32, 4, 2, 2),
        (BF16, 512): DecodeTiling(32, 8, 1, 1),
        (FP8, 32): DecodeTiling(32, 4, 2, 2),
        (FP8, 64): DecodeTiling(32, 4, 2, 2),
        (FP8, 128): DecodeTiling(32, 4, 2, 2),
        (FP8, 256): DecodeTiling(32, 4, 2, 1),
        (FP32, 32): DecodeTiling(32, 4, 2, 2),
        (FP32, 64): DecodeTiling(16, 4, 2, 4),
        (FP32, 128): DecodeTiling(16, 4, 2, 2),
        (FP32, 256): DecodeTiling(16, 8, 2, 1),
        (FP32, 512): DecodeTiling(16, 8, 1, 1),
    },
    PREFILL
    | {
        (BF16, 128): PrefillTiling(128, 32, 8, 3),
        (BF16, 256): PrefillTiling(64, 32, 8, 2),
        (BF16, 512): PrefillTiling(32, 32, 8, 1),
        (FP8, 128): PrefillTiling(128, 16, 8, 3),
        (FP8, 256): PrefillTiling(16, 32, 8, 2),
    },
    ORDERED_PREFILL
    | {
        (FP32, 64): PrefillTiling(16, 16, 8, 2),
        (FP32, 128): PrefillTiling(32, 16, 8, 2),
        (FP32, 256): PrefillTiling(16, 16, 16, 2),
    },
    product_warps=8,
    wide_programs=1,
)
LEAST_CAPABILITY = (8, 0)  # older GPUs cannot multiply bf16


def tilings_for(capability: tuple[int, int]) -> Tilings:
    """Return the tables for GPUs of a compute capability."""
    return WARPGROUPS if capability[0] in {9, 10, 11} else WARPS


@functools.cache
def tilings_of(device: torch.device) -> Tilings:
    if device.type != "cuda":
        return WARPGROUPS
    return tilings_for(torch.cuda.get_device_capability(device))


def padded(head_dim: int) -> int:
    """Return the head size of a tile, which is a power of two."""
    return max(32, 1 << (head_dim - 1).bit_length())


def decode_tiling(q: Tensor, pool: Tensor) -> DecodeTiling:
    """Return the tiling for queries `[batch, num_heads, head_dim]`."""
    return tilings_of(q.device).decode[_row_of(q, pool)]


def prefill_tiling(q: Tensor, pool: Tensor, *, ordered: bool) -> PrefillTiling:
    tilings = tilings_of(q.device)
    return (tilings.ordered_prefill if ordered else tilings.prefill)[_row_of(q, pool)]


def _row_of(q: Tensor, pool: Tensor) -> Row:
    return (pool if q.dtype == BF16 else q).dtype, padded(q.shape[2])
