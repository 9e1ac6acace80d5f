"""The other ranks of one model, as its layers see them.

A decoder gets one `Ranks` and calls it where partial results meet: after a row-parallel product
and where logits are put together. It never learns how ranks talk. Every rank calls the same
collectives in the same order with equal shapes; nothing here decides or samples.
"""

from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, distributed


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


class GlooRanks:
    """Worker processes of one host, over loopback TCP. One per process.

    Gloo reduces each piece of a tensor on one rank and hands out the sum, so all ranks get the same
    bits. A rank that dies makes the others' calls fail at once.
    """

    def __init__(self, rank: int, size: int, rendezvous: Path, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        distributed.init_process_group(
            "gloo",
            init_method=rendezvous.absolute().as_uri(),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )

    def all_reduce(self, tensor: Tensor) -> Tensor:
        distributed.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        distributed.all_gather(parts, tensor)
        return torch.cat(parts, dim=-1)

    def broadcast(self, tensor: Tensor) -> Tensor:
        distributed.broadcast(tensor, src=0)
        return tensor

    def close(self) -> None:
        distributed.destroy_process_group()
