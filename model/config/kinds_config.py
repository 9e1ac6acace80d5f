"""Models whose layers are of several kinds.

In Llama 4 most attend within chunks of a sequence and others see all of it. In Gemma 4 those with a
window have the heads that config.json describes first, those that see everything have fewer and
wider KV heads, and some layers read what others store. In Nemotron-H attention, states and MLPs are
layers of their own. This module never imports torch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from baton.model.config.reading import converted
from baton.protocol.errors import ConfigError

CHUNKED = "chunked_attention"
FULL = "full_attention"
_Positive = Annotated[int, Meta(gt=0)]
_Count = Annotated[int, Meta(ge=0)]


class LayerInputs(msgspec.Struct, frozen=True):
    """Each layer has an embedding of a token of its own, which it takes after the MLP."""

    vocab_size: int
    width: int


class KindsConfig(msgspec.Struct, frozen=True):
    """The heads of layers that see everything, and what layers have beside attention and MLP."""

    kv_heads: int  # divides that of layers with a window
    head_dim: int
    values_are_keys: bool  # in these layers, but for the norm and the rotation
    first_shared_layer: int  # it and those after it store nothing
    widens_shared_mlp: bool  # their MLPs are twice as wide
    inputs: LayerInputs | None


class _RawHeads(msgspec.Struct):
    head_dim: _Positive | None = None
    num_key_value_heads: _Positive | None = None


class _RawKinds(msgspec.Struct):
    """The fields of config.json that describe these layers, with transformers' defaults."""

    num_hidden_layers: _Positive
    num_attention_heads: _Positive
    num_key_value_heads: _Positive
    head_dim: _Positive
    vocab_size: _Positive
    global_head_dim: _Positive = 512
    num_global_key_value_heads: _Positive | None = None
    # The last two fields by layer, as transformers saves them.
    per_layer_config: dict[str, dict[str, object]] | None = None
    attention_k_eq_v: bool = False
    num_kv_shared_layers: _Count = 0
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: _Count = 256
    vocab_size_per_layer_input: _Positive = 262144


def kinds_config(
    file: Path,
    fields: dict[str, object],
    full_layers: tuple[int, ...],
    *,
    has_inputs: bool,
) -> KindsConfig:
    """Return what config.json says; `full_layers` see everything. Raises `ConfigError`."""
    raw = converted(file, fields, _RawKinds)
    heads = _RawHeads(raw.global_head_dim)
    if raw.attention_k_eq_v:
        heads.num_key_value_heads = raw.num_global_key_value_heads
    if raw.per_layer_config is not None:
        heads = _by_layer(file, raw.per_layer_config, full_layers)
    kv_heads = heads.num_key_value_heads or raw.num_key_value_heads
    head_dim = heads.head_dim or raw.head_dim
    if raw.num_key_value_heads % kv_heads or raw.num_attention_heads % kv_heads:
        raise ConfigError(
            f"{file}: the {kv_heads} KV heads of layers that see everything must divide "
            f"num_key_value_heads, {raw.num_key_value_heads}, and num_attention_heads"
        )
    if head_dim % 2:
        raise ConfigError(f"{file}: global_head_dim must be even for rotary embedding")
    first_shared = raw.num_hidden_layers - raw.num_kv_shared_layers
    layers = range(raw.num_hidden_layers)
    kinds = [layer in full_layers for layer in layers]
    if first_shared < 1 or set(kinds[:first_shared]) != set(kinds):
        raise ConfigError(
            f"{file}: num_kv_shared_layers leaves a kind of layers without one that stores keys"
        )
    inputs = None
    if has_inputs and raw.hidden_size_per_layer_input:
        if raw.vocab_size_per_layer_input < raw.vocab_size:
            raise ConfigError(
                f"{file}: vocab_size_per_layer_input is less than vocab_size"
            )
        inputs = LayerInputs(
            raw.vocab_size_per_layer_input, raw.hidden_size_per_layer_input
        )
    return KindsConfig(
        kv_heads=kv_heads,
        head_dim=head_dim,
        values_are_keys=raw.attention_k_eq_v,
        first_shared_layer=first_shared,
        widens_shared_mlp=raw.use_double_wide_mlp,
        inputs=inputs,
    )


def _by_layer(
    file: Path, by_layer: Mapping[str, dict[str, object]], full_layers: tuple[int, ...]
) -> _RawHeads:
    """Return the heads that `per_layer_config` gives to all layers that see everything."""
    if not by_layer:  # all heads are of one size
        return _RawHeads()
    if set(by_layer) != {str(layer) for layer in full_layers}:
        raise ConfigError(
            f"{file}: per_layer_config must name the layers that see everything, and no others"
        )
    first, *others = by_layer.values()
    if any(other != first for other in others) or set(first) - set(
        _RawHeads.__struct_fields__
    ):
        raise ConfigError(
            f"{file}: per_layer_config must give one head_dim and num_key_value_heads to all of "
            "its layers, and nothing else"
        )
    return converted(file, first, _RawHeads)


class Temperature(msgspec.Struct, frozen=True):
    """Queries grow with the logarithm of how many whole spans of tokens precede them."""

    span: int  # tokens
    growth: float


class ChunksConfig(msgspec.Struct, frozen=True):
    """Which layers attend within chunks, and what those that do not rotate have instead."""

    size: int  # tokens of a chunk; chunks start at multiples of it
    layers: tuple[int, ...]
    unrotated_layers: tuple[int, ...]
    # Queries and keys that are rotated have an RMS norm without a weight.
    norms_rotated: bool
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
        rotates = tuple(
            int((layer + 1) % raw.no_rope_layer_interval != 0) for layer in layers
        )
    if len(rotates) < len(layers):
        raise ConfigError(
            f"{file}: no_rope_layers must have an entry for each of {layers.stop}"
        )
    kinds = raw.layer_types
    if kinds is None:
        kinds = tuple(CHUNKED if rotates[layer] else FULL for layer in layers)
    if len(kinds) != len(layers) or set(kinds) - {CHUNKED, FULL}:
        raise ConfigError(
            f"{file}: layer_types must name one of {CHUNKED}, {FULL} for each of {layers.stop} "
            "layers"
        )
    if raw.attention_chunk_size is None and CHUNKED in kinds:
        raise ConfigError(
            f"{file}: layer_types: {CHUNKED} needs an attention_chunk_size"
        )
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


class _RawBlocks(msgspec.Struct):
    """The fields of config.json that say what each layer is."""

    layer_types: tuple[str, ...] | None = None
    hybrid_override_pattern: str = "ME*-"  # a letter for each, in older folders


MLP = "mlp"
SPARSE = "moe"
LETTERS = {"M": "linear_attention", "*": FULL, "-": MLP, "E": SPARSE}


def joined_blocks(
    file: Path, fields: dict[str, object]
) -> tuple[tuple[tuple[int, int | None], ...], dict[str, object]]:
    """Join each MLP with the attention or state before it, as the layers of other models are.

    Return the numbers of both, the second one None if there is no MLP, and the fields of a model
    with such layers. Raises `ConfigError` for an MLP that follows neither.
    """
    raw = converted(file, fields, _RawBlocks)
    kinds = raw.layer_types
    if kinds is None:
        kinds = tuple(
            LETTERS.get(letter, letter) for letter in raw.hybrid_override_pattern
        )
    blocks: list[tuple[int, int | None]] = []
    for number, kind in enumerate(kinds):
        if kind not in (MLP, SPARSE):
            blocks.append((number, None))
        elif blocks and blocks[-1][1] is None:
            blocks[-1] = (blocks[-1][0], number)
        else:
            raise ConfigError(
                f"{file}: layer {number} is an MLP that follows neither attention nor a state, "
                "which is not supported"
            )
    mlps = [None if mlp is None else kinds[mlp] for _, mlp in blocks]
    joined = {
        "num_hidden_layers": len(blocks),
        "layer_types": [kinds[mixer] for mixer, _ in blocks],
        "mlp_layer_types": ["sparse" if kind == SPARSE else "dense" for kind in mlps],
        "has_experts": SPARSE in mlps,
    }
    return tuple(blocks), {**fields, **joined}
