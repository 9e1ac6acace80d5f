"""Which prompt tokens the next step computes, and when blocks are announced and given back.

Pure: called by the engine loop only. First come, first served: the oldest prompt takes the whole
token budget of a step, the next ones what is left. All blocks of a prompt are reserved before its
first chunk, so a prompt that has started needs nothing but time; when the pool cannot take the
oldest waiting prompt, nothing passes it.
"""

from collections import deque

from baton.engine.block_pool import BlockPool
from baton.engine.choices import Choices
from baton.engine.outputs import Origin, Outputs
from baton.engine.plan import Slice, StepPlan, StepResult
from baton.engine.scheduler import Limits, problem_of
from baton.kv_transfer.interfaces import (
    Complete,
    ConnectorReport,
    Offer,
    Publish,
    Released,
    Withdraw,
)
from baton.prefill_node.handoff import Handoff
from baton.protocol.codec import MalformedMessage
from baton.protocol.errors import BatonError, Cancelled, InvariantBroken, RequestError
from baton.protocol.ids import Key
from baton.protocol.messages import (
    CancelDone,
    Decode,
    Failed,
    FirstToken,
    FirstTokens,
    Load,
    Prefill,
    StageTimes,
)


class PrefillScheduler:
    def __init__(self, pool: BlockPool, limits: Limits) -> None:
        self.pool = pool
        self.limits = limits
        self.outputs = Outputs()
        self._waiting: deque[Handoff] = deque()
        self._computing: dict[Key, Handoff] = {}  # in order of admission
        self._holding: dict[Key, Handoff] = {}  # computed or ended, blocks not yet given back
        self._step_id = 0

    # --- requests ------------------------------------------------------------------------------

    def add(self, now_s: float, origin: Origin, message: Prefill | Decode) -> None:
        problem = self._problem_of(message)
        if problem is not None or not isinstance(message, Prefill):
            error = problem or MalformedMessage("a prefill node was sent a Decode")
            self.outputs.say(origin, Failed(message.key, error.to_failure()))
            return
        handoff = Handoff.of(message, origin, now_s)
        for lower in self._live():
            if lower.choices.supersede(handoff.choices):
                self._end(lower)
        if self.pool.blocks_for(handoff.num_tokens) > self.pool.num_blocks:
            never = RequestError("the prompt can never fit this node's KV pool", param="prompt")
            self.outputs.say(origin, Failed(message.key, never.to_failure()))
            return
        self._waiting.append(handoff)

    def cancel(self, origin: Origin, keys: tuple[Key, ...]) -> None:
        for handoff in self._live():
            if handoff.choices.cancel(keys):
                self._end(handoff)
        self.outputs.say(origin, CancelDone(keys))

    def forget(self, origin: Origin) -> None:
        for handoff in self._live():
            if handoff.origin == origin:
                self._end(handoff)

    def on_report(self, now_s: float, report: ConnectorReport) -> None:
        if not isinstance(report, Released):
            raise InvariantBroken(f"a prefill node was told {type(report).__name__}")
        handoff = self._computing.get(report.key) or self._holding[report.key]
        handoff.is_offered = False
        if report.key in self._computing:  # decode is gone or declined: stop computing for it
            if report.failure is not None:
                self.outputs.say(handoff.origin, Failed(report.key, report.failure))
            self._end(handoff)
        self._release_if_quiet(handoff)

    # --- steps ---------------------------------------------------------------------------------

    def plan(self, now_s: float) -> StepPlan | None:
        slices: list[Slice] = []
        budget = self.limits.chunk_tokens
        for handoff in self._candidates(now_s):
            if budget == 0 or len(slices) == self.limits.max_num_seqs:
                break
            sequence = handoff.sequence
            length = min(budget, sequence.num_tokens - sequence.num_planned_tokens)
            is_last = sequence.num_planned_tokens + length == sequence.num_tokens
            slices.append(sequence.slice(length, handoff.choices.every if is_last else ()))
            budget -= length
        if not slices:
            return None
        self._step_id += 1
        return StepPlan(self._step_id, tuple(slices), generations=self.pool.take_fresh())

    def settle(self, now_s: float, plan: StepPlan, result: StepResult) -> None:
        for done, tokens in zip(plan.slices, result.tokens, strict=True):
            handoff = self._computing.get(done.key) or self._holding[done.key]
            handoff.sequence.settle(done)
            if handoff.is_ended:
                self._release_if_quiet(handoff)
                continue
            handoff.sequence.store_prefix(self.pool)
            self._publish(handoff)
            if tokens:
                self._complete(now_s, handoff, tokens)

    def load(self) -> Load:
        return Load(
            num_running=len(self._computing),
            num_waiting=len(self._waiting),
            free_blocks=self.pool.num_free,
            total_blocks=self.pool.num_blocks,
            cached_blocks=len(self.pool.cache),
            quarantined_blocks=self.pool.num_quarantined,
        )

    # --- inside --------------------------------------------------------------------------------

    def _known(self) -> list[Handoff]:
        return [*self._waiting, *self._computing.values(), *self._holding.values()]

    def _live(self) -> list[Handoff]:
        return [handoff for handoff in self._known() if not handoff.is_ended]

    def _problem_of(self, message: Prefill | Decode) -> BatonError | None:
        problem = problem_of(message, self.limits)
        if problem is None:
            choices = Choices.of(message)
            if any(handoff.choices.overlaps(choices) for handoff in self._known()):
                problem = MalformedMessage(f"{message.key} is in use")
        return problem

    def _candidates(self, now_s: float) -> list[Handoff]:
        """Prompts with tokens left to plan, oldest first; admits while the budget lasts."""
        ready = [
            h for h in self._computing.values() if h.sequence.num_planned_tokens < h.num_tokens
        ]
        tokens = sum(h.num_tokens - h.sequence.num_planned_tokens for h in ready)
        while self._waiting and tokens < self.limits.chunk_tokens:
            handoff = self._waiting[0]
            if not self._admit(now_s, handoff):
                break
            self._waiting.popleft()
            ready.append(handoff)
            tokens += handoff.num_tokens - handoff.sequence.num_planned_tokens
        return ready

    def _admit(self, now_s: float, handoff: Handoff) -> bool:
        """Reserve every block of the prompt, cached prefix first; offer them to decode."""
        sequence = handoff.sequence
        hashes = sequence.hash_blocks(self.pool.block_size, sequence.num_tokens)
        cached = self.pool.match(hashes[: (sequence.num_tokens - 1) // self.pool.block_size])
        num_missing = self.pool.blocks_for(sequence.num_tokens) - len(cached)
        if num_missing > self.pool.num_free:
            self.pool.release(cached)
            return False
        sequence.block_table = cached + self.pool.allocate(num_missing)
        sequence.num_computed_tokens = len(cached) * self.pool.block_size
        sequence.num_planned_tokens = sequence.num_computed_tokens
        handoff.num_cached_tokens = sequence.num_computed_tokens
        handoff.admitted_s = now_s
        self._computing[sequence.key] = handoff
        if handoff.decode_node is not None:
            handoff.is_offered = True
            offer = Offer(
                sequence.key, handoff.decode_node, sequence.num_tokens, len(sequence.block_table)
            )
            self.outputs.to_connector.append(offer)
            self._publish(handoff)
        return True

    def _publish(self, handoff: Handoff) -> None:
        """Announce the blocks that became final: whole ones, and the tail with the last token."""
        if not handoff.is_offered:
            return
        sequence = handoff.sequence
        valid = sequence.num_computed_tokens
        end = valid // self.pool.block_size
        if valid == sequence.num_tokens:
            end = len(sequence.block_table)
        first = handoff.num_published_blocks
        if end == first:
            return
        blocks = tuple(sequence.block_table[first:end])
        handoff.num_published_blocks = end
        self.outputs.to_connector.append(
            Publish(
                sequence.key,
                first,
                blocks,
                self.pool.generations_of(blocks),
                min(end * self.pool.block_size, valid),
            )
        )

    def _complete(self, now_s: float, handoff: Handoff, token_ids: tuple[int, ...]) -> None:
        sequence = handoff.sequence
        limits = self.limits
        tokens = tuple(
            FirstToken(t, sequence.finish_reason(t, limits.eos_token_ids, limits.max_model_len))
            for t in token_ids
        )
        times = StageTimes(
            queue_s=handoff.admitted_s - handoff.arrived_s,
            prefill_s=now_s - handoff.admitted_s,
            num_cached_tokens=handoff.num_cached_tokens,
        )
        self.outputs.say(
            handoff.origin, FirstTokens(sequence.key, sequence.num_tokens, tokens, times)
        )
        del self._computing[sequence.key]
        self._holding[sequence.key] = handoff
        if handoff.is_offered:
            self.outputs.to_connector.append(Complete(sequence.key, tokens))
        else:
            handoff.is_ended = True
        self._release_if_quiet(handoff)

    def _end(self, handoff: Handoff) -> None:
        """Nothing more is wanted of it; blocks follow when no step and no reader needs them."""
        handoff.is_ended = True
        key = handoff.sequence.key
        if handoff in self._waiting:
            self._waiting.remove(handoff)
            return
        self._holding[key] = self._computing.pop(key, handoff)
        if handoff.is_offered:
            cancelled = Cancelled("the request was cancelled").to_failure()
            self.outputs.to_connector.append(Withdraw(key, cancelled))
        self._release_if_quiet(handoff)

    def _release_if_quiet(self, handoff: Handoff) -> None:
        if handoff.sequence.is_idle and not handoff.is_offered:
            key = handoff.sequence.key
            if self._holding.pop(key, None) is not None:
                self.pool.release(handoff.sequence.block_table)
