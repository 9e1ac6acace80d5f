"""A linear layer's weights and the part of them that one rank holds.

Called by the decoder. Column-parallel layers hold rows of the checkpoint's matrix (outputs),
row-parallel ones hold columns (inputs); the decoder adds the ranks' results up. On CPUs
`HostLinears` makes the layers, whose rows are then computed as their `RowRule` says.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.layers.row_rule import RowRule

PACKED_OPS = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")


@dataclass(slots=True, frozen=True)
class Linear:
    weight: Tensor  # [outputs, inputs], dense or packed by `packed`
    bias: Tensor | None = None
    rule: RowRule | None = None  # None: all rows are computed at once

    def __call__(self, x: Tensor) -> Tensor:
        """`[num_rows, inputs]` to `[num_rows, outputs]`."""
        if self.rule is None or not x.shape[0]:
            return self.product(x)
        return self.rule.compute(self.product, x)

    def product(self, x: Tensor) -> Tensor:
        """All rows of `x` in one call of the library."""
        if self.weight.is_mkldnn:
            product = torch.ops.mkldnn._linear_pointwise.default
            return product(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


def packed(weight: Tensor) -> Tensor | None:
    """`weight` in the order in which oneDNN reads it; None where this machine cannot."""
    ops = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not all(hasattr(ops, op) for op in PACKED_OPS):
        return None
    if weight.dtype == torch.bfloat16 and not ops._is_mkldnn_bf16_supported():
        return None
    return ops._reorder_linear_weight(weight)


def share(num_units: int, rank: int, size: int, width: int = 1) -> slice:
    """The rows or columns of `num_units` units of `width` that belong to `rank`.

    Fewer units than ranks (KV heads): neighbouring ranks hold the same one.
    """
    if num_units < size:
        first = rank * num_units // size
        return slice(first * width, (first + 1) * width)
    per_rank = num_units // size * width
    return slice(rank * per_rank, (rank + 1) * per_rank)
