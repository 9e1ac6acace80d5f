"""Make the linear layers of one rank on a GPU where `engine.deterministic` is on.

All use a product with one order of sums. Where the library's product may take its place,
`OrderedLinears` examines at load for which weights it gives a row the same bits in every batch.
"""

import torch
from torch import Tensor

from baton.model.layers.linear import Linear, Product
from baton.node.executor import Progress
from baton.runtime.log import logger

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
        _equal_bits(
            product(rows[first : first + count], weight), whole[first : first + count]
        )
        for count in COUNTS
        for first in (0, LARGEST // 2 - 3)
    )


def _equal_bits(left: Tensor, right: Tensor) -> bool:
    words = torch.int16 if left.element_size() == 2 else torch.int32
    return torch.equal(left.contiguous().view(words), right.contiguous().view(words))


log = logger("linear")


class OrderedLinears:
    """The layers of one rank. Progress is shown as a part of at most `num_kinds` kinds."""

    def __init__(
        self,
        ordered: Product,
        num_kinds: int,
        progress: Progress,
        library: Product | None = None,
    ) -> None:
        """Take the product with one order, and the library's if it is to be examined."""
        self._ordered = ordered
        self._library = library
        self._num_kinds = num_kinds
        self._progress = progress
        self._found: dict[tuple[torch.Size, torch.dtype], Product] = {}

    def make(
        self, weight: Tensor, bias: Tensor | None = None, _: int | None = None
    ) -> Linear:
        """Return a layer that keeps `weight`, and gives a row the same bits in every batch."""
        if self._library is None:
            return Linear(weight, bias, ordered=self._ordered)
        kind = weight.shape, weight.dtype
        if kind not in self._found:
            self._progress("products", len(self._found), self._num_kinds)
            keeps = keeps_bits(self._library, weight)
            self._found[kind] = self._library if keeps else self._ordered
            shape = f"{weight.shape[0]}x{weight.shape[1]}"
            log.info(
                "a linear layer was examined", shape=shape, library_keeps_bits=keeps
            )
        return Linear(weight, bias, ordered=self._found[kind])
