"""Decide which prompt tokens the next step computes, and when blocks are announced and given back.

Prompts are served in order of arrival: the oldest prompt takes as much of a step's token budget as
it needs, and the next ones share the rest. All blocks of a prompt are reserved before its first
chunk, so a prompt that has started never waits for blocks. If the pool cannot take the oldest
waiting prompt, no other prompt passes it.

A prompt that waits for blocks of another node holds up no other one.
"""

from typing import assert_never

from baton.kv_transfer.interfaces import (
    BlocksCopied,
    BlocksDrained,
    BlocksSaved,
    ConnectorReport,
    KVReceived,
    Offer,
    OfferBroken,
    PrefixWanted,
    ReceiveBroken,
    ReceiveEnded,
    Released,
    TierOpened,
)
from baton.node.scheduling.block_pool import BlockPool
from baton.node.scheduling.checkpoints import StepCopies, reserve
from baton.node.scheduling.plan import Slice, StepPlan, StepResult
from baton.node.scheduling.prompt_reads import PrefixReads
from baton.node.scheduling.requests import NO_ROUTER, ByRequest, Choices, Origin, Outputs
from baton.node.scheduling.scheduler import NodeLimits, load_of, problem_of
from baton.node.scheduling.sequence import no_token
from baton.node.scheduling.tiers import Tiers
from baton.prefill_node.handoff import Handoff
from baton.protocol.codec import MalformedMessage
from baton.protocol.errors import (
    Cancelled,
    Failure,
    InvariantBroken,
    NodeError,
    RequestError,
)
from baton.protocol.ids import Key, RequestId
from baton.protocol.messages import (
    BlockRange,
    CancelDone,
    Decode,
    End,
    Failed,
    FirstToken,
    FirstTokens,
    Load,
    Offered,
    Pooled,
    Prefill,
    PromptLogprobs,
    Withdrawn,
)


class PrefillScheduler:
    def __init__(self, pool: BlockPool, limits: NodeLimits) -> None:
        self.pool = pool
        self.limits = limits
        self.outputs = Outputs()
        self._waiting: dict[Key, Handoff] = {}  # in order of arrival
        self._computing: dict[Key, Handoff] = {}  # in order of admission
        self._holding: dict[Key, Handoff] = {}  # computed or ended, blocks not yet given back
        self._known: ByRequest[Handoff] = ByRequest()  # all of these
        self._copies = StepCopies(pool)
        self.tiers = Tiers(pool, self.outputs)
        self._reads = PrefixReads(
            pool, self.outputs, self.tiers, repeats_last=limits.has_draft_head
        )
        self._step_id = 0

    # --- requests ------------------------------------------------------------------------------

    def add(self, now_s: float, origin: Origin, message: Prefill | Decode) -> None:
        problem = problem_of(message, self.limits, self._uses)
        if problem is not None or not isinstance(message, Prefill):
            error = problem or MalformedMessage("a prefill node was sent a Decode")
            self.outputs.send(origin, Failed(message.key, error.to_failure()))
            return
        handoff = Handoff.of(message, origin, now_s)
        for lower in self._live_of(message.key.request_id):
            if lower.choices.supersede(handoff.choices):
                self._end(lower, Cancelled("a newer attempt replaced it").to_failure())
        num_needed = self.pool.blocks_for(handoff.sequence.num_tokens) + self.pool.state_blocks
        if num_needed > self.pool.num_blocks:
            never = RequestError("the prompt can never fit this node's KV pool", param="prompt")
            self.outputs.send(origin, Failed(message.key, never.to_failure()))
            return
        self._waiting[message.key] = handoff
        self._known.add(message.key, handoff)

    def cancel(self, origin: Origin, keys: tuple[Key, ...]) -> None:
        for request_id in dict.fromkeys(key.request_id for key in keys):
            for handoff in self._live_of(request_id):
                if handoff.choices.cancel(keys):
                    self._end(handoff, Cancelled("the request was cancelled").to_failure())
        self.outputs.send(origin, CancelDone(keys))

    def forget(self, origin: Origin) -> None:
        # Decode may still reach the router, to which this must look like a lost node and not like a
        # cancel.
        lost = NodeError("the prefill node lost the channel to its router").to_failure()
        for handoff in [*self._waiting.values(), *self._computing.values()]:
            if handoff.origin == origin:
                self._end(handoff, lost)
        # The channel may have broken here alone, so decode must get the blocks of computed prompts.
        for handoff in self._holding.values():
            if handoff.origin == origin:
                handoff.origin = NO_ROUTER

    def on_report(self, now_s: float, report: ConnectorReport) -> None:
        match report:
            case Released() | OfferBroken():
                self._offer_ended(report)
            case Offered():
                self._reads.offered(self._handoff(report.key), report)
            case KVReceived():
                self._prefix_received(now_s, report)
            case ReceiveBroken():
                self._reads.broken(now_s, self._handoff(report.key))
            case ReceiveEnded():
                self._prefix_ended(now_s, report)
            case BlocksDrained(block_ids=block_ids):
                self.pool.readmit(block_ids)
            case TierOpened() | BlocksCopied() | BlocksSaved():
                self.tiers.on_report(now_s, report)
            case PrefixWanted():
                raise InvariantBroken("a prefill node was asked for a prefix")
            case _:
                assert_never(report)

    def _offer_ended(self, report: Released | OfferBroken) -> None:
        handoff = self._handoff(report.key)
        handoff.is_offered = isinstance(report, OfferBroken)
        if handoff.is_ended:
            self._release_if_idle(handoff)
            return
        # Decode will not get all blocks, even if the router has the first tokens.
        if report.failure is not None:
            self.outputs.send(handoff.origin, Failed(report.key, report.failure))
        self._end(handoff, None)

    def _prefix_received(self, now_s: float, report: KVReceived) -> None:
        handoff = self._handoff(report.key)
        # Readers check the generations of its blocks, which the next step publishes, so the blocks
        # are announced after it.
        self._reads.received(now_s, handoff)
        if handoff.is_ended:
            self._release_if_idle(handoff)

    def _prefix_ended(self, now_s: float, report: ReceiveEnded) -> None:
        self.pool.quarantine(report.quarantined)
        if self._reads.drained(report):
            return
        handoff = self._handoff(report.key)
        goes_on = self._reads.ended(now_s, handoff, report)
        if handoff.is_ended:
            self._release_if_idle(handoff)
        elif not goes_on:
            self.outputs.send(handoff.origin, Failed(report.key, report.failure))
            self._end(handoff, report.failure)

    # --- steps ---------------------------------------------------------------------------------

    def plan(self, now_s: float) -> StepPlan | None:
        self.tiers.write_back(now_s)
        slices: list[Slice] = []
        budget = self.limits.max_num_batched_tokens
        room = self.limits.max_first_tokens
        for handoff in self._candidates(now_s):
            every = handoff.choices.every
            if budget <= 0 or len(slices) == self.limits.max_num_seqs or len(every) > room:
                break
            self._copies.save(handoff.sequence)
            slices.append(handoff.sequence.chunk(budget, every, self._step_id + 1))
            budget -= slices[-1].length
            room -= slices[-1].num_sampled
        if not slices:
            return None
        self._step_id += 1
        copies = self._copies.take(self._step_id)
        return StepPlan(self._step_id, tuple(slices), copies, generations=self.pool.take_fresh())

    def settle(self, now_s: float, plan: StepPlan, result: StepResult) -> None:
        self._copies.settle(plan)
        num_tokens = sum(part.length for part in plan.slices)
        self._reads.costs.computed(now_s, num_tokens, result.ended_s - result.started_s)
        failed = dict(result.failed)
        logprobs = dict(result.logprobs)
        of_prompts = dict(result.prompt_logprobs)
        pooled = dict(result.pooled)
        for index, (done, tokens) in enumerate(zip(plan.slices, result.tokens, strict=True)):
            handoff = self._handoff(done.key)
            handoff.sequence.settle(done, tokens)
            if handoff.is_ended:
                self._release_if_idle(handoff)
                continue
            if index in of_prompts:
                self.outputs.send(handoff.origin, PromptLogprobs(done.key, of_prompts[index]))
            if index in failed:
                failure = no_token(failed[index])
                self.outputs.send(handoff.origin, Failed(done.key, failure))
                self._end(handoff, failure)
                continue
            handoff.sequence.store_prefix(self.pool)
            self._announce(handoff)
            if index in pooled:
                handoff.pooled.add(done.pooling, pooled[index])
            if handoff.is_pooled:
                self._send_pooled(now_s, handoff)
            elif tokens:
                firsts = handoff.sequence.first_tokens(tokens, self.limits, logprobs.get(index, ()))
                self._complete(now_s, handoff, firsts)

    def loras_in_use(self) -> set[str]:
        handoffs = (*self._waiting.values(), *self._computing.values(), *self._holding.values())
        return {handoff.sequence.sampling.lora for handoff in handoffs}

    def load(self) -> Load:
        return load_of(self.pool, len(self._computing), len(self._waiting))

    def in_progress(self) -> dict[Origin, list[Key]]:
        found: dict[Origin, list[Key]] = {}
        for handoff in (*self._waiting.values(), *self._computing.values()):
            found.setdefault(handoff.origin, []).append(handoff.sequence.key)
        return found

    @property
    def has_unseen(self) -> bool:
        return False

    # --- inside --------------------------------------------------------------------------------

    def _handoff(self, key: Key) -> Handoff:
        """Return a prompt that has blocks."""
        return self._computing.get(key) or self._holding[key]

    def _live_of(self, request_id: RequestId) -> list[Handoff]:
        return [handoff for handoff in self._known.of(request_id) if not handoff.is_ended]

    def _uses(self, choices: Choices) -> bool:
        known = self._known.of(choices.key.request_id)
        return any(handoff.choices.overlaps(choices) for handoff in known)

    def _candidates(self, now_s: float) -> list[Handoff]:
        """Return the prompts with tokens to plan, oldest first; admit while the budget lasts.

        The prompts of the step after this one are admitted too if their first tokens are read, so
        that those are here in time.
        """
        budget = self.limits.max_num_batched_tokens
        ready = [handoff for handoff in self._computing.values() if handoff.is_ready]
        tokens = sum(handoff.sequence.num_unplanned_tokens for handoff in ready)
        while self._waiting:
            handoff = next(iter(self._waiting.values()))
            is_early = tokens >= budget
            if is_early and (tokens >= 2 * budget or not self._reads.are_likely(handoff)):
                break
            if not self._admit(now_s, handoff):
                break
            del self._waiting[handoff.sequence.key]
            if handoff.is_ready:
                ready.append(handoff)
            if handoff.is_ready or is_early:
                tokens += handoff.sequence.num_unplanned_tokens
        return ready

    def _admit(self, now_s: float, handoff: Handoff) -> bool:
        """Reserve every block of the prompt, the cached prefix first, and offer them to decode."""
        sequence = handoff.sequence
        num_cached = reserve(self.pool, sequence, sequence.num_reusable_tokens)
        if num_cached is None:
            return False
        handoff.num_cached_tokens = num_cached * self.pool.block_size
        sequence.start_at(handoff.num_cached_tokens, repeats_last=self.limits.has_draft_head)
        self._copies.restore(sequence)
        handoff.admitted_s = now_s
        self._computing[sequence.key] = handoff
        if handoff.decode_node is not None:
            handoff.is_offered = True
            offer = Offer(
                sequence.key, handoff.decode_node, sequence.num_tokens, len(sequence.blocks)
            )
            self.outputs.to_connector.append(offer)
            self._announce(handoff)
        self._reads.begin(now_s, handoff, num_cached)
        return True

    def _announce(self, handoff: Handoff) -> None:
        """Announce the blocks that became final: whole blocks, and all others with the last token.

        The blocks of the state come last.
        """
        if not handoff.is_offered:
            return
        sequence = handoff.sequence
        end = sequence.num_computed_tokens // self.pool.block_size
        if sequence.num_computed_tokens == sequence.num_tokens:
            end = len(sequence.blocks)
        first = handoff.num_announced_blocks
        if end == first:
            return
        blocks = tuple(sequence.blocks[first:end])
        handoff.num_announced_blocks = end
        block_range = BlockRange(sequence.key, first, blocks, self.pool.generations_of(blocks))
        self.outputs.to_connector.append(block_range)

    def _send_pooled(self, now_s: float, handoff: Handoff) -> None:
        sequence = handoff.sequence
        numbers = handoff.pooled.numbers(sequence.num_tokens)
        self.outputs.send(handoff.origin, Pooled(sequence.key, numbers, handoff.times(now_s)))
        self._end(handoff, None)

    def _complete(self, now_s: float, handoff: Handoff, tokens: tuple[FirstToken, ...]) -> None:
        sequence = handoff.sequence
        times = handoff.times(now_s)
        self.outputs.send(
            handoff.origin, FirstTokens(sequence.key, sequence.num_tokens, tokens, times)
        )
        del self._computing[sequence.key]
        self._holding[sequence.key] = handoff
        if handoff.is_offered:
            self.outputs.to_connector.append(End(sequence.key, tokens, handoff.num_cached_tokens))
        else:
            handoff.is_ended = True
        self._release_if_idle(handoff)

    def _end(self, handoff: Handoff, why: Failure | None) -> None:
        """End a handoff. Its blocks are released when no step and no reader needs them.

        `why` is None if the connector has released it.
        """
        handoff.is_ended = True
        key = handoff.sequence.key
        if self._waiting.pop(key, None) is not None:
            self._known.remove(key)
            return
        self._holding[key] = self._computing.pop(key, handoff)
        if handoff.is_offered and why is not None:
            self.outputs.to_connector.append(Withdrawn(key, why))
        if handoff.read is not None:
            self._reads.abandon(handoff, why)
        self._release_if_idle(handoff)

    def _release_if_idle(self, handoff: Handoff) -> None:
        if handoff.sequence.is_idle and not handoff.is_offered and handoff.read is None:
            key = handoff.sequence.key
            if self._holding.pop(key, None) is not None:
                self._known.remove(key)
                self.pool.release(handoff.sequence.blocks)
