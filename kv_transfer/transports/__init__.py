"""Ways to read bytes from another process's pool, and which of them one rank takes to read another.

`TRANSPORTS` is the table of them; each one's file says what it needs. A setting can force one.
Nothing is tried here: if a pair cannot connect, the connector chooses again without the transport
that failed, and where several can read a peer, `trials` finds the fastest.
"""

import os
from collections.abc import Collection, Sequence

from baton.kv_transfer.interfaces import PeerTransport
from baton.kv_transfer.pools import DevicePool
from baton.kv_transfer.transports.addresses import Pool, TransportKind
from baton.kv_transfer.transports.cuda_ipc import CUDA_IPC
from baton.kv_transfer.transports.nixl import NIXL
from baton.kv_transfer.transports.shm import SHM
from baton.protocol.config import TransferConfig, TransportChoice
from baton.protocol.errors import ConfigError, TransferError
from baton.protocol.ids import Epoch
from baton.protocol.messages import RankAddress
from baton.runtime.host import num_gpus
from baton.runtime.log import logger

log = logger("transfer")

# In the order in which a pair takes them before they are tried. Those that go far come last.
TRANSPORTS: tuple[TransportKind, ...] = (CUDA_IPC, SHM, NIXL)


def make_transports(
    pool: Pool, epoch: Epoch, config: TransferConfig
) -> list[PeerTransport]:
    """Return the transports of one rank. Raises `ConfigError` if `config.transport` cannot work.

    `auto` adds one that goes far only where a peer may need it (`_may_go_far`). Each transport that
    does not work is one line of the log. A GPU may have none; then decode nodes compute their
    prompts.
    """
    is_on_gpu = isinstance(pool, DevicePool)
    is_forced = config.transport != "auto"
    kinds = [
        kind for kind in TRANSPORTS if not is_forced or kind.name == config.transport
    ]
    transports: list[PeerTransport] = []
    for index, kind in enumerate(kinds):
        can_lend = isinstance(pool, kind.lends)
        if is_forced and not can_lend:
            memory = "GPUs" if is_on_gpu else "CPUs"
            text = f"{kind.name} cannot read the memory of {memory}; set transfer.transport to auto"
            raise ConfigError(text)
        is_idle = (
            kind.goes_far
            and not is_forced
            and not _may_go_far(pool, config, transports)
        )
        if is_idle or not can_lend or not (is_forced or kind.is_installed()):
            continue
        try:
            transports.append(kind.make(pool, epoch, config))
        except ConfigError as error:
            may_follow = any(later.is_installed() for later in kinds[index + 1 :])
            if is_forced or not (is_on_gpu or transports or may_follow):
                raise
            log.warning(f"{kind.name} cannot be used", reason=error.message)
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
    kinds = [kind for kind in TRANSPORTS if kind.name in names]
    try:
        reaches = {kind.name: kind.reach(config) for kind in kinds}
    except OSError:  # a sandbox without /proc: the two nodes may try
        return ()
    if not reaches:  # a text that no other node has
        return (f"nothing@{os.urandom(8).hex()}",)
    return tuple(
        sorted(f"{name}@{place}" if place else name for name, place in reaches.items())
    )


def choose_transport(
    source: RankAddress,
    target: RankAddress,
    forced: TransportChoice,
    failed: Collection[str] = (),
) -> str:
    """Return the first of `usable_transports`."""
    return usable_transports(source, target, forced, failed)[0]


def usable_transports(
    source: RankAddress,
    target: RankAddress,
    forced: TransportChoice,
    failed: Collection[str] = (),
) -> tuple[str, ...]:
    """Return the transports by which `target` may read `source`, the first choice first.

    `failed` are the transports that did not connect this pair. Raises `TransferError` if none is
    left.
    """
    names = (source.metadata.keys() & target.metadata.keys()) - {*failed}
    common = [kind for kind in TRANSPORTS if kind.name in names]
    usable = tuple(
        kind.name
        for kind in common
        if kind.can_read(source.metadata[kind.name], target.metadata[kind.name])
    )
    if forced == "auto" and usable:
        return usable
    if forced in usable:
        return (forced,)
    reason = (
        f"prefill offers {_names(source)}, decode can use {_names(target)}, and no transport "
        "serves both where they run"
    )
    reason = next((kind.unreachable for kind in common if kind.name == forced), reason)
    prefix = "" if forced == "auto" else f"transfer.transport is {forced}, but "
    raise TransferError(prefix + reason, code="no_transport")


def _may_go_far(pool: Pool, config: TransferConfig, near: list[PeerTransport]) -> bool:
    """Return whether a transport that goes far may be needed, or be the fastest.

    It takes time to load, registers the whole pool and makes progress for ever. Without a network
    device, it reaches no CPU that shared memory does not reach faster. Between GPUs of one host it
    may be faster than `cuda_ipc`, as between two processes on one H200, so trials decide.
    """
    has_others = isinstance(pool, DevicePool) and num_gpus() > 1
    return bool(config.device) or not near or has_others


def _names(rank: RankAddress) -> str:
    return ", ".join(sorted(rank.metadata)) or "nothing"
