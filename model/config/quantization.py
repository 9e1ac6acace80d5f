"""How config.json says that the weights of linear layers are quantized: to integers or FP8.

Weights are multiplied by their scales when they are loaded, so products take the type of the other
tensors. Activations, keys and values are not quantized, which is more exact than what such a folder
asks for. A CPU that multiplies int8 numbers by themselves does so where the folder wants both in
int8, and kernels that widen weights of four bits or FP8 a tile at a time keep them so.
This file never imports torch.
"""

from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from baton.protocol.errors import ConfigError

Side = Annotated[int, Meta(gt=0)]
# Fields of a quantization_config that do not change what the stored numbers mean.
_HARMLESS = frozenset({
    "activation_scheme", "backend", "batch_size", "bits", "cache_block_size", "checkpoint_format",
    "config_groups", "damp_percent", "dataset", "dequantize", "desc_act", "exllama_config", "fmt",
    "format", "fuse_max_seq_len", "global_compression_ratio", "group_size", "ignore",
    "ignored_layers", "is_marlin_format", "kv_cache_scheme", "max_input_length", "meta",
    "model_file_base_name", "model_name_or_path", "model_seqlen", "modules_in_block_to_quantize",
    "modules_to_not_convert", "pack_dtype", "pad_token_id", "producer", "quant_algo",
    "quant_method", "quantization_status", "scale_fmt", "sparsity_config", "static_groups", "sym",
    "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama", "version", "weight_block_size",
    "zero_point",
})  # fmt: skip
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
# The checkpoint formats of GPTQ, and how much smaller than they are zero points are stored.
_GPTQ_OFFSETS = {"gptq": 1, "gptq_v2": 0}
_METHODS = ("fp8", "compressed-tensors", "modelopt", "awq", "gptq", "mxfp4")


WORDS, FLOATS, BYTES = ("I32",), ("F32", "F16", "BF16"), ("U8",)


class Part(NamedTuple):
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


class Packing(msgspec.Struct, frozen=True):
    """How AWQ, GPTQ and compressed-tensors pack the integers of weights into words of 32 bits.

    Several tensors take the place of `X.weight`. Inputs are in groups, and each output has a scale
    and a zero point for every group. MXFP4 packs the floats of all experts into bytes, beside
    scales that are powers of two.
    """

    form: Literal["awq", "gptq", "compressed-tensors", "mxfp4"]
    bits: int
    group_size: int  # inputs; 0 is all of them
    has_zeros: bool = True  # else zero is the middle of the integers
    zero_offset: int = 0  # that is missing in the stored zero points

    @property
    def first(self) -> str:
        """Return the tensor that says that a weight is packed."""
        names = {"compressed-tensors": "weight_packed", "mxfp4": "_blocks"}
        return names.get(self.form, "qweight")

    @property
    def scales(self) -> str:
        return "weight_scale" if self.form == "compressed-tensors" else "scales"

    def groups(self, inputs: int) -> int:
        return -(-inputs // (self.group_size or inputs))

    def parts(self, shape: tuple[int, ...]) -> dict[str, Part]:
        """Return the tensors that stand for a weight `[outputs, inputs]`, or for experts."""
        *experts, outputs, inputs = shape
        if self.form == "mxfp4":
            scales = (*experts, inputs, outputs // self.group_size)  # experts are turned
            half = self.group_size // 2
            return {"_blocks": Part((*scales, half), BYTES), "_scales": Part(scales, BYTES)}
        per_word, groups = 32 // self.bits, self.groups(inputs)
        if self.form == "compressed-tensors":
            zeros = {"weight_zero_point": Part((-(-outputs // per_word), groups), WORDS)}
            return {
                "weight_packed": Part((outputs, -(-inputs // per_word)), WORDS),
                "weight_scale": Part((outputs, groups), FLOATS),
                "weight_shape": Part((2,), ("I32", "I64")),
            } | (zeros if self.has_zeros else {})
        common = {
            "qzeros": Part((groups, outputs // per_word), WORDS),
            "scales": Part((groups, outputs), FLOATS),
        }
        if self.form == "awq":
            return {"qweight": Part((inputs, outputs // per_word), WORDS)} | common
        words = Part((inputs // per_word, outputs), WORDS)
        return {"qweight": words, "g_idx": Part((inputs,), WORDS)} | common


class Quantization(msgspec.Struct, frozen=True):
    """A weight whose stored type is `stored` has a tensor of scales beside it."""

    stored: str  # F8_E4M3, I8, or I32 with a `packing`
    scale_suffix: str = "weight_scale"
    strategy: str = "tensor"  # or channel or block
    block: tuple[int, int] | None = None  # rows and columns that share a scale
    # Each row of inputs is rounded to int8, too, where a device multiplies such integers.
    rounds_inputs: bool = False
    packing: Packing | None = None  # of tensors that take the place of the weight
    has_kv_scales: bool = False  # of keys and values, which are not needed

    def scale_of(self, name: str) -> str:
        return name.removesuffix("weight") + self.scale_suffix

    def input_scale_of(self, name: str) -> str:
        """Return a tensor that a folder may have, and which is not needed."""
        return name.removesuffix("weight") + "input_scale"

    def scale_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the shapes that the scales of a weight `[outputs, inputs]` may have."""
        if self.block is not None:
            return (tuple(-(-size // side) for size, side in zip(shape, self.block, strict=True)),)
        return ((shape[0], 1), (shape[0],)) if self.strategy == "channel" else ((), (1,))


class _Weights(msgspec.Struct):
    num_bits: int
    type: str
    strategy: str = "tensor"
    symmetric: bool = True
    dynamic: bool = False
    block_structure: tuple[Side, Side] | None = None
    group_size: int | None = None
    actorder: str | bool | None = None


class _Activations(msgspec.Struct):
    dynamic: bool | str = False
    num_bits: int = 8
    type: str = "int"
    strategy: str = "tensor"
    symmetric: bool = True

    @property
    def is_bytes_by_row(self) -> bool:
        kind = self.num_bits, self.type, self.strategy, self.dynamic
        return kind == (8, "int", "token", True) and self.symmetric


class _Group(msgspec.Struct):
    weights: _Weights
    input_activations: _Activations | None = None
    output_activations: _Activations | None = None


class _Sparsity(msgspec.Struct):
    format: str = "dense"


class _Config(msgspec.Struct):
    quant_method: str = ""
    # Of fine-grained FP8.
    activation_scheme: str = "dynamic"
    weight_block_size: tuple[Side, Side] | None = None
    # Of compressed-tensors.
    format: str = ""
    config_groups: dict[str, _Group] = {}
    sparsity_config: _Sparsity | None = None
    # Of ModelOpt.
    quant_algo: str = ""
    # Of AWQ and GPTQ.
    bits: int = 4
    group_size: int = 128
    version: str = "gemm"
    zero_point: bool = True
    checkpoint_format: str = ""
    is_marlin_format: bool = False
    pack_dtype: str = "int32"
    # Of compressed-tensors and ModelOpt.
    kv_cache_scheme: dict[str, object] | None = None


def read_quantization(file: Path, raw: dict[str, object]) -> Quantization:
    """Return what a quantization_config says. Raises `ConfigError` for what baton cannot load."""
    where = f"{file}: quantization_config"
    method = raw.get("quant_method")
    if method not in _METHODS:
        raise ConfigError(
            f"{where}: the weights are quantized by {method or 'an unnamed method'}, and baton "
            f"loads {', '.join(_METHODS)}"
        )
    try:
        given = msgspec.convert(raw, _Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from None
    for field, value in raw.items():
        if value and field not in _HARMLESS:
            raise ConfigError(f"{where}: {field} is not supported")
    has_kv_scales = given.kv_cache_scheme is not None
    return msgspec.structs.replace(_of_weights(where, given), has_kv_scales=has_kv_scales)


def _of_weights(where: str, given: _Config) -> Quantization:
    match given.quant_method:
        case "mxfp4":
            return Quantization("U8", packing=Packing("mxfp4", 4, 32))
        case "fp8" if given.weight_block_size is not None:
            return Quantization("F8_E4M3", "weight_scale_inv", "block", given.weight_block_size)
        case "modelopt" if given.quant_algo != "FP8":
            raise ConfigError(
                f"{where}: quant_algo {given.quant_algo!r} is not supported, only FP8"
            )
        case "fp8" | "modelopt":
            return Quantization("F8_E4M3")
        case "awq" | "gptq":
            return _grouped(where, given)
    return _compressed(where, given)


def _grouped(where: str, given: _Config) -> Quantization:
    """Return what AWQ and GPTQ say."""
    is_awq = given.quant_method == "awq"
    if given.bits not in ((4,) if is_awq else (4, 8)):
        raise ConfigError(f"{where}: {given.quant_method} of {given.bits} bits is not supported")
    if given.group_size != -1 and given.group_size < 1:
        raise ConfigError(f"{where}: group_size {given.group_size} is neither -1 nor above 0")
    if is_awq and (given.version.lower() != "gemm" or not given.zero_point):
        raise ConfigError(f"{where}: only version gemm of awq with zero_point is supported")
    offset = 0 if is_awq else _gptq_offset(where, given)
    group_size = max(0, given.group_size)
    packing = Packing("awq" if is_awq else "gptq", given.bits, group_size, zero_offset=offset)
    return Quantization("I32", packing.scales, "group", packing=packing)


def _gptq_offset(where: str, given: _Config) -> int:
    """Return how much smaller zero points are stored than they are."""
    formats = {given.checkpoint_format, given.format} - {""} or {"gptq"}
    if given.is_marlin_format or len(formats) > 1 or not formats <= _GPTQ_OFFSETS.keys():
        raise ConfigError(f"{where}: only checkpoint_format {' or '.join(_GPTQ_OFFSETS)} is known")
    if given.pack_dtype != "int32":
        raise ConfigError(f"{where}: pack_dtype {given.pack_dtype!r} is not supported, only int32")
    return _GPTQ_OFFSETS[formats.pop()]


def _compressed(where: str, given: _Config) -> Quantization:
    groups = list(given.config_groups.values())
    if not groups or any(group.weights != groups[0].weights for group in groups):
        raise ConfigError(f"{where}: config_groups must quantize all weights in one way")
    if given.format not in _FORMATS or (given.sparsity_config or _Sparsity()).format != "dense":
        raise ConfigError(f"{where}: only {', '.join(_FORMATS)} without sparsity are supported")
    if any(group.output_activations for group in groups):
        raise ConfigError(f"{where}: output_activations are not supported")
    weights = groups[0].weights
    if given.format == "pack-quantized":
        return _packed(where, weights)
    stored = {"float": "F8_E4M3", "int": "I8"}.get(weights.type)
    is_plain = weights.num_bits == 8 and weights.symmetric and not weights.dynamic
    known = ("tensor", "channel", *(["block"] if weights.block_structure else []))
    if stored is None or not is_plain or weights.strategy not in known:
        raise ConfigError(
            f"{where}: weights of {weights.num_bits} bits, type {weights.type} and strategy "
            f"{weights.strategy} are not supported, only symmetric ones of 8 bits by tensor, "
            "channel or block"
        )
    block = weights.block_structure if weights.strategy == "block" else None
    rounds = (
        stored == "I8"
        and not block
        and all(
            group.input_activations and group.input_activations.is_bytes_by_row for group in groups
        )
    )
    return Quantization(stored, "weight_scale", weights.strategy, block, rounds)


def _packed(where: str, weights: _Weights) -> Quantization:
    size = {"channel": 0, "group": weights.group_size or 0}.get(weights.strategy)
    is_known = weights.type == "int" and weights.num_bits in (4, 8) and not weights.dynamic
    if not is_known or size is None or size < (weights.strategy == "group"):
        raise ConfigError(
            f"{where}: packed weights of {weights.num_bits} bits, type {weights.type} and strategy "
            f"{weights.strategy} are not supported, only integers of 4 or 8 bits by channel or "
            "group"
        )
    if weights.actorder in ("group", "dynamic", True):
        raise ConfigError(f"{where}: actorder {weights.actorder!r} is not supported")
    packing = Packing("compressed-tensors", weights.num_bits, size, has_zeros=not weights.symmetric)
    return Quantization("I32", packing.scales, weights.strategy, packing=packing)
