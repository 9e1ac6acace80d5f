"""Layers that attend within chunks of a sequence beside others that see all of it (Llama 4).

This module never imports torch.
"""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from baton.model.config.reading import converted
from baton.protocol.errors import ConfigError

CHUNKED, FULL = "chunked_attention", "full_attention"
_Positive = Annotated[int, Meta(gt=0)]


class Temperature(msgspec.Struct, frozen=True):
    """Queries grow with the logarithm of how many whole spans of tokens precede them."""

    span: int  # tokens
    growth: float


class ChunksConfig(msgspec.Struct, frozen=True):
    """Which layers attend within chunks, and what those that do not rotate have instead."""

    size: int  # tokens of a chunk; chunks start at multiples of it
    layers: tuple[int, ...]
    unrotated_layers: tuple[int, ...]
    norms_rotated: bool  # queries and keys that are rotated have an RMS norm without a weight
    temperature: Temperature | None  # of the layers that do not rotate


class _RawChunks(msgspec.Struct):
    """The fields of config.json that describe these layers, with transformers' defaults."""

    num_hidden_layers: _Positive
    attention_chunk_size: _Positive | None = 8192
    layer_types: tuple[str, ...] | None = None
    no_rope_layers: tuple[int, ...] | None = None  # 0: the layer does not rotate
    no_rope_layer_interval: _Positive = 4
    use_qk_norm: bool = True
    attn_temperature_tuning: bool | int = True  # the first folders have the number 4
    floor_scale: _Positive = 8192
    attn_scale: float = 0.1


def chunks_config(file: Path, fields: dict[str, object]) -> ChunksConfig:
    """Return what config.json says. Raises `ConfigError`."""
    raw = converted(file, fields, _RawChunks)
    layers = range(raw.num_hidden_layers)
    rotates = raw.no_rope_layers
    if not rotates:
        rotates = tuple(int((layer + 1) % raw.no_rope_layer_interval != 0) for layer in layers)
    if len(rotates) < len(layers):
        raise ConfigError(f"{file}: no_rope_layers must have an entry for each of {layers.stop}")
    kinds = raw.layer_types
    if kinds is None:
        kinds = tuple(CHUNKED if rotates[layer] else FULL for layer in layers)
    if len(kinds) != len(layers) or set(kinds) - {CHUNKED, FULL}:
        raise ConfigError(
            f"{file}: layer_types must name one of {CHUNKED}, {FULL} for each of {layers.stop} "
            "layers"
        )
    if raw.attention_chunk_size is None and CHUNKED in kinds:
        raise ConfigError(f"{file}: layer_types: {CHUNKED} needs an attention_chunk_size")
    temperature = None
    if raw.attn_temperature_tuning:
        temperature = Temperature(raw.floor_scale, raw.attn_scale)
    return ChunksConfig(
        size=raw.attention_chunk_size or 0,
        layers=tuple(layer for layer in layers if kinds[layer] == CHUNKED),
        unrotated_layers=tuple(layer for layer in layers if not rotates[layer]),
        norms_rotated=raw.use_qk_norm,
        temperature=temperature,
    )
