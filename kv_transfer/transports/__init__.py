"""Ways to read bytes from another process's pool: shm and cuda_ipc on one host, nixl beyond it."""

from baton.kv_transfer.interfaces import PoolMemory, Transport
from baton.kv_transfer.pools import DevicePool, HostPool
from baton.kv_transfer.transports.addresses import CUDA_IPC, NIXL, SHM
from baton.kv_transfer.transports.cuda_ipc import CudaIpcTransport
from baton.kv_transfer.transports.nixl import NixlTransport
from baton.kv_transfer.transports.nixl_binding import is_installed
from baton.kv_transfer.transports.shm import ShmTransport
from baton.protocol.config import TransferConfig
from baton.protocol.errors import ConfigError
from baton.protocol.ids import Epoch
from baton.runtime.log import logger

log = logger("transfer")


def make_transports(
    pool: HostPool | DevicePool, epoch: Epoch, config: TransferConfig
) -> list[Transport]:
    """Return the transports of one rank. Raises `ConfigError` if `config.transport` cannot work.

    `auto` adds nixl to shm only where it is of use: nixl takes time to load and a thread, and
    without a network device it reaches only what shm reaches faster.
    """
    if isinstance(pool, DevicePool):
        return _of_a_gpu(pool, epoch, config)
    if config.transport == CUDA_IPC:
        raise ConfigError(
            "cuda_ipc reads GPU memory and this node computes on a CPU; set transfer.transport to "
            "auto"
        )
    transports: list[Transport] = []
    if config.transport != NIXL:
        try:
            transports.append(ShmTransport(pool, epoch))
        except ConfigError:
            if config.transport == SHM or not is_installed():
                raise
    if not transports or (config.transport == "auto" and config.device and is_installed()):
        memory = PoolMemory(pool.address, pool.shape.num_blocks, pool.shape.block_bytes)
        try:
            transports.append(NixlTransport(memory, epoch, config.device))
        except ConfigError as error:
            if not transports:
                raise
            log.warning("nixl cannot be used, so only this host is reached", reason=error.message)
    return transports


def _of_a_gpu(pool: DevicePool, epoch: Epoch, config: TransferConfig) -> list[Transport]:
    """Return which of cuda_ipc and nixl work here; `auto` logs a line for each that does not."""
    if config.transport == SHM:
        raise ConfigError("shm cannot read a GPU's memory; set transfer.transport to auto")
    transports: list[Transport] = []
    if config.transport != NIXL:
        try:
            transports.append(CudaIpcTransport(pool, epoch))
        except ConfigError as error:
            if config.transport == CUDA_IPC:
                raise
            log.warning("cuda_ipc cannot be used between GPUs of this host", reason=error.message)
    if config.transport == NIXL or (config.transport == "auto" and is_installed()):
        try:
            transports.append(NixlTransport(pool.memory, epoch, config.device))
        except ConfigError as error:
            if config.transport == NIXL:
                raise
            log.warning("nixl cannot be used, so only this host is reached", reason=error.message)
    if not transports:
        log.warning(
            "this GPU can hand no KV blocks over, so decode nodes compute their prompts "
            "themselves; to split prefill from decode, run `pip install -e '.[nixl]'` in baton's "
            "folder or start with `make serve EXTRAS=nixl`"
        )
    return transports
