"""The compile-time choices of the attention kernels for a number type and head size, as a table.

Heads of 80, 96 and 112 use the row of the next power of two. Every row compiles for Hopper without
a spill. `python -m tools.gpu.tilings` compiles the candidates, measures them where there is a GPU,
and prints rows to paste here. Nothing is tuned at run time, so warm-up compiles every variant.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


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


FP32, BF16 = torch.float32, torch.bfloat16
Row = tuple[torch.dtype, int]  # number type, head size

# A multiprocessor keeps some 100 KiB of loads in flight. fp32 is for parity only.
DECODE: dict[Row, DecodeTiling] = {
    (BF16, 32): DecodeTiling(128, 4, 3, 3),
    (BF16, 64): DecodeTiling(128, 4, 3, 3),
    (BF16, 128): DecodeTiling(64, 4, 3, 3, 168),
    (BF16, 256): DecodeTiling(32, 4, 3, 2),
    (FP32, 32): DecodeTiling(32, 4, 2, 4),
    (FP32, 64): DecodeTiling(32, 4, 2, 4),
    (FP32, 128): DecodeTiling(32, 4, 2, 4),
    (FP32, 256): DecodeTiling(16, 4, 2, 3),
}
# For heads up to 64, two programs share a multiprocessor: one computes products while the other
# computes the softmax.
PREFILL: dict[Row, PrefillTiling] = {
    (BF16, 32): PrefillTiling(128, 64, 8, 3),
    (BF16, 64): PrefillTiling(128, 64, 8, 3),
    (BF16, 128): PrefillTiling(128, 64, 8, 3, True),
    (BF16, 256): PrefillTiling(128, 32, 8, 3),
    (FP32, 32): PrefillTiling(32, 32, 16, 2),
    (FP32, 64): PrefillTiling(32, 32, 16, 2),
    (FP32, 128): PrefillTiling(32, 32, 16, 2),
    (FP32, 256): PrefillTiling(16, 16, 16, 2),
}

# For sums in decode's order: as many keys as in decode, and in bf16 fewer than 64 queries, so that
# the products use the instructions that decode's use.
ORDERED_PREFILL: dict[Row, PrefillTiling] = {
    (BF16, 32): PrefillTiling(32, 128, 4, 2),
    (BF16, 64): PrefillTiling(32, 128, 4, 2),
    (BF16, 128): PrefillTiling(32, 64, 4, 2),
    (BF16, 256): PrefillTiling(16, 32, 4, 2),
    (FP32, 32): PrefillTiling(32, 32, 8, 2),
    (FP32, 64): PrefillTiling(32, 32, 8, 2),
    (FP32, 128): PrefillTiling(64, 32, 16, 2),
    (FP32, 256): PrefillTiling(32, 16, 8, 2),
}


def padded(head_dim: int) -> int:
    """Return the head size of a tile, which is a power of two."""
    return max(32, 1 << (head_dim - 1).bit_length())


def decode_tiling(dtype: torch.dtype, head_dim: int) -> DecodeTiling:
    return DECODE[dtype, padded(head_dim)]


def prefill_tiling(dtype: torch.dtype, head_dim: int, *, ordered: bool) -> PrefillTiling:
    return (ORDERED_PREFILL if ordered else PREFILL)[dtype, padded(head_dim)]
