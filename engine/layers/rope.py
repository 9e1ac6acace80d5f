"""The table of rotary angles by which a backend rotates queries and keys.

The loader makes it once. It supports the three scalings that `DecoderConfig` accepts, and computes
in fp32 in the order of the Hugging Face reference, so that greedy tokens can be compared with it.
"""

import math

import torch
from torch import Tensor

from baton.engine.model_config import Rope


def rope_table(rope: Rope, head_dim: int, num_positions: int) -> Tensor:
    """Return the cosines, then sines, of every position: `[num_positions, head_dim]` fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = _scaled(rope, 1.0 / (rope.theta**exponents))
    angles = torch.arange(num_positions).float()[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _scaled(rope: Rope, frequencies: Tensor) -> Tensor:
    match rope.scaling:
        case "default":
            return frequencies
        case "linear":
            return frequencies / rope.factor
        case "llama3":
            return _llama3(rope, frequencies)


def _llama3(rope: Rope, frequencies: Tensor) -> Tensor:
    """Stretch low frequencies, keep high ones, and blend those between them (Llama 3.1)."""
    original = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    longest, shortest = original / rope.low_freq_factor, original / rope.high_freq_factor
    blend = (original / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    stretched = frequencies / rope.factor
    blended = (1 - blend) * stretched + blend * frequencies
    scaled = torch.where(wavelengths > longest, stretched, frequencies)
    is_between = (wavelengths <= longest) & (wavelengths >= shortest)
    return torch.where(is_between, blended, scaled)
