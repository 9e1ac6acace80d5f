"""LoRA of experts that are one parameter of a layer, as PEFT saves it for `target_parameters`.

There is one pair of matrices for all experts: `A` is `[num_experts * r, inputs]`, an expert's rows
together, and `B` is `[outputs, r * num_experts]`, where an expert has every `num_experts`-th
column.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from baton.model.checkpoint.tensors import DecoderTensors, ExpertTensors
from baton.model.checkpoint.weight_files import TensorEntry, text_name
from baton.protocol.errors import ConfigError

GATE_UP = "gate_up_proj"
DOWN = "down_proj"
_TENSOR = re.compile(
    r"base_model\.model\.([\w.]+\.experts(?:\.base_layer)*)\.lora_[AB]\.weight"
)
_LAYER = re.compile(r"model\.layers\.(\d+)\..*")
# Before, PEFT took the first dimension after the experts for the inputs, whatever it was.
_FIRST_VERSION = (0, 21)


class ExpertPart(NamedTuple):
    """What one linear layer of an expert has of the two matrices."""

    rows_of_a: slice
    rows_of_b: slice
    columns_of_b: slice


class ExpertLayer(NamedTuple):
    name: str  # in the adapter's file
    part: ExpertPart


def expert_layers(
    where: str,
    stored: Mapping[str, TensorEntry],
    tensors: DecoderTensors,
    rank: int,
    version: str,
) -> dict[str, ExpertLayer]:
    """Return the experts' layers that an adapter changes, by their names in the model.

    Raises a one-line `ConfigError` for tensors that do not fit it.
    """
    layers: dict[str, ExpertLayer] = {}
    for own in {match[1]: None for match in map(_TENSOR.fullmatch, stored) if match}:
        number = _LAYER.fullmatch(text_name(own))
        index = int(number[1]) if number else len(tensors.layers)
        experts = tensors.layers[index].experts if index < len(tensors.layers) else None
        if experts is None:
            raise ConfigError(f"{where}: the model has no experts for {own}")
        if experts.hidden == 2 * experts.width and _numbers(version) < _FIRST_VERSION:
            raise ConfigError(
                f"{where}: PEFT {version or 'of an unknown version'} may have swapped inputs and "
                "outputs of experts: save the adapter with PEFT 0.21 or later"
            )
        pair = [
            stored.get(f"base_model.model.{own}.lora_{letter}.weight")
            for letter in "AB"
        ]
        found = _layers_of(
            experts, own, rank, [entry.shape if entry else () for entry in pair]
        )
        if not found:
            shapes = " and ".join(
                str(list(entry.shape)) if entry else "none" for entry in pair
            )
            raise ConfigError(
                f"{where}: the matrices of {own} have the shapes {shapes}, but r and "
                "the model imply others"
            )
        if odd := sorted(found.keys() & layers.keys()):
            raise ConfigError(f"{where}: two tensors are for {odd[0]}")
        layers |= found
    return layers


def check_parameters(
    where: str, parameters: Sequence[str], layers: Mapping[str, ExpertLayer]
) -> None:
    """Check that no parameter that the configuration names is without tensors, or is another."""
    sides = {layer.part.rows_of_b.start is not None for layer in layers.values()}
    for parameter in parameters:
        last = parameter.rpartition(".")[2]
        if last not in (GATE_UP, DOWN) or (last == GATE_UP) not in sides:
            raise ConfigError(
                f"{where}: target_parameters names {parameter}, but no tensor is for it"
            )


def _layers_of(
    experts: ExpertTensors, own: str, rank: int, shapes: list[tuple[int, ...]]
) -> dict[str, ExpertLayer]:
    """Return the layers for which matrices of these shapes are; none if there are none."""
    num = experts.num_experts
    hidden = experts.hidden
    width = experts.width
    gates = slice(0, width)
    ups = slice(width, 2 * width)
    if experts.names.is_interleaved:
        gates = slice(0, 2 * width, 2)
        ups = slice(1, 2 * width, 2)
    layers: dict[str, ExpertLayer] = {}
    for number in range(num):
        names = experts.expert(number)
        a = slice(number * rank, (number + 1) * rank)
        b = slice(number, None, num)
        if shapes == [(num * rank, hidden), (2 * width, rank * num)]:
            for linear, rows in zip(names.gate_up, (gates, ups), strict=True):
                layers[linear.name] = ExpertLayer(own, ExpertPart(a, rows, b))
        elif shapes == [(num * rank, width), (hidden, rank * num)]:
            layers[names.down.name] = ExpertLayer(own, ExpertPart(a, slice(None), b))
    return layers


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
