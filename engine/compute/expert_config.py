"""The mixture of experts that config.json describes: how many, how chosen, in which layers.

A family is a row in each table here. This module never imports torch.
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


EXPERT_NAMES = {
    "qwen3_moe": ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
}
# What transformers takes where config.json does not say: experts, and experts of a token.
NUM_EXPERTS = {"qwen3_moe": (128, 8), "mixtral": (8, 2)}
_Positive = Annotated[int, Meta(gt=0)]


class RawExperts(msgspec.Struct):
    """The fields of config.json that describe experts."""

    num_hidden_layers: _Positive
    intermediate_size: _Positive
    num_experts: _Positive | None = None
    num_local_experts: _Positive | None = None
    num_experts_per_tok: _Positive | None = None
    moe_intermediate_size: _Positive = 768
    norm_topk_prob: bool = False
    mlp_only_layers: tuple[int, ...] | None = None
    decoder_sparse_step: _Positive = 1


def experts_config(file: Path, family: str, raw: RawExperts) -> ExpertsConfig:
    """Return the experts of a family in `EXPERT_NAMES`. Raises `ConfigError`."""
    if raw.num_experts and raw.num_local_experts not in (None, raw.num_experts):
        raise ConfigError(f"{file}: num_experts and num_local_experts differ: name one of them")
    default, default_per_tok = NUM_EXPERTS[family]
    num_experts = raw.num_experts or raw.num_local_experts or default
    per_tok = raw.num_experts_per_tok or default_per_tok
    if per_tok > num_experts:
        raise ConfigError(
            f"{file}: num_experts_per_tok must be at most the {num_experts} experts, not {per_tok}"
        )
    names = EXPERT_NAMES[family]
    if family == "mixtral":
        return ExpertsConfig(names, num_experts, per_tok, raw.intermediate_size, True)
    dense = tuple(
        layer
        for layer in range(raw.num_hidden_layers)
        if layer in (raw.mlp_only_layers or ()) or (layer + 1) % raw.decoder_sparse_step
    )
    width, is_normed = raw.moe_intermediate_size, raw.norm_topk_prob
    return ExpertsConfig(names, num_experts, per_tok, width, is_normed, dense)
