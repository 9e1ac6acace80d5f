"""Compute LoRA adapters beside the linear layers that they change.

A row goes through the two small matrices of its own adapter, whose rows are computed together, as
those of an expert are; so a token's bits do not depend on the adapters of other rows. Layers that
the decoder has joined (queries, keys and values; gates and ups) have one pair of matrices: `A` of
each part below one another, and `B` of each in the block of its outputs and of its `A`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from baton.model.layers.attention import AdaptedRows
from baton.model.layers.linear import Linear
from baton.model.layers.mlp import GroupedLinear


@dataclass(slots=True)
class Lora:
    """The matrices of all adapters for one linear layer of the decoder.

    Those of adapters that come or go at run time are replaced between two steps.
    """

    shrink: GroupedLinear  # [width, inputs] of each adapter
    expand: GroupedLinear  # [outputs, width]

    def __call__(self, y: Tensor, x: Tensor, adapted: AdaptedRows) -> Tensor:
        """Add to the outputs `[num_rows, outputs]` of a layer with the inputs `x`, in place."""
        order, ends = adapted.order, adapted.ends
        added = self.expand(self.shrink(x[order], ends), ends)
        return y.index_copy_(0, order, y[order] + added)

    def linears(self) -> Iterator[Linear]:
        yield from self.shrink.linears()
        yield from self.expand.linears()
