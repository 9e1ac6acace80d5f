"""The processes this node moves blocks to or from: their channels and their readable ranks.

Held by the connector only. A peer is a process, so it is named by node id and epoch; both sides
introduce themselves with `PeerHello`, and whoever differs in version, model or block layout is
refused with a typed failure. Ranks are connected on need, in the background.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from baton.kv_transfer.choice import choose_transport
from baton.kv_transfer.edges import source_ranks
from baton.kv_transfer.effects import Effects, PeerName
from baton.kv_transfer.interfaces import (
    AddPeer,
    DialPeer,
    DropPeer,
    RemovePeer,
)
from baton.protocol.config import TransferConfig
from baton.protocol.errors import Failure, TransferError
from baton.protocol.ids import Epoch, NodeId
from baton.protocol.messages import PROTOCOL_VERSION, NodeInfo, PeerHello

HELLO_S = 10.0  # from dialling to the peer's PeerHello
CONNECT_S = 60.0  # from AddPeer to PeerUp; a cold RDMA pair may take most of it
MAX_UNLISTED = 256


class Channel(Enum):
    NONE = auto()
    DIALLED = auto()  # our PeerHello is sent, theirs has not come
    UP = auto()
    REFUSED = auto()


class RankLink(Enum):
    ABSENT = auto()
    ADDING = auto()
    UP = auto()


@dataclass(slots=True, eq=False)
class Peer:
    name: PeerName
    info: NodeInfo | None = None
    is_listed: bool | None = None  # None: no router has named it yet
    channel: Channel = Channel.NONE
    is_dialled: bool = False  # by us
    refusal: Failure | None = None
    dialled_s: float = 0.0
    heard_s: float = 0.0
    ranks: list[RankLink] = field(default_factory=list)
    adding_s: list[float] = field(default_factory=list)

    @property
    def epoch(self) -> Epoch:
        return self.name[1]

    @property
    def is_gone(self) -> bool:
        """No router lists it, and there is something to close."""
        if self.is_listed is None:
            return self.channel is Channel.NONE
        has_ranks = any(link is not RankLink.ABSENT for link in self.ranks)
        return not self.is_listed and (self.channel is not Channel.NONE or has_ranks)

    @property
    def deadline_s(self) -> float | None:
        limits = [
            at + CONNECT_S
            for link, at in zip(self.ranks, self.adding_s, strict=True)
            if link is RankLink.ADDING
        ]
        if self.channel is Channel.DIALLED:
            limits.append(self.dialled_s + HELLO_S)
        return min(limits, default=None)


class Peers:
    """`reachable` names the peers to whom messages can be sent now."""

    def __init__(self, node: NodeInfo, transfer: TransferConfig) -> None:
        self._node = node
        self._transfer = transfer
        self._peers: dict[PeerName, Peer] = {}
        self._current: dict[NodeId, PeerName] = {}  # the process last listed under that id
        self.reachable: set[PeerName] = set()

    def all(self) -> list[Peer]:
        return list(self._peers.values())

    def get(self, name: PeerName) -> Peer:
        """That process, remembered from now on."""
        if name not in self._peers:
            num_ranks = len(self._node.ranks)
            self._peers[name] = Peer(
                name, ranks=[RankLink.ABSENT] * num_ranks, adding_s=[0.0] * num_ranks
            )
        return self._peers[name]

    def of_epoch(self, epoch: Epoch) -> Peer | None:
        return next((peer for peer in self._peers.values() if peer.epoch == epoch), None)

    def current(self, node: NodeId) -> Peer | None:
        """The process that the router last listed as that node."""
        return self._peers.get(self._current[node]) if node in self._current else None

    def changed(self, nodes: tuple[NodeInfo, ...]) -> None:
        """Routers may disagree for a while, so a node that is not listed is not yet forgotten."""
        for peer in self._peers.values():
            peer.is_listed = None if peer.is_listed is None else False
        for info in nodes:
            peer = self.get((info.node_id, info.epoch))
            peer.info, peer.is_listed = info, True
            self._current[info.node_id] = peer.name

    def forget_unlisted(self, used: Callable[[], set[PeerName]], out: Effects) -> None:
        """Close and unmap what is neither listed nor used; keep a few addresses for later."""
        unlisted = [p for p in self._peers.values() if p.is_gone]
        if not unlisted:
            return
        in_use = used()
        unlisted = [p for p in unlisted if p.name not in in_use]
        for peer in unlisted:
            self.disconnect(peer, out)
            for rank in range(len(peer.ranks)):
                self.remove_rank(peer, rank, out)
        superseded = [p for p in unlisted if self._current.get(p.name[0]) != p.name]
        kept = [p for p in self._peers.values() if p.is_listed is False and p not in superseded]
        for peer in superseded + [p for p in kept[:-MAX_UNLISTED] if p.name not in in_use]:
            del self._peers[peer.name]
            if self._current.get(peer.name[0]) == peer.name:
                del self._current[peer.name[0]]

    # --- channels ------------------------------------------------------------------------------

    def refusal_of(self, peer: Peer) -> Failure | None:
        """Why blocks cannot be exchanged with it, as far as is known."""
        if peer.refusal is not None or peer.info is None:
            return peer.refusal
        theirs = (peer.info.model, peer.info.layout.fingerprint)
        return self._difference(peer.name[0], PROTOCOL_VERSION, *theirs) or self._degrees(peer)

    def dial(self, now_s: float, peer: Peer, out: Effects) -> None:
        """Have a channel to it; what is sent now waits in it until it is open."""
        if peer.channel is Channel.NONE and peer.info is not None:
            peer.channel, peer.is_dialled = Channel.DIALLED, True
            peer.dialled_s = peer.heard_s = now_s
            self.reachable.add(peer.name)
            out.commands.append(DialPeer(peer.info))
            out.tell(peer.name, self._hello())

    def greeted(self, now_s: float, peer: Peer, hello: PeerHello, out: Effects) -> Failure | None:
        """It introduced itself: answered by the dialled side only, or two nodes would greet each
        other for ever. Returns why it is refused, if it is."""
        if not peer.is_dialled:
            self.reachable.add(peer.name)
            out.tell(peer.name, self._hello())
        peer.refusal = self._difference(
            peer.name[0], hello.version, hello.model, hello.layout_fingerprint
        )
        peer.channel = Channel.UP if peer.refusal is None else Channel.REFUSED
        peer.heard_s = now_s
        return peer.refusal

    def disconnect(self, peer: Peer, out: Effects) -> None:
        if peer.channel is not Channel.NONE:
            self.lost(peer)
            out.commands.append(DropPeer(*peer.name))

    def lost(self, peer: Peer) -> None:
        peer.channel, peer.is_dialled = Channel.NONE, False
        self.reachable.discard(peer.name)

    # --- ranks ---------------------------------------------------------------------------------

    def make_readable(self, now_s: float, peer: Peer, out: Effects) -> None:
        """Begin to connect every rank that is not. Raises `TransferError` if it never can be."""
        if peer.info is None:
            return
        sources = source_ranks(len(peer.info.ranks), len(self._node.ranks))
        for rank, source in enumerate(sources):
            if peer.ranks[rank] is RankLink.ABSENT:
                address = peer.info.ranks[source]
                transport = choose_transport(
                    address, self._node.ranks[rank], self._transfer.transport
                )
                peer.ranks[rank], peer.adding_s[rank] = RankLink.ADDING, now_s
                out.order(
                    rank,
                    AddPeer(
                        peer.epoch,
                        transport,
                        address,
                        peer.info.num_blocks,
                        peer.info.layout.block_bytes,
                    ),
                )

    def rank_up(self, peer: Peer, rank: int, out: Effects) -> None:
        if peer.ranks[rank] is RankLink.ABSENT:  # it was given up in the meantime
            out.order(rank, RemovePeer(peer.epoch))
        else:
            peer.ranks[rank] = RankLink.UP

    def remove_rank(self, peer: Peer, rank: int, out: Effects) -> None:
        """The next landing that needs it connects afresh."""
        if peer.ranks[rank] is not RankLink.ABSENT:
            peer.ranks[rank] = RankLink.ABSENT
            out.order(rank, RemovePeer(peer.epoch))

    def late_ranks(self, now_s: float, peer: Peer) -> list[int]:
        """Ranks that should have been connected by now."""
        return [
            rank
            for rank, link in enumerate(peer.ranks)
            if link is RankLink.ADDING and peer.adding_s[rank] + CONNECT_S <= now_s
        ]

    # --- inside --------------------------------------------------------------------------------

    def _hello(self) -> PeerHello:
        node = self._node
        fingerprint = node.layout.fingerprint
        return PeerHello(PROTOCOL_VERSION, node.node_id, node.epoch, node.model, fingerprint)

    def _difference(
        self, node: NodeId, version: int, model: str, fingerprint: str
    ) -> Failure | None:
        own = self._node
        for what, ours, theirs in (
            ("protocol version", str(PROTOCOL_VERSION), str(version)),
            ("model", own.model, model),
            ("KV layout", own.layout.fingerprint, fingerprint),
        ):
            if ours != theirs:
                text = f"{what} of {node} is {theirs}, of {own.node_id} {ours}"
                return TransferError(text, code="peer_mismatch").to_failure()
        return None

    def _degrees(self, peer: Peer) -> Failure | None:
        assert peer.info is not None
        degrees = (len(peer.info.ranks), len(self._node.ranks))
        prefill, decode = degrees if self._node.role == "decode" else degrees[::-1]
        try:
            source_ranks(prefill, decode)
        except TransferError as error:
            return error.to_failure()
        return None
