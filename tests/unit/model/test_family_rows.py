"""The rows of families: what folders leave out is what transformers' own classes take."""

import json

import pytest
from transformers import AutoConfig

from baton.model.config.decoder_config import DecoderConfig, read_decoder_config
from baton.model.families.family import ALWAYS, NEVER, Family
from baton.model.families.table import FAMILIES

# What no folder leaves out. Sizes of latent attention and of DeepSeek's experts belong to these.
NEEDED: dict[str, object] = {
    "vocab_size": 512,
    "hidden_size": 1024,
    "intermediate_size": 128,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "max_position_embeddings": 32768,
}
LATENT: dict[str, object] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 32,
}
GROUPED: dict[str, object] = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}


def needed_by(family: Family) -> dict[str, object]:
    fields = dict(NEEDED)
    if family.latent is not None:
        fields |= LATENT
    if family.experts is not None and family.experts.routing.startswith("grouped"):
        fields |= GROUPED
    if family.has_lone_blocks:
        fields |= {
            "layer_types": [*["linear_attention", "moe"] * 5, "full_attention", "mlp"]
        }
        del fields["first_k_dense_replace"]
        return fields
    if family.experts is not None and family.experts.switch:
        fields |= {family.experts.switch: True, "moe_intermediate_size": 32}
        fields |= {"num_experts": 8, "num_experts_per_tok": 2, "top_k_experts": 2}
    if family.state is not None and family.state.kind != "delta":
        fields["layer_types"] = [*family.state.layer_types[:1] * 11, "full_attention"]
    return fields


def ours(family: Family, folder) -> DecoderConfig:
    whole = {"architectures": [family.architecture], **needed_by(family)}
    (folder / "config.json").write_text(json.dumps(whole))
    return read_decoder_config(folder)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_absent_fields_take_what_transformers_takes(family, tmp_path):
    config = ours(family, tmp_path)
    theirs = AutoConfig.for_model(family.model_type, **needed_by(family))
    theirs.allow_global_per_layer_attribute_access = True
    if family.latent is None:
        assert config.num_kv_heads == theirs.num_key_value_heads
        head_dim = getattr(theirs, "head_dim", None)
        assert config.head_dim == (
            head_dim or theirs.hidden_size // theirs.num_attention_heads
        )
    assert config.rms_norm_eps == getattr(theirs, family.norm_eps)
    assert config.tie_word_embeddings == getattr(theirs, "tie_word_embeddings", False)
    for field, has_bias in (
        (family.qkv_bias, config.qkv_bias),
        (family.output_bias, config.output_bias),
        (family.mlp_bias, config.mlp_bias),
    ):
        assert has_bias == (
            getattr(theirs, field) if field not in ("", ALWAYS) else bool(field)
        )
    if family.rotates == NEVER:
        assert not config.rope.turns
        return
    rope = theirs.rope_parameters
    full = rope.get("full_attention", rope)
    assert config.rope.theta == full["rope_theta"]
    assert config.rope.scaling == full["rope_type"]
    assert config.rope.partial_rotary_factor == full.get("partial_rotary_factor", 1.0)
    if config.local_rope is not None:
        assert config.local_rope.theta == rope["sliding_attention"]["rope_theta"]
    assert windows_of(config) == windows_of_theirs(theirs)


@pytest.mark.parametrize(
    "family",
    [family for family in FAMILIES if family.experts is not None],
    ids=lambda family: family.model_type,
)
def test_absent_sizes_of_experts_are_those_of_transformers(family, tmp_path):
    config = ours(family, tmp_path)
    theirs = AutoConfig.for_model(family.model_type, **needed_by(family))
    experts = config.experts
    assert experts is not None
    assert (
        experts.num_experts == getattr(theirs, "num_local_experts", None)
        or theirs.num_experts
    )
    assert experts.num_experts_per_tok == theirs.num_experts_per_tok
    width = getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
    assert experts.moe_intermediate_size == width
    shared = getattr(theirs, "shared_expert_intermediate_size", None)
    if shared is not None and family.experts.shared:
        assert experts.shared_expert_intermediate_size == shared


def test_rows_have_names_of_their_own():
    for names in (
        [family.architecture for family in FAMILIES],
        [
            name
            for family in FAMILIES
            for name in (family.model_type, *family.other_model_types)
        ],
        [family.title for family in FAMILIES],
    ):
        assert len(names) == len(set(names))


def windows_of(config: DecoderConfig) -> list[int | None]:
    return [config.window_of(layer) for layer in range(config.num_layers)]


def windows_of_theirs(theirs) -> list[int | None]:
    """A window as long as the model counts as none."""
    window = getattr(theirs, "sliding_window", None)
    if window is None or not getattr(theirs, "use_sliding_window", True):
        return [None] * theirs.num_hidden_layers
    kinds = (
        getattr(theirs, "layer_types", None)
        or ["sliding_attention"] * theirs.num_hidden_layers
    )
    return [window if kind == "sliding_attention" else None for kind in kinds]
