"""The requests of a node: how they come in, get blocks, are computed in chunks, and end.

Both schedulers hold one `Requests` and add what their role does with a computed prompt. A prompt's
blocks are reserved in full before its first chunk, so a prompt that has started never waits for
blocks. Blocks are given back when no step, read or peer needs them.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping

from baton.kv_transfer.interfaces import (
    Abandon,
    BlocksDrained,
    ConnectorReport,
    KVReceived,
    ReceiveBroken,
    ReceiveEnded,
)
from baton.node.scheduling.block_pool import BlockPool
from baton.node.scheduling.checkpoints import StepCopies, reserve
from baton.node.scheduling.plan import Origin, Outputs, Slice, StepPlan, StepResult
from baton.node.scheduling.prefetches import Prefetches
from baton.node.scheduling.prefix_reads import PrefixOffers
from baton.node.scheduling.prompt_reads import PrefixReads
from baton.node.scheduling.request import Request, Sequence, no_token
from baton.node.scheduling.scheduler import NodeLimits, problem_of
from baton.node.scheduling.tiers import TierReport, Tiers
from baton.protocol.codec import MalformedMessage
from baton.protocol.config import SchedulingPolicy
from baton.protocol.errors import Cancelled, Failure
from baton.protocol.ids import Key, RequestId
from baton.protocol.messages import (
    CancelDone,
    Decode,
    Failed,
    Offered,
    Prefill,
    PromptLogprobs,
    Withdrawn,
)

# Reports that mean the same to every scheduler.
SharedReport = (
    Offered | KVReceived | ReceiveBroken | ReceiveEnded | BlocksDrained | TierReport
)


class Requests:
    """Every request of a node, until its last block is given back.

    `give_up` tells the connector that a handoff is not wanted any more, and `leave` ends a choice
    that runs.
    """

    def __init__(
        self,
        pool: BlockPool,
        limits: NodeLimits,
        outputs: Outputs,
        give_up: type[Withdrawn] | type[Abandon],
        leave: Callable[[Sequence], None],
    ) -> None:
        self.pool = pool
        self.limits = limits
        self.outputs = outputs
        self.copies = StepCopies(pool)
        self.tiers = Tiers(pool, outputs)
        self.reads = PrefixReads(
            pool, outputs, self.tiers, repeats_last=limits.engine.has_draft_head
        )
        self.prefixes = PrefixOffers(pool, outputs, self.tiers)
        self.prefetches = Prefetches(pool, outputs)
        self.line = WaitingLine(limits.engine.scheduling_policy)
        # Until they are given back or their choices run.
        self.prompts: dict[Key, Request] = {}
        # Those of them that got blocks, in order, until they are computed, received or ended.
        self.admitted: dict[Key, Request] = {}
        self.step_id = 0
        self._give_up = give_up
        self._leave = leave
        self._by_id: dict[RequestId, dict[Key, Request]] = {}  # all

    def __iter__(self) -> Iterator[Request]:
        for requests in self._by_id.values():
            yield from requests.values()

    def of(self, request_id: RequestId) -> list[Request]:
        """Return the attempts at a request that this node still holds, in order of arrival."""
        return list(self._by_id.get(request_id, {}).values())

    def of_router(self, origin: Origin) -> list[Request]:
        return [request for request in self if request.origin == origin]

    # --- in and out ----------------------------------------------------------------------------

    def take_in(
        self,
        now_s: float,
        origin: Origin,
        message: Prefill | Decode,
        kind: type[Prefill | Decode],
    ) -> Request | None:
        """Return a new request, which ends lower attempts at its choices, or answer `Failed`.

        The caller adds it, or refuses it.
        """
        problem = problem_of(message, self.limits, self._uses)
        if problem is None and not isinstance(message, kind):
            text = f"a {kind.__name__.lower()} node was sent a {type(message).__name__}"
            problem = MalformedMessage(text)
        if problem is not None:
            self.outputs.send(origin, Failed(message.key, problem.to_failure()))
            return None
        request = Request.of(
            message, origin, now_s, has_two_orders=self.pool.has_two_orders
        )
        for lower in self.of(message.key.request_id):
            self._drop(lower, lower.supersede(request), "a newer attempt replaced it")
        return request

    def add(self, request: Request) -> None:
        self.prompts[request.key] = request
        self._by_id.setdefault(request.key.request_id, {})[request.key] = request

    def cancel(self, origin: Origin, keys: tuple[Key, ...]) -> None:
        for request_id in dict.fromkeys(key.request_id for key in keys):
            for request in self.of(request_id):
                self._drop(request, request.cancel(keys), "the request was cancelled")
        self.outputs.send(origin, CancelDone(keys))

    def fail(self, request: Request, failure: Failure) -> None:
        """End a request whose prompt cannot go on, and say so."""
        self.outputs.send(request.origin, Failed(request.key, failure))
        self.end(request, failure)

    def end(self, request: Request, why: Failure | None) -> None:
        """End a request that has no choices yet. Its blocks follow when nothing needs them.

        `why` is None if nothing has to be given up for it.
        """
        if request.is_ended:
            return
        request.is_ended = True
        self.line.discard(request)
        self.admitted.pop(request.key, None)
        if request.has_handoff and why is not None:
            self.outputs.to_connector.append(self._give_up(request.key, why))
        if request.read is not None:
            self.reads.abandon(request, why)
        self.release_if_idle(request)

    def release_if_idle(self, request: Request) -> None:
        """Give back the blocks of an ended request, unless something still needs them."""
        if request.is_ended and request.is_idle:
            del self.prompts[request.key]
            self.remove(request)
            self.pool.release([*request.prompt.blocks, *request.tails])

    def remove(self, request: Request) -> None:
        """Forget a request that has no blocks any more."""
        requests = self._by_id[request.key.request_id]
        del requests[request.key]
        if not requests:
            del self._by_id[request.key.request_id]

    def take_prompt(self, key: Key) -> Request:
        """Return a request whose choices begin, with the blocks that they take over."""
        self.admitted.pop(key, None)
        return self.prompts.pop(key)

    def take_report(self, now_s: float, report: ConnectorReport) -> bool:
        """Handle a report of a read that is for no prompt. Return False if it is another one."""
        return self.prefetches.take(now_s, report) or self.prefixes.take(report)

    def on_report(self, now_s: float, report: SharedReport) -> None:
        """Handle a report of what is read for a prompt, or of a tier."""
        match report:
            case Offered():
                self.reads.offered(self.prompts[report.key], report)
            case KVReceived():
                # Readers check the generations of its blocks, which the next step publishes, so
                # the blocks are announced after it.
                self.reads.received(now_s, self.prompts[report.key])
                self.release_if_idle(self.prompts[report.key])
            case ReceiveBroken():
                self.reads.broken(now_s, self.prompts[report.key])
            case ReceiveEnded():
                self._receive_ended(now_s, report)
            case BlocksDrained(block_ids=block_ids):
                self.pool.readmit(block_ids)
            case _:
                self.tiers.on_report(now_s, report)

    # --- steps ---------------------------------------------------------------------------------

    def reserve(
        self, now_s: float, request: Request, num_tails: int = 0, num_kept_free: int = 0
    ) -> bool:
        """Give a waiting prompt all of its blocks, the cached prefix first, if there are enough.

        It gets `num_tails` blocks more for its choices, and `num_kept_free` must stay free.
        """
        prompt = request.prompt
        is_computed = request.is_computed_here
        num_held = prompt.num_reusable_tokens if is_computed else prompt.num_tokens
        num_cached = reserve(
            self.pool,
            prompt,
            num_held,
            num_tails + num_kept_free,
            is_computed=is_computed,
        )
        if num_cached is None:
            self.prefetches.give_way()
            return False
        request.tails = self.pool.allocate(num_tails)
        request.num_cached_tokens = num_cached * self.pool.block_size
        request.admitted_s = now_s
        self.line.discard(request)
        self.admitted[request.key] = request
        if is_computed:
            prompt.start_at(
                request.num_cached_tokens,
                repeats_last=self.limits.engine.has_draft_head,
            )
            self.copies.restore(prompt)
        return True

    def add_chunks(
        self,
        slices: list[Slice],
        ready: Iterable[Request],
        budget: int,
        num_kept_free: int = 0,
    ) -> None:
        """Add the next chunks of prompts to a step, in order, while `budget` tokens last."""
        room = self.limits.max_first_tokens
        for request in ready:
            every = request.every
            if (
                budget <= 0
                or len(slices) == self.limits.max_num_seqs
                or len(every) > room
            ):
                return
            if request.prompt.num_unplanned_tokens:
                if self.pool.has_two_orders and request.prompt.cuts_unit(budget):
                    return  # the next step has more room
                self.copies.save(request.prompt, num_kept_free)
                slices.append(request.prompt.chunk(budget, every, self.step_id + 1))
                budget -= slices[-1].length
                room -= slices[-1].num_sampled

    def launch(self, slices: list[Slice]) -> StepPlan | None:
        """Return the step with these slices; None if there is nothing to compute or to publish."""
        if not slices and not self.prefixes.need_step:
            return None
        self.step_id += 1
        self.prefixes.planned(self.step_id)
        copies = self.copies.take(self.step_id)
        return StepPlan(
            self.step_id, tuple(slices), copies, generations=self.pool.take_fresh()
        )

    def settle(self, now_s: float, plan: StepPlan, result: StepResult) -> None:
        """Settle what belongs to a whole step."""
        self.copies.settle(plan)
        self.prefixes.settled(plan.step_id)
        num_tokens = sum(part.length for part in plan.slices)
        self.reads.costs.computed(now_s, num_tokens, result.ended_s - result.started_s)

    def settle_chunk(
        self,
        done: Slice,
        tokens: tuple[int, ...],
        problem: str | None,
        prompt_logprobs: bytes | None,
    ) -> Request | None:
        """Settle a chunk of a prompt. Return its request if that goes on."""
        request = self.prompts[done.key]
        request.prompt.settle(done, tokens)
        if request.is_ended:
            self.release_if_idle(request)
            return None
        if prompt_logprobs is not None:
            self.outputs.send(request.origin, PromptLogprobs(done.key, prompt_logprobs))
        if problem is not None:
            self.fail(request, no_token(problem))
            return None
        request.prompt.store_prefix(self.pool)
        return request

    def in_progress(self) -> dict[Origin, list[Key]]:
        """Return the prompts that wait for nothing but this node, by router."""
        keys: dict[Origin, list[Key]] = {}
        for request in (*self.line, *self.admitted.values()):
            keys.setdefault(request.origin, []).append(request.key)
        return keys

    def loras(self) -> set[str]:
        return {request.sampling.lora for request in self}

    # --- inside --------------------------------------------------------------------------------

    def _uses(self, message: Prefill | Decode) -> bool:
        return any(request.uses(message) for request in self.of(message.key.request_id))

    def _drop(self, request: Request, choices: set[int], why: str) -> None:
        """End choices that are not live any more, and the request with its last one."""
        for choice in sorted(choices & request.sequences.keys()):
            self._leave(request.sequences[choice])
        if choices and not request.live and request.key in self.prompts:
            self.end(request, Cancelled(why).to_failure())

    def _receive_ended(self, now_s: float, report: ReceiveEnded) -> None:
        """Go on after a read that has failed, or end a request whose handoff has."""
        self.pool.quarantine(report.quarantined)
        if self.reads.drained(report):
            return
        request = self.prompts[report.key]
        goes_on = False
        if request.read is not None:
            goes_on = self.reads.ended(now_s, request, report)
        else:
            request.has_handoff = False
            request.prompt.forget_blocks(report.quarantined)
        if request.is_ended:
            self.release_if_idle(request)
        elif not goes_on:
            self.fail(request, report.failure)


Order = Callable[[Request], tuple[float, ...]]

# Which request gets blocks next, and which gives way: lower keys come first, and of requests with
# equal keys, the one that came first.
ORDERS: Mapping[SchedulingPolicy, Order] = {
    "fcfs": lambda _: (),
    "priority": lambda request: (request.sampling.priority, request.arrived_s),
}


class WaitingLine:
    """The requests that wait for blocks, in the order in which they should get them."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._order = ORDERS[policy]
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, now_s: float, request: Request) -> None:
        request.queued_s = now_s
        insort(self._requests, request, key=self._order)

    def discard(self, request: Request) -> None:
        """Remove a request, if it waits."""
        if request in self._requests:
            self._requests.remove(request)

    def last_of(self, running: Iterable[Sequence]) -> Sequence:
        """Return which of these sequences, in order of joining, gives its blocks up for others."""
        latest_first = reversed(list(running))
        return max(latest_first, key=lambda sequence: self._order(sequence.request))
