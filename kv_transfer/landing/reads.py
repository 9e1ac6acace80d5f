"""The reads of one landing: which blocks of a span go where, and how each read ended.

A landing machine holds it and decides when to post. Only blocks that decode lacks are read, once
over every edge. A local block is free again when all of its reads have ended and are quiet. If that
is not certain for one of the reads, the block is quarantined.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from baton.kv_transfer.edges import Edge
from baton.kv_transfer.interfaces import PeerRank, Read, ReadEnded
from baton.protocol.ids import Epoch
from baton.protocol.messages import Span


@dataclass(slots=True)
class SpanReads:
    """`num_posted` counts, by edge, the spans that were posted or need no read."""

    first_block: int
    block_ids: tuple[int, ...]
    num_posted: list[int] = field(default_factory=list)  # empty until the edges are known
    # The local rank and its blocks, by the read's ticket.
    outstanding: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    quarantined: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by ticket
    posted_s: list[float] = field(default_factory=list)
    last_end_s: float = 0.0
    num_bytes: int = 0

    def post(
        self, number: int, edge: Edge, span: Span, peer: Epoch, take_ticket: Callable[[], int]
    ) -> Read | None:
        """Return the read of the blocks of `span` that are missing here; None if none is missing.

        `number` is the place of the edge among the edges of the peer.
        """
        self.num_posted[number] += 1
        skip = max(0, self.first_block - span.first_block)
        remote = span.block_ids[skip:]
        if not remote:
            return None
        start = span.first_block + skip - self.first_block
        local = self.block_ids[start : start + len(remote)]
        ticket = take_ticket()
        self.outstanding[ticket] = (edge.target, local)
        checksums = span.checksums[edge.sums_row][skip:] if span.checksums else ()
        owner = PeerRank(peer, edge.source)
        return Read(ticket, owner, remote, local, span.generations[skip:], checksums)

    def ended(self, event: ReadEnded) -> None:
        _, local = self.outstanding.pop(event.ticket)
        if not event.quiet:
            self.quarantined[event.ticket] = local
        if event.failure is None:
            self.posted_s.append(event.posted_s)
            self.last_end_s = max(self.last_end_s, event.ended_s)
            self.num_bytes += event.num_bytes

    def give_up(self) -> None:
        """Quarantine the blocks of every read that has not ended, because it may still write."""
        for ticket, (_, local) in self.outstanding.items():
            self.quarantined[ticket] = local
        self.outstanding.clear()

    def have_all(self, num_spans: int) -> bool:
        if not self.num_posted:
            return num_spans == 0
        return not self.outstanding and all(posted == num_spans for posted in self.num_posted)

    def transfer_s(self) -> float:
        return self.last_end_s - min(self.posted_s) if self.posted_s else 0.0

    def exposed_s(self, end_arrived_s: float) -> float:
        """Return the time from the last announcement to the last end of a read.

        The time of waiting for blocks to land in does not count.
        """
        if not self.posted_s:
            return 0.0
        first_s, last_s = min(self.posted_s), max(self.posted_s)
        start_s = last_s if last_s <= end_arrived_s else max(first_s, end_arrived_s)
        return max(0.0, self.last_end_s - start_s)
