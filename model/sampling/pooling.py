"""Pool the rows of a slice: what a step returns of a prompt of which no token is wanted.

A slice's result is a row of integers: the number of its bytes, negative if a row is not finite, and
the bytes, eight to an integer.
"""

from array import array
from collections.abc import Callable, Iterator
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.node.scheduling.pooling import SUM_SCALE
from baton.protocol.pooling import Pooling

_WORD_BYTES = 8
_ROWS = 64  # at a time, which bounds the memory of rows in fp64


def rows_of(pooling: Pooling, first: int, length: int) -> range:
    """Return which rows of a batch a slice needs whose first row and length these are."""
    if pooling == "mean":
        return range(first, first + length)
    row = first if pooling == "cls" else first + length - 1
    return range(row, row + 1)


def packed_rows(
    pooling: Pooling, rows: Tensor, classify: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the integers for `rows` `[num_rows, hidden]`, those that `rows_of` names.

    `classify` returns the numbers of the model's classifier `[num_rows, labels]`.
    """
    is_finite = rows.isfinite().all()
    if pooling == "mean":
        words = torch.stack([_sums(part) for part in torch.split(rows, _ROWS)]).sum(
            dim=0
        )
        num_bytes = len(words) * _WORD_BYTES
    else:
        numbers = (classify(rows) if pooling == "classify" else rows)[0].float()
        num_bytes = len(numbers) * numbers.element_size()
        words = F.pad(numbers, (0, len(numbers) % 2)).view(torch.int64)
    head = torch.where(is_finite, num_bytes, -num_bytes).view(1)
    return torch.cat([head, words])


def unpacked_rows(words: Iterator[int]) -> tuple[bytes, bool]:
    """Read the next result. Return its bytes, and whether the rows were finite."""
    num_bytes = next(words)
    num_words = -(-abs(num_bytes) // _WORD_BYTES)
    data = array("q", islice(words, num_words)).tobytes()
    return data[: abs(num_bytes)], num_bytes > 0


def _sums(rows: Tensor) -> Tensor:
    """Return the sum of each column as integers, in units of 1 / `SUM_SCALE`."""
    return (rows.double() * SUM_SCALE).round().to(torch.int64).sum(dim=0)
