"""The ranks of one node over a process group of torch: NCCL between GPUs.

A worker whose rank is on a GPU joins the group before it loads. Collectives run in the order of
their caller's stream, so a captured step contains them, and every rank replays the same ones in the
same order because all ranks get the same plans. Tests join over gloo, which runs the same code on
CPUs. This file decides nothing about devices or models.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]  # it exists at run time

from baton.engine.tensor_parallel import sum_in_order
from baton.protocol.errors import NodeError


class GroupRanks:
    """The `Ranks` of a process group. `is_ordered` adds all parts in rank order, in float32.

    Without it, NCCL chooses an order, which may depend on the size of the tensor. With it, a sum
    moves the tensor once per rank. Both give the same bits on every rank.
    """

    def __init__(self, group: dist.ProcessGroup, *, is_ordered: bool) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.is_batch_invariant = is_ordered
        self.group = group

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if not self.is_batch_invariant:
            self.group.allreduce([tensor]).wait()
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
        if tensor.numel():  # a step that draws nothing asks for no logits
            self.group._allgather_base(parts, tensor.contiguous()).wait()
        return parts.view(self.size, *tensor.shape)


def join(
    device: torch.device, place: tuple[int, int], memory: int, timeout_s: float, *, is_ordered: bool
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
    try:
        dist.init_process_group(
            backend,
            store=FileStore(f"/proc/self/fd/{memory}", size),
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
