"""The mixture of experts that config.json describes: how many, how chosen, in which layers.

A family is a row of `EXPERT_FAMILIES`. This module never imports torch.
"""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from baton.protocol.errors import ConfigError


class ExpertNames(msgspec.Struct, frozen=True):
    """What the tensors of the experts and their router are called within a layer."""

    block: str
    gate: str
    up: str
    down: str


class ExpertsConfig(msgspec.Struct, frozen=True):
    """A mixture of experts with a softmax router, in all layers but `mlp_only_layers`."""

    names: ExpertNames
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int  # of one expert
    norm_topk_prob: bool  # the weights of a token's experts are scaled to a sum of 1
    mlp_only_layers: tuple[int, ...] = ()
    shared_expert_intermediate_size: int = 0  # of an expert that each token takes; 0: there is none


class ExpertFamily(msgspec.Struct, frozen=True):
    """A family's names, and what transformers takes for a field that config.json leaves out.

    Without `moe_intermediate_size`, experts are in every layer, as wide as `intermediate_size`.
    """

    names: ExpertNames
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0


_QWEN = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")
EXPERT_FAMILIES = {
    "qwen2_moe": ExpertFamily(_QWEN, 60, 4, 1408, 5632),
    "qwen3_moe": ExpertFamily(_QWEN, 128, 8, 768),
    "mixtral": ExpertFamily(ExpertNames("block_sparse_moe", "w1", "w3", "w2"), 8, 2),
}
_Positive = Annotated[int, Meta(gt=0)]


class RawExperts(msgspec.Struct):
    """The fields of config.json that describe experts."""

    num_hidden_layers: _Positive
    intermediate_size: _Positive
    num_experts: _Positive | None = None
    num_local_experts: _Positive | None = None
    num_experts_per_tok: _Positive | None = None
    moe_intermediate_size: _Positive | None = None
    shared_expert_intermediate_size: _Positive | None = None
    norm_topk_prob: bool = False
    mlp_only_layers: tuple[int, ...] | None = None
    decoder_sparse_step: _Positive = 1


def experts_config(file: Path, family: str, raw: RawExperts) -> ExpertsConfig:
    """Return the experts of one of `EXPERT_FAMILIES`. Raises `ConfigError`."""
    of = EXPERT_FAMILIES[family]
    if raw.num_experts and raw.num_local_experts not in (None, raw.num_experts):
        raise ConfigError(f"{file}: num_experts and num_local_experts differ: name one of them")
    num_experts = raw.num_experts or raw.num_local_experts or of.num_experts
    per_tok = raw.num_experts_per_tok or of.num_experts_per_tok
    if per_tok > num_experts:
        raise ConfigError(
            f"{file}: num_experts_per_tok must be at most the {num_experts} experts, not {per_tok}"
        )
    if not of.moe_intermediate_size:
        return ExpertsConfig(of.names, num_experts, per_tok, raw.intermediate_size, True)
    dense = (
        layer
        for layer in range(raw.num_hidden_layers)
        if layer in (raw.mlp_only_layers or ()) or (layer + 1) % raw.decoder_sparse_step
    )
    shared = raw.shared_expert_intermediate_size or of.shared_expert_intermediate_size
    return ExpertsConfig(
        names=of.names,
        num_experts=num_experts,
        num_experts_per_tok=per_tok,
        moe_intermediate_size=raw.moe_intermediate_size or of.moe_intermediate_size,
        norm_topk_prob=raw.norm_topk_prob,
        mlp_only_layers=tuple(dense),
        shared_expert_intermediate_size=shared if of.shared_expert_intermediate_size else 0,
    )
