"""What layers of a family have that those of Llama lack: gates, norms, caps of scores, windows.

This module never imports torch.
"""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from baton.kernels.constants import CLAMPED, SILU, Gate
from baton.model.config.reading import converted
from baton.model.families.family import ALWAYS, Family, Windows
from baton.protocol.errors import ConfigError

_Positive = Annotated[float, Meta(gt=0)]
LAYER_TYPES = {"full_attention", "sliding_attention"}
OF_IMAGES = "vision"  # the kind of bidirectional attention that text has not


class LayersConfig(msgspec.Struct, frozen=True):
    """What all layers share. The values by default are those of Llama."""

    gate: Gate | None = SILU  # None: the square of a ReLU, without a gate
    norm_offset: float = 0.0
    has_output_norms: bool = False
    embedding_scale: float | None = None
    # Of queries times keys; None: that of the length of a head.
    scale: float | None = None
    score_cap: float | None = None
    logit_cap: float | None = None
    has_sinks: bool = False
    has_output_gates: bool = False
    residual_scale: float | None = None  # of what a layer adds
    logit_divisor: float | None = None


class RawLayers(msgspec.Struct):
    """The fields of config.json that describe such layers."""

    hidden_size: int
    hidden_act: str = "silu"
    mlp_hidden_act: str = "relu2"  # of Nemotron
    hidden_activation: str = "gelu_pytorch_tanh"
    query_pre_attn_scalar: _Positive | None = None
    attn_logit_softcapping: _Positive | None = None
    final_logit_softcapping: _Positive | None = None
    use_bidirectional_attention: bool | str | None = None
    embedding_multiplier: _Positive | None = None
    attention_multiplier: _Positive | None = None
    residual_multiplier: _Positive | None = None
    logits_scaling: _Positive | None = None
    swiglu_alpha: _Positive = CLAMPED.slope
    swiglu_limit: _Positive = CLAMPED.limit


def layers_config(
    file: Path, family: Family, fields: dict[str, object]
) -> LayersConfig:
    """Return the layers of a family. Raises `ConfigError`."""
    raw = converted(file, fields, RawLayers)
    if family.gate is SILU and raw.hidden_act != "silu":
        raise ConfigError(
            f"{file}: hidden_act {raw.hidden_act!r} is not supported, only 'silu'"
        )
    if family.gate is None and raw.mlp_hidden_act != "relu2":
        raise ConfigError(
            f"{file}: mlp_hidden_act {raw.mlp_hidden_act!r} is not supported"
        )
    is_gelu = family.gate is not SILU and family.gate is not None
    if is_gelu and raw.hidden_activation != "gelu_pytorch_tanh":
        raise ConfigError(
            f"{file}: hidden_activation {raw.hidden_activation!r} is not supported in models of "
            f"{family.model_type}, only 'gelu_pytorch_tanh'"
        )
    is_of_images = raw.use_bidirectional_attention == OF_IMAGES
    if is_gelu and raw.use_bidirectional_attention and not is_of_images:
        raise ConfigError(f"{file}: use_bidirectional_attention is not supported")
    for name in family.refused:
        if fields.get(name):
            raise ConfigError(
                f"{file}: {name} is not supported in models of {family.model_type}"
            )
    gate = family.gate
    if gate is not None and gate is CLAMPED:
        gate = gate._replace(slope=raw.swiglu_alpha, limit=raw.swiglu_limit)
    layers = LayersConfig(
        gate=gate,
        norm_offset=family.norm_offset,
        has_output_norms=family.has_output_norms,
        embedding_scale=raw.hidden_size**0.5 if family.scales_embeddings else None,
        has_sinks=family.has_sinks,
        has_output_gates=family.has_output_gates,
    )
    if family.has_multipliers:
        return msgspec.structs.replace(
            layers,
            embedding_scale=raw.embedding_multiplier or 1.0,
            scale=raw.attention_multiplier or 1.0,
            residual_scale=raw.residual_multiplier or 1.0,
            logit_divisor=raw.logits_scaling or 1.0,
        )
    if not family.has_scalar:
        return layers
    scalar = raw.query_pre_attn_scalar
    return msgspec.structs.replace(
        layers,
        scale=None if scalar is None else scalar**-0.5,
        score_cap=raw.attn_logit_softcapping,
        logit_cap=raw.final_logit_softcapping,
    )


class _RawWindows(msgspec.Struct):
    """The fields of config.json that say which layers have a window."""

    num_hidden_layers: Annotated[int, Meta(gt=0)]
    sliding_window: Annotated[int, Meta(ge=0)] | None = None
    sliding_window_pattern: Annotated[int, Meta(gt=0)] | None = None
    max_window_layers: int = 28  # of Qwen
    layer_types: tuple[str, ...] | None = None


def windows_config(
    file: Path, family: Family, fields: dict[str, object], num_positions: int
) -> tuple[int | None, tuple[int, ...]]:
    """Return the window and the layers that see everything.

    The window is None if no layer has one that is shorter than the model's length.
    """
    raw = converted(file, fields, _RawWindows)
    windows = family.windows
    window = raw.sliding_window
    has_index = family.latent is not None and family.latent.index is not None
    if family.state is not None or family.has_chunks or has_index:
        return None, ()
    if (
        windows is not None
        and windows.switch
        and not says(file, fields, windows.switch)
    ):
        window = None
    has_own_rope = windows is not None and windows.has_own_rope
    kinds = set(raw.layer_types or ())
    if kinds and (
        kinds - LAYER_TYPES or len(raw.layer_types or ()) != raw.num_hidden_layers
    ):
        raise ConfigError(
            f"{file}: layer_types must name one of {', '.join(sorted(LAYER_TYPES))} for each of "
            f"{raw.num_hidden_layers} layers"
        )
    if window is None and ("sliding_attention" in kinds or has_own_rope):
        raise ConfigError(
            f"{file}: layer_types: sliding_attention needs a sliding_window"
        )
    if window == 0:
        raise ConfigError(f"{file}: sliding_window must be at least 1")
    if window is None or (window >= num_positions and not has_own_rope):
        return None, ()
    if windows is None:
        raise ConfigError(
            f"{file}: sliding_window is not supported in models of {family.model_type}"
        )
    full = _full_layers(windows, raw)
    if family.has_kinds:  # transformers lets the last layer see everything in any case
        full = tuple(sorted({*full, raw.num_hidden_layers - 1}))
    if raw.layer_types and full and not windows.reads_layer_types:
        raise ConfigError(
            f"{file}: layer_types: {family.model_type} has the window in all layers"
        )
    return (None, ()) if len(full) == raw.num_hidden_layers else (window, full)


def _full_layers(windows: Windows, raw: _RawWindows) -> tuple[int, ...]:
    """Return the layers without a window."""
    layers = range(raw.num_hidden_layers)
    if raw.layer_types:
        return tuple(
            layer for layer in layers if raw.layer_types[layer] == "full_attention"
        )
    match windows.layers:
        case "all":
            return ()
        case "upper":
            return tuple(layers[: max(0, raw.max_window_layers)])
        case "alternate":
            return tuple(
                layer for layer in layers if layer % 2 or layer >= raw.max_window_layers
            )
        case "pattern":
            period = windows.period
            if windows.reads_period and raw.sliding_window_pattern is not None:
                period = raw.sliding_window_pattern
            return tuple(layers[period - 1 :: period])


def says(file: Path, fields: dict[str, object], name: str) -> bool:
    """Return what a field says that a family names; `ALWAYS` and "" need no field."""
    value = name == ALWAYS if name in (ALWAYS, "") else fields.get(name)
    if not isinstance(value, bool | None):
        raise ConfigError(f"{file}: {name} must be true or false, not {value!r}")
    return bool(value)
