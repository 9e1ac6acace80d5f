"""A linear layer's weights and the part of them that one rank holds.

Column-parallel layers hold rows of the checkpoint's matrix (outputs), and row-parallel ones hold
columns (inputs), whose results the decoder adds over the ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.cpu.threads import MIN_SHARED_NS
from baton.model.batch_invariance.row_rule import RowRule, num_threads
from baton.model.layers.attention import AdaptedRows

# Rows [M, in], weight [out, in] -> [M, out].
Product = Callable[[Tensor, Tensor], Tensor]
# Adds to the outputs [M, out] what adapters make of the inputs [M, in] of their rows.
Adaptation = Callable[[Tensor, Tensor, AdaptedRows], Tensor]

# These costs were measured on a Zen 5 core in bf16, with small weights in its cache. On other CPUs
# the number of threads of a product may be a poor choice, but no bit changes.
NS_PER_WEIGHT = 0.03
NS_PER_MULTIPLICATION = 0.0046

PACKED_OPS = (
    "_is_mkldnn_bf16_supported",
    "_reorder_linear_weight",
    "_linear_pointwise",
)


@dataclass(slots=True, frozen=True)
class Linear:
    weight: Tensor  # [outputs, inputs], dense or packed by `packed`
    bias: Tensor | None = None
    rule: RowRule | None = None  # None: all rows are computed in one call
    ordered: Product | None = None  # gives a row the same bits in every batch
    trial: bytes = b""  # a digest of the bits of `ordered` where CPUs may differ
    adapt: Adaptation | None = None

    @property
    def is_batch_invariant(self) -> bool:
        return self.rule is not None or self.ordered is not None

    @property
    def digest(self) -> bytes:
        """Return a text that differs between layers that are known to compute different bits."""
        return self.trial if self.rule is None else self.rule.digest

    def __call__(self, x: Tensor, adapted: AdaptedRows | None = None) -> Tensor:
        """Return the outputs, `[num_rows, outputs]`, for `[num_rows, inputs]`."""
        y = self._by_rule(x)
        return y if adapted is None or self.adapt is None else self.adapt(y, x, adapted)

    def _by_rule(self, x: Tensor) -> Tensor:
        if self.rule is None or not x.shape[0]:
            return self.product(x)
        if self._cost_ns(x.shape[0]) < MIN_SHARED_NS and torch.get_num_threads() > 1:
            with num_threads(1):
                return self.rule.compute(self.product, x)
        return self.rule.compute(self.product, x)

    def _cost_ns(self, num_rows: int) -> float:
        """Return roughly how long one thread takes."""
        cost_ns = NS_PER_WEIGHT + NS_PER_MULTIPLICATION * num_rows
        return self.weight.numel() * self.weight.element_size() / 2 * cost_ns

    def product(self, x: Tensor) -> Tensor:
        """Compute all rows of `x` in one call of the library."""
        if self.ordered is not None:
            y = self.ordered(x, self.weight)
            return y if self.bias is None else y + self.bias
        if self.weight.is_mkldnn:
            product = torch.ops.mkldnn._linear_pointwise.default
            return product(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


def packed(weight: Tensor) -> Tensor | None:
    """Return `weight` in oneDNN's order of reading, or None if this machine cannot pack it."""
    ops = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not all(
        hasattr(ops, op) for op in PACKED_OPS
    ):
        return None
    if weight.dtype == torch.bfloat16 and not ops._is_mkldnn_bf16_supported():
        return None
    return ops._reorder_linear_weight(weight)
