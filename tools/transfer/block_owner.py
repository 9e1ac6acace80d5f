"""The process whose blocks `transfer.py` reads, and how that starts it.

It owns a pool whose blocks tell which they are, publishes its addresses in one line, and waits for
its parent to end it. Started with `Owner`; never alone.
"""

import queue
import select
import sys
from collections.abc import Sequence
from types import TracebackType

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.agent import make_port
from baton.kv_transfer.host_pool import HostPool, PoolShape
from baton.protocol.config import TransferConfig, TransportChoice
from baton.protocol.errors import NodeError
from baton.runtime.clock import monotonic
from baton.runtime.process import Child, Command, die_with_parent
from tools.transfer.block_readers import OWNER, Ids

START_TIMEOUT_S = 60.0
PREFIX = "owner "
STRIDE_BYTES = 64  # of the bytes that are looked at when a read is checked


class Owned(msgspec.Struct, frozen=True):
    """What the process is to own."""

    shape: PoolShape
    transports: tuple[TransportChoice, ...]


class Owner:
    """The process, as a context manager. Raises `NodeError` if it does not start."""

    def __init__(self, owned: Owned) -> None:
        self._owned = owned
        self._lines: queue.Queue[str] = queue.Queue()
        self._child: Child | None = None
        self.addresses: dict[str, bytes] = {}

    def __enter__(self) -> "Owner":
        argument = msgspec.json.encode(self._owned).decode()
        command = Command("owner", (argument,), "tools.transfer.block_owner")
        self._child = Child(command, lambda _, line: self._lines.put(line))
        try:
            self.addresses = self._wait(self._child)
        except BaseException:
            self._child.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._child is not None
        self._child.stop()

    def _wait(self, child: Child) -> dict[str, bytes]:
        deadline_s = monotonic() + START_TIMEOUT_S
        while child.poll() is None and monotonic() < deadline_s:
            try:
                line = self._lines.get(timeout=0.2)
            except queue.Empty:
                continue
            if line.startswith(PREFIX):
                return msgspec.json.decode(line[len(PREFIX) :], type=dict[str, bytes])
        why = child.tail[-1] if child.tail else f"no word within {START_TIMEOUT_S:g} s"
        raise NodeError(f"the process that owns the blocks did not start: {why}")


def marks(ids: Ids) -> NDArray[np.uint8]:
    """What every byte of these blocks is: neighbours differ, and no block is all zeros."""
    return (ids.astype(np.int64) * 37 % 251 + 1).astype(np.uint8)


def wrong_blocks(pool: HostPool, remote: Ids, local: Ids) -> int:
    """How many of the blocks `local` do not hold what the owner has in `remote`."""
    bytes_of = np.frombuffer(pool.buffer, np.uint8).reshape(pool.shape.num_blocks, -1)
    looked_at = bytes_of[:, ::STRIDE_BYTES][local]
    return int((looked_at != marks(remote)[:, None]).any(axis=1).sum())


def main(arguments: Sequence[str]) -> int:
    """The child's."""
    die_with_parent()
    owned = msgspec.json.decode(arguments[0], type=Owned)
    pool = HostPool(owned.shape.num_blocks, owned.shape.block_bytes)
    blocks = np.frombuffer(pool.buffer, np.uint8).reshape(owned.shape.num_blocks, -1)
    blocks[:] = marks(np.arange(owned.shape.num_blocks, dtype=np.int32))[:, None]
    ports = [make_port(pool, OWNER, TransferConfig(transport=name)) for name in owned.transports]
    metadata: dict[str, bytes] = {}
    for port in ports:
        metadata |= port.address().metadata
    print(PREFIX + msgspec.json.encode(metadata).decode(), flush=True)
    while True:
        select.select([port.fileno() for port in ports], [], [], 60.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
