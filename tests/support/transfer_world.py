"""Two connectors (or more) in one test: a network, ranks with checkable bytes, and a virtual clock.

Messages pass through the real codecs. Every link is FIFO per direction and may be slow, cut, or cut
on one side only; reads take time and fail on demand. The world plays both schedulers and checks the
contract while it runs: who may reuse which block, and what has landed.
"""

import msgspec

from baton.kv_transfer.transports.shm_address import ShmAddress
from baton.protocol.ids import Epoch, Key, NodeId, RequestId
from baton.protocol.kv_layout import KVLayout, Run
from baton.protocol.messages import NodeInfo, RankAddress, Role

BLOCK_SIZE = 4


def key(name: str = "r", attempt: int = 0) -> Key:
    return Key(RequestId(name), 0, attempt)


def layout(fingerprint: str = "layout") -> KVLayout:
    return KVLayout(BLOCK_SIZE, 64, {"kv": (Run(0, 64),)}, 0, 2, 16, fingerprint)


def rank_address(epoch: str, host: str = "host") -> RankAddress:
    return RankAddress({"shm": ShmAddress(host, f"@{epoch}", b"n" * 16, Epoch(epoch)).encode()})


def node(name: str, role: Role, *, num_ranks: int = 1, **fields: object) -> NodeInfo:
    """A node's publication; `fields` replace what it says."""
    epoch = f"{name}-1"
    info = NodeInfo(
        NodeId(name), Epoch(epoch), role, f"ipc://{name}" if role == "decode" else "",
        64, layout(), (rank_address(epoch),) * num_ranks, "model", 4096, 100,
    )  # fmt: skip
    return msgspec.structs.replace(info, **fields)
