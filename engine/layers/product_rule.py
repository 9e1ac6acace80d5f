"""Find out whether a device's matrix products give a row the same bits in every batch.

A GPU library chooses a kernel, and how it splits the sum, by the number of rows. `keeps_bits` tests
a product at load, on the weights that are served: it recomputes rows of a large product in batches
of other sizes. If bits differ, `kernels.fixed_product` replaces the library. The test runs when a
rank is loaded with `engine.deterministic`. It knows no device, because the product is a callable.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]  # rows [M, in], weight [out, in] -> [M, out]
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
