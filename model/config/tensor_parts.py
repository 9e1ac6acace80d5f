"""What a decoder's tensors are declared of: linear layers and norms, and the parts that ranks have.

This module never imports torch.
"""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

Shape = tuple[int, ...]


def share(num_units: int, rank: int, size: int, width: int = 1) -> slice:
    """Return the rows or columns, of `num_units` units of `width`, that belong to `rank`.

    If there are fewer units (KV heads) than ranks, neighbouring ranks hold the same unit.
    """
    if num_units < size:
        first = rank * num_units // size
        return slice(first * width, (first + 1) * width)
    per_rank = num_units // size * width
    return slice(rank * per_rank, (rank + 1) * per_rank)


class Units(msgspec.Struct, frozen=True):
    """Inputs or outputs of a layer: `count` units, such as heads, each of which one rank has."""

    count: int
    width: int = 1
    # Kernels take the numbers of each unit in the order of rotation.
    is_rotated: bool = False

    @property
    def size(self) -> int:
        return self.count * self.width

    def of_rank(self, rank: int, size: int) -> slice:
        return share(self.count, rank, size, self.width)


class LinearTensors(msgspec.Struct, frozen=True):
    """A linear layer: `NAME.weight` is `[outputs, inputs]`, and `NAME.bias` may be there.

    Ranks share the outputs, or else the inputs if `splits_inputs`. Outputs may be several blocks,
    one under the other, each of which is shared by itself.
    """

    name: str
    outputs: tuple[Units, ...]
    inputs: Units
    has_bias: bool = False
    splits_inputs: bool = False

    @property
    def num_outputs(self) -> int:
        return sum(units.size for units in self.outputs)

    def rows(self, rank: int, size: int) -> list[slice]:
        """Return the rows of `weight` that a rank has, in order."""
        if size == 1 or self.splits_inputs:
            return [slice(0, self.num_outputs)]
        rows = []
        first = 0
        for units in self.outputs:
            part = units.of_rank(rank, size)
            rows.append(slice(first + part.start, first + part.stop))
            first += units.size
        return rows

    def columns(self, rank: int, size: int) -> slice:
        """Return the columns of `weight` that a rank has."""
        if self.splits_inputs:
            return self.inputs.of_rank(rank, size)
        return slice(0, self.inputs.size)

    def shapes(self) -> Iterator[tuple[str, Shape]]:
        yield f"{self.name}.weight", (self.num_outputs, self.inputs.size)
        if self.has_bias:
            yield f"{self.name}.bias", (self.num_outputs,)


class NormTensor(NamedTuple):
    """The weight of a norm, over units whose order is that of the outputs it is of."""

    name: str  # without `.weight`
    size: int
    has_bias: bool = False

    def shapes(self) -> Iterator[tuple[str, Shape]]:
        yield f"{self.name}.weight", (self.size,)
        if self.has_bias:
            yield f"{self.name}.bias", (self.size,)
