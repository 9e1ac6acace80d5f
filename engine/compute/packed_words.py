"""Arrays laid one after the other into a piece of memory of 64-bit words, and found there again."""

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

NUMPY: dict[torch.dtype, type[np.int64 | np.int32 | np.float64]] = {
    torch.int64: np.int64, torch.int32: np.int32, torch.float64: np.float64,
}  # fmt: skip


class ArrayPlace(NamedTuple):
    """An array within the words of a step."""

    first: int
    end: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def of(self, words: Tensor) -> Tensor:
        part = words[self.first : self.end]
        if self.dtype != torch.int64:
            part = part.view(self.dtype)
        if self.dtype == torch.int32:  # two to a word
            part = part[: math.prod(self.shape)]
        return part.view(self.shape)


class PackedWords:
    """A piece of memory that is filled one array after the other."""

    def __init__(self, words: Tensor) -> None:
        self.words = words
        self._array = words.numpy()
        self._used = 0

    def put(self, values: ArrayLike, *shape: int, dtype: torch.dtype = torch.int64) -> ArrayPlace:
        size = math.prod(shape)
        first, end = self._used, self._used + (-(-size // 2) if dtype == torch.int32 else size)
        if size:
            part = self._array[first:end].view(NUMPY[dtype])
            part[:size] = np.asarray(values, NUMPY[dtype]).reshape(-1)
        self._used = end
        return ArrayPlace(first, end, shape, dtype)

    def used(self) -> Tensor:
        return self.words[: self._used]
