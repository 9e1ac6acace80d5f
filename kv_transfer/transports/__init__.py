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
from baton.runtime.host import num_gpus
from baton.runtime.log import logger

log = logger("transfer")


def make_transports(
    pool: HostPool | DevicePool, epoch: Epoch, config: TransferConfig
) -> list[Transport]:
    """Return the transports of one rank. Raises `ConfigError` if `config.transport` cannot work.

    `auto` adds nixl only where a peer may need it, because it takes time to load, registers the
    whole pool and makes progress for ever: without a network device, it reaches only what the near
    transport reaches faster, except GPUs of this host that this one does not see. Each transport
    that does not work is one line of the log. A GPU may have none; then decode nodes compute their
    prompts.
    """
    is_on_gpu = isinstance(pool, DevicePool)
    if config.transport == (SHM if is_on_gpu else CUDA_IPC):
        reason = "shm cannot read a GPU's memory" if is_on_gpu else "cuda_ipc reads GPU memory only"
        raise ConfigError(f"{reason}; set transfer.transport to auto")
    transports: list[Transport] = []
    if config.transport != NIXL:
        try:
            transports.append(_near(pool, epoch))
        except ConfigError as error:
            if config.transport != "auto" or not (is_on_gpu or is_installed()):
                raise
            log.warning("blocks cannot be shared on this host", reason=error.message)
    is_far = isinstance(pool, DevicePool) and len(pool.peers.visible) < num_gpus()
    is_useful = config.device or not transports or is_far
    if config.transport == NIXL or (config.transport == "auto" and is_useful and is_installed()):
        try:
            transports.append(NixlTransport(_memory_of(pool), epoch, config.device))
        except ConfigError as error:
            if config.transport == NIXL or not (is_on_gpu or transports):
                raise
            log.warning("nixl cannot be used, so only this host is reached", reason=error.message)
    if not transports:
        log.warning(
            "this GPU can hand no KV blocks over, so decode nodes compute their prompts "
            "themselves; to split prefill from decode, run `pip install -e '.[nixl]'` in baton's "
            "folder or start with `make serve EXTRAS=nixl`"
        )
    return transports


def _near(pool: HostPool | DevicePool, epoch: Epoch) -> Transport:
    if isinstance(pool, DevicePool):
        return CudaIpcTransport(pool, epoch)
    return ShmTransport(pool, epoch)


def _memory_of(pool: HostPool | DevicePool) -> PoolMemory:
    if isinstance(pool, DevicePool):
        return pool.memory
    return PoolMemory(pool.address, pool.shape.num_blocks, pool.shape.block_bytes)
