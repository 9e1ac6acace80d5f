"""The mixture of experts that config.json describes: how many, how chosen, in which layers.

A family's row says how they are chosen and named. This module never imports torch.
"""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from baton.model.config.reading import converted
from baton.model.families.family import Experts
from baton.protocol.errors import ConfigError


class GroupedRouting(msgspec.Struct, frozen=True):
    """DeepSeek's choice: among the experts of the `topk_group` best of `n_group` groups."""

    is_sigmoid: bool  # scores are sigmoids, and a bias changes the choice alone
    n_group: int
    topk_group: int
    routed_scaling_factor: float  # of the weights of all experts
    least_sum: float = 1e-20  # added to the sum by which weights are divided


class ExpertsConfig(msgspec.Struct, frozen=True):
    """A mixture of experts, in all layers but `mlp_only_layers`."""

    names: Experts
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int  # of one expert
    norm_topk_prob: bool  # the weights of a token's experts are scaled to a sum of 1
    mlp_only_layers: tuple[int, ...] = ()
    # Of an expert that each token takes; 0: there is none.
    shared_expert_intermediate_size: int = 0
    # Of what experts take and give; None: the hidden size.
    latent_size: int | None = None
    routing: GroupedRouting | None = None  # None: softmax over all experts


_Positive = Annotated[int, Meta(gt=0)]


class RawExperts(msgspec.Struct):
    """The fields of config.json that describe experts."""

    num_hidden_layers: _Positive
    intermediate_size: _Positive
    moe_layers: tuple[int, ...] | None = None  # of Llama 4, as the next field
    interleave_moe_layer_step: _Positive = 1
    num_experts: _Positive | None = None
    num_local_experts: _Positive | None = None
    num_experts_per_tok: _Positive | None = None
    moe_intermediate_size: _Positive | None = None
    shared_expert_intermediate_size: _Positive | None = None
    norm_topk_prob: bool = False
    mlp_only_layers: tuple[int, ...] | None = None
    decoder_sparse_step: _Positive = 1
    num_dense_layers: Annotated[int, Meta(ge=0)] = 0  # of LFM2, as the next two fields
    use_expert_bias: bool = True
    routed_scaling_factor: float = 1.0
    scoring_func: str | None = None
    shared_intermediate_size: int = 0


def experts_config(
    file: Path, names: Experts | None, fields: dict[str, object]
) -> ExpertsConfig | None:
    """Return the experts of a family whose row is `names`, if any. Raises `ConfigError`."""
    if names is None or (names.adds_mlp and fields.get("num_local_experts") == 0):
        return None
    if names.switch and not fields.get(names.switch):
        return None
    if names.routing in ("grouped_softmax", "grouped_sigmoid"):
        return _grouped_experts(file, names, converted(file, fields, RawGrouped))
    return _plain_experts(file, names, converted(file, fields, RawExperts))


def _plain_experts(file: Path, names: Experts, raw: RawExperts) -> ExpertsConfig:
    """Return experts that are chosen among all."""
    if raw.num_experts and raw.num_local_experts not in (None, raw.num_experts):
        raise ConfigError(
            f"{file}: num_experts and num_local_experts differ: name one of them"
        )
    num_experts = raw.num_experts or raw.num_local_experts
    per_tok = raw.num_experts_per_tok
    width = raw.moe_intermediate_size
    if names.fills_layers or names.routing == "input_sigmoid":
        width = raw.intermediate_size
    if num_experts is None or per_tok is None or width is None:
        raise ConfigError(
            f"{file}: num_experts, moe_intermediate_size or the number of experts of a token is "
            "missing"
        )
    if per_tok > num_experts:
        raise ConfigError(
            f"{file}: num_experts_per_tok must be at most the {num_experts} experts, not {per_tok}"
        )
    if names.fills_layers:
        shared = raw.shared_intermediate_size if names.adds_mlp else 0
    elif names.routing == "input_sigmoid":
        shared = width
    else:
        shared = raw.shared_expert_intermediate_size or 0 if names.shared else 0
    return ExpertsConfig(
        names=names,
        num_experts=num_experts,
        num_experts_per_tok=per_tok,
        moe_intermediate_size=width,
        norm_topk_prob=names.fills_layers or raw.norm_topk_prob,
        mlp_only_layers=_plain_dense_layers(names, raw),
        shared_expert_intermediate_size=shared,
        routing=_sigmoid_routing(file, names, raw),
    )


def _plain_dense_layers(names: Experts, raw: RawExperts) -> tuple[int, ...]:
    """Return the layers without experts."""
    layers = range(raw.num_hidden_layers)
    if names.fills_layers:
        return ()
    if names.routing == "input_sigmoid":
        step = raw.interleave_moe_layer_step
        sparse = layers[step - 1 :: step] if raw.moe_layers is None else raw.moe_layers
        return tuple(layer for layer in layers if layer not in sparse)
    return tuple(
        layer
        for layer in layers
        if layer in (raw.mlp_only_layers or ())
        or (layer + 1) % raw.decoder_sparse_step
        or layer < raw.num_dense_layers
    )


def _sigmoid_routing(
    file: Path, names: Experts, raw: RawExperts
) -> GroupedRouting | None:
    """Return the choice by sigmoids among all experts; None where it is another one."""
    if names.routing != "sigmoid":
        return None
    if raw.scoring_func not in (None, "sigmoid") or raw.shared_intermediate_size:
        raise ConfigError(
            f"{file}: scoring_func must be sigmoid, and shared_intermediate_size 0"
        )
    if not raw.use_expert_bias:
        raise ConfigError(f"{file}: use_expert_bias is false, which is not supported")
    scale = 1.0 if names.fills_layers else raw.routed_scaling_factor
    return GroupedRouting(True, 1, 1, scale, names.least_sum)


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
    # Of Nemotron, as the next field.
    moe_shared_expert_intermediate_size: _Positive | None = None
    moe_latent_size: _Positive | None = None


def _grouped_experts(file: Path, names: Experts, raw: RawGrouped) -> ExpertsConfig:
    """Return experts that are chosen as DeepSeek does."""
    is_sigmoid = names.routing == "grouped_sigmoid"
    num_experts = raw.n_routed_experts
    methods = ("noaux_tc",) if is_sigmoid else ("greedy", "group_limited_greedy")
    method = raw.topk_method or methods[0]
    n_group = raw.n_group or 1
    topk_group = raw.topk_group or 1
    if method == "greedy":
        n_group = topk_group = 1
    scoring = raw.scoring_func or ("sigmoid" if is_sigmoid else "softmax")
    others = {raw.num_experts, raw.num_local_experts} - {None, num_experts}
    for is_refused, text in (
        (
            method not in methods,
            f"topk_method {method!r} is not supported, only {methods}",
        ),
        (method != "greedy" and not raw.n_group, "n_group is missing"),
        (method != "greedy" and not raw.topk_group, "topk_group is missing"),
        (
            (scoring == "sigmoid") != is_sigmoid,
            f"scoring_func {scoring!r} is not supported",
        ),
        (
            not is_sigmoid and raw.norm_topk_prob,
            "norm_topk_prob is true, which DeepSeek's code and transformers' read differently",
        ),
        (
            raw.moe_shared_expert_intermediate_size is not None
            and raw.n_shared_experts != 1,
            "n_shared_experts must be 1",
        ),
        (raw.moe_layer_freq != 1, "moe_layer_freq other than 1 is not supported"),
        (
            bool(others),
            f"n_routed_experts is {num_experts}, but another field says {others}",
        ),
        (
            num_experts % n_group != 0,
            f"n_group, {n_group}, must divide n_routed_experts",
        ),
        (
            is_sigmoid and num_experts < 2 * n_group,
            "a group must have at least two experts",
        ),
        (topk_group > n_group, f"topk_group must be at most n_group, {n_group}"),
        (
            raw.num_experts_per_tok > num_experts // n_group * topk_group,
            "num_experts_per_tok is more than the experts of topk_group groups",
        ),
    ):
        if is_refused:
            raise ConfigError(f"{file}: {text}")
    return ExpertsConfig(
        names=names,
        num_experts=num_experts,
        num_experts_per_tok=raw.num_experts_per_tok,
        moe_intermediate_size=raw.moe_intermediate_size,
        norm_topk_prob=raw.norm_topk_prob,
        mlp_only_layers=_dense_layers(file, names, raw),
        shared_expert_intermediate_size=raw.n_shared_experts
        * (raw.moe_shared_expert_intermediate_size or raw.moe_intermediate_size),
        latent_size=raw.moe_latent_size,
        routing=GroupedRouting(
            is_sigmoid, n_group, topk_group, raw.routed_scaling_factor
        ),
    )


def _dense_layers(file: Path, names: Experts, raw: RawGrouped) -> tuple[int, ...]:
    """Return the layers without experts, which two fields may name."""
    layers = range(raw.num_hidden_layers)
    found = (
        []
        if raw.first_k_dense_replace is None
        else [tuple(layers[: raw.first_k_dense_replace])]
    )
    if kinds := raw.mlp_layer_types:
        if len(kinds) != len(layers) or set(kinds) - {"dense", "sparse"}:
            raise ConfigError(
                f"{file}: mlp_layer_types must be dense or sparse for each layer"
            )
        found.append(tuple(layer for layer in layers if kinds[layer] == "dense"))
    elif names.skips_first_layer:
        found.append((0,))
    if len(set(found)) != 1:
        what = "differ" if found else "are missing: name one"
        raise ConfigError(f"{file}: first_k_dense_replace and mlp_layer_types {what}")
    return found[0]
