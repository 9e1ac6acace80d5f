"""Decide which sequences take the next step: continuous batching, with prompts in between.

Every running sequence that has its next block takes part in every step while there are places. If
there are too few places, requests get them in turn, so a request with many choices never keeps
another one out. Local prompts get the rest of the token budget. When no block is left to grow into,
the youngest sequence goes back to its router, which resumes it elsewhere.
"""

from collections import Counter
from typing import assert_never

import msgspec

from baton.decode_node.stream import HeadDrafts, PromptLookup, Stream, fork_prompt
from baton.decode_node.waiting_queue import PendingPrompt, WaitingQueue
from baton.kv_transfer.interfaces import (
    BlocksCopied,
    BlocksDrained,
    BlocksSaved,
    ConnectorReport,
    KVReceived,
    OfferBroken,
    PrefixWanted,
    ReceiveBroken,
    ReceiveEnded,
    Released,
    TierOpened,
)
from baton.node.scheduling.block_pool import BlockPool
from baton.node.scheduling.checkpoints import StepCopies
from baton.node.scheduling.plan import Slice, StepPlan, StepResult
from baton.node.scheduling.prefix_reads import PrefixOffers
from baton.node.scheduling.prompt_reads import PrefixReads
from baton.node.scheduling.requests import ByRequest, Choices, Origin, Outputs
from baton.node.scheduling.scheduler import NodeLimits, load_of, problem_of
from baton.node.scheduling.sequence import Sequence, no_token
from baton.node.scheduling.tiers import Tiers
from baton.protocol.codec import MalformedMessage
from baton.protocol.errors import Failure, NodeError, TransferError
from baton.protocol.ids import Key
from baton.protocol.messages import (
    CancelDone,
    Decode,
    Failed,
    FirstToken,
    Load,
    Offered,
    Prefill,
    PromptLogprobs,
    StageTimes,
    TokenLogprobs,
)


class DecodeScheduler:
    def __init__(self, pool: BlockPool, limits: NodeLimits) -> None:
        self.pool = pool
        self.limits = limits
        self.outputs = Outputs()
        self._copies = StepCopies(pool)
        self.tiers = Tiers(pool, self.outputs)
        self._reads = PrefixReads(
            pool, self.outputs, self.tiers, repeats_last=limits.has_draft_head
        )
        self.queue = WaitingQueue(pool, self.outputs, limits, self._copies, self._reads)
        self._running: dict[Key, Stream] = {}  # in order of joining
        self._by_request: ByRequest[Stream] = ByRequest()  # the same
        self._num_running: Counter[Key] = Counter()  # by the message that asked for them
        self._leaving: dict[Key, Stream] = {}  # ended, but still part of a launched step
        self._prefixes = PrefixOffers(pool, self.outputs)
        self._step_id = 0
        self._num_launched = 0  # steps

    # --- requests ------------------------------------------------------------------------------

    def add(self, now_s: float, origin: Origin, message: Prefill | Decode) -> None:
        problem = problem_of(message, self.limits, self._uses)
        if problem is not None or not isinstance(message, Decode):
            error = problem or MalformedMessage("a decode node was sent a Prefill")
            self.outputs.send(origin, Failed(message.key, error.to_failure()))
            return
        self._supersede(Choices.of(message))
        self.queue.add(now_s, origin, message)

    def cancel(self, origin: Origin, keys: tuple[Key, ...]) -> None:
        for request_id in dict.fromkeys(key.request_id for key in keys):
            for prompt in self.queue.of(request_id):
                if prompt.choices.cancel(keys):
                    self.queue.end(prompt)
        for key in keys:
            stream = self._running.get(key)
            if stream is not None:
                self._leave(stream)
        self.outputs.send(origin, CancelDone(keys))

    def forget(self, origin: Origin) -> None:
        # To the router, which prefill may still reach, this must look like a lost node and not like
        # a cancel.
        lost = NodeError("the decode node lost the channel to its router").to_failure()
        for prompt in list(self.queue.pending.values()):
            if prompt.origin == origin and not prompt.is_ended:
                self.queue.end(prompt, lost)
        for stream in list(self._running.values()):
            if stream.origin == origin:
                self._leave(stream)

    def on_report(self, now_s: float, report: ConnectorReport) -> None:
        match report:
            case Offered():
                self.queue.offered(now_s, report)
            case KVReceived():
                self._received(now_s, report)
            case ReceiveEnded():
                self._receive_ended(now_s, report)
            case BlocksDrained(block_ids=block_ids):
                self.pool.readmit(block_ids)
            case PrefixWanted():
                self._prefixes.wanted(report)
            case Released(key=key):
                self._prefixes.released(key)
            case OfferBroken():
                pass  # the blocks may not be taken back before Released
            case ReceiveBroken():
                self._reads.broken(now_s, self.queue.pending[report.key])
            case TierOpened() | BlocksCopied() | BlocksSaved():
                self.tiers.on_report(now_s, report)
            case _:
                assert_never(report)

    # --- steps ---------------------------------------------------------------------------------

    def plan(self, now_s: float) -> StepPlan | None:
        self.tiers.write_back(now_s)
        if self._num_launched and self._has_guesses:
            return None  # all take the next step together, once the tokens before it are known
        num_slots = self.limits.max_num_seqs
        num_growing = min(len(self._running), num_slots)
        self.queue.reserve(now_s, len(self._num_running), num_growing)
        computing = self.queue.computing()
        slices = self._decode_slices(num_slots - len(computing))
        num_decoding = sum(part.length for part in slices)
        budget = max(self.limits.max_num_batched_tokens - num_decoding, self.pool.block_size)
        room = self.limits.max_first_tokens
        for prompt in computing:
            every = prompt.choices.every
            if budget <= 0 or len(slices) == self.limits.max_num_seqs or len(every) > room:
                break
            if prompt.sequence.num_unplanned_tokens:
                self._copies.save(prompt.sequence, num_growing)
                slices.append(prompt.sequence.chunk(budget, every, self._step_id + 1))
                budget -= slices[-1].length
                room -= slices[-1].num_sampled
        if not slices:
            if not self._running and not computing:  # all ended before their first step
                self._copies.drop()
            return None
        self._step_id += 1
        self._num_launched += 1
        copies = self._copies.take(self._step_id)
        return StepPlan(self._step_id, tuple(slices), copies, generations=self.pool.take_fresh())

    def settle(self, now_s: float, plan: StepPlan, result: StepResult) -> None:
        self._num_launched -= 1
        self._copies.settle(plan)
        num_tokens = sum(part.length for part in plan.slices)
        self._reads.costs.computed(now_s, num_tokens, result.ended_s - result.started_s)
        failed = dict(result.failed)
        logprobs = dict(result.logprobs)
        drafts = dict(result.drafts)
        of_prompts = dict(result.prompt_logprobs)
        for index, (done, tokens) in enumerate(zip(plan.slices, result.tokens, strict=True)):
            scores = logprobs.get(index, ())
            stream = self._running.get(done.key) or self._leaving.get(done.key)
            if stream is not None:
                stream.take_drafts(drafts.get(index, ()))
                self._settle_stream(stream, done, tokens, result, failed.get(index), scores)
            else:
                if index in of_prompts:  # a router that has cancelled it drops them
                    origin = self.queue.pending[done.key].origin
                    self.outputs.send(origin, PromptLogprobs(done.key, of_prompts[index]))
                self._settle_prompt(now_s, done, tokens, failed.get(index), scores)

    def loras_in_use(self) -> set[str]:
        sequences = [prompt.sequence for prompt in self.queue.pending.values()]
        streams = (*self._running.values(), *self._leaving.values())
        sequences += [stream.sequence for stream in streams]
        return {sequence.sampling.lora for sequence in sequences}

    def load(self) -> Load:
        return load_of(self.pool, len(self._running), self.queue.num_waiting)

    def in_progress(self) -> dict[Origin, list[Key]]:
        found: dict[Origin, list[Key]] = {}
        every: list[PendingPrompt | Stream] = [
            *self.queue.in_progress(),
            *self._running.values(),
        ]
        for one in every:
            found.setdefault(one.origin, []).extend(one.keys)
        return found

    # --- inside --------------------------------------------------------------------------------

    def _uses(self, choices: Choices) -> bool:
        if any(key in self._running or key in self._leaving for key in choices.keys):
            return True
        pending = self.queue.of(choices.key.request_id)
        return any(prompt.choices.overlaps(choices) for prompt in pending)

    def _supersede(self, newer: Choices) -> None:
        """End lower attempts at the same choices."""
        for prompt in self.queue.of(newer.key.request_id):
            if prompt.choices.supersede(newer):
                self.queue.end(prompt)
        for stream in self._by_request.of(newer.key.request_id):
            key = stream.sequence.key
            if any(key.is_superseded_by(other) for other in newer.keys):
                self._leave(stream)

    def _decode_slices(self, num_slots: int) -> list[Slice]:
        slices: list[Slice] = []
        num_guesses = self.limits.max_num_batched_tokens - num_slots  # that fit into a step
        for stream in self._in_turn(num_slots):
            if len(slices) == num_slots:
                break
            if stream.wants_step and self._grow(stream):
                slices.append(self._decode_slice(stream, num_guesses))
                num_guesses -= slices[-1].num_guesses
        return sorted(slices, key=lambda part: part.length > 1)  # single tokens come first

    def _decode_slice(self, stream: Stream, most_guesses: int) -> Slice:
        sequence = stream.sequence
        guesses = stream.guesses()[: max(0, most_guesses)]
        num_drafts = None
        if self.limits.has_draft_head:
            num_drafts = self._num_drafts(stream)
            # Behind the last guess is the row of a token that is sampled, from which drafts follow.
            wanted = len(guesses) + max(1, num_drafts)
            last = stream.limit - 1 - sequence.num_planned_tokens
            num_ahead = self._ahead(sequence, min(wanted, last))
            guesses = guesses[: num_ahead - 1]
            num_drafts = min(num_drafts, num_ahead - len(guesses))
            stream.awaits_drafts = num_drafts > 0
        elif guesses:
            guesses = guesses[: self._ahead(sequence, len(guesses))]
        choice = sequence.key.choice
        return sequence.slice(1, (choice,), self._step_id + 1, guesses, num_drafts)

    @property
    def _has_guesses(self) -> bool:
        """Return whether a stream has guesses, or will get some from a step that is launched."""
        if not self.limits.num_speculative_tokens:
            return False
        return any(stream.awaits_drafts or stream.guesses() for stream in self._running.values())

    def _num_drafts(self, stream: Stream) -> int:
        if stream.guesser is None:
            return 0
        return stream.guesser.num_drafts(stream.sequence.num_tokens)

    def _ahead(self, sequence: Sequence, wanted: int) -> int:
        """Return for how many of the `wanted` positions after the next one there are blocks.

        It gets more while each running sequence keeps one to grow into.
        """
        size = self.pool.block_size
        position = sequence.num_planned_tokens
        num_lacking = (position + wanted) // size + 1 - len(sequence.block_table)
        num_spare = self.pool.num_free - len(self._running)
        if num_lacking > 0 and num_spare > 0:
            sequence.block_table.extend(self.pool.allocate(min(num_lacking, num_spare)))
        return min(wanted, len(sequence.block_table) * size - position - 1)

    def _in_turn(self, num_slots: int) -> list[Stream]:
        """Return the running streams, beginning with those that have places if not all do.

        The first choice of every request comes before the second choice of any. A request's choices
        keep their order, so choices that have begun finish before others begin.
        """
        streams = list(self._running.values())
        if len(streams) <= num_slots:
            return streams
        turns: Counter[Key] = Counter()
        ranked: list[tuple[int, int]] = []
        for index, stream in enumerate(streams):
            if stream.wants_step:
                ranked.append((turns[stream.asked_by], index))
                turns[stream.asked_by] += 1
        return [streams[index] for _, index in sorted(ranked)]

    def _grow(self, stream: Stream) -> bool:
        """Give the next position a block. Preempt the youngest sequence if none is free."""
        sequence = stream.sequence
        # A head stores the row of the token that is sampled, too.
        end = sequence.num_planned_tokens + self.limits.has_draft_head
        if end < len(sequence.block_table) * self.pool.block_size:
            return True
        if self.pool.num_free == 0 and not (self._leaving or self.tiers.is_copying):
            youngest = next(reversed(self._running.values()))
            text = "preempted: no KV block is left to grow into"
            failure = Failure("preempted", text, retryable=True, http_status=503)
            self.outputs.send(youngest.origin, Failed(youngest.sequence.key, failure))
            self.pool.counts.preemptions += 1
            self._leave(youngest)
        if stream.is_ended or self.pool.num_free == 0:
            return False
        sequence.block_table.extend(self.pool.allocate(1))
        return True

    def _settle_stream(
        self,
        stream: Stream,
        done: Slice,
        tokens: tuple[int, ...],
        result: StepResult,
        problem: str | None,
        logprobs: tuple[TokenLogprobs, ...],
    ) -> None:
        sequence = stream.sequence
        tokens = done.kept(tokens)
        sequence.settle(done, tokens)
        if stream.is_ended:
            self._release_if_idle(stream)
            return
        if problem is not None:
            self.outputs.send(stream.origin, Failed(done.key, no_token(problem)))
            self._leave(stream)
        if not tokens:
            return
        reason = None
        for index, token_id in enumerate(tokens):
            reason = sequence.finish_reason(token_id, self.limits)
            sequence.token_ids.append(token_id)
            stream.logprobs += logprobs[index : index + 1]
            if reason is not None:
                break
        if done.num_guesses and stream.guesser is not None:
            stream.guesser.learn(done.num_guesses, len(tokens) - 1, sequence.num_tokens)
            self.pool.counts.spec_decode_draft_tokens += done.num_guesses
            self.pool.counts.spec_decode_accepted_tokens += len(tokens) - 1
        if stream.times is not None:
            stream.times = _with_first_step(stream.times, stream.joined_s, result)
        self.outputs.emit(stream.origin, stream.entry(reason))
        if reason is not None:
            self._leave(stream)

    def _settle_prompt(
        self,
        now_s: float,
        done: Slice,
        tokens: tuple[int, ...],
        problem: str | None,
        logprobs: tuple[TokenLogprobs, ...],
    ) -> None:
        prompt = self.queue.pending[done.key]
        prompt.sequence.settle(done, tokens)
        if prompt.is_ended:
            self.queue.release_if_idle(prompt)
            return
        if problem is not None:
            self.queue.fail(prompt, no_token(problem))
            return
        prompt.sequence.store_prefix(self.pool)
        if not tokens:
            return
        assert prompt.reserved_s is not None
        firsts = prompt.sequence.first_tokens(tokens, self.limits, logprobs)
        times = StageTimes(
            queue_s=prompt.reserved_s - prompt.arrived_s,
            prefill_s=now_s - prompt.reserved_s - prompt.prefix_read_s,
            num_cached_tokens=prompt.num_cached_tokens,
            num_read_tokens=prompt.num_read_tokens,
            prefix_read_s=prompt.prefix_read_s,
        )
        for stream in self._join(now_s, prompt, firsts, times, every=True):
            first = firsts[stream.sequence.key.choice - prompt.key.choice]
            self.outputs.emit(stream.origin, stream.entry(first.finish_reason))
            if first.finish_reason is not None:
                self._leave(stream)

    def _receive_ended(self, now_s: float, report: ReceiveEnded) -> None:
        prompt = self.queue.pending.get(report.key)
        if prompt is None or prompt.is_local:
            self._prefix_ended(now_s, prompt, report)
            return
        self.queue.receive_ended(report)

    def _prefix_ended(
        self, now_s: float, prompt: PendingPrompt | None, report: ReceiveEnded
    ) -> None:
        self.pool.quarantine(report.quarantined)
        if self._reads.drained(report):
            return
        assert prompt is not None
        goes_on = self._reads.ended(now_s, prompt, report)
        if prompt.is_ended:
            self.queue.release_if_idle(prompt)
        elif not goes_on:
            self.queue.fail(prompt, report.failure)

    def _received(self, now_s: float, report: KVReceived) -> None:
        prompt = self.queue.pending[report.key]
        if prompt.is_local:
            self._reads.received(now_s, prompt)
            if prompt.is_ended:
                self.queue.release_if_idle(prompt)
            return
        if prompt.is_ended:  # its blocks came while the cancel was on its way
            self.queue.release_if_idle(prompt)
            return
        if not self._fit(report.tokens, prompt.choices):
            text = "the first tokens from prefill do not match the request"
            self.queue.fail(prompt, TransferError(text).to_failure())
            return
        sequence = prompt.sequence
        sequence.start_at(sequence.num_tokens)  # its streams repeat what they need
        sequence.store_prefix(self.pool)
        times = StageTimes(
            transfer_s=report.transfer_s,
            exposed_s=report.exposed_s,
            transfer_bytes=report.num_bytes,
            num_cached_tokens=report.num_cached_tokens,
        )
        for stream in self._join(now_s, prompt, report.tokens, times, every=False):
            if not stream.wants_step:  # prefill may accept longer sequences than this node
                self.outputs.emit(stream.origin, stream.entry("length"))
                self._leave(stream)

    def _fit(self, tokens: tuple[FirstToken, ...], choices: Choices) -> bool:
        """Return whether a peer's first tokens are valid, before they reach a step."""
        is_whole = len(tokens) == len(choices.every)
        return is_whole and all(0 <= t.token_id < self.limits.vocab_size for t in tokens)

    def _join(
        self,
        now_s: float,
        prompt: PendingPrompt,
        firsts: tuple[FirstToken, ...],
        times: StageTimes,
        *,
        every: bool,
    ) -> list[Stream]:
        """Fork the prompt into streams. Without `every`, leave out choices that have ended."""
        self.queue.take(prompt.key)
        live = {
            choice: first.token_id
            for choice, first in zip(prompt.choices.every, firsts, strict=True)
            if choice in prompt.choices.live and (every or first.finish_reason is None)
        }
        sequences, copies = fork_prompt(
            self.pool,
            prompt.sequence,
            prompt.tails,
            live,
            repeats_last=self.limits.has_draft_head,
        )
        self._copies.add(copies)
        streams: list[Stream] = []
        for sequence in sequences:
            limit = sequence.num_prompt_tokens + sequence.sampling.max_tokens
            limit = min(limit, self.limits.max_model_len)
            position = sequence.num_computed_tokens
            stream = Stream(sequence, prompt.key, prompt.origin, position, limit, now_s, times)
            first = firsts[sequence.key.choice - prompt.key.choice]
            stream.logprobs += () if first.logprobs is None else (first.logprobs,)
            may_guess = self.limits.num_speculative_tokens and not self.pool.state_blocks
            if may_guess and not sequence.sampling.depends_on_output:
                has_head = self.limits.has_draft_head
                stream.guesser = (HeadDrafts if has_head else PromptLookup)(self.limits)
            self._running[sequence.key] = stream
            self._by_request.add(sequence.key, stream)
            self._num_running[prompt.key] += 1
            streams.append(stream)
        return streams

    def _leave(self, stream: Stream) -> None:
        """Remove a stream from the batch. Its blocks follow when no launched step needs them."""
        stream.is_ended = True
        key = stream.sequence.key
        del self._running[key]
        self._by_request.remove(key)
        self._num_running[stream.asked_by] -= 1
        if not self._num_running[stream.asked_by]:
            del self._num_running[stream.asked_by]
        self._leaving[key] = stream
        self._release_if_idle(stream)

    def _release_if_idle(self, stream: Stream) -> None:
        sequence = stream.sequence
        if sequence.is_idle:
            del self._leaving[sequence.key]
            sequence.store_prefix(self.pool)
            self.pool.release(sequence.blocks)


def _with_first_step(times: StageTimes, joined_s: float, result: StepResult) -> StageTimes:
    return msgspec.structs.replace(
        times,
        decode_queue_s=max(0.0, result.started_s - joined_s),
        first_step_s=result.ended_s - result.started_s,
    )
