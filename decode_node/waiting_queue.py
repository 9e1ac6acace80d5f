"""Requests that are about to join the running batch: prompts that are received or computed here.

Blocks are reserved in full, so a request that has its blocks waits for nothing else. A request gets
blocks only when the steps have a place for one of its choices, because a first token is worthless
if the second one must wait. Its other choices get places as they become free. Smaller requests may
pass the head of the queue while it has no blocks, until it has waited for `MAX_PASSED_S`.
"""

from dataclasses import dataclass, field
from itertools import islice

from baton.kv_transfer.interfaces import Abandon, BeginReceive, Expect, ReceiveEnded
from baton.node.scheduling.block_pool import BlockPool
from baton.node.scheduling.checkpoints import StepCopies, num_reusable_tokens, reserve
from baton.node.scheduling.prompt_reads import PrefixRead, PrefixReads
from baton.node.scheduling.requests import ByRequest, Choices, Origin, Outputs
from baton.node.scheduling.scheduler import NodeLimits
from baton.node.scheduling.sequence import Sequence
from baton.protocol.blocks import blocks_needed
from baton.protocol.errors import Cancelled, Failure, Overloaded, RequestError, TransferError
from baton.protocol.ids import Key, NodeId, RequestId
from baton.protocol.messages import NOT_CACHED, Accepted, Decode, Failed, Offered

MAX_PASSED_S = 1.0
# The number of requests behind the head of the queue that one step considers.
MAX_PASSING = 8


@dataclass(slots=True, eq=False)
class PendingPrompt:
    """One `Decode` message until its sequences run. The connector has the state of its receive."""

    sequence: Sequence
    origin: Origin
    message: Decode
    arrived_s: float
    choices: Choices
    queued_s: float = 0.0
    reserved_s: float | None = None  # when it got its blocks
    num_cached_tokens: int = 0
    read: PrefixRead | None = None  # of a local prompt, until it has ended
    num_read_tokens: int = 0
    prefix_read_s: float = 0.0
    tails: list[int] = field(default_factory=list)
    is_ended: bool = False  # cancelled or refused; blocks follow when no step or read needs them

    @property
    def key(self) -> Key:
        return self.message.key

    @property
    def keys(self) -> list[Key]:
        return [self.key]

    @property
    def is_local(self) -> bool:
        return self.message.prefill_node is None

    @property
    def prefix_node(self) -> NodeId | None:
        return None


class WaitingQueue:
    def __init__(
        self,
        pool: BlockPool,
        outputs: Outputs,
        limits: NodeLimits,
        copies: StepCopies,
        reads: PrefixReads,
    ) -> None:
        self.pool = pool
        self.copies = copies
        self.reads = reads
        self.outputs = outputs
        self.limits = limits
        self.pending: dict[Key, PendingPrompt] = {}
        self._by_request: ByRequest[PendingPrompt] = ByRequest()  # the same
        self._queue: dict[Key, PendingPrompt] = {}  # offered or local, without blocks; in order
        self._reserved: dict[Key, PendingPrompt] = {}  # prompts that have blocks and were not ended

    @property
    def num_waiting(self) -> int:
        return len(self.pending)

    def add(self, now_s: float, origin: Origin, message: Decode) -> None:
        choices = Choices.of(message)
        prompt = PendingPrompt(Sequence.of(message), origin, message, now_s, choices)
        if (refusal := self._refusal(prompt)) is not None:
            self.outputs.send(origin, Failed(message.key, refusal))
            return
        self.pending[message.key] = prompt
        self._by_request.add(message.key, prompt)
        if message.prefill_node is None:
            self._enqueue(now_s, prompt)
        else:
            self.outputs.to_connector.append(Expect(message.key, message.prefill_node))

    def offered(self, now_s: float, offer: Offered) -> None:
        """Queue a prompt whose blocks prefill holds, because it now needs blocks here."""
        prompt = self.pending[offer.key]
        if prompt.is_ended:
            return
        if offer.num_tokens == prompt.sequence.num_tokens:
            self._enqueue(now_s, prompt)
        else:
            text = f"prefill offers {offer.num_tokens} tokens of {prompt.sequence.num_tokens}"
            self.refuse(prompt, TransferError(text).to_failure())

    def of(self, request_id: RequestId) -> list[PendingPrompt]:
        return self._by_request.of(request_id)

    def take(self, key: Key) -> PendingPrompt:
        """Remove a prompt whose blocks the caller takes over."""
        self._by_request.remove(key)
        self._queue.pop(key, None)
        self._reserved.pop(key, None)
        return self.pending.pop(key)

    def reserve(self, now_s: float, num_requests: int, num_growing: int) -> None:
        """Give blocks to the prompts that fit while each request has a place in the steps.

        `num_requests` run already. Each of the `num_growing` sequences that take steps keeps a
        block to grow into.
        """
        for prompt in list(islice(self._queue.values(), MAX_PASSING + 1)):
            if num_requests + len(self._reserved) >= self.limits.max_num_seqs:
                return
            if self._lacks_too_much(prompt):
                self.refuse(prompt, _not_cached())
            elif self._reserve_one(now_s, prompt, num_growing):
                del self._queue[prompt.key]
            elif self.pool.num_owned == 0:  # blocks were quarantined after its arrival
                self.refuse(prompt, _shrunk())
            elif now_s - prompt.queued_s > MAX_PASSED_S or self.pool.num_free <= num_growing:
                return

    def computing(self) -> list[PendingPrompt]:
        """Return the local prompts that have their blocks, in order of admission.

        A prompt whose first tokens are read is not among them.
        """
        return [
            prompt for prompt in self._reserved.values() if prompt.is_local and prompt.read is None
        ]

    def in_progress(self) -> list[PendingPrompt]:
        """Return the prompts that wait for nothing but this node, which prefill has offered."""
        return [*self._queue.values(), *self._reserved.values()]

    def refuse(self, prompt: PendingPrompt, failure: Failure) -> None:
        self._send_failed(prompt, failure)
        self.end(prompt, failure)

    def fail(self, prompt: PendingPrompt, failure: Failure) -> None:
        """End a prompt that was received or computed but cannot continue."""
        prompt.is_ended = True
        self._reserved.pop(prompt.key, None)
        self._send_failed(prompt, failure)
        self.release_if_idle(prompt)

    def end(self, prompt: PendingPrompt, failure: Failure | None = None) -> None:
        """End a prompt. Its blocks are released when no read or step needs them."""
        was_ended = prompt.is_ended
        prompt.is_ended = True
        self._queue.pop(prompt.key, None)
        self._reserved.pop(prompt.key, None)
        if prompt.is_local:
            if prompt.read is not None and not was_ended:
                self.reads.abandon(prompt, failure)
            self.release_if_idle(prompt)
        elif not was_ended:
            failure = failure or Cancelled("the request was cancelled").to_failure()
            self.outputs.to_connector.append(Abandon(prompt.key, failure))

    def release_if_idle(self, prompt: PendingPrompt) -> None:
        if prompt.sequence.is_idle and prompt.read is None:
            self.take(prompt.key)
            self.pool.release([*prompt.sequence.blocks, *prompt.tails])

    def receive_ended(self, report: ReceiveEnded) -> None:
        prompt = self.take(report.key)
        blocks = [*prompt.sequence.blocks, *prompt.tails]
        self.pool.quarantine(report.quarantined)
        self.pool.release([block for block in blocks if block not in set(report.quarantined)])
        if not prompt.is_ended:
            self._send_failed(prompt, report.failure)

    # --- inside --------------------------------------------------------------------------------

    def _send_failed(self, prompt: PendingPrompt, failure: Failure) -> None:
        self.outputs.send(prompt.origin, Failed(prompt.key, failure))

    def _enqueue(self, now_s: float, prompt: PendingPrompt) -> None:
        prompt.queued_s = now_s
        self._queue[prompt.key] = prompt

    def _refusal(self, prompt: PendingPrompt) -> Failure | None:
        """Return why this request must be refused at once, or None."""
        message = prompt.message
        pool = self.pool
        longest = message.num_prompt_tokens + message.sampling.max_tokens
        longest = min(longest, self.limits.max_model_len)
        num_needed = blocks_needed(
            pool.block_size, len(message.token_ids), longest, message.num_choices, pool.state_blocks
        )
        if num_needed > pool.num_blocks:
            text = "prompt, max_tokens and n together can never fit this node's KV pool"
            return RequestError(text, param="max_tokens").to_failure()
        if num_needed > pool.num_blocks - pool.num_quarantined:
            return _shrunk()
        return None

    def _lacks_too_much(self, prompt: PendingPrompt) -> bool:
        """Return whether this node must compute more of a prompt than its router expected."""
        bound = prompt.message.max_uncached_tokens
        sequence = prompt.sequence
        if bound is None or sequence.num_tokens <= bound:
            return False
        num_known = num_reusable_tokens(self.pool, sequence)
        num_known += self.reads.num_held_tokens(sequence, num_known)
        return sequence.num_tokens - num_known > bound

    def _reserve_one(self, now_s: float, prompt: PendingPrompt, watermark: int) -> bool:
        sequence = prompt.sequence
        pool = self.pool
        has_tail = sequence.num_tokens % pool.block_size != 0
        num_tails = (len(prompt.choices.live) - 1) * (has_tail + pool.state_blocks)
        is_local = prompt.is_local
        num_held = sequence.num_reusable_tokens if is_local else sequence.num_tokens
        num_cached = reserve(pool, sequence, num_held, num_tails + watermark, is_computed=is_local)
        if num_cached is None:
            return False
        prompt.tails = pool.allocate(num_tails)
        prompt.reserved_s = now_s
        self._reserved[prompt.key] = prompt
        prompt.num_cached_tokens = num_cached * pool.block_size
        if prompt.is_local:
            sequence.start_at(prompt.num_cached_tokens, repeats_last=self.limits.has_draft_head)
            self.copies.restore(sequence)
            self.reads.begin(now_s, prompt, num_cached)
        else:
            fresh = tuple(sequence.blocks[num_cached:])
            self.outputs.to_connector.append(BeginReceive(prompt.key, num_cached, fresh))
        self.outputs.send(prompt.origin, Accepted(prompt.key, prompt.num_cached_tokens))
        return True


def _not_cached() -> Failure:
    text = "this node has cached less of the prompt than its router expected"
    return Overloaded(text, code=NOT_CACHED).to_failure()


def _shrunk() -> Failure:
    text = "so many of this node's KV blocks are quarantined that this request does not fit"
    return Overloaded(text).to_failure()
