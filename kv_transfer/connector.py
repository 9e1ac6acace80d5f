"""The connector of one node: routes events to the machines of its handoffs and peers. Pure.

Called by the engine loop (and by the simulator) only. Both roles are in one object: handoffs that
this node offers, and landings that it expects. It decides nothing about blocks itself, and never
touches a clock, a socket or memory. `docs/transfer.md` has the state tables.
"""

import itertools
from collections.abc import Sequence

from baton.kv_transfer.effects import Effects, PeerName
from baton.kv_transfer.interfaces import (
    Abandon,
    AgentEvent,
    Complete,
    ConnectorEvent,
    ConnectorStep,
    Expect,
    FromPeer,
    FromRank,
    Land,
    LandingEnded,
    Offer,
    PeerDown,
    PeerLost,
    PeersChanged,
    Publish,
    ReadEnded,
    Released,
    Withdraw,
)
from baton.kv_transfer.landing import (
    Broken,
    LandingEvent,
    LandingHandoff,
    LandingState,
    TimeUp,
)
from baton.kv_transfer.peers import CONNECT_S, HELLO_S, Channel, Peer, Peers
from baton.kv_transfer.source import (
    ChannelLost,
    LeaseEnded,
    Reconnected,
    SourceEvent,
    SourceHandoff,
    SourceState,
)
from baton.kv_transfer.tombstones import PARKED_S, Parking, Tombstones
from baton.protocol.config import TransferConfig
from baton.protocol.errors import Cancelled, Failure, InvariantBroken, TransferError
from baton.protocol.ids import Key
from baton.protocol.messages import (
    Declined,
    Done,
    End,
    Landing,
    NodeInfo,
    PeerHello,
    Renew,
    Span,
    Started,
    ToDecode,
    ToPrefill,
    Withdrawn,
)


class NodeConnector:
    """Implements `interfaces.Connector`."""

    def __init__(self, node: NodeInfo, transfer: TransferConfig) -> None:
        self._node = node
        self._lease_s = transfer.lease_s
        self._peers = Peers(node, transfer)
        self._sources: dict[Key, SourceHandoff] = {}
        self._landings: dict[Key, LandingHandoff] = {}
        self._released: Tombstones[Withdrawn] = Tombstones()
        self._landed: Tombstones[Done | Declined] = Tombstones()
        self._parking = Parking()
        self._tickets = itertools.count(1)
        self._readers: dict[int, Key] = {}  # ticket -> landing
        self._out = Effects(set())

    def step(self, now_s: float, events: Sequence[ConnectorEvent]) -> ConnectorStep:
        self._out = Effects(self._peers.reachable)
        for event in events:
            self._on(now_s, event)
        self._end_waits(now_s)
        self._renew(now_s)
        self._peers.forget_unlisted(self._used_peers, self._out)
        return ConnectorStep(self._out.commands, self._out.reports, self._wake_at_s())

    def _on(self, now_s: float, event: ConnectorEvent) -> None:
        match event:
            case FromPeer(node, epoch, message):
                self._on_message(now_s, self._peers.get((node, epoch)), message)
            case FromRank(rank, rank_event):
                self._on_rank(now_s, rank, rank_event)
            case Publish() | Complete() | Withdraw():
                if event.key in self._sources:  # else it crossed Released
                    self._source(now_s, self._sources[event.key], event)
            case Land() | Abandon():
                if event.key in self._landings:  # else it crossed the last report
                    self._landing(now_s, self._landings[event.key], event)
            case Offer():
                self._offer(now_s, event)
            case Expect():
                self._expect(now_s, event)
            case PeersChanged(nodes):
                self._peers.changed(nodes)
                for landing in list(self._landings.values()):
                    self._make_readable(now_s, landing)
            case PeerLost(node, epoch):
                self._lose(now_s, self._peers.get((node, epoch)))

    # --- offers of this node -------------------------------------------------------------------

    def _offer(self, now_s: float, offer: Offer) -> None:
        if offer.key in self._sources:
            raise InvariantBroken(f"{offer.key} was offered twice")
        self._released.note_attempt(offer.key)
        for lower in [k for k in self._sources if k.is_superseded_by(offer.key)]:
            self._source(now_s, self._sources[lower], Withdraw(lower, _superseded()))
        peer = self._peers.current(offer.decode_node)
        failure = self._refusal_of(offer, peer)
        if failure is not None or peer is None:
            assert failure is not None
            self._released.bury(offer.key, Withdrawn(offer.key, failure))
            self._out.reports.append(Released(offer.key, failure))
            return
        self._peers.dial(now_s, peer, self._out)
        self._sources[offer.key] = SourceHandoff(now_s, offer, peer.name, self._lease_s, self._out)

    def _refusal_of(self, offer: Offer, peer: Peer | None) -> Failure | None:
        if self._released.is_superseded(offer.key):
            return _superseded()
        if (tombstone := self._released.answer(offer.key)) is not None:
            return tombstone.failure
        if peer is None or peer.info is None or not peer.info.control_endpoint:
            text = f"no router has said how to reach decode node {offer.decode_node}"
            return TransferError(text, code="node_lost").to_failure()
        return self._peers.refusal_of(peer)

    def _source(self, now_s: float, source: SourceHandoff, event: SourceEvent) -> None:
        source.on(now_s, event, self._out)
        if source.state is SourceState.RELEASED:
            del self._sources[source.key]
            failure = source.failure or _failure("transfer_failed", "the blocks were given back")
            self._released.bury(source.key, Withdrawn(source.key, failure))

    def _on_answer(
        self, now_s: float, peer: Peer, key: Key, message: Landing | Renew | Done | Declined
    ) -> None:
        source = self._sources.get(key)
        if source is not None and source.peer == peer.name:
            self._source(now_s, source, message)
        elif isinstance(message, Landing | Renew):
            unknown = _failure("transfer_failed", "prefill does not hold this prompt")
            withdrawn = self._released.answer(key) or Withdrawn(key, unknown)
            self._out.tell(peer.name, withdrawn)

    # --- landings here -------------------------------------------------------------------------

    def _expect(self, now_s: float, expect: Expect) -> None:
        key = expect.key
        if key in self._landings:
            raise InvariantBroken(f"{key} was expected twice")
        self._supersede_landings(now_s, key)
        parked = self._parking.take(key)
        tombstone = self._landed.answer(key)
        if tombstone is not None or self._landed.is_superseded(key):
            failure = tombstone.failure if isinstance(tombstone, Declined) else _superseded()
            self._out.reports.append(LandingEnded(key, failure))
            if parked is not None:
                self._decline(parked.peer, key, failure)
            return
        landing = self._landings[key] = LandingHandoff(
            now_s, expect, len(self._node.ranks), self._node.num_blocks, self._take_ticket
        )
        self._make_readable(now_s, landing)
        if parked is not None:
            peer = self._peers.get(parked.peer)
            for message in parked.messages:  # its lease has run since it came
                at_s = parked.until_s - PARKED_S
                self._on_announcement(at_s, peer, message)

    def _landing(
        self, now_s: float, landing: LandingHandoff, event: LandingEvent, sender: Peer | None = None
    ) -> None:
        peer = sender if landing.peer is None else self._peers.get(landing.peer)
        if isinstance(event, Land):
            self._make_readable(now_s, landing)
            if landing.key not in self._landings:
                return
        landing.on(now_s, event, peer, self._out)
        if landing.state is LandingState.LANDED:
            del self._landings[landing.key]
            self._landed.bury(landing.key, Done(landing.key))
        elif landing.state is LandingState.ENDED:
            assert landing.failure is not None
            del self._landings[landing.key]
            self._landed.bury(landing.key, Declined(landing.key, landing.failure))
        elif isinstance(event, Started):
            self._make_readable(now_s, landing)

    def _make_readable(self, now_s: float, landing: LandingHandoff) -> None:
        """Connect to the ranks of whoever will be read, as soon as it is known who that is."""
        if landing.state is LandingState.DRAINING:
            return
        if landing.peer is None:
            peer = self._peers.current(landing.prefill_node)
        else:
            peer = self._peers.get(landing.peer)
        if peer is None:
            return
        failure = self._peers.refusal_of(peer)
        if failure is None:
            try:
                self._peers.make_readable(now_s, peer, self._out)
            except TransferError as error:
                failure = error.to_failure()
        if failure is not None:
            self._landing(now_s, landing, Broken(failure))

    def _on_announcement(
        self, now_s: float, peer: Peer, message: Started | Span | End | Withdrawn
    ) -> None:
        key = message.key
        landing = self._landings.get(key)
        if landing is not None:
            if landing.prefill_node == peer.name[0] and landing.peer in (None, peer.name):
                self._landing(now_s, landing, message, peer)
            elif not isinstance(message, Span):
                self._out.tell(peer.name, Declined(key, _unexpected()))
        elif (tombstone := self._landed.answer(key)) is not None:
            if not isinstance(message, Span):
                self._out.tell(peer.name, tombstone)
        elif peer.channel is Channel.REFUSED:
            assert peer.refusal is not None
            self._out.tell(peer.name, Declined(key, peer.refusal))
        else:
            self._on_early(now_s, peer, message)

    def _on_early(
        self, now_s: float, peer: Peer, message: Started | Span | End | Withdrawn
    ) -> None:
        """Of a key that nobody expects, or not yet."""
        key = message.key
        if isinstance(message, Withdrawn):
            self._parking.take(key)
            self._decline(peer.name, key, message.failure)
            return
        if isinstance(message, Started):
            self._supersede_landings(now_s, key)
        if self._landed.is_superseded(key):
            self._decline(peer.name, key, _superseded())
        elif not self._parking.park(now_s, peer.name, message):
            self._decline(peer.name, key, _unexpected())

    def _supersede_landings(self, now_s: float, key: Key) -> None:
        self._landed.note_attempt(key)
        for lower in [k for k in self._landings if k.is_superseded_by(key)]:
            self._landing(now_s, self._landings[lower], Broken(_superseded()))

    def _decline(self, peer: PeerName, key: Key, failure: Failure) -> None:
        """Refuse it for good: what still comes for it meets a tombstone."""
        declined = Declined(key, failure)
        self._landed.bury(key, declined)
        self._out.tell(peer, declined)

    def _take_ticket(self, key: Key) -> int:
        ticket = next(self._tickets)
        self._readers[ticket] = key
        return ticket

    # --- peers and ranks -----------------------------------------------------------------------

    def _on_message(self, now_s: float, peer: Peer, message: ToDecode | ToPrefill) -> None:
        if isinstance(message, PeerHello):
            self._greet(now_s, peer, message)
            return
        if peer.channel is Channel.NONE:
            return  # before it introduces itself it is nobody
        peer.heard_s = now_s
        match message:
            case Started() | Span() | End() | Withdrawn():
                self._on_announcement(now_s, peer, message)
            case Renew(keys=keys):
                for key in keys:
                    self._on_answer(now_s, peer, key, message)
            case Landing() | Done() | Declined():
                self._on_answer(now_s, peer, message.key, message)

    def _greet(self, now_s: float, peer: Peer, hello: PeerHello) -> None:
        if peer.channel in (Channel.UP, Channel.REFUSED):
            self._lose(now_s, peer)  # its channel began anew before we saw the old one end
        failure = self._peers.greeted(now_s, peer, hello, self._out)
        if failure is not None:
            self._end_all_of(now_s, peer, failure)
            for landing in list(self._landings.values()):
                if landing.peer is None and landing.prefill_node == peer.name[0]:
                    self._landing(now_s, landing, Broken(failure))
            return
        for source in list(self._sources.values()):
            if source.peer == peer.name:
                self._source(now_s, source, Reconnected())

    def _lose(self, now_s: float, peer: Peer) -> None:
        self._peers.lost(peer)
        failure = _failure("node_lost", f"the channel to node {peer.name[0]} broke")
        self._end_all_of(now_s, peer, failure)

    def _end_all_of(self, now_s: float, peer: Peer, failure: Failure) -> None:
        self._parking.forget_peer(peer.name)
        for source in list(self._sources.values()):
            if source.peer == peer.name:
                self._source(now_s, source, ChannelLost(failure))
        for landing in list(self._landings.values()):
            if landing.peer == peer.name:
                self._landing(now_s, landing, Broken(failure))

    def _on_rank(self, now_s: float, rank: int, event: AgentEvent) -> None:
        if isinstance(event, ReadEnded):
            key = self._readers.pop(event.ticket, None)
            landing = self._landings.get(key) if key is not None else None
            if landing is not None and landing.reads(event.ticket):
                self._landing(now_s, landing, event)
            return
        peer = self._peers.of_epoch(event.peer)
        if peer is None:
            return
        if isinstance(event, PeerDown):
            self._rank_down(now_s, peer, rank, event.failure)
            return
        self._peers.rank_up(peer, rank, self._out)
        for landing in list(self._landings.values()):
            if landing.peer == peer.name:
                self._landing(now_s, landing, event)

    def _rank_down(self, now_s: float, peer: Peer, rank: int, failure: Failure) -> None:
        self._peers.remove_rank(peer, rank, self._out)
        for landing in list(self._landings.values()):
            if landing.peer == peer.name and landing.state is LandingState.LANDING:
                self._landing(now_s, landing, Broken(failure))

    # --- time ----------------------------------------------------------------------------------

    def _end_waits(self, now_s: float) -> None:
        for source in list(self._sources.values()):
            if source.key in self._sources and source.deadline_s <= now_s:
                self._source(now_s, source, LeaseEnded())
                self._doubt(now_s, self._peers.get(source.peer))
        for landing in list(self._landings.values()):
            if landing.deadline_s <= now_s:
                self._landing(now_s, landing, TimeUp())
        for key, parked in self._parking.take_expired(now_s):
            self._decline(parked.peer, key, _unexpected())
        for peer in self._peers.all():
            if peer.channel is Channel.DIALLED and peer.dialled_s + HELLO_S <= now_s:
                self._hang_up(now_s, peer)
            for rank in self._peers.late_ranks(now_s, peer):
                text = f"rank {rank} could not connect to {peer.name[0]} in {CONNECT_S:g} s"
                self._rank_down(now_s, peer, rank, _failure("transfer_failed", text))

    def _doubt(self, now_s: float, peer: Peer) -> None:
        """Live decode nodes renew; one that says nothing for a lease is not there any more."""
        if peer.channel is not Channel.NONE and peer.heard_s + self._lease_s <= now_s:
            self._hang_up(now_s, peer)

    def _hang_up(self, now_s: float, peer: Peer) -> None:
        self._peers.disconnect(peer, self._out)
        self._lose(now_s, peer)

    def _renew(self, now_s: float) -> None:
        """One message per peer; when one lease is due, all of that peer's are renewed."""
        due = {
            landing.peer
            for landing in self._landings.values()
            if landing.renew_at_s is not None and landing.renew_at_s <= now_s
        }
        for peer in sorted(name for name in due if name is not None):
            keys = [
                key
                for key, landing in sorted(self._landings.items())
                if landing.peer == peer and landing.renew_at_s is not None
            ]
            self._out.tell(peer, Renew(tuple(keys)))
            for key in keys:
                self._landings[key].renewed(now_s)

    def _wake_at_s(self) -> float | None:
        limits: list[float | None] = [self._parking.deadline_s]
        limits += [source.deadline_s for source in self._sources.values()]
        for landing in self._landings.values():
            limits += (landing.deadline_s, landing.renew_at_s)
        limits += [peer.deadline_s for peer in self._peers.all()]
        return min((limit for limit in limits if limit is not None), default=None)

    def _used_peers(self) -> set[PeerName]:
        used = {source.peer for source in self._sources.values()} | self._parking.peers()
        for landing in self._landings.values():
            peer = self._peers.current(landing.prefill_node)
            if landing.peer is not None:
                used.add(landing.peer)
            elif peer is not None:
                used.add(peer.name)
        return used


def _failure(code: str, text: str) -> Failure:
    return TransferError(text, code=code).to_failure()


def _superseded() -> Failure:
    return Cancelled("a newer attempt of this request has begun").to_failure()


def _unexpected() -> Failure:
    return _failure("not_expected", "decode was not asked for this prompt")
