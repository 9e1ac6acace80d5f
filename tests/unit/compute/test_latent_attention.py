"""Latent attention in baton's own decoder: right, one row of a token, and bits of no batch."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from baton.engine.compute.decoder import Decoder
from baton.engine.compute.kv_cache import kv_layout
from baton.engine.compute.model_config import read_decoder_config
from baton.engine.compute.rank import is_batch_invariant, plan_rank
from baton.engine.compute.row_rule import MIN_ROWS, num_threads
from baton.engine.compute.tensor_parallel import SharedMemoryRanks
from baton.protocol.config import CacheConfig
from baton.protocol.errors import ConfigError
from baton.runtime.fields import with_values
from tests.support.compute import (
    Text,
    chunked_logits,
    compute_config,
    loaded,
    logits,
    needs_rules,
)
from tests.support.foreign_checkpoints import changed, foreign_folder
from tests.support.oracle import prompt
from tests.support.thread_ranks import on_all, thread_ranks

LENGTH = 150
KINDS = ("deepseek_v3", "deepseek_v2")
# As in the folder of DeepSeek-V3, whose two factors of YaRN cancel out in the angles alone.
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 128,
}  # fmt: skip
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "v3": ("deepseek_v3", {}),
    "v3 whose queries have no latent row": ("deepseek_v3", {"q_lora_rank": None}),
    "v3 with yarn": ("deepseek_v3", {"rope_parameters": YARN}),
    "v3 with other factors": (
        "deepseek_v3", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    ),
    "v3 in halves": ("deepseek_v3", {"rope_interleave": False}),
    "v3 in one group": ("deepseek_v3", {"n_group": 1, "num_experts_per_tok": 5}),
    "v3 in many groups": (
        "deepseek_v3",
        {"n_routed_experts": 32, "n_group": 8, "topk_group": 3, "num_experts_per_tok": 6},
    ),
    "v3 of weights as they are": ("deepseek_v3", {"norm_topk_prob": False}),
    "v3 of two shared experts": ("deepseek_v3", {"n_shared_experts": 2}),
    "v3 with stacked experts": ("deepseek_v3", {"save_original_format": False}),
    "v3 without experts": ("deepseek_v3", {"first_k_dense_replace": 3}),
    "v3 of unequal sizes": (
        "deepseek_v3", {"kv_lora_rank": 40, "qk_nope_head_dim": 12, "v_head_dim": 20},
    ),
    "v2": ("deepseek_v2", {"routed_scaling_factor": 3.0}),
    "v2 lite": (
        "deepseek_v2",
        {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "rope_parameters": YARN},
    ),
    "glm": ("glm4_moe_lite", {"num_hidden_layers": 2}),
    "youtu": ("youtu", {"pad_token_id": None}),  # transformers clears the row of a padding token
    "v2 of one expert in a group": ("deepseek_v2", {"n_group": 8, "topk_group": 3}),
}  # fmt: skip


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.inference_mode():
        out: Tensor = model(torch.tensor([prompt(LENGTH)])).logits[0].float()
    return out


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    worst = (ours - theirs).abs().max() / theirs.abs().max()
    assert worst < 2e-5, f"relative error {worst:.2e}"


def whole(folder: Path, dtype: str = "auto") -> Tensor:
    with loaded(compute_config(folder, dtype)) as runner:
        assert isinstance(runner.decoder, Decoder)
        return logits(runner, Text("a", prompt(LENGTH), range(3, 20)).chunk(0, LENGTH))[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_fp32_logits_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    kind, fields = VARIANTS[variant]
    rope = {name: of for name, of in fields.items() if name == "rope_parameters"}
    folder = foreign_folder(kind, **{k: of for k, of in fields.items() if k not in rope})
    folder = changed(tmp_path, folder, **rope)
    assert_close(whole(folder), reference(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_plain_torch_computes_the_same(kind: str) -> None:
    folder = foreign_folder(kind)
    config = compute_config(folder)
    config = with_values(config, {"engine.kernels": "torch"})
    text = Text("a", prompt(LENGTH), range(3, 20))
    with loaded(config) as runner:
        assert runner.backend.name == "torch"
        assert_close(chunked_logits(runner, text, [64]), reference(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_logits_are_as_near_to_fp32_as_those_of_transformers(kind: str) -> None:
    """Without experts, because a router's near ties differ in bf16."""
    folder = foreign_folder(kind, first_k_dense_replace=3)
    exact = reference(folder)
    allowed = 1.5 * (reference(folder, torch.bfloat16) - exact).abs().mean()
    assert (whole(folder, "bfloat16") - exact).abs().mean() < allowed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_whole_in_chunks_and_in_a_crowd(kind: str, dtype: str) -> None:
    with loaded(compute_config(foreign_folder(kind), dtype)) as runner:
        needs_rules(runner)
        assert is_batch_invariant(runner)
        runner.cache.pool.fill_(float("nan"))
        text = Text("a", prompt(90), range(10))
        crowd = [Text(f"b{n}", prompt(30, n), range(20 + 2 * n, 22 + 2 * n)) for n in range(9)]
        (expected,) = logits(runner, text.chunk(0, 90))
        beside = [one.chunk(0, 29) for one in crowd]
        parts = [
            logits(runner, text.chunk(0, 33))[0],
            logits(runner, *beside, text.chunk(33, 89))[-1],
            logits(runner, text.chunk(89, 90), *(one.chunk(29, 30) for one in crowd))[0],
        ]
        assert torch.equal(torch.cat(parts), expected)
        for start in (1, 88):
            assert torch.equal(logits(runner, text.chunk(start, 90))[0], expected[start:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_number_of_threads_leaves_no_trace(dtype: str) -> None:
    config = compute_config(foreign_folder("deepseek_v3", hidden_size=256), dtype)
    one = Text("one", prompt(2 * MIN_ROWS + 100), range(30))
    with loaded(config) as runner:
        needs_rules(runner)
        expected = chunked_logits(runner, one, [len(one.tokens)])
    with num_threads(2), loaded(config) as runner:
        found = chunked_logits(runner, one, [2 * MIN_ROWS + 3, 1, 9, 87])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_router_gives_rows_of_any_number_the_bits_of_a_row_alone(kind: str, dtype: str) -> None:
    with loaded(compute_config(foreign_folder(kind), dtype)) as runner, torch.inference_mode():
        needs_rules(runner)
        assert isinstance(runner.decoder, Decoder)
        mlp = runner.decoder.layers[1].mlp
        rows = torch.randn(59, 64, generator=torch.Generator().manual_seed(2))
        rows = rows.to(runner.cache.pool.dtype)
        alone = torch.cat([mlp(row[None], runner.backend) for row in rows])
        for count in range(2, 60):
            assert torch.equal(mlp(rows[:count], runner.backend), alone[:count])


@pytest.mark.parametrize("variant", ["v3", "v2", "v3 with stacked experts"])
def test_ranks_together_compute_what_one_computes(variant: str) -> None:
    kind, fields = VARIANTS[variant]
    config = compute_config(foreign_folder(kind, **fields))
    text = Text("a", prompt(100), range(10))

    def compute(rank: SharedMemoryRanks | None) -> Tensor:
        """The logits, and what one block holds after it."""
        with loaded(config, rank) as runner:
            rows = logits(runner, text.chunk(0, 100))[0]
            return torch.cat((rows.flatten(), runner.cache.pool[3].flatten()))

    alone = compute(None)
    with thread_ranks(2) as members:
        shares = on_all(members, compute)
    assert_close(shares[0], alone)
    assert torch.equal(*shares), "each rank holds every row"


def test_a_token_stores_one_row_a_layer_and_other_layouts_never_pair() -> None:
    config = compute_config(foreign_folder("deepseek_v3"))
    own = plan_rank(config, 1).layout
    assert [(one.kind, one.planes, one.width) for one in own.groups] == [("latent", 1, 40)]
    assert own.block_bytes == 16 * 3 * 40 * 4
    theirs = plan_rank(with_values(config, {"model.model_impl": "transformers"}), 1).layout
    assert own.fingerprint != theirs.fingerprint
    # transformers' code stores a key and a value, as long as a key, for each head.
    assert theirs.block_bytes == 16 * 3 * (4 * 2 * 24) * 4


# What the folders on the hub say that bears on a pool: V3's, V2-Lite's and Kimi-K2's.
COMMON: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "vocab_size": 129280,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "max_position_embeddings": 163840, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "n_group": 8,
    "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "moe_layer_freq": 1, "num_nextn_predict_layers": 1,
    "attention_bias": False, "hidden_act": "silu", "torch_dtype": "bfloat16", "rope_theta": 1e4,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0,
        "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
    },
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
}  # fmt: skip
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
    "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
    "q_lora_rank": None, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
    "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0,
    "rope_scaling": COMMON["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
KIMI: dict[str, Any] = {
    "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64, "n_group": 1,
    "topk_group": 1, "n_routed_experts": 384, "first_k_dense_replace": 1, "rope_theta": 5e4,
    "num_nextn_predict_layers": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "token_bytes", "scale"),
    [
        ({}, 61 * 576 * 2, 192**-0.5 * (0.1 * math.log(40) + 1) ** 2),
        (V2_LITE, 27 * 576 * 2, 192**-0.5 * (0.0707 * math.log(40) + 1) ** 2),
        (KIMI, 61 * 576 * 2, 192**-0.5 * (0.1 * math.log(40) + 1) ** 2),
    ],
)
def test_published_folders_are_read(
    fields: dict[str, Any], token_bytes: int, scale: float, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(COMMON | fields))
    config = read_decoder_config(tmp_path)
    layout = kv_layout(config, CacheConfig(block_size=16), 1, torch.bfloat16)
    assert layout.block_bytes == 16 * token_bytes
    assert config.attention_scale == pytest.approx(scale)
    assert (config.rope.attention_factor, config.rotary_dim) == (1.0, 64)
    assert config.max_position_embeddings == 163840


def test_a_folder_of_kimi_is_one_of_deepseek(tmp_path: Path) -> None:
    folder = changed(tmp_path, "deepseek_v3", model_type="kimi_k2")
    assert torch.equal(whole(folder), whole(foreign_folder("deepseek_v3")))


def test_layers_that_only_guess_tokens_are_left_out(tmp_path: Path) -> None:
    folder = changed(tmp_path, "deepseek_v3", num_nextn_predict_layers=1)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    expected = whole(folder)
    save_file({**tensors, "model.layers.3.eh_proj.weight": torch.zeros(4, 8)}, file)
    assert torch.equal(whole(folder), expected)
    save_file({**tensors, "model.layers.4.eh_proj.weight": torch.zeros(4, 8)}, file)
    with pytest.raises(ConfigError, match=r"calls for tensor model\.layers\.4\.eh_proj"):
        whole(folder)


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("deepseek_v3", {"attention_bias": True}, "attention_bias is not supported"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias is not supported"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads must be"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is true"),
        ("deepseek_v3", {"n_group": 3}, "must divide n_routed_experts"),
        ("deepseek_v3", {"n_group": None}, "n_group is missing"),
        ("deepseek_v3", {"n_group": 8}, "at least two experts"),
        ("deepseek_v3", {"topk_group": 3}, "topk_group must be at most n_group, 2"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, "more than the experts of topk_group groups"),
        ("deepseek_v3", {"num_local_experts": 9}, "another field says"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek_v3", {"sliding_window": 24}, "sliding_window is not supported"),
        ("deepseek_v3", {"kv_lora_rank": 24}, r"implies \[32, 64\]"),
        ("deepseek_v3", {"qk_rope_head_dim": 16}, "config.json implies"),
        ("deepseek_v3", {"v_head_dim": 8}, r"kv_b_proj\.weight has the shape"),
        ("deepseek_v3", {"n_shared_experts": 2}, r"shared_experts\.\w+\.weight has the shape"),
        ("deepseek_v3", {"first_k_dense_replace": 2}, "has no tensor"),
        ("deepseek_v3", {"first_k_dense_replace": None}, "are missing: name one"),
        ("glm4_moe_lite", {"first_k_dense_replace": 2}, "mlp_layer_types differ"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "dense or sparse for each layer"),
        (
            "deepseek_v3", {"rope_parameters": YARN | {"rope_type": "linear"}},
            "mscale_all_dim is supported with yarn only",
        ),
        (
            "deepseek_v3",
            {
                "rope_parameters": YARN
                | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            },
            "mscale_all_dim is supported with yarn only",
        ),
    ],
)  # fmt: skip
def test_a_folder_that_means_something_else_is_refused(
    kind: str, fields: dict[str, object], reason: str, tmp_path: Path
) -> None:
    folder = changed(tmp_path, kind, **fields)
    with pytest.raises(ConfigError, match=reason), loaded(compute_config(folder)):
        pass


def test_a_bias_that_is_not_finite_and_adapters_are_refused(tmp_path: Path) -> None:
    folder = changed(tmp_path, "deepseek_v3")
    with pytest.raises(ConfigError, match="latent attention is computed without adapters"):
        plan_rank(compute_config(folder, lora_modules=(f"mine={tmp_path}",)), 1)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.gate.e_score_correction_bias"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="e_score_correction_bias is not finite"):
        whole(folder)
