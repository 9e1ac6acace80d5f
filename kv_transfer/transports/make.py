"""Which transports a rank's agent gets. Called by `agent.make_port`.

Which of them a pair of ranks uses is not decided here but where the node chooses from what both
publish.
"""

from baton.kv_transfer.host_pool import HostPool
from baton.kv_transfer.interfaces import PoolMemory, Transport
from baton.kv_transfer.transports.nixl import NixlTransport
from baton.kv_transfer.transports.nixl_binding import is_installed
from baton.kv_transfer.transports.shm import ShmTransport
from baton.protocol.config import TransferConfig
from baton.protocol.errors import ConfigError
from baton.protocol.ids import Epoch


def make_transports(
    pool: HostPool | PoolMemory, epoch: Epoch, config: TransferConfig
) -> list[Transport]:
    """What `config.transport` asks for; raises `ConfigError` when it cannot be had.

    `auto` adds nixl to shm only where it can be of use: loading it takes time and a thread, and
    without a network device it reaches nothing that shm does not reach faster.
    """
    if isinstance(pool, PoolMemory):
        if config.transport == "shm":
            raise ConfigError("shm cannot read a GPU's memory; set transfer.transport to nixl")
        return [NixlTransport(pool, epoch, config.device)]
    transports: list[Transport] = []
    if config.transport != "nixl":
        transports.append(ShmTransport(pool, epoch))
    if config.transport == "nixl" or (
        config.transport == "auto" and config.device and is_installed()
    ):
        memory = PoolMemory(pool.address, pool.shape.num_blocks, pool.shape.block_bytes)
        transports.append(NixlTransport(memory, epoch, config.device))
    return transports
