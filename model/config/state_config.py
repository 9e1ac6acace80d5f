"""The layers with a state per sequence that config.json describes, and their tensors.

Such a layer has no keys and values: its heads keep a matrix each, and a short convolution its last
inputs. This module never imports torch.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton.kernels.state_layout import StateShape
from baton.model.config.reading import converted
from baton.model.config.tensor_parts import LinearTensors, NormTensor, Shape, Units
from baton.model.families.family import StateLayers
from baton.protocol.errors import ConfigError

_Positive = Annotated[int, Meta(gt=0)]


class StateConfig(msgspec.Struct, frozen=True):
    """The sizes of the layers with a state, on all ranks together."""

    names: StateLayers
    layers: tuple[int, ...]  # in ascending order
    num_heads: int
    # Divides `num_heads`; of a convolution alone, each channel is one.
    num_key_heads: int
    key_dim: int
    value_dim: int
    num_taps: int
    has_tap_biases: bool = False
    step_limits: tuple[float, float] = (0.0, math.inf)

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Return how many numbers of a token the convolution takes."""
        if self.names.kind == "conv":
            return self.num_key_heads
        return 2 * self.key_size + self.value_size

    def num_groups(self, kv_heads: int) -> int:
        """Return into how many groups of heads the parts of `kv_heads` of a block divide it."""
        return math.gcd(self.num_key_heads, kv_heads)

    def shape(self, kv_heads: int, num_ranks: int) -> StateShape:
        """Return one rank's state. Raises `ConfigError` if the ranks cannot share the groups."""
        groups = self.num_groups(kv_heads)
        if groups % num_ranks:
            raise ConfigError(
                f"engine.tensor_parallel_size: {num_ranks} ranks cannot share the states of "
                f"{groups} groups of heads"
            )
        return StateShape(
            num_groups=groups // num_ranks,
            num_heads=self.num_heads // groups,
            num_key_heads=self.num_key_heads // groups,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            num_channels=self.num_channels // groups,
            num_taps=self.num_taps,
            by_key=self.names.kind == "key_delta",
        )


class StateTensors(msgspec.Struct, frozen=True):
    """The tensors of one layer with a state."""

    inputs: tuple[LinearTensors, ...]
    taps: tuple[str, ...]  # [channels, 1, num_taps] together
    tap_biases: str | None  # [channels]
    num_channels: int
    num_taps: int
    rates_shape: Shape
    num_steps: int  # of heads, or of each number of their keys
    rates: str | None  # logarithms; this and the next three are None without matrices
    step_biases: str | None  # [num_steps]
    skips: str | None  # [heads]: how much of a value goes past the state
    norm: NormTensor | None
    num_heads: int
    output: LinearTensors
    # They make the gates of the norm, and the steps, of what two of the inputs give.
    expansions: tuple[LinearTensors, ...] = ()

    def shapes(self) -> Iterator[tuple[str, Shape]]:
        for linear in (*self.inputs, *self.expansions):
            yield from linear.shapes()
        for name in self.taps:
            yield name, (self.num_channels // len(self.taps), 1, self.num_taps)
        if self.tap_biases is not None:
            yield self.tap_biases, (self.num_channels,)
        of_heads = (
            (self.rates, self.rates_shape),
            (self.step_biases, (self.num_steps,)),
            (self.skips, (self.num_heads,)),
        )
        for number, shape in of_heads:
            if number is not None:
                yield number, shape
        if self.norm is not None:
            yield from self.norm.shapes()
        yield from self.output.shapes()


class _RawLayers(msgspec.Struct):
    """The fields of config.json that say which layers have a state."""

    num_hidden_layers: _Positive
    layer_types: tuple[str, ...] | None = None
    full_attention_interval: _Positive = 4
    full_attn_idxs: tuple[int, ...] | None = None  # of LFM2
    attn_output_gate: bool = True


class _RawDelta(msgspec.Struct):
    """The fields of config.json that describe a Gated DeltaNet."""

    linear_num_value_heads: _Positive
    linear_num_key_heads: _Positive
    linear_key_head_dim: _Positive
    linear_value_head_dim: _Positive
    linear_conv_kernel_dim: _Positive


class _RawLinear(msgspec.Struct):
    """The field `linear_attn_config` of Kimi's first folders, whose layers count from 1."""

    head_dim: _Positive | None = None
    num_heads: _Positive | None = None
    short_conv_kernel_size: _Positive | None = None
    kda_layers: tuple[_Positive, ...] | None = None
    full_attn_layers: tuple[_Positive, ...] | None = None


class _RawKeyDelta(msgspec.Struct):
    """The fields of config.json that describe Kimi's delta attention."""

    linear_num_heads: _Positive
    linear_head_dim: _Positive
    linear_conv_kernel_dim: _Positive
    linear_attn_config: _RawLinear = msgspec.field(default_factory=_RawLinear)


class _RawConvolution(msgspec.Struct):
    """The fields of config.json that describe a short convolution."""

    hidden_size: _Positive
    num_taps: _Positive = msgspec.field(name="conv_L_cache")


class _Infinity(msgspec.Struct):
    """As transformers writes it, because JSON has no such number."""

    number: Literal["Infinity"] = msgspec.field(name="__float__")


class _RawMamba(msgspec.Struct):
    """The fields of config.json that describe a Mamba-2."""

    hidden_size: _Positive
    mamba_n_heads: _Positive
    mamba_n_groups: _Positive
    mamba_d_state: _Positive
    mamba_d_conv: _Positive
    mamba_conv_bias: bool
    mamba_d_head: _Positive | Literal["auto"] = "auto"
    mamba_expand: _Positive = 2
    mamba_hidden_act: Literal["silu"] = "silu"
    time_step_limit: tuple[float, float | _Infinity] | None = None


def state_config(
    file: Path, names: StateLayers, fields: dict[str, object]
) -> StateConfig:
    """Return the layers of a family whose row has `state`. Raises `ConfigError`."""
    if names.kind == "key_delta":
        return _key_delta(file, names, fields)
    layers = _layers(file, names, converted(file, fields, _RawLayers))
    if names.kind == "mamba":
        return _mamba(file, names, layers, converted(file, fields, _RawMamba))
    if names.kind == "conv":
        conv = converted(file, fields, _RawConvolution)
        return StateConfig(names, layers, 0, conv.hidden_size, 0, 0, conv.num_taps)
    raw = converted(file, fields, _RawDelta)
    heads = raw.linear_num_value_heads
    key_heads = raw.linear_num_key_heads
    if heads % key_heads:
        raise ConfigError(
            f"{file}: linear_num_key_heads must divide linear_num_value_heads"
        )
    return StateConfig(
        names=names,
        layers=layers,
        num_heads=heads,
        num_key_heads=key_heads,
        key_dim=raw.linear_key_head_dim,
        value_dim=raw.linear_value_head_dim,
        num_taps=raw.linear_conv_kernel_dim,
    )


def _key_delta(
    file: Path, names: StateLayers, fields: dict[str, object]
) -> StateConfig:
    raw = converted(file, fields, _RawKeyDelta)
    of_layers = converted(file, fields, _RawLayers)
    given = raw.linear_attn_config
    layers = range(of_layers.num_hidden_layers)
    if of_layers.layer_types is None:
        full = {layer for layer in layers if layer and not layer % 4}
        if given.full_attn_layers is not None and given.kda_layers is not None:
            full = {number - 1 for number in given.full_attn_layers}
            if full | {number - 1 for number in given.kda_layers} != set(layers):
                raise ConfigError(f"{file}: linear_attn_config must name each layer")
        of_layers.layer_types = tuple(
            "full_attention" if layer in full else "linear_attention"
            for layer in layers
        )
    heads = given.num_heads or raw.linear_num_heads
    width = given.head_dim or raw.linear_head_dim
    return StateConfig(
        names=names,
        layers=_layers(file, names, of_layers),
        num_heads=heads,
        num_key_heads=heads,
        key_dim=width,
        value_dim=width,
        num_taps=given.short_conv_kernel_size or raw.linear_conv_kernel_dim,
    )


def _mamba(
    file: Path, names: StateLayers, layers: tuple[int, ...], raw: _RawMamba
) -> StateConfig:
    heads = raw.mamba_n_heads
    groups = raw.mamba_n_groups
    inner = raw.mamba_expand * raw.hidden_size
    width = inner // heads if raw.mamba_d_head == "auto" else raw.mamba_d_head
    if (names.expands and heads * width != inner) or heads % groups:
        raise ConfigError(
            f"{file}: mamba_n_heads times mamba_d_head must be mamba_expand times hidden_size, and "
            "mamba_n_groups must divide mamba_n_heads"
        )
    least, most = raw.time_step_limit or (0.0, math.inf)
    if isinstance(most, _Infinity):
        most = math.inf
    return StateConfig(
        names=names,
        layers=layers,
        num_heads=heads,
        num_key_heads=groups,
        key_dim=raw.mamba_d_state,
        value_dim=width,
        num_taps=raw.mamba_d_conv,
        has_tap_biases=raw.mamba_conv_bias,
        step_limits=(least, most),
    )


def state_tensors(config: StateConfig, layer: str, hidden_size: int) -> StateTensors:
    """Return the tensors of a layer whose names begin with `layer`."""
    block = f"{layer}{config.names.block}."
    hidden = Units(hidden_size)
    kind = config.names.kind
    if kind == "key_delta":
        return _key_delta_tensors(config, block, hidden)
    norm = None
    outputs = Units(config.num_channels)
    taps = f"{block}conv" if kind == "conv" else f"{block}conv1d"
    if kind != "conv":
        outputs = Units(config.num_heads, config.value_dim)
        # Of each head alone, or of all together.
        norm = NormTensor(
            f"{block}norm", config.value_dim if kind == "delta" else outputs.size
        )
    return StateTensors(
        inputs=tuple(
            LinearTensors(block + name, units, hidden)
            for name, units in _inputs(config)
        ),
        taps=(f"{taps}.weight",),
        tap_biases=f"{taps}.bias" if config.has_tap_biases else None,
        num_channels=config.num_channels,
        num_taps=config.num_taps,
        rates=None if norm is None else f"{block}A_log",
        step_biases=None if norm is None else f"{block}dt_bias",
        rates_shape=(config.num_heads,),
        num_steps=config.num_heads,
        skips=f"{block}D" if kind == "mamba" else None,
        num_heads=config.num_heads,
        norm=norm,
        output=LinearTensors(
            f"{block}out_proj", (hidden,), outputs, splits_inputs=True
        ),
    )


def _key_delta_tensors(config: StateConfig, block: str, hidden: Units) -> StateTensors:
    heads = Units(config.num_heads, config.value_dim)
    row = Units(1, config.value_dim)
    inputs = {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), heads),
        **dict.fromkeys(("g_a_proj", "f_a_proj"), row),
        "b_proj": Units(config.num_heads),
    }
    return StateTensors(
        inputs=tuple(
            LinearTensors(block + name, (of,), hidden) for name, of in inputs.items()
        ),
        taps=tuple(f"{block}{name}_conv1d.weight" for name in ("q", "k", "v")),
        tap_biases=None,
        num_channels=config.num_channels,
        num_taps=config.num_taps,
        rates=f"{block}A_log",
        step_biases=f"{block}dt_bias",
        rates_shape=(1, 1, config.num_heads, 1),
        num_steps=config.key_size,
        skips=None,
        num_heads=config.num_heads,
        norm=NormTensor(f"{block}o_norm", config.value_dim),
        output=LinearTensors(f"{block}o_proj", (hidden,), heads, splits_inputs=True),
        expansions=tuple(
            LinearTensors(f"{block}{name}", (heads,), row)
            for name in ("g_b_proj", "f_b_proj")
        ),
    )


def _inputs(config: StateConfig) -> tuple[tuple[str, tuple[Units, ...]], ...]:
    """Return the layers that read the hidden state, and what ranks share of their outputs."""
    if config.names.kind == "conv":
        channels = Units(config.num_channels)
        return (("in_proj", (channels, channels, channels)),)
    keys = Units(config.num_key_heads, config.key_dim)
    values = Units(config.num_heads, config.value_dim)
    gates = Units(config.num_heads)
    if config.names.kind == "mamba":
        return (("in_proj", (values, values, keys, keys, gates)),)
    if not config.names.joins_inputs:
        return (
            ("in_proj_qkv", (keys, keys, values)),
            ("in_proj_z", (values,)),
            ("in_proj_b", (gates,)),
            ("in_proj_a", (gates,)),
        )
    heads = config.num_heads // config.num_key_heads
    width = 2 * config.key_dim + 2 * heads * config.value_dim
    return (
        ("in_proj_qkvz", (Units(config.num_key_heads, width),)),
        ("in_proj_ba", (Units(config.num_key_heads, 2 * heads),)),
    )


def _layers(file: Path, names: StateLayers, raw: _RawLayers) -> tuple[int, ...]:
    """Return the layers with a state."""
    layers = range(raw.num_hidden_layers)
    kinds = raw.layer_types
    if not raw.attn_output_gate:
        raise ConfigError(f"{file}: attn_output_gate is false, which is not supported")
    if kinds is None and raw.full_attn_idxs is not None:
        found = tuple(layer for layer in layers if layer not in raw.full_attn_idxs)
    elif kinds is None and names.kind != "delta":
        raise ConfigError(f"{file}: layer_types must say which layers keep a state")
    elif kinds is None:
        interval = raw.full_attention_interval
        found = tuple(layer for layer in layers if (layer + 1) % interval)
    else:
        known = {*names.layer_types, *names.attention_types}
        if len(kinds) != len(layers) or set(kinds) - known:
            raise ConfigError(
                f"{file}: layer_types must name one of {', '.join(sorted(known))} for each of "
                f"{len(layers)} layers"
            )
        found = tuple(layer for layer in layers if kinds[layer] in names.layer_types)
    if not 0 < len(found) < len(layers):
        raise ConfigError(
            f"{file}: layer_types must have both {names.layer_types[0]} and "
            f"{names.attention_types[0]}"
        )
    return found
