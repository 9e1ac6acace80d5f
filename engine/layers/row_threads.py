"""Compute the rows of a batch on several threads, each with rows of its own.

Between two attentions a decoder computes each row apart from all others. `RowThreads` cuts the rows
once for all of these operations, so threads wait for one another once a layer, and share the small
operations between the products as well. Where a row has the same bits in every batch, the cuts
change none. The decoder of a CPU rank calls it, except where ranks share a model: those add up
their results between the operations.
"""

import threading
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from baton.engine.layers.row_rule import num_threads
from baton.kernels.cpu_threads import CpuThreads

RowWork = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # two of [num_rows, ...] to the same
ByRows = Callable[[RowWork, Tensor, Tensor], tuple[Tensor, Tensor]]

# Each thread reads all weights, so it needs rows for which that pays.
MIN_ROWS = 128


def at_once(work: RowWork, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Compute all rows in one call."""
    return work(x, residual)


class RowThreads:
    """A `ByRows` on as many threads as torch uses. One caller at a time."""

    def __init__(self) -> None:
        self._threads = CpuThreads()

    def __call__(self, work: RowWork, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        num_rows, count = len(x), torch.get_num_threads()
        if count == 1 or num_rows < count * MIN_ROWS:
            return work(x, residual)
        whole = _Whole(num_rows)

        def compute(first: int, end: int) -> None:
            with torch.inference_mode(), num_threads(1):
                whole.put(first, work(x[first:end], residual[first:end]))

        cuts = [num_rows * i // count for i in range(count + 1)]
        self._threads.run(compute, list(pairwise(cuts)))
        return whole.tensors


class _Whole:
    """The results of all rows; the first thread that has some makes room for them."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._lock = threading.Lock()
        self._tensors: tuple[Tensor, Tensor] | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        assert self._tensors is not None
        return self._tensors

    def put(self, first: int, parts: tuple[Tensor, Tensor]) -> None:
        with self._lock:
            if self._tensors is None:
                x, residual = (part.new_empty(self._num_rows, part.shape[1]) for part in parts)
                self._tensors = x, residual
        for target, part in zip(self._tensors, parts, strict=True):
            target[first : first + len(part)].copy_(part)
