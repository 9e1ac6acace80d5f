"""All handoffs that this node offers: find a key's machine, or answer for it.

The connector holds `Offers` and reports channels and time to it. If a reader renews a key that has
ended, or that was never offered, the answer is that the handoff was withdrawn.
"""

from collections.abc import Iterable

from baton.kv_transfer.announced_sums import AnnouncedSums
from baton.kv_transfer.effects import Effects
from baton.kv_transfer.interfaces import BlocksSummed, Offer, PeerName, Released
from baton.kv_transfer.peers import Peer, PeerTable
from baton.kv_transfer.source import (
    ChannelLost,
    LeaseEnded,
    Reconnected,
    SourceEvent,
    SourceHandoff,
    SourceState,
)
from baton.kv_transfer.tombstones import Tombstones, superseded
from baton.protocol.errors import Failure, InvariantBroken, TransferError
from baton.protocol.ids import Key
from baton.protocol.messages import Declined, Done, End, Renew, Span, Withdrawn


class Offers:
    def __init__(self, peers: PeerTable, lease_s: float, sums: AnnouncedSums | None = None) -> None:
        """If `sums` is given, spans are sent with checksums of their blocks."""
        self._sums = sums
        self._peers = peers
        self._lease_s = lease_s
        self._sources: dict[Key, SourceHandoff] = {}
        self._tombstones: Tombstones[Withdrawn] = Tombstones()

    def offer(self, now_s: float, offer: Offer, out: Effects) -> None:
        if offer.key in self._sources:
            raise InvariantBroken(f"{offer.key} was offered twice")
        self._tombstones.note_attempt(offer.key)
        for lower in [k for k in self._sources if k.is_superseded_by(offer.key)]:
            self._on(now_s, self._sources[lower], Withdrawn(lower, superseded()), out)
        peer = self._peers.current(offer.decode_node)
        failure = self._refusal_of(offer, peer)
        if failure is not None:
            self._tombstones.bury(offer.key, Withdrawn(offer.key, failure))
            out.reports.append(Released(offer.key, failure))
            return
        assert peer is not None
        self._peers.dial(now_s, peer, out)
        self._sources[offer.key] = SourceHandoff(now_s, offer, peer.name, self._lease_s, out)

    def advance(self, now_s: float, event: Span | End | Withdrawn, out: Effects) -> None:
        """Handle a scheduler's event of an offer, or drop it if it crossed Released."""
        if event.key not in self._sources:
            return
        source = self._sources[event.key]
        if self._sums is None or isinstance(event, Withdrawn):
            self._on(now_s, source, event, out)
        else:
            self._sums.add(event, self._peers.num_pieces(source.peer), out)
            self._announce(now_s, event.key, out)

    def summed(self, now_s: float, rank: int, event: BlocksSummed, out: Effects) -> None:
        """Handle one rank's checksums of a span."""
        key = self._sums.summed(rank, event) if self._sums is not None else None
        if key is not None:
            self._announce(now_s, key, out)

    def answered(
        self,
        now_s: float,
        peer: Peer,
        key: Key,
        message: Renew | Done | Declined,
        out: Effects,
    ) -> None:
        """Handle a message from decode about an offer."""
        source = self._sources.get(key)
        if source is not None and source.peer == peer.name:
            self._on(now_s, source, message, out)
        elif isinstance(message, Renew):
            unknown = TransferError("prefill does not hold this prompt").to_failure()
            out.tell(peer.name, self._tombstones.answer(key) or Withdrawn(key, unknown))

    def channel_lost(self, now_s: float, peer: PeerName, failure: Failure, out: Effects) -> None:
        for source in self._of(peer):
            self._on(now_s, source, ChannelLost(failure), out)

    def reconnected(self, now_s: float, peer: PeerName, out: Effects) -> None:
        for source in self._of(peer):
            self._on(now_s, source, Reconnected(), out)

    def end_leases(self, now_s: float, out: Effects) -> set[PeerName]:
        """End the leases that are over, and return the peers that did not renew them."""
        ended = [source for source in self._sources.values() if source.deadline_s <= now_s]
        for source in ended:
            self._on(now_s, source, LeaseEnded(), out)
        return {source.peer for source in ended}

    def deadlines(self) -> Iterable[float]:
        return (source.deadline_s for source in self._sources.values())

    def used_peers(self) -> set[PeerName]:
        return {source.peer for source in self._sources.values()}

    # --- inside --------------------------------------------------------------------------------

    def _announce(self, now_s: float, key: Key, out: Effects) -> None:
        assert self._sums is not None
        for message in self._sums.take(key):
            if key in self._sources:
                self._on(now_s, self._sources[key], message, out)

    def _on(self, now_s: float, source: SourceHandoff, event: SourceEvent, out: Effects) -> None:
        source.on(now_s, event, out)
        if source.state is SourceState.RELEASED:
            del self._sources[source.key]
            if self._sums is not None:
                self._sums.forget(source.key)
            failure = source.failure or TransferError("the blocks were given back").to_failure()
            self._tombstones.bury(source.key, Withdrawn(source.key, failure))

    def _of(self, peer: PeerName) -> list[SourceHandoff]:
        return [source for source in self._sources.values() if source.peer == peer]

    def _refusal_of(self, offer: Offer, peer: Peer | None) -> Failure | None:
        if self._tombstones.is_superseded(offer.key):
            return superseded()
        if (tombstone := self._tombstones.answer(offer.key)) is not None:
            return tombstone.failure
        if peer is None or peer.info is None or not peer.info.control_endpoint:
            text = f"no router has published how to reach decode node {offer.decode_node}"
            return TransferError(text, code="node_lost").to_failure()
        return self._peers.refusal_of(peer)
