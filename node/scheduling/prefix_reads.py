"""Prefixes that one node has cached and another one reads instead of computing them.

A read is a handoff of blocks that were computed long ago, so it goes through the same machines. It
is worth its while if reading takes less time than computing, by what both have taken lately. Blocks
that a tier alone has are loaded into the pool before they are lent.
"""

from dataclasses import dataclass

from baton.kv_transfer.interfaces import (
    ConnectorReport,
    KVReceived,
    Offer,
    OfferBroken,
    PrefixWanted,
    ReceiveBroken,
    ReceiveEnded,
    RefusePrefix,
    Released,
    TierPart,
)
from baton.node.scheduling.block_pool import BlockPool
from baton.node.scheduling.plan import Outputs
from baton.node.scheduling.tiers import Tiers
from baton.protocol.blocks import MIN_READ_TOKENS, BlockHash, unpack_hashes
from baton.protocol.errors import TransferError
from baton.protocol.ids import MAX_KEYS, Key, NodeId, RequestId
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
# A tier may take so long to load what another node wants. A prompt that waits for it gives up long
# before that if computing is quicker.
LOAD_TIMEOUT_S = 1.0


@dataclass(slots=True)
class _Unpublished:
    """Blocks that came here without a step, so readers do not see their generations yet."""

    reader: NodeId
    step_id: int | None = None  # that publishes them


@dataclass(slots=True)
class _Load:
    """Blocks of a tier that are read into `landing` to be lent, after those of the pool."""

    wanted: PrefixWanted
    num_known: int  # blocks of the pool
    hashes: list[BlockHash]
    landing: list[int]


class PrefixOffers:
    """The cached blocks that other nodes are reading. Each has one more reference until then."""

    def __init__(self, pool: BlockPool, outputs: Outputs, tiers: Tiers) -> None:
        self._pool = pool
        self._outputs = outputs
        self._tiers = tiers
        self._loads: dict[Key, _Load] = {}  # by the key of the load
        self._lent: dict[Key, list[int]] = {}
        self._unpublished: dict[Key, _Unpublished] = {}  # of those

    def wanted(self, report: PrefixWanted) -> None:
        """Offer the blocks of the longest cached prefix, or say that there is none."""
        if report.key in self._lent:
            return  # the reader asks twice
        pool = self._pool
        hashes = unpack_hashes(report.hashes)
        blocks = pool.match(hashes)
        num_lent = sum(map(len, self._lent.values()))
        room = max(0, int(MAX_LENT_SHARE * pool.num_blocks) - num_lent)
        pool.release(blocks[room:])
        del blocks[room:]
        self._lent[report.key] = blocks
        num_more = min(room - len(blocks), pool.num_free // 2)
        parts = self._tiers.find(hashes[len(blocks) : len(blocks) + num_more])
        num_blocks = len(blocks) + sum(len(part.slots) for part in parts)
        if parts and num_blocks > report.num_held_blocks:
            self._load(report, parts, hashes[len(blocks) : num_blocks])
        else:
            self._lend(report)

    def refuse(self, wanted: PrefixWanted) -> None:
        """Say that this node lends nothing under that key."""
        failure = TransferError(
            "this node has no more of the prefix to lend", code=NO_PREFIX
        )
        refusal = RefusePrefix(wanted.key, wanted.reader, failure.to_failure())
        self._outputs.to_connector.append(refusal)

    def take(self, report: ConnectorReport) -> bool:
        """Handle a report of what is loaded to be lent. Return False if it is of another read."""
        if not isinstance(report, KVReceived | ReceiveBroken | ReceiveEnded):
            return False
        if report.key not in self._loads:
            return False
        if not isinstance(report, ReceiveBroken):  # after which bytes may still land
            self._loaded(self._loads.pop(report.key), report)
        return True

    def _load(
        self, wanted: PrefixWanted, parts: list[TierPart], hashes: list[BlockHash]
    ) -> None:
        key = wanted.key
        # A prompt may come here under the key under which it is lent.
        load_key = Key(RequestId(f"lend {key.request_id}"), key.choice, key.attempt)
        landing = self._pool.allocate(len(hashes))
        self._loads[load_key] = _Load(wanted, len(self._lent[key]), hashes, landing)
        self._lent[key] += landing
        self._tiers.load(load_key, parts, landing, LOAD_TIMEOUT_S)

    def _loaded(self, load: _Load, report: KVReceived | ReceiveEnded) -> None:
        pool = self._pool
        if isinstance(report, KVReceived):
            self._tiers.loaded(report.key)
            pool.store(load.hashes, load.landing)
        else:
            self._tiers.loaded(report.key, report.failure)
            pool.quarantine(report.quarantined)
            pool.release(
                [block for block in load.landing if block not in report.quarantined]
            )
            del self._lent[load.wanted.key][load.num_known :]
        self._lend(load.wanted)

    def _lend(self, wanted: PrefixWanted) -> None:
        """Offer the blocks that are held for a reader, if it lacks some of them."""
        key = wanted.key
        blocks = self._lent[key]
        if len(blocks) <= wanted.num_held_blocks:
            self._pool.release(self._lent.pop(key))
            self.refuse(wanted)
        elif self._pool.are_published(blocks):
            self._offer(key, wanted.reader)
        else:
            self._unpublished[key] = _Unpublished(wanted.reader)

    @property
    def need_step(self) -> bool:
        """Return whether blocks wait for a step, also one that computes nothing."""
        return any(one.step_id is None for one in self._unpublished.values())

    def planned(self, step_id: int) -> None:
        """Note that this step publishes all generations."""
        for waiting in self._unpublished.values():
            if waiting.step_id is None:
                waiting.step_id = step_id

    def settled(self, step_id: int) -> None:
        """Offer the blocks that this step has published."""
        for key, waiting in list(self._unpublished.items()):
            if waiting.step_id is not None and waiting.step_id <= step_id:
                del self._unpublished[key]
                self._offer(key, waiting.reader)

    def _offer(self, key: Key, reader: NodeId) -> None:
        blocks = self._lent[key]
        num_tokens = len(blocks) * self._pool.block_size
        self._outputs.to_connector += [
            Offer(key, reader, num_tokens, len(blocks)),
            BlockRange(key, 0, tuple(blocks), self._pool.generations_of(blocks)),
            End(key, (), num_tokens),
        ]

    def lends(self, key: Key) -> bool:
        return key in self._lent

    def ended(self, report: Released | OfferBroken) -> None:
        """Take back blocks once nobody reads them any more."""
        if isinstance(report, Released):
            self._pool.release(self._lent.pop(report.key))


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

    def read(
        self, now_s: float, source: NodeId, num_tokens: int, seconds: float
    ) -> None:
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
