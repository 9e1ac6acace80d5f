"""The processes this node moves blocks to or from: their channels and their readable ranks.

Held by the connector only. A peer is a process, so it is named by node id and epoch. Both sides
introduce themselves with `PeerHello`; a peer that differs in version, model, block layout or number
of ranks is refused with a typed failure. Rank i reads rank i of a peer; ranks are connected on
need, in the background.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from baton.kv_transfer.effects import Effects
from baton.kv_transfer.interfaces import AddPeer, DialPeer, DropPeer, PeerName, RemovePeer
from baton.kv_transfer.transports.choice import choose_transport
from baton.protocol.config import TransferConfig
from baton.protocol.errors import Failure, TransferError
from baton.protocol.ids import Epoch, NodeId
from baton.protocol.messages import PROTOCOL_VERSION, NodeInfo, PeerHello
from baton.protocol.pairs import degree_problem, transport_problem

HELLO_S = 10.0  # from dialling to the peer's PeerHello
CONNECT_S = 90.0  # from AddPeer to PeerUp or PeerDown; longer than any transport takes
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
    transports: list[str] = field(default_factory=list)  # of each rank, the last that was chosen
    failed: set[str] = field(default_factory=set)  # transports that did not connect

    @property
    def epoch(self) -> Epoch:
        return self.name[1]

    @property
    def is_gone(self) -> bool:
        """True if no router lists it and there is something to close."""
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


class PeerTable:
    """Every peer that was listed or has spoken. `reachable` names those with a channel."""

    def __init__(self, node: NodeInfo, transfer: TransferConfig) -> None:
        self._node = node
        self._transfer = transfer
        self._peers: dict[PeerName, Peer] = {}
        self._current: dict[NodeId, PeerName] = {}  # the process last listed under that id
        self.reachable: set[PeerName] = set()

    def all(self) -> list[Peer]:
        return list(self._peers.values())

    def get(self, name: PeerName) -> Peer:
        """Return that process, and remember it from now on."""
        if name not in self._peers:
            num_ranks = len(self._node.ranks)
            self._peers[name] = Peer(
                name,
                ranks=[RankLink.ABSENT] * num_ranks,
                adding_s=[0.0] * num_ranks,
                transports=[""] * num_ranks,
            )
        return self._peers[name]

    def of_epoch(self, epoch: Epoch) -> Peer | None:
        return next((peer for peer in self._peers.values() if peer.epoch == epoch), None)

    def current(self, node: NodeId) -> Peer | None:
        """Return the process that a router last listed as that node."""
        return self._peers.get(self._current[node]) if node in self._current else None

    def changed(self, nodes: tuple[NodeInfo, ...]) -> None:
        """Take a router's list. Routers may disagree, so a node that is missing is not yet
        forgotten."""
        for peer in self._peers.values():
            peer.is_listed = None if peer.is_listed is None else False
        for info in nodes:
            peer = self.get((info.node_id, info.epoch))
            peer.info, peer.is_listed = info, True
            self._current[info.node_id] = peer.name

    def forget_unlisted(self, used: Callable[[], set[PeerName]], out: Effects) -> None:
        """Close and unmap peers that are neither listed nor used; keep some addresses for later."""
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
        """Return why blocks cannot be exchanged with it, as far as is known."""
        if peer.refusal is not None or peer.info is None:
            return peer.refusal
        theirs = (peer.info.model, peer.info.layout.fingerprint)
        return self._difference(peer.name[0], PROTOCOL_VERSION, *theirs) or self._problem(peer.info)

    def dial(self, now_s: float, peer: Peer, out: Effects) -> None:
        """Open a channel to it; messages that are sent now wait until the channel is open."""
        if peer.channel is Channel.NONE and peer.info is not None:
            peer.channel, peer.is_dialled = Channel.DIALLED, True
            peer.dialled_s = peer.heard_s = now_s
            self.reachable.add(peer.name)
            out.commands.append(DialPeer(peer.info))
            out.tell(peer.name, self._hello())

    def greeted(self, now_s: float, peer: Peer, hello: PeerHello, out: Effects) -> Failure | None:
        """Take a peer's greeting and return why the peer is refused, if it is.

        Only the dialled side answers, or two nodes would greet each other for ever.
        """
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
        """Begin to connect every rank that is not connected or connecting.

        Raises `TransferError` if one never can be: no transport serves both sides.
        """
        info = peer.info
        if info is None:
            return
        for rank in range(len(info.ranks)):
            if peer.ranks[rank] is RankLink.ABSENT:
                self._add_rank(now_s, peer, info, rank, out)

    def fall_back(self, now_s: float, peer: Peer, rank: int, out: Effects) -> bool:
        """Connect a rank by another transport if it did not connect by the first; else False."""
        if peer.ranks[rank] is not RankLink.ADDING or peer.info is None:
            return False
        peer.failed.add(peer.transports[rank])
        self.remove_rank(peer, rank, out)
        try:
            self._add_rank(now_s, peer, peer.info, rank, out)
        except TransferError:
            peer.failed.clear()  # none has worked, so the next landing begins with the first again
            return False
        return True

    def rank_up(self, peer: Peer, rank: int, out: Effects) -> None:
        if peer.ranks[rank] is RankLink.ABSENT:  # it was given up in the meantime
            out.order(rank, RemovePeer(peer.epoch))
        else:
            peer.ranks[rank] = RankLink.UP

    def remove_rank(self, peer: Peer, rank: int, out: Effects) -> None:
        """Disconnect it; the next landing that needs it connects it afresh."""
        if peer.ranks[rank] is not RankLink.ABSENT:
            peer.ranks[rank] = RankLink.ABSENT
            out.order(rank, RemovePeer(peer.epoch))

    def late_ranks(self, now_s: float, peer: Peer) -> list[int]:
        """Return the ranks that should have been connected by now."""
        return [
            rank
            for rank, link in enumerate(peer.ranks)
            if link is RankLink.ADDING and peer.adding_s[rank] + CONNECT_S <= now_s
        ]

    # --- inside --------------------------------------------------------------------------------

    def _add_rank(self, now_s: float, peer: Peer, info: NodeInfo, rank: int, out: Effects) -> None:
        address, ours = info.ranks[rank], self._node.ranks[rank]
        transport = choose_transport(address, ours, self._transfer.transport, peer.failed)
        peer.ranks[rank], peer.adding_s[rank] = RankLink.ADDING, now_s
        peer.transports[rank] = transport
        add = AddPeer(peer.epoch, transport, address, info.num_blocks, info.layout.block_bytes)
        out.order(rank, add)

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

    def _problem(self, info: NodeInfo) -> Failure | None:
        """Refuse a peer whose blocks, or whose reads, can never arrive."""
        own, pair = self._node, (info, self._node)
        prefill, decode = pair if own.role == "decode" else pair[::-1]
        if (problem := degree_problem(prefill, decode)) is not None:
            return TransferError(problem, code="peer_mismatch").to_failure()
        if (problem := transport_problem(prefill, decode)) is not None:
            return TransferError(problem, code="no_transport").to_failure()
        return None
