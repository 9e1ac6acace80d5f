"""Sample tokens from logits on a GPU with three kernels, without the host.

The first kernel takes the largest logit of every 64. The second reads the logits again for rows
that need the sum of all weights or that draw without a filter. The third, with one program per row,
picks a token among the chunks' winners or by `device_filters`. No shape depends on what was drawn.

It works under CUDA graph capture. The compiled CPU kernel does the same operations in fp32 and
gives the same token for the same logits; the torch code of the engine's `Sampler` defines it.
"""

# ruff: noqa: N803, PLR0913, PLR0917
# Compile-time values are in capitals, as in Triton's own code; arguments are pointers and strides.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels import constants
from baton.kernels.constants import ROW_INTS, ROW_REALS
from baton.kernels.cuda.filters import (
    CANDIDATES,
    NONE,
    SCALE,
    STEP,
    TINY,
    WIDTH,
    bound,
    draw,
    gather,
    load_logits,
    race,
    row_key,
    weight_of,
)

CHUNK = 4096  # logits of one program of the first two kernels
_ROW_INTS = tl.constexpr(ROW_INTS)
_ROW_REALS = tl.constexpr(ROW_REALS)
_MIN_TEMPERATURE = tl.constexpr(constants.MIN_TEMPERATURE)
_OTHERS = ("number_ptr", "has_changed")


def sample_tokens(
    logits: Tensor,  # [num_rows, vocab] fp32 or bf16
    ints: Tensor,  # [num_rows, ROW_INTS] int64: seed, choice, position, top_k
    reals: Tensor,  # [num_rows, ROW_REALS] float64: temperature, log of min_p, top_p
    # [num_rows, width] int32: ids that must not be drawn; -1 names none.
    held_back: Tensor,
    changed: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return one token id for each row, `[num_rows]` int64, on the device.

    `changed` has other logits, `[num_rows, vocab]` fp32, for rows whose number in `[num_rows, 2]`
    int32 is not negative: those of `token_counts`, which bf16 would round.
    The logits of the ids that must not be drawn are overwritten with minus infinity. A temperature
    below `constants.MIN_TEMPERATURE` is greedy and takes the lowest id among equals; it ignores the
    filters and costs least, so it suits the padding rows of a captured graph.
    """
    num_rows, vocab = logits.shape
    assert logits.stride(1) == 1, "the logits of a row are contiguous"
    assert (ints.shape, ints.dtype) == ((num_rows, ROW_INTS), torch.int64)
    assert (reals.shape, reals.dtype) == ((num_rows, ROW_REALS), torch.float64)
    assert (len(held_back), held_back.dtype) == (num_rows, torch.int32)
    assert all(given.is_contiguous() for given in (ints, reals, held_back))
    tiles = triton.cdiv(vocab, WIDTH.value)
    chunks = triton.cdiv(vocab, CHUNK)
    new = logits.new_empty
    tile_tops = new((num_rows, tiles), dtype=torch.float32)
    tile_sums = new((num_rows, tiles), dtype=torch.int64)
    tops, raced = new((2, num_rows, chunks), dtype=torch.float32)
    top_ids, raced_ids = new((2, num_rows, chunks), dtype=torch.int32)
    places = new((num_rows, tiles), dtype=torch.int32)
    kept = new((num_rows, CANDIDATES.value), dtype=torch.float32)
    kept_ids = new((num_rows, CANDIDATES.value), dtype=torch.int32)
    tokens = new(num_rows, dtype=torch.int64)
    padded = max(16, triton.next_power_of_2(chunks))
    # Without any, other tensors of these types stand for them, which nothing reads.
    others = (tile_tops, held_back, 0) if changed is None else (*changed, 1)
    assert others[0].is_contiguous()
    assert others[1].is_contiguous()
    _scan_kernel[(chunks, num_rows)](
        logits,
        *others,
        held_back,
        tile_tops,
        tops,
        top_ids,
        vocab,
        tiles,
        held_back.shape[1],
        logits.stride(0),
        CHUNK=CHUNK,
        num_warps=4,
        num_stages=1,
        enable_fp_fusion=False,
    )
    _weigh_kernel[(chunks, num_rows)](
        logits,
        *others,
        ints,
        reals,
        tops,
        tile_sums,
        raced,
        raced_ids,
        vocab,
        tiles,
        logits.stride(0),
        CHUNK=CHUNK,
        CHUNKS=padded,
        num_warps=4,
        num_stages=2,
        enable_fp_fusion=False,
    )
    _choose_kernel[(num_rows,)](
        logits,
        *others,
        ints,
        reals,
        tops,
        top_ids,
        raced,
        raced_ids,
        tile_tops,
        tile_sums,
        places,
        kept,
        kept_ids,
        tokens,
        vocab,
        tiles,
        chunks,
        logits.stride(0),
        CHUNKS=padded,
        TILES=max(16, triton.next_power_of_2(tiles)),
        num_warps=16,
        num_stages=1,
        enable_fp_fusion=False,
    )
    return tokens


# Counts, and the addresses of tensors that the host fills, are not specialised, so that every batch
# finds the variants that the first call compiled.
@triton.jit(
    do_not_specialize=[
        *_OTHERS,
        "held_ptr",
        "top_ptr",
        "top_id_ptr",
        "tiles",
        "held_width",
    ]
)
def _scan_kernel(
    logits_ptr: tl.tensor,
    changed_ptr: tl.tensor,
    number_ptr: tl.tensor,
    has_changed: tl.tensor,
    held_ptr: tl.tensor,
    tile_top_ptr: tl.tensor,
    top_ptr: tl.tensor,
    top_id_ptr: tl.tensor,
    vocab: tl.tensor,
    tiles: tl.tensor,
    held_width: tl.tensor,
    stride_logits: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """Hide ids that must not be drawn; store a chunk's maxima and the first id of the largest."""
    first = tl.program_id(0) * CHUNK
    row = tl.program_id(1)
    own = _own(
        logits_ptr, stride_logits, changed_ptr, number_ptr, has_changed, row, vocab
    )
    logits, changed, is_changed = own
    for start in range(0, held_width, 16):
        i = start + tl.arange(0, 16)
        token = tl.load(held_ptr + row * held_width + i, mask=i < held_width, other=-1)
        is_here = (token >= first) & (token < first + CHUNK) & (token < vocab)
        tl.store(logits + token, float("-inf"), mask=is_here & (is_changed == 0))
        tl.store(changed + token, float("-inf"), mask=is_here & is_changed)
    tl.debug_barrier()  # the loads below are by other threads
    tile = tl.arange(0, CHUNK // WIDTH)
    token = first + tile[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = load_logits(own, token, token < vocab)
    tile_tops = tl.max(x, 1)
    tile += first // WIDTH
    tl.store(
        tile_top_ptr + row.to(tl.int64) * tiles + tile, tile_tops, mask=tile < tiles
    )
    top = tl.max(tile_tops, 0)
    place = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(top_ptr + place, top)
    is_top = (x == top) & (token < vocab)
    tl.store(top_id_ptr + place, tl.min(tl.min(tl.where(is_top, token, NONE), 1), 0))


@triton.jit(
    do_not_specialize=[
        *_OTHERS,
        "int_ptr",
        "real_ptr",
        "top_ptr",
        "raced_ptr",
        "raced_id_ptr",
        "tiles",
    ]
)
def _weigh_kernel(
    logits_ptr: tl.tensor,
    changed_ptr: tl.tensor,
    number_ptr: tl.tensor,
    has_changed: tl.tensor,
    int_ptr: tl.tensor,
    real_ptr: tl.tensor,
    top_ptr: tl.tensor,
    tile_sum_ptr: tl.tensor,
    raced_ptr: tl.tensor,
    raced_id_ptr: tl.tensor,
    vocab: tl.tensor,
    tiles: tl.tensor,
    stride_logits: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    """Store the sums of a chunk's weights for top-p, or its winner for a row without filters."""
    row = tl.program_id(1)
    chunks = tl.num_programs(0)
    temperature, lowest, top_p = _reals(real_ptr, row)
    top_k = tl.load(int_ptr + row * _ROW_INTS + 3)
    if (temperature >= _MIN_TEMPERATURE) & ((top_k <= 0) | (top_k >= vocab)):
        heat = temperature.to(tl.float32)
        chunk = tl.arange(0, CHUNKS)
        tops = tl.load(
            top_ptr + row * chunks + chunk, mask=chunk < chunks, other=float("-inf")
        )
        highest = tl.div_rn(tl.max(tops, 0), heat)
        own = _own(
            logits_ptr, stride_logits, changed_ptr, number_ptr, has_changed, row, vocab
        )
        tile = tl.arange(0, STEP // WIDTH)
        lane = tile[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        first = tl.program_id(0) * CHUNK
        if top_p < 1.0:
            for start in range(first, first + CHUNK, STEP):
                token = start + lane
                x = load_logits(own, token, token < vocab)
                weight = weight_of(tl.div_rn(x, heat) - highest, lowest)
                sums = tl.sum((weight * SCALE).to(tl.int64), 1)
                place = start // WIDTH + tile
                own_sums = tile_sum_ptr + row.to(tl.int64) * tiles
                tl.store(own_sums + place, sums, mask=place < tiles)
        else:
            key = _key(int_ptr, row)
            best = tl.zeros((STEP // WIDTH, WIDTH), tl.float32)
            best_id = tl.zeros((STEP // WIDTH, WIDTH), tl.int32)
            for start in range(first, first + CHUNK, STEP):
                token = start + lane
                x = load_logits(own, token, token < vocab)
                weight = weight_of(tl.div_rn(x, heat) - highest, lowest)
                best, best_id = race(best, best_id, weight, TINY, key, token)
            won = tl.max(tl.max(best, 1), 0)
            place = row * chunks + tl.program_id(0)
            tl.store(raced_ptr + place, won)
            won_id = tl.min(tl.min(tl.where(best == won, best_id, NONE), 1), 0)
            tl.store(raced_id_ptr + place, won_id)


@triton.jit(
    do_not_specialize=[
        *_OTHERS,
        "int_ptr",
        "real_ptr",
        "top_ptr",
        "top_id_ptr",
        "raced_ptr",
        "raced_id_ptr",
        "tiles",
        "chunks",
    ]
)
def _choose_kernel(
    logits_ptr: tl.tensor,
    changed_ptr: tl.tensor,
    number_ptr: tl.tensor,
    has_changed: tl.tensor,
    int_ptr: tl.tensor,
    real_ptr: tl.tensor,
    top_ptr: tl.tensor,
    top_id_ptr: tl.tensor,
    raced_ptr: tl.tensor,
    raced_id_ptr: tl.tensor,
    tile_top_ptr: tl.tensor,
    tile_sum_ptr: tl.tensor,
    place_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    kept_id_ptr: tl.tensor,
    token_ptr: tl.tensor,
    vocab: tl.tensor,
    tiles: tl.tensor,
    chunks: tl.tensor,
    stride_logits: tl.tensor,
    CHUNKS: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """Choose the token of a row from the results of the other kernels."""
    row = tl.program_id(0).to(tl.int64)
    temperature, lowest, top_p = _reals(real_ptr, row)
    top_k = tl.load(int_ptr + row * _ROW_INTS + 3)
    has_top_k = (top_k > 0) & (top_k < vocab)
    if temperature < _MIN_TEMPERATURE:
        token = _winner(top_ptr, top_id_ptr, row, chunks, CHUNKS)
    elif has_top_k | (top_p < 1.0):
        heat = temperature.to(tl.float32)
        chunk = tl.arange(0, CHUNKS)
        tops = tl.load(
            top_ptr + row * chunks + chunk, mask=chunk < chunks, other=float("-inf")
        )
        highest = tl.div_rn(tl.max(tops, 0), heat)
        own = _own(
            logits_ptr, stride_logits, changed_ptr, number_ptr, has_changed, row, vocab
        )
        limit, wanted = bound(
            tile_top_ptr + row * tiles,
            tile_sum_ptr + row * tiles,
            tiles,
            heat,
            highest,
            lowest,
            has_top_k,
            top_k,
            top_p,
            TILES,
        )
        count = gather(
            own,
            tile_top_ptr + row * tiles,
            place_ptr + row * tiles,
            kept_ptr + row * CANDIDATES,
            kept_id_ptr + row * CANDIDATES,
            vocab,
            tiles,
            heat,
            highest,
            limit,
            TILES,
        )
        token = draw(
            own,
            kept_ptr + row * CANDIDATES,
            kept_id_ptr + row * CANDIDATES,
            count,
            vocab,
            heat,
            highest,
            lowest,
            has_top_k,
            top_k,
            top_p,
            wanted,
            _key(int_ptr, row),
        )
    else:
        token = _winner(raced_ptr, raced_id_ptr, row, chunks, CHUNKS)
    tl.store(token_ptr + row, token.to(tl.int64))


@triton.jit
def _own(
    logits_ptr: tl.tensor,
    stride_logits: tl.tensor,
    changed_ptr: tl.tensor,
    number_ptr: tl.tensor,
    has_changed: tl.tensor,
    row: tl.tensor,
    vocab: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return what `load_logits` takes."""
    number = tl.load(number_ptr + 2 * row, mask=has_changed > 0, other=-1)
    row = row.to(tl.int64)
    return logits_ptr + row * stride_logits, changed_ptr + row * vocab, number >= 0


@triton.jit
def _winner(
    value_ptr: tl.tensor,
    id_ptr: tl.tensor,
    row: tl.tensor,
    chunks: tl.tensor,
    CHUNKS: tl.constexpr,
) -> tl.tensor:
    """Return the id of the largest of a row's chunks, the lowest among equals; 0 if all are NaN."""
    chunk = tl.arange(0, CHUNKS)
    is_live = chunk < chunks
    value = tl.load(value_ptr + row * chunks + chunk, mask=is_live, other=float("-inf"))
    token = tl.load(id_ptr + row * chunks + chunk, mask=is_live, other=NONE)
    token = tl.min(tl.where(value == tl.max(value, 0), token, NONE), 0)
    return tl.where(token == NONE, 0, token)


@triton.jit
def _reals(
    real_ptr: tl.tensor, row: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the temperature (fp64), the least scaled logit of min-p (fp32) and top_p (fp64)."""
    own = real_ptr + row * _ROW_REALS
    return tl.load(own), tl.load(own + 1).to(tl.float32), tl.load(own + 2)


@triton.jit
def _key(int_ptr: tl.tensor, row: tl.tensor) -> tl.tensor:
    own = int_ptr + row * _ROW_INTS
    return row_key(tl.load(own), tl.load(own + 1), tl.load(own + 2))
