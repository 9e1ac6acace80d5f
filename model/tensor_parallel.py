"""The interface of a model's layers to its other ranks, over shared memory or NCCL.

Every rank calls the same collectives in the same order with equal shapes. On GPUs, collectives run
in the order of their caller's stream, so a captured step contains them.
"""

import mmap
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]  # it exists at run time
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllreduceOptions,
)

from baton.protocol.errors import NodeError

# The limit for one rank in one exchange; larger tensors are sent in pieces.
SLOT_BYTES = 4 << 20


class Ranks(Protocol):
    """`size` processes that hold one model; this is number `rank`. All calls block."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def is_batch_invariant(self) -> bool:
        """Return whether the bits of a row's sum depend on that row alone."""
        ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks in place and return the tensor, which is bit-equal on every rank."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the ranks' tensors of equal shape, concatenated along the last dimension."""
        ...


class SingleRank:
    """One rank that is the whole model."""

    rank = 0
    size = 1
    is_batch_invariant = True

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor


class SharedMemoryRanks:
    """Ranks on one host, with CPU tensors in shared memory and a byte on a socket as the signal.

    Each element is summed in rank order in float32, so its bits depend neither on the calling rank
    nor on the rest of the batch (a ring would cut a tensor at places that depend on its size). If a
    peer dies, its socket closes, and the calls of all others raise `NodeError`.

    Slots alternate: a rank writes into one pair's half again only after every peer has signalled
    the exchange in between, and a peer does that after it has read this half.
    """

    is_batch_invariant = True

    def __init__(self, rank: int, memory: int, peers: Sequence[socket.socket]) -> None:
        """Map `memory`, an empty file's descriptor that all share. `peers` are in rank order."""
        self.rank = rank
        self.size = len(peers) + 1
        self._peers = peers
        num_bytes = 2 * self.size * SLOT_BYTES
        os.ftruncate(memory, num_bytes)  # the later ranks set the same size
        self._memory = mmap.mmap(memory, num_bytes)
        buffer = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._slots = buffer.view(2, self.size, SLOT_BYTES)
        self._half = 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        for piece in _pieces(tensor.view(-1), tensor.element_size()):
            piece.copy_(sum_in_order(self._exchange(piece)))
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        rows = tensor.reshape(-1, tensor.shape[-1])
        pieces = _pieces(rows, rows.shape[1] * rows.element_size())
        gathered = [torch.cat(self._exchange(piece), dim=-1) for piece in pieces]
        return torch.cat(gathered).view(
            *tensor.shape[:-1], self.size * tensor.shape[-1]
        )

    def _exchange(self, piece: Tensor) -> list[Tensor]:
        """Return every rank's piece, in rank order. They are valid until the next exchange."""
        slots = self._slots[self._half]
        self._half = 1 - self._half
        num_bytes = piece.numel() * piece.element_size()
        parts = [slot[:num_bytes].view(piece.dtype).view(piece.shape) for slot in slots]
        parts[self.rank].copy_(piece)
        try:
            for peer in self._peers:
                peer.sendall(b"\0")
            if all(peer.recv(1) for peer in self._peers):
                return parts
        except OSError:
            pass
        raise NodeError("another rank of this node is gone")


def sum_in_order(parts: Sequence[Tensor] | Tensor) -> Tensor:
    """Return the sum of the ranks' tensors in float32, added in rank order."""
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    return total


def least(ranks: Ranks, number: int, device: torch.device) -> int:
    """Return the smallest of the ranks' numbers, which is the same on all ranks."""
    return int(ranks.all_gather(torch.tensor([number], device=device)).min())


def _pieces(tensor: Tensor, row_bytes: int) -> Sequence[Tensor]:
    """Return views of consecutive rows, each of which fits a slot."""
    assert row_bytes <= SLOT_BYTES, "one row must fit a slot"
    return torch.split(tensor, SLOT_BYTES // row_bytes)


class GroupRanks:
    """The `Ranks` of a process group. `is_ordered` adds all parts in rank order, in float32.

    Without it, NCCL chooses an order, which may depend on the size of the tensor. With it, a sum
    moves the tensor once per rank. Both give the same bits on every rank.
    """

    def __init__(self, group: dist.ProcessGroup, *, is_ordered: bool) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.is_batch_invariant = is_ordered
        self.group = group
        # On the stream of the caller: NCCL's own would fork and join a step twice in each layer.
        self._sum, self._gather = AllreduceOptions(), AllgatherOptions()
        self._sum.asyncOp = self._gather.asyncOp = False

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if not self.is_batch_invariant:
            self.group.allreduce([tensor], self._sum).wait()
            return tensor
        return tensor.copy_(sum_in_order(self._gathered(tensor)))

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.cat(self._gathered(tensor).unbind(), dim=-1)

    def leave(self) -> None:
        """End the group, as every other rank does; call it only when no captured step is left.

        NCCL waits for the graphs that contain its collectives, and for ranks that are late.
        """
        dist.destroy_process_group()

    def _gathered(self, tensor: Tensor) -> Tensor:
        """Return the ranks' tensors, in rank order: `[size, *tensor.shape]`."""
        parts = tensor.new_empty(self.size * len(tensor), *tensor.shape[1:])
        if tensor.numel():  # a step that samples nothing asks for no logits
            self.group._allgather_base(parts, tensor.contiguous(), self._gather).wait()
        return parts.view(self.size, *tensor.shape)


def join(
    device: torch.device,
    place: tuple[int, int],
    memory: int,
    timeout_s: float,
    *,
    is_ordered: bool,
) -> GroupRanks:
    """Meet the other ranks of this host, over NCCL or, on CPUs, gloo. Raises `NodeError`.

    `place` is the rank of this process and the number of ranks; `memory` is the descriptor of an
    empty file that all ranks inherited. A collective that takes longer than `timeout_s` ends its
    rank.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    # NCCL opens ports on which the ranks meet; no other host takes part.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    rank, size = place
    # The store opens its path again, the last time as it is destroyed, which an error may put off.
    # If another file had the number by then, torch would write to it, hang, or abort the process.
    path = f"/proc/self/fd/{os.dup(memory)}"  # so this one stays open
    try:
        dist.init_process_group(
            backend,
            store=FileStore(path, size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise NodeError(
            f"rank {rank} of {size} could not meet the others over {backend} within "
            f"{timeout_s:g} s: {reason}; run with NCCL_DEBUG=INFO to see more"
        ) from error
    assert dist.group.WORLD is not None
    return GroupRanks(dist.group.WORLD, is_ordered=is_ordered)
