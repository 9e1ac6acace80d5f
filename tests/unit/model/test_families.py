"""What families of baton's own decoder have in common: right, with bits that no batch changes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.model.batch_invariance.row_rule import MIN_ROWS, num_threads
from baton.model.families.table import FAMILIES as ROWS
from baton.model.layers.decoder import Decoder
from baton.model.runner.compute_digest import is_batch_invariant
from baton.model.runner.rank import load_rank
from baton.model.runner.rank_plan import plan_rank
from baton.model.tensor_parallel import SharedMemoryRanks, SingleRank
from baton.protocol.errors import ConfigError
from baton.protocol.ids import Epoch
from baton.runtime.fields import with_values
from tests.support.checkpoints import FAMILIES, model_folder
from tests.support.compute import (
    Text,
    chunked_logits,
    compute_config,
    loaded,
    logits,
    needs_rules,
    no_progress,
    random_tokens,
)
from tests.support.depth import nightly
from tests.support.foreign_checkpoints import (
    DEEPSEEK_YARN,
    LENGTH,
    assert_close,
    changed,
    foreign_folder,
    reference,
    whole,
)
from tests.support.foreign_checkpoints import FAMILIES as FOREIGN
from tests.support.oracle import prompt
from tests.support.thread_ranks import on_all, thread_ranks

EXPERTS = ("qwen3_moe", "mixtral", "qwen2_moe", "minimax_m2")
LATENT = ("deepseek_v3", "deepseek_v2", "deepseek_v32", "glm_moe_dsa")
STATES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        kind: (kind, {})
        for kind in (
            "qwen3_next",
            "qwen3_5_text",
            "qwen3_5_moe_text",
            "qwen3_5",
            "qwen3_5_moe",
            "granitemoehybrid",
            "lfm2_moe",
            "kimi_linear",
        )
    },
    "lfm2": ("lfm2", {}),
    "lfm2 with other widths": (
        "lfm2",
        {
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
            "conv_L_cache": 5,
            "layer_types": ("full_attention", "conv", "conv", "full_attention"),
        },
    ),
    "nemotron-h": ("nemotron_h", {}),
    "nemotron-h with latent experts": (
        "nemotron_h",
        {
            "moe_latent_size": 32,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
        },
    ),
    "nemotron-h without experts or biases of taps": (
        "nemotron_h",
        {
            "use_conv_bias": False,
            "n_groups": 1,
            "layers_block_type": ("linear_attention", "mlp", "full_attention", "mlp"),
        },
    ),
    "kimi-linear with latent queries": (
        "kimi_linear",
        {
            "q_lora_rank": 16,
            "linear_conv_kernel_dim": 3,
            "num_shared_experts": 2,
            "mlp_layer_types": ("sparse", "dense", "sparse", "dense"),
            "moe_renormalize": False,
        },
    ),
    "lfm2 with experts": (
        "lfm2_moe",
        {"norm_topk_prob": False, "routed_scaling_factor": 1.7, "num_dense_layers": 0},
    ),
    "granite 4 with experts": ("granitemoehybrid", {"num_local_experts": 4}),
    "granite 4 that shares keys": ("granitemoehybrid", {"mamba_n_groups": 1}),
    "granite 4 with positions": (
        "granitemoehybrid",
        {
            "position_embedding_type": "rope",
            "mamba_conv_bias": False,
            "tie_word_embeddings": False,
            "time_step_limit": (0.3, 0.9),
            "mamba_d_state": 40,
        },
    ),
}
LAYERS = (
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "llama4_text",
    "gemma4_text",
)  # whose layers are of several kinds
WITHOUT_EXPERTS = {"first_k_dense_replace": 5}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
# As in the folders of Qwen 3 and DeepSeek; the second writes all that may be left out.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
WHOLE_YARN = YARN | {
    "beta_fast": 16,
    "beta_slow": 2,
    "mscale": 0.7,
    "mscale_all_dim": 1.1,
    "truncate": False,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
TURNS = {"layer_types": ["sliding_attention", "full_attention"]}
LINEAR_4 = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "factor": 8.0}
FACTORS = {
    "short_factor": [1.0 + n / 9 for n in range(8)],
    "long_factor": [2.0 + n for n in range(8)],
}
FIRST_1024 = {"original_max_position_embeddings": 1024}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 64, **FACTORS}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    **{
        row.model_type: (row.model_type, {})
        for row in ROWS
        if row.model_type in FOREIGN
    },
    **STATES,
    "llama with all biases": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie": True},
    ),
    "a vocabulary that ranks cannot share": ("qwen2", {"vocab_size": 1023}),
    "llama3 rope": ("llama", {"extra": json.dumps({"rope_parameters": LLAMA3})}),
    "dynamic rope": ("llama", {"extra": json.dumps({"rope_parameters": DYNAMIC})}),
    "linear rope": ("llama", {"extra": json.dumps({"rope_scaling": LINEAR_4})}),
    "yarn": ("qwen3", {"extra": json.dumps({"rope_scaling": YARN})}),
    "yarn with all fields": (
        "qwen3",
        {"extra": json.dumps({"rope_scaling": WHOLE_YARN})},
    ),
    "yarn with a factor": (
        "llama",
        {"extra": json.dumps({"rope_parameters": YARN | {"attention_factor": 0.9}})},
    ),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}),
    "tied embeddings": ("qwen2", {"tie": True}),
    "a sliding window": ("mistral", {"sliding_window": 50}),
    "a window in the upper layer": (
        "qwen2",
        {"sliding_window": 50, "extra": json.dumps({"max_window_layers": 1})},
    ),
    "a window in one layer": (
        "qwen3",
        {"sliding_window": 50, "extra": json.dumps(TURNS)},
    ),
    "mistral with kinds of layers": (
        "mistral",
        {"sliding_window": 50, "extra": json.dumps(TURNS)},
    ),
    "ministral with kinds of layers": (
        "ministral",
        {"layer_types": ("sliding_attention", "full_attention", "full_attention")},
    ),
    "yarn beyond a window": (
        "qwen3",
        {
            "sliding_window": 64,
            "max_position_embeddings": 64,
            "extra": json.dumps({"max_window_layers": 1, "rope_scaling": YARN}),
        },
    ),
    "a head size of its own": ("qwen3", {"head_dim": 64}),
    "no grouped queries": ("llama", {"num_kv_heads": 4}),
    "one KV head": ("llama", {"num_kv_heads": 1}),
    "a shared expert without biases": (
        "qwen2_moe",
        {"qkv_bias": False, "mlp_only_layers": (0,)},
    ),
    "weights that sum to one": ("qwen3_moe", {"norm_topk_prob": True}),
    "a dense layer": ("qwen3_moe", {"mlp_only_layers": (1,)}),
    "every second layer": (
        "qwen3_moe",
        {"decoder_sparse_step": 2, "tie_word_embeddings": True},
    ),
    "more experts": ("qwen3_moe", {"num_experts": 40, "num_experts_per_tok": 7}),
    "all experts": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3}),
    "biases and a window": (
        "qwen3_moe",
        {"attention_bias": True, "use_sliding_window": True, "sliding_window": 24},
    ),
    "a window": ("mixtral", {"sliding_window": 24}),
    "stacked qwen3_moe": ("qwen3_moe", {"save_original_format": False}),
    "stacked mixtral": ("mixtral", {"save_original_format": False}),
    "stacked qwen2_moe": ("qwen2_moe", {"save_original_format": False}),
    "v3 whose queries have no latent row": ("deepseek_v3", {"q_lora_rank": None}),
    "v3 with yarn": ("deepseek_v3", {"rope_parameters": DEEPSEEK_YARN}),
    "v3 with other factors": (
        "deepseek_v3",
        {"rope_parameters": DEEPSEEK_YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    ),
    "v3 in halves": ("deepseek_v3", {"rope_interleave": False}),
    "v3 in one group": ("deepseek_v3", {"n_group": 1, "num_experts_per_tok": 5}),
    "v3 in many groups": (
        "deepseek_v3",
        {
            "n_routed_experts": 32,
            "n_group": 8,
            "topk_group": 3,
            "num_experts_per_tok": 6,
        },
    ),
    "v3 of weights as they are": ("deepseek_v3", {"norm_topk_prob": False}),
    "v3 of two shared experts": ("deepseek_v3", {"n_shared_experts": 2}),
    "v3 with stacked experts": ("deepseek_v3", {"save_original_format": False}),
    "v3 without experts": ("deepseek_v3", {"first_k_dense_replace": 3}),
    "v3 of unequal sizes": (
        "deepseek_v3",
        {"kv_lora_rank": 40, "qk_nope_head_dim": 12, "v_head_dim": 20},
    ),
    "v3.2 with yarn": ("deepseek_v32", {"rope_parameters": DEEPSEEK_YARN}),
    "v3.2 that sees nearly all": ("deepseek_v32", {"index_topk": 149}),
    "v3.2 of whole vectors": ("deepseek_v32", {"index_head_dim": 32, "index_topk": 64}),
    "glm-5 with a pattern": (
        "glm_moe_dsa",
        {"num_hidden_layers": 4, "indexer_types": None, "index_topk_pattern": "FSFS"},
    ),
    "glm-5 with a period": (
        "glm_moe_dsa",
        {"indexer_types": None, "index_topk_freq": 2},
    ),
    "v2": ("deepseek_v2", {"routed_scaling_factor": 3.0}),
    "v2 lite": (
        "deepseek_v2",
        {
            "q_lora_rank": None,
            "topk_method": "greedy",
            "n_group": 1,
            "rope_parameters": DEEPSEEK_YARN,
        },
    ),
    "glm": ("glm4_moe_lite", {"num_hidden_layers": 2}),
    "glm-4.5": ("glm4_moe", {"attention_bias": True}),
    "glm-4.5 with norms": ("glm4_moe", {"use_qk_norm": True}),
    "glm-4.5 that rotates three quarters": (
        "glm4_moe",
        {"rope_parameters": YARN | {"partial_rotary_factor": 0.75}},
    ),
    "minimax-m2": ("minimax_m2", {"rotary_dim": 8}),
    "stacked minimax-m2": ("minimax_m2", {"save_original_format": False}),
    "phi3": ("phi3", {"sliding_window": 24}),
    # As Phi-4-mini and as the first folders of Phi-3 have it.
    "longrope of three quarters": (
        "phi3",
        {
            "rope_parameters": {name: of[:6] for name, of in FACTORS.items()}
            | {"rope_type": "longrope", "partial_rotary_factor": 0.75},
            "original_max_position_embeddings": 64,
        },
    ),
    "longrope up to its first length": (
        "phi3",
        {
            "rope_parameters": LONGROPE
            | {"rope_type": "su", "attention_factor": 1.3}
            | FIRST_1024,
            **FIRST_1024,
        },
    ),
    "longrope in llama": (
        "llama",
        {"head_dim": 16, "extra": json.dumps({"rope_scaling": LONGROPE})},
    ),
    "v2 of one expert in a group": ("deepseek_v2", {"n_group": 8, "topk_group": 3}),
    "gemma2 with low caps": (
        "gemma2",
        {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0},
    ),
    "gemma2 without caps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma2 with biases and a head": (
        "gemma2",
        {"attention_bias": True, "tie_word_embeddings": False},
    ),
    "gemma2 with windows at the end": (
        "gemma2",
        {"layer_types": ("full_attention", "full_attention", "sliding_attention")},
    ),
    "gemma3 with angles of each kind": (
        "gemma3_text",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
                "full_attention": LINEAR | {"rope_theta": 5e4},
            },
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3 with a window that is too wide": ("gemma3_text", {"sliding_window": 2000}),
    "gemma3 that sees images": ("gemma3", {}),
    "gemma3 that sees images, as transformers names it": (
        "gemma3",
        {"save_original_format": False},
    ),
    "mistral that sees images": ("mistral3", {}),
    "llama 4 that sees images": ("llama4", {}),
    "llama 4 without norms and temperatures": (
        "llama4_text",
        {"use_qk_norm": False, "attn_temperature_tuning": False},
    ),
    "llama 4 with layers of all kinds": (
        "llama4_text",
        {
            "no_rope_layers": (1, 0, 0, 1, 1),
            "num_experts_per_tok": 2,
            "moe_layers": (0,),
            "layer_types": (
                "full_attention",
                "chunked_attention",
                "full_attention",
                "chunked_attention",
                "full_attention",
            ),
        },
    ),
    "gemma 4 with experts and wide MLPs": (
        "gemma4_text",
        {
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma 4 that sees images": ("gemma4", {}),
    "gemma 4 that sees images without a tower": ("gemma4_unified", {}),
    "gemma 4 of one size of heads": (
        "gemma4_text",
        {
            "global_head_dim": 16,
            "attention_k_eq_v": False,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "attention_bias": True,
        },
    ),
    "gemma 4 with one KV head": (
        "gemma4_text",
        {
            "num_key_value_heads": 1,
            "attention_k_eq_v": False,
            "global_head_dim": 48,
            "num_kv_shared_layers": 4,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma 4 whose layers see everything": (
        "gemma4_unified_text",
        {"layer_types": ("full_attention",) * 7, "num_kv_shared_layers": 3},
    ),
    "gpt-oss with a low limit": ("gpt_oss", {"swiglu_limit": 0.7, "swiglu_alpha": 1.3}),
    "gpt-oss with other angles": ("gpt_oss", {"rope_parameters": YARN}),
    "gpt-oss without biases": ("gpt_oss", {"attention_bias": False}),
}
# Whose feature another one has with another number or beside other features.
NIGHTLY = frozenset(
    (
        "all experts",
        "a window",
        "gemma 4 of one size of heads",
        "gemma 4 with one KV head",
        "gemma2 with windows at the end",
        "gemma2 without caps",
        "gemma3 that sees images, as transformers names it",
        "gemma3 with a window that is too wide",
        "glm-4.5 with norms",
        "glm-5 with a period",
        "gpt-oss with other angles",
        "granite 4 that shares keys",
        "lfm2 with other widths",
        "mistral with kinds of layers",
        "more experts",
        "no grouped queries",
        "one KV head",
        "stacked minimax-m2",
        "stacked mixtral",
        "stacked qwen2_moe",
        "v3 in many groups",
        "v3 in one group",
        "v3 of two shared experts",
        "v3 of weights as they are",
        "v3 with other factors",
        "v3.2 of whole vectors",
        "v3.2 that sees nearly all",
        "v3.2 with yarn",
        "weights that sum to one",
        "yarn with a factor",
    )
)


def depth_of(variant: str) -> Any:
    return nightly(variant) if variant in NIGHTLY else variant


def folder_of(variant: str, tmp_path: Path) -> Path:
    kind, fields = VARIANTS.get(variant, (variant, {}))
    if kind in FAMILIES:
        return model_folder(kind, num_layers=2, **fields)
    rope = {name: of for name, of in fields.items() if name == "rope_parameters"}
    folder = foreign_folder(
        kind, **{k: of for k, of in fields.items() if k not in rope}
    )
    return changed(tmp_path, folder, **rope) if rope else folder


def test_every_family_has_a_checkpoint_that_is_compared_with_transformers():
    assert {row.model_type for row in ROWS} <= {*FAMILIES, *FOREIGN}


@pytest.mark.parametrize("variant", [depth_of(name) for name in VARIANTS])
def test_fp32_logits_equal_those_of_transformers(variant, tmp_path):
    folder = folder_of(variant, tmp_path)
    # Transformers' own error is about as large.
    most = 2e-4 if variant in STATES else 2e-5
    assert_close(whole(folder), reference(folder), most)


def test_longrope_has_the_angles_of_the_longest_sequence_that_a_node_takes(tmp_path):
    """transformers takes those of one sequence, so only they are compared that have its own."""
    folder = folder_of("longrope of three quarters", tmp_path)
    tokens = prompt(60)
    for max_model_len, is_equal in ((64, True), (65, False)):
        config = with_values(
            compute_config(folder), {"model.max_model_len": max_model_len}
        )
        with loaded(config) as runner:
            ours = logits(runner, Text("a", tokens, range(4)).chunk(0, 60))[0]
        theirs = reference(folder, tokens)
        assert ((ours - theirs).abs().max() < 2e-5 * theirs.abs().max()) == is_equal


def test_a_node_says_that_it_takes_the_long_table_of_longrope(tmp_path, caplog):
    folder = folder_of("longrope of three quarters", tmp_path)
    for max_model_len, wanted in ((64, []), (65, [64])):
        config = with_values(
            compute_config(folder), {"model.max_model_len": max_model_len}
        )
        load_rank(config, Epoch("ab"), SingleRank(), no_progress).close()
        said = [
            one for one in caplog.records if one.getMessage().startswith("longrope: ")
        ]
        assert [
            one.fields["original_max_position_embeddings"] for one in said
        ] == wanted


@pytest.mark.parametrize("kind", LATENT + LAYERS)
def test_plain_torch_computes_the_same(kind):
    config = with_values(
        compute_config(foreign_folder(kind)), {"engine.kernels": "torch"}
    )
    with loaded(config) as runner:
        assert runner.backend.name == "torch"
        found = chunked_logits(runner, Text("a", prompt(LENGTH), range(3, 20)), [64])
    assert_close(found, reference(foreign_folder(kind)))


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "qwen3",
        "qwen3_moe",
        "deepseek_v3",
        "glm_moe_dsa",
        *LAYERS,
        *map(nightly, ("mistral", "qwen2", "mixtral", "qwen2_moe", "minimax_m2")),
        *map(nightly, ("deepseek_v2", "deepseek_v32")),
    ],
)
def test_bf16_logits_are_as_near_to_fp32_as_those_of_transformers(kind, tmp_path):
    """Without a router's groups, because their near ties differ in bf16."""
    folder = (
        foreign_folder(kind, **WITHOUT_EXPERTS)
        if kind in LATENT
        else folder_of(kind, tmp_path)
    )
    exact = reference(folder)
    allowed = 1.5 * (reference(folder, dtype=torch.bfloat16) - exact).abs().mean()
    assert (whole(folder, "bfloat16") - exact).abs().mean() < allowed


@pytest.mark.parametrize("variant", [*LATENT, *LAYERS, "longrope of three quarters"])
@pytest.mark.parametrize("dtype", [nightly("float32"), "bfloat16"])
def test_a_row_has_the_same_bits_whole_in_chunks_and_in_a_crowd(
    variant, dtype, tmp_path
):
    with loaded(compute_config(folder_of(variant, tmp_path), dtype)) as runner:
        needs_rules(runner)
        assert is_batch_invariant(runner)
        for part in (runner.cache.pool, runner.cache.index_keys):
            if part is not None:
                part.fill_(float("nan"))
        text = Text("a", prompt(90), range(10))
        crowd = [
            Text(f"b{n}", prompt(30, n), range(20 + 2 * n, 22 + 2 * n))
            for n in range(9)
        ]
        (expected,) = logits(runner, text.chunk(0, 90))
        beside = [one.chunk(0, 29) for one in crowd]
        parts = [
            logits(runner, text.chunk(0, 33))[0],
            logits(runner, *beside, text.chunk(33, 89))[-1],
            logits(runner, text.chunk(89, 90), *(one.chunk(29, 30) for one in crowd))[
                0
            ],
        ]
        assert torch.equal(torch.cat(parts), expected)
        for start in (1, 88):
            assert torch.equal(
                logits(runner, text.chunk(start, 90))[0], expected[start:]
            )


@pytest.mark.parametrize("kind", EXPERTS + LATENT)
@pytest.mark.parametrize("dtype", [nightly("float32"), "bfloat16"])
def test_rows_of_any_number_have_the_bits_of_a_row_alone(kind, dtype):
    """Vector code treats the last rows of many numbers in its own way."""
    with (
        loaded(compute_config(foreign_folder(kind), dtype)) as runner,
        torch.inference_mode(),
    ):
        needs_rules(runner)
        assert isinstance(runner.decoder, Decoder)
        mlp = runner.decoder.layers[1].mlp
        rows = torch.randn(59, 64, generator=torch.Generator().manual_seed(2))
        rows = rows.to(runner.cache.pool.dtype)
        alone = torch.cat([mlp(row[None], runner.backend) for row in rows])
        for count in range(2, 60):
            assert torch.equal(mlp(rows[:count], runner.backend), alone[:count])


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        # Wide enough that threads share the experts of a decode step, too.
        ("mixtral", {"hidden_size": 256, "intermediate_size": 512}),
        ("deepseek_v3", {"hidden_size": 256}),
    ],
)
@pytest.mark.parametrize("dtype", [nightly("float32"), "bfloat16"])
def test_the_number_of_threads_leaves_no_trace(kind, fields, dtype):
    config = compute_config(foreign_folder(kind, **fields), dtype)
    one = Text("one", prompt(2 * MIN_ROWS + 100), range(30))
    with loaded(config) as runner:
        needs_rules(runner)
        expected = chunked_logits(runner, one, [len(one.tokens)])
    with num_threads(2), loaded(config) as runner:
        found = chunked_logits(runner, one, [2 * MIN_ROWS + 3, 1, 9, 87])
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("variant", "size"),
    [
        ("qwen3_moe", 2),
        nightly("stacked mixtral", 2),
        ("a dense layer", 2),
        ("qwen2_moe", 2),
        ("deepseek_v3", 2),
        nightly("v2", 2),
        nightly("v3 with stacked experts", 2),
        nightly("deepseek_v32", 2),
        ("glm_moe_dsa", 2),
        ("qwen3", 2),
        ("llama with all biases", 2),
        ("a vocabulary that ranks cannot share", 4),  # nor its KV heads
        *((name, 2) for name in LAYERS[:-1]),
        *(nightly(name, 4) for name in LAYERS[:-1]),
        ("gemma4_text", 2),
        nightly("gemma 4 with one KV head", 4),
        ("gemma 4 with experts and wide MLPs", 2),
        ("longrope of three quarters", 2),
        nightly("longrope of three quarters", 4),
    ],
)
def test_ranks_together_compute_what_one_computes(variant, size, tmp_path):
    kind, _ = VARIANTS[variant]
    config = compute_config(folder_of(variant, tmp_path))
    # Of each rank's share.
    tokens = random_tokens(100, vocab=1023 if kind in FAMILIES else 512)

    def compute(rank: SharedMemoryRanks | None) -> Tensor:
        """The logits, and what a block holds after it where each rank holds every row."""
        with loaded(config, rank) as runner:
            rows = logits(runner, Text("a", tokens, range(10)).chunk(0, 100))[0]
            held = runner.cache.pool[3] if kind in LATENT else rows[:0]
            return torch.cat((rows.flatten(), held.flatten()))

    alone = compute(None)
    with thread_ranks(size) as members:
        shares = on_all(members, compute)
    assert_close(shares[0], alone)
    assert all(torch.equal(share, shares[0]) for share in shares)


def test_ranks_that_cannot_share_the_heads_are_refused():
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel_size"):
        plan_rank(compute_config(model_folder("llama")), 3)


@pytest.mark.release
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_prompts_beyond_the_window_of_qwen_equal_transformers_too(family):
    """Where config.json says nothing, the window has 4,096 tokens."""
    extra = json.dumps({"max_window_layers": 1})
    folder = model_folder(family, num_layers=2, sliding_window=4096, extra=extra)
    text = Text("r", prompt(4_100), range(260))
    with loaded(compute_config(folder, num_blocks=260)) as runner:
        assert_close(
            chunked_logits(runner, text, [512]), reference(folder, text.tokens)
        )
