"""Tiny random checkpoints of families that transformers computes, as transformers saves them."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.checkpoints import scratch_folder, write_tokenizer

BASE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": None,
}  # fmt: skip
GROUPED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "num_key_value_heads": 4, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "n_shared_experts": 1, **GROUPED,
}  # fmt: skip
HALF_WINDOWS = {"sliding_window": 24, "num_hidden_layers": 7, "head_dim": 16}
MoE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**MoE, "head_dim": 16},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "olmo2": {},
    "gemma3_text": {**HALF_WINDOWS, "query_pre_attn_scalar": 16},
    "phi3": {},
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "cohere": {},
    "smollm3": {"num_hidden_layers": 5},
    "glm4": {"head_dim": 16},
    "deepseek_v3": LATENT,
    "gpt2": {"n_positions": 1024},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4},
    "bloom": {},
    "mamba": {},
    "phimoe": {"sliding_window": 24, "num_local_experts": 4},
    "llama4_text": {**HALF_WINDOWS, "attention_chunk_size": 32, "num_local_experts": 4},
}  # fmt: skip


@cache
def foreign_folder(kind: str, **more: Any) -> Path:
    """The folder of a model with weights with which attention and experts matter."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**BASE, **FAMILIES[kind], **more})
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 1.5 / weight.shape[-1] ** 0.5, generator=generator)
            else:
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    folder = scratch_folder(kind)
    model.save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size)
    return folder
