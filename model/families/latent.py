"""Rows of families with latent attention, which keep one row of a token for all heads."""

from baton.model.families.family import (
    DEEPSEEK_EXPERTS,
    NEXTN,
    Experts,
    Family,
    Index,
    Latent,
)

LATENT = (
    Family(
        title="DeepSeek-V2 (Lite, Coder)",
        architecture="DeepseekV2ForCausalLM",
        model_type="deepseek_v2",
        defaults={"max_position_embeddings": 2048},
        latent=Latent(is_interleaved=True),
        experts=Experts(routing="grouped_softmax", shared="shared_experts"),
        has_nextn_layers=True,
    ),
    Family(
        title="DeepSeek-V3, R1, Kimi-K2",
        architecture="DeepseekV3ForCausalLM",
        model_type="deepseek_v3",
        other_model_types=("kimi_k2",),
        wrappers=(
            "KimiK25ForConditionalGeneration",
            "Kimi_K25ForConditionalGeneration",
        ),
        defaults={"max_position_embeddings": 4096},
        latent=Latent(),
        experts=DEEPSEEK_EXPERTS,
        has_nextn_layers=True,
        draft=NEXTN,
    ),
    Family(
        title="DeepSeek-V3.2",
        architecture="DeepseekV32ForCausalLM",
        model_type="deepseek_v32",
        defaults={
            "max_position_embeddings": 163840,
            "index_n_heads": 64,
            "index_head_dim": 128,
            "index_topk": 2048,
        },
        latent=Latent(is_interleaved=True, index=Index()),
        experts=DEEPSEEK_EXPERTS,
        has_nextn_layers=True,
        draft=NEXTN,
    ),
    Family(
        title="GLM-5",
        architecture="GlmMoeDsaForCausalLM",
        model_type="glm_moe_dsa",
        defaults={
            "max_position_embeddings": 202752,
            "rms_norm_eps": 1e-5,
            "index_n_heads": 32,
            "index_head_dim": 128,
            "index_topk": 2048,
        },
        latent=Latent(
            is_interleaved=True, index=Index(is_interleaved=True, is_shared=True)
        ),
        experts=DEEPSEEK_EXPERTS,
        has_nextn_layers=True,
        draft=NEXTN,
    ),
    Family(
        title="GLM-4.7-Flash",
        architecture="Glm4MoeLiteForCausalLM",
        model_type="glm4_moe_lite",
        defaults={"max_position_embeddings": 202752, "rms_norm_eps": 1e-5},
        latent=Latent(),
        experts=Experts(
            routing="grouped_sigmoid", shared="shared_experts", skips_first_layer=True
        ),
        has_nextn_layers=True,
        draft=NEXTN,
    ),
    Family(
        title="Youtu-LLM",
        architecture="YoutuForCausalLM",
        model_type="youtu",
        defaults={"max_position_embeddings": 131072, "tie_word_embeddings": True},
        latent=Latent(),
        has_nextn_layers=True,
    ),
)
