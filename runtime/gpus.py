"""The GPUs of this host and which node takes which, without importing torch.

The launcher of local nodes gives each its own GPU, round robin. A node sees the others too, after
its own: transfers between GPUs of one host need to.
"""

import os
from collections.abc import Mapping
from pathlib import Path

DEVICES = Path("/dev")
VARIABLE = "CUDA_VISIBLE_DEVICES"


def num_gpus(devices: Path = DEVICES) -> int:
    """Return how many GPUs of NVIDIA this process could open."""
    return len(list(devices.glob("nvidia[0-9]*")))


def gpus_of(
    number: int, devices: Path = DEVICES, environment: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Return the GPUs that node `number` of this host sees, its own first; none without GPUs."""
    given = (os.environ if environment is None else environment).get(VARIABLE)
    if given is None:
        known = tuple(str(index) for index in range(num_gpus(devices)))
    else:
        known = tuple(name.strip() for name in given.split(",") if name.strip())
    if not known:
        return ()
    first = number % len(known)
    return known[first:] + known[:first]


def nodes_on_gpu(number: int, num_nodes: int, num_known: int) -> int:
    """Return how many of `num_nodes` nodes have the same GPU as node `number`, itself included."""
    return len(range(number % num_known, num_nodes, num_known))
