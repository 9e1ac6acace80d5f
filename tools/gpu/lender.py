"""The process whose blocks the transfer section reads, and the class that starts it.

The process owns a pool on the device, or in host memory where the section runs on a CPU, writes a
mark into every block, publishes its address in one line, and waits for its parent to end it.
"""

import queue
import select
import sys
from collections.abc import Sequence
from types import TracebackType

import msgspec
import torch
from torch import Tensor

from baton.kv_transfer.agent import make_port
from baton.kv_transfer.device_pool import DevicePool
from baton.kv_transfer.host_pool import HostPool
from baton.kv_transfer.interfaces import PoolMemory
from baton.protocol.config import TransferConfig, TransportChoice
from baton.protocol.errors import NodeError
from baton.protocol.ids import Epoch
from baton.protocol.messages import RankAddress
from baton.runtime.clock import monotonic
from baton.runtime.process import Child, Command, die_with_parent

OWNER = Epoch("owner")
START_TIMEOUT_S = 60.0
PREFIX = "owner "
MODULE = "tools.gpu.lender"


class Lent(msgspec.Struct, frozen=True):
    """What the process is to own, and how it can be read."""

    device: str
    num_blocks: int
    block_bytes: int
    transport: TransportChoice


def make_pool(
    device: str, num_blocks: int, block_bytes: int
) -> tuple[HostPool | DevicePool, Tensor]:
    """Return a pool of zeros, and its blocks as a tensor: [num_blocks, words] int32."""
    if device == "cpu":
        host = HostPool(num_blocks, block_bytes)
        return host, torch.frombuffer(host.buffer, dtype=torch.int32).view(num_blocks, -1)
    from baton.engine.peer_memory import CudaPeerMemory

    words = torch.zeros(num_blocks + 1, block_bytes // 4, dtype=torch.int32, device=device)
    blocks = words[:num_blocks]
    memory = PoolMemory(blocks.data_ptr(), num_blocks, block_bytes, str(blocks.device), 1)
    return DevicePool(memory, HostPool(num_blocks, 0), CudaPeerMemory(blocks, num_blocks)), blocks


def marks(block_ids: Sequence[int]) -> Tensor:
    """Return the value of every word of these blocks: neighbours differ, and no block is zero."""
    return torch.tensor([block * 37 % 251 + 1 for block in block_ids], dtype=torch.int32)


class Lender:
    """The process, as a context manager. Raises `NodeError` if it does not start."""

    def __init__(self, lent: Lent) -> None:
        self._lent = lent
        self._lines: queue.Queue[str] = queue.Queue()
        self._child: Child | None = None
        self.address = RankAddress({})

    def __enter__(self) -> "Lender":
        argument = msgspec.json.encode(self._lent).decode()
        command = Command("lender", (argument,), MODULE)
        self._child = Child(command, lambda _, line: self._lines.put(line))
        try:
            self.address = self._wait(self._child)
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

    def _wait(self, child: Child) -> RankAddress:
        deadline_s = monotonic() + START_TIMEOUT_S
        while child.poll() is None and monotonic() < deadline_s:
            try:
                line = self._lines.get(timeout=0.2)
            except queue.Empty:
                continue
            if line.startswith(PREFIX):
                return msgspec.json.decode(line[len(PREFIX) :], type=RankAddress)
        why = child.tail[-1] if child.tail else f"no word within {START_TIMEOUT_S:g} s"
        raise NodeError(f"the process that owns the blocks did not start: {why}")


def main(arguments: Sequence[str]) -> int:
    """Run the child process."""
    die_with_parent()
    lent = msgspec.json.decode(arguments[0], type=Lent)
    pool, blocks = make_pool(lent.device, lent.num_blocks, lent.block_bytes)
    blocks.copy_(marks(range(lent.num_blocks))[:, None].expand(blocks.shape))
    if blocks.is_cuda:
        torch.cuda.synchronize()  # the parent reads at once
    port = make_port(pool, OWNER, TransferConfig(transport=lent.transport))
    print(PREFIX + msgspec.json.encode(port.address()).decode(), flush=True)
    while True:
        select.select([port.fileno()], [], [], 60.0)
        port.poll()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
