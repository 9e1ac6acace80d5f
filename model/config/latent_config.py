"""The latent attention that config.json describes (MLA of DeepSeek-V2), and its tensors.

A token's keys and values of all heads follow from one latent row and a rotated key, so a layer
stores these alone. This module never imports torch.
"""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from baton.model.config.reading import converted
from baton.model.families.family import Index, Latent
from baton.protocol.errors import ConfigError

_Positive = Annotated[int, Meta(gt=0)]
# In `layer_types`, now and before.
INDEXED = ("indexed_attention", "deepseek_sparse_attention")
# In `indexer_types` and patterns.
SHARED = {"full": False, "F": False, "shared": True, "S": True}


class IndexConfig(msgspec.Struct, frozen=True):
    """The index of sparse attention.

    A layer's index scores all keys that a query may see, by queries and keys of its own, and the
    query sees those with the best scores.
    """

    num_heads: int
    head_dim: int
    num_chosen: int  # keys that a query sees at most
    # Its numbers that are rotated together are neighbours in the files.
    is_interleaved: bool
    # Those that have it; others take what the last one has chosen.
    layers: tuple[int, ...]


class LatentConfig(msgspec.Struct, frozen=True):
    """The sizes of latent attention, with the names of config.json."""

    # None: queries are projected without a latent row of their own.
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    # The numbers that are rotated together are neighbours in the files.
    is_interleaved: bool
    index: IndexConfig | None = None

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def row_dim(self) -> int:
        """Return how many numbers a layer stores for a token."""
        return self.kv_lora_rank + self.qk_rope_head_dim


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


def latent_config(
    file: Path, latent: Latent, fields: dict[str, object]
) -> LatentConfig:
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
        (
            raw.qk_rope_head_dim % 2 != 0,
            "qk_rope_head_dim must be even for rotary embedding",
        ),
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
            raw.rope_interleave
            if latent.is_interleaved is None
            else latent.is_interleaved
        ),
        index=None
        if latent.index is None
        else index_config(file, latent.index, fields),
    )


class _RawIndex(msgspec.Struct):
    """The fields of config.json that describe an index."""

    num_hidden_layers: _Positive
    qk_rope_head_dim: _Positive
    q_lora_rank: _Positive | None
    index_n_heads: _Positive
    index_head_dim: _Positive
    index_topk: _Positive
    indexer_rope_interleave: bool | None = None
    rope_interleave: bool = True
    layer_types: tuple[str, ...] | None = None
    indexer_types: tuple[str, ...] | None = None
    index_topk_pattern: str | tuple[str, ...] | None = None
    index_topk_freq: int | None = None
    index_skip_topk_offset: int | None = None


def index_config(file: Path, index: Index, fields: dict[str, object]) -> IndexConfig:
    """Return the index of a family whose row has `index`. Raises `ConfigError`."""
    raw = converted(file, fields, _RawIndex)
    layers = _indexed_layers(file, index, raw)
    for is_refused, text in (
        (
            raw.q_lora_rank is None,
            "q_lora_rank is missing, from which an index makes its queries",
        ),
        (
            raw.index_head_dim < raw.qk_rope_head_dim,
            f"index_head_dim must be at least qk_rope_head_dim, {raw.qk_rope_head_dim}",
        ),
        (not raw.rope_interleave, "rope_interleave is false, which is not supported"),
        (
            raw.indexer_rope_interleave not in (None, index.is_interleaved),
            f"indexer_rope_interleave must be {str(index.is_interleaved).lower()}",
        ),
        (
            bool(set(raw.layer_types or ()) - set(INDEXED)),
            f"layer_types must be {INDEXED[0]} for each layer",
        ),
    ):
        if is_refused:
            raise ConfigError(f"{file}: {text}")
    return IndexConfig(
        num_heads=raw.index_n_heads,
        head_dim=raw.index_head_dim,
        num_chosen=raw.index_topk,
        is_interleaved=index.is_interleaved,
        layers=layers,
    )


def _indexed_layers(file: Path, index: Index, raw: _RawIndex) -> tuple[int, ...]:
    """Return the layers that have an index, as one of three fields says."""
    layers = range(raw.num_hidden_layers)
    kinds = tuple(raw.indexer_types or raw.index_topk_pattern or ())
    if not kinds:
        period = max(raw.index_topk_freq or 1, 1)
        offset = 2 if raw.index_skip_topk_offset is None else raw.index_skip_topk_offset
        kinds = tuple(
            "S" if max(layer - offset + 1, 0) % period else "F" for layer in layers
        )
    if len(kinds) != len(layers) or set(kinds) - set(SHARED):
        raise ConfigError(
            f"{file}: indexer_types must be full or shared for each layer"
        )
    has_index = [not SHARED[kind] for kind in kinds]
    if not has_index[0]:
        raise ConfigError(f"{file}: indexer_types: the first layer must be full")
    if not index.is_shared and not all(has_index):
        raise ConfigError(
            f"{file}: indexer_types: each layer must be full in this family"
        )
    return tuple(layer for layer in layers if has_index[layer])
