"""Block ids of a read as an array, checked against the pool: what follows is address arithmetic."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from baton.protocol.errors import TransferError


def check_read(
    remote: Sequence[int], num_remote: int, local: Sequence[int], num_local: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Remote and local ids of one read; `TransferError` unless they pair and lie in their pools."""
    source, target = np.asarray(remote, np.int64), np.asarray(local, np.int64)
    if len(source) != len(target):
        raise TransferError("a read needs a local block for each remote one")
    for ids, num_blocks in ((source, num_remote), (target, num_local)):
        if len(ids) and int(ids.view(np.uint64).max()) >= num_blocks:  # negative ones are huge
            raise TransferError(f"a block id is outside of 0..{num_blocks - 1}")
    return source, target
