"""One handoff as decode takes it: announced spans are read into its blocks until all are there.

The connector feeds it scheduler events, prefill's messages and the ends of reads. It reports Landed
only with every block read on every rank, End, and proof that the blocks were held while they were
read. Whatever goes wrong, it drains: local blocks are given back when no read can write to them any
more, and named as quarantined where nobody knows.
"""

from collections.abc import Callable

from baton.kv_transfer.effects import Effects, PeerName
from baton.kv_transfer.interfaces import (
    Abandon,
    CancelRead,
    Expect,
    Land,
    Landed,
    LandingEnded,
    Offered,
    PeerUp,
    ReadEnded,
)
from baton.kv_transfer.landing_rules import (
    DRAIN_S,
    STALL_S,
    TABLE,
    WAIT_S,
    Broken,
    LandingState,
    TimeUp,
)
from baton.kv_transfer.lease import ReaderLease
from baton.kv_transfer.peers import Peer, RankLink
from baton.kv_transfer.reads import SpanReads
from baton.protocol.errors import Failure, InvariantBroken, TransferError
from baton.protocol.ids import Key
from baton.protocol.messages import Declined, Done, End, Landing, Span, Started, Withdrawn

TakeTicket = Callable[[Key], int]
LandingEvent = (
    Started | Span | End | Withdrawn | Land | Abandon | Broken | PeerUp | ReadEnded | TimeUp
)


class LandingHandoff:
    def __init__(
        self, now_s: float, expect: Expect, num_ranks: int, max_blocks: int, take_ticket: TakeTicket
    ) -> None:
        self.key = expect.key
        self.prefill_node = expect.prefill_node
        self.peer: PeerName | None = None
        self.state = LandingState.EXPECTED
        self.lease: ReaderLease | None = None
        self.failure: Failure | None = None
        self._num_ranks = num_ranks
        self._max_blocks = max_blocks
        self._take_ticket = take_ticket
        self._since_s = now_s
        self._progress_s = now_s
        self._started: Started | None = None
        self._spans: list[Span] = []
        self._num_announced_blocks = 0
        self._end: End | None = None
        self._end_arrived_s = now_s
        self._reads: SpanReads | None = None

    @property
    def deadline_s(self) -> float:
        match self.state:
            case LandingState.DRAINING:
                return self._since_s + DRAIN_S
            case LandingState.OFFERED | LandingState.LANDING:
                assert self.lease is not None
                limit_s = min(self._since_s + WAIT_S, self.lease.limit_s)
                if self._reads is not None and not self._reads.have_all(len(self._spans)):
                    limit_s = min(limit_s, self._progress_s + STALL_S)
                return limit_s
            case _:
                return self._since_s + WAIT_S

    @property
    def renew_at_s(self) -> float | None:
        """When the next renewal is due; at once if only the proof is missing."""
        if self.state not in (LandingState.OFFERED, LandingState.LANDING):
            return None
        assert self.lease is not None
        if self._has_all() and self._reads is not None and self._reads.posted_s:
            end_s = self._reads.last_end_s
            if not self.lease.covers(end_s) and not self.lease.may_cover(end_s):
                return end_s
        return self.lease.renew_at_s

    @property
    def next_s(self) -> float:
        """The earlier of the two: when this landing wants attention if nothing comes."""
        deadline_s, renew_at_s = self.deadline_s, self.renew_at_s
        return deadline_s if renew_at_s is None else min(deadline_s, renew_at_s)

    def on(self, now_s: float, event: LandingEvent, peer: Peer | None, out: Effects) -> None:
        """`peer` is the process that offered it; before that, the one that sent `event`."""
        before = self.state
        match self.state:
            case LandingState.EXPECTED:
                self._on_expected(now_s, event, peer, out)
            case LandingState.OFFERED:
                self._on_offered(now_s, event, peer, out)
            case LandingState.LANDING:
                self._on_landing(now_s, event, peer, out)
            case LandingState.DRAINING:
                self._on_draining(event, out)
            case _:
                raise InvariantBroken(f"{self.key} had ended before {type(event).__name__}")
        if self.state is LandingState.LANDING:
            self._read(now_s, peer, out)
            self._land_if_complete(out)
        TABLE.check(before, event, self.state)

    def renewed(self, now_s: float) -> None:
        """A renewal was sent."""
        assert self.lease is not None
        self.lease.renewed(now_s)

    def reads(self, ticket: int) -> bool:
        """Has that read not ended yet, as far as this landing knows?"""
        return self._reads is not None and ticket in self._reads.outstanding

    # --- inside: one method per state ----------------------------------------------------------

    def _on_expected(
        self, now_s: float, event: LandingEvent, peer: Peer | None, out: Effects
    ) -> None:
        match event:
            case Started(num_blocks=num_blocks, lease_s=lease_s):
                assert peer is not None
                self.peer = peer.name
                self._started = event
                self.lease = ReaderLease(now_s, lease_s)
                self._since_s = now_s
                self.state = LandingState.OFFERED
                if not 0 < num_blocks <= self._max_blocks or not 0 < lease_s <= WAIT_S:
                    self._fail(now_s, _wrong("Started names impossible sizes"), out)
                else:
                    out.reports.append(Offered(self.key, event.num_tokens, num_blocks))
            case Land() | PeerUp():
                pass  # cannot be: the table refuses it
            case _:
                if peer is not None:
                    self.peer = peer.name
                self._fail(now_s, self._why(event), out)

    def _on_offered(
        self, now_s: float, event: LandingEvent, peer: Peer | None, out: Effects
    ) -> None:
        match event:
            case Land():
                self._begin(now_s, event, out)
            case Started() | Span() | End():
                self._hear(now_s, event, out)
            case PeerUp():
                pass
            case _:
                self._fail(now_s, self._why(event), out)

    def _on_landing(
        self, now_s: float, event: LandingEvent, peer: Peer | None, out: Effects
    ) -> None:
        match event:
            case Started() | Span() | End():
                self._hear(now_s, event, out)
            case Land():
                raise InvariantBroken(f"{self.key} was given blocks twice")
            case PeerUp():
                self._progress_s = now_s
            case ReadEnded(failure=failure):
                assert self._reads is not None
                self._progress_s = now_s
                self._reads.ended(event)
                if failure is not None or not event.quiet:
                    self._fail(now_s, failure or _wrong("a read ended unquiet"), out)
            case _:
                self._fail(now_s, self._why(event), out)

    def _on_draining(self, event: LandingEvent, out: Effects) -> None:
        assert self._reads is not None
        match event:
            case ReadEnded():
                self._reads.ended(event)
                if not self._reads.outstanding:
                    self._finish(out)
            case TimeUp():
                self._reads.give_up()
                self._finish(out)
            case _:
                pass

    # --- inside: what they do ------------------------------------------------------------------

    def _hear(self, now_s: float, message: Started | Span | End, out: Effects) -> None:
        assert self._started is not None
        assert self.lease is not None
        match message:
            case Started():
                if not self.lease.confirmed():
                    self._fail(now_s, _wrong("it was offered twice"), out)
            case Span():
                problem = self._problem_of(message)
                if problem is not None:
                    self._fail(now_s, _wrong(problem), out)
                    return
                if self._reads is None or self._reads.have_all(len(self._spans)):
                    self._progress_s = now_s
                self._spans.append(message)
                self._num_announced_blocks += len(message.block_ids)
            case End(num_spans=num_spans):
                is_whole = self._num_announced_blocks == self._started.num_blocks
                if self._end is not None or num_spans != len(self._spans) or not is_whole:
                    self._fail(now_s, _wrong("End came without all spans"), out)
                self._end, self._end_arrived_s = message, now_s

    def _problem_of(self, span: Span) -> str | None:
        assert self._started is not None
        if span.index != len(self._spans) or span.first_block != self._num_announced_blocks:
            return "a span does not follow the last one"
        num_blocks = len(span.block_ids)
        if num_blocks == 0 or num_blocks != len(span.generations):
            return "a span is malformed"
        if span.first_block + num_blocks > self._started.num_blocks:
            return "a span has more blocks than were offered"
        return None

    def _begin(self, now_s: float, land: Land, out: Effects) -> None:
        assert self._started is not None
        assert self.lease is not None
        assert self.peer is not None
        if land.first_block + len(land.block_ids) != self._started.num_blocks:
            text = f"prefill holds {self._started.num_blocks} blocks, decode wants another number"
            self._fail(now_s, _wrong(text), out)
            return
        self._reads = SpanReads(land.first_block, land.block_ids, [0] * self._num_ranks)
        self.state = LandingState.LANDING
        self._since_s = self._progress_s = now_s
        self.lease.renewed(now_s)
        out.tell(self.peer, Landing(self.key, land.first_block))

    def _read(self, now_s: float, peer: Peer | None, out: Effects) -> None:
        """Post what was announced and is missing, on every rank that is connected."""
        assert self._reads is not None
        assert peer is not None
        for rank, num_posted in enumerate(self._reads.num_posted):
            if peer.info is None or peer.ranks[rank] is not RankLink.UP:
                continue
            for span in self._spans[num_posted:]:
                if not all(0 <= block < peer.info.num_blocks for block in span.block_ids):
                    self._fail(now_s, _wrong("a span names blocks that prefill has not"), out)
                    return
                read = self._reads.post(rank, span, peer.epoch, self._next_ticket)
                if read is not None:
                    out.order(rank, read)

    def _next_ticket(self) -> int:
        return self._take_ticket(self.key)

    def _has_all(self) -> bool:
        if self._end is None or self._reads is None:
            return False
        return not self._reads.block_ids or self._reads.have_all(len(self._spans))

    def _land_if_complete(self, out: Effects) -> None:
        if self.state is not LandingState.LANDING or not self._has_all():
            return
        assert self._reads is not None
        assert self._end is not None
        assert self.lease is not None
        assert self.peer is not None
        if self._reads.block_ids and not self.lease.covers(self._reads.last_end_s):
            return  # the proof is on its way, or `renew_at_s` asks for it
        self.state = LandingState.LANDED
        out.tell(self.peer, Done(self.key))
        out.reports.append(
            Landed(
                self.key,
                self._end.tokens,
                self._reads.num_bytes,
                self._reads.transfer_s(),
                self._reads.exposed_s(self._end_arrived_s),
            )
        )

    def _fail(self, now_s: float, failure: Failure, out: Effects) -> None:
        self.failure = failure
        self._since_s = now_s
        self.state = LandingState.DRAINING
        if self._reads is None or not self._reads.outstanding:
            self._finish(out)
            return
        for ticket, (rank, _) in self._reads.outstanding.items():
            out.order(rank, CancelRead(ticket))

    def _finish(self, out: Effects) -> None:
        assert self.failure is not None
        self.state = LandingState.ENDED
        quarantined = () if self._reads is None else tuple(sorted(self._reads.quarantined))
        if self.peer is not None:
            out.tell(self.peer, Declined(self.key, self.failure))
        out.reports.append(LandingEnded(self.key, self.failure, quarantined))

    def _why(self, event: LandingEvent) -> Failure:
        match event:
            case Withdrawn(failure=failure) | Abandon(failure=failure) | Broken(failure=failure):
                return failure
            case TimeUp():
                text = f"prefill node {self.prefill_node} kept a handoff waiting too long"
                return TransferError(text, code="transfer_timeout").to_failure()
            case _:
                return _wrong(f"{type(event).__name__} is out of place")


def _wrong(text: str) -> Failure:
    return TransferError(text).to_failure()
