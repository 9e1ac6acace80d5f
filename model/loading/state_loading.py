"""Load one rank's part of a layer that keeps a state for each sequence."""

import torch
from torch import Tensor

from baton.kernels.state_layout import StateShape
from baton.kernels.state_reference import Gates, StateWeights
from baton.model.config.state_config import StateConfig, StateTensors
from baton.model.layers.linear import Linear
from baton.model.loading.layer_weights import LayerWeights


def load_state(weights: LayerWeights, tensors: StateTensors) -> tuple[Linear, StateWeights]:
    """Return the layer that reads the hidden state, and the rest.

    The outputs of the first are the channels, group by group, then the gates of the norm, those of
    what a token adds, and the steps.
    """
    config, ranks, read = weights.config, weights.ranks, weights.read
    state = config.state
    assert state is not None, "the layer has a state"
    shape = state.shape(config.num_kv_heads, ranks.size)
    heads = shape.num_groups * shape.num_heads
    own = slice(ranks.rank * heads, (ranks.rank + 1) * heads)
    inputs = weights.columns(tensors.inputs, _input_order(state, shape))
    channels = _channels(state, shape, ranks.rank).to(weights.device)
    taps = read(tensors.taps, dtype=torch.float32)[channels, 0]  # [channels, taps]
    taps = taps.view(shape.num_groups, shape.num_channels, shape.num_taps)
    key_size, scale = shape.num_key_heads * shape.key_dim, shape.key_dim**-0.5
    to_gates = shape.num_groups * shape.num_channels
    to_betas = to_gates + heads * shape.value_dim
    return inputs, StateWeights(
        taps=taps.transpose(1, 2).contiguous(),
        norm=read(f"{tensors.norm.name}.weight", dtype=torch.float32).repeat(heads),
        to_keys=key_size,
        to_values=2 * key_size,
        is_normed=True,
        scale=scale,
        corrects=True,
        gates=Gates(
            to_steps=to_betas + heads,
            to_betas=to_betas,
            rates=-read(tensors.rates, rows=own, dtype=torch.float32).exp(),
            biases=read(tensors.step_biases, rows=own, dtype=torch.float32),
        ),
        to_gates=to_gates,
        num_norms=heads,
    )


def _input_order(state: StateConfig, shape: StateShape) -> Tensor:
    """Return where the outputs are in a rank's rows of the files' tensors, joined."""
    key_heads = shape.num_groups * shape.num_key_heads
    values = shape.value_dim * shape.num_heads // shape.num_key_heads  # of a head of keys
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
    by_group = torch.cat([part.reshape(shape.num_groups, -1) for part in channels], dim=1)
    return torch.cat([part.flatten() for part in (by_group, norm_gates, betas, steps)])


def _channels(state: StateConfig, shape: StateShape, rank: int) -> Tensor:
    """Return which channels of the whole model a rank has, group by group."""
    sizes = [state.key_size, state.key_size, state.value_size]
    parts = torch.split(torch.arange(sum(sizes)), sizes)
    groups = slice(rank * shape.num_groups, (rank + 1) * shape.num_groups)
    num_groups = state.num_key_heads // shape.num_key_heads
    return torch.cat([part.view(num_groups, -1) for part in parts], dim=1)[groups].flatten()
