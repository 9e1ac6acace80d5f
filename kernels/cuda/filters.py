"""Device functions that filter a row of logits by top-k and top-p and sample from what is left.

They repeat `kernels.cpu.sampling` operation by operation: IEEE sums, products and quotients, fused
multiply-adds only where they are written, and integers. Equal logits therefore give equal bits on a
CPU and on a GPU. Compile the kernels that call them without fusion (`enable_fp_fusion=False`).

The maxima and sums of a row's tiles alone give a lower bound of an edge: so many maxima reach it
that the tokens above it must satisfy the filter. The few tokens that reach the bound are gathered,
and the exact edge is found among them bit by bit, because a histogram would need atomic adds. Where
a flat distribution leaves too many tokens for that, `nucleus` finds the edge of top-p; for top-k,
the row itself is searched, which is slower and gives the same result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels import constants

_E6, _E5, _E4, _E3, _E2, _E1 = map(tl.constexpr, constants.EXP2)
_L8, _L7, _L6, _L5, _L4, _L3, _L2, _L1, _L0 = map(tl.constexpr, constants.LOG)
_ROUNDER = tl.constexpr(constants.ROUNDER)
_LOWEST = tl.constexpr(constants.LOWEST)
_LOG2_E_HIGH = tl.constexpr(constants.LOG2_E_HIGH)
_LOG2_E_LOW = tl.constexpr(constants.LOG2_E_LOW)
_LN_2 = tl.constexpr(constants.LN_2)
_LN_2_HIGH = tl.constexpr(constants.LN_2_HIGH)
_LN_2_LOW = tl.constexpr(constants.LN_2_LOW)
_ROOT_HALF = tl.constexpr(constants.ROOT_HALF)
_LARGEST_UNIFORM = tl.constexpr(constants.LARGEST_UNIFORM)
_GOLDEN, _MIX_1, _MIX_2 = map(
    tl.constexpr, (constants.GOLDEN, constants.MIX_1, constants.MIX_2)
)


@triton.jit
def exponential(x: tl.tensor) -> tl.tensor:
    """Return exp of numbers of at most 0; 0 below -87.3 and for NaN."""
    bounded = tl.where(x > _LOWEST, x, _LOWEST)
    power = bounded * _LOG2_E_HIGH
    # Add what the product lost by rounding, and the rest of log2(e). Without them the exponential
    # of -20 would be off by a millionth.
    lost = tl.fma(bounded, _LOG2_E_HIGH, -power)
    lost = tl.fma(bounded, _LOG2_E_LOW, lost)
    weight = _exp2(power)
    return tl.fma(weight, lost * _LN_2, weight)


@triton.jit
def _exp2(x: tl.tensor) -> tl.tensor:
    shifted = x + _ROUNDER
    rest = x - (shifted - _ROUNDER)
    value = tl.fma(rest, _E6, _E5)
    value = tl.fma(value, rest, _E4)
    value = tl.fma(value, rest, _E3)
    value = tl.fma(value, rest, _E2)
    value = tl.fma(value, rest, _E1)
    value = tl.fma(value, rest, 1.0)
    exponent = (shifted.to(tl.int32, bitcast=True) << 23) + (127 << 23)
    return tl.where(x < -126.0, 0.0, value * exponent.to(tl.float32, bitcast=True))


@triton.jit
def row_key(seed: tl.tensor, choice: tl.tensor, position: tl.tensor) -> tl.tensor:
    """Return the key of a draw, a hash of three int64 numbers."""
    key = _mix(seed.to(tl.uint64, bitcast=True))
    key = _mix(key ^ (choice + 1).to(tl.uint64, bitcast=True) * _GOLDEN)
    return _mix(key ^ (position + 1).to(tl.uint64, bitcast=True) * _MIX_2)


@triton.jit
def _mix(value: tl.tensor) -> tl.tensor:
    """Apply the output function of splitmix64 (Steele, Lea, Flood 2014)."""
    value = value + _GOLDEN
    value = (value ^ (value >> 30)) * _MIX_1
    value = (value ^ (value >> 27)) * _MIX_2
    return value ^ (value >> 31)


@triton.jit
def noise(key: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Return standard exponential noise: splitmix64 of the row's key and the token id."""
    return minus_log_of_rest(uniform(key, token))


@triton.jit
def uniform(key: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Return numbers in (0, 1). Small ones, which win, keep the full precision of a float."""
    bits = (_mix(key + token.to(tl.uint64) * _GOLDEN) >> 32).to(tl.uint32)
    value = (bits.to(tl.float32) + 0.5) * (2.0**-32)
    return tl.where(value < _LARGEST_UNIFORM, value, _LARGEST_UNIFORM)


@triton.jit
def minus_log_of_rest(x: tl.tensor) -> tl.tensor:
    """Return -log(1 - x) of numbers above 0 and below 1; small numbers keep all their bits."""
    rest = (1.0 - x).to(tl.int32, bitcast=True)
    power = (rest - _ROOT_HALF) >> 23
    near_one = (rest - (power << 23)).to(tl.float32, bitcast=True)
    f = tl.where(power == 0, -x, near_one - 1.0)
    exponent = power.to(tl.float32)
    square = f * f
    value = tl.fma(f, _L8, _L7)
    value = tl.fma(value, f, _L6)
    value = tl.fma(value, f, _L5)
    value = tl.fma(value, f, _L4)
    value = tl.fma(value, f, _L3)
    value = tl.fma(value, f, _L2)
    value = tl.fma(value, f, _L1)
    value = tl.fma(value, f, _L0)
    value = value * square * f
    value = tl.fma(exponent, _LN_2_LOW, value)
    value = tl.fma(square, -0.5, value)
    return -tl.fma(exponent, _LN_2_HIGH, f + value)


# ruff: noqa: N803, PLR0913, PLR0917
# Compile-time values are in capitals, as in Triton's own code; arguments are pointers and strides.


WIDTH = tl.constexpr(64)  # logits of a tile, which has one maximum and one sum
CANDIDATES = tl.constexpr(4096)  # tokens that are gathered; more are read from the row
STEP = tl.constexpr(1024)  # tokens at a time where a program walks over many
SCALE = tl.constexpr(constants.WEIGHT_SCALE)
TINY = tl.constexpr(constants.TINY)
NONE = tl.constexpr(2**31 - 1)  # more than any token id
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_FARTHEST = tl.constexpr(0x43480000)  # the bits of 200: exp of -200 is 0
_CLOSEST = tl.constexpr(0x3A800000)  # the bits of 2**-10
# A bound leaves 16 bits open.
_COARSE_STEPS, _SLACK = tl.constexpr(15), tl.constexpr(2 << 16)


@triton.jit
def load_logits(own: tl.tuple, token: tl.tensor, is_live: tl.tensor) -> tl.tensor:
    """Return a row's logits in fp32.

    `own` is where they are, where its changed ones are, and whether it has those.
    """
    logits, changed, is_changed = own
    x = tl.load(
        logits + token, mask=is_live & (is_changed == 0), other=float("-inf")
    ).to(tl.float32)
    y = tl.load(changed + token, mask=is_live & is_changed, other=float("-inf"))
    return tl.where(is_changed, y, x)


@triton.jit
def bound(
    tile_tops: tl.tensor,
    tile_sums: tl.tensor,
    tiles: tl.tensor,
    heat: tl.tensor,
    highest: tl.tensor,
    lowest: tl.tensor,
    has_top_k: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    TILES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return how far below the top kept tokens may lie, the whole weight, and what top-p wants.

    Distances are the bits of floats, which are integers in the same order. Within the distance lie
    as many maxima as top-k wants, or tiles that hold the weight that top-p wants. The tokens of a
    tile within a distance weigh at least as much as its maximum, and at most as much as the whole
    tile without the others.
    """
    tile = tl.arange(0, TILES)
    scaled = (
        tl.div_rn(
            tl.load(tile_tops + tile, mask=tile < tiles, other=float("-inf")), heat
        )
        - highest
    )
    distance = scaled.to(tl.int32, bitcast=True) & _MAGNITUDE
    heaviest = (weight_of(scaled, lowest) * SCALE).to(tl.int64)
    uses_sums = (tile < tiles) & (has_top_k == 0)
    sums = tl.load(tile_sums + tile, mask=uses_sums, other=0)
    total = tl.sum(sums, 0)
    share = tl.maximum((total.to(tl.float64) * top_p).to(tl.int64), 1)
    wanted = tl.where(has_top_k, top_k, share)
    limit = tl.full((), 0, tl.int32)
    for step in range(_COARSE_STEPS):
        bit = 1 << (30 - step)
        within = distance <= limit + (bit - 1)
        farthest = (limit + (bit - 1)).to(tl.float32, bitcast=True)
        # An exponential may be one unit too small, so the bound is a little larger.
        most = (exponential(-farthest) * SCALE).to(tl.int64)
        most += (most >> 18) + 1
        held = tl.maximum(heaviest, sums - (WIDTH - 1) * most)
        held = tl.where(has_top_k, tl.full((TILES,), 1, tl.int64), held)
        limit += tl.where(tl.sum(tl.where(within, held, 0), 0) < wanted, bit, 0)
    # Add one step and a least distance, so that no token outside has the weight of one inside.
    limit = tl.minimum(limit, _FARTHEST) + _SLACK
    return tl.minimum(tl.maximum(limit, _CLOSEST), _FARTHEST), total, share


@triton.jit
def gather(
    own: tl.tuple,
    tile_tops: tl.tensor,
    places: tl.tensor,
    kept: tl.tensor,
    kept_ids: tl.tensor,
    vocab: tl.tensor,
    tiles: tl.tensor,
    heat: tl.tensor,
    highest: tl.tensor,
    limit: tl.tensor,
    TILES: tl.constexpr,
) -> tl.tensor:
    """Store logits and ids of the tokens within a distance, ids ascending; return the number.

    If there are more than `CANDIDATES`, it stops early and returns any larger number.
    """
    tile = tl.arange(0, TILES)
    tops = tl.load(tile_tops + tile, mask=tile < tiles, other=float("-inf"))
    within = _distance(tops, heat, highest) <= limit
    tl.store(places + tl.cumsum(within.to(tl.int32), 0) - 1, tile, mask=within)
    num_lanes = tl.sum(within.to(tl.int32), 0) * WIDTH
    tl.debug_barrier()  # other threads load the places
    count = tl.full((), 0, tl.int32)
    start = tl.full((), 0, tl.int32)
    while (start < num_lanes) & (count <= CANDIDATES):
        lane = start + tl.arange(0, STEP)
        place = tl.load(places + lane // WIDTH, mask=lane < num_lanes, other=0)
        token = place * WIDTH + lane % WIDTH
        is_live = (lane < num_lanes) & (token < vocab)
        x = load_logits(own, token, is_live)
        taken = _distance(x, heat, highest) <= limit
        target = count + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(kept + target, x, mask=taken & (target < CANDIDATES))
        tl.store(kept_ids + target, token, mask=taken & (target < CANDIDATES))
        count += tl.sum(taken.to(tl.int32), 0)
        start += STEP
    return count


@triton.jit
def draw(
    own: tl.tuple,
    kept: tl.tensor,
    kept_ids: tl.tensor,
    count: tl.tensor,
    vocab: tl.tensor,
    heat: tl.tensor,
    highest: tl.tensor,
    lowest: tl.tensor,
    has_top_k: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    wanted: tl.tensor,
    key: tl.tensor,
) -> tl.tensor:
    """Find the exact edges among the gathered tokens, or in the whole row, and draw above them."""
    is_row = count > CANDIDATES
    count = tl.where(is_row, vocab, count)
    if has_top_k:
        edge = tl.full((), 0, tl.int32)
        for step in range(31):
            bit = 1 << (30 - step)
            found = tl.full((), 0, tl.int32)
            for start in range(0, count, STEP):
                x = _logits(own, kept, start, count, is_row)
                within = _distance(x, heat, highest) <= edge + (bit - 1)
                found += tl.sum(within.to(tl.int32), 0)
            edge += tl.where(found < top_k, bit, 0)
        lowest = tl.maximum(
            lowest, -tl.minimum(edge, _FARTHEST).to(tl.float32, bitcast=True)
        )
    least = tl.full((), TINY, tl.float32)
    if top_p < 1.0:
        if has_top_k:
            total = tl.full((), 0, tl.int64)
            for start in range(0, count, STEP):
                x = _logits(own, kept, start, count, is_row)
                weight = weight_of(tl.div_rn(x, heat) - highest, lowest)
                total += tl.sum((weight * SCALE).to(tl.int64), 0)
            wanted = tl.maximum((total.to(tl.float64) * top_p).to(tl.int64), 1)
        edge = tl.full((), 0, tl.int32)
        for step in range(1, 31):  # no weight is above 1
            trial = edge + (1 << (30 - step))
            above = tl.full((), 0, tl.int64)
            for start in range(0, count, STEP):
                x = _logits(own, kept, start, count, is_row)
                weight = weight_of(tl.div_rn(x, heat) - highest, lowest)
                reaches = weight.to(tl.int32, bitcast=True) >= trial
                above += tl.sum(tl.where(reaches, (weight * SCALE).to(tl.int64), 0), 0)
            edge = tl.where(above >= wanted, trial, edge)
        least = tl.maximum(least, edge.to(tl.float32, bitcast=True))
    best = tl.zeros((STEP,), tl.float32)
    best_id = tl.zeros((STEP,), tl.int32)
    for start in range(0, count, STEP):
        lane = start + tl.arange(0, STEP)
        x = _logits(own, kept, start, count, is_row)
        weight = weight_of(tl.div_rn(x, heat) - highest, lowest)
        known = tl.load(kept_ids + lane, mask=(lane < count) & (is_row == 0), other=0)
        best, best_id = race(
            best, best_id, weight, least, key, tl.where(is_row, lane, known)
        )
    won = tl.max(best, 0)
    return tl.min(tl.where(best == won, best_id, NONE), 0)


@triton.jit
def _logits(
    own: tl.tuple,
    kept: tl.tensor,
    start: tl.tensor,
    count: tl.tensor,
    is_row: tl.tensor,
) -> tl.tensor:
    lane = start + tl.arange(0, STEP)
    is_live = lane < count
    from_row = load_logits(own, lane, is_live & is_row)
    gathered = tl.load(kept + lane, mask=is_live & (is_row == 0), other=float("-inf"))
    return tl.where(is_row, from_row, gathered)


@triton.jit
def race(
    best: tl.tensor,
    best_id: tl.tensor,
    weight: tl.tensor,
    least: tl.tensor,
    key: tl.tensor,
    token: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Divide weights of at least `least` by noise; keep each lane's larger quotient and its id.

    Each lane takes its tokens in ascending order, so the lowest id among equals stays.
    """
    ratio = tl.where(weight >= least, tl.div_rn(weight, noise(key, token)), 0.0)
    return tl.where(ratio > best, ratio, best), tl.where(ratio > best, token, best_id)


@triton.jit
def weight_of(scaled: tl.tensor, lowest: tl.tensor) -> tl.tensor:
    return tl.where(scaled >= lowest, exponential(scaled), 0.0)


@triton.jit
def _distance(x: tl.tensor, heat: tl.tensor, highest: tl.tensor) -> tl.tensor:
    """Return the bits of the scaled logits' distances from the top; those of NaN are largest."""
    return (tl.div_rn(x, heat) - highest).to(tl.int32, bitcast=True) & _MAGNITUDE
