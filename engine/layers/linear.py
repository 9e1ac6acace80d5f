"""A linear layer's weights and the part of them that one rank holds.

Called by the decoder. Column-parallel layers hold rows of the checkpoint's matrix (outputs),
row-parallel ones hold columns (inputs); the decoder adds the ranks' results up. On CPUs
`HostLinears` makes the layers, whose rows are then computed as their `RowRule` says.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.layers.product_rule import Product
from baton.engine.layers.row_rule import RowRule, num_threads
from baton.kernels.cpu_threads import MIN_SHARED_NS

# Measured on a Zen 5 core in bf16, small weights in its cache. Elsewhere the number of threads of a
# product may be a poor choice; no bit changes.
NS_PER_WEIGHT, NS_PER_MULTIPLICATION = 0.03, 0.0046

PACKED_OPS = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")


@dataclass(slots=True, frozen=True)
class Linear:
    weight: Tensor  # [outputs, inputs], dense or packed by `packed`
    bias: Tensor | None = None
    rule: RowRule | None = None  # None: all rows are computed at once
    ordered: Product | None = None  # gives a row the same bits in every batch
    trial: bytes = b""  # a digest of the bits of `ordered`, where CPUs may differ

    @property
    def is_batch_invariant(self) -> bool:
        return self.rule is not None or self.ordered is not None

    @property
    def digest(self) -> bytes:
        """Differs for two layers of one shape if they are known to compute other bits."""
        return self.trial if self.rule is None else self.rule.digest

    def __call__(self, x: Tensor) -> Tensor:
        """`[num_rows, inputs]` to `[num_rows, outputs]`."""
        if self.rule is None or not x.shape[0]:
            return self.product(x)
        if self._cost_ns(x.shape[0]) < MIN_SHARED_NS and torch.get_num_threads() > 1:
            with num_threads(1):
                return self.rule.compute(self.product, x)
        return self.rule.compute(self.product, x)

    def _cost_ns(self, num_rows: int) -> float:
        """Return about how long one thread takes."""
        cost_ns = NS_PER_WEIGHT + NS_PER_MULTIPLICATION * num_rows
        return self.weight.numel() * self.weight.element_size() / 2 * cost_ns

    def product(self, x: Tensor) -> Tensor:
        """All rows of `x` in one call of the library."""
        if self.ordered is not None:
            y = self.ordered(x, self.weight)
            return y if self.bias is None else y + self.bias
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
