"""The handoffs that a node offers: a machine for each, found by its key.

A prefill node offers whole prompts. Any node may offer a prefix that it has cached.

Announced blocks are held under a lease and given back only after the reader's answer (Done,
Declined) or at the end of the lease: a lost channel does not prove that the reader is gone. Renew
extends the lease and is confirmed by Renewed, because the reader must not rely on a renewal that
came too late. A renewal of a key that has ended, or that was never offered, is answered by
Withdrawn.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import assert_never

import msgspec

from baton.kv_transfer.bookkeeping import Tombstones, superseded
from baton.kv_transfer.interfaces import (
    LEASE_EXPIRED,
    BlocksSummed,
    Effects,
    Offer,
    OfferBroken,
    PeerName,
    PrefixWanted,
    RefusePrefix,
    Released,
    SumBlocks,
)
from baton.kv_transfer.peers import Channel, Peer, PeerTable
from baton.protocol.errors import Failure, InvariantBroken, TransferError
from baton.protocol.ids import Key
from baton.protocol.messages import (
    BlockRange,
    Declined,
    Done,
    End,
    Offered,
    Renew,
    Renewed,
    WantPrefix,
    Withdrawn,
)

MAX_UNANSWERED = 1024


class Offers:
    def __init__(
        self, peers: PeerTable, lease_s: float, sums: "AnnouncedSums | None" = None
    ) -> None:
        """If `sums` is given, block ranges are sent with checksums of their blocks."""
        self._sums = sums
        self._peers = peers
        self._lease_s = lease_s
        self._sources: dict[Key, SourceHandoff] = {}
        self._tombstones: Tombstones[Withdrawn] = Tombstones()
        # Handoffs that ended without an answer of decode, which may not know even of the offer.
        self._unanswered: dict[Key, PeerName] = {}

    def offer(self, offer: Offer, out: Effects) -> None:
        if offer.key in self._sources:
            raise InvariantBroken(f"{offer.key} was offered twice")
        self._tombstones.note_attempt(offer.key)
        for lower in [k for k in self._sources if k.is_superseded_by(offer.key)]:
            self._on(self._sources[lower], Withdrawn(lower, superseded()), out)
        reached = self._ended(offer.key) or self._peers.reach(offer.reader, out)
        if isinstance(reached, Failure):
            self._tombstones.bury(offer.key, Withdrawn(offer.key, reached))
            out.reports.append(Released(offer.key, reached))
            return
        self._sources[offer.key] = SourceHandoff(
            offer, reached.name, self._lease_s, out
        )

    def wanted(self, peer: Peer, message: WantPrefix, out: Effects) -> None:
        """Handle a peer's question for a prefix, which the scheduler answers."""
        key = message.key
        if peer.channel is not Channel.UP or key in self._sources:
            return
        if (ended := self._ended(key)) is not None:
            out.send(peer.name, Withdrawn(key, ended))
            return
        out.reports.append(
            PrefixWanted(key, peer.name[0], message.hashes, message.num_held_blocks)
        )

    def refuse(self, event: RefusePrefix, out: Effects) -> None:
        peer = self._peers.current(event.reader)
        withdrawn = Withdrawn(event.key, event.failure)
        self._tombstones.bury(event.key, withdrawn)
        if peer is not None:
            out.send(peer.name, withdrawn)

    def advance(self, event: BlockRange | End | Withdrawn, out: Effects) -> None:
        """Handle a scheduler's event of an offer, or drop it if it crossed Released."""
        if event.key not in self._sources:
            return
        source = self._sources[event.key]
        if self._sums is None or isinstance(event, Withdrawn):
            self._on(source, event, out)
        else:
            self._sums.add(event, self._peers.num_slices(source.peer), out)
            self._announce(event.key, out)

    def summed(self, rank: int, event: BlocksSummed, out: Effects) -> None:
        """Handle one rank's checksums of a block range."""
        key = self._sums.summed(rank, event) if self._sums is not None else None
        if key is not None:
            self._announce(key, out)

    def answered(
        self, peer: Peer, key: Key, message: Renew | Done | Declined, out: Effects
    ) -> None:
        """Handle a reader's message about an offer."""
        source = self._sources.get(key)
        if not isinstance(message, Renew) and self._unanswered.get(key) == peer.name:
            del self._unanswered[key]
        if source is not None and source.peer == peer.name:
            self._on(source, message, out)
        elif isinstance(message, Renew):
            unknown = TransferError("the node does not hold this prompt").to_failure()
            out.send(peer.name, self._tombstones.answer(key) or Withdrawn(key, unknown))

    def channel_lost(self, peer: PeerName, failure: Failure, out: Effects) -> None:
        for source in self._of(peer):
            self._on(source, ChannelLost(failure), out)

    def reconnected(self, peer: PeerName, out: Effects) -> None:
        for source in self._of(peer):
            self._on(source, Reconnected(), out)
        for key in [key for key, name in self._unanswered.items() if name == peer]:
            if (withdrawn := self._tombstones.answer(key)) is not None:
                out.send(peer, withdrawn)

    def end_leases(self, out: Effects) -> set[PeerName]:
        """End the leases that are over, and return the peers that did not renew them."""
        ended = [
            source
            for source in self._sources.values()
            if source.deadline_s <= out.now_s
        ]
        for source in ended:
            self._on(source, LeaseEnded(), out)
        return {source.peer for source in ended}

    def deadlines(self) -> Iterable[float]:
        return (source.deadline_s for source in self._sources.values())

    def used_peers(self) -> set[PeerName]:
        return {source.peer for source in self._sources.values()}

    def _announce(self, key: Key, out: Effects) -> None:
        assert self._sums is not None
        for message in self._sums.take(key):
            if key in self._sources:
                self._on(self._sources[key], message, out)

    def _on(self, source: "SourceHandoff", event: "SourceEvent", out: Effects) -> None:
        source.on(event, out)
        if source.state is SourceState.RELEASED:
            del self._sources[source.key]
            if self._sums is not None:
                self._sums.forget(source.key)
            failure = (
                source.failure
                or TransferError("the blocks were given back").to_failure()
            )
            self._tombstones.bury(source.key, Withdrawn(source.key, failure))
            if not isinstance(event, Done | Declined):
                self._unanswered[source.key] = source.peer
                if len(self._unanswered) > MAX_UNANSWERED:
                    del self._unanswered[next(iter(self._unanswered))]

    def _of(self, peer: PeerName) -> "list[SourceHandoff]":
        return [source for source in self._sources.values() if source.peer == peer]

    def _ended(self, key: Key) -> Failure | None:
        """Return why nothing more may be offered under this key."""
        if self._tombstones.is_superseded(key):
            return superseded()
        tombstone = self._tombstones.answer(key)
        return None if tombstone is None else tombstone.failure


class SourceState(Enum):
    OFFERED = auto()  # Offered is sent, block ranges follow
    COMPLETE = auto()  # End is sent
    LEAVING = auto()  # given up, but the reader may still read announced blocks
    RELEASED = auto()


@dataclass(slots=True, frozen=True)
class LeaseEnded:
    """The reader did not renew in time."""


@dataclass(slots=True, frozen=True)
class ChannelLost:
    """The channel to the reader is gone, or the reader was refused."""

    failure: Failure


@dataclass(slots=True, frozen=True)
class Reconnected:
    """There is a new channel to the process to which this handoff was offered."""


SourceEvent = (
    BlockRange
    | End
    | Withdrawn
    | Renew
    | Done
    | Declined
    | ChannelLost
    | Reconnected
    | LeaseEnded
)


class SourceHandoff:
    """The constructor sends Offered. `deadline_s` is the end of the lease in every state."""

    def __init__(
        self, offer: Offer, peer: PeerName, lease_s: float, out: Effects
    ) -> None:
        self.key = offer.key
        self.peer = peer
        self.state = SourceState.OFFERED
        self.lease_s = lease_s
        self.deadline_s = out.now_s + lease_s
        self.failure: Failure | None = None
        self._num_blocks = offer.num_blocks
        self._num_announced_blocks = 0
        self._is_complete = False
        out.send(peer, Offered(offer.key, offer.num_tokens, offer.num_blocks, lease_s))

    def on(self, event: SourceEvent, out: Effects) -> None:
        match self.state:
            case SourceState.OFFERED | SourceState.COMPLETE:
                self._on_live(event, out)
            case SourceState.LEAVING:
                self._on_leaving(event, out)
            case SourceState.RELEASED:
                raise InvariantBroken(
                    f"{self.key} was released before {type(event).__name__}"
                )
            case _:
                assert_never(self.state)

    def _on_live(self, event: SourceEvent, out: Effects) -> None:
        match event:
            case BlockRange():
                self._announce(event, out)
            case End():
                self._complete(event, out)
            case Renew():
                self.deadline_s = out.now_s + self.lease_s
                out.send(self.peer, Renewed(self.key))
            case Done():
                error = TransferError(
                    "the reader was done with a prompt that had not ended"
                )
                self._release(None if self._is_complete else error.to_failure(), out)
            case Declined(failure=failure):
                self._release(failure, out)
            case Withdrawn(failure=failure):
                out.send(self.peer, event)
                self._leave(failure, out)
            case ChannelLost(failure=failure):
                self._leave(failure, out)
                if self.state is SourceState.LEAVING:
                    out.reports.append(OfferBroken(self.key, failure))
            case LeaseEnded():
                text = f"node {self.peer[0]} let the lease of {self.lease_s:g} s end"
                failure = TransferError(text, code=LEASE_EXPIRED).to_failure()
                out.send(self.peer, Withdrawn(self.key, failure))
                self._release(failure, out)
            case Reconnected():
                pass
            case _:
                assert_never(event)

    def _on_leaving(self, event: SourceEvent, out: Effects) -> None:
        match event:
            case Renew() | Reconnected():
                assert self.failure is not None
                out.send(self.peer, Withdrawn(self.key, self.failure))
            case Done():
                self._release(None if self._is_complete else self.failure, out)
            case Declined() | LeaseEnded():
                self._release(self.failure, out)
            case BlockRange() | End() | Withdrawn() | ChannelLost():
                pass
            case _:
                assert_never(event)

    def _announce(self, block_range: BlockRange, out: Effects) -> None:
        if self._is_complete or block_range.first_block != self._num_announced_blocks:
            raise InvariantBroken(
                f"{self.key} announces block {block_range.first_block} out of order"
            )
        self._num_announced_blocks += len(block_range.block_ids)
        out.send(self.peer, block_range)

    def _complete(self, end: End, out: Effects) -> None:
        if self._is_complete or self._num_announced_blocks != self._num_blocks:
            raise InvariantBroken(f"{self.key} ends twice or without all of its blocks")
        self.state = SourceState.COMPLETE
        self._is_complete = True
        out.send(self.peer, end)

    def _leave(self, failure: Failure, out: Effects) -> None:
        self.failure = failure
        if self._num_announced_blocks == 0:
            self._release(failure, out)
        else:
            self.state = SourceState.LEAVING

    def _release(self, failure: Failure | None, out: Effects) -> None:
        self.state = SourceState.RELEASED
        self.failure = failure
        out.reports.append(Released(self.key, failure))


@dataclass(slots=True)
class _Waiting:
    message: BlockRange | End
    # The rows of checksums from each rank that has answered.
    sums: dict[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)


class AnnouncedSums:
    def __init__(self, num_ranks: int, block_bytes: int) -> None:
        self._num_ranks = num_ranks
        self._block_bytes = block_bytes
        self._tickets = itertools.count(1)
        self._queues: dict[Key, deque[_Waiting]] = {}
        self._asked: dict[int, _Waiting] = {}

    def add(self, message: BlockRange | End, num_slices: int, out: Effects) -> None:
        """Queue an announcement, and ask all ranks for the checksums if it is a block range."""
        waiting = _Waiting(message)
        self._queues.setdefault(message.key, deque()).append(waiting)
        if isinstance(message, BlockRange):
            ticket = next(self._tickets)
            self._asked[ticket] = waiting
            slice_bytes = self._block_bytes // num_slices
            for rank in range(self._num_ranks):
                out.command(
                    rank, SumBlocks(ticket, message.block_ids, slice_bytes, num_slices)
                )

    def summed(self, rank: int, event: BlocksSummed) -> Key | None:
        """Note an answer, and return the key whose announcements may now be ready."""
        waiting = self._asked.get(event.ticket)
        if waiting is None:
            return None  # its handoff has ended
        waiting.sums[rank] = event.checksums
        if len(waiting.sums) < self._num_ranks:
            return None
        del self._asked[event.ticket]
        return waiting.message.key

    def take(self, key: Key) -> Iterator[BlockRange | End]:
        """Yield the announcements that can be sent now, in order."""
        queue = self._queues.get(key)
        while queue:
            message = queue[0].message
            sums = queue[0].sums
            if isinstance(message, BlockRange):
                if len(sums) < self._num_ranks:
                    return
                rows = tuple(
                    row for rank in range(self._num_ranks) for row in sums[rank]
                )
                message = msgspec.structs.replace(message, checksums=rows)
            queue.popleft()
            yield message
        self._queues.pop(key, None)

    def forget(self, key: Key) -> None:
        gone = self._queues.pop(key, ())
        self._asked = {
            ticket: waiting
            for ticket, waiting in self._asked.items()
            if not any(waiting is one for one in gone)
        }
