"""Cached blocks that this node reads from another one before a prompt needs them.

They are read one message after the other, into blocks that are empty or hold what was used longer
ago, and a read is given up when a request lacks blocks.
"""

from collections import deque
from dataclasses import dataclass, field

from baton.kv_transfer.interfaces import (
    Abandon,
    BeginReceive,
    ConnectorReport,
    FetchPrefix,
    KVReceived,
    ReceiveBroken,
    ReceiveEnded,
)
from baton.node.scheduling.block_pool import BlockPool
from baton.node.scheduling.plan import NO_ROUTER, Origin, Outputs
from baton.protocol.blocks import BlockHash, pack_hashes, unpack_hashes
from baton.protocol.errors import Failure, Overloaded
from baton.protocol.messages import Offered, Prefetch, Prefetched

MAX_LANDING_SHARE = 1 / 8  # of a pool's blocks
MAX_WAITING = 256
# While a read is being given up, a sequence waits so long for its blocks, and then loses others.
GIVE_WAY_S = 1.0


@dataclass(slots=True)
class _Read:
    origin: Origin
    message: Prefetch
    ends_s: float
    hashes: list[BlockHash] = field(default_factory=list)  # that are asked for
    # Read into; empty until they are offered.
    landing: list[int] = field(default_factory=list)
    is_given_up: bool = False


class Prefetches:
    def __init__(self, pool: BlockPool, outputs: Outputs) -> None:
        self._pool = pool
        self._outputs = outputs
        self._waiting: deque[_Read] = deque()
        self._reading: _Read | None = None
        self._yields_until_s = 0.0
        self._now_s = 0.0

    def add(self, now_s: float, origin: Origin, message: Prefetch) -> None:
        read = _Read(origin, message, now_s + message.timeout_s)
        is_known = (
            self._reading is not None and self._reading.message.key == message.key
        )
        if (
            is_known
            or len(self._waiting) >= MAX_WAITING
            or not self._pool.caches_prefixes
        ):
            self._answer(read, 0)
        else:
            self._waiting.append(read)
        self.step(now_s)

    def step(self, now_s: float) -> None:
        """Begin the next read if none is under way."""
        self._now_s = now_s
        while self._waiting and self._reading is None:
            self._begin(now_s, self._waiting.popleft())

    def take(self, now_s: float, report: ConnectorReport) -> bool:
        """Handle a report of the read that is under way. Return False if it is of another."""
        read = self._reading
        if read is None or getattr(report, "key", None) != read.message.key:
            return False
        match report:
            case Offered(num_blocks=num_blocks):
                self._offered(read, num_blocks)
            case KVReceived():
                num_blocks = len(read.landing)
                self._pool.store(read.hashes[:num_blocks], read.landing)
                self._pool.counts.prefetched_tokens += (
                    num_blocks * self._pool.block_size
                )
                self._end(now_s, read, num_blocks)
            case ReceiveBroken():
                pass  # until it has ended
            case ReceiveEnded(quarantined=quarantined):
                self._pool.quarantine(quarantined)
                read.landing = [
                    block for block in read.landing if block not in quarantined
                ]
                self._end(now_s, read, 0)
            case _:
                return False
        return True

    def give_way(self) -> bool:
        """Give up what is being read. Return whether its blocks will probably be free soon."""
        read = self._reading
        if read is None or not read.landing:
            return False
        if not read.is_given_up:
            self._yields_until_s = self._now_s + GIVE_WAY_S
            self._give_up(read, "the node needs its blocks for a request")
        return self._now_s < self._yields_until_s

    def clear(self) -> None:
        """Read nothing more of what was asked for until now."""
        while self._waiting:
            self._answer(self._waiting.popleft(), 0)
        if self._reading is not None:
            self._give_up(self._reading, "the prefix cache was reset")

    def forget(self, origin: Origin) -> None:
        """Answer a router no more."""
        self._waiting = deque(read for read in self._waiting if read.origin != origin)
        if self._reading is not None and self._reading.origin == origin:
            self._reading.origin = NO_ROUTER

    def landing(self) -> list[int]:
        """Return the blocks into which is read, each of which has a reference for it."""
        return [] if self._reading is None else self._reading.landing

    def _begin(self, now_s: float, read: _Read) -> None:
        message = read.message
        cache = self._pool.cache
        limit = max(1, int(self._pool.num_blocks * MAX_LANDING_SHARE))
        limit = self._pool.num_takeable(message.idle_s, limit)
        lacking = [one for one in unpack_hashes(message.hashes) if not cache.has(one)]
        read.hashes = lacking[:limit]
        timeout_s = read.ends_s - now_s
        if not read.hashes or timeout_s <= 0:
            self._answer(read, 0)
            return
        self._reading = read
        packed = pack_hashes(read.hashes)
        fetch = FetchPrefix(message.key, message.source, packed, 0, timeout_s)
        self._outputs.to_connector.append(fetch)

    def _offered(self, read: _Read, num_blocks: int) -> None:
        if read.is_given_up:
            return
        pool = self._pool
        is_possible = 0 < num_blocks <= len(read.hashes)
        if (
            not is_possible
            or pool.num_takeable(read.message.idle_s, num_blocks) < num_blocks
        ):
            self._give_up(read, "the node has no blocks for them")
            return
        read.landing = pool.allocate(num_blocks)
        begin = BeginReceive(read.message.key, 0, tuple(read.landing))
        self._outputs.to_connector.append(begin)

    def _give_up(self, read: _Read, why: str) -> None:
        if not read.is_given_up:
            read.is_given_up = True
            failure: Failure = Overloaded(why, code="not_prefetched").to_failure()
            self._outputs.to_connector.append(Abandon(read.message.key, failure))

    def _end(self, now_s: float, read: _Read, num_blocks: int) -> None:
        self._pool.release(read.landing)
        self._reading = None
        self._answer(read, num_blocks)
        self.step(now_s)

    def _answer(self, read: _Read, num_blocks: int) -> None:
        self._outputs.send(read.origin, Prefetched(read.message.key, num_blocks))
