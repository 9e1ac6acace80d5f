"""A process of its own that owns KV blocks, and a reader of them, for the tools that time reads.

The child fills a pool on its device with marks, publishes its address in one line, and waits for
its parent to end it. `block_owner` and `BlockReader` are the parent's side.
"""

import queue
import select
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.agent import TransferAgent, make_port
from baton.kv_transfer.interfaces import (
    AddPeer,
    AgentEvent,
    BlockSlice,
    PeerRank,
    PeerUp,
    PoolMemory,
    Read,
    ReadEnded,
)
from baton.kv_transfer.pools import DevicePool, HostPool
from baton.protocol.config import TransferConfig, TransportChoice
from baton.protocol.errors import NodeError
from baton.protocol.ids import Epoch
from baton.protocol.messages import RankAddress
from baton.runtime.clock import monotonic
from baton.runtime.process import Child, Command, die_with_parent

if TYPE_CHECKING:
    from torch import Tensor

MODULE = "tools.block_owner"
OWNER = Epoch("owner")
READER = Epoch("reader")
RANK = PeerRank(OWNER)
START_TIMEOUT_S = READ_TIMEOUT_S = 60.0
PREFIX = "owner "


class Owned(msgspec.Struct, frozen=True):
    """The blocks that the process is to own, and how they can be read."""

    num_blocks: int
    block_bytes: int
    transports: tuple[TransportChoice, ...]
    device: str = "cpu"


@contextmanager
def block_owner(owned: Owned) -> Iterator[RankAddress]:
    """Run the process and yield its address. Raises `NodeError` if it does not start."""
    lines: queue.Queue[str] = queue.Queue()
    command = Command("owner", (msgspec.json.encode(owned).decode(),), MODULE)
    child = Child(command, lambda _, line: lines.put(line))
    try:
        yield _address_in(child, lines)
    finally:
        child.stop()


def _address_in(child: Child, lines: "queue.Queue[str]") -> RankAddress:
    deadline_s = monotonic() + START_TIMEOUT_S
    while child.poll() is None and monotonic() < deadline_s:
        with suppress(queue.Empty):
            line = lines.get(timeout=0.2)
            if line.startswith(PREFIX):
                return msgspec.json.decode(line[len(PREFIX) :], type=RankAddress)
    why = child.tail[-1] if child.tail else f"no word within {START_TIMEOUT_S:g} s"
    raise NodeError(f"the process that owns the blocks did not start: {why}")


class BlockReader:
    """One transport through its agent, as a node uses it, into a pool with blocks of that size."""

    def __init__(
        self,
        pool: HostPool | DevicePool,
        transport: str,
        owner: RankAddress,
        owned: Owned,
    ) -> None:
        config = TransferConfig(transport=transport)  # type: ignore[arg-type]
        self._transport = transport
        self._port: TransferAgent = make_port(pool, READER, config)
        whole = BlockSlice(0, 0, owned.block_bytes)
        self._port.send(
            AddPeer(RANK, transport, owner, owned.num_blocks, owned.block_bytes, whole)
        )
        if not isinstance(event := self._event(), PeerUp):
            self.close()
            raise NodeError(f"{transport} does not connect: {event}")

    def read(self, remote: Sequence[int], local: Sequence[int]) -> ReadEnded:
        """Return when the blocks are there. Raises `NodeError` if they do not come."""
        self._port.send(Read(0, RANK, tuple(remote), tuple(local), (0,) * len(remote)))
        event = self._event()
        if not isinstance(event, ReadEnded) or event.failure is not None:
            raise NodeError(f"a read over {self._transport} failed: {event}")
        return event

    def close(self) -> None:
        self._port.close()

    def _event(self) -> AgentEvent:
        deadline_s = monotonic() + READ_TIMEOUT_S
        while not (events := self._port.poll()):
            if monotonic() > deadline_s:
                raise NodeError(
                    f"{self._transport} did not answer within {READ_TIMEOUT_S:g} s"
                )
            select.select([self._port.fileno()], [], [], 1.0)
        return events[0]


def words_of(pool: HostPool) -> NDArray[np.int32]:
    """Return the blocks of a pool in host memory as words: [num_blocks, words]."""
    return np.frombuffer(pool.buffer, np.int32).reshape(pool.shape.num_blocks, -1)


def device_pool(
    device: str, num_blocks: int, block_bytes: int
) -> tuple[DevicePool, "Tensor"]:
    """Return a pool of zeros in a GPU's memory, and its blocks: [num_blocks, words] int32."""
    import torch

    from baton.model.runner.peer_memory import CudaPeerMemory

    words = torch.zeros(
        num_blocks + 1, block_bytes // 4, dtype=torch.int32, device=device
    )
    blocks = words[:num_blocks]
    memory = PoolMemory(
        blocks.data_ptr(), num_blocks, block_bytes, str(blocks.device), 1
    )
    return DevicePool(
        memory, HostPool(num_blocks, 0), CudaPeerMemory(blocks, num_blocks)
    ), blocks


def marks(block_ids: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the value of every word of these blocks: neighbours differ, and no block is zero."""
    return (np.asarray(block_ids, np.int64) * 37 % 251 + 1).astype(np.int32)


def wrong_blocks(
    pool: HostPool, remote: NDArray[np.int32], local: NDArray[np.int32]
) -> int:
    """Return how many of the blocks `local` differ from the owner's blocks `remote`."""
    return int((words_of(pool)[local] != marks(remote)[:, None]).any(axis=1).sum())


def main(arguments: Sequence[str]) -> int:
    """Run the child process."""
    die_with_parent()
    owned = msgspec.json.decode(arguments[0], type=Owned)
    pool: HostPool | DevicePool
    marked = marks(range(owned.num_blocks))[:, None]
    if owned.device == "cpu":
        pool = HostPool(owned.num_blocks, owned.block_bytes)
        words_of(pool)[:] = marked
    else:
        import torch

        torch.cuda.set_device(owned.device)
        pool, blocks = device_pool(owned.device, owned.num_blocks, owned.block_bytes)
        blocks.copy_(torch.from_numpy(marked).expand(blocks.shape))
        torch.cuda.synchronize()  # the parent reads at once
    ports = [
        make_port(pool, OWNER, TransferConfig(transport=name))
        for name in owned.transports
    ]
    metadata: dict[str, bytes] = {}
    for port in ports:
        metadata |= port.address().metadata
    print(PREFIX + msgspec.json.encode(RankAddress(metadata)).decode(), flush=True)
    while True:
        select.select([port.fileno() for port in ports], [], [], 60.0)
        for port in ports:
            port.poll()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
