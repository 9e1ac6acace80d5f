"""Latent attention, mixtures of experts and kinds of layers in the own decoder.

`test_families` has what all families share.
"""

import json
import math
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.model.config.decoder_config import read_decoder_config
from baton.model.runner.kv_cache import kv_layout
from baton.model.runner.rank_plan import plan_rank
from baton.model.tensor_parallel import SharedMemoryRanks
from baton.protocol.config import CacheConfig, ClusterConfig
from baton.protocol.errors import ConfigError
from baton.runtime.fields import with_values
from tests.support.compute import Text, compute_config, loaded, logits
from tests.support.foreign_checkpoints import (
    DEEPSEEK_YARN,
    LENGTH,
    assert_close,
    changed,
    foreign_folder,
    reference,
    whole,
)
from tests.support.oracle import prompt
from tests.support.quantized import experts_in_mxfp4
from tests.support.thread_ranks import on_all, thread_ranks


def test_a_token_stores_one_row_a_layer_and_other_layouts_never_pair():
    config = compute_config(foreign_folder("deepseek_v3"))
    own = plan_rank(config, 1).layout
    assert [(one.kind, one.planes, one.width) for one in own.groups] == [
        ("latent", 1, 40)
    ]
    assert own.block_bytes == 16 * 3 * 40 * 4
    theirs = plan_rank(
        with_values(config, {"model.model_impl": "transformers"}), 1
    ).layout
    assert own.fingerprint != theirs.fingerprint
    # transformers' code stores a key and a value, as long as a key, for each head.
    assert theirs.block_bytes == 16 * 3 * (4 * 2 * 24) * 4


# What the folders on the hub say that bears on a pool: V3's, V2-Lite's and Kimi-K2's.
COMMON: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "vocab_size": 129280,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "max_position_embeddings": 163840,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
    "attention_bias": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "rope_theta": 1e4,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
}
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "rope_scaling": COMMON["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
}
V32: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
}
KIMI: dict[str, Any] = {
    "model_type": "kimi_k2",
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "rope_theta": 5e4,
    "num_nextn_predict_layers": 0,
}


@pytest.mark.parametrize(
    ("fields", "token_bytes", "scale"),
    [
        ({}, 61 * 576 * 2, 192**-0.5 * (0.1 * math.log(40) + 1) ** 2),
        (V2_LITE, 27 * 576 * 2, 192**-0.5 * (0.0707 * math.log(40) + 1) ** 2),
        (V32, 61 * (576 + 128) * 2, 192**-0.5 * (0.1 * math.log(40) + 1) ** 2),
        (KIMI, 61 * 576 * 2, 192**-0.5 * (0.1 * math.log(40) + 1) ** 2),
    ],
)
def test_published_folders_are_read(fields, token_bytes, scale, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(COMMON | fields))
    config = read_decoder_config(tmp_path)
    layout = kv_layout(config, CacheConfig(block_size=16), 1, torch.bfloat16)
    assert layout.block_bytes == 16 * token_bytes
    assert config.attention_scale == pytest.approx(scale)
    assert (config.rope.attention_factor, config.rotary_dim) == (1.0, 64)
    assert config.max_position_embeddings == 163840


def test_a_folder_of_kimi_is_one_of_deepseek(tmp_path):
    folder = changed(tmp_path, "deepseek_v3", model_type="kimi_k2")
    assert torch.equal(whole(folder), whole(foreign_folder("deepseek_v3")))


def test_layers_that_only_guess_tokens_are_left_out(tmp_path):
    folder = changed(tmp_path, "deepseek_v3", num_nextn_predict_layers=1)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    expected = whole(folder)
    save_file({**tensors, "model.layers.3.eh_proj.weight": torch.zeros(4, 8)}, file)
    assert torch.equal(whole(folder), expected)
    save_file({**tensors, "model.layers.4.eh_proj.weight": torch.zeros(4, 8)}, file)
    with pytest.raises(ConfigError, match=r"model\.layers\.4\.eh_proj"):
        whole(folder)


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("deepseek_v3", {"attention_bias": True}, "attention_bias"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads must be"),
        (
            "deepseek_v3",
            {"scoring_func": "softmax"},
            "scoring_func 'softmax'",
        ),
        (
            "deepseek_v2",
            {"scoring_func": "sigmoid"},
            "scoring_func 'sigmoid'",
        ),
        (
            "deepseek_v3",
            {"topk_method": "greedy"},
            "topk_method 'greedy'",
        ),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is true"),
        ("deepseek_v3", {"n_group": 3}, "must divide n_routed_experts"),
        ("deepseek_v3", {"n_group": None}, "n_group is missing"),
        ("deepseek_v3", {"n_group": 8}, "two experts"),
        ("deepseek_v3", {"topk_group": 3}, "topk_group"),
        (
            "deepseek_v3",
            {"num_experts_per_tok": 5},
            "topk_group",
        ),
        ("deepseek_v3", {"num_local_experts": 9}, "n_routed_experts"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek_v3", {"sliding_window": 24}, "sliding_window"),
        ("deepseek_v3", {"kv_lora_rank": 24}, r"implies \[32, 64\]"),
        ("deepseek_v3", {"qk_rope_head_dim": 16}, "config.json implies"),
        ("deepseek_v3", {"v_head_dim": 8}, r"kv_b_proj\.weight"),
        (
            "deepseek_v3",
            {"n_shared_experts": 2},
            "shared_experts",
        ),
        ("deepseek_v3", {"first_k_dense_replace": 2}, r"mlp\.gate_proj"),
        ("deepseek_v3", {"first_k_dense_replace": None}, "first_k_dense_replace"),
        ("glm4_moe_lite", {"first_k_dense_replace": 2}, "mlp_layer_types differ"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func"),
        (
            "glm4_moe_lite",
            {"mlp_layer_types": ["dense"]},
            "mlp_layer_types",
        ),
        (
            "deepseek_v3",
            {"rope_parameters": DEEPSEEK_YARN | {"rope_type": "linear"}},
            "mscale_all_dim",
        ),
        (
            "deepseek_v3",
            {
                "rope_parameters": DEEPSEEK_YARN
                | {
                    "rope_type": "llama3",
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                }
            },
            "mscale_all_dim",
        ),
        (
            "gemma2",
            {"hidden_activation": "silu"},
            "hidden_activation 'silu'",
        ),
        (
            "gemma2",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention",
        ),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping"),
        (
            "gemma3_text",
            {"attn_logit_softcapping": 5},
            "attn_logit_softcapping",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"rope_type": "default"}},
            "rope_parameters",
        ),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types must name"),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit"),
        ("gemma3_text", {"sliding_window": None}, "needs a sliding_window"),
        ("qwen3_moe", {"num_experts": 9}, "num_experts and num_local_experts differ"),
        (
            "qwen3_moe",
            {"num_experts_per_tok": 9},
            "num_experts_per_tok",
        ),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        (
            "qwen3_moe",
            {"num_local_experts": 9},
            r"mlp\.gate\.weight",
        ),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}, "has no tensor"),
        (
            "qwen3_moe",
            {"use_sliding_window": True, "sliding_window": 0},
            "sliding_window",
        ),
        ("qwen3_moe", {"moe_intermediate_size": 64}, r"implies \[64, 64\]"),
        (
            "qwen3_moe",
            {"mlp_only_layers": [2]},
            r"model\.layers\.2\.mlp\.gate_proj",
        ),
    ],
)
def test_a_folder_that_means_something_else_is_refused(kind, fields, reason, tmp_path):
    folder = changed(tmp_path, kind, **fields)
    with pytest.raises(ConfigError, match=reason), loaded(compute_config(folder)):
        pass


def test_a_bias_that_is_not_finite_and_adapters_are_refused(tmp_path):
    folder = changed(tmp_path, "deepseek_v3")
    with pytest.raises(
        ConfigError, match="latent attention is computed without adapters"
    ):
        plan_rank(compute_config(folder, lora_modules=(f"mine={tmp_path}",)), 1)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.gate.e_score_correction_bias"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="e_score_correction_bias"):
        whole(folder)


LINEAR = {"rope_type": "linear", "factor": 8.0}
OLD_FIELDS = {"rope_theta": 5e4, "rope_local_base_freq": 2e3, "rope_scaling": LINEAR}


def first_logits(
    config: ClusterConfig, rank: SharedMemoryRanks | None = None
) -> Tensor:
    with loaded(config, rank) as runner:
        return logits(runner, Text("a", prompt(LENGTH), range(10)).chunk(0, 100))[0]


def test_a_folder_with_the_old_fields_of_gemma3_is_read(tmp_path):
    absent = ("rope_parameters", "layer_types")
    folder = changed(
        tmp_path, "gemma3_text", absent, sliding_window_pattern=3, **OLD_FIELDS
    )
    assert_close(whole(folder), reference(folder))


def test_experts_in_mxfp4_have_the_bits_of_their_numbers(tmp_path):
    packed, plain = experts_in_mxfp4(tmp_path)
    stored = load_file(packed / "model.safetensors")
    expected = whole(plain)
    assert torch.equal(whole(packed), expected)
    config = compute_config(packed)
    with thread_ranks(2) as members:
        for share in on_all(members, lambda rank: first_logits(config, rank)):
            assert_close(share, expected[:100])
    name = "model.layers.1.mlp.experts.down_proj_blocks"
    save_file(
        {**stored, name: stored[name][..., 1:].contiguous()},
        packed / "model.safetensors",
    )
    with pytest.raises(ConfigError, match="_blocks"), loaded(config):
        pass


def test_fields_that_config_leaves_out_have_transformers_values(tmp_path):
    absent = (
        "rms_norm_eps",
        "rope_parameters",
        "num_experts_per_tok",
        "num_local_experts",
        "head_dim",
        "sliding_window",
        "hidden_act",
    )
    folder = changed(tmp_path, "mixtral", absent)
    assert_close(whole(folder), reference(folder))


def test_ranks_that_cannot_share_an_expert_are_refused():
    folder = foreign_folder("qwen3_moe", moe_intermediate_size=33)
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel_size"):
        plan_rank(compute_config(folder), 2)


@pytest.mark.parametrize("fields", [{}, {"max_window_layers": 1}])
def test_windows_in_turns_equal_those_of_transformers(fields, tmp_path):
    folder = changed(
        tmp_path,
        "qwen2_moe",
        ("layer_types",),
        use_sliding_window=True,
        sliding_window=24,
        **fields,
    )
    assert_close(whole(folder), reference(folder))
