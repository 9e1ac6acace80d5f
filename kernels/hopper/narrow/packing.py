"""Weights of four and eight bits in the order in which the streaming kernel reads them.

A tile has 64 outputs and 128 inputs: 4 KiB of codes of four bits, or 8 KiB of bytes, as the threads
of a warpgroup hold the first operand of a product, so that they load 16 bytes and exchange none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.hopper.narrow.streaming import (
    FORMATS,
    FP8_BLOCKS,
    FP8_ROWS,
    GROUPS,
    INT4,
    INT8,
    INT8_ROWS,
    MXFP4,
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

MXFP4_GROUP = 32  # inputs of a scale
# A scale of 2^power has this much more as an exponent of bf16 that also puts the fields of codes
# in their places; with these powers, what codes stand for is exact in bf16.
POWER_TO_BF16 = 253
POWERS = range(-127, 2)


@dataclass(slots=True, frozen=True)
class PackedWeight:
    """Codes and scales on a device. `kind` is one of the kernel's."""

    kind: str
    codes: Tensor  # int32 [tiles, 32], of 4 KiB each `[32, 32]`
    outputs: int  # of one expert, if there are any
    inputs: int
    # int32 [tiles, 64] for each group: a scale, and of INT4 128 + a zero point in the lower half.
    # Of MXFP4 for each step: four bytes, the exponents of bf16 by which numbers are multiplied.
    meta: Tensor | None = None
    scales: Tensor | None = None  # fp32: [outputs / 128, steps] or [outputs]
    is_half: bool = False  # whether scales of INT4 are fp16, else bf16
    group: int = STEP  # inputs of a step whose sums are scaled at once
    experts: int = 0  # which have whole tiles each, one expert after the other

    @property
    def words(self) -> int:
        """Return how many words of `meta` an output has in a step."""
        form = FORMATS[self.kind]
        return form.has_step_words + form.has_group_words * (STEP // self.group)

    @property
    def steps(self) -> int:
        return -(-self.inputs // STEP)

    @property
    def tiles(self) -> int:
        """Return how many programs cover the outputs, of one expert if there are any."""
        return -(-self.outputs // TILE)

    @property
    def parts(self) -> int:
        """Return in how many parts the inputs are summed, for any number of rows."""
        if self.experts:
            return 1
        wanted = 1 if self.tiles >= MANY_TILES else 2 if self.tiles > FEW_TILES else 4
        return max(1, min(wanted, MAX_PARTS, self.steps // 4))


def packed_weight(weight: NarrowWeight, device: torch.device) -> PackedWeight | None:
    """Return a weight packed on a device; None where its groups or scales do not fit."""
    if any(size % 8 for size in weight.codes.shape):
        return None
    pack = {"int4": _int4, "fp4": _mxfp4, "int8": _int8, "fp8": _fp8}[weight.kind]
    return pack(weight, weight.scales.to(device), device)


def packed_experts(
    weights: Sequence[NarrowWeight], device: torch.device
) -> PackedWeight | None:
    """Return the weights of experts as one; None where they differ in kind or do not fit."""
    first = weights[0]
    outputs = len(first.codes)
    kinds = {(own.kind, own.group, own.codes.shape) for own in weights}
    if len(kinds) > 1 or outputs % 8:
        return None
    added = -outputs % TILE
    codes, scales, zeros = (
        torch.cat([_with_more(part.to(device), added) for part in parts])
        for parts in zip(
            *((own.codes, own.scales, own.zeros) for own in weights), strict=True
        )
    )
    whole = replace(first, codes=codes, scales=scales, zeros=zeros)
    packed = packed_weight(whole, device)
    return packed and replace(packed, outputs=outputs, experts=len(weights))


def _with_more(part: Tensor, added: int) -> Tensor:
    """Return a matrix whose last output is there some times more, with a scale that fits."""
    return torch.cat((part, part[-1:].expand(added, -1)))


def _fp8(
    weight: NarrowWeight, scales: Tensor, device: torch.device
) -> PackedWeight | None:
    outputs, inputs = weight.codes.shape
    if scales.shape[1] == 1:
        return _by_rows(FP8_ROWS, weight, scales, device)
    if weight.group != STEP:
        return None
    blocks = F.pad(scales.float(), (0, 0, 0, -len(scales) % TILE))
    blocks = blocks.unflatten(0, (-1, TILE))
    of_block = blocks[:, :1]
    last = len(scales) - (len(blocks) - 1) * TILE
    is_equal = (blocks[:-1] == of_block[:-1]).all() and (
        blocks[-1, :last] == of_block[-1]
    ).all()
    if not bool(is_equal):
        return None
    by_block = of_block[:, 0].contiguous()
    words = _byte_words(weight.codes.to(device))
    return PackedWeight(FP8_BLOCKS, words, outputs, inputs, scales=by_block)


def _int8(
    weight: NarrowWeight, scales: Tensor, device: torch.device
) -> PackedWeight | None:
    outputs, inputs = weight.codes.shape
    if scales.shape[1] == 1:
        return _by_rows(INT8_ROWS, weight, scales, device)
    group = _group_in_step(weight)
    if group is None:
        return None
    by_group = scales.float()[:, _groups(weight, group, device)]
    meta = _by_tile(_filled(by_group.view(torch.int32), TILE, 1))
    words = _byte_words(weight.codes.to(device))
    return PackedWeight(INT8, words, outputs, inputs, meta=meta, group=group)


def _by_rows(
    kind: str, weight: NarrowWeight, scales: Tensor, device: torch.device
) -> PackedWeight:
    outputs, inputs = weight.codes.shape
    by_row = F.pad(scales[:, 0].float(), (0, -len(scales) % TILE)).contiguous()
    words = _byte_words(weight.codes.to(device))
    return PackedWeight(kind, words, outputs, inputs, scales=by_row)


def _int4(
    weight: NarrowWeight, scales: Tensor, device: torch.device
) -> PackedWeight | None:
    outputs, inputs = weight.codes.shape
    group = _group_in_step(weight)
    zeros = weight.zeros.to(device)
    if group is None or int(zeros.min()) < 0 or int(zeros.max()) > MAX_ZERO:
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
    of = _groups(weight, group, device)
    upper = _filled(scales.to(narrow).view(torch.int16).int()[:, of], TILE, 1)
    lower = (zeros[:, of].float() + 128).bfloat16().view(torch.int16).int()
    # Outputs that fill a tile have zero points of 0, as their codes.
    lower = F.pad(lower, (0, 0, 0, -len(zeros) % TILE), value=0x4300)
    meta = _by_tile((upper << 16) | (lower & 0xFFFF))
    return PackedWeight(
        INT4,
        _int4_words(_filled(weight.codes.to(device), TILE, STEP)),
        outputs,
        inputs,
        meta=meta,
        is_half=narrow == torch.float16,
        group=group,
    )


def _mxfp4(
    weight: NarrowWeight, scales: Tensor, device: torch.device
) -> PackedWeight | None:
    outputs, inputs = weight.codes.shape
    halves, powers = torch.frexp(scales.float())
    # frexp's fractions are a half and more.
    powers = powers.int() - 1
    is_whole = scales.shape[1] == 1
    if (
        not bool((halves == 0.5).all())
        or int(powers.min()) not in POWERS
        or int(powers.max()) not in POWERS
        or not (is_whole or weight.group % MXFP4_GROUP == 0)
    ):
        return None
    exponents = _filled(powers + POWER_TO_BF16, TILE, 1)
    exponents = exponents[:, _groups(weight, MXFP4_GROUP, device)]
    bytes_of = exponents.unflatten(1, (-1, STEP // MXFP4_GROUP)).unbind(2)
    meta = torch.zeros_like(bytes_of[0])
    for number, byte in enumerate(bytes_of):
        meta |= byte << (8 * number)
    words = _mxfp4_words(_filled(weight.codes.to(device), TILE, STEP))
    return PackedWeight(MXFP4, words, outputs, inputs, meta=_by_tile(meta))


def _group_in_step(weight: NarrowWeight) -> int | None:
    """Return how many inputs of a step are scaled at once; None where the kernel cannot."""
    if weight.scales.shape[1] == 1:
        return STEP
    sizes = (STEP, STEP // 2, STEP // 4)
    return next((size for size in sizes if weight.group % size == 0), None)


def _groups(weight: NarrowWeight, size: int, device: torch.device) -> Tensor:
    """Return the group of each `size` inputs, up to a whole step."""
    inputs = weight.codes.shape[1]
    firsts = torch.arange(0, inputs + -inputs % STEP, size, device=device)
    # Inputs that fill a step meet zeros.
    return firsts.clamp(max=inputs - 1) // weight.group


def _by_tile(meta: Tensor) -> Tensor:
    """Return words `[outputs, …]` in the order of tiles, and in a tile of words, `[…, 64]`."""
    return meta.unflatten(0, (-1, UNIT)).transpose(1, 2).reshape(-1, UNIT).contiguous()


def _filled(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Fill a matrix with zeros up to whole multiples."""
    return F.pad(matrix, (0, -matrix.shape[1] % columns, 0, -matrix.shape[0] % rows))


def _int4_words(codes: Tensor) -> Tensor:
    """Pack `[outputs, inputs]` of whole tiles, four neighbouring pairs of inputs to a word."""
    split = _by_word(codes)
    words = torch.zeros_like(split[..., 0, :, :, 0], dtype=torch.int32)
    for quarter in range(4):
        for number in range(2):
            part = split[..., quarter, :, :, number].to(torch.int32)
            words |= part << (16 * number + 4 * quarter)
    return _in_registers(words)


def _mxfp4_words(codes: Tensor) -> Tensor:
    """Pack codes as `_int4_words`, with their bits a shift away from where bf16 has them."""
    split = _by_word(codes)
    words = torch.zeros_like(split[..., 0, :, :, 0], dtype=torch.int32)
    for quarter in range(4):
        for number in range(2):
            part = split[..., quarter, :, :, number].to(torch.int32)
            sign = part >> 3
            if quarter < 3:
                field = sign << (15 - 3 * quarter) | (part & 7) << (6 - 3 * quarter)
            else:
                field = sign << 14 | (part & 6) << 9 | (part & 1) << 13
            words |= field << (16 * number)
    return _in_registers(words)


def _by_word(codes: Tensor) -> Tensor:
    # Outputs: units, warps, halves, groups of lanes. Inputs: steps, words, quarters, registers,
    # lanes, pairs.
    return codes.view(-1, 4, 2, 8, codes.shape[1] // STEP, 2, 4, 2, 4, 2)


def _in_registers(words: Tensor) -> Tensor:
    return words.permute(0, 4, 6, 1, 3, 7, 2, 5).reshape(-1, 32).contiguous()


def _byte_words(codes: Tensor) -> Tensor:
    """Pack bytes `[outputs, inputs]`, four inputs of two pairs to a word."""
    codes = _filled(codes.view(torch.uint8), TILE, STEP)
    split = codes.view(-1, 4, 2, 8, codes.shape[1] // STEP, 2, 2, 2, 2, 4, 2)
    split = split.permute(0, 4, 5, 8, 1, 3, 9, 2, 6, 10, 7)
    return split.contiguous().view(-1).view(torch.int32).view(-1, 32)
