"""A folder's configuration is read completely or refused in one line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from baton.model.config.decoder_config import DecoderConfig, read_decoder_config
from baton.model.config.rope_config import Rope
from baton.protocol.errors import ConfigError
from tests.support.checkpoints import model_folder

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 64,
    "long_factor": [2.0] * 64,
}
LLAMA3_ROPE: dict[str, object] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ABSENT = object()


def folder_of(folder: Path, **fields: object) -> Path:
    config = {
        name: value for name, value in (LLAMA | fields).items() if value is not ABSENT
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def read(folder: Path, **fields: object) -> DecoderConfig:
    return read_decoder_config(folder_of(folder, **fields))


def refusal(folder: Path, **fields: object) -> str:
    with pytest.raises(ConfigError) as caught:
        read(folder, **fields)
    assert "\n" not in caught.value.message
    assert str(folder / "config.json") in caught.value.message
    return caught.value.message


# What folders on the hub say, where it differs from LLAMA: gpt-oss-20b, Gemma 3 1B and 2 2B,
# GLM-4.5-Air and MiniMax-M2.
PUBLISHED: dict[str, dict[str, object]] = {
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "head_dim": 64,
        "vocab_size": 201088,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "experts_per_token": 4,
        "max_position_embeddings": 131072,
        "initial_context_length": 4096,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "rope_theta": 150000,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "rope_type": "yarn",
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    },
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 262144,
        "max_position_embeddings": 32768,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "rope_scaling": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "cache_implementation": "hybrid",
    },
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 256000,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "rope_theta": 10000.0,
        "cache_implementation": "hybrid",
    },
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "intermediate_size": 10944,
        "n_group": 1,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "head_dim": 128,
        "topk_group": 1,
        "vocab_size": 151552,
        "max_position_embeddings": 131072,
        "attention_bias": True,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1000000,
        "use_qk_norm": False,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-5,
    },
    "minimax_m2": {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "head_dim": 128,
        "vocab_size": 200064,
        "max_position_embeddings": 196608,
        "rotary_dim": 64,
        "rope_theta": 5000000,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "float8_e4m3fn",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        },
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"],
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "vocab_size": 200064,
        "max_position_embeddings": 131072,
        "attention_bias": False,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "rope_theta": 10000.0,
        "sliding_window": 262144,
        "embd_pdrop": 0.0,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 48,
            "long_factor": [32.0] * 48,
        },
    },
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_folders_are_read(family, tmp_path):
    config = read(tmp_path, model_type=family, **PUBLISHED[family])
    windows = [config.window_of(layer) for layer in range(config.num_layers)]
    found = (
        windows[:6],
        config.attention_scale,
        config.rope.rotated(config.head_dim),
        config.rope_of(0).theta,
        config.rope_of(config.num_layers - 1).theta,
        config.qkv_bias,
        config.output_bias,
        config.max_position_embeddings,
    )
    assert (
        found
        == {
            "gpt_oss": ([128, None] * 3, 0.125, 64, 1.5e5, 1.5e5, True, True, 131072),
            "gemma3_text": (
                [512] * 5 + [None],
                1 / 16,
                256,
                1e4,
                1e4,
                False,
                False,
                32768,
            ),
            "gemma2": ([4096, None] * 3, 1 / 16, 256, 1e4, 1e4, False, False, 8192),
            "glm4_moe": ([None] * 6, 128**-0.5, 64, 1e6, 1e6, True, False, 131072),
            "minimax_m2": ([None] * 6, 128**-0.5, 64, 5e6, 5e6, False, False, 196608),
            "phi3": ([None] * 6, 128**-0.5, 96, 1e4, 1e4, False, False, 131072),
        }[family]
    )


def test_of_gemma_3_that_sees_images_the_text_is_read(tmp_path):
    """As the hub's folder of the 4B has it, which leaves out what transformers has by default."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
        "text_config": text,
        "vision_config": {"hidden_size": 1152},
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config = read_decoder_config(tmp_path)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.max_position_embeddings) == (262208, 131072)
    assert (config.dtype, config.eos_token_ids, config.tie_word_embeddings) == (
        "bfloat16",
        (1, 106),
        True,
    )
    assert (config.rope, config.local_rope) == (Rope(1e6, "linear", 8.0), Rope(1e4))
    whole["text_config"] = None
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(ConfigError, match=r"config\.json: Expected `object`"):
        read_decoder_config(tmp_path)


def test_absent_fields_take_what_transformers_takes(tmp_path):
    config = read(tmp_path)
    assert (config.head_dim, config.rms_norm_eps, config.rope) == (
        128,
        1e-6,
        Rope(10000.0),
    )
    assert not config.tie_word_embeddings
    assert read(tmp_path, num_key_value_heads=ABSENT).num_kv_heads == 32
    mistral = read(
        tmp_path, architectures=["MistralForCausalLM"], num_key_value_heads=ABSENT
    )
    assert mistral.num_kv_heads == 8
    assert read(tmp_path, num_key_value_heads=None).num_kv_heads == 32
    qwen3 = read(tmp_path, architectures=["Qwen3ForCausalLM"], hidden_size=1024)
    assert qwen3.head_dim == 128


def test_biases_go_where_the_family_has_them(tmp_path):
    llama = read(tmp_path, attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias) == (True, True, True)
    qwen3 = read(
        tmp_path, architectures=["Qwen3ForCausalLM"], attention_bias=True, mlp_bias=True
    )
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.mlp_bias) == (True, True, False)
    qwen2 = read(tmp_path, architectures=["Qwen2ForCausalLM"])
    assert (qwen2.qkv_bias, qwen2.output_bias) == (True, False)
    mistral = read(tmp_path, architectures=["MistralForCausalLM"], attention_bias=True)
    assert (mistral.qkv_bias, mistral.output_bias) == (False, False)


def test_rope_is_read_from_old_and_new_fields(tmp_path):
    scaled = Rope(5e5, "llama3", 8.0, 1.0, 4.0, 8192)
    assert read(tmp_path, rope_theta=5e5, rope_scaling=LLAMA3_ROPE).rope == scaled
    longer = read(tmp_path, rope_scaling=YARN, max_position_embeddings=100)
    assert longer.max_position_embeddings == 256
    assert (
        read(tmp_path, rope_parameters={**LLAMA3_ROPE, "rope_theta": 5e5}).rope
        == scaled
    )
    linear = {"type": "linear", "factor": 2.0}
    assert read(tmp_path, rope_scaling=linear).rope == Rope(10000.0, "linear", 2.0)
    assert (
        read(tmp_path, rope_scaling=linear, rope_parameters=linear).rope.factor == 2.0
    )
    for without in (YARN, LLAMA3_ROPE, LONGROPE):
        scaling = {**without, "original_max_position_embeddings": None}
        taken = read(tmp_path, rope_scaling=scaling, max_position_embeddings=512)
        assert taken.rope.original_max_position_embeddings == 512
    assert (
        read(tmp_path, max_position_embeddings=ABSENT).max_position_embeddings == 2048
    )
    beside = read(
        tmp_path, rope_scaling=LLAMA3_ROPE, original_max_position_embeddings=4096
    )
    assert beside.rope.original_max_position_embeddings == 4096


def test_a_window_counts_only_where_layers_use_it(tmp_path):
    mistral = ["MistralForCausalLM"]
    qwen2 = ["Qwen2ForCausalLM"]
    assert "models of llama" in refusal(tmp_path, sliding_window=100)
    assert read(tmp_path, sliding_window=8192).sliding_window is None
    assert (
        read(tmp_path, architectures=mistral, sliding_window=100).sliding_window == 100
    )
    assert (
        read(tmp_path, architectures=mistral, sliding_window=None).sliding_window
        is None
    )
    assert read(tmp_path, architectures=mistral).sliding_window == 4096
    assert (
        read(tmp_path, architectures=mistral, sliding_window=8192).sliding_window
        is None
    )
    assert (
        read(tmp_path, architectures=qwen2, sliding_window=100).sliding_window is None
    )
    used: dict[str, object] = {"architectures": qwen2, "use_sliding_window": True}
    assert read(tmp_path, **used, max_window_layers=0).sliding_window == 4096
    used["sliding_window"] = 100
    assert read(tmp_path, **used, max_window_layers=32).sliding_window is None
    assert read(tmp_path, **used, max_window_layers=0).sliding_window == 100
    assert read(tmp_path, **used, max_window_layers=2).full_layers == (0, 1)
    mixed = ["full_attention", "sliding_attention"] * 16
    assert read(tmp_path, **used, layer_types=mixed).full_layers == tuple(
        range(0, 32, 2)
    )
    kinds: dict[str, object] = {"architectures": mistral, "sliding_window": 100}
    assert read(tmp_path, **kinds, layer_types=mixed).window_of(2) is None
    assert read(tmp_path, **kinds, layer_types=mixed).window_of(3) == 100
    for architecture in ("MixtralForCausalLM", "Qwen3MoeForCausalLM"):
        of = {**used, "architectures": [architecture], "layer_types": mixed}
        assert "has the window in all layers" in refusal(tmp_path, **of)
    assert read(tmp_path, **kinds, layer_types=mixed[::2] * 2).sliding_window is None
    assert read(tmp_path, **kinds, layer_types=mixed[1::2] * 2).sliding_window == 100


def write_tokenizer(folder, end, name="tokenizer_config.json", **fields):
    tokens = [{"id": 2, "content": "</s>"}, {"id": 5, "content": "<|end|>"}]
    far = {"id": 1 << 20, "content": "<|far|>"}
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [*tokens, far]}))
    (folder / name).write_text(json.dumps({"eos_token": end, **fields}))


def test_the_end_that_only_the_tokenizer_names_is_one(tmp_path):
    for end in ("<|end|>", {"content": "<|end|>", "lstrip": False}):
        write_tokenizer(tmp_path, end)
        assert read(tmp_path, eos_token_id=7).eos_token_ids == (5, 7)
    write_tokenizer(tmp_path, "</s>", "special_tokens_map.json")
    # As in older folders.
    assert read(tmp_path, eos_token_id=None).eos_token_ids == (2,)
    write_tokenizer(tmp_path, "<|end|>", added_tokens_decoder={})
    assert read(tmp_path, eos_token_id=None).eos_token_ids == (5,)
    write_tokenizer(tmp_path, "<|far|>", added_tokens_decoder={})
    # The model has no such row.
    assert read(tmp_path, eos_token_id=7).eos_token_ids == (7,)


def test_ends_are_those_of_both_files(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 4]}')
    assert read(tmp_path, eos_token_id=7).eos_token_ids == (4, 7, 9)
    (tmp_path / "generation_config.json").unlink()
    assert read(tmp_path, eos_token_id=None).eos_token_ids == ()


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("bfloat16", "bfloat16"),
        ("float32", "float32"),
        ("float16", "float32"),
        (None, "float32"),
    ],
)
def test_the_dtype_is_the_checkpoints(given, taken, tmp_path):
    assert read(tmp_path, torch_dtype=given).dtype == taken
    assert read(tmp_path, torch_dtype=given).is_widened == (given == "float16")
    assert read(tmp_path, dtype=given, torch_dtype=ABSENT).dtype == taken
    for by_part in ({"": "float64", "text_config": given or "float32"}, {"": given}):
        assert read(tmp_path, dtype=by_part, torch_dtype=ABSENT).dtype == taken


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": ABSENT, "model_type": "bert"}, "bert"),
        ({"architectures": ABSENT}, "architectures"),
        ({"hidden_size": ABSENT}, "hidden_size"),
        ({"hidden_size": "large"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"head_dim": 33}, "head_dim"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8"),
        ({"rope_scaling": {**YARN, "factor": 1e9}}, "more than"),
        ({"rope_scaling": {**YARN, "rope_theta": 1.0}}, "rope_theta above 1"),
        (
            {"rope_scaling": {**YARN, "rope_type": "proportional"}},
            "'proportional' is not supported",
        ),
        (
            {"rope_scaling": {**YARN, "rope_type": "longrope"}},
            "needs short_factor and long_factor",
        ),
        (
            {"rope_scaling": {**LONGROPE, "short_factor": [1.0]}},
            "short_factor has 1 numbers, but",
        ),
        (
            {"rope_scaling": {**LONGROPE, "long_factor": [1.0] * 63 + [0]}},
            "long_factor[63]",
        ),
        (
            {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.01},
            "must rotate an even part of 128",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        (
            {"rope_scaling": {**LLAMA3_ROPE, "high_freq_factor": 1.0}},
            "high_freq_factor",
        ),
        (
            {"rope_scaling": {"partial_rotary_factor": 0.5}},
            "other than 1 is not supported in",
        ),
        ({"rope_scaling": {"partial_rotary_factor": 2}}, "<= 1.0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "quantization_config",
        ),
        (
            {"compression_config": {"quant_method": "compressed-tensors"}},
            "config_groups",
        ),
        ({"model_type": "granite"}, "model_type 'granite' contradicts"),
        (
            {
                "partial_rotary_factor": 0.5,
                "rope_parameters": {"partial_rotary_factor": 0.75},
            },
            "is there twice",
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"type": "yarn"}},
            "differ",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}},
            "by kind of layer",
        ),
        (
            {"rope_parameters": {"rope_theta": None}},
            "rope_parameters: Expected `float`",
        ),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "linear"}}, "linear needs a factor"),
        ({"rope_scaling": {"type": "ntk"}}, "type 'ntk' is not supported, only"),
        (
            {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 1}},
            "original_max_position_embeddings must be 2 or more",
        ),
        ({"rope_scaling": {**LLAMA3_ROPE, "factor": None}}, "llama3 needs a factor"),
        (
            {"rope_scaling": {"rope_type": None, "type": "linear", "factor": 2.0}},
            "rope_type",
        ),
        ({"max_position_embeddings": 1 << 40}, "max_position_embeddings"),
        ({"is_causal": False}, "is_causal"),
        ({"attention_chunk_size": 16}, "attention_chunk_size"),
        ({"per_layer_config": {"1": {"num_key_value_heads": 1}}}, "per_layer_config"),
        ({"text_config": {"quantization_config": {}}}, "text_config"),
        ({"layer_types": ["full_attention"] * 31}, "for each of 32 layers"),
        ({"layer_types": ["chunked_attention"] * 32}, "layer_types must name one of"),
        (
            {"layer_types": ["sliding_attention"] * 32},
            "sliding_attention needs a sliding_window",
        ),
    ],
)
def test_a_refusal_names_the_file_and_the_field(fields, named, tmp_path):
    assert named in refusal(tmp_path, **fields)


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not a folder"):
        read_decoder_config(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_decoder_config(tmp_path)
    for broken in ("{", "[]", "", '"text"'):
        (tmp_path / "config.json").write_text(broken)
        with pytest.raises(ConfigError, match=r"config\.json"):
            read_decoder_config(tmp_path)
    folder_of(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        read_decoder_config(tmp_path)


def test_reading_a_configuration_does_not_load_torch():
    script = (
        "import sys; from pathlib import Path\n"
        "from baton.model.config.decoder_config import read_decoder_config\n"
        f"read_decoder_config(Path({str(model_folder('llama'))!r}))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
