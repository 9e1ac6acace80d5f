"""The numbers on which kernels and their callers agree. This file does not import numba or Triton.

The engine's torch sampler, the compiled CPU kernel and the GPU kernels share those of sampling. A
change of one of them changes the tokens that a seed gives, so nodes of two versions would disagree.
The compiled kernels evaluate both polynomials in the same order with fused multiply-adds, so they
agree to the last bit.
"""

import math
from typing import NamedTuple

# --- sizes of the CPU kernels -------------------------------------------------------------------

WIDTH = 16  # floats in a vector
# Keys: with heads of 64 a tile of keys and values in fp32 fits a core's first cache.
TILE = 64
# Queries x heads of one KV head at a time, so that a tile is unpacked once for many.
ROWS = 128
# A linear layer computes PANEL outputs of SHEET rows at a time. If there are more than FEW rows, it
# takes DEPTH pairs of inputs at a time.
PANEL = 64
SHEET = 256
FEW = 64
DEPTH = 256
# Of a weight that is widened, for few rows: such a tile fits the first cache.
NARROW_DEPTH = 32
MAX_STRIP = 6  # rows of a product whose sums fit the registers
STRIP = 4 * WIDTH  # columns of a state's matrix at a time, whose sums fit the registers
STATE_CHUNK = (
    64  # positions that go through a state at once on GPUs, cut at multiples of it
)
# To which the largest input of a row is rounded, as the least is to -127.
LARGEST_BYTE = 127.0
LOG2_E = 1.4426950408889634
NO_WINDOW = 1 << 40  # keys that a query sees where a model has no sliding window
ROW_INTS, ROW_REALS = 4, 3  # parameters of a row that is sampled
SUMS = 1 << 11  # counters of a histogram
DIGIT_BITS = 8  # of a score, in the histograms by which keys are chosen

# --- sampling -----------------------------------------------------------------------------------

GOLDEN = 0x9E3779B97F4A7C15  # splitmix64 (Steele, Lea, Flood 2014)
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MIN_TEMPERATURE = 1e-5  # a lower temperature means greedy
# The largest weight; the sum of 2**27 of them still fits 63 bits.
WEIGHT_SCALE = float(1 << 36)
LARGEST_UNIFORM = 1.0 - 2.0**-24

# For |x| <= 1/2, 2**x is 1 + x * polynomial within 1e-8. The highest power comes first.
EXP2 = (
    0.00015453163359779865,
    0.0013390863314270973,
    0.009618083015084267,
    0.055503569543361664,
    0.24022650718688965,
    0.6931471824645996,
)
# 1.5 * 2**23: adding it leaves the nearest integer in the low bits.
ROUNDER = 12582912.0
# log2(e) as the sum of two floats, and ln(2).
LOG2_E_HIGH = 1.4426950216293335
LOG2_E_LOW = 1.92596298909109e-08
LN_2 = 0.6931471805599453
LOWEST = -200.0  # exp of it is 0
# log(1 + f) is f - f**2 / 2 + f**3 * polynomial for 1 + f from sqrt(1/2) to sqrt(2), within one
# unit in the last place (Moshier's Cephes library, logf.c); the highest power comes first.
LOG = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
LN_2_HIGH = 0.693359375
LN_2_LOW = -2.12194440e-4
ROOT_HALF = 0x3F3504F3  # the bits of sqrt(1/2)
TINY = 2.0**-126  # a smaller weight is never drawn

# A word of `token_counts`: bit 0, the count, and 1 plus the index of a bias.
MAX_COUNT = (1 << 20) - 1
BIAS_SHIFT = 21
BIAS_MASK = (1 << 11) - 1
# The exponent of a row in FP8 is less than that of its largest number by `FP8_SPAN`. From the least
# one on, all codes stand for normal numbers of bf16; above the most, numbers would overflow.
FP8_SPAN = 8
LEAST_EXPONENT = 10
MOST_EXPONENT = 246
# Of a word's place, the word, the mix.
CHECKSUM_FACTORS = (0x01000193, 0x7FEB352D, 0x846CA68B)


class Gate(NamedTuple):
    """The gate of an MLP: `g * sigmoid(slope * g + cubic * g**3) * (up + offset)`.

    `g` is at most `limit`, and `up` is within it on both sides.
    """

    slope: float = 1.0
    cubic: float = 0.0
    limit: float = math.inf
    offset: float = 0.0


SILU = Gate()
CLAMPED = Gate(1.702, limit=7.0, offset=1.0)  # of gpt-oss
GELU_TANH = Gate(2 * math.sqrt(2 / math.pi), 0.08943 * math.sqrt(2 / math.pi))


def in_powers_of_2(scale: float, softcap: float | None) -> tuple[float, float]:
    """Return the factor of products and the cap for a softmax in base 2; a cap of 0 is none.

    A capped score is `cap - 2 * cap / (1 + 2**(factor * product))`, which is `cap` times the tanh.
    """
    if softcap is None:
        return scale * LOG2_E, 0.0
    return 2 * LOG2_E * scale / softcap, softcap * LOG2_E


def padded(head_dim: int) -> int:
    """Return the length of a head's row in whole registers, in fp32 and in bf16."""
    return -(-head_dim // (2 * WIDTH)) * (2 * WIDTH)


def scratch_floats(group: int, head_dim: int) -> int:
    """Return how many floats of memory `attend` needs per thread, without 16 rows of staging."""
    rows = max(ROWS, group)
    return 2 * (rows + TILE) * padded(head_dim) + rows * (WIDTH + 1) + MAX_STRIP * TILE
