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
    shared: str = "shared_expert"
    shared_gate: str = "shared_expert_gate"  # "": the shared expert has no weight of its own
    router: str = "gate"
    router_bias: str = "gate.e_score_correction_bias"
    # All experts of a layer are in one tensor, [inputs, outputs] each, with gates and ups in turns,
    # and they and the router have biases.
    are_turned: bool = False


class GroupedRouting(msgspec.Struct, frozen=True):
    """DeepSeek's choice: among the experts of the `topk_group` best of `n_group` groups."""

    is_sigmoid: bool  # scores are sigmoids, and a bias changes the choice alone
    n_group: int
    topk_group: int
    routed_scaling_factor: float  # of the weights of all experts


class ExpertsConfig(msgspec.Struct, frozen=True):
    """A mixture of experts, in all layers but `mlp_only_layers`."""

    names: ExpertNames
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int  # of one expert
    norm_topk_prob: bool  # the weights of a token's experts are scaled to a sum of 1
    mlp_only_layers: tuple[int, ...] = ()
    shared_expert_intermediate_size: int = 0  # of an expert that each token takes; 0: there is none
    routing: GroupedRouting | None = None  # None: softmax over all experts


class ExpertFamily(msgspec.Struct, frozen=True):
    """A family's names, and what transformers takes for a field that config.json leaves out.

    Without `moe_intermediate_size`, experts are in every layer, as wide as `intermediate_size`.
    """

    names: ExpertNames
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    routing: GroupedRouting | None = None


_QWEN = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")
EXPERT_FAMILIES = {
    "qwen2_moe": ExpertFamily(_QWEN, 60, 4, 1408, 5632),
    "qwen3_moe": ExpertFamily(_QWEN, 128, 8, 768),
    "gpt_oss": ExpertFamily(
        ExpertNames("mlp", "", "", "", router="router", are_turned=True), 128, 4
    ),
    "mixtral": ExpertFamily(ExpertNames("block_sparse_moe", "w1", "w3", "w2"), 8, 2),
    "minimax_m2": ExpertFamily(
        ExpertNames("block_sparse_moe", "w1", "w3", "w2", router_bias="e_score_correction_bias"),
        256, 8, routing=GroupedRouting(True, 1, 1, 1.0),
    ),
}  # fmt: skip
_DEEPSEEK = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj", "shared_experts", "")
# Whether scores are sigmoids.
GROUPED_FAMILIES = {
    "deepseek_v2": False, "deepseek_v3": True, "glm4_moe_lite": True, "glm4_moe": True,
}  # fmt: skip
ALL_BUT_THE_FIRST = ("glm4_moe_lite",)  # have experts, unless `mlp_layer_types` says otherwise
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
    scoring_func: str | None = None
    shared_intermediate_size: int = 0


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
    if of.routing is not None and (
        raw.scoring_func not in (None, "sigmoid") or raw.shared_intermediate_size
    ):
        raise ConfigError(f"{file}: scoring_func must be sigmoid, and shared_intermediate_size 0")
    if not of.moe_intermediate_size:
        return ExpertsConfig(
            of.names, num_experts, per_tok, raw.intermediate_size, True, routing=of.routing
        )
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


class RawGrouped(msgspec.Struct):
    """The fields of DeepSeek's config.json that describe experts. Folders write all sizes."""

    num_hidden_layers: _Positive
    n_routed_experts: _Positive
    n_shared_experts: _Positive
    num_experts_per_tok: _Positive
    moe_intermediate_size: _Positive
    routed_scaling_factor: float
    norm_topk_prob: bool
    first_k_dense_replace: Annotated[int, Meta(ge=0)] | None = None
    mlp_layer_types: tuple[str, ...] | None = None
    n_group: _Positive | None = None
    topk_group: _Positive | None = None
    topk_method: str | None = None
    scoring_func: str | None = None
    moe_layer_freq: int = 1
    num_experts: int | None = None
    num_local_experts: int | None = None


def grouped_experts(file: Path, family: str, raw: RawGrouped) -> ExpertsConfig:
    """Return the experts of one of `GROUPED_FAMILIES`. Raises `ConfigError`."""
    is_sigmoid, num_experts = GROUPED_FAMILIES[family], raw.n_routed_experts
    methods = ("noaux_tc",) if is_sigmoid else ("greedy", "group_limited_greedy")
    method = raw.topk_method or methods[0]
    n_group, topk_group = raw.n_group or 1, raw.topk_group or 1
    if method == "greedy":
        n_group = topk_group = 1
    scoring = raw.scoring_func or ("sigmoid" if is_sigmoid else "softmax")
    others = {raw.num_experts, raw.num_local_experts} - {None, num_experts}
    for is_refused, text in (
        (method not in methods, f"topk_method {method!r} is not supported, only {methods}"),
        (method != "greedy" and not raw.n_group, "n_group is missing"),
        (method != "greedy" and not raw.topk_group, "topk_group is missing"),
        ((scoring == "sigmoid") != is_sigmoid, f"scoring_func {scoring!r} is not supported"),
        (
            not is_sigmoid and raw.norm_topk_prob,
            "norm_topk_prob is true, which DeepSeek's code and transformers' read differently",
        ),
        (raw.moe_layer_freq != 1, "moe_layer_freq other than 1 is not supported"),
        (bool(others), f"n_routed_experts is {num_experts}, but another field says {others}"),
        (num_experts % n_group != 0, f"n_group, {n_group}, must divide n_routed_experts"),
        (is_sigmoid and num_experts < 2 * n_group, "a group must have at least two experts"),
        (topk_group > n_group, f"topk_group must be at most n_group, {n_group}"),
        (
            raw.num_experts_per_tok > num_experts // n_group * topk_group,
            "num_experts_per_tok is more than the experts of topk_group groups",
        ),
    ):
        if is_refused:
            raise ConfigError(f"{file}: {text}")
    return ExpertsConfig(
        names=_DEEPSEEK,
        num_experts=num_experts,
        num_experts_per_tok=raw.num_experts_per_tok,
        moe_intermediate_size=raw.moe_intermediate_size,
        norm_topk_prob=raw.norm_topk_prob,
        mlp_only_layers=_dense_layers(file, family, raw),
        shared_expert_intermediate_size=raw.n_shared_experts * raw.moe_intermediate_size,
        routing=GroupedRouting(is_sigmoid, n_group, topk_group, raw.routed_scaling_factor),
    )


def _dense_layers(file: Path, family: str, raw: RawGrouped) -> tuple[int, ...]:
    """Return the layers without experts, which two fields may name."""
    layers = range(raw.num_hidden_layers)
    found = (
        [] if raw.first_k_dense_replace is None else [tuple(layers[: raw.first_k_dense_replace])]
    )
    if kinds := raw.mlp_layer_types:
        if len(kinds) != len(layers) or set(kinds) - {"dense", "sparse"}:
            raise ConfigError(f"{file}: mlp_layer_types must be dense or sparse for each layer")
        found.append(tuple(layer for layer in layers if kinds[layer] == "dense"))
    elif family in ALL_BUT_THE_FIRST:
        found.append((0,))
    if len(set(found)) != 1:
        what = "differ" if found else "are missing: name one"
        raise ConfigError(f"{file}: first_k_dense_replace and mlp_layer_types {what}")
    return found[0]
