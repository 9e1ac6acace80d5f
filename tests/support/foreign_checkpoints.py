"""Tiny random checkpoints of families that transformers computes, as transformers saves them.

`reference` and `whole` compute the same prompt with transformers and with baton's own decoder.
"""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from baton.model.layers.decoder import Decoder
from tests.support.checkpoints import scratch_folder, write_tokenizer
from tests.support.compute import Text, compute_config, loaded, logits, state_of
from tests.support.oracle import prompt

BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": None,
}
GROUPED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    **GROUPED,
}
# Far fewer keys than a prompt has, so that the choice matters. With few heads, many scores are 0,
# and transformers breaks such ties in no order.
INDEX = {"index_n_heads": 16, "index_head_dim": 24, "index_topk": 20}
_VISION = {
    "hidden_size": 16,
    "out_hidden_size": 64,
    "intermediate_size": 16,
    "depth": 1,
    "num_heads": 2,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
SEEING: dict[str, dict[str, Any]] = {
    kind: {"vision_config": _VISION, "tie_word_embeddings": False}
    for kind in ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v_moe")
}
SEEING["mistral3"] = {
    "tie_word_embeddings": False,
    "vision_config": {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "head_dim": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    },
}
HALF_WINDOWS = {"sliding_window": 24, "num_hidden_layers": 7, "head_dim": 16}
# Layers of both kinds store keys, and layers of both kinds read those of others.
GEMMA_4: dict[str, Any] = {
    "sliding_window": 24,
    "num_hidden_layers": 7,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_key_value_heads": 4,
    "num_attention_heads": 8,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 512,
    "layer_types": [
        *["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "full_attention",
    ],
}
MoE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
# Two heads of values share one of keys.
STATES = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**MoE, "head_dim": 16},
    "qwen3_next": {**STATES, **MoE, "shared_expert_intermediate_size": 48},
    "qwen3_5_text": STATES,
    "qwen3_5_moe_text": {**STATES, **MoE, "shared_expert_intermediate_size": 48},
    **{
        kind: {
            "text_config": {
                **BASE,
                **STATES,
                **MoE,
                "shared_expert_intermediate_size": 48,
                "rope_parameters": {
                    "rope_type": "default",
                    "mrope_section": [1, 1, 0],
                    "mrope_interleaved": True,
                    "partial_rotary_factor": 0.25,
                },
            },
            "vision_config": _VISION,
            "tie_word_embeddings": False,
        }
        for kind in ("qwen3_5", "qwen3_5_moe")
    },
    "lfm2": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "block_multiple_of": 32,
    },
    "kimi_linear": {
        **{key: of for key, of in LATENT.items() if "_rank" in key or "head" in key},
        "num_hidden_layers": 4,
        "q_lora_rank": None,
        "linear_num_heads": 4,
        "linear_head_dim": 24,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "layer_types": [
            "linear_attention",
            "full_attention",
            "linear_attention",
            "linear_attention",
        ],
    },
    "lfm2_moe": {
        **MoE,
        "num_hidden_layers": 4,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
    },
    "nemotron_h": {
        "layers_block_type": [
            "linear_attention",
            "moe",
            "full_attention",
            "linear_attention",
            "mlp",
        ],
        "head_dim": 16,
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
        "time_step_min": 1e-9,
        **GROUPED,
    },
    "granitemoehybrid": {
        "num_experts_per_tok": 2,
        "tie_word_embeddings": True,
        "mamba_expand": 2,
        "num_local_experts": 0,
        "num_hidden_layers": 4,
        "shared_intermediate_size": 96,
        "layer_types": [
            *["linear_attention"] * 2,
            "full_attention",
            "linear_attention",
        ],
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_d_head": 16,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "qwen2_moe": {**MoE, "shared_expert_intermediate_size": 48},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "seed_oss": {"head_dim": 16},
    "olmo2": {},
    "gemma3_text": {**HALF_WINDOWS, "query_pre_attn_scalar": 16},
    "phi3": {},
    "granite": {
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "cohere": {},
    "smollm3": {"num_hidden_layers": 5},
    "glm4": {"head_dim": 16},
    "deepseek_v3": LATENT,
    "deepseek_v2": {
        **LATENT,
        "topk_method": "group_limited_greedy",
        "norm_topk_prob": False,
    },
    "deepseek_v32": {**LATENT, **INDEX},
    "glm_moe_dsa": {
        **LATENT,
        **INDEX,
        "num_hidden_layers": 5,
        "indexer_types": ["full", "shared", "full", "shared", "shared"],
    },
    "glm4_moe_lite": LATENT,
    "glm4_moe": {
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        **GROUPED,
    },
    "minimax_m2": {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2},
    # transformers clears the row of a padding token
    "youtu": {
        "pad_token_id": None,
        **{key: of for key, of in LATENT.items() if "_rank" in key or "head" in key},
    },
    "ministral": {"sliding_window": 24, "head_dim": 16},
    "gpt2": {"n_positions": 1024},
    "qwen3": {"head_dim": 16},
    "gemma4_text": GEMMA_4,
    "gemma4_unified_text": GEMMA_4,
    "gemma4": {
        "text_config": {**BASE, **GEMMA_4},
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "head_dim": 8,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "position_embedding_size": 16,
        },
    },
    "gemma4_unified": {
        "text_config": {**BASE, **GEMMA_4},
        "vision_config": {"patch_size": 2, "mm_embed_dim": 16, "mm_posemb_size": 16},
    },
    "gemma2": {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 24},
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
    },
    "gemma3": {
        "text_config": {**BASE, **HALF_WINDOWS, "query_pre_attn_scalar": 16},
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        "mm_tokens_per_image": 4,
    },
    **{
        f"{kind}_text": {"text_config": {**BASE, **text}, **SEEING[kind]}
        for kind, text in {
            "qwen2_5_vl": {
                "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}
            },
            "qwen3_vl": {
                "head_dim": 16,
                "rope_parameters": {
                    "rope_type": "default",
                    "mrope_section": [2, 3, 3],
                    "mrope_interleaved": True,
                },
            },
            "qwen3_vl_moe": {**MoE, "head_dim": 16},
            "glm4v_moe": {
                "head_dim": 16,
                "moe_intermediate_size": 32,
                "first_k_dense_replace": 1,
                **GROUPED,
                "rope_parameters": {
                    "rope_type": "default",
                    "mrope_section": [1, 1, 2],
                    "partial_rotary_factor": 0.5,
                },
            },
        }.items()
    },
    "mistral3": {
        "text_config": {
            **BASE,
            "model_type": "mistral",
            "head_dim": 16,
            "sliding_window": None,
        },
        **SEEING["mistral3"],
    },
    "bloom": {},
    "codegen": {"n_positions": 1024, "rotary_dim": 8},
    "gemma3n_text": {
        **HALF_WINDOWS,
        "num_hidden_layers": 10,
        "num_kv_shared_layers": 4,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "vocab_size_per_layer_input": 512,
        "hidden_size_per_layer_input": 16,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 10,
    },
    "gptj": {"n_positions": 1024, "rotary_dim": 8},
    "mamba": {},
    "phimoe": {"sliding_window": 24, "num_local_experts": 4},
    "llama4_text": {
        "num_hidden_layers": 5,
        "head_dim": 16,
        "attention_chunk_size": 32,
        "floor_scale": 20,
        "attn_scale": 0.4,
        "num_local_experts": 4,
        "intermediate_size_mlp": 96,
        "moe_layers": [1, 2, 4],
    },
    "llama4": {
        "text_config": {
            **BASE,
            "num_hidden_layers": 5,
            "head_dim": 16,
            "attention_chunk_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 96,
        },
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
    },
}


# Fields of any family; each takes those that it has.
SMALL: dict[str, Any] = {
    **MoE,
    **LATENT,
    "num_local_experts": 8,
    "intermediate_size": 64,
    "head_dim": 16,
    "d_ff": 64,
    "shared_expert_intermediate_size": 32,
    "sliding_window": 24,
    "n_positions": 1024,
    "ffn_dim": 64,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "d_model": 64,
    "n_group": 1,
    "mamba_d_state": 8,
    "vocab_size_per_layer_input": 512,
    "hidden_size_per_layer_input": 16,
    "index_topk": 16,
    "per_layer_config": None,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "num_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "encoder_ffn_dim": 64,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
}


def small_config(kind: str) -> Any:
    """A small configuration of any decoder of transformers, with each of its kinds of layers."""
    text = AutoConfig.for_model(kind).get_text_config()
    fields = text.to_dict()
    wanted = {**SMALL, **BASE, **FAMILIES.get(kind, {})}
    if "qk_rope_head_dim" in fields:
        wanted |= {"num_key_value_heads": 4, "head_dim": 8}
    chosen = {k: v for k, v in wanted.items() if k in fields or k in text.attribute_map}
    depth = chosen.get("num_hidden_layers", 3)
    for name, value in fields.items():
        if (
            isinstance(value, list)
            and len(value) == text.num_hidden_layers
            and name not in chosen
        ):
            kinds = [
                value[value.index(one)]
                for one in {repr(each): each for each in value}.values()
            ]
            chosen[name] = [*value[: depth - len(kinds)], *kinds][-depth:]
    kept = {
        k: v
        for k, v in fields.items()
        if k not in ("transformers_version", "architectures")
    }
    return type(text)(**{**kept, **chosen})


@cache
def foreign_folder(
    kind: str, *, save_original_format: bool = True, **fields: Any
) -> Path:
    """The folder of a model with weights with which attention and experts matter."""
    fields = {
        name: list(of) if isinstance(of, tuple) else of for name, of in fields.items()
    }
    of_whole = kind.removesuffix("_text") if "text_config" in FAMILIES[kind] else kind
    config = AutoConfig.for_model(of_whole, **{**BASE, **FAMILIES[kind], **fields})
    return _written(kind, config, save_original_format=save_original_format)


def changed(
    tmp_path: Path, original: str | Path, absent: tuple[str, ...] = (), **fields: object
) -> Path:
    """A copy of a folder with other fields in its config.json, or without some."""
    folder = tmp_path / "changed"
    shutil.copytree(
        foreign_folder(original) if isinstance(original, str) else original, folder
    )
    file = folder / "config.json"
    config = {**json.loads(file.read_bytes()), **fields}
    file.write_text(json.dumps({k: of for k, of in config.items() if k not in absent}))
    return folder


def small_folder(kind: str, most_weights: int = 60_000_000) -> Path:
    """The folder of a model of `small_config`. Raises what transformers raises."""
    config = small_config(kind)
    with torch.device("meta"):
        size = sum(
            one.numel() for one in AutoModelForCausalLM.from_config(config).parameters()
        )
    if size > most_weights:
        raise ValueError(f"{size} weights are too many")
    return _written(kind, config)


def _auto_class(config: Any) -> Any:
    """transformers' class for such a model: of some that see, only the whole can be made."""
    is_text = type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForCausalLM if is_text else AutoModelForImageTextToText


def _written(kind: str, config: Any, **saving: bool) -> Path:
    torch.manual_seed(0)
    model = _auto_class(config).from_config(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 1.5 / weight.shape[-1] ** 0.5, generator=generator)
            else:
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("layer_scalar"):
                buffer.copy_(0.6 + 0.8 * torch.rand(buffer.shape, generator=generator))
    folder = scratch_folder(kind)
    model.save_pretrained(folder, **saving)
    write_tokenizer(folder, config.get_text_config().vocab_size)
    return folder


LENGTH = 150
# As in the folder of DeepSeek-V3, whose two factors of YaRN cancel out in the angles alone.
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 128,
}


def reference(
    folder: Path, tokens: list[int] | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The logits of transformers."""
    auto = _auto_class(AutoConfig.from_pretrained(folder))
    model = auto.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        out: Tensor = model(torch.tensor([tokens or prompt(LENGTH)])).logits[0].float()
    return out


def whole(folder: Path, dtype: str = "auto") -> Tensor:
    """The logits of baton's own decoder."""
    with loaded(compute_config(folder, dtype)) as runner:
        assert isinstance(runner.decoder, Decoder)
        text = Text("a", prompt(LENGTH), range(3, 20), state=state_of(runner))
        return logits(runner, text.chunk(0, LENGTH))[0]


def assert_close(ours: Tensor, theirs: Tensor, most: float = 2e-5) -> None:
    worst = (ours - theirs).abs().max() / theirs.abs().max()
    assert worst < most, f"relative error {worst:.2e}"
