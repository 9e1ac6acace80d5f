"""Device functions that find the nucleus of top-p in a flat row, in a fixed number of passes.

A sample of the row brackets the edge: tokens of a certain weight on are kept, those below another
weight are not. One pass over the row, by many programs, sums and races the tokens above the bracket
and gathers the few inside it, among which the exact edge lies. If the exact sums show that the
sample was wrong, or if too many tokens lie in the bracket, the row itself is searched.

The race needs a logarithm and a quotient of each token. Only tokens that can beat the best one of
the sample get that far, because the noise of a token is never below its uniform number.
"""

# ruff: noqa: N803, PLR0913, PLR0917
# Compile-time values are in capitals, as in Triton's own code; arguments are pointers and strides.

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels.cuda.filters import (
    NONE,
    SCALE,
    STEP,
    TINY,
    load_logits,
    minus_log_of_rest,
    race,
    uniform,
    weight_of,
)

CAPACITY = tl.constexpr(8192)  # tokens that a bracket may hold
SAMPLE = tl.constexpr(8192)  # tokens that show where the bracket lies
_OPEN_BITS = tl.constexpr(8)  # of a weight, which the ends of a bracket leave open
_STEPS = tl.constexpr(22)
_FIRST_BIT = tl.constexpr(1 << 21)
_VARIANCES = tl.constexpr(
    25.0
)  # an end is five standard deviations from what the sample says
_PAST_ONE = tl.constexpr(0x3F800001)  # the bits after those of the largest weight
_GOLDEN = tl.constexpr(2654435769)  # 2**32 over the golden ratio
# Noise is computed to seven digits, so a token may win with a little more than this allows.
_CLOSE = tl.constexpr(1.0 - 1e-5)


@triton.jit
def bracket(
    own: tl.tuple,
    vocab: tl.tensor,
    heat: tl.tensor,
    highest: tl.tensor,
    lowest: tl.tensor,
    total: tl.tensor,
    wanted: tl.tensor,
    key: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the bits of two weights and the quotient of a token that is kept.

    All tokens of the second weight or more are kept, if the sample is right, and all below the
    first one are not. If all tokens of the sample in between have one weight, the bracket holds
    that weight alone.
    """
    # A token from each of as many equal parts of the row, at places that no pattern of it follows.
    width = tl.maximum(vocab, SAMPLE).to(tl.int64)
    i = tl.arange(0, SAMPLE).to(tl.int64)
    place = (((i * _GOLDEN) & 0xFFFFFFFF) * width) >> 32
    token = ((i * width + tl.where(width > SAMPLE, place, 0)) // SAMPLE).to(tl.int32)
    x = load_logits(own, token, token < vocab)
    weight = tl.where(
        token < vocab, weight_of(tl.div_rn(x, heat) - highest, lowest), 0.0
    )
    square = weight * weight
    factor = width.to(tl.float32) / SAMPLE
    dropped = (total - wanted).to(tl.float32) / SCALE
    variances = tl.where(width > SAMPLE, _VARIANCES, 0.0)
    low = tl.full((), 0, tl.int32)
    high = tl.full((), 0, tl.int32)
    for step in range(_STEPS):
        bit = _FIRST_BIT >> step
        at_low = ((low + bit) << _OPEN_BITS).to(tl.float32, bitcast=True)
        at_high = ((high + bit) << _OPEN_BITS).to(tl.float32, bitcast=True)
        below_low = weight < at_low
        below_high = weight < at_high
        low_sum = tl.sum(tl.where(below_low, weight, 0.0), 0)
        low_squares = tl.sum(tl.where(below_low, square, 0.0), 0)
        high_sum = tl.sum(tl.where(below_high, weight, 0.0), 0)
        high_squares = tl.sum(tl.where(below_high, square, 0.0), 0)
        # Unseen tokens just below an end may weigh as much as it: count one more.
        low_noise = tl.sqrt(variances * (low_squares + at_low * at_low))
        high_noise = tl.sqrt(variances * (high_squares + at_high * at_high))
        low += tl.where(factor * (low_sum + low_noise) <= dropped, bit, 0)
        high += tl.where(factor * (high_sum - high_noise) < dropped, bit, 0)
    high = (tl.maximum(high, low) + 1) << _OPEN_BITS
    high = tl.minimum(high, _PAST_ONE)
    low = low << _OPEN_BITS
    bits = weight.to(tl.int32, bitcast=True)
    is_inside = (bits >= low) & (bits < high) & (weight > 0.0)
    least = tl.min(tl.where(is_inside, bits, NONE), 0)
    most = tl.max(tl.where(is_inside, bits, 0), 0)
    low = tl.where(least == most, least, low)
    high = tl.where(least == most, least + 1, high)
    best = tl.zeros((SAMPLE,), tl.float32)
    best_id = tl.zeros((SAMPLE,), tl.int32)
    best, best_id = race(best, best_id, weight, raced_from(low, high), key, token)
    return low, high, tl.max(best, 0)


@triton.jit
def raced_from(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Return the least weight that a sweep races: the bracket's own, if it holds one alone."""
    bits = tl.where(high - low == 1, low, high)
    return tl.maximum(bits.to(tl.float32, bitcast=True), TINY)


@triton.jit
def sweep(
    own: tl.tuple,
    first: tl.tensor,
    vocab: tl.tensor,
    heat: tl.tensor,
    highest: tl.tensor,
    lowest: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    floor: tl.tensor,
    key: tl.tensor,
    count: tl.tensor,
    kept: tl.tensor,
    kept_ids: tl.tensor,
    CHUNK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the weight of a chunk's tokens above the bracket, the best quotient and its token.

    The weights and ids of the tokens inside the bracket go behind those of other chunks, in any
    order, and `count` counts them.
    """
    lane = tl.arange(0, STEP)
    least = raced_from(low, high)
    above = tl.zeros((STEP,), tl.int64)
    best = tl.zeros((STEP,), tl.float32)
    best_id = tl.zeros((STEP,), tl.int32)
    for start in range(first, first + CHUNK, STEP):
        token = start + lane
        x = load_logits(own, token, token < vocab)
        weight = weight_of(tl.div_rn(x, heat) - highest, lowest)
        bits = weight.to(tl.int32, bitcast=True)
        above += tl.where(bits >= high, (weight * SCALE).to(tl.int64), 0)
        number = uniform(key, token)
        may_win = (weight >= least) & (weight >= floor * number * _CLOSE)
        if tl.max(may_win.to(tl.int32), 0) > 0:
            ratio = tl.where(
                weight >= least, tl.div_rn(weight, minus_log_of_rest(number)), 0.0
            )
            best_id = tl.where(ratio > best, token, best_id)
            best = tl.where(ratio > best, ratio, best)
        is_inside = (bits >= low) & (bits < high) & (weight > 0.0)
        num_inside = tl.sum(is_inside.to(tl.int32), 0)
        if num_inside > 0:
            place = tl.atomic_add(count, num_inside)
            target = place + tl.cumsum(is_inside.to(tl.int32), 0) - 1
            is_kept = is_inside & (target < CAPACITY) & (high - low > 1)
            tl.store(kept + target, weight, mask=is_kept)
            tl.store(kept_ids + target, token, mask=is_kept)
    won = tl.max(best, 0)
    won_id = tl.min(tl.where(best == won, best_id, NONE), 0)
    return tl.sum(above, 0), won, won_id


@triton.jit
def select(
    low: tl.tensor,
    high: tl.tensor,
    above: tl.tensor,
    wanted: tl.tensor,
    count: tl.tensor,
    kept: tl.tensor,
    kept_ids: tl.tensor,
    key: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return whether the bracket was right, and the best quotient of its kept tokens with its id.

    `above` is the weight of all tokens above the bracket, which the caller has raced.
    """
    is_one_weight = high - low == 1
    i = tl.arange(0, CAPACITY)
    is_live = (i < count) & (is_one_weight == 0)
    weight = tl.load(kept + i, mask=is_live, other=0.0)
    token = tl.load(kept_ids + i, mask=is_live, other=NONE)
    whole = (weight * SCALE).to(tl.int64)
    one = (low.to(tl.float32, bitcast=True) * SCALE).to(tl.int64)
    inside = tl.where(is_one_weight, count * one, tl.sum(whole, 0))
    is_right = (above < wanted) & (above + inside >= wanted)
    is_right = is_right & (is_one_weight | (count <= CAPACITY))
    bits = weight.to(tl.int32, bitcast=True)
    edge = tl.full((), 0, tl.int32)
    for step in range(1, 31):  # no weight is above 1
        trial = edge + (1 << (30 - step))
        held = above + tl.sum(tl.where(bits >= trial, whole, 0), 0)
        edge = tl.where(held >= wanted, trial, edge)
    least = tl.maximum(edge.to(tl.float32, bitcast=True), TINY)
    best = tl.zeros((CAPACITY,), tl.float32)
    best_id = tl.full((CAPACITY,), NONE, tl.int32)
    best, best_id = race(best, best_id, weight, least, key, token)
    won = tl.max(best, 0)
    return is_right, won, tl.min(tl.where(best == won, best_id, NONE), 0)
