"""The process whose blocks the transfer section reads; `BlockOwner` starts it.

The process owns a pool on the device, or in host memory where the section runs on a CPU, writes a
mark into every block, publishes its address in one line, and waits for its parent to end it.
"""

import select
import sys
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from baton.kv_transfer.agent import make_port
from baton.kv_transfer.interfaces import PoolMemory
from baton.kv_transfer.pools import DevicePool, HostPool
from baton.protocol.config import TransferConfig, TransportChoice
from baton.protocol.ids import Epoch
from baton.runtime.process import die_with_parent
from tools.block_owner import publish

OWNER = Epoch("owner")
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


def main(arguments: Sequence[str]) -> int:
    """Run the child process."""
    die_with_parent()
    lent = msgspec.json.decode(arguments[0], type=Lent)
    pool, blocks = make_pool(lent.device, lent.num_blocks, lent.block_bytes)
    blocks.copy_(marks(range(lent.num_blocks))[:, None].expand(blocks.shape))
    if blocks.is_cuda:
        torch.cuda.synchronize()  # the parent reads at once
    port = make_port(pool, OWNER, TransferConfig(transport=lent.transport))
    publish(port.address())
    while True:
        select.select([port.fileno()], [], [], 60.0)
        port.poll()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
