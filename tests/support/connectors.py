"""Nodes and messages for tests of one connector, which stands between a scheduler and its peers."""

import msgspec

from baton.kv_transfer.connector import NodeConnector
from baton.kv_transfer.interfaces import (
    ConnectorEvent,
    Effects,
    FromPeer,
    Offer,
    PeersChanged,
    ToPeer,
)
from baton.kv_transfer.transports.addresses import ShmAddress
from baton.protocol.config import TransferConfig
from baton.protocol.errors import Failure
from baton.protocol.ids import Epoch, Key, NodeId, RequestId
from baton.protocol.messages import (
    PROTOCOL_VERSION,
    KVLayout,
    NodeInfo,
    Offered,
    PeerHello,
    PeerMessage,
    RankAddress,
    Role,
)

BLOCK_SIZE = 4
BLOCK_BYTES = 64
HEAD_BYTES = 16  # of one KV head in a block of a node whose number of heads is known
FAILURE = Failure("test", "the test wants it so")
P = NodeId("p")
D = NodeId("d")


def key(name: str = "r", attempt: int = 0) -> Key:
    return Key(RequestId(name), 0, attempt)


def rank_address(epoch: str, host: str = "host") -> RankAddress:
    return RankAddress(
        {"shm": ShmAddress(host, f"@{epoch}", b"n" * 16, Epoch(epoch)).encode()}
    )


def heads_of(kv_heads: int, num_ranks: int, rank: int) -> list[int]:
    """Return the KV heads of one rank; with fewer heads than ranks, neighbours hold the same."""
    if kv_heads < num_ranks:
        return [rank * kv_heads // num_ranks]
    held = kv_heads // num_ranks
    return list(range(rank * held, (rank + 1) * held))


def node(
    name: str, role: Role, *, num_ranks: int = 1, kv_heads: int = 0, **fields: object
) -> NodeInfo:
    """Return what a node publishes; `fields` replace parts of it. Without `kv_heads` it is one of
    an older version, each of whose ranks has blocks of `BLOCK_BYTES`."""
    epoch = f"{name}-1"
    held = len(heads_of(kv_heads, max(1, num_ranks), 0))
    block_bytes = held * HEAD_BYTES if kv_heads else BLOCK_BYTES
    info = NodeInfo(
        NodeId(name),
        Epoch(epoch),
        role,
        f"ipc://{name}" if role == "decode" else "",
        64,
        KVLayout(BLOCK_SIZE, block_bytes, "layout", kv_heads),
        (rank_address(epoch),) * num_ranks,
        "model",
        4096,
        100,
    )
    return msgspec.structs.replace(info, **fields)


PREFILL = node("p", "prefill")
DECODE = node("d", "decode")


def hello(info: NodeInfo, **fields: object) -> PeerHello:
    greeting = PeerHello(
        PROTOCOL_VERSION, info.node_id, info.epoch, info.model, info.layout.fingerprint
    )
    return msgspec.structs.replace(greeting, **fields)


def heard(info: NodeInfo, *messages: PeerMessage) -> list[ConnectorEvent]:
    return [FromPeer(info.node_id, info.epoch, message) for message in messages]


def told(info: NodeInfo, message: PeerMessage) -> ToPeer:
    return ToPeer(info.node_id, info.epoch, message)


def said(step: Effects) -> list[PeerMessage]:
    return [command.message for command in step.commands if isinstance(command, ToPeer)]


def offer(name: str = "r", attempt: int = 0) -> Offer:
    return Offer(key(name, attempt), D, 8, 2)


def offered(name: str = "r", num_blocks: int = 2, lease_s: float = 30.0) -> Offered:
    return Offered(key(name), 8, num_blocks, lease_s)


def prefill(*events: ConnectorEvent, decode: NodeInfo = DECODE) -> NodeConnector:
    """Return the connector of `p`, which knows `decode`, after a first step with `events`."""
    connector = NodeConnector(PREFILL, TransferConfig())
    connector.step(0.0, [PeersChanged((decode,)), *events])
    return connector


def decode(*events: ConnectorEvent, prefill: NodeInfo = PREFILL) -> NodeConnector:
    """Return the connector of `d`, which knows `prefill`, after a first step with `events`."""
    connector = NodeConnector(DECODE, TransferConfig())
    connector.step(0.0, [PeersChanged((prefill,)), *events])
    return connector
