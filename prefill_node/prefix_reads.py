"""Prompts whose first tokens are read from another node instead of computed.

A prompt waits no longer for them than computing them takes. Whatever goes wrong with a read, its
prompt is computed.
"""

from collections.abc import Iterable

from baton.kv_transfer.interfaces import (
    Abandon,
    BeginReceive,
    FetchPrefix,
    ReceiveEnded,
)
from baton.node.scheduling.block_pool import BlockPool
from baton.node.scheduling.prefix_reads import MAX_READ_BLOCKS, PrefixCosts
from baton.node.scheduling.requests import Outputs
from baton.node.scheduling.sequence import Sequence
from baton.prefill_node.handoff import Handoff, PrefixRead
from baton.protocol.blocks import pack_hashes
from baton.protocol.errors import Cancelled, Failure, TransferError
from baton.protocol.ids import Key
from baton.protocol.messages import Offered


class PrefixReads:
    def __init__(self, pool: BlockPool, outputs: Outputs, *, repeats_last: bool = False) -> None:
        self.costs = PrefixCosts()
        self._repeats_last = repeats_last
        self._pool = pool
        self._outputs = outputs
        # Blocks that bytes may still reach although their prompts have others by now.
        self._draining: dict[Key, list[int]] = {}

    def begin(self, now_s: float, handoff: Handoff, num_held_blocks: int) -> None:
        """Ask another node for a prompt's first tokens, if it may have them and that is quicker."""
        pool = self._pool
        sequence = handoff.sequence
        source = handoff.prefix_node
        if source is None or pool.state_blocks or not pool.caches_prefixes:
            return
        hashes = sequence.hash_blocks(pool.block_size, sequence.num_reusable_tokens)
        hashes = hashes[:MAX_READ_BLOCKS]
        num_lacking = (len(hashes) - num_held_blocks) * pool.block_size
        timeout_s = self.costs.timeout_s(now_s, source, num_lacking)
        if timeout_s is None:
            return
        handoff.read = PrefixRead(source, num_held_blocks, len(hashes), now_s)
        self._outputs.to_connector.append(
            FetchPrefix(sequence.key, source, pack_hashes(hashes), num_held_blocks, timeout_s)
        )

    def offered(self, handoff: Handoff, offered: Offered) -> None:
        """Say where the blocks of a source go."""
        read = handoff.read
        if handoff.is_ended or read is None:
            return  # its Abandon is on its way
        if not read.num_held_blocks < offered.num_blocks <= read.num_wanted_blocks:
            error = TransferError("the number of blocks offered is not the number asked for")
            self._outputs.to_connector.append(Abandon(offered.key, error.to_failure()))
            return
        table = handoff.sequence.block_table
        read.landing = table[read.num_held_blocks : offered.num_blocks]
        begin = BeginReceive(offered.key, read.num_held_blocks, tuple(read.landing))
        self._outputs.to_connector.append(begin)

    def received(self, now_s: float, handoff: Handoff) -> None:
        """Let a prompt go on after the tokens that have been read."""
        read = handoff.read
        handoff.read = None
        assert read is not None
        if handoff.is_ended:
            return
        size = self._pool.block_size
        position = (read.num_held_blocks + len(read.landing)) * size
        handoff.sequence.start_at(position, repeats_last=self._repeats_last)
        handoff.num_cached_tokens = handoff.sequence.num_computed_tokens
        handoff.num_read_tokens = len(read.landing) * size
        handoff.prefix_read_s = now_s - read.began_s
        self.costs.read(now_s, read.source, handoff.num_read_tokens, handoff.prefix_read_s)
        self._pool.counts.prefix_read_tokens += handoff.num_read_tokens

    def broken(self, now_s: float, handoff: Handoff) -> None:
        """Compute into other blocks at once, while bytes may still land in those of the read."""
        read = handoff.read
        if read is None or handoff.is_ended or self._pool.num_free < len(read.landing):
            return  # until the read has ended
        num_tokens = len(read.landing) * self._pool.block_size
        self.costs.read(now_s, read.source, num_tokens, 2 * (now_s - read.began_s))
        self._draining[handoff.sequence.key] = read.landing
        self._replace(handoff.sequence, read.landing)
        self._give_up(handoff)

    def drained(self, report: ReceiveEnded) -> bool:
        """Take back the blocks of a broken read whose prompt goes on in others, if it is one."""
        drained = self._draining.pop(report.key, None)
        if drained is None:
            return False
        self._pool.release([block for block in drained if block not in report.quarantined])
        return True

    def ended(self, now_s: float, handoff: Handoff, report: ReceiveEnded) -> bool:
        """Let a prompt be computed. Return False if it lacks blocks, because some are lost."""
        sequence = handoff.sequence
        read = handoff.read
        assert read is not None
        if report.failure.code == "transfer_timeout":
            num_tokens = read.num_wanted_blocks * self._pool.block_size
            self.costs.read(now_s, read.source, num_tokens, 2 * (now_s - read.began_s))
        if handoff.is_ended:
            handoff.read = None
        else:
            self._give_up(handoff)
        if not handoff.is_ended and len(report.quarantined) <= self._pool.num_free:
            self._replace(sequence, report.quarantined)
            return True
        lost = set(report.quarantined)
        sequence.block_table = [block for block in sequence.block_table if block not in lost]
        return not lost

    def abandon(self, handoff: Handoff, why: Failure | None) -> None:
        """End the read of a prompt that has ended."""
        failure = why or Cancelled("the prompt is not wanted any more").to_failure()
        self._outputs.to_connector.append(Abandon(handoff.sequence.key, failure))

    def _replace(self, sequence: Sequence, blocks: Iterable[int]) -> None:
        """Give a sequence fresh blocks instead of some of its own."""
        gone = set(blocks)
        fresh = iter(self._pool.allocate(len(gone)))
        sequence.block_table = [
            next(fresh) if block in gone else block for block in sequence.block_table
        ]

    def _give_up(self, handoff: Handoff) -> None:
        handoff.read = None
        self._pool.counts.failed_prefix_reads += 1
