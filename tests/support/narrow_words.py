"""Reads packed weights as the streaming kernel does, by the instructions of its own text."""

import re
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.kernels.hopper.narrow import streaming
from baton.kernels.hopper.narrow.packing import PackedWeight

Words = NDArray[np.uint32]


def pairs(words: Words) -> NDArray[np.float32]:
    """Return the two bf16 numbers of each word, the lower one first."""
    halves = np.stack((words << np.uint32(16), words & np.uint32(0xFFFF0000)), -1)
    return halves.view(np.float32)


def in_words(numbers: NDArray[np.float32]) -> Words:
    bits = torch.from_numpy(numbers).bfloat16().view(torch.int16).numpy()
    low, high = (bits[..., i].astype(np.uint16).astype(np.uint32) for i in (0, 1))
    return low | high << np.uint32(16)


def interpreted(text: str, inputs: Mapping[str, Words], outputs: int) -> list[Words]:
    """Follow instructions for many threads at once."""
    registers = dict(inputs)

    def value(word: str) -> Words:
        if word in registers:
            return registers[word]
        return np.asarray(int(word, 0), np.uint32)

    operations = {
        "mov.b32": lambda a: a,
        "shr.b32": lambda a, b: a >> b,
        "shl.b32": lambda a, b: a << b,
        "and.b32": lambda a, b: a & b,
        "lop3.b32": lambda a, b, c, _table: (a & b) | c,
        "sub.rn.bf16x2": lambda a, b: in_words(pairs(a) - pairs(b)),
        "mul.rn.bf16x2": lambda a, b: in_words(pairs(a) * pairs(b)),
    }
    for line in re.split(r"[;\n]+", text.strip("{} \n")):
        if not line.strip() or ".reg" in line:
            continue
        name, rest = line.split(None, 1)
        target, *words = (word.strip() for word in rest.split(","))
        assert name != "lop3.b32" or int(words[3], 0) == 0xEA
        registers[target] = operations[name](*map(value, words))
    return [registers[f"${number}"] for number in range(outputs)]


def read(packed: PackedWeight) -> Tensor:
    """Return the numbers that a warpgroup multiplies, times what scales its sums."""
    pieces = streaming.FORMATS[packed.kind].bits // 4
    steps = packed.steps
    units = packed.tiles * 2 * max(1, packed.experts)
    words = packed.codes.numpy().view(np.uint32)
    # Registers, warps, lanes by eight and by four, halves of rows, pairs.
    words = words.reshape(units, steps, pieces, 2, 4, 8, 4, 2, 2)
    words = words.transpose(0, 1, 2, 4, 7, 5, 3, 6, 8)
    words = words.reshape(units, steps, pieces, 64, 8, 2)
    numbers = np.zeros((units, 64, steps, 128), np.float64)
    meta = None
    if packed.meta is not None:
        meta = packed.meta.numpy().view(np.uint32)
        meta = meta.reshape(units, steps, packed.words, 64, 1)
    for piece in range(pieces):
        low, high = (np.ascontiguousarray(words[:, :, piece, ..., i]) for i in (0, 1))
        quarters = widened(packed.kind, low, high, meta)
        for quarter, words_of in enumerate(quarters):
            part = pairs(words_of).reshape(units, steps, 64, 16).transpose(0, 2, 1, 3)
            start = (quarter + 4 * piece) * 16
            numbers[..., start : start + 16] = part
    return torch.from_numpy(numbers * scales_of(packed, units)).reshape(units * 64, -1)


def widened(kind: str, low: Words, high: Words, meta: Words | None) -> list[Words]:
    """Return four or eight pairs by the kernel's instructions."""
    if kind in {streaming.INT4, streaming.MXFP4}:
        assert meta is not None
        inputs = {"$8": low, "$9": high}
        if kind == streaming.INT4:
            texts = {
                1: streaming.INT4_TEXT,
                2: streaming.INT4_TEXT_OF_2,
                4: streaming.INT4_TEXT_OF_4,
            }
            text = texts[meta.shape[2]]
            operands = (meta & np.uint32(0xFFFF)) * np.uint32(0x00010001)
        else:
            text = streaming.MXFP4_TEXT
            shifts = np.array([0, 8, 16, 24], np.uint32).reshape(4, 1, 1)
            operands = ((meta >> shifts) & np.uint32(0xFF)) * np.uint32(0x00800080)
        for number in range(operands.shape[2]):
            inputs[f"${10 + 2 * number}"] = operands[:, :, number]
        return interpreted(str(text.value), inputs, 8)
    is_fp8 = kind in {streaming.FP8_BLOCKS, streaming.FP8_ROWS}
    text = streaming.FP8_TEXT if is_fp8 else streaming.INT8_TEXT
    return interpreted(str(text.value), {"$4": low, "$5": high}, 4)


def scales_of(packed: PackedWeight, units: int) -> NDArray[np.float64]:
    """Return scales `[units, 64, steps, 128]`, or ones that broadcast to it."""
    if packed.kind == streaming.MXFP4:
        return np.ones((1, 1, 1, 1))
    if packed.meta is not None:
        if packed.kind == streaming.INT8:
            scales = packed.meta.view(torch.float32).double()
        else:
            dtype = torch.float16 if packed.is_half else torch.bfloat16
            scales = (packed.meta >> 16).to(torch.int16).view(dtype).double()
        scales = scales.view(units, packed.steps, packed.words, 64).permute(0, 3, 1, 2)
        return scales.repeat_interleave(packed.group, 3).numpy()
    assert packed.scales is not None
    scales = packed.scales.double()
    if packed.kind in {streaming.FP8_ROWS, streaming.INT8_ROWS}:
        return scales.view(units, 64, 1, 1).numpy()
    return scales.repeat_interleave(2, 0)[:, None, :, None].numpy()
