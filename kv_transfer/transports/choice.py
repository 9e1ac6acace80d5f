"""Which transports a rank has, and which of them one rank takes to read another.

`agent` makes a rank's transports here, and the connector chooses one for each pair of ranks. The
choice is a plain rule over what both ranks have published: GPUs of one host that see each other
take cuda_ipc, ranks on one host that both have shm take shm, and other pairs take nixl. A setting
can force one transport. Nothing is tried here: if a pair cannot connect, the connector chooses
again without the transport that failed.
"""

import os
from collections.abc import Collection, Sequence

from baton.kv_transfer.device_pool import DevicePool
from baton.kv_transfer.host_pool import HostPool
from baton.kv_transfer.interfaces import PoolMemory, Transport
from baton.kv_transfer.transports.cuda_ipc import (
    CudaIpcAddress,
    CudaIpcTransport,
    process_space,
)
from baton.kv_transfer.transports.nixl import NixlTransport
from baton.kv_transfer.transports.nixl_binding import is_installed
from baton.kv_transfer.transports.shm import ShmAddress, ShmTransport, this_place
from baton.protocol.config import TransferConfig, TransportChoice
from baton.protocol.errors import ConfigError, TransferError
from baton.protocol.ids import Epoch
from baton.protocol.messages import RankAddress
from baton.runtime.log import logger

log = logger("transfer")

SHM = ShmTransport.name
NIXL = NixlTransport.name
CUDA_IPC = CudaIpcTransport.name


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


def reaches_of(ranks: Sequence[RankAddress], config: TransferConfig) -> tuple[str, ...]:
    """Return the ways to read the pools of a node, as `NodeInfo` publishes them.

    Two nodes with an equal text can use that transport with each other.
    """
    names = set.intersection(*({*rank.metadata} for rank in ranks))
    try:
        here = "/".join(this_place())
    except OSError:  # a sandbox without /proc: the two nodes may try
        return ()
    if not names:  # a text that no other node has
        return (f"nothing@{here}/{os.getpid()}",)
    near = {
        SHM: f"{SHM}@{here}",
        CUDA_IPC: f"{CUDA_IPC}@{here}/{process_space()}",
        NIXL: NIXL if config.device else f"{NIXL}@{here}",
    }
    return tuple(sorted(near[name] for name in names))


def choose_transport(
    source: RankAddress,
    target: RankAddress,
    forced: TransportChoice,
    failed: Collection[str] = (),
) -> str:
    """Return the transport by which `target` reads `source`. Raises `TransferError` if none works.

    `failed` are the transports that did not connect this pair.
    """
    common = (source.metadata.keys() & target.metadata.keys()) - {*failed}
    if forced != "auto":
        if forced not in common:
            raise _nothing_in_common(source, target, f"transfer.transport is {forced}, but ")
        if forced == SHM and not _on_one_host(source, target):
            raise TransferError(
                "transfer.transport is shm, but the two ranks are on different hosts",
                code="no_transport",
            )
        if forced == CUDA_IPC and not _see_one_gpu(source, target):
            raise TransferError(
                "transfer.transport is cuda_ipc, but decode does not see prefill's GPU: it is on "
                "another host, hidden by CUDA_VISIBLE_DEVICES, or in a container with its own ipc "
                "or pid namespace",
                code="no_transport",
            )
        return forced
    if CUDA_IPC in common and _see_one_gpu(source, target):
        return CUDA_IPC
    if SHM in common and _on_one_host(source, target):
        return SHM
    if NIXL in common:
        return NIXL
    raise _nothing_in_common(source, target, "")


def _on_one_host(source: RankAddress, target: RankAddress) -> bool:
    ours, theirs = (ShmAddress.decode(rank.metadata[SHM]) for rank in (source, target))
    return ours.shares_host(theirs)


def _see_one_gpu(source: RankAddress, target: RankAddress) -> bool:
    owner, reader = (CudaIpcAddress.decode(rank.metadata[CUDA_IPC]) for rank in (source, target))
    return owner.can_be_read_by(reader)


def _nothing_in_common(source: RankAddress, target: RankAddress, prefix: str) -> TransferError:
    return TransferError(
        f"{prefix}prefill offers {_names(source)}, decode can use {_names(target)}, and no "
        "transport serves both where they run",
        code="no_transport",
    )


def _names(rank: RankAddress) -> str:
    return ", ".join(sorted(rank.metadata)) or "nothing"
