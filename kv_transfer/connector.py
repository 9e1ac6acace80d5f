"""The connector of one node, which routes events to its offers, its receives and its peers.

One object serves both roles. It has no clock and does no I/O, and keys break ties. Exactly one
Released follows each Offer, and exactly one KVReceived or ReceiveEnded follows each Expect, each
FetchPrefix and each LoadPrefix. Every state that is not final has a deadline. `docs/transfer.md`
shows the machines behind it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from baton.kv_transfer.interfaces import (
    Abandon,
    AgentEvent,
    BeginReceive,
    BlocksCopied,
    BlocksSaved,
    BlocksSummed,
    ClearTier,
    ConnectorEvent,
    DialPeers,
    Effects,
    Expect,
    FetchPrefix,
    FromPeer,
    FromRank,
    LoadPrefix,
    Offer,
    PeerDown,
    PeerLost,
    PeerName,
    PeersChanged,
    PeerUp,
    ReadDrained,
    ReadEnded,
    RefusePrefix,
    SaveBlocks,
    SlotsHeld,
    TierOpened,
)
from baton.kv_transfer.offers import AnnouncedSums, Offers
from baton.kv_transfer.peers import (
    HELLO_S,
    REDIAL_S,
    Channel,
    Peer,
    PeerTable,
    RankLink,
)
from baton.kv_transfer.receives import KVReceives
from baton.protocol.blocks import NO_HASH, unpack_hashes
from baton.protocol.config import TransferConfig
from baton.protocol.errors import Failure, TransferError
from baton.protocol.ids import NodeId
from baton.protocol.messages import (
    BlockRange,
    Declined,
    Done,
    End,
    NodeInfo,
    Offered,
    PeerHello,
    PeerMessage,
    Renew,
    Renewed,
    TierName,
    WantPrefix,
    Withdrawn,
)


class NodeConnector:
    def __init__(self, node: NodeInfo, transfer: TransferConfig) -> None:
        self._lease_s = transfer.lease_s
        self._dials = node.role == "prefill"
        self._peers = PeerTable(node, transfer)
        sums = None
        if transfer.verify_kv:
            sums = AnnouncedSums(len(node.ranks), node.layout.block_bytes)
        self._offers = Offers(self._peers, transfer.lease_s, sums)
        self._receives = KVReceives(node, self._peers)
        self._tiers = TierSaves(len(node.ranks))

    def step(self, now_s: float, events: Sequence[ConnectorEvent]) -> Effects:
        out = Effects(now_s, self._peers.has_channel)
        for event in events:
            self._on(event, out)
        out.wake_at_s = self._wake_at_s()
        if out.wake_at_s is not None and out.wake_at_s <= now_s:
            self._end_waits(out)
            self._receives.renew(out)
            out.wake_at_s = self._wake_at_s()
        self._peers.forget_unlisted(self._used_peers, out)
        return out

    @property
    def unreachable(self) -> tuple[NodeId, ...]:
        """Return the decode nodes that this prefill node cannot reach, and dials again."""
        return tuple(sorted(peer.name[0] for peer in self._cut_off()))

    def reads_tier(self, ticket: int) -> bool:
        """Return whether that read is of a tier of this node."""
        return self._receives.reads_tier(ticket)

    def _on(self, event: ConnectorEvent, out: Effects) -> None:
        match event:
            case FromPeer(node, epoch, message):
                self._on_message(self._peers.get((node, epoch)), message, out)
            case FromRank(rank, rank_event):
                self._on_rank(rank, rank_event, out)
            case BlockRange() | End() | Withdrawn():
                self._offers.advance(event, out)
            case BeginReceive() | Abandon():
                self._receives.advance(event, out)
            case LoadPrefix():
                self._receives.load(event, out)
            case SaveBlocks() | ClearTier():
                self._tiers.save(event, out)
            case Offer():
                self._offers.offer(event, out)
            case RefusePrefix():
                self._offers.refuse(event, out)
            case Expect():
                self._receives.expect(event, out)
            case FetchPrefix():
                self._receives.fetch(event, out)
            case PeersChanged(nodes):
                self._peers.changed(nodes)
                self._receives.peers_changed(out)
            case DialPeers():
                for peer in self._peers.all() if self._dials else ():
                    if peer.is_listed:
                        self._peers.dial(peer, out)
            case PeerLost(node, epoch):
                self._lose(self._peers.get((node, epoch)), out)
            case _:
                assert_never(event)

    def _on_message(self, peer: Peer, message: PeerMessage, out: Effects) -> None:
        if isinstance(message, PeerHello):
            self._greet(peer, message, out)
            return
        if peer.channel is Channel.NONE:
            return  # the peer has not introduced itself
        peer.heard_s = out.now_s
        match message:
            case Offered() | BlockRange() | End() | Withdrawn() | Renewed():
                self._receives.announced(peer, message, out)
            case WantPrefix():
                self._offers.wanted(peer, message, out)
            case Renew(keys=keys):
                for key in keys:
                    self._offers.answered(peer, key, message, out)
            case Done() | Declined():
                self._offers.answered(peer, message.key, message, out)
            case _:
                assert_never(message)

    def _greet(self, peer: Peer, hello: PeerHello, out: Effects) -> None:
        if peer.channel in (Channel.UP, Channel.REFUSED):
            # The other end has restarted its session, and has ended every handoff with this node.
            self._end_all_of(peer.name, _broken(peer.name), out)
        failure = self._peers.greeted(peer, hello, out)
        if failure is None:
            self._offers.reconnected(peer.name, out)
        else:
            self._end_all_of(peer.name, failure, out)
            self._receives.refused(peer.name, failure, out)

    def _lose(self, peer: Peer, out: Effects) -> None:
        peer.is_broken = self._dials
        self._peers.lost(peer, out)
        self._end_all_of(peer.name, _broken(peer.name), out)

    def _end_all_of(self, peer: PeerName, failure: Failure, out: Effects) -> None:
        self._offers.channel_lost(peer, failure, out)
        self._receives.channel_lost(peer, failure, out)

    def _on_rank(self, rank: int, event: AgentEvent, out: Effects) -> None:
        match event:
            case SlotsHeld():
                self._tiers.held(rank, event, out)
            case BlocksCopied():
                self._tiers.copied(event, out)
            case BlocksSaved():
                self._tiers.saved(event, out)
            case ReadEnded():
                self._receives.read_ended(event, out)
            case ReadDrained(ticket):
                self._receives.read_drained(ticket, out)
            case BlocksSummed():
                self._offers.summed(rank, event, out)
            case PeerUp() | PeerDown():
                peer = self._peers.of_epoch(event.peer.epoch)
                link = None if peer is None else peer.link(rank, event.peer.rank)
                if peer is None or link is None:
                    return  # the peer table has forgotten that process
                if isinstance(event, PeerDown):
                    self._link_down(peer, link, event.failure, out)
                else:
                    self._peers.link_up(peer, link, out)
                    self._receives.rank_up(peer.name, event, out)
            case _:
                assert_never(event)

    def _link_down(
        self, peer: Peer, link: RankLink, failure: Failure, out: Effects
    ) -> None:
        if self._peers.fall_back(peer, link, out):
            return
        self._peers.remove_link(peer, link, out)
        self._receives.rank_down(peer.name, failure, out)

    def _end_waits(self, out: Effects) -> None:
        for name in sorted(self._offers.end_leases(out)):
            # A live decode node renews its leases, so one that was silent for a whole lease is
            # gone.
            peer = self._peers.get(name)
            if (
                peer.channel is not Channel.NONE
                and peer.heard_s + self._lease_s <= out.now_s
            ):
                self._hang_up(peer, out)
        self._receives.end_waits(out)
        for peer in self._peers_to_redial():
            if peer.lost_s + REDIAL_S <= out.now_s:
                self._peers.dial(peer, out)
        for peer in self._peers.all():
            if (
                peer.channel is Channel.DIALLED
                and peer.dialled_s + HELLO_S <= out.now_s
            ):
                self._hang_up(peer, out)

    def _hang_up(self, peer: Peer, out: Effects) -> None:
        self._peers.disconnect(peer, out)
        self._lose(peer, out)

    def _wake_at_s(self) -> float | None:
        limits = [*self._offers.deadlines(), *self._receives.deadlines()]
        dialled = [
            peer for peer in self._peers.all() if peer.channel is Channel.DIALLED
        ]
        limits += [peer.dialled_s + HELLO_S for peer in dialled]
        limits += [peer.lost_s + REDIAL_S for peer in self._peers_to_redial()]
        return min(limits, default=None)

    def _peers_to_redial(self) -> list[Peer]:
        return [peer for peer in self._cut_off() if peer.channel is Channel.NONE]

    def _cut_off(self) -> list[Peer]:
        """Return the listed peers to which a channel broke, until they answer on a new one."""
        return [peer for peer in self._peers.all() if peer.is_broken and peer.is_listed]

    def _used_peers(self) -> set[PeerName]:
        return self._offers.used_peers() | self._receives.used_peers()


class TierSaves:
    """What every rank of the node has saved in its part of each tier, or found there."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._saves: dict[int, _Save] = {}
        # Hashes of slots, by rank.
        self._held: dict[TierName, dict[int, list[bytes]]] = {}

    def save(self, event: SaveBlocks | ClearTier, out: Effects) -> None:
        num_copying = self._num_ranks if isinstance(event, SaveBlocks) else 0
        self._saves[event.ticket] = _Save(num_copying, self._num_ranks)
        for rank in range(self._num_ranks):
            out.command(rank, event)

    def copied(self, event: BlocksCopied, out: Effects) -> None:
        save = self._saves[event.ticket]
        save.num_copying -= 1
        if save.num_copying == 0:
            out.reports.append(event)

    def saved(self, event: BlocksSaved, out: Effects) -> None:
        save = self._saves[event.ticket]
        save.num_saving -= 1
        save.failure = save.failure or event.failure
        if save.num_saving == 0:
            del self._saves[event.ticket]
            out.reports.append(BlocksSaved(event.ticket, save.failure))

    def held(self, rank: int, event: SlotsHeld, out: Effects) -> None:
        ranks = self._held.setdefault(event.tier, {})
        ranks.setdefault(rank, []).extend(unpack_hashes(event.hashes))
        is_whole = all(len(hashes) == event.num_slots for hashes in ranks.values())
        if is_whole and len(ranks) == self._num_ranks:
            alike = zip(*ranks.values(), strict=True)
            common = [one[0] if len(set(one)) == 1 else NO_HASH for one in alike]
            out.reports.append(
                TierOpened(event.tier, event.num_slots, b"".join(common))
            )
            del self._held[event.tier]


@dataclass(slots=True)
class _Save:
    """A command that every rank has got, and how many have not answered."""

    num_copying: int
    num_saving: int
    failure: Failure | None = None


def _broken(peer: PeerName) -> Failure:
    text = f"the channel to node {peer[0]} broke"
    return TransferError(text, code="node_lost").to_failure()
