"""A linear layer's weights and the part of them that one rank holds.

Column-parallel layers hold rows of the checkpoint's matrix (outputs), and row-parallel ones hold
columns (inputs), whose results the decoder adds over the ranks. With `engine.deterministic` on a
GPU, `OrderedLinears` tests at load whether the library's product gives a row the same bits in every
batch, and uses a product with one order of sums where it does not.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.compute.attention import AdaptedRows
from baton.engine.compute.executor import Progress
from baton.engine.compute.row_rule import RowRule, num_threads
from baton.kernels.cpu_threads import MIN_SHARED_NS
from baton.runtime.log import logger

Product = Callable[[Tensor, Tensor], Tensor]  # rows [M, in], weight [out, in] -> [M, out]
# Adds to the outputs [M, out] what adapters make of the inputs [M, in] of their rows.
Adaptation = Callable[[Tensor, Tensor, AdaptedRows], Tensor]
# The numbers of rows for which decode steps are captured, and some of mixed steps between them.
COUNTS = (
    *(1, 2, 3, 4, 8, 12, 16, 17, 24, 32, 33, 40, 48, 56, 64, 65, 80, 96, 112, 128, 129),
    *(160, 192, 224, 256, 257, 384, 512, 768, 1024, 1536, 2047),
)
LARGEST = 2048


def keeps_bits(product: Product, weight: Tensor) -> bool:
    """Return whether every number of rows gives the same bits as a product of 2,048 rows.

    Rows are taken from the middle as well: a kernel may treat the end of a batch in its own way.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(LARGEST, weight.shape[1], generator=generator)
    rows = rows.to(weight.device, weight.dtype)
    whole = product(rows, weight)
    return all(
        _equal_bits(product(rows[first : first + count], weight), whole[first : first + count])
        for count in COUNTS
        for first in (0, LARGEST // 2 - 3)
    )


def _equal_bits(left: Tensor, right: Tensor) -> bool:
    words = torch.int16 if left.element_size() == 2 else torch.int32
    return torch.equal(left.contiguous().view(words), right.contiguous().view(words))


# These costs were measured on a Zen 5 core in bf16, with small weights in its cache. On other CPUs
# the number of threads of a product may be a poor choice, but no bit changes.
NS_PER_WEIGHT, NS_PER_MULTIPLICATION = 0.03, 0.0046

PACKED_OPS = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")


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
    if not torch.backends.mkldnn.is_available() or not all(hasattr(ops, op) for op in PACKED_OPS):
        return None
    if weight.dtype == torch.bfloat16 and not ops._is_mkldnn_bf16_supported():
        return None
    return ops._reorder_linear_weight(weight)


def share(num_units: int, rank: int, size: int, width: int = 1) -> slice:
    """Return the rows or columns, of `num_units` units of `width`, that belong to `rank`.

    If there are fewer units (KV heads) than ranks, neighbouring ranks hold the same unit.
    """
    if num_units < size:
        first = rank * num_units // size
        return slice(first * width, (first + 1) * width)
    per_rank = num_units // size * width
    return slice(rank * per_rank, (rank + 1) * per_rank)


log = logger("linear")


class OrderedLinears:
    """The layers of one rank. Progress is shown as a part of at most `num_kinds` kinds."""

    def __init__(
        self, ordered: Product, num_kinds: int, progress: Progress, library: Product = F.linear
    ) -> None:
        """Take the product with one order and the library's product."""
        self._ordered, self._library = ordered, library
        self._num_kinds, self._progress = num_kinds, progress
        self._found: dict[tuple[torch.Size, torch.dtype], Product] = {}

    def make(self, weight: Tensor, bias: Tensor | None = None, _: int | None = None) -> Linear:
        """Return a layer that keeps `weight`, and gives a row the same bits in every batch."""
        kind = weight.shape, weight.dtype
        if kind not in self._found:
            self._progress("products", len(self._found), self._num_kinds)
            keeps = keeps_bits(self._library, weight)
            self._found[kind] = self._library if keeps else self._ordered
            shape = f"{weight.shape[0]}x{weight.shape[1]}"
            log.info("a linear layer was examined", shape=shape, library_keeps_bits=keeps)
        return Linear(weight, bias, ordered=self._found[kind])
