"""One receive: blocks of a peer's prompt or prefix, or of this node's tiers, until all are there.

KVReceived is reported only after every slice of every block was read on every rank, End is here,
and it is proven that the source held the blocks while they were read. A failed handoff drains
first: it gives its blocks back when no read can write to them any more, and reports those for which
this is not certain as quarantined.

Blocks of tiers are there from the start, and the scheduler keeps their slots as they are until the
receive has ended. So nothing is announced, and no lease is needed.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from math import inf
from typing import assert_never

from baton.kv_transfer.bookkeeping import ReaderLease
from baton.kv_transfer.interfaces import (
    TIER_TIMEOUT,
    Abandon,
    BeginReceive,
    CancelRead,
    Effects,
    Expect,
    FetchPrefix,
    KVReceived,
    LoadPrefix,
    PeerName,
    PeerRank,
    PeerUp,
    Read,
    ReadEnded,
    ReceiveBroken,
    ReceiveEnded,
    TierPart,
    tier_peer,
)
from baton.kv_transfer.peers import LinkState, Peer, ShardMapping
from baton.protocol.errors import Failure, InvariantBroken, TransferError
from baton.protocol.ids import Epoch, Key
from baton.protocol.messages import (
    BlockRange,
    Declined,
    Done,
    End,
    NodeInfo,
    Offered,
    Renew,
    Renewed,
    Withdrawn,
)

# The router cancels long before this; it only bounds what a router forgot.
WAIT_S = 600.0
STALL_S = 60.0  # how long reads may make no progress while blocks are missing
# Longer than an agent takes to decide whether a read is quiesced.
SHUTDOWN_TIMEOUT_S = 60.0


class ReceiveState(Enum):
    EXPECTED = auto()  # the source has not offered the blocks
    # The source holds them, and the scheduler has named no place for them yet.
    OFFERED = auto()
    RECEIVING = auto()  # the scheduler has reserved blocks, and block ranges are read
    DRAINING = auto()  # the receive failed, and reads may still write
    RECEIVED = auto()
    ENDED = auto()


@dataclass(slots=True, frozen=True)
class Broken:
    """The handoff cannot go on because of its peer, a rank or a newer attempt."""

    failure: Failure


@dataclass(slots=True, frozen=True)
class TimeUp:
    """The time `deadline_s` has come."""


TakeTicket = Callable[[Key], int]
Announcement = Offered | BlockRange | End | Renewed
ReceiveEvent = (
    Announcement
    | Withdrawn
    | BeginReceive
    | Abandon
    | Broken
    | PeerUp
    | ReadEnded
    | TimeUp
)


class KVReceive:
    def __init__(
        self,
        now_s: float,
        event: Expect | FetchPrefix | LoadPrefix,
        max_blocks: int,
        take_ticket: TakeTicket,
    ) -> None:
        self.key = event.key
        # None: tiers.
        self.source = None if isinstance(event, LoadPrefix) else event.source
        self.peer: PeerName | None = None
        self.state = ReceiveState.EXPECTED
        self.lease: ReaderLease | None = None
        self.failure: Failure | None = None
        self._max_blocks = max_blocks
        self._take_ticket = take_ticket
        self._since_s = now_s
        self._progress_s = now_s
        # Nobody waits longer for a prefix than computing it takes.
        self._is_prefix = not isinstance(event, Expect)
        self._end_by_s = inf if isinstance(event, Expect) else now_s + event.timeout_s
        self._num_blocks = 0  # of the whole prompt or prefix, as offered
        self._block_ranges: list[BlockRange] = []
        self._num_announced_blocks = 0
        self._end: End | None = None
        self._end_arrived_s = now_s
        # The blocks that are missing here, which are read once over every edge to the peer.
        self._first_block = 0
        self._block_ids: tuple[int, ...] = ()
        # By edge, the block ranges that were posted or need no read; empty until edges are known.
        self._num_posted: list[int] = []
        # The local rank and its blocks, by ticket; then blocks of reads that are not quiesced.
        self._outstanding: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.quarantined: dict[int, tuple[int, ...]] = {}
        self._posted_s: list[float] = []
        self._last_end_s = 0.0
        self._num_bytes = 0

    @property
    def deadline_s(self) -> float:
        if self.state is ReceiveState.DRAINING:
            return self._since_s + SHUTDOWN_TIMEOUT_S
        limit_s = min(self._since_s + WAIT_S, self._end_by_s)
        if self.lease is not None:
            limit_s = min(limit_s, self.lease.limit_s)
        if self.state is ReceiveState.RECEIVING and not self._have_all_ranges():
            limit_s = min(limit_s, self._progress_s + STALL_S)
        return limit_s

    @property
    def renew_at_s(self) -> float | None:
        """Return when the next renewal is due: at once if only the proof is missing."""
        if (
            self.state not in (ReceiveState.OFFERED, ReceiveState.RECEIVING)
            or self.lease is None
        ):
            return None
        if self._has_all() and self._posted_s:
            end_s = self._last_end_s
            if not self.lease.covers(end_s) and not self.lease.may_cover(end_s):
                return end_s
        return self.lease.renew_at_s

    @property
    def next_s(self) -> float:
        """Return when the next deadline or renewal is due if no event comes before."""
        deadline_s = self.deadline_s
        renew_at_s = self.renew_at_s
        return deadline_s if renew_at_s is None else min(deadline_s, renew_at_s)

    def on(self, event: ReceiveEvent, peer: Peer | None, out: Effects) -> None:
        """Handle an event. `peer` is the process that offered the prompt or that sent `event`."""
        match self.state:
            case ReceiveState.EXPECTED:
                self._on_expected(event, peer, out)
            case ReceiveState.OFFERED | ReceiveState.RECEIVING:
                self._on_live(event, out)
            case ReceiveState.DRAINING:
                self._on_draining(event, out)
            case ReceiveState.RECEIVED | ReceiveState.ENDED:
                raise InvariantBroken(
                    f"{self.key} had ended before {type(event).__name__}"
                )
            case _:
                assert_never(self.state)
        if self.state is ReceiveState.RECEIVING and self.source is not None:
            self._read(peer, out)
        self._end_if_complete(out)

    def load(self, parts: Iterable[TierPart], num_ranks: int, out: Effects) -> set[int]:
        """Read parts of this node's tiers, each on every rank. Return the tickets of the reads."""
        self.state = ReceiveState.RECEIVING
        for part in parts:
            for rank in range(num_ranks):
                ticket = self._take_ticket(self.key)
                self._outstanding[ticket] = rank, part.block_ids
                peer = tier_peer(part.tier)
                generations = (0,) * len(part.slots)
                read = Read(
                    ticket,
                    peer,
                    part.slots,
                    part.block_ids,
                    generations,
                    hashes=part.hashes,
                )
                out.command(rank, read)
        return set(self._outstanding)

    def reads(self, ticket: int) -> bool:
        """Return whether that read belongs to this receive and has not ended."""
        return ticket in self._outstanding

    def _on_expected(
        self, event: ReceiveEvent, peer: Peer | None, out: Effects
    ) -> None:
        if peer is not None:
            self.peer = peer.name
        match event:
            case Offered():
                self._take_offer(event, out)
            case BlockRange() | End() | Renewed():
                self._fail(_wrong(f"{type(event).__name__} came before Offered"), out)
            case Withdrawn() | Abandon() | Broken() | TimeUp():
                self._fail(self._why(event), out)
            case PeerUp():
                pass
            case BeginReceive() | ReadEnded():
                raise self._out_of_place(event)
            case _:
                assert_never(event)

    def _on_live(self, event: ReceiveEvent, out: Effects) -> None:
        match event:
            case Offered() | BlockRange() | End() | Renewed():
                self._on_announcement(event, out)
            case Withdrawn() | Abandon() | Broken() | TimeUp():
                self._fail(self._why(event), out)
            case PeerUp():
                self._progress_s = out.now_s
            case BeginReceive() if self.state is ReceiveState.OFFERED:
                self._begin(event, out)
            case ReadEnded(failure=failure) if self.state is ReceiveState.RECEIVING:
                self._progress_s = out.now_s
                self._read_ended(event)
                if failure is not None or not event.quiesced:
                    self._fail(
                        failure or _wrong("a read ended without being quiesced"), out
                    )
            case BeginReceive() | ReadEnded():
                raise self._out_of_place(event)
            case _:
                assert_never(event)

    def _on_draining(self, event: ReceiveEvent, out: Effects) -> None:
        match event:
            case ReadEnded():
                self._read_ended(event)
                if not self._outstanding:
                    self._finish(out)
            case TimeUp():
                # Every read that has not ended may still write.
                for ticket, (_, local) in self._outstanding.items():
                    self.quarantined[ticket] = local
                self._outstanding.clear()
                self._finish(out)
            case BeginReceive():
                raise self._out_of_place(event)
            case _:
                pass  # nothing else matters any more

    def _take_offer(self, offered: Offered, out: Effects) -> None:
        self.state = ReceiveState.OFFERED
        self.lease = ReaderLease(out.now_s, offered.lease_s)
        self._num_blocks = offered.num_blocks
        self._since_s = out.now_s
        if (
            not 0 < offered.num_blocks <= self._max_blocks
            or not 0 < offered.lease_s <= WAIT_S
        ):
            self._fail(_wrong("Offered names impossible sizes"), out)
        else:
            out.reports.append(offered)

    def _on_announcement(self, message: Announcement, out: Effects) -> None:
        assert self.lease is not None
        problem: str | None = None
        match message:
            case Offered():
                problem = "the prompt was offered twice"
            case Renewed():
                if not self.lease.confirmed():
                    problem = "a renewal was confirmed that was not sent"
            case BlockRange():
                problem = self._problem_of(message)
                if problem is None:
                    if self.state is ReceiveState.OFFERED or self._have_all_ranges():
                        self._progress_s = out.now_s
                    self._block_ranges.append(message)
                    self._num_announced_blocks += len(message.block_ids)
            case End():
                if (
                    self._end is not None
                    or self._num_announced_blocks != self._num_blocks
                ):
                    problem = "End came twice or before all block ranges"
                self._end = message
                self._end_arrived_s = out.now_s
            case _:
                assert_never(message)
        if problem is not None:
            self._fail(_wrong(problem), out)

    def _problem_of(self, block_range: BlockRange) -> str | None:
        num_blocks = len(block_range.block_ids)
        if block_range.first_block != self._num_announced_blocks:
            return "a block range does not follow the last one"
        if num_blocks == 0 or num_blocks != len(block_range.generations):
            return "a block range is malformed"
        if any(len(row) != num_blocks for row in block_range.checksums):
            return "a block range's checksums are not those of its blocks"
        if block_range.first_block + num_blocks > self._num_blocks:
            return "a block range has more blocks than were offered"
        return None

    def _begin(self, event: BeginReceive, out: Effects) -> None:
        assert self.peer is not None
        assert self.lease is not None
        if event.first_block + len(event.block_ids) != self._num_blocks:
            text = f"{self._num_blocks} blocks were offered, but another number is expected"
            self._fail(_wrong(text), out)
            return
        self._first_block = event.first_block
        self._block_ids = event.block_ids
        self.state = ReceiveState.RECEIVING
        self._since_s = self._progress_s = out.now_s
        self.lease.renewed(out.now_s)
        out.send(self.peer, Renew((self.key,)))

    def _read(self, peer: Peer | None, out: Effects) -> None:
        """Post reads, over every link that is up, of announced blocks that are missing."""
        assert peer is not None
        if peer.info is None or not peer.links:
            return
        self._num_posted = self._num_posted or [0] * len(peer.links)
        for number, link in enumerate(peer.links):
            if link.state is not LinkState.UP:
                continue
            for block_range in self._block_ranges[self._num_posted[number] :]:
                problem = _unreadable(block_range, peer.info, link.edge)
                if problem is not None:
                    self._fail(_wrong(problem), out)
                    return
                self._num_posted[number] += 1
                read = self._read_of(block_range, link.edge, peer.epoch)
                if read is not None:
                    out.command(link.edge.target, read)

    def _read_of(
        self, block_range: BlockRange, edge: ShardMapping, peer: Epoch
    ) -> Read | None:
        """Return the read of the blocks of a range that are missing here; None if none is."""
        skip = max(0, self._first_block - block_range.first_block)
        remote = block_range.block_ids[skip:]
        if not remote:
            return None
        start = block_range.first_block + skip - self._first_block
        local = self._block_ids[start : start + len(remote)]
        ticket = self._take_ticket(self.key)
        self._outstanding[ticket] = (edge.target, local)
        checksums = (
            block_range.checksums[edge.sums_row][skip:] if block_range.checksums else ()
        )
        owner = PeerRank(peer, edge.source)
        return Read(
            ticket, owner, remote, local, block_range.generations[skip:], checksums
        )

    def _read_ended(self, event: ReadEnded) -> None:
        _, local = self._outstanding.pop(event.ticket)
        if not event.quiesced:
            self.quarantined[event.ticket] = local
        if event.failure is None:
            self._posted_s.append(event.posted_s)
            self._last_end_s = max(self._last_end_s, event.ended_s)
            self._num_bytes += event.num_bytes

    def _have_all_ranges(self) -> bool:
        """Return whether every announced block has been read on every rank."""
        num_block_ranges = len(self._block_ranges)
        if not self._num_posted:
            return num_block_ranges == 0 and not self._outstanding
        return not self._outstanding and all(
            posted == num_block_ranges for posted in self._num_posted
        )

    def _has_all(self) -> bool:
        if self.state is not ReceiveState.RECEIVING:
            return False
        if self.source is None:
            return not self._outstanding
        return self._end is not None and (
            not self._block_ids or self._have_all_ranges()
        )

    def _end_if_complete(self, out: Effects) -> None:
        if not self._has_all():
            return
        if self.source is None:
            took_s = max(0.0, self._last_end_s - self._since_s)
            self.state = ReceiveState.RECEIVED
            out.reports.append(
                KVReceived(self.key, (), self._num_bytes, took_s, took_s)
            )
            return
        assert self._end is not None
        assert self.lease is not None
        assert self.peer is not None
        if self._block_ids and not self.lease.covers(self._last_end_s):
            return  # the proof is on its way, or `renew_at_s` requests it
        self.state = ReceiveState.RECEIVED
        out.send(self.peer, Done(self.key))
        out.reports.append(
            KVReceived(
                self.key,
                self._end.tokens,
                self._num_bytes,
                self._last_end_s - min(self._posted_s) if self._posted_s else 0.0,
                self._exposed_s(),
                self._end.num_cached_tokens,
            )
        )

    def _exposed_s(self) -> float:
        """Return the time from the last announcement to the last end of a read.

        The time of waiting for blocks to read into does not count.
        """
        if not self._posted_s:
            return 0.0
        first_s = min(self._posted_s)
        last_s = max(self._posted_s)
        end_arrived_s = self._end_arrived_s
        start_s = last_s if last_s <= end_arrived_s else max(first_s, end_arrived_s)
        return max(0.0, self._last_end_s - start_s)

    def _fail(self, failure: Failure, out: Effects) -> None:
        self.failure = failure
        self._since_s = out.now_s
        self.state = ReceiveState.DRAINING
        if not self._outstanding:
            self._finish(out)
            return
        if self._is_prefix:
            out.reports.append(ReceiveBroken(self.key))
        for ticket, (rank, _) in self._outstanding.items():
            out.command(rank, CancelRead(ticket))

    def _finish(self, out: Effects) -> None:
        assert self.failure is not None
        self.state = ReceiveState.ENDED
        quarantined = tuple(
            sorted({b for local in self.quarantined.values() for b in local})
        )
        if self.peer is not None:
            out.send(self.peer, Declined(self.key, self.failure))
        out.reports.append(ReceiveEnded(self.key, self.failure, quarantined))

    def _why(self, event: Withdrawn | Abandon | Broken | TimeUp) -> Failure:
        if not isinstance(event, TimeUp):
            return event.failure
        if self.source is None:
            text = "a tier kept a prompt waiting too long"
            return TransferError(text, code=TIER_TIMEOUT).to_failure()
        text = f"node {self.source} kept a handoff waiting too long"
        return TransferError(text, code="transfer_timeout").to_failure()

    def _out_of_place(self, event: ReceiveEvent) -> InvariantBroken:
        return InvariantBroken(
            f"{self.key} is {self.state.name}, but {type(event).__name__} came"
        )


def _wrong(text: str) -> Failure:
    return TransferError(text).to_failure()


def _unreadable(
    block_range: BlockRange, source: NodeInfo, edge: ShardMapping
) -> str | None:
    """Return why the blocks of a block range cannot be read from the node that announced it."""
    if not all(0 <= block < source.num_blocks for block in block_range.block_ids):
        return "a block range names blocks that the source does not have"
    if (
        block_range.checksums
        and len(block_range.checksums) != len(source.ranks) * edge.num_slices
    ):
        return "a block range has checksums of slices other than those that are read"
    return None
