"""Read, check and complete the description of a decoder in a Hugging Face folder.

It refuses what baton cannot compute exactly, before any weight is loaded: a model with an unknown
activation or rotary scaling would run and give wrong text. It never imports torch.
"""

from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from baton.model.config.expert_config import (
    EXPERT_FAMILIES,
    GROUPED_FAMILIES,
    ExpertsConfig,
    RawExperts,
    RawGrouped,
    experts_config,
    grouped_experts,
)
from baton.model.config.latent_config import (
    LATENT_FAMILIES,
    LatentConfig,
    RawLatent,
    latent_config,
)
from baton.model.config.layer_config import LAYER_FAMILIES, LayersConfig, RawLayers, layers_config
from baton.model.config.quantization import Quantization, read_quantization
from baton.model.config.rope_config import LOCAL_ROPE, MAX_POSITIONS, RawRope, Rope, ropes_config
from baton.protocol.errors import ConfigError

ModelFamily = Literal[
    "llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2",
    "deepseek_v3", "glm4_moe_lite", "youtu", "ministral", "gemma2", "gemma3_text",
    "gpt_oss", "glm4_moe", "minimax_m2", "phi3",
]  # fmt: skip
DecoderDtype = Literal["float32", "bfloat16"]
Positive = Annotated[int, Meta(gt=0)]
T = TypeVar("T")

ARCHITECTURES: dict[str, ModelFamily] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MinistralForCausalLM": "ministral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "YoutuForCausalLM": "youtu",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "GptOssForCausalLM": "gpt_oss",
    "Glm4MoeForCausalLM": "glm4_moe",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "Phi3ForCausalLM": "phi3",
}
# Other models of an architecture, whose folders have a model_type of their own.
ALSO_CALLED: dict[str, ModelFamily] = {"kimi_k2": "deepseek_v3"}
# Models that see images, too. Of these the decoder of text is computed, which is in `text_config`.
WRAPPED = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}
# What their folders on the hub leave out.
WRAPPED_FIELDS = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "max_position_embeddings": 131072,
}  # fmt: skip
WHOLE_FIELDS = (
    "eos_token_id",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "tie_word_embeddings",
)  # of the whole, where `text_config` has none
NO_WINDOWS = ("llama", "glm4_moe", "minimax_m2", *LATENT_FAMILIES)
# transformers uses this value where the field is absent.
HEAD_DIM_OF: dict[ModelFamily, int] = {
    "qwen3": 128, "gemma2": 256, "gemma3_text": 256, "gpt_oss": 64, "minimax_m2": 128,
}  # fmt: skip
QWEN_MAX_WINDOW_LAYERS = 28
SLIDING_WINDOW, SLIDING_WINDOW_OF = 4096, {"gpt_oss": 128}
WINDOWS_EVERYWHERE = ("qwen3_moe", "mixtral", "phi3")  # transformers reads no layer_types of theirs
# Of so many layers, the last one has no window.
WINDOW_PATTERN: dict[ModelFamily, int] = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2}
LAYER_TYPES = {"full_attention", "sliding_attention"}
ABSENT_KV_HEADS: dict[ModelFamily, int] = {
    "mistral": 8, "ministral": 8, "qwen2": 32, "qwen3": 32, "qwen2_moe": 16, "qwen3_moe": 4,
    "mixtral": 8, "gemma2": 4, "gemma3_text": 4, "gpt_oss": 8, "glm4_moe": 8,
    "minimax_m2": 8,
}  # fmt: skip
# The files in which tools leave how they have quantized the weights.
QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
RMS_NORM_EPS = 1e-6
RMS_NORM_EPS_OF: dict[ModelFamily, float] = {
    "mixtral": 1e-5, "glm4_moe_lite": 1e-5, "gpt_oss": 1e-5, "glm4_moe": 1e-5,
    "phi3": 1e-5,
}  # fmt: skip
BIASES = ("llama", "qwen3", "qwen3_moe", "glm4_moe", *LAYER_FAMILIES)  # if attention_bias says so
BIASED = ("gpt_oss",)  # where attention_bias is absent
FUSED = ("phi3",)  # queries, keys and values are one tensor, and gates and ups
QK_NORMED = ("qwen3", "qwen3_moe", "gemma3_text", "minimax_m2")
GUESSING = ("glm4_moe", *LATENT_FAMILIES)  # whose num_nextn_predict_layers is read
DTYPE_OF = {"gpt_oss": "bfloat16"}  # whose published folders name none
TIED = ("youtu", "gemma2", "gemma3_text")  # where tie_word_embeddings is absent
# Fields that transformers honours in every family, where they say more than nothing.
UNSUPPORTED = ("attention_chunk_size", "per_layer_config", "text_config")


class DecoderConfig(msgspec.Struct, frozen=True):
    """A Llama-family decoder.

    With latent attention a layer stores one row for all heads: `num_kv_heads` is 1, and `head_dim`
    is the length of the row.

    In all layers but `full_layers`, a token sees itself and `sliding_window - 1` tokens before it.
    `dtype` is the checkpoint's (float16 is widened); a setting may override it.
    """

    family: ModelFamily
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
    sliding_window: int | None
    dtype: DecoderDtype
    is_widened: bool  # the checkpoint's weights are float16
    eos_token_ids: tuple[int, ...]
    quantization: Quantization | None = None
    experts: ExpertsConfig | None = None
    full_layers: tuple[int, ...] = ()
    latent: LatentConfig | None = None
    num_nextn_predict_layers: int = 0  # in the files after the others; they only guess tokens
    layers: LayersConfig = LayersConfig()
    local_rope: Rope | None = None  # of layers with a window, if they have one of their own

    @property
    def is_fused(self) -> bool:
        """Return whether the files hold QKV in one tensor, and gates and ups in another."""
        return self.family in FUSED

    @property
    def rotary_dim(self) -> int:
        return self.head_dim if self.latent is None else self.latent.qk_rope_head_dim

    @property
    def attention_scale(self) -> float:
        """Return the factor of queries times keys."""
        width = self.head_dim if self.latent is None else self.latent.qk_head_dim
        scale: float = self.layers.scale or width**-0.5
        return scale if self.latent is None else scale * self.rope.score_factor

    def window_of(self, layer: int) -> int | None:
        return None if layer in self.full_layers else self.sliding_window

    def rope_of(self, layer: int) -> Rope:
        return self.rope if self.window_of(layer) is None else self.local_rope or self.rope

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """Return the experts of a layer; None where it has a dense MLP."""
        if self.experts is None or layer in self.experts.mlp_only_layers:
            return None
        return self.experts


def read_decoder_config(folder: Path) -> DecoderConfig:
    """Return a folder's decoder. Raises a one-line `ConfigError` that names file and field."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; a Hugging Face model folder is needed")
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(f"{folder} has no config.json; a Hugging Face model folder is needed")
    family = _family(file, read_json(file, _Kind))
    raw = read_json(file, _RawConfig)
    kv_heads = raw.num_key_value_heads
    if isinstance(kv_heads, UnsetType):
        kv_heads = ABSENT_KV_HEADS.get(family)
    num_kv_heads = kv_heads or raw.num_attention_heads
    head_dim = raw.head_dim or HEAD_DIM_OF.get(family, raw.hidden_size // raw.num_attention_heads)
    latent = None
    if family in LATENT_FAMILIES:
        latent = latent_config(file, family, read_json(file, RawLatent))
        num_kv_heads, head_dim = 1, latent.row_dim
    _check(file, family, raw, num_kv_heads, head_dim if latent is None else latent.qk_rope_head_dim)
    has_bias = family in BIASED if raw.attention_bias is None else raw.attention_bias
    has_bias = has_bias and family in BIASES
    layers = LayersConfig()
    if family in LAYER_FAMILIES:
        layers = layers_config(file, family, read_json(file, RawLayers))
    eps = raw.rms_norm_eps
    if isinstance(eps, UnsetType):
        eps = RMS_NORM_EPS_OF.get(family, RMS_NORM_EPS)
    experts = None
    if family in EXPERT_FAMILIES:
        experts = experts_config(file, family, read_json(file, RawExperts))
    if family in GROUPED_FAMILIES:
        experts = grouped_experts(file, family, read_json(file, RawGrouped))
    rope, local_rope = ropes_config(file, family, read_json(file, RawRope))
    _check_rotated(file, rope, head_dim if latent is None else latent.qk_rope_head_dim)
    num_positions = max(raw.max_position_embeddings, rope.num_positions)
    window, full_layers = _sliding_window(file, family, raw, num_positions)
    return DecoderConfig(
        family=family,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        num_layers=raw.num_hidden_layers,
        num_heads=raw.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=num_positions,
        rms_norm_eps=eps,
        rope=rope,
        tie_word_embeddings=(
            family in TIED if raw.tie_word_embeddings is None else raw.tie_word_embeddings
        ),
        qkv_bias=has_bias or family == "qwen2" or (family == "qwen2_moe" and raw.qkv_bias),
        output_bias=has_bias and family != "glm4_moe",
        mlp_bias=raw.mlp_bias and family == "llama",
        qk_norm=raw.use_qk_norm if family == "glm4_moe" else family in QK_NORMED,
        joins_qk_norm=family == "minimax_m2",
        sliding_window=window,
        full_layers=full_layers,
        quantization=_quantization(file, raw),
        dtype=_dtype(file, family, raw),
        is_widened=(raw.dtype or raw.torch_dtype) == "float16",
        eos_token_ids=_eos_token_ids(folder, raw),
        experts=experts,
        latent=latent,
        num_nextn_predict_layers=raw.num_nextn_predict_layers if family in GUESSING else 0,
        layers=layers,
        local_rope=local_rope,
    )


class _Kind(msgspec.Struct):
    """The fields that are read first, so that an unknown architecture is reported as such."""

    architectures: tuple[str, ...] | None = None
    model_type: str = ""


class _RawConfig(msgspec.Struct):
    """The fields of config.json that affect the computation; all others are ignored."""

    vocab_size: Positive
    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    max_position_embeddings: Annotated[int, Meta(gt=0, le=MAX_POSITIONS)]
    num_key_value_heads: Positive | UnsetType | None = UNSET
    head_dim: Positive | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float | UnsetType = UNSET
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    qkv_bias: bool = True
    mlp_bias: bool = False
    use_qk_norm: bool = False
    num_nextn_predict_layers: Annotated[int, Meta(ge=0)] = 0
    use_sliding_window: bool = False
    sliding_window: Annotated[int, Meta(ge=0)] | UnsetType | None = UNSET
    max_window_layers: int = QWEN_MAX_WINDOW_LAYERS
    sliding_window_pattern: Positive | None = None
    layer_types: tuple[str, ...] | None = None
    is_causal: bool = True
    attention_chunk_size: object = None
    per_layer_config: object = None
    text_config: object = None
    quantization_config: dict[str, object] | None = None
    compression_config: dict[str, object] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: int | tuple[int, ...] | None = None


class _RawGeneration(msgspec.Struct):
    eos_token_id: int | tuple[int, ...] | None = None


def read_json(file: Path, kind: type[T]) -> T:
    """Return what a file says; of a `WRAPPED` model's config.json, what it says of its text.

    Raises a one-line `ConfigError` that names the file.
    """
    try:
        data = file.read_bytes()
        if file.name == "config.json" and (text := _text_of(data)) is not None:
            return msgspec.convert(text, kind)
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None


def _text_of(data: bytes) -> dict[str, object] | None:
    """Return the fields of the text's decoder; None if the model is not one of `WRAPPED`."""
    named = msgspec.json.decode(data, type=_Kind).architectures
    if not named or named[0] not in WRAPPED:
        return None
    whole = msgspec.json.decode(data, type=dict[str, object])
    text = msgspec.convert(whole.get("text_config"), dict[str, object])
    shared = {name: whole[name] for name in WHOLE_FIELDS if name in whole}
    return {**WRAPPED_FIELDS, **shared, **text, "architectures": [WRAPPED[named[0]]]}


def _family(file: Path, kind: _Kind) -> ModelFamily:
    named = kind.architectures or ()
    for name in named:
        if name in ARCHITECTURES:
            family = ARCHITECTURES[name]
            if ALSO_CALLED.get(kind.model_type, kind.model_type) not in ("", family):
                raise ConfigError(
                    f"{file}: model_type {kind.model_type!r} contradicts the architecture {name}, "
                    f"whose model_type is {family!r}"
                )
            return family
    by_type: dict[str, ModelFamily] = {family: family for family in ARCHITECTURES.values()}
    if not named and kind.model_type in by_type:
        return by_type[kind.model_type]
    found = ", ".join(named) or kind.model_type or "nothing"
    raise ConfigError(f"{file}: architectures names {found}; baton runs {', '.join(ARCHITECTURES)}")


def _check(
    file: Path, family: ModelFamily, raw: _RawConfig, num_kv_heads: int, head_dim: int
) -> None:
    has_silu = raw.hidden_act == "silu" or family in LAYER_FAMILIES
    refusals = (
        (not has_silu, f"hidden_act {raw.hidden_act!r} is not supported, only 'silu'"),
        (
            raw.num_attention_heads % num_kv_heads != 0,
            "num_key_value_heads must divide num_attention_heads",
        ),
        (head_dim % 2 != 0, f"head_dim must be even for rotary embedding, not {head_dim}"),
        (not raw.is_causal, "is_causal is false: tokens that see later ones are not supported"),
        *((bool(getattr(raw, name)), f"{name} is not supported") for name in UNSUPPORTED),
    )
    for is_refused, text in refusals:
        if is_refused:
            raise ConfigError(f"{file}: {text}")


def _check_rotated(file: Path, rope: Rope, head_dim: int) -> None:
    pairs, odd = divmod(rope.rotated(head_dim), 2)
    if odd or not pairs:
        raise ConfigError(f"{file}: partial_rotary_factor must rotate an even part of {head_dim}")
    for name in ("short_factor", "long_factor") if rope.scaling == "longrope" else ():
        if (count := len(getattr(rope, name))) != pairs:
            raise ConfigError(f"{file}: {name} has {count} numbers, but {pairs} pairs are rotated")


def _quantization(file: Path, raw: _RawConfig) -> Quantization | None:
    given = raw.quantization_config
    if given is None:
        given = raw.compression_config
    if given is not None:
        return read_quantization(file, given)
    if other := [name for name in QUANTIZATION_FILES if (file.parent / name).is_file()]:
        raise ConfigError(
            f"{file} has no quantization_config, but {other[0]} is there: baton reads how weights "
            "are quantized from config.json alone"
        )
    return None


def _sliding_window(
    file: Path, family: ModelFamily, raw: _RawConfig, num_positions: int
) -> tuple[int | None, tuple[int, ...]]:
    """Return the window and the layers that see everything.

    The window is None if no layer has one that is shorter than the model's length.
    """
    default = SLIDING_WINDOW_OF.get(family, SLIDING_WINDOW)
    absent = None if family in ("mixtral", "phi3", *NO_WINDOWS) else default
    window = absent if isinstance(raw.sliding_window, UnsetType) else raw.sliding_window
    if family.startswith("qwen") and not raw.use_sliding_window:
        window = None
    kinds = set(raw.layer_types or ())
    if kinds and (kinds - LAYER_TYPES or len(raw.layer_types or ()) != raw.num_hidden_layers):
        raise ConfigError(
            f"{file}: layer_types must name one of {', '.join(sorted(LAYER_TYPES))} for each of "
            f"{raw.num_hidden_layers} layers"
        )
    if window is None and ("sliding_attention" in kinds or family in LOCAL_ROPE):
        raise ConfigError(f"{file}: layer_types: sliding_attention needs a sliding_window")
    if window == 0:
        raise ConfigError(f"{file}: sliding_window must be at least 1")
    if window is None or (window >= num_positions and family not in LOCAL_ROPE):
        return None, ()
    if family in NO_WINDOWS:
        raise ConfigError(f"{file}: sliding_window is not supported in models of {family}")
    layers = range(raw.num_hidden_layers)
    if raw.layer_types:
        full = tuple(layer for layer in layers if raw.layer_types[layer] == "full_attention")
        if full and family in WINDOWS_EVERYWHERE:
            raise ConfigError(f"{file}: layer_types: {family} has the window in all layers")
    elif pattern := WINDOW_PATTERN.get(family):
        if family in LOCAL_ROPE:
            pattern = raw.sliding_window_pattern or pattern
        full = tuple(layers[pattern - 1 :: pattern])
    elif family == "qwen2_moe":  # in turns, up to a layer
        full = tuple(layer for layer in layers if layer % 2 or layer >= raw.max_window_layers)
    elif family in ("mistral", "ministral", *WINDOWS_EVERYWHERE):
        full = ()
    else:
        full = tuple(layer for layer in layers if layer < raw.max_window_layers)
    return (None, ()) if len(full) == len(layers) else (window, full)


def _dtype(file: Path, family: ModelFamily, raw: _RawConfig) -> DecoderDtype:
    match raw.dtype or raw.torch_dtype or DTYPE_OF.get(family, "float32"):
        case "bfloat16":
            return "bfloat16"
        case "float32" | "float16":
            return "float32"
        case other:
            raise ConfigError(f"{file}: dtype {other!r} is not supported")


def _eos_token_ids(folder: Path, raw: _RawConfig) -> tuple[int, ...]:
    """Return every id that either file calls an end, in ascending order."""
    given = [raw.eos_token_id]
    generation = folder / "generation_config.json"
    if generation.is_file():
        given.append(read_json(generation, _RawGeneration).eos_token_id)
    ids: set[int] = set()
    for entry in given:
        if entry is not None:
            ids |= {entry} if isinstance(entry, int) else set(entry)
    return tuple(sorted(ids))
