"""How config.json says that the weights of linear layers are quantized: to eight bits and scales.

Weights are multiplied by their scales when they are loaded, so products take the type of the other
tensors, and activations are not quantized, which is more exact than what such a folder asks for.
A CPU that multiplies int8 numbers by themselves does so where the folder wants both in int8.
It never imports torch.
"""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from baton.protocol.errors import ConfigError

Side = Annotated[int, Meta(gt=0)]
# Fields of a quantization_config that do not change what the stored numbers mean.
_HARMLESS = frozenset({
    "activation_scheme", "config_groups", "dequantize", "fmt", "format", "global_compression_ratio",
    "ignore", "ignored_layers", "modules_to_not_convert", "quant_method", "quantization_status",
    "scale_fmt", "sparsity_config", "version", "weight_block_size",
})  # fmt: skip
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")


class Quantization(msgspec.Struct, frozen=True):
    """A weight whose stored type is `stored` has a tensor of scales beside it."""

    stored: str  # F8_E4M3 or I8
    scale_suffix: str
    strategy: str  # tensor, channel or block
    block: tuple[int, int] | None = None  # rows and columns that share a scale
    # Each row of inputs is rounded to int8, too, where a device multiplies such integers.
    rounds_inputs: bool = False

    def scale_of(self, name: str) -> str:
        return name.removesuffix("weight") + self.scale_suffix

    def scale_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the shapes that the scales of a weight `[outputs, inputs]` may have."""
        if self.block is not None:
            return (tuple(-(-size // side) for size, side in zip(shape, self.block, strict=True)),)
        return ((shape[0], 1), (shape[0],)) if self.strategy == "channel" else ((), (1,))


class _Weights(msgspec.Struct):
    num_bits: int
    type: str
    strategy: str
    symmetric: bool = True
    dynamic: bool = False
    block_structure: tuple[Side, Side] | None = None


class _Activations(msgspec.Struct):
    dynamic: bool | str = False
    num_bits: int = 8
    type: str = "int"
    strategy: str = "tensor"
    symmetric: bool = True

    @property
    def is_bytes_by_row(self) -> bool:
        return (self.num_bits, self.type, self.strategy) == (8, "int", "token") and self.symmetric


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


def read_quantization(file: Path, raw: dict[str, object]) -> Quantization:
    """Return what a quantization_config says. Raises `ConfigError` for what baton cannot load."""
    where = f"{file}: quantization_config"
    method = raw.get("quant_method")
    if method not in ("fp8", "compressed-tensors"):
        raise ConfigError(
            f"{where}: the weights are quantized by {method or 'an unnamed method'}, and baton "
            "loads fp8 with blocks and compressed-tensors of eight bits"
        )
    try:
        given = msgspec.convert(raw, _Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from None
    for field, value in raw.items():
        if value and field not in _HARMLESS:
            raise ConfigError(f"{where}: {field} is not supported")
    if method == "fp8":
        if given.weight_block_size is None or given.activation_scheme != "dynamic":
            raise ConfigError(f"{where}: fp8 needs weight_block_size and dynamic activations")
        return Quantization("F8_E4M3", "weight_scale_inv", "block", given.weight_block_size)
    return _compressed(where, given)


def _compressed(where: str, given: _Config) -> Quantization:
    groups = list(given.config_groups.values())
    if not groups or any(group.weights != groups[0].weights for group in groups):
        raise ConfigError(f"{where}: config_groups must quantize all weights in one way")
    if given.format not in _FORMATS or (given.sparsity_config or _Sparsity()).format != "dense":
        raise ConfigError(f"{where}: only {', '.join(_FORMATS)} without sparsity are supported")
    for group in groups:
        inputs = group.input_activations
        if group.output_activations or (inputs and not inputs.dynamic):
            raise ConfigError(f"{where}: only dynamic scales of input_activations are supported")
    weights = groups[0].weights
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
