"""Describe memory to NIXL: as rows of address, length and device number, of one memory type.

Only `nixl` uses it.
"""

import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.interfaces import PoolMemory
from baton.protocol.errors import TransferError

WARM_UP_BYTES = 64
MAX_DEVICE_DIGITS = 3


def segment(device: str) -> tuple[str, int]:
    """Return NIXL's memory type and device number of "cpu" or "cuda:1"."""
    kind, _, index = device.partition(":")
    if (
        kind not in ("cpu", "cuda")
        or not (index or "0").isdecimal()
        or (len(index) > MAX_DEVICE_DIGITS)
    ):
        raise TransferError(f"nixl knows no device {device!r}")
    return ("VRAM" if kind == "cuda" else "DRAM"), int(index or 0)


def warm_up_bytes(block_bytes: int) -> int:
    return min(WARM_UP_BYTES, block_bytes)


def block_rows(memory: PoolMemory, offset: int, num_bytes: int) -> NDArray[np.uint64]:
    """Return a descriptor (address, length, device) for a range of each block: [num_blocks, 3]."""
    rows = np.empty((memory.num_blocks, 3), np.uint64)
    offsets = np.arange(memory.num_blocks, dtype=np.uint64) * np.uint64(memory.block_bytes)
    rows[:, 0] = offsets + np.uint64(memory.address + offset)
    rows[:, 1] = num_bytes
    rows[:, 2] = segment(memory.device)[1]
    return rows


def one_row(address: int, num_bytes: int, device: int) -> NDArray[np.uint64]:
    return np.array([[address, num_bytes, device]], np.uint64)
