"""Prefixes that one node has cached and another one reads instead of computing them.

A read is a handoff of blocks that were computed long ago, so it goes through the same machines. It
is worth its while if reading takes less time than computing, by what both have taken lately.
"""

from dataclasses import dataclass

from baton.kv_transfer.interfaces import Offer, PrefixWanted, RefusePrefix
from baton.node.scheduling.block_pool import BlockPool
from baton.node.scheduling.outputs import Outputs
from baton.protocol.blocks import MIN_READ_TOKENS, unpack_hashes
from baton.protocol.errors import TransferError
from baton.protocol.ids import MAX_KEYS, Key, NodeId
from baton.protocol.messages import BlockRange, End

NO_PREFIX = "no_prefix"  # the failure of a read of what the source does not have
MAX_READ_BLOCKS = MAX_KEYS  # whose hashes one message can hold
# A prompt waits for its prefix as long as computing that would take, but at least so long, because
# other processes of a busy host must answer.
MIN_TIMEOUT_S = 0.02
FIRST_TIMEOUT_S = 1.0  # while it is not known how long computing takes
WEIGHT = 0.2  # of the newest measurement
FORGET_S = 30.0  # a source that was slow or failed is tried again after this time
# All prefixes together that are being read may hold this share of a pool.
MAX_LENT_SHARE = 0.25


class PrefixOffers:
    """The cached blocks that other nodes are reading. Each has one more reference until then."""

    def __init__(self, pool: BlockPool, outputs: Outputs) -> None:
        self._pool = pool
        self._outputs = outputs
        self._lent: dict[Key, list[int]] = {}

    def wanted(self, report: PrefixWanted) -> None:
        """Offer the blocks of the longest cached prefix, or say that there is none."""
        pool = self._pool
        key = report.key
        blocks = pool.match(unpack_hashes(report.hashes))
        num_lent = sum(map(len, self._lent.values())) + len(blocks)
        if len(blocks) <= report.num_held_blocks or num_lent > MAX_LENT_SHARE * pool.num_blocks:
            pool.release(blocks)
            failure = TransferError("this node has no more of the prefix to lend", code=NO_PREFIX)
            refusal = RefusePrefix(key, report.reader, failure.to_failure())
            self._outputs.to_connector.append(refusal)
            return
        self._lent[key] = blocks
        num_tokens = len(blocks) * pool.block_size
        self._outputs.to_connector += [
            Offer(key, report.reader, num_tokens, len(blocks)),
            BlockRange(key, 0, tuple(blocks), pool.generations_of(blocks)),
            End(key, (), num_tokens),
        ]

    def released(self, key: Key) -> None:
        """Take back blocks that nobody reads any more."""
        self._pool.release(self._lent.pop(key))


@dataclass(slots=True)
class _Pace:
    seconds: float  # a token
    at_s: float

    def learn(self, now_s: float, seconds: float) -> None:
        self.seconds += WEIGHT * (seconds - self.seconds)
        self.at_s = now_s


class PrefixCosts:
    """How long computing a token takes here, and reading one from each source."""

    def __init__(self) -> None:
        self._compute: _Pace | None = None
        self._reads: dict[NodeId, _Pace] = {}

    def computed(self, now_s: float, num_tokens: int, seconds: float) -> None:
        """Learn from a step. Small ones, which mostly cost their launch, do not count."""
        if num_tokens < MIN_READ_TOKENS:
            return
        if self._compute is None:
            self._compute = _Pace(seconds / num_tokens, now_s)
        self._compute.learn(now_s, seconds / num_tokens)

    def read(self, now_s: float, source: NodeId, num_tokens: int, seconds: float) -> None:
        """Learn from a read, or from one that was given up after so many seconds."""
        pace = self._reads.setdefault(source, _Pace(seconds / num_tokens, now_s))
        pace.learn(now_s, seconds / num_tokens)

    def are_worth_it(self, num_tokens: int) -> bool:
        """Return whether so many tokens may be read at all."""
        return num_tokens >= MIN_READ_TOKENS

    def timeout_s(self, now_s: float, source: NodeId, num_tokens: int) -> float | None:
        """Return how long to wait for so many tokens; None if they should be computed."""
        if not self.are_worth_it(num_tokens):
            return None
        if self._compute is None:
            return FIRST_TIMEOUT_S
        pace = self._reads.get(source)
        if pace is not None and now_s - pace.at_s > FORGET_S:
            del self._reads[source]
        elif pace is not None and pace.seconds > self._compute.seconds:
            return None
        return max(MIN_TIMEOUT_S, num_tokens * self._compute.seconds)
