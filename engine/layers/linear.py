"""A linear layer's weights and the part of them that one rank holds.

Called by the decoder. Column-parallel layers hold rows of the checkpoint's matrix (outputs),
row-parallel ones hold columns (inputs); who adds the ranks' results up is the decoder's business.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(slots=True, frozen=True)
class Linear:
    weight: Tensor  # [outputs, inputs]
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def share(num_units: int, rank: int, size: int, width: int = 1) -> slice:
    """The rows or columns of `num_units` units of `width` that belong to `rank`.

    Fewer units than ranks (KV heads): neighbouring ranks hold the same one.
    """
    if num_units < size:
        first = rank * num_units // size
        return slice(first * width, (first + 1) * width)
    per_rank = num_units // size * width
    return slice(rank * per_rank, (rank + 1) * per_rank)
