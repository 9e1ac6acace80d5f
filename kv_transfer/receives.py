"""All receives of a node: find a key's machine, park early messages, and answer late ones.

A decode node receives whole prompts, a prefill node prefixes that another node has cached, and both
load prefixes from their own tiers. Leases
of all receives from one peer are renewed together. If the source still sends messages of a key that
has ended, the answer is again that the reader is done, or why it declined.
"""

import itertools
from collections.abc import Iterable
from dataclasses import replace

from baton.kv_transfer.bookkeeping import (
    PARKED_S,
    Parked,
    Parking,
    Tombstones,
    superseded,
)
from baton.kv_transfer.interfaces import (
    Abandon,
    BeginReceive,
    BlocksDrained,
    Effects,
    Expect,
    FetchPrefix,
    LoadPrefix,
    PeerName,
    PeerUp,
    ReadEnded,
    ReceiveEnded,
)
from baton.kv_transfer.peers import Channel, Peer, PeerTable
from baton.kv_transfer.receive import (
    Broken,
    KVReceive,
    ReceiveEvent,
    ReceiveState,
    TimeUp,
)
from baton.protocol.errors import Failure, InvariantBroken, TransferError
from baton.protocol.ids import Key
from baton.protocol.messages import (
    BlockRange,
    Declined,
    Done,
    End,
    NodeInfo,
    Offered,
    Renew,
    Renewed,
    WantPrefix,
    Withdrawn,
)

FromSource = Offered | BlockRange | End | Withdrawn | Renewed


class KVReceives:
    def __init__(self, node: NodeInfo, peers: PeerTable) -> None:
        self._node = node
        self._peers = peers
        self._receives: dict[Key, KVReceive] = {}
        # When each receive needs attention, cached to keep steps cheap.
        self._next_s: dict[Key, float] = {}
        self._tombstones: Tombstones[Done | Declined] = Tombstones()
        self._parking = Parking()
        self._tickets = itertools.count(1)
        self._readers: dict[int, Key] = {}  # ticket -> receive
        self._tier_readers: set[int] = set()  # those of tiers
        # Ticket -> blocks, of ended receives.
        self._quarantined: dict[int, tuple[int, ...]] = {}

    def expect(self, event: Expect, out: Effects) -> None:
        parked = self._parking.take(event.key)
        receive = self._open(event, parked, out)
        if receive is None:
            return
        self._make_readable(receive, out)
        if parked is not None:
            # Its lease has run since it came.
            then = replace(out, now_s=parked.until_s - PARKED_S)
            for message in parked.messages:
                self.announced(self._peers.get(parked.peer), message, then)

    def fetch(self, event: FetchPrefix, out: Effects) -> None:
        receive = self._open(event, self._parking.take(event.key), out)
        if receive is None:
            return
        reached = self._peers.reach(event.source, out)
        if isinstance(reached, Failure):
            self._on(receive, Broken(reached), out)
            return
        receive.peer = reached.name
        out.send(
            reached.name, WantPrefix(event.key, event.hashes, event.num_held_blocks)
        )
        self._make_readable(receive, out)

    def load(self, event: LoadPrefix, out: Effects) -> None:
        if event.key in self._receives:
            raise InvariantBroken(f"{event.key} is loaded twice")
        receive = KVReceive(out.now_s, event, self._node.num_blocks, self._take_ticket)
        self._receives[event.key] = receive
        self._tier_readers |= receive.load(event.parts, len(self._node.ranks), out)
        self._next_s[event.key] = receive.deadline_s

    def reads_tier(self, ticket: int) -> bool:
        """Return whether a read of a tier has this ticket, and bytes of it may still land."""
        return ticket in self._tier_readers

    def _open(
        self, event: Expect | FetchPrefix, parked: Parked | None, out: Effects
    ) -> KVReceive | None:
        """Begin a receive, unless its key has ended."""
        key = event.key
        if key in self._receives:
            raise InvariantBroken(f"{key} was expected twice")
        self._supersede(key, out)
        tombstone = self._tombstones.answer(key)
        if tombstone is not None or self._tombstones.is_superseded(key):
            failure = (
                tombstone.failure if isinstance(tombstone, Declined) else superseded()
            )
            out.reports.append(ReceiveEnded(key, failure))
            if parked is not None:
                self._decline(parked.peer, key, failure, out)
            return None
        receive = self._receives[key] = KVReceive(
            out.now_s, event, self._node.num_blocks, self._take_ticket
        )
        self._next_s[key] = receive.deadline_s
        return receive

    def advance(self, event: BeginReceive | Abandon, out: Effects) -> None:
        """Handle a scheduler's event, or drop it if it crossed its key's last report."""
        receive = self._receives.get(event.key)
        if receive is not None and isinstance(event, BeginReceive):
            self._make_readable(receive, out)
            receive = self._receives.get(event.key)
        if receive is not None:
            self._on(receive, event, out)

    def announced(self, peer: Peer, message: FromSource, out: Effects) -> None:
        """Handle a source's message about a handoff."""
        key = message.key
        receive = self._receives.get(key)
        # Another message of the key makes its state clear.
        wants_answer = not isinstance(message, BlockRange | Renewed)
        if receive is not None:
            if receive.source == peer.name[0] and receive.peer in (None, peer.name):
                self._on(receive, message, out, sender=peer)
            elif wants_answer:
                out.send(peer.name, Declined(key, _unexpected()))
        elif (tombstone := self._tombstones.answer(key)) is not None:
            if wants_answer:
                out.send(peer.name, tombstone)
        elif peer.channel is Channel.REFUSED:
            assert peer.refusal is not None
            out.send(peer.name, Declined(key, peer.refusal))
        else:
            self._announced_early(peer, message, out)

    def read_ended(self, event: ReadEnded, out: Effects) -> None:
        key = self._readers.get(event.ticket)
        if event.quiesced:
            self._readers.pop(event.ticket, None)
            self._tier_readers.discard(event.ticket)
        receive = None if key is None else self._receives.get(key)
        if receive is not None and receive.reads(event.ticket):
            self._on(receive, event, out)
        elif event.quiesced:
            self.read_drained(event.ticket, out)

    def read_drained(self, ticket: int, out: Effects) -> None:
        """Give back the blocks of a read that has drained, unless another read names them."""
        key = self._readers.pop(ticket, None)
        self._tier_readers.discard(ticket)
        if key is not None and key in self._receives:
            self._receives[key].quarantined.pop(ticket, None)
        named = {*self._quarantined.pop(ticket, ())}
        for others in self._quarantined.values():
            named -= {*others}
        if named:
            out.reports.append(BlocksDrained(tuple(sorted(named))))

    def rank_up(self, peer: PeerName, event: PeerUp, out: Effects) -> None:
        for receive in self._of(peer):
            self._on(receive, event, out)

    def rank_down(self, peer: PeerName, failure: Failure, out: Effects) -> None:
        """End the receives that read from a lost rank; others may use a new connection."""
        for receive in self._of(peer):
            if receive.state is ReceiveState.RECEIVING:
                self._on(receive, Broken(failure), out)

    def channel_lost(self, peer: PeerName, failure: Failure, out: Effects) -> None:
        self._parking.forget_peer(peer)
        for receive in self._of(peer):
            self._on(receive, Broken(failure), out)

    def refused(self, peer: PeerName, failure: Failure, out: Effects) -> None:
        """End the receives that wait for that process, which can never send blocks to this node."""
        for receive in list(self._receives.values()):
            if receive.peer is None and receive.source == peer[0]:
                self._on(receive, Broken(failure), out)

    def peers_changed(self, out: Effects) -> None:
        for receive in list(self._receives.values()):
            self._make_readable(receive, out)

    def end_waits(self, out: Effects) -> None:
        for key in [key for key, at_s in self._next_s.items() if at_s <= out.now_s]:
            if self._receives[key].deadline_s <= out.now_s:
                self._on(self._receives[key], TimeUp(), out)
        for key, parked in self._parking.take_expired(out.now_s):
            self._decline(parked.peer, key, _unexpected(), out)

    def renew(self, out: Effects) -> None:
        """Renew the leases that are due, together with all others of the same peer."""
        due: set[PeerName] = set()
        for key in [key for key, at_s in self._next_s.items() if at_s <= out.now_s]:
            receive = self._receives[key]
            if receive.peer is not None and receive.renew_at_s is not None:
                due.add(receive.peer)
        for peer in sorted(due):
            receives = [one for one in self._of(peer) if one.renew_at_s is not None]
            receives.sort(key=lambda receive: receive.key)
            out.send(peer, Renew(tuple(receive.key for receive in receives)))
            for receive in receives:
                assert receive.lease is not None
                receive.lease.renewed(out.now_s)
                self._next_s[receive.key] = receive.next_s

    def deadlines(self) -> Iterable[float]:
        if self._parking.deadline_s is not None:
            yield self._parking.deadline_s
        yield from self._next_s.values()

    def used_peers(self) -> set[PeerName]:
        used = self._parking.peers()
        for receive in self._receives.values():
            peer = self._peer_of(receive)
            if peer is not None:
                used.add(peer.name)
        return used

    def _on(
        self,
        receive: KVReceive,
        event: ReceiveEvent,
        out: Effects,
        *,
        sender: Peer | None = None,
    ) -> None:
        peer = sender if receive.peer is None else self._peers.get(receive.peer)
        receive.on(event, peer, out)
        if receive.state is ReceiveState.RECEIVED:
            self._bury(receive, Done(receive.key))
        elif receive.state is ReceiveState.ENDED:
            assert receive.failure is not None
            self._quarantined |= receive.quarantined
            self._bury(receive, Declined(receive.key, receive.failure))
        else:
            self._next_s[receive.key] = receive.next_s
            if isinstance(event, Offered):
                self._make_readable(receive, out)

    def _bury(self, receive: KVReceive, answer: Done | Declined) -> None:
        del self._receives[receive.key], self._next_s[receive.key]
        # The rest of a prefix may follow from another node.
        if receive.source is not None:
            self._tombstones.bury(receive.key, answer)

    def _of(self, peer: PeerName) -> list[KVReceive]:
        return [receive for receive in self._receives.values() if receive.peer == peer]

    def _peer_of(self, receive: KVReceive) -> Peer | None:
        """Return the process that a receive reads from, if there is one."""
        if receive.peer is not None:
            return self._peers.get(receive.peer)
        return None if receive.source is None else self._peers.current(receive.source)

    def _make_readable(self, receive: KVReceive, out: Effects) -> None:
        """Connect to the ranks that will be read as soon as their process is known."""
        if receive.state is ReceiveState.DRAINING:
            return
        peer = self._peer_of(receive)
        if peer is None:
            return
        failure = self._peers.refusal_of(peer)
        if failure is None:
            try:
                self._peers.make_readable(peer, out)
            except TransferError as error:
                failure = error.to_failure()
        if failure is not None:
            self._on(receive, Broken(failure), out)

    def _announced_early(self, peer: Peer, message: FromSource, out: Effects) -> None:
        """Park or decline a message of a key that is not expected, or not yet."""
        key = message.key
        if isinstance(message, Renewed):
            return  # the receive was forgotten long ago
        if isinstance(message, Withdrawn):
            self._parking.take(key)
            self._decline(peer.name, key, message.failure, out)
            return
        if isinstance(message, Offered):
            self._supersede(key, out)
        if self._tombstones.is_superseded(key):
            self._decline(peer.name, key, superseded(), out)
        elif not self._parking.park(out.now_s, peer.name, message):
            self._parking.take(key)
            self._decline(peer.name, key, _unexpected(), out)

    def _supersede(self, key: Key, out: Effects) -> None:
        self._tombstones.note_attempt(key)
        for lower in [k for k in self._receives if k.is_superseded_by(key)]:
            self._on(self._receives[lower], Broken(superseded()), out)

    def _decline(
        self, peer: PeerName, key: Key, failure: Failure, out: Effects
    ) -> None:
        """Refuse a handoff for good; later messages of its key get the same answer."""
        declined = Declined(key, failure)
        self._tombstones.bury(key, declined)
        out.send(peer, declined)

    def _take_ticket(self, key: Key) -> int:
        ticket = next(self._tickets)
        self._readers[ticket] = key
        return ticket


def _unexpected() -> Failure:
    text = "this node was not asked to read that prompt"
    return TransferError(text, code="not_expected").to_failure()
