"""Read, check and complete the description of a decoder in a Hugging Face folder.

It refuses what baton cannot compute exactly, before any weight is loaded: a model with an unknown
activation or rotary scaling would run and give wrong text. It never imports torch.
"""

import math
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton.model.config.expert_config import ExpertsConfig, experts_config
from baton.model.config.kinds_config import (
    ChunksConfig,
    KindsConfig,
    chunks_config,
    joined_blocks,
    kinds_config,
)
from baton.model.config.latent_config import IndexConfig, LatentConfig, latent_config
from baton.model.config.layer_config import (
    OF_IMAGES,
    LayersConfig,
    layers_config,
    says,
    windows_config,
)
from baton.model.config.quantization import (
    Quantization,
    fields_of_tool,
    read_quantization,
)
from baton.model.config.reading import (
    EndIds,
    ModelKind,
    converted,
    end_token_ids,
    read_fields,
    read_json,
)
from baton.model.config.rope_config import MAX_POSITIONS, UNROTATED, Rope, ropes_config
from baton.model.config.state_config import StateConfig, state_config
from baton.model.families.family import DraftNames, Family, Head, LayerNames, MlpNames
from baton.model.families.table import (
    BY_ARCHITECTURE,
    BY_MODEL_TYPE,
    FAMILIES,
    OTHER_HEADS,
)
from baton.protocol.errors import ConfigError

DecoderDtype = Literal["float32", "bfloat16"]
Positive = Annotated[int, Meta(gt=0)]

DEFAULT_LABELS = 2  # transformers' own
# The files in which tools leave how they have quantized the weights.
QUANTIZATION_FILES = (
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
)
# Fields that transformers honours in every family, where they say more than nothing.
UNSUPPORTED = ("attention_chunk_size", "per_layer_config", "text_config")


class DecoderConfig(msgspec.Struct, frozen=True):
    """A Llama-family decoder.

    With latent attention a layer stores one row for all heads: `num_kv_heads` is 1, and `head_dim`
    is the length of the row.

    In all layers but `full_layers`, a token sees itself and `sliding_window - 1` tokens before it.
    `dtype` is the checkpoint's (float16 is widened); a setting may override it.
    """

    family: str  # its model_type
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: Rope
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    joins_qk_norm: bool  # over all heads together
    is_fused: bool  # the files hold QKV in one tensor, and gates and ups in another
    sliding_window: int | None
    dtype: DecoderDtype
    is_widened: bool  # the checkpoint's weights are float16
    eos_token_ids: tuple[int, ...]
    quantization: Quantization | None = None
    experts: ExpertsConfig | None = None
    full_layers: tuple[int, ...] = ()
    latent: LatentConfig | None = None
    # In the files after the others; they only guess tokens.
    num_nextn_predict_layers: int = 0
    layers: LayersConfig = LayersConfig()
    # Of layers with a window, if they have one of their own.
    local_rope: Rope | None = None
    head: Head = "tokens"
    num_labels: int = 0  # of the head `labels`
    # Tokens that config.json names instead of a head: no, yes.
    label_names: tuple[str, ...] = ()
    # The tokens of which scores are made: the first one's logit, without the second one's.
    label_token_ids: tuple[int, ...] = ()
    state: StateConfig | None = None
    chunks: ChunksConfig | None = None
    kinds: KindsConfig | None = None
    # The layers in the files that are the attention or state of each layer, and its MLP, if these
    # are apart; a layer may then have no MLP.
    blocks: tuple[tuple[int, int | None], ...] = ()
    guessing: tuple[str, ...] = ()  # what names of tensors that are not read begin with
    names: LayerNames = LayerNames()
    mlp: MlpNames = MlpNames()
    # The layer behind the others that drafts tokens, if it is wanted. Its number is `num_layers`.
    draft: DraftNames | None = None
    eagle: "EagleConfig | None" = None  # the same from a folder of its own
    joins_inputs: bool = False  # attention takes the embedding beside a hidden state

    @property
    def rotary_dim(self) -> int:
        return self.head_dim if self.latent is None else self.latent.qk_rope_head_dim

    def is_wide(self, layer: int) -> bool:
        """Return whether a layer has the heads of `kinds`."""
        return self.kinds is not None and self.window_of(layer) is None

    def heads_of(self, layer: int) -> tuple[int, int]:
        """Return how many KV heads a layer has, and how many numbers a head has."""
        if self.kinds is not None and self.is_wide(layer):
            return self.kinds.kv_heads, self.kinds.head_dim
        return self.num_kv_heads, self.head_dim

    def stores_keys(self, layer: int) -> bool:
        return self.kinds is None or layer < self.kinds.first_shared_layer

    def num_stored(self, *, wide: bool = False) -> int:
        """Return how many layers of a kind store keys and values."""
        layers = range(self.num_layers)
        return sum(
            self.stores_keys(one) and self.is_wide(one) == wide for one in layers
        )

    def mlp_width_of(self, layer: int) -> int:
        """Return how wide the dense MLP of a layer is."""
        is_twice = self.kinds is not None and self.kinds.widens_shared_mlp
        return self.intermediate_size * (
            2 if is_twice and not self.stores_keys(layer) else 1
        )

    @property
    def attention_scale(self) -> float:
        """Return the factor of queries times keys."""
        width = self.head_dim if self.latent is None else self.latent.qk_head_dim
        scale: float = self.layers.scale or width**-0.5
        return scale if self.latent is None else scale * self.rope.score_factor

    @property
    def num_kv_layers(self) -> int:
        """Return how many layers store keys and values, each of them with `head_dim` numbers.

        The layers of `kinds` count as what they store, and a layer that drafts is the last one.
        """
        if self.kinds is not None:
            wide = (
                self.num_stored(wide=True) * self.kinds.kv_heads * self.kinds.head_dim
            )
            return self.num_stored() + math.ceil(
                wide / (self.num_kv_heads * self.head_dim)
            )
        num_states = 0 if self.state is None else len(self.state.layers)
        return self.num_layers - num_states + self.has_draft_head

    @property
    def has_draft_head(self) -> bool:
        return self.draft is not None or self.eagle is not None

    def numbers_in_files(self, layer: int) -> tuple[int, int | None]:
        """Return which layers of the files have a layer's attention or state, and its MLP."""
        return self.blocks[layer] if self.blocks else (layer, layer)

    def prefix_of(self, layer: int) -> str:
        """Return what the names of a layer's tensors begin with, attention or state and norms."""
        if self.draft is not None and layer == self.num_layers and self.draft.layer:
            return self.draft.layer
        return self.names.layer.format(self.numbers_in_files(layer)[0])

    def mlp_prefix_of(self, layer: int) -> str:
        """Return the same of a layer's MLP."""
        number = self.numbers_in_files(layer)[1]
        return self.names.layer.format(number) if self.blocks else self.prefix_of(layer)

    def has_mlp(self, layer: int) -> bool:
        return self.numbers_in_files(layer)[1] is not None

    def has_state(self, layer: int) -> bool:
        return self.state is not None and layer in self.state.layers

    def stored_number(self, layer: int) -> int:
        """Return how many earlier layers store the same kind of things, a state or not.

        A layer that stores nothing has the number of the last one of its kind that does.
        """
        if self.kinds is not None:
            end = min(layer, self.kinds.first_shared_layer)
            count = sum(
                self.is_wide(layer) == self.is_wide(other) for other in range(end)
            )
            return count if self.stores_keys(layer) else count - 1
        return sum(
            self.has_state(layer) == self.has_state(other) for other in range(layer)
        )

    @property
    def index(self) -> IndexConfig | None:
        """Return the index that chooses the keys which a query sees, if there is one."""
        return None if self.latent is None else self.latent.index

    def window_of(self, layer: int) -> int | None:
        return None if layer in self.full_layers else self.sliding_window

    def chunk_of(self, layer: int) -> int:
        """Return how many tokens the chunks have in which a layer attends; 0: it sees all."""
        if self.chunks is None or layer not in self.chunks.layers:
            return 0
        return self.chunks.size

    def rotates(self, layer: int) -> bool:
        return self.chunks is None or layer not in self.chunks.unrotated_layers

    @property
    def rotations(self) -> tuple[tuple[Rope, int], ...]:
        """Return the rotary embeddings of all layers, each once, and the widths of their tables."""
        own = [self.rotation_of(layer) for layer in range(self.num_layers)]
        if self.eagle is not None:
            own += self.eagle.decoder.rotations
        return tuple(dict.fromkeys(own))

    def rotation_of(self, layer: int) -> tuple[Rope, int]:
        width = self.heads_of(layer)[1] if self.latent is None else self.rotary_dim
        return self.rope_of(layer), width

    def rope_of(self, layer: int) -> Rope:
        if not self.rotates(layer):
            return UNROTATED
        return (
            self.rope if self.window_of(layer) is None else self.local_rope or self.rope
        )

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """Return the experts of a layer; None where it has a dense MLP or none."""
        if self.experts is None or layer in self.experts.mlp_only_layers:
            return None
        return self.experts


class EagleConfig(msgspec.Struct, frozen=True):
    """A draft of EAGLE-3, in a folder of its own.

    Its layer takes the joined streams before the layers `taps` of the model.
    """

    folder: str
    decoder: DecoderConfig  # of one layer, with the draft's vocabulary
    taps: tuple[int, ...]
    prefix: str  # before the names of its tensors, but for that of its head
    has_embedding: bool  # of its own


def read_decoder_config(folder: Path) -> DecoderConfig:
    """Return a folder's decoder. Raises a one-line `ConfigError` that names file and field."""
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder; a Hugging Face model folder is needed"
        )
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"{folder} has no config.json; a Hugging Face model folder is needed"
        )
    fields = read_fields(file)
    family, head = _family(file, converted(file, fields, ModelKind))
    return decoder_config(folder, fields, family, head)


def decoder_config(
    folder: Path, fields: dict[str, object], family: Family, head: Head = "tokens"
) -> DecoderConfig:
    """Return the decoder that these fields of a folder's config.json describe."""
    file = folder / "config.json"
    fields = family.with_defaults(fields)
    blocks: tuple[tuple[int, int | None], ...] = ()
    if family.has_lone_blocks:
        blocks, fields = joined_blocks(file, fields)
    raw = converted(file, fields, _RawConfig)
    num_kv_heads = raw.num_key_value_heads or raw.num_attention_heads
    head_dim = raw.head_dim or raw.hidden_size // raw.num_attention_heads
    rotated_dim = head_dim
    latent = None
    if family.latent is not None:
        latent = latent_config(file, family.latent, fields)
        num_kv_heads = 1
        head_dim = latent.row_dim
        rotated_dim = latent.qk_rope_head_dim
    _check(file, family, raw, num_kv_heads, rotated_dim)
    rope, local_rope = ropes_config(file, family, fields)
    _check_rotated(file, rope, rotated_dim)
    num_positions = max(raw.max_position_embeddings, rope.num_positions)
    window, full_layers = windows_config(file, family, fields, num_positions)
    kinds = None
    if family.has_kinds:
        seeing = full_layers if window else tuple(range(raw.num_hidden_layers))
        kinds = kinds_config(file, fields, seeing, has_inputs=family.has_layer_inputs)
    return DecoderConfig(
        family=family.model_type,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=_mlp_width(file, family, fields),
        num_layers=raw.num_hidden_layers,
        num_heads=raw.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=num_positions,
        rms_norm_eps=_eps(file, family, fields),
        rope=rope,
        tie_word_embeddings=bool(raw.tie_word_embeddings),
        qkv_bias=says(file, fields, family.qkv_bias),
        output_bias=says(file, fields, family.output_bias),
        mlp_bias=says(file, fields, family.mlp_bias),
        qk_norm=says(file, fields, family.qk_norm),
        joins_qk_norm=family.joins_qk_norm,
        is_fused=family.is_fused,
        sliding_window=window,
        full_layers=full_layers,
        quantization=_quantization(file, raw),
        dtype=_dtype(file, raw),
        is_widened=_stored_dtype(raw) == "float16",
        eos_token_ids=_eos_token_ids(folder, raw),
        experts=experts_config(file, family.experts, fields),
        latent=latent,
        num_nextn_predict_layers=raw.num_nextn_predict_layers
        if family.has_nextn_layers
        else 0,
        layers=layers_config(file, family, fields),
        local_rope=local_rope,
        head=head,
        num_labels=raw.num_classes if head == "labels" else 0,
        state=None
        if family.state is None
        else state_config(file, family.state, fields),
        chunks=chunks_config(file, fields) if family.has_chunks else None,
        kinds=kinds,
        blocks=blocks,
        guessing=family.guessing,
        names=family.names,
        mlp=MlpNames(gate_up=("gate_up_proj",)) if family.is_fused else family.mlp,
        label_names=raw.classifier_from_token or (),
    )


class _RawConfig(msgspec.Struct):
    """The fields of config.json that affect the computation; all others are ignored."""

    vocab_size: Positive
    hidden_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    max_position_embeddings: Annotated[int, Meta(gt=0, le=MAX_POSITIONS)]
    num_key_value_heads: Positive | None = None
    head_dim: Positive | None = None
    tie_word_embeddings: bool | None = None
    num_nextn_predict_layers: Annotated[int, Meta(ge=0)] = 0
    is_causal: bool = True
    use_bidirectional_attention: object = None
    attention_chunk_size: object = None
    per_layer_config: object = None
    text_config: object = None
    quantization_config: dict[str, object] | None = None
    compression_config: dict[str, object] | None = None
    dtype: str | dict[str, str | None] | None = None
    torch_dtype: str | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    num_labels: int | None = None
    id2label: dict[str, object] | None = None
    classifier_from_token: tuple[str, ...] | None = None

    @property
    def num_classes(self) -> int:
        """Return how many labels a classifier has, as transformers finds it."""
        return len(self.id2label or ()) or self.num_labels or DEFAULT_LABELS


class _RawAdjusted(msgspec.Struct):
    """The fields of LFM2's config.json that adjust the width of its MLPs."""

    block_ffn_dim_multiplier: Annotated[float, Meta(gt=0)] = 1.0
    block_multiple_of: Positive = 256


class _RawGeneration(msgspec.Struct):
    eos_token_id: int | tuple[int, ...] | None = None


def _mlp_width(file: Path, family: Family, fields: dict[str, object]) -> int:
    """Return how wide a dense MLP is, by the field that the family names.

    LFM2 names the width of an MLP without gates, of which it takes two thirds, in whole multiples.
    """
    name = family.mlp_width
    width = fields.get(name)
    if not isinstance(width, int) or width < 1:
        raise ConfigError(
            f"{file}: {name} must be a whole number above 0, not {width!r}"
        )
    if not fields.get("block_auto_adjust_ff_dim"):
        return width
    raw = converted(file, fields, _RawAdjusted)
    width = int(raw.block_ffn_dim_multiplier * int(2 * width / 3))
    return -(-width // raw.block_multiple_of) * raw.block_multiple_of


def _eps(file: Path, family: Family, fields: dict[str, object]) -> float:
    eps = fields.get(family.norm_eps, 1e-6)
    if not isinstance(eps, float | int):
        raise ConfigError(f"{file}: {family.norm_eps} must be a number, not {eps!r}")
    return float(eps)


def _family(file: Path, kind: ModelKind) -> tuple[Family, Head]:
    named = kind.architectures or ()
    heads: dict[str, tuple[Family, Head]] = {
        **{name: (family, "tokens") for name, family in BY_ARCHITECTURE.items()},
        **OTHER_HEADS,
    }
    for name in named:
        if name in heads:
            family, head = heads[name]
            if kind.model_type not in (
                "",
                family.model_type,
                *family.other_model_types,
            ):
                raise ConfigError(
                    f"{file}: model_type {kind.model_type!r} contradicts the architecture {name}, "
                    f"whose model_type is {family.model_type!r}"
                )
            return family, head
    if not named and kind.model_type in BY_MODEL_TYPE:
        return BY_MODEL_TYPE[kind.model_type], "tokens"
    found = ", ".join(named) or kind.model_type or "nothing"
    known = ", ".join(family.architecture for family in FAMILIES)
    raise ConfigError(f"{file}: architectures names {found}; baton runs {known}")


def _check(
    file: Path, family: Family, raw: _RawConfig, num_kv_heads: int, head_dim: int
) -> None:
    read = {
        "attention_chunk_size": family.has_chunks,
        "per_layer_config": family.has_kinds,
    }
    unsupported = [name for name in UNSUPPORTED if not read.get(name)]
    refusals = (
        (
            raw.num_attention_heads % num_kv_heads != 0,
            "num_key_value_heads must divide num_attention_heads",
        ),
        (
            head_dim % 2 != 0,
            f"head_dim must be even for rotary embedding, not {head_dim}",
        ),
        (
            not raw.is_causal
            or raw.use_bidirectional_attention not in (None, False, OF_IMAGES),
            "is_causal is false or use_bidirectional_attention is true: tokens that see later ones "
            "are not supported",
        ),
        *(
            (bool(getattr(raw, name)), f"{name} is not supported")
            for name in unsupported
        ),
    )
    for is_refused, text in refusals:
        if is_refused:
            raise ConfigError(f"{file}: {text}")


def _check_rotated(file: Path, rope: Rope, head_dim: int) -> None:
    pairs, odd = divmod(rope.rotated(head_dim), 2)
    if odd or not pairs:
        raise ConfigError(
            f"{file}: partial_rotary_factor must rotate an even part of {head_dim}"
        )
    for name in ("short_factor", "long_factor") if rope.scaling == "longrope" else ():
        if (count := len(getattr(rope, name))) != pairs:
            raise ConfigError(
                f"{file}: {name} has {count} numbers, but {pairs} pairs are rotated"
            )


def _quantization(file: Path, raw: _RawConfig) -> Quantization | None:
    given = raw.quantization_config
    if given is None:
        given = raw.compression_config
    if given is not None:
        return read_quantization(file, given)
    for name in QUANTIZATION_FILES:
        other = file.parent / name
        if other.is_file():
            fields = fields_of_tool(other, read_json(other, msgspec.Raw))
            return None if fields is None else read_quantization(other, fields)
    return None


def _stored_dtype(raw: _RawConfig) -> str:
    """Return the type that the folder says its weights have."""
    dtype = raw.dtype or raw.torch_dtype or "float32"
    if isinstance(dtype, dict):  # by part of the model, and for the rest
        dtype = dtype.get("text_config") or dtype.get("") or "float32"
    return dtype


def _dtype(file: Path, raw: _RawConfig) -> DecoderDtype:
    match _stored_dtype(raw):
        case "bfloat16":
            return "bfloat16"
        case "float32" | "float16":
            return "float32"
        case other:
            raise ConfigError(f"{file}: dtype {other!r} is not supported")


def _eos_token_ids(folder: Path, raw: _RawConfig) -> tuple[int, ...]:
    """Return every id that a file of the folder calls an end, in ascending order."""
    given: list[EndIds] = [raw.eos_token_id]
    generation = folder / "generation_config.json"
    if generation.is_file():
        given.append(read_json(generation, _RawGeneration).eos_token_id)
    return end_token_ids(folder, raw.vocab_size, given)
