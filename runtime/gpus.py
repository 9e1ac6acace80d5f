"""The GPUs of this host, and which node takes which of them. Nothing here imports torch.

The launcher of local nodes gives each node its own GPU, or one for each of its ranks, round robin;
a node divides its GPUs among its ranks in the same way. Each process also sees the other GPUs,
after its own, because transfers between GPUs of one host need them.
"""

import os
from collections.abc import Mapping
from pathlib import Path

DEVICES = Path("/dev")
VARIABLE = "CUDA_VISIBLE_DEVICES"


def num_gpus(devices: Path = DEVICES) -> int:
    """Return how many NVIDIA GPUs this process could open."""
    return len(list(devices.glob("nvidia[0-9]*")))


def gpus_of(
    number: int, devices: Path = DEVICES, environment: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Return the GPUs of this process, beginning with GPU `number` and wrapping around.

    The result is empty on a machine without GPUs.
    """
    given = (os.environ if environment is None else environment).get(VARIABLE)
    if given is None:
        known = tuple(str(index) for index in range(num_gpus(devices)))
    else:
        known = tuple(name.strip() for name in given.split(",") if name.strip())
    if not known:
        return ()
    first = number % len(known)
    return known[first:] + known[:first]


def nodes_on_gpu(number: int, num_nodes: int, num_known: int, gpus_each: int = 1) -> int:
    """Return how many of `num_nodes` nodes use a GPU of node `number`, that node included.

    Each node takes the next `gpus_each` GPUs, one for each of its ranks.
    """

    def taken(node: int) -> set[int]:
        return {(node * gpus_each + rank) % num_known for rank in range(gpus_each)}

    own = taken(number)
    return max(sum(gpu in taken(node) for node in range(num_nodes)) for gpu in own)
