"""The latent attention that config.json describes (MLA of DeepSeek-V2), and its tensors.

A token's keys and values of all heads follow from one latent row and a rotated key, so a layer
stores these alone. This module never imports torch.
"""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from baton.model.config.families import Latent
from baton.model.config.reading import converted
from baton.protocol.errors import ConfigError

_Positive = Annotated[int, Meta(gt=0)]


class LatentConfig(msgspec.Struct, frozen=True):
    """The sizes of latent attention, with the names of config.json."""

    q_lora_rank: int | None  # None: queries are projected without a latent row of their own
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    is_interleaved: bool  # the numbers that are rotated together are neighbours in the files

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def row_dim(self) -> int:
        """Return how many numbers a layer stores for a token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def tensors(self, hidden: int, num_heads: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of one layer's tensors, by their names within its attention."""
        queries = num_heads * self.qk_head_dim
        shapes: dict[str, tuple[int, ...]] = {"q_proj.weight": (queries, hidden)}
        if self.q_lora_rank is not None:
            shapes = {
                "q_a_proj.weight": (self.q_lora_rank, hidden),
                "q_a_layernorm.weight": (self.q_lora_rank,),
                "q_b_proj.weight": (queries, self.q_lora_rank),
            }
        expanded = num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        return shapes | {
            "kv_a_proj_with_mqa.weight": (self.row_dim, hidden),
            "kv_a_layernorm.weight": (self.kv_lora_rank,),
            "kv_b_proj.weight": (expanded, self.kv_lora_rank),
            "o_proj.weight": (hidden, num_heads * self.v_head_dim),
        }


class RawLatent(msgspec.Struct):
    """The fields of config.json that describe latent attention. Folders write all sizes."""

    num_attention_heads: _Positive
    q_lora_rank: _Positive | None
    kv_lora_rank: _Positive
    qk_nope_head_dim: _Positive
    qk_rope_head_dim: _Positive
    v_head_dim: _Positive
    num_key_value_heads: _Positive | None = None
    rope_interleave: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False


def latent_config(file: Path, latent: Latent, fields: dict[str, object]) -> LatentConfig:
    """Return the attention of a family whose row has `latent`. Raises `ConfigError`."""
    raw = converted(file, fields, RawLatent)
    heads = raw.num_attention_heads
    for is_refused, text in (
        (raw.attention_bias, "attention_bias is not supported in latent attention"),
        (raw.mlp_bias, "mlp_bias is not supported beside latent attention"),
        (
            raw.num_key_value_heads not in (None, heads),
            f"num_key_value_heads must be num_attention_heads, {heads}, in latent attention",
        ),
        (raw.qk_rope_head_dim % 2 != 0, "qk_rope_head_dim must be even for rotary embedding"),
    ):
        if is_refused:
            raise ConfigError(f"{file}: {text}")
    return LatentConfig(
        q_lora_rank=raw.q_lora_rank,
        kv_lora_rank=raw.kv_lora_rank,
        qk_nope_head_dim=raw.qk_nope_head_dim,
        qk_rope_head_dim=raw.qk_rope_head_dim,
        v_head_dim=raw.v_head_dim,
        is_interleaved=(
            raw.rope_interleave if latent.is_interleaved is None else latent.is_interleaved
        ),
    )
