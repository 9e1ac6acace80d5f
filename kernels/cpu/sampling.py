"""Sample tokens on CPUs: filter by selection, and add noise hashed from (row, token id).

A row's token is a pure function of its own logits and parameters: every sum that decides a token is
a sum of integers, and everything else is computed for each token alone. Nothing is sorted: for rows
with a filter, three histograms of the bits of floats find the filter's edge. The torch code of the
engine's `Sampler` defines the meaning.
"""

# ruff: noqa: ARG001, PLR0913, PLR0917  (numba's parameters; pointers and sizes)

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from baton.kernels import constants
from baton.kernels.constants import (
    GOLDEN,
    LARGEST_UNIFORM,
    MIN_TEMPERATURE,
    MIX_1,
    MIX_2,
    ROW_INTS,
    ROW_REALS,
    SUMS,
    WEIGHT_SCALE,
    WIDTH,
)
from baton.kernels.cpu.vectors import (
    FLOAT,
    FLOATS,
    INT32,
    INT64,
    LANES,
    WORDS,
    Doubles,
    Floats,
    Int32s,
    Int64s,
    constant,
    every,
    exp2,
    fma,
    hide,
    instruction,
    kernel,
    larger,
    largest,
    load,
    load_first,
    minus_log_of_rest,
    shift,
    spread,
    store,
)

ZERO = np.float32(0)
HIDDEN = np.float32("-inf")
LOG2_E_HIGH = np.float32(constants.LOG2_E_HIGH)
LOG2_E_LOW = np.float32(constants.LOG2_E_LOW)
LN_2 = np.float32(constants.LN_2)
LOWEST = np.float32(constants.LOWEST)
SCALE = np.float32(WEIGHT_SCALE)
TINY = np.float32(constants.TINY)
MAGNITUDE = 0x7FFFFFFF
STEP = np.uint64(GOLDEN)
FIRST_FACTOR = np.uint64(MIX_1)
SECOND_FACTOR = np.uint64(MIX_2)

LONG = ir.VectorType(INT64, WIDTH)


@kernel
def sample(
    first: int,
    end: int,
    scratch: Floats,  # whole vectors of [vocab]
    bits: Int32s,  # the same memory
    sums: Int64s,  # [SUMS]
    logits: Floats,  # [num_rows, vocab]
    vocab: int,
    ints: Int64s,  # [num_rows, ROW_INTS]: seed, choice, position, top_k
    reals: Doubles,  # [num_rows, ROW_REALS]: temperature, log of min_p, top_p
    tokens: Int64s,  # [num_rows]
) -> None:
    """Sample one token for each of the rows `first:end`."""
    for row in range(first, end):
        own = shift(logits, row * vocab)
        numbers = row * ROW_INTS
        temperature = reals[row * ROW_REALS]
        log_min_p = reals[row * ROW_REALS + 1]
        top_k = ints[numbers + 3]
        top_p = reals[row * ROW_REALS + 2]
        top = _top(own, vocab)
        if temperature < MIN_TEMPERATURE:
            tokens[row] = _first_of(own, vocab, top)
            continue
        _scale(scratch, own, vocab, np.float32(temperature), top)
        lowest = np.float32(log_min_p)
        least = TINY
        if 0 < top_k < vocab:
            lowest = max(
                lowest, as_float(~_edge(scratch, bits, vocab, sums, top_k, 1.0))
            )
        _weigh(scratch, vocab, lowest)
        if top_p < 1.0:
            least = max(least, as_float(_edge(scratch, bits, vocab, sums, 0, top_p)))
        key = _row_key(ints[numbers], ints[numbers + 1], ints[numbers + 2])
        highest = _race(scratch, vocab, least, key)
        tokens[row] = _first_of(scratch, vocab, highest)


@kernel
def _top(values: Floats, count: int) -> float:
    highest = every(HIDDEN)
    whole = count // WIDTH * WIDTH
    for i in range(0, whole, WIDTH):
        highest = larger(load(values, i), highest)
    if whole < count:
        rest = load_first(values, whole, count - whole)
        highest = larger(hide(rest, 0, count - whole), highest)
    return largest(highest)


@kernel
def _first_of(values: Floats, count: int, value: float) -> int:
    """Return the first index of `value`; 0 if it does not occur, as when all numbers are NaN."""
    for start in range(0, count, WIDTH):
        have = min(WIDTH, count - start)
        there = (
            load(values, start) if have == WIDTH else load_first(values, start, have)
        )
        if reaches(there, value):
            for i in range(start, start + have):
                if values[i] == value:
                    return i
    return 0


@kernel
def _scale(
    scaled: Floats, logits: Floats, vocab: int, temperature: float, top: float
) -> None:
    """Divide the logits by the temperature and subtract the highest; pad with minus infinity."""
    divisor = every(temperature)
    highest = every(top / temperature)
    whole = vocab // WIDTH * WIDTH
    for i in range(0, whole, WIDTH):
        store(scaled, i, load(logits, i) / divisor - highest)
    if whole < vocab:
        rest = load_first(logits, whole, vocab - whole) / divisor - highest
        store(scaled, whole, hide(rest, 0, vocab - whole))


@kernel
def _weigh(scaled: Floats, vocab: int, lowest: float) -> None:
    """Turn each number into its exponential, and those below `lowest` into 0."""
    for i in range(0, vocab, WIDTH):
        x = load(scaled, i)
        bounded = larger(x, every(LOWEST))
        power = bounded * every(LOG2_E_HIGH)
        # Add what the product lost by rounding, and the rest of log2(e). Without them the
        # exponential of -20 would be off by a millionth.
        lost = fma(bounded, every(LOG2_E_HIGH), every(ZERO) - power)
        lost = fma(bounded, every(LOG2_E_LOW), lost)
        weight = exp2(power)
        store(
            scaled,
            i,
            keep_from(x, every(lowest), fma(weight, lost * every(LN_2), weight)),
        )


@kernel
def _edge(
    values: Floats, bits: Int32s, count: int, sums: Int64s, wanted: int, share: float
) -> int:
    """Return the smallest number that a filter keeps.

    With `wanted`, the numbers are 0 or less, and the result is the complement of the bits of the
    `wanted`-th largest. Otherwise they are weights, and the result is the bits of the last weight
    that is needed to make up `share` of their sum.

    In both forms the bits without the sign are integers in the order of the numbers. The highest
    11 of the 31 are found first, by a histogram of the numbers over the values of these bits, then
    the next 10, then the last 10, each time among the numbers that share the bits found so far.
    """
    by_weight = wanted == 0
    found = 0
    above = 0
    for level in range(3):
        low = 20 - 10 * level
        width = 11 if level == 0 else 10
        for i in range(SUMS):
            sums[i] = 0
        for i in range(count):
            ordered = int(bits[i])
            if not by_weight:
                ordered = ~ordered & MAGNITUDE
            if ordered >> (low + width) == found:
                place = ordered >> low & ((1 << width) - 1)
                sums[place] += int(values[i] * SCALE) if by_weight else 1
        if level == 0 and by_weight:
            whole = 0
            for i in range(SUMS):
                whole += sums[i]
            wanted = max(int(float(whole) * share), 1)
        place = (1 << width) - 1
        while place > 0 and above + sums[place] < wanted:
            above += sums[place]
            place -= 1
        found = found << width | place
    return found


@kernel
def _race(weights: Floats, vocab: int, least: float, key: np.uint64) -> float:
    """Divide the weights of at least `least` by exponential noise, and return the largest quotient.

    The other weights become 0. Each token wins with the probability of its share of the weights.
    """
    highest = every(ZERO)
    for i in range(0, vocab, WIDTH):
        weight = load(weights, i)
        if reaches(weight, least):
            ratio = keep_from(weight, every(least), weight) / noise(key, i)
            highest = larger(ratio, highest)
            store(weights, i, ratio)
        else:
            store(weights, i, every(ZERO))
    return largest(highest)


@kernel
def _row_key(seed: int, choice: int, position: int) -> np.uint64:
    key = _mix(np.uint64(seed))
    key = _mix(key ^ np.uint64(choice + 1) * STEP)
    return _mix(key ^ np.uint64(position + 1) * SECOND_FACTOR)


@kernel
def _mix(value: np.uint64) -> np.uint64:
    """Apply the output function of splitmix64."""
    value = value + STEP
    value = (value ^ value >> np.uint64(30)) * FIRST_FACTOR
    value = (value ^ value >> np.uint64(27)) * SECOND_FACTOR
    return value ^ value >> np.uint64(31)


# --- instructions ----------------------------------------------------------------------------


@intrinsic
def as_float(context: object, value: types.Type) -> object:
    """Return the float whose bits are the lower half of `value`."""
    return instruction(
        types.float32(types.int64),
        lambda builder, word: builder.bitcast(builder.trunc(word, INT32), FLOAT),
    )


@intrinsic
def reaches(context: object, lanes: types.Type, value: types.Type) -> object:
    """Return whether a lane is `value` or more."""

    def emit(builder: ir.IRBuilder, lanes: ir.Value, value: ir.Value) -> ir.Value:
        flags = builder.fcmp_ordered(">=", lanes, spread(builder, value, FLOATS))
        packed = builder.bitcast(flags, ir.IntType(WIDTH))
        return builder.icmp_unsigned("!=", packed, ir.IntType(WIDTH)(0))

    return instruction(types.boolean(LANES, types.float32), emit)


@intrinsic
def keep_from(
    context: object, lanes: types.Type, least: types.Type, values: types.Type
) -> object:
    """Return `values` where `lanes` are at least `least`, else 0."""

    def emit(
        builder: ir.IRBuilder, lanes: ir.Value, least: ir.Value, values: ir.Value
    ) -> ir.Value:
        is_kept = builder.fcmp_ordered(">=", lanes, least)
        return builder.select(is_kept, values, constant(FLOATS, 0.0))

    return instruction(LANES(LANES, LANES, LANES), emit)


@intrinsic
def noise(context: object, key: types.Type, first: types.Type) -> object:
    """Return standard exponential noise for 16 tokens from `first` on: splitmix64 of (key, id)."""

    def emit(builder: ir.IRBuilder, key: ir.Value, first: ir.Value) -> ir.Value:
        steps = ir.Constant(
            LONG, [lane * GOLDEN % 2**64 for lane in range(1, WIDTH + 1)]
        )
        start = builder.add(key, builder.mul(first, INT64(GOLDEN)))
        one = builder.insert_element(ir.Constant(LONG, ir.Undefined), start, INT32(0))
        value = builder.add(builder.shuffle_vector(one, one, constant(WORDS, 0)), steps)
        for distance, factor in ((30, MIX_1), (27, MIX_2), (31, None)):
            value = builder.xor(value, builder.lshr(value, constant(LONG, distance)))
            if factor is not None:
                value = builder.mul(value, constant(LONG, factor))
        words = builder.trunc(builder.lshr(value, constant(LONG, 32)), WORDS)
        number = builder.fadd(builder.uitofp(words, FLOATS), constant(FLOATS, 0.5))
        uniform = builder.fmul(number, constant(FLOATS, 2.0**-32))
        most = constant(FLOATS, LARGEST_UNIFORM)
        is_less = builder.fcmp_ordered("<", uniform, most)
        return minus_log_of_rest(builder, builder.select(is_less, uniform, most))

    return instruction(LANES(types.uint64, types.int64), emit)
