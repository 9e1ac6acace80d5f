"""Decide which sequences take the next step: continuous batching, with prompts in between.

Every running sequence that has its next block takes part in every step while there are places. If
there are too few places, requests get them in turn, so a request with many choices never keeps
another one out. Local prompts get the rest of the token budget. When no block is left to grow into,
the youngest sequence goes back to its router, which resumes it elsewhere.
"""

from collections import Counter
from typing import assert_never

import msgspec

from baton.decode_node.admission import admit, fork_prompt, refusal
from baton.decode_node.speculation import Speculation
from baton.kv_transfer.interfaces import (
    Abandon,
    BlocksCopied,
    BlocksDrained,
    BlocksSaved,
    ConnectorReport,
    Expect,
    KVReceived,
    OfferBroken,
    PrefixWanted,
    ReceiveBroken,
    ReceiveEnded,
    Released,
    TierOpened,
)
from baton.node.scheduling.block_pool import BlockPool
from baton.node.scheduling.plan import Origin, Outputs, Slice, StepPlan, StepResult
from baton.node.scheduling.request import UNIT_TOKENS, Request, Sequence, no_token
from baton.node.scheduling.requests import Requests
from baton.node.scheduling.scheduler import NodeLimits, load_of
from baton.protocol.errors import Failure, NodeError, TransferError
from baton.protocol.ids import Key
from baton.protocol.messages import (
    Decode,
    Failed,
    FirstToken,
    Load,
    Offered,
    Prefill,
    StageTimes,
    TokenLogprobs,
)


class DecodeScheduler:
    def __init__(self, pool: BlockPool, limits: NodeLimits) -> None:
        self.pool = pool
        self.limits = limits
        self.outputs = Outputs()
        self.requests = Requests(pool, limits, self.outputs, Abandon, self._leave)
        self.tiers = self.requests.tiers
        self.prefetches = self.requests.prefetches
        self._running: dict[Key, Sequence] = {}  # in order of joining
        self._num_running: Counter[Key] = Counter()  # of each request
        # Ended, but still part of a launched step.
        self._leaving: dict[Key, Sequence] = {}
        self._speculation = Speculation(limits)
        self._num_launched = 0  # steps

    # --- requests ------------------------------------------------------------------------------

    def add(self, now_s: float, origin: Origin, message: Prefill | Decode) -> None:
        request = self.requests.take_in(now_s, origin, message, Decode)
        if request is None:
            return
        failure = refusal(request, self.pool, self.limits)
        if failure is not None:
            self.outputs.send(origin, Failed(message.key, failure))
            return
        self.requests.add(request)
        if request.peer is None:
            self.requests.line.add(now_s, request)
        else:
            request.has_handoff = True
            self.outputs.to_connector.append(Expect(request.key, request.peer))

    def cancel(self, origin: Origin, keys: tuple[Key, ...]) -> None:
        self.requests.cancel(origin, keys)

    def forget(self, origin: Origin) -> None:
        # To the router, which prefill may still reach, this must look like a lost node and not like
        # a cancel.
        self.prefetches.forget(origin)
        lost = NodeError("the decode node lost the channel to its router").to_failure()
        for request in self.requests.of_router(origin):
            if request.key in self.requests.prompts:
                self.requests.end(request, lost)
            for choice in sorted(request.live & request.sequences.keys()):
                self._leave(request.sequences[choice])

    def on_report(self, now_s: float, report: ConnectorReport) -> None:
        if self.requests.take_report(now_s, report):
            return
        match report:
            case Offered():
                self._offered(now_s, report)
            case KVReceived(key=key) if self.requests.prompts[key].has_handoff:
                self._received(now_s, report)
            case PrefixWanted():
                self.requests.prefixes.wanted(report)
            case Released() | OfferBroken():
                self.requests.prefixes.ended(report)
            case KVReceived() | ReceiveBroken() | ReceiveEnded() | BlocksDrained():
                self.requests.on_report(now_s, report)
            case TierOpened() | BlocksCopied() | BlocksSaved():
                self.requests.on_report(now_s, report)
            case _:
                assert_never(report)

    def _offered(self, now_s: float, offer: Offered) -> None:
        """Queue a request whose blocks prefill holds, because it now needs blocks here."""
        request = self.requests.prompts[offer.key]
        if request.is_ended:
            return
        if offer.num_tokens == request.prompt.num_tokens:
            self.requests.line.add(now_s, request)
        else:
            text = f"prefill offers {offer.num_tokens} tokens of {request.prompt.num_tokens}"
            self.requests.fail(request, TransferError(text).to_failure())

    def _received(self, now_s: float, report: KVReceived) -> None:
        request = self.requests.prompts[report.key]
        request.has_handoff = False
        if request.is_ended:  # its blocks came while the cancel was on its way
            self.requests.release_if_idle(request)
            return
        if not self._fit(report.tokens, request):
            text = "the first tokens from prefill do not match the request"
            self.requests.fail(request, TransferError(text).to_failure())
            return
        prompt = request.prompt
        prompt.start_at(prompt.num_tokens)  # its choices repeat what they need
        prompt.store_prefix(self.pool)
        times = StageTimes(
            transfer_s=report.transfer_s,
            exposed_s=report.exposed_s,
            transfer_bytes=report.num_bytes,
            num_cached_tokens=report.num_cached_tokens,
        )
        for sequence in self._join(now_s, request, report.tokens, times, every=False):
            # Prefill may accept longer sequences than this node.
            if not sequence.wants_step:
                self.outputs.emit(request.origin, sequence.entry("length"))
                self._leave(sequence)

    def _fit(self, tokens: tuple[FirstToken, ...], request: Request) -> bool:
        """Return whether a peer's first tokens are valid, before they reach a step."""
        is_whole = len(tokens) == len(request.every)
        return is_whole and all(
            0 <= t.token_id < self.limits.vocab_size for t in tokens
        )

    # --- steps ---------------------------------------------------------------------------------

    def plan(self, now_s: float) -> StepPlan | None:
        self.tiers.write_back(now_s)
        self.prefetches.step(now_s)
        if self._num_launched and self._speculation.is_ahead(self._running.values()):
            # All take the next step together, once the tokens before it are known.
            return None
        num_slots = self.limits.max_num_seqs
        num_growing = min(len(self._running), num_slots)
        admit(self.requests, now_s, len(self._num_running), num_growing)
        computing = [
            request
            for request in self.requests.admitted.values()
            if request.is_computed_here and request.read is None
        ]
        slices = self._decode_slices(num_slots - len(computing))
        num_decoding = sum(part.length for part in slices)
        least = UNIT_TOKENS + 1 if self.pool.has_two_orders else self.pool.block_size
        budget = max(self.limits.max_num_batched_tokens - num_decoding, least)
        self.requests.add_chunks(slices, computing, budget, num_growing)
        # All ended before a first step.
        if not slices and not self._running and not computing:
            self.requests.copies.drop()
        plan = self.requests.launch(slices)
        if plan is None:
            return None
        self._num_launched += 1
        return plan

    def settle(self, now_s: float, plan: StepPlan, result: StepResult) -> None:
        self._num_launched -= 1
        self.requests.settle(now_s, plan, result)
        failed = dict(result.failed)
        logprobs = dict(result.logprobs)
        drafts = dict(result.drafts)
        prompt_logprobs = dict(result.prompt_logprobs)
        for index, (done, tokens) in enumerate(
            zip(plan.slices, result.tokens, strict=True)
        ):
            scores = logprobs.get(index, ())
            problem = failed.get(index)
            sequence = self._running.get(done.key) or self._leaving.get(done.key)
            if sequence is not None:
                self._speculation.take(sequence, drafts.get(index, ()))
                self._settle_sequence(sequence, done, tokens, result, problem, scores)
                continue
            request = self.requests.settle_chunk(
                done, tokens, problem, prompt_logprobs.get(index)
            )
            if request is not None and tokens:
                self._begin(now_s, request, tokens, scores)

    def loras_in_use(self) -> set[str]:
        return self.requests.loras()

    def load(self) -> Load:
        return load_of(self.pool, len(self._running), len(self.requests.prompts))

    def in_progress(self) -> dict[Origin, list[Key]]:
        keys = self.requests.in_progress()
        for sequence in self._running.values():
            keys.setdefault(sequence.request.origin, []).append(sequence.key)
        return keys

    # --- inside --------------------------------------------------------------------------------

    def _decode_slices(self, num_slots: int) -> list[Slice]:
        slices: list[Slice] = []
        # That fit into a step.
        num_guesses = self.limits.max_num_batched_tokens - num_slots
        for sequence in self._in_turn(num_slots):
            if len(slices) == num_slots:
                break
            if sequence.wants_step and self._grow(sequence):
                slices.append(self._decode_slice(sequence, num_guesses))
                num_guesses -= slices[-1].length - 1
        # Single tokens come first.
        return sorted(slices, key=lambda part: part.length > 1)

    def _decode_slice(self, sequence: Sequence, most_guesses: int) -> Slice:
        guesses = self._speculation.guesses(sequence)[: max(0, most_guesses)]
        num_drafts = None
        if self.limits.engine.has_draft_head:
            num_drafts = self._speculation.num_drafts(sequence)
            # Behind the last guess is the row of a token that is sampled, from which drafts follow.
            wanted = len(guesses) + max(1, num_drafts)
            last = sequence.limit - 1 - sequence.num_planned_tokens
            num_ahead = self._ahead(sequence, min(wanted, last))
            guesses = guesses[: num_ahead - 1]
            num_drafts = min(num_drafts, num_ahead - len(guesses))
            self._speculation.expect(sequence, num_drafts)
        elif guesses:
            guesses = guesses[: self._ahead(sequence, len(guesses))]
        samples = (sequence.key.choice,)
        return sequence.slice(
            1, samples, self.requests.step_id + 1, guesses, num_drafts
        )

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

    def _in_turn(self, num_slots: int) -> list[Sequence]:
        """Return the running sequences, beginning with those that have places if not all do.

        The first choice of every request comes before the second choice of any. A request's choices
        keep their order, so choices that have begun finish before others begin.
        """
        sequences = list(self._running.values())
        if len(sequences) <= num_slots:
            return sequences
        turns: Counter[Key] = Counter()
        ranked: list[tuple[int, int]] = []
        for index, sequence in enumerate(sequences):
            if sequence.wants_step:
                ranked.append((turns[sequence.request.key], index))
                turns[sequence.request.key] += 1
        return [sequences[index] for _, index in sorted(ranked)]

    def _grow(self, sequence: Sequence) -> bool:
        """Give the next position a block. Preempt the last sequence in order if none is free."""
        # A head stores the row of the token that is sampled, too.
        end = sequence.num_planned_tokens + self.limits.engine.has_draft_head
        if end < len(sequence.block_table) * self.pool.block_size:
            return True
        if self.pool.num_free == 0 and not self._will_free_blocks():
            last = self.requests.line.last_of(self._running.values())
            text = "preempted: no KV block is left to grow into"
            failure = Failure("preempted", text, retryable=True, http_status=503)
            self.outputs.send(last.request.origin, Failed(last.key, failure))
            self.pool.counts.preemptions += 1
            self._leave(last)
        if sequence.is_ended or self.pool.num_free == 0:
            return False
        sequence.block_table.extend(self.pool.allocate(1))
        return True

    def _will_free_blocks(self) -> bool:
        """Return whether blocks will be free soon although no sequence ends."""
        return (
            bool(self._leaving) or self.tiers.is_copying or self.prefetches.give_way()
        )

    def _settle_sequence(
        self,
        sequence: Sequence,
        done: Slice,
        sampled: tuple[int, ...],
        result: StepResult,
        problem: str | None,
        logprobs: tuple[TokenLogprobs, ...],
    ) -> None:
        tokens = sequence.settle(done, sampled)
        if sequence.is_ended:
            self._release_if_idle(sequence)
            return
        origin = sequence.request.origin
        if problem is not None:
            self.outputs.send(origin, Failed(done.key, no_token(problem)))
            self._leave(sequence)
        if not tokens:
            return
        reason = None
        for index, token_id in enumerate(tokens):
            reason = sequence.finish_reason(token_id, self.limits)
            sequence.token_ids.append(token_id)
            sequence.logprobs += logprobs[index : index + 1]
            if reason is not None:
                break
        if done.num_guesses:
            self._speculation.learn(sequence, done.num_guesses, len(tokens) - 1)
            sequence.num_draft_tokens += done.num_guesses
            sequence.num_accepted_tokens += len(tokens) - 1
            self.pool.counts.spec_decode_draft_tokens += done.num_guesses
            self.pool.counts.spec_decode_accepted_tokens += len(tokens) - 1
        if sequence.times is not None:
            sequence.times = _with_first_step(sequence.times, sequence.joined_s, result)
        self.outputs.emit(origin, sequence.entry(reason))
        if reason is not None:
            self._leave(sequence)

    def _begin(
        self,
        now_s: float,
        request: Request,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
    ) -> None:
        """Begin the choices of a prompt that was computed here, with their first tokens."""
        firsts = request.prompt.first_tokens(tokens, self.limits, logprobs)
        for sequence in self._join(
            now_s, request, firsts, request.times(now_s), every=True
        ):
            first = firsts[sequence.key.choice - request.key.choice]
            self.outputs.emit(request.origin, sequence.entry(first.finish_reason))
            if first.finish_reason is not None:
                self._leave(sequence)

    def _join(
        self,
        now_s: float,
        request: Request,
        firsts: tuple[FirstToken, ...],
        times: StageTimes,
        *,
        every: bool,
    ) -> list[Sequence]:
        """Let the choices of a request run. Without `every`, leave out those that have ended."""
        self.requests.take_prompt(request.key)
        live = {
            choice: first.token_id
            for choice, first in zip(request.every, firsts, strict=True)
            if choice in request.live and (every or first.finish_reason is None)
        }
        copies = fork_prompt(
            self.pool, request, live, repeats_last=self.limits.engine.has_draft_head
        )
        self.requests.copies.add(copies)
        sequences = list(request.sequences.values())
        if not sequences:
            self.requests.remove(request)
        for sequence in sequences:
            sequence.limit = request.num_prompt_tokens + request.sampling.max_tokens
            sequence.limit = min(sequence.limit, self.limits.max_model_len)
            sequence.num_sent_tokens = sequence.num_computed_tokens
            sequence.joined_s = now_s
            sequence.times = times
            first = firsts[sequence.key.choice - request.key.choice]
            sequence.logprobs = () if first.logprobs is None else (first.logprobs,)
            self._speculation.begin(sequence)
            self._running[sequence.key] = sequence
            self._num_running[request.key] += 1
        return sequences

    def _leave(self, sequence: Sequence) -> None:
        """Remove a sequence from the batch. Its blocks follow when no launched step needs them."""
        sequence.is_ended = True
        request = sequence.request
        request.live.discard(sequence.key.choice)
        del self._running[sequence.key]
        self._num_running[request.key] -= 1
        if not self._num_running[request.key]:
            del self._num_running[request.key]
        self._leaving[sequence.key] = sequence
        self._speculation.end(sequence)
        self._release_if_idle(sequence)

    def _release_if_idle(self, sequence: Sequence) -> None:
        if not sequence.is_idle:
            return
        del self._leaving[sequence.key]
        sequence.store_prefix(self.pool)
        self.pool.release(sequence.blocks)
        del sequence.request.sequences[sequence.key.choice]
        if not sequence.request.sequences:
            self.requests.remove(sequence.request)


def _with_first_step(
    times: StageTimes, joined_s: float, result: StepResult
) -> StageTimes:
    return msgspec.structs.replace(
        times,
        decode_queue_s=max(0.0, result.started_s - joined_s),
        first_step_s=result.ended_s - result.started_s,
    )
