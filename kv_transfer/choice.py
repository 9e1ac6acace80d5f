"""How one rank reads another: a plain rule over what both have published.

Called by the connector for every pair of ranks that meets, and by start-up reports. Same host and
`shm` on both sides: shm; otherwise nixl. A setting forces one. Nothing is tried out here.
"""

from baton.kv_transfer.transports.shm_address import decode_address
from baton.protocol.config import TransportChoice
from baton.protocol.errors import TransferError
from baton.protocol.messages import RankAddress

SHM = "shm"
NIXL = "nixl"


def choose_transport(source: RankAddress, target: RankAddress, forced: TransportChoice) -> str:
    """The transport by which `target` reads `source`. Raises `TransferError` if there is none."""
    common = source.metadata.keys() & target.metadata.keys()
    if forced != "auto":
        if forced not in common:
            raise _nothing_in_common(source, target, f"transfer.transport is {forced}, but ")
        if forced == SHM and not on_one_host(source, target):
            raise TransferError(
                "transfer.transport is shm, but the two ranks are on different hosts",
                code="no_transport",
            )
        return forced
    if SHM in common and on_one_host(source, target):
        return SHM
    if NIXL in common:
        return NIXL
    raise _nothing_in_common(source, target, "")


def on_one_host(source: RankAddress, target: RankAddress) -> bool:
    """As both say; the proof is the nonce that the reader finds through its mapping."""
    hosts = [decode_address(rank.metadata[SHM]).host for rank in (source, target)]
    return hosts[0] == hosts[1]


def _nothing_in_common(source: RankAddress, target: RankAddress, prefix: str) -> TransferError:
    return TransferError(
        f"{prefix}prefill offers {_names(source)}, decode can use {_names(target)}, and no "
        "transport serves both where they run",
        code="no_transport",
    )


def _names(rank: RankAddress) -> str:
    return ", ".join(sorted(rank.metadata)) or "nothing"
