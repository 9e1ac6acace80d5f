"""The other ranks of one model, as its layers see them.

A decoder gets one `Ranks` and calls it where partial results meet: after a row-parallel product
and where logits are put together. It never learns how ranks talk. Every rank calls the same
collectives in the same order with equal shapes; nothing here decides or samples.
"""

from typing import Protocol

from torch import Tensor


class Ranks(Protocol):
    """`size` processes that hold one model; this is number `rank`. All calls are blocking."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place and returned; bit-equal on every rank."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The ranks' tensors of equal shape, concatenated along the last dimension."""
        ...

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's values, in place and returned."""
        ...


class SingleRank:
    """One rank that is the whole model: every collective is the identity."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        return tensor
