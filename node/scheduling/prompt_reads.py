"""Prompts whose first tokens are read, from a tier or another node, instead of computed.

A prompt waits no longer for them than computing them takes. Whatever goes wrong with a read, its
prompt is computed.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items

from baton.kv_transfer.interfaces import (
    TIER_TIMEOUT,
    Abandon,
    BeginReceive,
    FetchPrefix,
    ReceiveEnded,
    TierPart,
)
from baton.node.scheduling.block_pool import BlockPool
from baton.node.scheduling.plan import Outputs
from baton.node.scheduling.prefix_reads import MAX_READ_BLOCKS, PrefixCosts
from baton.node.scheduling.request import PrefixRead, Request, Sequence
from baton.node.scheduling.tiers import FASTEST_FIRST, Tiers
from baton.protocol.blocks import BlockHash, pack_hashes
from baton.protocol.errors import Cancelled, Failure, TransferError
from baton.protocol.ids import Key, NodeId
from baton.protocol.messages import Offered


class PrefixReads:
    def __init__(
        self,
        pool: BlockPool,
        outputs: Outputs,
        tiers: Tiers,
        *,
        repeats_last: bool = False,
    ) -> None:
        self.costs = PrefixCosts()
        self._repeats_last = repeats_last
        self._tiers = tiers
        self._pool = pool
        self._outputs = outputs
        # Blocks that bytes may still reach although their prompts have others by now.
        self._draining: dict[Key, list[int]] = {}

    def begin(self, now_s: float, request: Request, num_held_blocks: int) -> None:
        """Read a prompt's first tokens that this node lacks, where that is quicker.

        Its tiers come first, and then another node that may have more.
        """
        pool = self._pool
        if pool.state_blocks or not pool.caches_prefixes:
            return
        sequence = request.prompt
        hashes = sequence.hash_blocks(pool.block_size, sequence.num_reusable_tokens)
        hashes = hashes[: num_held_blocks + MAX_READ_BLOCKS]
        parts = self._tiers.find(hashes[num_held_blocks:])
        if parts and self._load(now_s, request, num_held_blocks, parts):
            return
        self._fetch(now_s, request, num_held_blocks, hashes[:MAX_READ_BLOCKS])

    def are_likely(self, request: Request) -> bool:
        """Return whether a prompt that has no blocks yet will probably read some."""
        if request.prefix_node is not None:
            return True
        if not self._tiers.by_name:
            return False
        size = self._pool.block_size
        sequence = request.prompt
        hashes = sequence.hash_blocks(size, sequence.num_reusable_tokens)
        num_known = len(self._pool.cache.lookup(hashes)) * size
        return self.costs.are_worth_it(self.num_held_tokens(sequence, num_known))

    def num_held_tokens(self, sequence: Sequence, num_known_tokens: int) -> int:
        """Return how many tokens after those of the pool the tiers hold."""
        size = self._pool.block_size
        hashes = sequence.hash_blocks(size, sequence.num_reusable_tokens)
        parts = self._tiers.find(hashes[num_known_tokens // size :])
        return sum(len(part.slots) for part in parts) * size

    def _load(
        self,
        now_s: float,
        request: Request,
        num_held_blocks: int,
        parts: list[TierPart],
    ) -> bool:
        """Read blocks from tiers. Return False if they should be computed."""
        slowest = max((part.tier for part in parts), key=FASTEST_FIRST.index)
        source = NodeId(slowest)
        num_blocks = sum(len(part.slots) for part in parts)
        num_tokens = num_blocks * self._pool.block_size
        timeout_s = self.costs.timeout_s(now_s, source, num_tokens)
        if timeout_s is None:
            return False
        end = num_held_blocks + num_blocks
        landing = request.prompt.block_table[num_held_blocks:end]
        request.read = PrefixRead(
            source, num_held_blocks, end, now_s, landing, is_of_tier=True
        )
        self._tiers.load(request.prompt.key, parts, landing, timeout_s)
        return True

    def _fetch(
        self,
        now_s: float,
        request: Request,
        num_held_blocks: int,
        hashes: Items[BlockHash],
    ) -> None:
        """Ask another node for blocks, if it may have them."""
        source = request.prefix_node
        if source is None:
            return
        num_lacking = (len(hashes) - num_held_blocks) * self._pool.block_size
        timeout_s = self.costs.timeout_s(now_s, source, num_lacking)
        if timeout_s is None:
            return
        request.read = PrefixRead(source, num_held_blocks, len(hashes), now_s)
        packed = pack_hashes(hashes)
        key = request.prompt.key
        self._outputs.to_connector.append(
            FetchPrefix(key, source, packed, num_held_blocks, timeout_s)
        )

    def offered(self, request: Request, offered: Offered) -> None:
        """Say where the blocks of a source go."""
        read = request.read
        if request.is_ended or read is None:
            return  # its Abandon is on its way
        if not read.num_held_blocks < offered.num_blocks <= read.num_wanted_blocks:
            error = TransferError(
                "the number of blocks offered is not the number asked for"
            )
            self._outputs.to_connector.append(Abandon(offered.key, error.to_failure()))
            return
        table = request.prompt.block_table
        read.landing = table[read.num_held_blocks : offered.num_blocks]
        begin = BeginReceive(offered.key, read.num_held_blocks, tuple(read.landing))
        self._outputs.to_connector.append(begin)

    def received(self, now_s: float, request: Request) -> None:
        """Let a prompt go on after the tokens that have been read."""
        read = request.read
        request.read = None
        assert read is not None
        if read.is_of_tier:
            self._tiers.loaded(request.prompt.key)
        if request.is_ended:
            return
        size = self._pool.block_size
        num_held_blocks = read.num_held_blocks + len(read.landing)
        num_tokens = len(read.landing) * size
        took_s = now_s - read.began_s
        position = num_held_blocks * size
        request.prompt.start_at(position, repeats_last=self._repeats_last)
        request.num_cached_tokens = request.prompt.num_computed_tokens
        request.num_read_tokens += num_tokens
        request.prefix_read_s += took_s
        self.costs.read(now_s, read.source, num_tokens, took_s)
        self._pool.counts.read_from(read.source, num_tokens)
        if read.is_of_tier:
            self.begin(now_s, request, num_held_blocks)

    def broken(self, now_s: float, request: Request) -> None:
        """Compute into other blocks at once, while bytes may still land in those of the read."""
        read = request.read
        if read is None or request.is_ended or self._pool.num_free < len(read.landing):
            return  # until the read has ended
        num_tokens = len(read.landing) * self._pool.block_size
        self.costs.read(now_s, read.source, num_tokens, 2 * (now_s - read.began_s))
        self._draining[request.prompt.key] = read.landing
        self._replace(request.prompt, read.landing)
        self._give_up(request)

    def drained(self, report: ReceiveEnded) -> bool:
        """Take back the blocks of a broken read whose prompt goes on in others, if it is one."""
        drained = self._draining.pop(report.key, None)
        if drained is None:
            return False
        self._tiers.loaded(report.key, report.failure)
        self._pool.release(
            [block for block in drained if block not in report.quarantined]
        )
        return True

    def ended(self, now_s: float, request: Request, report: ReceiveEnded) -> bool:
        """Let a prompt be computed. Return False if it lacks blocks, because some are lost."""
        read = request.read
        assert read is not None
        self._tiers.loaded(report.key, report.failure)
        if report.failure.code in ("transfer_timeout", TIER_TIMEOUT):
            num_tokens = read.num_wanted_blocks * self._pool.block_size
            self.costs.read(now_s, read.source, num_tokens, 2 * (now_s - read.began_s))
        if request.is_ended:
            request.read = None
        else:
            self._give_up(request)
        if not request.is_ended and len(report.quarantined) <= self._pool.num_free:
            self._replace(request.prompt, report.quarantined)
            return True
        request.prompt.forget_blocks(report.quarantined)
        return not report.quarantined

    def abandon(self, request: Request, why: Failure | None) -> None:
        """End the read of a prompt that has ended."""
        failure = why or Cancelled("the prompt is not wanted any more").to_failure()
        self._outputs.to_connector.append(Abandon(request.prompt.key, failure))

    def _replace(self, sequence: Sequence, blocks: Iterable[int]) -> None:
        """Give a sequence fresh blocks instead of some of its own."""
        gone = set(blocks)
        fresh = iter(self._pool.allocate(len(gone)))
        sequence.block_table = [
            next(fresh) if block in gone else block for block in sequence.block_table
        ]

    def _give_up(self, request: Request) -> None:
        request.read = None
        self._pool.counts.failed_prefix_reads += 1
