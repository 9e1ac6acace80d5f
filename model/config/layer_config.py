"""What layers of a family have that those of Llama lack: other gates and norms, caps of scores.

A family is a row of `LAYER_FAMILIES`. This module never imports torch.
"""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from baton.kernels.constants import CLAMPED, GELU_TANH, SILU, Gate
from baton.protocol.errors import ConfigError

_Positive = Annotated[float, Meta(gt=0)]


class LayerFamily(msgspec.Struct, frozen=True):
    """A family's parts, and what transformers takes for a field that config.json leaves out."""

    gate: Gate = GELU_TANH
    norm_offset: float = 0.0  # added to the weights of all norms
    has_output_norms: bool = False  # of attention and of the MLP, before they are added
    scales_embeddings: bool = False  # by the root of the hidden size
    query_pre_attn_scalar: float | None = None  # None: the length of a head
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    has_sinks: bool = False  # a score of each head that no key has


LAYER_FAMILIES = {
    "gemma2": LayerFamily(GELU_TANH, 1.0, True, True, 256.0, 50.0, 30.0),
    "gemma3_text": LayerFamily(GELU_TANH, 1.0, True, True, 256.0),
    "gpt_oss": LayerFamily(CLAMPED, has_sinks=True),
}


class LayersConfig(msgspec.Struct, frozen=True):
    """What all layers share. The values by default are those of Llama."""

    gate: Gate = SILU
    norm_offset: float = 0.0
    has_output_norms: bool = False
    embedding_scale: float | None = None
    scale: float | None = None  # of queries times keys; None: that of the length of a head
    score_cap: float | None = None
    logit_cap: float | None = None
    has_sinks: bool = False


class RawLayers(msgspec.Struct):
    """The fields of config.json that describe such layers."""

    hidden_size: int
    hidden_activation: str = "gelu_pytorch_tanh"
    query_pre_attn_scalar: _Positive | None = None
    attn_logit_softcapping: _Positive | UnsetType | None = UNSET
    final_logit_softcapping: _Positive | UnsetType | None = UNSET
    use_bidirectional_attention: bool | None = None
    swiglu_alpha: _Positive = CLAMPED.slope
    swiglu_limit: _Positive = CLAMPED.limit


def layers_config(file: Path, family: str, raw: RawLayers) -> LayersConfig:
    """Return the layers of one of `LAYER_FAMILIES`. Raises `ConfigError`."""
    of = LAYER_FAMILIES[family]
    if raw.hidden_activation != "gelu_pytorch_tanh":
        raise ConfigError(
            f"{file}: hidden_activation {raw.hidden_activation!r} is not supported in models of "
            f"{family}, only 'gelu_pytorch_tanh'"
        )
    if raw.use_bidirectional_attention:
        raise ConfigError(f"{file}: use_bidirectional_attention is not supported")
    if raw.attn_logit_softcapping and of.attn_logit_softcapping is None:
        raise ConfigError(f"{file}: attn_logit_softcapping is not supported in models of {family}")
    score_cap, logit_cap = raw.attn_logit_softcapping, raw.final_logit_softcapping
    gate = of.gate._replace(slope=raw.swiglu_alpha, limit=raw.swiglu_limit)
    scalar = raw.query_pre_attn_scalar or of.query_pre_attn_scalar
    return LayersConfig(
        gate=gate if of.gate is CLAMPED else of.gate,
        norm_offset=of.norm_offset,
        has_output_norms=of.has_output_norms,
        embedding_scale=raw.hidden_size**0.5 if of.scales_embeddings else None,
        scale=None if scalar is None else scalar**-0.5,
        score_cap=of.attn_logit_softcapping if score_cap is UNSET else score_cap,
        has_sinks=of.has_sinks,
        logit_cap=of.final_logit_softcapping if logit_cap is UNSET else logit_cap,
    )
