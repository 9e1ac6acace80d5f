"""How config.json says that the weights of linear layers are quantized: to integers or FP8.

Weights are multiplied by their scales when they are loaded, so products take the type of the other
tensors. Activations, keys and values are not quantized, which is more exact than what such a folder
asks for. A CPU that multiplies int8 numbers by themselves does so where the folder wants both in
int8, and kernels that widen weights of four bits or FP8 a tile at a time keep them so.
This file never imports torch.
"""

import re
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from baton.model.config.packing import FLOATS, POWERS, Codebook, Fp4Names, Packing
from baton.protocol.errors import ConfigError

Side = Annotated[int, Meta(gt=0)]
# Fields of a quantization_config that do not change what the stored numbers mean.
_HARMLESS = frozenset(
    {
        "_load_in_4bit",
        "_load_in_8bit",
        "act_bits",
        "act_data_type",
        "act_dynamic",
        "act_group_size",
        "act_sym",
        "activation_scale_ub",
        "activation_scheme",
        "amp",
        "autoround_version",
        "backend",
        "batch_size",
        "bits",
        "block_name_to_quantize",
        "bnb_4bit_compute_dtype",
        "bnb_4bit_quant_storage",
        "bnb_4bit_quant_type",
        "bnb_4bit_use_double_quant",
        "cache_block_size",
        "data_type",
        "enable_minmax_tuning",
        "enable_norm_bias_tuning",
        "enable_quanted_input",
        "extra_config",
        "gradient_accumulate_steps",
        "iters",
        "llm_int8_enable_fp32_cpu_offload",
        "llm_int8_has_fp16_weight",
        "llm_int8_skip_modules",
        "llm_int8_threshold",
        "load_in_4bit",
        "load_in_8bit",
        "low_gpu_mem_usage",
        "lr",
        "minmax_lr",
        "nsamples",
        "packing_format",
        "quant_block_list",
        "quant_lm_head",
        "scale_dtype",
        "seqlen",
        "to_quant_block_names",
        "checkpoint_format",
        "config_groups",
        "damp_percent",
        "dataset",
        "dequantize",
        "desc_act",
        "exllama_config",
        "fmt",
        "format",
        "fuse_max_seq_len",
        "global_compression_ratio",
        "group_size",
        "ignore",
        "ignored_layers",
        "is_marlin_format",
        "kv_cache_scheme",
        "max_input_length",
        "meta",
        "model_file_base_name",
        "model_name_or_path",
        "model_seqlen",
        "modules_in_block_to_quantize",
        "modules_to_not_convert",
        "pack_dtype",
        "pad_token_id",
        "producer",
        "q_group_size",
        "quant_algo",
        "quant_method",
        "quantization_status",
        "scale_fmt",
        "sparsity_config",
        "static_groups",
        "sym",
        "tokenizer",
        "true_sequential",
        "use_cuda_fp16",
        "use_exllama",
        "version",
        "w_bit",
        "weight_block_size",
        "zero_point",
    }
)
# The checkpoint formats of GPTQ, and how much smaller than they are zero points are stored.
_GPTQ_OFFSETS = {"gptq": 1, "gptq_v2": 0}
# The packing formats of auto-round: whose tensors they have, and GPTQ's checkpoint format.
_AUTO_ROUND = {
    "auto_round:auto_gptq": ("gptq", "gptq"),
    "auto_round:gptq": ("gptq", "gptq"),
    "auto_round": ("gptq", "gptq_v2"),
    "auto_round:gptqmodel": ("gptq", "gptq_v2"),
    "auto_round:auto_awq": ("awq", ""),
    "auto_round:awq": ("awq", ""),
}
BNB_BLOCK = 64  # numbers that share a scale where bitsandbytes packs four bits
# The formats of compressed-tensors with one number in each place.
_PLAIN_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")
_METHODS = (
    "fp8",
    "fbgemm_fp8",
    "compressed-tensors",
    "modelopt",
    "modelopt_fp4",
    "awq",
    "gptq",
    "mxfp4",
    "bitsandbytes",
    "auto-round",
    "intel/auto-round",
)


class WeightFormat(msgspec.Struct, frozen=True):
    """How one kind of layer is stored: a weight of type `stored` has a tensor of scales beside it.

    `targets` names the layers: a class such as Linear, a name, or `re:` and a pattern.
    """

    stored: str  # F8_E4M3, I8, or the type of packed numbers
    scale_suffix: str = "weight_scale"
    strategy: str = "tensor"  # or channel or block
    block: tuple[int, int] | None = None  # rows and columns that share a scale
    # Each row of inputs is rounded to int8, too, where a device multiplies such integers.
    rounds_inputs: bool = False
    scale_dtypes: tuple[str, ...] = (*FLOATS, "F8_E8M0")
    packing: Packing | None = None  # of tensors that take the place of the weight
    targets: tuple[str, ...] = ("Linear",)
    scale_divisor: float = 1.0  # of each scale, before it multiplies

    def scale_of(self, name: str) -> str:
        return name.removesuffix("weight") + self.scale_suffix

    def scale_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the shapes that the scales of a weight `[outputs, inputs]` may have."""
        if self.block is not None:
            return (
                tuple(
                    -(-size // side)
                    for size, side in zip(shape, self.block, strict=True)
                ),
            )
        return (
            ((shape[0], 1), (shape[0],)) if self.strategy == "channel" else ((), (1,))
        )

    def names(self, layer: str) -> bool:
        """Return whether a target names this layer, and not only its class."""
        return any(
            re.match(target.removeprefix("re:"), layer) is not None
            if target.startswith("re:")
            else target == layer
            for target in self.targets
        )


class Quantization(msgspec.Struct, frozen=True):
    """The formats of a folder's weights. Layers whose tensors have none of them are plain."""

    formats: tuple[WeightFormat, ...]

    def of(self, layer: str) -> WeightFormat:
        """Return the format of a layer, such as `model.layers.0.mlp.up_proj`, if it has one."""
        named = (each for each in self.formats if each.names(layer))
        classes = (each for each in self.formats if "Linear" in each.targets)
        return next(named, None) or next(classes, self.formats[0])


class _Weights(msgspec.Struct):
    num_bits: int
    type: str
    strategy: str = "tensor"
    symmetric: bool = True
    dynamic: bool = False
    block_structure: tuple[Side, Side] | None = None
    group_size: int | None = None
    actorder: str | bool | None = None

    @property
    def is_plain(self) -> bool:
        return self.num_bits == 8 and self.symmetric and not self.dynamic


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
    targets: tuple[str, ...] = ("Linear",)
    format: str | None = None
    input_activations: _Activations | None = None
    output_activations: _Activations | None = None


class _Sparsity(msgspec.Struct):
    format: str = "dense"


class _LayerBits(msgspec.Struct):
    """What auto-round says of one layer, where it is not as the others."""

    bits: int | None = None
    group_size: int | None = None
    data_type: str | None = None


class _Config(msgspec.Struct):
    quant_method: str = ""
    # Of fine-grained FP8.
    activation_scheme: str = "dynamic"
    weight_block_size: tuple[Side, Side] | None = None
    # Of compressed-tensors.
    format: str = ""
    backend: str = ""
    config_groups: dict[str, _Group] = {}
    sparsity_config: _Sparsity | None = None
    # Of ModelOpt.
    quant_algo: str = ""
    # Of AWQ and GPTQ. Old folders of AWQ have the second names.
    bits: int | None = None
    w_bit: int | None = None
    group_size: int | None = None
    q_group_size: int | None = None
    version: str = "gemm"
    zero_point: bool = True
    checkpoint_format: str = ""
    is_marlin_format: bool = False
    pack_dtype: str = "int32"
    # Of bitsandbytes.
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_quant_storage: str | None = "uint8"
    # Of auto-round.
    packing_format: str = ""
    data_type: str = "int"
    extra_config: dict[str, _LayerBits] | None = None


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
    return Quantization(_formats(where, given))


class _ModelOpt(msgspec.Struct):
    """The part of hf_quant_config.json that says how weights are quantized."""

    quant_algo: str | None = None
    exclude_modules: tuple[str, ...] = ()


class _ModelOptFile(msgspec.Struct):
    quantization: _ModelOpt


def fields_of_tool(file: Path, data: bytes) -> dict[str, object] | None:
    """Return a quantization_config from the file that a tool left beside config.json.

    None means that the file quantizes no weights. Raises `ConfigError`.
    """
    try:
        if file.name == "hf_quant_config.json":
            given = msgspec.json.decode(data, type=_ModelOptFile).quantization
            if not given.quant_algo:
                return None
            return {"quant_method": "modelopt", "quant_algo": given.quant_algo}
        fields = msgspec.json.decode(data, type=dict[str, object])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file}: {error}") from None
    is_awq = file.name == "quant_config.json"
    return {"quant_method": "awq" if is_awq else "gptq", **fields}


def _formats(where: str, given: _Config) -> tuple[WeightFormat, ...]:
    match given.quant_method:
        case "mxfp4":
            return (WeightFormat("U8", packing=Packing("mxfp4", 4, 32)),)
        case "fp8" if given.weight_block_size is not None:
            block = given.weight_block_size
            return (WeightFormat("F8_E4M3", "weight_scale_inv", "block", block),)
        case "fp8":
            return (WeightFormat("F8_E4M3"),)
        case "fbgemm_fp8":
            return (WeightFormat("F8_E4M3", strategy="channel"),)
        case "modelopt" | "modelopt_fp4":
            return _modelopt(where, given)
        case "awq" | "gptq":
            return _grouped(where, given)
        case "bitsandbytes":
            return _bitsandbytes(where, given)
        case "auto-round" | "intel/auto-round":
            return _grouped(where, _of_auto_round(where, given), has_order=False)
    return _compressed(where, given)


_MXFP8 = WeightFormat("F8_E4M3", strategy="block", block=(1, 32), scale_dtypes=POWERS)
_NVFP4_OF_MODELOPT = Packing(
    "fp4", 4, 16, fp4=Fp4Names("weight", "weight_scale", "weight_scale_2")
)
_NVFP4 = Packing(
    "fp4",
    4,
    16,
    fp4=Fp4Names("weight_packed", "weight_scale", "weight_global_scale", divides=True),
)
# ModelOpt's names of ways to quantize weights.
_MODELOPT = {
    "FP8": WeightFormat("F8_E4M3"),
    "FP8_PER_CHANNEL_PER_TOKEN": WeightFormat("F8_E4M3", strategy="channel"),
    "MXFP8": _MXFP8,
    "NVFP4": WeightFormat("U8", packing=_NVFP4_OF_MODELOPT),
    "W4A16_NVFP4": WeightFormat("U8", packing=_NVFP4_OF_MODELOPT),
}


def _modelopt(where: str, given: _Config) -> tuple[WeightFormat, ...]:
    if given.quant_algo not in _MODELOPT:
        raise ConfigError(
            f"{where}: quant_algo {given.quant_algo!r} is not supported, only "
            f"{', '.join(_MODELOPT)}"
        )
    return (_MODELOPT[given.quant_algo],)


def _bitsandbytes(where: str, given: _Config) -> tuple[WeightFormat, ...]:
    if given.load_in_8bit:
        return (WeightFormat("I8", "SCB", "channel", scale_divisor=127.0),)
    kind = given.bnb_4bit_quant_type
    if not given.load_in_4bit or kind not in ("nf4", "fp4"):
        raise ConfigError(
            f"{where}: only load_in_8bit, and load_in_4bit with nf4 or fp4, is known"
        )
    if given.bnb_4bit_quant_storage not in (None, "uint8"):
        storage = given.bnb_4bit_quant_storage
        raise ConfigError(
            f"{where}: bnb_4bit_quant_storage {storage!r} is not supported, only uint8"
        )
    codebook = Codebook(kind, given.bnb_4bit_use_double_quant)
    return (
        WeightFormat("U8", packing=Packing("bnb", 4, BNB_BLOCK, codebook=codebook)),
    )


def _of_auto_round(where: str, given: _Config) -> _Config:
    """Return what AWQ or GPTQ would say of the same tensors."""
    name = given.packing_format or given.backend
    if name not in _AUTO_ROUND or given.data_type != "int":
        raise ConfigError(
            f"{where}: auto-round's packing_format {name!r} with data_type {given.data_type!r} is "
            f"not supported, only {', '.join(_AUTO_ROUND)} with int"
        )
    for layer, own in (given.extra_config or {}).items():
        is_plain = own.bits is not None and own.bits >= 16
        is_as_others = own.bits in (None, given.bits) and own.group_size in (
            None,
            given.group_size,
        )
        if not is_plain and not is_as_others:
            raise ConfigError(
                f"{where}: extra_config gives {layer} other bits or groups, which is not supported"
            )
    method, stored = _AUTO_ROUND[name]
    return msgspec.structs.replace(
        given,
        quant_method=method,
        checkpoint_format=stored,
        format="",
        version="gemm",
        zero_point=True,
    )


def _grouped(
    where: str, given: _Config, *, has_order: bool = True
) -> tuple[WeightFormat, ...]:
    """Return what AWQ and GPTQ say."""
    is_awq = given.quant_method == "awq"
    bits = given.bits or given.w_bit or 4
    sizes = (given.group_size, given.q_group_size, 128)
    size = next(size for size in sizes if size is not None)
    if bits not in ((4,) if is_awq else (4, 8)):
        raise ConfigError(
            f"{where}: {given.quant_method} of {bits} bits is not supported"
        )
    if size != -1 and size < 1:
        raise ConfigError(f"{where}: group_size {size} is neither -1 nor above 0")
    if is_awq and (given.version.lower() != "gemm" or not given.zero_point):
        raise ConfigError(
            f"{where}: only version gemm of awq with zero_point is supported"
        )
    offset = 0 if is_awq else _gptq_offset(where, given)
    form = Packing(
        "awq" if is_awq else "gptq",
        bits,
        max(0, size),
        zero_offset=offset,
        has_order=has_order and not is_awq,
    )
    return (WeightFormat("I32", form.scales, "group", packing=form),)


def _gptq_offset(where: str, given: _Config) -> int:
    """Return how much smaller zero points are stored than they are."""
    formats = {given.checkpoint_format, given.format} - {""} or {"gptq"}
    if (
        given.is_marlin_format
        or len(formats) > 1
        or not formats <= _GPTQ_OFFSETS.keys()
    ):
        raise ConfigError(
            f"{where}: only checkpoint_format {' or '.join(_GPTQ_OFFSETS)} is known"
        )
    if given.pack_dtype != "int32":
        raise ConfigError(
            f"{where}: pack_dtype {given.pack_dtype!r} is not supported, only int32"
        )
    return _GPTQ_OFFSETS[formats.pop()]


def _compressed(where: str, given: _Config) -> tuple[WeightFormat, ...]:
    """Return a format for each group of compressed-tensors."""
    groups = list(given.config_groups.values())
    if not groups:
        raise ConfigError(f"{where}: config_groups names no weights")
    if (given.sparsity_config or _Sparsity()).format != "dense":
        raise ConfigError(f"{where}: sparsity_config is not supported")
    if any(group.output_activations for group in groups):
        raise ConfigError(f"{where}: output_activations are not supported")
    for target in (target for group in groups for target in group.targets):
        try:
            re.compile(target.removeprefix("re:"))
        except re.error as error:
            raise ConfigError(
                f"{where}: targets: {target!r} is not a valid pattern: {error}"
            ) from None
    return tuple(
        msgspec.structs.replace(
            _format_of(where, group, group.format or given.format),
            targets=group.targets,
        )
        for group in groups
    )


def _format_of(where: str, group: _Group, name: str) -> WeightFormat:
    match name:
        case "pack-quantized":
            return _packed(where, group.weights)
        case "nvfp4-pack-quantized":
            return WeightFormat("U8", packing=_NVFP4)
        case "mxfp4-pack-quantized":
            return WeightFormat("U8", packing=Packing("fp4", 4, 32))
        case "mxfp8-quantized":
            return _MXFP8
    if name not in _PLAIN_FORMATS:
        known = (
            *_PLAIN_FORMATS,
            "pack-quantized",
            "nvfp4-pack-quantized",
            "mxfp4-pack-quantized",
            "mxfp8-quantized",
        )
        raise ConfigError(
            f"{where}: format {name!r} is not supported, only {', '.join(known)}"
        )
    return _plain(where, group)


def _plain(where: str, group: _Group) -> WeightFormat:
    """Return the format of numbers of eight bits each."""
    weights = group.weights
    stored = {"float": "F8_E4M3", "int": "I8"}.get(weights.type)
    known = ["tensor", "channel"]
    if weights.block_structure:
        known.append("block")
    if stored is None or not weights.is_plain or weights.strategy not in known:
        raise ConfigError(
            f"{where}: weights of {weights.num_bits} bits, type {weights.type} and strategy "
            f"{weights.strategy} are not supported, only symmetric ones of 8 bits by tensor, "
            "channel or block"
        )
    block = weights.block_structure if weights.strategy == "block" else None
    inputs = group.input_activations
    rounds = (
        stored == "I8" and not block and inputs is not None and inputs.is_bytes_by_row
    )
    return WeightFormat(stored, "weight_scale", weights.strategy, block, rounds)


def _packed(where: str, weights: _Weights) -> WeightFormat:
    size = {"channel": 0, "group": weights.group_size or 0}.get(weights.strategy)
    is_known = (
        weights.type == "int" and weights.num_bits in (4, 8) and not weights.dynamic
    )
    if not is_known or size is None or size < (weights.strategy == "group"):
        raise ConfigError(
            f"{where}: packed weights of {weights.num_bits} bits, type {weights.type} and strategy "
            f"{weights.strategy} are not supported, only integers of 4 or 8 bits by channel or "
            "group"
        )
    # With the order `weight` or `static`, a group's inputs are neighbours in the file.
    has_order = weights.actorder in ("group", "dynamic", True)
    packing = Packing(
        "compressed-tensors",
        weights.num_bits,
        size,
        has_zeros=not weights.symmetric,
        has_order=has_order and weights.strategy == "group",
    )
    return WeightFormat("I32", packing.scales, weights.strategy, packing=packing)
