"""Weights of four bits and FP8 in the order in which the streaming kernel reads them.

A tile has 64 outputs and 128 inputs: 4 KiB of codes of four bits, or 8 KiB of FP8, as the threads
of a warpgroup hold the first operand of a product, so that they load 16 bytes and exchange none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.hopper.narrow.streaming import (
    FP8_BLOCKS,
    FP8_ROWS,
    GROUPS,
    INT4,
    STEP,
    UNIT,
)
from baton.kernels.reference import NarrowWeight

TILE = UNIT * GROUPS  # outputs of a program
MAX_ZERO = 127  # 128 + zero is exact in bf16
MAX_PARTS = 4
# Outputs in tiles: as many as a large GPU has multiprocessors, or half as many.
MANY_TILES = 132
FEW_TILES = 64


@dataclass(slots=True, frozen=True)
class PackedWeight:
    """Codes and scales on a device. `kind` is one of the kernel's."""

    kind: str
    codes: Tensor  # int32 [tiles, 32], of 4 KiB each `[32, 32]`
    meta: Tensor | None  # int32 [tiles, 64] of INT4: a scale and 128 + a zero point
    scales: Tensor | None  # fp32, of FP8: [outputs / 128, steps] or [outputs]
    outputs: int
    inputs: int
    is_half: bool  # whether scales of INT4 are fp16, else bf16

    @property
    def steps(self) -> int:
        return -(-self.inputs // STEP)

    @property
    def tiles(self) -> int:
        """Return how many programs cover the outputs."""
        return -(-self.outputs // TILE)

    @property
    def parts(self) -> int:
        """Return in how many parts the inputs are summed, for any number of rows."""
        wanted = 1 if self.tiles >= MANY_TILES else 2 if self.tiles > FEW_TILES else 4
        return max(1, min(wanted, MAX_PARTS, self.steps // 4))


def packed_weight(weight: NarrowWeight, device: torch.device) -> PackedWeight | None:
    """Return a weight packed on a device; None where its groups or scales do not fit."""
    outputs, inputs = weight.codes.shape
    if inputs % 8 or outputs % 8:
        return None
    scales = weight.scales.to(device)
    if weight.codes.dtype == torch.uint8:
        return _int4(weight, scales, device)
    codes = _filled(weight.codes.view(torch.uint8).to(device), TILE, STEP)
    words = _fp8_words(codes)
    if scales.shape[1] == 1:
        by_row = F.pad(scales[:, 0].float(), (0, -outputs % TILE)).contiguous()
        return PackedWeight(FP8_ROWS, words, None, by_row, outputs, inputs, False)
    if weight.group != STEP:
        return None
    blocks = F.pad(scales.float(), (0, 0, 0, -outputs % TILE)).unflatten(0, (-1, TILE))
    of_block = blocks[:, :1]
    last = outputs - (len(blocks) - 1) * TILE
    is_equal = (blocks[:-1] == of_block[:-1]).all() and (
        blocks[-1, :last] == of_block[-1]
    ).all()
    if not bool(is_equal):
        return None
    by_block = of_block[:, 0].contiguous()
    return PackedWeight(FP8_BLOCKS, words, None, by_block, outputs, inputs, False)


def _int4(
    weight: NarrowWeight, scales: Tensor, device: torch.device
) -> PackedWeight | None:
    outputs, inputs = weight.codes.shape
    is_whole = scales.shape[1] == 1
    if not is_whole and weight.group % STEP:
        return None
    zeros = weight.zeros.to(device)
    if int(zeros.min()) < 0 or int(zeros.max()) > MAX_ZERO:
        return None
    narrow = next(
        (
            dtype
            for dtype in (torch.float16, torch.bfloat16)
            if torch.equal(scales.to(dtype).float(), scales.float())
        ),
        None,
    )
    if narrow is None:
        return None
    steps = -(-inputs // STEP)
    of = torch.arange(steps, device=device) * (0 if is_whole else STEP) // weight.group
    upper = _filled(scales.to(narrow).view(torch.int16).int()[:, of], TILE, 1)
    lower = (zeros[:, of].float() + 128).bfloat16().view(torch.int16).int()
    # Outputs that fill a tile have zero points of 0, as their codes.
    lower = F.pad(lower, (0, 0, 0, -outputs % TILE), value=0x4300)
    meta = (upper << 16) | (lower & 0xFFFF)
    meta = meta.unflatten(0, (-1, UNIT)).transpose(1, 2).reshape(-1, UNIT)
    words = _int4_words(_filled(weight.codes.to(device), TILE, STEP))
    is_half = narrow == torch.float16
    return PackedWeight(INT4, words, meta.contiguous(), None, outputs, inputs, is_half)


def _filled(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Fill a matrix with zeros up to whole multiples."""
    return F.pad(matrix, (0, -matrix.shape[1] % columns, 0, -matrix.shape[0] % rows))


def _int4_words(codes: Tensor) -> Tensor:
    """Pack `[outputs, inputs]` of whole tiles, four neighbouring pairs of inputs to a word."""
    # Outputs: units, warps, halves, groups of lanes. Inputs: steps, words, quarters, registers,
    # lanes, pairs.
    split = codes.view(-1, 4, 2, 8, codes.shape[1] // STEP, 2, 4, 2, 4, 2)
    shape = (*split.shape[:6], *split.shape[7:9])
    words = torch.zeros(shape, dtype=torch.int32, device=codes.device)
    for quarter in range(4):
        for number in range(2):
            part = split[..., quarter, :, :, number].to(torch.int32)
            words |= part << (16 * number + 4 * quarter)
    return words.permute(0, 4, 6, 1, 3, 7, 2, 5).reshape(-1, 32).contiguous()


def _fp8_words(codes: Tensor) -> Tensor:
    """Pack `[outputs, inputs]` of whole tiles, four inputs of two pairs to a word."""
    split = codes.view(-1, 4, 2, 8, codes.shape[1] // STEP, 2, 2, 2, 2, 4, 2)
    split = split.permute(0, 4, 5, 8, 1, 3, 9, 2, 6, 10, 7)
    return split.contiguous().view(-1).view(torch.int32).view(-1, 32)
