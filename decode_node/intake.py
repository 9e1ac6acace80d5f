"""Requests on their way into the running batch: landings of handed-over prompts, and local prompts.

Pure: the decode scheduler is its only caller. Blocks are reserved in full, so whoever holds a
landing or computes a prompt needs nothing but time. A head that does not fit may be passed by
smaller requests until it has waited `MAX_PASSED_S`; from then on nothing passes it.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from baton.engine.block_pool import BlockPool
from baton.engine.outputs import Origin, Outputs
from baton.engine.sequence import Sequence
from baton.kv_transfer.interfaces import Abandon, Expect, Land, LandingEnded
from baton.protocol.errors import Cancelled, Failure, RequestError
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
    live_choices: set[int]
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
    def choices(self) -> tuple[int, ...]:
        first = self.key.choice
        return tuple(range(first, first + self.message.num_choices))

    def cancel_choices(self, keys: tuple[Key, ...]) -> bool:
        """Strike the choices that `keys` name; True when that was the last of them."""
        named = {
            key.choice
            for key in keys
            if key.request_id == self.key.request_id and key.attempt == self.key.attempt
        }
        if not named & self.live_choices:
            return False
        self.live_choices -= named
        return not self.live_choices


class Intake:
    def __init__(self, pool: BlockPool, outputs: Outputs, max_model_len: int) -> None:
        self.pool = pool
        self.outputs = outputs
        self.arrivals: dict[Key, Arrival] = {}
        self._max_model_len = max_model_len
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
        choices = range(message.key.choice, message.key.choice + message.num_choices)
        arrival = Arrival(sequence, origin, message, now_s, set(choices), State.EXPECTED)
        if (refusal := self._refusal(arrival)) is not None:
            self.outputs.say(origin, Failed(message.key, refusal))
            return
        self.arrivals[message.key] = arrival
        if message.prefill_node is None:
            self.enqueue(now_s, message.key)
        else:
            self.outputs.to_connector.append(Expect(message.key, message.prefill_node))

    def enqueue(self, now_s: float, key: Key) -> None:
        """It needs blocks now: prefill has offered it, or it is computed here."""
        arrival = self.arrivals[key]
        if arrival.state is State.EXPECTED:
            arrival.state, arrival.queued_s = State.QUEUED, now_s
            self._queue.append(arrival)

    def reserve(self, now_s: float, num_running: int) -> None:
        """Give blocks to whoever fits, leaving one block of growth for each running sequence."""
        for arrival in list(self._queue):
            is_first = len(self._queue) == len(self.arrivals) and num_running == 0
            if self._reserve_one(now_s, arrival, 0 if is_first else num_running):
                self._queue.remove(arrival)
            elif now_s - arrival.queued_s > MAX_PASSED_S:
                return

    def computing(self) -> list[Arrival]:
        """Local prompts that hold their blocks, in order of arrival."""
        return [a for a in self.arrivals.values() if a.state is State.COMPUTING]

    def end(self, arrival: Arrival) -> None:
        """Nothing more is wanted of it. Blocks are released when no read or step needs them."""
        was, arrival.state = arrival.state, State.ENDED
        if arrival in self._queue:
            self._queue.remove(arrival)
        if arrival.is_local:
            self.release_if_idle(arrival)
        elif was is not State.ENDED:
            cancelled = Cancelled("the request was cancelled").to_failure()
            self.outputs.to_connector.append(Abandon(arrival.key, cancelled))

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

    def _refusal(self, arrival: Arrival) -> Failure | None:
        """What can never fit is refused at once."""
        message, pool = arrival.message, self.pool
        longest = min(message.num_prompt_tokens + message.sampling.max_tokens, self._max_model_len)
        shared = len(message.token_ids) // pool.block_size
        own = pool.blocks_for(longest) - shared
        if shared + own * message.num_choices > pool.num_blocks:
            text = "prompt, max_tokens and n together can never fit this node's KV pool"
            return RequestError(text, param="max_tokens").to_failure()
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
        num_tails = len(arrival.live_choices) - 1 if has_tail else 0
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
