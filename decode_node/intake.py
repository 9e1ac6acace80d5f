"""Requests on their way into the running batch: landings of handed-over prompts, and local prompts.

Pure: the decode scheduler is its only caller. Blocks are reserved in full, so whoever holds a
landing or computes a prompt needs nothing but time. Nobody is let in for whom a step has no place:
a first token is worth nothing when the second must wait. A head that does not fit may be passed by
smaller requests until it has waited `MAX_PASSED_S`; from then on nothing passes it.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from baton.engine.block_pool import BlockPool
from baton.engine.choices import Choices
from baton.engine.outputs import Origin, Outputs
from baton.engine.scheduler import Limits
from baton.engine.sequence import Sequence
from baton.kv_transfer.interfaces import Abandon, Expect, Land, LandingEnded, Offered
from baton.protocol.errors import Cancelled, Failure, Overloaded, RequestError, TransferError
from baton.protocol.ids import Key
from baton.protocol.messages import Accepted, Decode, Failed

MAX_PASSED_S = 1.0


class State(Enum):
    EXPECTED = auto()  # prefill has not offered it yet
    QUEUED = auto()  # offered (or local) and waiting for blocks
    LANDING = auto()  # blocks reserved, reads under way
    COMPUTING = auto()  # blocks reserved, the prompt is computed here
    ENDED = auto()  # cancelled or refused; blocks follow when nothing touches them


@dataclass(slots=True, eq=False)
class Arrival:
    """One `Decode` message until its sequences run."""

    sequence: Sequence
    origin: Origin
    message: Decode
    arrived_s: float
    choices: Choices
    state: State
    queued_s: float = 0.0
    reserved_s: float = 0.0
    num_cached_tokens: int = 0
    tails: list[int] = field(default_factory=list)

    @property
    def key(self) -> Key:
        return self.message.key

    @property
    def is_local(self) -> bool:
        return self.message.prefill_node is None

    @property
    def has_seats(self) -> bool:
        """Whether it holds blocks and will want its place in steps."""
        return self.state in (State.LANDING, State.COMPUTING)


class Intake:
    def __init__(self, pool: BlockPool, outputs: Outputs, limits: Limits) -> None:
        self.pool = pool
        self.outputs = outputs
        self.limits = limits
        self.arrivals: dict[Key, Arrival] = {}
        self._queue: list[Arrival] = []  # QUEUED, in order of arrival here

    @property
    def num_waiting(self) -> int:
        return len(self.arrivals)

    def add(self, now_s: float, origin: Origin, message: Decode) -> None:
        sequence = Sequence(
            message.key,
            message.token_ids,
            message.num_prompt_tokens,
            message.sampling,
            message.extra_keys,
        )
        choices = Choices.of(message)
        arrival = Arrival(sequence, origin, message, now_s, choices, State.EXPECTED)
        if (refusal := self._refusal(arrival)) is not None:
            self.outputs.say(origin, Failed(message.key, refusal))
            return
        self.arrivals[message.key] = arrival
        if message.prefill_node is None:
            self._enqueue(now_s, arrival)
        else:
            self.outputs.to_connector.append(Expect(message.key, message.prefill_node))

    def offered(self, now_s: float, offer: Offered) -> None:
        """Prefill holds its blocks, so now it needs some here."""
        arrival = self.arrivals[offer.key]
        if arrival.state is not State.EXPECTED:
            return
        if offer.num_tokens == arrival.sequence.num_tokens:
            self._enqueue(now_s, arrival)
        else:
            text = f"prefill offers {offer.num_tokens} tokens of {arrival.sequence.num_tokens}"
            self.refuse(arrival, TransferError(text).to_failure())

    def reserve(self, now_s: float, num_running: int) -> None:
        """Give blocks to whoever fits, leaving one block of growth for each running sequence."""
        if not self._queue:
            return
        limit, seated = self.limits.max_num_seqs, num_running
        seated += sum(len(a.choices.live) for a in self.arrivals.values() if a.has_seats)
        for arrival in list(self._queue):
            wanted = len(arrival.choices.live)
            has_seats = seated == 0 or seated + wanted <= limit  # alone it may have more
            if has_seats and self._reserve_one(now_s, arrival, num_running):
                self._queue.remove(arrival)
                seated += wanted
            elif self.pool.num_owned == 0:  # blocks were quarantined since it came
                self.refuse(arrival, _shrunk())
            elif (
                now_s - arrival.queued_s > MAX_PASSED_S
                or seated >= limit
                or self.pool.num_free <= num_running
            ):
                return

    def computing(self) -> list[Arrival]:
        """Local prompts that hold their blocks, in order of arrival."""
        return [a for a in self.arrivals.values() if a.state is State.COMPUTING]

    def refuse(self, arrival: Arrival, failure: Failure) -> None:
        self.outputs.say(arrival.origin, Failed(arrival.key, failure))
        self.end(arrival, failure)

    def fail(self, arrival: Arrival, failure: Failure) -> None:
        """It has landed, but cannot go on."""
        arrival.state = State.ENDED
        self.outputs.say(arrival.origin, Failed(arrival.key, failure))
        self.release_if_idle(arrival)

    def end(self, arrival: Arrival, failure: Failure | None = None) -> None:
        """Nothing more is wanted of it. Blocks are released when no read or step needs them."""
        was, arrival.state = arrival.state, State.ENDED
        if arrival in self._queue:
            self._queue.remove(arrival)
        if arrival.is_local:
            self.release_if_idle(arrival)
        elif was is not State.ENDED:
            failure = failure or Cancelled("the request was cancelled").to_failure()
            self.outputs.to_connector.append(Abandon(arrival.key, failure))

    def release_if_idle(self, arrival: Arrival) -> None:
        if arrival.sequence.is_idle:
            del self.arrivals[arrival.key]
            self.pool.release([*arrival.sequence.block_table, *arrival.tails])

    def landing_ended(self, report: LandingEnded) -> None:
        arrival = self.arrivals.pop(report.key)
        if arrival in self._queue:
            self._queue.remove(arrival)
        blocks = [*arrival.sequence.block_table, *arrival.tails]
        self.pool.quarantine(report.quarantined)
        self.pool.release([block for block in blocks if block not in set(report.quarantined)])
        if arrival.state is not State.ENDED:
            self.outputs.say(arrival.origin, Failed(report.key, report.failure))

    # --- inside --------------------------------------------------------------------------------

    def _enqueue(self, now_s: float, arrival: Arrival) -> None:
        arrival.state, arrival.queued_s = State.QUEUED, now_s
        self._queue.append(arrival)

    def _refusal(self, arrival: Arrival) -> Failure | None:
        """What can never fit is refused at once."""
        message, pool = arrival.message, self.pool
        longest = message.num_prompt_tokens + message.sampling.max_tokens
        longest = min(longest, self.limits.max_model_len)
        shared = len(message.token_ids) // pool.block_size
        own = pool.blocks_for(longest) - shared
        num_needed = shared + own * message.num_choices
        if num_needed > pool.num_blocks:
            text = "prompt, max_tokens and n together can never fit this node's KV pool"
            return RequestError(text, param="max_tokens").to_failure()
        if num_needed > pool.num_blocks - pool.num_quarantined:
            return _shrunk()
        if not arrival.is_local or message.max_uncached_tokens is None:
            return None
        uncached = len(message.token_ids) - self._num_cached(arrival.sequence)
        if uncached > message.max_uncached_tokens:
            text = f"{uncached} tokens are not cached here"
            return Failure("not_cached", text, retryable=True, http_status=503)
        return None

    def _num_cached(self, sequence: Sequence) -> int:
        hashes = sequence.hash_blocks(self.pool.block_size, sequence.num_tokens)
        hashes = hashes[: (sequence.num_tokens - 1) // self.pool.block_size]
        return len(self.pool.cache.lookup(hashes)) * self.pool.block_size

    def _reserve_one(self, now_s: float, arrival: Arrival, watermark: int) -> bool:
        sequence, pool = arrival.sequence, self.pool
        hashes = sequence.hash_blocks(pool.block_size, sequence.num_tokens)
        if arrival.is_local:  # logits are needed, so the last token is computed again
            hashes = hashes[: (sequence.num_tokens - 1) // pool.block_size]
        cached = pool.match(hashes)
        num_missing = pool.blocks_for(sequence.num_tokens) - len(cached)
        has_tail = sequence.num_tokens % pool.block_size != 0
        num_tails = len(arrival.choices.live) - 1 if has_tail else 0
        if num_missing + num_tails + watermark > pool.num_free:
            pool.release(cached)
            return False
        missing = pool.allocate(num_missing)
        sequence.block_table = cached + missing
        arrival.tails = pool.allocate(num_tails)
        arrival.reserved_s = now_s
        arrival.num_cached_tokens = min(len(cached) * pool.block_size, sequence.num_tokens)
        if arrival.is_local:
            arrival.state = State.COMPUTING
            sequence.num_computed_tokens = sequence.num_planned_tokens = arrival.num_cached_tokens
        else:
            arrival.state = State.LANDING
            self.outputs.to_connector.append(Land(arrival.key, len(cached), tuple(missing)))
        self.outputs.say(arrival.origin, Accepted(arrival.key, arrival.num_cached_tokens))
        return True


def _shrunk() -> Failure:
    text = "too many of this node's KV blocks are quarantined for this request"
    return Overloaded(text).to_failure()
