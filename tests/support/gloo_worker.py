"""The process of one rank whose group meets over gloo, by the code that GPU ranks run over NCCL.

A test lets the executor start it in place of `baton.model.executors.worker`. It ends with code 3 if
the worker, ending in order, has not left the group.
"""

import os
import sys

import torch
import torch.distributed as dist

from baton.model.executors import worker
from baton.model.executors.worker_messages import LoadRank
from baton.model.tensor_parallel import GroupRanks, join

JOIN_S = 120.0


def _join(load: LoadRank) -> GroupRanks:
    place = load.rank, len(load.peers) + 1
    return join(torch.device("cpu"), place, load.memory, JOIN_S, is_ordered=True)


def main(arguments: list[str]) -> int:
    worker._join = _join
    code = worker.main(arguments)
    return 3 if code == 0 and dist.is_initialized() else code


if __name__ == "__main__":
    # A thread of gloo that still lets go of a tensor would abort a process that finalizes Python.
    os._exit(main(sys.argv[1:]))
