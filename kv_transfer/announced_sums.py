"""Announcements that wait for the checksums of their blocks, if `transfer.verify_kv` is on.

The offers of a prefill node hold it. Each rank's agent computes the checksums of a span's blocks in
its own pool, piece by piece as decode will read them. The span is sent when all ranks have
answered, and later announcements wait behind it.
"""

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from baton.kv_transfer.effects import Effects
from baton.kv_transfer.interfaces import BlocksSummed, SumBlocks
from baton.protocol.ids import Key
from baton.protocol.messages import End, Span


@dataclass(slots=True)
class _Waiting:
    message: Span | End
    # The rows of checksums from each rank that has answered.
    sums: dict[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)


class AnnouncedSums:
    def __init__(self, num_ranks: int, block_bytes: int) -> None:
        self._num_ranks = num_ranks
        self._block_bytes = block_bytes
        self._tickets = itertools.count(1)
        self._queues: dict[Key, deque[_Waiting]] = {}
        self._asked: dict[int, _Waiting] = {}

    def add(self, message: Span | End, num_pieces: int, out: Effects) -> None:
        """Queue an announcement, and ask all ranks for the checksums if it is a span."""
        waiting = _Waiting(message)
        self._queues.setdefault(message.key, deque()).append(waiting)
        if isinstance(message, Span):
            ticket = next(self._tickets)
            self._asked[ticket] = waiting
            piece_bytes = self._block_bytes // num_pieces
            for rank in range(self._num_ranks):
                out.order(rank, SumBlocks(ticket, message.block_ids, piece_bytes, num_pieces))

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

    def take(self, key: Key) -> Iterator[Span | End]:
        """Yield the announcements that can be sent now, in order."""
        queue = self._queues.get(key)
        while queue:
            message, sums = queue[0].message, queue[0].sums
            if isinstance(message, Span):
                if len(sums) < self._num_ranks:
                    return
                rows = tuple(row for rank in range(self._num_ranks) for row in sums[rank])
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
