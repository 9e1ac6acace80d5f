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
from baton.node.scheduling.plan import (
    NO_ROUTER,
    Origin,
    Outputs,
    Slice,
    StepPlan,
    StepResult,
)
from baton.node.scheduling.pooling import pooled_numbers, pooled_with
from baton.node.scheduling.request import Request, Sequence
from baton.node.scheduling.requests import Requests
from baton.node.scheduling.scheduler import NodeLimits, load_of
from baton.protocol.codec import MalformedMessage
from baton.protocol.errors import InvariantBroken, NodeError, RequestError
from baton.protocol.ids import Key
from baton.protocol.messages import (
    BlockRange,
    Decode,
    End,
    Failed,
    FirstToken,
    FirstTokens,
    Load,
    Offered,
    Pooled,
    Prefill,
    Withdrawn,
)


class PrefillScheduler:
    def __init__(self, pool: BlockPool, limits: NodeLimits) -> None:
        self.pool = pool
        self.limits = limits
        self.outputs = Outputs()
        self.requests = Requests(pool, limits, self.outputs, Withdrawn, _no_choice_runs)
        self.tiers = self.requests.tiers
        self.prefetches = self.requests.prefetches

    # --- requests ------------------------------------------------------------------------------

    def add(self, now_s: float, origin: Origin, message: Prefill | Decode) -> None:
        if self.requests.prefixes.lends(message.key):
            in_use = MalformedMessage(f"{message.key} is in use")
            self.outputs.send(origin, Failed(message.key, in_use.to_failure()))
            return
        request = self.requests.take_in(now_s, origin, message, Prefill)
        if request is None:
            return
        num_needed = (
            self.pool.blocks_for(request.prompt.num_tokens) + self.pool.state_blocks
        )
        if num_needed > self.pool.num_blocks:
            never = RequestError(
                "the prompt can never fit this node's KV pool", param="prompt"
            )
            self.outputs.send(origin, Failed(message.key, never.to_failure()))
            return
        self.requests.add(request)
        self.requests.line.add(now_s, request)

    def cancel(self, origin: Origin, keys: tuple[Key, ...]) -> None:
        self.requests.cancel(origin, keys)

    def forget(self, origin: Origin) -> None:
        # Decode may still reach the router, to which this must look like a lost node and not like a
        # cancel.
        self.prefetches.forget(origin)
        lost = NodeError("the prefill node lost the channel to its router").to_failure()
        for request in self.requests.of_router(origin):
            if request in self.requests.line or request.key in self.requests.admitted:
                self.requests.end(request, lost)
            else:
                # The channel may have broken here alone, so decode must get the blocks.
                request.origin = NO_ROUTER

    def on_report(self, now_s: float, report: ConnectorReport) -> None:
        if self.requests.take_report(now_s, report):
            return
        match report:
            case Released() | OfferBroken() if self.requests.prefixes.lends(report.key):
                self.requests.prefixes.ended(report)
            case Released() | OfferBroken():
                self._offer_ended(report)
            case PrefixWanted(key=key) if self.requests.of(key.request_id):
                self.requests.prefixes.refuse(report)  # the key is that of a prompt
            case PrefixWanted():
                self.requests.prefixes.wanted(report)
            case (
                Offered()
                | KVReceived()
                | ReceiveBroken()
                | ReceiveEnded()
                | BlocksDrained()
            ):
                self.requests.on_report(now_s, report)
            case TierOpened() | BlocksCopied() | BlocksSaved():
                self.requests.on_report(now_s, report)
            case _:
                assert_never(report)

    def _offer_ended(self, report: Released | OfferBroken) -> None:
        request = self.requests.prompts[report.key]
        request.has_handoff = isinstance(report, OfferBroken)
        if request.is_ended:
            self.requests.release_if_idle(request)
            return
        # Decode will not get all blocks, even if the router has the first tokens.
        if report.failure is not None:
            self.outputs.send(request.origin, Failed(report.key, report.failure))
        self.requests.end(request, None)

    # --- steps ---------------------------------------------------------------------------------

    def plan(self, now_s: float) -> StepPlan | None:
        self.tiers.write_back(now_s)
        self.prefetches.step(now_s)
        slices: list[Slice] = []
        ready = self._ready(now_s)
        self.requests.add_chunks(slices, ready, self.limits.max_num_batched_tokens)
        return self.requests.launch(slices)

    def settle(self, now_s: float, plan: StepPlan, result: StepResult) -> None:
        self.requests.settle(now_s, plan, result)
        failed = dict(result.failed)
        logprobs = dict(result.logprobs)
        prompt_logprobs = dict(result.prompt_logprobs)
        pooled = dict(result.pooled)
        for index, (done, tokens) in enumerate(
            zip(plan.slices, result.tokens, strict=True)
        ):
            request = self.requests.settle_chunk(
                done, tokens, failed.get(index), prompt_logprobs.get(index)
            )
            if request is None:
                continue
            self._announce(request)
            if index in pooled:
                request.pooled = pooled_with(
                    request.pooled, done.pooling, pooled[index]
                )
            if request.is_pooled:
                self._send_pooled(now_s, request)
            elif tokens:
                scores = logprobs.get(index, ())
                firsts = request.prompt.first_tokens(tokens, self.limits, scores)
                self._complete(now_s, request, firsts)

    def loras_in_use(self) -> set[str]:
        return self.requests.loras()

    def load(self) -> Load:
        return load_of(self.pool, len(self.requests.admitted), len(self.requests.line))

    def in_progress(self) -> dict[Origin, list[Key]]:
        return self.requests.in_progress()

    # --- inside --------------------------------------------------------------------------------

    def _ready(self, now_s: float) -> list[Request]:
        """Return the prompts with tokens to plan, oldest first; admit while the budget lasts.

        The prompts of the step after this one are admitted too if their first tokens are read, so
        that those are here in time.
        """
        budget = self.limits.max_num_batched_tokens
        ready = [
            request for request in self.requests.admitted.values() if request.is_ready
        ]
        tokens = sum(request.prompt.num_unplanned_tokens for request in ready)
        for request in list(self.requests.line):
            is_early = tokens >= budget
            if is_early and (
                tokens >= 2 * budget or not self.requests.reads.are_likely(request)
            ):
                break
            if not self._admit(now_s, request):
                break
            if request.is_ready:
                ready.append(request)
            if request.is_ready or is_early:
                tokens += request.prompt.num_unplanned_tokens
        return ready

    def _admit(self, now_s: float, request: Request) -> bool:
        """Reserve every block of the prompt, and offer them to decode."""
        if not self.requests.reserve(now_s, request):
            return False
        prompt = request.prompt
        if request.peer is not None:
            request.has_handoff = True
            offer = Offer(
                request.key, request.peer, prompt.num_tokens, len(prompt.blocks)
            )
            self.outputs.to_connector.append(offer)
            self._announce(request)
        num_cached = request.num_cached_tokens // self.pool.block_size
        self.requests.reads.begin(now_s, request, num_cached)
        return True

    def _announce(self, request: Request) -> None:
        """Announce the blocks that became final: whole blocks, and all others with the last token.

        The blocks of the state come last.
        """
        if not request.has_handoff:
            return
        prompt = request.prompt
        end = prompt.num_computed_tokens // self.pool.block_size
        if prompt.num_computed_tokens == prompt.num_tokens:
            end = len(prompt.blocks)
        first = request.num_announced_blocks
        if end == first:
            return
        blocks = tuple(prompt.blocks[first:end])
        request.num_announced_blocks = end
        block_range = BlockRange(
            request.key, first, blocks, self.pool.generations_of(blocks)
        )
        self.outputs.to_connector.append(block_range)

    def _send_pooled(self, now_s: float, request: Request) -> None:
        pooling = request.sampling.pooling
        numbers = pooled_numbers(request.pooled, pooling, request.prompt.num_tokens)
        self.outputs.send(
            request.origin, Pooled(request.key, numbers, request.times(now_s))
        )
        self.requests.end(request, None)

    def _complete(
        self, now_s: float, request: Request, tokens: tuple[FirstToken, ...]
    ) -> None:
        times = request.times(now_s)
        num_tokens = request.prompt.num_tokens
        self.outputs.send(
            request.origin, FirstTokens(request.key, num_tokens, tokens, times)
        )
        if request.has_handoff:
            del self.requests.admitted[request.key]
            self.outputs.to_connector.append(
                End(request.key, tokens, request.num_cached_tokens)
            )
        else:
            self.requests.end(request, None)


def _no_choice_runs(sequence: Sequence) -> None:
    raise InvariantBroken(f"{sequence.key} runs on a prefill node")
