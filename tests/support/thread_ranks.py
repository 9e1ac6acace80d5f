"""The ranks of one node as threads of this process, over the memory that processes would share."""

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, combinations

import torch
from torch import Tensor

from baton.model.tensor_parallel import SharedMemoryRanks


@contextmanager
def thread_ranks(size: int) -> Iterator[list[SharedMemoryRanks]]:
    """All ranks of one node, for one thread each."""
    memory = os.memfd_create("ranks")
    ends: list[list[socket.socket]] = [[] for _ in range(size)]
    for one, other in combinations(range(size), 2):
        pair = socket.socketpair()
        ends[one].append(pair[0])
        ends[other].append(pair[1])
    try:
        yield [SharedMemoryRanks(rank, memory, ends[rank]) for rank in range(size)]
    finally:
        os.close(memory)
        for end in chain.from_iterable(ends):
            end.close()


def on_all(
    members: list[SharedMemoryRanks], call: Callable[[SharedMemoryRanks], Tensor]
) -> Tensor:
    """What every rank gets, stacked."""
    with ThreadPoolExecutor(len(members)) as pool:
        return torch.stack(list(pool.map(call, members)))
