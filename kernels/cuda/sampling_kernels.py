"""The kernels of `sampling.sample_tokens`: two read all logits, and three choose among them."""

# ruff: noqa: N803, PLR0913, PLR0917
# Compile-time values are in capitals, as in Triton's own code; arguments are pointers and strides.

from __future__ import annotations

import triton
import triton.language as tl

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
from baton.kernels.cuda.nucleus import CAPACITY, bracket, select, sweep

_ROW_INTS = tl.constexpr(ROW_INTS)
_ROW_REALS = tl.constexpr(ROW_REALS)
_MIN_TEMPERATURE = tl.constexpr(constants.MIN_TEMPERATURE)
_OTHERS = ("number_ptr", "has_changed")


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
def scan_kernel(
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
def weigh_kernel(
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
        highest = _highest(top_ptr, row, chunks, heat, CHUNKS)
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
        "share_ptr",
        "num_ptr",
        "floor_ptr",
        "tiles",
        "chunks",
    ]
)
def gather_kernel(
    logits_ptr: tl.tensor,
    changed_ptr: tl.tensor,
    number_ptr: tl.tensor,
    has_changed: tl.tensor,
    int_ptr: tl.tensor,
    real_ptr: tl.tensor,
    top_ptr: tl.tensor,
    tile_top_ptr: tl.tensor,
    tile_sum_ptr: tl.tensor,
    place_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    kept_id_ptr: tl.tensor,
    share_ptr: tl.tensor,
    num_ptr: tl.tensor,
    floor_ptr: tl.tensor,
    vocab: tl.tensor,
    tiles: tl.tensor,
    chunks: tl.tensor,
    stride_logits: tl.tensor,
    CHUNKS: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """Gather the tokens of a row that its filters may keep, or bracket its nucleus.

    `num_ptr` gets four int32 a row: the gathered tokens (more than `CANDIDATES` if they are too
    many), the ends of the bracket, and a zero for what `sweep_kernel` counts.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature, lowest, top_p = _reals(real_ptr, row)
    top_k = tl.load(int_ptr + row * _ROW_INTS + 3)
    has_top_k = (top_k > 0) & (top_k < vocab)
    if (temperature >= _MIN_TEMPERATURE) & (has_top_k | (top_p < 1.0)):
        heat = temperature.to(tl.float32)
        highest = _highest(top_ptr, row, chunks, heat, CHUNKS)
        own = _own(
            logits_ptr, stride_logits, changed_ptr, number_ptr, has_changed, row, vocab
        )
        limit, total, wanted = bound(
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
            kept_ptr + row * CAPACITY,
            kept_id_ptr + row * CAPACITY,
            vocab,
            tiles,
            heat,
            highest,
            limit,
            TILES,
        )
        tl.store(share_ptr + row, wanted)
        tl.store(num_ptr + 4 * row, count)
        if (count > CANDIDATES) & (has_top_k == 0):
            key = _key(int_ptr, row)
            low, high, floor = bracket(
                own, vocab, heat, highest, lowest, total, wanted, key
            )
            tl.store(num_ptr + 4 * row + 1, low)
            tl.store(num_ptr + 4 * row + 2, high)
            tl.store(num_ptr + 4 * row + 3, 0)
            tl.store(floor_ptr + row, floor)


@triton.jit(
    do_not_specialize=[
        *_OTHERS,
        "int_ptr",
        "real_ptr",
        "top_ptr",
        "num_ptr",
        "floor_ptr",
        "raced_ptr",
        "raced_id_ptr",
        "chunks",
    ]
)
def sweep_kernel(
    logits_ptr: tl.tensor,
    changed_ptr: tl.tensor,
    number_ptr: tl.tensor,
    has_changed: tl.tensor,
    int_ptr: tl.tensor,
    real_ptr: tl.tensor,
    top_ptr: tl.tensor,
    num_ptr: tl.tensor,
    floor_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    kept_id_ptr: tl.tensor,
    above_ptr: tl.tensor,
    raced_ptr: tl.tensor,
    raced_id_ptr: tl.tensor,
    vocab: tl.tensor,
    chunks: tl.tensor,
    stride_logits: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    """Sum and race a chunk of a row whose nucleus was bracketed; others are left alone."""
    row = tl.program_id(1).to(tl.int64)
    if _is_bracketed(int_ptr, real_ptr, num_ptr, row, vocab):
        temperature, lowest, _ = _reals(real_ptr, row)
        heat = temperature.to(tl.float32)
        above, won, won_id = sweep(
            _own(
                logits_ptr,
                stride_logits,
                changed_ptr,
                number_ptr,
                has_changed,
                row,
                vocab,
            ),
            tl.program_id(0) * CHUNK,
            vocab,
            heat,
            _highest(top_ptr, row, chunks, heat, CHUNKS),
            lowest,
            tl.load(num_ptr + 4 * row + 1),
            tl.load(num_ptr + 4 * row + 2),
            tl.load(floor_ptr + row),
            _key(int_ptr, row),
            num_ptr + 4 * row + 3,
            kept_ptr + row * CAPACITY,
            kept_id_ptr + row * CAPACITY,
            CHUNK,
        )
        place = row * chunks + tl.program_id(0)
        tl.store(above_ptr + place, above)
        tl.store(raced_ptr + place, won)
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
        "share_ptr",
        "num_ptr",
        "chunks",
    ]
)
def choose_kernel(
    logits_ptr: tl.tensor,
    changed_ptr: tl.tensor,
    number_ptr: tl.tensor,
    has_changed: tl.tensor,
    int_ptr: tl.tensor,
    real_ptr: tl.tensor,
    top_ptr: tl.tensor,
    top_id_ptr: tl.tensor,
    above_ptr: tl.tensor,
    raced_ptr: tl.tensor,
    raced_id_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    kept_id_ptr: tl.tensor,
    share_ptr: tl.tensor,
    num_ptr: tl.tensor,
    token_ptr: tl.tensor,
    vocab: tl.tensor,
    chunks: tl.tensor,
    stride_logits: tl.tensor,
    CHUNKS: tl.constexpr,
) -> None:
    """Choose the token of a row from the results of the other kernels."""
    row = tl.program_id(0).to(tl.int64)
    temperature, lowest, top_p = _reals(real_ptr, row)
    top_k = tl.load(int_ptr + row * _ROW_INTS + 3)
    has_top_k = (top_k > 0) & (top_k < vocab)
    if temperature < _MIN_TEMPERATURE:
        token = _winner(top_ptr, top_id_ptr, row, chunks, CHUNKS)
    elif has_top_k | (top_p < 1.0):
        key = _key(int_ptr, row)
        wanted = tl.load(share_ptr + row)
        count = tl.load(num_ptr + 4 * row)
        kept = kept_ptr + row * CAPACITY
        kept_ids = kept_id_ptr + row * CAPACITY
        is_chosen = tl.full((), 0, tl.int1)
        token = tl.full((), NONE, tl.int32)
        if (count > CANDIDATES) & (has_top_k == 0):
            chunk = tl.arange(0, CHUNKS)
            at = row * chunks + chunk
            is_live = chunk < chunks
            is_chosen, best, best_id = select(
                tl.load(num_ptr + 4 * row + 1),
                tl.load(num_ptr + 4 * row + 2),
                tl.sum(tl.load(above_ptr + at, mask=is_live, other=0), 0),
                wanted,
                tl.load(num_ptr + 4 * row + 3),
                kept,
                kept_ids,
                key,
            )
            raced = tl.load(raced_ptr + at, mask=is_live, other=0.0)
            raced_id = tl.load(raced_id_ptr + at, mask=is_live, other=NONE)
            won = tl.maximum(best, tl.max(raced, 0))
            token = tl.min(tl.where(raced == won, raced_id, NONE), 0)
            token = tl.minimum(token, tl.where(best == won, best_id, NONE))
        if is_chosen == 0:
            heat = temperature.to(tl.float32)
            token = draw(
                _own(
                    logits_ptr,
                    stride_logits,
                    changed_ptr,
                    number_ptr,
                    has_changed,
                    row,
                    vocab,
                ),
                kept,
                kept_ids,
                count,
                vocab,
                heat,
                _highest(top_ptr, row, chunks, heat, CHUNKS),
                lowest,
                has_top_k,
                top_k,
                top_p,
                wanted,
                key,
            )
    else:
        token = _winner(raced_ptr, raced_id_ptr, row, chunks, CHUNKS)
    tl.store(token_ptr + row, token.to(tl.int64))


@triton.jit
def _is_bracketed(
    int_ptr: tl.tensor,
    real_ptr: tl.tensor,
    num_ptr: tl.tensor,
    row: tl.tensor,
    vocab: tl.tensor,
) -> tl.tensor:
    temperature, _, top_p = _reals(real_ptr, row)
    top_k = tl.load(int_ptr + row * _ROW_INTS + 3)
    is_nucleus = (temperature >= _MIN_TEMPERATURE) & (top_p < 1.0)
    is_nucleus = is_nucleus & ((top_k <= 0) | (top_k >= vocab))
    # Of other rows nothing was stored.
    count = tl.load(num_ptr + 4 * row, mask=is_nucleus, other=0)
    return count > CANDIDATES


@triton.jit
def _highest(
    top_ptr: tl.tensor,
    row: tl.tensor,
    chunks: tl.tensor,
    heat: tl.tensor,
    CHUNKS: tl.constexpr,
) -> tl.tensor:
    """Return the largest scaled logit of a row."""
    chunk = tl.arange(0, CHUNKS)
    tops = tl.load(
        top_ptr + row * chunks + chunk, mask=chunk < chunks, other=float("-inf")
    )
    return tl.div_rn(tl.max(tops, 0), heat)


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
