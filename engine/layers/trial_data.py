"""Make weights and rows whose products show, in every output, the order in which a library adds.

`HostLinears` uses them at load. Columns come in pairs of equal weights whose inputs cancel. The
exact result is zero, so a product returns only rounding errors: another order of the sum gives
other bits in nearly every output, even after rounding to bf16. All numbers are made from integers,
so they are the same on every machine.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NUM_ROWS = 8
DISTINCT_OUTPUTS = 64  # rows of the weight before they repeat
MANTISSA_BITS = {torch.bfloat16: 8, torch.float32: 24}
EXPONENTS = (-6, 7)
# This is close to the rounding errors of sums of such numbers; a larger bias would hide them.
BIAS_EXPONENTS = (-17, -14)


def trial_weight(outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """Return a weight, `[outputs, inputs]`."""
    numbers = _numbers((min(outputs, DISTINCT_OUTPUTS), inputs // 2), dtype, EXPONENTS, seed=1)
    some = _in_pairs(numbers, numbers, inputs).to(dtype)
    return some.repeat(-(-outputs // len(some)), 1)[:outputs].contiguous()


def trial_rows(inputs: int, dtype: torch.dtype) -> Tensor:
    """Return rows, `[NUM_ROWS, inputs]`."""
    numbers = _numbers((NUM_ROWS, inputs // 2), dtype, EXPONENTS, seed=2)
    return _in_pairs(numbers, -numbers, inputs).to(dtype)


def trial_bias(outputs: int, dtype: torch.dtype) -> Tensor:
    """Return a bias, `[outputs]`."""
    return torch.from_numpy(_numbers((1, outputs), dtype, BIAS_EXPONENTS, seed=3)[0]).to(dtype)


def _numbers(
    shape: tuple[int, int], dtype: torch.dtype, exponents: tuple[int, int], seed: int
) -> NDArray[np.float32]:
    """Return numbers of either sign that `dtype` holds exactly."""
    random = np.random.Generator(np.random.PCG64(seed))
    bits = MANTISSA_BITS[dtype]
    mantissas = random.integers(1 << (bits - 1), 1 << bits, shape)
    mantissas *= 1 - 2 * random.integers(0, 2, shape)
    powers = random.integers(*exponents, shape) - (bits - 1)
    return np.ldexp(mantissas.astype(np.float32), powers.astype(np.int32))


def _in_pairs(ones: NDArray[np.float32], others: NDArray[np.float32], inputs: int) -> Tensor:
    """Return both halves with columns in a random order; the last of an odd number is zero."""
    odd = np.zeros((len(ones), inputs % 2), dtype=np.float32)
    order = np.random.Generator(np.random.PCG64(inputs)).permutation(inputs)
    return torch.from_numpy(np.concatenate((ones, others, odd), axis=1)[:, order])
