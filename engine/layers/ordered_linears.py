"""Make the linear layers of a GPU rank whose bits do not depend on the batch.

If `engine.deterministic` is on, the loader calls `make` for every layer. A GPU's library may sum in
another order for another number of rows. `keeps_bits` tries it with the first weight of each shape,
and where bits differ, a product with one order replaces it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.executor import Progress
from baton.engine.layers.linear import Linear
from baton.engine.layers.product_rule import Product, keeps_bits
from baton.runtime.log import logger

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
