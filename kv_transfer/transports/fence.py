"""A fence between the copy of a peer's blocks and the reading of their generations.

`shm` and `cuda_ipc` use it. x86 keeps loads in order and stores in order, so it needs no fence. On
other CPUs a copy could contain bytes of a block's next owner although the old generation is read
after it. There the kernel's membarrier orders both ends: it runs a full barrier on each CPU that
runs a thread of a registered process, so the owner's stores need no barrier of their own.
"""

import ctypes
import os
import platform
from collections.abc import Callable

from baton.protocol.errors import ConfigError, TransferError

Fence = Callable[[], None]

ORDERED_MACHINES = ("x86_64", "AMD64", "i686")
# Of membarrier From linux/membarrier.h.
SYSCALL_NUMBERS = {"x86_64": 324, "aarch64": 283, "riscv64": 283}
GLOBAL_EXPEDITED, REGISTER_GLOBAL_EXPEDITED = 1 << 1, 1 << 2


def make_fence() -> Fence:
    """Return the fence that a reader calls between copy and check; register this process as owner.

    Raises `ConfigError` if the machine needs a fence and the kernel has none.
    """
    if platform.machine() in ORDERED_MACHINES:
        return lambda: None
    return membarrier_fence()


def membarrier_fence() -> Fence:
    """Return a fence by membarrier. Raises `ConfigError` if this kernel does not offer it."""
    number = SYSCALL_NUMBERS.get(platform.machine())
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    if number is None or syscall(number, REGISTER_GLOBAL_EXPEDITED, 0, 0) != 0:
        raise ConfigError(
            f"shm needs the membarrier system call on {platform.machine()}, and it is not allowed "
            "here; set transfer.transport to nixl"
        )

    def fence() -> None:
        if syscall(number, GLOBAL_EXPEDITED, 0, 0) != 0:
            reason = os.strerror(ctypes.get_errno())
            raise TransferError(f"membarrier failed: {reason}")

    return fence
