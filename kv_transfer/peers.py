"""The processes this node moves blocks to or from: their channels and their readable ranks.

A peer is a process, so its name is a node id and an epoch. Both sides introduce themselves with
`PeerHello`; a peer with another version, model or block layout, or whose degree does not fit, is
refused with a typed failure. `edges_between` decides which rank reads which rank of a peer. Ranks
are connected in the background when they are needed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from baton.kv_transfer.interfaces import (
    AddPeer,
    BlockSlice,
    DialPeer,
    DropPeer,
    Effects,
    PeerName,
    PeerRank,
    RemovePeer,
)
from baton.kv_transfer.transports import usable_transports
from baton.protocol.config import TransferConfig
from baton.protocol.errors import Failure, TransferError
from baton.protocol.ids import Epoch, NodeId
from baton.protocol.messages import PROTOCOL_VERSION, NodeInfo, PeerHello
from baton.protocol.pairing import tp_size_problem, transport_problem

# From losing a channel to dialling that peer again, also without a request.
REDIAL_S = 5.0
HELLO_S = 4.0  # from dialling to the peer's PeerHello
MAX_UNLISTED = 256


class Channel(Enum):
    NONE = auto()
    DIALLED = auto()  # our PeerHello is sent, and theirs has not arrived
    UP = auto()
    REFUSED = auto()


class LinkState(Enum):
    ABSENT = auto()
    ADDING = auto()
    UP = auto()


@dataclass(slots=True, eq=False)
class RankLink:
    """One of our ranks, and the peer's rank that it reads."""

    edge: "ShardMapping"
    state: LinkState = LinkState.ABSENT
    transport: str = ""  # the one that was chosen last


@dataclass(slots=True, eq=False)
class Peer:
    name: PeerName
    info: NodeInfo | None = None
    is_listed: bool | None = None  # None if no router has named the node yet
    channel: Channel = Channel.NONE
    is_broken: bool = False  # its channel broke, and it has not answered on a new one
    refusal: Failure | None = None
    dialled_s: float = 0.0
    heard_s: float = 0.0
    lost_s: float = 0.0
    # Empty until the peer's ranks are to be read.
    links: list[RankLink] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)  # transports that did not connect

    @property
    def epoch(self) -> Epoch:
        return self.name[1]

    @property
    def is_gone(self) -> bool:
        """Return whether no router lists the peer and something of it is still open."""
        if self.is_listed is None:
            return self.channel is Channel.NONE
        has_links = any(link.state is not LinkState.ABSENT for link in self.links)
        return not self.is_listed and (self.channel is not Channel.NONE or has_links)

    def link(self, target: int, source: int) -> RankLink | None:
        """Return the link by which our rank `target` reads the peer's rank `source`."""
        ends = (target, source)
        return next(
            (one for one in self.links if (one.edge.target, one.edge.source) == ends),
            None,
        )


class PeerTable:
    """Every peer that was listed or has sent a message."""

    def __init__(self, node: NodeInfo, transfer: TransferConfig) -> None:
        self._node = node
        self._transfer = transfer
        self._peers: dict[PeerName, Peer] = {}
        # The process last listed under that id.
        self._current: dict[NodeId, PeerName] = {}

    def all(self) -> list[Peer]:
        return list(self._peers.values())

    def get(self, name: PeerName) -> Peer:
        """Return that process, and add it to the table if it is new."""
        if name not in self._peers:
            self._peers[name] = Peer(name)
        return self._peers[name]

    def has_channel(self, name: PeerName) -> bool:
        return name in self._peers and self._peers[name].channel is not Channel.NONE

    def of_epoch(self, epoch: Epoch) -> Peer | None:
        return next(
            (peer for peer in self._peers.values() if peer.epoch == epoch), None
        )

    def current(self, node: NodeId) -> Peer | None:
        """Return the process that a router last listed as that node."""
        return self._peers.get(self._current[node]) if node in self._current else None

    def changed(self, nodes: tuple[NodeInfo, ...]) -> None:
        """Take in a router's list. Routers may disagree, so a missing node is not forgotten yet."""
        for peer in self._peers.values():
            peer.is_listed = None if peer.is_listed is None else False
        for info in nodes:
            peer = self.get((info.node_id, info.epoch))
            peer.info = info
            peer.is_listed = True
            self._current[info.node_id] = peer.name

    def forget_unlisted(self, used: Callable[[], set[PeerName]], out: Effects) -> None:
        """Close and unmap peers that are neither listed nor used, but keep some addresses."""
        unlisted = [p for p in self._peers.values() if p.is_gone]
        if not unlisted:
            return
        in_use = used()
        unlisted = [p for p in unlisted if p.name not in in_use]
        for peer in unlisted:
            self.disconnect(peer, out)
            for link in peer.links:
                self.remove_link(peer, link, out)
        superseded = [p for p in unlisted if self._current.get(p.name[0]) != p.name]
        kept = [
            p
            for p in self._peers.values()
            if p.is_listed is False and p not in superseded
        ]
        for peer in superseded + [
            p for p in kept[:-MAX_UNLISTED] if p.name not in in_use
        ]:
            del self._peers[peer.name]
            if self._current.get(peer.name[0]) == peer.name:
                del self._current[peer.name[0]]

    def reach(self, node: NodeId, out: Effects) -> Peer | Failure:
        """Return the process of a node, with a channel that is open or opens now, or why not."""
        peer = self.current(node)
        if peer is None or peer.info is None or not self._has_way(peer, peer.info):
            text = f"no router has published how to reach node {node}"
            return TransferError(text, code="node_lost").to_failure()
        if (refusal := self.refusal_of(peer)) is not None:
            return refusal
        self.dial(peer, out)
        return peer

    def refusal_of(self, peer: Peer) -> Failure | None:
        """Return why blocks cannot be exchanged with that peer; None while no reason is known."""
        if peer.refusal is not None or peer.info is None:
            return peer.refusal
        theirs = (peer.info.model, peer.info.layout.fingerprint)
        return self._difference(
            peer.name[0], PROTOCOL_VERSION, *theirs
        ) or self._problem(peer.info)

    def dial(self, peer: Peer, out: Effects) -> None:
        """Open a channel to that peer. Messages wait until the channel is open."""
        if peer.channel is Channel.NONE and peer.info is not None:
            peer.channel = Channel.DIALLED
            peer.dialled_s = peer.heard_s = out.now_s
            out.commands.append(DialPeer(peer.info))
            out.send(peer.name, self._hello())

    def greeted(self, peer: Peer, hello: PeerHello, out: Effects) -> Failure | None:
        """Handle a peer's PeerHello, and return why the peer is refused, if it is.

        Only decode nodes answer, which prefill nodes dial; otherwise two nodes would greet each
        other for ever.
        """
        peer.refusal = self._difference(
            peer.name[0], hello.version, hello.model, hello.layout_fingerprint
        )
        peer.channel = Channel.UP if peer.refusal is None else Channel.REFUSED
        if self._node.role == "decode":
            out.send(peer.name, self._hello())
        peer.heard_s = out.now_s
        peer.is_broken = False
        return peer.refusal

    def disconnect(self, peer: Peer, out: Effects) -> None:
        if peer.channel is not Channel.NONE:
            self.lost(peer, out)
            out.commands.append(DropPeer(*peer.name))

    def lost(self, peer: Peer, out: Effects) -> None:
        peer.channel = Channel.NONE
        peer.lost_s = out.now_s

    def num_slices(self, name: PeerName) -> int:
        """Return into how many slices that decode node's reads cut one of our blocks."""
        info = self._peers[name].info
        assert info is not None, "a handoff was offered to it"
        return edges_between(self._node, info)[0].num_slices

    def make_readable(self, peer: Peer, out: Effects) -> None:
        """Begin to connect every link that is not up or connecting.

        The peer must not have been refused. Raises `TransferError` if no transport serves both
        sides.
        """
        info = peer.info
        if info is None:
            return
        if not peer.links:
            peer.links = [RankLink(edge) for edge in edges_between(info, self._node)]
        for link in peer.links:
            if link.state is LinkState.ABSENT:
                self._add(peer, info, link, out)

    def fall_back(self, peer: Peer, link: RankLink, out: Effects) -> bool:
        """Retry a failed link with another transport. Return False if there is none."""
        if link.state is not LinkState.ADDING or peer.info is None:
            return False
        peer.failed.add(link.transport)
        self.remove_link(peer, link, out)
        try:
            self._add(peer, peer.info, link, out)
        except TransferError:
            # None has worked, so the next receive starts with the first one again.
            peer.failed.clear()
            return False
        return True

    def link_up(self, peer: Peer, link: RankLink, out: Effects) -> None:
        if link.state is LinkState.ABSENT:  # the link was given up in the meantime
            out.command(link.edge.target, RemovePeer(_owner(peer, link)))
        else:
            link.state = LinkState.UP

    def remove_link(self, peer: Peer, link: RankLink, out: Effects) -> None:
        """Disconnect a link; the next receive that needs it connects it again."""
        if link.state is not LinkState.ABSENT:
            link.state = LinkState.ABSENT
            out.command(link.edge.target, RemovePeer(_owner(peer, link)))

    def _add(self, peer: Peer, info: NodeInfo, link: RankLink, out: Effects) -> None:
        edge = link.edge
        address = info.ranks[edge.source]
        ours = self._node.ranks[edge.target]
        first, *others = usable_transports(
            address, ours, self._transfer.transport, peer.failed
        )
        link.state = LinkState.ADDING
        link.transport = first
        add = AddPeer(
            _owner(peer, link),
            first,
            address,
            info.num_blocks,
            info.layout.block_bytes,
            edge.part,
            tuple(others),
        )
        out.command(edge.target, add)

    def _has_way(self, peer: Peer, info: NodeInfo) -> bool:
        return peer.channel is not Channel.NONE or bool(info.control_endpoint)

    def _hello(self) -> PeerHello:
        node = self._node
        fingerprint = node.layout.fingerprint
        return PeerHello(
            PROTOCOL_VERSION, node.node_id, node.epoch, node.model, fingerprint
        )

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
        """Return why this node and that peer can never exchange blocks."""
        own = self._node
        pair = (info, self._node)
        prefill, decode = pair if own.role == "decode" else pair[::-1]
        if (problem := tp_size_problem(prefill, decode)) is not None:
            return TransferError(problem, code="peer_mismatch").to_failure()
        if (problem := transport_problem(prefill, decode)) is not None:
            return TransferError(problem, code="no_transport").to_failure()
        return None


def _owner(peer: Peer, link: RankLink) -> PeerRank:
    return PeerRank(peer.epoch, link.edge.source)


class ShardMapping(msgspec.Struct, frozen=True):
    """Rank `target` of decode reads `part` of every block of rank `source` of prefill."""

    source: int
    target: int
    part: BlockSlice
    num_slices: int  # in a block of `source`

    @property
    def sums_row(self) -> int:
        """Return the row in which a block range lists the checksums of this slice.

        Rows are ordered by rank of prefill, then by heads.
        """
        return (
            self.source * self.num_slices
            + self.part.remote_offset // self.part.num_bytes
        )


def edges_between(prefill: NodeInfo, decode: NodeInfo) -> list[ShardMapping]:
    """Return every read that one block needs, ordered by rank of decode and then by heads.

    `pairs.tp_size_problem` must have found no problem with the two nodes. Equal `tp_size`s read
    rank by rank. If several ranks hold the same head, each serves its share of that head's readers.
    """
    num_sources = len(prefill.ranks)
    num_targets = len(decode.ranks)
    if num_sources == num_targets:
        whole = BlockSlice(0, 0, decode.layout.block_bytes)
        return [ShardMapping(rank, rank, whole, 1) for rank in range(num_targets)]
    kv_heads = prefill.layout.kv_heads
    # The number of ranks that hold different heads. If there are more ranks, neighbours hold the
    # same heads.
    sources = min(num_sources, kv_heads)
    targets = min(num_targets, kv_heads)
    source_copies = num_sources // sources
    target_copies = num_targets // targets
    num_reads = max(1, sources // targets)
    num_slices = max(1, targets // sources)
    num_bytes = decode.layout.block_bytes // num_reads
    edges = []
    for target in range(num_targets):
        group, copy = divmod(target, target_copies)
        for number in range(num_reads):
            source = (group * sources // targets + number) * source_copies
            source += copy * source_copies // target_copies
            remote_offset = group % num_slices * num_bytes
            part = BlockSlice(remote_offset, number * num_bytes, num_bytes)
            edges.append(ShardMapping(source, target, part, num_slices))
    return edges
