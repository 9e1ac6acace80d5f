"""Device functions that draw a token: exponentials, exponential noise, and the key of a row.

They repeat `kernels.cpu_sampling` operation by operation: IEEE sums, products and quotients, fused
multiply-adds only where they are written, and integers. Equal logits therefore give equal bits on a
CPU and on a GPU. Compile the kernels that call them without fusion (`enable_fp_fusion=False`).
`device_sampling` calls them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels import draws

_E6, _E5, _E4, _E3, _E2, _E1 = map(tl.constexpr, draws.EXP2)
_L8, _L7, _L6, _L5, _L4, _L3, _L2, _L1, _L0 = map(tl.constexpr, draws.LOG)
_ROUNDER, _LOWEST = tl.constexpr(draws.ROUNDER), tl.constexpr(draws.LOWEST)
_LOG2_E_HIGH, _LOG2_E_LOW = tl.constexpr(draws.LOG2_E_HIGH), tl.constexpr(draws.LOG2_E_LOW)
_LN_2 = tl.constexpr(draws.LN_2)
_LN_2_HIGH, _LN_2_LOW = tl.constexpr(draws.LN_2_HIGH), tl.constexpr(draws.LN_2_LOW)
_ROOT_HALF = tl.constexpr(draws.ROOT_HALF)
_LARGEST_UNIFORM = tl.constexpr(draws.LARGEST_UNIFORM)
_GOLDEN, _MIX_1, _MIX_2 = map(tl.constexpr, (draws.GOLDEN, draws.MIX_1, draws.MIX_2))


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
    bits = (_mix(key + token.to(tl.uint64) * _GOLDEN) >> 32).to(tl.uint32)
    # Map into (0, 1). Small values, which win, keep the full precision of a float.
    uniform = (bits.to(tl.float32) + 0.5) * (2.0**-32)
    return _minus_log_of_rest(tl.where(uniform < _LARGEST_UNIFORM, uniform, _LARGEST_UNIFORM))


@triton.jit
def _minus_log_of_rest(x: tl.tensor) -> tl.tensor:
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
