"""One rank's KV pool in a GPU's memory, and how other processes of the host can read it.

The rank's loader makes a `DevicePool` in place of a `HostPool`; `choice` makes its transports. The
engine implements `PeerMemory`, which is all that touches a GPU: this room imports no torch.
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

        Pieces have `num_bytes` and are numbered through a pool; numbers are in range. The returned
        function says whether the copy has ended. Both raise `TransferError`.
        """
        ...

    def close(self) -> None:
        """Unmap the pool. No copy of it may be in flight."""
        ...


class PeerMemory(Protocol):
    """What `cuda_ipc` needs of a GPU. Only the agent's thread calls `enter` and `open`, and uses
    what `open` returns."""

    @property
    def gpu(self) -> str:
        """Return the id of the GPU that holds the local pool; all processes of the host agree."""
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
        """Make the GPU current on the calling thread, and compile what copies need."""
        ...

    def open(self, handle: bytes, shape: PoolShape) -> PeerPool:
        """Map the pool of another process. Raises `TransferError`."""
        ...


@dataclass(slots=True, frozen=True)
class DevicePool:
    """A pool in a GPU's memory. `table` is a host pool of empty blocks: generations alone."""

    memory: PoolMemory
    table: HostPool
    peers: PeerMemory

    def close(self) -> None:
        self.table.close()
