"""One rank's KV pool in a GPU's memory, and how other processes of the host can read it.

The rank's loader makes a `DevicePool` in place of a `HostPool`; `choice` makes its transports. The
engine implements `PeerMemory`, the only part that touches a GPU, because this room imports no
torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.host_pool import HostPool, PoolShape
from baton.kv_transfer.interfaces import PoolMemory


class PeerPool(Protocol):
    """The pool of another process in this process's GPU address space."""

    def copy(
        self, remote: NDArray[np.int64], local: NDArray[np.int64], num_bytes: int
    ) -> Callable[[], bool]:
        """Launch the copy of pieces `remote` of that pool to pieces `local` of ours.

        Pieces have `num_bytes` and are numbered from the start of a pool; the caller has checked
        the numbers. The returned function says whether the copy has ended. Both raise
        `TransferError`.
        """
        ...

    def close(self) -> None:
        """Unmap the pool. No copy of it may be in flight."""
        ...


class PeerMemory(Protocol):
    """What `cuda_ipc` needs from a GPU. Only the agent's thread calls `enter` and `open`."""

    @property
    def gpu(self) -> str:
        """Return the id of the local pool's GPU, which is the same in all processes of the host."""
        ...

    @property
    def visible(self) -> tuple[str, ...]:
        """Return the ids of all GPUs that this process can use."""
        ...

    def handle(self) -> bytes:
        """Return the bytes with which another process opens the local pool.

        Raises `ConfigError` where the memory cannot be shared.
        """
        ...

    def enter(self) -> None:
        """Make the GPU current on the calling thread, and compile the kernels that copy."""
        ...

    def open(self, handle: bytes, shape: PoolShape) -> PeerPool:
        """Map the pool of another process. Raises `TransferError`."""
        ...


@dataclass(slots=True, frozen=True)
class DevicePool:
    """A pool in a GPU's memory. `table` is a host pool with generations and empty blocks."""

    memory: PoolMemory
    table: HostPool
    peers: PeerMemory

    def close(self) -> None:
        self.table.close()
