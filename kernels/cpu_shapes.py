"""The sizes on which the CPU kernels and their caller agree. This file does not import numba."""

WIDTH = 16  # floats in a vector
TILE = 64  # keys: with heads of 64 a tile of keys and values in fp32 fits a core's first cache
ROWS = 128  # queries x heads of one KV head at a time, so that a tile is unpacked once for many
# A linear layer computes PANEL outputs of SHEET rows at a time. If there are more than FEW rows, it
# takes DEPTH pairs of inputs at a time.
PANEL, SHEET, FEW, DEPTH = 64, 256, 64, 256
MAX_STRIP = 6  # rows of a product whose sums fit the registers
LOG2_E = 1.4426950408889634
NO_WINDOW = 1 << 40  # keys that a query sees where a model has no sliding window
ROW_INTS, ROW_REALS = 4, 3  # parameters of a row that is sampled
SUMS = 1 << 11  # counters of a histogram


def padded(head_dim: int) -> int:
    """Return the length of a head's row in whole registers, in fp32 and in bf16."""
    return -(-head_dim // (2 * WIDTH)) * (2 * WIDTH)


def scratch_floats(group: int, head_dim: int) -> int:
    """Return how many floats of memory `attend` needs per thread, without 16 rows of staging."""
    rows = max(ROWS, group)
    return 2 * (rows + TILE) * padded(head_dim) + rows * (WIDTH + 1) + MAX_STRIP * TILE
