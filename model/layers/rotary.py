"""The table of a rotary embedding: the cosines and sines of every position."""

import math

import torch
from torch import Tensor

from baton.model.config.rope_config import Rope


def rope_table(rope: Rope, head_dim: int, num_positions: int) -> Tensor:
    """Return the cosines, then sines, of every position: `[num_positions, head_dim]` fp32.

    Where a part of a head is rotated, its numbers are in `head_order`. Where the angles depend on
    the length of a sequence, `num_positions` is the longest that a node takes.
    """
    rotated = rope.rotated(head_dim)
    table = unrotated(head_dim, num_positions)
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
    periods = rope.theta**exponents
    if rope.scaling == "proportional":
        periods[int(rope.partial_rotary_factor * head_dim // 2) :] = math.inf
    if rope.scaling == "longrope":
        periods *= torch.tensor(
            rope.long_factor if rope.is_long(num_positions) else rope.short_factor
        )
    frequencies = (
        _scaled(rope, 1.0 / periods) if rope.turns else torch.zeros_like(periods)
    )
    angles = torch.arange(num_positions).float()[:, None] * frequencies
    cos, sin = table.view(num_positions, 2, -1)[..., : rotated // 2].unbind(1)
    cos.copy_(angles.cos() * rope.attention_factor)
    sin.copy_(angles.sin() * rope.attention_factor)
    return table


def head_order(rope: Rope, head_dim: int) -> Tensor | None:
    """Return a head's numbers in the order in which kernels rotate number i with i + half a head.

    A head begins with those that are rotated, so they are spread over both of its halves. None:
    all are rotated, in this order. Scores of queries and keys in one order are those of any other.
    """
    if (rotated := rope.rotated(head_dim)) == head_dim and not rope.rotates_neighbours:
        return None
    numbers = torch.arange(head_dim)
    turned = numbers[:rotated]
    pairs = turned.view(-1, 2).T if rope.rotates_neighbours else turned.chunk(2)
    halves = zip(pairs, numbers[rotated:].chunk(2), strict=True)
    return torch.cat([part for half in halves for part in half])


def unrotated(head_dim: int, num_positions: int) -> Tensor:
    """Return a table that turns nothing, for a model that has rotated its queries and keys."""
    half = torch.ones(num_positions, head_dim // 2)
    return torch.cat((half, torch.zeros_like(half)), dim=1)


def _scaled(rope: Rope, frequencies: Tensor) -> Tensor:
    match rope.scaling:
        case "default" | "longrope":
            return frequencies
        case "linear" | "proportional":
            return frequencies / rope.factor
        case "llama3":
            return _llama3(rope, frequencies)
        case "yarn":
            return _yarn(rope, frequencies)


def _llama3(rope: Rope, frequencies: Tensor) -> Tensor:
    """Stretch low frequencies, keep high ones, and blend those between them (Llama 3.1)."""
    original = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    longest = original / rope.low_freq_factor
    shortest = original / rope.high_freq_factor
    blend = (original / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    stretched = frequencies / rope.factor
    blended = (1 - blend) * stretched + blend * frequencies
    scaled = torch.where(wavelengths > longest, stretched, frequencies)
    is_between = (wavelengths <= longest) & (wavelengths >= shortest)
    return torch.where(is_between, blended, scaled)


def _yarn(rope: Rope, frequencies: Tensor) -> Tensor:
    """Stretch the frequencies that turn seldom within the original length, and blend (YaRN)."""
    num = len(frequencies)

    def place(rotations: float) -> float:
        """Return the place of the frequency that turns so often within the original length."""
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return num * math.log(turns) / math.log(rope.theta)

    first = place(rope.beta_fast)
    last = place(rope.beta_slow)
    if rope.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, 2 * num - 1)
    places = torch.arange(num, dtype=torch.float32)
    share = ((places - first) / (last - first or 0.001)).clamp(0, 1)
    return frequencies / rope.factor * share + frequencies * (1 - share)
