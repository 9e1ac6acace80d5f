"""Load one rank's part of a layer that keeps a state for each sequence."""

import torch
from torch import Tensor

from baton.kernels.state_layout import StateShape
from baton.kernels.state_reference import Gates, StateWeights
from baton.model.config.state_config import StateConfig, StateTensors
from baton.model.layers.layer_parts import ExpandedGates
from baton.model.layers.linear import Linear
from baton.model.loading.layer_weights import LayerWeights


def load_state(
    weights: LayerWeights, tensors: StateTensors
) -> tuple[Linear, StateWeights, ExpandedGates | None]:
    """Return the layer that reads the hidden state, the rest, and what completes its outputs.

    The outputs of the first are the channels, group by group, then the gates of the norm, those of
    what a token adds, and the steps.
    """
    config = weights.config
    ranks = weights.ranks
    read = weights.read
    state = config.state
    assert state is not None, "the layer has a state"
    shape = state.shape(config.num_kv_heads, ranks.size)
    heads = shape.num_groups * shape.num_heads
    own = slice(ranks.rank * heads, (ranks.rank + 1) * heads)
    if tensors.norm is None:
        return *_load_convolution(weights, tensors, shape), None
    if state.names.kind == "key_delta":
        return _load_key_delta(weights, tensors, state)
    assert tensors.rates is not None, "heads have matrices"
    assert tensors.step_biases is not None, "heads have matrices"
    is_delta = state.names.kind == "delta"
    order = _delta_order(state, shape) if is_delta else _mamba_order(shape)
    inputs = weights.columns(tensors.inputs, order)
    channels = _channels(state, shape, ranks.rank).to(weights.device)
    taps = read(tensors.taps[0], dtype=torch.float32)[channels, 0]  # [channels, taps]
    taps = taps.view(shape.num_groups, shape.num_channels, shape.num_taps)
    key_size = shape.num_key_heads * shape.key_dim
    to_gates = shape.num_groups * shape.num_channels
    to_rest = to_gates + heads * shape.value_dim
    norm = read(f"{tensors.norm.name}.weight", dtype=torch.float32)
    values = slice(own.start * shape.value_dim, own.stop * shape.value_dim)
    biases = skips = None
    if tensors.skips is not None:
        skips = read(tensors.skips, rows=own, dtype=torch.float32)
    if tensors.tap_biases is not None:
        biases = read(tensors.tap_biases, dtype=torch.float32)[channels].contiguous()
    found = StateWeights(
        taps=taps.transpose(1, 2).contiguous(),
        norm=norm.repeat(heads) if is_delta else norm[values].contiguous(),
        tap_biases=biases,
        to_keys=key_size,
        to_values=2 * key_size,
        is_normed=is_delta,
        scale=shape.key_dim**-0.5 if is_delta else 1.0,
        corrects=is_delta,
        skips=skips,
        gates=Gates(
            to_steps=to_rest + heads if is_delta else to_rest,
            to_betas=to_rest if is_delta else None,
            rates=-read(tensors.rates, rows=own, dtype=torch.float32).exp(),
            biases=read(tensors.step_biases, rows=own, dtype=torch.float32),
            limits=state.step_limits,
        ),
        to_gates=to_gates,
        num_norms=heads if is_delta else shape.num_groups * shape.num_key_heads,
        gates_first=not is_delta,
    )
    return inputs, found, None


def _load_key_delta(
    weights: LayerWeights, tensors: StateTensors, state: StateConfig
) -> tuple[Linear, StateWeights, ExpandedGates]:
    """Return a layer of Kimi's, which one rank has as a whole."""
    assert weights.ranks.size == 1, "latent attention has one group of heads"
    assert tensors.norm is not None, "heads have matrices"
    assert tensors.rates is not None, "heads have matrices"
    assert tensors.step_biases is not None, "heads have matrices"
    read = weights.read
    heads = state.num_heads
    width = state.value_dim
    taps = torch.cat([read(name, dtype=torch.float32)[:, 0] for name in tensors.taps])
    rates = -read(tensors.rates, dtype=torch.float32).flatten().exp()
    gates, steps = (
        weights.linear(read(f"{one.name}.weight")) for one in tensors.expansions
    )
    to_gates = state.num_channels
    to_steps = state.num_channels + heads * width
    found = StateWeights(
        taps=taps.T[None].contiguous(),
        norm=read(f"{tensors.norm.name}.weight", dtype=torch.float32).repeat(heads),
        to_keys=state.key_size,
        to_values=2 * state.key_size,
        is_normed=True,
        scale=state.key_dim**-0.5,
        corrects=True,
        gates=Gates(
            to_steps=to_steps,
            to_betas=to_steps + state.key_size,
            rates=rates.repeat_interleave(state.key_dim),
            biases=read(tensors.step_biases, dtype=torch.float32),
            num_betas=heads,
        ),
        to_gates=to_gates,
        num_norms=heads,
        by_sigmoid=True,
    )
    return (
        weights.columns(tensors.inputs),
        found,
        ExpandedGates(gates, steps, to_gates, width),
    )


def _load_convolution(
    weights: LayerWeights, tensors: StateTensors, shape: StateShape
) -> tuple[Linear, StateWeights]:
    """Return a layer without matrices. The outputs of the first are two gates and the channels."""
    size = shape.num_groups * shape.num_channels
    own = slice(weights.ranks.rank * size, (weights.ranks.rank + 1) * size)
    taps = weights.read(tensors.taps[0], rows=own, dtype=torch.float32)[:, 0]
    taps = taps.view(shape.num_groups, shape.num_channels, shape.num_taps)
    return weights.columns(tensors.inputs), StateWeights(
        taps=taps.transpose(1, 2).contiguous(), norm=taps.new_empty(0), activates=False
    )


def _mamba_order(shape: StateShape) -> Tensor:
    """Return where the outputs are in a rank's rows of the files' tensor.

    It has the gates of the norm, then values, keys and queries, then the steps.
    """
    key_heads = shape.num_groups * shape.num_key_heads
    values = shape.num_groups * shape.num_heads * shape.value_dim
    keys = key_heads * shape.key_dim
    sizes = [values, values, keys, keys, shape.num_groups * shape.num_heads]
    gates, *parts, steps = torch.split(torch.arange(sum(sizes)), sizes)
    by_group = [part.view(shape.num_groups, -1) for part in reversed(parts)]
    return torch.cat((torch.cat(by_group, dim=1).flatten(), gates, steps))


def _delta_order(state: StateConfig, shape: StateShape) -> Tensor:
    """Return where the outputs are in a rank's rows of the files' tensors, joined."""
    key_heads = shape.num_groups * shape.num_key_heads
    # Of a head of keys.
    values = shape.value_dim * shape.num_heads // shape.num_key_heads
    gates = shape.num_heads // shape.num_key_heads
    sizes = [shape.key_dim, shape.key_dim, values, values]
    if state.names.joins_inputs:
        numbers = torch.arange(key_heads * sum(sizes)).view(key_heads, -1)
        parts = list(torch.split(numbers, sizes, dim=1))
        rest = numbers.numel() + torch.arange(key_heads * 2 * gates).view(key_heads, -1)
        parts += torch.split(rest, gates, dim=1)
    else:
        sizes += [gates, gates]
        whole = torch.arange(key_heads * sum(sizes))
        every = torch.split(whole, [key_heads * size for size in sizes])
        parts = [one.view(key_heads, -1) for one in every]
    *channels, norm_gates, betas, steps = parts
    by_group = torch.cat(
        [part.reshape(shape.num_groups, -1) for part in channels], dim=1
    )
    return torch.cat([part.flatten() for part in (by_group, norm_gates, betas, steps)])


def _channels(state: StateConfig, shape: StateShape, rank: int) -> Tensor:
    """Return which channels of the whole model a rank has, group by group."""
    sizes = [state.key_size, state.key_size, state.value_size]
    step = -1 if state.names.kind == "mamba" else 1  # its values come first
    parts = torch.split(torch.arange(sum(sizes)), sizes[::step])[::step]
    groups = slice(rank * shape.num_groups, (rank + 1) * shape.num_groups)
    num_groups = state.num_key_heads // shape.num_key_heads
    return torch.cat([part.view(num_groups, -1) for part in parts], dim=1)[
        groups
    ].flatten()
