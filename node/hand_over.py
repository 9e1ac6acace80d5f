"""What a node that drains lets others take of its cache before it leaves.

It names its blocks to a router, those that were used last first, and the router asks other nodes
to read them. Blocks that sequences add until they end are named after them.
"""

from collections import deque
from collections.abc import Iterator
from itertools import islice

from baton.node.scheduling.block_pool import BlockPool
from baton.node.scheduling.plan import Origin
from baton.node.scheduling.tiers import Tiers
from baton.protocol.blocks import BlockHash, pack_hashes
from baton.protocol.messages import HandedOver, HandOver, Load

MAX_BLOCKS = 64  # in one message, which one node reads
MAX_SHARE = 1 / 16  # of the pool, in one message
MAX_UNANSWERED = 8  # messages
MAX_POOLS = 4  # of blocks are named in all, those of tiers included
UNKNOWN_IDLE_S = 1e9  # of a block in a tier, which takes the place of no other


class CacheHandOver:
    def __init__(self, pool: BlockPool, tiers: Tiers) -> None:
        self._pool = pool
        self._tiers = tiers
        self._ends_s = 0.0
        self._router: Origin | None = None
        self._left: deque[tuple[BlockHash, float]] = deque()
        self._named: set[BlockHash] = set()
        self._unanswered: set[int] = set()
        self._next_number = 0
        self._was_idle = False

    def begin(self, now_s: float, timeout_s: float) -> None:
        """Choose a router that watches this cache. Without one, nothing is handed over."""
        self._ends_s = now_s + timeout_s
        if timeout_s:
            self._router = min(self._pool.cache.journal.origins, default=None)
        self._refill()

    def messages(self, now_s: float, load: Load) -> Iterator[tuple[Origin, HandOver]]:
        """Yield what to send now. A node whose last sequence has ended names what is new."""
        is_idle = not (load.num_running or load.num_waiting)
        if is_idle and not self._was_idle:
            self._was_idle = True
            self._refill()
        size = max(1, min(MAX_BLOCKS, int(self._pool.num_blocks * MAX_SHARE)))
        timeout_s = self._ends_s - now_s
        if self._router is None or timeout_s <= 0:
            return
        while self._left and len(self._unanswered) < MAX_UNANSWERED:
            part = [self._left.popleft() for _ in range(min(size, len(self._left)))]
            hashes = pack_hashes(block_hash for block_hash, _ in part)
            idle_s = max(seconds for _, seconds in part)
            self._next_number += 1
            self._unanswered.add(self._next_number)
            yield self._router, HandOver(self._next_number, hashes, idle_s, timeout_s)

    def answered(self, message: HandedOver) -> None:
        self._unanswered.discard(message.number)

    def lost(self, origin: Origin) -> None:
        """Hand nothing more over if that router did it."""
        if origin == self._router:
            self._router = None

    def is_over(self, now_s: float) -> bool:
        """Return whether the node need not wait for it any longer."""
        if self._router is None or now_s >= self._ends_s:
            return True
        return self._was_idle and not (self._left or self._unanswered)

    def _refill(self) -> None:
        if self._router is None:
            return
        new: dict[BlockHash, float] = {}
        for block_hash, idle_s in islice(
            self._held(), MAX_POOLS * self._pool.num_blocks
        ):
            if block_hash not in self._named:
                new.setdefault(block_hash, idle_s)
        self._named.update(new)
        self._left.extendleft(reversed(new.items()))

    def _held(self) -> Iterator[tuple[BlockHash, float]]:
        yield from self._pool.cache.hottest()
        for tier in self._tiers.by_name.values():
            for block_hash in tier.hottest():
                yield block_hash, UNKNOWN_IDLE_S
